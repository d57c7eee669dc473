"""The guard's side of the launcher and of dg-init: requests out, checked answers in.

`Launcher` speaks to dg-launcher, which is trusted; `BoxInit` to dg-init, which lives beside the agent and whose bytes are
taken as hostile: fixed length, known kinds, numbers we gave out, no descriptors.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsec_guard.errors import SetupError
from dsec_guard.sandbox import plan
from dsec_guard.sandbox.spec import ExecRequest, SelfCheck, SpawnedBox, SpawnSpec

_LONGEST_EXTRA_S = 5.0  # beyond the launcher's own deadline: it answers then in any case

_HINTS = {
    ("build_root", "mount_setattr idmap"): "this file system cannot be id-mapped here; the tree has to be copied or chowned",
    ("build_root", "open_tree"): "the path has to exist on the host",
    ("clone", "clone3"): "needs root, Linux 5.7 or later, and a v2 cgroup directory whose tree is still there",
    ("enter_user_ns", "setns"): "user namespaces have to be enabled: sysctl user.max_user_namespaces",
    ("make_userns", "unshare"): "user namespaces have to be enabled: sysctl user.max_user_namespaces",
    ("deadline", ""): "the host is overloaded or a file system hangs; raise deadline_ms",
    ("self_check", ""): "a denial that this policy promises does not hold on this host: `dsec-guard doctor`",
}


@dataclass(frozen=True)
class StartedExec:
    """A command after its exec. pid_inside: in the box's pid namespace."""

    exec_id: int
    pid_inside: int


@dataclass(frozen=True)
class ExecExit:
    """The end of a command. status: as wait(2) gives it (`os.waitstatus_to_exitcode`)."""

    exec_id: int
    status: int


def _text(raw: bytes) -> str:
    """A C text field; what is not printable ASCII becomes `?`, whoever wrote it."""
    return "".join(chr(c) if 0x20 <= c < 0x7F else "?" for c in raw.split(b"\0", 1)[0])


def _setup_error(answer: dict[str, Any], what: str) -> SetupError:
    step, call, number = _text(answer["step"]), _text(answer["call"]), answer["errnum"]
    name = errno.errorcode.get(number, str(number))
    hint = _HINTS.get((step, call.split("(", 1)[0])) or _HINTS.get((step, ""), "")
    return SetupError(f"{what}: {step}: {call}: {name} ({os.strerror(number)})", step=step, errno_name=name, hint=hint)


def _broken(what: str, call: str, number: int) -> SetupError:
    return SetupError(f"{what}: {call}: {errno.errorcode[number]}", step="protocol", errno_name=errno.errorcode[number])


