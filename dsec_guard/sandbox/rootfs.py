"""The file tree of a box, as an ordered list of steps for the launcher.

Everything that is not listed here is absent inside. The base is a small scaffold, read-only once built; host
directories come in as read-only binds, writable places as directories of the box's one store (a tmpfs with the policy's
byte and inode limits), the workspace as an overlay. No sysfs is mounted: a few plain files stand where programs look
for their limits.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec_guard.errors import UsageError
from dsec_guard.policy.schema import Bind, HiddenStyle, Limits, Policy, RootKind, User
from dsec_guard.sandbox.decoys import Alias, DecoyTree, hidden_places
from dsec_guard.sandbox.environment import AGENT_NAME, HOSTNAME, home_directory
from dsec_guard.sandbox.spec import MountFlag, OpKind, RootOp

WORKSPACE_OVERLAY = "workspace"

_RO = MountFlag.RO | MountFlag.NOSUID | MountFlag.NODEV
_SYSTEM = _RO | MountFlag.IDMAP_BOX
_WRITABLE = MountFlag.NOSUID | MountFlag.NODEV
_OPTIONAL = MountFlag.OPTIONAL

# Entries of the host's /etc that programs need and that hold no secret, as directories or files, bound read-only.
# Left out on purpose: shadow, sudoers, ssh, ssl/private, apt/auth.conf, pip.conf, npmrc, gitconfig, cron, systemd.
_ETC_BINDS = (
    "alternatives", "bash_completion.d", "ca-certificates", "emacs", "fonts", "glvnd", "groff", "gtk-2.0", "gtk-3.0",
    "ImageMagick-6", "java-*", "ld.so.conf.d", "ld-musl-x86_64.d", "lighttpd", "lynx", "magic.d", "maven", "mono", "openmpi",
    "perl", "php", "profile.d", "python*", "R", "skel", "ssl/certs", "terminfo", "texmf", "vim", "xdg", "xml", "sgml",
    "OpenCL", "iproute2", "dpkg", "pki", "crypto-policies",
)
_ETC_FILES = (
    "adduser.conf", "bash.bashrc", "bindresvport.blacklist", "ca-certificates.conf", "debian_version", "deluser.conf",
    "ethertypes", "gai.conf", "host.conf", "inputrc", "issue", "ld.so.cache", "ld.so.conf", "ld-musl-x86_64.path",
    "locale.alias", "locale.conf", "locale.gen", "localtime", "login.defs", "magic", "magic.mime", "mailcap",
    "manpath.config", "mime.types", "nanorc", "netconfig", "networks", "os-release", "profile", "protocols",
    "redhat-release", "rpc", "services", "shells", "ssl/openssl.cnf", "timezone", "wgetrc", "xattr.conf",
)
_COPY_LIMIT = 16 * 1024  # a file up to this size is cheaper copied into the scaffold than bound

_PROC_FILES = (
    "proc/kcore", "proc/kpagecount", "proc/kpageflags", "proc/kpagecgroup", "proc/keys", "proc/key-users",
    "proc/sysrq-trigger", "proc/timer_list", "proc/timer_stats", "proc/sched_debug", "proc/latency_stats", "proc/kmsg",
    "proc/slabinfo", "proc/vmallocinfo", "proc/mtrr", "proc/pagetypeinfo", "proc/interrupts", "proc/iomem",
    "proc/ioports",
)
_PROC_DIRS = ("proc/acpi", "proc/scsi", "proc/asound", "proc/driver", "proc/mpt", "proc/dynamic_debug")
_PROC_READONLY = ("proc/sys", "proc/bus", "proc/fs", "proc/irq", "proc/pressure", "proc/sysvipc")

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_RESERVED = ("/", "/proc", "/sys", "/dev")


@dataclass(frozen=True)
class RootContext:
    """What a box's root depends on beside its policy.

    workspace: host directory of the workspace, links resolved; None for none. owner_map: the launcher gets a second
    user namespace that shows the directory's owner as the agent; False: plain box map (the lower's files then belong to
    nobody inside, unless owned by root). agent_uid/gid: inside. binds: extra read-only binds of the command line.
    decoys: made by `build_decoys` for this box with `aliases_of` this context. cgroup_v1: controllers that bind the box
    through hierarchies of their own; cgroup_v2_limits: its limits stand in its v2 directory.
    """

    workspace: Path | None = None
    agent_uid: int = 1000
    agent_gid: int = 1000
    hostname: str = HOSTNAME
    binds: tuple[Bind, ...] = ()
    decoys: DecoyTree | None = None
    owner_map: bool = True
    host_root: Path = Path("/")
    cgroup_v1: tuple[str, ...] = ()
    cgroup_v2_limits: bool = False


@dataclass(frozen=True)
class RootPlan:
    """ops: for `SpawnSpec.ops`. All paths are absolute and inside.

    workspace: where it stands, "" for none. readable: trees a command may read and execute from, writable: trees it may
    change (for Landlock). store_places: directory name in the box's store -> path inside, for the inspection after the
    run. kernel_paths: masked files of the kernel: nobody has honest business there. harness of the policy is not here.
    """

    ops: tuple[RootOp, ...]
    workspace: str
    home: str
    tmp: str
    readable: tuple[str, ...]
    writable: tuple[str, ...]
    store_places: Mapping[str, str]
    kernel_paths: tuple[str, ...]
    notes: tuple[str, ...] = ()


def workspace_target(policy: Policy, workspace: Path | None) -> str:
    """Where the workspace appears inside; "" without one. Raises UsageError where nothing may be mounted."""
    if workspace is None:
        return ""
    target = str(workspace) if policy.workspace.target == "same" else policy.workspace.target
    clean = "/" + "/".join(part for part in target.split("/") if part)
    if ".." in target.split("/") or not target.startswith("/"):
        raise UsageError(f"workspace.target: {target!r} is no absolute path without '..'")
    if clean in (*_RESERVED, "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64") or clean.startswith(("/proc/", "/sys/", "/dev/")):
        raise UsageError(f"the workspace cannot stand at {clean} inside", hint="set workspace.target: /workspace in the policy")
    return clean


def aliases_of(policy: Policy, context: RootContext) -> tuple[Alias, ...]:
    """Host paths that show inside: what `build_decoys` must know to cover hidden material wherever it shows."""
    aliases = [Alias(bind.source, bind.target) for bind in (*policy.filesystem.binds, *context.binds)]
    if context.workspace is not None:
        aliases.append(Alias(str(context.workspace), workspace_target(policy, context.workspace)))
    root = policy.filesystem.root
    if root.kind is RootKind.DIRECTORY and root.path is not None:
        aliases.append(Alias(root.path, "/"))
    else:
        aliases += [Alias(path, path) for path in policy.filesystem.read
                    if path != "/etc" and os.path.isdir(path) and not os.path.islink(path)]
    return tuple(aliases)


def compose_root(policy: Policy, context: RootContext) -> RootPlan:
    """The steps that build the box's root for `policy`.

    Raises UsageError for a bind, workspace or root that cannot be used, among them any that would show hidden material.
    """
    return _Composer(policy, context).compose()


@dataclass
class _Composer:
    policy: Policy
    context: RootContext
    ops: list[RootOp] = field(default_factory=list)
    readable: list[str] = field(default_factory=list)
    writable: list[str] = field(default_factory=list)
    store_places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)  # inside -> host, of every bind, for mount points below them

    def compose(self) -> RootPlan:
        policy = self.policy
        self._check_exposure()
        if policy.filesystem.root.kind is RootKind.DIRECTORY:
            self._directory_root()
        else:
            self._host_root()
        self._etc_generated()
        self._var()
        self._dev()
        self._proc()
        self._sys()
        self._extra_binds()
        self._writable_places()
        target = self._workspace()
        home = self._home(target)
        self._state()
        self._decoys(target)
        return RootPlan(
            ops=tuple(self.ops), workspace=target, home=home, tmp="/tmp", readable=_unique(self.readable),
            writable=_unique(self.writable), store_places=dict(self.store_places),
            kernel_paths=tuple("/" + path for path in _PROC_FILES), notes=tuple(self.notes),
        )

    # --------------------------------------------------------------------------------------------- small helpers

    def _dir(self, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        self.ops.append(RootOp(OpKind.DIR, _relative(path), mode=mode, uid=uid, gid=gid))

    def _file(self, path: str, content: bytes | str, mode: int = 0o444) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        self.ops.append(RootOp(OpKind.FILE, _relative(path), content=data, mode=mode))

    def _link(self, path: str, text: str) -> None:
        self.ops.append(RootOp(OpKind.SYMLINK, _relative(path), source=text))

    def _bind(self, source: str, path: str, flags: MountFlag = _SYSTEM) -> None:
        self.ops.append(RootOp(OpKind.BIND, _relative(path), source=source, flags=flags))
        self.bound[path] = source

    def _store(self, name: str, path: str, mode: int, uid: int, gid: int) -> None:
        self.ops.append(RootOp(OpKind.STORE, _relative(path), source=name, flags=_WRITABLE, mode=mode, uid=uid, gid=gid))
        self.store_places[name] = path
        self.writable.append(path)

    @property
    def _user(self) -> tuple[int, int]:
        return (0, 0) if self.policy.user is User.ROOT else (self.context.agent_uid, self.context.agent_gid)

    def _host(self, path: str) -> str:
        return str(self.context.host_root / path.lstrip("/"))

    # -------------------------------------------------------------------------------------------- system content

    def _host_root(self) -> None:
        wanted = [_clean(path) for path in self.policy.filesystem.read]
        if "/lib" in wanted:
            wanted += [path for path in ("/lib32", "/libx32") if os.path.lexists(self._host(path))]
        for path in dict.fromkeys(wanted):
            if path in _RESERVED or path in ("/root", "/home", "/var", "/run", "/tmp") or path.startswith(
                    ("/proc/", "/sys/", "/dev/")):
                raise UsageError(f"filesystem.read: {path} of the host is never shown inside",
                                 hint="name the directories below it that the task needs, or use --bind-ro")
            if path == "/etc":
                self._etc_of_host(self._host("/etc"))
            elif os.path.islink(self._host(path)):
                self._link(path, os.readlink(self._host(path)))
                self.readable.append(path)
            elif os.path.exists(self._host(path)):
                self._bind(self._host(path), path)
                self.readable.append(path)

    def _etc_of_host(self, etc: str) -> None:
        self.readable.append("/etc")
        for op in _etc_ops(etc, self._host("/usr"), os.stat(etc).st_mtime_ns):
            self.ops.append(op)
            if op.kind is OpKind.BIND:
                self.bound["/" + op.target] = op.source

    def _directory_root(self) -> None:
        """A prepared tree: its top level is shown entry by entry, so that our own places stand beside it."""
        root = self.policy.filesystem.root.path
        if root is None or not os.path.isdir(root):
            raise UsageError(f"filesystem.root.path: {root!r} is no directory", hint="name a prepared root file system")
        split = {"etc": _ETC_OWN, "var": frozenset(("tmp", "run", "lock")), "home": frozenset()}
        with os.scandir(root) as listing:
            entries = sorted(listing, key=lambda item: item.name)
        for entry in entries:
            if entry.name in ("proc", "sys", "dev", "tmp", "run", "root", "lost+found", ".dockerenv"):
                continue
            if entry.name in split and entry.is_dir(follow_symlinks=False):
                self._dir(f"/{entry.name}")
                self.readable.append(f"/{entry.name}")
                self._entries(entry.path, f"/{entry.name}", split[entry.name])
            else:
                self._entry(entry.path, f"/{entry.name}")
                self.readable.append(f"/{entry.name}")

    def _entries(self, source: str, target: str, skip: frozenset[str]) -> None:
        with os.scandir(source) as listing:
            for item in sorted(listing, key=lambda entry: entry.name):
                if item.name not in skip:
                    self._entry(item.path, f"{target}/{item.name}")

    def _entry(self, source: str, target: str) -> None:
        info = os.lstat(source)
        if stat.S_ISLNK(info.st_mode):
            self._link(target, os.readlink(source))
        elif stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode):
            self._bind(source, target)

    def _etc_generated(self) -> None:
        home, uid, gid = home_directory(self.policy), self.context.agent_uid, self.context.agent_gid
        root_home = home if self.policy.user is User.ROOT else "/root"
        agent_home = f"/home/{AGENT_NAME}" if self.policy.user is User.ROOT else home
        name = self.context.hostname
        self._dir("/etc/apt")
        passwd = (f"root:x:0:0:root:{root_home}:/bin/sh\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
                  f"{AGENT_NAME}:x:{uid}:{gid}:{AGENT_NAME}:{agent_home}:/bin/sh\n"
                  "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n")
        group = f"root:x:0:\ndaemon:x:1:\ntty:x:5:\nutmp:x:43:\n{AGENT_NAME}:x:{gid}:\nnogroup:x:65534:\n"
        self._file("/etc/passwd", passwd)
        self._file("/etc/group", group)
        self._file("/etc/hostname", f"{name}\n")
        self._file("/etc/hosts", f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n")
        # Nothing listens there: a look-up is refused at once instead of running into a time-out.
        self._file("/etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._file("/etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
                                         "networks: files\nprotocols: files\nservices: files\n")
        # No password can match, and programs that insist on the file find it.
        self._file("/etc/shadow", "", mode=0o000)
        self._file("/etc/machine-id", "00000000000000000000000000000001\n")
        self._file("/etc/apt/sources.list", "")
        self._link("/etc/mtab", "/proc/self/mounts")

    def _var(self) -> None:
        self._dir("/var")
        if self.policy.filesystem.root.kind is RootKind.HOST:
            for path in ("/var/cache/apt/archives/partial", "/var/lib/apt/lists/partial", "/var/log", "/var/spool"):
                self._dir(path)
            self.readable.append("/var")
            dpkg = self._host("/var/lib/dpkg")
            if os.path.isdir(dpkg) and "/var/lib/dpkg" not in self.bound:
                self._bind(dpkg, "/var/lib/dpkg")
        self._link("/var/run", "/run")
        self._link("/var/lock", "/run/lock")

    # --------------------------------------------------------------------------------------------- kernel places

    def _dev(self) -> None:
        limits = self.policy.limits
        self._dir("/dev")
        for name in _DEVICES:
            # A read-only mount does not stop writing to a device, only changing its node.
            self._bind(f"/dev/{name}", f"/dev/{name}", MountFlag.RO | MountFlag.NOSUID | MountFlag.NOEXEC)
        for name, text in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                           ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx")):
            self._link(f"/dev/{name}", text)
        self.ops.append(RootOp(OpKind.DEVPTS, "dev/pts", flags=MountFlag.NOSUID | MountFlag.NOEXEC,
                               inodes=max(limits.ptys, 1), gid=5))
        if limits.shm:
            self.ops.append(RootOp(OpKind.TMPFS, "dev/shm", flags=_WRITABLE, mode=0o1777, size_bytes=limits.shm,
                                   inodes=max(min(limits.files, 65536), 64)))
        else:
            self._dir("/dev/shm")  # a tmpfs of size 0 would have no limit
        self.ops.append(RootOp(OpKind.MQUEUE, "dev/mqueue",
                               flags=MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC | _OPTIONAL))
        self.writable += ["/dev/shm", "/dev/mqueue"]

    def _proc(self) -> None:
        self.ops.append(RootOp(OpKind.PROC, "proc", flags=MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC))
        # Read-only first: a mask below would otherwise be covered by the second mount of its parent.
        for path in _PROC_READONLY:
            self.ops.append(RootOp(OpKind.READONLY, path, flags=_RO | MountFlag.NOEXEC | _OPTIONAL))
        for path in _PROC_FILES:
            self.ops.append(RootOp(OpKind.MASK_FILE, path, flags=_OPTIONAL))
        for path in _PROC_DIRS:
            self.ops.append(RootOp(OpKind.MASK_DIR, path, flags=_OPTIONAL))

    def _sys(self) -> None:
        flags = _RO | MountFlag.NOEXEC
        for path, text in _sys_files(self.policy.limits).items():
            if not (self.context.cgroup_v2_limits and path.startswith("/sys/fs/cgroup/")):
                self._file(path, text)
        # The real files where there are any: runtimes look for these mounts, and writing is refused by the mount.
        if self.context.cgroup_v2_limits:
            self.ops.append(RootOp(OpKind.CGROUP, "sys/fs/cgroup", flags=flags))
        for name in self.context.cgroup_v1:
            self.ops.append(RootOp(OpKind.CGROUP, f"sys/fs/cgroup/{name}", name=name, flags=flags))
        self.readable.append("/sys")

    # ----------------------------------------------------------------------------------------- the policy's places

    def _extra_binds(self) -> None:
        for bind in (*self.policy.filesystem.binds, *self.context.binds):
            target = _clean(bind.target)
            if target in (*_RESERVED, "/etc", "/usr", "/tmp", "/run") or target.startswith(("/proc/", "/sys/", "/dev/")):
                raise UsageError(f"a bind cannot stand at {target} inside", hint="choose another place, such as /mnt/data")
            try:
                source = os.path.realpath(bind.source, strict=True)
            except OSError as problem:
                raise UsageError(f"bind {bind.source!r}: {problem.strerror}",
                                 hint="name an existing file or directory of this host") from problem
            if source in _RESERVED or source.startswith(("/proc/", "/sys/")):
                raise UsageError(f"bind {bind.source!r}: {source} of the host is never shown inside")
            if not (os.path.isdir(source) or os.path.isfile(source)):
                raise UsageError(f"bind {bind.source!r}: neither a file nor a directory")
            self._mount_point(target, source)
            self._bind(source, target)
            self.readable.append(target)

    def _mount_point(self, target: str, source: str) -> None:
        """Refuse a mount point that would have to be made inside a read-only bind."""
        above = _covering(target, self.bound)
        if above is not None and not os.path.exists(self.bound[above] + target[len(above):]):
            raise UsageError(f"{source!r} cannot be shown at {target} inside: {above} is read-only and has no such entry",
                             hint="choose a place outside the system directories")

    def _writable_places(self) -> None:
        uid, gid = self._user
        target = workspace_target(self.policy, self.context.workspace)
        places = [_clean(path) for path in (*self.policy.filesystem.temporary, *self.policy.filesystem.write)]
        for path in dict.fromkeys(("/tmp", "/var/tmp", "/run", *places)):
            if path in (target, "/dev/shm", "/dev/mqueue") or (target and path.startswith(target + "/")):
                continue
            if path in _RESERVED or path in ("/usr", "/etc") or path.startswith(("/proc/", "/sys/", "/dev/")):
                raise UsageError(f"filesystem.write: {path} cannot be made writable inside")
            above = _covering(path, self.bound)
            if above is not None and not os.path.isdir(self.bound[above] + path[len(above):]):
                raise UsageError(f"filesystem.write: {path} lies in the read-only {above} and does not exist there")
            name = path.strip("/").replace("/", "-")
            if path == "/run":
                self._store("run", path, 0o755, 0, 0)
            elif path in ("/tmp", "/var/tmp"):
                self._store(name, path, 0o1777, 0, 0)
            else:
                self._store(name, path, 0o755, uid, gid)
        for path, mode in (("/run/lock", 0o1777), ("/run/user", 0o755)):
            self._dir(path, mode)
        self._dir(f"/run/user/{uid}", 0o700, uid, gid)

    def _workspace(self) -> str:
        workspace = self.context.workspace
        target = workspace_target(self.policy, workspace)
        if workspace is None:
            return ""
        above = _covering(target, self.bound)
        if above is not None and not os.path.isdir(self.bound[above] + target[len(above):]):
            raise UsageError(f"the workspace cannot stand at {target} inside: {above} is read-only and has no such directory",
                             hint="set workspace.target: /workspace in the policy")
        flags = _WRITABLE | (MountFlag.IDMAP_OWNER if self.context.owner_map else MountFlag.IDMAP_BOX)
        self.ops.append(RootOp(OpKind.OVERLAY, _relative(target), source=str(workspace), name=WORKSPACE_OVERLAY,
                               flags=flags, uid=self._user[0], gid=self._user[1]))
        self.writable.append(target)
        return target

    def _home(self, target: str) -> str:
        uid, gid = self._user
        home = _clean(home_directory(self.policy))
        if not any(op.target == "root" for op in self.ops):
            self._dir("/root", 0o700)
        self._dir("/home")
        within = [*self.store_places.values(), *([target] if target else [])]
        if any(home == place or home.startswith(place + "/") for place in within):
            return home
        above = _covering(home, self.bound)
        if above is not None and not os.path.isdir(self.bound[above] + home[len(above):]):
            raise UsageError(f"environment.HOME: {home} lies in the read-only {above}")
        self._store("home", home, 0o700 if uid == 0 else 0o755, uid, gid)
        return home

    def _state(self) -> None:
        for item in self.policy.answers.environment_state:
            source, target = item.source or item.path, _clean(item.path)
            if not os.path.exists(source):
                self.notes.append(f"environment state {target} does not exist on this host")
                continue
            self._mount_point(target, source)
            self._bind(os.path.realpath(source), target, _SYSTEM | MountFlag.NOEXEC)
            self.readable.append(target)

    # ------------------------------------------------------------------------------------------- hidden material

    def _check_exposure(self) -> None:
        """A root or bind that shows hidden material must be covered there by a decoy, or the run is refused."""
        aliases = aliases_of(self.policy, self.context)
        covered = {item.target for item in self.context.decoys.mounts} if self.context.decoys else set()
        for place in hidden_places(self.policy.answers, aliases):
            for alias in aliases:
                below = _inside(place.path, alias.target)
                if below is None or not os.path.lexists(os.path.join(alias.source, below)):
                    continue
                if place.path not in covered:
                    raise UsageError(
                        f"hidden material would be readable inside: {place.path} stands in {alias.source}",
                        hint="take it out of that directory, or keep answers.style: decoy so that it is covered")
                if alias.target == "/":
                    self.notes.append(f"the root file system {alias.source} holds hidden material at {place.path}: covered")
            for alias in aliases:
                # The other way round: a bind of something inside the hidden directory.
                if place.source and _inside(os.path.realpath(alias.source), place.source) not in (None, ""):
                    raise UsageError(f"{alias.source} is part of hidden material and would be shown at {alias.target}",
                                     hint="do not bind it")
            if self.policy.answers.style is HiddenStyle.DECOY and self.context.decoys is None:
                raise UsageError(f"no decoys were made for the hidden {place.path}")

    def _decoys(self, workspace: str) -> None:
        if self.context.decoys is None:
            return
        self.notes += self.context.decoys.notes
        for item in self.context.decoys.mounts:
            above = _covering(item.target, self.bound)
            if above is not None and not os.path.lexists(self.bound[above] + item.target[len(above):]):
                self.notes.append(f"no decoy at {item.target}: {above} is read-only and has no such entry")
                continue
            self.ops.append(RootOp(OpKind.TREE, _relative(item.target), fd=item.fd, flags=_RO | MountFlag.NOEXEC))
            self.readable.append(item.target)
        if workspace:
            self.notes += [f"hidden material inside the workspace is covered at {item.target}"
                           for item in self.context.decoys.mounts if _inside(item.target, workspace) is not None]


_ETC_OWN = frozenset((
    "passwd", "passwd-", "group", "group-", "shadow", "shadow-", "gshadow", "gshadow-", "hostname", "hosts",
    "resolv.conf", "nsswitch.conf", "machine-id", "mtab", "apt", "sudoers", "sudoers.d", "ssh",
))


@functools.lru_cache(maxsize=4)
def _etc_ops(etc: str, usr: str, _changed_ns: int) -> tuple[RootOp, ...]:
    """The host's harmless part of /etc; read once per change of the directory, since every box asks for it."""
    ops = [RootOp(OpKind.DIR, name) for name in ("etc", "etc/ssl")]
    for pattern in _ETC_BINDS:
        for name in _glob(etc, pattern):
            path = f"{etc}/{name}"
            if os.path.isdir(path) and not os.path.islink(path):
                ops.append(RootOp(OpKind.BIND, f"etc/{name}", source=path, flags=_SYSTEM))
    for name in _ETC_FILES:
        op = _etc_file(etc, usr, name)
        if op is not None:
            ops.append(op)
    ops += [RootOp(OpKind.DIR, f"etc/apt/{name}")
            for name in ("apt.conf.d", "preferences.d", "sources.list.d", "trusted.gpg.d")]
    return tuple(ops)


