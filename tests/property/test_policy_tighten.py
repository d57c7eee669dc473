"""An accepted child allows no more than its parent: for calls, paths, limits and the network."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_guard.errors import PolicyError
from dsec_guard.host.seccomp import RET_ALLOW
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import Phase
from dsec_guard.policy.explain import explain_path
from dsec_guard.policy.load import load_policy
from dsec_guard.policy.profile import decide
from dsec_guard.policy.schema import Limits, NetworkWord, Policy
from dsec_guard.policy.tighten import phase_network

PLACES = ["/usr", "/usr/lib", "/etc", "/opt", "/srv/a", "/srv/a/b", "/data", "/tmp", "/root", "/"]
PROBED = [*(p.rstrip("/") + "/x" for p in PLACES), *PLACES]
CALLS = ["read", "ptrace", "kcmp", "syslog", "mount", "vserver", "getpid", "io_uring_setup", "socket", "clone"]
RANK = {NetworkWord.NONE: 0, NetworkWord.ALLOWLIST: 1, NetworkWord.OPEN: 2}

paths = st.lists(st.sampled_from(PLACES), max_size=3, unique=True)
words = st.sampled_from([w.value for w in NetworkWord])
fragments = st.fixed_dictionaries({}, optional={
    "limits": st.fixed_dictionaries({}, optional={
        "memory": st.sampled_from(["64MiB", "1GiB", "4GiB"]), "pids": st.integers(4, 600),
        "wall_time": st.sampled_from(["10s", "2h"]), "cpus": st.sampled_from([0.5, 1, 2])}),
    "filesystem": st.fixed_dictionaries({}, optional={
        "read": paths, "write": paths, "temporary": paths,
        "binds": st.lists(st.fixed_dictionaries({"source": st.sampled_from(PLACES), "target": st.sampled_from(["/b", "/usr"])}),
                          max_size=1)}),
    "workspace": st.fixed_dictionaries({"target": st.sampled_from(["same", "/workspace", "/usr/src", "/data"])}),
    "environment": st.fixed_dictionaries({"HOME": st.sampled_from(PLACES)}),
    "network": words,
    "phases": st.dictionaries(st.sampled_from([p.value for p in Phase]), st.fixed_dictionaries({"network": words}), max_size=2),
    "syscalls": st.fixed_dictionaries({}, optional={
        "allow": st.lists(st.sampled_from(CALLS), max_size=2, unique=True), "io_uring": st.booleans(),
        "deny": st.lists(st.builds(lambda n: {"name": n}, st.sampled_from(CALLS)), max_size=2)}),
    "landlock": st.fixed_dictionaries({}, optional={
        "enabled": st.booleans(), "connect_tcp": st.lists(st.sampled_from([80, 443]), max_size=2)}),
    "answers": st.fixed_dictionaries({}, optional={"hidden": paths, "environment_state": paths}),
    "user": st.sampled_from(["agent", "root"]),
    "if_unsupported": st.sampled_from(["refuse", "degrade"]),
    "children_may": st.lists(st.sampled_from(["root", "degrade"]), max_size=2, unique=True),
    "pass_environment": st.lists(st.sampled_from(["TERM", "LC_*", "LC_ALL", "SECRET"]), max_size=3, unique=True),
})


def below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def load(directory: Path, name: str, content: dict[str, object]) -> Policy | None:
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"schema": "dsec-guard/policy/v1", **content}))
    try:
        return load_policy(str(path))
    except PolicyError:
        return None


def allowed_calls(policy: Policy) -> set[tuple[str, int]]:
    spec = decide(policy.syscalls).spec
    rows = [(0,) * 6, (17, 3, 0, 0, 0, 0), (0x10000000, 0, 0, 0, 0, 0)]
    return {(name, i) for name in CALLS for i, row in enumerate(rows) if spec.expected(X86_64[name], row) == RET_ALLOW}


def allowed_paths(policy: Policy) -> set[tuple[str, str]]:
    return {(path, op) for path in PROBED for op in ("read", "write", "execute")
            if explain_path(policy, path, op, workspace="/ws")[0].answer == "allowed"}


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fragments, fragments)
def test_an_accepted_child_allows_no_more(parent_content, child_content):
    with tempfile.TemporaryDirectory() as name:
        parent = load(Path(name), "parent", parent_content)
        child = load(Path(name), "child", {"extends": "./parent.yaml", **child_content})
    if parent is None or child is None:
        return
    for limit in Limits.model_fields:
        assert getattr(child.limits, limit) <= getattr(parent.limits, limit)
    for phase in Phase:
        assert RANK[phase_network(child, phase)] <= RANK[phase_network(parent, phase)]
    assert allowed_calls(child) <= allowed_calls(parent)
    extra = allowed_paths(child) - allowed_paths(parent)
    # What the parent left out altogether may become the box's own scratch space or workspace: nothing of the host shows.
    # The state of a task's environment may be added, read-only.
    own = [*child.filesystem.write, *child.filesystem.temporary, child.workspace.target, child.home]
    added = [s.path for s in child.answers.environment_state]
    extra = {(path, op) for path, op in extra if op != "read" or not any(below(path, a) for a in added)}
    new = [a for a in added if a not in [s.path for s in parent.answers.environment_state]]
    assert not [a for a in new for h in parent.answers.hidden if below(a, h.path)]
    answers = parent.answers
    kept = [*parent.filesystem.read, *(s.path for s in answers.environment_state), *(h.path for h in answers.hidden)]
    for path, op in extra:
        assert any(below(path, o) for o in own), (path, op)
        assert not any(below(path, k) for k in kept if k != "/"), (path, op)
    assert not (child.landlock.enabled < parent.landlock.enabled)
    assert set(child.children_may) <= set(parent.children_may)


@settings(max_examples=60, deadline=None)
@given(fragments)
def test_a_policy_is_a_tightening_of_itself(content):
    with tempfile.TemporaryDirectory() as name:
        alone = load(Path(name), "parent", content)
        child = load(Path(name), "child", {"extends": "./parent.yaml"})
    assert (alone is None) == (child is None)
    if alone is not None and child is not None:
        assert child.digest == alone.digest
