"""The stock of boxes made ahead: what is kept, what is given back, what is handed out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dsec_guard.errors import SetupError, UsageError
from dsec_guard.policy.compile import Plan
from dsec_guard.policy.schema import Bind, Policy
from dsec_guard.service.watched import MOST_READY, READY_MAX_AGE_S, BoxShape, ReadyBoxes


@dataclass(eq=False)
class FakeBox:
    name: str
    made_at: float
    alive: bool = True
    closed: int = 0
    fails: bool = False

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise SetupError("still alive", step="kill")


@dataclass
class Yard:
    now: float = 100.0
    made: list[FakeBox] = field(default_factory=list)
    refuse_after: int | None = None

    def make(self, _shape: BoxShape, name: str) -> FakeBox:
        if self.refuse_after is not None and len(self.made) >= self.refuse_after:
            raise SetupError("no more", step="clone")
        self.made.append(FakeBox(name, self.now))
        return self.made[-1]


@pytest.fixture
def yard() -> Yard:
    return Yard()


@pytest.fixture
def ready(yard: Yard) -> ReadyBoxes:
    return ReadyBoxes(yard.make, clock=lambda: yard.now)  # type: ignore[arg-type]


@pytest.fixture
def shape() -> BoxShape:
    return BoxShape(policy=Policy(), plan=object())  # type: ignore[arg-type]


def test_boxes_are_handed_out_once_oldest_first(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    assert ready.fill(shape, 2) == 2
    assert [ready.take(shape), ready.take(shape), ready.take(shape)] == [*yard.made, None]
    assert len({box.name for box in yard.made}) == 2
    assert [box.closed for box in yard.made] == [0, 0]


def test_fill_makes_only_what_is_missing_and_gives_back_what_is_too_much(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    ready.fill(shape, 3)
    assert ready.fill(shape, 3) == 0
    assert ready.fill(shape, 1) == 0
    assert [box.closed for box in yard.made] == [0, 1, 1]
    ready.fill(shape, 0)
    assert len(ready) == 0
    assert yard.made[0].closed == 1


@pytest.mark.parametrize("fault", ["old", "dead"])
def test_an_old_or_dead_box_is_never_handed_out(ready: ReadyBoxes, yard: Yard, shape: BoxShape, fault: str) -> None:
    ready.fill(shape, 1)
    if fault == "old":
        yard.now += READY_MAX_AGE_S
    else:
        yard.made[0].alive = False
    assert ready.take(shape) is None
    assert yard.made[0].closed == 1
    assert ready.fill(shape, 1) == 1


def test_fill_gives_back_old_boxes_of_other_shapes(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    ready.fill(shape, 1)
    yard.now += READY_MAX_AGE_S
    other = BoxShape(policy=shape.policy, plan=shape.plan, binds=(Bind(source="/usr", target="/data"),))
    ready.fill(other, 1)
    assert [box.closed for box in yard.made] == [1, 0]


@pytest.mark.parametrize("other", ["policy", "plan", "binds"])
def test_another_kind_of_box_is_not_a_stand_in(ready: ReadyBoxes, shape: BoxShape, other: str) -> None:
    ready.fill(shape, 1)
    changed: dict[str, object] = {"policy": shape.policy, "plan": shape.plan}
    changed[other] = {"policy": Policy(), "plan": object(), "binds": (Bind(source="/usr", target="/data"),)}[other]
    assert ready.take(BoxShape(**changed)) is None  # type: ignore[arg-type]
    assert ready.take(shape) is not None


def test_what_was_made_before_a_failure_stays(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    yard.refuse_after = 2
    with pytest.raises(SetupError):
        ready.fill(shape, 3)
    assert len(ready) == 2


def test_the_number_of_all_boxes_is_bounded(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    ready.fill(shape, 2)
    other = BoxShape(policy=Policy(), plan=Plan.__new__(Plan))
    with pytest.raises(UsageError):
        ready.fill(other, MOST_READY - 1)
    assert len(yard.made) == 2


def test_close_gives_all_back_also_past_one_that_fails(ready: ReadyBoxes, yard: Yard, shape: BoxShape) -> None:
    ready.fill(shape, 3)
    yard.made[0].fails = True
    with pytest.raises(SetupError):
        ready.close()
    assert [box.closed for box in yard.made] == [1, 1, 1]
    ready.close()
