"""Write-back, packs and recovery on real overlays."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import zstandard

from dsec_guard.errors import RecordError, UsageError
from dsec_guard.host.mount import kernel_dev
from dsec_guard.model import unescape_bytes
from dsec_guard.sandbox import workspace as ws
from tests.kernel.overlay import dig, overlay, put

pytestmark = pytest.mark.needs("overlay")


def nothing(_: Path) -> None:
    return


def apply(tmp_path, fill, act, *, meanwhile=None, inside="", **kwargs):
    with overlay(tmp_path, fill, lambda top: None) as empty:
        assert empty.upper >= 0
    box = tmp_path / "box"
    box.mkdir()
    with overlay(box, fill, act) as left:
        started = kwargs.pop("started_ns", None) or marks.pop()
        if meanwhile:
            meanwhile(left.lower_path)
        place = ws.check_workspace(left.lower_path, named=True)
        report = ws.write_back(left.upper, place, inside_prefix=inside or str(left.lower_path),
                               journal_dir=tmp_path / "journal", started_ns=started, **kwargs)
        return report, left.lower_path


marks: list[int] = []


def run(act):
    """The agent's part, with the start of the run noted before it."""
    def body(top: Path) -> None:
        time.sleep(0)  # nothing: the mark below is what separates host changes before the run from later ones
        marks[:] = [ws.now_ns()]
        act(top)
    return body


def refused(report) -> dict[str, str]:
    return {item.path: item.why for item in report.refused}


def snapshot(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def test_changes_come_back_with_the_directorys_owner_and_plain_modes(tmp_path):
    def fill(top: Path) -> None:
        put(top / "edit", "old")
        put(top / "gone", "bye")
        put(top / "dir/inner", "x")
        os.chown(top, 4321, 4322)

    def act(top: Path) -> None:
        put(top / "edit", "new", 0o600)
        (top / "gone").unlink()
        shutil.rmtree(top / "dir")
        put(top / "made/here/tool", "#!/bin/sh\n", 0o755)
        (top / "link").symlink_to("made/here/tool")
        os.link(top / "edit", top / "hard")

    report, top = apply(tmp_path, fill, run(act))
    assert snapshot(top) == {"edit": b"new", "hard": b"new", "link": b"#!/bin/sh\n", "made/here/tool": b"#!/bin/sh\n"}
    assert report.refused == ()
    assert not report.stopped
    assert (top / "edit").stat().st_ino != (top / "hard").stat().st_ino
    for name in ("edit", "made", "made/here/tool", "link"):
        info = (top / name).lstat()
        assert (info.st_uid, info.st_gid) == (4321, 4322), name
    assert stat.S_IMODE((top / "edit").stat().st_mode) == 0o600
    assert stat.S_IMODE((top / "made/here/tool").stat().st_mode) == 0o755
    assert list((tmp_path / "journal").iterdir()) == []
    assert not [name for name in os.listdir(top) if name.startswith(".dsec-guard")]


def test_what_must_not_come_back_is_refused_and_listed(tmp_path):
    def act(top: Path) -> None:
        os.mkfifo(top / "pipe")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(top / "sock"))
        put(top / "suid", "x", 0o4755)
        (top / "out").symlink_to("/etc/shadow")
        (top / "up").symlink_to("../../secret")
        (top / "self").symlink_to(".")
        (top / "via").symlink_to("self/../../secret")
        put(top / "venv/pyvenv.cfg")
        (top / "venv/python").symlink_to("/usr/bin/python3")

    report, top = apply(tmp_path, nothing, run(act))
    assert refused(report) == {"pipe": "fifo", "sock": "socket", "suid": "setuid", "out": "link_outside",
                               "up": "link_outside", "via": "link_outside", "venv/python": "link_system"}
    assert sorted(os.listdir(top)) == ["self", "suid", "venv"]
    assert stat.S_IMODE((top / "suid").stat().st_mode) == 0o755


