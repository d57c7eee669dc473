"""`policy explain` and `policy diff`: the answer and the line that decides it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dsec_guard.cli.doctor import doctor
from dsec_guard.cli.policy import policy as policy_command
from dsec_guard.errors import UsageError
from dsec_guard.host.probe import PRETEND_VARIABLE
from dsec_guard.policy.explain import differences, explain_path, explain_syscall, settings
from dsec_guard.policy.load import load_policy
from dsec_guard.policy.publish import schema_text


@pytest.mark.parametrize(("path", "operation", "answer", "key"), [
    ("/srv/answers/x", "read", "reported", "answers.hidden.0"),
    ("/srv/answers/x", "list", "allowed", "answers.hidden.0"),
    ("/srv/answers/x", "write", "refused", "answers.hidden.0"),
    ("/srv/state/x", "read", "allowed", "answers.environment_state.0"),
    ("/srv/state/x", "write", "refused", "answers.environment_state.0"),
    ("/workspace/a", "write", "allowed", "workspace.target"),
    ("/workspace/home/a", "write", "allowed", "environment.HOME"),
    ("/usr/bin/python3", "execute", "allowed", "filesystem.read.0"),
    ("/usr/bin/python3", "write", "refused", "filesystem"),
    ("/tmp/x", "write", "allowed", "filesystem.temporary.0"),
    ("/root/x", "read", "refused", "filesystem"),
    ("/dev/null", "write", "allowed", "filesystem.root"),
])
def test_a_path_is_answered_with_the_deciding_key(path, operation, answer, key):
    policy = load_policy("corpus")
    first = explain_path(policy, path, operation)[0]
    assert (first.answer, first.key) == (answer, key)
    assert first.place == policy.place(key)
    assert ".yaml:" in first.place


def test_writing_to_the_harness_is_allowed_and_reported():
    answers = explain_path(load_policy("corpus"), "/workspace/repo/tests/deep/test_a.py", "write")
    assert [a.answer for a in answers] == ["allowed", "reported"]
    assert answers[1].key == "answers.harness.0"
    assert len(explain_path(load_policy("corpus"), "/workspace/repo/mytests/test_a.py", "write")) == 1


def test_a_workspace_at_its_own_path_is_explained():
    assert explain_path(load_policy("untrusted-script"), "/w/a", "write", workspace="/w")[0].key == "workspace.target"


@pytest.mark.parametrize(("name", "answers", "words"), [
    ("read", ["allowed"], "profile default allows it"),
    ("mount", ["refused"], "EPERM"),
    ("clone3", ["refused"], "ENOSYS"),
    ("clone", ["refused", "allowed"], "when arg0 & 0x7e020000 is not 0"),
    ("vserver", ["refused"], "does not list it: EPERM"),
])
def test_a_system_call_is_answered(name, answers, words):
    found = explain_syscall(load_policy("base"), name)
    assert [a.answer for a in found] == answers
    assert words in found[0].because


def test_a_denied_call_names_its_line(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("schema: dsec-guard/policy/v1\nextends: base\nsyscalls: {deny: [{name: ptrace, because: no debuggers}]}\n")
    (answer,) = explain_syscall(load_policy(str(path)), "ptrace")
    assert answer.answer == "refused"
    assert "no debuggers" in answer.because
    assert answer.place == f"{path}:3:19"


def test_an_unknown_call_is_a_usage_error():
    with pytest.raises(UsageError, match="mounnt"):
        explain_syscall(load_policy("base"), "mounnt")


def test_differences_are_by_key():
    left, right = load_policy("base"), load_policy("untrusted-script")
    found = {d.key: (d.left, d.right) for d in differences(left, right)}
    assert found["limits.memory"] == (16 << 30, 2 << 30)
    assert "network" not in found
    assert differences(left, left) == ()


def test_settings_name_the_file_of_each_key():
    places = {key: place for key, _, place in settings(load_policy("corpus"))}
    assert "corpus.yaml:" in places["limits.memory"]
    assert "base.yaml:" in places["limits.events"]
    assert places["allowed_hosts"] == "default"


def run(command, *words, env=None):
    return CliRunner().invoke(command, words, env=env)


def test_the_command_validates_and_counts(tmp_path):
    assert run(policy_command, "validate", "base", "corpus").exit_code == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: dsec-guard/policy/v1\nmode: off\n")
    assert run(policy_command, "validate", "base", str(bad)).exit_code == 1


def test_the_command_explains_as_json():
    result = run(policy_command, "explain", "corpus", "--path", "/srv/answers", "--syscall", "mount", "--json")
    assert [a["answer"] for a in json.loads(result.stdout)] == ["reported", "refused"]
    whole = json.loads(run(policy_command, "explain", "corpus", "--json").stdout)
    assert whole["limits"]["pids"] == 128
    assert "limits.pids: 128" in run(policy_command, "explain", "corpus").stdout
    assert run(policy_command, "explain", "corpus", "--path", "a/b").exit_code == 125


def test_the_command_prints_the_schema_and_differences():
    assert run(policy_command, "schema").stdout == schema_text()
    result = run(policy_command, "diff", "base", "corpus")
    assert result.exit_code == 1
    assert "limits.pids: 4096 -> 128" in result.stdout
    assert run(policy_command, "diff", "base", "base", "--json").stdout == "[]\n"


def test_doctor_names_what_is_missing_and_the_remedy():
    result = run(doctor, env={PRETEND_VARIABLE: "landlock"})
    assert result.exit_code == 1
    assert "missing  landlock" in result.stdout
    assert "lsm=landlock" in result.stdout
    found = json.loads(run(doctor, "--json", env={PRETEND_VARIABLE: "landlock,btf"}).stdout)
    assert found["usable"] is False
    works = {f["name"]: f["works"] for f in found["features"]}
    assert not works["landlock"]
    assert not works["bpf_tracing"]  # stands on btf
