"""The sealed `.git`: what the base reaches is whole, nothing else is in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_guard.errors import DsecGuardError, HostError, UsageError
from dsec_guard.policy.schema import Repository
from dsec_guard.sandbox import seal as seal_module
from dsec_guard.sandbox.decoys import Alias
from dsec_guard.sandbox.seal import Seal, seal_repository

pytestmark = pytest.mark.needs("git")
LATER = "later-secret"
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "a",
               "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
               "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}


def git(where: Path, *words: str, text: str = "") -> str:
    done = subprocess.run(["git", *words], cwd=where, env=ENVIRONMENT, input=text, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repo: Path, text: str) -> str:
    (repo / "a.py").write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", text)
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two commits on main, tagged v1."""
    path = tmp_path / "work/repo"
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    commit(path, "one")
    commit(path, "two")
    git(path, "tag", "-a", "v1", "-m", "first")
    return path


def sealed(repo: Path, base: str = "HEAD", *, decoys: bool = False) -> Seal:
    found = seal_repository(
        Repository(path="/workspace/repo", base=base), [Alias(str(repo.parent), "/workspace")], repo.parents[1] / "sealed",
        workspace="/workspace", owner=(os.getuid(), os.getgid()), decoys=decoys, seed=b"s")
    assert found is not None
    return found


def everything(directory: Path) -> str:
    """All objects of a sealed repository, and all text files in it."""
    objects = subprocess.run(["git", "--git-dir", directory, "cat-file", "--batch-all-objects", "--batch"], env=ENVIRONMENT,
                             capture_output=True, check=True).stdout.decode("latin-1")
    return objects + "".join(p.read_bytes().decode("latin-1") for p in directory.rglob("*") if p.is_file())


def remote_branch(repo: Path) -> None:
    sha = commit(repo, LATER)
    git(repo, "update-ref", "refs/remotes/origin/fix", sha)
    git(repo, "reset", "-q", "--hard", "HEAD~1")


def packed_branch(repo: Path) -> None:
    remote_branch(repo)
    git(repo, "pack-refs", "--all")
    git(repo, "repack", "-adq")
    git(repo, "commit-graph", "write", "--reachable")


def reflog(repo: Path) -> None:
    commit(repo, LATER)
    git(repo, "reset", "-q", "--hard", "HEAD~1")


def stash(repo: Path) -> None:
    (repo / "a.py").write_text(LATER)
    git(repo, "stash", "-q")


def dangling(repo: Path) -> None:
    git(repo, "hash-object", "-w", "--stdin", text=LATER)


def tag(repo: Path) -> None:
    commit(repo, LATER)
    git(repo, "tag", "-a", "v2", "-m", LATER)
    git(repo, "reset", "-q", "--hard", "HEAD~1")


def staged(repo: Path) -> None:
    (repo / "a.py").write_text(LATER)
    git(repo, "add", "a.py")


def worktree(repo: Path) -> None:
    git(repo, "worktree", "add", "-q", "-b", "side", str(repo.parents[1] / "side"))
    commit(repo.parents[1] / "side", LATER)


def note(repo: Path) -> None:
    git(repo, "notes", "add", "-m", LATER)


@pytest.mark.parametrize("leave", [remote_branch, packed_branch, reflog, stash, dangling, tag, staged, worktree, note])
def test_later_history_is_not_in_it(repo: Path, leave: Callable[[Path], None]) -> None:
    leave(repo)
    assert LATER in everything(repo / ".git")
    directory = sealed(repo).directory
    found = everything(directory)
    assert LATER not in found
    assert "two" in found
    git(directory, "--git-dir=.", "fsck", "--strict")  # also of what the index names


def test_the_history_of_the_base_is_whole(repo: Path) -> None:
    packed_branch(repo)
    directory = sealed(repo).directory
    assert git(directory, "--git-dir=.", "fsck", "--strict") == ""
    assert git(directory, "--git-dir=.", "log", "--format=%s") == "two\none"
    assert git(directory, "--git-dir=.", "describe") == "v1"
    assert git(directory, "--git-dir=.", "symbolic-ref", "HEAD") == "refs/heads/main"
    assert git(repo, f"--git-dir={directory}", "--work-tree=.", "status", "--porcelain") == ""


