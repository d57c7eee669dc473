"""System call profiles: our YAML form and Docker/OCI seccomp JSON, both within the floor that no policy can lift.

`profiles/floor.yaml` names what is never allowed (`never`) and what is refused by argument (`refuse`); it holds for
every profile. A profile adds the list of calls it allows, and refusals of its own.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dsec_guard.errors import PolicyError
from dsec_guard.host.seccomp import ALL64, IO_URING, LOW32, ArgTest, Conjunction, FilterSpec, Refusal
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.policy.data import data_dir
from dsec_guard.policy.schema import Syscalls

PROFILE_SCHEMA = "dsec-guard/syscalls/v1"
MAX_PROFILE_BYTES = 1 << 20

# libyaml's where PyYAML was built with it: a profile of 300 names takes 2 ms instead of 30. Both build plain values only.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Profile:
    """allow: name -> conjunctions one of which must hold (none: always). notes: what of a foreign form was left out."""

    name: str
    allow: Mapping[str, tuple[Conjunction, ...]]
    refuse: tuple[Refusal, ...]
    default_errno: int = errno.EPERM
    notes: tuple[str, ...] = ()


def find_profile(text: str, directory: Path | None) -> str:
    """A profile's name as it is, a path made absolute (relative to `directory`). Raises ValueError when it cannot be
    used: `what is wrong: what is accepted`."""
    value = text
    if "/" in text or text.endswith((".yaml", ".yml", ".json")):
        value = str(((directory or Path.cwd()) / text).resolve())
    try:
        load_profile(value)
    except PolicyError as error:
        raise ValueError(error.problems[0]) from error
    return value


def _profile_file(name: str) -> Path:
    if os.path.isabs(name):
        return Path(name)
    names = sorted(p.stem for p in data_dir("profiles").iterdir() if p.suffix in (".yaml", ".json") and p.stem != "floor")
    for suffix in (".yaml", ".json"):
        candidate = data_dir("profiles") / f"{name}{suffix}"
        if name in names and candidate.is_file():
            return candidate
    raise PolicyError([f"{name!r} is no profile: {', '.join(names)}, or a path to a YAML or OCI JSON file"])


@cache
def load_profile(name: str) -> Profile:
    """A profile by name or absolute path. Raises PolicyError with its first mistakes."""
    path = _profile_file(name)
    content = _read(path)
    if "defaultAction" in content:
        return _from_oci(path, content)
    return _from_yaml(path, content, ("allow", "never", "refuse"))


@cache
def load_floor() -> Profile:
    """What holds for every profile; its `allow` is empty, unconditional refusals are what is never allowed."""
    path = data_dir("profiles") / "floor.yaml"
    return _from_yaml(path, _read(path), ("never", "refuse"))


def covers(outer: str, inner: str) -> bool:
    """Whether profile `outer` allows every call that `inner` allows. Errs on the side of no: conditions are compared as
    written, not solved."""
    wide, narrow = load_profile(outer), load_profile(inner)
    refused = {(r.name, r.when) for r in narrow.refuse}
    for name, alternatives in narrow.allow.items():
        bound = wide.allow.get(name)
        if bound is None or (bound and (not alternatives or not set(alternatives) <= set(bound))):
            return False
    return all((r.name, r.when) in refused or r.name not in narrow.allow for r in wide.refuse)


@dataclass(frozen=True)
class Decided:
    """A policy's system calls in full. spec: what the exec filter says at level full. notify: the refusals that at level
    cold go to the listener instead; `silent` is the exec filter's specification then."""

    spec: FilterSpec
    notify: tuple[Refusal, ...]
    silent: FilterSpec
    notes: tuple[str, ...] = ()


