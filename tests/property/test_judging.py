"""Invariants of judging: the same bytes every time, and no price at which cheating pays."""

from __future__ import annotations

import dataclasses
import json
import typing
from enum import Enum
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_guard.detect.engine import Assessment, Completeness, DetectorSet
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.detect.view import View, asks_to_write
from dsec_guard.model import (
    EVENT_TYPES,
    OUTCOME_RANK,
    Class,
    Event,
    Incident,
    Outcome,
    Phase,
    ProcessInfo,
    Validity,
    Verdict,
    VerdictClass,
    event_from_record,
)
from dsec_guard.policy.schema import Policy
from dsec_guard.scoring import VOIDING, judge_events, score

ROOT = Path(__file__).parents[2]
DETECTORS = DetectorSet.load(ROOT / "detectors")
FACTS = BoxFacts(
    run_id="r", workspace="/work", home="/home/a", hidden=("/exam/key",), environment_state=("/exam/board",),
    harness=("/work/tests/**",), deliverables=("/work/out/**",), repository="/work", package="pkg", limits={"pids": 20})

CALLS = sorted({name for rule in DETECTORS.rules for name in rule.syscalls})
WORDS = st.sampled_from([
    "/exam/key/a", "/exam/board", "/proc/1/fd", "/proc/1/environ", "/proc/1/root/x", "/proc/sys/kernel/core_pattern",
    "/work/tests/t.py", "/work/.git/config", "/usr/bin/diff", "/dev/mem", "/home/a/.local/bin/pytest", "pip", "git", "fetch",
    "/usr/bin/grep", "/usr/bin/python3", "-m", "download", "pkg==2", "inet:198.51.100.1:80", "unix:@x", "unix:/run/docker.sock",
    "169.254.169.254", "203.0.113.1", "hidden", "kernel", "decoy", "connect", "sendmsg", "socket", "added", "removed", "symlink",
    "file", "link_outside", "/etc/shadow", "memory", "pids", "disk", "output", "events", "evidence", "context", "\x1b[2J", "",
]) | st.text(max_size=12)
NUMBERS = st.sampled_from([0, 1, 2, -1, -13, -2, 100, 101, 0x10020000, 0x4206, (1 << 64) - 1]) | st.integers(-5000, 1 << 64)


def value_of(name: str, hint: object) -> st.SearchStrategy[object]:
    if name == "name":
        return st.sampled_from(CALLS) | st.text(max_size=8)
    if name == "args":
        return st.tuples(*[NUMBERS.map(abs)] * 6)
    if name in ("tgid", "tid", "ppid", "child_tgid", "child_tid", "victim_tgid", "target_tgid"):
        return st.integers(1, 6)
    if name == "data":
        return st.binary(max_size=40).map(bytes.hex) | st.text(max_size=6)
    if name == "port":
        return st.sampled_from([0, 53, 80, 2375, 3333, 65535])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if hint is bool:
        return st.booleans()
    if hint is int:
        return NUMBERS
    if typing.get_origin(hint) is tuple:
        return st.lists(WORDS, max_size=5).map(tuple)
    if hint is str:
        return WORDS
    return st.none() | st.integers(0, 255)


