"""Whatever bytes a policy or profile holds, reading it ends in a policy or in a PolicyError, soon."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_guard.errors import PolicyError
from dsec_guard.policy.data import data_dir
from dsec_guard.policy.load import MAX_PROBLEMS, load_policy
from dsec_guard.policy.profile import PROFILE_SCHEMA, load_profile
from dsec_guard.policy.schema import Policy, yaml_fields

SEED = (data_dir("policies") / "corpus.yaml").read_bytes()
KEYS = [*(name for name, _ in yaml_fields(Policy)), "schema", "extends", "x", "path", "kind"]
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
                    st.sampled_from(["2GiB", "30min", "none", "default", "/a", "same", "root", "base", "EPERM", "mount"]))
trees = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=20)
LIMIT_S = 10.0


def read(raw: bytes, suffix: str, reader) -> None:
    """Calls `reader` on a file of these bytes; anything but success or a printable PolicyError is a fault."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"p{suffix}"
        path.write_bytes(raw)
        began = time.monotonic()
        problems: tuple[str, ...] = ("none",)
        try:
            reader(str(path))
        except PolicyError as error:
            problems = error.problems
        assert time.monotonic() - began < LIMIT_S
    assert 1 <= len(problems) <= MAX_PROBLEMS + 1
    assert all(p.isprintable() for p in problems), problems


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_any_bytes(raw):
    read(raw, ".yaml", load_policy)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet="{}[]:,-&*!|>'\"%@`#? \n\tabc0~<\\", max_size=200))
def test_any_yaml_punctuation(text):
    read(b"schema: dsec-guard/policy/v1\n" + text.encode(), ".yaml", load_policy)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), trees, max_size=6))
def test_any_tree_under_known_keys(content):
    read(yaml.safe_dump({"schema": "dsec-guard/policy/v1", **content}).encode("utf-8", "surrogatepass"), ".yaml", load_policy)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_shipped_policy_with_flipped_bytes(changes):
    raw = bytearray(SEED)
    for position, value in changes:
        raw[position] = value
    read(bytes(raw), ".yaml", load_policy)


profile_keys = st.sampled_from(["defaultAction", "syscalls", "names", "name", "action", "args", "index", "value", "op",
                                "includes", "caps", "schema", "allow", "refuse", "never",
                                "arg", "is", "only", "mask", "where", "errno", "any_bit"])
profile_values = st.one_of(scalars, st.sampled_from(["SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_CMP_EQ", "read", PROFILE_SCHEMA]))
profile_trees = st.recursive(
    profile_values, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(profile_keys, inner, max_size=4)),
    max_leaves=15)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(profile_keys, profile_trees, max_size=5), st.sampled_from([PROFILE_SCHEMA, None]))
def test_any_profile(content, schema):
    content = {**content, **({"schema": schema} if schema else {})}
    read(json.dumps(content).encode("utf-8", "surrogatepass"), ".json", load_profile)
