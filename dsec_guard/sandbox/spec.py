"""What a launcher is asked to build: plain data between the policy side and the binary plan.

`rootfs.py` composes `RootOp`s, `box.py` adds descriptors and limits, `plan.py` packs the whole for `native/`.
Paths in `target` are relative to the new root (no leading slash, no `..`); uids and gids are those seen inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

# What an honest root inside needs, inside the box's user namespace only: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
# SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT.
BOX_CAPS = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18))


class OpKind(IntEnum):
    """One step of building the root; executed in order by the launcher's `build_root`."""

    DIR = 1         # make target and its parents; mode, uid, gid for the last part
    SYMLINK = 2     # target -> text in `source`
    FILE = 3        # target with `content`, mode, uid, gid (lives on the scaffold)
    BIND = 4        # host path `source` at target; a missing mount point is made (directory or file as the source is)
    TREE = 5        # detached mount `fd` (open_tree/fsmount) at target
    TMPFS = 6       # fresh tmpfs: size_bytes, inodes, mode, uid, gid
    STORE = 7       # directory `source` of the box's store at target (made with mode, uid, gid)
    OVERLAY = 8     # lower = host path `source` (or detached tree `fd`), upper/work in the store under `name`
    PROC = 9        # fresh procfs of the box's pid namespace
    DEVPTS = 10     # new instance, inodes = max ptys
    MQUEUE = 11
    READONLY = 12   # bind target on itself, read-only (below an existing mount such as /proc/sys)
    MASK_FILE = 13  # hide an existing file: `source` names a scaffold file bound over it, else a 000 empty file
    CGROUP = 15     # the box's own cgroup: v1 with the controllers in `name` (comma-separated), v2 where it is empty
    MASK_DIR = 14   # hide an existing directory under an empty read-only tmpfs


class MountFlag(IntFlag):
    RO = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    RECURSIVE = 16      # BIND of a whole subtree with its submounts
    IDMAP_BOX = 32      # BIND/OVERLAY lower: on-disk ids shown through the box's user namespace (0 -> base)
    IDMAP_OWNER = 64    # same through the workspace map (the directory's owner -> the agent's uid)
    OPTIONAL = 128      # a missing source or target is no failure


NO_FLAGS = MountFlag(0)


@dataclass(frozen=True)
class RootOp:
    kind: OpKind
    target: str
    source: str = ""
    name: str = ""
    content: bytes = b""
    fd: int = -1
    flags: MountFlag = NO_FLAGS
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    inodes: int = 0


@dataclass(frozen=True)
class LandlockRule:
    """`access` in the kernel's LANDLOCK_ACCESS_FS_* bits, already masked to the ABI of this host."""

    path: str
    access: int


@dataclass(frozen=True)
class LandlockSpec:
    handled_fs: int
    handled_net: int = 0
    scoped: int = 0
    rules: tuple[LandlockRule, ...] = ()
    ports: tuple[tuple[int, int], ...] = ()  # (port, access)


@dataclass(frozen=True)
class Rlimit:
    resource: int
    soft: int
    hard: int


@dataclass(frozen=True)
class SpawnSpec:
    """Everything a box is built from. Descriptors stay owned by the caller.

    base_uid: host uid of the box's uid 0; the box owns base_uid .. base_uid+65535. cgroup_fd: its v2 cgroup directory.
    v1_tasks_fds: `tasks` files of its v1 cgroups (hybrid hosts). userns_fd / owner_map_fd: user namespaces with their
    maps written (the second only for IDMAP_OWNER). notify_filter: BPF program with SECCOMP_RET_USER_NOTIF installed once
    for the whole box (level cold), b"" for none. exec_filters: BPF programs, one per phase index used by ExecRequest.
    landlock: one spec per phase index, None where the host or the policy has none. deadline_ms: for the whole set-up.
    caps: the most that any ExecRequest of this box may ask for. self_check: dg-init proves its denials before it is
    ready, confined as phase `check_phase`; check_syscalls: (number, errno its filter answers to bad arguments).
    """

    name: str
    hostname: str
    base_uid: int
    cgroup_fd: int
    userns_fd: int
    ops: tuple[RootOp, ...]
    store_bytes: int
    store_inodes: int
    v1_tasks_fds: tuple[int, ...] = ()
    owner_map_fd: int = -1
    notify_filter: bytes = b""
    exec_filters: tuple[bytes, ...] = ()
    landlock: tuple[LandlockSpec | None, ...] = ()
    rlimits: tuple[Rlimit, ...] = ()
    namespace_limits_zero: bool = True
    stage_dir: str = "/run/dsec-guard/stage"
    deadline_ms: int = 10_000
    caps: int = BOX_CAPS
    self_check: bool = True
    check_phase: int = 0
    check_syscalls: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ExecRequest:
    """One command for dg-init. stdio: three descriptors (for a pty: the slave three times and tty=True).

    caps: capability bits kept (inside the box's user namespace) by the command; 0 for the agent user.
    phase: index into SpawnSpec.exec_filters and .landlock.
    """

    argv: tuple[bytes, ...]
    env: tuple[bytes, ...]
    cwd: bytes
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    caps: int = 0
    umask: int = 0o022
    phase: int = 0
    tty: bool = False
    stdio: tuple[int, int, int] = (0, 1, 2)


@dataclass(frozen=True)
class SelfCheck:
    """One denial the box's first process proved before any agent code ran: a name, and whether it was refused."""

    name: str
    refused: bool
    detail: str = ""


@dataclass
class SpawnedBox:
    """Handles of a running box; the caller closes them.

    pid: host pid of dg-init. init_fd: SEQPACKET to dg-init. store_fd: O_PATH directory of the store (upper layers,
    writable places). overlay_fds / upper_fds: by RootOp.name. root_fd: O_PATH of the box's root. listener_fd: seccomp
    notification descriptor or -1.
    """

    pid: int
    pidfd: int
    init_fd: int
    store_fd: int
    root_fd: int
    listener_fd: int = -1
    overlay_fds: dict[str, int] = field(default_factory=dict)
    upper_fds: dict[str, int] = field(default_factory=dict)
    checks: tuple[SelfCheck, ...] = ()
    notes: tuple[str, ...] = ()
