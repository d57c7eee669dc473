"""What a policy says about one path or one system call, and which line of which file says it."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsec_guard.errors import UsageError
from dsec_guard.host.landlock import FsRight
from dsec_guard.host.seccomp import ArgTest
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import Level
from dsec_guard.policy.compile import grants_of
from dsec_guard.policy.profile import decide, load_floor
from dsec_guard.policy.schema import HiddenStyle, Policy
from dsec_guard.policy.tighten import fixed_part, is_within

Operation = Literal["read", "write", "execute", "list"]

_RIGHTS = {"read": FsRight.READ_FILE, "write": FsRight.WRITE_FILE, "execute": FsRight.EXECUTE, "list": FsRight.READ_DIR}


@dataclass(frozen=True)
class Answer:
    """answer: allowed | refused | absent | reported. because: for people. key, place: what decides, and where it is."""

    answer: str
    because: str
    key: str
    place: str


@dataclass(frozen=True)
class Difference:
    """One key whose value differs; None where one side does not have it."""

    key: str
    left: Any
    right: Any


def explain_path(policy: Policy, path: str, operation: Operation, *, workspace: str = "") -> tuple[Answer, ...]:
    """What happens to `operation` on an absolute, normalised path inside; the first answer decides, others add to it."""
    return tuple(_path_answers(policy, path, operation, workspace))


def _path_answers(policy: Policy, path: str, operation: Operation, workspace: str) -> Iterator[Answer]:
    def answer(what: str, because: str, key: str) -> Answer:
        return Answer(what, because, key, policy.place(key))

    for i, hidden in enumerate(policy.answers.hidden):
        if is_within(path, hidden.path):
            key = f"answers.hidden.{i}"
            if operation == "list":
                yield answer("allowed", "listing is no look at the content; the files are decoys or absent", key)
            elif operation == "read" and policy.answers.style is HiddenStyle.DECOY:
                yield answer("reported", "a decoy stands there: opening it is an incident of class answer_peek", key)
            else:
                yield answer("refused", "hidden material is absent or a read-only decoy; trying is an incident", key)
            return
    for i, state in enumerate(policy.answers.environment_state):
        if is_within(path, state.path):
            key = f"answers.environment_state.{i}"
            refused = operation in ("write", "execute")
            yield answer("refused" if refused else "allowed", "the environment's state can be read, never written", key)
            return
    yield _granted(policy, path, operation, workspace, answer)
    if operation == "write":
        for i, pattern in enumerate(policy.answers.harness):
            if is_within(path, fixed_part(pattern)) and _matches(path, pattern):
                because = "belongs to the task: changing or adding it is an incident of class tamper"
                yield answer("reported", because, f"answers.harness.{i}")


def _granted(policy: Policy, path: str, operation: Operation, workspace: str, answer: Any) -> Answer:
    grants = [root for root, right in grants_of(policy, workspace) if is_within(path, root) and right & _RIGHTS[operation]]
    if not grants:
        return Answer("refused", "no part of the policy grants it; outside the listed places nothing is there", "filesystem",
                      policy.place("filesystem"))
    root = max(grants, key=len)
    key, because = _source(policy, root, workspace)
    result: Answer = answer("allowed", because, key)
    return result


def _source(policy: Policy, root: str, workspace: str) -> tuple[str, str]:
    """Which key brought a granted root about."""
    target = workspace if policy.workspace.target == "same" else policy.workspace.target
    if root == target:
        return "workspace.target", "the workspace, copy-on-write inside the box's disk limit"
    for name in ("write", "temporary", "read"):
        paths: Sequence[str] = getattr(policy.filesystem, name)
        if root in paths:
            words = "read-only, from the root file system" if name == "read" else "the box's own, inside its disk limit"
            return f"filesystem.{name}.{paths.index(root)}", f"{root} is {words}"
    for i, bind in enumerate(policy.filesystem.binds):
        if root == bind.target:
            return f"filesystem.binds.{i}", f"{root} shows {bind.source} of the host, read-only"
    if root == policy.home:
        return "environment.HOME", "the home directory, the box's own"
    return "filesystem.root", f"{root} is part of every box"


def _matches(path: str, pattern: str) -> bool:
    """`*` and `?` within one part, `**` over any number of parts."""
    text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.fullmatch(text, path) is not None


def explain_syscall(policy: Policy, name: str) -> tuple[Answer, ...]:
    """What happens to one system call; refusals by argument come before the answer for all other arguments.

    Raises: UsageError for a name that the table does not have.
    """
    if name not in X86_64:
        raise UsageError(f"no system call is called {name!r} on x86-64", hint="see `man 2 syscalls` for the names")
    decided = decide(policy.syscalls)
    floor = set(load_floor().refuse)
    denied = {rule.name: i for i, rule in enumerate(policy.syscalls.deny)}
    answers: list[Answer] = []
    for refusal in (r for r in decided.spec.refuse if r.name == name):
        if name in denied:
            key, place = f"syscalls.deny.{denied[name]}", policy.place(f"syscalls.deny.{denied[name]}")
        elif refusal in floor:
            key, place = "floor", "profiles/floor.yaml"
        else:
            key, place = "syscalls.profile", policy.place("syscalls.profile")
        told = "; the monitor is told" if refusal.notify and policy.monitor.level is Level.COLD else ""
        when = " and ".join(_words(t) for t in refusal.when)
        text = f"{errno.errorcode[refusal.errno]}{told}: {refusal.because or 'the policy says so'}"
        text = f"when {when}: {text}" if when else text
        answers.append(Answer("refused", text, key, place))
    if any(a.answer == "refused" and not a.because.startswith("when ") for a in answers):
        return tuple(answers)
    allowed = name in decided.spec.allow
    key = f"syscalls.allow.{policy.syscalls.allow.index(name)}" if name in policy.syscalls.allow else "syscalls.profile"
    otherwise = f"does not list it: {errno.errorcode[decided.spec.default_errno]}"
    because = f"the profile {policy.syscalls.profile} {'allows it' if allowed else otherwise}"
    if allowed and answers:
        because += " otherwise"
    return (*answers, Answer("allowed" if allowed else "refused", because, key, policy.place(key)))


def _words(test: ArgTest) -> str:
    masked = f"arg{test.arg}" if test.mask & 0xFFFFFFFF == 0xFFFFFFFF else f"arg{test.arg} & {test.mask:#x}"
    if test.values == (0,) and not test.inside:
        return f"{masked} is not 0"
    return f"{masked} is {'one' if test.inside else 'none'} of {', '.join(hex(v) for v in test.values)}"


def settings(policy: Policy) -> tuple[tuple[str, str, str], ...]:
    """Every key of the effective policy: dotted name, value as JSON, place of the line that set it or `default`."""
    content = policy.model_dump(mode="json", by_alias=True, exclude={"name", "digest"})
    return tuple((key, json.dumps(value, ensure_ascii=True), policy.place(key)) for key, value in _flat("", content))


def differences(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """Every key in which two effective policies differ, dotted, in the model's order; lists are compared as a whole."""
    skip = {"name", "digest", "description"}
    a = dict(_flat("", left.model_dump(mode="json", by_alias=True, exclude=skip)))
    b = dict(_flat("", right.model_dump(mode="json", by_alias=True, exclude=skip)))
    return tuple(Difference(k, a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}{key}.", inner)
    else:
        yield prefix[:-1], value
