"""Nothing is left of runs that ended, nor of runs whose `dsec-guard` was killed with -9 at a random moment.

DSEC_GUARD_LEFTOVER_RUNS sets how many runs there are (default 60); a tenth of them, at least 20, are killed. 2 s after
the last kill everything is gone, with no further command in between that could clean up. The runs have a run directory,
a state directory and a cgroup base of their own, and other guards may work on the host at the same time.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest

from dsec_guard.host.cgroup import CgroupHost

pytestmark = [pytest.mark.needs("run"), pytest.mark.timeout(3600)]

RUNS = int(os.environ.get("DSEC_GUARD_LEFTOVER_RUNS", "60"))
KILLS = min(RUNS, max(20, RUNS // 10))
PARALLEL = 8
SETTLE_S = 2.0
NAMESPACES = ("mnt", "net", "pid", "ipc", "uts", "cgroup", "user")

#: What the commands in the boxes do: end at once; leave processes behind; write to the workspace; never end by themselves.
SHORT = "echo done > short; exit 3"
LEAVES = "sleep 1000 & setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000' & echo x > left; exit 0"
WRITES = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do mkdir -p d$i; head -c 200000 /dev/zero > d$i/f; done; ls -R / > list 2>&1; exit 0"
STAYS = "sleep 1000 & setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000 & wait' & mkfifo /tmp/p; echo x > stays; cat /tmp/p"

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36
_SYS_BPF = 321
_NS_GET_ID = 0x8008B70D
_NEXT_ID = {"prog": 11, "link": 31}


def bpf_ids(kind: str) -> set[int]:
    """The ids of all programs or links in the kernel. Source: bpf(2), BPF_PROG_GET_NEXT_ID, BPF_LINK_GET_NEXT_ID."""
    found: set[int] = set()
    attr = ctypes.create_string_buffer(128)
    at = 0
    while True:
        struct.pack_into("II", attr, 0, at, 0)
        if _libc.syscall(_SYS_BPF, _NEXT_ID[kind], attr, 12) < 0:
            return found
        (at,) = struct.unpack_from("I", attr, 4)
        found.add(at)


def bpf_ids_held(kind: str) -> set[int]:
    """The ids that some process has a descriptor for (a link's counts for its program)."""
    held: set[int] = set()
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with suppress(OSError):
            held.update(int(number) for number in re.findall(rf"^{kind}_id:\s*(\d+)$", info.read_text(), re.MULTILINE))
    return held


def descendants(top: int) -> set[int]:
    """Living processes below `top`; what is dead and only waits to be taken note of does not count."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(stat.parent.name)] = int(fields[1])
    found = {top}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {top}


def namespace(link: Path) -> tuple[str, int] | None:
    """What kind of namespace `link` leads to and its id, which unlike its inode number is never used again; None where it
    is no namespace, or before Linux 6.18. Source: linux/nsfs.h, NS_GET_ID."""
    with suppress(OSError):
        kind = os.readlink(link).partition(":")[0]
        if kind not in NAMESPACES:
            return None
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return kind, int.from_bytes(fcntl.ioctl(fd, _NS_GET_ID, bytes(8)), "little")
        finally:
            os.close(fd)
    return None


def namespaces_in_use() -> set[tuple[str, int] | None]:
    """Every namespace that a process is in or has a descriptor of."""
    return {namespace(link) for place in ("ns/*", "fd/*") for link in Path("/proc").glob(f"[0-9]*/{place}")}


class Yard:
    """Directories and cgroups that only our runs use."""

    def __init__(self, top: Path) -> None:
        self.run, self.state, self.temporary, self.work = top / "run", top / "state", top / "tmp", top / "work"
        for path in (self.run, self.state, self.temporary, self.work):
            path.mkdir(mode=0o700)
        self.base = f"dsec-guard-leftovers-{os.getpid()}"
        self.env = {**os.environ, "DSEC_GUARD_RUN_DIR": str(self.run), "DSEC_GUARD_STATE": str(self.state),
                    "DSEC_GUARD_CGROUP": self.base, "TMPDIR": str(self.temporary)}
        self.cgroups = CgroupHost.probe(environ=self.env).bases()
        self.namespaces: set[tuple[str, int] | None] = set()
        self._next = 0
        self._lock = threading.Lock()
        self.mounts = self.mount_lines()
        self.temporaries = set(Path("/tmp").iterdir())
        self.bpf = {kind: bpf_ids(kind) for kind in _NEXT_ID}
        self.pins = self.bpf_pins()
        self.children = descendants(os.getpid())
        self.own_namespaces = {namespace(Path(f"/proc/self/ns/{name}")) for name in NAMESPACES} | {None}

    @staticmethod
    def mount_lines() -> set[str]:
        return set(Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines())

    @staticmethod
    def bpf_pins() -> set[Path]:
        return set(Path("/sys/fs/bpf").rglob("*"))

    def workspace(self) -> Path:
        with self._lock:
            self._next += 1
            path = self.work / f"w{self._next}"
        path.mkdir()
        (path / "short").write_text("before\n")
        return path

    def note_namespaces(self) -> None:
        """Remember the namespaces of boxes that live now, so that their end can be seen."""
        with suppress(OSError):
            for procs in self.cgroups[0].glob("*/*/cgroup.procs"):
                for pid in procs.read_text().split():
                    for name in NAMESPACES:
                        self.namespaces.add(namespace(Path(f"/proc/{pid}/ns/{name}")))

    def left(self) -> list[str]:
        """What there is now and was not there before."""
        found = [f"process {pid}: {_describe(pid)}" for pid in descendants(os.getpid()) - self.children]
        ours = ("/dsec-guard", str(self.work.parent))
        found += [f"mount {line}" for line in self.mount_lines() - self.mounts if any(word in line for word in ours)]
        for base in self.cgroups:
            found += [f"cgroup {path}" for path in base.rglob("*") if path.is_dir()]
        found += [f"in the run directory: {path}" for path in self.run.rglob("*")
                  if path.relative_to(self.run).parts not in (("uids.lock",), ("instances",))]
        found += [f"temporary file {path}" for path in self.temporary.rglob("*")]
        found += [f"temporary file {path}" for path in set(Path("/tmp").iterdir()) - self.temporaries if "dsec" in path.name]
        found += [f"note of a write-back: {path}" for path in (self.state / "write-back").rglob("*")]
        found += [f"temporary file {path}" for top in (self.state, self.work) for path in top.rglob(".*")]
        found += [f"BPF pin {path}" for path in self.bpf_pins() - self.pins if "dsec" in path.name or "dg_" in path.name]
        for kind, before in self.bpf.items():
            # Those of other guards are held by living processes, or gone when looked for again.
            ids = bpf_ids(kind) - before
            ids -= bpf_ids_held(kind)
            found += [f"BPF {kind} {number}" for number in ids & bpf_ids(kind)]
        found += [f"namespace {name}" for name in (self.namespaces - self.own_namespaces) & namespaces_in_use()]
        return found

    def remove_bases(self) -> None:
        for base in self.cgroups:
            if base.is_dir():
                base.rmdir()


def _describe(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return "?"


def _reap() -> None:
    """Take note of orphans that ended below us; children that `subprocess` waits for are left to it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ChildProcessError):
            text = stat.read_text("utf-8", "replace")
            fields = text.rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid() and "(dg-" in text:
                os.waitpid(int(stat.parent.name), os.WNOHANG)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Orphans of our runs come to this process, so that none of them is overlooked. Source: prctl(2)."""
    assert _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    place = Yard(tmp_path)
    try:
        yield place
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for pid in descendants(os.getpid()) - place.children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        place.remove_bases()


def start(yard: Yard, cli: tuple[str, ...], script: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*cli, "run", *options, "--", "sh", "-c", script], cwd=yard.workspace(), env=yard.env,
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def whole_run(yard: Yard, cli: tuple[str, ...], script: str, status: int) -> float:
    """Seconds that a run took. Fails when it ended otherwise."""
    began = time.monotonic()
    process = start(yard, cli, script, "--keep")
    _, said = process.communicate(timeout=300)
    assert process.returncode == status, said
    # Whatever a killed run left would be removed by the next one, which says so.
    assert b"removed" not in said, said
    return time.monotonic() - began


def killed_run(yard: Yard, cli: tuple[str, ...], script: str, after_s: float) -> bool:
    """Whether the kill came before the end. Only the process of `dsec-guard` itself is killed."""
    process = start(yard, cli, script, "--keep")
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.stderr is not None
    process.stderr.close()
    return process.wait() == -signal.SIGKILL


def test_nothing_is_left_of_ended_and_killed_runs(yard: Yard, dsec_guard_cli: tuple[str, ...]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    times = [whole_run(yard, dsec_guard_cli, SHORT, 3)]
    killed: list[float] = []
    last_kill = 0.0

    def ended(number: int) -> None:
        script, status = ((SHORT, 3), (LEAVES, 0), (WRITES, 0))[number % 3]
        times.append(whole_run(yard, dsec_guard_cli, script, status))

    def cut_off(number: int, where: float) -> None:
        nonlocal last_kill
        # Over all of a run's life, and now and then among its very first instructions.
        after = where * (0.05 if number % 5 == 0 else 1.3) * statistics.median(times[-20:])
        script = STAYS if number % 2 else WRITES
        for shorter in range(20):  # a run that was over too soon is no killed one
            if killed_run(yard, dsec_guard_cli, script, after * 0.8**shorter):
                killed.append(after)
                last_kill = time.monotonic()
                return
        raise AssertionError(f"no run lived for {after * 0.8**19:.3f} s")

    whole = [(ended, (n,)) for n in range(RUNS - KILLS - 1)]
    cut = [(cut_off, (n, chance.random())) for n in range(KILLS)]
    jobs = whole + cut[PARALLEL:]
    chance.shuffle(jobs)
    jobs += cut[:PARALLEL]  # nothing comes after these
    with ThreadPoolExecutor(PARALLEL) as pool:
        waiting = [pool.submit(job, *arguments) for job, arguments in jobs]
        while wait(waiting, 0.05).not_done:
            yard.note_namespaces()
            _reap()
        for future in waiting:
            future.result()
    assert len(killed) == KILLS
    if namespace(Path("/proc/self/ns/net")) is not None:
        assert yard.namespaces - yard.own_namespaces, "no box was ever seen, so that none could be missed"
    _reap()
    while (left := yard.left()) and time.monotonic() < last_kill + SETTLE_S:
        _reap()
    assert not left, f"seed {seed}, of {RUNS} runs {KILLS} killed: {left}"


def test_nothing_is_left_of_boxes_that_waited_for_a_guard_that_was_killed(yard: Yard) -> None:
    code = ("import sys\nfrom dsec_guard.policy.load import load_policy\nfrom dsec_guard.service.guard import Guard\n"
            "from dsec_guard.service.request import RunRequest\nguard = Guard.open()\n"
            "guard.prepare(RunRequest(policy=load_policy('untrusted-script'), argv=(b'true',)), 4)\n"
            "print(len(guard.ready), flush=True)\nsys.stdin.read()\n")
    process = subprocess.Popen([sys.executable, "-c", code], env=yard.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"4\n"
        yard.note_namespaces()
        boxes = [path for path in yard.cgroups[0].glob("*/*/cgroup.procs") if path.read_text().split()]
        assert len(boxes) >= 4
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + SETTLE_S
    while (left := yard.left()) and time.monotonic() < deadline:
        _reap()
    assert not left


def test_a_leftover_of_each_kind_would_be_seen(yard: Yard, dsec_guard_cli: tuple[str, ...]) -> None:
    """A run that still lives has processes, cgroups, namespaces, programs and links, and a lock: all are reported."""
    process = start(yard, dsec_guard_cli, STAYS)
    deadline = time.monotonic() + 30
    kinds: set[str] = set()
    wanted = {"process", "cgroup", "in"} | ({"namespace"} if namespace(Path("/proc/self/ns/net")) else set())
    try:
        while not wanted <= kinds and time.monotonic() < deadline and process.poll() is None:
            yard.note_namespaces()
            kinds = {line.split(" ", 1)[0] for line in yard.left()}
        assert wanted <= kinds
        # Held by the living guard and therefore not blamed; without that they would be.
        assert (bpf_ids("link") - yard.bpf["link"]) & bpf_ids_held("link")
        assert (bpf_ids("prog") - yard.bpf["prog"]) & bpf_ids_held("prog")
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + SETTLE_S
    while (left := yard.left()) and time.monotonic() < deadline:
        _reap()
    assert not left
