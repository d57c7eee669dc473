"""Recordings: the events of one box as JSON Lines, with all that is needed to judge them again.

    {"type": "header", "schema": "dsec-guard/events/v1", "run_id", "started", "argv", "policy": {"name", "digest",
     "effective": {...}}, "detectors": {"digest"}, "facts": {...}, "layers": [...], "host": {...}}
    {"type": "event", "kind": ..., "seq": ..., ...}        one per event, in ingest order (model.Event.to_record)
    {"type": "incident", ..., "evidence": [seq, ...]}      as in the result, evidence by sequence number
    {"type": "verdict", ...}, {"type": "reward", ...}      as in the result, with `completeness` and `fold`
    {"type": "end", "events": n, "truncated": n, "ended", "exit": {...}, "stdio": {...}}

The file is written as the run goes on and flushed at least once a second when told the time (`flush_if_due`), so that a
guard that was killed leaves a readable beginning. A name that ends in `.zst` is compressed; each flush ends a block.
"""

from __future__ import annotations

import io
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from dsec_guard.errors import RecordError, UsageError
from dsec_guard.incident.result import incident_json, result_json, rfc3339
from dsec_guard.model import Event, escape_bytes, event_from_record

if TYPE_CHECKING:
    from dsec_guard.model import Incident, Layer
    from dsec_guard.policy.schema import Policy
    from dsec_guard.service.request import RunOutcome

SCHEMA = "dsec-guard/events/v1"
MAX_BYTES = 512 << 20
MAX_LINE = 1 << 20
MAX_EVENTS = 2_000_000
FLUSH_S = 1.0
MOST_HELD = 1024          # events kept in memory before the file is made

_ENCODE = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


_ROOM = "make room there, or name another place with --record FILE or $DSEC_GUARD_STATE"


