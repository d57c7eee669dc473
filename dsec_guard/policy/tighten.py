"""What "a child only tightens" means, key by key.

Bounds may shrink, refusals may grow, and nothing becomes readable, writable or reachable that the parent kept away.
Judgement (mode, detectors, penalties, monitor level) and placement (workspace target, environment literals,
deliverables) are the author's own: they bind nothing. One thing is added on purpose: the state of a task's environment
(`answers.environment_state`), which is named with it, read-only, and never something that the parent hides.
docs/policy.md has the same table for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dsec_guard.model import Phase
from dsec_guard.policy.schema import Choice, IfUnsupported, Limits, NetworkWord, Policy, RootKind, Unit, User
from dsec_guard.policy.units import format_duration, format_size

_NETWORK_RANK = {NetworkWord.NONE: 0, NetworkWord.ALLOWLIST: 1, NetworkWord.OPEN: 2}

#: Whether every call that the second profile allows is allowed by the first; raises PolicyError for an unreadable one.
Covers = Callable[[str, str], bool]


@dataclass(frozen=True)
class Violation:
    """`key` is the dotted name in the child, `what` is wrong with it, `accepted` is what would do."""

    key: str
    what: str
    accepted: str


def is_within(path: str, root: str) -> bool:
    """Whether `path` is `root` or lies below it; both absolute and normalised."""
    return path == root or root == "/" or path.startswith(root + "/")


def fixed_part(pattern: str) -> str:
    """The directory below which everything a pattern can match lies: `/a/b/*.py` -> `/a/b`."""
    kept: list[str] = []
    for part in pattern.split("/"):
        if any(c in part for c in "*?["):
            break
        kept.append(part)
    return "/".join(kept) or "/"


def violations(parent: Policy, child: Policy, *, covers: Covers) -> Iterator[Violation]:
    """Every point in which `child` loosens `parent`; both are effective policies."""
    yield from _limits(parent, child)
    yield from _filesystem(parent, child)
    yield from _answers(parent, child)
    yield from _network(parent, child)
    yield from _syscalls(parent, child, covers)
    yield from _landlock(parent, child)
    yield from _choices(parent, child)
    extra = [name for name in child.pass_environment if not _passes(name, parent.pass_environment)]
    if extra:
        yield Violation("pass_environment", f"{', '.join(extra)} is not passed on by the parent",
                        f"some of {', '.join(parent.pass_environment) or 'nothing'}")


def _passes(name: str, allowed: Sequence[str]) -> bool:
    return name in allowed or any(a.endswith("*") and name.startswith(a[:-1]) for a in allowed)


def limit_text(name: str, value: float) -> str:
    """A limit's value as it would be written in YAML."""
    unit = [m for m in Limits.model_fields[name].metadata if isinstance(m, Unit)]
    if unit == [Unit.SIZE]:
        return format_size(int(value))
    if unit == [Unit.DURATION]:
        return format_duration(int(value))
    return f"{value:g}" if value < 1 << 16 else f"{value:.0f}"


def _limits(parent: Policy, child: Policy) -> Iterator[Violation]:
    for name in Limits.model_fields:
        bound, wanted = getattr(parent.limits, name), getattr(child.limits, name)
        if wanted > bound:
            yield Violation(f"limits.{name}", f"{limit_text(name, wanted)} is above the parent's",
                            f"at most {limit_text(name, bound)}")


def _filesystem(parent: Policy, child: Policy) -> Iterator[Violation]:
    old, new = parent.filesystem, child.filesystem
    if new.root != old.root and not (old.root.kind is RootKind.HOST and new.root.kind is RootKind.DIRECTORY):
        yield Violation("filesystem.root", "differs from the parent's", "the parent's root, or a directory instead of host")
    for path in new.read:
        if not any(is_within(path, root) for root in old.read):
            yield Violation("filesystem.read", f"{path} is not readable in the parent",
                            f"paths at or below {', '.join(old.read) or 'none'}")
    sources = [*old.read, *(b.source for b in old.binds)]
    for bind in new.binds:
        if not any(is_within(bind.source, root) for root in sources):
            yield Violation("filesystem.binds", f"{bind.source} is not readable in the parent",
                            "sources at or below what the parent reads (or `--bind-ro` for one run)")
    read_only = [*old.read, *(b.target for b in old.binds), *(s.path for s in parent.answers.environment_state)]
    writable = [*old.write, *old.temporary]
    for key in ("write", "temporary"):
        for path in getattr(new, key):
            if any(is_within(path, root) for root in writable):
                continue
            hit = [root for root in read_only if is_within(path, root) or is_within(root, path)]
            if hit:
                yield Violation(f"filesystem.{key}", f"{path} would make {hit[0]} writable, which the parent only reads",
                                "paths apart from what the parent reads")
    for key, target, before in (("workspace.target", child.workspace.target, parent.workspace.target),
                                ("environment.HOME", child.home, parent.home)):
        hit = [root for root in read_only if is_within(target, root) or is_within(root, target)]
        if target != before and hit:
            yield Violation(key, f"{target} would make {hit[0]} writable, which the parent only reads",
                            "a place apart from what the parent reads")


