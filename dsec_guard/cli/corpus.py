"""`dsec-guard corpus`: run a directory of behaviour probes and compare with what its manifest expects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dsec_guard.cli.options import guard_errors
from dsec_guard.corpus.judge import Judged, Summary, summarise
from dsec_guard.corpus.manifest import load_corpus, select
from dsec_guard.model import printable

WIDTH = 110     # the table's own; a log has no width to ask for


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--id", "ids", metavar="ID", multiple=True, help="Only this probe (may be repeated).")
@click.option("--class", "classes", metavar="CLASS", multiple=True, help="Only probes of this class (may be repeated).")
@click.option("--policy", metavar="NAME|FILE", default="base", show_default=True,
              help="What each probe's policy extends.")
@click.option("--level", type=click.Choice(["cold", "full"]), help="How closely to watch; the policy's level when left out.")
@click.option("--json", "json_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the results here.")
@guard_errors
def corpus(directory: Path, ids: tuple[str, ...], classes: tuple[str, ...], policy: str, level: str | None,
           json_file: Path | None) -> None:
    """Run the probes of DIR (manifest.yaml, task.yaml, layout.py), each in a box of its own.

    Exit status: 0 when every expectation held, 1 when one failed, 125 when the guard could not work here.
    """
    from dsec_guard.corpus.runner import CorpusSession

    loaded = load_corpus(directory)
    chosen = select(loaded, ids, classes)
    judged: list[Judged] = []
    with CorpusSession(loaded, parent=policy, level=level) as session:
        for item in session.run_all(chosen):
            judged.append(item)
            _progress(item, len(judged), len(chosen))
    summary = summarise(judged)
    if json_file is not None:
        whole = {"probes": [j.as_json() for j in judged], "summary": summary.as_json()}
        json_file.write_text(json.dumps(whole, indent=1, ensure_ascii=True) + "\n", "utf-8")
    _table(summary)
    sys.exit(0 if summary.ok else 1)


def _progress(item: Judged, number: int, total: int) -> None:
    word = "skipped" if item.skipped is not None else "ok" if item.ok else "FAILED"
    click.echo(f"[{number:3}/{total}] {item.id:<28} {word:<8} {item.seconds:5.1f} s  {item.verdict_class}", err=True)
    for reason in item.why:
        click.echo(f"          {printable(reason)[:400]}", err=True)


def _table(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("class", "probes", "prevented", "reported", "missed", "false alarms", "skipped", "failed")
    for name, row in summary.rows.items():
        table.add_row(name, *(str(row[k]) for k in
                              ("probes", "prevented", "reported", "missed", "false_alarms", "skipped", "failed")))
    console = Console(width=WIDTH, soft_wrap=True)
    console.print(table)
    for probe_id, why in summary.skipped.items():
        console.print(f"skipped {probe_id}: {printable(why)}", markup=False)
    console.print(f"severity exact: {summary.exact_share:.1%}; probes with a further class: {summary.extra_share:.1%}",
                  markup=False)
    for line in (*summary.problems, *(f"failed: {name}" for name in summary.failed)):
        console.print(line, markup=False)
