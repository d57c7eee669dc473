"""The holder with a stand-in for the launcher: clean-up after a killed guard, fanotify, seccomp notifications."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_guard.errors import HostError, SetupError
from dsec_guard.host.cgroup import BoxCgroup, CgroupHost, CgroupLimits, Instance
from dsec_guard.host.fanotify import FanotifyGroup
from dsec_guard.host.uids import UidRange
from dsec_guard.sandbox.holder import (
    ChildExited,
    FloodKilled,
    Holder,
    HolderDied,
    HolderLimits,
    Message,
    RawNotify,
    RawOpen,
    Sensor,
)
from dsec_guard.service.reaper import reap

PROGRAMS = Path(__file__).parent / "programs"
NATIVE = Path(__file__).resolve().parents[2] / "dsec_guard/_native"
LIMITS = CgroupLimits(memory=256 << 20, pids=64, cpus=1)
AFTER_DEATH_S = 2.0

pytestmark = [
    pytest.mark.needs("cgroup_v2", "clone_into_cgroup"),
    pytest.mark.skipif(not (NATIVE / "dg-holder").exists(), reason="dg-holder is not built"),
]


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("launcher") / "launcher"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", program, PROGRAMS / "stand_in_launcher.c"], check=True)
    return program


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A base directory of the test's own, so that guards of other tests are neither seen nor touched."""
    name = f"dsec-guard-test-{os.getpid()}"
    monkeypatch.setenv("DSEC_GUARD_CGROUP", name)
    yield name
    for path in CgroupHost.probe().bases():
        if path.exists():
            path.rmdir()


@pytest.fixture
def instance(base: str) -> Iterator[Instance]:
    with CgroupHost.probe().instance("one") as made:
        yield made


@pytest.fixture
def holder(launcher: Path, instance: Instance) -> Iterator[Holder]:
    limits = HolderLimits(notify_records=5, notify_kill=40, open_records=12, open_repeats=4)
    with Holder.start(NATIVE, instance, launcher=launcher, limits=limits) as started:
        yield started


@pytest.fixture
def box(holder: Holder, instance: Instance) -> Iterator[BoxCgroup]:
    made = instance.create_box("box", LIMITS)
    holder.register_box(made.id, made)
    yield made
    if made.dir_fd >= 0:
        made.kill()
        assert made.wait_empty(2)
        assert made.remove()


def spawn(holder: Holder, box: BoxCgroup, *argv: str) -> int:
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    socket.send_fds(holder.launcher_socket, [words], [box.dir_fd, *box.v1_tasks_fds])
    pid: int = struct.unpack("i", holder.launcher_socket.recv(4))[0]
    assert pid > 0
    return pid


def wait_for(holder: Holder, kind: type[Message], seconds: float = 5.0) -> Message:
    found: list[Message] = []

    def look() -> bool:
        found.extend(m for m in holder.read_messages() if isinstance(m, kind))
        return bool(found)

    assert eventually(look, seconds), f"no {kind.__name__}"
    return found[0]


# ------------------------------------------------------------------------------------------------------ its children


def test_the_end_of_a_box_is_told_with_its_status(holder: Holder, box: BoxCgroup):
    first = spawn(holder, box, "/bin/sh", "-c", "exit 7")
    ended = wait_for(holder, ChildExited)
    assert isinstance(ended, ChildExited)
    assert (ended.pid, ended.exit_code, ended.signal) == (first, 7, None)
    second = spawn(holder, box, "/bin/sleep", "1000")
    assert Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1] == str(holder.pid)
    box.kill()
    ended = wait_for(holder, ChildExited)
    assert isinstance(ended, ChildExited)
    assert (ended.pid, ended.exit_code, ended.signal) == (second, None, 9)


def test_hundreds_of_ends_reach_a_guard_that_reads_late(holder: Holder, box: BoxCgroup):
    pids = {spawn(holder, box, "/bin/true") for _ in range(300)}
    ended: set[int] = set()

    def all_told() -> bool:
        ended.update(m.pid for m in holder.read_messages() if isinstance(m, ChildExited))
        return pids <= ended

    assert eventually(all_told)


