"""The three streams of a command in a box: pipes or a pty between the box and whoever called the guard.

A thread of its own moves the bytes, so that neither a slow reader nor a busy guard stops the other. Nothing here changes
a flag of the caller's descriptors: fd 0, 1 and 2 are shared with the user's shell, and O_NONBLOCK belongs to the open
file, not to the descriptor (open(2)). The box gets pipe ends (or a pty slave) only, never a descriptor of the caller's:
those would not be bound by Landlock, and a terminal among them could be typed into.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import select
import signal
import stat
import struct
import termios
import threading
import time
import tty
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, Self

CHUNK = 64 << 10
PIPE_BUF = 4096
TTY_SLICE = 256              # what n_tty promises to take once poll(2) says writable (WAKEUP_CHARS)
PTY_DRAIN = 256 << 10        # more than a pty can hold
DROP_WINDOW_S = 0.02         # beyond the limit at most DROP_BYTES are read per window: 200 MiB/s per stream
DROP_BYTES = 4 << 20
BACKGROUND_RETRY_MS = 250
DEFAULT_WINDOW = (24, 80)
TIOCSPTLCK = 0x40045431
TIOCGPTPEER = 0x5441         # not in termios before Python 3.13

_USUAL_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH, signal.SIGTSTP, signal.SIGTTIN,
    signal.SIGTTOU, signal.SIGCONT, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)

_Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass(frozen=True)
class StreamReport:
    """What became of one stream.

    passed: bytes handed on; sha256: hex digest of exactly those. dropped: read from the box beyond the limit, or left
    over when the receiver went away. limited: the limit was reached. error: errno name of a receiver that failed
    (EPIPE: it closed), else empty.
    """

    passed: int = 0
    dropped: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    limited: bool = False
    error: str = ""


@dataclass(frozen=True)
class StdioReport:
    stdin: StreamReport
    stdout: StreamReport
    stderr: StreamReport
    tty: bool = False

    @property
    def output_bytes(self) -> int:
        """All that the command wrote and the guard read, dropped bytes included."""
        return sum(s.passed + s.dropped for s in (self.stdout, self.stderr))

    @property
    def limited(self) -> tuple[str, ...]:
        """Names of the streams that reached the limit."""
        return tuple(n for n, s in (("stdout", self.stdout), ("stderr", self.stderr)) if s.limited)

    def as_record(self) -> dict[str, dict[str, object]]:
        """Plain values for a record."""
        return {
            name: {"passed": s.passed, "dropped": s.dropped, "sha256": s.sha256, "limited": s.limited, "error": s.error}
            for name, s in (("stdin", self.stdin), ("stdout", self.stdout), ("stderr", self.stderr))
        }


# ------------------------------------------------------------------------------------------------------------ sinks


class Sink(Protocol):
    """Where a stream goes. `write` never waits: 0 = not now, poll `poll_fd` (None: always ready) for writing."""

    poll_fd: int | None

    def write(self, data: memoryview) -> int: ...

    def close(self) -> None: ...


class Capture:
    """Keeps the first `cap_bytes` in memory and counts the rest."""

    poll_fd: int | None = None

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._kept = bytearray()
        self.total = 0

    def write(self, data: memoryview) -> int:
        self._kept += data[: max(0, self._cap - len(self._kept))]
        self.total += len(data)
        return len(data)

    def close(self) -> None:
        """Nothing is held."""

    @property
    def data(self) -> bytes:
        return bytes(self._kept)

    @property
    def truncated(self) -> bool:
        return self.total > len(self._kept)


class FdSink:
    """A descriptor of the caller's, written to without waiting and without touching its flags."""

    def __init__(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        self._slice = CHUNK
        self.poll_fd: int | None = None
        self._send: Callable[[memoryview], int] | None = None
        terminal = os.isatty(fd)
        if stat.S_ISFIFO(mode) or terminal:
            try:  # a second open file has flags of its own
                self._fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError:  # no reader left, or a terminal of another user after su(1)
                self._fd = os.dup(fd)
                self._slice = TTY_SLICE if terminal else PIPE_BUF
            self.poll_fd = self._fd
        elif stat.S_ISSOCK(mode):
            import socket  # here, since it costs 3 ms and few need it

            sock = socket.socket(fileno=os.dup(fd))
            self._fd = sock.detach()
            self._send = lambda data: _send_nowait(self._fd, data)
            self.poll_fd = self._fd
        else:
            self._fd = os.dup(fd)  # shares the offset with the caller's descriptor

    def write(self, data: memoryview) -> int:
        try:
            if self._send is not None:
                return self._send(data)
            return os.write(self._fd, data[: self._slice])
        except (BlockingIOError, InterruptedError):
            return 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _send_nowait(fd: int, data: memoryview) -> int:
    import socket

    sock = socket.socket(fileno=fd)
    try:
        return sock.send(data, socket.MSG_DONTWAIT)
    finally:
        sock.detach()


# --------------------------------------------------------------------------------------------------------- terminal


class RawTerminal:
    """The user's terminal in raw mode; `restore` runs once, also at interpreter exit and on a fatal signal.

    Signals that already have a handler keep it:
    whoever installed it leads to `restore` by the ordinary path.
    """

    _FATAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)

    def __init__(self, fd: int, on_resize: Callable[[], None]) -> None:
        self._fd = fd
        self._on_resize = on_resize
        self.saved = termios.tcgetattr(fd)
        self._active = False
        self._handlers: dict[int, tuple[_Handler, _Handler]] = {}  # ours, the one before

    def enter(self) -> None:
        self._active = True
        atexit.register(self.restore)
        self._set_raw()
        if threading.current_thread() is not threading.main_thread():
            return  # no handler can be set from here: no resizing, and `restore` is left to `close` and atexit
        self._handle(signal.SIGWINCH, self._resized)
        self._handle(signal.SIGCONT, self._continued)
        for number in self._FATAL:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._handle(number, self._fatal)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers[number] = (handler, signal.signal(number, handler))

    def restore(self) -> None:
        """Put the terminal back as it was; harmless when repeated or when the terminal is gone."""
        if not self._active:
            return
        self._active = False
        atexit.unregister(self.restore)
        # From the background tcsetattr would stop us: termios(3), SIGTTOU.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            termios.tcsetattr(self._fd, termios.TCSANOW, self.saved)
        except termios.error:
            pass  # hung up: nobody is left to restore it for
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if threading.current_thread() is threading.main_thread():
            for number, (ours, before_us) in self._handlers.items():
                if signal.getsignal(number) == ours:
                    signal.signal(number, before_us)
        self._handlers.clear()

    def window(self) -> tuple[int, int]:
        return window_size(self._fd)

    def _set_raw(self) -> None:
        tty.setraw(self._fd, termios.TCSANOW)

    def _resized(self, _number: int, _frame: FrameType | None) -> None:
        self._on_resize()

    def _continued(self, _number: int, _frame: FrameType | None) -> None:
        if self._active:
            self._set_raw()
            self._on_resize()

    def _fatal(self, number: int, _frame: FrameType | None) -> None:
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def open_pty_of(root_fd: int) -> tuple[int, int]:
    """A pty pair of the devpts instance at dev/pts below `root_fd`; no name of the box is followed further than that.

    Returns: master and slave, close-on-exec. Raises: OSError. Source: pts(4), ioctl_tty(2), TIOCGPTPEER.
    """
    master = os.open("dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root_fd)
    try:
        fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))
        slave = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise
    return master, slave


