"""The state directory: one directory per run, and the log of incidents.

    <state>/                     $DSEC_GUARD_STATE, else /var/lib/dsec-guard; 0700
      incidents.jsonl            the truth: one incident a line, appended under a lock and synced before it counts
      incidents.<n>.jsonl        earlier segments
      index.sqlite               made from the segments whenever it is missing or behind
      write-back/                notes of write-backs under way (sandbox/workspace.py)
      runs/<run id>/             result.json, events.jsonl.zst, changes pack; locked while the run lives

The directory is bounded (`limit_bytes`, `limit_runs`): the oldest runs without incidents go first, then the oldest.
The log of incidents keeps MAX_SEGMENTS segments of SEGMENT_BYTES.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dsec_guard.errors import HostError, RecordError, UsageError
from dsec_guard.incident.result import as_text, incident_json, rfc3339, to_bytes, write_atomic

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Mapping

    from dsec_guard.service.request import RunOutcome

DEFAULT_STATE = Path("/var/lib/dsec-guard")
SCHEMA = "dsec-guard/incidents/v1"
LIMIT_BYTES = 2 << 30
LIMIT_RUNS = 20_000
SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 8
MAX_LINE = 1 << 20
PRUNE_EVERY_S = 60.0

_RUN_ID = re.compile(r"r-[0-9]{8}-[0-9]{6}-[0-9a-f]{8}")
_SEGMENT = re.compile(r"incidents\.([0-9]{6})\.jsonl")


def state_path() -> Path:
    """$DSEC_GUARD_STATE, else /var/lib/dsec-guard. Raises UsageError for a relative path."""
    text = os.environ.get("DSEC_GUARD_STATE", "")
    if not text:
        return DEFAULT_STATE
    path = Path(text)
    if not path.is_absolute():
        raise UsageError(f"DSEC_GUARD_STATE={text} is no absolute path", hint="export DSEC_GUARD_STATE=/some/directory")
    return path


def new_run_id(now_ns: int | None = None) -> str:
    """`r-20260131-235959-0123abcd`: sorts by time (UTC)."""
    now = time.time_ns() if now_ns is None else now_ns
    return f"r-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now // 1_000_000_000))}-{secrets.token_hex(4)}"


class RunDir:
    """One run's directory, locked against pruning until `close`."""

    def __init__(self, state: StateDir, run_id: str, path: Path, fd: int) -> None:
        self._state = state
        self.run_id = run_id
        self.path = path
        self._fd = fd

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl.zst"

    @property
    def changes_file(self) -> Path:
        """Where changes to the workspace are packed when they are not written back."""
        return self.path / "changes.tar.zst"

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomic(self.result_file, to_bytes(result, indent=None), sync=bool(result.get("incidents")))

    def close(self) -> None:
        """Unlock; afterwards the state directory is brought below its limits when that is due."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._state.prune_if_due()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class StoredIncident:
    """A line of the log. `record` is the whole incident with `run_id`, `recorded`, `policy` and `labels` beside it."""

    id: str
    run_id: str
    cls: str
    rule: str
    outcome: str
    severity: int
    recorded: str
    record: Mapping[str, Any]


class StateDir:
    """See the module. Several processes may use one directory at the same time."""

    def __init__(self, path: Path, *, limit_bytes: int, limit_runs: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._limit_runs = limit_runs

    @classmethod
    def open(cls, path: Path | None = None, *, limit_bytes: int = LIMIT_BYTES,
             limit_runs: int = LIMIT_RUNS) -> StateDir:
        """Use (and make) the state directory. Raises: HostError when it cannot be made, is no directory, belongs to
        somebody else, or others may write to it."""
        where = state_path() if path is None else path
        try:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = where.stat()
            if found.st_uid != os.geteuid():
                raise HostError(f"the state directory {where} belongs to uid {found.st_uid}, not to {os.geteuid()}",
                                feature="state", hint="set DSEC_GUARD_STATE to a directory of your own")
            if stat.S_IMODE(found.st_mode) & 0o022:
                raise HostError(f"others may write to the state directory {where}", feature="state",
                                hint=f"chmod 700 {where}")
            (where / "runs").mkdir(mode=0o700, exist_ok=True)
        except OSError as err:
            raise HostError(f"the state directory {where} cannot be used: {err.strerror}", feature="state",
                            hint="set DSEC_GUARD_STATE to a writable directory") from err
        return cls(where, limit_bytes=limit_bytes, limit_runs=limit_runs)

    @property
    def journal_dir(self) -> Path:
        """Where write-backs that are under way are noted, so that the next run can clean up after a kill."""
        path = self.path / "write-back"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    # ---- runs

    def new_run(self) -> RunDir:
        """A fresh, locked run directory. Raises: HostError when the place is full or read-only."""
        while True:
            run_id = new_run_id()
            path = self.path / "runs" / run_id
            try:
                path.mkdir(mode=0o700)
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileExistsError:
                continue
            except OSError as err:
                raise HostError(f"cannot make {path}: {err.strerror}", feature="state",
                                hint="free some space, or set DSEC_GUARD_STATE") from err
            fcntl.flock(fd, fcntl.LOCK_SH)
            return RunDir(self, run_id, path, fd)

    def prune_if_due(self) -> None:
        """`prune`, at most once a minute for all processes together."""
        stamp = self.path / "pruned"
        with contextlib.suppress(FileNotFoundError):
            if 0 <= time.time() - stamp.stat().st_mtime < PRUNE_EVERY_S:
                return
        stamp.touch(mode=0o600)
        self.prune()

    def prune(self) -> int:
        """Remove runs until both limits hold; running ones stay. Returns how many went."""
        with (self.path / "prune.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0  # somebody else is at it
            return self._prune()

    def _prune(self) -> int:
        runs: list[tuple[bool, str, int]] = []
        for entry in os.scandir(self.path / "runs"):
            if _RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                size, flagged = _measure(Path(entry.path))
                runs.append((flagged, entry.name, size))
        total, count, gone = sum(size for _, _, size in runs), len(runs), 0
        for _flagged, name, size in sorted(runs):
            if total <= self._limit_bytes and count <= self._limit_runs:
                break
            if self._remove_run(self.path / "runs" / name):
                total, count, gone = total - size, count - 1, gone + 1
        return gone

    @staticmethod
    def _remove_run(path: Path) -> bool:
        import shutil

        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            return False  # still running
        finally:
            os.close(fd)
        return True

    # ---- the log of incidents

    def append_incidents(self, outcome: RunOutcome) -> None:
        """Record all incidents of a run; once this returns they survive the process and the machine.

        Raises: HostError when they cannot be written: the run must then not be reported as recorded.
        """
        if not outcome.incidents:
            return
        common = {
            "schema": SCHEMA, "recorded": rfc3339(time.time_ns()), "run_id": outcome.run_id,
            "policy": {"name": outcome.policy_name, "digest": outcome.policy_digest},
            "labels": {as_text(key): as_text(value) for key, value in sorted(outcome.labels.items())},
        }
        records = (incident_json(x, started_ns=outcome.started_ns) for x in outcome.incidents)
        lines = b"".join(to_bytes({**common, **record}, indent=None) for record in records)
        try:
            if outcome.run_dir is not None:
                (outcome.run_dir / "flagged").touch(mode=0o600)
            self._append(lines)
        except OSError as err:
            raise HostError(f"cannot record incidents in {self.path}: {err.strerror}", feature="state",
                            hint="free some space, or set DSEC_GUARD_STATE") from err

    def _append(self, lines: bytes) -> None:
        with self._locked_log() as fd:
            end = os.lseek(fd, 0, os.SEEK_END)
            if end == 0:
                header = to_bytes({"schema": SCHEMA, "segment": secrets.token_hex(16)}, indent=None)
                lines = header + lines
            elif os.pread(fd, 1, end - 1) != b"\n":
                lines = b"\n" + lines  # a writer died in the middle of its line: readers skip that one
            view = memoryview(lines)
            try:
                while view:
                    view = view[os.write(fd, view):]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, end)  # all or nothing: a full disk leaves no half
                raise
            if end == 0:
                self._sync_directory()

    @contextlib.contextmanager
    def _locked_log(self) -> Iterator[int]:
        """The current segment, locked, with room for more."""
        log = self.path / "incidents.jsonl"
        while True:
            fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                mine = os.fstat(fd)
                try:
                    current = log.stat().st_ino == mine.st_ino
                except FileNotFoundError:
                    current = False
                if current and mine.st_size < SEGMENT_BYTES:
                    yield fd
                    return
                if current:
                    self._rotate(log)
            finally:
                os.close(fd)

    def _rotate(self, log: Path) -> None:
        numbers = sorted(int(m[1]) for p in self.path.iterdir() if (m := _SEGMENT.fullmatch(p.name)))
        log.rename(self.path / f"incidents.{(numbers[-1] if numbers else 0) + 1:06d}.jsonl")
        for number in numbers[: max(0, len(numbers) + 2 - MAX_SEGMENTS)]:
            (self.path / f"incidents.{number:06d}.jsonl").unlink()
        self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # ---- reading

    def incidents(self, *, cls: str = "", run: str = "", rule: str = "", since: str = "", id_prefix: str = "",
                  limit: int = 0) -> list[StoredIncident]:
        """Recorded incidents, newest first.

        since: an RFC 3339 time in UTC. run and id_prefix match from the start, rule matches a whole id or its part
        before a dot. limit: 0 = all. Raises: RecordError when neither the index nor a new one can be read.
        """
        import sqlite3

        where, values = ["1"], []
        for clause, value in (("class = ?", cls), ("recorded >= ?", since)):
            if value:
                where.append(clause)
                values.append(value)
        for column, value in (("run_id", run), ("id", id_prefix)):
            if value:
                where.append(f"substr({column}, 1, {len(value)}) = ?")
                values.append(value)
        if rule:
            where.append(f"(rule = ? OR substr(rule, 1, {len(rule) + 1}) = ?)")
            values += [rule, rule + "."]
        query = (f"SELECT segment, offset, length FROM incidents WHERE {' AND '.join(where)} "
                 f"ORDER BY recorded DESC, segment, offset DESC LIMIT {limit or -1}")
        for attempt in (1, 2):
            try:
                with contextlib.closing(self._index()) as index:
                    segments = self._refresh(index)
                    rows = index.execute(query, values).fetchall()
                break
            except sqlite3.DatabaseError as err:
                if attempt == 2:
                    raise RecordError(f"the incident index in {self.path} cannot be used: {err}") from err
                for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        (self.path / name).unlink()
        return [x for x in (self._read_at(segments, *row) for row in rows) if x is not None]

    @staticmethod
    def _read_at(segments: Mapping[str, Path], segment: str, offset: int, length: int) -> StoredIncident | None:
        try:
            with segments[segment].open("rb") as file:
                file.seek(offset)
                return _parse_incident(file.read(length))
        except FileNotFoundError:
            return None  # rotated away since

    def _index(self) -> sqlite3.Connection:
        import sqlite3

        path = self.path / "index.sqlite"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        index = sqlite3.connect(path, timeout=10)
        try:
            index.execute("PRAGMA journal_mode = WAL")
            index.executescript(
                "CREATE TABLE IF NOT EXISTS segments (segment TEXT PRIMARY KEY, indexed INTEGER NOT NULL);"
                "CREATE TABLE IF NOT EXISTS incidents (segment TEXT, offset INTEGER, length INTEGER, id TEXT,"
                " run_id TEXT, class TEXT, rule TEXT, severity INTEGER, recorded TEXT,"
                " PRIMARY KEY (segment, offset)) WITHOUT ROWID;"
                "CREATE INDEX IF NOT EXISTS by_time ON incidents (recorded);"
                "CREATE INDEX IF NOT EXISTS by_run ON incidents (run_id);"
                "CREATE INDEX IF NOT EXISTS by_id ON incidents (id);"
            )
        except sqlite3.Error:
            index.close()
            raise
        return index

    def _refresh(self, index: sqlite3.Connection) -> dict[str, Path]:
        """Take up what was appended since, forget segments that are gone. Returns the segments' files by name."""
        segments = self._segments()
        with index:
            index.execute("BEGIN IMMEDIATE")
            known = dict(index.execute("SELECT segment, indexed FROM segments"))
            for gone in set(known) - set(segments):
                index.execute("DELETE FROM incidents WHERE segment = ?", (gone,))
                index.execute("DELETE FROM segments WHERE segment = ?", (gone,))
            for segment, path in segments.items():
                start = known.get(segment, 0)
                if start > path.stat().st_size:  # cut by hand: nothing we know of it holds any more
                    index.execute("DELETE FROM incidents WHERE segment = ?", (segment,))
                    start = 0
                end = start
                for offset, length, incident in _lines(path, start):
                    end = offset + length
                    if incident is not None:
                        index.execute("INSERT OR REPLACE INTO incidents VALUES (?,?,?,?,?,?,?,?,?)",
                                      (segment, offset, length, incident.id, incident.run_id, incident.cls,
                                       incident.rule, incident.severity, incident.recorded))
                if end != start or segment not in known:
                    index.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (segment, end))
        return segments

    def _segments(self) -> dict[str, Path]:
        result: dict[str, Path] = {}
        paths = sorted(p for p in self.path.iterdir() if p.name == "incidents.jsonl" or _SEGMENT.fullmatch(p.name))
        for path in paths:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    result[str(json.loads(file.readline(MAX_LINE))["segment"])] = path
                except (ValueError, KeyError, TypeError):
                    result[f"headless {path.name}"] = path
        return result


def _lines(path: Path, start: int) -> Iterator[tuple[int, int, StoredIncident | None]]:
    """Offset, length and incident of every complete line from `start`; None for a header or a torn line."""
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        while True:
            line = file.readline()
            if not line.endswith(b"\n"):
                return
            yield offset, len(line), _parse_incident(line) if len(line) <= MAX_LINE else None
            offset += len(line)


def _parse_incident(line: bytes) -> StoredIncident | None:
    try:
        record = json.loads(line)
        return StoredIncident(
            id=str(record["id"]), run_id=str(record["run_id"]), cls=str(record["class"]), rule=str(record["rule"]),
            outcome=str(record["outcome"]), severity=int(record["severity"]), recorded=str(record["recorded"]),
            record=record,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _measure(path: Path) -> tuple[int, bool]:
    """Bytes on disk of a run's directory, which is flat by construction, and whether the run had incidents."""
    size, flagged = 4096, False
    for entry in os.scandir(path):
        flagged = flagged or entry.name == "flagged"
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size, flagged


def stored_ids(incidents: Iterable[StoredIncident]) -> tuple[str, ...]:
    """Distinct ids in the order given."""
    return tuple(dict.fromkeys(x.id for x in incidents))
