"""The streams of `run` with a real box: what a shell does to a command must work on a guarded one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("run")]

TIMEOUT_S = 100


@pytest.fixture
def shell(dsec_guard_cli: tuple[str, ...], state_dir: Path, tmp_path: Path):
    """Run a line of shell in which "$@" is `dsec-guard run --discard --report r.json`."""
    (tmp_path / "work").mkdir()
    words = [*dsec_guard_cli, "run", "--discard", "--report", str(tmp_path / "r.json")]

    def run(line: str, **options) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["bash", "-o", "pipefail", "-c", line, "bash", *words], capture_output=True, timeout=TIMEOUT_S,
                              cwd=tmp_path / "work", check=False, **options)

    return run


def result(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "r.json").read_text())


def test_a_reader_that_leaves_ends_the_command(shell, tmp_path: Path):
    done = shell('"$@" --quiet -- yes | head -n 2; exit ${PIPESTATUS[0]}')
    assert done.stdout == b"y\ny\n"
    assert done.returncode == 128 + signal.SIGPIPE
    assert result(tmp_path)["exit"] == {"code": None, "signal": 13, "reason": "signal"}
    assert result(tmp_path)["verdict"]["class"] == "clean"


def test_closed_streams_are_no_streams(shell, tmp_path: Path):
    done = shell('"$@" --quiet -- sh -c "cat; echo x; echo y >&2; exit 4" <&- >&- 2>&-')
    assert done.returncode == 4
    assert result(tmp_path)["verdict"]["class"] == "clean"


def test_an_idle_stdin_does_not_hold_the_end(shell):
    read_end, write_end = os.pipe()
    done = shell('"$@" --quiet -- echo done', stdin=read_end)
    os.close(read_end)
    os.close(write_end)
    assert (done.stdout, done.returncode) == (b"done\n", 0)


def test_bytes_pass_both_ways_and_streams_can_be_reopened(shell, tmp_path: Path):
    data = os.urandom(300_000)
    done = shell('"$@" --quiet -- sh -c "cat /dev/stdin >/dev/stdout; echo e >/dev/stderr"', input=data)
    assert done.stdout == data
    assert done.stderr == b"e\n"
    streams = result(tmp_path)["stdio"]
    assert streams["stdin"]["sha256"] == streams["stdout"]["sha256"]
    assert streams["stdout"]["passed"] == len(data)


def test_output_beyond_the_limit_is_dropped_and_flagged(shell, tmp_path: Path):
    done = shell('"$@" --quiet --limit output=1MiB -- sh -c "head -c 5000000 /dev/zero; echo end >&2"')
    assert len(done.stdout) == 1 << 20
    assert done.stderr.startswith(b"end\n")
    assert "output" in result(tmp_path)["flags"]
    assert result(tmp_path)["usage"]["output_bytes"] == 5_000_004


def test_json_is_all_of_stdout(shell):
    done = shell('"$@" --json --quiet -- echo hello')
    assert json.loads(done.stdout)["exit"]["code"] == 0
    assert done.stderr.startswith(b"hello\n")


def test_what_outlives_the_command_is_ended_and_not_waited_for(shell, tmp_path: Path):
    started = time.monotonic()
    done = shell('"$@" --quiet -- sh -c "sleep 90 & echo started"')
    assert done.stdout == b"started\n"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("command", "status", "reason"), [("/no/such", 127, "not_found"), ("/etc/passwd", 126, "not_executable")])
def test_what_cannot_run_says_so(shell, tmp_path: Path, command: str, status: int, reason: str):
    done = shell(f'"$@" --quiet -- {command}')
    assert done.returncode == status
    assert result(tmp_path)["exit"]["reason"] == reason
    assert done.stdout == b""
    assert b"inside the box" in done.stderr


def test_packed_changes_can_be_applied_later(dsec_guard_cli, state_dir: Path, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "old").write_text("before")
    pack = tmp_path / "changes.tar.zst"
    subprocess.run([*dsec_guard_cli, "run", "--quiet", "--pack", str(pack), "--", "sh", "-c", "echo after >old; echo new >new"],
                   cwd=work, timeout=TIMEOUT_S, check=True)
    assert (work / "old").read_text() == "before"
    words = [*dsec_guard_cli, "apply", str(pack), "--to", str(work)]
    (work / "old").write_text("changed on the host")
    done = subprocess.run(words, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert b"changed on the host: old" in done.stderr
    assert not (work / "new").exists()
    done = subprocess.run([*words, "--force"], capture_output=True, timeout=TIMEOUT_S, check=True)
    assert b"1 written" in done.stderr
    assert ((work / "old").read_text(), (work / "new").read_text()) == ("changed on the host", "new\n")
