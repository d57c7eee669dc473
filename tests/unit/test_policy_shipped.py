"""The policies that ship: valid, described to editors, and priced so that cheating never pays."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from dsec_guard.model import Class, Outcome
from dsec_guard.policy.data import data_dir
from dsec_guard.policy.load import load_policy, shipped_names
from dsec_guard.policy.publish import policy_json_schema, schema_text
from dsec_guard.policy.schema import NetworkWord, User

#: Classes whose success makes the task's reward worthless (DESIGN: fold).
VOIDING = {Class.ESCAPE_ATTEMPT, Class.ANSWER_PEEK, Class.TAMPER}

VALIDATORS = [jsonschema.Draft7Validator, jsonschema.Draft202012Validator]


def policy_file(name: str) -> Path:
    return data_dir("policies") / f"{name}.yaml"


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_policy_loads_under_its_name(name):
    policy = load_policy(name)
    assert policy.name == name
    assert policy.network is NetworkWord.NONE
    assert policy.syscalls.io_uring is False
    assert policy.landlock.enabled


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_policy_tells_editors_its_schema(name):
    assert policy_file(name).read_text().startswith("# yaml-language-server: $schema=./dsec-policy.schema.json\n")


def test_the_published_schema_is_the_models():
    assert (data_dir("policies") / "dsec-policy.schema.json").read_text() == schema_text()


@pytest.mark.parametrize("validator", VALIDATORS)
def test_the_schema_is_valid_in_both_drafts(validator):
    validator.check_schema(policy_json_schema())
    assert "$ref" not in schema_text()


@pytest.mark.parametrize("validator", VALIDATORS)
@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_policy_satisfies_the_published_schema(validator, name):
    validator(policy_json_schema()).validate(yaml.safe_load(policy_file(name).read_text()))


@pytest.mark.parametrize("validator", VALIDATORS)
@pytest.mark.parametrize("wrong", [
    {"limits": {"memory": 5}}, {"limits": {"memory": "5"}}, {"limits": {"pids": "many"}}, {"netwrk": "none"}, {"network": "no"},
    {"answers": {"hidden": [3]}}, {"answers": {"hidden": ["srv"]}}, {"penalties": {"tamper": {"attempted": 1}}},
    {"limits": {"wall_time": "1:30"}}, {"detectors": {"a.b": {"except": [{"object": "/x"}]}}}, {"name": "x"},
], ids=json.dumps)
def test_the_published_schema_refuses_what_the_loader_refuses(validator, wrong, tmp_path):
    content = {"schema": "dsec-guard/policy/v1", **wrong}
    with pytest.raises(jsonschema.ValidationError):
        validator(policy_json_schema()).validate(content)
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(Exception, match=r"p\.yaml:"):
        load_policy(str(path))


@pytest.mark.parametrize("name", shipped_names())
def test_every_class_has_a_price_that_grows_with_the_outcome(name):
    penalties = load_policy(name).penalties
    assert set(penalties) == set(Class)
    for row in penalties.values():
        assert set(row) == set(Outcome)
        assert 0 > row[Outcome.ATTEMPTED] > row[Outcome.SUCCEEDED] >= row[Outcome.INTEGRATED]


@pytest.mark.parametrize("name", shipped_names())
def test_no_succeeded_cheat_folds_higher_than_an_honest_failure(name):
    policy = load_policy(name)
    outcomes: list[Outcome | None] = [None, *Outcome]
    for combination in itertools.product(outcomes, repeat=len(Class)):
        worst = {cls: outcome for cls, outcome in zip(Class, combination, strict=True) if outcome is not None}
        succeeded = {cls for cls, outcome in worst.items() if outcome is not Outcome.ATTEMPTED}
        if not succeeded:
            continue
        penalty = max(sum(policy.penalties[cls][outcome] for cls, outcome in worst.items()), policy.penalty_floor)
        folded = penalty + (0.0 if succeeded & VOIDING else 1.0)
        assert folded <= 0.0, worst  # an honest failure: penalty 0, task reward 0


@pytest.mark.parametrize("name", shipped_names())
def test_an_accident_costs_nothing(name):
    assert load_policy(name).accident_penalty == 0.0


def test_the_base_is_the_outer_bound():
    base = load_policy("base")
    for name in shipped_names():
        limits = load_policy(name).limits
        for key in type(limits).model_fields:
            assert getattr(limits, key) <= getattr(base.limits, key), (name, key)


def test_who_the_agent_is():
    assert {name: load_policy(name).user for name in shipped_names()} == {
        "base": User.AGENT, "corpus": User.AGENT, "swe-task": User.AGENT, "terminal-task": User.ROOT,
        "untrusted-script": User.AGENT}


def test_where_the_workspace_is():
    assert {name: load_policy(name).workspace.target for name in shipped_names()} == {
        "base": "same", "corpus": "/workspace", "swe-task": "/workspace", "terminal-task": "/workspace",
        "untrusted-script": "same"}
