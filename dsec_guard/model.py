"""Types that all layers share: what the kernel saw, what detectors claim, what the trainer gets.

Everything here is frozen, holds plain values and imports nothing of ours, so that the pure-Python client can use it on
Python 3.10. Text that an agent chose is kept *escaped*: see `escape_bytes`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class Class(str, Enum):
    """What a finding accuses the agent of; the order decides ties between incidents of equal weight."""

    ESCAPE_ATTEMPT = "escape_attempt"
    ANSWER_PEEK = "answer_peek"
    TAMPER = "tamper"
    EXFILTRATION = "exfiltration"
    SYSTEM_CRASH = "system_crash"


class VerdictClass(str, Enum):
    """A finding's class, or what is said when there is none."""

    ESCAPE_ATTEMPT = "escape_attempt"
    ANSWER_PEEK = "answer_peek"
    TAMPER = "tamper"
    EXFILTRATION = "exfiltration"
    SYSTEM_CRASH = "system_crash"
    CLEAN = "clean"
    INCONCLUSIVE = "inconclusive"


class Outcome(str, Enum):
    """How far it got; later members are worse."""

    ATTEMPTED = "attempted"
    SUCCEEDED = "succeeded"
    INTEGRATED = "integrated"


OUTCOME_RANK: Mapping[Outcome, int] = {Outcome.ATTEMPTED: 0, Outcome.SUCCEEDED: 1, Outcome.INTEGRATED: 2}


class Validity(str, Enum):
    """Whether a sample may be trained on, and whose fault it is if not."""

    OK = "ok"
    AGENT_FAULT = "agent_fault"
    INFRA_FAULT = "infra_fault"
    UNKNOWN = "unknown"


class Level(str, Enum):
    """How closely the kernel watches: `cold` costs nothing per system call, `full` sees every attempt."""

    COLD = "cold"
    FULL = "full"


class Phase(str, Enum):
    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"


class ExitReason(str, Enum):
    """Why the command ended: the authority over any exit status."""

    EXITED = "exited"
    SIGNAL = "signal"
    WALL_LIMIT = "wall_limit"
    MEMORY_LIMIT = "memory_limit"
    KILLED_BY_POLICY = "killed_by_policy"
    NOT_FOUND = "not_found"
    NOT_EXECUTABLE = "not_executable"
    GUARD_ERROR = "guard_error"
    INTERRUPTED = "interrupted"


class LayerState(str, Enum):
    ENFORCED = "enforced"
    WEAKENED = "weakened"
    MISSING = "missing"


@dataclass(frozen=True)
class Layer:
    """One binding or watching layer of a box and what became of it on this host.

    optional: its absence is listed, but nothing counts on it.
    """

    name: str
    state: LayerState
    detail: str = ""
    optional: bool = False


def severity_word(severity: int) -> str:
    """`none` for 0, then low (1-3), medium (4-6), high (7-8), critical (9-10)."""
    if not 0 <= severity <= 10:
        raise ValueError(f"severity must be 0..10, got {severity}")
    for top, word in ((0, "none"), (3, "low"), (6, "medium"), (8, "high")):
        if severity <= top:
            return word
    return "critical"


def escape_bytes(raw: bytes) -> str:
    r"""Bytes an agent chose -> text, reversibly: UTF-8 stays, a backslash doubles, any other byte becomes `\xNN`.

    Control characters stay as they are (JSON escapes them); strip them with `printable` before a terminal.
    """
    if b"\\" not in raw:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            pass  # the slow way below
    out: list[str] = []
    for ch in raw.decode("utf-8", "surrogateescape"):
        if ch == "\\":
            out.append("\\\\")
        elif "\udc80" <= ch <= "\udcff":
            out.append(f"\\x{ord(ch) - 0xDC00:02x}")
        else:
            out.append(ch)
    return "".join(out)


_ESCAPE = re.compile(r"\\(\\|x[0-9a-f]{2})")


