"""`dsec-guard run`: one command in a box. Parses, calls the guard, reports."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsec_guard.cli.options import (
    EXIT_FAIL_ON,
    EXIT_GUARD_ERROR,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_WALL_LIMIT,
    guard_errors,
    output_path,
    parse_env,
    parse_labels,
    parse_pairs,
    report_error,
    say,
    write_stdout,
)
from dsec_guard.errors import DsecGuardError, UsageError
from dsec_guard.model import Class, ExitReason, Level, RewardInfo, Validity, Verdict, VerdictClass
from dsec_guard.service.request import (
    BindRequest,
    ExitInfo,
    KeepMode,
    RunOutcome,
    RunRequest,
    TransferReport,
    parse_reward,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_guard.policy.schema import Policy

FAIL_ON = ("any", *(c.value for c in Class), VerdictClass.INCONCLUSIVE.value)


class RunCommand(click.Command):
    """`--keep` may stand alone or as `--keep=always`; click would take the command's name as its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {name: not p.is_flag for p in self.params if isinstance(p, click.Option) for name in p.opts}
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] == "--keep":
                args[position] = "--keep=keep"
            position += 2 if "=" not in args[position] and takes_value.get(args[position], False) else 1
        return super().parse_args(ctx, args)


@click.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
@click.option("--policy", "policy_name", metavar="NAME|FILE", default="untrusted-script", show_default=True,
              help="A shipped policy's name or a YAML file.")
@click.option("--workspace", metavar="DIR", type=click.Path(path_type=Path),
              help="The directory to work on, copy-on-write.  [default: the current directory]")
@click.option("--bind-ro", metavar="PATH[:INSIDE]", multiple=True, help="Show a host path inside, read-only.")
@click.option("--env", metavar="K[=V]", multiple=True, help="Set a variable inside; without =V pass on the one here.")
@click.option("--wall", metavar="DUR", help="End the command after this time, such as 90s or 30min.")
@click.option("--limit", metavar="NAME=VALUE", multiple=True, help="Tighten a limit of the policy.")
@click.option("--level", type=click.Choice([x.value for x in Level]), help="How closely to watch.")
@click.option("--tty", is_flag=True, help="Give the command a terminal of its own.")
@click.option("--keep", metavar="[=always]", type=click.Choice(["keep", "always"]),
              help="Write changes back to the workspace unless an incident is high or worse (the default); "
                   "with =always in any case.")
@click.option("--discard", is_flag=True, help="Drop the changes.")
@click.option("--pack", metavar="FILE", type=click.Path(path_type=Path), help="Pack the changes into FILE instead.")
@click.option("--collect", metavar="DIR", type=click.Path(path_type=Path), help="Copy the policy's deliverables there.")
@click.option("--record", metavar="FILE", type=click.Path(path_type=Path),
              help="Write the event records (JSON Lines; compressed if FILE ends in .zst).")
