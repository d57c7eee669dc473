"""Which system calls matter: the class table that the kernel side looks numbers up in.

Each call gets a class (how its result is judged, bpf/dg_calls.h) and the places of its path arguments. Numbers come from
`host/syscall_table.py`; a number without a name is class UNKNOWN and always reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from dsec_guard.host.syscall_table import I386, X32_BIT, X86_64, syscall_name

__all__ = ["TABLE_SIZE", "WATCHED_IOCTLS", "CallClass", "call_name", "class_table", "class_table_i386", "counted_name"]

TABLE_SIZE = 512  # DG_SYSCALLS
HOOK_BASE = 0x10000  # DG_NR_HOOK
I386_BASE = 0x20000  # DG_NR_I386


class CallClass(IntEnum):
    """enum dg_class of bpf/dg_events.h."""

    SKIP = 0
    ALWAYS = 1
    OPEN = 2
    PATH = 3
    ADDR = 4
    SEND = 5
    SENDMSG = 6
    SOCKET = 7
    KILL = 8
    FORK = 9
    CLONE3 = 10
    PTRACE = 11
    REFUSED = 12
    IOCTL = 13
    PERSONALITY = 14
    EXECVE = 15
    MKNOD = 16
    PRCTL = 17
    UNKNOWN = 18
    MOUNT = 19
    WRITE = 20


_CRITICAL = 1 << 24  # DG_E_CRITICAL
_BIND = 1 << 25  # DG_E_BIND


def _entry(
    cls: CallClass, *, path: int = -1, dir: int = -1, path2: int = -1, dir2: int = -1, mode: int = -1, flags: int = 0
) -> int:
    """enum dg_entry: class, then argument indexes + 1 in three bits each; -1 is none."""
    value = int(cls) | flags
    for shift, index in ((6, path), (9, dir), (12, path2), (15, dir2), (18, mode)):
        value |= (index + 1) << shift
    return value


def _entries() -> Mapping[str, int]:
    c = CallClass
    table: dict[str, int] = {}

    def put(cls: CallClass, names: str, **places: int) -> None:
        for name in names.split():
            if name in table:
                raise AssertionError(f"{name} has two classes")
            table[name] = _entry(cls, **places)

    # Rare and privileged: every attempt, whatever its result.
    put(c.MOUNT, "mount", path=1, path2=0, flags=_CRITICAL)
    put(c.ALWAYS, "umount2 chroot swapon swapoff acct", path=0, flags=_CRITICAL)
    put(c.ALWAYS, "pivot_root", path=0, path2=1, flags=_CRITICAL)
    put(c.ALWAYS, "move_mount", dir=0, path=1, dir2=2, path2=3, flags=_CRITICAL)
    put(c.ALWAYS, "open_tree open_tree_attr fspick mount_setattr", dir=0, path=1, flags=_CRITICAL)
    put(c.ALWAYS, "fsopen", path=0, flags=_CRITICAL)
    put(c.ALWAYS, "fsconfig", path=2, path2=3, flags=_CRITICAL)
    put(c.ALWAYS, "setns open_by_handle_at finit_module", dir=0, flags=_CRITICAL)
    put(
        c.ALWAYS,
        "fsmount unshare process_vm_readv process_vm_writev pidfd_getfd kcmp bpf perf_event_open init_module"
        " delete_module create_module kexec_load kexec_file_load userfaultfd io_uring_setup io_uring_enter"
        " io_uring_register keyctl add_key request_key settimeofday clock_settime reboot sethostname setdomainname"
        " iopl ioperm process_madvise move_pages migrate_pages lookup_dcookie fanotify_init",
        flags=_CRITICAL,
    )
    put(c.ALWAYS, "capset syslog quotactl_fd vhangup statmount listmount modify_ldt nfsservctl uselib")
    put(c.ALWAYS, "quotactl", path=1)

    # Names in the file system.
    put(c.OPEN, "open creat", path=0)
    put(c.OPEN, "openat openat2", dir=0, path=1)
    # Where a link leads: of another process's namespaces, roots and descriptors it is refused.
    put(c.PATH, "readlink", path=0)
    put(c.PATH, "readlinkat", dir=0, path=1)
    put(c.PATH, "unlink rmdir mkdir chmod chown lchown truncate utime utimes", path=0)
    put(c.PATH, "setxattr lsetxattr removexattr lremovexattr", path=0, path2=1)
    put(c.PATH, "rename link", path=0, path2=1)
    put(c.PATH, "symlink", path=1, path2=0)
    put(
        c.PATH,
        "unlinkat mkdirat fchmodat fchmodat2 fchownat utimensat futimesat setxattrat removexattrat file_setattr",
        dir=0,
        path=1,
    )
    put(c.PATH, "renameat renameat2 linkat", dir=0, path=1, dir2=2, path2=3)
    put(c.PATH, "symlinkat", dir=1, path=2, path2=0)
    put(c.PATH, "fchmod fchown fsetxattr fremovexattr ftruncate fallocate", dir=0)
    put(c.MKNOD, "mknod", path=0, mode=1, flags=_CRITICAL)
    put(c.MKNOD, "mknodat", dir=0, path=1, mode=2, flags=_CRITICAL)
    put(c.EXECVE, "execve", path=0)
    put(c.EXECVE, "execveat", dir=0, path=1)
    put(c.REFUSED, "chdir name_to_handle_at fanotify_mark", path=0)
    put(c.REFUSED, "fchdir", dir=0)

    # Processes and network.
    put(c.ADDR, "connect")
    put(c.ADDR, "bind", flags=_BIND)
    put(c.SEND, "sendto")
    put(c.SENDMSG, "sendmsg sendmmsg")
    put(c.SOCKET, "socket")
    put(c.KILL, "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal")
    put(c.FORK, "fork vfork clone", flags=_CRITICAL)
    put(c.CLONE3, "clone3", flags=_CRITICAL)
    put(c.PTRACE, "ptrace", flags=_CRITICAL)
    put(c.IOCTL, "ioctl", dir=0)
    put(c.PERSONALITY, "personality")
    put(c.PRCTL, "prctl")
    put(
        c.REFUSED,
        "setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups sched_setscheduler"
        " sched_setattr sched_setparam sched_setaffinity setpriority ioprio_set adjtimex clock_adjtime setrlimit"
        " prlimit64 pidfd_open get_robust_list seccomp memfd_secret mlock mlock2 mlockall shmctl shmat semctl msgctl"
        " socketpair setsockopt arch_prctl process_mrelease set_mempolicy mbind mmap mprotect sysfs ustat",
    )
    put(c.REFUSED, "fcntl writev pwritev pwritev2 sendfile read pread64", dir=0)
    put(c.REFUSED, "copy_file_range", dir=0, dir2=2)
    put(c.WRITE, "write pwrite64", dir=0)
    return table


_ENTRIES: Mapping[str, int] = _entries()

WATCHED_IOCTLS: Mapping[int, str] = {
    0x5412: "TIOCSTI",
    0x541C: "TIOCLINUX",
    0x541D: "TIOCCONS",
    0x5423: "TIOCSETD",
    0x5437: "TIOCVHANGUP",
    0x4B47: "KDSKBENT",
    0x4B49: "KDSKBSENT",
    0x4B3A: "KDSETMODE",
    0x4B72: "KDFONTOP",
    0x4B45: "KDSKBMODE",
    0x4B30: "KDMKTONE",
    0x560A: "VT_RESIZEX",
    0x5606: "VT_ACTIVATE",
    0x40086602: "FS_IOC_SETFLAGS",
    0x401C5820: "FS_IOC_FSSETXATTR",
    0xC0045877: "FIFREEZE",
    0xC0045878: "FITHAW",
    0xC0185879: "FITRIM",
    0x1260: "BLKGETSIZE",
    0x125D: "BLKROSET",
    0x1261: "BLKFLSBUF",
    0x1277: "BLKDISCARD",
    0x127F: "BLKZEROOUT",
    0x4C00: "LOOP_SET_FD",
    0x4C0A: "LOOP_CONFIGURE",
    0x4C82: "LOOP_CTL_GET_FREE",
    0x400454CA: "TUNSETIFF",
    0x8914: "SIOCSIFFLAGS",
    0x8916: "SIOCSIFADDR",
    0x8924: "SIOCSIFHWADDR",
    0x890B: "SIOCADDRT",
    0xB701: "NS_GET_USERNS",
    0xB702: "NS_GET_PARENT",
    0xAE01: "KVM_CREATE_VM",
    0x5000940E: "BTRFS_IOC_SUBVOL_CREATE",
    0x50009401: "BTRFS_IOC_SNAP_CREATE",
    0x5000940F: "BTRFS_IOC_SNAP_DESTROY",
    0xAF01: "VHOST_SET_OWNER",
    0x8004E500: "FUSE_DEV_IOC_CLONE",
    0x40042408: "PERF_EVENT_IOC_SET_BPF",
    0x2285: "SG_IO",
    0xC018AA3F: "UFFDIO_API",
    0xAA00: "USERFAULTFD_IOC_NEW",
    0x40045201: "RNDADDTOENTCNT",
    0x40085203: "RNDADDENTROPY",
    0x5206: "RNDCLEARPOOL",
    0xC0C0586D: "XFS_IOC_SWAPEXT",
    0xC028660F: "EXT4_IOC_MOVE_EXT",
    0x6611: "EXT4_IOC_SWAP_BOOT",
}
"""ioctl requests reported whatever their result. Sources: asm-generic/ioctls.h, linux/{kd,vt,fs,kvm,loop,if_tun,sockios,
nsfs,btrfs,vhost,fuse,perf_event,userfaultfd,random}.h, scsi/sg.h; xfs_fs.h and fs/ext4/ext4.h for the last three."""


def class_table() -> list[int]:
    """One entry per x86-64 number 0..TABLE_SIZE-1, for dg_config.classes; x32 numbers use it without their bit."""
    table = [int(CallClass.UNKNOWN)] * TABLE_SIZE
    for name, number in X86_64.items():
        if number < TABLE_SIZE:
            table[number] = _ENTRIES.get(name, 0)
    return table


# Calls whose arguments are laid out otherwise there (socketcall, old ones): the numbers alone.
_I386_SAME_NAME = {
    "umount2": "umount2",
    "clock_settime64": "clock_settime",
    "truncate64": "truncate",
    "chown32": "chown",
}


def class_table_i386() -> list[int]:
    """The same for the 32-bit entry: it only says where path arguments are, since all of it is reported."""
    table = [int(CallClass.UNKNOWN)] * TABLE_SIZE
    for name, number in I386.items():
        if number < TABLE_SIZE:
            table[number] = _ENTRIES.get(_I386_SAME_NAME.get(name, name), int(CallClass.SKIP))
    return table


def call_name(number: int, *, i386: bool = False) -> str:
    """The x86-64 name of a number as the kernel saw it (x32 numbers include their bit), else `nr_<number>`."""
    return syscall_name(number, i386=i386)


_HOOKS: Mapping[int, str] = {
    6: "signal",
    7: "network",
    8: "device",
    9: "sysctl",
    11: "io_uring",
    12: "cgroup_move",
    13: "oom",
}
_NETWORK_OPS: Mapping[int, str] = {1: "connect", 2: "sendmsg", 3: "bind", 4: "socket"}


def counted_name(number: int) -> str:
    """The name of a dg_count_key number: a system call, or `network:connect`-like for what is none."""
    if number & X32_BIT:
        return syscall_name(number)
    if number & I386_BASE:
        return syscall_name(number & ~I386_BASE, i386=True)
    if number & HOOK_BASE:
        kind, op = number & 31, (number & 0xFFFF) >> 5
        name = _HOOKS.get(kind, f"kind_{kind}")
        return f"{name}:{_NETWORK_OPS.get(op, str(op))}" if kind == 7 else name
    return syscall_name(number)
