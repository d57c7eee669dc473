"""The guard's side of the holder, the small process that outlives a killed guard and cleans up after it.

`Holder` starts it and speaks its control socket; `decode_record` and its kind unpack what its sensors saw into plain
values, which the monitor turns into model events (phase, exec index and sequence are not known here).
Layouts: native/dg_holder.h.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from dsec_guard.errors import HostError, MonitorError, SetupError
from dsec_guard.host.cgroup import BoxCgroup, Instance
from dsec_guard.model import Abi

VERSION = 1
MESSAGE_MAX = 16384
RECORD_SIZE = 1024

_REQUEST = struct.Struct("<HHiQII")
_NOTICE = struct.Struct("<HHiQiiQQQQQ")
_RECORD = struct.Struct("<HHIQQIIII16sQQQiI6QiIHHHH440s176s128s128s")
_RULE = struct.Struct("<ii")
_RECORDS_PIPE_BYTES = 1 << 20
_CONTROL_BYTES = 1 << 20
_FAN_OPEN_EXEC_PERM = 0x00040000
_EM_X86_64_ARCH = 0xC000003E
_EM_I386_ARCH = 0x40000003
_X32_BIT = 0x40000000


class Request(IntEnum):
    INSTANCE = 1
    BOX = 2
    RELEASE_BOX = 3
    OWN_DIRECTORY = 4
    PATH = 5
    RELEASE_PATH = 6
    FD = 7
    DROP_FD = 8
    WATCH_FANOTIFY = 9
    WATCH_NOTIFY = 10
    FLUSH = 11
    END = 12
    RELEASE_INSTANCE = 13


class Notice(IntEnum):
    READY = 1
    CHILD = 2
    SENSOR_DIED = 3
    REFUSED = 4
    FLOOD_KILLED = 5
    OVERFLOW = 6
    TOTALS = 7


class Sensor(IntEnum):
    FANOTIFY = 1
    NOTIFY = 2


class RecordFlag(IntFlag):
    VANISHED = 1
    TRUNCATED = 2
    CALL_KNOWN = 4
    MEMORY_READ = 8


# ---------------------------------------------------------------------------------------------------------- messages


@dataclass(frozen=True)
class Message:
    """Something the holder told. at_ns: CLOCK_MONOTONIC."""

    at_ns: int = 0


@dataclass(frozen=True)
class Ready(Message):
    launcher_pid: int = 0


@dataclass(frozen=True)
class ChildExited(Message):
    """A child of the holder ended: a box's first process, or the launcher. status: as of waitpid(2)."""

    pid: int = 0
    status: int = 0

    @property
    def exit_code(self) -> int | None:
        return os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None


@dataclass(frozen=True)
class SensorDied(Message):
    """box_id 0: for all boxes. What happened from now on goes unseen: the boxes are incomplete."""

    sensor: Sensor = Sensor.FANOTIFY
    box_id: int = 0
    errno: int = 0

    @property
    def name(self) -> str:
        """`fanotify` or `notify`."""
        return self.sensor.name.lower()


@dataclass(frozen=True)
class EventsMissed(Message):
    """Openings of marked files went unseen; whose is unknown. errno: 0 when the kernel's queue was full."""

    errno: int = 0


@dataclass(frozen=True)
class FloodKilled(Message):
    """The box made so many notified calls that it was ended."""

    box_id: int = 0


@dataclass(frozen=True)
class RequestRefused(Message):
    """The holder could not do what it was asked."""

    request: int = 0
    box_id: int = 0
    errno: int = 0


@dataclass(frozen=True)
class Totals(Message):
    """What one sensor saw of one box. seen = recorded + lost + counted.

    lost: records the guard did not read fast enough. counted: more of the same, or beyond the box's number of records.
    """

    box_id: int = 0
    sensor: Sensor = Sensor.FANOTIFY
    seen: int = 0
    recorded: int = 0
    lost: int = 0
    counted: int = 0


@dataclass(frozen=True)
class HolderDied(Message):
    """The holder is gone; so are its boxes. The guard must clean up what it made."""


