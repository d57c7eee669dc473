"""Events of one box in, incidents and a verdict out: the same for a live run and for a replay.

The engine asks only the rules and detectors that watch the kind of an event (and, for system calls, its name).
Penalties are `scoring.py`'s business: what happened does not depend on what it costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rfc8785

from dsec_guard.detect import collect, crash, exfil, history, peek, submission, tamper
from dsec_guard.detect.base import REGISTRY, Detector, DetectorSpec
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.detect.language import DetectorError, Rule, RuleFile, compile_rules, read_rule_file
from dsec_guard.detect.paths import glob
from dsec_guard.detect.view import View
from dsec_guard.errors import HostError
from dsec_guard.model import (
    OUTCOME_RANK,
    Class,
    Event,
    EvidenceLost,
    ExitReason,
    Finding,
    Incident,
    Level,
    Outcome,
    Phase,
    ProcessInfo,
    RunEnded,
    SyscallSeen,
    Validity,
    Verdict,
    VerdictClass,
)
from dsec_guard.policy.schema import DetectorSetting, Policy

#: Events kept in an incident; the rest is counted.
MAX_EVIDENCE = 8
#: Objects per rule that get an incident of their own; what is beyond joins the last one.
MAX_OBJECTS = 32
BEYOND = "(more objects)"

STATEFUL_MODULES = (collect, crash, exfil, history, peek, submission, tamper)
CLASS_ORDER = {cls: i for i, cls in enumerate(Class)}
FLOOD = "tamper.evidence_flood"


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """What the sensors can vouch for at a box's end.

    lost: ring -> records dropped for this box. over_budget: records beyond the box's own event budget, which is the
    box's doing. sensors_missing: sources the host does not offer at the policy's level; sensors_dead: sources that
    stopped during the run. missing_layers: other layers that are absent: listed, no more. guard_failed: why the guard
    could not do its work, "" if it did.
    """

    lost: Mapping[str, int] = field(default_factory=dict)
    over_budget: int = 0
    sensors_missing: tuple[str, ...] = ()
    sensors_dead: tuple[str, ...] = ()
    missing_layers: tuple[str, ...] = ()
    guard_failed: str = ""

    @property
    def events_lost(self) -> int:
        return sum(self.lost.values()) + self.over_budget


@dataclass(frozen=True)
class Assessment:
    """What happened, before any price: incidents in order of their first event, the verdict, and the losses."""

    incidents: tuple[Incident, ...]
    verdict: Verdict
    events_lost: int


@dataclass(frozen=True)
class DetectorSet:
    """Compiled rules of a directory plus the detectors in code. digest: over every byte that decides a verdict."""

    rules: tuple[Rule, ...]
    stateful: tuple[DetectorSpec, ...]
    digest: str

    @classmethod
    def load(cls, directory: Path) -> DetectorSet:
        """Read `directory/*.yaml` in name order. Raises DetectorError with every mistake, HostError if unreadable."""
        try:
            names = sorted(p for p in directory.iterdir() if p.suffix == ".yaml" and p.is_file())
            texts = [(p.name, p.read_text("utf-8")) for p in names]
        except (OSError, UnicodeDecodeError) as error:
            raise HostError(f"detectors cannot be read from {directory}: {error}", feature="detectors",
                            hint="reinstall dsec-guard, or name a directory of detector files") from error
        if not texts:
            raise HostError(f"no detectors in {directory}", feature="detectors",
                            hint="reinstall dsec-guard, or name a directory of detector files")
        return cls.from_texts(texts)

    @classmethod
    def from_texts(cls, texts: Iterable[tuple[str, str]]) -> DetectorSet:
        """The same from (name, text) pairs. Raises DetectorError."""
        digest = hashlib.sha256()
        files: list[RuleFile] = []
        problems: list[str] = []
        for name, text in texts:
            digest.update(f"{name}\0{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
            rule_file, found = read_rule_file(name, text)
            files.append(rule_file)
            problems += found
        rules, found = compile_rules(files)
        problems += found
        stateful = tuple(REGISTRY[name] for name in sorted(REGISTRY))
        taken = {rule_id for spec in stateful for rule_id in spec.rules}
        problems += [f"{r.place}: {r.id}: the name belongs to a detector in code" for r in rules if r.id in taken]
        if problems:
            raise DetectorError(problems)
        for source in _sources():
            digest.update(source)
        return cls(rules, stateful, digest.hexdigest())

    @property
    def ids(self) -> frozenset[str]:
        """Every rule id a policy's `detectors:` may name."""
        return frozenset(r.id for r in self.rules) | {i for s in self.stateful for i in s.rules} | {FLOOD}


