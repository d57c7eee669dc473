"""`run --tty` at a real terminal, with a real box."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("run")]

DEADLINE_S = 40


class Terminal:
    """A user at a terminal who runs one command line."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (31, 97))
        self.before = termios.tcgetattr(self.slave)

        def controlling() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.child = subprocess.Popen(words, stdin=self.slave, stdout=self.slave, stderr=self.slave, cwd=cwd,
                                      preexec_fn=controlling)
        self.all = b""
        self.seen = b""

    def expect(self, text: bytes) -> bytes:
        """Everything up to and with `text`."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} not in {self.all!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                data = os.read(self.master, 65536)
                self.seen += data
                self.all += data
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def ends(self) -> int:
        end = time.monotonic() + DEADLINE_S
        while self.child.poll() is None:
            assert time.monotonic() < end, f"still running: {self.all!r}"
            if select.select([self.master], [], [], 0.02)[0]:
                self.all += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.all += os.read(self.master, 65536)
        return self.child.returncode

    def restored(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def at_terminal(dsec_guard_cli: tuple[str, ...], state_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def run(*argv: str, options: tuple[str, ...] = ()) -> Terminal:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        words = [*dsec_guard_cli, "run", "--tty", "--discard", "--report", str(tmp_path / "r.json"), *options, "--", *argv]
        made.append(Terminal(words, work))
        return made[-1]

    yield run
    for one in made:
        one.close()


def result(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "r.json").read_text())


def test_the_command_has_a_terminal_of_the_users_size(at_terminal, tmp_path: Path):
    t = at_terminal("sh", "-c", "test -t 0 && test -t 1 && test -t 2 && stty size && tty && echo to-tty >/dev/tty; "
                    "echo to-out >/dev/stdout")
    t.expect(b"31 97")
    t.expect(b"/dev/pts/0")
    t.expect(b"to-tty")
    t.expect(b"to-out")
    assert t.ends() == 0
    assert t.restored()
    assert result(tmp_path)["verdict"]["class"] == "clean"


def test_window_changes_reach_the_command(at_terminal):
    t = at_terminal("sh", "-c", "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done")
    t.expect(b"ready")
    termios.tcsetwinsize(t.slave, (40, 120))
    t.expect(b"40 120")
    assert t.ends() == 0


def test_control_characters_are_the_commands(at_terminal):
    t = at_terminal("sh", "-c", "trap 'echo GOT-INT' INT; echo ready; read a; read b; echo \"line=$b\"")
    t.expect(b"ready")
    t.type(b"\x03")
    t.expect(b"GOT-INT")
    t.type(b"one\n")
    t.type(b"two\n")
    t.expect(b"line=")
    assert t.ends() == 0


def test_suspension_is_job_control_inside(at_terminal):
    t = at_terminal("bash", "--norc", "-i")
    t.expect(b"$ ")
    t.type(b"sh -c 'echo u\"\"p; exec sleep 30'\n")
    t.expect(b"up\r\n")
    t.type(b"\x1a")
    t.expect(b"Stopped")
    t.type(b"disown %1; exit 5\n")
    assert t.ends() == 5
    assert t.restored()


def test_end_of_file_is_typed(at_terminal):
    t = at_terminal("sh", "-c", "echo ready; cat; echo over")
    t.expect(b"ready")
    t.type(b"text\n")
    t.expect(b"text\r\ntext")
    t.type(b"\x04")
    t.expect(b"over")
    assert t.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_restores_the_terminal(at_terminal, tmp_path: Path, number: signal.Signals):
    t = at_terminal("sh", "-c", "echo ready; exec sleep 60")
    t.expect(b"ready")
    t.child.send_signal(number)
    assert t.ends() == 128 + number
    assert t.restored()
    assert result(tmp_path)["exit"]["signal"] == number


def test_a_wall_limit_restores_the_terminal(at_terminal, tmp_path: Path):
    t = at_terminal("sleep", "60", options=("--wall", "1s"))
    assert t.ends() == 124
    assert t.restored()
    assert result(tmp_path)["exit"]["reason"] == "wall_limit"


@pytest.mark.parametrize("how", ["TIOCSTI", "TIOCLINUX"])
def test_nothing_can_be_typed_into_the_terminal_from_inside(at_terminal, tmp_path: Path, how: str):
    number = {"TIOCSTI": termios.TIOCSTI, "TIOCLINUX": 0x541C}[how]
    code = (f"import fcntl, os\ntry:\n fcntl.ioctl(0, {number}, b'i'); print('TYPED')\n"
            "except OSError as e: print('errno', e.errno)")
    t = at_terminal("python3", "-c", code)
    t.expect(b"errno 1")
    t.ends()
    assert b"TYPED" not in t.all
    assert any(i["class"] == "escape_attempt" for i in result(tmp_path)["incidents"])


def test_all_output_arrives_after_a_quick_end(at_terminal):
    t = at_terminal("sh", "-c", "seq 1 5000")
    t.expect(b"\r\n4999\r\n5000\r\n")
    assert t.ends() == 0


def test_without_a_terminal_the_command_still_gets_one(dsec_guard_cli, state_dir: Path, tmp_path: Path):
    words = [*dsec_guard_cli, "run", "--tty", "--quiet", "--discard", "--", "sh", "-c", "test -t 0 && stty size; cat"]
    done = subprocess.run(words, input=b"typed\n", capture_output=True, cwd=tmp_path, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(b"24 80\r\n") or b"24 80\r\n" in done.stdout
    assert b"typed" in done.stdout
