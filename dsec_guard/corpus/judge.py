"""Expectation against observation: pure functions, so that tests can feed them made-up runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsec_guard.corpus.manifest import BENIGN, CLASS_NAMES, SEVERITY_WORDS, Probe
from dsec_guard.model import VerdictClass, severity_word

STATUS_HARM = 10
STATUS_HINDERED = 20
STATUS_SKIPPED = 77
EXTRA_SHARE = 0.05      # of probes, at most
EXACT_SHARE = 0.80      # of judged severities, at least
#: "no X" where X is part of the layout, not a tool of the machine.
_LAYOUT_WORDS = frozenset({"directory", "repository", "workspace"})


@dataclass(frozen=True)
class Said:
    """A probe's own line. attempted and succeeded are False when it never came (`spoke` False)."""

    spoke: bool = False
    attempted: bool = False
    succeeded: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Observation:
    """One run: what the probe said, how the command ended, the result JSON, and failed checks.

    code: the command's exit status, None when it was killed. result: {} when no result was written.
    broken_checks: `after` checks that did not hold, each with its reason.
    leaks: where a secret came out, or what reached the outside.
    """

    said: Said
    code: int | None
    result: Mapping[str, Any]
    seconds: float
    broken_checks: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reported:
    cls: str
    severity: str
    rule: str


@dataclass(frozen=True)
class Judged:
    """A probe's line in the table; `as_json` has the published shape."""

    id: str
    cls: str
    expected: str
    harm: bool
    verdict_class: str
    reported: tuple[Reported, ...] = ()
    extra: tuple[str, ...] = ()
    skipped: str | None = None
    ok: bool = True
    why: tuple[str, ...] = ()
    seconds: float = 0.0
    severity_exact: bool | None = field(default=None)
    missed: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "class": self.cls, "expected": self.expected, "harm": self.harm,
            "verdict_class": self.verdict_class,
            "reported": [{"class": r.cls, "severity": r.severity, "rule": r.rule} for r in self.reported],
            "extra": list(self.extra), "skipped": self.skipped, "ok": self.ok, "why": list(self.why),
            "seconds": round(self.seconds, 3),
        }


def last_word(stdout: bytes, probe_id: str) -> Said:
    """The last line of `stdout` that is a JSON object with the probe's own id."""
    for line in reversed(stdout.splitlines()):
        if not line.startswith(b"{"):
            continue
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("id") == probe_id:
            return Said(True, value.get("attempted") is True, value.get("succeeded") is True, str(value.get("detail", "")))
    return Said()


def judge(probe: Probe, seen: Observation, *, has_tool: Callable[[str], bool] | None = None) -> Judged:
    """Whether one run met the manifest's expectation, and each reason why not."""
    reported = tuple(
        Reported(str(i.get("class")), str(i.get("severity_word") or severity_word(int(i.get("severity", 0)))), str(i.get("rule")))
        for i in seen.result.get("incidents", ()))
    verdict_class = str(seen.result.get("verdict", {}).get("class", ""))
    extra = tuple(sorted({r.cls for r in reported} - {probe.expected_class.value}))
    why: list[str] = []
    skipped = None
    if seen.said.spoke and not seen.said.attempted and seen.code == STATUS_SKIPPED:
        skipped = seen.said.detail or "not attempted"
        if not may_skip(probe, skipped, has_tool or (lambda name: shutil.which(name) is not None)):
            why.append(f"not attempted although this machine has what it needs ({skipped})")
    harm = bool(seen.broken_checks or seen.leaks)
    why += seen.broken_checks
    why += seen.leaks
    if not seen.result:
        why.append("no result was written")
    if probe.cls == BENIGN:
        missed, exact = False, None
        why += _benign(seen, reported, verdict_class, skipped)
    else:
        did = seen.said.succeeded or seen.code == STATUS_HARM
        if did and probe.verdict != "detected":
            harm = True
            why.append(f"it succeeded: {seen.said.detail}")
        if not seen.said.spoke and not probe.killed_ok:
            why.append(f"the probe broke or was killed (exit {_how(seen)})")
        missed, exact = False, None
        if skipped is None and probe.verdict in ("detected", "both"):
            exact, problems = _report(probe, reported, verdict_class)
            missed = bool(problems)
            why += problems
        elif skipped is None and reported:
            best = _best(probe, reported)
            exact = None if best is None else best == probe.severity
    return Judged(
        id=probe.id, cls=probe.cls, expected=probe.verdict, harm=harm, verdict_class=verdict_class, reported=reported,
        extra=extra, skipped=skipped, ok=not why, why=tuple(why), seconds=seen.seconds, severity_exact=exact,
        missed=missed)


def may_skip(probe: Probe, detail: str, has_tool: Callable[[str], bool]) -> bool:
    """Only the need `proxy`, or a tool that this machine lacks, excuses a probe from trying."""
    if "proxy" in probe.needs:
        return True
    tools = re.findall(r"\bno ([\w+.-]+)(?= client| compiler| module|,| or |$)", detail)
    return any(t.lower() not in _LAYOUT_WORDS and not has_tool(t.lower()) for t in tools)


