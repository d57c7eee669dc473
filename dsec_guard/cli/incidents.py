"""`dsec-guard incidents`: what was recorded on this machine."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone

import click

from dsec_guard.cli.options import guard_errors, say, write_stdout
from dsec_guard.errors import UsageError
from dsec_guard.model import Class


@click.group()
def incidents() -> None:
    """List and show recorded incidents."""


@incidents.command("ls")
@click.option("--class", "cls", type=click.Choice([c.value for c in Class]), help="Only this class.")
@click.option("--run", metavar="RUN", help="Only this run (or runs that begin so).")
@click.option("--rule", metavar="RULE", help="Only this rule, or all rules below it (escape matches escape.mount).")
@click.option("--since", metavar="TIME", help="Only since then: an age such as 2h or 7d, or 2026-01-31[T10:00:00Z].")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many, the newest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@guard_errors
def ls(cls: str | None, run: str | None, rule: str | None, since: str | None, limit: int, as_json: bool) -> None:
    """List incidents, newest first."""
    from dsec_guard.cli.render import incident_table
    from dsec_guard.incident.store import StateDir

    found = StateDir.open().incidents(cls=cls or "", run=run or "", rule=rule or "", limit=limit,
                                      since=_since(since) if since else "")
    if as_json:
        write_stdout("".join(json.dumps(x.record) + "\n" for x in found).encode("ascii"))
    elif found:
        incident_table(found)
    else:
        say("no such incident")


@incidents.command("show")
@click.argument("incident_id", metavar="ID")
@click.option("--run", metavar="RUN", help="Of this run, where several runs recorded the same incident.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@guard_errors
def show(incident_id: str, run: str | None, as_json: bool) -> None:
    """Show one incident; ID may be cut short. Of several records of the same incident the newest is shown."""
    from dsec_guard.cli.render import incident_page
    from dsec_guard.incident.store import StateDir, stored_ids

    found = StateDir.open().incidents(id_prefix=incident_id, run=run or "")
    ids = stored_ids(found)
    if not ids:
        raise UsageError(f"no incident {incident_id}", hint="dsec-guard incidents ls")
    if len(ids) > 1:
        raise UsageError(f"{incident_id} could be any of {', '.join(x[:16] for x in ids[:5])}", hint="give more of the id")
    if as_json:
        write_stdout((json.dumps(found[0].record, indent=2) + "\n").encode("ascii"))
    else:
        incident_page(found[0])
        if len(found) > 1:
            print(f"\nalso recorded in {len(found) - 1} other run(s): see incidents ls --json", file=sys.stderr)


def _since(text: str) -> str:
    """A point in time in the log's own form. Raises: UsageError."""
    from dsec_guard.incident.result import rfc3339
    from dsec_guard.policy.units import parse_duration

    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        try:
            return rfc3339(time.time_ns() - parse_duration(text) * 1_000_000)
        except ValueError:
            raise UsageError(f"--since {text}: want an age such as 2h or 7d, or a time such as 2026-01-31T10:00:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return rfc3339(round(moment.timestamp() * 1_000_000) * 1000)