def unescape_bytes(text: str) -> bytes:
    r"""The inverse of `escape_bytes`."""

    def one(match: re.Match[str]) -> str:
        body = match.group(1)
        return "\\" if body == "\\" else chr(0xDC00 + int(body[1:], 16))

    return _ESCAPE.sub(one, text).encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """`text` without anything a terminal would act on: C0, DEL, C1, bidirectional and other format characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


# --------------------------------------------------------------------------------------------------------- events


class Source(str, Enum):
    """Which sensor saw it."""

    SYS_EXIT = "sys_exit"        # tp_btf/sys_exit, level full
    NOTIFY = "notify"            # seccomp user notification of a call that is refused anyway, level cold
    TRACEPOINT = "tracepoint"    # cold tracepoints
    CGROUP = "cgroup"            # cgroup-attached BPF programs
    FANOTIFY = "fanotify"        # permission event on a decoy or a protected file
    COUNTER = "counter"          # cgroup, store and stdio counters read by the guard
    INSPECTION = "inspection"    # the guard's own look at what a box left behind
    GUARD = "guard"              # the guard's own actions


class Abi(str, Enum):
    X64 = "x64"
    X32 = "x32"
    I386 = "i386"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fact about one box.

    seq: position in the box's single ingest order, from 1. at_ns: nanoseconds since the box started (CLOCK_MONOTONIC).
    exec: index of the command within the box, 0 = box set-up. tgid, tid, ppid: host numbers; 0 = not a task's act.
    uid: as seen inside the box. comm: the task's name (agent-chosen, escaped).
    """

    kind: ClassVar[str] = "event"
    seq: int = 0
    at_ns: int = 0
    phase: Phase = Phase.AGENT
    exec: int = 1
    tgid: int = 0
    tid: int = 0
    ppid: int = 0
    uid: int = 0
    comm: str = ""
    source: Source = Source.GUARD

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values, `kind` first; the inverse is `event_from_record`."""
        record: dict[str, Any] = {"kind": self.kind}
        for f in dataclasses.fields(self):
            record[f.name] = _plain(getattr(self, f.name))
        return record


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


class _WithResult:
    ret: int

    @property
    def errno(self) -> int:
        """0 where the call succeeded, else the positive error number."""
        return -self.ret if -4096 < self.ret < 0 else 0

    @property
    def ok(self) -> bool:
        return not -4096 < self.ret < 0


@dataclass(frozen=True, kw_only=True)
class SyscallSeen(_WithResult, Event):
    """A watched system call with its real result (level full), or a refused one (notify).

    name: x86-64 name, also for the i386 and x32 calls where the table knows it, else `nr_<n>`. args: six raw values.
    path: the path argument as resolved text: absolute, lexically normalised, made absolute by the task's working
    directory or directory descriptor, with leading `/proc/self/root`-like parts kept as given in `raw_path`.
    path2: a second path. address: for connect/sendto/bind: `unix:/path`, `unix:@name`, `inet:1.2.3.4:80`,
    `inet6:[::1]:80`, `vsock:cid:port`, `af_<n>`. data: first bytes of a buffer argument (sendto, write to a refused
    descriptor), hex, at most 256 bytes. Memory arguments may change after the kernel read them: intent, never effect.
    flags: of the call, also where they sit in memory (clone3, openat2). program32: the i386 call of a program that is a
    32-bit one as a whole, which cannot call otherwise.
    """

    kind: ClassVar[str] = "syscall"
    name: str
    nr: int
    abi: Abi = Abi.X64
    args: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    ret: int = 0
    path: str = ""
    raw_path: str = ""
    path2: str = ""
    address: str = ""
    data: str = ""
    flags: int = 0
    program32: bool = False


@dataclass(frozen=True, kw_only=True)
class FileOpened(_WithResult, Event):
    """A protected or decoy object was opened (matched by device and inode, whatever name was used), or would have been.

    object: the policy's name of the object (its canonical path inside the box, or a decoy's name). label: one of
    `hidden`, `harness`, `environment_state`, `decoy`, `kernel`, `package`, and in a sealed repository `later_commit`,
    `later_content`, `whole_tree`. decoy: nothing real stood there.
    path: the name used, as far as known. from_exec: opened by exec.
    """

    kind: ClassVar[str] = "file_opened"
    object: str
    label: str
    decoy: bool = False
    path: str = ""
    for_read: bool = True
    for_write: bool = False
    from_exec: bool = False
    ret: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessExec(Event):
    """exec succeeded. exe: the kernel's file name. argv: at most 64 words / 512 bytes. memfd: no name in the file system."""

    kind: ClassVar[str] = "exec"
    exe: str
    argv: tuple[str, ...] = ()
    memfd: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskCreated(Event):
    """fork, vfork, clone, or a thread. child_tgid equals tgid for a thread."""

    kind: ClassVar[str] = "task"
    child_tgid: int
    child_tid: int
    flags: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessExit(Event):
    """The last thread of a process ended. code 0..255; signal 0 unless a signal ended it."""

    kind: ClassVar[str] = "exit"
    code: int = 0
    signal: int = 0


