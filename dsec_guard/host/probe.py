"""What this host can do, found out by doing it: never by a version number or a configuration file.

Each probe makes the call that the product will make, in a child process where it would change the caller, and undoes
what it made. `DSEC_GUARD_PRETEND_MISSING=btf,landlock` makes the named features look missing: for tests of how the
product behaves on lesser hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import resource
import select
import signal
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsec_guard.host import mount
from dsec_guard.host.landlock import FsRight, landlock_abi
from dsec_guard.host.syscall_table import X86_64

PRETEND_VARIABLE = "DSEC_GUARD_PRETEND_MISSING"
CHILD_TIMEOUT_S = 10.0

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_INTO_CGROUP = 1 << 33
_MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x4000, 0x40000, 0x2, 0x4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Feature:
    """One thing tried. tried: what was done. detail: what came of it. number: the Landlock ABI, 0 elsewhere."""

    name: str
    works: bool
    tried: str
    detail: str = ""
    number: int = 0


@dataclass(frozen=True)
class HostFeatures:
    """The results by name; `rlimit_hard` has this process's hard limits by RLIMIT_* number (absent: unlimited)."""

    features: Mapping[str, Feature]
    rlimit_hard: Mapping[int, int] = field(default_factory=dict)

    def works(self, name: str) -> bool:
        """Raises KeyError for a feature that was not probed."""
        return self.features[name].works

    def detail(self, name: str) -> str:
        return self.features[name].detail

    @property
    def landlock_abi(self) -> int:
        return self.features["landlock"].number if self.works("landlock") else 0


@dataclass(frozen=True)
class Remedy:
    """How to get a missing feature. container: the smallest flags of docker run; pod: of a pod's security context."""

    enable: str
    container: str = ""
    pod: str = ""
    sysctl: str = ""


@dataclass(frozen=True)
class Probe:
    """tried: said to people. run: returns (detail, number); raises OSError or _Missing when the feature is not there.

    depends: features without which this one counts as missing.
    """

    name: str
    tried: str
    remedy: Remedy
    run: Callable[[Path], tuple[str, int]]
    depends: tuple[str, ...] = ()
    optional: bool = False


class _Missing(Exception):
    """The feature is not there; the text says how that showed."""


def _current_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def probe(names: Collection[str] | None = None, *, workspace: Path | None = None) -> HostFeatures:
    """Try every feature, or those in `names` with what they depend on.

    workspace: where id-mapped mounts are tried, since that depends on the file system (default: the current directory,
    or `/` when that has been removed).
    Takes some tens of milliseconds and leaves nothing behind.
    """
    place = workspace if workspace is not None else _current_directory()
    pretended = {n.strip() for n in os.environ.get(PRETEND_VARIABLE, "").split(",") if n.strip()}
    wanted = set(PROBES if names is None else names)
    for one in reversed(list(PROBES.values())):
        if one.name in wanted:
            wanted.update(one.depends)
    found: dict[str, Feature] = {}
    for name, one in PROBES.items():
        if name in wanted:
            found[name] = _try(one, place, found, pretended)
    limits = {number: hard for number in _RLIMITS if (hard := resource.getrlimit(number)[1]) != resource.RLIM_INFINITY}
    return HostFeatures(found, limits)


_RLIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK,
            resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)


def _try(probe: Probe, place: Path, found: Mapping[str, Feature], pretended: Collection[str]) -> Feature:
    if probe.name in pretended:
        return Feature(probe.name, False, probe.tried, f"{PRETEND_VARIABLE} says so")
    lacking = [d for d in probe.depends if not found[d].works]
    if lacking:
        return Feature(probe.name, False, probe.tried, f"needs {lacking[0]}")
    try:
        detail, number = probe.run(place)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        return Feature(probe.name, False, probe.tried, f"{name} {error.strerror or error}".strip())
    except _Missing as error:
        return Feature(probe.name, False, probe.tried, str(error))
    return Feature(probe.name, True, probe.tried, detail, number)


