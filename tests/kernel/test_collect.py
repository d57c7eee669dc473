"""Collection of deliverables out of a merged overlay with hostile content."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.model import unescape_bytes
from dsec_guard.sandbox.collect import CollectLimits, collect
from tests.kernel.overlay import dig, overlay, put

pytestmark = pytest.mark.needs("overlay")


def gather(tmp_path: Path, act, deliverables=("/workspace/out",), fill=lambda top: None, dest=None, **kwargs):
    with overlay(tmp_path, fill, act) as left:
        dest = dest or tmp_path / "dest"
        return collect({"/workspace": left.merged}, deliverables, dest, **kwargs), dest


def refused(report) -> dict[str, str]:
    return {item.path: item.why for item in report.refused}


def test_files_directories_and_inner_links_are_copied_from_both_layers(tmp_path):
    def act(top: Path) -> None:
        put(top / "out/sub/new", "agent", 0o755)
        (top / "out/link").symlink_to("sub/new")
        (top / "out/sub/abs").symlink_to("/workspace/out/old")
        put(top / "elsewhere", "no")

    report, dest = gather(tmp_path, act, fill=lambda top: put(top / "out/old", "host"))
    assert report.complete
    assert (dest / "out/sub/new").read_text() == "agent"
    assert (dest / "out/old").read_text() == "host"
    assert (dest / "out/link").readlink() == Path("sub/new")
    assert (dest / "out/sub/abs").read_text() == "host"
    assert sorted(os.listdir(dest)) == ["out"]
    assert [item.path for item in report.collected] == ["out/link", "out/old", "out/sub", "out/sub/abs", "out/sub/new"]
    assert not [name for name in os.listdir(dest / "out") if name.startswith(".dsec")]


def test_links_that_lead_out_are_refused_and_never_followed(tmp_path):
    secret = tmp_path / "secret"
    put(secret / "key", "SECRET")

    def act(top: Path) -> None:
        (top / "out").mkdir()
        (top / "out/a").symlink_to(secret / "key")
        (top / "out/dir").symlink_to(secret)
        (top / "out/up").symlink_to("../../secret/key")
        (top / "out/here").symlink_to(".")
        (top / "out/via").symlink_to("here/../../secret/key")
        (top / "out/side").symlink_to("../other")

    report, dest = gather(tmp_path, act)
    assert set(refused(report)) == {f"/workspace/out/{n}" for n in ("a", "dir", "up", "via", "side")}
    assert set(refused(report).values()) == {"link_outside"}
    assert {item.link_target for item in report.refused} >= {str(secret), "../other"}
    assert b"SECRET" not in b"".join(path.read_bytes() for path in dest.rglob("*") if path.is_file())
    assert os.listdir(dest / "out") == ["here"]


def test_a_deliverable_that_is_itself_a_link_is_refused(tmp_path):
    put(tmp_path / "secret/key", "SECRET")

    def act(top: Path) -> None:
        (top / "out").symlink_to(tmp_path / "secret")
        (top / "d").symlink_to(tmp_path / "secret")

    report, dest = gather(tmp_path, act, ("/workspace/out", "/workspace/d/key"))
    assert refused(report) == {"/workspace/out": "link_outside", "/workspace/d/key": "link_outside"}
    assert os.listdir(dest) == []


def test_special_files_are_refused_and_set_id_bits_dropped(tmp_path):
    def act(top: Path) -> None:
        (top / "out").mkdir()
        os.mkfifo(top / "out/pipe")
        os.mknod(top / "out/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(top / "out/sock"))
        put(top / "out/suid", "x", 0o6777)
        os.link(top / "out/suid", top / "out/hard")

    report, dest = gather(tmp_path, act)
    assert refused(report) == {"/workspace/out/pipe": "fifo", "/workspace/out/null": "device",
                               "/workspace/out/sock": "socket"}
    assert stat.S_IMODE((dest / "out/suid").stat().st_mode) == 0o755
    assert (dest / "out/suid").stat().st_ino != (dest / "out/hard").stat().st_ino
    assert [item.links for item in report.collected if item.ftype == "file"] == [2, 2]


def test_a_sparse_giant_is_refused_and_smaller_holes_are_kept(tmp_path):
    def act(top: Path) -> None:
        (top / "out").mkdir()
        for name, size in (("giant", 1 << 40), ("holes", 1 << 30)):
            with (top / "out" / name).open("wb") as file:
                file.truncate(size)
                file.write(b"head")

    report, dest = gather(tmp_path, act)
    assert refused(report) == {"/workspace/out/giant": "too_big"}
    assert (dest / "out/holes").stat().st_size == 1 << 30
    assert (dest / "out/holes").stat().st_blocks < 100


def test_bytes_entries_depth_and_time_are_bounded(tmp_path):
    def act(top: Path) -> None:
        for number in range(50):
            put(top / f"out/{number:02}", b"x" * 10_000)
        dig(top / "out", 5000)

    with overlay(tmp_path, lambda top: None, act) as left:
        def go(name: str, **kwargs):
            roots = {"/workspace": left.merged}
            return collect(roots, ["/workspace/out"], tmp_path / name, **kwargs)

        assert "bytes" in refused(go("b", limits=CollectLimits(max_bytes=95_000))).values()
        assert sum(p.stat().st_size for p in (tmp_path / "b/out").iterdir() if p.is_file()) == 90_000
        assert "too_many" in refused(go("e", limits=CollectLimits(max_entries=10))).values()
        deep = go("d", limits=CollectLimits(max_depth=100))
        assert list(refused(deep).values()) == ["too_deep"]
        ticks = iter(range(10_000))
        late = go("t", limits=CollectLimits(seconds=20), clock=lambda: float(next(ticks)))
        assert "time" in refused(late).values()
        assert not list((tmp_path / "t").rglob(".dsec-guard-*"))


def test_odd_names_are_copied_and_listed_reversibly(tmp_path):
    names = [b"two\nlines", b"\xff\xfe", b"\x1b[31m", b"-rf", b"x" * 255, b"back\\slash", b"..."]

    def act(top: Path) -> None:
        (top / "out").mkdir()
        for name in names:
            os.close(os.open(os.fsencode(top) + b"/out/" + name, os.O_CREAT | os.O_WRONLY, 0o644))

    report, dest = gather(tmp_path, act)
    assert report.complete
    assert sorted(os.listdir(os.fsencode(dest / "out"))) == sorted(names)
    assert sorted(unescape_bytes(item.path) for item in report.collected) == sorted(b"out/" + name for name in names)


def test_links_laid_in_the_destination_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    put(outside / "file", "keep")
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "out").symlink_to(outside)
    report, _ = gather(tmp_path, lambda top: put(top / "out/file", "agent"), dest=dest)
    assert "dest_conflict" in refused(report).values()
    (dest / "out").unlink()
    (dest / "out").mkdir()
    (dest / "out/file").symlink_to(outside / "file")
    shutil.rmtree(tmp_path / "lower")
    report, _ = gather(tmp_path, lambda top: put(top / "out/file", "agent"), dest=dest)
    assert (outside / "file").read_text() == "keep"
    assert (dest / "out/file").read_text() == "agent"
    assert not (dest / "out/file").is_symlink()
    (tmp_path / "l").symlink_to(dest)
    with pytest.raises(UsageError):
        collect({}, [], tmp_path / "l")


def test_patterns_missing_ones_and_places_outside(tmp_path):
    def act(top: Path) -> None:
        put(top / "out/a.txt")
        put(top / "out/sub/b.txt")
        put(top / "out/c.bin")

    report, dest = gather(tmp_path, act, ("/workspace/out/**/*.txt", "/workspace/none", "/workspace/out/*.zip"))
    assert sorted(str(p.relative_to(dest)) for p in dest.rglob("*") if p.is_file()) == ["out/a.txt", "out/sub/b.txt"]
    assert report.missing == ("/workspace/none", "/workspace/out/*.zip")
    for bad in ("/etc/passwd", "/workspace/../etc", "out", "/workspacex"):
        with pytest.raises(UsageError):
            gather(tmp_path, lambda top: None, (bad,))
