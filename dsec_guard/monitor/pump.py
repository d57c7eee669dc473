"""From raw observations to the events detectors judge: one order, one spelling.

Takes kernel records (wire.py) and what the holder's threads saw (fanotify, seccomp notifications; any object with the
fields of `RawOpen` or `RawNotify`). Every byte here may be the agent's choice: nothing raises on odd content, all text is
escaped, paths are resolved by text only and never looked up.
"""

from __future__ import annotations

import errno
import ipaddress
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsec_guard.errors import MonitorError
from dsec_guard.host.syscall_table import X32_BIT, syscall_name
from dsec_guard.model import (
    Abi,
    CallsCounted,
    CapabilityRefused,
    CgroupMoved,
    DeviceAttempt,
    Event,
    EvidenceLost,
    FileOpened,
    IoUringUsed,
    NetworkAttempt,
    OomKilled,
    Phase,
    ProcessExec,
    ProcessExit,
    SignalSent,
    Source,
    SyscallSeen,
    SysctlAttempt,
    TaskCreated,
    escape_bytes,
)
from dsec_guard.monitor import wire
from dsec_guard.monitor.loader import PHASE_NUMBERS, BoxCounters

__all__ = ["BoxStream", "ProtectedObject", "Pump", "RawNotify", "RawOpen", "decode_address", "resolve_path"]

_PHASES = {number: Phase(name) for name, number in PHASE_NUMBERS.items()}
_ABIS = (Abi.X64, Abi.X32, Abi.I386)
_AUDIT_ARCH_I386 = 0x40000003
_OVERFLOW_UID = 65534
_UID_RANGE = 65536
_ARGV_WORDS = 64
_MOST_PROCESSES = 65536
_O_ACCMODE, _O_WRONLY, _O_RDWR, _O_PATH = 3, 1, 2, 0o10000000
_FAN_OPEN_EXEC_PERM = 0x40000
_PROC_SPECIAL = ("root", "cwd")

# Arguments that are text but no path: left as they are.
_PLAIN_PATH = frozenset({"fsopen", "fsconfig", "init_module", "delete_module", "request_key", "quotactl"})
_PLAIN_PATH2 = frozenset({
    "mount", "symlink", "symlinkat", "setxattr", "lsetxattr", "removexattr", "lremovexattr", "fsconfig", "request_key",
})  # fmt: skip
_FLAGS_ARG = {"open": 1, "openat": 2, "clone": 0, "unshare": 0, "umount2": 1, "mount": 3, "setns": 1, "personality": 0}
_CREAT_FLAGS = 0o1101  # O_CREAT | O_WRONLY | O_TRUNC
_ADDRESS_CALLS = frozenset({"connect", "bind", "sendto", "sendmsg", "sendmmsg"})


@dataclass(frozen=True)
class ProtectedObject:
    """What a protected inode is: the policy's name for it (its path inside), label and decoy as in FileOpened; dev and
    ino as stat(2) gives them, for observations that name the inode."""

    object: str
    label: str
    decoy: bool = False
    dev: int = 0
    ino: int = 0


