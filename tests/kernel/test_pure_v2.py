"""`dsec-guard run` where cgroup version 2 is all there is: on such a host by itself, else in a guest.

The guest is started by a script (`SCRIPT -t SECONDS -o OUTDIR -- COMMAND…`, which copies $VMTEST_OUT to OUTDIR) that
DSEC_GUARD_VMTEST names; without one the tests are skipped on a host with other cgroups.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve()
PROGRAM = HERE.parent / "programs" / "pure_v2.sh"
BESIDE = HERE.parents[3] / "shared" / "vmtest" / "vmtest.sh"
DSEC_GUARD = Path(sys.executable).parent / "dsec-guard"
NO_GUEST = 125  # the script's status when no guest could be started or it died


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs left in their output directory."""
    place = tmp_path_factory.mktemp("pure-v2")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        subprocess.run(["sh", PROGRAM, DSEC_GUARD, place], check=True, timeout=300)
        return place
    script = Path(os.environ.get("DSEC_GUARD_VMTEST") or BESIDE)
    if not script.is_file():
        pytest.skip("this host has cgroups of version 1, and DSEC_GUARD_VMTEST names no script that starts a guest")
    done = subprocess.run(
        ["bash", script, "-t", "400", "-o", place, "--", "sh", "-c", f'sh {PROGRAM} {DSEC_GUARD} "$VMTEST_OUT"'],
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=900)
    if done.returncode == NO_GUEST:
        pytest.skip(f"no guest could be started: {done.stdout[-500:]}")
    assert done.returncode == 0, done.stdout[-4000:]
    return place


def result(out: Path, name: str) -> dict[str, Any]:
    found = json.loads((out / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def test_an_honest_run_is_clean_and_keeps_its_changes(out: Path) -> None:
    clean = result(out, "clean")
    assert (clean["exit"]["reason"], clean["verdict"]["class"], clean["verdict"]["complete"]) == ("exited", "clean", True)
    assert (out / "kept").read_text() == "kept\n"
    assert [x["name"] for x in clean["layers"] if x["state"] == "missing"] == []
    assert clean["usage"]["memory_peak"] > 0


def test_memory_and_tasks_are_limited_and_blamed(out: Path) -> None:
    memory, pids = result(out, "memory"), result(out, "pids")
    assert (memory["exit"]["reason"], memory["flags"]) == ("memory_limit", ["oom"])
    assert 60 << 20 <= memory["usage"]["memory_peak"] <= 64 << 20
    assert [x["rule"] for x in memory["incidents"]] == ["crash.memory"]
    assert (pids["flags"], pids["usage"]["pids_peak"]) == (["pids"], 16)
    assert [x["rule"] for x in pids["incidents"]] == ["crash.pids"]


def test_the_boxs_own_limits_are_not_its_to_change(out: Path) -> None:
    assert {(x["rule"], x["outcome"]) for x in result(out, "cgroup")["incidents"]} == {("escape.cgroup_control", "attempted")}


def test_no_cgroup_is_left(out: Path) -> None:
    assert (out / "left").read_text() == "0\n"