def test_a_branch_beyond_the_base_ends_at_the_base(repo: Path) -> None:
    commit(repo, LATER)
    for base in ("v1", "HEAD~1", git(repo, "rev-parse", "HEAD~1"), git(repo, "rev-parse", "--short", "HEAD~1")):
        directory = sealed(repo, base).directory
        assert LATER not in everything(directory)
        assert git(directory, "--git-dir=.", "log", "--format=%s", "main") == "two\none"
        directory.rename(directory.with_name(f"was-{len(base)}"))


def test_a_borrowed_store_is_read_and_covered(repo: Path) -> None:
    remote_branch(repo)
    borrower = repo.with_name("clone")
    git(repo.parent, "clone", "-q", "--shared", str(repo), str(borrower))
    found = seal_repository(
        Repository(path="/workspace/clone"), [Alias(str(repo.parent), "/workspace")], repo.parents[1] / "sealed",
        workspace="/workspace", owner=(os.getuid(), os.getgid()), decoys=False, seed=b"s")
    assert found is not None
    assert found.masked == ("/workspace/repo/.git/objects",)
    assert LATER not in everything(found.directory)
    assert git(found.directory, "--git-dir=.", "log", "--format=%s") == "two\none"


def test_the_real_one_is_covered_wherever_else_it_shows(repo: Path) -> None:
    def shown(*binds: Alias) -> tuple[str, ...]:
        found = seal_repository(
            Repository(path="/workspace/repo"), [Alias(str(repo.parent), "/workspace"), *binds],
            repo.parents[1] / f"sealed{len(list(repo.parents[1].iterdir()))}", workspace="/workspace",
            owner=(os.getuid(), os.getgid()), decoys=False, seed=b"s")
        assert found is not None
        return found.masked

    assert shown() == ()
    assert shown(Alias(str(repo), "/data"), Alias(str(repo / ".git"), "/git")) == ("/data/.git", "/git")
    with pytest.raises(UsageError, match="is part of a repository"):
        shown(Alias(str(repo / ".git/objects"), "/data"))


def test_a_store_of_another_owner_or_by_a_quoted_name_is_not_read(repo: Path, tmp_path: Path) -> None:
    alternates = repo / ".git/objects/info/alternates"
    for line in ("/proc/self/root/etc", f'"{tmp_path}"', "/nowhere"):
        alternates.write_text(line + "\n")
        with pytest.raises(UsageError) as caught:
            sealed(repo)
        assert caught.value.hint
    alternates.unlink()
    if os.getuid() == 0:
        os.chown(repo / ".git/objects", 1234, 1234)
        with pytest.raises(UsageError, match="another owner"):
            sealed(repo)


def test_a_shallow_clone_stays_shallow(repo: Path) -> None:
    shallow = repo.parent / "s/repo"
    git(repo.parent, "clone", "-q", "--depth=1", f"file://{repo}", str(shallow))
    directory = sealed(shallow).directory
    assert git(directory, "--git-dir=.", "log", "--format=%s") == "two"


def test_settings_and_hooks_that_run_programs_stay_out(repo: Path) -> None:
    git(repo, "config", "core.fsmonitor", "touch /tmp/ran")
    git(repo, "config", "alias.x", "!id")
    git(repo, "config", "remote.origin.url", "https://user:word@example.invalid/x")
    git(repo, "config", "core.autocrlf", "input")
    (repo / ".git/hooks/post-checkout").write_text("#!/bin/sh\n")
    directory = sealed(repo).directory
    text = (directory / "config").read_text()
    assert "autocrlf" in text
    assert not any(word in text for word in ("fsmonitor", "alias", "user:word", "remote"))
    assert not list((directory / "hooks").iterdir())