# ----------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class RawOpen:
    """A marked file was about to be opened, and was let through.

    Numbers as the host sees them (uid: in the initial user namespace). dev: st_dev as of fstat(2). mask: fanotify bits.
    path: the file's name as the kernel shows it, in the opener's mount tree (hostile bytes, as comm). nr, args: the call
    the opener was held in, nr -1 where unknown. tgid, ppid, uid are 0 and comm empty when `vanished`.
    """

    box_id: int
    at_ns: int
    tgid: int
    tid: int
    ppid: int
    uid: int
    comm: bytes
    dev: int
    ino: int
    mask: int
    nr: int
    args: tuple[int, int, int, int, int, int]
    path: bytes
    vanished: bool
    truncated: bool

    @property
    def from_exec(self) -> bool:
        return bool(self.mask & _FAN_OPEN_EXEC_PERM)

    @property
    def open_flags(self) -> int | None:
        """Flags of open(2) and openat(2); None for other calls (openat2 has them in memory)."""
        return self.args[_FLAG_ARGUMENT[self.nr]] if self.nr in _FLAG_ARGUMENT else None


_FLAG_ARGUMENT: Mapping[int, int] = {2: 1, 257: 2}  # open, openat


@dataclass(frozen=True)
class RawNotify:
    """A system call that was refused with `given_errno` after its filter handed it over.

    arch: AUDIT_ARCH_*; nr and args as in the filter's data. path, path2, data: arguments read from the task while it
    was held (intent only: they may have been changed since), base: where a relative path starts; all are hostile bytes
    and empty without `memory_read`.
    """

    box_id: int
    at_ns: int
    tgid: int
    tid: int
    ppid: int
    uid: int
    comm: bytes
    nr: int
    arch: int
    args: tuple[int, int, int, int, int, int]
    given_errno: int
    path: bytes
    path2: bytes
    base: bytes
    data: bytes
    memory_read: bool
    vanished: bool
    truncated: bool

    @property
    def abi(self) -> Abi:
        if self.arch == _EM_I386_ARCH:
            return Abi.I386
        return Abi.X32 if self.nr & _X32_BIT else Abi.X64


RawRecord = RawOpen | RawNotify
_KINDS: Mapping[int, type[RawOpen] | type[RawNotify]] = {1: RawOpen, 2: RawNotify}


def decode_record(raw: bytes | memoryview) -> RawRecord:
    """One record of `RECORD_SIZE` bytes. Raises: MonitorError for anything that is none."""
    if len(raw) != RECORD_SIZE:
        raise MonitorError(f"a holder record has {RECORD_SIZE} bytes, got {len(raw)}")
    (
        version, kind, flags, box_id, at_ns, tgid, tid, ppid, uid, comm, dev, ino, mask, nr, arch,
        a0, a1, a2, a3, a4, a5, given, _, path_len, path2_len, base_len, data_len, path, path2, base, data,
    ) = _RECORD.unpack(raw)  # fmt: skip
    if version != VERSION or kind not in _KINDS:
        raise MonitorError(f"holder record of version {version}, kind {kind}: want version {VERSION}, kind 1 or 2")
    for length, field in ((path_len, path), (path2_len, path2), (base_len, base), (data_len, data)):
        if length > len(field):
            raise MonitorError(f"holder record claims {length} bytes in a field of {len(field)}")
    args = (a0, a1, a2, a3, a4, a5)
    name = comm.partition(b"\0")[0]
    vanished, truncated = bool(flags & RecordFlag.VANISHED), bool(flags & RecordFlag.TRUNCATED)
    if kind == 1:
        known = bool(flags & RecordFlag.CALL_KNOWN)
        return RawOpen(
            box_id, at_ns, tgid, tid, ppid, uid, name, dev, ino, mask, nr if known else -1,
            args if known else (0, 0, 0, 0, 0, 0), path[:path_len], vanished, truncated,
        )  # fmt: skip
    return RawNotify(
        box_id, at_ns, tgid, tid, ppid, uid, name, nr, arch, args, given, path[:path_len], path2[:path2_len],
        base[:base_len], data[:data_len], bool(flags & RecordFlag.MEMORY_READ), vanished, truncated,
    )  # fmt: skip


def decode_fanotify(raw: bytes) -> RawOpen:
    """As `decode_record`, for a record that must be an opening."""
    record = decode_record(raw)
    if not isinstance(record, RawOpen):
        raise MonitorError("a notification where an opening was expected")
    return record


def decode_notify(raw: bytes) -> RawNotify:
    """As `decode_record`, for a record that must be a notification."""
    record = decode_record(raw)
    if not isinstance(record, RawNotify):
        raise MonitorError("an opening where a notification was expected")
    return record


