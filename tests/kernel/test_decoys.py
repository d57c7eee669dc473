"""Decoys as a real detached tmpfs, attached in a private mount namespace."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

from dsec_guard.errors import SetupError
from dsec_guard.host import mount
from dsec_guard.policy.schema import Answers, HiddenObject, HiddenStyle, StateObject
from dsec_guard.sandbox.decoys import Alias, DecoyTree, build_decoys, hidden_places
from tests.kernel.overlay import put

pytestmark = pytest.mark.needs("namespaces")
SECRET = b"TOP-SECRET-" + b"0123456789abcdef"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    top = tmp_path / "real"
    put(top / "answers/key.json", b'{"a": "' + SECRET + b'"}' + b" " * 500, 0o600)
    put(top / "answers/deep/case.txt", SECRET * 10, 0o600)
    put(top / "answers/run.sh", SECRET * 3, 0o700)
    put(top / "answers/big.bin", SECRET, 0o600)
    os.truncate(top / "answers/big.bin", 1 << 33)
    os.mkfifo(top / "answers/pipe")
    (top / "answers/link").symlink_to("/etc/shadow")
    return top


def hidden(*pairs: tuple[str, str | None], **kwargs) -> Answers:
    return Answers(hidden=tuple(HiddenObject(path=path, source=source) for path, source in pairs), **kwargs)


def attached(tree: DecoyTree, tmp_path: Path, action):
    """Attach every decoy below tmp_path/inside as a box would have it, and run `action` on that path."""
    top = tmp_path / "inside"

    def body():
        for item in tree.mounts:
            point = top / item.target.lstrip("/")
            point.parent.mkdir(parents=True, exist_ok=True)
            point.mkdir(exist_ok=True) if item.is_dir else point.touch()
            mount.move_mount(item.fd, mount.AT_FDCWD, os.fsencode(point))
        return action(top)

    return mount.in_private_mount_namespace(body)


@pytest.mark.parametrize("older_kernel", [False, True])
def test_names_and_sizes_are_real_and_content_is_not(tmp_path, real, older_kernel):
    answers = hidden(("/srv/answers", str(real / "answers")), ("/srv/key.json", str(real / "answers/key.json")))
    before = Path("/proc/self/mountinfo").read_text()
    with build_decoys(answers, b"seed", owner_uid=4321, owner_gid=4322, force_namespace=older_kernel) as tree:
        assert Path("/proc/self/mountinfo").read_text() == before

        def check(top: Path) -> dict[str, tuple[int, int, int]]:
            found = {}
            for path in sorted(top.rglob("*")):
                info = path.lstat()
                if path.is_file():
                    found[str(path.relative_to(top))] = (info.st_size, stat.S_IMODE(info.st_mode), info.st_uid)
                    with path.open("rb") as file:
                        assert SECRET not in file.read(1 << 20)
                    assert info.st_ino in {item.ino for item in tree.objects}
                    with pytest.raises(OSError, match="Read-only") as caught:
                        path.open("ab")
                    assert caught.value.errno == errno.EROFS
            with pytest.raises(OSError, match="cross-device") as caught:
                os.link(top / "srv/key.json", top / "stolen")
            assert caught.value.errno == errno.EXDEV
            return found

        found = attached(tree, tmp_path, check)
    assert found == {
        "srv/answers/key.json": ((real / "answers/key.json").stat().st_size, 0o444, 4321),
        "srv/answers/deep/case.txt": (len(SECRET) * 10, 0o444, 4321),
        "srv/answers/run.sh": (len(SECRET) * 3, 0o555, 4321),
        "srv/answers/big.bin": (1 << 33, 0o444, 4321),
        "srv/key.json": ((real / "answers/key.json").stat().st_size, 0o444, 4321),
    }


def test_objects_carry_the_numbers_the_kernel_uses(tmp_path, real):
    with build_decoys(hidden(("/srv/answers", str(real / "answers"))), b"s") as tree:
        by_name = {item.object: item for item in tree.objects}
        assert by_name["/srv/answers"].is_dir
        assert all(item.decoy for item in tree.objects)
        item = by_name["/srv/answers/deep/case.txt"]
        handle = tree.open_object(item)
        info = os.fstat(handle)
        os.close(handle)
        assert (mount.kernel_dev(info.st_dev), info.st_ino) == (item.dev, item.ino)
        assert stat.S_ISREG(info.st_mode)


def test_every_box_gets_other_content_and_the_same_seed_the_same(tmp_path, real):
    def content(seed: bytes, name: str) -> dict[str, bytes]:
        with build_decoys(hidden(("/srv/answers", str(real / "answers"))), seed) as tree:
            tokens = {item.object: item.token for item in tree.canaries}
            return attached(tree, tmp_path / name, lambda top: {
                str(p.relative_to(top)): p.read_bytes().replace(tokens[f"/{p.relative_to(top)}"], b"")
                for p in top.rglob("*.*") if p.is_file() and p.suffix != ".bin"})

    first, again, other = content(b"a", "1"), content(b"a", "2"), content(b"b", "3")
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)


def test_canaries_stand_in_the_files_they_name(tmp_path, real):
    with build_decoys(hidden(("/srv/answers", str(real / "answers"))), b"s") as tree:
        canaries = {item.object: item.token for item in tree.canaries}
        texts = attached(tree, tmp_path, lambda top: {
            "/" + str(p.relative_to(top)): p.open("rb").read(1 << 16) for p in top.rglob("*") if p.is_file()})
    assert set(canaries) == set(texts)
    assert all(canaries[name] in texts[name] for name in canaries)
    assert len(set(canaries.values())) == len(canaries)


@pytest.mark.needs("git")
@pytest.mark.parametrize("exists", [True, False])
def test_a_hidden_repository_is_a_repository_with_other_content(tmp_path, exists):
    source = tmp_path / "up.git"
    if exists:
        subprocess.run(["git", "init", "-q", "--bare", source], check=True)
    with build_decoys(hidden(("/srv/up.git", str(source))), b"s") as tree:
        def use(top: Path) -> str:
            git = ["git", "-c", "safe.directory=*", "-C", top / "srv/up.git"]
            subprocess.run([*git, "fsck", "--strict"], check=True, capture_output=True)
            return subprocess.run([*git, "log", "--all", "-p"], check=True, capture_output=True, text=True).stdout

        log = attached(tree, tmp_path, use)
        assert log.count("commit ") == 2
        (canary,) = tree.canaries
        assert (canary.object, log.count(canary.token.decode())) == ("/srv/up.git", 1)


def test_what_exists_nowhere_is_invented(tmp_path):
    with build_decoys(hidden(("/nowhere/answers", None), ("/nowhere/key.json", None)), b"s") as tree:
        kinds = {item.target: item.is_dir for item in tree.mounts}
        files = attached(tree, tmp_path, lambda top: len([p for p in top.rglob("*") if p.is_file()]))
    assert kinds == {"/nowhere/answers": True, "/nowhere/key.json": False}
    assert files >= 4
    assert all(item.decoy for item in tree.objects)


def test_hidden_material_is_covered_wherever_it_shows(tmp_path, real):
    work = tmp_path / "work"
    put(work / "tests/hidden/a.py", SECRET)
    put(work / "sub/solution.patch", SECRET)
    put(work / "solution.patch", SECRET)
    aliases = [Alias(str(work), "/workspace"), Alias(str(real), "/data")]
    answers = hidden(("/workspace/tests/hidden", None), ("/workspace/**/solution.*", None), ("/workspace/none", None),
                     ("/srv/answers", str(real / "answers")))
    places = {item.path: item.source for item in hidden_places(answers, aliases)}
    assert set(places) == {"/workspace/tests/hidden", "/workspace/sub/solution.patch", "/workspace/solution.patch",
                           "/workspace/none", "/srv/answers", "/data/answers"}
    with build_decoys(answers, b"s", aliases=aliases) as tree:
        # Nothing is there to cover, and a mount point would have to be made in the user's directory.
        assert "/workspace/none" not in {item.target for item in tree.mounts}
        assert {"/data/answers", "/workspace/solution.patch"} <= {item.target for item in tree.mounts}


def test_style_absent_covers_only_what_would_show(tmp_path, real):
    aliases = [Alias(str(real), "/data")]
    answers = hidden(("/srv/answers", str(real / "answers")), style=HiddenStyle.ABSENT)
    with build_decoys(answers, b"s", aliases=aliases) as tree:
        assert [item.target for item in tree.mounts] == ["/data/answers"]
        assert attached(tree, tmp_path, lambda top: os.listdir(top / "data/answers")) == []


def test_large_trees_are_cut_and_endless_patterns_refused(tmp_path):
    for number in range(300):
        put(tmp_path / f"many/{number}.txt")
    with pytest.raises(SetupError, match="more than"):
        build_decoys(hidden((f"{tmp_path}/many/*.txt", None)), b"s")


def test_environment_state_is_listed_with_its_real_inode(tmp_path):
    put(tmp_path / "state/board.json", "{}")
    state = StateObject(path="/srv/state", source=str(tmp_path / "state"))
    with build_decoys(Answers(environment_state=(state,)), b"s") as tree:
        assert tree.mounts == []
        item = {item.object: item for item in tree.objects}["/srv/state/board.json"]
        info = (tmp_path / "state/board.json").stat()
        assert (item.dev, item.ino, item.label) == (mount.kernel_dev(info.st_dev), info.st_ino, "environment_state")


def test_no_descriptor_is_left_after_use(real):
    before = set(os.listdir("/proc/self/fd"))
    with build_decoys(hidden(("/srv/answers", str(real / "answers"))), b"s"):
        assert len(os.listdir("/proc/self/fd")) > len(before)
    assert set(os.listdir("/proc/self/fd")) == before
