"""What detectors see beside the event itself: the box's facts and its processes, both made from the events alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec_guard.detect.facts import BoxFacts
from dsec_guard.detect.paths import normalise
from dsec_guard.model import (
    Event,
    FileChanged,
    FileOpened,
    OutputRefused,
    ProcessExec,
    ProcessExit,
    ProcessInfo,
    SourceFact,
    SyscallSeen,
    TaskCreated,
)

#: More processes than this are not remembered one by one: a fork bomb must not become the guard's memory bomb.
MAX_PROCESSES = 50_000
MAX_ANCESTRY = 32

O_WRONLY_OR_RDWR = 3
O_CREAT = 0x40
O_TRUNC = 0x200
O_DIRECTORY = 0x10000
O_PATH = 0x200000
CLONE_THREAD = 0x10000

#: Where the flags of an opening call sit among its arguments; openat2 keeps them in memory (`flags` of the event).
OPEN_FLAGS_AT = {"open": 1, "openat": 2, "open_by_handle_at": 2}
OPEN_CALLS = frozenset({"open", "openat", "openat2", "creat"})

#: Calls that change what a path names, and which of their two paths is changed.
CHANGES_FIRST = frozenset({
    "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat",
    "truncate", "utime", "utimes", "utimensat", "futimesat", "setxattr", "lsetxattr", "setxattrat", "removexattr",
    "lremovexattr", "removexattrat", "mknod", "mknodat", "fchmod", "fchown", "ftruncate", "fsetxattr", "fremovexattr",
    "write", "pwrite64", "writev", "fallocate", "symlink", "symlinkat",  # of a symlink, path is the link, path2 its text
})
CHANGES_SECOND = frozenset({"link", "linkat"})
CHANGES_BOTH = frozenset({"rename", "renameat", "renameat2"})


def signed32(value: int) -> int:
    """A raw register as the C `int` the kernel takes from it."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def open_flags(event: SyscallSeen) -> int:
    """Flags of an opening call, 0 for other calls."""
    if event.name == "creat":
        return 1 | O_CREAT | O_TRUNC
    if event.name == "openat2":
        return event.flags
    at = OPEN_FLAGS_AT.get(event.name)
    return event.args[at] if at is not None else 0


def asks_to_write(event: Event) -> bool:
    """An opening that could change the object, or a call that changes what a path names."""
    if isinstance(event, FileOpened):
        return event.for_write
    if not isinstance(event, SyscallSeen):
        return False
    if event.name in CHANGES_FIRST or event.name in CHANGES_SECOND or event.name in CHANGES_BOTH:
        return True
    flags = open_flags(event)
    return bool(flags & (O_WRONLY_OR_RDWR | O_CREAT | O_TRUNC)) and not flags & O_PATH


@dataclass
class Process:
    """One process of the box, alive or ended. Numbers are host tgids; depth counts forks since the last exec above it."""

    tgid: int
    parent: int = 0
    exe: str = ""
    argv: tuple[str, ...] = ()
    memfd: bool = False
    has_execed: bool = False
    exec_index: int = 0
    born_seq: int = 0
    born_ns: int = 0
    ended_seq: int = 0
    ended_ns: int = 0
    code: int = 0
    signal: int = 0
    depth: int = 0
    children: int = 0
    children_execed: int = 0
    threads: int = 0


