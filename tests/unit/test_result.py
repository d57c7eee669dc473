"""The result JSON and the summary for people."""

from __future__ import annotations

import io
import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.incident.result import result_json, rfc3339, to_bytes, write_atomic
from dsec_guard.incident.summary import print_summary
from dsec_guard.model import (
    ExitReason,
    Layer,
    LayerState,
    ProcessInfo,
    RewardInfo,
    Validity,
    Verdict,
    VerdictClass,
    unescape_bytes,
)
from dsec_guard.service.request import ExitInfo, RefusedPath, TransferReport

PROMISED = {
    "": {"schema", "run_id", "policy", "argv", "exit", "layers", "monitor", "usage", "flags", "incidents", "verdict",
         "reward", "fold"},
    "policy": {"name", "digest"},
    "exit": {"code", "signal", "reason"},
    "monitor": {"level", "events", "lost", "over_budget"},
    "usage": {"wall_s", "cpu_s", "memory_peak", "pids_peak", "disk_bytes", "files", "output_bytes"},
    "verdict": {"class", "outcome", "severity", "severity_word", "validity", "complete", "reasons", "level"},
    "reward": {"dsec_penalty", "dsec_valid", "dsec_escape", "dsec_peek", "dsec_tamper", "dsec_exfil", "dsec_crash",
               "dsec_severity", "dsec_incidents", "dsec_events_lost"},
}
PROMISED_INCIDENT = {"id", "class", "rule", "outcome", "severity", "severity_word", "at", "phase", "exec", "process", "object",
                     "evidence", "explanation", "references", "penalty", "counted", "accident"}


@pytest.mark.parametrize("bad", [False, True])
def test_promised_keys_are_there(make_outcome, bad):
    result = json.loads(to_bytes(result_json(make_outcome(bad=bad))))
    for key, names in PROMISED.items():
        assert names <= set(result[key] if key else result), key
    assert set(result["reward"]) == PROMISED["reward"]
    assert all({"name", "state", "detail"} <= set(layer) for layer in result["layers"])
    assert len(result["incidents"]) == bad
    for incident in result["incidents"]:
        assert set(incident) >= PROMISED_INCIDENT
        assert set(incident["process"]) == {"exe", "argv", "pid", "ancestry"}


def test_a_clean_run_costs_exactly_nothing(make_outcome):
    text = to_bytes(result_json(make_outcome(reward=RewardInfo(penalty=-0.0), fold=-0.0)))
    result = json.loads(text)
    assert b"-0.0" not in text
    assert result["reward"]["dsec_penalty"] == 0
    assert math.copysign(1, result["fold"]) == 1


def test_times_are_rfc3339_and_incidents_count_from_the_start(make_outcome):
    result = result_json(make_outcome(bad=True))
    assert result["started"] == "2026-05-28T20:26:40.123456Z"
    assert result["incidents"][0]["at"] == "2026-05-28T20:26:41.623456Z"
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"


def test_bytes_that_are_no_utf8_are_escaped_reversibly(make_outcome):
    result = json.loads(to_bytes(result_json(make_outcome(argv=(b"a\\b\xff\x1b", "ü".encode()),
                                                          labels={"k": os.fsdecode(b"\xfe")}, warnings=("\ud800",)))))
    assert [unescape_bytes(w) for w in result["argv"]] == [b"a\\b\xff\x1b", "ü".encode()]
    assert unescape_bytes(result["labels"]["k"]) == b"\xfe"


def test_json_is_ascii_and_refuses_nan(make_outcome):
    text = to_bytes(result_json(make_outcome(bad=True, argv=("\x9b31m\u202e".encode(),))))
    assert text.isascii()
    assert b"\x1b" not in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_bytes(result_json(make_outcome(fold=math.nan)))


def test_evidence_is_cut_and_counted(make_outcome, make_incident):
    event = make_incident().evidence[0]
    incident = make_incident(evidence=tuple(replace(event, seq=n) for n in range(100)))
    shown = result_json(make_outcome(bad=True, incidents=(incident,)))["incidents"][0]
    assert shown["evidence_total"] == 100
    assert [e["seq"] for e in shown["evidence"]] == list(range(16))


def test_write_is_atomic_private_and_leaves_nothing(tmp_path: Path, monkeypatch):
    target = tmp_path / "r.json"
    target.write_text("old")
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(UsageError, match="No space left"):
        write_atomic(target, b"newer")
    monkeypatch.undo()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["r.json"]


