"""The command line with a stand-in for the guard: options, exit statuses, where every byte goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from dsec_guard.cli.main import COMMANDS, cli
from dsec_guard.cli.run import exit_status
from dsec_guard.errors import HostError
from dsec_guard.incident.store import StateDir
from dsec_guard.model import Class, ExitReason, Level, Validity, Verdict, VerdictClass
from dsec_guard.sandbox.stdio import BoxIO
from dsec_guard.service.request import ExitInfo, KeepMode, RunOutcome, RunRequest

ROOT = Path(__file__).resolve().parents[2]


class FakeGuard:
    """Runs the command bare (it is ours) and says what the test wants to hear."""

    requests: ClassVar[list[RunRequest]] = []
    make: Callable[..., RunOutcome]
    changes: ClassVar[dict[str, Any]] = {}
    error: Exception | None = None
    warning = ""

    def __init__(self, on_warning: Callable[[str], None]) -> None:
        self._warn = on_warning

    @classmethod
    def open(cls, _state_dir: Path, *, on_warning: Callable[[str], None]) -> FakeGuard:
        return cls(on_warning)

    def __enter__(self) -> FakeGuard:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def run(self, request: RunRequest, io: BoxIO) -> RunOutcome:
        FakeGuard.requests.append(request)
        if FakeGuard.warning:
            self._warn(FakeGuard.warning)
        if FakeGuard.error is not None:
            raise FakeGuard.error
        fds = io.prepare(limit_bytes=request.policy.limits.output, owner=(os.getuid(), os.getgid()))
        child = subprocess.Popen([os.fsdecode(w) for w in request.argv], stdin=fds[0], stdout=fds[1], stderr=fds[2])
        io.start()
        code = child.wait(20)
        io.finish()
        assert io.wait(20)
        end = ExitInfo(reason=ExitReason.EXITED, code=code) if code >= 0 else ExitInfo(reason=ExitReason.SIGNAL, signal=-code)
        return FakeGuard.make(**{"argv": request.argv, "exit": end, "policy_name": request.policy.name, **FakeGuard.changes})


@pytest.fixture
def guard(monkeypatch, make_outcome, tmp_path: Path) -> type[FakeGuard]:
    module = ModuleType("dsec_guard.service.guard")
    module.Guard = FakeGuard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dsec_guard.service.guard", module)
    monkeypatch.setattr(FakeGuard, "requests", [])
    monkeypatch.setattr(FakeGuard, "changes", {})
    monkeypatch.setattr(FakeGuard, "error", None)
    monkeypatch.setattr(FakeGuard, "warning", "")
    monkeypatch.setattr(FakeGuard, "make", staticmethod(make_outcome), raising=False)
    monkeypatch.setenv("DSEC_GUARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return FakeGuard


def call(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args), prog_name="dsec-guard")
    return caught.value.code or 0


def run(*args: str) -> int:
    return call("run", *args)


def last(guard: type[FakeGuard]) -> RunRequest:
    return guard.requests[-1]


# --------------------------------------------------------------------------------------------------------- requests


def test_defaults(guard, tmp_path: Path):
    assert run("--", "true") == 0
    request = last(guard)
    assert request.policy.name == "untrusted-script"
    assert request.argv == (b"true",)
    assert request.workspace == tmp_path / "work"
    assert not request.workspace_named
    assert request.keep is KeepMode.KEEP
    assert request.level is None
    assert request.wall_ms is None
    assert not request.tty
    assert request.fail_on == frozenset()


def test_options_reach_the_request(guard, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PASSED", "on")
    (tmp_path / "ws").mkdir()
    (tmp_path / "ro").mkdir()
    assert run("--policy", "base", "--workspace", str(tmp_path / "ws"), "--bind-ro", str(tmp_path / "ro"), "--bind-ro",
               f"{tmp_path}/ro:/opt/../opt/ro", "--env", "A=b=c", "--env", "PASSED", "--wall", "90s", "--limit", "pids=77",
               "--level", "cold", "--tty", "--pack", "p.tar.zst", "--record", "r.jsonl.zst", "--report", "r.json",
               "--task-reward", "0.5", "--label", "team=a", "--fail-on", "any", "--fail-on", "tamper", "--quiet",
               "true", "--policy", "x") == 0
    request = last(guard)
    assert request.argv == (b"true", b"--policy", b"x")
    assert request.workspace == tmp_path / "ws"
    assert request.workspace_named
    assert [(b.source, b.target) for b in request.bind_ro] == [(tmp_path / "ro", f"{tmp_path}/ro"), (tmp_path / "ro", "/opt/ro")]
    assert request.env == {"A": "b=c", "PASSED": "on"}
    assert request.wall_ms == request.policy.limits.wall_time == 90_000
    assert request.policy.limits.pids == 77
    assert request.level is request.policy.monitor.level is Level.COLD
    assert request.tty
    assert request.keep is KeepMode.PACK
    assert request.pack_file == tmp_path / "work" / "p.tar.zst"
    assert request.record_file == tmp_path / "work" / "r.jsonl.zst"
    assert request.report_file == tmp_path / "work" / "r.json"
    assert request.task_reward == 0.5
    assert request.labels == {"team": "a"}
    assert request.fail_on == {"any", "tamper"}


@pytest.mark.parametrize(
    ("words", "keep"),
    [(["--keep", "true"], KeepMode.KEEP), (["--keep=always", "true"], KeepMode.KEEP_ALWAYS),
     (["--keep", "--", "true"], KeepMode.KEEP), (["--discard", "--", "true"], KeepMode.DISCARD),
     (["--label", "a=--keep", "--keep=keep", "true"], KeepMode.KEEP)],
)
def test_keep_takes_its_value_only_after_an_equals_sign(guard, words: list[str], keep: KeepMode):
    assert run(*words) == 0
    assert last(guard).keep is keep
    assert last(guard).argv == (b"true",)


def test_arguments_that_are_no_utf8_pass(guard, capfdbinary):
    assert run("--quiet", "printf", "%s", os.fsdecode(b"\xff\xfe")) == 0
    assert last(guard).argv[-1] == b"\xff\xfe"
    assert capfdbinary.readouterr().out == b"\xff\xfe"


def test_the_task_reward_file_is_read_after_the_command(guard, tmp_path: Path):
    assert run("--task-reward", str(tmp_path / "reward"), "true") == 0  # not there yet: fine
    (tmp_path / "reward").write_text(" 0.25\n")
    assert last(guard).known_task_reward() == 0.25
    for text in ("", "nan", "inf", "1 2", "x" * 100):
        (tmp_path / "reward").write_text(text)
        with pytest.raises(Exception, match="finite number"):
            last(guard).known_task_reward()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "Missing argument"),
        (["--no-such", "true"], "No such option"),
        (["--policy", "nope", "true"], "no policy of that name"),
        (["--policy", "/no/such.yaml", "true"], "/no/such.yaml"),
        (["--workspace", "/no/such", "true"], "/no/such"),
        (["--workspace", "/etc/passwd", "true"], "/etc/passwd"),
        (["--bind-ro", "/no/such", "true"], "--bind-ro /no/such"),
        (["--bind-ro", "/usr:/", "true"], "root of the box"),
        (["--env", "NOT_SET_HERE", "true"], "not set here"),
        (["--env", "1=2", "true"], "no name"),
        (["--env", "A=1", "--env", "A=2", "true"], "given twice"),
        (["--wall", "soon", "true"], "soon"),
        (["--wall", "100d", "true"], "above the policy"),
        (["--wall", "1s", "--limit", "wall_time=1s", "true"], "same thing"),
        (["--limit", "pids", "true"], "want NAME=VALUE"),
        (["--limit", "pidz=1", "true"], "did you mean pids"),
        (["--limit", "memory=1000TiB", "true"], "above the policy"),
        (["--limit", "memory=lots", "true"], "lots"),
        (["--level", "warm", "true"], "warm"),
        (["--keep", "--discard", "true"], "exclude each other"),
        (["--discard", "--pack", "x", "true"], "exclude each other"),
        (["--keep=maybe", "true"], "maybe"),
        (["--report", "/no/such/dir/r", "true"], "/no/such/dir"),
        (["--report", ".", "true"], "is a directory"),
        (["--report", "x", "--record", "./x", "true"], "same file"),
        (["--collect", "/etc/passwd", "true"], "no directory"),
        (["--collect", "/no/such/dir", "true"], "no directory"),
        (["--collect", "out", "true"], "names no deliverables"),
        (["--task-reward", "nan", "true"], "finite"),
        (["--task-reward", "/no/such/file", "true"], "neither a number nor a file"),
        (["--label", "a b=c", "true"], "--label a b"),
        (["--label", f"a={'x' * 2000}", "true"], "longer than"),
        (["--fail-on", "rain", "true"], "rain"),
        ([""], "the command is empty"),
    ],
)
def test_bad_arguments_are_one_clear_message_before_anything_starts(guard, capfd, words: list[str], what: str):
    assert run(*words) == 125
    assert guard.requests == []
    out, err = capfd.readouterr()
    assert out == ""
    assert what in err
    assert err.startswith("dsec-guard: ")
    assert "Traceback" not in err
    assert os.listdir(".") == []


@pytest.mark.parametrize("where", ["/", "home", "above home"])
def test_careless_workspaces_must_be_named(guard, capfd, tmp_path: Path, monkeypatch, where: str):
    home = tmp_path / "a" / "home"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir({"/": "/", "home": home, "above home": home.parent}[where])
    assert run("true") == 125
    assert "--workspace" in capfd.readouterr().err
    assert guard.requests == []
    if where != "/":
        assert run("--workspace", ".", "true") == 0
        assert last(guard).workspace_named


def test_a_current_directory_that_is_gone(guard, capfd, tmp_path: Path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run("true") == 125
    assert "does not exist any more" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------- streams and status


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (ExitInfo(reason=ExitReason.EXITED, code=0), 0), (ExitInfo(reason=ExitReason.EXITED, code=7), 7),
        (ExitInfo(reason=ExitReason.SIGNAL, signal=11), 139), (ExitInfo(reason=ExitReason.WALL_LIMIT, signal=9), 124),
        (ExitInfo(reason=ExitReason.GUARD_ERROR), 125), (ExitInfo(reason=ExitReason.NOT_EXECUTABLE, code=126), 126),
        (ExitInfo(reason=ExitReason.NOT_FOUND, code=127), 127), (ExitInfo(reason=ExitReason.MEMORY_LIMIT, signal=9), 137),
        (ExitInfo(reason=ExitReason.KILLED_BY_POLICY, signal=31), 159), (ExitInfo(reason=ExitReason.INTERRUPTED, signal=2), 130),
        (ExitInfo(reason=ExitReason.EXITED), 125),
    ],
)
def test_exit_statuses(make_outcome, end: ExitInfo, status: int):
    assert exit_status(make_outcome(exit=end)) == status
    if end.code != 0:
        assert exit_status(make_outcome(bad=True, exit=end), frozenset({"any"})) == status  # never hides a failure


def test_fail_on_is_10_only_for_the_classes_named(make_outcome, make_incident):
    bad = make_outcome(bad=True)
    assert exit_status(bad) == 0
    assert exit_status(bad, frozenset({"any"})) == 10
    assert exit_status(bad, frozenset({"escape_attempt"})) == 10
    assert exit_status(bad, frozenset({"tamper", "answer_peek"})) == 0
    accident = make_outcome(bad=True, incidents=(make_incident(cls=Class.SYSTEM_CRASH, accident=True),))
    assert exit_status(accident, frozenset({"any"})) == 0
    unknown = make_outcome(verdict=Verdict(cls=VerdictClass.INCONCLUSIVE, outcome=None, severity=0,
                                           validity=Validity.UNKNOWN, complete=False))
    assert exit_status(unknown, frozenset({"any"})) == 0
    assert exit_status(unknown, frozenset({"inconclusive"})) == 10


def test_the_commands_streams_and_status_pass_through(guard, capfdbinary):
    assert run("--quiet", "sh", "-c", "printf 'o\\377'; printf 'e\\376' >&2; exit 3") == 3
    assert capfdbinary.readouterr() == (b"o\xff", b"e\xfe")
    assert run("--quiet", "sh", "-c", "kill -TERM $$") == 143


def test_json_owns_stdout(guard, capfd):
    assert run("--json", "echo", "hello") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["exit"] == {"code": 0, "signal": None, "reason": "exited"}
    assert err.startswith("hello\n")


def test_the_summary_goes_to_stderr_and_quiet_ends_it(guard, capfd):
    assert run("echo", "hello") == 0
    out, err = capfd.readouterr()
    assert out == "hello\n"
    assert "clean" in err
    assert run("--quiet", "echo", "hello") == 0
    assert capfd.readouterr() == ("hello\n", "")


def test_warnings_are_shown_unless_quiet(guard, capfd):
    guard.warning = "left\x1b over"
    assert run("true") == 0
    assert "dsec-guard: warning: left\ufffd over\n" in capfd.readouterr().err
    assert run("--quiet", "true") == 0
    assert "warning" not in capfd.readouterr().err


def test_a_report_is_written(guard, tmp_path: Path):
    guard.changes = {"bad": True}
    assert run("--quiet", "--report", "r.json", "--fail-on", "escape_attempt", "true") == 10
    result = json.loads((tmp_path / "work" / "r.json").read_text())
    assert result["verdict"]["class"] == "escape_attempt"
    assert result["policy"]["name"] == "untrusted-script"


def test_a_failing_guard_is_reported_as_such(guard, capfd, tmp_path: Path):
    guard.error = HostError("no memory controller", feature="cgroup", hint="mount it")
    assert run("--report", "r.json", "--json", "true") == 125
    out, err = capfd.readouterr()
    assert err == "dsec-guard: no memory controller\n  next: mount it\n"
    for text in (out, (tmp_path / "work" / "r.json").read_text()):
        result = json.loads(text)
        assert result["exit"]["reason"] == "guard_error"
        assert result["verdict"]["class"] == "inconclusive"
        assert result["verdict"]["validity"] == "infra_fault"
        assert result["reward"]["dsec_valid"] == 0
        assert result["reward"]["dsec_penalty"] == 0
        assert result["error"] == {"message": "no memory controller", "hint": "mount it"}


def test_a_bug_of_ours_is_125_and_one_line(guard, capfd, monkeypatch):
    monkeypatch.delenv("DSEC_GUARD_DEBUG", raising=False)
    guard.error = ZeroDivisionError("oh")
    assert run("true") == 125
    err = capfd.readouterr().err
    assert err.startswith("dsec-guard: internal error: ZeroDivisionError: oh\n")
    assert "Traceback" not in err
    monkeypatch.setenv("DSEC_GUARD_DEBUG", "1")
    assert run("true") == 125
    assert "Traceback" in capfd.readouterr().err


def test_interrupted_before_the_box_runs(guard):
    guard.error = KeyboardInterrupt()  # type: ignore[assignment]
    assert run("true") == 130


def test_json_to_a_reader_that_left_keeps_the_status():
    code = ("import os, sys\nsys.path.insert(0, sys.argv[1])\n"
            "from dsec_guard.cli.options import write_stdout\n"
            "try:\n    write_stdout(b'x' * 1000000)\nexcept BrokenPipeError:\n    sys.exit(5)\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], stdout=write_end, check=False)
    os.close(write_end)
    assert done.returncode == 5


# ----------------------------------------------------------------------------------------------------------- group


def test_help_lists_every_command_without_importing_it(capfd):
    for name in COMMANDS:
        sys.modules.pop(COMMANDS[name][0], None)
    assert call("--help") == 0
    out = capfd.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)
    assert not any(module in sys.modules for module, _ in COMMANDS.values())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_has_help(name: str, capfd):
    assert call(name, "--help") == 0
    assert capfd.readouterr().out.startswith("Usage: dsec-guard ")


def test_an_unknown_command_is_125(capfd):
    assert call("rum") == 125
    assert "No such command" in capfd.readouterr().err


def test_nothing_heavy_is_imported_before_the_box_runs():
    code = ("import sys; sys.path.insert(0, sys.argv[1])\n"
            "from dsec_guard.cli.main import cli\n"
            "from dsec_guard.cli.run import build_request\n"
            "print(*sorted({m.split('.')[0] for m in sys.modules} & {'rich', 'pydantic', 'yaml', 'sqlite3', 'zstandard',"
            " 'cryptography', 'pyroute2', 'pyseccomp', 'asyncio', 'socket'}))\n")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_without_the_guards_dependencies_the_command_says_so(tmp_path: Path):
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(\"No module named 'click'\")\n")
    done = subprocess.run([sys.executable, "-c", "import sys; sys.path[:0] = sys.argv[1:3]; import dsec_guard.cli.main",
                           str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "pip install 'dsec-guard[guard]'" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------- incidents


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch, make_outcome, make_incident) -> list[str]:
    monkeypatch.setenv("DSEC_GUARD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "150")
    ids = ["1a" * 16, "1b" * 16]
    evil = "/x\x1b[31m[bold]"
    StateDir.open().append_incidents(make_outcome(bad=True, run_dir=None, incidents=(
        make_incident(id=ids[0], object=evil, explanation=evil), make_incident(id=ids[1], cls=Class.TAMPER, rule="tamper.x"))))
    return ids


def test_incidents_ls_and_its_filters(recorded, capfd):
    assert call("incidents", "ls") == 0
    out = capfd.readouterr().out
    assert "escape.mount" in out
    assert "tamper.x" in out
    assert "\x1b" not in out
    assert "[bold]" in out
    for words, expected in ((["--class", "tamper"], 1), (["--rule", "escape"], 1), (["--since", "1h"], 2), (["--run", "zz"], 0),
                            (["--since", "2999-01-01"], 0), (["--limit", "1"], 1)):
        assert call("incidents", "ls", "--json", *words) == 0
        assert len(capfd.readouterr().out.splitlines()) == expected, words
    assert call("incidents", "ls", "--since", "yesterday") == 125
    assert "2h or 7d" in capfd.readouterr().err


def test_incidents_show(recorded, capfd):
    assert call("incidents", "show", "1a1a") == 0
    out = capfd.readouterr().out
    assert recorded[0] in out
    assert "mount" in out
    assert "\x1b" not in out
    assert call("incidents", "show", "1b", "--json") == 0
    assert json.loads(capfd.readouterr().out)["id"] == recorded[1]
    assert call("incidents", "show", "1") == 125
    assert "could be any of" in capfd.readouterr().err
    assert call("incidents", "show", "ff") == 125
    assert "no incident ff" in capfd.readouterr().err


def test_incidents_of_a_fresh_machine(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setenv("DSEC_GUARD_STATE", str(tmp_path / "none"))
    assert call("incidents", "ls") == 0
    assert capfd.readouterr() == ("", "dsec-guard: no such incident\n")
