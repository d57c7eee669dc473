"""A running sandbox and everything it holds: made in one order, given back in the other.

The guard's side only: what runs between clone and exec is `native/dg_setup.c`, what may be opened inside is composed by
`rootfs.py`. A box knows nothing of monitors or verdicts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsec_guard.errors import SetupError
from dsec_guard.host.cgroup import BoxCgroup, CgroupLimits, Instance
from dsec_guard.host.uids import UidRange
from dsec_guard.model import Phase
from dsec_guard.policy.compile import AGENT_UID, Plan
from dsec_guard.policy.schema import Bind, HiddenStyle, Policy
from dsec_guard.sandbox.decoys import Alias, DecoyTree, build_decoys
from dsec_guard.sandbox.environment import HOSTNAME, UMASK, encode_environment
from dsec_guard.sandbox.holder import Holder
from dsec_guard.sandbox.launch import BoxInit, Launcher, StartedExec
from dsec_guard.sandbox.owners import can_idmap, copy_workspace, without_refused_maps
from dsec_guard.sandbox.rootfs import RootContext, RootPlan, aliases_of, compose_root, workspace_target
from dsec_guard.sandbox.roots import Root, RootCache
from dsec_guard.sandbox.seal import Seal, seal_repository
from dsec_guard.sandbox.spec import (
    NO_FLAGS,
    ExecRequest,
    LandlockRule,
    LandlockSpec,
    MountFlag,
    OpKind,
    Rlimit,
    RootOp,
    SpawnedBox,
    SpawnSpec,
)
from dsec_guard.sandbox.workspace import WorkspaceDir

PHASES = (Phase.SETUP, Phase.AGENT, Phase.VERIFY)
START_TIMEOUT_S = 10.0
EMPTY_TIMEOUT_S = 5.0
SEAL_OVERLAY = "sealed-repository"
OWN_TASKS = 1  # dg-init counts against pids.max and is not the agent's


@dataclass(frozen=True, kw_only=True)
class BoxRequest:
    """What a box is made for. binds: beside the policy's, read-only. covered: host directories that show empty and
    read-only where the workspace contains them. stage_dir: an existing directory that the launcher mounts over in the
    box's own mount namespace."""

    name: str
    policy: Policy
    plan: Plan
    workspace: WorkspaceDir | None = None
    binds: tuple[Bind, ...] = ()
    covered: tuple[Path, ...] = ()
    stage_dir: Path = Path("/run/dsec-guard/stage")


