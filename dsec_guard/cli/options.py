"""What the commands share: checked option values, and errors turned into one clear line."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from dsec_guard.errors import DsecGuardError, PolicyError, UsageError
from dsec_guard.model import printable

EXIT_FAIL_ON = 10
EXIT_WALL_LIMIT = 124
EXIT_GUARD_ERROR = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_INTERRUPTED = 130

MAX_LABELS = 64
MAX_LABEL_VALUE = 1024

P = ParamSpec("P")
T = TypeVar("T")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


def guard_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn failures of dsec-guard itself into a message with a next step on stderr and exit status 125."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (DsecGuardError, click.ClickException, click.Abort, click.exceptions.Exit) as err:
            if not isinstance(err, DsecGuardError):
                raise
            report_error(err)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Nobody reads our own output any more; what Python still wants to flush must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(128 + signal.SIGPIPE)
        except Exception as err:  # noqa: BLE001  (whatever broke, the command has not failed: we have)
            report_error(err)
        sys.exit(EXIT_GUARD_ERROR)

    return wrapped


def report_error(err: Exception) -> None:
    """`dsec-guard: what failed` and `  next: what to do` on stderr; a policy's mistakes one a line."""
    if isinstance(err, PolicyError):
        say(*err.problems)
    elif isinstance(err, DsecGuardError):
        say(*str(err).splitlines() or ["failed"])
    else:
        say(f"internal error: {type(err).__name__}: {err}")
        if os.environ.get("DSEC_GUARD_DEBUG"):
            traceback.print_exception(err)
    hint = err.hint if isinstance(err, DsecGuardError) else ""
    if not isinstance(err, DsecGuardError) and not os.environ.get("DSEC_GUARD_DEBUG"):
        hint = "DSEC_GUARD_DEBUG=1 shows where; please report it"
    elif isinstance(err, PolicyError) and not hint:
        hint = "correct it; `dsec-guard policy validate FILE` checks a policy and its parents without running anything"
    elif isinstance(err, UsageError) and not hint:
        context = click.get_current_context(silent=True)
        hint = f"`{context.command_path if context is not None else 'dsec-guard'} --help` lists what is accepted"
    for line in hint.splitlines():
        _to_stderr(f"  next: {printable(line)}\n")


def say(*lines: str) -> None:
    """Lines for people on stderr, stripped of what a terminal would act on."""
    for line in lines:
        _to_stderr(f"dsec-guard: {printable(line)}\n")


def _to_stderr(text: str) -> None:
    data = text.encode("utf-8", "replace")
    try:
        os.write(2, data)
    except OSError:
        return  # nobody to tell


def parse_pairs(values: Iterable[str], option: str) -> dict[str, str]:
    """`K=V` words. Raises: UsageError for a word without `=` or a name given twice."""
    result: dict[str, str] = {}
    for word in values:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {word}: want NAME=VALUE")
        if name in result:
            raise UsageError(f"{option} {name} is given twice")
        result[name] = value
    return result


def parse_env(values: Iterable[str]) -> dict[str, str]:
    """`K=V`, or `K` for the value it has here. Raises: UsageError for a bad name or a variable that is not set."""
    words = []
    for word in values:
        if "=" not in word:
            if word not in os.environ:
                raise UsageError(f"--env {word}: not set here", hint=f"--env {word}=VALUE")
            word = f"{word}={os.environ[word]}"
        words.append(word)
    result = parse_pairs(words, "--env")
    for name in result:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env {name}: no name of an environment variable", hint="letters, digits and _")
    return result


def parse_labels(values: Iterable[str]) -> dict[str, str]:
    """Labels for the records: at most 64, short names. Raises: UsageError."""
    result = parse_pairs(values, "--label")
    for name, value in result.items():
        if not _LABEL.fullmatch(name):
            raise UsageError(f"--label {name}: want at most 64 letters, digits, dots, dashes, underscores or slashes")
        if len(value) > MAX_LABEL_VALUE:
            raise UsageError(f"--label {name}: the value is longer than {MAX_LABEL_VALUE} characters")
    if len(result) > MAX_LABELS:
        raise UsageError(f"more than {MAX_LABELS} labels")
    return result


def output_path(path: Path | None, option: str) -> Path | None:
    """A file that is going to be written: absolute, in a directory that exists and takes files. Raises: UsageError."""
    if path is None:
        return None
    where = Path(os.path.abspath(path))
    if where.is_dir():
        raise UsageError(f"{option} {path} is a directory", hint="name a file")
    if not where.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {where.parent}", hint=f"mkdir -p {where.parent}")
    if not os.access(where if where.exists() else where.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")
    return where


def write_stdout(data: bytes) -> None:
    """All of `data` to fd 1. Raises: BrokenPipeError when nobody reads it."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
