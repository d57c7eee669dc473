"""The embedded guard: a host of boxes inside the caller's own process.

`Guard.open` starts what its boxes share (holder, launcher, BPF object, one instance directory in every cgroup hierarchy);
`Guard.run` builds one box, lets one command run in it, and turns what the kernel saw into a RunOutcome. The order at the
end is fixed: the command is gone, the box is empty, evidence is drained, changes are inspected, outputs collected, the box
is judged and recorded, and only then anything is written back to the workspace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from dsec_guard.detect.engine import DetectorSet
from dsec_guard.errors import HostError, SetupError, UsageError
from dsec_guard.host.cgroup import CgroupHost, Instance
from dsec_guard.host.fanotify import FanotifyGroup
from dsec_guard.host.probe import PROBES, HostFeatures, probe
from dsec_guard.incident.store import StateDir
from dsec_guard.monitor.loader import KernelMonitor
from dsec_guard.policy.compile import Plan, compile_policy, needed_features
from dsec_guard.policy.data import data_dir
from dsec_guard.policy.schema import Bind, Policy
from dsec_guard.sandbox.holder import Holder
from dsec_guard.sandbox.launch import Launcher
from dsec_guard.sandbox.roots import RootCache
from dsec_guard.sandbox.stdio import BoxIO
from dsec_guard.sandbox.workspace import WorkspaceDir, recover
from dsec_guard.service.reaper import RUN_DIR, Ownership, reap
from dsec_guard.service.request import RunOutcome, RunRequest
from dsec_guard.service.run import Run
from dsec_guard.service.watched import BoxShape, ReadyBoxes, WatchedBox

_PLANS_KEPT = 256
LINGER_S = 1.0  # the program on sys_exit, after the last box of level full
RUN_DIR_VARIABLE = "DSEC_GUARD_RUN_DIR"
NATIVE_DIR = Path(__file__).resolve().parent.parent / "_native"


def run_dir_path() -> Path:
    """$DSEC_GUARD_RUN_DIR, else /run/dsec-guard. Raises: UsageError for a relative path."""
    path = Path(os.environ.get(RUN_DIR_VARIABLE) or RUN_DIR)
    if not path.is_absolute():
        raise UsageError(f"{RUN_DIR_VARIABLE}={path} is no absolute path", hint=f"unset it, or use {RUN_DIR}")
    return path


class Guard:
    """See the module. One thread uses it at a time; many guards may live side by side on a host."""

    def __init__(self, state: StateDir, run_dir: Path, on_warning: Callable[[str], None]) -> None:
        self.state = state
        self.run_dir = run_dir
        self.on_warning = on_warning
        self.detectors = DetectorSet.load(data_dir("detectors"))
        #: What verdicts are made from: it must not be in a command's hands.
        self.own_places = state.path.resolve(), run_dir.resolve()
        self._stack = contextlib.ExitStack()
        self._covered: set[Path] = set()
        self._plans: dict[tuple[int, str, tuple[str, ...]], tuple[Policy, Plan]] = {}
        self.roots = RootCache()
        self.ready = ReadyBoxes(lambda shape, name: WatchedBox.create(self, shape, name))
        self._features: dict[tuple[str, ...], HostFeatures] = {}
        self.instance: Instance
        self.holder: Holder
        self.launcher: Launcher
        self.fanotify: FanotifyGroup | None = None
        self.monitor: KernelMonitor | None = None
        self.monitor_error = ""
        self.stage_dir: Path

    @classmethod
    def open(cls, state_dir: Path | None = None, *, run_dir: Path | None = None,
             on_warning: Callable[[str], None] = lambda _text: None) -> Guard:
        """Remove what dead guards left, then start what boxes share.

        state_dir: see StateDir.open. run_dir: for locks and mount points, on a file system of this boot; None:
        $DSEC_GUARD_RUN_DIR, else /run/dsec-guard. All guards of a host share one, or their boxes may get the same user ids.
        Raises: HostError naming the missing feature, SetupError, UsageError; nothing is left behind then.
        """
        privilege = probe(["root"]).features["root"]
        if not privilege.works:  # said first: everything else would fail for this reason, and say less
            raise HostError(f"dsec-guard needs root's privileges: {privilege.detail}", feature="root",
                            hint=f"{PROBES['root'].remedy.enable}; `dsec-guard doctor` shows what each layer needs")
        guard = cls(StateDir.open(state_dir), run_dir_path() if run_dir is None else run_dir, on_warning)
        try:
            guard._start()
        except BaseException:
            guard.close()
            raise
        return guard

    def _start(self) -> None:
        for left in reap(self.run_dir):
            self.on_warning(f"removed what a guard that was killed left: {left}")
        for workspace in recover(self.journal_dir):
            self.on_warning(f"removed the half-made write-back of a guard that was killed, in {workspace}")
        # The holder comes first and learns of everything before it is made: a kill in between leaves nothing either.
        host = CgroupHost.probe()
        self.holder = self._stack.enter_context(Holder.start(NATIVE_DIR))
        owner = self._stack.enter_context(Ownership.take(self.run_dir, cover=self.cover))
        self.holder.hold_fd("ownership", owner.fd)
        self.stage_dir = owner.directory / "stage"
        self.stage_dir.mkdir(mode=0o700)
        for root in (host.v2.path, *host.v1_mounts):
            self.holder.own_directory(root)
        with self._registered(tuple(base / owner.name for base in host.bases())):
            self.instance = self._stack.enter_context(host.instance(owner.name))
            self.holder.register_instance(self.instance)
        # What lives in the instance has to end before its directories can go.
        self._stack.callback(self.holder.end)
        self.launcher = Launcher(self.holder.launcher_socket)
        self._stack.callback(self.launcher.close)
        try:
            self.monitor = KernelMonitor.load(self.instance.v2_fd, self.instance.v2_level + 1, linger_s=LINGER_S)
            self._stack.callback(self.monitor.close)
        except HostError as err:
            self.monitor_error = str(err)  # whether a box may run without it is the policy's decision
        self._stack.callback(self.ready.close)

    def shape(self, request: RunRequest, plan: Plan, workspace: WorkspaceDir | None) -> BoxShape:
        """What the box of this request is like. plan: `self.plan` of it."""
        return BoxShape(policy=request.policy, plan=plan, workspace=workspace, covered=self.own_places,
                        binds=tuple(Bind(source=str(b.source), target=b.target) for b in request.bind_ro))

    @property
    def journal_dir(self) -> Path:
        """Where notes of write-backs in progress are kept."""
        return self.state.path / "write-back"

    @contextlib.contextmanager
    def cover(self, paths: tuple[Path, ...]) -> Iterator[None]:
        """While the block runs, the holder removes `paths` if we are killed: the last one first."""
        for directory in dict.fromkeys(path.parent for path in paths):
            if directory not in self._covered:
                self.holder.own_directory(directory)
                self._covered.add(directory)
        with self._registered(paths):
            yield

    @contextlib.contextmanager
    def _registered(self, paths: tuple[Path, ...]) -> Iterator[None]:
        for path in paths:
            self.holder.register_path(path)
        try:
            yield
        finally:
            with contextlib.suppress(SetupError):  # a holder that has ended has removed them
                for path in paths:
                    self.holder.release_path(path)

    def features(self, policy: Policy) -> HostFeatures:
        """What of the host this policy asks for, probed once per guard."""
        names = needed_features(policy)
        if names not in self._features:
            self._features[names] = probe(names)
        return self._features[names]

    def plan(self, policy: Policy, workspace: str, readable: tuple[str, ...]) -> Plan:
        """The policy compiled for this host, kept for the next run that asks for the same (a policy object is frozen)."""
        key = (id(policy), workspace, readable)
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            # The policy is kept beside: while it lives, nothing else can have its id.
            self._plans[key] = policy, compile_policy(policy, self.features(policy), workspace=workspace, readable=readable)
        return self._plans[key][1]

    def _plan_of(self, request: RunRequest) -> Plan:
        return self.plan(request.policy, str(request.workspace or ""), tuple(b.target for b in request.bind_ro))

    def prepare(self, request: RunRequest, count: int) -> int:
        """Bring the boxes that wait for requests like this one (same policy object, same binds) to `count`; 0 gives them
        back. A run takes one and leaves the rest; whoever runs many calls this again between them.

        A box made ahead shows the host's /etc of that moment and is replaced after READY_MAX_AGE_S. Returns how many were
        made. Raises: UsageError for a request with a workspace, whose box shows files of the moment it starts, or for too
        many; PolicyError, HostError, SetupError as `run`.
        """
        if request.workspace is not None:
            raise UsageError("boxes with a workspace are not made ahead",
                             hint="give the files by `bind_ro`, or leave this box to `run`")
        if count < 0:
            raise UsageError(f"{count} boxes cannot be kept ready", hint="0 or more")
        return self.ready.fill(self.shape(request, self._plan_of(request), None), count)

    def fanotify_group(self) -> FanotifyGroup:
        """The group that watches decoys and protected files of all boxes; read by the holder."""
        if self.fanotify is None:
            self.fanotify = self._stack.enter_context(FanotifyGroup.open())
            self.holder.watch_fanotify(self.fanotify.fd)
        return self.fanotify

    def run(self, request: RunRequest, io: BoxIO) -> RunOutcome:
        """Run one command in a box of its own, judge it, record it.

        A failure of the guard after the box exists is an outcome (`exit.reason` guard_error, validity infra_fault), so
        that nothing seen before it is lost. Raises: PolicyError, UsageError, HostError, SetupError before that.
        """
        plan = self._plan_of(request)
        with self.state.new_run() as run_dir:
            return Run(self, request, plan, io, run_dir).execute()

    def close(self) -> None:
        """End what boxes shared. Repeating is harmless."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
