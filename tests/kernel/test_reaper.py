"""Leftovers of guards whose holder died too are found by the kernel's own state and removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_guard.errors import HostError
from dsec_guard.host.cgroup import CgroupHost
from dsec_guard.host.uids import ensure_run_dir
from dsec_guard.service.reaper import Ownership, reap, start_time

pytestmark = pytest.mark.needs("cgroup_v2", "cgroup_limits")

OWNER = """
import os, subprocess, sys
from pathlib import Path
from dsec_guard.host.cgroup import CgroupHost, CgroupLimits
from dsec_guard.service.reaper import Ownership
owner = Ownership.take(Path(sys.argv[1]))
(owner.directory / "dir").mkdir()
(owner.directory / "dir/file").write_text("x")
(owner.directory / "link").symlink_to(sys.argv[2])
box = CgroupHost.probe().instance(owner.name).create_box("box", CgroupLimits(memory=64 << 20, pids=9, cpus=1))
(box.v2_dir / "below").mkdir()
child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; read x; sleep 1000 & wait"], stdin=subprocess.PIPE)
(box.v2_dir / "cgroup.procs").write_text(str(child.pid))
for fd in box.v1_tasks_fds:
    os.write(fd, str(child.pid).encode())
child.stdin.write(b"\\n")
child.stdin.flush()
print(owner.name, child.pid, *(path.parent for path in box.paths), flush=True)
sys.stdin.read()
"""


class Owner:
    def __init__(self, run_dir: Path, outside: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER, run_dir, outside], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
        assert self.process.stdout is not None
        self.name, child, *paths = self.process.stdout.readline().split()
        self.child, self.paths = int(child), [Path(path) for path in paths]
        self.scratch = [run_dir / "instances" / self.name, run_dir / "instances" / f"{self.name}.lock"]

    def left(self) -> list[Path]:
        return [path for path in (*self.paths, *self.scratch) if path.exists()]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DSEC_GUARD_CGROUP", f"dsec-guard-test-{os.getpid()}")
    yield tmp_path / "run"
    for path in CgroupHost.probe().bases():
        if path.exists():
            path.rmdir()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/keep").write_text("another's")
    return tmp_path / "outside"


def test_what_a_killed_guard_left_is_removed_and_a_living_ones_is_not(run_dir: Path, outside: Path):
    dead, living = Owner(run_dir, outside), Owner(run_dir, outside)
    assert reap(run_dir) == []
    dead.kill()
    assert len(dead.left()) == len(dead.paths) + 2
    assert start_time(dead.child)
    removed = reap(run_dir)
    assert sorted(removed) == sorted(str(path) for path in (*dead.paths, *dead.scratch))
    assert dead.left() == []
    assert start_time(dead.child) == 0
    assert len(living.left()) == len(living.paths) + 2
    assert start_time(living.child)
    assert (outside / "keep").read_text() == "another's"
    assert reap(run_dir) == []
    living.kill()
    assert reap(run_dir)
    assert living.left() == []


def test_a_guard_whose_holder_still_lives_is_left_to_it(run_dir: Path, outside: Path):
    owner = Owner(run_dir, outside)
    held = os.open(f"/proc/{owner.process.pid}/fd", os.O_RDONLY)
    copy = os.pidfd_open(owner.process.pid)
    lock = steal(copy, owner.scratch[1])
    owner.kill()
    assert reap(run_dir) == []
    assert owner.left()
    os.close(lock)
    assert reap(run_dir)
    assert not owner.left()
    os.close(held)
    os.close(copy)


def steal(pidfd: int, path: Path) -> int:
    """A copy of the lock's descriptor, as the holder has one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(3, 64):
        fd: int = libc.syscall(438, pidfd, number, 0)
        if fd >= 0 and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
        if fd >= 0:
            os.close(fd)
    raise AssertionError("the owner does not hold its lock")


def test_directories_without_a_lock_file_are_judged_by_their_process(run_dir: Path):
    host = CgroupHost.probe()
    mine = f"{os.getpid()}-{start_time(os.getpid())}"
    reused = f"{os.getpid()}-{start_time(os.getpid()) + 1}"
    for name in (mine, reused, "somebody-elses", "12-ab"):
        host.instance(name).close()
    removed = reap(run_dir)
    assert removed
    assert all(path.endswith("/" + reused) for path in removed)
    for name in (mine, "somebody-elses", "12-ab"):
        for base in host.bases():
            (base / name).rmdir()


def test_names_are_never_used_twice_and_go_with_their_owner(run_dir: Path):
    owners = [Ownership.take(run_dir) for _ in range(3)]
    assert len({owner.name for owner in owners}) == 3
    assert reap(run_dir) == []
    for owner in owners:
        (owner.directory / "x").write_text("y")
        owner.release()
    assert os.listdir(run_dir / "instances") == []


def test_nothing_to_do_is_quick(run_dir: Path):
    ensure_run_dir(run_dir)
    host = CgroupHost.probe()
    host.instance("1-1").remove()
    best = 1.0
    for _ in range(10):
        began = time.monotonic()
        assert reap(run_dir) == []
        best = min(best, time.monotonic() - began)
    assert best < 0.005


def test_a_run_directory_of_somebody_else_is_refused(tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with pytest.raises(HostError, match="belongs to uid 12345"):
        ensure_run_dir(other)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(HostError):
        ensure_run_dir(link)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    assert ensure_run_dir(mine).stat().st_mode & 0o777 == 0o700


def test_a_box_that_outlives_the_deadline_is_left_for_the_next_time(run_dir: Path, outside: Path):
    owner = Owner(run_dir, outside)
    owner.kill()
    box = owner.paths[0] / "box"
    # A process that the instance's own cgroup.kill does not reach: it sits in the v1 directories only.
    stranger = subprocess.Popen(["/bin/sleep", "1000"])
    v1 = [path for path in owner.paths[1:] if (path / "box/tasks").exists()]
    if not v1:
        stranger.kill()
        stranger.wait()
        assert reap(run_dir)
        pytest.skip("pure v2: cgroup.kill reaches every member")
    (v1[0] / "box/tasks").write_text(str(stranger.pid))
    began = time.monotonic()
    removed = reap(run_dir, deadline_s=0.2)
    assert time.monotonic() - began < 1
    assert str(v1[0]) not in removed
    assert v1[0].exists()
    assert all(path.exists() for path in owner.scratch)
    assert not box.exists()
    stranger.kill()
    stranger.wait()
    assert str(v1[0]) in reap(run_dir)
    assert owner.left() == []