def _sources() -> list[bytes]:
    """The code that detects, so that its change changes the digest."""
    return [p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))]


@dataclass
class _Group:
    """Findings of one rule on one object."""

    finding: Finding
    first: Event
    process: ProcessInfo
    outcome: Outcome
    severity: int
    accident: bool
    evidence: list[Event] = field(default_factory=list)
    count: int = 0


@dataclass(frozen=True)
class _Ask:
    """Who is asked about one kind of event: all rules for one that asks to write, the rest for one that reads."""

    rules: tuple[Rule, ...] = ()
    detectors: tuple[Detector, ...] = ()
    reading: tuple[Rule, ...] = ()


def _ask(rules: Iterable[Rule], detectors: Iterable[Detector]) -> _Ask:
    rules = tuple(rules)
    return _Ask(rules, tuple(detectors), tuple(r for r in rules if not r.writes_only))



class Judge:
    """One box's judge. Feed the events in their order, then `finish` once."""

    def __init__(self, policy: Policy, facts: BoxFacts, detectors: DetectorSet) -> None:
        self.policy, self.facts, self.detectors = policy, facts, detectors
        self.view = View(facts)
        self._settings: Mapping[str, DetectorSetting] = policy.detectors
        self._rules = tuple(r for r in detectors.rules if self._active(r.id, r.needs))
        self._stateful: list[tuple[DetectorSpec, Detector]] = [
            (s, s.make()) for s in detectors.stateful
            if any(self._enabled(i) for i in s.rules) and self._applies(s.needs)
        ]
        self._groups: dict[tuple[str, str], _Group] = {}
        self._objects: dict[str, int] = {}
        self._over_budget = 0
        self._flood: Event | None = None
        self._last: Event | None = None
        self._end: ExitReason | None = None
        self._events = 0
        self._named = frozenset(c for r in self._rules for c in r.syscalls) | {c for s, _ in self._stateful for c in s.syscalls}
        self._asked: dict[tuple[str, str], _Ask] = {}

    def _enabled(self, rule_id: str) -> bool:
        setting = self._settings.get(rule_id)
        return setting is None or setting.enabled

    def _applies(self, needs: tuple[tuple[str, ...], ...]) -> bool:
        """At level cold nothing that needs sys_exit is asked for: that is the policy's choice, no loss of evidence."""
        return self.facts.level is Level.FULL or all(any(s != "sys_exit" for s in item) for item in needs)

    def _active(self, rule_id: str, needs: tuple[tuple[str, ...], ...]) -> bool:
        return self._enabled(rule_id) and self._applies(needs)

    def _find_out(self, kind: str, call: str) -> _Ask:
        """Who watches this kind of event and, where somebody names it, this call. Found out when the first one comes: few
        kinds come at all. Calls that nobody names share one entry, so that odd numbers do not fill the table."""
        key = (kind, call if call in self._named else "")
        if key not in self._asked:

            def watched(calls: frozenset[str]) -> bool:  # names of calls narrow system calls only
                return kind != SyscallSeen.kind or not calls or key[1] in calls

            self._asked[key] = _ask(
                (r for r in self._rules if kind in r.kinds and watched(r.syscalls)),
                (d for s, d in self._stateful if kind in s.watches and watched(s.syscalls)),
            )
        return self._asked[key]

    def feed(self, event: Event) -> None:
        """Take one event. Order matters: it is the box's single ingest order."""
        view = self.view
        view.observe(event)
        self._events += 1
        self._last = event
        kind = event.kind
        if kind == "syscall":
            assert isinstance(event, SyscallSeen)
            ask = self._asked.get((kind, event.name)) or self._find_out(kind, event.name)
        else:
            ask = self._asked.get((kind, "")) or self._find_out(kind, "")
            if kind == "lost":
                assert isinstance(event, EvidenceLost)
                self._note_loss(event)
            elif kind == "end":
                assert isinstance(event, RunEnded)
                self._end = event.reason
        if event.phase is Phase.SETUP:
            return  # set-up is trusted; its processes are only remembered
        for rule in ask.rules if len(ask.rules) == len(ask.reading) or view.writes(event) else ask.reading:
            if rule.test(event, view):
                self._add(self._finding(rule, event), event)
        for found in ask.detectors:
            for finding in found.feed(event, view):
                self._add(finding, event)

    def _note_loss(self, event: EvidenceLost) -> None:
        if event.over_budget:
            self._over_budget += event.count
            self._flood = self._flood or event

    def _finding(self, rule: Rule, event: Event) -> Finding:
        return Finding(
            rule=rule.id, cls=rule.cls, outcome=rule.outcome_of(event, self.view), severity=rule.severity,
            evidence=(event,), reason=rule.explanation(event, self.view), object=str(rule.object(event, self.view)),
            references=rule.references, accident=rule.accident, allow_hint=rule.allow,
        )

    def _add(self, finding: Finding, event: Event) -> None:
        setting = self._settings.get(finding.rule)
        if setting is not None and not setting.enabled:
            return
        process = finding.process or self.view.info(finding.evidence[0] if finding.evidence else event)
        if setting is not None and _excepted(setting, finding, process):
            return
        severity = setting.severity if setting is not None and setting.severity is not None else finding.severity
        key = (finding.rule, finding.object)
        group = self._groups.get(key)
        if group is None and self._objects.get(finding.rule, 0) >= MAX_OBJECTS:
            key = (finding.rule, BEYOND)
            group = self._groups.get(key)
        if group is None:
            self._objects[finding.rule] = self._objects.get(finding.rule, 0) + 1
            first = finding.evidence[0] if finding.evidence else event
            group = _Group(finding, first, process, finding.outcome, severity, finding.accident)
            self._groups[key] = group
        if OUTCOME_RANK[finding.outcome] > OUTCOME_RANK[group.outcome]:
            group.finding, group.outcome, group.process = finding, finding.outcome, process
        group.severity = max(group.severity, severity)
        group.accident = group.accident and finding.accident
        group.count += 1
        room = MAX_EVIDENCE - len(group.evidence)
        group.evidence += [e for e in finding.evidence[:room] if not any(e is k for k in group.evidence)]

    def finish(self, completeness: Completeness) -> Assessment:
        """Close the box. Byte-identical for the same events, facts, policy, detectors and completeness."""
        for _, found in self._stateful:
            for finding in found.finish(self.view):
                self._add(finding, self._last or Event())
        over = max(self._over_budget, completeness.over_budget)
        if over and self._enabled(FLOOD):
            self._add(_flood_finding(over, self._flood, self.facts), self._flood or Event())
        incidents = tuple(self._incident(key, group) for key, group in sorted(
            self._groups.items(), key=lambda item: (item[1].first.seq, item[0])))
        lost = completeness.events_lost - completeness.over_budget + over
        return Assessment(incidents, self._verdict(incidents, completeness, over), lost)

    def _incident(self, key: tuple[str, str], group: _Group) -> Incident:
        rule, obj = key
        finding = group.finding
        setting = self._settings.get(rule)
        explanation = finding.reason
        if finding.allow_hint:
            explanation += f" To allow it: {finding.allow_hint}"
        return Incident(
            id=_incident_id(self.facts, rule, obj, group), cls=finding.cls, rule=rule, outcome=group.outcome,
            severity=group.severity, at_ns=group.first.at_ns, phase=group.first.phase, exec=group.first.exec,
            process=group.process, object=obj, evidence=tuple(group.evidence), explanation=explanation,
            references=finding.references, accident=group.accident, occurrences=group.count,
            rewarded=setting is None or setting.reward,
        )

    def _unserved(self, completeness: Completeness) -> list[str]:
        """Evidence sources that an enabled detector needs and that were not there, or not to the end."""
        gone = set(completeness.sensors_missing) | set(completeness.sensors_dead)
        if not gone:
            return []
        asked = [r.needs for r in self._rules] + [s.needs for s, _ in self._stateful]
        out = {"|".join(item) for needs in asked for item in needs if all(s in gone for s in item)}
        return sorted(out)

    def _verdict(self, incidents: tuple[Incident, ...], completeness: Completeness, over: int) -> Verdict:
        reasons: list[str] = []
        unserved = self._unserved(completeness)
        dead = set(completeness.sensors_dead)
        for item in unserved:
            word = "stopped during the run" if set(item.split("|")) & dead else "is not available on this host"
            reasons.append(f"evidence source {item} {word}")
        lost = {ring: n for ring, n in sorted(completeness.lost.items()) if n}
        reasons += [f"{n} records of ring {ring} were lost" for ring, n in lost.items()]
        if over:
            reasons.append(f"{over} records were beyond the box's own event budget")
        if completeness.guard_failed:
            reasons.append(f"the guard failed: {completeness.guard_failed}")
        # Only rings that findings depend on count; what the context ring drops is listed.
        failed = bool(completeness.guard_failed) or self._end is ExitReason.GUARD_ERROR
        complete = not (unserved or over or failed or any(ring != "context" for ring in lost))
        reasons += [f"layer {name} is missing" for name in sorted(completeness.missing_layers)]
        validity = self._validity(incidents, over=over, failed=failed, complete=complete, dead=bool(dead and unserved))
        if incidents:
            main = max(incidents, key=lambda i: (i.severity, OUTCOME_RANK[i.outcome], -CLASS_ORDER[i.cls]))
            return Verdict(VerdictClass(main.cls.value), main.outcome, main.severity, validity, complete,
                           tuple(reasons), self.facts.level)
        cls = VerdictClass.CLEAN if complete else VerdictClass.INCONCLUSIVE
        return Verdict(cls, None, 0, validity, complete, tuple(reasons), self.facts.level)

    def _validity(
        self, incidents: tuple[Incident, ...], *, over: int, failed: bool, complete: bool, dead: bool,
    ) -> Validity:
        """Agent fault is not infrastructure fault; a finding already made is not washed away by a later loss."""
        if over:
            return Validity.AGENT_FAULT
        if failed:
            return Validity.INFRA_FAULT
        if incidents or complete:
            return Validity.OK
        return Validity.INFRA_FAULT if dead else Validity.UNKNOWN


