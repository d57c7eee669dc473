"""The pure-Python client: importable anywhere, typed results, typed failures."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dsec_guard import client
from dsec_guard.errors import RecordError, UsageError
from dsec_guard.incident.result import result_json, to_bytes
from dsec_guard.model import (
    Class,
    ExitReason,
    Outcome,
    RewardInfo,
    Validity,
    Verdict,
    VerdictClass,
)
from dsec_guard.scoring import Judgement

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def interpreters() -> dict[str, str]:
    """Version -> path of every interpreter from 3.10 to 3.13 that is here: DSEC_GUARD_TEST_PYTHONS, PATH, pyenv, uv."""
    named = os.environ.get("DSEC_GUARD_TEST_PYTHONS", "").split(os.pathsep)
    candidates = [Path(p) for p in named if p]
    candidates += [Path(found) for v in VERSIONS if (found := shutil.which(f"python{v}"))]
    for pattern in (".pyenv/versions/*/bin/python3", ".local/share/uv/python/*/bin/python3"):
        candidates += sorted(Path.home().glob(pattern))
    candidates.append(Path(sys.executable))
    result: dict[str, str] = {}
    for path in candidates:
        done = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True,
                              text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() in VERSIONS:
            result.setdefault(done.stdout.strip(), str(path))
    return result


FOUND = interpreters()


@pytest.mark.parametrize("version", sorted(FOUND))
def test_import_needs_nothing_but_python(tmp_path: Path, version: str):
    for name in ("pydantic", "click", "rich", "yaml", "zstandard", "pyseccomp", "pyroute2", "rfc8785"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('an incompatible one')\n")
    code = textwrap.dedent("""
        import sys
        sys.path[:0] = sys.argv[1:3]
        from dsec_guard import client, model
        result = client.load_result(sys.argv[3])
        assert result.incidents[0].cls is model.Class.ESCAPE_ATTEMPT
        print(result.fold(1.0), result.exit.reason.value)
        ours = sorted(m for m in sys.modules if m.startswith('dsec_guard.'))
        assert ours == ['dsec_guard.client', 'dsec_guard.errors', 'dsec_guard.model'], ours
    """)
    sample = tmp_path / "sample.json"
    sample.write_text(json.dumps(SAMPLE))
    done = subprocess.run([FOUND[version], "-I", "-c", code, str(tmp_path), str(ROOT), str(sample)], capture_output=True,
                          text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == ["0.7", "exited"]


SAMPLE = {
    "schema": "dsec-guard/result/v1", "run_id": "r-1", "argv": ["a\\xff"], "policy": {"name": "p", "mode": "enforce"},
    "exit": {"code": 0, "signal": None, "reason": "exited"}, "flags": [],
    "verdict": {"class": "escape_attempt", "outcome": "attempted", "severity": 7, "validity": "agent_fault",
                "complete": True, "reasons": [], "level": "full"},
    "incidents": [{"id": "1", "class": "escape_attempt", "rule": "escape.mount", "outcome": "attempted", "severity": 7,
                   "object": "/mnt", "explanation": "e", "penalty": -0.3, "counted": True, "accident": False}],
    "reward": {"dsec_penalty": -0.3, "dsec_valid": 1},
}


def test_every_result_can_be_loaded(tmp_path: Path, make_outcome):
    for outcome in (make_outcome(), make_outcome(bad=True)):
        path = tmp_path / "r.json"
        path.write_bytes(to_bytes(result_json(outcome)))
        result = client.load_result(path)
        assert result.run_id == outcome.run_id
        assert result.argv == outcome.argv
        assert result.clean is (not outcome.incidents)
        assert dict(result.reward) == outcome.reward.as_dict()
        assert [i.id for i in result.incidents] == [i.id for i in outcome.incidents]


@pytest.mark.parametrize("bad", ["", "{}", "[]", "null", '{"schema": "dsec-guard/result/v9"}', "[" * 100_000])
def test_anything_else_is_a_record_error(tmp_path: Path, bad: str):
    (tmp_path / "r").write_text(bad)
    with pytest.raises(RecordError):
        client.load_result(tmp_path / "r")
    with pytest.raises(RecordError, match="No such file"):
        client.load_result(tmp_path / "none")


@pytest.mark.parametrize("mode", ["enforce", "observe"])
@pytest.mark.parametrize("validity", list(Validity))
@pytest.mark.parametrize("cls", list(Class))
@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("rewarded", [True, False])
def test_fold_agrees_with_the_guards_own(make_outcome, make_incident, mode, validity, cls, outcome, rewarded):
    incident = make_incident(cls=cls, outcome=outcome, rewarded=rewarded)
    reward = RewardInfo(penalty=0.0 if mode == "observe" else -0.3, valid=int(validity in (Validity.OK, Validity.AGENT_FAULT)))
    verdict = Verdict(cls=VerdictClass(cls.value), outcome=outcome, severity=7, validity=validity, complete=True)
    voided = mode == "enforce" and rewarded and outcome is not Outcome.ATTEMPTED and cls in (
        Class.ANSWER_PEEK, Class.TAMPER, Class.ESCAPE_ATTEMPT)
    guards = Judgement((incident,), verdict, reward, voided=voided)
    ours = client.parse_result(result_json(make_outcome(incidents=(incident,), verdict=verdict, reward=reward, mode=mode)))
    for task_reward in (0.0, 1.0, -2.5):
        assert ours.fold(task_reward) == guards.fold(task_reward)


def test_fold_refuses_what_is_no_number(make_outcome):
    result = client.parse_result(result_json(make_outcome()))
    with pytest.raises(ValueError, match="finite"):
        result.fold(math.nan)


# -------------------------------------------------------------------------------------------------- calling the command

FAKE = """
import json, os, signal, sys, time
args = sys.argv[1:]
report = args[args.index("--report") + 1]
argv = args[args.index("--") + 1:]
result = json.loads(os.environ["SAMPLE"])
def write(**changes):
    with open(report, "w") as file:
        json.dump({**result, **changes}, file)