class RecordWriter:
    """Writes one recording. Order: `header`, any number of `events`, `finish`; `close` alone leaves a beginning.

    max_bytes: of uncompressed event lines; further events are counted, not written. when_due: the file is made by the first
    flush, and `discard` before that leaves none; else at once. Raises: UsageError when the file cannot be made, RecordError
    when it cannot be written.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, when_due: bool = False) -> None:
        self.path = path
        self._left = max_bytes
        self._events = 0
        self._truncated = 0
        self._flushed_at = time.monotonic()
        self._dirty = False
        self._closed = False
        self._held: list[Event] = []
        self._header: dict[str, Any] | None = None
        self._raw: BinaryIO | None = None
        self._out: Any = None
        self._zstd_block = 0
        if not when_due:
            self._make()

    def _make(self) -> None:
        path = self.path
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as err:
            raise UsageError(f"cannot write the record {path}: {err.strerror}", hint="name a writable place") from err
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UsageError(f"cannot write the record {path}: it is no regular file", hint="name a regular file")
        os.ftruncate(fd, 0)
        self._raw = os.fdopen(fd, "wb")
        self._out = self._raw
        if path.name.endswith(".zst"):
            import zstandard

            self._out = zstandard.ZstdCompressor(level=3).stream_writer(self._raw, closefd=False)
            self._zstd_block = zstandard.FLUSH_BLOCK
        if self._header is not None:
            self._write_header(self._header)
        held, self._held = self._held, []
        for event in held:
            self._write_event(event)

    def header(self, *, run_id: str, started_ns: int, argv: Iterable[bytes], policy: Policy, detectors_digest: str,
               facts: Mapping[str, Any], layers: Iterable[Layer] = (), host: Mapping[str, Any] | None = None) -> None:
        """The first line; started_ns is CLOCK_REALTIME nanoseconds, facts (BoxFacts.to_record) and host plain values."""
        self._header = {
            "run_id": run_id, "started_ns": started_ns, "argv": tuple(argv), "policy": policy,
            "detectors_digest": detectors_digest, "facts": facts, "layers": tuple(layers), "host": host,
        }
        if self._raw is not None:
            self._write_header(self._header)
            self.flush()

    def _write_header(self, given: Mapping[str, Any]) -> None:
        policy: Policy = given["policy"]
        self._line({
            "type": "header", "schema": SCHEMA, "run_id": given["run_id"], "started": rfc3339(given["started_ns"]),
            "started_ns": given["started_ns"], "argv": [escape_bytes(word) for word in given["argv"]],
            "policy": {"name": policy.name, "digest": policy.digest,
                       "effective": policy.model_dump(mode="json", by_alias=True)},
            "detectors": {"digest": given["detectors_digest"]}, "facts": dict(given["facts"]),
            "layers": [{"name": x.name, "state": x.state.value, "detail": x.detail} for x in given["layers"]],
            "host": dict(given["host"] or {}),
        })

    def events(self, events: Iterable[Event]) -> None:
        """Append events in ingest order."""
        for event in events:
            self._events += 1
            if self._raw is not None:
                self._write_event(event)
                continue
            self._held.append(event)
            self._dirty = True
            if len(self._held) >= MOST_HELD:
                self._make()
        self.flush_if_due()

    def _write_event(self, event: Event) -> None:
        if self._left <= 0:
            self._truncated += 1
        else:
            self._left -= self._line({"type": "event", **event.to_record()})

    def flush_if_due(self) -> None:
        """Call at least once a second while the box runs: what was appended then outlives the process."""
        if self._dirty and time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def discard(self) -> None:
        """Leave no file, whether one was made or not."""
        if self._raw is not None:
            self.close()
            self.path.unlink(missing_ok=True)
        self._closed = True

    def finish(self, outcome: RunOutcome, *, completeness: Mapping[str, Any]) -> None:
        """Append incidents, verdict, reward and the last line, and close the file. completeness: the fields of
        detect.engine.Completeness as plain values."""
        if self._raw is None:
            self._make()
        result = result_json(outcome)
        for incident in outcome.incidents:
            self._line({"type": "incident", **incident_record(incident, started_ns=outcome.started_ns)})
        self._line({"type": "verdict", **result["verdict"], "completeness": dict(completeness)})
        self._line({"type": "reward", **result["reward"], "would_be_penalty": result["would_be_penalty"],
                    "task_reward": result["task_reward"], "fold": result["fold"]})
        self._line({"type": "end", "events": self._events, "truncated": self._truncated, "ended": result["ended"],
                    "exit": result["exit"], "flags": result["flags"], "monitor": result["monitor"],
                    "stdio": result["stdio"]})
        self.close()

    def close(self) -> None:
        """Write out what is buffered and close; harmless when repeated."""
        if self._closed:
            return
        if self._raw is None:
            self._make()
        assert self._raw is not None
        self._closed = True
        try:
            if self._out is not self._raw:
                self._out.close()
            self._raw.close()
        except OSError as err:
            raise RecordError(f"cannot write the record {self.path}: {err.strerror}", hint=_ROOM) from err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def flush(self) -> None:
        if self._raw is None:
            self._make()
        assert self._raw is not None
        try:
            if self._out is not self._raw:
                self._out.flush(self._zstd_block)
            self._raw.flush()
        except OSError as err:
            raise RecordError(f"cannot write the record {self.path}: {err.strerror}", hint=_ROOM) from err
        self._flushed_at, self._dirty = time.monotonic(), False

    def _line(self, record: Mapping[str, Any]) -> int:
        data = _ENCODE(record).encode("ascii") + b"\n"
        try:
            self._out.write(data)
        except OSError as err:
            raise RecordError(f"cannot write the record {self.path}: {err.strerror}",
                              hint="free some space, or record elsewhere") from err
        self._dirty = True
        return len(data)


def incident_record(incident: Incident, *, started_ns: int) -> dict[str, Any]:
    """An incident as in the result, its evidence by sequence number."""
    return {**incident_json(incident, started_ns=started_ns), "evidence": [event.seq for event in incident.evidence]}


@dataclass(frozen=True)
class Recording:
    """A recording as read. finished: the last line is there; torn: the file ends in the middle of a line, which was left out."""

    header: Mapping[str, Any]
    events: tuple[Event, ...]
    incidents: tuple[Mapping[str, Any], ...] = ()
    verdict: Mapping[str, Any] | None = None
    reward: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    torn: bool = False

    @property
    def finished(self) -> bool:
        return self.end is not None

    @property
    def truncated(self) -> int:
        """Events that were counted but not written."""
        return int(self.end["truncated"]) if self.end is not None else 0

    def policy(self) -> Policy:
        """The policy it was judged under. Raises: RecordError when it does not fit the model any more."""
        from pydantic import ValidationError

        from dsec_guard.policy.schema import Policy

        try:
            return Policy.model_validate(self.header["policy"]["effective"])
        except (KeyError, TypeError, ValidationError) as err:
            raise RecordError(f"the recorded policy cannot be used: {err}", line=1, hint="judge it with --policy") from err


def read_record(path: Path, *, max_bytes: int = 2 * MAX_BYTES, max_events: int = MAX_EVENTS) -> Recording:
    """Read a recording, finished or not.

    Raises: RecordError with the 1-based line for anything that is no such recording; a last line that was cut off by a
    crash is left out instead. Sizes are bounded before they are believed: max_bytes counts uncompressed bytes.
    """
    try:
        with path.open("rb") as file:
            return _parse(str(path), _read_lines(str(path), file, max_bytes), max_events)
    except OSError as err:
        raise RecordError(f"cannot read {path}: {err.strerror}", hint="name a file that `run --record` wrote") from err


def _read_lines(name: str, file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Lines with their newline; the last may lack it."""
    source: BinaryIO = file
    if file.read(4) == b"\x28\xb5\x2f\xfd":
        import zstandard

        file.seek(0)
        # The window is bounded too: a crafted frame asks for gigabytes (RFC 8878, section 3.1.1.1.2).
        source = zstandard.ZstdDecompressor(max_window_size=64 << 20).stream_reader(file, read_across_frames=True)
        errors: tuple[type[Exception], ...] = (zstandard.ZstdError,)
    else:
        file.seek(0)
        errors = ()
    buffered = io.BufferedReader(source, 1 << 16)  # type: ignore[type-var]
    total = number = 0
    while True:
        number += 1
        try:
            line = buffered.readline(MAX_LINE + 1)
        except errors as err:
            raise RecordError(f"{name}:{number}: damaged compression: {err}", line=number) from err
        if not line:
            return
        total += len(line)
        if len(line) > MAX_LINE:
            raise RecordError(f"{name}:{number}: longer than {MAX_LINE} bytes", line=number)
        if total > max_bytes:
            raise RecordError(f"{name}:{number}: the recording is larger than {max_bytes} bytes", line=number)
        yield line


