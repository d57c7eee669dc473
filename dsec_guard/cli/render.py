"""Tables and pages of the commands that show records; markup is off, agent-chosen text is stripped."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from dsec_guard.cli.options import write_stdout
from dsec_guard.model import printable, severity_word

if TYPE_CHECKING:
    from rich.console import Console

    from dsec_guard.incident.store import StoredIncident

COLOURS = {"none": "green", "low": "cyan", "medium": "yellow", "high": "red", "critical": "bold red"}


@contextlib.contextmanager
def stdout_page() -> Iterator[Console]:
    """A console that takes no markup; what is printed goes to stdout at the end, in colour only on a terminal and
    without NO_COLOR. Not printed by rich itself, which ends the process on a broken pipe."""
    from rich.console import Console

    page = StringIO()
    yield Console(file=page, force_terminal=os.isatty(1) or None, highlight=False, markup=False, emoji=False)
    write_stdout(page.getvalue().encode("utf-8", "replace"))


def incident_table(incidents: Sequence[StoredIncident]) -> None:
    """One line per incident, newest first, on stdout."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", no_wrap=True)
    table.add_column("when (UTC)", no_wrap=True)
    table.add_column("severity", no_wrap=True)
    table.add_column("rule", overflow="fold")
    table.add_column("outcome", no_wrap=True)
    table.add_column("object", overflow="fold")
    for one in incidents:
        word = severity_word(one.severity)
        table.add_row(Text(printable(one.id[:12])), Text(printable(one.recorded[:19].replace("T", " "))),
                      Text(f"{one.severity} {word}", style=COLOURS[word]), Text(printable(one.rule)),
                      Text(printable(one.outcome)), Text(_cut(printable(str(one.record.get("object", ""))), 60)))
    with stdout_page() as out:
        out.print(table)


def incident_page(incident: StoredIncident) -> None:
    """Everything about one incident, on stdout."""
    from rich.text import Text

    record = incident.record
    word = severity_word(incident.severity)
    head = Text(printable(f"{incident.rule}  "), style="bold")
    head.append(f"{printable(incident.cls)} {printable(incident.outcome)}, severity {incident.severity} ({word})",
                style=COLOURS[word])
    process = _mapping(record.get("process"))
    rows = [
        ("id", incident.id), ("run", incident.run_id), ("recorded", incident.recorded), ("at", record.get("at")),
        ("phase", f"{record.get('phase')}, command {record.get('exec')}"),
        ("process", f"{process.get('exe')} (pid {process.get('pid')})"),
        ("argv", " ".join(str(x) for x in _list(process.get("argv")))),
        ("ancestry", " ← ".join(str(x) for x in _list(process.get("ancestry")))),
        ("object", record.get("object")),
        ("penalty", f"{record.get('penalty')}{'' if record.get('counted') else ' (not counted)'}"),
        ("policy", _mapping(record.get("policy")).get("name")),
        ("references", ", ".join(str(x) for x in _list(record.get("references")))),
        ("labels", ", ".join(f"{k}={v}" for k, v in _mapping(record.get("labels")).items())),
    ]
    with stdout_page() as out:
        out.print(head)
        for label, value in rows:
            if value not in (None, ""):
                out.print(Text(f"  {label:<11}", style="dim").append(printable(str(value)), style=""))
        out.print()
        out.print(Text(printable(str(record.get("explanation", "")))))
        evidence = _list(record.get("evidence"))
        out.print()
        out.print(Text(f"evidence: {len(evidence)} of {record.get('evidence_total', len(evidence))} events", style="bold"))
        for event in evidence:
            out.print(Text("  " + printable(_event_line(_mapping(event)))))


def _event_line(event: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in event.items()
            if k not in ("kind", "at", "seq", "at_ns", "phase", "exec", "source", "comm") and v not in ("", 0, [], None)}
    return (f"{event.get('at', '')} {event.get('kind', '')} [{event.get('comm', '')}] "
            f"{json.dumps(rest, ensure_ascii=True)} ({event.get('source', '')})")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
