"""Recordings: what is written can be read and judged again, whatever happened to the writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import zstandard

from dsec_guard.detect.engine import Completeness
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.errors import RecordError, UsageError
from dsec_guard.model import FileOpened, Level, ProcessExec, SyscallSeen
from dsec_guard.policy.schema import Policy
from dsec_guard.replay.record import FLUSH_S, MAX_LINE, MOST_HELD, RecordWriter, read_record

ROOT = str(Path(__file__).resolve().parents[2])
EVENTS = (
    ProcessExec(seq=1, at_ns=5, exe="/bin/sh", argv=("sh", "a\\xff\x1b")),
    SyscallSeen(seq=2, at_ns=6, name="mount", nr=165, args=(1 << 63, 0, 0, 0, 0, 0), ret=-1, path="/mnt"),
    FileOpened(seq=3, at_ns=7, object="/srv/answers/key", label="hidden", decoy=True, ret=3),
)
FACTS = BoxFacts(run_id="r", level=Level.FULL, workspace="/workspace", limits={"pids": 256})


def header(writer: RecordWriter) -> None:
    writer.header(run_id="r", started_ns=1_780_000_000_123_456_789, argv=(b"sh", b"\xff"),
                  policy=Policy(name="p", digest="d"), detectors_digest="dd", facts=FACTS.to_record(), host={"kernel": "6.18"})


def exec_event(seq: int) -> ProcessExec:
    return ProcessExec(seq=seq, at_ns=seq, exe="/bin/true")


def write(path: Path, outcome=None, **options) -> None:
    writer = RecordWriter(path, **options)
    header(writer)
    writer.events(EVENTS)
    if outcome is not None:
        writer.finish(outcome, completeness=asdict(Completeness(lost={"context": 1}, sensors_missing=("notify",))))
    else:
        writer.close()


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.zst"])
def test_what_is_written_is_read_back(tmp_path: Path, make_outcome, name: str):
    path = tmp_path / name
    write(path, make_outcome(bad=True))
    recording = read_record(path)
    assert recording.events == EVENTS
    assert recording.finished
    assert not recording.torn
    assert recording.header["schema"] == "dsec-guard/events/v1"
    assert recording.header["facts"] == FACTS.to_record()
    assert recording.header["policy"]["name"] == "p"
    assert recording.policy() == Policy(name="p", digest="d")
    assert recording.incidents[0]["evidence"] == [7]
    assert recording.verdict["class"] == "escape_attempt"
    assert recording.verdict["completeness"]["lost"] == {"context": 1}
    assert recording.reward["dsec_penalty"] == -0.3
    assert recording.end["events"] == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_are_plain_json_with_a_type(tmp_path: Path, make_outcome):
    write(tmp_path / "r", make_outcome())
    lines = [json.loads(line) for line in (tmp_path / "r").read_bytes().splitlines()]
    assert [x["type"] for x in lines] == ["header", "event", "event", "event", "verdict", "reward", "end"]
    assert lines[1]["kind"] == "exec"


def test_an_unfinished_recording_is_readable(tmp_path: Path):
    write(tmp_path / "r")
    recording = read_record(tmp_path / "r")
    assert recording.events == EVENTS
    assert not recording.finished
    assert recording.verdict is None


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.zst"])
def test_a_killed_writer_leaves_what_it_flushed(tmp_path: Path, name: str):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from dsec_guard.replay import record\n"
        "from dsec_guard.model import ProcessExec\n"
        "from dsec_guard.policy.schema import Policy\n"
        "record.FLUSH_S = 0.01\n"
        "w = record.RecordWriter(Path(sys.argv[2]))\n"
        "w.header(run_id='r', started_ns=0, argv=(b'x',), policy=Policy(), detectors_digest='d', facts={})\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    w.events([ProcessExec(seq=n, exe='/bin/true')])\n"
        "    if n == 100: time.sleep(0.02); w.flush_if_due(); print('there', flush=True)\n"
    )
    path = tmp_path / name
    child = subprocess.Popen([sys.executable, "-c", code, ROOT, str(path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"there\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    recording = read_record(path)
    assert len(recording.events) >= 100
    assert [e.seq for e in recording.events] == list(range(1, len(recording.events) + 1))
    assert not recording.finished


def test_flush_is_left_for_a_second(tmp_path: Path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    writer = RecordWriter(tmp_path / "r")
    writer.events(EVENTS)
    assert (tmp_path / "r").stat().st_size == 0
    now[0] += 1.0
    writer.flush_if_due()
    assert (tmp_path / "r").read_bytes().count(b"\n") == 3
    writer.close()
    writer.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    write(tmp_path / "r")
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data[:-10])
    recording = read_record(tmp_path / "r")
    assert recording.torn
    assert recording.events == EVENTS[:2]


def test_beyond_the_size_limit_events_are_counted(tmp_path: Path, make_outcome):
    write(tmp_path / "r", make_outcome(), max_bytes=100)
    recording = read_record(tmp_path / "r")
    assert recording.events == EVENTS[:1]
    assert recording.truncated == 2
    assert recording.end["events"] == 3
    assert recording.verdict is not None


HEADER = b'{"type":"header","schema":"dsec-guard/events/v1"}\n'


@pytest.mark.parametrize(
    ("data", "line", "what"),
    [
        (b"", 1, "empty"),
        (b"{}\n", 1, "no header"),
        (b'{"type":"header","schema":"dsec-guard/events/v9"}\n', 1, "no header"),
        (HEADER + b"nonsense\n", 2, "no JSON"),
        (HEADER + b"[1]\n", 2, "no JSON object"),
        (HEADER + b"[" * 100_000 + b"\n", 2, "no JSON"),
        (HEADER + b'{"type":"event","kind":"no such"}\n', 2, "no event"),
        (HEADER + b'{"type":"event","kind":"exec"}\n', 2, "no event"),
        (HEADER + b'{"type":"event","kind":"exec","exe":"x","odd":1}\n', 2, "no event"),
        (HEADER + b'{"type":"event","kind":"exec","exe":"x","phase":"lunch"}\n', 2, "no event"),
        (HEADER + b'{"type":"what"}\n', 2, "unknown type"),
        (HEADER + b'{"type":"end"}\n{"type":"verdict"}\n', 3, "after the end"),
        (HEADER + b'"' + b"x" * MAX_LINE + b'"\n', 2, "longer than"),
        (zstandard.compress(HEADER) + b"\x28\xb5\x2f\xfdrubbish", 1, "damaged"),  # read ahead: the line where it is noticed
    ],
)
def test_anything_else_is_an_error_with_its_line(tmp_path: Path, data: bytes, line: int, what: str):
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(RecordError, match=what) as caught:
        read_record(tmp_path / "r")
    assert caught.value.line == line


def test_sizes_are_bounded(tmp_path: Path):
    bomb = zstandard.compress(HEADER + b"\n" * (4 << 20))
    assert len(bomb) < 10_000
    (tmp_path / "bomb.zst").write_bytes(bomb)
    with pytest.raises(RecordError):
        read_record(tmp_path / "bomb.zst")
    write(tmp_path / "r")
    with pytest.raises(RecordError, match="more than 2 events"):
        read_record(tmp_path / "r", max_events=2)
    with pytest.raises(RecordError, match="larger than 500 bytes"):
        read_record(tmp_path / "r", max_bytes=500)
    with pytest.raises(RecordError, match="No such file"):
        read_record(tmp_path / "none")


def test_a_record_goes_only_to_a_regular_file(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("fifo", "link", "no/dir"):
        with pytest.raises(UsageError, match="cannot write the record"):
            RecordWriter(tmp_path / name)


def test_a_record_that_is_made_when_due_leaves_no_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    path = tmp_path / "later.jsonl"
    writer = RecordWriter(path, when_due=True)
    header(writer)
    writer.events([exec_event(1)])
    writer.flush_if_due()
    assert not path.exists()
    now += FLUSH_S
    writer.flush_if_due()
    assert [event.seq for event in read_record(path).events] == [1]
    writer.discard()
    assert not path.exists()


def test_a_record_made_when_due_is_bounded_in_memory_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    writer = RecordWriter(path, when_due=True)
    header(writer)
    writer.events([exec_event(n) for n in range(1, MOST_HELD + 3)])
    assert path.exists()
    writer.close()
    assert [event.seq for event in read_record(path).events] == list(range(1, MOST_HELD + 3))


def test_a_record_that_was_never_due_is_written_by_close_and_not_by_discard(tmp_path: Path) -> None:
    for name, end in (("closed", RecordWriter.close), ("discarded", RecordWriter.discard)):
        writer = RecordWriter(tmp_path / name, when_due=True)
        header(writer)
        end(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]
