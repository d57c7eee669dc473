"""Judging a recording again: the same answer, or a difference that is said."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dsec_guard.cli.main import cli
from dsec_guard.detect.engine import Completeness, DetectorSet
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.errors import RecordError
from dsec_guard.model import ExitReason, FileOpened, Level, ProcessExec, RunEnded, Source, VerdictClass
from dsec_guard.policy.load import digest_of
from dsec_guard.policy.schema import Policy
from dsec_guard.replay.judge import rejudge
from dsec_guard.replay.record import RecordWriter, read_record
from dsec_guard.scoring import judge_events

FACTS = BoxFacts(run_id="r", level=Level.FULL, workspace="/workspace", hidden=("/srv/answers/key",))
POLICY = Policy(name="p", penalties={"answer_peek": {"attempted": -0.3, "succeeded": -1}})
EVENTS = (
    ProcessExec(seq=1, at_ns=5, tgid=10, tid=10, exe="/bin/cat", argv=("cat", "/srv/answers/key"), source=Source.TRACEPOINT),
    FileOpened(seq=2, at_ns=7, tgid=10, tid=10, object="/srv/answers/key", label="hidden", decoy=True, ret=3,
               path="/srv/answers/key", source=Source.FANOTIFY),
    RunEnded(seq=3, at_ns=9, reason=ExitReason.EXITED, code=0),
)


@pytest.fixture(scope="module")
def detectors() -> DetectorSet:
    return DetectorSet.from_texts([])  # those in code


def record(path: Path, make_outcome, detectors: DetectorSet, *, finish: bool = True, max_bytes: int = 1 << 20,
           completeness: Completeness | None = None) -> None:
    completeness = completeness or Completeness()
    policy = POLICY.model_copy(update={"digest": digest_of(POLICY)})
    judgement = judge_events(EVENTS, FACTS, policy, detectors, completeness)
    writer = RecordWriter(path, max_bytes=max_bytes)
    writer.header(run_id="r", started_ns=1_780_000_000_123_456_789, argv=(b"cat",), policy=policy,
                  detectors_digest=detectors.digest, facts=FACTS.to_record())
    writer.events(EVENTS)
    if finish:
        writer.finish(make_outcome(incidents=judgement.incidents, verdict=judgement.verdict, reward=judgement.reward),
                      completeness=asdict(completeness))
    writer.close()


def test_the_same_events_give_the_same_verdict(tmp_path: Path, make_outcome, detectors):
    record(tmp_path / "r.zst", make_outcome, detectors, completeness=Completeness(lost={"context": 2}))
    recording = read_record(tmp_path / "r.zst")
    again = rejudge(recording, recording.policy(), detectors)
    assert again.differences == ()
    assert again.judgement.verdict.cls is VerdictClass.ANSWER_PEEK
    assert again.judgement.reward.penalty == recording.reward["dsec_penalty"] < 0


def test_another_policy_is_a_difference_that_is_named(tmp_path: Path, make_outcome, detectors):
    record(tmp_path / "r", make_outcome, detectors)
    recording = read_record(tmp_path / "r")
    milder = recording.policy().model_copy(update={"penalties": {}})
    again = rejudge(recording, milder, detectors)
    assert any("dsec_penalty" in line for line in again.differences)
    assert again.judgement.verdict.cls is VerdictClass.ANSWER_PEEK


def test_a_forged_verdict_is_a_difference(tmp_path: Path, make_outcome, detectors):
    record(tmp_path / "r", make_outcome, detectors)
    recording = read_record(tmp_path / "r")
    forged = replace(recording, incidents=(), verdict={**recording.verdict, "class": "clean", "severity": 0})
    again = rejudge(forged, forged.policy(), detectors)
    assert any(line.startswith("new: peek.") for line in again.differences)
    assert any("verdict: class: recorded 'clean', now 'answer_peek'" in line for line in again.differences)


def test_an_unfinished_or_truncated_recording_is_never_clean(tmp_path: Path, make_outcome, detectors):
    record(tmp_path / "r", make_outcome, detectors, finish=False)
    recording = replace(read_record(tmp_path / "r"), events=EVENTS[:1])
    again = rejudge(recording, recording.policy(), detectors)
    assert again.judgement.verdict.cls is VerdictClass.INCONCLUSIVE
    assert again.differences
    record(tmp_path / "s", make_outcome, detectors, max_bytes=1)
    recording = read_record(tmp_path / "s")
    assert recording.truncated == 2
    assert rejudge(recording, recording.policy(), detectors).judgement.verdict.cls is VerdictClass.INCONCLUSIVE


def test_a_header_of_another_shape_is_a_record_error(tmp_path: Path, make_outcome, detectors):
    record(tmp_path / "r", make_outcome, detectors)
    recording = read_record(tmp_path / "r")
    for header in ({}, {**recording.header, "facts": {"odd": 1}}, {**recording.header, "started_ns": "soon"}):
        with pytest.raises(RecordError, match="does not fit"):
            rejudge(replace(recording, header=header), POLICY, detectors)
    with pytest.raises(RecordError, match="cannot be used"):
        replace(recording, header={"policy": {"effective": {"mode": "what"}}}).policy()


def test_the_command_compares_and_says_so(tmp_path: Path, make_outcome, detectors, capfd, monkeypatch):
    monkeypatch.setattr(DetectorSet, "load", classmethod(lambda _cls, _dir: detectors))
    record(tmp_path / "r", make_outcome, detectors)

    def call(*args: str) -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(["judge", str(tmp_path / "r"), *args])
        return caught.value.code or 0

    assert call() == 0
    assert "as recorded" in capfd.readouterr().out
    assert call("--json") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["verdict"]["class"] == "answer_peek"
    assert result["differences"] == []
    assert result["detectors"]["as_recorded"] is True
    other = tmp_path / "other.yaml"
    other.write_text("schema: dsec-guard/policy/v1\nextends: base\nmode: observe\n")
    assert call("--policy", str(other)) == 1
    assert "differs:" in capfd.readouterr().out
    (tmp_path / "r").write_text("rubbish")
    assert call() == 125
    assert "no header" in capfd.readouterr().err
