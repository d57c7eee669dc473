"""An attachment that lingers: one for users that follow each other closely, none when nobody comes."""

from __future__ import annotations

import threading

import pytest

from dsec_guard.monitor.linger import Lingering


class Hook:
    """What is attached, and each step in order."""

    def __init__(self, linger_s: float) -> None:
        self.steps: list[str] = []
        self.detached = threading.Event()
        self.kept = Lingering(self._attach, self._detach, linger_s)

    def _attach(self) -> int:
        self.steps.append("attach")
        return 7

    def _detach(self, held: int) -> None:
        assert held == 7
        self.steps.append("detach")
        self.detached.set()


def test_without_a_delay_it_ends_with_its_last_user() -> None:
    hook = Hook(0)
    hook.kept.want()
    hook.kept.unwant()
    hook.kept.want()
    assert hook.kept.attached
    hook.kept.close()
    assert hook.steps == ["attach", "detach", "attach", "detach"]


def test_users_that_follow_each_other_share_it() -> None:
    hook = Hook(3600)
    for _ in range(5):
        hook.kept.want()
        hook.kept.unwant()
    assert hook.kept.attached
    hook.kept.close()
    hook.kept.close()
    assert hook.steps == ["attach", "detach"]


def test_it_ends_by_itself_and_can_be_had_again() -> None:
    hook = Hook(0.01)
    for _ in range(2):
        hook.detached.clear()
        hook.kept.want()
        hook.kept.unwant()
        assert hook.detached.wait(30)
    hook.kept.close()
    assert hook.steps == ["attach", "detach"] * 2


def test_it_never_ends_under_a_user() -> None:
    hook = Hook(0.01)
    hook.kept.want()
    hook.kept.unwant()
    hook.kept.want()
    assert not hook.detached.wait(0.1) or hook.steps == ["attach", "detach", "attach"]
    assert hook.kept.attached
    hook.kept.close()


def test_a_refused_attachment_leaves_nothing_behind() -> None:
    def refuse() -> int:
        raise OSError("no")

    kept = Lingering(refuse, lambda held: None, 1)
    with pytest.raises(OSError, match="no"):
        kept.want()
    assert not kept.attached
    kept.close()
