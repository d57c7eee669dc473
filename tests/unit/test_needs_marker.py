"""The `needs` marker: runs, skips with the reason, or fails where the feature must be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def run_one(tmp_path, feature, **env):
    """A test that needs `feature`, in a pytest of its own with the suite's conftest as a plugin."""
    (tmp_path / "test_one.py").write_text(f"import pytest\n@pytest.mark.needs({feature!r})\ndef test_one():\n    pass\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSEC_GUARD_", "PYTEST_"))}
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rs", "--rootdir",
                           str(tmp_path), "-c", os.devnull, "-q", str(tmp_path)], capture_output=True, text=True, timeout=120,
                          env={**clean, "PYTHONPATH": str(TESTS), **env}, cwd=tmp_path, check=False)
    return done.returncode, done.stdout


def test_it_runs_where_the_feature_works(tmp_path):
    code, out = run_one(tmp_path, "x86_64")
    assert code == 0
    assert "1 passed" in out


def test_it_skips_with_the_reason(tmp_path):
    code, out = run_one(tmp_path, "x86_64", DSEC_GUARD_PRETEND_MISSING="x86_64")
    assert code == 0
    assert "1 skipped" in out
    assert "x86_64: " in out


@pytest.mark.parametrize("words", ["x86_64", "landlock, x86_64", "all"])
def test_it_fails_where_the_feature_must_be_there(tmp_path, words):
    code, out = run_one(tmp_path, "x86_64", DSEC_GUARD_PRETEND_MISSING="x86_64", DSEC_GUARD_TESTS_MUST_HAVE=words)
    assert code == 1
    assert "has to be there" in out


def test_an_unknown_feature_is_a_mistake(tmp_path):
    code, out = run_one(tmp_path, "warp_drive")
    assert code == 1
    assert "unknown feature" in out


def test_ci_names_every_feature_that_is_not_optional():
    told = subprocess.run([sys.executable, "-c", "import conftest; print(*sorted(conftest.must_have()))"], capture_output=True,
                          text=True, timeout=60, check=True, cwd=TESTS,
                          env={**os.environ, "PYTHONPATH": str(TESTS), "DSEC_GUARD_TESTS_MUST_HAVE": "all"})
    script = (TESTS.parent / ".ci" / "run").read_text("utf-8")
    listed = script.split("features=(", 1)[1].split(")", 1)[0].split()
    assert sorted(listed) == told.stdout.split()