@dataclass
class View:
    """The box so far. `observe` takes each event before the detectors see it."""

    facts: BoxFacts
    processes: dict[int, Process] = field(default_factory=dict)
    first_tgid: int = 0
    alive: int = 0
    alive_peak: int = 0
    created: int = 0
    first_seq: int = 0
    last_ns: int = 0
    _path_of: Event | None = None
    _path: str = ""
    _path2: str = ""
    _writes: bool = False
    _written: tuple[str, ...] | None = None

    def observe(self, event: Event) -> None:
        kind = event.kind
        if kind == "task":
            assert isinstance(event, TaskCreated)
            self._task(event)
        elif kind == "exec":
            assert isinstance(event, ProcessExec)
            self._exec(event)
        elif kind == "exit":
            assert isinstance(event, ProcessExit)
            self._exit(event)
        if event.at_ns > self.last_ns:
            self.last_ns = event.at_ns

    def _task(self, event: TaskCreated) -> None:
        maker = self._known(event)
        self.created += 1
        if event.child_tgid == event.tgid:
            maker.threads += 1
            return
        maker.children += 1
        if len(self.processes) >= MAX_PROCESSES:
            return
        self.processes[event.child_tgid] = Process(
            event.child_tgid, event.tgid, maker.exe, maker.argv, maker.memfd, exec_index=event.exec,
            born_seq=event.seq, born_ns=event.at_ns, depth=maker.depth + 1,
        )
        self.alive += 1
        self.alive_peak = max(self.alive_peak, self.alive)

    def _exec(self, event: ProcessExec) -> None:
        process = self._known(event)
        if not self.first_tgid and event.exec >= 1:
            self.first_tgid = event.tgid
        if not process.has_execed and (parent := self.processes.get(process.parent)) is not None:
            parent.children_execed += 1
        process.exe, process.argv, process.memfd = event.exe, event.argv, event.memfd
        process.has_execed, process.depth = True, 0

    def _exit(self, event: ProcessExit) -> None:
        process = self._known(event)
        if not process.ended_seq:
            self.alive = max(0, self.alive - 1)
        process.ended_seq, process.ended_ns = event.seq, event.at_ns
        process.code, process.signal = event.code, event.signal

    def _known(self, event: Event) -> Process:
        process = self.processes.get(event.tgid)
        if process is None:
            process = Process(event.tgid, event.ppid, exec_index=event.exec, born_seq=event.seq, born_ns=event.at_ns)
            if len(self.processes) < MAX_PROCESSES:
                self.processes[event.tgid] = process
        return process

    def process(self, event: Event) -> Process:
        """The process that acted; one without an earlier event is known by its task name alone."""
        found = self.processes.get(event.tgid)
        return found if found is not None else Process(event.tgid, event.ppid, born_seq=event.seq, born_ns=event.at_ns)

    def ancestry(self, process: Process) -> tuple[str, ...]:
        """Executables from the parent upwards; a loop or an unknown parent ends the list."""
        out: list[str] = []
        seen = {process.tgid}
        at = self.processes.get(process.parent)
        while at is not None and at.tgid not in seen and len(out) < MAX_ANCESTRY:
            seen.add(at.tgid)
            if at.exe:
                out.append(at.exe)
            at = self.processes.get(at.parent)
        return tuple(out)

    def info(self, event: Event) -> ProcessInfo:
        """Who did it, for an incident. Without an exec event the task's name stands in for the executable."""
        process = self.process(event)
        return ProcessInfo(process.exe or event.comm, process.argv, event.tgid, self.ancestry(process))

    def path(self, event: Event) -> str:
        """The event's path, normalised; what was opened goes before how it was named."""
        if event is not self._path_of:
            self._fill(event)
        return self._path

    def path2(self, event: Event) -> str:
        if event is not self._path_of:
            self._fill(event)
        return self._path2

    def _fill(self, event: Event) -> None:
        self._path_of, self._path, self._path2 = event, "", ""
        self._writes, self._written = asks_to_write(event), None
        if isinstance(event, SyscallSeen):
            self._path, self._path2 = normalise(event.path), normalise(event.path2)
        elif isinstance(event, FileOpened):
            self._path = normalise(event.object or event.path)
        elif isinstance(event, (FileChanged, SourceFact, OutputRefused)):
            self._path = normalise(event.path)

    def writes(self, event: Event) -> bool:
        """`asks_to_write`, asked once per event."""
        if event is not self._path_of:
            self._fill(event)
        return self._writes

    def written(self, event: Event) -> tuple[str, ...]:
        """Paths the event would change; empty for reading."""
        if not self.writes(event):
            return ()
        if self._written is None:
            both: tuple[str, ...] = (self._path, self._path2)
            name = event.name if isinstance(event, SyscallSeen) else ""
            if name not in CHANGES_BOTH:
                both = both[1:] if name in CHANGES_SECOND else both[:1]
            self._written = tuple(p for p in both if p)
        return self._written
