"""Every error dsec-guard raises on purpose.

    DsecGuardError
    ├── PolicyError     the policy file: where, what is wrong, what is accepted
    ├── UsageError      an argument, path or option of a command
    ├── HostError       a kernel or host feature is missing: which, how to enable it
    ├── SetupError      a box could not be built: step, call, errno name
    ├── MonitorError    evidence was lost or a sensor died
    └── RecordError     a recording or archive cannot be read: file, line

"The guard failed" (these) and "the command failed" (a result) never share a type or an exit status.
"""

from __future__ import annotations


class DsecGuardError(Exception):
    """Base of all deliberate failures. `hint` is the next action for the reader, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class PolicyError(DsecGuardError):
    """One or more mistakes in a policy; `problems` has one line each, `file:line:col: what: accepted`, safe for terminals
    whatever the policy holds."""

    def __init__(self, problems: list[str], *, hint: str = "") -> None:
        self.problems = tuple(map(_printable, problems))
        super().__init__("\n".join(self.problems), hint=hint)


class UsageError(DsecGuardError):
    """An argument that cannot be used: which one, and what would be."""


class HostError(DsecGuardError):
    """A feature of the host is missing; `feature` is the name `dsec-guard doctor` lists."""

    def __init__(self, message: str, *, feature: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.feature = feature


class SetupError(DsecGuardError):
    """A step between clone and exec failed. `step` is its name in the launcher's table, `errno_name` such as EPERM."""

    def __init__(self, message: str, *, step: str = "", errno_name: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.errno_name = errno_name


class MonitorError(DsecGuardError):
    """A sensor could not be started, died, or lost records."""


class RecordError(DsecGuardError):
    """A recording cannot be read or refuses to verify; `line` is 1-based, 0 when unknown."""

    def __init__(self, message: str, *, line: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.line = line
