"""A run's outcome as JSON: the shape that trainers, reports and the incident log rely on."""

from __future__ import annotations

import json
import os
import stat
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from dsec_guard.errors import UsageError
from dsec_guard.host.newfile import new_file
from dsec_guard.model import Event, Incident, Verdict, escape_bytes, severity_word

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dsec_guard.service.request import RunOutcome, TransferReport

SCHEMA = "dsec-guard/result/v1"
MAX_EVIDENCE = 16


def rfc3339(realtime_ns: int) -> str:
    """CLOCK_REALTIME nanoseconds -> `2026-01-31T23:59:59.123456Z`: fixed width, so that text order is time order."""
    seconds, rest = divmod(realtime_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest // 1000:06d}Z"


def result_json(outcome: RunOutcome) -> dict[str, Any]:
    """The result of one run as plain JSON values; keys are added over time, never renamed.

    Text that is no UTF-8 is escaped (model.escape_bytes). Times are RFC 3339 in UTC, numbers finite. An incident's
    evidence is cut at MAX_EVIDENCE events, `evidence_total` has the count.
    """
    return {
        "schema": SCHEMA,
        "run_id": outcome.run_id,
        "started": rfc3339(outcome.started_ns),
        "exited": rfc3339(outcome.exited_ns),
        "ended": rfc3339(outcome.ended_ns),
        "policy": {"name": outcome.policy_name, "digest": outcome.policy_digest, "mode": outcome.mode},
        "argv": [escape_bytes(word) for word in outcome.argv],
        "exit": {"code": outcome.exit.code, "signal": outcome.exit.signal, "reason": outcome.exit.reason.value},
        "layers": [
            {"name": x.name, "state": x.state.value, "detail": as_text(x.detail), "optional": x.optional}
            for x in outcome.layers
        ],
        "monitor": {
            "level": outcome.monitor.level.value if outcome.monitor.level else None,
            "events": outcome.monitor.events,
            "lost": outcome.monitor.lost,
            "over_budget": outcome.monitor.over_budget,
        },
        "usage": {
            "wall_s": round(outcome.usage.wall_s, 6),
            "cpu_s": round(outcome.usage.cpu_s, 6),
            "memory_peak": outcome.usage.memory_peak,
            "pids_peak": outcome.usage.pids_peak,
            "disk_bytes": outcome.usage.disk_bytes,
            "files": outcome.usage.files,
            "output_bytes": outcome.usage.output_bytes,
        },
        "flags": list(outcome.flags),
        "incidents": [incident_json(x, started_ns=outcome.started_ns) for x in outcome.incidents],
        "verdict": verdict_json(outcome.verdict),
        "reward": {key: _number(value) for key, value in outcome.reward.as_dict().items()},
        "would_be_penalty": _number(outcome.reward.would_be_penalty),
        "task_reward": None if outcome.task_reward is None else _number(outcome.task_reward),
        "fold": None if outcome.fold is None else _number(outcome.fold),
        "run_dir": None if outcome.run_dir is None else _path(outcome.run_dir),
        "record": None if outcome.record_file is None else _path(outcome.record_file),
        "workspace": {
            "path": None if outcome.workspace is None else _path(outcome.workspace),
            **_transfer(outcome.write_back),
        },
        "collect": _transfer(outcome.collect),
        "stdio": {name: dict(stream) for name, stream in outcome.stdio.items()},
        "labels": {as_text(key): as_text(value) for key, value in sorted(outcome.labels.items())},
        "warnings": [as_text(w) for w in outcome.warnings],
        "error": {"message": as_text(outcome.error), "hint": as_text(outcome.hint)} if outcome.error else None,
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as in the result."""
    return {
        "class": verdict.cls.value,
        "outcome": verdict.outcome.value if verdict.outcome else None,
        "severity": verdict.severity,
        "severity_word": severity_word(verdict.severity),
        "validity": verdict.validity.value,
        "complete": verdict.complete,
        "reasons": [as_text(r) for r in verdict.reasons],
        "level": verdict.level.value,
    }


def incident_json(incident: Incident, *, started_ns: int) -> dict[str, Any]:
    """One incident of a run that started at `started_ns` (CLOCK_REALTIME nanoseconds)."""
    return {
        "id": incident.id,
        "class": incident.cls.value,
        "rule": incident.rule,
        "outcome": incident.outcome.value,
        "severity": incident.severity,
        "severity_word": severity_word(incident.severity),
        "at": rfc3339(started_ns + incident.at_ns),
        "phase": incident.phase.value,
        "exec": incident.exec,
        "process": {
            "exe": as_text(incident.process.exe),
            "argv": [as_text(word) for word in incident.process.argv],
            "pid": incident.process.pid,
            "ancestry": [as_text(exe) for exe in incident.process.ancestry],
        },
        "object": as_text(incident.object),
        "evidence": [_evidence(event, started_ns) for event in incident.evidence[:MAX_EVIDENCE]],
        "evidence_total": len(incident.evidence),
        "explanation": as_text(incident.explanation),
        "references": list(incident.references),
        "penalty": _number(incident.penalty),
        "counted": incident.counted,
        "accident": incident.accident,
        "rewarded": incident.rewarded,
        "occurrences": incident.occurrences,
    }


def _evidence(event: Event, started_ns: int) -> dict[str, Any]:
    record = {key: as_text(value) if isinstance(value, str) else value for key, value in event.to_record().items()}
    return {"at": rfc3339(started_ns + event.at_ns), **record}


def _transfer(report: TransferReport) -> dict[str, Any]:
    return {
        "state": report.state,
        "written": report.written,
        "removed": report.removed,
        "refused": [{"path": as_text(r.path), "why": r.why} for r in report.refused],
        "refused_total": max(report.refused_total, len(report.refused)),
        "pack": None if report.pack is None else _path(report.pack),
        "apply": [as_text(word) for word in report.apply_command],
        "why": as_text(report.why),
    }


def _number(value: float) -> float | int:
    """Never a negative zero: a clean run's penalty is exactly 0."""
    return value + 0


def _path(path: Path) -> str:
    return escape_bytes(os.fsencode(path))


def as_text(text: str) -> str:
    """Text that is escaped already passes as it is; a stray surrogate (from an argument) becomes its escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return escape_bytes(text.encode("utf-8", "surrogateescape" if _only_escapes(text) else "surrogatepass"))
    return text


def _only_escapes(text: str) -> bool:
    return all(not "\ud800" <= c <= "\udfff" or "\udc80" <= c <= "\udcff" for c in text)


def to_bytes(value: Mapping[str, Any], *, indent: int | None = 2) -> bytes:
    """JSON text in ASCII: whatever a terminal or a pager might act on is escaped. Raises ValueError for NaN."""
    return (json.dumps(value, indent=indent, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def write_atomic(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace `path` by a 0600 file with `data`: whoever looks sees the old or the new. A path that exists and is no
    regular file (a fifo, /dev/stderr) is written to as it is. Raises: UsageError naming the path.
    """
    try:
        try:
            special = not stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            special = False
        if special:
            with path.open("wb", buffering=0) as stream:
                _write_all(stream.fileno(), data)
            return
        with new_file(path, sync=sync) as fd:
            _write_all(fd, data)
    except OSError as err:
        raise UsageError(f"cannot write {_path(path)}: {err.strerror}", hint="name a writable place") from err


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]
