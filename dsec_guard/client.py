"""Use dsec-guard from a trainer: pure Python 3.10+, standard library only, nothing native.

    from dsec_guard import client

    result = client.run(["python3", "solve.py"], policy="swe-task", workspace="/tmp/task-17")
    if result.valid:
        train(reward=result.fold(task_reward))

`run` calls the `dsec-guard` command, which may live in another environment (the guard itself wants Python 3.11).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_guard.errors import DsecGuardError, RecordError, UsageError
from dsec_guard.model import Class, ExitReason, Level, Outcome, Validity, VerdictClass, unescape_bytes

RESULT_SCHEMA = "dsec-guard/result/v1"
MAX_RESULT_BYTES = 64 << 20
STOP_GRACE_S = 15.0


class GuardFailed(DsecGuardError):
    """dsec-guard itself failed (exit status 125); nothing is known about the command. `result` is set when a result
    was written all the same."""

    def __init__(self, message: str, *, hint: str = "", result: GuardedResult | None = None) -> None:
        super().__init__(message, hint=hint)
        self.result = result


class GuardNotFound(DsecGuardError):
    """There is no `dsec-guard` command here."""


class GuardTimeout(DsecGuardError):
    """`timeout` passed; the run was stopped. `result` is what it wrote when it was told to end, or None."""

    def __init__(self, message: str, *, result: GuardedResult | None = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class ExitStatus:
    """How the command ended; `reason` is the authority, code or signal are None where they do not apply."""

    reason: ExitReason
    code: int | None
    signal: int | None


@dataclass(frozen=True)
class GuardedIncident:
    """One incident of a result. `raw` is the whole record, evidence included; text in it is escaped."""

    id: str
    cls: Class
    rule: str
    outcome: Outcome
    severity: int
    object: str
    explanation: str
    penalty: float
    counted: bool
    accident: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class GuardedVerdict:
    cls: VerdictClass
    outcome: Outcome | None
    severity: int
    validity: Validity
    complete: bool
    reasons: tuple[str, ...]
    level: Level


@dataclass(frozen=True)
class GuardedResult:
    """The result of one run. `reward` has the same ten `dsec_...` keys always; `raw` is the whole result JSON.

    stdout, stderr: what `run` captured of the command's, else empty.
    """

    run_id: str
    exit: ExitStatus
    verdict: GuardedVerdict
    incidents: tuple[GuardedIncident, ...]
    reward: Mapping[str, float]
    flags: tuple[str, ...]
    raw: Mapping[str, Any]
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def argv(self) -> tuple[bytes, ...]:
        return tuple(unescape_bytes(word) for word in self.raw["argv"])

    @property
    def penalty(self) -> float:
        """<= 0; exactly 0 for a clean run."""
        return self.reward["dsec_penalty"]

    @property
    def valid(self) -> bool:
        """Whether the sample may be trained on; if not, mask it."""
        return bool(self.reward["dsec_valid"])

    @property
    def clean(self) -> bool:
        return self.verdict.cls is VerdictClass.CLEAN

    def fold(self, task_reward: float) -> float | None:
        """The reward to train on: the penalty, plus the task's reward unless a cheat got through; None for an invalid
        sample. A policy in `observe` mode changes nothing. Raises: ValueError for a task reward that is not finite.
        """
        if not math.isfinite(task_reward):
            raise ValueError(f"the task reward must be finite, got {task_reward}")
        if not self.valid:
            return None
        observing = self.raw["policy"].get("mode") == "observe"
        cheated = any(
            i.cls in (Class.ANSWER_PEEK, Class.TAMPER, Class.ESCAPE_ATTEMPT) and i.outcome is not Outcome.ATTEMPTED
            and i.raw.get("rewarded", True)
            for i in self.incidents
        )
        return self.penalty + (0.0 if cheated and not observing else task_reward)


def run(
    argv: Sequence[str | bytes | os.PathLike[str]],
    *,
    policy: str | os.PathLike[str] = "untrusted-script",
    workspace: str | os.PathLike[str] | None = None,
    bind_ro: Sequence[str | os.PathLike[str]] = (),
    env: Mapping[str, str] | None = None,
    wall: str | None = None,
    limits: Mapping[str, str] | None = None,
    level: Level | str | None = None,
    keep: str = "keep",
    pack: str | os.PathLike[str] | None = None,
    collect: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    task_reward: float | None = None,
    labels: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    capture: bool = True,
    timeout: float | None = None,
    command: Sequence[str | os.PathLike[str]] | None = None,
) -> GuardedResult:
    """Run `argv` in a box and return what it came to.

    policy, workspace, ...: the options of `dsec-guard run`. workspace: a directory that is given here counts as named;
    None is the current directory. keep: `keep`, `always`, `discard`, or `pack` with the file in `pack`. stdin: bytes
    for the command, None for no input. capture: keep its stdout and stderr (both bounded by the policy's output limit),
    else they go where ours go. timeout: seconds, for the guard as a whole; the policy's wall-clock limit is the ordinary
    way to bound the command. command: how to call dsec-guard; default: the one beside this Python, else from PATH.

    An incident is no exception. Raises: GuardFailed, GuardNotFound, GuardTimeout, UsageError for bad arguments.
    """
    words = [_word(w) for w in _command(command)]
    words += [b"run", b"--no-summary", b"--policy", _word(policy)]
    for option, value in (("--workspace", workspace), ("--wall", wall), ("--collect", collect), ("--record", record)):
        if value is not None:
            words += [option.encode(), _word(value)]
    if level is not None:
        words += [b"--level", Level(level).value.encode()]
    if task_reward is not None:
        words += [b"--task-reward", repr(float(task_reward)).encode()]
    for option, pairs in (("--env", env), ("--limit", limits), ("--label", labels)):
        for name, value in (pairs or {}).items():
            words += [option.encode(), os.fsencode(f"{name}={value}")]
    for path in bind_ro:
        words += [b"--bind-ro", _word(path)]
    words += _keep_words(keep, pack)
    with tempfile.TemporaryDirectory(prefix="dsec-guard-") as directory:
        report = Path(directory) / "result.json"
        words += [b"--report", os.fsencode(report), b"--", *(_word(w) for w in argv)]
        return _call(words, report, stdin=stdin, capture=capture, timeout=timeout)


def load_result(path: str | os.PathLike[str], *, stdout: bytes = b"", stderr: bytes = b"") -> GuardedResult:
    """Read a result that `dsec-guard run --report FILE` wrote. Raises: RecordError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_RESULT_BYTES + 1)
    except OSError as err:
        raise RecordError(f"cannot read {os.fspath(path)}: {err.strerror}") from err
    if len(data) > MAX_RESULT_BYTES:
        raise RecordError(f"{os.fspath(path)} is larger than {MAX_RESULT_BYTES} bytes")
    try:
        return parse_result(json.loads(data), stdout=stdout, stderr=stderr)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise RecordError(f"{os.fspath(path)} is no result of this version: {type(err).__name__}: {err}") from err


