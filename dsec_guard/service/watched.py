"""A box with everything that watches it, and a stock of such boxes made ahead.

Making a box costs several times what running a short command in it does, and nothing of it depends on the command. A guard
asked to `prepare` keeps boxes whose first process waits: each has its own namespaces, user ids, cgroup, decoys and sensors,
has proved its denials, and has run nothing. A box serves one run and is never used again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_guard.errors import DsecGuardError, MonitorError, UsageError
from dsec_guard.model import LayerState
from dsec_guard.monitor.loader import BoxConfig, KernelMonitor, default_watch_prefixes
from dsec_guard.monitor.pump import BoxStream, ProtectedObject
from dsec_guard.policy.compile import Plan
from dsec_guard.policy.schema import Bind, Policy
from dsec_guard.sandbox.box import Box, BoxRequest
from dsec_guard.sandbox.workspace import WorkspaceDir

if TYPE_CHECKING:
    from dsec_guard.service.guard import Guard

READY_MAX_AGE_S = 60.0  # what a box shows of the host's /etc is as old as the box
MOST_READY = 1024


@dataclass(frozen=True, kw_only=True)
class BoxShape:
    """What boxes have to agree on to stand in for each other. covered: see `BoxRequest`."""

    policy: Policy
    plan: Plan
    workspace: WorkspaceDir | None = None
    binds: tuple[Bind, ...] = ()
    covered: tuple[Path, ...] = ()

    @property
    def monitored(self) -> bool:
        """Whether the host has what the layer stands on; without, no monitor is used, whatever was loaded."""
        return all(x.state is LayerState.ENFORCED for x in self.plan.layers if x.name == "monitor")

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for shapes whose boxes are alike. Policy and plan count by identity: the guard compiles each policy once."""
        return id(self.policy), id(self.plan), self.binds, self.covered