class _Raw(Protocol):
    """at_ns: CLOCK_MONOTONIC. uid: in the initial user namespace. comm may be padded with NULs."""

    @property
    def box_id(self) -> int: ...
    @property
    def at_ns(self) -> int: ...
    @property
    def tgid(self) -> int: ...
    @property
    def tid(self) -> int: ...
    @property
    def ppid(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def comm(self) -> bytes: ...
    @property
    def nr(self) -> int: ...
    @property
    def args(self) -> Sequence[int]: ...
    @property
    def path(self) -> bytes: ...


class RawOpen(_Raw, Protocol):
    """fanotify saw a marked file being opened. nr, args: of the opener's call, 0 when not known."""

    @property
    def dev(self) -> int: ...
    @property
    def ino(self) -> int: ...
    @property
    def mask(self) -> int: ...


class RawNotify(_Raw, Protocol):
    """A refused call, from a seccomp notification. given_errno: positive. base: directory of a relative `path`.
    data: sockaddr of network calls, else the first bytes of the call's buffer."""

    @property
    def arch(self) -> int: ...
    @property
    def given_errno(self) -> int: ...
    @property
    def path2(self) -> bytes: ...
    @property
    def base(self) -> bytes: ...
    @property
    def data(self) -> bytes: ...


# ---------------------------------------------------------------------------------------------------------- text


def resolve_path(path: bytes, base: bytes = b"") -> str:
    """Absolute, lexically normalised, escaped. base: the directory of a relative path, and the working directory for
    `/proc/self/cwd`.

    `/proc/<self|thread-self|n>/[task/n/]root` counts as the root: all tasks of a box that an agent can look at share it.
    `..` above the root stays there. Symbolic links of the agent's own are not followed: effects are judged by inode.
    A relative path without a base keeps its text.
    """
    if not path:
        parts = _normal(base.split(b"/"), [], [])
    elif path.startswith(b"/"):
        here = _normal(base.split(b"/"), [], []) if base.startswith(b"/") else None
        parts = _normal(path.split(b"/"), [], here)
    elif base.startswith(b"/"):
        here = _normal(base.split(b"/"), [], [])
        parts = _normal(path.split(b"/"), list(here), here)
    else:
        return escape_bytes(path)
    return escape_bytes(b"/" + b"/".join(parts)) if path or base else ""


def _normal(words: Iterable[bytes], start: list[bytes], cwd: list[bytes] | None) -> list[bytes]:
    """Walk the words from `start`; `cwd` None: the working directory is not known."""
    out = start
    for word in words:
        if word in (b"", b"."):
            continue
        if word == b"..":
            if out:
                out.pop()
            continue
        out.append(word)
        magic = _proc_magic(out)
        if magic == "root":
            out = []
        elif magic == "cwd" and cwd is not None and out[1] in (b"self", b"thread-self"):
            out = list(cwd)
    return out


def _proc_magic(parts: list[bytes]) -> str:
    """`root` or `cwd` when the parts are exactly one of the kernel's links to a directory of a task."""
    if len(parts) not in (3, 5) or parts[0] != b"proc":
        return ""
    last = parts[-1].decode("latin-1")
    if last not in _PROC_SPECIAL or not (parts[1] in (b"self", b"thread-self") or parts[1].isdigit()):
        return ""
    return last if len(parts) == 3 or (parts[2] == b"task" and parts[3].isdigit()) else ""


def decode_address(raw: bytes, base: bytes = b"") -> str:
    """The text form of a struct sockaddr, as SyscallSeen.address describes it; "" when there is none.

    base: the working directory, for a relative unix path.
    """
    if len(raw) < 2:
        return ""
    (family,) = struct.unpack_from("<H", raw)
    body = raw[2:]
    if family == 1:
        if not body:
            return "unix:"
        if body[0] == 0:
            # An abstract name counts with every byte; callers that pass the whole structure pad it with NULs.
            return "unix:@" + escape_bytes(body[1:].rstrip(b"\0"))
        return "unix:" + resolve_path(body.partition(b"\0")[0], base)
    if family == 2 and len(body) >= 6:
        port, packed = struct.unpack_from(">H4s", body)
        return f"inet:{ipaddress.IPv4Address(packed)}:{port}"
    if family == 10 and len(body) >= 22:
        port, _flow, packed6 = struct.unpack_from(">HI16s", body)
        return f"inet6:[{ipaddress.IPv6Address(packed6)}]:{port}"
    if family == 40 and len(body) >= 10:
        _, port, cid = struct.unpack_from("<HII", body)
        return f"vsock:{cid}:{port}"
    return f"af_{family}"


def _word(raw: bytes) -> str:
    return escape_bytes(raw.partition(b"\0")[0])


# -------------------------------------------------------------------------------------------------------- streams


class BoxStream:
    """One box's observations in, its events out, numbered in the single order in which they were taken in.

    started_ns: CLOCK_MONOTONIC at the box's start. base_uid: host uid of the box's root. objects: the numbers given to
    KernelMonitor.protect.
    """

    def __init__(self, box_id: int, started_ns: int, base_uid: int, objects: Mapping[int, ProtectedObject]) -> None:
        self.box_id = box_id
        self._started_ns = started_ns
        self._base_uid = base_uid
        self._objects = objects
        self._by_inode = {(o.dev, o.ino): o for o in objects.values() if o.ino}
        self._by_path = {o.object: o for o in objects.values()}
        self._seq = 0
        self._execs: dict[int, int] = {}
        self._phase = Phase.AGENT

    def restart(self, started_ns: int) -> None:
        """Count times from `started_ns` on. Only before the first event. Raises: MonitorError after it."""
        if self._seq:
            raise MonitorError(f"box {self.box_id} has events already")
        self._started_ns = started_ns

    def number(self, event: Event) -> Event:
        """Put an event made elsewhere (counters, inspection, the guard itself) into the order: sets `seq` only."""
        self._seq += 1
        object.__setattr__(event, "seq", self._seq)
        return event

    def ingest(self, raw: wire.RawRecord | RawOpen | RawNotify) -> list[Event]:
        """The events of one observation, usually one."""
        events: Sequence[Event]
        if isinstance(raw, wire.RawCall):
            events = self._file(raw) if raw.head.kind is wire.Kind.FILE else [self._call(raw)]
        elif hasattr(raw, "head"):
            events = [self._other(raw)]
        elif hasattr(raw, "given_errno"):
            events = [self._notified(raw)]
        else:
            events = self._opened(raw)
        return [self.number(event) for event in events]

    def summary(self, counters: BoxCounters, fanotify_lost: int = 0, notify_lost: int = 0) -> list[Event]:
        """What the counters say that no event does; once, after the last record was taken in."""
        events: list[Event] = []
        common: dict[str, Any] = {"source": Source.COUNTER, "phase": self._phase, "exec": 0}
        for (name, ret), count in sorted(counters.calls.items()):
            events.append(CallsCounted(name=name, ret=ret, count=count, **common))
        if counters.calls_other:
            events.append(CallsCounted(name="other", ret=0, count=counters.calls_other, **common))
        for ring, count, over in (
            ("evidence", counters.lost_evidence, False),
            ("context", counters.lost_context, False),
            ("evidence", counters.over_budget, True),
            ("fanotify", fanotify_lost, False),
            ("notify", notify_lost, False),
        ):
            if count:
                events.append(EvidenceLost(ring=ring, count=count, over_budget=over, **common))
        return [self.number(event) for event in events]

    # ------------------------------------------------------------------------------------------------- one by one

    def _common(self, head: wire.RawHead, source: Source) -> dict[str, Any]:
        """The fields all events share; where a record could not carry its command's index, that of its process."""
        index = head.exec
        if index:
            self._remember(head.tgid, index)
        else:
            index = self._execs.get(head.tgid, 0)
        self._phase = _PHASES.get(head.phase, Phase.AGENT)
        return {
            "at_ns": max(0, head.at_ns - self._started_ns),
            "phase": self._phase,
            "exec": index,
            "tgid": head.tgid,
            "tid": head.tid,
            "ppid": head.ppid,
            "uid": self._inner_uid(head.uid),
            "comm": _word(head.comm),
            "source": source,
        }

    def _held(self, raw: RawOpen | RawNotify, source: Source) -> dict[str, Any]:
        return {
            "at_ns": max(0, raw.at_ns - self._started_ns),
            "phase": self._phase,
            "exec": self._execs.get(raw.tgid, 0),
            "tgid": raw.tgid,
            "tid": raw.tid,
            "ppid": raw.ppid,
            "uid": self._inner_uid(raw.uid),
            "comm": _word(raw.comm),
            "source": source,
        }

    def _remember(self, tgid: int, index: int) -> None:
        if len(self._execs) >= _MOST_PROCESSES:
            self._execs.clear()
        self._execs[tgid] = index

    def _inner_uid(self, uid: int) -> int:
        inner = uid - self._base_uid
        return inner if 0 <= inner < _UID_RANGE else _OVERFLOW_UID

    def _call(self, raw: wire.RawCall) -> SyscallSeen:
        abi = _ABIS[raw.abi] if raw.abi < len(_ABIS) else Abi.X64
        name = syscall_name(raw.nr, i386=abi is Abi.I386)
        return SyscallSeen(
            **self._common(raw.head, Source.SYS_EXIT),
            **_call_fields(name, raw.args, raw.path, raw.base, raw.path2, raw.base2, raw.addr),
            nr=raw.nr,
            abi=abi,
            args=raw.args,
            # A filter that ends the task rolls the call back: its number stands where the result would.
            ret=-errno.EPERM if abi is not Abi.X64 and raw.ret == raw.nr else raw.ret,
            data=raw.data.hex(),
            flags=_flags(name, raw.args, raw.extra),
            program32=bool(raw.head.flags & wire.RecordFlag.PROGRAM32),
        )

    def _file(self, raw: wire.RawCall) -> list[Event]:
        path = resolve_path(raw.path, raw.base) if raw.path or raw.base else ""
        known = self._objects.get(raw.object) or self._by_path.get(path)
        if known is None:
            # A descriptor that was gone before it could be looked at, below a watched place.
            return [self._call(raw)]
        from_exec = raw.why is wire.Why.EXEC
        if raw.why is wire.Why.SLOT:
            name = syscall_name(raw.nr, i386=raw.abi == _ABIS.index(Abi.I386))
            flags = _flags(name, raw.args, raw.extra)
        else:
            flags = raw.file_flags
        events: list[Event] = [
            FileOpened(
                **self._common(raw.head, Source.TRACEPOINT if from_exec else Source.SYS_EXIT),
                object=known.object,
                label=known.label,
                decoy=known.decoy,
                path=path,
                from_exec=from_exec,
                ret=raw.ret,
                **_access(flags),
            )
        ]
        if raw.abi:
            events.append(self._call(raw))
        return events

    def _opened(self, raw: Any) -> list[Event]:
        known = self._by_inode.get((raw.dev, raw.ino))
        if known is None:
            return []
        from_exec = bool(raw.mask & _FAN_OPEN_EXEC_PERM)
        flags = 0 if from_exec else _flags(syscall_name(raw.nr), raw.args, 0)
        return [
            FileOpened(
                **self._held(raw, Source.FANOTIFY),
                object=known.object,
                label=known.label,
                decoy=known.decoy,
                path=_word(raw.path),
                from_exec=from_exec,
                **_access(flags & ~_O_PATH),
            )
        ]

    def _notified(self, raw: Any) -> SyscallSeen:
        i386 = raw.arch == _AUDIT_ARCH_I386
        abi = Abi.I386 if i386 else Abi.X32 if raw.nr & X32_BIT else Abi.X64
        name = syscall_name(raw.nr, i386=i386)
        args = tuple(raw.args)
        address = raw.data if name in _ADDRESS_CALLS else b""
        extra = 0
        if name in ("clone3", "openat2") and len(raw.data) >= 8:
            (extra,) = struct.unpack_from("<Q", raw.data)
        return SyscallSeen(
            **self._held(raw, Source.NOTIFY),
            **_call_fields(name, args, raw.path, raw.base, raw.path2, b"", address),
            nr=raw.nr,
            abi=abi,
            args=args,
            ret=-raw.given_errno,
            data="" if address else raw.data[:256].hex(),
            flags=_flags(name, args, extra),
        )

    def _other(self, raw: Any) -> Event:
        head: wire.RawHead = raw.head
        hook = isinstance(raw, (wire.RawNet, wire.RawDevice, wire.RawSysctl))
        common = self._common(head, Source.CGROUP if hook else Source.TRACEPOINT)
        if isinstance(raw, wire.RawExec):
            words = raw.argv.removesuffix(b"\0").split(b"\0") if raw.argv else []
            argv = tuple(escape_bytes(word) for word in words[:_ARGV_WORDS])
            return ProcessExec(**common, exe=escape_bytes(raw.file), argv=argv, memfd=raw.nlink == 0)
        if isinstance(raw, wire.RawTask):
            if raw.child_exec:
                self._remember(raw.child_tgid, raw.child_exec)
                common["exec"] = raw.child_exec
            return TaskCreated(**common, child_tgid=raw.child_tgid, child_tid=raw.child_tid, flags=raw.clone_flags)
        if isinstance(raw, wire.RawExit):
            # A number can be used again, and then belongs to another command.
            self._execs.pop(head.tgid, None)
            return ProcessExit(**common, code=raw.status >> 8 & 0xFF, signal=raw.status & 0x7F)
        if isinstance(raw, wire.RawSignal):
            return SignalSent(
                **common,
                signal=raw.sig,
                target_tgid=raw.target_tgid,
                target_in_box=raw.in_box,
                target_is_init=raw.is_init,
            )
        if isinstance(raw, wire.RawNet):
            return NetworkAttempt(
                **common,
                op=_NET_OPS.get(raw.op, f"op_{raw.op}"),
                family=raw.family,
                sock_type=raw.type,
                protocol=raw.protocol,
                address="" if raw.op == _OP_SOCKET else _ip(raw.family, raw.addr),
                port=raw.port,
                ret=raw.ret,
            )
        if isinstance(raw, wire.RawDevice):
            access = "".join(letter for bit, letter in ((2, "r"), (4, "w"), (1, "m")) if raw.access & bit)
            return DeviceAttempt(
                **common, dev_type="block" if raw.dev_type == 1 else "char", major=raw.major, minor=raw.minor,
                access=access, ret=raw.ret,
            )  # fmt: skip
        if isinstance(raw, wire.RawSysctl):
            return SysctlAttempt(**common, name=escape_bytes(raw.name), write=bool(raw.write), ret=raw.ret)
        if isinstance(raw, wire.RawCap):
            return CapabilityRefused(**common, cap=raw.cap)
        if isinstance(raw, wire.RawUring):
            created = raw.op == 1
            return IoUringUsed(**common, op="create" if created else "submit", opcode=-1 if created else raw.opcode)
        if isinstance(raw, wire.RawCgroup):
            return CgroupMoved(**common, destination=escape_bytes(raw.path))
        if isinstance(raw, wire.RawOom):
            return OomKilled(**common, victim_tgid=raw.victim_tgid)
        raise TypeError(f"not an observation: {type(raw).__name__}")


_NET_OPS = {1: "connect", 2: "sendmsg", 3: "bind", 4: "socket"}
_OP_SOCKET = 4


def _ip(family: int, raw: bytes) -> str:
    return str(ipaddress.IPv6Address(raw)) if family == 10 else str(ipaddress.IPv4Address(raw[:4]))


def _access(flags: int) -> dict[str, Any]:
    """for_read, for_write of open(2) flags; an O_PATH descriptor does neither."""
    if flags & _O_PATH:
        return {"for_read": False, "for_write": False}
    mode = flags & _O_ACCMODE
    return {"for_read": mode != _O_WRONLY, "for_write": mode in (_O_WRONLY, _O_RDWR)}


def _flags(name: str, args: Sequence[int], extra: int) -> int:
    if name in ("clone3", "openat2"):
        return extra
    if name == "creat":
        return _CREAT_FLAGS
    index = _FLAGS_ARG.get(name, -1)
    return args[index] if 0 <= index < len(args) else 0


def _call_fields(
    name: str, args: Sequence[int], path: bytes, base: bytes, path2: bytes, base2: bytes, address: bytes
) -> dict[str, Any]:
    """name, path, raw_path, path2, address of a SyscallSeen."""
    path, path2 = path.partition(b"\0")[0], path2.partition(b"\0")[0]
    if name in _ADDRESS_CALLS:
        return {"name": name, "address": decode_address(address, base)}
    first = escape_bytes(path) if name in _PLAIN_PATH else resolve_path(path, base)
    second = escape_bytes(path2) if name in _PLAIN_PATH2 else resolve_path(path2, base2)
    return {"name": name, "path": first, "raw_path": escape_bytes(path), "path2": second}


class Pump:
    """Routes observations of all boxes to their streams."""

    def __init__(self) -> None:
        self._streams: dict[int, BoxStream] = {}
        self.unrouted = 0

    def add(self, stream: BoxStream) -> None:
        self._streams[stream.box_id] = stream

    def remove(self, box_id: int) -> None:
        self._streams.pop(box_id, None)

    def ingest(self, raws: Iterable[wire.RawRecord | RawOpen | RawNotify]) -> dict[int, list[Event]]:
        """Events by box id. What belongs to no known box is counted in `unrouted`."""
        out: dict[int, list[Event]] = {}
        for raw in raws:
            head = getattr(raw, "head", None)
            box_id: int = head.box if head is not None else getattr(raw, "box_id", 0)
            stream = self._streams.get(box_id)
            if stream is None:
                self.unrouted += 1
                continue
            out.setdefault(box_id, []).extend(stream.ingest(raw))
        return out
