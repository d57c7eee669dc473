"""Fixtures and the `needs` marker for the whole suite.

`@pytest.mark.needs("feature")` runs the test only where the feature works, which is found out by trying it. Where
DSEC_GUARD_TESTS_MUST_HAVE (a comma-separated list, or `all`) names the feature, its absence fails the test instead of
skipping it: continuous integration must not turn green by leaving tests out.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_guard.host.probe import PROBES, probe

REPOSITORY = Path(__file__).resolve().parent.parent
LEFTOVER_S = 3.0

CLI = (sys.executable, "-P", "-c", "from dsec_guard.cli.main import cli; cli()")
#: Programs that tests start, by the name of the feature.
PROGRAMS = {"bubblewrap": "bwrap", "clang": "clang-14", "gcc": "gcc", "git": "git", "strace": "strace"}
#: What no test may insist on: hosts that have it are rare, or it is only compared with.
OPTIONAL = frozenset({"strace"})


def pytest_configure() -> None:
    """A shell starts background jobs with INT and QUIT ignored, and every program that tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@functools.cache
def missing(feature: str) -> str:
    """Why a feature does not work here; "" when it does.

    Features are those that `dsec-guard doctor` tries, the programs above, and `run`: the whole line through.
    """
    if feature in PROGRAMS:
        return "" if shutil.which(PROGRAMS[feature]) else f"{PROGRAMS[feature]} is not installed"
    if feature == "run":
        done = subprocess.run([*CLI, "run", "--quiet", "--discard", "--", "true"], capture_output=True, timeout=120,
                              cwd=REPOSITORY / "tests", check=False)
        return "" if done.returncode == 0 else f"dsec-guard run -- true: {done.returncode} {done.stderr[-300:]!r}"
    if feature not in PROBES:
        return f"unknown feature: known are {', '.join(known_features())}"
    found = probe([feature], workspace=REPOSITORY).features[feature]
    return "" if found.works else f"{found.tried}: {found.detail}"


def known_features() -> tuple[str, ...]:
    return (*PROBES, *PROGRAMS, "run")


def must_have() -> frozenset[str]:
    """The features whose absence fails a test. `all` leaves out what a host need not have."""
    words = {w.strip() for w in os.environ.get("DSEC_GUARD_TESTS_MUST_HAVE", "").split(",") if w.strip()}
    if "all" in words:
        words |= {f for f in known_features() if f not in OPTIONAL and not (f in PROBES and PROBES[f].optional)}
    return frozenset(words - {"all"})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for feature in marker.args:
            why = missing(feature)
            if not why:
                continue
            if feature in must_have() or feature not in known_features():
                pytest.fail(f"{feature} has to be there (DSEC_GUARD_TESTS_MUST_HAVE): {why}", pytrace=False)
            pytest.skip(f"{feature}: {why}")


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, also for every `dsec-guard` it starts."""
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("DSEC_GUARD_STATE", str(path))
    return path


def _ours() -> set[str]:
    """Processes in a guard's cgroups, mounts of ours in this namespace, and cgroups of ours."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                text = (process / "cgroup").read_text()
            except OSError:
                continue
            if "/dsec-guard" in text:
                found.add(f"process {process.name}")
    found |= {f"mount {line.split(' ')[1]}" for line in Path("/proc/self/mounts").read_text().splitlines()
              if "/dsec-guard" in line.split(" ")[1]}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, fs, _ = line.split(" ")[:4]
        if fs in ("cgroup", "cgroup2"):
            found |= {f"cgroup {p}" for p in Path(point).glob("dsec-guard/*")}
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no process, mount or cgroup of the product behind that was not there before."""
    before = _ours()
    yield
    deadline = time.monotonic() + LEFTOVER_S
    while (left := _ours() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {sorted(left)}"


@pytest.fixture(scope="session")
def dsec_guard_cli() -> tuple[str, ...]:
    """The words that start the command line of the code under test."""
    return CLI