def decide(syscalls: Syscalls) -> Decided:
    """Floor, profile and the policy's own lists put together; the strictest wins."""
    profile, floor = load_profile(syscalls.profile), load_floor()
    own = [Refusal(rule.name, _errno(rule.errno), because=rule.because) for rule in syscalls.deny]
    denied = {r.name for r in own}
    never = [r for r in floor.refuse if not r.when and r.name not in denied]
    if syscalls.io_uring:
        never = [r for r in never if r.name not in IO_URING]
    barred = denied | {r.name for r in never}
    allow = {**profile.allow, **dict.fromkeys(syscalls.allow, ())}
    if syscalls.io_uring:
        allow.update(dict.fromkeys(IO_URING, ()))
    allow = {name: when for name, when in allow.items() if name not in barred}
    by_argument = [r for r in (*floor.refuse, *profile.refuse) if r.when and r.name in allow]
    profile_never = [r for r in profile.refuse if not r.when and r.name not in barred]
    allow = {name: when for name, when in allow.items() if name not in {r.name for r in profile_never}}
    refuse = _group([*own, *never, *profile_never, *by_argument])
    notify = tuple(r for r in refuse if r.notify)
    silent_allow = {**allow, **{r.name: () for r in notify if not r.when}}
    silent = FilterSpec(silent_allow, tuple(r for r in refuse if not r.notify), profile.default_errno)
    return Decided(FilterSpec(allow, refuse, profile.default_errno), notify, silent, profile.notes)


