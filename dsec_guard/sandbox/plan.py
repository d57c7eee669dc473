"""Packs what `spec.py` describes into the bytes that the launcher and dg-init check: the twin of `native/dg_plan.h`.

Every record below names its fields in the order of the C structure; a test compares each offset with the header. Strings
and arrays lie behind the fixed part and are referred to by spans (offset, length).
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsec_guard.errors import SetupError
from dsec_guard.sandbox.spec import ExecRequest, LandlockSpec, RootOp, SpawnSpec

PLAN_MAGIC = 0x4E4C5044
EXEC_MAGIC = 0x43455844
MSG_MAGIC = 0x47534D44
VERSION = 1
NO_FD = 0xFFFFFFFF
MAX_PLAN = 16777216
MAX_FDS = 250
MAX_CHECKS = 16
INIT_UID = 65533

PLAN_LIMIT_NAMESPACES = 1
PLAN_SELF_CHECK = 2
EXEC_TTY = 1

REQ_MAKE_USERNS = 1
REQ_SPAWN = 2
REQ_EXEC = 3
REQ_SIGNAL = 4
USERNS_OWNER = 1
SIGNAL_ALL = 0

ANS_ERROR = 1
ANS_USERNS = 2
ANS_SPAWNED = 3
ANS_READY = 4
ANS_STARTED = 5
ANS_FAILED = 6
ANS_EXITED = 7

Span = tuple[int, int]


class Record:
    """One C structure: its name and (field, struct code) in order; code `S` is a span."""

    def __init__(self, name: str, fields: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self.fields = tuple(fields)
        self._struct = struct.Struct("<" + "".join("II" if code == "S" else code for _, code in fields))
        self.size = self._struct.size

    def offsets(self) -> dict[str, int]:
        """Field -> bytes from the start, as packed here; the C compiler has to agree."""
        at, offsets = 0, {}
        for name, code in self.fields:
            offsets[name] = at
            at += struct.calcsize("<" + ("II" if code == "S" else code))
        return offsets

    def pack(self, **values: Any) -> bytes:
        """Missing fields are zero."""
        flat: list[Any] = []
        for name, code in self.fields:
            if code == "S":
                flat.extend(values.get(name, (0, 0)))
            elif code.endswith("s"):
                flat.append(values.get(name, b""))
            else:
                flat.append(values.get(name, 0))
        return self._struct.pack(*flat)

    def pack_row(self, *values: Any) -> bytes:
        """All fields in their order, a span as two numbers."""
        return self._struct.pack(*values)

    def unpack(self, data: bytes | memoryview, offset: int = 0) -> dict[str, Any]:
        """Only for records without spans."""
        values = self._struct.unpack_from(data, offset)
        return {name: value for (name, _), value in zip(self.fields, values, strict=True)}


PLAN = Record("dg_plan", (
    ("magic", "I"), ("version", "I"), ("size", "I"), ("flags", "I"), ("base_uid", "I"), ("deadline_ms", "I"),
    ("store_bytes", "Q"), ("store_inodes", "Q"), ("caps", "Q"), ("cgroup_fd", "I"), ("userns_fd", "I"),
    ("owner_map_fd", "I"), ("check_phase", "I"), ("name", "S"), ("hostname", "S"), ("stage_dir", "S"), ("ops", "S"),
    ("v1_fds", "S"), ("rlimits", "S"), ("phases", "S"), ("checks", "S"), ("notify", "S"),
))
OP = Record("dg_op", (
    ("kind", "I"), ("flags", "I"), ("mode", "I"), ("uid", "I"), ("gid", "I"), ("fd", "I"), ("target", "S"),
    ("source", "S"), ("name", "S"), ("content", "S"), ("size_bytes", "Q"), ("inodes", "Q"),
))
RLIMIT = Record("dg_rlimit", (("resource", "I"), ("reserved", "I"), ("soft", "Q"), ("hard", "Q")))
PHASE = Record("dg_phase", (
    ("filter", "S"), ("rules", "S"), ("ports", "S"), ("has_landlock", "I"), ("reserved", "I"), ("handled_fs", "Q"),
    ("handled_net", "Q"), ("scoped", "Q"),
))
RULE = Record("dg_rule", (("path", "S"), ("access", "Q")))
PORT = Record("dg_port", (("port", "Q"), ("access", "Q")))
CHECK = Record("dg_check", (("number", "I"), ("errnum", "I")))
EXEC = Record("dg_exec", (
    ("magic", "I"), ("version", "I"), ("size", "I"), ("flags", "I"), ("caps", "Q"), ("uid", "I"), ("gid", "I"),
    ("umask", "I"), ("phase", "I"), ("groups", "S"), ("argv", "S"), ("env", "S"), ("cwd", "S"),
))
REQUEST = Record("dg_request", (("magic", "I"), ("version", "I"), ("kind", "I"), ("flags", "I"), ("arg", "16s")))
CHECK_RESULT = Record("dg_check_result", (("name", "24s"), ("refused", "I"), ("errnum", "I")))
ANSWER = Record("dg_answer", (
    ("magic", "I"), ("version", "I"), ("kind", "I"), ("errnum", "i"), ("step", "32s"), ("call", "96s"),
    ("exec_id", "I"), ("pid", "I"), ("status", "i"), ("has_listener", "I"), ("overlays", "I"), ("checks", "I"),
    ("check", f"{CHECK_RESULT.size * (MAX_CHECKS + 8)}s"),
))
RECORDS = (PLAN, OP, RLIMIT, PHASE, RULE, PORT, CHECK, EXEC, REQUEST, CHECK_RESULT, ANSWER)

_BPF_INSTRUCTION = 8  # bytes
_NAME_AT, _BASE_UID_AT = PLAN.offsets()["name"], PLAN.offsets()["base_uid"]


class _Pack:
    """The growing plan: a fixed part, then what its spans point to."""

    def __init__(self, head: Record) -> None:
        self._head = head
        self._data = bytearray(head.size)
        self._texts: dict[bytes, Span] = {}
        self._known: dict[bytes | str, Span] = {}  # as given: a plan names some texts hundreds of times

    def text(self, value: bytes | str) -> Span:
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = self._place(os.fsencode(value))
        return known

    def _place(self, raw: bytes) -> Span:
        span = self._texts.get(raw)
        if span is None:
            span = self._texts[raw] = self._append(raw)
        return span

    def own_text(self, value: str) -> Span:
        """A text that nothing else points to, so that it can be written over."""
        return self._append(os.fsencode(value))

    def _append(self, raw: bytes) -> Span:
        if b"\0" in raw:
            raise SetupError(f"a NUL byte in {raw!r}", step="pack_plan", errno_name="EINVAL")
        span = (len(self._data), len(raw))
        self._data += raw + b"\0"
        return span

    def blob(self, value: bytes, *, element: int = 1) -> Span:
        if len(value) % element:
            raise SetupError(f"{len(value)} bytes are no array of {element}", step="pack_plan", errno_name="EINVAL")
        if not value:
            return (0, 0)
        self._data += bytes(-len(self._data) % 8)
        span = (len(self._data), len(value) // element)
        self._data += value
        return span

    def array(self, records: Iterable[bytes], element: int) -> Span:
        return self.blob(b"".join(records), element=element)

    def done(self, **head: Any) -> bytes:
        self._data[: self._head.size] = self._head.pack(size=len(self._data), **head)
        if len(self._data) > MAX_PLAN:
            raise SetupError(f"a plan of {len(self._data)} bytes", step="pack_plan", errno_name="E2BIG",
                             hint=f"at most {MAX_PLAN} are accepted")
        return bytes(self._data)


@dataclass(frozen=True)
class PackedPlan:
    """`fds` go along in this order *behind* the plan's own descriptor: the plan counts it as index 0."""

    data: bytes
    fds: tuple[int, ...]
    overlay_names: tuple[str, ...]