def parse_result(raw: Mapping[str, Any], *, stdout: bytes = b"", stderr: bytes = b"") -> GuardedResult:
    """Typed view of a result's JSON. Raises: KeyError, TypeError, ValueError for anything else."""
    if raw["schema"] != RESULT_SCHEMA:
        raise ValueError(f"schema {raw['schema']!r}, want {RESULT_SCHEMA}")
    end, verdict, reward = raw["exit"], raw["verdict"], raw["reward"]
    if not {"dsec_penalty", "dsec_valid"} <= reward.keys():
        raise ValueError("no dsec_penalty or dsec_valid among the rewards")
    return GuardedResult(
        run_id=raw["run_id"],
        exit=ExitStatus(reason=ExitReason(end["reason"]), code=end["code"], signal=end["signal"]),
        verdict=GuardedVerdict(
            cls=VerdictClass(verdict["class"]),
            outcome=None if verdict["outcome"] is None else Outcome(verdict["outcome"]),
            severity=int(verdict["severity"]), validity=Validity(verdict["validity"]),
            complete=bool(verdict["complete"]), reasons=tuple(verdict["reasons"]), level=Level(verdict["level"]),
        ),
        incidents=tuple(
            GuardedIncident(
                id=i["id"], cls=Class(i["class"]), rule=i["rule"], outcome=Outcome(i["outcome"]),
                severity=int(i["severity"]), object=i["object"], explanation=i["explanation"],
                penalty=float(i["penalty"]), counted=bool(i["counted"]), accident=bool(i["accident"]), raw=i,
            )
            for i in raw["incidents"]
        ),
        reward={str(k): v for k, v in reward.items()},
        flags=tuple(raw["flags"]), raw=raw, stdout=stdout, stderr=stderr,
    )


