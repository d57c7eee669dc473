"""Shared stand-ins: the outcome of a run that never was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec_guard.model import (
    Class,
    ExitReason,
    Incident,
    Layer,
    LayerState,
    Level,
    Outcome,
    Phase,
    ProcessInfo,
    RewardInfo,
    SyscallSeen,
    Validity,
    Verdict,
    VerdictClass,
)
from dsec_guard.service.request import ExitInfo, MonitorStats, RunOutcome, Usage

STARTED_NS = 1_780_000_000_123_456_789


@pytest.fixture
def make_incident() -> Callable[..., Incident]:
    def make(**changes: Any) -> Incident:
        event = SyscallSeen(seq=7, at_ns=1_500_000_000, tgid=4242, tid=4242, comm="python3", name="mount", nr=165,
                            args=(1, 2, 3, 4, 5, 1 << 63), ret=-1, path="/mnt", raw_path="/mnt")
        values: dict[str, Any] = {
            "id": "0123456789abcdef0123456789abcdef", "cls": Class.ESCAPE_ATTEMPT, "rule": "escape.mount",
            "outcome": Outcome.ATTEMPTED, "severity": 7, "at_ns": 1_500_000_000, "phase": Phase.AGENT, "exec": 1,
            "process": ProcessInfo(exe="/usr/bin/python3", argv=("python3", "x.py"), pid=4242, ancestry=("/bin/sh",)),
            "object": "/mnt", "evidence": (event,), "explanation": "mount was refused with EPERM",
            "references": ("mount(2)",), "penalty": -0.3, "counted": True,
        }
        return Incident(**{**values, **changes})

    return make


@pytest.fixture
def make_outcome(make_incident: Callable[..., Incident]) -> Callable[..., RunOutcome]:
    """A clean run, or with `bad=True` one with an incident; any field can be changed by name."""

    def make(*, bad: bool = False, **changes: Any) -> RunOutcome:
        values: dict[str, Any] = {
            "run_id": "r-20260528-203320-0123abcd", "run_dir": Path("/var/lib/dsec-guard/runs/r-20260528-203320-0123abcd"),
            "policy_name": "untrusted-script", "policy_digest": "ab" * 32, "argv": (b"python3", b"x\xff.py"),
            "exit": ExitInfo(reason=ExitReason.EXITED, code=0),
            "verdict": Verdict(cls=VerdictClass.CLEAN, outcome=None, severity=0, validity=Validity.OK, complete=True),
            "reward": RewardInfo(), "started_ns": STARTED_NS, "exited_ns": STARTED_NS + 1_900_000_000,
            "ended_ns": STARTED_NS + 2_000_000_000,
            "layers": (Layer("seccomp", LayerState.ENFORCED), Layer("bpf_lsm", LayerState.MISSING, "EPERM", optional=True)),
            "monitor": MonitorStats(level=Level.FULL, events=12), "usage": Usage(wall_s=2.0, cpu_s=0.5),
        }
        if bad:
            values["incidents"] = (make_incident(),)
            values["verdict"] = Verdict(cls=VerdictClass.ESCAPE_ATTEMPT, outcome=Outcome.ATTEMPTED, severity=7,
                                        validity=Validity.AGENT_FAULT, complete=True)
            values["reward"] = RewardInfo(penalty=-0.3, escape=1, severity=7, incidents=1)
        return RunOutcome(**{**values, **changes})

    return make