class _Fds:
    def __init__(self) -> None:
        self.fds: list[int] = []

    def index(self, fd: int) -> int:
        if fd < 0:
            return NO_FD
        self.fds.append(fd)
        return len(self.fds)


def _pack_op(pack: _Pack, fds: _Fds, op: RootOp) -> bytes:
    # In the order of OP's fields: by name it costs four times as much, and a root has some 170 steps.
    return OP.pack_row(
        int(op.kind), int(op.flags), op.mode, op.uid, op.gid, fds.index(op.fd), *pack.text(op.target),
        *pack.text(op.source), *pack.text(op.name), *pack.blob(op.content), op.size_bytes, op.inodes)


def _pack_phase(pack: _Pack, filter_: bytes, landlock: LandlockSpec | None) -> bytes:
    code = pack.blob(filter_, element=_BPF_INSTRUCTION)
    if landlock is None:
        return PHASE.pack(filter=code)
    rules = [RULE.pack(path=pack.text(rule.path), access=rule.access) for rule in landlock.rules]
    ports = [PORT.pack(port=port, access=access) for port, access in landlock.ports]
    return PHASE.pack(
        filter=code, rules=pack.array(rules, RULE.size), ports=pack.array(ports, PORT.size), has_landlock=1,
        handled_fs=landlock.handled_fs, handled_net=landlock.handled_net, scoped=landlock.scoped,
    )


