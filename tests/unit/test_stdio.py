"""The stream pump with real processes standing in for a box."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_guard.sandbox.stdio import BoxIO, Capture, StdioReport, fill_closed_stdio, open_pty_of, window_size

ME = (os.getuid(), os.getgid())
LIMIT = 64 << 20


def run_in(io: BoxIO, argv: list[str], *, limit: int = LIMIT, timeout: float = 20, wait_child: bool = True) -> StdioReport:
    """The order in which the guard uses a BoxIO, with a plain child in place of the box."""
    stdin, stdout, stderr = io.prepare(limit_bytes=limit, owner=ME)
    child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    io.start()
    try:
        if wait_child:
            child.wait(timeout)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(5)
    io.finish()
    assert io.wait(timeout)
    return io.report()


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def until(condition: Callable[[], bool], deadline_s: float = 10) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.005)


def test_bytes_pass_unmodified_with_digest_and_count():
    data = bytes(range(256)) * 4096
    out, err = Capture(LIMIT), Capture(LIMIT)
    with BoxIO(stdin=data, stdout=out, stderr=err) as io:
        report = run_in(io, ["sh", "-c", "cat; printf 'e\\000\\377' >&2"])
    assert out.data == data
    assert err.data == b"e\0\xff"
    assert report.stdout.passed == len(data)
    assert report.stdout.sha256 == hashlib.sha256(data).hexdigest()
    assert report.stdin.passed == len(data)
    assert report.stdin.sha256 == hashlib.sha256(data).hexdigest()
    assert report.limited == ()
    assert report.output_bytes == len(data) + 3


def test_output_beyond_the_limit_is_read_and_dropped():
    out, err = Capture(LIMIT), Capture(LIMIT)
    with BoxIO(stdin=None, stdout=out, stderr=err) as io:
        report = run_in(io, ["sh", "-c", "head -c 3000000 /dev/zero; echo done >&2"], limit=100_000)
    assert out.data == bytes(100_000)
    assert err.data == b"done\n"  # the command was never held up
    assert report.stdout.passed == 100_000
    assert report.stdout.dropped == 2_900_000
    assert report.limited == ("stdout",)


def test_output_of_exactly_the_limit_is_not_flagged():
    out = Capture(LIMIT)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(10)) as io:
        report = run_in(io, ["head", "-c", "100000", "/dev/zero"], limit=100_000)
    assert (report.stdout.passed, report.stdout.dropped, report.limited) == (100_000, 0, ())


def test_capture_keeps_only_its_cap():
    out = Capture(10)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(10)) as io:
        report = run_in(io, ["head", "-c", "1000", "/dev/zero"])
    assert out.data == bytes(10)
    assert out.truncated
    assert out.total == report.stdout.passed == 1000


def test_no_stdin_reads_as_end_of_file():
    out = Capture(100)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(100)) as io:
        run_in(io, ["sh", "-c", "cat; echo end"])
    assert out.data == b"end\n"


def test_idle_stdin_does_not_hold_the_end_back():
    idle_r, idle_w = os.pipe()
    try:
        with BoxIO(stdin=idle_r, stdout=Capture(100), stderr=Capture(100)) as io:
            report = run_in(io, ["true"], timeout=5)
        assert report.stdin.passed == 0
    finally:
        os.close(idle_r)
        os.close(idle_w)


def test_end_of_a_pipe_on_stdin_is_forwarded():
    read_end, write_end = os.pipe()
    out = Capture(100)
    os.write(write_end, b"one")
    os.close(write_end)
    with BoxIO(stdin=read_end, stdout=out, stderr=Capture(100)) as io:
        run_in(io, ["sh", "-c", "cat; echo ' end'"])
    os.close(read_end)
    assert out.data == b"one end\n"


def test_regular_file_and_directory_on_stdin(tmp_path: Path):
    (tmp_path / "in").write_bytes(b"x" * 200_000)
    for name, size in (("in", b"200000\n"), (".", b"0\n")):
        fd = os.open(tmp_path / name, os.O_RDONLY)
        out = Capture(100)
        with BoxIO(stdin=fd, stdout=out, stderr=Capture(100)) as io:
            run_in(io, ["wc", "-c"])
        os.close(fd)
        assert out.data == size


def test_input_is_no_longer_taken_once_the_command_closed_its_end():
    read_end, write_end = os.pipe()
    out = Capture(100)
    with BoxIO(stdin=read_end, stdout=out, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["sh", "-c", "exec <&-; echo closed; exec sleep 60"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        until(lambda: out.data == b"closed\n")
        until(lambda: io._input is not None and io._input.source == -1)
        os.write(write_end, b"for the next reader")
        child.kill()
        child.wait()
        io.finish()
        assert io.wait(5)
    assert os.read(read_end, 100) == b"for the next reader"
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_closes_gives_the_command_sigpipe():
    read_end, write_end = os.pipe()
    with BoxIO(stdin=None, stdout=write_end, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["yes"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        assert os.read(read_end, 4) == b"y\ny\n"
        os.close(read_end)
        assert child.wait(10) == -signal.SIGPIPE
        io.finish()
        assert io.wait(5)
        assert io.report().stdout.error == "EPIPE"
    os.close(write_end)


def test_a_slow_reader_holds_the_command_back_and_loses_nothing():
    read_end, write_end = os.pipe()
    before = fcntl.fcntl(write_end, fcntl.F_GETFL)
    total = 4 << 20
    with BoxIO(stdin=None, stdout=write_end, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["head", "-c", str(total), "/dev/zero"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        stuck = io.report().stdout.passed
        until(lambda: io.report().stdout.passed > 0)
        for _ in range(20):
            stuck = io.report().stdout.passed
            time.sleep(0.005)
        assert stuck <= 1 << 20  # nobody read yet: no more than this is ever buffered
        assert child.poll() is None
        got = 0
        chunk = b"?"
        reader_done = threading.Event()

        def read_all() -> None:
            nonlocal got, chunk
            while got < total and chunk:
                chunk = os.read(read_end, 65536)
                got += len(chunk)
            reader_done.set()

        threading.Thread(target=read_all, daemon=True).start()
        assert child.wait(20) == 0
        io.finish()
        assert io.wait(20)
        assert reader_done.wait(20)
        assert got == total
    assert fcntl.fcntl(write_end, fcntl.F_GETFL) == before  # shared with the caller's shell
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_never_reads_can_be_given_up():
    read_end, write_end = os.pipe()
    with BoxIO(stdin=None, stdout=write_end, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["yes"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        until(lambda: io.report().stdout.passed >= 4096)
        child.kill()
        child.wait()
        io.finish()
        assert not io.wait(0.05)
        io.abort()
        assert io.wait(5)
        assert io.report().stdout.dropped > 0
    os.close(read_end)
    os.close(write_end)


def test_a_leaked_writer_is_not_waited_for():
    out = Capture(LIMIT)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["sh", "-c", "echo first; sleep 60 & echo $!"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        assert child.wait(10) == 0
        io.finish()
        try:
            assert io.wait(5)
        finally:
            os.kill(int(out.data.split()[1]), signal.SIGKILL)
    assert out.data.startswith(b"first\n")


@pytest.mark.parametrize("kind", ["socket", "file", "blocking-off"])
def test_other_kinds_of_stdout(kind: str, tmp_path: Path):
    data = b"0123456789abcdef" * 8192
    here: socket.socket | None = None
    if kind == "socket":
        here, there = socket.socketpair()
        fd = there.detach()
    elif kind == "file":
        fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"before")
    else:
        read_end, fd = os.pipe()
        here = None
        os.set_blocking(fd, False)  # somebody else's choice
    got = bytearray()

    def drain() -> None:
        while len(got) < len(data):
            got.extend(here.recv(65536) if here else os.read(read_end, 65536))

    reader = threading.Thread(target=drain, daemon=True)
    if kind != "file":
        reader.start()
    with BoxIO(stdin=data, stdout=fd, stderr=Capture(100)) as io:
        run_in(io, ["cat"])
    if kind == "file":
        assert (tmp_path / "out").read_bytes() == b"before" + data  # at the shared offset
        assert os.lseek(fd, 0, os.SEEK_CUR) == len(data) + 6
    else:
        reader.join(10)
        assert bytes(got) == data
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pipe away")
@pytest.mark.parametrize("tty", [False, True])
def test_the_commands_user_owns_its_streams_and_may_reopen_them(tty: bool):
    with BoxIO(stdin=None, stdout=Capture(100), stderr=Capture(100), tty=tty) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=(12345, 12346))
        assert [(os.fstat(fd).st_uid, os.fstat(fd).st_gid) for fd in fds] == [(12345, 12346)] * 3
        assert all(os.fstat(fd).st_mode & 0o077 in (0, 0o020) for fd in fds)
        os.close(os.open(f"/proc/self/fd/{fds[1]}", os.O_WRONLY | os.O_NOCTTY))


def test_no_descriptor_is_left_behind():
    before = sorted(os.listdir("/proc/self/fd"))
    for tty in (False, True):
        with BoxIO(stdin=b"x", stdout=Capture(100), stderr=Capture(100), tty=tty) as io:
            run_in(io, ["true"])
        with BoxIO(stdin=b"x", stdout=Capture(100), stderr=Capture(100), tty=tty) as io:
            io.prepare(limit_bytes=1, owner=ME)  # the box could not be started
        with BoxIO(tty=tty):
            pass
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_done_fd_says_when_all_was_delivered():
    import select

    out = Capture(100)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(100)) as io:
        fds = io.prepare(limit_bytes=LIMIT, owner=ME)
        child = subprocess.Popen(["echo", "x"], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        child.wait()
        assert select.select([io.done_fd], [], [], 0)[0] == []
        io.finish()
        assert select.select([io.done_fd], [], [], 5)[0] == [io.done_fd]
        assert out.data == b"x\n"


def test_closed_standard_descriptors_become_dev_null(tmp_path: Path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from dsec_guard.sandbox.stdio import fill_closed_stdio\n"
        "fill_closed_stdio()\n"
        "rest = os.open('/dev/null', os.O_RDONLY)\n"
        "open(sys.argv[2], 'w').write(f'{[os.readlink(f\"/proc/self/fd/{n}\") for n in range(3)]} {rest}')\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    result = tmp_path / "result"
    subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code, root, str(result)], check=True)
    names, _, rest = result.read_text().rpartition(" ")
    assert names == "['/dev/null', '/dev/null', '/dev/null']"
    assert int(rest) > 2


def test_filling_leaves_open_descriptors_alone():
    before = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
    fill_closed_stdio()
    assert [os.readlink(f"/proc/self/fd/{n}") for n in range(3)] == before


# ------------------------------------------------------------------------------------------------------------- pty


def test_pty_output_and_a_late_writer_are_complete():
    out = Capture(LIMIT)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(1), tty=True) as io:
        report = run_in(io, python("import os\nos.write(1, b'x' * 3000 + b'\\n')\nprint(os.isatty(0), os.isatty(2))"))
    assert out.data == b"x" * 3000 + b"\r\nTrue True\r\n"
    assert report.tty
    assert report.stdout.passed == len(out.data)


def test_pty_end_of_input_is_the_end_of_file_character():
    out = Capture(LIMIT)
    with BoxIO(stdin=b"line\nrest", stdout=out, stderr=Capture(1), tty=True) as io:
        run_in(io, ["sh", "-c", "stty -echo; cat; echo :end"])
    assert out.data.endswith(b"rest:end\r\n")


def test_pty_output_limit():
    out = Capture(LIMIT)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(1), tty=True) as io:
        report = run_in(io, ["head", "-c", "50000", "/dev/zero"], limit=1000)
    assert out.data == bytes(1000)
    assert report.stdout.dropped == 49_000
    assert report.limited == ("stdout",)


def test_pty_size_without_a_terminal_is_24_by_80():
    out = Capture(100)
    with BoxIO(stdin=None, stdout=out, stderr=Capture(1), tty=True) as io:
        run_in(io, ["stty", "size"])
    assert out.data == b"24 80\r\n"


def test_a_pty_of_another_root_has_its_name_there():
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        master, slave = open_pty_of(root)
    finally:
        os.close(root)
    assert os.ttyname(slave).startswith("/dev/pts/")
    assert not os.get_inheritable(master)
    os.write(slave, b"x")
    assert os.read(master, 10) == b"x"
    os.close(master)
    os.close(slave)


SESSION = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from dsec_guard.sandbox.stdio import BoxIO
import fcntl, termios
how = sys.argv[2]
def controlling():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with BoxIO(tty=True) as io:
    fds = io.prepare(limit_bytes=1 << 20, owner=(os.getuid(), os.getgid()))
    child = subprocess.Popen(sys.argv[3:], stdin=fds[0], stdout=fds[1], stderr=fds[2], preexec_fn=controlling)
    io.start()
    if how == "raise":
        child.kill(); child.wait()
        raise SystemExit(7)
    code = child.wait()
    io.finish()
    io.wait(5)
print("code", code)
"""


