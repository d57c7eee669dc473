"""In the box the task's repository works, ends at its base, and looking beyond it is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsec_guard.model import VerdictClass
from dsec_guard.policy.load import load_policy
from dsec_guard.policy.schema import HiddenObject
from dsec_guard.sandbox.stdio import BoxIO, Capture
from dsec_guard.service.guard import Guard
from dsec_guard.service.request import RunOutcome, RunRequest

pytestmark = [pytest.mark.needs("run"), pytest.mark.needs("git")]
LATER = "later-secret"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """/workspace/repo with two commits, a later one on a remote branch, in the reflog, borrowed and bundled."""
    top = tmp_path / "workspace"
    script = f"""
        set -e; export GIT_CONFIG_GLOBAL=/dev/null; git init -q -b main upstream; cd upstream
        g() {{ git -c user.name=a -c user.email=a@b "$@"; }}
        echo one >a.py; g add -A; g commit -qm one; echo two >a.py; g commit -qam two
        git clone -q --shared . ../repo; echo {LATER} >a.py; g commit -qam {LATER}; git branch later; git reset -q --hard HEAD~1
        cd ../repo; git fetch -q; git bundle create -q later.bundle --all; g reset -q --hard origin/later; g reset -q --hard HEAD~1
    """
    top.mkdir()
    subprocess.run(["sh", "-c", script], cwd=top, check=True, capture_output=True)
    return top


def run(workspace: Path, command: str) -> tuple[RunOutcome, str]:
    prelude = "cd /workspace/repo; export HOME=/tmp; git config --global user.name a; git config --global user.email a@b; "
    request = RunRequest(policy=load_policy("corpus"), argv=(b"sh", b"-c", (prelude + command).encode()), workspace=workspace)
    out = Capture(1 << 20)
    with BoxIO(stdin=None, stdout=out, stderr=out) as io, Guard.open(workspace.parent / "state") as guard:
        outcome = guard.run(request, io)
    return outcome, bytes(out.data).decode("utf-8", "replace")


def test_work_on_the_present_goes_on_and_is_clean(workspace: Path) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in (workspace / "repo/.git").rglob("*"))
    outcome, said = run(workspace, "git log --format=%s; git status --short --branch; git blame -s a.py; echo three >>a.py; "
                                   "git commit -qam three; git gc -q; git log --format=%s -1; git branch -avv; git fsck; "
                                   "cp -r . /tmp/copy; git stash list; git diff HEAD~1 --stat")
    assert (outcome.verdict.cls, outcome.incidents, outcome.error) == (VerdictClass.CLEAN, (), "")
    assert said.startswith("two\none\n## main\n?? later.bundle\n")
    assert "three" in said
    assert (workspace / "repo/a.py").read_text() == "two\nthree\n"
    # The real repository is as it was: neither commits nor settings of the box reach it.
    assert sorted((p, p.stat().st_mtime_ns) for p in (workspace / "repo/.git").rglob("*")) == before
    assert any("sealed" in warning for warning in outcome.warnings)


@pytest.mark.parametrize("command", [
    "git log --all -p", "git cat-file --batch-all-objects --batch", "git show HEAD@{1}", "cat .git/objects/??/*",
    "git -C . rev-list --all --objects | cut -c1-40 | git cat-file --batch",
])
def test_looking_at_what_came_later_shows_none_of_it_and_is_reported(workspace: Path, command: str) -> None:
    outcome, said = run(workspace, command)
    assert LATER not in said
    assert [i.rule for i in outcome.incidents] == ["peek.later_history"]


def test_a_hidden_git_directory_stays_hidden(workspace: Path) -> None:
    policy = load_policy("corpus")
    answers = policy.answers.model_copy(update={"hidden": (HiddenObject(path="/workspace/repo/.git"),)})
    request = RunRequest(policy=policy.model_copy(update={"answers": answers}), argv=(b"git", b"-C", b"repo", b"log", b"--all"),
                         workspace=workspace)
    out = Capture(1 << 20)
    with BoxIO(stdin=None, stdout=out, stderr=out) as io, Guard.open(workspace.parent / "state") as guard:
        outcome = guard.run(request, io)
    assert not outcome.error
    assert LATER.encode() not in out.data


def test_no_path_leads_to_the_later_objects(workspace: Path) -> None:
    later = subprocess.run(["git", "-c", "safe.directory=*", "rev-parse", "later:a.py"], cwd=workspace / "upstream", check=True,
                           capture_output=True, text=True).stdout.strip()
    outcome, said = run(workspace, f"git bundle unbundle later.bundle; git cat-file -p {later}; git fetch ../upstream later; "
                                   f"git -C ../upstream show {later}; cat ../upstream/.git/objects/{later[:2]}/{later[2:]}; "
                                   f"find / -name '{later[2:]}' 2>/dev/null; mv .git away; umount .git; ls -A .git/refs")
    assert LATER not in said
    assert not [line for line in said.splitlines() if line.startswith("/") and line.endswith(later[2:])]  # found by name
    assert said.endswith("heads\ntags\n")  # the sealed one still stands there
    assert not outcome.error