def pack_plan(spec: SpawnSpec) -> PackedPlan:
    """SpawnSpec -> the bytes and descriptors of one SPAWN request.

    Raises: SetupError (step `pack_plan`) for what no plan can hold; the launcher checks all the rest.
    """
    pack, fds = _Pack(PLAN), _Fds()
    phases = max(len(spec.exec_filters), len(spec.landlock), 1)
    filters = spec.exec_filters + (b"",) * (phases - len(spec.exec_filters))
    landlocks = spec.landlock + (None,) * (phases - len(spec.landlock))
    flags = (PLAN_LIMIT_NAMESPACES if spec.namespace_limits_zero else 0) | (PLAN_SELF_CHECK if spec.self_check else 0)
    try:
        head: dict[str, Any] = {
            "cgroup_fd": fds.index(spec.cgroup_fd), "userns_fd": fds.index(spec.userns_fd),
            "owner_map_fd": fds.index(spec.owner_map_fd),
            "v1_fds": pack.array([struct.pack("<I", fds.index(fd)) for fd in spec.v1_tasks_fds], 4),
            "name": pack.own_text(spec.name), "hostname": pack.text(spec.hostname), "stage_dir": pack.text(spec.stage_dir),
            "ops": pack.array([_pack_op(pack, fds, op) for op in spec.ops], OP.size),
            "rlimits": pack.array(
                [RLIMIT.pack(resource=r.resource, soft=_rlim(r.soft), hard=_rlim(r.hard)) for r in spec.rlimits], RLIMIT.size),
            "phases": pack.array(
                [_pack_phase(pack, code, rules) for code, rules in zip(filters, landlocks, strict=True)], PHASE.size),
            "checks": pack.array([CHECK.pack(number=nr, errnum=err) for nr, err in spec.check_syscalls], CHECK.size),
            "notify": pack.blob(spec.notify_filter, element=_BPF_INSTRUCTION),
        }
        data = pack.done(
            magic=PLAN_MAGIC, version=VERSION, flags=flags, base_uid=spec.base_uid, deadline_ms=spec.deadline_ms,
            store_bytes=spec.store_bytes, store_inodes=spec.store_inodes, caps=spec.caps, check_phase=spec.check_phase,
            **head,
        )
    except struct.error as problem:
        raise SetupError(f"a number of the plan is out of range: {problem}", step="pack_plan", errno_name="ERANGE") from problem
    if len(fds.fds) >= MAX_FDS:
        raise SetupError(f"{len(fds.fds)} descriptors in one plan", step="pack_plan", errno_name="EMFILE",
                         hint=f"fewer than {MAX_FDS} are accepted")
    names = tuple(op.name for op in spec.ops if op.kind.name == "OVERLAY")
    return PackedPlan(data=data, fds=tuple(fds.fds), overlay_names=names)


def repack_plan(packed: PackedPlan, spec: SpawnSpec) -> PackedPlan | None:
    """As `pack_plan(spec)`, from the plan of another box that differs in its name, base uid and descriptors alone.

    None when the name's length differs: nothing can be moved. That all else is equal is the caller's to know.
    """
    name, data = os.fsencode(spec.name), bytearray(packed.data)
    start, length = struct.unpack_from("<II", data, _NAME_AT)
    if length != len(name) or b"\0" in name:
        return None
    data[start:start + length] = name
    struct.pack_into("<I", data, _BASE_UID_AT, spec.base_uid)
    given = (spec.cgroup_fd, spec.userns_fd, spec.owner_map_fd, *spec.v1_tasks_fds, *(op.fd for op in spec.ops))
    fds = tuple(fd for fd in given if fd >= 0)
    return replace(packed, data=bytes(data), fds=fds) if len(fds) == len(packed.fds) else None


def _rlim(value: int) -> int:
    """RLIM_INFINITY is -1 in Python's `resource`."""
    return value & 0xFFFFFFFFFFFFFFFF if value < 0 else value


def pack_exec(req: ExecRequest) -> bytes:
    """ExecRequest -> the bytes of one EXEC request; its stdio descriptors travel beside.

    Raises: SetupError (step `pack_plan`) for what no request can hold.
    """
    pack = _Pack(EXEC)

    def texts(values: tuple[bytes, ...]) -> Span:
        return pack.array([struct.pack("<II", *span) for span in map(pack.text, values)], 8)

    try:
        head: dict[str, Any] = {
            "groups": pack.array([struct.pack("<I", gid) for gid in req.groups], 4),
            "argv": texts(req.argv), "env": texts(req.env), "cwd": pack.text(req.cwd),
        }
        return pack.done(
            magic=EXEC_MAGIC, version=VERSION, flags=EXEC_TTY if req.tty else 0, caps=req.caps, uid=req.uid, gid=req.gid,
            umask=req.umask, phase=req.phase, **head,
        )
    except struct.error as problem:
        raise SetupError(f"a number of the request is out of range: {problem}", step="pack_plan",
                         errno_name="ERANGE") from problem


def pack_request(kind: int, *args: int, flags: int = 0) -> bytes:
    """One message to the launcher or dg-init with up to four numbers."""
    try:
        numbers = struct.pack("<4I", *args, *(0,) * (4 - len(args)))
    except struct.error as problem:
        raise SetupError(f"a number of the request is out of range: {problem}", step="pack_plan",
                         errno_name="ERANGE") from problem
    return REQUEST.pack(magic=MSG_MAGIC, version=VERSION, kind=kind, flags=flags, arg=numbers)


def sealed_memfd(data: bytes, name: str) -> int:
    """A memfd with `data` that nobody can change any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view):]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS,
                    fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
