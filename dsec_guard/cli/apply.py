"""`dsec-guard apply`: changes that a run packed, written to the workspace after all."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dsec_guard.cli.options import guard_errors, say
from dsec_guard.errors import UsageError


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", "workspace", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where to apply it.")
@click.option("--force", is_flag=True, help="Apply the rest where files changed on the host since the run began; those stay.")
@guard_errors
def apply(file: Path, workspace: Path, force: bool) -> None:
    """Apply the changes in FILE (of `run --pack`, or of a run whose changes were withheld) to a directory.

    The checks of write-back hold here too. Exit status: 0 done, 1 nothing applied because of changes on the host.
    """
    from dsec_guard.incident.store import StateDir
    from dsec_guard.sandbox.workspace import apply_pack, check_workspace, recover

    if not file.is_file():
        raise UsageError(f"{file} is no file", hint="name the file that the run's summary named")
    journal = StateDir.open().journal_dir
    recover(journal)
    report = apply_pack(file, check_workspace(workspace, named=True), journal_dir=journal, force=force)
    for one in report.refused:
        say(f"left out: {one.path} ({one.why})")
    for path in report.conflicts:
        say(f"changed on the host: {path}")
    if report.stopped:
        say("nothing was applied: --force leaves those files as they are and applies the rest")
        sys.exit(1)
    say(f"{len(report.applied)} written, {len(report.removed)} removed, {len(report.refused)} left out")
