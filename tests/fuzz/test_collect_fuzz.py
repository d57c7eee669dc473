"""Random hostile trees: collection ends, stays inside its destination and copies no byte from outside."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_guard.model import unescape_bytes
from dsec_guard.sandbox.collect import CollectLimits, collect

SECRET = b"CONTENT-FROM-OUTSIDE"

names = st.one_of(st.sampled_from([b"a", b"b", b"c", b"\xff", b"two\nlines", b"...", b"-x"]),
                  st.binary(min_size=1, max_size=20).filter(lambda n: not set(n) & {0, 47} and n not in (b".", b"..")))
targets = st.lists(st.one_of(names, st.sampled_from([b"..", b".", b"secret"])), min_size=1, max_size=6).map(b"/".join)
links = st.one_of(targets, targets.map(lambda t: b"/workspace/out/" + t), st.sampled_from([b"/etc/passwd", b"OUTSIDE"]))
entries = st.lists(st.tuples(st.lists(names, min_size=1, max_size=4), st.sampled_from(["file", "dir", "link", "fifo", "hole"]),
                             links), max_size=25)


def build(top: bytes, tree, outside: bytes) -> None:
    for parts, kind, target in tree:
        parent = top + b"/" + b"/".join(parts[:-1])
        try:
            os.makedirs(parent, exist_ok=True)
            path = parent + b"/" + parts[-1]
            if not os.path.realpath(parent).startswith(top):
                continue  # the agent of this test may only write into its own place
            if kind == "dir":
                os.makedirs(path, exist_ok=True)
            elif kind == "link":
                os.symlink(outside if target == b"OUTSIDE" else target, path)
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                with open(path, "xb") as file:
                    file.write(b"agent")
                    file.truncate(1 << 35 if kind == "hole" else 5)
        except OSError:
            continue  # a name taken by another kind of entry


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries)
def test_no_tree_makes_collection_leave_its_place(tree):
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "secret").write_bytes(SECRET)
        (base / "work/out").mkdir(parents=True)
        build(os.fsencode(base / "work/out"), tree, os.fsencode(base / "secret"))
        root = os.open(base / "work", os.O_RDONLY | os.O_DIRECTORY)
        try:
            report = collect({"/workspace": root}, ["/workspace/out"], base / "dest",
                             limits=CollectLimits(max_file_bytes=1 << 30))
        finally:
            os.close(root)
        dest = os.path.realpath(os.fsencode(base / "dest"))
        seen = set()
        for here, dirs, files in os.walk(dest):
            for name in dirs + files:
                path = os.path.join(here, name)
                seen.add(os.path.relpath(path, dest))
                mode = os.lstat(path).st_mode
                assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
                if stat.S_ISLNK(mode):
                    end = os.path.realpath(path)
                    assert end == dest or end.startswith(dest + b"/")
                elif stat.S_ISREG(mode):
                    with open(path, "rb") as file:
                        assert SECRET not in file.read(100)
        listed = {unescape_bytes(item.path) for item in report.collected}
        assert seen == listed | ({b"out"} if seen else set())
        assert sorted(os.listdir(base)) == ["dest", "secret", "work"]