def test_git_hooks_and_configuration_never_come_back(tmp_path):
    def fill(top: Path) -> None:
        put(top / ".git/config", "[core]\n")
        put(top / ".git/HEAD", "ref: refs/heads/main\n")
        put(top / "old/.git/HEAD", "x")

    def act(top: Path) -> None:
        put(top / ".git/config", "[core]\n\tfsmonitor = ./x\n")
        put(top / ".git/hooks/pre-commit", "#!/bin/sh\n", 0o755)
        put(top / ".git/objects/ab/cdef", "blob")
        put(top / ".git/modules/sub/config", "x")
        put(top / "sub/.git", "gitdir: ../evil\n")
        put(top / "evil/HEAD", "ref: x\n")
        (top / "evil/objects").mkdir()
        (top / "evil/refs").mkdir()
        put(top / "evil/config", "[core]\n")
        put(top / "evil/hooks/post-checkout", "#!/bin/sh\n", 0o755)
        put(top / "app/config", "no git at all")
        put(top / "app/hooks/use.ts", "no git at all")
        # A repository in two places, and one that a later run would complete.
        put(top / "x/HEAD", "ref: refs/heads/main\n")
        put(top / "x/commondir", "../y\n")
        for half in ("y", "z"):
            (top / half / "objects").mkdir(parents=True)
            (top / half / "refs").mkdir()
            put(top / half / "config", "[core]\n\tpager = ./x\n")
            put(top / half / "hooks/reference-transaction", "#!/bin/sh\n", 0o755)
        put(top / ".git/rebase-merge/git-rebase-todo", "exec ./x\n")
        put(top / "N/.GIT/config", "case")
        shutil.rmtree(top / "old")

    report, top = apply(tmp_path, fill, run(act))
    assert refused(report) == dict.fromkeys(
        (".git/config", ".git/hooks", ".git/modules/sub/config", "sub/.git", "evil/config", "evil/hooks", "N/.GIT/config",
         "x/commondir", "y/config", "y/hooks", "z/config", "z/hooks", ".git/rebase-merge", "old"), "git_config")
    assert (top / ".git/config").read_text() == "[core]\n"
    assert not (top / ".git/hooks").exists()
    assert (top / ".git/objects/ab/cdef").read_text() == "blob"
    assert (top / "app/config").exists()
    assert (top / "app/hooks/use.ts").exists()


@pytest.mark.parametrize("what", ["edited", "removed", "appeared", "inside_removed", "became_link"])
def test_a_file_changed_on_the_host_stops_everything(tmp_path, what):
    def fill(top: Path) -> None:
        put(top / "a", "old")
        put(top / "b", "old")
        put(top / "dir/inner", "old")

    def act(top: Path) -> None:
        put(top / "a", "agent")
        put(top / "b", "agent")
        put(top / "new", "agent")
        put(top / "dir/other", "agent")
        if what == "inside_removed":
            shutil.rmtree(top / "dir")

    def meanwhile(top: Path) -> None:
        time.sleep(0.02)  # the kernel's file clock may lag a tick behind: now_ns()
        if what == "edited":
            (top / "a").write_text("user")
        elif what == "removed":
            (top / "a").unlink()
        elif what == "appeared":
            (top / "new").write_text("user")
        elif what == "inside_removed":
            (top / "dir/inner").write_text("user")
        else:
            shutil.rmtree(top / "dir")
            (top / "dir").symlink_to("/tmp")

    def keep(top: Path) -> None:
        meanwhile(top)
        kept.update(snapshot(top))

    kept: dict[str, bytes] = {}
    report, top = apply(tmp_path, fill, run(act), meanwhile=keep)
    assert report.stopped
    assert report.conflicts
    assert set(refused(report).values()) == {"changed_on_host"}
    assert snapshot(top) == kept
    assert not os.path.lexists("/tmp/other")


def test_force_applies_what_is_not_in_conflict(tmp_path):
    def act(top: Path) -> None:
        put(top / "a", "agent")
        put(top / "b", "agent")

    def meanwhile(top: Path) -> None:
        time.sleep(0.02)
        (top / "a").write_text("user")

    report, top = apply(tmp_path, lambda t: (put(t / "a", "old"), put(t / "b", "old")), run(act), meanwhile=meanwhile,
                        force=True)
    assert snapshot(top) == {"a": b"user", "b": b"agent"}
    assert refused(report) == {"a": "changed_on_host"}


