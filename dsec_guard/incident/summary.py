"""What a run came to, for people: a few lines on stderr after the command has ended.

Every string that an agent chose goes through `printable` and into a rich Text, which knows no markup.
"""

from __future__ import annotations

import os
import shlex
import sys
from io import StringIO
from typing import TYPE_CHECKING, TextIO

from dsec_guard.model import OUTCOME_RANK, ExitReason, LayerState, VerdictClass, escape_bytes, printable, severity_word

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from dsec_guard.model import Incident
    from dsec_guard.service.request import RunOutcome, TransferReport

MAX_INCIDENTS = 8
MAX_REFUSED = 5
MAX_OBJECT = 200
COPIED = frozenset({"packed in", "to apply", "run", "report", "record"})
COLOURS = {"none": "green", "low": "cyan", "medium": "yellow", "high": "red", "critical": "bold red"}
WORDS = {
    ExitReason.WALL_LIMIT: "ended at the wall-clock limit",
    ExitReason.MEMORY_LIMIT: "killed at the memory limit",
    ExitReason.KILLED_BY_POLICY: "killed by policy",
    ExitReason.NOT_FOUND: "not found inside the box",
    ExitReason.NOT_EXECUTABLE: "not executable inside the box",
    ExitReason.GUARD_ERROR: "the guard failed",
    ExitReason.INTERRUPTED: "interrupted",
}


def print_summary(outcome: RunOutcome, *, quiet: bool = False, report_file: Path | None = None,
                  file: TextIO | None = None) -> None:
    """Write the summary to `file` (default: stderr). quiet: only when there is an incident, a failure of the guard or
    something that was not written back. A reader that is gone is no error."""
    stream = sys.stderr if file is None else file
    if stream is None or (quiet and not worth_saying(outcome)):
        return
    try:
        if _plain_enough(outcome):
            stream.write(_one_line(outcome, report_file) + "\n")
        else:
            stream.write(_rendered(outcome, report_file, terminal=stream.isatty()))
        stream.flush()
    except BrokenPipeError:
        if stream is sys.stderr:  # Python flushes once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def worth_saying(outcome: RunOutcome) -> bool:
    """Whether a quiet caller wants to know."""
    return bool(outcome.incidents or outcome.error or outcome.verdict.cls is not VerdictClass.CLEAN
                or outcome.exit.reason in (ExitReason.NOT_FOUND, ExitReason.NOT_EXECUTABLE)
                or outcome.write_back.state in ("withheld", "partial", "failed"))


def _weaker(outcome: RunOutcome) -> list[str]:
    """Layers that bind or see less than the policy's author may think; optional ones do not count."""
    return [f"{x.name} {x.state.value}" + (f" ({x.detail})" if x.detail else "")
            for x in outcome.layers if x.state is not LayerState.ENFORCED and not x.optional]


def _plain_enough(outcome: RunOutcome) -> bool:
    return not (worth_saying(outcome) or outcome.flags or _weaker(outcome) or outcome.write_back.refused
                or outcome.collect.refused or outcome.write_back.pack or outcome.warnings)


def _one_line(outcome: RunOutcome, report_file: Path | None) -> str:
    parts = ["clean", _exit_words(outcome), _duration(outcome.usage.wall_s), f"watched: {outcome.verdict.level.value}"]
    if written := _transfer_words(outcome.write_back):
        parts.append(f"workspace: {written}")
    if outcome.run_dir is not None:
        parts.append(f"report: {report_file or outcome.run_dir}")
    return printable("dsec-guard: " + " · ".join(parts))


def _rendered(outcome: RunOutcome, report_file: Path | None, *, terminal: bool) -> str:
    """The text, with colours for a terminal. Not printed by rich itself: it ends the process on a broken pipe."""
    from rich.console import Console

    page = StringIO()
    console = Console(file=page, force_terminal=terminal or None, highlight=False, markup=False, emoji=False)
    _head(console, outcome)
    for incident in _worst_first(outcome.incidents)[:MAX_INCIDENTS]:
        _incident(console, incident)
    if len(outcome.incidents) > MAX_INCIDENTS:
        console.print(_text(f"  … and {len(outcome.incidents) - MAX_INCIDENTS} more in the report", "dim"))
    for label, value, style in _facts(outcome, report_file):
        if label in COPIED:  # a wrapped path or command is no use to the clipboard
            console.print(_text(f"  {label:<10} ", "dim").append(printable(value), style), soft_wrap=True)
        else:
            console.print(_hanging(f"  {label:<10} ", value, style, console.width))
    return page.getvalue()


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def _hanging(label: str, value: str, style: str, width: int) -> Text:
    """`label` and `value`, later lines indented below the value's start."""
    from rich.console import Console

    indent = len(label)
    ruler = Console(width=max(width - indent, 20), color_system=None, highlight=False, markup=False, emoji=False)
    lines = _text(value).wrap(ruler, max(width - indent, 20))
    result = _text(label, "dim")
    for number, line in enumerate(lines):
        if number:
            result.append("\n" + " " * indent)
        line.rstrip()
        result.append(line.plain, style)
    return result