def _etc_file(etc: str, usr: str, name: str) -> RootOp | None:
    path, target = f"{etc}/{name}", f"etc/{name}"
    if os.path.islink(path):
        text = os.readlink(path)
        if os.path.normpath(os.path.join(etc, text)).startswith((usr + "/", etc + "/")):
            return RootOp(OpKind.SYMLINK, target, source=text)
    if not os.path.isfile(path):
        return None
    if os.stat(path).st_size <= _COPY_LIMIT:
        return RootOp(OpKind.FILE, target, content=Path(path).read_bytes(), mode=0o444)
    return RootOp(OpKind.BIND, target, source=os.path.realpath(path), flags=_SYSTEM)


def _sys_files(limits: Limits) -> dict[str, str]:
    """Plain files at the places where runtimes look for their size; they hold what the box may use."""
    period = 100_000
    cgroup = {
        "cgroup.controllers": "cpu memory pids\n", "cgroup.subtree_control": "", "cgroup.procs": "", "cgroup.threads": "",
        "cgroup.type": "domain\n", "cgroup.events": "populated 1\nfrozen 0\n", "cgroup.max.depth": "0\n",
        "cgroup.max.descendants": "0\n", "memory.max": f"{limits.memory}\n", "memory.high": "max\n",
        "memory.low": "0\n", "memory.min": "0\n", "memory.swap.max": "0\n", "memory.current": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "pids.max": f"{limits.pids}\n",
        "pids.current": "1\n", "cpu.max": f"{max(int(limits.cpus * period), 1000)} {period}\n", "cpu.weight": "100\n",
        "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
    }
    files = {f"/sys/fs/cgroup/{name}": text for name, text in cgroup.items()}
    cpus = f"0-{(os.cpu_count() or 1) - 1}\n" if (os.cpu_count() or 1) > 1 else "0\n"
    files |= {f"/sys/devices/system/cpu/{name}": cpus for name in ("online", "possible", "present")}
    files["/sys/devices/system/node/online"] = "0\n"
    files["/sys/kernel/mm/transparent_hugepage/enabled"] = "always [madvise] never\n"
    files["/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"] = "2097152\n"
    return files


def _clean(path: str) -> str:
    """An absolute path in normal form. Raises UsageError for a relative one and for `..`."""
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "\0" in path:
        raise UsageError(f"{path!r} is no absolute path without '..'")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def _relative(path: str) -> str:
    return path.lstrip("/")


def _inside(path: str, top: str) -> str | None:
    """`path` relative to `top`, "" for itself, None when it is not below."""
    if path == top:
        return ""
    prefix = top.rstrip("/") + "/"
    return path[len(prefix):] if path.startswith(prefix) else None


def _covering(path: str, bound: Mapping[str, str]) -> str | None:
    """The innermost bind that `path` lies strictly inside of."""
    above = [place for place in bound if path.startswith(place.rstrip("/") + "/")]
    return max(above, key=len) if above else None


def _glob(directory: str, pattern: str) -> list[str]:
    if "*" not in pattern:
        return [pattern] if os.path.lexists(f"{directory}/{pattern}") else []
    head = pattern.rstrip("*")
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(head))
    except OSError:
        return []


def _unique(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(paths))