def test_a_directory_made_anew_is_applied_like_any_other(tmp_path):
    def fill(top: Path) -> None:
        put(top / "d/same", "same")
        put(top / "d/old", "old")
        put(top / "d/sub/x", "x")
        put(top / "f", "a file")

    def act(top: Path) -> None:
        shutil.rmtree(top / "d")
        put(top / "d/same", "same")
        put(top / "d/new", "new")
        (top / "f").unlink()
        put(top / "f/inner", "now a directory")

    report, top = apply(tmp_path, fill, run(act))
    assert not report.stopped, report.conflicts
    assert snapshot(top) == {"d/same": b"same", "d/new": b"new", "f/inner": b"now a directory"}


def test_holes_odd_names_and_depth_survive(tmp_path):
    names = [b"two\nlines", b"\xff\xfe", b"\x1b[31m", b"-rf", b"x" * 255]

    def act(top: Path) -> None:
        with (top / "sparse").open("wb") as file:
            file.truncate(1 << 40)
            file.seek(1 << 39)
            file.write(b"island")
        for name in names:
            os.close(os.open(os.fsencode(top) + b"/" + name, os.O_CREAT | os.O_WRONLY, 0o644))
        dig(top, 300)

    report, top = apply(tmp_path, nothing, run(act))
    assert report.refused == ()
    with (top / "sparse").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == 1 << 40
        assert os.fstat(file.fileno()).st_blocks < 100
        file.seek(1 << 39)
        assert file.read(6) == b"island"
    assert set(names) < set(os.listdir(os.fsencode(top)))
    assert (top / "/".join(["d"] * 300) / "leaf").read_text() == "bottom"
    shutil.rmtree(top)


def test_an_absolute_link_inside_becomes_relative_where_the_place_differs(tmp_path):
    report, top = apply(tmp_path, nothing, run(lambda t: (put(t / "x", "x"), put(t / "d/y"),
                                                          (t / "d/l").symlink_to("/workspace/x"))), inside="/workspace")
    assert report.refused == ()
    assert (top / "d/l").readlink() == Path("../x")
    assert (top / "d/l").read_text() == "x"


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from dsec_guard.sandbox import workspace as ws
real = os.rename
count = 0
def slow(*args, **kwargs):
    global count
    if "src_dir_fd" in kwargs:
        count += 1
        if count == int(sys.argv[2]):
            print("ready", flush=True)
            sys.stdin.read()
    return real(*args, **kwargs)