class Terminal:
    """A user's terminal: a pty whose slave a child has as its controlling terminal."""

    def __init__(self, how: str, *argv: str) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.resize(31, 97)
        root = str(Path(__file__).resolve().parents[2])

        def controlling() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.child = subprocess.Popen([sys.executable, "-c", SESSION, root, how, *argv], stdin=self.slave,
                                      stdout=self.slave, stderr=self.slave, preexec_fn=controlling)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.slave, (rows, columns))

    def expect(self, text: bytes) -> None:
        import select

        end = time.monotonic() + 15
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} not in {self.seen!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.seen += os.read(self.master, 65536)
        self.seen = self.seen.split(text, 1)[1]

    def raw(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & termios.ICANON

    def restored(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made: list[Terminal] = []

    def make(how: str, *argv: str) -> Terminal:
        made.append(Terminal(how, *argv))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_interrupt_and_suspend_are_bytes_for_the_command(terminal):
    t = terminal("plain", "sh", "-c", "trap 'echo GOT-INT' INT; echo ready; read x; read y; echo \"x=$x\"")
    t.expect(b"ready")
    until(t.raw)
    os.write(t.master, b"\x03")
    t.expect(b"GOT-INT")
    os.write(t.master, b"word\n\n")
    t.expect(b"x=")
    t.expect(b"code 0")
    assert t.child.wait(5) == 0
    assert t.restored()


def test_window_size_is_taken_over_and_followed(terminal):
    t = terminal("plain", "sh", "-c", "stty size; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done")
    t.expect(b"31 97")
    t.expect(b"ready")
    t.resize(40, 120)
    t.expect(b"40 120")
    t.expect(b"code 0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_terminal_is_restored_on_a_signal(terminal, number: signal.Signals):
    t = terminal("plain", "sh", "-c", "trap '' HUP; echo ready; exec sleep 20")
    t.expect(b"ready")
    until(t.raw)
    t.child.send_signal(number)
    assert t.child.wait(10) == -number
    assert t.restored()


def test_terminal_is_restored_on_an_exception(terminal):
    t = terminal("raise", "sleep", "20")
    assert t.child.wait(10) == 7
    assert t.restored()


def test_raw_mode_returns_after_a_stop(terminal):
    t = terminal("plain", "sh", "-c", "echo ready; read x; echo \"x=$x\"")
    t.expect(b"ready")
    until(t.raw)
    termios.tcsetattr(t.slave, termios.TCSANOW, t.before)  # as a shell does while the job is stopped
    assert not t.raw()
    t.child.send_signal(signal.SIGCONT)
    until(t.raw)
    os.write(t.master, b"\n")
    t.expect(b"code 0")


def test_window_size_of_no_terminal():
    read_end, write_end = os.pipe()
    assert window_size(read_end) == (24, 80)
    os.close(read_end)
    os.close(write_end)
