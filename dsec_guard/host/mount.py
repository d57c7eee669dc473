"""Thin wrappers of the mount and path calls that Python has no names for.

Every wrapper raises OSError with the call's name in front of the kernel's text. Descriptors returned are close-on-exec
and belong to the caller. x86-64 numbers only, as everywhere in the product.
Source: fsopen(2), fsconfig(2), fsmount(2), open_tree(2), move_mount(2), mount_setattr(2), openat2(2), renameat2(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_SYS_RENAMEAT2 = 316
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC

MOVE_MOUNT_F_EMPTY_PATH = 0x4

FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_IDMAP = 0x100000
MOUNT_ATTR_NOSYMFOLLOW = 0x200000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

_CLONE_NEWNS = 0x20000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_EAGAIN_TRIES = 32

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

T = TypeVar("T")


def _fail(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _syscall(call: str, number: int, *args: Any) -> int:
    # Plain ints would be passed as C int: a 64-bit argument register must not keep a stale upper half.
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise _fail(call)
    return result


def fsopen(fstype: str) -> int:
    """A file system context for `fstype`, to be configured and then mounted by `fsmount`."""
    return _syscall("fsopen", _SYS_FSOPEN, os.fsencode(fstype), FSOPEN_CLOEXEC)


def fsconfig_string(context_fd: int, key: str, value: str) -> None:
    _syscall("fsconfig", _SYS_FSCONFIG, context_fd, FSCONFIG_SET_STRING, key.encode(), os.fsencode(value), 0)


def fsconfig_create(context_fd: int) -> None:
    """Make the superblock; the options given before are final afterwards."""
    _syscall("fsconfig(create)", _SYS_FSCONFIG, context_fd, FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(context_fd: int, attributes: int = 0) -> int:
    """Mount the context detached: nothing appears in any mount namespace. Returns an O_PATH-like descriptor."""
    return _syscall("fsmount", _SYS_FSMOUNT, context_fd, FSMOUNT_CLOEXEC, attributes)


def new_tmpfs(*, size_bytes: int, inodes: int, mode: int = 0o755, attributes: int = 0) -> int:
    """A detached tmpfs of at most `size_bytes` and `inodes` (both > 0: tmpfs reads 0 as no limit)."""
    if size_bytes <= 0 or inodes <= 0:
        raise ValueError(f"a tmpfs needs limits above 0, got {size_bytes} bytes and {inodes} inodes")
    context = fsopen("tmpfs")
    try:
        fsconfig_string(context, "size", str(size_bytes))
        fsconfig_string(context, "nr_inodes", str(inodes))
        fsconfig_string(context, "mode", f"{mode:o}")
        fsconfig_create(context)
        return fsmount(context, attributes)
    finally:
        os.close(context)


def open_tree(dir_fd: int, path: bytes, *, clone: bool = True, recursive: bool = False) -> int:
    """The mount at `path` (b"" = `dir_fd` itself) as a descriptor; `clone` makes a detached copy rooted there.

    Kernels before 6.15 refuse to clone out of a detached mount with EINVAL: see `clone_parts`.
    """
    flags = OPEN_TREE_CLOEXEC
    flags |= OPEN_TREE_CLONE if clone else 0
    flags |= AT_EMPTY_PATH if not path else 0
    flags |= AT_RECURSIVE if recursive else 0
    return _syscall("open_tree", _SYS_OPEN_TREE, dir_fd, path, flags)


def move_mount(mount_fd: int, dir_fd: int, path: bytes) -> None:
    """Attach a detached mount at `path`; the same descriptor cannot be attached a second time."""
    _syscall("move_mount", _SYS_MOVE_MOUNT, mount_fd, b"", dir_fd, path, MOVE_MOUNT_F_EMPTY_PATH)


def mount_setattr(mount_fd: int, *, set_attributes: int = 0, clear_attributes: int = 0, userns_fd: int = 0,
                  recursive: bool = False) -> None:
    """Change the attributes of a mount given by descriptor; `userns_fd` only together with MOUNT_ATTR_IDMAP."""
    attr = ctypes.create_string_buffer(struct.pack("=QQQQ", set_attributes, clear_attributes, 0, userns_fd), 32)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _syscall("mount_setattr", _SYS_MOUNT_SETATTR, mount_fd, b"", flags, attr, 32)


def openat2(dir_fd: int, path: bytes, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2). EAGAIN (a rename raced with a scoped look-up) is tried again a bounded number of times."""
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve), 24)
    for attempt in range(_EAGAIN_TRIES):
        try:
            return _syscall("openat2", _SYS_OPENAT2, dir_fd, path, how, 24)
        except OSError as problem:
            if problem.errno != errno.EAGAIN or attempt == _EAGAIN_TRIES - 1:
                raise
    raise AssertionError("the loop above returns or raises")


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    _syscall("renameat2", _SYS_RENAMEAT2, old_dir_fd, old, new_dir_fd, new, flags)


def syncfs(fd: int) -> None:
    """Flush the file system that `fd` lies on: syncfs(2)."""
    if _libc.syncfs(ctypes.c_int(fd)) < 0:
        raise _fail("syncfs")


def kernel_dev(st_dev: int) -> int:
    """A device number of stat(2) as the kernel keeps it in `s_dev`: (major << 20) | minor, in 32 bits.

    Source: include/linux/kdev_t.h, MKDEV; user space sees new_encode_dev() of it.
    """
    return (os.major(st_dev) << 20) | os.minor(st_dev)


def clone_parts(mount_fd: int, paths: list[bytes]) -> list[int]:
    """A detached clone for every path below a detached mount (b"" = its root), in order; on failure none stays open."""
    try:
        return _clone_each(mount_fd, paths)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    return in_private_mount_namespace(lambda: clone_attached(mount_fd, paths))


def _clone_each(dir_fd: int, paths: list[bytes]) -> list[int]:
    fds: list[int] = []
    try:
        fds.extend(open_tree(dir_fd, path) for path in paths)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def clone_attached(mount_fd: int, paths: list[bytes]) -> list[int]:
    """Attach in this thread's own mount namespace, clone from there; the namespace ends with the thread."""
    move_mount(mount_fd, AT_FDCWD, b"/")
    # "/" of the caller is still the tree underneath: the descriptor is the way into the mount on top of it.
    return _clone_each(mount_fd, paths)


def in_private_mount_namespace(action: Callable[[], T]) -> T:
    """Run `action` in a thread with a private copy of the mount namespace; nothing it mounts is seen elsewhere.

    unshare(CLONE_NEWNS) of one thread leaves the other threads of the process where they are: unshare(2).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            if _libc.unshare(ctypes.c_int(_CLONE_NEWNS)) < 0:
                raise _fail("unshare(CLONE_NEWNS)")
            if _libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) < 0:
                raise _fail("mount(MS_PRIVATE)")
            result.append(action())
        except BaseException as problem:  # noqa: BLE001 - carried to the caller's thread, whatever it is
            failure.append(problem)

    thread = threading.Thread(target=body, name="private-mounts")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
