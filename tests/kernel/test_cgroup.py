"""Control groups on the real kernel: limits hold and are counted, boxes are killed, frozen, found empty and removed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_guard.errors import HostError
from dsec_guard.host.cgroup import BoxCgroup, CgroupHost, CgroupLimits, Instance
from dsec_guard.host.uids import UidRange

pytestmark = pytest.mark.needs("cgroup_v2", "cgroup_limits")

LIMITS = CgroupLimits(memory=64 << 20, pids=12, cpus=0.5)


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setenv("DSEC_GUARD_CGROUP", f"dsec-guard-test-{os.getpid()}")
    host = CgroupHost.probe()
    with host.instance("one") as made:
        yield made
    for path in host.bases():
        path.rmdir()


@pytest.fixture
def box(instance: Instance) -> Iterator[BoxCgroup]:
    made = instance.create_box("box", LIMITS)
    yield made
    if made.dir_fd >= 0:
        made.kill()
        assert made.wait_empty(5)
        assert made.remove()


class Member:
    """A Python process that waits until it is in the box, then runs `code`."""

    def __init__(self, box: BoxCgroup, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import os, sys, time\nsys.stdin.readline()\n{code}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        (box.v2_dir / "cgroup.procs").write_text(str(self.process.pid))
        for fd in box.v1_tasks_fds:
            os.write(fd, str(self.process.pid).encode())
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_the_id_is_the_inode_and_the_name_is_what_proc_shows(box: BoxCgroup):
    member = Member(box, "print(open('/proc/self/cgroup').read(), end=''); print('end', flush=True); sys.stdin.read()")
    lines = []
    while (line := member.line()) != "end":
        lines.append(line)
    assert f"0::{box.proc_path}" in lines
    assert box.id == os.stat(box.v2_dir).st_ino
    for path in box.paths[1:]:
        assert any(line.endswith(box.proc_path) and not line.startswith("0::") for line in lines), path
    member.process.kill()
    member.process.wait()


def test_forks_beyond_the_limit_fail_with_eagain_and_are_counted(box: BoxCgroup):
    member = Member(box, """
made, refused = 0, []
for _ in range(20):
    try:
        pid = os.fork()
    except OSError as error:
        refused.append(error.errno)
        continue
    if pid == 0:
        time.sleep(1000)
    made += 1
print(made, refused, flush=True)
sys.stdin.read()
""")
    assert member.line() == f"11 {[11] * 9}"
    usage = box.usage()
    assert (usage.pids_current, usage.pids_peak, usage.pids_denied) == (12, 12, 9)
    box.kill()
    assert member.process.wait(5) == -9
    assert box.wait_empty(2)
    assert within(5, lambda: box.usage().pids_current == 0)  # the orphans are reaped by the host's init


def test_memory_beyond_the_limit_is_ended_counted_and_told_promptly(box: BoxCgroup):
    with box.oom_watch() as oom:
        poller = select.poll()
        poller.register(oom.fileno(), select.POLLIN)
        assert oom.drain() == 0
        assert not poller.poll(0)
        member = Member(box, "blocks = []\nwhile True: blocks.append(b'x' * (1 << 20))")
        assert poller.poll(20_000)
        kills, deadline = oom.drain(), time.monotonic() + 5
        while not kills and time.monotonic() < deadline:
            poller.poll(100)
            kills = oom.drain()
        assert kills >= 1
        assert oom.drain() == 0
    assert member.process.wait(10) == -9
    usage = box.usage()
    assert usage.oom_kills >= 1
    assert usage.memory_failcnt >= 1 or box.host.is_hybrid
    assert LIMITS.memory * 0.9 < usage.memory_peak <= LIMITS.memory


def test_swap_is_no_way_round_the_memory_limit(box: BoxCgroup):
    for path in box.paths:
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (path / name).exists():
                assert int((path / name).read_text()) in (LIMITS.memory, 0)


def test_cpu_time_is_bound_and_read(box: BoxCgroup):
    member = Member(box, """