def _parse(name: str, lines: Iterable[bytes], max_events: int) -> Recording:
    header: Mapping[str, Any] | None = None
    events: list[Event] = []
    incidents: list[Mapping[str, Any]] = []
    last: dict[str, Mapping[str, Any]] = {}
    torn = False
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            torn = True
            break
        record = _decode(name, number, line)
        kind = record.pop("type", None)
        if header is None:
            if kind != "header" or record.get("schema") != SCHEMA:
                raise RecordError(f"{name}:1: no header of {SCHEMA}", line=1, hint="name a file that `run --record` wrote")
            header = record
        elif "end" in last:
            raise RecordError(f"{name}:{number}: a line after the end", line=number)
        elif kind == "event":
            if len(events) >= max_events:
                raise RecordError(f"{name}:{number}: more than {max_events} events", line=number)
            events.append(_event(name, number, record))
        elif kind == "incident":
            incidents.append(record)
        elif kind in ("verdict", "reward", "end"):
            last[kind] = record
        else:
            raise RecordError(f"{name}:{number}: unknown type {str(kind)[:40]!r}", line=number)
    if header is None:
        what = f"no header of {SCHEMA}" if torn else "empty"
        raise RecordError(f"{name}:1: {what}", line=1, hint="name a file that `run --record` wrote")
    return Recording(header=header, events=tuple(events), incidents=tuple(incidents), verdict=last.get("verdict"),
                     reward=last.get("reward"), end=last.get("end"), torn=torn)


def _decode(name: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise RecordError(f"{name}:{number}: no JSON: {err}", line=number) from err
    if not isinstance(record, dict):
        raise RecordError(f"{name}:{number}: no JSON object", line=number)
    return record


def _event(name: str, number: int, record: Mapping[str, Any]) -> Event:
    try:
        return event_from_record(record)
    except (KeyError, TypeError, ValueError) as err:
        raise RecordError(f"{name}:{number}: no event of this version: {err}", line=number) from err