class Box:
    """One sandbox. `create` builds it, `exec` runs commands in it, `kill` empties it, `close` gives everything back."""

    def __init__(self, request: BoxRequest, stack: contextlib.ExitStack) -> None:
        self.request = request
        self._stack = stack
        self.cgroup: BoxCgroup
        self.uids: UidRange
        self.decoys: DecoyTree
        self.root: RootPlan
        self.seal: Seal | None = None
        self.spawned: SpawnedBox
        self.init: BoxInit
        self.unmapped: tuple[str, ...] = ()
        self._emptied = False

    @property
    def id(self) -> int:
        """The inode number of the box's v2 cgroup directory: its name for the kernel and for records."""
        return self.cgroup.id

    @property
    def agent_owner(self) -> tuple[int, int]:
        """Host uid and gid of the agent's user."""
        plan = self.request.plan
        return self.uids.base + plan.agent_uid, self.uids.base + plan.agent_gid

    @classmethod
    def create(cls, request: BoxRequest, *, instance: Instance, holder: Holder, launcher: Launcher, run_dir: Path,
               roots: RootCache, before_spawn: Callable[[Box], None]) -> Box:
        """Build a box up to its waiting dg-init. before_spawn: called when the box has its cgroup and decoys, before any
        of its tasks exists (the monitor learns of it there).

        Raises: SetupError, HostError; everything made so far is given back.
        """
        with contextlib.ExitStack() as stack:
            box = cls(request, stack)
            box._build(instance, holder, launcher, run_dir, roots, before_spawn)
            box._stack = stack.pop_all()
            return box

    def _build(self, instance: Instance, holder: Holder, launcher: Launcher, run_dir: Path,
               roots: RootCache, before_spawn: Callable[[Box], None]) -> None:
        request, policy, plan, stack = self.request, self.request.policy, self.request.plan, self._stack
        limits = policy.limits
        self.uids = stack.enter_context(UidRange.acquire(run_dir))
        # The range stays taken for as long as a process of it can live, which may be longer than the guard does.
        holder.hold_fd(f"uids-{self.uids.base}", self.uids.fd)
        stack.callback(holder.drop_fd, f"uids-{self.uids.base}")
        self.cgroup = instance.create_box(
            request.name, CgroupLimits(memory=limits.memory, pids=limits.pids + OWN_TASKS, cpus=limits.cpus))
        stack.callback(self._release_cgroup, holder)
        holder.register_box(self.id, self.cgroup)
        userns = launcher.make_userns(self.uids.base, owner=None, agent_uid=plan.agent_uid)
        stack.callback(os.close, userns)
        owner_map = -1
        if request.workspace is not None:
            owner_map = launcher.make_userns(self.uids.base, owner=(request.workspace.uid, request.workspace.gid),
                                             agent_uid=plan.agent_uid)
            stack.callback(os.close, owner_map)
        context = RootContext(
            workspace=request.workspace.path if request.workspace is not None else None, agent_uid=AGENT_UID,
            agent_gid=AGENT_UID, hostname=HOSTNAME, binds=request.binds,
            cgroup_v1=tuple(c for c, mount in instance.host.placed.items() if mount is not None),
            cgroup_v2_limits=instance.host.placed.get("memory", False) is None,
        )
        self.seal = self._sealed(aliases_of(policy, context))
        self.decoys = build_decoys(policy.answers, secrets.token_bytes(16), owner_uid=self.uids.base,
                                   owner_gid=self.uids.base, aliases=aliases_of(policy, context),
                                   planted=self.seal.planted if self.seal is not None else ())
        stack.callback(self.decoys.close)
        context = replace(context, decoys=self.decoys)

        def compose() -> Root:
            root = compose_root(policy, context)
            ops, unmapped = without_refused_maps(root.ops, userns)
            return Root(root=root, ops=ops, unmapped=unmapped, policy=policy, plan=plan)

        owner = (request.workspace.uid, request.workspace.gid) if request.workspace is not None else None
        known = roots.get(policy, plan, context, owner, compose)
        alike = self.seal is None  # a sealed repository is one box's own
        self.root, ops, self.unmapped = known.root, known.for_box(context), known.unmapped
        if request.workspace is not None and not can_idmap(request.workspace.path, owner_map):
            ops, alike = self._copied_workspace(request.workspace, ops), False
            self.unmapped += (self.root.workspace,)
        ops = (*self._with_seal(ops), *self._covers())
        before_spawn(self)
        spec = SpawnSpec(
            name=request.name, hostname=HOSTNAME, base_uid=self.uids.base, cgroup_fd=self.cgroup.dir_fd,
            userns_fd=userns, owner_map_fd=owner_map, v1_tasks_fds=self.cgroup.v1_tasks_fds, ops=ops,
            store_bytes=limits.disk, store_inodes=limits.files,
            notify_filter=plan.notify_filter, exec_filters=tuple(plan.exec_filters[p] for p in PHASES),
            landlock=tuple(_landlock(plan, phase) for phase in PHASES),
            rlimits=tuple(Rlimit(*limit) for limit in plan.rlimits), stage_dir=str(request.stage_dir),
            caps=plan.caps, check_phase=PHASES.index(Phase.AGENT), check_syscalls=plan.proofs,
        )
        self.spawned = launcher.spawn(spec, roots.pack(known, spec) if alike else None)
        self.cgroup.close_tasks()
        stack.callback(self._close_spawned)
        self.init = BoxInit(self.spawned.init_fd)

    def _sealed(self, aliases: Sequence[Alias]) -> Seal | None:
        """The task's repository without its later history, in a directory that is removed with the box."""
        policy, workspace = self.request.policy, self.request.workspace
        if policy.answers.repository is None:
            return None
        hidden = tuple(item.path.rstrip("/") + "/" for item in policy.answers.hidden)
        if f"{policy.answers.repository.path.rstrip('/')}/.git/".startswith(hidden):
            return None  # its decoy stands there
        directory = self.request.stage_dir.parent / f"{self.request.name}-repository"
        self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return seal_repository(
            policy.answers.repository, aliases, directory, owner=self.agent_owner,
            workspace=workspace_target(policy, workspace.path if workspace is not None else None),
            decoys=policy.answers.style is HiddenStyle.DECOY, seed=secrets.token_bytes(16))

    def _with_seal(self, ops: tuple[RootOp, ...]) -> tuple[RootOp, ...]:
        """The sealed `.git` over the real one, before the decoys that stand in it."""
        if self.seal is None:
            return ops
        flags = MountFlag.NOSUID | MountFlag.NODEV | (NO_FLAGS if self.seal.writable else MountFlag.RO)
        plan = self.request.plan
        own = [RootOp(OpKind.OVERLAY, self.seal.target.lstrip("/"), source=str(self.seal.directory), name=SEAL_OVERLAY,
                      flags=flags, uid=plan.agent_uid, gid=plan.agent_gid)]
        own += [RootOp(OpKind.MASK_DIR, path.lstrip("/"), flags=MountFlag.OPTIONAL) for path in self.seal.masked]
        own += [RootOp(OpKind.MASK_FILE, path.lstrip("/"), flags=MountFlag.OPTIONAL) for path in self.seal.bundles]
        at = next((i for i, op in enumerate(ops) if op.kind is OpKind.TREE), len(ops))
        return (*ops[:at], *own, *ops[at:])

    def _covers(self) -> tuple[RootOp, ...]:
        workspace = self.request.workspace
        if workspace is None:
            return ()
        return tuple(RootOp(OpKind.MASK_DIR, f"{self.root.workspace}/{path.relative_to(workspace.path)}".lstrip("/"),
                            flags=MountFlag.OPTIONAL)
                     for path in self.request.covered if workspace.path in path.parents)

    def _copied_workspace(self, workspace: WorkspaceDir, ops: tuple[RootOp, ...]) -> tuple[RootOp, ...]:
        """The workspace's file system maps no owners: the overlay's lower becomes a copy that is the agent's own."""
        copy = self.request.stage_dir.parent / f"{self.request.name}-workspace"
        self._stack.callback(shutil.rmtree, copy, ignore_errors=True)
        copy_workspace(workspace.path, copy, self.agent_owner, max_bytes=self.request.policy.limits.disk)
        return tuple(replace(op, source=str(copy), flags=op.flags & ~(MountFlag.IDMAP_OWNER | MountFlag.IDMAP_BOX))
                     if op.kind is OpKind.OVERLAY else op for op in ops)

    def forget_listener(self) -> None:
        """The holder has the seccomp listener now and has to be the only one: an epoll set reports a closed descriptor for
        as long as another copy of it is open (epoll(7), questions and answers, 6)."""
        os.close(self.spawned.listener_fd)
        self.spawned = replace(self.spawned, listener_fd=-1)

    def _close_spawned(self) -> None:
        spawned = self.spawned
        self.init.close()
        for fd in (spawned.pidfd, spawned.store_fd, spawned.root_fd, spawned.listener_fd,
                   *spawned.overlay_fds.values(), *spawned.upper_fds.values()):
            if fd >= 0:
                os.close(fd)

    def _release_cgroup(self, holder: Holder) -> None:
        if not self._emptied:
            self.kill()
        if not self.cgroup.remove(deadline_s=EMPTY_TIMEOUT_S):
            return  # the holder keeps it and tries again at its end
        holder.release_box(self.id)

    def exec(self, argv: tuple[bytes, ...], *, environment: Mapping[str, str], stdio: tuple[int, int, int],
             tty: bool = False, phase: Phase = Phase.AGENT, cwd: str | None = None,
             meanwhile: Callable[[], None] | None = None) -> StartedExec:
        """Start one command as the agent's user. environment: all of it (`compose_environment`). meanwhile: see BoxInit.

        Raises: SetupError with errno_name ENOENT or EACCES where it cannot be."""
        plan = self.request.plan
        return self.init.exec(ExecRequest(
            argv=argv, env=encode_environment(environment), umask=UMASK,
            cwd=os.fsencode(cwd if cwd is not None else self.root.workspace or plan.home),
            uid=plan.agent_uid, gid=plan.agent_gid, caps=plan.caps, phase=PHASES.index(phase), tty=tty, stdio=stdio,
        ), timeout=START_TIMEOUT_S, meanwhile=meanwhile)

    def kill(self) -> None:
        """End every process of the box, and prove it by the empty cgroup. Raises SetupError when some survive."""
        self.cgroup.kill()
        if not self.cgroup.wait_empty(EMPTY_TIMEOUT_S):
            raise SetupError(f"processes of the box {self.request.name} are still alive {EMPTY_TIMEOUT_S:.0f} s after "
                             "they were killed", step="kill",
                             hint="a process in an uninterruptible wait; look at its stack in /proc/PID/stack")
        self._emptied = True  # with dg-init gone, nothing can start in it any more

    def close(self) -> None:
        """Kill what is left and give everything back. Repeating is harmless."""
        self._stack.close()


def _landlock(plan: Plan, phase: Phase) -> LandlockSpec | None:
    found = plan.landlock[phase]
    if found is None:
        return None
    return LandlockSpec(
        handled_fs=found.handled_fs, handled_net=found.handled_net, scoped=found.scoped,
        rules=tuple(LandlockRule(r.path, r.access) for r in found.rules), ports=tuple(found.ports),
    )