# ------------------------------------------------------------------------------------------------------ small helpers


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _syscall(name: str, *args: object) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _check(int(_libc.syscall(ctypes.c_long(X86_64[name]), *words)), name)


def _unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def _in_child(action: Callable[[], str]) -> str:
    """Run `action` in a forked child and return its text; what it raises is raised here. Raises _Missing when the child
    does not answer in time or dies."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                answer: dict[str, object] = {"text": action()}
            except OSError as error:
                answer = {"errno": error.errno, "text": error.strerror or str(error)}
            except _Missing as error:
                answer = {"missing": str(error)}
            os.write(write_end, json.dumps(answer).encode())
            status = 0
        finally:
            os._exit(status)  # never back into the caller's code, whatever happened above
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], CHILD_TIMEOUT_S)
        raw = os.read(read_end, 65536) if ready else b""
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not raw:
        raise _Missing("the trial process ended without an answer")
    answer = json.loads(raw)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["text"])
    if "missing" in answer:
        raise _Missing(answer["missing"])
    return str(answer["text"])


@contextlib.contextmanager
def _mapped_user_namespace() -> Iterator[int]:
    """A descriptor of a user namespace whose ids 0..65535 are mapped to a high range, kept alive by a child."""
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    done_r, done_w = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(done_w)
            _unshare(_CLONE_NEWUSER)
            os.write(ready_w, b"1")
            os.read(done_r, 1)
        except OSError as error:
            os.write(ready_w, struct.pack("=bi", 0, error.errno or 0))
        finally:
            os._exit(0)
    os.close(ready_w)
    os.close(done_r)
    try:
        answer = os.read(ready_r, 16)
        if answer != b"1":
            number = struct.unpack("=bi", answer)[1] if len(answer) == 5 else errno.EIO
            raise OSError(number, f"unshare(CLONE_NEWUSER): {os.strerror(number)}")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 200000 65536\n")
        descriptor = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        os.close(ready_r)
        os.close(done_w)
        os.waitpid(child, 0)


@dataclass(frozen=True)
class CgroupMounts:
    """v2: where the cgroup2 file system is mounted, None for nowhere. v1: controller -> mount point."""

    v2: Path | None
    v1: Mapping[str, Path]


@functools.cache
def cgroup_mounts() -> CgroupMounts:
    """From /proc/self/mountinfo, the first mount of each."""
    v2: Path | None = None
    v1: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split(" ")[4].encode().decode("unicode_escape"))
        fstype, _, options = right.split(" ", 2)
        if fstype == "cgroup2" and v2 is None:
            v2 = point
        elif fstype == "cgroup":
            for controller in options.split(","):
                v1.setdefault(controller, point)
    return CgroupMounts(v2, v1)


@contextlib.contextmanager
def _trial_cgroup(parent: Path) -> Iterator[Path]:
    path = parent / f"dsec-guard-probe.{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


# ------------------------------------------------------------------------------------------------------------- probes


def _x86_64(_: Path) -> tuple[str, int]:
    machine = platform.machine()
    if machine != "x86_64" or struct.calcsize("P") != 8:
        raise _Missing(f"this is {machine}")
    return machine, 0


_NEEDED_CAPS = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SETPCAP": 8,
                "CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def _root(_: Path) -> tuple[str, int]:
    if os.geteuid() != 0:
        raise _Missing(f"uid {os.geteuid()}")
    effective = next(int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines()
                     if line.startswith("CapEff:"))
    lacking = [name for name, bit in _NEEDED_CAPS.items() if not effective >> bit & 1]
    if lacking:
        raise _Missing(f"root without {', '.join(lacking)}")
    return "uid 0 with the capabilities a guard uses", 0


def _namespaces(_: Path) -> tuple[str, int]:
    def action() -> str:
        _unshare(_CLONE_NEWNS | _CLONE_NEWCGROUP | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET)
        return "mount, cgroup, uts, ipc, pid, net"

    return _in_child(action), 0


def _user_namespaces(_: Path) -> tuple[str, int]:
    with _mapped_user_namespace():
        return "made, with a map of 65536 ids", 0


def _tmpfs_and_overlay(_: Path) -> tuple[str, int]:
    def action() -> str:
        _unshare(_CLONE_NEWNS)
        _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        base = os.fsencode(tempfile.gettempdir())
        _mount(b"tmpfs", base, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,nr_inodes=64")
        for name in (b"lower", b"upper", b"work", b"merged"):
            Path(os.fsdecode(base + b"/" + name)).mkdir()
        options = b"lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work,index=on,xino=on" % (base, base, base)
        _mount(b"overlay", base + b"/merged", b"overlay", _MS_NOSUID | _MS_NODEV, options)
        Path(os.fsdecode(base + b"/merged/file")).write_text("x")
        if not Path(os.fsdecode(base + b"/upper/file")).exists():
            raise _Missing("a file written to the overlay did not reach its upper layer")
        line = next(ln for ln in Path("/proc/self/mountinfo").read_text().splitlines() if " - overlay " in ln and "/merged " in ln)
        if "index=off" in line or "xino=off" in line:
            raise _Missing("the kernel dropped index=on or xino=on")
        return "index=on and xino=on hold"

    return _in_child(action), 0


def _mount(source: bytes, target: bytes, fstype: bytes | None, flags: int, data: bytes | None) -> None:
    _check(_libc.mount(source, target, fstype, ctypes.c_ulong(flags), data), f"mount({(fstype or b'private').decode()})")


def _idmapped(place: Path) -> tuple[str, int]:
    with _mapped_user_namespace() as user_ns:
        tree = mount.open_tree(mount.AT_FDCWD, os.fsencode(place))
        try:
            mount.mount_setattr(tree, set_attributes=mount.MOUNT_ATTR_IDMAP, userns_fd=user_ns)
        finally:
            os.close(tree)
    return f"works on the file system of {place}", 0


def _cgroup_v2(_: Path) -> tuple[str, int]:
    mounts = cgroup_mounts()
    if mounts.v2 is None:
        raise _Missing("no cgroup2 file system is mounted")
    with _trial_cgroup(mounts.v2) as path:
        if not (path / "cgroup.kill").exists():
            raise _Missing("a new cgroup has no cgroup.kill")
    return f"{'hybrid' if 'memory' in mounts.v1 else 'pure'}, {mounts.v2}", 0


def _cgroup_limits(_: Path) -> tuple[str, int]:
    mounts = cgroup_mounts()
    if "memory" in mounts.v1:
        return _v1_limits(mounts)
    if mounts.v2 is None:
        raise _Missing("no cgroup file system is mounted")
    controllers = set((mounts.v2 / "cgroup.controllers").read_text().split())
    lacking = {"memory", "pids", "cpu"} - controllers
    if lacking:
        raise _Missing(f"{mounts.v2} has no {', '.join(sorted(lacking))} controller")
    with _trial_cgroup(mounts.v2) as path:
        enabled = set((path / "cgroup.controllers").read_text().split())
        if "memory" in enabled:
            (path / "memory.max").write_text(str(64 << 20))
    late = sorted({"memory", "pids", "cpu"} - enabled)
    return f"v2: memory, pids, cpu{'; to be switched on for children: ' + ', '.join(late) if late else ''}", 0


def _v1_limits(mounts: CgroupMounts) -> tuple[str, int]:
    for controller, name, value in (("memory", "memory.limit_in_bytes", str(64 << 20)), ("pids", "pids.max", "64"),
                                    ("cpu", "cpu.cfs_quota_us", "100000")):
        if controller not in mounts.v1:
            raise _Missing(f"the v1 hierarchy {controller} is not mounted")
        with _trial_cgroup(mounts.v1[controller]) as path:
            (path / name).write_text(value)
    return "v1: memory, pids, cpu", 0


class _CloneArgs(ctypes.Structure):
    """struct clone_args of linux/sched.h, first three versions."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in (
        "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls", "set_tid",
        "set_tid_size", "cgroup"))