def _decode_notice(raw: bytes) -> Message:
    if len(raw) != _NOTICE.size:
        raise MonitorError(f"a holder notice has {_NOTICE.size} bytes, got {len(raw)}")
    version, kind, arg, box_id, pid, status, at_ns, seen, recorded, lost, counted = _NOTICE.unpack(raw)
    if version != VERSION:
        raise MonitorError(f"holder notice of version {version}, want {VERSION}")
    if kind == Notice.READY:
        return Ready(at_ns, pid)
    if kind == Notice.CHILD:
        return ChildExited(at_ns, pid, status)
    if kind == Notice.SENSOR_DIED:
        return SensorDied(at_ns, Sensor(arg), box_id, status)
    if kind == Notice.REFUSED:
        return RequestRefused(at_ns, arg, box_id, status)
    if kind == Notice.FLOOD_KILLED:
        return FloodKilled(at_ns, box_id)
    if kind == Notice.OVERFLOW:
        return EventsMissed(at_ns, status)
    if kind == Notice.TOTALS:
        return Totals(at_ns, box_id, Sensor(arg), seen, recorded, lost, counted)
    raise MonitorError(f"holder notice of kind {kind}")


# ------------------------------------------------------------------------------------------------------------ holder


@dataclass(frozen=True)
class HolderLimits:
    """notify_records: notices of one box that become records; notify_kill: that end it. open_records: openings of one
    box that become records; open_repeats: of one object by one process."""

    notify_records: int = 256
    notify_kill: int = 100_000
    open_records: int = 1024
    open_repeats: int = 8


