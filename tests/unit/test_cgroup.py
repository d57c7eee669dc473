"""Reading mountinfo, names and id ranges: no privilege needed."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from dsec_guard.errors import HostError, MonitorError
from dsec_guard.host.cgroup import CgroupHost, parse_mountinfo
from dsec_guard.host.uids import COUNT, FIRST, SIZE, UidRange, reserved_ranges
from dsec_guard.sandbox import holder as holder_module
from dsec_guard.sandbox.holder import RECORD_SIZE, RawNotify, RawOpen, decode_fanotify, decode_notify, decode_record

HYBRID = r"""
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / {root}/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / {root}/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / {root}/pids\040x rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / {root}/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 /outer {root}/unified rw,relatime - cgroup2 cgroup2 rw
"""


def fake_host(tmp_path: Path, controllers: str, mountinfo: str = HYBRID, **environ: str) -> CgroupHost:
    (tmp_path / "unified").mkdir(exist_ok=True)
    (tmp_path / "unified/cgroup.controllers").write_text(controllers + "\n")
    return CgroupHost.probe(mountinfo=mountinfo.replace("{root}", str(tmp_path)), environ=environ)


def test_mountinfo_names_v2_and_v1_with_escapes():
    v2, v1 = parse_mountinfo(HYBRID.replace("{root}", "/c"))
    assert v2 is not None
    assert (v2.path, v2.root) == (Path("/c/unified"), "/outer")
    assert [(str(m.path), sorted(m.controllers - {"rw"})) for m in v1] == [
        ("/c/cpu,cpuacct", ["cpu", "cpuacct"]), ("/c/memory", ["memory"]), ("/c/pids x", ["pids"]),
        ("/c/systemd", ["name=systemd"])]


def test_a_hybrid_host_takes_each_controller_from_where_it_is(tmp_path):
    host = fake_host(tmp_path, "")
    assert host.is_hybrid
    assert host.missing == ()
    assert [str(b.relative_to(tmp_path)) for b in host.bases()] == [
        "unified/dsec-guard", "memory/dsec-guard", "pids x/dsec-guard", "cpu,cpuacct/dsec-guard"]


def test_v2_controllers_win_over_v1(tmp_path):
    host = fake_host(tmp_path, "cpu memory pids io")
    assert not host.is_hybrid
    assert host.missing == ()
    assert len(host.bases()) == 1


def test_a_controller_that_is_nowhere_is_said_to_be_missing(tmp_path):
    host = fake_host(tmp_path, "memory", "\n".join(line for line in HYBRID.splitlines() if "cgroup2" in line))
    assert host.missing == ("pids", "cpu")


def test_no_v2_tree_is_refused_with_a_way_out():
    with pytest.raises(HostError, match="no cgroup v2") as caught:
        CgroupHost.probe(mountinfo="", environ={})
    assert caught.value.feature == "cgroup_v2"
    assert "mount -t cgroup2" in caught.value.hint


@pytest.mark.parametrize("base", ["", "..", "a/../b", "a b", "a//b", "-x", "a\n"])
def test_a_base_that_leaves_the_tree_is_refused(tmp_path, base):
    with pytest.raises(HostError, match="DSEC_GUARD_CGROUP"):
        fake_host(tmp_path, "", DSEC_GUARD_CGROUP=base)


def test_a_base_of_the_users_choice_is_never_removed_by_us(tmp_path):
    assert not fake_host(tmp_path, "", DSEC_GUARD_CGROUP="/site/guards/").base_is_default
    assert fake_host(tmp_path, "").base_is_default


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 65, "a\n", "-rf"])
def test_odd_instance_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no cgroup name"):
        fake_host(tmp_path, "").instance(name)


# ------------------------------------------------------------------------------------------------------- id ranges


def test_ranges_stay_in_the_unused_part_below_2_31():
    assert FIRST == 1879048192
    assert FIRST % SIZE == 0
    assert FIRST + COUNT * SIZE == 0x7FFE0000 < 2**31


def test_living_ranges_never_meet_and_released_ones_come_back(tmp_path):
    held = [UidRange.acquire(tmp_path, count=5) for _ in range(5)]
    assert sorted(r.base for r in held) == [FIRST + i * SIZE for i in range(5)]
    with pytest.raises(HostError, match="all 5 user id ranges"):
        UidRange.acquire(tmp_path, count=5)
    held[2].release()
    with UidRange.acquire(tmp_path, count=5) as again:
        assert again.base == held[2].base
    for one in held:
        one.release()


def test_ranges_that_subuid_gives_away_are_left_out(tmp_path, monkeypatch):
    subuid = tmp_path / "subuid"
    subuid.write_text(f"root:100000:65536\nbroken\nx:y:z\nalice:{FIRST + SIZE - 1}:2\n")
    assert reserved_ranges((subuid, tmp_path / "absent")) == ((FIRST + SIZE - 1, FIRST + SIZE + 1),)
    monkeypatch.setattr("dsec_guard.host.uids.reserved_ranges", lambda: reserved_ranges((subuid,)))
    held = [UidRange.acquire(tmp_path, count=3)]
    assert held[0].base == FIRST + 2 * SIZE
    with pytest.raises(HostError):
        UidRange.acquire(tmp_path, count=3)
    held[0].release()


# --------------------------------------------------------------------------------------------------------- records


def packed(**changes: int | bytes) -> bytes:
    values: dict[str, int | bytes] = dict(
        version=1, kind=2, flags=12, box=7, at=9, tgid=11, tid=12, ppid=10, uid=5, comm=b"sh\0", dev=1, ino=2, mask=3,
        nr=165, arch=0xC000003E, a0=1, a1=2, a2=3, a3=4, a4=5, a5=2**64 - 1, given=1, reserved=0, n1=4, n2=0, n3=1, n4=2,
        path=b"/abcdef", path2=b"", base=b"/", data=b"\xff\x00")
    values.update(changes)
    return holder_module._RECORD.pack(*values.values())


def test_the_record_layout_is_that_of_the_header():
    assert holder_module._RECORD.size == RECORD_SIZE
    header = (Path(holder_module.__file__).parent.parent / "native/dg_holder.h").read_text()
    widths = {"uint16_t": 2, "uint32_t": 4, "int32_t": 4, "uint64_t": 8, "char": 1, "uint8_t": 1}
    for name, layout in (("dg_record", holder_module._RECORD), ("dg_hold_notice", holder_module._NOTICE),
                         ("dg_hold_request", holder_module._REQUEST)):
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", header, re.DOTALL)
        assert body is not None
        fields = re.findall(r"^\s*(\w+) \w+(?:\[(\d+|sizeof[^\]]*)\])?;", body.group(1), re.MULTILINE)
        sizes = [widths[kind] * int(count or 1) for kind, count in fields]
        ours = [struct.calcsize("<" + part) for part in re.findall(r"\d*[HIQisB]", layout.format)]
        expanded: list[int] = []
        for part, size in zip(re.findall(r"\d*[HIQisB]", layout.format), ours, strict=True):
            count = 1 if part[-1] == "s" or not part[:-1] else int(part[:-1])
            expanded += [size // count] * count
        flat: list[int] = []
        for (kind, count), size in zip(fields, sizes, strict=True):
            flat += [size] if not count or kind in ("char", "uint8_t") else [widths[kind]] * int(count)
        assert flat == expanded, name


def test_notify_and_open_records_decode():
    record = decode_notify(packed())
    assert isinstance(record, RawNotify)
    assert (record.box_id, record.tgid, record.comm, record.nr, record.given_errno) == (7, 11, b"sh", 165, 1)
    assert (record.path, record.base, record.data, record.memory_read) == (b"/abc", b"/", b"\xff\x00", True)
    assert record.args[5] == 2**64 - 1
    opened = decode_fanotify(packed(kind=1, mask=0x40000, flags=0, nr=2))
    assert isinstance(opened, RawOpen)
    assert opened.from_exec
    assert opened.nr == -1
    assert opened.open_flags is None
    assert decode_fanotify(packed(kind=1, nr=257, flags=4, a2=0o2)).open_flags == 2


@pytest.mark.parametrize("raw", [b"", b"\0" * RECORD_SIZE, b"\xff" * RECORD_SIZE, packed()[:-1], packed(kind=3),
                                 packed(version=2), packed(n1=441), packed(n4=129)])
def test_broken_records_are_refused(raw):
    with pytest.raises(MonitorError):
        decode_record(raw)


def test_a_record_of_the_other_kind_is_refused():
    with pytest.raises(MonitorError):
        decode_fanotify(packed())
    with pytest.raises(MonitorError):
        decode_notify(packed(kind=1))
