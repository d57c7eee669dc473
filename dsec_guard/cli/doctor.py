"""`dsec-guard doctor`: which layers work on this host, how that was tried, and how to enable the rest."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from dsec_guard.cli.options import guard_errors
from dsec_guard.model import printable

if TYPE_CHECKING:
    from dsec_guard.host.probe import HostFeatures

DEFAULT_POLICY = "untrusted-script"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@guard_errors
def doctor(as_json: bool) -> None:
    """Try every kernel feature that a box is made of.

    Exit status: 0 when `dsec-guard run` with its default policy could work here, 1 when it could not.
    """
    from dsec_guard.errors import HostError
    from dsec_guard.host.probe import probe
    from dsec_guard.policy.compile import compile_policy
    from dsec_guard.policy.load import load_policy

    features = probe()
    problem: HostError | None = None
    try:
        compile_policy(load_policy(DEFAULT_POLICY), features)
    except HostError as error:
        problem = error
    if as_json:
        click.echo(json.dumps(_as_json(features, problem), indent=2))
    else:
        _print(features, problem)
    sys.exit(0 if problem is None else 1)


def _as_json(features: HostFeatures, problem: Exception | None) -> dict[str, Any]:
    from dsec_guard.host.probe import PROBES

    return {
        "schema": "dsec-guard/doctor/v1",
        "policy": DEFAULT_POLICY,
        "usable": problem is None,
        "problem": None if problem is None else str(problem),
        "features": [
            {"name": f.name, "works": f.works, "optional": PROBES[f.name].optional, "tried": f.tried, "detail": f.detail,
             **vars(PROBES[f.name].remedy)}
            for f in features.features.values()
        ],
    }


def _print(features: HostFeatures, problem: Exception | None) -> None:
    from dsec_guard.host.probe import PROBES

    for feature in features.features.values():
        entry = PROBES[feature.name]
        state = "works  " if feature.works else "missing"
        click.echo(printable(f"{state}  {feature.name}: {feature.tried}: {feature.detail}"))
        if not feature.works:
            remedy = entry.remedy
            for label, text in (("enable", remedy.enable), ("docker run", remedy.container),
                                ("pod securityContext", remedy.pod), ("sysctl", remedy.sysctl)):
                if text:
                    click.echo(printable(f"           {label}: {text}"))
            if entry.optional:
                click.echo("           optional: no policy depends on it")
    click.echo()
    if problem is None:
        click.echo(f"A run with the policy {DEFAULT_POLICY} works here.")
    else:
        click.echo(printable(f"A run with the policy {DEFAULT_POLICY} does not work here: {problem}"))
