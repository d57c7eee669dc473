"""The state directory: run directories, the incident log and its index."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec_guard.errors import HostError, UsageError
from dsec_guard.incident import store
from dsec_guard.incident.store import StateDir, new_run_id, state_path
from dsec_guard.model import Class, Outcome

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "state")


def ids(found) -> list[str]:
    return [x.id for x in found]


def test_the_directory_is_private_and_named_by_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DSEC_GUARD_STATE", str(tmp_path / "a" / "b"))
    opened = StateDir.open()
    assert opened.path == tmp_path / "a" / "b"
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o700
    monkeypatch.setenv("DSEC_GUARD_STATE", "relative")
    with pytest.raises(UsageError, match="no absolute path"):
        state_path()
    monkeypatch.delenv("DSEC_GUARD_STATE")
    assert state_path() == Path("/var/lib/dsec-guard")


def test_a_directory_others_may_write_to_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(HostError, match="others may write") as caught:
        StateDir.open(tmp_path / "open")
    assert "chmod 700" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(HostError, match="belongs to uid 12345"):
        StateDir.open(tmp_path / "theirs")


def test_a_place_that_cannot_be_made_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be used: Not a directory"):
        StateDir.open(tmp_path / "file" / "state")


def test_run_ids_sort_by_time():
    assert new_run_id(0) < new_run_id(10**18) < new_run_id(2 * 10**18)
    assert new_run_id(0) != new_run_id(0)


def test_a_result_is_written_into_the_run_directory(state: StateDir):
    with state.new_run() as run:
        run.write_result({"run_id": run.run_id})
        assert json.loads(run.result_file.read_text()) == {"run_id": run.run_id}
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(run.result_file.stat().st_mode) == 0o600


def test_incidents_are_found_by_every_filter(state: StateDir, make_outcome, make_incident):
    first = make_incident(id="a" * 32)
    second = make_incident(id="b" * 32, cls=Class.ANSWER_PEEK, rule="peek.hidden_read", outcome=Outcome.SUCCEEDED, severity=9)
    third = make_incident(id="ab" + "c" * 30, rule="escapee")
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(first, second)))
    middle = store.rfc3339(time.time_ns())
    state.append_incidents(make_outcome(bad=True, run_dir=None, run_id="r-other", incidents=(third,), labels={"k": "v"}))
    assert set(ids(state.incidents())) == {first.id, second.id, third.id}
    assert ids(state.incidents())[0] == third.id  # the newest first
    assert ids(state.incidents(cls="answer_peek")) == [second.id]
    assert ids(state.incidents(run="r-2026")) == [second.id, first.id]
    assert ids(state.incidents(rule="escape")) == [first.id]
    assert ids(state.incidents(rule="peek.hidden_read")) == [second.id]
    assert ids(state.incidents(since=middle)) == [third.id]
    assert ids(state.incidents(id_prefix="a")) == [third.id, first.id]
    assert len(state.incidents(limit=1)) == 1
    assert ids(state.incidents(rule="' OR 1=1 --")) == []
    record = state.incidents(run="r-other")[0].record
    assert record["labels"] == {"k": "v"}
    assert record["policy"] == {"name": "untrusted-script", "digest": "ab" * 32}
    assert record["explanation"] == third.explanation


def test_no_incidents_write_nothing(state: StateDir, make_outcome):
    state.append_incidents(make_outcome())
    assert not (state.path / "incidents.jsonl").exists()
    assert state.incidents() == []


@pytest.mark.parametrize("harm", ["missing", "behind", "damaged"])
def test_the_index_is_made_again_from_the_log(state: StateDir, make_outcome, make_incident, harm: str):
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="1" * 32),)))
    assert ids(state.incidents()) == ["1" * 32]
    index = state.path / "index.sqlite"
    if harm == "missing":
        for file in state.path.glob("index.sqlite*"):
            file.unlink()
    elif harm == "damaged":
        for file in state.path.glob("index.sqlite-*"):
            file.unlink()
        index.write_bytes(b"not a database, by no means" * 500)
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="2" * 32),)))
    assert ids(state.incidents()) == ["2" * 32, "1" * 32]


def test_a_torn_line_costs_only_itself(state: StateDir, make_outcome, make_incident):
    log = state.path / "incidents.jsonl"
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="1" * 32),)))
    with log.open("ab") as file:
        file.write(b'{"id": "torn", "run_i')  # a writer died here
    assert ids(state.incidents()) == ["1" * 32]
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="2" * 32),)))
    assert ids(state.incidents()) == ["2" * 32, "1" * 32]


def test_a_full_disk_leaves_no_half_line(state: StateDir, make_outcome, make_incident, monkeypatch):
    state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="1" * 32),)))
    before = (state.path / "incidents.jsonl").read_bytes()
    real = os.write
    calls = []

    def write(fd: int, data: bytes) -> int:
        if calls:
            raise OSError(28, "No space left on device")
        calls.append(1)
        return real(fd, bytes(data[:10]))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(HostError, match="No space left"):
        state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id="2" * 32),)))
    monkeypatch.undo()
    assert (state.path / "incidents.jsonl").read_bytes() == before


def test_the_log_is_bounded_by_segments(state: StateDir, make_outcome, make_incident, monkeypatch):
    monkeypatch.setattr(store, "SEGMENT_BYTES", 1)
    for n in range(store.MAX_SEGMENTS + 4):
        state.append_incidents(make_outcome(bad=True, run_dir=None, incidents=(make_incident(id=f"{n:032x}"),)))
        newest = state.incidents()[0].id
        assert newest == f"{n:032x}"
    segments = sorted(p.name for p in state.path.glob("incidents*.jsonl"))
    assert len(segments) == store.MAX_SEGMENTS
    assert len(state.incidents()) == store.MAX_SEGMENTS
    with sqlite3.connect(state.path / "index.sqlite") as raw:
        assert raw.execute("SELECT count(*) FROM segments").fetchone() == (store.MAX_SEGMENTS,)
    raw.close()


APPENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from dsec_guard.incident.store import StateDir
state = StateDir.open(Path(sys.argv[2]))
n = 0
while True:
    number = f"{sys.argv[3]}-{n}"
    line = ('{"id":"%s","run_id":"r","class":"tamper","rule":"x","outcome":"attempted","severity":1,"recorded":"2026",'
            '"pad":"%s"}\\n' % (number, "x" * 3000)).encode()
    state._append(line)
    print(number, flush=True)  # acknowledged
    n += 1
"""