os.rename = slow
ws.apply_pack(Path(sys.argv[1]), ws.check_workspace(sys.argv[4], named=True), journal_dir=Path(sys.argv[5]))
"""


@pytest.mark.parametrize("at", [1, 7, 20])
def test_after_a_kill_every_file_is_old_or_new_and_the_next_run_cleans_up(tmp_path, at):
    def fill(top: Path) -> None:
        for number in range(20):
            put(top / f"f{number:02}", "old" * 1000)

    def act(top: Path) -> None:
        for number in range(20):
            put(top / f"f{number:02}", "new" * 5000)

    with overlay(tmp_path, fill, run(act)) as left:
        ws.pack(left.upper, ws.check_workspace(left.lower_path, named=True), tmp_path / "p.tar.zst",
                inside_prefix="/w", started_ns=marks.pop())
        top = left.lower_path
    journal = tmp_path / "journal"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "p.tar.zst"), str(at),
                              str(Path(ws.__file__).parents[2]), str(top), str(journal)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert ws.recover(journal) == ()  # it lives: hands off
    assert [name for name in os.listdir(top) if name.startswith(".dsec-guard")]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    contents = {path.read_text() for path in top.glob("f*")}
    assert contents <= {"old" * 1000, "new" * 5000}
    assert sum(path.read_text().startswith("new") for path in top.glob("f*")) == at - 1
    assert len(ws.recover(journal)) == 1
    assert sorted(os.listdir(top)) == [f"f{number:02}" for number in range(20)]
    assert ws.recover(journal) == ()


def test_a_pack_holds_no_name_of_the_agents_and_applies_the_same(tmp_path):
    def act(top: Path) -> None:
        put(top / "edit", "new")
        put(top / "sub/added", "data", 0o755)
        (top / "gone").unlink()
        (top / "link").symlink_to("edit")
        with (top / "sparse").open("wb") as file:
            file.truncate(1 << 40)
            file.write(b"head")

    with overlay(tmp_path, lambda t: (put(t / "edit", "old"), put(t / "gone")), run(act)) as left:
        place = ws.check_workspace(left.lower_path, named=True)
        ws.pack(left.upper, place, tmp_path / "p.tar.zst", inside_prefix="/w", started_ns=marks.pop())
        raw = zstandard.ZstdDecompressor().stream_reader((tmp_path / "p.tar.zst").open("rb")).read()
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            assert all(m.isreg() and (m.name == "manifest.json" or m.name.startswith("data/")) for m in tar.getmembers())
        assert (tmp_path / "p.tar.zst").stat().st_size < 10_000
        assert snapshot(left.lower_path) == {"edit": b"old", "gone": b"x"}
        report = ws.apply_pack(tmp_path / "p.tar.zst", place, journal_dir=tmp_path / "j")
        assert not report.stopped
        assert (left.lower_path / "sparse").stat().st_size == 1 << 40
        (left.lower_path / "sparse").unlink()
        assert snapshot(left.lower_path) == {"edit": b"new", "link": b"new", "sub/added": b"data"}


def forged(path: Path, changes: list[dict], schema: str = ws.PACK_SCHEMA) -> Path:
    manifest = json.dumps({"schema": schema, "started_ns": ws.now_ns(), "changes": changes}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("manifest.json")
        member.size = len(manifest)
        tar.addfile(member, io.BytesIO(manifest))
    path.write_bytes(zstandard.ZstdCompressor().compress(buffer.getvalue()))
    return path


@pytest.mark.parametrize("bad", ["../x", "/etc/x", "a/../../x", "", "a//b", "a/./b", "a\0b"])
def test_a_forged_pack_cannot_leave_the_directory(tmp_path, bad):
    (tmp_path / "w").mkdir()
    change = {"kind": "mkdir", "path": bad, "mode": 0o755, "size": 0, "mtime_ns": 0, "link": "", "existed": False,
              "replace_dir": False, "segments": []}
    place = ws.check_workspace(tmp_path / "w", named=True)
    with pytest.raises(RecordError):
        ws.apply_pack(forged(tmp_path / "f", [change]), place, journal_dir=tmp_path / "j")
    good = {**change, "path": "ok"}
    ws.apply_pack(forged(tmp_path / "g", [good]), place, journal_dir=tmp_path / "j")
    assert os.listdir(tmp_path / "w") == ["ok"]


def test_a_damaged_pack_is_refused_with_nothing_applied(tmp_path):
    (tmp_path / "w").mkdir()
    place = ws.check_workspace(tmp_path / "w", named=True)
    for number, content in enumerate((b"", b"\0" * 4096, b"not zstd", zstandard.ZstdCompressor().compress(b"no tar"))):
        (tmp_path / f"{number}").write_bytes(content)
        with pytest.raises(RecordError):
            ws.apply_pack(tmp_path / f"{number}", place, journal_dir=tmp_path / "j")
    assert os.listdir(tmp_path / "w") == []


def test_a_replaced_workspace_is_not_written_to(tmp_path):
    (tmp_path / "w").mkdir()
    place = ws.check_workspace(tmp_path / "w", named=True)
    (tmp_path / "w").rename(tmp_path / "v")
    (tmp_path / "w").mkdir()
    with pytest.raises(UsageError, match="replaced"):
        ws.apply_pack(forged(tmp_path / "g", []), place, journal_dir=tmp_path / "j")


def test_dangerous_workspaces_are_refused_unless_named(tmp_path):
    home = tmp_path / "home/me"
    (home / "project").mkdir(parents=True)
    for path in ("/", home, home.parent, tmp_path):
        with pytest.raises(UsageError):
            ws.check_workspace(path, named=False, home=str(home))
    assert ws.check_workspace(home / "project", named=False, home=str(home)).path == home / "project"
    assert ws.check_workspace(home, named=True, home=str(home)).path == home
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing", "/proc/self", "/sys/kernel"):
        with pytest.raises(UsageError):
            ws.check_workspace(path, named=True)
    os.symlink(home, tmp_path / "alias")
    with pytest.raises(UsageError):
        ws.check_workspace(tmp_path / "alias", named=False, home=str(home))


def test_kernel_device_numbers_are_told_from_those_of_stat():
    assert kernel_dev(os.makedev(254, 3)) == (254 << 20) | 3
    assert unescape_bytes("a") == b"a"