def _flood_finding(over: int, event: Event | None, facts: BoxFacts) -> Finding:
    return Finding(
        rule=FLOOD, cls=Class.TAMPER, outcome=Outcome.ATTEMPTED, severity=8, evidence=(event,) if event else (),
        reason=(f"The box caused {over} records more than its event budget holds; what they would have shown is lost. "
                "The budget is the box's own, so the loss is its doing."),
        object="evidence", references=("ATT&CK T1562.006",),
        allow_hint=f"limits: {{events: {int(facts.limits.get('events', 200_000)) + over}}}",
    )


def _excepted(setting: DetectorSetting, finding: Finding, process: ProcessInfo) -> bool:
    """Whether the policy's `except` names this finding; an entry with both parts wants both."""
    for entry in setting.except_:
        fits_object = entry.object is None or glob(entry.object, finding.object)
        fits_process = entry.process is None or glob(entry.process, process.exe)
        if fits_object and fits_process and (entry.object or entry.process):
            return True
    return False


#: Left out of an incident's id: times and host numbers, and raw words that may be addresses.
_VOLATILE = frozenset({"seq", "at_ns", "tgid", "tid", "ppid", "args", "data", "child_tgid", "child_tid", "target_tgid",
                       "victim_tgid"})


def _incident_id(facts: BoxFacts, rule: str, obj: str, group: _Group) -> str:
    """The first 32 hex digits of SHA-256 over the run, the rule, the object and what the evidence says."""
    essentials = [{k: plain(v) for k, v in e.to_record().items() if k not in _VOLATILE} for e in group.evidence]
    body = {"run": facts.run_id, "box": facts.box, "rule": rule, "object": obj, "class": group.finding.cls.value,
            "outcome": group.outcome.value, "evidence": essentials}
    return hashlib.sha256(canonical(body)).hexdigest()[:32]


def plain(value: Any) -> Any:
    """JSON values within RFC 8785's domain: whole numbers beyond 2**53-1 become hexadecimal text."""
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        return value
    return value if -(1 << 53) < value < 1 << 53 else hex(value)


def canonical(value: Any) -> bytes:
    """RFC 8785 bytes of plain values; lone surrogates, which JSON cannot carry, are replaced."""
    return rfc8785.dumps(_scrub(plain(value)))


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_scrub(v) for v in value]
    if isinstance(value, dict):
        return {_scrub(k): _scrub(v) for k, v in value.items()}
    return value


def assess(
    events: Iterable[Event], facts: BoxFacts, policy: Policy, detectors: DetectorSet, completeness: Completeness,
) -> Assessment:
    """Judge recorded events, without a price; `scoring.judge_events` adds it."""
    judge = Judge(policy, facts, detectors)
    for event in events:
        judge.feed(event)
    return judge.finish(completeness)