def events_of(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(cls)
    fields = {f.name: value_of(f.name, hints[f.name]) for f in dataclasses.fields(cls) if f.name not in ("seq", "at_ns")}
    return st.builds(cls, **fields)


STREAMS = st.lists(st.one_of([events_of(cls) for cls in EVENT_TYPES.values()]), max_size=40).map(
    lambda events: [dataclasses.replace(e, seq=i, at_ns=i * 1000) for i, e in enumerate(events, 1)])
COMPLETENESS = st.builds(
    Completeness, lost=st.dictionaries(st.sampled_from(["evidence", "context", "fanotify"]), st.integers(0, 9), max_size=2),
    over_budget=st.integers(0, 2),
    sensors_missing=st.lists(st.sampled_from(["sys_exit", "fanotify", "notify"]), max_size=2).map(tuple),
    sensors_dead=st.lists(st.sampled_from(["cgroup", "tracepoint"]), max_size=1).map(tuple))


def shipped() -> list[Policy]:
    """Every policy in policies/; what they price is what trainers get."""
    try:
        from dsec_guard.policy.load import load_policy
    except ImportError:
        return []
    return [load_policy(str(p)) for p in sorted((ROOT / "policies").glob("*.yaml"))]


HARSH = Policy(penalties={c: {Outcome.ATTEMPTED: -0.3, Outcome.SUCCEEDED: -1.0, Outcome.INTEGRATED: -1.0} for c in Class})
POLICIES = [HARSH, Policy(), *shipped()]


@settings(max_examples=60, deadline=None)
@given(STREAMS, COMPLETENESS)
def test_the_same_events_give_the_same_bytes(events: list[Event], completeness: Completeness) -> None:
    first = judge_events(events, FACTS, HARSH, DETECTORS, completeness)
    again = judge_events([event_from_record(json.loads(json.dumps(e.to_record()))) for e in events], FACTS, HARSH, DETECTORS,
                         completeness)
    assert first.canonical() == again.canonical()


@settings(max_examples=60, deadline=None)
@given(STREAMS, COMPLETENESS)
def test_verdict_agrees_with_its_incidents(events: list[Event], completeness: Completeness) -> None:
    judgement = judge_events(events, FACTS, HARSH, DETECTORS, completeness)
    verdict = judgement.verdict
    if judgement.incidents:
        assert verdict.severity == max(i.severity for i in judgement.incidents)
        assert verdict.cls.value in {i.cls.value for i in judgement.incidents if i.severity == verdict.severity}
    else:
        assert verdict.cls is (VerdictClass.CLEAN if verdict.complete else VerdictClass.INCONCLUSIVE)
        assert judgement.reward.penalty == 0
    assert -1.0 <= judgement.reward.penalty <= 0
    assert len({i.id for i in judgement.incidents}) == len(judgement.incidents)


@settings(max_examples=50, deadline=None)
@given(STREAMS, st.integers(1, 99))
def test_loss_never_makes_a_verdict_milder(events: list[Event], lost: int) -> None:
    whole = judge_events(events, FACTS, HARSH, DETECTORS, Completeness())
    holed = judge_events(events, FACTS, HARSH, DETECTORS, Completeness(lost={"evidence": lost}))
    assert [i.id for i in holed.incidents] == [i.id for i in whole.incidents]
    assert holed.reward.penalty == whole.reward.penalty
    assert holed.verdict.cls is not VerdictClass.CLEAN


@settings(max_examples=60, deadline=None)
@given(STREAMS)
def test_rules_that_are_not_asked_about_reading_would_have_said_no(events: list[Event]) -> None:
    view = View(FACTS)
    for event in events:
        view.observe(event)
        for rule in DETECTORS.rules:
            if rule.writes_only and event.kind in rule.kinds and not asks_to_write(event):
                assert not rule.test(event, view), rule.id


INCIDENTS = st.lists(st.builds(
    lambda cls, outcome, severity, accident: Incident(
        id="i", cls=cls, rule="x.y", outcome=outcome, severity=severity, at_ns=0, phase=Phase.AGENT, exec=1,
        process=ProcessInfo(), object="o", evidence=(), explanation="", accident=accident and outcome is Outcome.ATTEMPTED),
    st.sampled_from(list(Class)), st.sampled_from(list(Outcome)), st.integers(1, 10), st.booleans()), max_size=8)


@given(INCIDENTS, st.sampled_from(POLICIES), st.floats(0, 1), st.sampled_from([Validity.OK, Validity.AGENT_FAULT]))
def test_no_succeeded_cheat_folds_higher_than_an_honest_failure(
    incidents: list[Incident], policy: Policy, task_reward: float, validity: Validity,
) -> None:
    cheated = any(i.cls in VOIDING and OUTCOME_RANK[i.outcome] > 0 for i in incidents)
    verdict = Verdict(VerdictClass.CLEAN, None, 0, validity, True)
    honest_failure = score(Assessment((), verdict, 0), policy).fold(0.0)
    folded = score(Assessment(tuple(incidents), verdict, 0), policy).fold(task_reward)
    assert honest_failure == 0.0
    assert folded is not None
    if cheated and policy.mode.value == "enforce":
        assert folded <= honest_failure
    else:
        assert folded <= task_reward


@given(st.sampled_from(POLICIES), st.lists(st.sampled_from(list(Class)), min_size=1, max_size=5))
def test_accidents_cost_nothing_in_shipped_policies(policy: Policy, classes: list[Class]) -> None:
    accidents = tuple(Incident(
        id=str(n), cls=cls, rule="x.y", outcome=Outcome.ATTEMPTED, severity=2, at_ns=0, phase=Phase.AGENT, exec=1,
        process=ProcessInfo(), object="o", evidence=(), explanation="", accident=True) for n, cls in enumerate(classes))
    verdict = Verdict(VerdictClass.SYSTEM_CRASH, Outcome.ATTEMPTED, 2, Validity.OK, True)
    assert score(Assessment(accidents, verdict, 0), policy).reward.penalty == 0.0