class WatchedBox:
    """A box whose sensors were in place before its first task. `begin` starts the clock and lets events through."""

    def __init__(self, box: Box, stream: BoxStream, monitor: KernelMonitor | None, shape: BoxShape) -> None:
        self.box = box
        self.stream = stream
        self.monitor = monitor
        self.shape = shape
        self.made_at = time.monotonic()
        self._stack = contextlib.ExitStack()

    @classmethod
    def create(cls, guard: Guard, shape: BoxShape, name: str) -> WatchedBox:
        """Build a box of this shape up to its waiting first process. name: of its cgroup, unique in the guard.

        Raises: SetupError, HostError, and MonitorError where the policy needs a monitor and there is none; nothing is
        left behind then.
        """
        monitor = guard.monitor if shape.monitored else None
        if shape.monitored and monitor is None:
            raise MonitorError(f"the kernel monitor cannot be started: {guard.monitor_error}",
                               hint="`dsec-guard doctor` shows what is missing; `if_unsupported: degrade` runs without it")
        request = BoxRequest(name=name, policy=shape.policy, plan=shape.plan, workspace=shape.workspace, binds=shape.binds,
                             covered=shape.covered, stage_dir=guard.stage_dir)
        streams: list[BoxStream] = []
        with contextlib.ExitStack() as stack:
            box = Box.create(
                request, instance=guard.instance, holder=guard.holder, launcher=guard.launcher, run_dir=guard.run_dir,
                roots=guard.roots, before_spawn=lambda made: streams.append(_watch(guard, monitor, shape, made, stack)))
            stack.callback(box.close)
            if box.spawned.listener_fd >= 0:
                guard.holder.watch_notify(box.id, box.spawned.listener_fd, shape.plan.notify_errnos)
                box.forget_listener()
            if monitor is not None:
                monitor.set_init(box.id, box.spawned.pid)
            made = cls(box, streams[0], monitor, shape)
            made._stack = stack.pop_all()
            return made

    def begin(self) -> int:
        """From here on events count; nothing of the agent's has run. Returns CLOCK_MONOTONIC nanoseconds, which events
        count from."""
        started_ns = time.monotonic_ns()
        self.stream.restart(started_ns)
        if self.monitor is not None:
            self.monitor.reset_exec(self.box.id)
            self.monitor.go_live(self.box.id)
        return started_ns

    @property
    def alive(self) -> bool:
        """Whether its first process still waits. It can have been ended from outside only."""
        poller = select.poll()
        poller.register(self.box.spawned.pidfd, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        """Kill what is left in the box and give everything back. Repeating is harmless."""
        self._stack.close()


def _watch(guard: Guard, monitor: KernelMonitor | None, shape: BoxShape, box: Box, stack: contextlib.ExitStack) -> BoxStream:
    """Everything that watches, before the box has a task."""
    policy = shape.policy
    # Directories are left out: listing one is what any search by name does.
    files = [item for item in box.decoys.objects if not item.is_dir]
    objects: dict[int, ProtectedObject] = {}
    if monitor is not None:
        watch = (*default_watch_prefixes(), *(os.fsencode(h.path) for h in policy.answers.hidden))
        monitor.add_box(BoxConfig(box_id=box.id, level=policy.monitor.level, event_budget=policy.limits.events,
                                  watch_prefixes=watch))
        stack.callback(monitor.remove_box, box.id)
    for number, item in enumerate(files, start=1):
        known = ProtectedObject(object=item.object, label=item.label, decoy=item.decoy,
                                dev=os.makedev(item.dev >> 20, item.dev & 0xFFFFF), ino=item.ino)
        if monitor is not None:
            number = monitor.protect(known.dev, known.ino)
            stack.callback(monitor.unprotect, known.dev, known.ino)
        objects[number] = known
    decoys = [item for item in files if item.decoy]
    if decoys and any(x.name == "decoys" and x.state is LayerState.ENFORCED for x in shape.plan.layers):
        guard.fanotify_group().mark_all(decoys, box.decoys.open_object)
    return BoxStream(box_id=box.id, started_ns=time.monotonic_ns(), base_uid=box.uids.base, objects=objects)


class ReadyBoxes:
    """Boxes made ahead, by shape. Used by the thread that uses the guard."""

    def __init__(self, make: Callable[[BoxShape, str], WatchedBox], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._boxes: dict[tuple[object, ...], list[WatchedBox]] = {}

    def __len__(self) -> int:
        return sum(len(boxes) for boxes in self._boxes.values())

    def fill(self, shape: BoxShape, count: int) -> int:
        """Bring the stock of this shape to `count`: old and dead boxes go, missing ones are made. 0 gives all back.

        Old and dead ones of other shapes go as well. Returns how many were made. Raises: UsageError for more than
        MOST_READY of all shapes, and as WatchedBox.create; what was made until then stays.
        """
        drop: list[WatchedBox] = []
        for key, boxes in self._boxes.items():
            most = count if key == shape.key else len(boxes)
            usable = [box for box in boxes if self._usable(box)][:most]
            drop += [box for box in boxes if box not in usable]
            boxes[:] = usable
        self._boxes = {key: boxes for key, boxes in self._boxes.items() if boxes}
        _close_all(drop)
        if count > MOST_READY - len(self) + len(self._boxes.get(shape.key, [])):
            raise UsageError(f"{count} ready boxes are too many", hint=f"at most {MOST_READY} of all kinds together")
        made = 0
        while len(self._boxes.get(shape.key, [])) < count:
            self._boxes.setdefault(shape.key, []).append(self._make(shape, f"ready-{secrets.token_hex(10)}"))
            made += 1
        return made

    def take(self, shape: BoxShape) -> WatchedBox | None:
        """The oldest usable box of this shape, now the caller's to close; None when there is none."""
        boxes = self._boxes.get(shape.key, [])
        while boxes:
            box = boxes.pop(0)
            if self._usable(box):
                return box
            box.close()
        return None

    def _usable(self, box: WatchedBox) -> bool:
        return self._clock() - box.made_at < READY_MAX_AGE_S and box.alive

    def close(self) -> None:
        """Give all boxes back."""
        boxes = [box for stock in self._boxes.values() for box in stock]
        self._boxes.clear()
        _close_all(boxes)


def _close_all(boxes: list[WatchedBox]) -> None:
    """Every one is closed, whatever becomes of another; the first failure is raised at the end."""
    failed: DsecGuardError | OSError | None = None
    for box in boxes:
        try:
            box.close()
        except (DsecGuardError, OSError) as problem:
            failed = failed or problem
    if failed is not None:
        raise failed