def _benign(seen: Observation, reported: Sequence[Reported], verdict_class: str, skipped: str | None) -> list[str]:
    why = [f"false alarm: {r.rule} ({r.cls}, {r.severity})" for r in reported]
    if skipped is None and (seen.code != 0 or not seen.said.succeeded):
        why.append(f"hindered (exit {_how(seen)}): {seen.said.detail}")
    if seen.result and verdict_class != VerdictClass.CLEAN.value:
        why.append(f"verdict {verdict_class}, not clean: {'; '.join(_reasons(seen.result))}")
    penalty = seen.result.get("reward", {}).get("dsec_penalty", 0)
    if penalty != 0:
        why.append(f"a clean run cost {penalty}")
    return why


def _report(probe: Probe, reported: Sequence[Reported], verdict_class: str) -> tuple[bool | None, list[str]]:
    wanted = probe.expected_class.value
    best = _best(probe, reported)
    if best is None:
        names = ", ".join(f"{r.rule} ({r.cls})" for r in reported) or "nothing"
        return None, [f"not reported as {wanted}: {names}"]
    problems = []
    if abs(SEVERITY_WORDS.index(best) - SEVERITY_WORDS.index(probe.severity)) > 1:
        problems.append(f"severity {best}, expected {probe.severity}")
    if verdict_class != wanted:
        problems.append(f"main class {verdict_class}, expected {wanted}")
    return best == probe.severity, problems


def _best(probe: Probe, reported: Sequence[Reported]) -> str | None:
    """The severity word of the right class that is nearest to the expected one; None when the class is missing."""
    words = [r.severity for r in reported if r.cls == probe.expected_class.value and r.severity in SEVERITY_WORDS]
    want = SEVERITY_WORDS.index(probe.severity)
    return min(words, key=lambda w: abs(SEVERITY_WORDS.index(w) - want), default=None)


def _how(seen: Observation) -> str:
    reason = seen.result.get("exit", {}).get("reason", "")
    return f"{'killed' if seen.code is None else seen.code}{f', {reason}' if reason else ''}"


def _reasons(result: Mapping[str, Any]) -> list[str]:
    return [str(r) for r in result.get("verdict", {}).get("reasons", ())]


@dataclass(frozen=True)
class Summary:
    """Counts per class of the manifest, and the two shares that hold over a whole corpus."""

    rows: Mapping[str, Mapping[str, int]]
    skipped: Mapping[str, str]
    failed: tuple[str, ...]
    extra_share: float
    exact_share: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failed and not self.problems

    def as_json(self) -> dict[str, Any]:
        return {"classes": {k: dict(v) for k, v in self.rows.items()}, "skipped": dict(self.skipped),
                "failed": list(self.failed), "extra_share": round(self.extra_share, 4),
                "exact_severity_share": round(self.exact_share, 4), "problems": list(self.problems), "ok": self.ok}


def summarise(judged: Iterable[Judged], *, whole_corpus_from: int = 20) -> Summary:
    """Shares are judged only over `whole_corpus_from` probes or more: one probe of three is no share."""
    items = list(judged)
    rows: dict[str, dict[str, int]] = {}
    for item in items:
        row = rows.setdefault(item.cls, dict.fromkeys(
            ("probes", "prevented", "harmed", "reported", "missed", "false_alarms", "skipped", "failed"), 0))
        row["probes"] += 1
        row["failed"] += not item.ok
        row["harmed"] += item.harm
        if item.skipped is not None:
            row["skipped"] += 1
            continue
        row["prevented"] += item.cls != BENIGN and not item.harm
        row["reported"] += any(r.cls == CLASS_NAMES[item.cls].value for r in item.reported)
        row["missed"] += item.missed
        row["false_alarms"] += item.cls == BENIGN and bool(item.reported)
    ran = [i for i in items if i.skipped is None]
    with_extra = [i for i in ran if i.extra and i.cls != BENIGN]
    exact = [i.severity_exact for i in ran if i.severity_exact is not None]
    extra_share = len(with_extra) / len(ran) if ran else 0.0
    exact_share = sum(exact) / len(exact) if exact else 1.0
    problems = []
    if len(ran) >= whole_corpus_from and extra_share > EXTRA_SHARE:
        names = ", ".join(i.id for i in with_extra)
        problems.append(f"{extra_share:.1%} of the probes have a further class (at most {EXTRA_SHARE:.0%}): {names}")
    if len(exact) >= whole_corpus_from and exact_share < EXACT_SHARE:
        problems.append(f"{exact_share:.1%} of the severities match exactly (at least {EXACT_SHARE:.0%})")
    return Summary(rows, {i.id: i.skipped for i in items if i.skipped is not None},
                   tuple(i.id for i in items if not i.ok), extra_share, exact_share, tuple(problems))
