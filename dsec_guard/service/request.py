"""What a guarded run is asked to do, and what it came to: the shapes between command line, SDK and guard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_guard.errors import UsageError
from dsec_guard.model import ExitReason, Incident, Layer, Level, RewardInfo, Verdict

if TYPE_CHECKING:
    from dsec_guard.policy.schema import Policy

MAX_REWARD_TEXT = 64


class KeepMode(str, Enum):
    """What becomes of the changes in the workspace."""

    KEEP = "keep"            # written back unless an incident is high or worse, or the guard failed
    KEEP_ALWAYS = "always"   # written back whatever was found
    DISCARD = "discard"
    PACK = "pack"            # into RunRequest.pack_file, never written back


@dataclass(frozen=True, kw_only=True)
class BindRequest:
    """`source`: an existing absolute host path. `target`: absolute, as seen inside."""

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One command under one policy. The policy is final: limits and level of the command line are already in it.

    workspace: absolute directory, None for a box without one. workspace_named: the user named it, so that `/` and
    $HOME are not refused again. env: added to (and winning over) the policy's environment. wall_ms: None = the
    policy's limit. task_reward, task_reward_file: for `fold`, see `known_task_reward`. report_file and fail_on are the
    caller's business after the run, everything else the guard's.
    """

    policy: Policy
    argv: tuple[bytes, ...]
    workspace: Path | None = None
    workspace_named: bool = False
    bind_ro: tuple[BindRequest, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    wall_ms: int | None = None
    level: Level | None = None
    tty: bool = False
    keep: KeepMode = KeepMode.KEEP
    pack_file: Path | None = None
    collect_dir: Path | None = None
    record_file: Path | None = None
    report_file: Path | None = None
    task_reward: float | None = None
    task_reward_file: Path | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    fail_on: frozenset[str] = frozenset()

    def known_task_reward(self) -> float | None:
        """The task's own reward once the command has ended and before anything is written back: the number given, or
        the one in `task_reward_file`, read now; None when none was asked for. Raises: UsageError for a file that is
        missing or holds anything but one finite number."""
        if self.task_reward_file is None:
            return self.task_reward
        try:
            with self.task_reward_file.open("rb") as file:
                text = file.read(MAX_REWARD_TEXT + 1)
        except OSError as err:
            raise UsageError(f"cannot read the task reward {self.task_reward_file}: {err.strerror}") from err
        return parse_reward(text.decode("ascii", "replace"), str(self.task_reward_file))


def parse_reward(text: str, where: str) -> float:
    """One finite number. Raises: UsageError that names `where` it came from."""
    try:
        value = float(text) if len(text) <= MAX_REWARD_TEXT else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where} holds no finite number", hint="a number such as 0.75, or a file that holds one")
    return value


@dataclass(frozen=True, kw_only=True)
class ExitInfo:
    """code: 0..255 for an exit, signal: 1..64 for an end by signal, else None. reason is the authority."""

    reason: ExitReason
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, kw_only=True)
class MonitorStats:
    """level: what was watched (None: no monitor). events: taken in. lost: dropped by rings. over_budget: beyond the
    box's own event budget."""

    level: Level | None = None
    events: int = 0
    lost: int = 0
    over_budget: int = 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Seconds, bytes and counts; 0 where the host cannot tell."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_peak: int = 0
    pids_peak: int = 0
    disk_bytes: int = 0
    files: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RefusedPath:
    """`path` is escaped text (see model.escape_bytes), `why` a short fixed word."""

    path: str
    why: str


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What a write-back or a collection did.

    state: applied | discarded | packed | withheld | partial | collected | failed | none. pack: the file that holds the
    changes, if any. apply_command: words that would apply the pack. refused: at most the first 1,000, the count is
    `refused_total`.
    """

    state: str = "none"
    written: int = 0
    removed: int = 0
    refused: tuple[RefusedPath, ...] = ()
    refused_total: int = 0
    pack: Path | None = None
    apply_command: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """All a result is made from.

    Times are CLOCK_REALTIME nanoseconds: exited_ns is when the guard knew of the command's end, ended_ns when it had judged;
    events count from `started_ns`. flags: timeout, oom, pids, disk, files, output ... error and hint: of a guard failure,
    else empty.
    """

    run_id: str
    run_dir: Path | None
    policy_name: str
    policy_digest: str
    argv: tuple[bytes, ...]
    exit: ExitInfo
    verdict: Verdict
    reward: RewardInfo
    started_ns: int
    exited_ns: int
    ended_ns: int
    mode: str = "enforce"
    layers: tuple[Layer, ...] = ()
    monitor: MonitorStats = MonitorStats()
    usage: Usage = Usage()
    flags: tuple[str, ...] = ()
    incidents: tuple[Incident, ...] = ()
    task_reward: float | None = None
    fold: float | None = None
    workspace: Path | None = None
    write_back: TransferReport = TransferReport()
    collect: TransferReport = TransferReport()
    record_file: Path | None = None
    stdio: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""