@click.option("--report", metavar="FILE", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option("--task-reward", metavar="NUMBER|FILE", help="The task's own reward, for `fold`.")
@click.option("--label", metavar="K=V", multiple=True, help="Put a label into the records.")
@click.option("--fail-on", metavar="CLASS|any", multiple=True, type=click.Choice(FAIL_ON),
              help="Exit 10 after such an incident if the command itself exited 0.")
@click.option("--json", "as_json", is_flag=True, help="Print the result on stdout; the command's stdout goes to stderr.")
@click.option("--quiet", is_flag=True, help="No summary unless there is an incident or a failure.")
@click.option("--no-summary", is_flag=True, hidden=True, help="No summary at all.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@guard_errors
def run(as_json: bool, quiet: bool, no_summary: bool, **options: Any) -> None:
    """Run ARGV in a box, watch it, and judge what it did.

    Exit status: ARGV's own; 128+N after signal N; 124 wall-clock limit; 125 dsec-guard failed; 126 not executable;
    127 not found inside; 10 see --fail-on.
    """
    from dsec_guard.sandbox.stdio import fill_closed_stdio

    fill_closed_stdio()
    request = build_request(**options)
    outcome = run_guarded(request, as_json=as_json, quiet=quiet or no_summary)
    status = report(outcome, request, as_json=as_json, quiet=quiet, summary=not no_summary)
    sys.exit(status)


# --------------------------------------------------------------------------------------------------------- request


def build_request(*, policy_name: str, argv: tuple[str, ...], workspace: Path | None, bind_ro: tuple[str, ...],
                  env: tuple[str, ...], wall: str | None, limit: tuple[str, ...], level: str | None, tty: bool,
                  keep: str | None, discard: bool, pack: Path | None, collect: Path | None, record: Path | None,
                  report: Path | None, task_reward: str | None, label: tuple[str, ...],
                  fail_on: tuple[str, ...]) -> RunRequest:
    """Everything that can be wrong with the arguments is found here, before anything starts or is written.

    Raises: UsageError, PolicyError.
    """
    if not argv[0]:
        raise UsageError("the command is empty", hint="dsec-guard run -- COMMAND ARGUMENTS")
    if sum((keep is not None, discard, pack is not None)) > 1:
        raise UsageError("--keep, --discard and --pack exclude each other", hint="give one of them")
    mode = {None: KeepMode.KEEP, "keep": KeepMode.KEEP, "always": KeepMode.KEEP_ALWAYS}[keep]
    if discard:
        mode = KeepMode.DISCARD
    elif pack is not None:
        mode = KeepMode.PACK
    reward, reward_file = _task_reward(task_reward)
    outputs = {name: output_path(path, name) for name, path in (("--report", report), ("--record", record),
                                                                ("--pack", pack))}
    _distinct({**outputs, "--task-reward": reward_file})
    collect_dir = None if collect is None else Path(os.path.abspath(collect))
    if collect_dir is not None and collect_dir.exists() and not collect_dir.is_dir():
        raise UsageError(f"--collect {collect} is no directory")
    if collect_dir is not None and not collect_dir.parent.is_dir():
        raise UsageError(f"--collect {collect}: there is no directory {collect_dir.parent}",
                         hint=f"mkdir -p {collect_dir.parent}")
    variables, labels = parse_env(env), parse_labels(label)
    binds = tuple(_bind(word) for word in bind_ro)
    policy = _policy(policy_name, parse_pairs(limit, "--limit"), wall, level)
    if collect_dir is not None and not policy.deliverables:
        raise UsageError(f"--collect: the policy {policy.name} names no deliverables",
                         hint="add `deliverables: [PATTERN]` to the policy")
    return RunRequest(
        policy=policy, argv=tuple(os.fsencode(word) for word in argv),
        workspace=_workspace(workspace), workspace_named=workspace is not None, bind_ro=binds, env=variables,
        wall_ms=policy.limits.wall_time if wall is not None else None, level=Level(level) if level else None, tty=tty,
        keep=mode, pack_file=outputs["--pack"], collect_dir=collect_dir, record_file=outputs["--record"],
        report_file=outputs["--report"], task_reward=reward, task_reward_file=reward_file, labels=labels,
        fail_on=frozenset(fail_on),
    )


def _policy(name: str, limits: dict[str, str], wall: str | None, level: str | None) -> Policy:
    from dsec_guard.policy.load import load_policy, override_limits, with_level

    policy = load_policy(name)
    if wall is not None:
        if "wall_time" in limits:
            raise UsageError("--wall and --limit wall_time say the same thing", hint="give one of them")
        limits = {**limits, "wall_time": wall}
    if limits:
        policy = override_limits(policy, limits)
    return with_level(policy, Level(level)) if level else policy


def _workspace(named: Path | None) -> Path:
    from dsec_guard.sandbox.workspace import check_workspace

    if named is not None:
        return check_workspace(named, named=True).path
    try:
        current = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more", hint="cd elsewhere, or --workspace DIR") from None
    return check_workspace(current, named=False).path


def _bind(word: str) -> BindRequest:
    source, _, target = word.partition(":")
    if not target.startswith("/"):
        source, target = word, ""
    try:
        path = Path(source).resolve(strict=True)
    except OSError as err:
        raise UsageError(f"--bind-ro {word}: {err.strerror}", hint="name an existing path") from err
    inside = os.path.normpath(target or os.path.abspath(source))
    if inside == "/":
        raise UsageError(f"--bind-ro {word}: the root of the box is not for binding over", hint="PATH:/some/place")
    return BindRequest(source=path, target=inside)


def _task_reward(text: str | None) -> tuple[float | None, Path | None]:
    if text is None:
        return None, None
    try:
        float(text)
    except ValueError:
        path = Path(os.path.abspath(text))
        if not path.parent.is_dir() or path.is_dir():
            raise UsageError(f"--task-reward {text} is neither a number nor a file",
                             hint="a number such as 0.75, or a file that holds one when the command has ended") from None
        return None, path
    return parse_reward(text, "--task-reward"), None


def _distinct(paths: dict[str, Path | None]) -> None:
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path in seen and not path.is_char_device():
            raise UsageError(f"{seen[path]} and {option} name the same file {path}")
        seen[path] = option


# ------------------------------------------------------------------------------------------------------- execution


def run_guarded(request: RunRequest, *, as_json: bool, quiet: bool) -> RunOutcome:
    """One run in a guard of its own. A failure of the guard is an outcome too, so that it can be reported."""
    from dsec_guard.incident.store import new_run_id, state_path
    from dsec_guard.sandbox.stdio import BoxIO
    from dsec_guard.service.guard import Guard

    started_ns = time.time_ns()
    warn: Callable[[str], None] = (lambda _text: None) if quiet else (lambda text: say(f"warning: {text}"))
    try:
        # The terminal is given back last, after whatever the guard still has to clean up.
        with (BoxIO(stdin=0, stdout=2 if as_json else 1, stderr=2, tty=request.tty) as io,
              Guard.open(state_path(), on_warning=warn) as guard):
            return guard.run(request, io)
    except DsecGuardError as err:
        return failed_outcome(request, err, run_id=new_run_id(started_ns), started_ns=started_ns)


def failed_outcome(request: RunRequest, err: DsecGuardError, *, run_id: str, started_ns: int) -> RunOutcome:
    """The outcome of a run that dsec-guard could not start or finish: nothing is known about the command."""
    policy, now_ns = request.policy, time.time_ns()
    return RunOutcome(
        run_id=run_id, run_dir=None, policy_name=policy.name, policy_digest=policy.digest, mode=policy.mode.value,
        argv=request.argv, exit=ExitInfo(reason=ExitReason.GUARD_ERROR),
        verdict=Verdict(cls=VerdictClass.INCONCLUSIVE, outcome=None, severity=0, validity=Validity.INFRA_FAULT,
                        complete=False, reasons=(str(err),), level=policy.monitor.level),
        reward=RewardInfo(valid=0), started_ns=started_ns, exited_ns=now_ns, ended_ns=now_ns,
        workspace=request.workspace,
        task_reward=request.task_reward, write_back=TransferReport(state="none", why="the guard failed"),
        labels=request.labels, error=str(err), hint=err.hint,
    )


# ---------------------------------------------------------------------------------------------------------- report


def report(outcome: RunOutcome, request: RunRequest, *, as_json: bool, quiet: bool, summary: bool) -> int:
    """Write what was asked for and say what happened. Returns the exit status."""
    from dsec_guard.incident.result import result_json, to_bytes, write_atomic

    status = exit_status(outcome, request.fail_on)
    data = to_bytes(result_json(outcome))
    if request.report_file is not None:
        try:
            write_atomic(request.report_file, data)
        except UsageError as err:
            report_error(err)
            status = EXIT_GUARD_ERROR
    if outcome.error:
        report_error(DsecGuardError(outcome.error, hint=outcome.hint))
    if summary and not (outcome.error and outcome.run_dir is None):
        from dsec_guard.incident.summary import print_summary

        print_summary(outcome, quiet=quiet, report_file=request.report_file)
    if as_json:
        try:
            write_stdout(data)
        except OSError as err:
            if not isinstance(err, BrokenPipeError):  # a reader that left is no failure of ours
                report_error(UsageError(f"cannot write the result to stdout: {err.strerror}"))
                status = EXIT_GUARD_ERROR
    return status


def exit_status(outcome: RunOutcome, fail_on: frozenset[str] = frozenset()) -> int:
    """The shell's view; `exit.reason` in the result is the authority."""
    end = outcome.exit
    by_reason = {
        ExitReason.GUARD_ERROR: EXIT_GUARD_ERROR, ExitReason.WALL_LIMIT: EXIT_WALL_LIMIT,
        ExitReason.NOT_FOUND: EXIT_NOT_FOUND, ExitReason.NOT_EXECUTABLE: EXIT_NOT_EXECUTABLE,
    }
    if end.reason in by_reason:
        return by_reason[end.reason]
    if end.signal is not None:
        return 128 + end.signal
    if end.code is None:
        return EXIT_GUARD_ERROR
    if end.code == 0 and end.reason is ExitReason.EXITED and fails(outcome, fail_on):
        return EXIT_FAIL_ON
    return end.code


def fails(outcome: RunOutcome, fail_on: frozenset[str]) -> bool:
    """Whether an incident (no mere accident) of a named class was found, or the verdict is inconclusive and that was
    named; `any` means all of these classes."""
    found = {i.cls.value for i in outcome.incidents if not i.accident}
    if outcome.verdict.cls is VerdictClass.INCONCLUSIVE:
        return VerdictClass.INCONCLUSIVE.value in fail_on
    return bool(found) if "any" in fail_on else bool(found & fail_on)
