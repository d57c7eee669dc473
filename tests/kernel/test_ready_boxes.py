"""Boxes made ahead are judged as those made in the call, serve one run, and leave nothing."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.model import Class, VerdictClass
from dsec_guard.policy.load import load_policy
from dsec_guard.policy.schema import Policy
from dsec_guard.sandbox.stdio import BoxIO, Capture
from dsec_guard.service.guard import Guard
from dsec_guard.service.request import BindRequest, RunOutcome, RunRequest

pytestmark = pytest.mark.needs("run")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    with Guard.open(tmp_path_factory.mktemp("guard") / "state") as opened:
        yield opened


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Hidden answers, and a state file of the host that all boxes show."""
    top = tmp_path_factory.mktemp("task")
    (top / "answers.json").write_text("{}")
    (top / "state.db").write_text("state")
    file = top / "task.yaml"
    file.write_text(
        f"schema: dsec-guard/policy/v1\nextends: untrusted-script\nanswers:\n  hidden:\n    - path: /srv/key/answers.json\n"
        f"      source: {top}/answers.json\n  environment_state:\n    - path: /srv/state/state.db\n"
        f"      source: {top}/state.db\n")
    return load_policy(str(file))


def run(guard: Guard, policy: Policy, script: str, **options: object) -> tuple[RunOutcome, str]:
    out = Capture(65536)
    request = RunRequest(policy=policy, argv=(b"sh", b"-c", script.encode()), **options)  # type: ignore[arg-type]
    with BoxIO(stdin=None, stdout=out, stderr=out) as io:
        outcome = guard.run(request, io)
    return outcome, out.data.decode()


def prepare(guard: Guard, policy: Policy, count: int, **options: object) -> int:
    return guard.prepare(RunRequest(policy=policy, argv=(b"true",), **options), count)  # type: ignore[arg-type]


def shown(outcome: RunOutcome) -> list[tuple[str, str, str, int]]:
    return [(i.cls.value, i.rule, i.object, i.severity) for i in outcome.incidents]


@pytest.mark.parametrize("script", [
    "true", "cat /srv/key/answers.json", "cat /srv/state/state.db; unshare -Ur true; mount -t tmpfs x /mnt; exit 3",
    "head -c 100000 /dev/zero > /tmp/file; sleep 0.2", "kill -9 $$",
])
def test_a_box_made_ahead_is_judged_like_any_other(guard: Guard, policy: Policy, script: str) -> None:
    fresh, said = run(guard, policy, script)
    assert prepare(guard, policy, 1) == 1
    ready, said_ready = run(guard, policy, script)
    assert len(guard.ready) == 0
    assert shown(ready) == shown(fresh)
    assert (ready.exit, ready.verdict, ready.reward) == (fresh.exit, fresh.verdict, fresh.reward)
    if "answers" not in script:  # decoys differ from box to box
        assert said_ready == said
    assert ready.usage.disk_bytes == pytest.approx(fresh.usage.disk_bytes, rel=0.05)


def test_waiting_boxes_take_no_part_in_the_run_of_another(guard: Guard, policy: Policy) -> None:
    prepare(guard, policy, 3)
    for left in (2, 1, 0):
        outcome, _ = run(guard, policy, "cat /srv/key/answers.json; cat /srv/state/state.db")
        assert [i.cls for i in outcome.incidents] == [Class.ANSWER_PEEK] * len(outcome.incidents)
        assert {i.object for i in outcome.incidents} >= {"/srv/key/answers.json"}
        assert outcome.verdict.complete
        assert len(guard.ready) == left
    clean, _ = run(guard, policy, "true")
    assert clean.verdict.cls is VerdictClass.CLEAN


def test_state_of_the_host_stays_protected_when_another_box_of_it_ends(guard: Guard, policy: Policy) -> None:
    assert guard.monitor is not None
    prepare(guard, policy, 2)
    before = guard.monitor.protected
    run(guard, policy, "true")
    assert guard.monitor.protected == before - 1  # the decoy of its own
    prepare(guard, policy, 0)
    assert guard.monitor.protected == 0


def test_environment_time_and_limits_are_those_of_the_run(guard: Guard, policy: Policy) -> None:
    prepare(guard, policy, 1)
    outcome, said = run(guard, policy, "echo $ONE; sleep 0.3; sleep 5", env={"ONE": "of this run"}, wall_ms=1000)
    assert said == "of this run\n"
    assert "timeout" in outcome.flags
    assert 0.9 < outcome.usage.wall_s < 4


def test_a_box_that_was_ended_from_outside_is_passed_over(guard: Guard, policy: Policy) -> None:
    prepare(guard, policy, 1)
    (stock,) = guard.ready._boxes.values()
    os.kill(stock[0].box.spawned.pid, signal.SIGKILL)
    assert select.select([stock[0].box.spawned.pidfd], [], [], 10)[0]
    outcome, said = run(guard, policy, "echo fine")
    assert (outcome.verdict.cls, said) == (VerdictClass.CLEAN, "fine\n")


def test_binds_are_part_of_the_kind(guard: Guard, policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("shown")
    tmp_path.chmod(0o755)
    binds = (BindRequest(source=tmp_path, target="/data"),)
    prepare(guard, policy, 1)
    assert run(guard, policy, "cat /data/file", bind_ro=binds)[1] == "shown"
    assert len(guard.ready) == 1
    prepare(guard, policy, 1, bind_ro=binds)
    assert run(guard, policy, "cat /data/file", bind_ro=binds)[1] == "shown"
    prepare(guard, policy, 0)
    assert len(guard.ready) == 0


def test_bad_numbers_and_workspaces_are_refused(guard: Guard, policy: Policy, tmp_path: Path) -> None:
    prepare(guard, policy, 0)
    for count, options in ((-1, {}), (1, {"workspace": tmp_path}), (10**6, {})):
        with pytest.raises(UsageError) as caught:
            prepare(guard, policy, count, **options)
        assert caught.value.hint
    assert len(guard.ready) == 0


def test_closing_the_guard_ends_waiting_boxes(policy: Policy, tmp_path: Path) -> None:
    with Guard.open(tmp_path / "state") as guard:
        prepare(guard, policy, 2)
        (stock,) = guard.ready._boxes.values()
        pids, cgroups = [w.box.spawned.pid for w in stock], [p for w in stock for p in w.box.cgroup.paths]
        assert all(path.exists() for path in cgroups)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(path.exists() for path in cgroups)