def test_a_bundle_beside_the_files_is_named_unless_it_is_tracked(repo: Path) -> None:
    git(repo, "bundle", "create", "-q", str(repo / "ours.bundle"), "main")
    git(repo, "add", "-f", "ours.bundle")
    git(repo, "commit", "-qm", "three")
    (repo / "deep").mkdir()
    git(repo, "bundle", "create", "-q", str(repo / "deep/later.bundle"), "main")
    (repo / "no.bundle").write_text("js")
    assert sealed(repo).bundles == ("/workspace/repo/deep/later.bundle",)


@pytest.mark.parametrize(("break_it", "words"), [
    (lambda repo: "nowhere", "the base 'nowhere' is no commit"),
    (lambda repo: "0123456789abcdef0123456789abcdef01234567", "is no commit"),
    (lambda repo: "--all", "is no commit"),
    (lambda repo: (os.rename(repo / ".git", repo.parent / "g"), (repo / ".git").write_text("gitdir: ../g\n"), "HEAD")[2],
     "points to a directory elsewhere"),
    (lambda repo: ((repo / ".git/HEAD").write_text("ref: ../../x\n"), "HEAD")[1], "HEAD of"),
    (lambda repo: ((repo / ".git/objects/ff").symlink_to("/etc"), "HEAD")[1], "are links"),
    (lambda repo: (git(repo.parent, "clone", "-q", "--bare", str(repo), "b"), git(repo, "status"),
                   os.rename(repo, repo.with_name("x")), os.rename(repo.parent / "b", repo), "HEAD")[4], "bare repository"),
])
def test_what_cannot_be_sealed_is_refused_with_a_hint(repo: Path, break_it: Callable[[Path], str], words: str) -> None:
    base = break_it(repo)
    with pytest.raises(UsageError, match=words) as caught:
        sealed(repo, base)
    assert caught.value.hint


def test_a_repository_without_commits_is_sealed_empty(tmp_path: Path) -> None:
    repo = tmp_path / "work/repo"
    repo.mkdir(parents=True)
    git(repo, "init", "-q", "-b", "trunk")
    dangling(repo)
    directory = sealed(repo).directory
    assert LATER not in everything(directory)
    assert (directory / "HEAD").read_text() == "ref: refs/heads/trunk\n"


def test_no_repository_is_nothing_to_seal(tmp_path: Path) -> None:
    arguments = {"workspace": "/workspace", "owner": (0, 0), "decoys": True, "seed": b"s"}
    for path in ("/workspace", "/elsewhere"):
        assert seal_repository(Repository(path=path), [Alias(str(tmp_path), "/workspace")], tmp_path / "sealed",
                               **arguments) is None  # type: ignore[arg-type]


def test_a_host_without_git_says_so(repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(seal_module, "_SEARCH", str(tmp_path))
    with pytest.raises(HostError, match="needs git") as caught:
        sealed(repo)
    assert caught.value.hint


def test_the_made_up_future_is_whole_and_lists_without_its_content(repo: Path) -> None:
    found = sealed(repo, decoys=True)
    labels = sorted(item.label for item in found.planted)
    assert labels == ["later_commit", *["later_content"] * 4, "whole_tree"]
    for item in found.planted:  # as the box's mounts show it
        path = found.directory / item.target.removeprefix("/workspace/repo/.git/")
        path.chmod(0o644)
        path.write_bytes(item.content)
    assert git(found.directory, "--git-dir=.", "fsck", "--strict", "--no-dangling") == ""
    token = next(item.token.decode() for item in found.planted if item.token)
    assert token in git(found.directory, "--git-dir=.", "log", "--all", "-p")
    assert token in git(found.directory, "--git-dir=.", "show", "HEAD@{1}")
    assert token not in git(found.directory, "--git-dir=.", "log", "-p")


def test_failures_of_git_are_the_guards(repo: Path) -> None:
    for pack in (repo / ".git/objects").glob("??/*"):
        pack.chmod(0o644)
        pack.write_bytes(b"broken")
    with pytest.raises(DsecGuardError):
        sealed(repo)