def _receive(sock: socket.socket, max_fds: int) -> tuple[bytes, list[int]]:
    """One message, and its descriptors (close-on-exec). More than `max_fds` are closed by the kernel (MSG_CTRUNC)."""
    numbers = array.array("i")
    space = socket.CMSG_SPACE(max_fds * numbers.itemsize) if max_fds else 0
    data, ancillary, flags, _ = sock.recvmsg(plan.ANSWER.size + 1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(raw[: len(raw) - len(raw) % numbers.itemsize])
    fds = list(numbers)
    if max_fds and flags & socket.MSG_CTRUNC:
        _close_all(fds)
        raise _broken("launcher", "too many descriptors in an answer", errno.EPROTO)
    return data, fds


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _wait_readable(sock: socket.socket, deadline: float, what: str) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise SetupError(f"{what}: no answer in time", step="deadline", errno_name="ETIMEDOUT",
                         hint=_HINTS[("deadline", "")])


def _parse(data: bytes, what: str) -> dict[str, Any]:
    if not data:
        raise _broken(what, "the process has ended", errno.EPIPE)
    if len(data) != plan.ANSWER.size:
        raise _broken(what, f"an answer of {len(data)} bytes", errno.EPROTO)
    answer = plan.ANSWER.unpack(data)
    if answer["magic"] != plan.MSG_MAGIC or answer["version"] != plan.VERSION:
        raise _broken(what, "an answer of another version", errno.EPROTO)
    return answer


def _checks(answer: dict[str, Any]) -> tuple[SelfCheck, ...]:
    results = []
    for index in range(min(answer["checks"], plan.MAX_CHECKS + 8)):
        one = plan.CHECK_RESULT.unpack(answer["check"], index * plan.CHECK_RESULT.size)
        detail = errno.errorcode.get(one["errnum"], str(one["errnum"]))
        results.append(SelfCheck(name=_text(one["name"]), refused=bool(one["refused"]), detail=detail))
    return tuple(results)


class Launcher:
    """One dg-launcher behind `sock`, a connected SEQPACKET socket that this object owns. One request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def close(self) -> None:
        """The launcher ends at end-of-file; boxes it made live on."""
        self._sock.close()

    def _ask(self, request: bytes, fds: list[int], timeout: float, what: str) -> tuple[dict[str, Any], list[int]]:
        try:
            socket.send_fds(self._sock, [request], fds)
            _wait_readable(self._sock, time.monotonic() + timeout, what)
            data, received = _receive(self._sock, plan.MAX_FDS)
        except OSError as problem:
            raise _broken(what, "the launcher's socket", problem.errno or errno.EIO) from problem
        try:
            answer = _parse(data, what)
            if answer["kind"] == plan.ANS_ERROR:
                raise _setup_error(answer, what)
        except SetupError:
            _close_all(received)
            raise
        return answer, received

    def make_userns(self, base_uid: int, *, owner: tuple[int, int] | None = None, agent_uid: int = 1000) -> int:
        """A user namespace 0..65535 -> base_uid.., charged to base_uid. Returns its descriptor, the caller's to close.

        owner: host (uid, gid) that an id-mapped mount shall show as `agent_uid`; the two ids change places. Such a map
        only serves as SpawnSpec.owner_map_fd. Raises: SetupError, step `make_userns`.
        """
        numbers = (base_uid, owner[0], owner[1], agent_uid) if owner else (base_uid,)
        request = plan.pack_request(plan.REQ_MAKE_USERNS, *numbers, flags=plan.USERNS_OWNER if owner else 0)
        answer, fds = self._ask(request, [], _LONGEST_EXTRA_S, "user namespace")
        if answer["kind"] != plan.ANS_USERNS or len(fds) != 1:
            _close_all(fds)
            raise _broken("user namespace", "an unexpected answer", errno.EPROTO)
        return fds[0]

    def spawn(self, spec: SpawnSpec, packed: plan.PackedPlan | None = None) -> SpawnedBox:
        """Builds a box and returns its handles once dg-init is up and has proved its denials. packed: the spec as bytes.

        Raises: SetupError with the launcher's step (`build_root`, `deadline`, `self_check`, ...) and errno; the box's
        first process is then killed, and emptying the cgroup is the caller's.
        """
        packed = plan.pack_plan(spec) if packed is None else packed
        what = f"box {spec.name}"
        memfd = plan.sealed_memfd(packed.data, "dsec-plan")
        try:
            answer, fds = self._ask(plan.pack_request(plan.REQ_SPAWN), [memfd, *packed.fds],
                                    spec.deadline_ms / 1000 + _LONGEST_EXTRA_S, what)
        finally:
            os.close(memfd)
        listener = 1 if answer["has_listener"] else 0
        if answer["kind"] != plan.ANS_SPAWNED or len(fds) != 4 + listener + 2 * len(packed.overlay_names):
            _close_all(fds)
            raise _broken(what, "an unexpected answer", errno.EPROTO)
        layers = fds[4 + listener:]
        return SpawnedBox(
            pid=answer["pid"], pidfd=fds[0], init_fd=fds[1], store_fd=fds[2], root_fd=fds[3],
            listener_fd=fds[4] if listener else -1,
            overlay_fds=dict(zip(packed.overlay_names, layers[0::2], strict=True)),
            upper_fds=dict(zip(packed.overlay_names, layers[1::2], strict=True)),
            checks=_checks(answer),
        )


class BoxInit:
    """dg-init of one box behind `init_fd`, which this object owns.

    Exits that arrive while something else is awaited are kept for `read_exits`; `fileno` is readable when new ones come.
    """

    def __init__(self, init_fd: int) -> None:
        self._sock = socket.socket(fileno=init_fd)
        self._next_id = 1
        self._live: set[int] = set()
        self._exits: list[ExecExit] = []
        self.closed_by_box = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """dg-init ends at end-of-file, and with it every process of the box."""
        self._sock.close()

    def _next_answer(self) -> dict[str, Any]:
        try:
            data, _ = _receive(self._sock, 0)
        except ConnectionError:
            data = b""
        if not data:
            self.closed_by_box = True
        return _parse(data, "box's first process")

    def exec(
        self, req: ExecRequest, timeout: float = 10.0, *, on_id: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] | None = None
    ) -> StartedExec:
        """Starts a command and returns after its exec. `on_id` learns its number before anything runs; `meanwhile` is
        called while the command is being started, and what it raises is passed on.

        Raises: SetupError; step `execve` with ENOENT or EACCES when the program cannot be run, `chdir` for its directory,
        `deadline` when no answer came in time (the command may yet start: end the box).
        """
        exec_id = self._next_id
        self._next_id = exec_id % 0xFFFFFFFE + 1
        memfd = plan.sealed_memfd(plan.pack_exec(req), "dsec-exec")
        if on_id is not None:
            on_id(exec_id)
        self._live.add(exec_id)
        try:
            socket.send_fds(self._sock, [plan.pack_request(plan.REQ_EXEC, exec_id)], [memfd, *req.stdio])
        except OSError as problem:
            raise _broken("exec", "the box's socket", problem.errno or errno.EIO) from problem
        finally:
            os.close(memfd)
        deadline = time.monotonic() + timeout
        if meanwhile is not None:
            meanwhile()
        while True:
            _wait_readable(self._sock, deadline, "exec")
            answer = self._next_answer()
            if answer["exec_id"] == exec_id and answer["kind"] == plan.ANS_STARTED:
                return StartedExec(exec_id=exec_id, pid_inside=answer["pid"])
            if answer["exec_id"] == exec_id and answer["kind"] == plan.ANS_FAILED:
                self._live.discard(exec_id)
                raise _setup_error(answer, "exec")
            self._take_exit(answer)

    def _take_exit(self, answer: dict[str, Any]) -> None:
        if answer["kind"] != plan.ANS_EXITED or answer["exec_id"] not in self._live:
            raise _broken("box's first process", "an unexpected answer", errno.EPROTO)
        self._live.discard(answer["exec_id"])
        self._exits.append(ExecExit(exec_id=answer["exec_id"], status=answer["status"] & 0xFFFF))

    def read_exits(self) -> list[ExecExit]:
        """The ends that have arrived, without waiting. After the box's end: what came before, `closed_by_box` set.

        Raises: SetupError, step `protocol`, for bytes that dg-init never sends.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while not self.closed_by_box and poller.poll(0):
            try:
                self._take_exit(self._next_answer())
            except SetupError:
                if not self.closed_by_box:
                    raise
        exits, self._exits = self._exits, []
        return exits

    def signal(self, exec_id: int | None, sig: int) -> None:
        """Sends `sig` to the process group of a command, or with None to every process of the box.

        A command that has ended is passed over. Raises: SetupError, step `protocol`, when the box is gone.
        """
        target = plan.SIGNAL_ALL if exec_id is None else exec_id
        try:
            self._sock.send(plan.pack_request(plan.REQ_SIGNAL, target, sig))
        except OSError as problem:
            raise _broken("signal", "the box's socket", problem.errno or errno.EIO) from problem