def test_it_keeps_nothing_of_the_guard_open_and_hears_no_signal(launcher: Path, instance: Instance):
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    with Holder.start(NATIVE, instance, launcher=launcher) as started:
        os.close(write_end)
        assert os.read(read_end, 1) == b""  # nobody else has the other end
        os.close(read_end)
        fds = {os.readlink(f"/proc/{started.pid}/fd/{fd}") for fd in ("0", "1", "2")}
        assert fds == {"/dev/null"}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            os.kill(started.pid, number)
        assert os.getsid(started.pid) == started.pid != os.getsid(0)
        made = instance.create_box("alive", LIMITS)
        started.register_box(made.id, made)
        started.settle(made.id)  # it still answers
        assert eventually(lambda: Path(f"/proc/{started.launcher_pid}/exe").readlink() == launcher)
        ignored = [line for line in Path(f"/proc/{started.launcher_pid}/status").read_text().splitlines()
                   if line.startswith(("SigIgn", "SigBlk"))]
        own = 3 << 31  # 32 and 33 belong to the C library, and cannot be set through it
        assert [int(line.split()[1], 16) & ~own for line in ignored] == [0, 0]
        assert made.remove()
        started.release_box(made.id)


def test_an_orderly_end_leaves_status_0_and_no_launcher(launcher: Path, instance: Instance):
    started = Holder.start(NATIVE, instance, launcher=launcher)
    pid, running = started.launcher_pid, is_running(started.launcher_pid)
    began = time.monotonic()
    assert started.end() == 0
    assert running
    assert time.monotonic() - began < 1
    assert not is_running(pid)


