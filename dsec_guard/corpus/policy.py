"""The facts of a corpus task as a policy for one probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsec_guard.corpus.manifest import Probe, Task
from dsec_guard.policy.schema import SCHEMA_ID

#: task.yaml's name of a limit -> the policy's, and the unit its number is in.
LIMITS: Mapping[str, tuple[str, str]] = {
    "tasks": ("pids", ""), "memory_mib": ("memory", "MiB"), "shm_mib": ("shm", "MiB"), "disk_mib": ("disk", "MiB"),
    "files": ("files", ""), "open_files": ("open_files", ""), "cpu_cores": ("cpus", ""), "ptys": ("ptys", ""),
    "output_mib": ("output", "MiB"),
}


def policy_for(task: Task, layout: Path, probe: Probe, *, parent: str) -> dict[str, Any]:
    """The policy's YAML tree: `parent` narrowed to this task, with the hidden things of `layout` as sources."""
    limits: dict[str, Any] = {"wall_time": f"{probe.time_bound_s}s"}
    for theirs, value in task.limits.items():
        if theirs in LIMITS:
            ours, unit = LIMITS[theirs]
            limits[ours] = f"{value}{unit}" if unit else value
    if "disk" in limits:
        limits["file_size"] = limits["disk"]    # a sparse file counts by its length
    answers: dict[str, Any] = {
        "hidden": [_object(task, layout, path) for path in task.hidden_paths],
        "environment_state": [_object(task, layout, path) for path in task.environment_state],
        "harness": list(task.harness_files),
        "allowed_reads": list(task.allowed_reads),
    }
    if task.repository is not None:
        answers["repository"] = {"path": task.repository[0], "base": task.repository[1]}
    if task.package is not None:
        answers["package"] = task.package
    tree: dict[str, Any] = {
        "schema": SCHEMA_ID,
        "extends": parent,
        "limits": limits,
        "workspace": {"target": task.cwd},
        "environment": dict(task.env),
        "network": task.network,
        "answers": answers,
    }
    if task.collect is not None:
        tree["deliverables"] = [task.collect]
    return tree


def write_policy(tree: Mapping[str, Any], path: Path) -> None:
    """As YAML that the policy loader accepts."""
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False, default_flow_style=False), "utf-8")


def _object(task: Task, layout: Path, path: str) -> dict[str, str]:
    source = task.in_layout(path, layout)
    return {"path": path} if source is None else {"path": path, "source": str(source)}
