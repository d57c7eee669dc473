"""Roots and plans of boxes that are alike, composed once a second instead of once a box.

Composing looks at the host (which directories are there, what /etc holds): a change of it reaches boxes after KEEP_S. What
a box has of its own, its name, user ids and descriptors, is put in each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dsec_guard.policy.compile import Plan
from dsec_guard.policy.schema import Policy
from dsec_guard.sandbox.plan import PackedPlan, pack_plan, repack_plan
from dsec_guard.sandbox.rootfs import RootContext, RootPlan
from dsec_guard.sandbox.spec import OpKind, RootOp, SpawnSpec

KEEP_S = 1.0
_KEPT = 64


@dataclass
class Root:
    """root: as composed, descriptors of decoys included. ops: as the launcher gets them. unmapped: see `owners.py`."""

    root: RootPlan
    ops: tuple[RootOp, ...]
    unmapped: tuple[str, ...]
    policy: Policy  # held: while they live, nothing else can have their ids, which are part of the key
    plan: Plan
    made_at: float = 0.0
    packed: PackedPlan | None = None

    def for_box(self, context: RootContext) -> tuple[RootOp, ...]:
        """The steps with the descriptors of this box's decoys."""
        fds = {item.target.lstrip("/"): item.fd for item in context.decoys.mounts} if context.decoys else {}
        if not fds:
            return self.ops
        return tuple(replace(op, fd=fds[op.target]) if op.kind is OpKind.TREE else op for op in self.ops)


class RootCache:
    """One per guard; `keep_s` 0 composes each time."""

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._roots: dict[tuple[object, ...], Root] = {}

    def get(self, policy: Policy, plan: Plan, context: RootContext, owner: tuple[int, int] | None,
            compose: Callable[[], Root]) -> Root:
        """The root for a box of this kind. owner: the workspace's. Raises: what `compose` does."""
        decoys = tuple(item.target for item in context.decoys.mounts) if context.decoys else None
        key = (id(policy), id(plan), replace(context, decoys=None), owner, decoys)
        found = self._roots.get(key)
        if found is None or self._clock() - found.made_at >= self._keep_s:
            if len(self._roots) >= _KEPT:
                self._roots.clear()
            # The age is that of what was looked at: before, not after.
            began = self._clock()
            found = self._roots[key] = replace(compose(), made_at=began)
        return found

    @staticmethod
    def pack(root: Root, spec: SpawnSpec) -> PackedPlan:
        """The box's plan as bytes. Raises: as `pack_plan`."""
        packed = repack_plan(root.packed, spec) if root.packed is not None else None
        if packed is None:
            packed = root.packed = pack_plan(spec)
        return packed
