"""What goes wrong after the command has ended costs neither the verdict nor the changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.model import ExitReason, VerdictClass
from dsec_guard.policy.load import load_policy
from dsec_guard.sandbox.changes import ChangeLimits
from dsec_guard.sandbox.stdio import BoxIO, Capture
from dsec_guard.service import run as run_module
from dsec_guard.service.guard import Guard
from dsec_guard.service.request import RunOutcome, RunRequest

pytestmark = pytest.mark.needs("run")


def run(tmp_path: Path, *argv: str, **options: object) -> RunOutcome:
    workspace = tmp_path / "workspace"
    workspace.mkdir(exist_ok=True)
    request = RunRequest(policy=load_policy("corpus"), argv=tuple(word.encode() for word in argv), workspace=workspace,
                         **options)  # type: ignore[arg-type]
    with BoxIO(stdin=None, stdout=Capture(4096), stderr=Capture(4096)) as io, Guard.open(tmp_path / "state") as guard:
        return guard.run(request, io)


def test_a_collection_that_cannot_be_made_leaves_verdict_and_changes(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "echo x > note", collect_dir=Path("/proc/nowhere"))
    assert outcome.collect.state == "failed"
    assert outcome.verdict.cls is VerdictClass.CLEAN
    assert (tmp_path / "workspace/note").read_text() == "x\n"


def test_changes_survive_a_workspace_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.write_back

    def vanished(*_args: object, **_kwargs: object) -> object:
        raise UsageError("the workspace was replaced")

    monkeypatch.setattr(run_module, "write_back", vanished)
    outcome = run(tmp_path, "sh", "-c", "echo x > note")
    monkeypatch.setattr(run_module, "write_back", real)
    assert outcome.write_back.state == "failed"
    assert outcome.write_back.pack is not None
    assert outcome.write_back.pack.is_file()
    assert outcome.run_dir is not None
    assert json.loads((outcome.run_dir / "result.json").read_bytes())["verdict"]["class"] == "clean"


def test_an_inspection_that_fails_is_a_guard_failure_with_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run_module, "inspect_changes", broken)
    outcome = run(tmp_path, "true")
    assert outcome.exit.reason is ExitReason.GUARD_ERROR
    assert outcome.verdict.cls is VerdictClass.INCONCLUSIVE
    assert outcome.reward.valid == 0
    assert outcome.run_dir is not None
    assert (outcome.run_dir / "result.json").is_file()


def test_what_was_not_looked_at_forbids_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.inspect_changes

    def short(*args: object, **kwargs: object) -> object:
        return real(*args, **{**kwargs, "limits": ChangeLimits(max_entries=2)})  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "inspect_changes", short)
    outcome = run(tmp_path, "sh", "-c", "touch a b c d e f")
    assert outcome.verdict.cls is VerdictClass.INCONCLUSIVE
    assert not outcome.verdict.complete
    shutil.rmtree(tmp_path / "workspace")