def test_a_dead_holder_takes_its_boxes_along_and_is_noticed(launcher: Path, instance: Instance):
    started = Holder.start(NATIVE, instance, launcher=launcher)
    made = instance.create_box("box", LIMITS)
    started.register_box(made.id, made)
    pid = spawn(started, made, "/bin/sleep", "1000")
    # The stand-in asks for its death signal only just before this.
    assert eventually(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/sleep"))
    os.kill(started.pid, signal.SIGKILL)
    wait_for(started, HolderDied)
    assert started.read_messages() == []
    assert made.wait_empty(2)
    assert not is_running(pid)
    assert started.end() == -9
    assert made.remove()


def test_requests_it_cannot_carry_out_are_told(holder: Holder, box: BoxCgroup, tmp_path: Path):
    holder.register_path(tmp_path / "not-owned")
    with pytest.raises(SetupError, match="refused PATH"):
        holder.settle(box.id)
    holder.register_box(box.id + 1, box)
    with pytest.raises(SetupError, match="refused BOX"):
        holder.settle(box.id)
    holder.settle(box.id)


def test_a_missing_program_is_one_clear_error(tmp_path: Path):
    with pytest.raises(SetupError, match="dg-holder is missing"):
        Holder.start(tmp_path)


# --------------------------------------------------------------------------------------------------- a killed guard


def start_guard(launcher: Path, run_dir: Path, count: int, *more: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    guard = subprocess.Popen(
        [sys.executable, PROGRAMS / "guard_to_kill.py", NATIVE, launcher, run_dir, str(count), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert guard.stdout is not None
    line = guard.stdout.readline()
    assert line, "the guard did not come up"
    told = json.loads(line)
    assert len(told["pids"]) == count
    return guard, told


@pytest.mark.parametrize("count", [1, 8, 120])
def test_nothing_is_left_two_seconds_after_the_guard_was_killed(launcher: Path, base: str, tmp_path: Path, count: int):
    outside = tmp_path / "outside/deeper"
    outside.mkdir(parents=True)
    (outside / "keep").write_text("not the guard's")
    guard, told = start_guard(launcher, tmp_path, count)
    pids = [*told["pids"], told["launcher"], told["holder"]]
    assert all(is_running(pid) for pid in pids)
    assert not is_free(tmp_path)
    guard.kill()
    died = time.monotonic()
    guard.wait()
    gone = eventually(lambda: not any(is_running(pid) for pid in pids), AFTER_DEATH_S)
    took = time.monotonic() - died
    assert gone, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if is_running(pid)]
    assert not [p for p in (*told["paths"], told["directory"], told["lock"]) if Path(p).exists()]
    assert took < AFTER_DEATH_S
    assert (outside / "keep").read_text() == "not the guard's"
    # The holder's threads may end a moment after its first one.
    assert eventually(lambda: is_free(tmp_path), 1)


def is_free(run_dir: Path) -> bool:
    try:
        UidRange.acquire(run_dir, count=1).release()
    except HostError:
        return False
    return True


def test_guard_and_holder_killed_together_leave_no_process(launcher: Path, base: str, tmp_path: Path):
    guard, told = start_guard(launcher, tmp_path, 8)
    pids = [*told["pids"], told["launcher"]]
    os.kill(int(str(told["holder"])), signal.SIGKILL)
    guard.kill()
    guard.wait()
    assert eventually(lambda: not any(is_running(pid) for pid in pids), AFTER_DEATH_S)
    assert reap(tmp_path)
    assert not [p for p in told["paths"] if Path(p).exists()]


def test_the_shared_parent_goes_with_the_last_instance(launcher: Path, base: str, tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first, told_first = start_guard(launcher, tmp_path / "one", 1, "shared")
    second, told_second = start_guard(launcher, tmp_path / "two", 1, "shared")
    bases = CgroupHost.probe().bases()
    for guard, told, stays in ((first, told_first, True), (second, told_second, False)):
        guard.kill()
        guard.wait()
        assert eventually(lambda holder=int(str(told["holder"])): not is_running(holder), AFTER_DEATH_S)
        assert not [p for p in told["paths"] if Path(p).exists()]
        assert [path.exists() for path in bases] == [stays] * len(bases)


# ---------------------------------------------------------------------------------------------------------- fanotify


class Opener:
    """A shell in a mount namespace of its own with a tmpfs, told by lines what to run."""

    def __init__(self, where: Path) -> None:
        script = f"mount -t tmpfs x {where} && cd {where} && echo ready && while read -r line; do eval \"$line\"; echo done; done"
        self.process = subprocess.Popen(["unshare", "-m", "--propagation", "private", "/bin/sh", "-c", script], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.where = where
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        while (line := self._line()) != "done":
            assert line, "the opener ended"

    def open(self, name: str) -> int:
        return os.open(f"/proc/{self.process.pid}/root{self.where}/{name}", os.O_PATH)


@pytest.fixture
def opener(box: BoxCgroup, tmp_path: Path) -> Iterator[Opener]:
    started = Opener(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


def opens_of(holder: Holder, box: BoxCgroup) -> list[RawOpen]:
    holder.totals(box.id)
    return [r for r in holder.read_records() if isinstance(r, RawOpen)]


@pytest.mark.needs("fanotify")
def test_an_opening_names_who_and_what_and_is_let_through(holder: Holder, box: BoxCgroup, opener: Opener):
    opener.run("echo hidden > secret; mkdir d; ln secret d/other; cp /bin/true tool; echo 1 > plain")
    with FanotifyGroup.open() as group:
        holder.watch_fanotify(group.fd)
        for name in ("secret", "tool", "d"):
            fd = opener.open(name)
            status = os.fstat(fd)
            group.mark(fd, is_dir=name == "d")
            os.close(fd)
            if name == "secret":
                secret = status
        opener.run("cat secret plain")  # not in a box yet
        assert opens_of(holder, box) == []
        (box.v2_dir / "cgroup.procs").write_text(str(opener.process.pid))
        opener.run("cat plain; cat secret > copy")
        (opened,) = opens_of(holder, box)
        assert (opened.box_id, opened.dev, opened.ino) == (box.id, secret.st_dev, secret.st_ino)
        assert opened.comm == b"cat"
        assert opened.uid == 0
        assert opened.ppid == opener.process.pid
        assert opened.path.endswith(b"/secret")
        assert not opened.from_exec
        assert opened.nr == 257
        assert opened.open_flags is not None
        assert opened.open_flags & os.O_ACCMODE == os.O_RDONLY
        assert abs(opened.at_ns - time.monotonic_ns()) < 10**10
        opener.run("test \"$(cat copy)\" = hidden || exit 1")
        opener.run("cat d/other; ./tool; ls d")
        records = opens_of(holder, box)
        assert any(r.path.endswith(b"/d/other") and r.ino == secret.st_ino for r in records)
        assert any(r.from_exec and r.nr == 59 and r.path.endswith(b"/tool") for r in records)
        assert any(r.comm == b"ls" and r.path.endswith(b"/d") for r in records)


@pytest.mark.needs("fanotify")
def test_a_loop_over_a_decoy_is_counted_not_repeated(holder: Holder, box: BoxCgroup, opener: Opener):
    opener.run("echo x > secret")
    with FanotifyGroup.open() as group:
        holder.watch_fanotify(group.fd)
        fd = opener.open("secret")
        group.mark(fd)
        os.close(fd)
        (box.v2_dir / "cgroup.procs").write_text(str(opener.process.pid))
        opener.run("for i in $(seq 50); do read x < secret; done")
        totals = holder.totals(box.id)[Sensor.FANOTIFY]
        records = [r for r in holder.read_records() if isinstance(r, RawOpen)]
        assert len(records) == 4 == totals.recorded
        assert (totals.seen, totals.counted, totals.lost) == (50, 46, 0)
        opener.run("for i in $(seq 20); do cat secret; done")
        totals = holder.totals(box.id)[Sensor.FANOTIFY]
        assert (totals.seen, totals.recorded, totals.lost) == (70, 12, 0)


@pytest.mark.needs("fanotify")
def test_records_that_nobody_reads_are_lost_in_the_count_and_hold_nobody(launcher: Path, instance: Instance, tmp_path: Path):
    limits = HolderLimits(open_records=10**6, open_repeats=10**6)
    with Holder.start(NATIVE, instance, launcher=launcher, limits=limits) as started:
        made = instance.create_box("box", LIMITS)
        started.register_box(made.id, made)
        opener = Opener(tmp_path)
        with FanotifyGroup.open() as group:
            started.watch_fanotify(group.fd)
            opener.run("echo x > secret")
            fd = opener.open("secret")
            group.mark(fd)
            os.close(fd)
            (made.v2_dir / "cgroup.procs").write_text(str(opener.process.pid))
            opener.run("i=0; while [ $i -lt 1500 ]; do read x < secret; i=$((i+1)); done")
        totals = started.totals(made.id)[Sensor.FANOTIFY]
        assert totals.seen == 1500
        assert totals.lost > 0
        assert totals.recorded + totals.lost == 1500
        assert len(started.read_records(10**5)) == totals.recorded
        made.kill()
        opener.process.wait()
        assert made.wait_empty(2)
        assert made.remove()


# ----------------------------------------------------------------------------------------------------- notifications


class Notified:
    """A task of the box whose filter hands some calls over to the holder."""

    def __init__(self, box: BoxCgroup) -> None:
        self.conversation, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen([sys.executable, PROGRAMS / "notified_task.py", str(theirs.fileno())],
                                        pass_fds=[theirs.fileno()])
        theirs.close()
        (box.v2_dir / "cgroup.procs").write_text(str(self.process.pid))
        _, (self.listener,), _, _ = socket.recv_fds(self.conversation, 64, 1)

    def call(self, name: str, *arguments: object, times: int = 1) -> int:
        self.conversation.send(json.dumps([name, times, *arguments]).encode())
        number: int = json.loads(self.conversation.recv(64))
        return number

    def close(self) -> None:
        self.conversation.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def notified(holder: Holder, box: BoxCgroup) -> Iterator[Notified]:
    task = Notified(box)
    holder.watch_notify(box.id, task.listener, {161: errno.ENOENT, 163: errno.ENOSYS})
    os.close(task.listener)
    yield task
    task.close()


@pytest.mark.needs("seccomp_notify")
def test_a_notified_call_gets_the_tables_errno_and_a_record(holder: Holder, box: BoxCgroup, notified: Notified):
    assert notified.call("mount", "/source", "target/here", "proc", 4, "opts") == errno.EPERM
    assert notified.call("chroot", "/") == errno.ENOENT
    assert notified.call("acct", 0) == errno.ENOSYS
    totals = holder.totals(box.id)[Sensor.NOTIFY]
    records = [r for r in holder.read_records() if isinstance(r, RawNotify)]
    assert totals.seen == totals.recorded == len(records) == 3
    mount, chroot, acct = records
    assert (mount.nr, mount.given_errno, mount.box_id, mount.abi.value) == (165, errno.EPERM, box.id, "x64")
    assert (mount.path, mount.path2, mount.data) == (b"target/here", b"/source", b"proc")
    assert mount.memory_read
    assert mount.base == os.fsencode(os.getcwd())
    assert mount.args[3] == 4
    assert (mount.tgid, mount.ppid, mount.uid) == (notified.process.pid, os.getpid(), 0)
    assert mount.comm.startswith(b"python")
    assert (chroot.nr, chroot.given_errno, chroot.path) == (161, errno.ENOENT, b"/")
    assert (acct.nr, acct.path, acct.args[0]) == (163, b"", 0)


@pytest.mark.needs("seccomp_notify")
def test_argument_memory_that_is_not_there_harms_nothing(holder: Holder, box: BoxCgroup, notified: Notified):
    for address in (1, 2**47 - 1, 2**63, 2**64 - 1):
        assert notified.call("chroot", address - 2**64 if address >= 2**63 else address) == errno.ENOENT
    holder.totals(box.id)
    assert [r.path for r in holder.read_records()] == [b""] * 4
    assert notified.call("chroot", "x" * 3000) == errno.ENOENT
    holder.totals(box.id)
    (long,) = holder.read_records()
    assert isinstance(long, RawNotify)
    assert long.truncated
    assert long.path == b"x" * 440


@pytest.mark.needs("seccomp_notify")
def test_a_flood_of_notices_is_counted_and_then_ends_the_box(holder: Holder, box: BoxCgroup, notified: Notified):
    assert notified.call("chroot", "/", times=20) == errno.ENOENT
    totals = holder.totals(box.id)[Sensor.NOTIFY]
    assert (totals.seen, totals.recorded, totals.counted, totals.lost) == (20, 5, 15, 0)
    assert len(holder.read_records()) == 5
    notified.conversation.send(json.dumps(["chroot", 100, "/"]).encode())
    killed = wait_for(holder, FloodKilled)
    assert isinstance(killed, FloodKilled)
    assert killed.box_id == box.id
    assert notified.process.wait(5) == -9
    assert box.wait_empty(2)


@pytest.mark.needs("seccomp_notify")
def test_one_box_of_many_keeps_its_listener_when_others_go(holder: Holder, box: BoxCgroup, instance: Instance,
                                                           notified: Notified):
    other = instance.create_box("other", LIMITS)
    holder.register_box(other.id, other)
    task = Notified(other)
    holder.watch_notify(other.id, task.listener, {}, errno.EACCES)
    os.close(task.listener)
    assert task.call("chroot", "/") == errno.EACCES
    holder.release_box(other.id)
    task.close()
    assert other.wait_empty(2)
    assert other.remove()
    assert notified.call("chroot", "/") == errno.ENOENT
    holder.totals(box.id)
    assert [r.box_id for r in holder.read_records()] == [other.id, box.id]
