"""`dsec-guard policy`: check policy files, say what they mean, and compare them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import cast

import click

from dsec_guard.cli.options import guard_errors, say
from dsec_guard.errors import PolicyError, UsageError
from dsec_guard.model import printable


@click.group()
def policy() -> None:
    """Check, explain and compare policies."""


@policy.command()
@click.argument("names", metavar="NAME|FILE...", nargs=-1, required=True)
@guard_errors
def validate(names: tuple[str, ...]) -> None:
    """Check each policy and its parents; every mistake is listed with its place.

    Exit status: 0 when all are right, 1 when one is not.
    """
    from dsec_guard.policy.load import load_policy

    wrong = 0
    for name in names:
        try:
            loaded = load_policy(name)
        except PolicyError as error:
            wrong += 1
            say(*error.problems)
        else:
            click.echo(f"{printable(name)}: ok, digest {loaded.digest}")
    sys.exit(1 if wrong else 0)


@policy.command()
@click.argument("name", metavar="NAME|FILE")
@click.option("--path", metavar="PATH", help="A path as seen inside the box.")
@click.option("--op", type=click.Choice(["read", "write", "execute", "list"]), default="read", show_default=True)
@click.option("--workspace", metavar="DIR", type=click.Path(path_type=Path), default=Path(),
              help="The workspace, where the policy leaves it at its own path.")
@click.option("--syscall", metavar="NAME", help="A system call.")
@click.option("--json", "as_json", is_flag=True, help="Print the effective policy, or the answers, as JSON.")
@guard_errors
def explain(name: str, path: str | None, op: str, workspace: Path, syscall: str | None, as_json: bool) -> None:
    """Say what would happen to a path or a system call, and which line of which file decides it.

    Without --path and --syscall: every key of the effective policy with the place it comes from.
    """
    from dsec_guard.policy.explain import Answer, Operation, explain_path, explain_syscall, settings
    from dsec_guard.policy.load import load_policy

    loaded = load_policy(name)
    answers: list[Answer] = []
    if path is not None:
        if not path.startswith("/") or os.path.normpath(path) != path:
            raise UsageError(f"--path {path}: want an absolute path without . and ..", hint="--path /workspace/file")
        answers += explain_path(loaded, path, cast(Operation, op), workspace=str(workspace.resolve()))
    if syscall is not None:
        answers += explain_syscall(loaded, syscall)
    if path is None and syscall is None:
        if as_json:
            click.echo(json.dumps(loaded.model_dump(mode="json", by_alias=True), indent=2))
        else:
            for key, value, place in settings(loaded):
                click.echo(printable(f"{key}: {value}    [{place}]"))
    elif as_json:
        click.echo(json.dumps([vars(a) for a in answers], indent=2))
    else:
        for a in answers:
            click.echo(printable(f"{a.answer}: {a.because}    [{a.key}, {a.place}]"))


@policy.command()
@guard_errors
def schema() -> None:
    """Print the JSON Schema of policy files (for editors)."""
    from dsec_guard.policy.publish import schema_text

    click.echo(schema_text(), nl=False)


@policy.command()
@click.argument("left", metavar="NAME|FILE")
@click.argument("right", metavar="NAME|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@guard_errors
def diff(left: str, right: str, as_json: bool) -> None:
    """Show in which keys two policies differ once their parents are applied.

    Exit status: 0 when they bind and judge alike, 1 when they differ.
    """
    from dsec_guard.policy.explain import differences
    from dsec_guard.policy.load import load_policy

    found = differences(load_policy(left), load_policy(right))
    if as_json:
        click.echo(json.dumps([vars(d) for d in found], indent=2))
    else:
        for d in found:
            click.echo(printable(f"{d.key}: {json.dumps(d.left)} -> {json.dumps(d.right)}"))
    sys.exit(1 if found else 0)