def test_write_to_a_fifo_goes_through(tmp_path: Path):
    fifo = tmp_path / "f"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(fifo, b"x")
    assert os.read(reader, 10) == b"x"
    os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)


# --------------------------------------------------------------------------------------------------------- summary


def summary(outcome, *, columns: int = 80, **options) -> str:
    out = io.StringIO()
    old = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        print_summary(outcome, file=out, **options)
    finally:
        if old is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = old
    return out.getvalue()


def test_a_clean_run_is_one_line(make_outcome):
    text = summary(make_outcome())
    assert text.count("\n") == 1
    assert "clean" in text
    assert "/var/lib/dsec-guard/runs/r-" in text


def test_quiet_is_silent_unless_something_happened(make_outcome):
    assert summary(make_outcome(), quiet=True) == ""
    assert summary(make_outcome(flags=("output",)), quiet=True) == ""
    assert "escape.mount" in summary(make_outcome(bad=True), quiet=True)
    absent = ExitInfo(reason=ExitReason.NOT_FOUND, code=127)
    assert "not found inside the box" in summary(make_outcome(exit=absent), quiet=True)
    withheld = TransferReport(state="withheld", pack=Path("/p"), apply_command=("dsec-guard", "apply", "/p"))
    assert "dsec-guard apply /p" in summary(make_outcome(write_back=withheld), quiet=True)
    inconclusive = Verdict(cls=VerdictClass.INCONCLUSIVE, outcome=None, severity=0, validity=Validity.UNKNOWN,
                           complete=False, reasons=("12 events lost",))
    assert "12 events lost" in summary(make_outcome(verdict=inconclusive), quiet=True)


def test_incidents_say_what_why_and_what_it_costs(make_outcome):
    text = summary(make_outcome(bad=True), report_file=Path("/tmp/r.json"))
    for part in ("escape_attempt", "attempted", "severity 7 (high)", "escape.mount", "/usr/bin/python3", "4242", "/mnt",
                 "mount was refused with EPERM", "-0.30", "/tmp/r.json", "/var/lib/dsec-guard/runs/r-"):
        assert part in text, part


def test_weaker_layers_show_but_optional_ones_do_not(make_outcome):
    layers = (Layer("landlock", LayerState.WEAKENED, "ABI 4"), Layer("bpf_lsm", LayerState.MISSING, "", optional=True))
    text = summary(make_outcome(layers=layers))
    assert "landlock weakened (ABI 4)" in text
    assert "bpf_lsm" not in text


def test_what_the_agent_chose_cannot_reach_the_terminal_or_the_markup(make_outcome, make_incident):
    evil = "/x[bold red]\x1b]0;owned\x07\x9b2J\u202e[/bold red][link=http://e]"
    incident = make_incident(object=evil, explanation=evil, process=ProcessInfo(exe=evil, argv=(evil,), pid=1))
    text = summary(make_outcome(bad=True, incidents=(incident,), argv=(evil.encode(),),
                                exit=ExitInfo(reason=ExitReason.NOT_FOUND, code=127), warnings=(evil,),
                                write_back=TransferReport(state="partial", refused=(RefusedPath(path=evil, why="fifo"),))),
                   columns=200)
    assert "[bold red]" in text  # shown as it is, not obeyed
    assert "[link=http://e]" in text
    assert all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("columns", [40, 80])
def test_lines_fit_the_terminal(make_outcome, make_incident, columns):
    incident = make_incident(explanation="word " * 60, object="/a" * 90)
    text = summary(make_outcome(bad=True, incidents=(incident,)), columns=columns)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  run ")) <= columns
    assert "  run        /var/lib/dsec-guard/runs/r-20260528-203320-0123abcd\n" in text  # whole, for the clipboard


def test_no_colour_without_a_terminal(make_outcome):
    assert "\x1b" not in summary(make_outcome(bad=True))


def test_many_incidents_are_cut_worst_first(make_outcome, make_incident):
    incidents = tuple(make_incident(id=f"{n:032x}", severity=n % 10 + 1, rule=f"escape.r{n}") for n in range(20))
    text = summary(make_outcome(bad=True, incidents=incidents))
    assert "and 12 more" in text
    assert text.index("escape.r9") < text.index("escape.r8")
    assert "escape.r0 " not in text


def test_a_reader_that_is_gone_is_no_error(make_outcome):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", closefd=False) as gone:
        print_summary(make_outcome(bad=True), file=gone)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, write_end)  # what is still buffered must not fail on close
        os.close(null)
    os.close(write_end)