@dataclass(frozen=True, kw_only=True)
class SignalSent(Event):
    """A signal generated by the task (comm, tgid), seen by the kernel. target_in_box: the target belongs to the same box."""

    kind: ClassVar[str] = "signal"
    signal: int
    target_tgid: int
    target_in_box: bool = True
    target_is_init: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkAttempt(_WithResult, Event):
    """A cgroup hook saw connect, sendmsg, bind or socket. ret: 0 allowed, else the negative error it was refused with.

    op: connect | sendmsg | bind | socket. family, sock_type, protocol: numbers of socket(2). address: text, no brackets.
    """

    kind: ClassVar[str] = "network"
    op: str
    family: int
    sock_type: int = 0
    protocol: int = 0
    address: str = ""
    port: int = 0
    ret: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceAttempt(_WithResult, Event):
    """cgroup device hook. access: letters of r, w, m(knod). dev_type: block | char."""

    kind: ClassVar[str] = "device"
    dev_type: str
    major: int
    minor: int
    access: str
    ret: int = 0


@dataclass(frozen=True, kw_only=True)
class SysctlAttempt(_WithResult, Event):
    kind: ClassVar[str] = "sysctl"
    name: str
    write: bool = False
    ret: int = 0


@dataclass(frozen=True, kw_only=True)
class CapabilityRefused(Event):
    """cap_capable said no. Common in honest work: context, never evidence by itself."""

    kind: ClassVar[str] = "capability"
    cap: int


@dataclass(frozen=True, kw_only=True)
class IoUringUsed(Event):
    """op: create | submit. opcode: of a submitted request, -1 for create."""

    kind: ClassVar[str] = "io_uring"
    op: str
    opcode: int = -1


@dataclass(frozen=True, kw_only=True)
class CgroupMoved(Event):
    """A task of the box was attached to another cgroup."""

    kind: ClassVar[str] = "cgroup_move"
    destination: str


@dataclass(frozen=True, kw_only=True)
class OomKilled(Event):
    kind: ClassVar[str] = "oom"
    victim_tgid: int


@dataclass(frozen=True, kw_only=True)
class LimitHit(Event):
    """A limit of the box was reached.

    limit: memory | pids | disk | files | output | wall | cpu | open_files | fsize | events. value: the limit, peak: the
    highest use seen, count: how often it was refused; units: bytes for memory, disk, output, fsize; tasks, files,
    descriptors; milliseconds for wall and cpu. own: the box's own limit (False: the host's).
    detail: a word such as the stream's name.
    """

    kind: ClassVar[str] = "limit"
    limit: str
    value: int = 0
    peak: int = 0
    count: int = 1
    own: bool = True
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class UsageSummary(Event):
    """What the box used, read once at its end; zero where the host cannot tell."""

    kind: ClassVar[str] = "usage"
    wall_ms: int = 0
    cpu_ms: int = 0
    memory_peak: int = 0
    pids_peak: int = 0
    forks: int = 0
    disk_bytes: int = 0
    files: int = 0
    output_bytes: int = 0
    shm_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FileChanged(Event):
    """Found by the guard's own inspection of the box's writable layers after the agent's processes are gone.

    path: inside the box. change: added | modified | removed | retyped (content-equal rewrites are not listed).
    ftype: file | dir | symlink | fifo | socket | char | block. digest: sha256 hex of a regular file, "" beyond 64 MiB.
    link_target: of a symbolic link. place: workspace | store. head: the first 4096 bytes of a text file of the kinds
    that interpreters and tools load at start (hooks, *.pth, conftest.py, *.cfg ...), escaped, else "".
    traits: facts the inspector worked out that detectors may judge, for instance `in_venv`, `executable`.
    """

    kind: ClassVar[str] = "file_changed"
    path: str
    change: str
    ftype: str = "file"
    mode: int = 0
    size: int = 0
    link_target: str = ""
    digest: str = ""
    place: str = "workspace"
    head: str = ""
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceFact(Event):
    """A line of a Python file that the agent handed in, parsed by the guard after the run and never executed.

    path: inside the box. what: exit | equal | patch | report | clock | frames | heap | trace | memory | opaque |
    hidden_read | hidden_write. sure: the form has no honest use known. detail: for people.
    """

    kind: ClassVar[str] = "source_fact"
    path: str
    line: int
    what: str
    sure: bool = True
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class OutputRefused(Event):
    """Collection or write-back left something out. why: a short fixed word (link_outside, device, fifo, hardlink ...)."""

    kind: ClassVar[str] = "output_refused"
    path: str
    why: str
    link_target: str = ""
    step: str = "collect"


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Event):
    kind: ClassVar[str] = "phase"
    previous: str = ""