import resource
end = time.monotonic() + 1
while time.monotonic() < end: pass
print('done', flush=True)
sys.stdin.read()
""")
    assert member.line() == "done"
    used = box.usage().cpu_ns
    assert 0.05e9 < used < 0.75e9  # half a CPU for one second, plus one period
    member.process.kill()
    member.process.wait()


def test_freezing_stops_and_thawing_lets_go(box: BoxCgroup):
    member = Member(box, "while True: pass")
    assert within(5, lambda: box.usage().cpu_ns > 0)
    assert box.freeze()
    before = box.usage().cpu_ns
    time.sleep(0.05)  # not a wait: the span in which nothing may happen
    assert box.usage().cpu_ns == before
    box.thaw()
    assert within(5, lambda: box.usage().cpu_ns > before)
    assert box.freeze()
    box.kill()  # also reaches a frozen box
    assert member.process.wait(5) == -9


def test_an_occupied_box_is_neither_empty_nor_removed(box: BoxCgroup):
    member = Member(box, "print('up', flush=True); time.sleep(1000)")
    assert member.line() == "up"
    assert box.populated()
    assert not box.wait_empty(0.05)
    dirs = [path for path in box.paths if path.is_dir()]
    assert not box.remove(0.02)
    assert box.v2_dir.is_dir()
    member.process.kill()
    member.process.wait()
    assert box.remove(2)
    assert not any(path.exists() for path in dirs)


def test_an_emptied_box_is_noticed_at_once(box: BoxCgroup):
    member = Member(box, "print('up', flush=True); time.sleep(1000)")
    member.line()
    box.kill()
    member.process.wait()
    began = time.monotonic()
    assert box.wait_empty(2)
    assert time.monotonic() - began < 0.5


def test_a_box_that_cannot_be_made_leaves_nothing(instance: Instance):
    with pytest.raises(HostError) as caught:
        instance.create_box("bad", CgroupLimits(memory=64 << 20, pids=-5, cpus=1))
    assert "pids.max" in str(caught.value)
    assert not any((path / "bad").exists() for path in instance.paths)
    made = instance.create_box("twice", LIMITS)
    with pytest.raises(HostError):
        instance.create_box("twice", LIMITS)
    assert made.v2_dir.is_dir()
    assert made.remove()


def test_descriptors_are_given_back(instance: Instance):
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(20):
        made = instance.create_box(f"b{number}", LIMITS)
        assert len(made.v1_tasks_fds) == len(instance.paths) - 1
        with made.oom_watch():
            made.close_tasks()
        assert made.v1_tasks_fds == ()
        assert made.wait_empty(1)
        assert made.remove()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_instance_exists_once(instance: Instance):
    with pytest.raises(HostError, match="exists already"):
        instance.host.instance("one")
    assert instance.v2_dir.is_dir()


def test_guards_that_come_and_go_share_the_base(monkeypatch: pytest.MonkeyPatch):
    """Ten at a time make and remove instances below one base that each tries to remove."""
    base = f"dsec-guard-test-{os.getpid()}x"
    code = """
import os, sys
from dsec_guard.host import cgroup
cgroup.DEFAULT_BASE = os.environ["DSEC_GUARD_CGROUP"]
host = cgroup.CgroupHost.probe()
assert host.base_is_default
for number in range(25):
    with host.instance(f"{os.getpid()}-{number}") as instance:
        box = instance.create_box("box", cgroup.CgroupLimits(memory=64 << 20, pids=8, cpus=1))
        assert box.wait_empty(1) and box.remove()
"""
    environment = {**os.environ, "DSEC_GUARD_CGROUP": base, "PYTHONPATH": str(Path(__file__).parents[2])}
    guards = [subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) for _ in range(4)]
    for guard in guards:
        _, errors = guard.communicate(timeout=60)
        assert guard.returncode == 0, errors.decode()[-800:]
    monkeypatch.setenv("DSEC_GUARD_CGROUP", base)
    assert not any(path.exists() for path in CgroupHost.probe().bases())


def test_ranges_of_guards_in_parallel_never_meet_and_a_killed_one_frees_its_own(tmp_path: Path):
    code = """
import sys
from pathlib import Path
from dsec_guard.host.uids import UidRange
ranges = [UidRange.acquire(Path(sys.argv[1]), count=40) for _ in range(10)]
print(*(r.base for r in ranges), flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    guards = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    held = [guard.stdout.readline().split() for guard in guards if guard.stdout is not None]
    bases = [base for line in held for base in line]
    assert len(bases) == 40 == len(set(bases))
    with pytest.raises(HostError):
        UidRange.acquire(tmp_path, count=40)
    guards[0].kill()
    guards[0].wait()
    again = {UidRange.acquire(tmp_path, count=40) for _ in range(10)}
    assert {str(r.base) for r in again} == set(held[0])
    for one in again:
        one.release()
    for guard in guards[1:]:
        guard.communicate()
