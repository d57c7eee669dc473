"""The cache of composed roots: what is alike is composed once, what a box has of its own stays its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from dsec_guard.policy.compile import Plan
from dsec_guard.policy.load import load_policy
from dsec_guard.sandbox.decoys import DecoyMount, DecoyTree
from dsec_guard.sandbox.rootfs import RootContext, RootPlan
from dsec_guard.sandbox.roots import Root, RootCache
from dsec_guard.sandbox.spec import OpKind, RootOp

POLICY = load_policy("untrusted-script")
PLAN = cast("Plan", object())


def decoys(*placed: tuple[str, int]) -> DecoyTree:
    return DecoyTree(mounts=[DecoyMount(target, fd, is_dir=False) for target, fd in placed])


class Cache:
    """A cache with a clock of the test's; counts what was composed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.composed = 0
        self.cache = RootCache(keep_s=1.0, clock=lambda: self.now)

    def ask(self, context: RootContext, owner: tuple[int, int] | None = None) -> tuple[RootOp, ...]:
        def compose() -> Root:
            self.composed += 1
            trees = context.decoys.mounts if context.decoys else []
            ops = (RootOp(OpKind.DIR, "etc"), *(RootOp(OpKind.TREE, item.target.lstrip("/"), fd=item.fd) for item in trees))
            root = RootPlan(ops=ops, workspace="", home="/home/agent", tmp="/tmp", readable=(), writable=(),
                            store_places={}, kernel_paths=())
            return Root(root=root, ops=ops, unmapped=(), policy=POLICY, plan=PLAN)

        return self.cache.get(POLICY, PLAN, context, owner, compose).for_box(context)


def test_boxes_alike_share_a_root_and_keep_their_own_decoys() -> None:
    cache = Cache()
    first = cache.ask(RootContext(decoys=decoys(("/answers", 11), ("/key", 12))))
    second = cache.ask(RootContext(decoys=decoys(("/answers", 21), ("/key", 22))))
    assert cache.composed == 1
    assert [(op.target, op.fd) for op in first] == [("etc", -1), ("answers", 11), ("key", 12)]
    assert [(op.target, op.fd) for op in second] == [("etc", -1), ("answers", 21), ("key", 22)]


def test_the_host_is_looked_at_again_after_a_while() -> None:
    cache = Cache()
    context = RootContext()
    cache.ask(context)
    cache.now = 0.99
    cache.ask(context)
    assert cache.composed == 1
    cache.now = 1.0
    cache.ask(context)
    assert cache.composed == 2


@pytest.mark.parametrize("other", [
    RootContext(workspace=Path("/elsewhere")), RootContext(agent_uid=7), RootContext(decoys=decoys(("/key", 5))),
    RootContext(cgroup_v1=("memory",)), RootContext(owner_map=False),
])
def test_what_differs_is_composed_anew(other: RootContext) -> None:
    cache = Cache()
    cache.ask(RootContext(decoys=DecoyTree()))
    cache.ask(replace(other, decoys=other.decoys or DecoyTree()))
    assert cache.composed == 2


def test_another_owner_of_the_workspace_is_another_root() -> None:
    cache = Cache()
    cache.ask(RootContext(), owner=(0, 0))
    cache.ask(RootContext(), owner=(1000, 1000))
    assert cache.composed == 2