def _group(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """An unconditional refusal of a name makes conditional ones of the same name pointless (and libseccomp balks)."""
    kept = list(refusals)
    always = {r.name for r in kept if not r.when}
    seen: set[str] = set()
    result = []
    for refusal in kept:
        if refusal.name in always and (refusal.when or refusal.name in seen):
            continue
        if not refusal.when:
            seen.add(refusal.name)
        result.append(refusal)
    return tuple(result)


# ----------------------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROFILE_BYTES + 1)
        if len(raw) > MAX_PROFILE_BYTES:
            raise PolicyError([f"{path}: is larger than 1 MiB: a seccomp profile"])
        content = json.loads(raw) if path.suffix == ".json" else yaml.load(raw, Loader=_LOADER)  # noqa: S506 - a safe loader
    except OSError as error:
        raise PolicyError([f"{path}: cannot be read ({error.strerror}): a readable profile"]) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise PolicyError([f"{path}: is neither YAML nor JSON ({' '.join(str(error).split())[:200]}): a profile"]) from error
    if not isinstance(content, dict):
        raise PolicyError([f"{path}: holds no mapping: a YAML profile (schema: {PROFILE_SCHEMA}) or OCI seccomp JSON"])
    return content


def _errno(name: object) -> int:
    number = getattr(errno, name, None) if isinstance(name, str) and name in errno.errorcode.values() else None
    if not isinstance(number, int):
        raise ValueError(f"{name!r} is no error name: such as EPERM or ENOSYS")
    return number


def _from_yaml(path: Path, content: Mapping[str, Any], keys: Sequence[str]) -> Profile:
    problems: list[str] = []
    known = ("schema", "description", "default_errno", *keys)
    problems += [f"{path}: {key}: unknown key: one of {', '.join(known)}" for key in content if key not in known]
    if content.get("schema") != PROFILE_SCHEMA:
        problems.append(f"{path}: schema: {content.get('schema')!r} is not known: {PROFILE_SCHEMA}")
    default_errno = errno.EPERM
    allow: dict[str, tuple[Conjunction, ...]] = {}
    refuse: list[Refusal] = []
    try:
        default_errno = _errno(content.get("default_errno", "EPERM"))
        for name in _names(content.get("allow", [])):
            allow[name] = ()
        for entry in content.get("never", []):
            notify = bool(entry.get("notify", True))
            refuse += [Refusal(name, _errno(entry.get("errno", "EPERM")), (), notify, str(entry.get("because", "")))
                       for name in _names(entry["names"])]
        for entry in content.get("refuse", []):
            refuse.append(_refusal(entry))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problems.append(f"{path}: {error}")
    if problems:
        raise PolicyError(problems)
    return Profile(path.stem, allow, tuple(refuse), default_errno)


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{value!r} is no list of system call names")
    unknown = [name for name in value if name not in X86_64]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such system call on x86-64")
    return list(value)


def _refusal(entry: Mapping[str, Any]) -> Refusal:
    """`{name, arg, is | only | any_bit, mask, where: {arg, mask, is}, errno, notify, because}`."""
    unknown = set(entry) - {"name", "arg", "is", "only", "any_bit", "mask", "where", "errno", "notify", "because"}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no key of a refusal")
    (name,) = _names([entry["name"]])
    when: Conjunction = ()
    if "arg" in entry:
        when = (*((_test(entry["where"]),) if "where" in entry else ()), _test(entry))
    return Refusal(name, _errno(entry.get("errno", "EPERM")), when, bool(entry.get("notify", False)),
                   str(entry.get("because", "")))


def _test(entry: Mapping[str, Any]) -> ArgTest:
    arg, mask = int(entry["arg"]), int(entry.get("mask", LOW32))
    if mask > LOW32:
        raise ValueError(f"mask {mask:#x} is out of range: 32 bits")
    if "any_bit" in entry:
        return ArgTest(arg, (0,), int(entry["any_bit"]), inside=False)
    values = entry["is"] if "is" in entry else entry["only"]
    return ArgTest(arg, tuple(int(v) for v in values), mask, inside="is" in entry)


# --------------------------------------------------------------------------------------------------- Docker, OCI JSON

_REFUSING = {"SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP",
             "SCMP_ACT_TRACE"}


def _from_oci(path: Path, content: Mapping[str, Any]) -> Profile:
    """runtime-spec, config-linux.md, "Seccomp", and Docker's additions (names, includes, excludes, errnoRet)."""
    notes: list[str] = []
    allow: dict[str, tuple[Conjunction, ...]] = {}
    refuse: list[Refusal] = []
    try:
        default_errno = int(content.get("defaultErrnoRet", errno.EPERM))
        if not 0 < default_errno < 4096:
            raise ValueError(f"defaultErrnoRet {default_errno} is out of range: 1..4095")
        if _allows(content["defaultAction"]):
            allow = dict.fromkeys(X86_64, ())
        for rule in content.get("syscalls", []):
            names = [str(n) for n in rule.get("names", [rule["name"]] if "name" in rule else [])]
            if skipped := _skip(rule):
                notes.append(f"{', '.join(names[:3])}...: left out ({skipped})")
                continue
            unknown = [n for n in names if n not in X86_64]
            if unknown:
                notes.append(f"{', '.join(unknown[:5])}: no call of x86-64")
            when = _oci_args(rule.get("args") or [])
            for name in (n for n in names if n in X86_64):
                if _allows(rule["action"]):
                    known = allow.get(name)
                    allow[name] = () if not when or known == () else (*(known or ()), *when)
                else:
                    number = int(rule.get("errnoRet") or default_errno)
                    refuse += [Refusal(name, number, conj) for conj in (when or ((),))]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PolicyError([f"{path}: {error!s}: an OCI seccomp profile for x86-64"]) from error
    if _allows(content["defaultAction"]):
        return Profile(path.stem, allow, tuple(refuse), default_errno, tuple(notes))
    named = {r.name for r in refuse if not r.when}
    return Profile(path.stem, {n: w for n, w in allow.items() if n not in named}, tuple(refuse), default_errno, tuple(notes))


def _allows(action: object) -> bool:
    if action in ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG"):
        return True
    if action in _REFUSING:
        return False
    raise ValueError(f"action {action!r} is not supported: SCMP_ACT_ALLOW, SCMP_ACT_LOG, SCMP_ACT_ERRNO or SCMP_ACT_KILL")


def _skip(rule: Mapping[str, Any]) -> str:
    """Why a rule does not concern a box: it is for capabilities no box has, or for another machine."""
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    if includes.get("caps"):
        return f"needs {', '.join(includes['caps'])}"
    if includes.get("arches") and not {"amd64", "x86_64"} & set(includes["arches"]):
        return "another architecture"
    if {"amd64", "x86_64"} & set(excludes.get("arches") or ()):
        return "not for x86-64"
    return ""


def _oci_args(args: Sequence[Mapping[str, Any]]) -> tuple[Conjunction, ...]:
    """One conjunction of all arguments; with several tests of one argument, one conjunction each, as runc does."""
    tests = []
    for arg in args:
        index, value, second = int(arg["index"]), int(arg["value"]), int(arg.get("valueTwo") or 0)
        if not 0 <= index <= 5:
            raise ValueError(f"argument index {index} is out of range: 0..5")
        op = arg["op"]
        if op == "SCMP_CMP_EQ":
            tests.append(ArgTest(index, (value,), ALL64))
        elif op == "SCMP_CMP_MASKED_EQ":
            tests.append(ArgTest(index, (second & value,), value))
        elif op == "SCMP_CMP_NE":
            tests.append(ArgTest(index, (value,), ALL64, inside=False))
        else:
            raise ValueError(f"comparison {op!r} is not supported: SCMP_CMP_EQ, SCMP_CMP_NE or SCMP_CMP_MASKED_EQ")
    if not tests:
        return ()
    if len({t.arg for t in tests}) < len(tests):
        return tuple((t,) for t in tests)
    return (tuple(tests),)
