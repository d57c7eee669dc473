"""The binary plan: what Python packs is what the C header declares."""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
from pathlib import Path

import pytest

from dsec_guard.errors import SetupError
from dsec_guard.sandbox import plan
from dsec_guard.sandbox.spec import (
    ExecRequest,
    LandlockRule,
    LandlockSpec,
    MountFlag,
    OpKind,
    Rlimit,
    RootOp,
    SpawnSpec,
)

HEADER = Path(__file__).resolve().parents[2] / "dsec_guard" / "native" / "dg_plan.h"
#: Names of the header that plan.py has under the same name without the prefix.
SHARED = (
    "PLAN_MAGIC", "EXEC_MAGIC", "MSG_MAGIC", "VERSION", "NO_FD", "MAX_PLAN", "MAX_FDS", "MAX_CHECKS", "INIT_UID",
    "PLAN_LIMIT_NAMESPACES", "PLAN_SELF_CHECK", "EXEC_TTY", "REQ_MAKE_USERNS", "REQ_SPAWN", "REQ_EXEC", "REQ_SIGNAL",
    "USERNS_OWNER", "SIGNAL_ALL", "ANS_ERROR", "ANS_USERNS", "ANS_SPAWNED", "ANS_READY", "ANS_STARTED", "ANS_FAILED",
    "ANS_EXITED",
)


def constants() -> dict[str, int]:
    found = re.findall(r"^#define DG_(\w+) (0x[0-9a-f]+|\d+)u\b", HEADER.read_text(), re.MULTILINE)
    return {name: int(value, 0) for name, value in found}


def spec(**changes: object) -> SpawnSpec:
    values: dict[str, object] = dict(
        name="box", hostname="sandbox", base_uid=1 << 20, cgroup_fd=10, userns_fd=11, store_bytes=1 << 20,
        store_inodes=100, ops=(RootOp(OpKind.DIR, "etc"),),
    )
    values.update(changes)
    return SpawnSpec(**values)  # type: ignore[arg-type]


def text_at(data: bytes, span: tuple[int, int]) -> bytes:
    assert data[span[0] + span[1]] == 0
    return data[span[0]:span[0] + span[1]]


def span_at(data: bytes, record: plan.Record, field: str, base: int = 0) -> tuple[int, int]:
    off, length = struct.unpack_from("<II", data, base + record.offsets()[field])
    return off, length


def test_constants_are_those_of_the_header():
    in_header = constants()
    assert {name: getattr(plan, name) for name in SHARED} == {name: in_header[name] for name in SHARED}


def test_kinds_and_flags_are_those_of_the_header():
    in_header = constants()
    assert {f"OP_{kind.name}": int(kind) for kind in OpKind} == {
        name: value for name, value in in_header.items() if name.startswith("OP_")}
    flags = {f"MOUNT_{flag.name}": int(flag) for flag in MountFlag}
    assert flags == {n: v for n, v in in_header.items() if n.startswith("MOUNT_") and n != "MOUNT_ALL"}
    assert in_header["MOUNT_ALL"] == sum(flags.values())


@pytest.mark.needs("gcc")
def test_every_field_lies_where_the_compiler_puts_it(tmp_path):
    lines = ["#include <stddef.h>", "#include <stdio.h>", f'#include "{HEADER}"', "int main(void) {"]
    expected = []
    for record in plan.RECORDS:
        lines.append(f'printf("%zu\\n", sizeof(struct {record.name}));')
        expected.append((record.name, "size", record.size))
        for field, offset in record.offsets().items():
            lines.append(f'printf("%zu\\n", offsetof(struct {record.name}, {field}));')
            expected.append((record.name, field, offset))
    (tmp_path / "layout.c").write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["gcc", "-o", tmp_path / "layout", tmp_path / "layout.c"], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.split()
    assert [(*e[:2], int(got)) for e, got in zip(expected, printed, strict=True)] == expected


def test_the_header_declares_no_record_that_python_lacks():
    declared = set(re.findall(r"^struct (dg_\w+) \{", HEADER.read_text(), re.MULTILINE)) - {"dg_span"}
    assert declared == {record.name for record in plan.RECORDS}


def test_descriptors_follow_the_plans_own_in_the_order_of_use():
    packed = plan.pack_plan(spec(owner_map_fd=12, v1_tasks_fds=(13, 14), ops=(RootOp(OpKind.TREE, "opt", fd=15),)))
    assert packed.fds == (10, 11, 12, 13, 14, 15)
    head = struct.unpack_from("<III", packed.data, plan.PLAN.offsets()["cgroup_fd"])
    assert head == (1, 2, 3)
    off, count = span_at(packed.data, plan.PLAN, "v1_fds")
    assert struct.unpack_from(f"<{count}I", packed.data, off) == (4, 5)
    ops = span_at(packed.data, plan.PLAN, "ops")[0]
    assert struct.unpack_from("<I", packed.data, ops + plan.OP.offsets()["fd"])[0] == 6


def test_an_absent_descriptor_is_no_index():
    packed = plan.pack_plan(spec())
    assert struct.unpack_from("<I", packed.data, plan.PLAN.offsets()["owner_map_fd"])[0] == plan.NO_FD


