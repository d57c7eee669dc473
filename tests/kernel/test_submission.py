"""The scan of what is handed in, on a real overlay: which files it reads, and what they said before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_guard.sandbox.changes import inspect_changes
from dsec_guard.sandbox.submission import ScanLimits, ScanReport, scan_submission
from tests.kernel.overlay import overlay, put

pytestmark = pytest.mark.needs("overlay")

EXIT = "import os\ndef mean(v):\n    os._exit(0)\n"


def scan(tmp_path: Path, fill, act, *, patterns=("/workspace/out", "/workspace/repo"), **kwargs) -> ScanReport:
    with overlay(tmp_path, fill, act) as left:
        changed = inspect_changes(left.upper, left.lower, "/workspace").events
        return scan_submission(left.upper, left.lower, "/workspace", changed, patterns, **kwargs)


def paths(report: ScanReport) -> list[str]:
    return [fact.path for fact in report.facts]


def test_changed_python_files_that_are_handed_in_are_read_and_no_others(tmp_path):
    def fill(top: Path) -> None:
        put(top / "repo/untouched.py", EXIT)

    def act(top: Path) -> None:
        for name in ("repo/calc.py", "out/deep/er/sol.py", "out/text.txt", "scratch/mine.py", "repo/lib/site-packages/a.py"):
            put(top / name, EXIT)
        os.symlink("calc.py", top / "repo/link.py")
        os.mkfifo(top / "repo/pipe.py")

    report = scan(tmp_path, fill, act)
    assert paths(report) == ["/workspace/out/deep/er/sol.py", "/workspace/repo/calc.py"]
    assert report.facts[0].line == 3
    assert not report.skipped


def test_a_pattern_hands_in_what_it_matches(tmp_path):
    def act(top: Path) -> None:
        put(top / "a/x.py", EXIT)
        put(top / "a/y.pyw", EXIT)

    assert paths(scan(tmp_path, lambda _: None, act, patterns=("/workspace/**/*.py",))) == ["/workspace/a/x.py"]


def test_what_a_file_said_before_is_not_the_agents_doing(tmp_path):
    def fill(top: Path) -> None:
        put(top / "repo/old.py", EXIT)
        put(top / "repo/more.py", EXIT)

    def act(top: Path) -> None:
        put(top / "repo/old.py", "# a note\n\n" + EXIT)
        put(top / "repo/more.py", EXIT + "    os._exit(0)\n")

    report = scan(tmp_path, fill, act)
    assert paths(report) == ["/workspace/repo/more.py"]


def test_what_lies_beyond_the_limits_is_said(tmp_path):
    def act(top: Path) -> None:
        put(top / "repo/a.py", EXIT)
        put(top / "repo/big.py", "#" * 2000)
        put(top / "repo/deep.py", "-" * 900 + "not " * 9000 + "1")
        put(top / "repo/z.py", EXIT)

    small = scan(tmp_path, lambda _: None, act, limits=ScanLimits(max_file_bytes=1000))
    assert small.skipped == (("/workspace/repo/big.py", "too_big"), ("/workspace/repo/deep.py", "too_big"))


def test_a_file_too_deep_to_parse_is_said_and_the_rest_is_read(tmp_path):
    def act(top: Path) -> None:
        put(top / "repo/deep.py", "not " * 90_000 + "1")
        put(top / "repo/z.py", EXIT)

    report = scan(tmp_path, lambda _: None, act)
    assert report.skipped == (("/workspace/repo/deep.py", "too_deep"),)
    assert paths(report) == ["/workspace/repo/z.py"]


@pytest.mark.parametrize(("limits", "why"), [
    (ScanLimits(max_files=1), "too_many"), (ScanLimits(max_bytes=len(EXIT) + 5), "too_many"), (ScanLimits(seconds=-1), "time"),
])
def test_the_whole_scan_is_bounded(tmp_path, limits, why):
    def act(top: Path) -> None:
        put(top / "repo/a.py", EXIT)
        put(top / "repo/b.py", EXIT)

    report = scan(tmp_path, lambda _: None, act, limits=limits)
    assert report.skipped[-1] == ("/workspace/repo/b.py", why)


def test_a_name_that_is_no_text_is_read_too(tmp_path):
    def act(top: Path) -> None:
        os.makedirs(top / "repo")
        with open(os.fsencode(top) + b"/repo/\xff.py", "w") as file:
            file.write(EXIT)

    assert paths(scan(tmp_path, lambda _: None, act)) == ["/workspace/repo/\\xff.py"]
