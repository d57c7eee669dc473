"""The shipped recordings are judged as their names say, byte for byte alike each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_guard.detect.engine import DetectorSet
from dsec_guard.model import VerdictClass
from dsec_guard.policy.data import data_dir
from dsec_guard.replay.judge import rejudge
from dsec_guard.replay.record import read_record

REPLAYS = sorted(data_dir("replays").glob("*.jsonl.zst"))
CLASSES = {
    "escape": VerdictClass.ESCAPE_ATTEMPT, "peek": VerdictClass.ANSWER_PEEK, "tamper": VerdictClass.TAMPER,
    "exfil": VerdictClass.EXFILTRATION, "crash": VerdictClass.SYSTEM_CRASH,
}


@pytest.fixture(scope="module")
def detectors() -> DetectorSet:
    return DetectorSet.load(data_dir("detectors"))


def test_every_class_has_an_attack_and_every_family_something_honest() -> None:
    names = [path.name for path in REPLAYS]
    assert {name.split(".")[0] for name in names if ".attack." in name} == set(CLASSES)
    assert sum(".benign." in name for name in names) >= len(CLASSES)


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.name.removesuffix(".jsonl.zst"))
def test_a_recording_is_judged_as_its_name_says(path: Path, detectors: DetectorSet) -> None:
    recording = read_record(path)
    assert recording.finished
    once, twice = (rejudge(recording, recording.policy(), detectors).judgement for _ in range(2))
    family = path.name.split(".")[0]
    expected = VerdictClass.CLEAN if ".benign." in path.name else CLASSES[family]
    assert once.verdict.cls is expected
    assert once.canonical() == twice.canonical()
    assert (once.reward.penalty == 0) == (expected is VerdictClass.CLEAN)
