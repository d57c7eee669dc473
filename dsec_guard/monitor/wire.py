"""Bytes of bpf/dg_events.h <-> Python: ring records decoded to frozen dataclasses, map keys and values packed.

tests/unit/test_wire.py compiles the header and compares every offset and size with the tables here. Records come from the
kernel but their text and buffers come from the agent; a record that does not fit its own lengths raises WireError.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from dsec_guard.errors import MonitorError

__all__ = [
    "LAYOUTS",
    "Kind",
    "RawCall",
    "RawCap",
    "RawCgroup",
    "RawDevice",
    "RawExec",
    "RawExit",
    "RawHead",
    "RawNet",
    "RawOom",
    "RawRecord",
    "RawSignal",
    "RawSysctl",
    "RawTask",
    "RawUring",
    "RecordFlag",
    "Why",
    "WireError",
    "decode",
    "frames",
]


class WireError(MonitorError):
    """A record does not have the form dg_events.h describes: kernel object and Python package do not match."""


class Kind(IntEnum):
    CALL = 1
    FILE = 2
    EXEC = 3
    TASK = 4
    EXIT = 5
    SIGNAL = 6
    NET = 7
    DEVICE = 8
    SYSCTL = 9
    CAP = 10
    URING = 11
    CGROUP = 12
    OOM = 13


class RecordFlag(IntFlag):
    CRITICAL = 1
    TRUNCATED = 2
    DETACHED = 4
    UNREADABLE = 8
    PROGRAM32 = 16


class Why(IntEnum):
    CLASS = 0
    REFUSED = 1
    ABSENT = 2
    RESOURCE = 3
    ABI = 4
    UNKNOWN = 5
    PROTECTED = 6
    SLOT = 7
    EXEC = 8


TAIL_MAX = 2048
EXEC_TAIL_MAX = 256 + 512
WATCHES = 24
WATCH_BYTES = 64
SYSCALLS = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """One C struct: a struct module format without padding of its own, and the names of its fields in order."""

    name: str
    format: str
    fields: tuple[str, ...]

    @property
    def size(self) -> int:
        return struct.calcsize(self.format)

    def offsets(self) -> dict[str, int]:
        """Field -> offset, worked out from the format alone."""
        found: dict[str, int] = {}
        at = 0
        codes = _split(self.format)
        for name in self.fields:
            found[name] = at
            count = _ARRAYS.get((self.name, name), 1)
            for _ in range(count):
                at += struct.calcsize("<" + codes.pop(0))
        if codes:
            raise AssertionError(f"{self.name}: {codes} without a name")
        return found


def _split(fmt: str) -> list[str]:
    """`<QQ2H16s` -> Q Q H H 16s."""
    out: list[str] = []
    digits = ""
    for ch in fmt.lstrip("<"):
        if ch.isdigit():
            digits += ch
        elif ch in "sx":
            out.append(digits + ch)
            digits = ""
        else:
            out.extend([ch] * int(digits or 1))
            digits = ""
    return out


_ARRAYS: dict[tuple[str, str], int] = {("dg_call", "args"): 6}

_HEAD = Layout(
    "dg_head",
    "<QQHHIIIIIII16s",
    ("at_ns", "box", "kind", "flags", "size", "exec", "phase", "tgid", "tid", "ppid", "uid", "comm"),
)


def _record(name: str, fmt: str, fields: str) -> Layout:
    return Layout(name, f"<{_HEAD.size}s{fmt}", ("head", *fields.split()))


_CALL = _record(
    "dg_call",
    "q6QQQIBBHI6H",
    "ret args extra object nr abi cls why file_flags len_base len_path len_base2 len_path2 len_addr len_data",
)
_EXEC = _record("dg_exec", "IHH", "nlink len_file len_argv")
_TASK = _record("dg_task", "QIIII", "clone_flags child_tgid child_tid child_exec pad")
_EXIT = _record("dg_exit", "II", "status pad")
_SIGNAL = _record("dg_signal", "iiIBBBB", "sig code target_tgid in_box is_init from_kernel result")
_NET = _record("dg_net", "IIII16sIi", "op family type protocol addr port ret")
_DEVICE = _record("dg_device", "IIIIiI", "dev_type access major minor ret pad")
_SYSCTL = _record("dg_sysctl", "iI96s", "ret write name")
_CAP = _record("dg_cap", "II", "cap pad")
_URING = _record("dg_uring", "II", "op opcode")
_CGROUP = _record("dg_cgroup", "QII128s", "destination moved_tgid len_path path")
_OOM = _record("dg_oom", "II", "victim_tgid pad")

BOX = Layout(
    "dg_box",
    "<QQQIIIIII",
    ("event_budget", "context_budget", "reserved_budget", "level", "network", "phase", "init_tgid", "live", "watches"),
)
STATS = Layout(
    "dg_stats",
    "<18Q",
    (
        "events", "context", "emitted", "lost_evidence", "lost_context", "over_budget", "suppressed", "reserved",
        "protected_seen", "forks", "threads", "execs", "exits", "signals", "exec_counter", "caps_seen", "count_keys",
        "calls_other",
    ),
)  # fmt: skip
GLOBAL = Layout("dg_global", "<QQQQ", ("lost_evidence", "lost_context", "protected_objects", "strayed"))
OBJECT_KEY = Layout("dg_object_key", "<QQ", ("dev", "ino"))
COUNT_KEY = Layout("dg_count_key", "<QIi", ("box", "nr", "ret"))

LAYOUTS: tuple[Layout, ...] = (
    _HEAD, _CALL, _EXEC, _TASK, _EXIT, _SIGNAL, _NET, _DEVICE, _SYSCTL, _CAP, _URING, _CGROUP, _OOM, BOX, STATS, GLOBAL,
    OBJECT_KEY, COUNT_KEY,
)  # fmt: skip
"""What the test compares. dg_call and dg_exec end with `tail`, of TAIL_MAX and EXEC_TAIL_MAX bytes."""


@dataclass(frozen=True, slots=True)
class RawHead:
    """at_ns: CLOCK_MONOTONIC. box: id. uid: in the initial user namespace. comm: bytes without the padding."""

    at_ns: int
    box: int
    kind: Kind
    flags: RecordFlag
    size: int
    exec: int
    phase: int
    tgid: int
    tid: int
    ppid: int
    uid: int
    comm: bytes


@dataclass(frozen=True, slots=True)
class RawCall:
    """DG_CALL and DG_FILE. nr: as the kernel saw it, x32 bit included. abi: 0 x64, 1 x32, 2 i386."""

    head: RawHead
    ret: int
    args: tuple[int, ...]
    extra: int
    object: int
    nr: int
    abi: int
    cls: int
    why: Why
    file_flags: int
    base: bytes
    path: bytes
    base2: bytes
    path2: bytes
    addr: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class RawExec:
    head: RawHead
    nlink: int
    file: bytes
    argv: bytes


@dataclass(frozen=True, slots=True)
class RawTask:
    head: RawHead
    clone_flags: int
    child_tgid: int
    child_tid: int
    child_exec: int


@dataclass(frozen=True, slots=True)
class RawExit:
    head: RawHead
    status: int


@dataclass(frozen=True, slots=True)
class RawSignal:
    head: RawHead
    sig: int
    code: int
    target_tgid: int
    in_box: bool
    is_init: bool
    from_kernel: bool
    result: int


@dataclass(frozen=True, slots=True)
class RawNet:
    head: RawHead
    op: int
    family: int
    type: int
    protocol: int
    addr: bytes
    port: int
    ret: int


@dataclass(frozen=True, slots=True)
class RawDevice:
    head: RawHead
    dev_type: int
    access: int
    major: int
    minor: int
    ret: int


@dataclass(frozen=True, slots=True)
class RawSysctl:
    head: RawHead
    ret: int
    write: int
    name: bytes


@dataclass(frozen=True, slots=True)
class RawCap:
    head: RawHead
    cap: int


@dataclass(frozen=True, slots=True)
class RawUring:
    head: RawHead
    op: int
    opcode: int


@dataclass(frozen=True, slots=True)
class RawCgroup:
    head: RawHead
    destination: int
    moved_tgid: int
    path: bytes


@dataclass(frozen=True, slots=True)
class RawOom:
    head: RawHead
    victim_tgid: int


RawRecord = (
    RawCall
    | RawExec
    | RawTask
    | RawExit
    | RawSignal
    | RawNet
    | RawDevice
    | RawSysctl
    | RawCap
    | RawUring
    | RawCgroup
    | RawOom
)

_unpack_head = struct.Struct(_HEAD.format).unpack_from
_body = {
    layout.name: struct.Struct("<" + layout.format[len(f"<{_HEAD.size}s") :])
    for layout in LAYOUTS
    if "head" in layout.fields
}
_call_body, _exec_body = _body["dg_call"], _body["dg_exec"]
_KINDS: dict[int, Kind] = {int(k): k for k in Kind}
_WHYS: dict[int, Why] = {int(w): w for w in Why}
_FRAME = struct.Struct("<II")


def frames(buffer: memoryview | bytes) -> Iterator[memoryview]:
    """Split what dg_ring_drain wrote into records."""
    view = memoryview(buffer)
    at, end = 0, len(view)
    while at < end:
        length, _ = _FRAME.unpack_from(view, at)
        at += _FRAME.size
        if at + length > end:
            raise WireError(f"a record of {length} bytes does not fit into what was drained")
        yield view[at : at + length]
        at += (length + 7) & ~7


def decode(record: memoryview | bytes) -> RawRecord:
    """One ring record. Raises WireError when it is not what dg_events.h describes."""
    try:
        return _decode(memoryview(record))
    except (struct.error, KeyError) as exc:
        raise WireError(f"undecodable record of {len(record)} bytes: {exc}") from exc


def _decode(view: memoryview) -> RawRecord:
    at_ns, box, kind, flags, size, exec_, phase, tgid, tid, ppid, uid, comm = _unpack_head(view)
    which = _KINDS[kind]
    head = RawHead(
        at_ns, box, which, RecordFlag(flags & 31), size, exec_, phase, tgid, tid, ppid, uid, comm.partition(b"\0")[0]
    )
    base = _HEAD.size
    if which in (Kind.CALL, Kind.FILE):
        (
            ret, a0, a1, a2, a3, a4, a5, extra, obj, nr, abi, cls, why, file_flags, l_base, l_path, l_base2, l_path2, l_addr,
            l_data,
        ) = _call_body.unpack_from(view, base)  # fmt: skip
        parts: list[bytes] = []
        at = base + _call_body.size
        for length in (l_base, l_path, l_base2, l_path2, l_addr, l_data):
            parts.append(bytes(view[at : at + length]))
            at += length
        if at > len(view):
            raise WireError(f"a call record of {len(view)} bytes claims {at}")
        return RawCall(head, ret, (a0, a1, a2, a3, a4, a5), extra, obj, nr, abi, cls, _WHYS[why], file_flags, *parts)
    if which is Kind.EXEC:
        nlink, l_file, l_argv = _exec_body.unpack_from(view, base)
        at = base + _exec_body.size
        if at + l_file + l_argv > len(view):
            raise WireError(f"an exec record of {len(view)} bytes claims {at + l_file + l_argv}")
        return RawExec(head, nlink, bytes(view[at : at + l_file]), bytes(view[at + l_file : at + l_file + l_argv]))
    if which is Kind.TASK:
        clone_flags, child_tgid, child_tid, child_exec, _ = _body["dg_task"].unpack_from(view, base)
        return RawTask(head, clone_flags, child_tgid, child_tid, child_exec)
    if which is Kind.EXIT:
        status, _ = _body["dg_exit"].unpack_from(view, base)
        return RawExit(head, status)
    if which is Kind.SIGNAL:
        sig, code, target, in_box, is_init, from_kernel, result = _body["dg_signal"].unpack_from(view, base)
        return RawSignal(head, sig, code, target, bool(in_box), bool(is_init), bool(from_kernel), result)
    if which is Kind.NET:
        return RawNet(head, *_body["dg_net"].unpack_from(view, base))
    if which is Kind.DEVICE:
        return RawDevice(head, *_body["dg_device"].unpack_from(view, base)[:5])
    if which is Kind.SYSCTL:
        ret, write, name = _body["dg_sysctl"].unpack_from(view, base)
        return RawSysctl(head, ret, write, name.partition(b"\0")[0])
    if which is Kind.CAP:
        return RawCap(head, _body["dg_cap"].unpack_from(view, base)[0])
    if which is Kind.URING:
        return RawUring(head, *_body["dg_uring"].unpack_from(view, base))
    if which is Kind.CGROUP:
        destination, moved, length, path = _body["dg_cgroup"].unpack_from(view, base)
        return RawCgroup(head, destination, moved, path[: min(length, len(path))])
    return RawOom(head, _body["dg_oom"].unpack_from(view, base)[0])


# ------------------------------------------------------------------------------------------------- maps, both ways


def pack_config(ancestor_level: int, fail_closed: bool, classes: list[int], classes_i386: list[int]) -> bytes:
    """struct dg_config, the contents of .rodata.dg."""
    if len(classes) != SYSCALLS or len(classes_i386) != SYSCALLS:
        raise ValueError("class tables have one entry per number")
    return struct.pack(f"<II{2 * SYSCALLS}I", ancestor_level, int(fail_closed), *classes, *classes_i386)


CONFIG_SIZE = struct.calcsize(f"<II{2 * SYSCALLS}I")


def fit_watches(prefixes: Iterable[bytes]) -> tuple[bytes, ...]:
    """At most WATCHES prefixes of at most WATCH_BYTES bytes that cover all of the given ones, and as little more as that
    allows: long ones are cut, ones below another are dropped, and the two most alike are joined until they fit.

    Raises: ValueError for a prefix that is not absolute.
    """
    found: list[bytes] = []
    for prefix in sorted(set(prefixes)):
        if not prefix.startswith(b"/"):
            raise ValueError(f"a watch prefix is an absolute path, got {prefix!r}")
        # In sorted order, a prefix of this one is the last that was kept.
        if not found or not prefix[:WATCH_BYTES].startswith(found[-1]):
            found.append(prefix[:WATCH_BYTES])
    while len(found) > WATCHES:
        shared = [_shared(a, b) for a, b in itertools.pairwise(found)]
        at = max(range(len(shared)), key=lambda i: len(shared[i]))
        found[at : at + 2] = [shared[at]]
    return tuple(found)


def _shared(one: bytes, other: bytes) -> bytes:
    """The bytes both start with; not whole path components, as the kernel does not compare those either."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return bytes(a for a, _ in same)


def pack_watches(fitted: tuple[bytes, ...]) -> bytes:
    """struct dg_watch of what `fit_watches` gave: the prefixes' bytes, then the masks that say which bytes count."""
    words = b"".join(prefix.ljust(WATCH_BYTES, b"\0") for prefix in fitted)
    masks = b"".join((b"\xff" * len(prefix)).ljust(WATCH_BYTES, b"\0") for prefix in fitted)
    half = WATCHES * WATCH_BYTES
    return words.ljust(half, b"\0") + masks.ljust(half, b"\0")


WATCH_SIZE = 2 * WATCHES * WATCH_BYTES