class Holder:
    """A running holder. launcher_socket: SEQPACKET to the launcher. records_fd: non-blocking pipe of records.

    Poll `fileno()` and `records_fd`; `read_messages` and `read_records` never block.
    """

    _KILL_GRACE_S: ClassVar[float] = 3.0

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, launcher_socket: socket.socket, records_fd: int
    ) -> None:
        self.process = process
        self.pid = process.pid
        self.launcher_pid = 0
        self.launcher_socket = launcher_socket
        self.records_fd = records_fd
        self._control = control
        self._early: list[Message] = []
        self._died = False
        self._partial = b""

    @classmethod
    def start(
        cls,
        native_dir: Path,
        instance: Instance | None = None,
        *,
        launcher: Path | None = None,
        limits: HolderLimits = HolderLimits(),
        timeout_s: float = 5.0,
    ) -> Holder:
        """Start `dg-holder` of `native_dir` and, through it, the launcher (default: `dg-launcher` beside it).

        instance: registered at once (see `register_instance`).

        Raises: SetupError when one of them cannot be started.
        """
        program, launcher = native_dir / "dg-holder", launcher or native_dir / "dg-launcher"
        for path in (program, launcher):
            if not os.access(path, os.X_OK):
                raise SetupError(f"{path} is missing", step="holder", errno_name="ENOENT", hint="make native")
        control, control_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launch, launch_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        records, records_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        holder: Holder | None = None
        try:
            _enlarge_pipe(records)
            for end in (control, control_end):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BYTES)
            options = {
                "--control": control_end.fileno(),
                "--records": records_end,
                "--launcher-socket": launch_end.fileno(),
                "--launcher": launcher.absolute(),
                "--notify-records": limits.notify_records,
                "--notify-kill": limits.notify_kill,
                "--open-records": limits.open_records,
                "--open-repeats": limits.open_repeats,
            }
            process = subprocess.Popen(
                [str(program), *(str(word) for pair in options.items() for word in pair)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=True,
                pass_fds=(control_end.fileno(), launch_end.fileno(), records_end),
                start_new_session=True,  # a Ctrl-C of the very first moment must not hit it
                cwd="/",
                env={},
            )
            holder = cls(process, control, launch, records)
        except OSError as error:
            raise SetupError(
                f"cannot start {program}: {error.strerror}",
                step="holder",
                errno_name=errno.errorcode.get(error.errno or 0, ""),
            ) from error
        finally:
            control_end.close()
            launch_end.close()
            os.close(records_end)
            if holder is None:
                control.close()
                launch.close()
                os.close(records)
        holder._await_ready(timeout_s)
        if instance is not None:
            holder.register_instance(instance)
        return holder

    def _await_ready(self, timeout_s: float) -> None:
        message = self._next_message(time.monotonic() + timeout_s)
        if isinstance(message, Ready):
            self.launcher_pid = message.launcher_pid
            return
        self.process.kill()
        status = self.process.wait()
        self._close()
        raise SetupError(f"dg-holder ended with status {status} before it was ready", step="holder")

    # -------------------------------------------------------------------------------------------------- registering

    def register_instance(self, instance: Instance) -> None:
        """What is below `instance` is killed, and its directories are removed, if the guard dies."""
        self._request(
            Request.INSTANCE,
            arg=int(instance.host.base_is_default),
            payload=_strings(*(os.fsencode(path) for path in instance.paths)),
            fd=instance.v2_fd,
        )

    def release_instance(self, instance: Instance) -> None:
        """The guard has removed `instance` itself."""
        self._request(Request.RELEASE_INSTANCE, payload=_strings(os.fsencode(instance.v2_dir)))

    def register_box(self, box_id: int, cgroup: BoxCgroup) -> None:
        """Answer for a box before its first process is made; its sensors name it by `box_id` (`cgroup.id`)."""
        paths = (os.fsencode(path) for path in cgroup.paths)
        payload = _strings(os.fsencode(cgroup.proc_path), *paths)
        self._request(Request.BOX, box_id=box_id, payload=payload, fd=cgroup.dir_fd)

    def release_box(self, box_id: int) -> None:
        """The guard has ended and removed the box itself. Its listeners are closed, its counts are forgotten."""
        self._request(Request.RELEASE_BOX, box_id=box_id)

    def own_directory(self, path: Path) -> None:
        """Paths below `path` may be registered. The directory itself is not removed. Raises: HostError."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"{path}: {error.strerror}", feature="run_dir") from error
        try:
            self._request(Request.OWN_DIRECTORY, payload=_strings(os.fsencode(path)), fd=fd)
        finally:
            os.close(fd)

    def register_path(self, path: Path) -> None:
        """Remove the file or tree at `path` if the guard dies: the last one registered first, without following links
        or crossing mounts. It must lie below a directory given to `own_directory`."""
        self._request(Request.PATH, payload=_strings(os.fsencode(path)))

    def release_path(self, path: Path) -> None:
        self._request(Request.RELEASE_PATH, payload=_strings(os.fsencode(path)))

    def hold_fd(self, name: str, fd: int) -> None:
        """Keep a copy of `fd` open until `drop_fd`, or the holder's end."""
        self._request(Request.FD, payload=_strings(name.encode()), fd=fd)

    def drop_fd(self, name: str) -> None:
        self._request(Request.DROP_FD, payload=_strings(name.encode()))

    def watch_fanotify(self, fd: int) -> None:
        """Answer the permission events of group `fd` (always: allowed) and report those of registered boxes."""
        self._request(Request.WATCH_FANOTIFY, fd=fd)

    def watch_notify(
        self, box_id: int, fd: int, errnos: Mapping[int, int] = {}, default: int = errno.EPERM
    ) -> None:
        """Answer listener `fd` of a box: `errnos` has the positive error number by x86-64 call number."""
        rules = b"".join(_RULE.pack(nr, number) for nr, number in sorted(errnos.items()))
        self._request(Request.WATCH_NOTIFY, box_id=box_id, arg=default, payload=rules, fd=fd)

    def _request(self, kind: Request, *, arg: int = 0, box_id: int = 0, payload: bytes = b"", fd: int = -1) -> None:
        message = _REQUEST.pack(VERSION, kind, arg, box_id, len(payload), 0) + payload
        if len(message) > MESSAGE_MAX:
            raise SetupError(f"{kind.name}: {len(message)} bytes for the holder, at most {MESSAGE_MAX}", step="holder")
        try:
            if fd >= 0:
                socket.send_fds(self._control, [message], [fd])
            else:
                self._control.send(message)
        except OSError as error:
            raise SetupError(
                f"the holder is gone ({kind.name}: {error.strerror})",
                step="holder",
                errno_name=errno.errorcode.get(error.errno or 0, ""),
            ) from error

    # -------------------------------------------------------------------------------------------------- reading

    def fileno(self) -> int:
        """Readable when `read_messages` has something."""
        return self._control.fileno()

    def read_messages(self) -> list[Message]:
        """Everything the holder told by now, oldest first; `HolderDied` once, as the last one ever."""
        messages, self._early = self._early, []
        while (message := self._receive()) is not None:
            messages.append(message)
        return messages

    def _receive(self) -> Message | None:
        if self._died:
            return None
        try:
            raw = self._control.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raw = b""
        if not raw:
            self._died = True
            return HolderDied(time.monotonic_ns())
        return _decode_notice(raw)

    def _next_message(self, deadline: float) -> Message | None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while (message := self._receive()) is None:
            left = deadline - time.monotonic()
            if self._died or left <= 0:
                return None
            poller.poll(left * 1000)
        return message

    def settle(self, box_id: int, timeout_s: float = 1.0) -> None:
        """Return once all requests so far are carried out. Raises: SetupError when one was refused, MonitorError as
        `totals`."""
        refused = [m for m in self._settle(box_id, timeout_s) if isinstance(m, RequestRefused)]
        if refused:
            request = Request(refused[0].request).name
            raise SetupError(
                f"the holder refused {request}: {os.strerror(refused[0].errno)}",
                step="holder",
                errno_name=errno.errorcode.get(refused[0].errno, ""),
            )

    def totals(self, box_id: int, timeout_s: float = 1.0) -> dict[Sensor, Totals]:
        """What each sensor saw of a box; every record of it so far is in the pipe when this returns.

        Call it after the box's last process is gone, then `read_records` until it is empty.
        Raises: MonitorError when the holder does not answer in time; then nothing is known about losses.
        """
        return {m.sensor: m for m in self._settle(box_id, timeout_s) if isinstance(m, Totals)}

    def _settle(self, box_id: int, timeout_s: float) -> list[Message]:
        """Flush both sensors; other messages are kept for `read_messages`. Returns what belongs to the settling."""
        deadline = time.monotonic() + timeout_s
        mine: list[Message] = []
        answered = 0
        self._request(Request.FLUSH, box_id=box_id)
        while answered < len(Sensor):
            message = self._next_message(deadline)
            if message is None:
                raise MonitorError("the holder did not answer in time")
            if isinstance(message, Totals) and message.box_id == box_id:
                answered += 1
                mine.append(message)
            elif isinstance(message, RequestRefused):
                mine.append(message)
            else:
                self._early.append(message)
                if isinstance(message, HolderDied):
                    raise MonitorError("the holder died")
        return mine

    def read_records(self, max_records: int = 4096) -> list[RawRecord]:
        """Records that are there by now, oldest first; [] when there are none. Raises: MonitorError on a broken one."""
        chunks = [self._partial] if self._partial else []
        have = len(self._partial)
        while have < max_records * RECORD_SIZE:
            try:
                chunk = os.read(self.records_fd, 64 * RECORD_SIZE)
            except BlockingIOError:
                break
            if not chunk:
                break
            chunks.append(chunk)
            have += len(chunk)
        raw = memoryview(b"".join(chunks))
        whole = len(raw) - len(raw) % RECORD_SIZE
        self._partial = bytes(raw[whole:])
        return [decode_record(raw[at : at + RECORD_SIZE]) for at in range(0, whole, RECORD_SIZE)]

    # -------------------------------------------------------------------------------------------------- ending

    def end(self) -> int:
        """Let the holder remove what is still registered and wait for it. Returns its status: 0 when nothing is left,
        1 when something stayed, negative when a signal ended it."""
        if self.process.returncode is None:
            with contextlib.suppress(SetupError):  # it is gone already: its status tells below
                self._request(Request.END)
            try:
                self.process.wait(self._KILL_GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()
        self._close()
        return self.process.returncode

    def _close(self) -> None:
        self._control.close()
        self.launcher_socket.close()
        if self.records_fd >= 0:
            os.close(self.records_fd)
            self.records_fd = -1

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


def _strings(*parts: bytes) -> bytes:
    if any(not part or b"\0" in part for part in parts):
        raise ValueError(f"empty or with NUL: {parts!r}")
    return b"".join(part + b"\0" for part in parts)


def _enlarge_pipe(fd: int) -> None:
    """More room between the sensors and the guard. A user over its pipe budget keeps the default of 64 KiB."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _RECORDS_PIPE_BYTES)
    except PermissionError:
        return