def stop(number, frame):
    write(exit={"code": None, "signal": 15, "reason": "interrupted"})
    print("stopped", flush=True)
    sys.exit(143)
if argv[0] == "args":
    print(json.dumps(args))
    write()
elif argv[0] == "cat":
    sys.stdout.write(sys.stdin.read()); sys.stderr.write("to stderr")
    write()
elif argv[0] == "fail":
    print("dsec-guard: no cgroup\\nrest\\n  next: mount it", file=sys.stderr)
    sys.exit(125)
elif argv[0] == "fail-with-result":
    write(exit={"code": None, "signal": None, "reason": "guard_error"}, error={"message": "broken", "hint": "mend"})
    sys.exit(125)
elif argv[0] == "hang":
    signal.signal(signal.SIGTERM, stop)
    print("up", flush=True)
    while True: time.sleep(60)
elif argv[0] == "hang-hard":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch) -> list[str]:
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("SAMPLE", json.dumps(SAMPLE))
    return [sys.executable, str(tmp_path / "fake.py")]


def test_options_become_words_and_argv_comes_last(fake, tmp_path: Path):
    result = client.run(["args", "--", "--policy", b"\xff"], policy="swe-task", workspace=tmp_path, bind_ro=["/opt/x"],
                        env={"A": "1 2"}, wall="5s", limits={"pids": "10"}, level="cold", keep="always",
                        collect=tmp_path, record="r.jsonl", task_reward=0.5, labels={"k": "v"}, command=fake)
    words = json.loads(result.stdout)
    at = words.index("--")
    assert words[at + 1:] == ["args", "--", "--policy", "\udcff"]
    assert words[:2] == ["run", "--no-summary"]
    options = words[2:at]
    for pair in (["--policy", "swe-task"], ["--workspace", str(tmp_path)], ["--bind-ro", "/opt/x"], ["--env", "A=1 2"],
                 ["--wall", "5s"], ["--limit", "pids=10"], ["--level", "cold"], ["--collect", str(tmp_path)],
                 ["--record", "r.jsonl"], ["--task-reward", "0.5"], ["--label", "k=v"]):
        assert any(options[i:i + 2] == pair for i in range(len(options))), pair
    assert "--keep=always" in options


def test_input_and_output_are_kept(fake):
    result = client.run(["cat"], stdin=b"in\n", command=fake)
    assert (result.stdout, result.stderr) == (b"in\n", b"to stderr")
    assert client.run(["cat"], command=fake).stdout == b""


def test_a_failed_guard_is_an_exception_with_its_message(fake):
    with pytest.raises(client.GuardFailed, match=r"^no cgroup$") as caught:
        client.run(["fail"], command=fake)
    assert caught.value.hint == "mount it"
    assert caught.value.result is None
    with pytest.raises(client.GuardFailed, match=r"^broken$") as caught:
        client.run(["fail-with-result"], command=fake)
    assert caught.value.result.exit.reason is ExitReason.GUARD_ERROR


def test_a_timeout_ends_the_run_and_keeps_its_result(fake):
    with pytest.raises(client.GuardTimeout) as caught:
        client.run(["hang"], timeout=1.0, command=fake)
    assert caught.value.result.exit.reason is ExitReason.INTERRUPTED
    assert caught.value.result.stdout == b"up\nstopped\n"


def test_a_guard_that_will_not_end_is_killed(fake, monkeypatch):
    monkeypatch.setattr(client, "STOP_GRACE_S", 0.1)
    with pytest.raises(client.GuardTimeout) as caught:
        client.run(["hang-hard"], timeout=0.5, command=fake)
    assert caught.value.result is None


def test_no_command_is_a_typed_error(monkeypatch, tmp_path: Path):
    with pytest.raises(client.GuardNotFound):
        client.run(["x"], command=[str(tmp_path / "none")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(client.GuardNotFound):
        client.run(["x"])


@pytest.mark.parametrize("options", [{"keep": "maybe"}, {"keep": "pack"}, {"pack": "f"}, {"policy": "a\0b"}, {"command": []}])
def test_bad_arguments_are_usage_errors(options):
    with pytest.raises(UsageError):
        client.run(["x"], **{"command": ["true"], **options})
