"""The engine: grouping, bounds, policy settings, completeness and validity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec_guard.detect.engine import MAX_EVIDENCE, MAX_OBJECTS, Assessment, Completeness, DetectorSet, Judge, assess
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.errors import HostError
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import (
    Event,
    EvidenceLost,
    ExitReason,
    FileOpened,
    Level,
    Outcome,
    Phase,
    ProcessExec,
    RunEnded,
    SyscallSeen,
    TaskCreated,
    Validity,
    VerdictClass,
)
from dsec_guard.policy.schema import DetectorSetting, Exception_, Policy

DIRECTORY = Path(__file__).parents[2] / "detectors"
DETECTORS = DetectorSet.load(DIRECTORY)
FACTS = BoxFacts(run_id="r", hidden=("/exam",))
FULL = Completeness()


def setting(**values: Any) -> DetectorSetting:
    return DetectorSetting.model_validate(values)


def mount(**fields: Any) -> SyscallSeen:
    return SyscallSeen(**{"name": "mount", "nr": 165, "ret": -1, "tgid": 9, **fields})


def seqd(events: Iterable[Event]) -> list[Event]:
    return [replace(e, seq=i, at_ns=i) for i, e in enumerate(events, 1)]


def said(
    events: Iterable[Event], policy: Policy | None = None, complete: Completeness = FULL, facts: BoxFacts = FACTS,
) -> Assessment:
    return assess(seqd(events), facts, policy or Policy(), DETECTORS, complete)


def test_findings_of_one_rule_and_object_are_one_incident_with_bounded_evidence() -> None:
    found = said([mount() for _ in range(50)]).incidents
    assert len(found) == 1
    assert found[0].occurrences == 50
    assert [e.seq for e in found[0].evidence] == list(range(1, MAX_EVIDENCE + 1))


def test_objects_are_bounded_and_nothing_is_dropped_silently() -> None:
    events = [SyscallSeen(name="openat", nr=257, args=(0, 0, 1, 0, 0, 0), ret=-30, path=f"/exam/{i}", tgid=9) for i in range(500)]
    found = said(events).incidents
    assert len(found) == MAX_OBJECTS + 1
    assert sum(i.occurrences for i in found) == 500


def test_main_class_is_the_gravest_and_ties_go_by_the_class_list() -> None:
    peek = FileOpened(object="/exam/a", label="hidden", decoy=True, ret=3, tgid=9)
    assert said([peek, mount()]).verdict.cls is VerdictClass.ESCAPE_ATTEMPT  # both 7 and attempted
    real = FileOpened(object="/exam/a", label="hidden", ret=3, tgid=9)
    assert said([mount(), real]).verdict.outcome is Outcome.SUCCEEDED


def test_policy_settings_apply() -> None:
    off = Policy(detectors={"escape.mount": setting(enabled=False)})
    assert said([mount()], off).incidents == ()
    graver = Policy(detectors={"escape.mount": setting(severity=10)})
    assert said([mount()], graver).verdict.severity == 10
    held = Policy(detectors={"escape.mount": setting(reward=False)})
    assert said([mount()], held).incidents[0].rewarded is False
    peek_off = Policy(detectors={"peek.hidden_read": setting(enabled=False)})
    assert said([FileOpened(object="/exam/a", label="hidden", ret=3)], peek_off).incidents == ()


@pytest.mark.parametrize(("entry", "kept"), [
    ({"object": "mount"}, 0), ({"object": "m*"}, 0), ({"object": "umount"}, 1), ({"process": "/usr/bin/*"}, 0),
    ({"process": "/usr/bin/*", "object": "other"}, 1), ({}, 1),
])
def test_exceptions_match_object_and_process(entry: dict[str, str], kept: int) -> None:
    policy = Policy(detectors={"escape.mount": DetectorSetting.model_validate(
        {"except": [Exception_(because="tried", **entry).model_dump()]})})
    assert len(said([ProcessExec(exe="/usr/bin/box", tgid=9), mount()], policy).incidents) == kept


def test_setup_is_trusted() -> None:
    assert said([mount(phase=Phase.SETUP)]).verdict.cls is VerdictClass.CLEAN


@pytest.mark.parametrize(("complete", "cls", "validity"), [
    (FULL, VerdictClass.CLEAN, Validity.OK),
    (Completeness(missing_layers=("bpf_lsm",)), VerdictClass.CLEAN, Validity.OK),
    (Completeness(lost={"context": 9}), VerdictClass.CLEAN, Validity.OK),
    (Completeness(lost={"evidence": 1}), VerdictClass.INCONCLUSIVE, Validity.UNKNOWN),
    (Completeness(sensors_missing=("sys_exit",)), VerdictClass.INCONCLUSIVE, Validity.UNKNOWN),
    (Completeness(sensors_dead=("sys_exit",)), VerdictClass.INCONCLUSIVE, Validity.INFRA_FAULT),
    (Completeness(sensors_missing=("notify",)), VerdictClass.CLEAN, Validity.OK),
    (Completeness(guard_failed="EIO"), VerdictClass.INCONCLUSIVE, Validity.INFRA_FAULT),
    (Completeness(over_budget=5), VerdictClass.TAMPER, Validity.AGENT_FAULT),
])
def test_nothing_found_is_clean_only_when_all_was_watched(complete: Completeness, cls: VerdictClass, validity: Validity) -> None:
    verdict = said([], complete=complete).verdict
    assert (verdict.cls, verdict.validity) == (cls, validity)
    assert verdict.complete is (complete in (FULL,) or cls is VerdictClass.CLEAN)
    assert bool(verdict.reasons) is (complete not in (FULL, Completeness(sensors_missing=("notify",))))


def test_loss_does_not_wash_findings_away() -> None:
    verdict = said([mount()], complete=Completeness(lost={"evidence": 5}, sensors_dead=("sys_exit",))).verdict
    assert verdict.cls is VerdictClass.ESCAPE_ATTEMPT
    assert verdict.validity is Validity.OK
    assert verdict.complete is False


def test_a_flood_by_the_box_is_tampering_and_no_way_out() -> None:
    found = said([EvidenceLost(ring="evidence", count=7, over_budget=True)], complete=Completeness(lost={"evidence": 3}))
    assert [(i.rule, i.cls.value) for i in found.incidents] == [("tamper.evidence_flood", "tamper")]
    assert found.verdict.validity is Validity.AGENT_FAULT
    assert found.events_lost == 10


def test_guard_error_is_nobodys_penalty() -> None:
    assert said([RunEnded(reason=ExitReason.GUARD_ERROR)]).verdict.validity is Validity.INFRA_FAULT


def test_level_cold_is_clean_without_the_sensor_of_level_full() -> None:
    cold = replace(FACTS, level=Level.COLD)
    assert said([], complete=Completeness(sensors_missing=("sys_exit",)), facts=cold).verdict.cls is VerdictClass.CLEAN
    both = Completeness(sensors_missing=("sys_exit", "notify"))
    assert said([], complete=both, facts=cold).verdict.cls is VerdictClass.INCONCLUSIVE


def test_incident_names_process_and_ancestry() -> None:
    events: list[Event] = [
        ProcessExec(exe="/bin/sh", argv=("sh",), tgid=7), TaskCreated(tgid=7, child_tgid=8, child_tid=8),
        TaskCreated(tgid=8, child_tgid=9, child_tid=9), ProcessExec(exe="/work/x", argv=("x", "-y"), tgid=9), mount(),
    ]
    process = said(events).incidents[0].process
    assert (process.exe, process.argv, process.pid, process.ancestry) == ("/work/x", ("x", "-y"), 9, ("/bin/sh", "/bin/sh"))


def test_incident_id_does_not_depend_on_times_and_host_numbers_but_on_the_run() -> None:
    one = said([mount()]).incidents[0].id
    assert said([mount(tgid=77, args=(1 << 63, 0, 0, 0, 0, 0))]).incidents[0].id == one
    assert said([mount()], facts=replace(FACTS, run_id="other")).incidents[0].id != one
    assert said([mount(ret=-13)]).incidents[0].id != one


def test_a_loop_of_parents_ends() -> None:
    events: list[Event] = [TaskCreated(tgid=9, child_tgid=8, child_tid=8), TaskCreated(tgid=8, child_tgid=9, child_tid=9), mount()]
    assert said(events).incidents


def test_digest_covers_every_file(tmp_path: Path) -> None:
    for path in DIRECTORY.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    assert DetectorSet.load(tmp_path).digest == DETECTORS.digest
    first = sorted(tmp_path.iterdir())[0]
    first.write_text(first.read_text() + "\n# changed\n")
    assert DetectorSet.load(tmp_path).digest != DETECTORS.digest


def test_missing_or_empty_directory_is_a_host_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(HostError, match="detectors"):
            DetectorSet.load(place)


def test_every_rule_is_indexed_under_its_kinds() -> None:
    judge = Judge(Policy(), FACTS, DETECTORS)
    for rule in DETECTORS.rules:
        for kind in rule.kinds:
            for name in (rule.syscalls if kind == "syscall" and rule.syscalls else ("",)):
                assert rule in judge._find_out(kind, name).rules


def test_rules_name_real_system_calls() -> None:
    gone = {"umount", "open_tree_attr"}  # the i386 call, and one newer than the table
    for rule in DETECTORS.rules:
        assert rule.syscalls - set(X86_64) <= gone, rule.id