@dataclass(frozen=True, kw_only=True)
class EvidenceLost(Event):
    """ring: evidence | context | fanotify | notify | inspection (of what a box left behind). over_budget: the box's own
    event budget was used up."""

    kind: ClassVar[str] = "lost"
    ring: str
    count: int
    over_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class CallsCounted(Event):
    """Beyond the first few, calls of one kind are only counted: how many of `name` ended with `ret`."""

    kind: ClassVar[str] = "counted"
    name: str
    ret: int
    count: int


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    kind: ClassVar[str] = "end"
    reason: ExitReason
    code: int | None = None
    signal: int | None = None


EVENT_TYPES: Mapping[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        SyscallSeen, FileOpened, ProcessExec, TaskCreated, ProcessExit, SignalSent, NetworkAttempt, DeviceAttempt,
        SysctlAttempt, CapabilityRefused, IoUringUsed, CgroupMoved, OomKilled, LimitHit, UsageSummary, FileChanged,
        SourceFact, OutputRefused, PhaseChanged, EvidenceLost, CallsCounted, RunEnded,
    )
}

_ENUM_FIELDS: Mapping[str, type[Enum]] = {"phase": Phase, "source": Source, "abi": Abi, "reason": ExitReason}


def event_from_record(record: Mapping[str, Any]) -> Event:
    """Rebuild an event from `Event.to_record`. Raises KeyError/TypeError/ValueError on anything else."""
    values = dict(record)
    cls = EVENT_TYPES[values.pop("kind")]
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := set(values) - known:
        raise ValueError(f"unknown fields {sorted(unknown)} in a {cls.kind} event")
    for name, enum in _ENUM_FIELDS.items():
        if name in values and name in known:
            values[name] = enum(values[name])
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)


# ------------------------------------------------------------------------------------------- findings and verdicts


@dataclass(frozen=True)
class ProcessInfo:
    """Who did it. ancestry: executables from the parent upwards to the box's first command."""

    exe: str = ""
    argv: tuple[str, ...] = ()
    pid: int = 0
    ancestry: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A detector's claim about one or more events. severity 1..10; object: what was acted on, as inside the box.

    process: who did it, where that was known better when the event came than at the box's end.
    """

    rule: str
    cls: Class
    outcome: Outcome
    severity: int
    evidence: tuple[Event, ...]
    reason: str
    object: str = ""
    references: tuple[str, ...] = ()
    accident: bool = False
    allow_hint: str = ""
    process: ProcessInfo | None = None


@dataclass(frozen=True)
class Incident:
    """Findings of one rule on one object, as recorded. id: digest of its evidence, stable across replays.

    at_ns, phase, exec: of the first event. penalty: what this incident is worth by the policy; counted: whether it is
    the one of its class that entered the sum. rewarded: False for held-out detectors.
    """

    id: str
    cls: Class
    rule: str
    outcome: Outcome
    severity: int
    at_ns: int
    phase: Phase
    exec: int
    process: ProcessInfo
    object: str
    evidence: tuple[Event, ...]
    explanation: str
    references: tuple[str, ...] = ()
    penalty: float = 0.0
    counted: bool = False
    accident: bool = False
    rewarded: bool = True
    occurrences: int = 1


@dataclass(frozen=True)
class Verdict:
    """The box as a whole. complete: every sensor that an enabled detector needs was there and lost nothing."""

    cls: VerdictClass
    outcome: Outcome | None
    severity: int
    validity: Validity
    complete: bool
    reasons: tuple[str, ...] = ()
    level: Level = Level.FULL


@dataclass(frozen=True)
class RewardInfo:
    """Fixed numeric keys for every box, zeros included; see `as_dict`."""

    penalty: float = 0.0
    valid: int = 1
    escape: int = 0
    peek: int = 0
    tamper: int = 0
    exfil: int = 0
    crash: int = 0
    severity: int = 0
    incidents: int = 0
    events_lost: int = 0
    would_be_penalty: float = field(default=0.0, metadata={"key": False})

    def as_dict(self) -> dict[str, float | int]:
        """`dsec_penalty, dsec_valid, dsec_escape ... dsec_events_lost`: the same ten keys always."""
        return {f"dsec_{f.name}": getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("key", True)}