def window_size(fd: int) -> tuple[int, int]:
    """Rows and columns of the terminal behind `fd`; 24 by 80 where it is none or does not know."""
    try:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return DEFAULT_WINDOW
    return (rows, columns) if rows and columns else DEFAULT_WINDOW


# ---------------------------------------------------------------------------------------------------------- streams


class _Output:
    """One stream from the box: `source` is ours (non-blocking), `sink` whoever receives it."""

    def __init__(self, source: int, sink: Sink, limit_bytes: int, *, pty: bool = False) -> None:
        self.source = source
        self.sink = sink
        self._left = limit_bytes
        self._pty = pty
        self.pending = memoryview(b"")
        self.passed = 0
        self.dropped = 0
        self._digest = hashlib.sha256()
        self.limited = False
        self.error = ""
        self._drain: int | None = None
        self._window_end = 0.0
        self._window_bytes = 0
        self.paused_until = 0.0

    @property
    def done(self) -> bool:
        return self.source < 0 and not self.pending

    @property
    def eager(self) -> bool:
        """Read without waiting for readiness: what a dead writer left in a pty shows only by reading until EAGAIN."""
        return self._pty and self._drain is not None and self.source >= 0 and not self.pending

    def readable(self, devnull: int) -> None:
        """Take one chunk from the box: to pass on, or beyond the limit to drop."""
        if self._left == 0 and self.limited and not self._pty:
            self._splice_away(devnull)
            return
        want = CHUNK if self._drain is None else min(CHUNK, self._drain)
        try:
            data = os.read(self.source, want)
        except BlockingIOError:
            if self._drain is not None:
                self.close_source()
            return
        except OSError as err:
            if err.errno != errno.EIO:  # EIO: every slave of the pty is closed
                self.error = self.error or errno.errorcode.get(err.errno or 0, "EIO")
            self.close_source()
            return
        if not data:
            self.close_source()
            return
        self._took(len(data))
        keep = data[: self._left]
        self._left -= len(keep)
        if len(keep) < len(data):
            self.limited = True
            self.dropped += len(data) - len(keep)
            self._pace(len(data) - len(keep))
        self.pending = memoryview(keep)

    def _splice_away(self, devnull: int) -> None:
        want = CHUNK if self._drain is None else min(CHUNK, self._drain)
        try:
            count = os.splice(self.source, devnull, want, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            if self._drain is not None:
                self.close_source()
            return
        if not count:
            self.close_source()
            return
        self._took(count)
        self.dropped += count
        self._pace(count)

    def _took(self, count: int) -> None:
        if self._drain is not None:
            self._drain -= count
            if self._drain <= 0:
                self.close_source()

    def _pace(self, count: int) -> None:
        """A flood must not cost the guard a processor."""
        now = time.monotonic()
        if now >= self._window_end:
            self._window_end, self._window_bytes = now + DROP_WINDOW_S, 0
        self._window_bytes += count
        if self._window_bytes >= DROP_BYTES:
            self.paused_until = self._window_end

    def flush(self) -> None:
        """Hand pending bytes on as far as the sink takes them now."""
        while self.pending:
            try:
                count = self.sink.write(self.pending)
            except OSError as err:
                self._sink_failed(err)
                return
            if not count:
                return
            self._digest.update(self.pending[:count])
            self.passed += count
            self.pending = self.pending[count:]

    def _sink_failed(self, err: OSError) -> None:
        """The receiver is gone: the command learns it as it would outside, by SIGPIPE on its next write."""
        self.error = errno.errorcode.get(err.errno or 0, "EIO")
        self.dropped += len(self.pending)
        self.pending = memoryview(b"")
        self.close_source()

    def begin_drain(self) -> None:
        """The writers are gone: read what is there now, and not what a leaked writer may still add."""
        if self.source < 0:
            return
        self.paused_until = 0.0
        if self._pty:
            self._drain = PTY_DRAIN
            return
        self._drain = struct.unpack("i", fcntl.ioctl(self.source, termios.FIONREAD, bytes(4)))[0]
        if self._drain == 0:
            self.close_source()

    def close_source(self) -> None:
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def report(self) -> StreamReport:
        return StreamReport(passed=self.passed, dropped=self.dropped, sha256=self._digest.hexdigest(),
                            limited=self.limited, error=self.error)


class _Input:
    """The stream to the box: from a descriptor of the caller's (a duplicate of it) or from bytes."""

    def __init__(self, source: int | bytes | None, target: int, *, pty: bool = False) -> None:
        self.source = -1
        self.target = target
        self.pending = memoryview(b"")
        self._pty = pty
        self._at_line_start = True
        self._eof_sent = False
        self.passed = 0
        self._digest = hashlib.sha256()
        self._terminal = False
        if isinstance(source, bytes):
            self.pending = memoryview(source)
        elif source is not None:
            self.source = os.dup(source)
            self._terminal = os.isatty(self.source)

    def in_background(self) -> bool:
        """Reading the controlling terminal from a background job would stop the whole guard (SIGTTIN)."""
        if not self._terminal:
            return False
        try:
            return os.tcgetpgrp(self.source) != os.getpgrp()
        except OSError:
            return False  # not our controlling terminal

    def readable(self) -> None:
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return
        except OSError as err:
            if err.errno == errno.EIO and self.in_background():
                return
            data = b""  # a directory, a hung-up terminal: no more input
        if data:
            self.pending = memoryview(data)
        else:
            self.close_source()

    def flush(self) -> None:
        if self.target < 0:
            return
        while self.pending:
            try:
                count = os.write(self.target, self.pending[:CHUNK])
            except BlockingIOError:
                return
            except OSError:  # EPIPE: the command reads no more
                self.close()
                return
            self._digest.update(self.pending[:count])
            self.passed += count
            self._at_line_start = self.pending[count - 1] == 0x0A
            self.pending = self.pending[count:]
        if self.source < 0:
            self._end()

    def _end(self) -> None:
        """Pass the end of input on: a pipe closes, a terminal line discipline wants its end-of-file character."""
        if self._pty and not self._eof_sent:
            self._eof_sent = True
            self.pending = memoryview(b"\x04" if self._at_line_start else b"\x04\x04")
            self.flush()
        else:
            self._close_target()

    def _close_target(self) -> None:
        if self.target >= 0:
            os.close(self.target)
            self.target = -1

    def close_source(self) -> None:
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def close(self) -> None:
        self.close_source()
        self._close_target()
        self.pending = memoryview(b"")

    def report(self) -> StreamReport:
        return StreamReport(passed=self.passed, sha256=self._digest.hexdigest())


class BoxIO:
    """Streams of one command. Order of use: `prepare`, hand the three descriptors to the exec, `start`, when the
    command has ended and its box is empty `finish`, then `wait` (or watch `done_fd`), at last `close`; a context
    manager closes. `close` restores the terminal whatever happened before.

    stdin: a descriptor, bytes, or None for no input. stdout, stderr: a descriptor or a Capture.
    Raises: OSError where a given descriptor is not open.
    """

    def __init__(self, *, stdin: int | bytes | None = 0, stdout: int | Capture = 1, stderr: int | Capture = 2,
                 tty: bool = False) -> None:
        self.tty = tty
        self._stdin_from = stdin
        self._stdout_to = stdout
        self._stderr_to = stderr
        self._outputs: dict[str, _Output] = {}
        self._input: _Input | None = None
        self._box_ends: list[int] = []
        self._held: list[int] = []
        self._terminal: RawTerminal | None = None
        self._master = -1
        self._thread: threading.Thread | None = None
        self._finishing = False
        self._aborted = False
        self._resize = False
        self._closed = False
        self.failure: BaseException | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.done_fd, self._done_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._done = threading.Event()
        self._devnull = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---- set-up

    def prepare(self, *, limit_bytes: int, owner: tuple[int, int], root_fd: int = -1) -> tuple[int, int, int]:
        """Make the box's ends of the streams.

        limit_bytes: how much of each of stdout and stderr passes. owner: *host* uid and gid of the command's user; the
        pipes become its own, so that opening /dev/stdout inside works. root_fd: the box's root; a pty then comes from
        the box's own devpts, where its name and its Landlock rules are, else from the host's.
        Returns: three descriptors for ExecRequest.stdio, owned by this object until `start`.
        """
        if self.tty:
            return self._prepare_pty(limit_bytes, owner, root_fd)
        stdin_r, stdin_w = os.pipe2(os.O_CLOEXEC)
        self._box_ends.append(stdin_r)
        os.set_blocking(stdin_w, False)
        os.fchown(stdin_r, *owner)
        self._input = _Input(self._stdin_from, stdin_w)
        for name, to in (("stdout", self._stdout_to), ("stderr", self._stderr_to)):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            self._box_ends.append(write_end)
            os.set_blocking(read_end, False)
            os.fchown(write_end, *owner)
            self._outputs[name] = _Output(read_end, _sink_for(to), limit_bytes)
        return self._box_ends[0], self._box_ends[1], self._box_ends[2]

    def _prepare_pty(self, limit_bytes: int, owner: tuple[int, int], root_fd: int) -> tuple[int, int, int]:
        master, slave = os.openpty() if root_fd < 0 else open_pty_of(root_fd)
        self._master = master
        self._held += [master, slave]  # our slave keeps the line up while nobody inside has it open
        os.set_blocking(master, False)
        os.fchown(slave, *owner)
        os.fchmod(slave, 0o620)
        source = self._stdin_from
        if isinstance(source, int) and os.isatty(source):
            self._terminal = RawTerminal(source, self._note_resize)
            termios.tcsetattr(slave, termios.TCSANOW, self._terminal.saved)
        self._copy_window()
        self._input = _Input(source, os.dup(master), pty=True)
        self._outputs["stdout"] = _Output(os.dup(master), _sink_for(self._stdout_to), limit_bytes, pty=True)
        return slave, slave, slave

    def start(self) -> None:
        """The command has its streams: drop our copies of its ends, make the terminal raw, start moving bytes."""
        self._close_box_ends()
        if self._terminal is not None:
            self._terminal.enter()
        self._thread = threading.Thread(target=self._run, name="dsec-guard-stdio", daemon=True)
        # The thread takes no signals: handlers belong to the main thread, and SIGTTIN must become EIO (see _Input). It
        # starts without those that are usual; the rest it shuts out itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _USUAL_SIGNALS)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # ---- end

    def finish(self) -> None:
        """The box is empty: deliver what is still in the pipes, then be done. Returns at once."""
        self._finishing = True
        self._wake()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until everything was delivered; False on timeout (a reader that does not read). `finish` comes first.

        Raises: whatever broke the moving thread.
        """
        if self._thread is not None and not self._done.wait(timeout_s):
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def abort(self) -> None:
        """Give up on what was not delivered yet."""
        self._aborted = True
        self._wake()

    def close(self) -> None:
        """Restore the terminal and release everything; undelivered bytes are dropped. Repeating is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._terminal is not None:
            self._terminal.restore()
        self._close_box_ends()
        if self._thread is not None:
            self.abort()
            self._thread.join(1.0)
            if self._thread.is_alive():
                # Stuck in a write to a descriptor that only pretended to be ready; its descriptors stay with it.
                return
        for output in self._outputs.values():
            output.close_source()
            output.sink.close()
        if self._input is not None:
            self._input.close()
        for fd in (*self._held, self._wake_r, self._wake_w, self.done_fd, self._done_w, self._devnull):
            os.close(fd)
        self._held.clear()

    def report(self) -> StdioReport:
        """Counts and digests so far; final once `wait` returned True or `close` was called."""
        none = StreamReport()
        return StdioReport(
            stdin=self._input.report() if self._input else none,
            stdout=self._outputs["stdout"].report() if "stdout" in self._outputs else none,
            stderr=self._outputs["stderr"].report() if "stderr" in self._outputs else none,
            tty=self.tty,
        )

    # ---- internals

    def _close_box_ends(self) -> None:
        for fd in self._box_ends:
            os.close(fd)
        self._box_ends.clear()

    def _note_resize(self) -> None:
        self._resize = True
        self._wake()

    def _copy_window(self) -> None:
        if self._terminal is not None:
            rows, columns = self._terminal.window()
        else:
            rows, columns = window_size(self._stdout_to) if isinstance(self._stdout_to, int) else DEFAULT_WINDOW
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is already waiting
            os.write(self._wake_w, b"\0")

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._loop()
        except BaseException as err:  # noqa: BLE001  (handed to whoever waits)
            self.failure = err
        finally:
            for output in self._outputs.values():  # the command must not hang on a stream that nobody reads
                output.dropped += len(output.pending)
                output.pending = memoryview(b"")
                output.close_source()
            self._done.set()
            os.write(self._done_w, b"\0")

    def _loop(self) -> None:
        assert self._input is not None
        draining = False
        while not self._aborted:
            if self._finishing and not draining:
                draining = True
                self._input.close()
                for output in self._outputs.values():
                    output.begin_drain()
            if draining and all(o.done for o in self._outputs.values()):
                return
            self._turn()

    def _turn(self) -> None:
        """Wait for anything to move, and move it."""
        stdin = self._input
        assert stdin is not None
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        actions: dict[int, Callable[[], None]] = {}
        timeout_ms: float | None = None
        now = time.monotonic()
        for output in self._outputs.values():
            if output.pending:
                if output.sink.poll_fd is None:
                    timeout_ms = 0
                else:
                    poll.register(output.sink.poll_fd, select.POLLOUT)
                    actions[output.sink.poll_fd] = output.flush
            elif output.eager:
                timeout_ms = 0
            elif output.source >= 0:
                if output.paused_until > now:
                    wait_ms = (output.paused_until - now) * 1000
                    timeout_ms = wait_ms if timeout_ms is None else min(timeout_ms, wait_ms)
                else:
                    poll.register(output.source, select.POLLIN)
                    actions[output.source] = self._taker(output)
        if stdin.target >= 0:
            if stdin.pending or stdin.source < 0:
                poll.register(stdin.target, select.POLLOUT)
                actions[stdin.target] = stdin.flush
            else:
                if not self.tty:  # an error alone: the command closed its input
                    poll.register(stdin.target, 0)
                    actions[stdin.target] = stdin.close
                if stdin.in_background():
                    timeout_ms = BACKGROUND_RETRY_MS if timeout_ms is None else min(timeout_ms, BACKGROUND_RETRY_MS)
                else:
                    poll.register(stdin.source, select.POLLIN)
                    actions[stdin.source] = self._feed
        ready = poll.poll(None if timeout_ms is None else max(0, round(timeout_ms + 0.5)))
        for fd, _events in ready:
            if fd == self._wake_r:
                os.read(self._wake_r, 4096)
                if self._resize:
                    self._resize = False
                    self._copy_window()
            else:
                actions[fd]()
        for output in self._outputs.values():
            if output.eager:
                output.readable(self._devnull)
            if output.pending and output.sink.poll_fd is None:
                output.flush()

    def _taker(self, output: _Output) -> Callable[[], None]:
        def take() -> None:
            output.readable(self._devnull)
            output.flush()
        return take

    def _feed(self) -> None:
        assert self._input is not None
        self._input.readable()
        self._input.flush()


def _sink_for(to: int | Capture) -> Sink:
    return FdSink(to) if isinstance(to, int) else to


def fill_closed_stdio() -> None:
    """Open /dev/null on whichever of 0, 1 and 2 is closed, so that no later file of ours lands there and receives a
    command's output. Called before anything else opens a file."""
    for fd in (0, 1, 2):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            opened = os.open("/dev/null", os.O_RDONLY if fd == 0 else os.O_WRONLY)  # the lowest free number: `fd`
            os.set_inheritable(opened, True)
