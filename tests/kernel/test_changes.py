"""The inspection of what a box leaves behind, on real overlays with hostile content."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest

from dsec_guard.host.walk import Walk, WalkLimits, open_regular
from dsec_guard.model import FileChanged, unescape_bytes
from dsec_guard.sandbox.changes import ChangeLimits, ChangeReport, inspect_changes, link_leaves
from dsec_guard.service import run as run_module
from tests.kernel.overlay import dig, overlay, put

pytestmark = pytest.mark.needs("overlay")


def nothing(_: Path) -> None:
    return


def look(tmp_path: Path, fill, act, **kwargs) -> ChangeReport:
    with overlay(tmp_path, fill, act) as left:
        return inspect_changes(left.upper, left.lower, "/workspace", **kwargs)


def by_path(report: ChangeReport) -> dict[str, FileChanged]:
    return {event.path: event for event in report.events}


def test_added_modified_and_removed_files_are_told_apart(tmp_path):
    def fill(top: Path) -> None:
        put(top / "keep.txt", "same")
        put(top / "edit.txt", "old")
        put(top / "gone.txt", "bye")

    def act(top: Path) -> None:
        put(top / "edit.txt", "new!")
        put(top / "src/new.txt", "hello")
        (top / "gone.txt").unlink()

    report = look(tmp_path, fill, act)
    found = {path: (event.change, event.ftype) for path, event in by_path(report).items()}
    assert found == {
        "/workspace/edit.txt": ("modified", "file"), "/workspace/gone.txt": ("removed", "file"),
        "/workspace/src": ("added", "dir"), "/workspace/src/new.txt": ("added", "file"),
    }
    assert report.complete
    assert by_path(report)["/workspace/src/new.txt"].digest == hashlib.sha256(b"hello").hexdigest()


def test_a_rewrite_with_equal_content_is_no_change(tmp_path):
    def act(top: Path) -> None:
        (top / "a.txt").write_text("same")
        shutil.copy(top / "b.txt", top / "b.new")
        (top / "b.new").rename(top / "b.txt")
        (top / "link").unlink()
        (top / "link").symlink_to("a.txt")

    def fill(top: Path) -> None:
        put(top / "a.txt", "same")
        put(top / "b.txt", "b" * 5000)
        (top / "link").symlink_to("a.txt")

    report = look(tmp_path, fill, act)
    assert report.events == ()
    assert report.entries == 3  # all were made anew: otherwise nothing was compared


def test_a_directory_removed_and_made_again_lists_only_real_differences(tmp_path):
    def fill(top: Path) -> None:
        for name in ("one.py", "two.py", "sub/three.py"):
            put(top / "tests" / name, f"# {name}\n")

    def act(top: Path) -> None:
        shutil.rmtree(top / "tests")
        put(top / "tests/one.py", "# one.py\n")
        put(top / "tests/two.py", "# other\n")

    found = {path: event.change for path, event in by_path(look(tmp_path, fill, act)).items()}
    assert found == {
        "/workspace/tests/two.py": "modified", "/workspace/tests/sub": "removed",
        "/workspace/tests/sub/three.py": "removed",
    }


def test_a_removed_directory_is_listed_with_its_content(tmp_path):
    report = look(tmp_path, lambda top: put(top / "tests/deep/a.py"), lambda top: shutil.rmtree(top / "tests"))
    assert [(e.path, e.change) for e in report.events] == [
        ("/workspace/tests", "removed"), ("/workspace/tests/deep", "removed"),
        ("/workspace/tests/deep/a.py", "removed"),
    ]


def test_a_file_replaced_by_a_link_or_a_directory_is_retyped(tmp_path):
    def fill(top: Path) -> None:
        put(top / "a")
        put(top / "b/inner")

    def act(top: Path) -> None:
        (top / "a").unlink()
        (top / "a").symlink_to("/etc/passwd")
        shutil.rmtree(top / "b")
        put(top / "b", "now a file")

    found = by_path(look(tmp_path, fill, act))
    assert found["/workspace/a"].change == "retyped"
    assert found["/workspace/a"].link_target == "/etc/passwd"
    assert "symlink_outside" in found["/workspace/a"].traits
    assert found["/workspace/b"].change == "retyped"
    assert found["/workspace/b/inner"].change == "removed"


def test_a_sparse_tebibyte_is_not_read(tmp_path):
    def act(top: Path) -> None:
        with (top / "huge").open("wb") as file:
            file.truncate(1 << 40)
        with (top / "same").open("r+b") as file:
            file.truncate(1 << 40)  # copied up, same size: compared by its data only

    def fill(top: Path) -> None:
        with (top / "same").open("wb") as file:
            file.truncate(1 << 40)

    with overlay(tmp_path, fill, act) as left:
        began = time.monotonic()
        found = by_path(inspect_changes(left.upper, left.lower, "/workspace"))
        assert time.monotonic() - began < 5
    assert set(found) == {"/workspace/huge"}
    assert found["/workspace/huge"].size == 1 << 40
    assert found["/workspace/huge"].digest == ""
    assert "sparse" in found["/workspace/huge"].traits


def test_equal_content_is_found_where_one_side_has_holes(tmp_path):
    size = 3 << 20

    def fill(top: Path) -> None:
        put(top / "holes", b"\0" * size)
        put(top / "differs", b"\0" * (size - 1) + b"x")

    def act(top: Path) -> None:
        for name in ("holes", "differs"):
            with (top / "new").open("wb") as file:
                file.truncate(size)
            (top / "new").rename(top / name)

    assert set(by_path(look(tmp_path, fill, act))) == {"/workspace/differs"}


def test_odd_names_come_back_byte_for_byte(tmp_path):
    names = [b"two\nlines", b"\xff\xfe", b"\x1b[31mred", b"x" * 255, b"back\\slash", "\u202etxt".encode(), b" ", b"-rf"]

    def act(top: Path) -> None:
        for name in names:
            os.close(os.open(os.fsencode(top) + b"/" + name, os.O_CREAT | os.O_WRONLY, 0o644))

    report = look(tmp_path, nothing, act)
    assert sorted(unescape_bytes(event.path) for event in report.events) == sorted(b"/workspace/" + n for n in names)
    assert [unescape_bytes(e.path) for e in report.events] == sorted(unescape_bytes(e.path) for e in report.events)


def test_a_tree_deeper_than_any_path_is_walked_with_few_descriptors(tmp_path):
    depth = 5000
    with overlay(tmp_path, nothing, lambda top: dig(top, depth)) as left:
        peak = 0
        walk = Walk(left.upper)
        deepest = 0
        for entry in walk:
            deepest = max(deepest, entry.depth)
            if entry.depth % 500 == 0:
                peak = max(peak, len(os.listdir("/proc/self/fd")))
        report = inspect_changes(left.upper, left.lower, "/workspace")
    assert (deepest, walk.skipped) == (depth + 1, [])
    assert peak < 200
    assert report.complete
    assert len(report.events) == depth + 1
    assert max(report.events, key=lambda event: len(event.path)).digest == hashlib.sha256(b"bottom").hexdigest()


def test_too_many_entries_are_cut_and_said_so(tmp_path):
    def act(top: Path) -> None:
        (top / "many").mkdir()
        for number in range(10_000):
            (top / f"many/{number:05}").touch()

    report = look(tmp_path, nothing, act, limits=ChangeLimits(max_entries=500))
    assert len(report.events) == 500
    assert not report.complete
    assert [why for _, why in report.skipped] == ["too_many"]


def test_long_paths_in_number_are_cut_and_said_so(tmp_path):
    with overlay(tmp_path, nothing, lambda top: dig(top, 300, "n" * 200)) as left:
        walk = Walk(left.upper, WalkLimits(max_path_bytes=1 << 20))
        total = sum(len(entry.path) for entry in walk)
    assert 900_000 < total <= 1 << 20
    assert walk.truncated


def test_special_files_set_id_bits_and_hard_links_are_named(tmp_path):
    def act(top: Path) -> None:
        os.mkfifo(top / "pipe")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(top / "sock"))
        put(top / "suid", "#!/bin/sh\n", 0o4755)
        os.link(top / "suid", top / "again")

    found = by_path(look(tmp_path, nothing, act))
    assert found["/workspace/pipe"].ftype == "fifo"
    assert found["/workspace/sock"].ftype == "socket"
    assert {"setuid", "executable", "hardlink"} <= set(found["/workspace/suid"].traits)


def test_opening_never_hangs_on_a_fifo_or_follows_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    top = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in (b"pipe", b"link"):
            with pytest.raises(OSError, match=r"no regular|symbolic"):
                os.close(open_regular(top, name))
    finally:
        os.close(top)


def test_start_up_files_carry_their_head_and_hooks_are_seen(tmp_path):
    def act(top: Path) -> None:
        put(top / "conftest.py", "import os\n")
        put(top / ".git/config", "[core]\n\tfsmonitor = x\n")
        put(top / ".git/hooks/pre-commit", "#!/bin/sh\n", 0o755)
        put(top / "lib/evil.pth", "import evil\n")
        put(top / "data.bin", b"\0\1\2")
        put(top / "notes.txt", "plain")

    found = by_path(look(tmp_path, nothing, act))
    assert found["/workspace/conftest.py"].head == "import os\n"
    assert "fsmonitor" in found["/workspace/.git/config"].head
    assert found["/workspace/.git/hooks/pre-commit"].head == "#!/bin/sh\n"
    assert found["/workspace/lib/evil.pth"].head == "import evil\n"
    assert found["/workspace/data.bin"].head == found["/workspace/notes.txt"].head == ""


def test_files_of_a_virtual_environment_are_known_and_a_pretended_one_is_not(tmp_path):
    def act(top: Path) -> None:
        put(top / "venv/pyvenv.cfg", "home = /usr/bin\n")
        (top / "venv/bin").mkdir(parents=True)
        (top / "venv/bin/python").symlink_to("/usr/bin/python3")
        put(top / "venv/lib/python3.11/site-packages/a.pth", "x\n")
        put(top / "pyvenv.cfg", "home = /nowhere\n")
        put(top / "lib/sitecustomize.py", "x = 1\n")
        put(top / "conftest.py", "x = 1\n")

    found = by_path(look(tmp_path, nothing, act))
    assert "in_venv" in found["/workspace/venv/lib/python3.11/site-packages/a.pth"].traits
    assert "in_venv" not in found["/workspace/lib/sitecustomize.py"].traits
    assert "in_venv" not in found["/workspace/conftest.py"].traits


def test_modules_that_hide_the_standard_library_are_marked(tmp_path):
    def fill(top: Path) -> None:
        put(top / "repo/main.py", "import json\n")
        put(top / "repo/pkg/__init__.py", "")

    def act(top: Path) -> None:
        put(top / "repo/json.py", "x = 1\n")
        put(top / "repo/pytest/__init__.py", "")
        put(top / "repo/pkg/types.py", "x = 1\n")   # pkg.types hides nothing
        put(top / "repo/test.py", "x = 1\n")        # everybody's name for a scratch script
        put(top / "repo/helpers.py", "x = 1\n")

    found = by_path(look(tmp_path, fill, act))
    marked = {path for path, event in found.items() if "shadows_stdlib" in event.traits}
    assert marked == {"/workspace/repo/json.py", "/workspace/repo/pytest/__init__.py"}


def test_making_a_file_executable_is_a_change_and_other_modes_are_not(tmp_path):
    def fill(top: Path) -> None:
        put(top / "a", "x", 0o644)
        put(top / "b", "x", 0o644)

    def act(top: Path) -> None:
        (top / "a").chmod(0o755)
        (top / "b").chmod(0o600)

    found = by_path(look(tmp_path, fill, act))
    assert set(found) == {"/workspace/a"}
    assert found["/workspace/a"].traits == ("executable", "mode_only")


def test_a_place_without_a_lower_lists_everything_as_added(tmp_path):
    put(tmp_path / "t/file", "x")
    top = os.open(tmp_path / "t", os.O_RDONLY | os.O_DIRECTORY)
    try:
        (event,) = inspect_changes(top, -1, "/tmp", place="store").events
    finally:
        os.close(top)
    assert (event.path, event.change, event.place) == ("/tmp/file", "added", "store")


@pytest.mark.parametrize(("path", "target", "leaves"), [
    (b"a", b"b", False), (b"a", b"../b", True), (b"d/a", b"../b", False), (b"d/a", b"../../b", True),
    (b"a", b"d/../../b", True), (b"a", b"d/../b", True),  # d may be a link to the top itself
    (b"a", b"/workspace/x", False), (b"a", b"/workspace", False), (b"a", b"/workspace/../etc", True),
    (b"a", b"/workspacex", True), (b"a", b"/etc/passwd", True), (b"a", b"", True), (b"a", b"./b/./c", False),
])
def test_where_a_link_may_lead(path, target, leaves):
    assert link_leaves(path, target, b"/workspace") is leaves


def test_a_walk_stops_at_another_mount():
    top = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        walk = Walk(top, WalkLimits(max_entries=100_000, max_depth=2), lambda entry: entry.path == b"proc")
        names = [entry.path for entry in walk]
    finally:
        os.close(top)
    assert (b"proc", "mount") in walk.skipped
    assert not [name for name in names if name.startswith(b"proc/")]


def test_the_size_of_a_tmpfs_directory_tells_whether_it_is_empty() -> None:
    """Directories of the store that are empty are not walked."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        top = Path(name)
        (top / "work").mkdir()
        store = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert run_module._is_empty("work", store)
            assert run_module._is_empty("missing", store)
            for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("x", path), lambda path: Path(path).write_text("")):
                make(top / "work/a")
                assert not run_module._is_empty("work", store)
                (top / "work/a").rename(top / "work/.b")
                assert not run_module._is_empty("work", store)
                (top / "work/.b").rename(top / "gone")
                assert run_module._is_empty("work", store)
                (os.rmdir if make is os.mkdir else os.unlink)(top / "gone")
        finally:
            os.close(store)