def _answers(parent: Policy, child: Policy) -> Iterator[Violation]:
    old, new = parent.answers, child.answers
    known = set(old.allowed_reads)
    for pattern in new.allowed_reads:
        base = fixed_part(pattern)
        hit = [h.path for h in old.hidden if is_within(base, h.path) or is_within(h.path, base)]
        if pattern not in known and hit:
            yield Violation("answers.allowed_reads", f"{pattern} would open {hit[0]}, which the parent hides",
                            "patterns apart from what the parent hides")
    for state in new.environment_state:
        hit = [h.path for h in old.hidden if is_within(state.path, h.path) or is_within(h.path, state.path)]
        if state not in old.environment_state and hit:
            yield Violation("answers.environment_state", f"{state.path} would open {hit[0]}, which the parent hides",
                            "places apart from what the parent hides")
    for key in ("repository", "package"):
        if getattr(old, key) is not None and getattr(new, key) != getattr(old, key):
            yield Violation(f"answers.{key}", "differs from the parent's", "the parent's, or leave it out")


def phase_network(policy: Policy, phase: Phase) -> NetworkWord:
    """The network word that holds in one phase."""
    setting = policy.phases.get(phase)
    return policy.network if setting is None or setting.network is None else setting.network


def _network(parent: Policy, child: Policy) -> Iterator[Violation]:
    for phase in Phase:
        bound, wanted = phase_network(parent, phase), phase_network(child, phase)
        if _NETWORK_RANK[wanted] > _NETWORK_RANK[bound]:
            setting = child.phases.get(phase)
            own = setting is not None and setting.network is not None
            yield Violation(f"phases.{phase.value}.network" if own else "network",
                            f"{wanted.value} is wider than the parent's", bound.value)
            if not own:
                return
    extra = [host for host in child.allowed_hosts if host not in parent.allowed_hosts]
    if extra and parent.network is not NetworkWord.OPEN:
        yield Violation("allowed_hosts", f"{', '.join(extra)} is not reachable in the parent",
                        f"some of {', '.join(parent.allowed_hosts) or 'none'}")


def _syscalls(parent: Policy, child: Policy, covers: Covers) -> Iterator[Violation]:
    old, new = parent.syscalls, child.syscalls
    if new.profile != old.profile and not covers(old.profile, new.profile):
        yield Violation("syscalls.profile", f"{new.profile} allows calls that the parent's {old.profile} refuses",
                        "a profile that allows no more")
    if new.io_uring and not old.io_uring:
        yield Violation("syscalls.io_uring", "the parent does not allow it", "false")
    extra = [name for name in new.allow if name not in old.allow]
    if extra:
        yield Violation("syscalls.allow", f"{', '.join(extra)} is not allowed by the parent",
                        f"some of {', '.join(old.allow) or 'none'}")


def _landlock(parent: Policy, child: Policy) -> Iterator[Violation]:
    if parent.landlock.enabled and not child.landlock.enabled:
        yield Violation("landlock.enabled", "switches off what the parent has", "true")
    for key in ("connect_tcp", "bind_tcp"):
        old, new = getattr(parent.landlock, key), getattr(child.landlock, key)
        if old is not None and (new is None or not set(new) <= set(old)):
            yield Violation(f"landlock.{key}", "allows ports that the parent refuses", f"some of {list(old)}")


def _choices(parent: Policy, child: Policy) -> Iterator[Violation]:
    allowed = ", ".join(c.value for c in parent.children_may) or "nothing"
    if child.user is User.ROOT and parent.user is not User.ROOT and Choice.ROOT not in parent.children_may:
        yield Violation("user", f"root is not left open by the parent (its children_may has {allowed})", "agent")
    if (child.if_unsupported is IfUnsupported.DEGRADE and parent.if_unsupported is IfUnsupported.REFUSE
            and Choice.DEGRADE not in parent.children_may):
        yield Violation("if_unsupported", f"degrade is not left open by the parent (its children_may has {allowed})",
                        "refuse")
    extra = [c.value for c in child.children_may if c not in parent.children_may]
    if extra:
        yield Violation("children_may", f"{', '.join(extra)} is not in the parent's", f"some of {allowed}")