def _word(value: str | bytes | os.PathLike[str]) -> bytes:
    word = os.fsencode(value)
    if b"\0" in word:
        raise UsageError(f"a NUL byte in {word[:40]!r}")
    return word


def _keep_words(keep: str, pack: str | os.PathLike[str] | None) -> list[bytes]:
    if (keep == "pack") != (pack is not None):
        raise UsageError("keep='pack' and pack=FILE belong together")
    if pack is not None:
        return [b"--pack", _word(pack)]
    words = {"keep": [b"--keep"], "always": [b"--keep=always"], "discard": [b"--discard"]}
    if keep not in words:
        raise UsageError(f"keep={keep!r}: want keep, always, discard or pack")
    return words[keep]


def _command(command: Sequence[str | os.PathLike[str]] | None) -> Sequence[str | os.PathLike[str]]:
    if command is not None:
        if not command:
            raise UsageError("command is empty")
        return command
    beside = Path(sys.executable).with_name("dsec-guard")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("dsec-guard")
    if found is None:
        raise GuardNotFound("there is no dsec-guard command", hint="pip install 'dsec-guard[guard]', or pass command=[...]")
    return [found]


def _call(words: list[bytes], report: Path, *, stdin: bytes | None, capture: bool,
          timeout: float | None) -> GuardedResult:
    sink = subprocess.PIPE if capture else None
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                                   stdout=sink, stderr=sink)
    except FileNotFoundError as err:
        raise GuardNotFound(f"cannot run {os.fsdecode(words[0])}: {err.strerror}") from err
    except OSError as err:
        raise GuardFailed(f"cannot run {os.fsdecode(words[0])}: {err.strerror}") from err
    try:
        out, errors = process.communicate(stdin, timeout)
    except subprocess.TimeoutExpired:
        out, errors = _stop(process)
        result = load_result(report, stdout=out, stderr=errors) if report.exists() else None
        raise GuardTimeout(f"no result within {timeout} s; the run was stopped", result=result) from None
    except BaseException:
        _stop(process)
        raise
    result = load_result(report, stdout=out or b"", stderr=errors or b"") if report.exists() else None
    if result is None or result.exit.reason is ExitReason.GUARD_ERROR:
        message, hint = _failure(errors or b"", process.returncode, result)
        raise GuardFailed(message, hint=hint, result=result)
    return result


def _stop(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Tell the guard to end (twice means at once), then make sure of it. Returns what was still captured."""
    for number, wait_s in ((signal.SIGTERM, STOP_GRACE_S / 2), (signal.SIGTERM, STOP_GRACE_S / 2), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            out, errors = process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            continue
        return out or b"", errors or b""
    return b"", b""


def _failure(errors: bytes, status: int, result: GuardedResult | None) -> tuple[str, str]:
    """Message and hint of a failed guard: from the result, else from the lines it wrote to stderr."""
    if result is not None and (said := result.raw.get("error")):
        return str(said["message"]), str(said["hint"])
    lines = errors.decode("utf-8", "replace").splitlines()
    message = "\n".join(x[len("dsec-guard: "):] for x in lines if x.startswith("dsec-guard: "))
    hint = "\n".join(x[len("  next: "):] for x in lines if x.startswith("  next: "))
    return message or f"dsec-guard ended with status {status} and wrote no result", hint
