"""What one `dsec-guard run` started and used, seen from outside while it runs, and what is left of it afterwards.

Nothing here asks the guard: processes, cgroups, mounts and memory are read from /proc, so that a guard that forgets
something cannot also forget to say so.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.05
LEFTOVER_S = 2.0
#: The product's own name in cgroup paths, mounts and files.
OURS = "dsec-guard"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Task:
    """A process that cannot be mistaken for a later one with the same number. start: clock ticks since boot."""

    pid: int
    start: int


@dataclass
class Seen:
    """What the watcher saw of one run. guard: the pid of its guard, 0 for none. Memory in bytes, of the guard's process
    alone: `base` when the first process of its box appeared, `peak` the most after that."""

    guard: int = 0
    tasks: set[Task] = field(default_factory=set)
    cgroups: set[Path] = field(default_factory=set)
    memory_base: int = 0
    memory_peak: int = 0

    @property
    def memory_growth(self) -> int:
        return max(0, self.memory_peak - self.memory_base)


class Watcher:
    """A thread that follows the guard's descendants until `stop`."""

    def __init__(self, guard_pid: int) -> None:
        self._guard = guard_pid
        self._seen = Seen(guard=guard_pid)
        self._mounts = _cgroup_mounts()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="corpus-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> Seen:
        self._stop.set()
        self._thread.join()
        return self._seen

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        parents = _parents()
        family = {self._guard}
        grown = True
        while grown:
            fresh = {pid for pid, (ppid, _) in parents.items() if ppid in family and pid not in family}
            family |= fresh
            grown = bool(fresh)
        for pid in family - {self._guard}:
            if pid in parents:
                self._seen.tasks.add(Task(pid, parents[pid][1]))
            self._seen.cgroups |= _cgroups_of(pid, self._mounts)
        memory = _resident(self._guard)
        if self._seen.cgroups and not self._seen.memory_base:
            self._seen.memory_base = memory
        if self._seen.memory_base:
            self._seen.memory_peak = max(self._seen.memory_peak, memory)


@dataclass(frozen=True)
class HostState:
    """What a run could leave on the host, as one comparable picture."""

    mounts: frozenset[str]
    ipc: frozenset[str]
    files: frozenset[str]


def host_state(state_dir: Path) -> HostState:
    """Mounts that name us, System V IPC objects, and names in the places where run-time things are put."""
    mounts = frozenset(line.split(" ", 5)[4] for line in _lines(_PROC / "self/mountinfo") if OURS in line)
    ipc = frozenset(f"{kind}:{line}" for kind in ("msg", "sem", "shm") for line in
                    (" ".join(row.split()[:2]) for row in _lines(_PROC / "sysvipc" / kind)[1:]))
    files: set[str] = set()
    for place in (Path("/dev/shm"), Path("/run/netns"), Path("/run") / OURS, Path("/sys/fs/bpf"), state_dir / "tmp"):
        with contextlib.suppress(OSError):
            files |= {str(entry) for entry in place.iterdir()}
    stage = Path("/run") / OURS / "stage"
    with contextlib.suppress(OSError):
        files |= {str(entry) for entry in stage.iterdir()}
    return HostState(mounts, ipc, frozenset(files))


def leftovers(seen: Seen, *, token: str, mark: str, since: int, patience_s: float = LEFTOVER_S) -> list[str]:
    """Processes of the run that live on. Polls until there are none or `patience_s` is over.

    token: a text every process of the run carried in its environment. mark: a text in the arguments, "" for none; then
    only processes started after `since` (clock ticks since boot) count.
    """
    return _until_empty(lambda: _living(seen, token, mark, since), patience_s)


def debris(seen: Seen, before: HostState, state_dir: Path, patience_s: float = LEFTOVER_S) -> list[str]:
    """Cgroups of the run that still exist, and mounts, IPC objects and files that were not there before.

    A guard's cgroups are named after its pid, so that a run too short for the watcher is looked after as well.
    """
    def look() -> list[str]:
        after = host_state(state_dir)
        named = {p for top in _cgroup_mounts().values() for p in (top / OURS).glob(f"{seen.guard}-*")} if seen.guard else set()
        found = [f"cgroup {path}" for path in sorted(seen.cgroups | named) if path.exists()]
        found += [f"mount {m}" for m in sorted(after.mounts - before.mounts)]
        found += [f"ipc object {i}" for i in sorted(after.ipc - before.ipc)]
        found += [f"file {f}" for f in sorted(after.files - before.files)]
        return found

    return _until_empty(look, patience_s)


def ticks_now() -> int:
    """Now, in the unit of a process's start time."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _until_empty(look: Callable[[], list[str]], patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    while True:
        found = look()
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(SAMPLE_S)


def _living(seen: Seen, token: str, mark: str, since: int) -> list[str]:
    found = []
    own = os.getpid()
    for pid, (_, start) in _parents().items():
        if pid == own:
            continue
        base = _PROC / str(pid)
        argv = _read(base / "cmdline")
        zombie = not argv and _state(base) == "Z"
        why = ""
        if Task(pid, start) in seen.tasks and not zombie:
            why = "descendant"
        elif mark and start >= since and mark.encode() in argv:
            why = "mark"
        elif token and token.encode() in _read(base / "environ"):
            why = "environment"
        elif seen.cgroups and _cgroups_of(pid, _cgroup_mounts()) & seen.cgroups:
            why = "cgroup"
        if why:
            found.append(f"process {pid} ({why}): {argv[:120]!r}")
    return found


def _parents() -> dict[int, tuple[int, int]]:
    """pid -> (parent, start) of every process there is."""
    table = {}
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        fields = _stat(_PROC / name)
        if fields is not None:
            table[int(name)] = (int(fields[1]), int(fields[19]))
    return table


def _stat(base: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: the name before it may hold blanks and brackets (proc(5))."""
    text = _read(base / "stat")
    return text.rpartition(b")")[2].decode("ascii").split() if text else None


def _state(base: Path) -> str:
    fields = _stat(base)
    return fields[0] if fields else ""


def _resident(pid: int) -> int:
    match = re.search(rb"^VmRSS:\s+(\d+) kB", _read(_PROC / str(pid) / "status"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _cgroups_of(pid: int, mounts: dict[str, Path]) -> set[Path]:
    """The directories of a process's cgroups that are the product's."""
    found = set()
    for line in _read(_PROC / str(pid) / "cgroup").decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if OURS in path and "/../" not in path:
            for controller in controllers.split(","):
                if controller in mounts:
                    found.add(mounts[controller] / path.lstrip("/"))
    return found


def _cgroup_mounts() -> dict[str, Path]:
    """Controller ("" for version 2) -> mount point."""
    mounts: dict[str, Path] = {}
    for line in _lines(_PROC / "self/mounts"):
        _, point, kind, options = line.split(" ")[:4]
        if kind == "cgroup2":
            mounts.setdefault("", Path(point))
        elif kind == "cgroup":
            for option in options.split(","):
                mounts.setdefault(option, Path(point))
    return mounts


def _read(path: Path) -> bytes:
    """b"" when the process behind `path` is gone or not ours to read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _lines(path: Path) -> list[str]:
    return _read(path).decode("utf-8", "replace").splitlines()