def test_parallel_writers_killed_at_any_moment_lose_nothing_acknowledged(state: StateDir):
    writers = [subprocess.Popen([sys.executable, "-c", APPENDER, ROOT, str(state.path), str(k)], stdout=subprocess.PIPE)
               for k in range(4)]
    acknowledged: set[str] = set()
    for k, writer in enumerate(writers):
        for _ in range(5 + 3 * k):
            acknowledged.add(writer.stdout.readline().decode().strip())
        writer.send_signal(signal.SIGKILL)
    for writer in writers:
        rest = writer.stdout.read().decode()
        acknowledged.update(line for line in rest.split("\n")[:-1])
        writer.wait()
        writer.stdout.close()
    found = ids(state.incidents())
    assert acknowledged <= set(found)
    assert len(found) == len(set(found))


def make_runs(state: StateDir, count: int, flagged: set[int]) -> list[Path]:
    paths = []
    for n in range(count):
        path = state.path / "runs" / f"r-20260101-0000{n:02d}-00000000"
        path.mkdir()
        (path / "result.json").write_bytes(b"x" * 100_000)
        if n in flagged:
            (path / "flagged").touch()
        paths.append(path)
    return paths


def test_old_runs_without_incidents_go_first(tmp_path: Path):
    state = StateDir.open(tmp_path / "s", limit_runs=3)
    paths = make_runs(state, 6, flagged={0, 4})
    assert state.prune() == 3
    assert [p.exists() for p in paths] == [True, False, False, False, True, True]


def test_the_directory_is_bounded_in_bytes(tmp_path: Path):
    state = StateDir.open(tmp_path / "s", limit_bytes=250_000)
    paths = make_runs(state, 4, flagged={0, 1, 2, 3})
    assert state.prune() == 2
    assert [p.exists() for p in paths] == [False, False, True, True]


def test_a_run_that_lives_is_not_pruned_and_foreign_names_stay(tmp_path: Path):
    state = StateDir.open(tmp_path / "s", limit_runs=0)
    (state.path / "runs" / "mine").mkdir()
    run = state.new_run()
    assert state.prune() == 0
    assert run.path.exists()
    run.close()  # prunes by itself: the first one is due
    assert not run.path.exists()
    assert (state.path / "runs" / "mine").exists()


def test_pruning_is_not_repeated_at_once(tmp_path: Path):
    state = StateDir.open(tmp_path / "s", limit_runs=1)
    state.prune_if_due()
    make_runs(state, 3, flagged=set())
    state.prune_if_due()
    assert len(list((state.path / "runs").iterdir())) == 3
    os.utime(state.path / "pruned", (0, 0))
    state.prune_if_due()
    assert len(list((state.path / "runs").iterdir())) == 1


def test_a_run_with_incidents_is_marked_for_keeping(state: StateDir, make_outcome):
    run = state.new_run()
    state.append_incidents(make_outcome(bad=True, run_dir=run.path))
    assert (run.path / "flagged").exists()
    run.close()