def _head(console: Console, outcome: RunOutcome) -> None:
    verdict = outcome.verdict
    word = severity_word(verdict.severity)
    style = COLOURS[word] if verdict.cls is not VerdictClass.INCONCLUSIVE else "yellow"
    line = _text("dsec-guard: ", "bold")
    line.append(verdict.cls.value, style)
    if verdict.outcome is not None:
        line.append(f" {verdict.outcome.value}")
    if verdict.severity:
        line.append(f" · severity {verdict.severity} ({word})", style)
    line.append(f" · penalty {_signed(outcome.reward.penalty)}")
    if outcome.mode == "observe" and outcome.reward.would_be_penalty:
        line.append(f" (observing; it would be {_signed(outcome.reward.would_be_penalty)})")
    console.print(line)
    complete = "complete" if verdict.complete else "incomplete"
    console.print(_hanging("  ", f"{_exit_words(outcome)} in {_duration(outcome.usage.wall_s)} · policy "
                           f"{outcome.policy_name} · watched: {verdict.level.value}, {complete} · "
                           f"sample {verdict.validity.value}"
                           + (f" · fold {_signed(outcome.fold)}" if outcome.fold is not None else ""), "", console.width))


def _incident(console: Console, incident: Incident) -> None:
    word = severity_word(incident.severity)
    line = _text("  ")
    line.append(f"{word} {incident.severity}", COLOURS[word])
    line.append(f" {printable(incident.rule)} ", "bold")
    line.append(f"{incident.outcome.value}")
    notes = [f"penalty {_signed(incident.penalty)}" if incident.counted else "not counted"]
    if incident.occurrences > 1:
        notes.append(f"{incident.occurrences} times")
    if incident.accident:
        notes.append("an accident")
    if not incident.rewarded:
        notes.append("held out")
    line.append(f" ({', '.join(notes)})", "dim")
    console.print(line)
    who = incident.process.exe or "?"
    console.print(_hanging("    by    ", f"{who} (pid {incident.process.pid})", "", console.width))
    if incident.object:
        console.print(_hanging("    what  ", _cut(incident.object), "", console.width))
    console.print(_hanging("    why   ", incident.explanation, "", console.width))


def _facts(outcome: RunOutcome, report_file: Path | None) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    if outcome.verdict.reasons and outcome.verdict.cls is VerdictClass.INCONCLUSIVE:
        rows.append(("because", "; ".join(outcome.verdict.reasons), "yellow"))
    if weaker := _weaker(outcome):
        rows.append(("weaker", ", ".join(weaker), "yellow"))
    if outcome.monitor.lost or outcome.monitor.over_budget:
        rows.append(("lost", f"{outcome.monitor.lost} events lost, {outcome.monitor.over_budget} over budget", "yellow"))
    if outcome.flags:
        rows.append(("limits", ", ".join(outcome.flags), "yellow"))
    rows += [("warning", warning, "yellow") for warning in outcome.warnings]
    for label, report in (("workspace", outcome.write_back), ("collected", outcome.collect)):
        if words := _transfer_words(report):
            rows.append((label, words, ""))
        rows += [("  left out", f"{_cut(r.path)} ({r.why})", "yellow") for r in report.refused[:MAX_REFUSED]]
        more = max(report.refused_total, len(report.refused)) - MAX_REFUSED
        if more > 0:
            rows.append(("", f"… and {more} more in the report", ""))
        if report.pack is not None:
            rows.append(("packed in", str(report.pack), ""))
        if report.apply_command:
            rows.append(("to apply", shlex.join(report.apply_command), "bold"))
    if outcome.run_dir is not None:
        rows.append(("run", str(outcome.run_dir), ""))
    if report_file is not None:
        rows.append(("report", str(report_file), ""))
    if outcome.record_file is not None:
        rows.append(("record", str(outcome.record_file), ""))
    return rows


def _transfer_words(report: TransferReport) -> str:
    refused = max(report.refused_total, len(report.refused))
    counts = [f"{n} {word}" for n, word in ((report.written, "written"), (report.removed, "removed"), (refused, "left out")) if n]
    if report.state in ("none", "applied", "collected") and not counts and not report.why:
        return ""
    heads = {"applied": "", "collected": "", "none": "", "withheld": "nothing written back", "packed": "changes packed",
             "discarded": "changes dropped", "partial": "partly written back", "failed": "failed"}
    head = heads.get(report.state, report.state)
    if report.why:
        head = f"{head}: {report.why}" if head else report.why
    if counts and report.state == "withheld":
        return f"{head} ({', '.join(counts)} in the pack)"
    return ", ".join(x for x in (head, *counts) if x)


def _exit_words(outcome: RunOutcome) -> str:
    end = outcome.exit
    words = WORDS.get(end.reason)
    status = f"signal {end.signal}" if end.signal is not None else f"exit {end.code}" if end.code is not None else ""
    name = os.path.basename(escape_bytes(outcome.argv[0])) if outcome.argv else "the command"
    if words is None:
        return status or end.reason.value
    return f"{name} {words}" + (f" ({status})" if status else "")


def _worst_first(incidents: tuple[Incident, ...]) -> list[Incident]:
    return sorted(incidents, key=lambda i: (-i.severity, -OUTCOME_RANK[i.outcome], i.at_ns, i.id))


def _signed(value: float) -> str:
    return f"{value + 0:.2f}" if value else "0"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_OBJECT else text[: MAX_OBJECT - 1] + "…"
