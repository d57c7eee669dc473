"""bpf/dg_events.h and monitor/wire.py describe the same bytes; hostile bytes become text or a WireError, nothing else."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import (
    Abi,
    CallsCounted,
    EvidenceLost,
    FileOpened,
    Phase,
    ProcessExec,
    Source,
    SyscallSeen,
    event_from_record,
)
from dsec_guard.monitor import syscalls, wire
from dsec_guard.monitor.loader import BoxCounters
from dsec_guard.monitor.pump import BoxStream, ProtectedObject, Pump, decode_address, resolve_path

BPF = Path(wire.__file__).resolve().parent.parent / "bpf"
HEADER = (BPF / "dg_events.h").read_text()


def _c(name: str) -> int:
    """A number of an enum in the header."""
    found = re.search(rf"\b{name} = ([0-9a-fx <]+)", HEADER)
    assert found, f"{name} is not in dg_events.h"
    return _number(found.group(1).strip())


def _number(text: str) -> int:
    left, _, right = text.partition("<<")
    return int(left, 0) << int(right or "0", 0)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compares the layout")
def test_every_offset_and_size_of_the_header_is_the_one_wire_uses(tmp_path: Path) -> None:
    lines = ['#include <stddef.h>', '#include <stdio.h>', f'#include "{BPF / "dg_events.h"}"', "int main(void) {"]
    for layout in wire.LAYOUTS:
        lines.append(f'printf("{layout.name} (sizeof) %zu\\n", sizeof(struct {layout.name}));')
        lines += [
            f'printf("{layout.name} {name} %zu\\n", offsetof(struct {layout.name}, {name}));' for name in layout.fields
        ]
    lines += [
        'printf("dg_call tail %zu\\n", offsetof(struct dg_call, tail));',
        'printf("dg_exec tail %zu\\n", offsetof(struct dg_exec, tail));',
        'printf("dg_config (sizeof) %zu\\n", sizeof(struct dg_config));',
        'printf("dg_watch (sizeof) %zu\\n", sizeof(struct dg_watch)); }',
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-o", tmp_path / "layout", source], check=True)
    said: dict[tuple[str, str], int] = {}
    for line in subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.splitlines():
        struct_name, field, value = line.split()
        said[struct_name, field] = int(value)

    tails = {"dg_call": wire.TAIL_MAX, "dg_exec": wire.EXEC_TAIL_MAX}
    for layout in wire.LAYOUTS:
        assert {f: said[layout.name, f] for f in layout.fields} == layout.offsets(), layout.name
        assert said[layout.name, "(sizeof)"] == layout.size + tails.get(layout.name, 0), layout.name
    for name in tails:
        assert said[name, "tail"] == next(x for x in wire.LAYOUTS if x.name == name).size
    assert said["dg_config", "(sizeof)"] == wire.CONFIG_SIZE
    assert said["dg_watch", "(sizeof)"] == wire.WATCH_SIZE


def test_enums_of_the_header_are_those_of_python() -> None:
    for kind in wire.Kind:
        assert _c(f"DG_{kind.name}") == kind
    for why in wire.Why:
        assert _c(f"DG_W_{why.name}") == why
    for cls in syscalls.CallClass:
        assert _c(f"DG_C_{cls.name}") == cls
    for flag in wire.RecordFlag:
        assert _c(f"DG_R_{flag.name}") == flag
    assert _c("DG_SYSCALLS") == syscalls.TABLE_SIZE == wire.SYSCALLS
    assert _c("DG_WATCHES") == wire.WATCHES
    assert _c("DG_NR_HOOK") == syscalls.HOOK_BASE
    assert _c("DG_NR_I386") == syscalls.I386_BASE
    assert _c("DG_E_CRITICAL") == syscalls._CRITICAL
    assert _c("DG_E_BIND") == syscalls._BIND


def test_number_without_a_name_is_unknown_and_a_harmless_one_is_skipped() -> None:
    table = syscalls.class_table()
    assert table[400] == syscalls.CallClass.UNKNOWN
    assert table[X86_64["getpid"]] == syscalls.CallClass.SKIP
    assert table[X86_64["mseal"]] == syscalls.CallClass.SKIP
    assert table[X86_64["mount"]] & 0x3F == syscalls.CallClass.MOUNT


def test_path_arguments_are_where_the_manual_says() -> None:
    table = syscalls.class_table()

    def places(name: str) -> tuple[int, ...]:
        return tuple((table[X86_64[name]] >> shift & 7) - 1 for shift in (6, 9, 12, 15))

    assert places("openat") == (1, 0, -1, -1)  # path, dir, path2, dir2
    assert places("renameat2") == (1, 0, 3, 2)
    assert places("symlinkat") == (2, 1, 0, -1)
    assert places("mount") == (1, -1, 0, -1)
    assert places("fchmod") == (-1, 0, -1, -1)


@given(st.lists(st.binary(max_size=90).map(lambda b: b"/" + b.replace(b"\0", b"0")), max_size=60))
def test_fitted_watches_cover_all_that_was_asked_for(prefixes: list[bytes]) -> None:
    fitted = wire.fit_watches(prefixes)
    assert len(fitted) <= wire.WATCHES
    assert all(any(p.startswith(f) for f in fitted) for p in prefixes)
    assert len(wire.pack_watches(fitted)) == wire.WATCH_SIZE


def test_few_short_watches_stay_as_they_are() -> None:
    assert wire.fit_watches((b"/srv/a", b"/proc/", b"/srv/a/b")) == (b"/proc/", b"/srv/a")
    with pytest.raises(ValueError, match="absolute"):
        wire.fit_watches((b"srv",))


# ---------------------------------------------------------------------------------------------------- decoding


def _head(kind: wire.Kind, **values: Any) -> bytes:
    fields = {
        "at_ns": 5_000, "box": 7, "kind": kind, "flags": 0, "size": 0, "exec": 1, "phase": 1, "tgid": 100, "tid": 101,
        "ppid": 99, "uid": 101_000, "comm": b"cat",
    } | values  # fmt: skip
    return struct.pack(wire._HEAD.format, *fields.values())


def _call(kind: wire.Kind = wire.Kind.CALL, *, ret: int = -13, nr: int = 257, abi: int = 0, why: int = 1, obj: int = 0,
          args: tuple[int, ...] = (0, 0, 0, 0, 0, 0), file_flags: int = 0, tail: tuple[bytes, ...] = (), **head: Any) -> bytes:
    tail = (*tail, b"", b"", b"", b"", b"", b"")[:6]
    body = struct.pack("<q6QQQIBBHI6H", ret, *args, 0, obj, nr, abi, 2, why, file_flags, *map(len, tail))
    return _head(kind, **head) + body + b"".join(tail)


def _stream(**objects: ProtectedObject) -> BoxStream:
    return BoxStream(7, 1_000, 100_000, {int(k[1:]): v for k, v in objects.items()})


def test_refused_relative_open_becomes_an_event_with_the_whole_path() -> None:
    raw = wire.decode(_call(tail=(b"/srv/answers", b"../answers/./key.json"), args=(3, 0, 0o101, 0, 0, 0)))
    (event,) = _stream().ingest(raw)
    assert event == SyscallSeen(
        seq=1, at_ns=4_000, phase=Phase.AGENT, exec=1, tgid=100, tid=101, ppid=99, uid=1_000, comm="cat",
        source=Source.SYS_EXIT, name="openat", nr=257, args=(3, 0, 0o101, 0, 0, 0), ret=-13, path="/srv/answers/key.json",
        raw_path="../answers/./key.json", flags=0o101,
    )  # fmt: skip
    assert event_from_record(event.to_record()) == event


def test_protected_open_names_the_object_and_whether_it_could_be_read() -> None:
    key = ProtectedObject("/srv/answers/key", "hidden", dev=5, ino=6)

    def opened(flags: int, **kw: Any) -> FileOpened:
        record = _call(wire.Kind.FILE, ret=3, why=6, obj=9, file_flags=flags, tail=(b"", b"/tmp/link"), **kw)
        event = _stream(o9=key).ingest(wire.decode(record))[0]
        assert isinstance(event, FileOpened)
        return event

    assert (opened(0).for_read, opened(0).for_write, opened(0).object) == (True, False, "/srv/answers/key")
    assert (opened(1).for_read, opened(1).for_write) == (False, True)
    assert (opened(0o10000000).for_read, opened(0o10000000).for_write) == (False, False)
    assert opened(0).path == "/tmp/link"
    assert opened(0).source is Source.SYS_EXIT


def test_protected_open_through_a_foreign_entry_shows_both_facts() -> None:
    stream = _stream(o9=ProtectedObject("/srv/k", "hidden"))
    events = stream.ingest(wire.decode(_call(wire.Kind.FILE, ret=3, nr=5, abi=2, why=6, obj=9, tail=(b"", b"/srv/k"))))
    assert [type(e) for e in events] == [FileOpened, SyscallSeen]
    assert isinstance(events[1], SyscallSeen)
    assert (events[1].abi, events[1].name) == (Abi.I386, "open")


def test_vanished_descriptor_counts_for_the_object_its_name_meant() -> None:
    stream = _stream(o9=ProtectedObject("/srv/k", "hidden"))
    (event,) = stream.ingest(wire.decode(_call(wire.Kind.FILE, ret=3, why=7, tail=(b"/srv", b"k"))))
    assert isinstance(event, FileOpened)
    assert (event.object, event.ok) == ("/srv/k", True)
    (other,) = stream.ingest(wire.decode(_call(wire.Kind.FILE, ret=3, why=7, tail=(b"/srv", b"other"))))
    assert isinstance(other, SyscallSeen)


def test_fanotify_and_notification_objects_enter_the_same_order() -> None:
    stream = _stream(o1=ProtectedObject("/srv/k", "decoy", decoy=True, dev=2, ino=3))
    task = {"box_id": 7, "at_ns": 2_000, "tgid": 5, "tid": 5, "ppid": 1, "uid": 101_000, "comm": b"sh\0\0"}
    opened = SimpleNamespace(**task, nr=257, args=(0, 0, 2, 0, 0, 0), path=b"/srv/k", dev=2, ino=3, mask=0x10000)
    refused = SimpleNamespace(
        **task, nr=165, args=(0,) * 6, path=b"mnt", base=b"/tmp", path2=b"proc", data=b"proc", arch=0xC000003E, given_errno=1
    )
    events = [*stream.ingest(opened), *stream.ingest(refused)]
    assert [e.seq for e in events] == [1, 2]
    assert isinstance(events[0], FileOpened)
    assert isinstance(events[1], SyscallSeen)
    assert (events[0].source, events[0].for_write, events[0].decoy) == (Source.FANOTIFY, True, True)
    assert (events[1].name, events[1].path, events[1].path2, events[1].ret) == ("mount", "/tmp/mnt", "proc", -1)
    assert stream.ingest(SimpleNamespace(**(vars(opened) | {"ino": 4}))) == []


def test_hook_record_takes_the_command_of_its_process() -> None:
    stream = _stream()
    task = _head(wire.Kind.TASK) + struct.pack("<QIIII", 0, 200, 200, 3, 0)
    net = _head(wire.Kind.NET, tgid=200, exec=0) + struct.pack("<IIII16sIi", 1, 2, 1, 6, bytes([198, 51, 100, 1]), 80, -1)
    stream.ingest(wire.decode(task))
    (event,) = stream.ingest(wire.decode(net))
    record = event.to_record()
    seen = [record[name] for name in ("exec", "address", "port", "op", "ret")]
    assert seen == [3, "198.51.100.1", 80, "connect", -1]


def test_exec_keeps_words_of_any_bytes() -> None:
    tail = b"/bin/sh" + b"sh\0-c\0\x1b[2J\xff\0"
    record = _head(wire.Kind.EXEC) + struct.pack("<IHH", 0, 7, len(tail) - 7) + tail
    (event,) = _stream().ingest(wire.decode(record))
    assert isinstance(event, ProcessExec)
    assert (event.exe, event.argv, event.memfd) == ("/bin/sh", ("sh", "-c", "\x1b[2J\\xff"), True)


def test_counters_become_counted_calls_and_losses() -> None:
    counters = BoxCounters(lost_evidence=2, over_budget=3, calls={("openat", -13): 40})
    events = _stream().summary(counters, notify_lost=1)
    assert events[0].to_record()["count"] == 40
    assert isinstance(events[0], CallsCounted)
    lost = [(e.ring, e.count, e.over_budget) for e in events[1:] if isinstance(e, EvidenceLost)]
    assert lost == [("evidence", 2, False), ("evidence", 3, True), ("notify", 1, False)]


def test_pump_routes_by_box_and_counts_the_rest() -> None:
    pump = Pump()
    pump.add(_stream())
    events = pump.ingest([wire.decode(_call()), wire.decode(_call(box=8))])
    assert list(events) == [7]
    assert pump.unrouted == 1


@given(st.binary(max_size=400))
def test_any_bytes_decode_or_are_a_wire_error(data: bytes) -> None:
    try:
        record = wire.decode(data)
    except wire.WireError:
        return
    _stream().ingest(record)


@given(st.sampled_from(list(wire.Kind)), st.binary(min_size=400, max_size=600))
def test_any_body_behind_a_good_head_decodes_or_is_a_wire_error(kind: wire.Kind, body: bytes) -> None:
    try:
        record = wire.decode(_head(kind) + body)
    except wire.WireError:
        return
    for event in _stream(o1=ProtectedObject("/k", "hidden")).ingest(record):
        assert event_from_record(event.to_record()) == event


def test_frames_stop_at_a_length_beyond_the_batch() -> None:
    good = struct.pack("<II", 5, 0) + b"hello\0\0\0"
    assert [bytes(f) for f in wire.frames(good * 2)] == [b"hello", b"hello"]
    with pytest.raises(wire.WireError):
        list(wire.frames(struct.pack("<II", 500, 0) + b"hello"))


# -------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("path", "base", "want"),
    [
        (b"/srv//answers/./key", b"", "/srv/answers/key"),
        (b"key", b"/srv/answers", "/srv/answers/key"),
        (b"../../etc/shadow", b"/workspace/repo", "/etc/shadow"),
        (b"../../../../x", b"/a", "/x"),
        (b"/proc/self/root/srv/key", b"/w", "/srv/key"),
        (b"/proc/1/root/srv/key", b"", "/srv/key"),
        (b"/proc/thread-self/root/../srv/key", b"", "/srv/key"),
        (b"/proc/self/task/12/root/srv/key", b"", "/srv/key"),
        (b"/proc/self/root/proc/self/root/srv/key", b"", "/srv/key"),
        (b"/proc/self/cwd/../key", b"/srv/answers", "/srv/key"),
        (b"/proc/12/cwd/../key", b"/srv/answers", "/proc/12/key"),
        (b"/proc/self/cwd/key", b"", "/proc/self/cwd/key"),
        (b"self/root/etc/shadow", b"/proc", "/etc/shadow"),
        (b"/proc/self/rootfs/x", b"", "/proc/self/rootfs/x"),
        (b"key", b"", "key"),
        (b"", b"/dev/tty", "/dev/tty"),
        (b"", b"", ""),
        (b"/", b"", "/"),
        (b"\xff\\\x1b", b"/", "/\\xff\\\\\x1b"),
    ],
)
def test_resolve_path(path: bytes, base: bytes, want: str) -> None:
    assert resolve_path(path, base) == want


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_resolved_path_has_no_dots_left(path: bytes, base: bytes) -> None:
    text = resolve_path(b"/" + path, b"/" + base)
    assert text.startswith("/")
    assert not {"", ".", ".."} & set(text[1:].split("/")) or text == "/"


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (b"", ""),
        (b"\x02", ""),
        (struct.pack("<H", 2) + struct.pack(">H4s", 80, bytes([1, 2, 3, 4])), "inet:1.2.3.4:80"),
        (struct.pack("<H", 2) + b"\0", "af_2"),
        (struct.pack("<H", 10) + struct.pack(">HI16s", 443, 0, b"\0" * 15 + b"\1"), "inet6:[::1]:443"),
        (struct.pack("<H", 1) + b"/run/d.sock\0rest", "unix:/run/d.sock"),
        (struct.pack("<H", 1) + b"d.sock", "unix:/work/d.sock"),
        (struct.pack("<H", 1) + b"\0na\0me\0\0", "unix:@na\0me"),
        (struct.pack("<H", 1), "unix:"),
        (struct.pack("<HHII", 40, 0, 1024, 2), "vsock:2:1024"),
        (struct.pack("<H", 17) + b"\0" * 18, "af_17"),
    ],
)
def test_decode_address(raw: bytes, want: str) -> None:
    assert decode_address(raw, b"/work") == want