def test_texts_end_with_nul_and_arrays_are_aligned():
    ops = (RootOp(OpKind.FILE, "etc/hosts", content=b"x" * 3), RootOp(OpKind.SYMLINK, "bin", source="usr/bin"))
    data = plan.pack_plan(spec(ops=ops)).data
    start, count = span_at(data, plan.PLAN, "ops")
    assert (start % 8, count) == (0, 2)
    assert text_at(data, span_at(data, plan.OP, "target", start)) == b"etc/hosts"
    off, length = span_at(data, plan.OP, "content", start)
    assert data[off:off + length] == b"xxx"
    assert text_at(data, span_at(data, plan.OP, "source", start + plan.OP.size)) == b"usr/bin"
    assert struct.unpack_from("<I", data, plan.PLAN.offsets()["size"])[0] == len(data)


def test_a_filter_counts_instructions_and_landlock_is_kept_per_phase():
    rules = LandlockSpec(handled_fs=7, scoped=3, rules=(LandlockRule("/usr", 5),), ports=((443, 2),))
    data = plan.pack_plan(spec(exec_filters=(b"\1" * 16, b""), landlock=(None, rules))).data
    start, count = span_at(data, plan.PLAN, "phases")
    assert count == 2
    assert span_at(data, plan.PHASE, "filter", start)[1] == 2
    offsets = plan.PHASE.offsets()
    assert struct.unpack_from("<I", data, start + offsets["has_landlock"])[0] == 0
    second = start + plan.PHASE.size
    assert struct.unpack_from("<I", data, second + offsets["has_landlock"])[0] == 1
    rule, rule_count = span_at(data, plan.PHASE, "rules", second)
    assert rule_count == 1
    assert text_at(data, span_at(data, plan.RULE, "path", rule)) == b"/usr"
    assert struct.unpack_from("<QQ", data, span_at(data, plan.PHASE, "ports", second)[0]) == (443, 2)


def test_an_unlimited_rlimit_is_all_ones():
    data = plan.pack_plan(spec(rlimits=(Rlimit(resource.RLIMIT_CPU, 1, resource.RLIM_INFINITY),))).data
    assert struct.unpack_from("<IIQQ", data, span_at(data, plan.PLAN, "rlimits")[0])[2:] == (1, (1 << 64) - 1)


@pytest.mark.parametrize("changes", [
    {"base_uid": -1},
    {"base_uid": 1 << 32},
    {"hostname": "a\0b"},
    {"exec_filters": (b"1234567",)},
    {"ops": (RootOp(OpKind.DIR, "x", size_bytes=1 << 64),)},
    {"ops": tuple(RootOp(OpKind.TREE, f"x{n}", fd=n) for n in range(plan.MAX_FDS))},
    {"ops": (RootOp(OpKind.FILE, "x", content=bytes(plan.MAX_PLAN)),)},
], ids=["negative", "too-large", "nul", "half-instruction", "too-many-bytes", "too-many-fds", "too-long"])
def test_what_no_plan_can_hold_is_an_error_by_name(changes):
    with pytest.raises(SetupError) as caught:
        plan.pack_plan(spec(**changes))
    assert caught.value.step == "pack_plan"
    assert caught.value.errno_name


def test_an_exec_request_carries_bytes_that_are_no_utf8():
    req = ExecRequest(argv=(b"/bin/echo", b"\xff\xfe"), env=(b"A=\xe4",), cwd=b"/w\xff", uid=1, gid=2, groups=(3, 4), tty=True)
    data = plan.pack_exec(req)
    start, count = span_at(data, plan.EXEC, "argv")
    spans = [struct.unpack_from("<II", data, start + 8 * n) for n in range(count)]
    assert [text_at(data, s) for s in spans] == [b"/bin/echo", b"\xff\xfe"]
    assert text_at(data, span_at(data, plan.EXEC, "cwd")) == b"/w\xff"
    groups, count = span_at(data, plan.EXEC, "groups")
    assert struct.unpack_from(f"<{count}I", data, groups) == (3, 4)
    assert struct.unpack_from("<I", data, plan.EXEC.offsets()["flags"])[0] == plan.EXEC_TTY


def test_an_argument_with_a_nul_is_refused():
    with pytest.raises(SetupError):
        plan.pack_exec(ExecRequest(argv=(b"a\0b",), env=(), cwd=b"/", uid=1, gid=1))


def test_nobody_can_change_a_sealed_plan():
    fd = plan.sealed_memfd(b"plan", "test")
    try:
        assert os.pread(fd, 10, 0) == b"plan"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _with_fds(first: int, **changes: object) -> SpawnSpec:
    ops = (RootOp(OpKind.DIR, "etc"), RootOp(OpKind.TREE, "answers", fd=first + 3), RootOp(OpKind.TREE, "key", fd=first + 4))
    return spec(cgroup_fd=first, userns_fd=first + 1, v1_tasks_fds=(first + 2,), ops=ops, **changes)


def test_a_plan_written_over_for_another_box_is_the_plan_of_that_box() -> None:
    # A name that is also the text of something else must not take that along.
    packed = plan.pack_plan(_with_fds(10, name="sandbox", hostname="sandbox"))
    other = _with_fds(30, name="another", hostname="sandbox", base_uid=1 << 21)
    again = plan.repack_plan(packed, other)
    assert again == plan.pack_plan(other)
    assert again is not None
    assert again.fds == (30, 31, 32, 33, 34)
    assert again.data != packed.data


@pytest.mark.parametrize("changes", [{"name": "longer than sandbox"}, {"owner_map_fd": 40}])
def test_a_plan_of_another_shape_is_not_written_over(changes: dict[str, object]) -> None:
    packed = plan.pack_plan(_with_fds(10, name="sandbox"))
    assert plan.repack_plan(packed, _with_fds(30, **{"name": "another", **changes})) is None