def _clone_into_cgroup(_: Path) -> tuple[str, int]:
    v2 = cgroup_mounts().v2
    if v2 is None:
        raise _Missing("no cgroup2 file system is mounted")
    with _trial_cgroup(v2) as path:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            arguments = _CloneArgs(flags=_CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=descriptor)
            child = _syscall("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
            if child == 0:
                os._exit(0)  # without fork's handlers: nothing of the interpreter may run here
            os.waitpid(child, 0)
        finally:
            os.close(descriptor)
    return "a child began its life there", 0


class _Fprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install_filter(flags: int, verdict: int) -> int:
    program = struct.pack("=HBBI", 0x06, 0, 0, verdict)
    _check(_libc.prctl(38, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    return _syscall("seccomp", 1, flags, ctypes.byref(_Fprog(1, program)))


def _seccomp(_: Path) -> tuple[str, int]:
    def action() -> str:
        _install_filter(0, 0x7FFF0000)
        return "a filter was installed"

    return _in_child(action), 0


def _seccomp_notify(_: Path) -> tuple[str, int]:
    def action() -> str:
        os.close(_install_filter(1 << 3, 0x7FFF0000))  # SECCOMP_FILTER_FLAG_NEW_LISTENER
        return "a filter with a listener was installed"

    return _in_child(action), 0


def _landlock(_: Path) -> tuple[str, int]:
    abi = landlock_abi()
    if abi < 1:
        raise _Missing("the kernel knows no ruleset")

    def action() -> str:
        attribute = struct.pack("=Q", FsRight.READ_DIR)  # struct landlock_ruleset_attr: handled_access_fs
        ruleset = _syscall("landlock_create_ruleset", attribute, len(attribute), 0)
        _check(_libc.prctl(38, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _syscall("landlock_restrict_self", ruleset, 0)
        try:
            os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            if error.errno == errno.EACCES:
                return f"ABI {abi}, listing a directory was refused"
        raise _Missing("a ruleset was taken, but it refused nothing")

    return _in_child(action), abi


def _fanotify(_: Path) -> tuple[str, int]:
    # FAN_CLASS_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK; FAN_MARK_ADD; FAN_OPEN_PERM: linux/fanotify.h
    group = _syscall("fanotify_init", 0x4 | 0x1 | 0x2, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with tempfile.NamedTemporaryFile() as file:
            _syscall("fanotify_mark", group, 0x1, 0x00010000, -100, os.fsencode(file.name))
    finally:
        os.close(group)
    return "a file was marked for permission events", 0


def _btf(_: Path) -> tuple[str, int]:
    with open("/sys/kernel/btf/vmlinux", "rb") as file:
        if struct.unpack("=H", file.read(2)) != (0xEB9F,):
            raise _Missing("/sys/kernel/btf/vmlinux is no BTF")
    return "/sys/kernel/btf/vmlinux", 0


# linux/bpf.h
_BPF_PROG_LOAD, _BPF_PROG_ATTACH, _BPF_PROG_DETACH, _BPF_RAW_TRACEPOINT_OPEN = 5, 8, 9, 17
_PROG_CGROUP_SOCK_ADDR, _PROG_TRACING, _PROG_LSM = 18, 26, 29
_ATTACH_INET4_CONNECT, _ATTACH_TRACE_RAW_TP, _ATTACH_LSM_MAC = 10, 23, 27


@functools.cache
def _libbpf() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise _Missing(f"libbpf.so.1 cannot be loaded ({error})") from error
    # LIBBPF_PRINT callback NULL: what libbpf would write to stderr is in the results below.
    library.libbpf_set_print(None)
    return library


def _load_program(program_type: int, attach_type: int, result: int, btf_id: int = 0) -> int:
    """A program that only returns `result`. Layout: union bpf_attr of linux/bpf.h, BPF_PROG_LOAD."""
    instructions = ctypes.create_string_buffer(struct.pack("=BBhi", 0xB7, 0, 0, result) + struct.pack("=BBhi", 0x95, 0, 0, 0), 16)
    licence = ctypes.create_string_buffer(b"GPL")
    attribute = struct.pack("=IIQQIIQI", program_type, 2, ctypes.addressof(instructions), ctypes.addressof(licence), 0, 0, 0, 0)
    attribute += struct.pack("=I16sII", 0, b"dg_probe", 0, attach_type)  # flags, name, ifindex, expected_attach_type
    attribute += struct.pack("=IIQIIQII", 0, 0, 0, 0, 0, 0, 0, btf_id)  # BTF of the program itself: none
    return _syscall("bpf", _BPF_PROG_LOAD, ctypes.create_string_buffer(attribute, len(attribute)), len(attribute))


def _kernel_btf_id(name: bytes, attach_type: int) -> int:
    found = int(_libbpf().libbpf_find_vmlinux_btf_id(ctypes.c_char_p(name), ctypes.c_int(attach_type)))
    if found < 0:
        raise _Missing(f"{name.decode()} is not in the kernel's BTF")
    return found


def _bpf_tracing(_: Path) -> tuple[str, int]:
    program = _load_program(_PROG_TRACING, _ATTACH_TRACE_RAW_TP, 0, _kernel_btf_id(b"sys_exit", _ATTACH_TRACE_RAW_TP))
    try:
        attribute = struct.pack("=QII", 0, program, 0)
        os.close(_syscall("bpf", _BPF_RAW_TRACEPOINT_OPEN, ctypes.create_string_buffer(attribute, 16), 16))
    finally:
        os.close(program)
    return "a program ran on sys_exit for a moment", 0


def _bpf_cgroup(_: Path) -> tuple[str, int]:
    v2 = cgroup_mounts().v2
    if v2 is None:
        raise _Missing("no cgroup2 file system is mounted")
    program = _load_program(_PROG_CGROUP_SOCK_ADDR, _ATTACH_INET4_CONNECT, 1)
    try:
        with _trial_cgroup(v2) as path:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                attribute = ctypes.create_string_buffer(struct.pack("=IIIII", descriptor, program, _ATTACH_INET4_CONNECT, 0, 0), 20)
                _syscall("bpf", _BPF_PROG_ATTACH, attribute, 20)
                _syscall("bpf", _BPF_PROG_DETACH, attribute, 20)
            finally:
                os.close(descriptor)
    finally:
        os.close(program)
    return "a connect hook was attached to a cgroup for a moment", 0


def _bpf_lsm(_: Path) -> tuple[str, int]:
    program = _load_program(_PROG_LSM, _ATTACH_LSM_MAC, 0, _kernel_btf_id(b"file_open", _ATTACH_LSM_MAC))
    os.close(program)
    return "a program on file_open was loaded", 0


_PRIVILEGE = Remedy("run as root (sudo), or in a container with the capabilities beside",
                    "--cap-add SYS_ADMIN --cap-add NET_ADMIN", "capabilities: {add: [SYS_ADMIN, NET_ADMIN]}, runAsUser: 0")
_OWN_SECCOMP = "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_POD_SECCOMP = "capabilities: {add: [SYS_ADMIN]}, seccompProfile: {type: Unconfined}, appArmorProfile: {type: Unconfined}"
_BPF = Remedy("a kernel with CONFIG_BPF_SYSCALL, CONFIG_DEBUG_INFO_BTF and CONFIG_CGROUP_BPF; apt-get install libbpf1",
              "--cap-add SYS_ADMIN --cap-add BPF --cap-add PERFMON --security-opt seccomp=unconfined",
              "capabilities: {add: [SYS_ADMIN, BPF, PERFMON]}, seccompProfile: {type: Unconfined}")

_ALL = (
    Probe("x86_64", "asked uname(2)", Remedy("use an x86-64 host: nothing else is supported"), _x86_64),
    Probe("root", "read the own uid and effective capabilities", _PRIVILEGE, _root),
    Probe("namespaces", "unshare(2) of six namespaces in a child",
          Remedy("allow namespaces", _OWN_SECCOMP, _POD_SECCOMP,
                 "user.max_mnt_namespaces, user.max_net_namespaces, user.max_pid_namespaces > 0"), _namespaces),
    Probe("user_namespaces", "unshare(CLONE_NEWUSER) in a child, then wrote its id maps",
          Remedy("allow user namespaces and give the container a range of ids", _OWN_SECCOMP, _POD_SECCOMP,
                 "user.max_user_namespaces > 0; kernel.unprivileged_userns_clone = 1 where it exists"), _user_namespaces),
    Probe("overlay", "mounted an overlay with index=on,xino=on over a tmpfs in a private mount namespace",
          Remedy("modprobe overlay", _OWN_SECCOMP, _POD_SECCOMP), _tmpfs_and_overlay),
    Probe("idmapped_mounts", "id-mapped a detached copy of the mount that holds the workspace",
          Remedy("keep workspaces on ext4, xfs, btrfs or tmpfs", _OWN_SECCOMP, _POD_SECCOMP), _idmapped, ("user_namespaces",)),
    Probe("cgroup_v2", "made a cgroup in the v2 tree and removed it",
          Remedy("mount -t cgroup2 none /sys/fs/cgroup (or /sys/fs/cgroup/unified on a hybrid host)",
                 "--cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw",
                 "hostPath volume /sys/fs/cgroup, mounted read-write"), _cgroup_v2),
    Probe("cgroup_limits", "made a cgroup and set a memory limit",
          Remedy("let the controllers be used: echo '+memory +pids +cpu' > /sys/fs/cgroup/cgroup.subtree_control",
                 "--cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw",
                 "hostPath volume /sys/fs/cgroup, mounted read-write"), _cgroup_limits),
    Probe("clone_into_cgroup", "clone3(CLONE_INTO_CGROUP) into a cgroup of its own",
          Remedy("allow clone3", _OWN_SECCOMP, _POD_SECCOMP), _clone_into_cgroup, ("cgroup_v2",)),
    Probe("seccomp", "installed a filter in a child", Remedy("a kernel with CONFIG_SECCOMP_FILTER"), _seccomp),
    Probe("seccomp_notify", "installed a filter with a listener in a child",
          Remedy("allow seccomp(2) with a listener", "--security-opt seccomp=unconfined", "seccompProfile: {type: Unconfined}"),
          _seccomp_notify, ("seccomp",)),
    Probe("landlock", "restricted a child, then let it try to list a directory",
          Remedy("boot with landlock in the list: lsm=landlock,... (CONFIG_SECURITY_LANDLOCK)",
                 "--security-opt seccomp=unconfined", "seccompProfile: {type: Unconfined}"), _landlock),
    Probe("fanotify", "marked a temporary file for permission events",
          Remedy("a kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS", "--cap-add SYS_ADMIN --security-opt seccomp=unconfined",
                 "capabilities: {add: [SYS_ADMIN]}, seccompProfile: {type: Unconfined}",
                 "fs.fanotify.max_user_groups > 0"), _fanotify),
    Probe("btf", "opened the kernel's type information",
          Remedy("a kernel with CONFIG_DEBUG_INFO_BTF, and /sys readable"), _btf),
    Probe("bpf_cgroup", "attached a connect hook to a cgroup of its own", _BPF, _bpf_cgroup, ("btf", "cgroup_v2")),
    Probe("bpf_tracing", "attached a program to the sys_exit tracepoint", _BPF, _bpf_tracing, ("btf",)),
    Probe("bpf_lsm", "loaded a program for the file_open hook",
          Remedy("boot with bpf in the list: lsm=...,bpf (CONFIG_BPF_LSM); optional, never the only layer for anything",
                 _BPF.container, _BPF.pod), _bpf_lsm, ("btf",), optional=True),
)

PROBES: Mapping[str, Probe] = {one.name: one for one in _ALL}
