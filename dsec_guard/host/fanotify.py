"""fanotify groups and inode marks: who opens a marked file, whatever name or mount leads to it.

The group asks for permission events, which hold the opener until somebody answers: hand it to the holder at once
(`Holder.watch_fanotify`), which always allows. Marks may be added before and after.
Source: fanotify_init(2), fanotify_mark(2), fanotify(7).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, TypeVar

from dsec_guard.errors import HostError

FAN_OPEN_PERM = 0x00010000
FAN_OPEN_EXEC_PERM = 0x00040000
FAN_ONDIR = 0x40000000

_FAN_CLOEXEC = 0x1
_FAN_NONBLOCK = 0x2
_FAN_CLASS_CONTENT = 0x4
_FAN_UNLIMITED_QUEUE = 0x10
_FAN_UNLIMITED_MARKS = 0x20
_FAN_REPORT_TID = 0x100
_GROUP_FLAGS = (
    _FAN_CLASS_CONTENT | _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_UNLIMITED_QUEUE | _FAN_UNLIMITED_MARKS | _FAN_REPORT_TID
)
_FAN_MARK_ADD = 0x1
_FAN_MARK_REMOVE = 0x2
_AT_FDCWD = -100


def _failed(what: str) -> HostError:
    number = ctypes.get_errno()
    return HostError(
        f"{what}: {os.strerror(number)}",
        feature="fanotify",
        hint="needs CAP_SYS_ADMIN in the initial user namespace and CONFIG_FANOTIFY_ACCESS_PERMISSIONS",
    )


class Markable(Protocol):
    """One object of a tree: what `open_object` of the tree takes."""

    @property
    def is_dir(self) -> bool: ...


M = TypeVar("M", bound=Markable)


class FanotifyGroup:
    """A group of permission events; a context manager. fd: to be handed to the holder.

    The queue is unlimited: a full one would let openings pass unseen. Event descriptors are read-only.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def open(cls) -> FanotifyGroup:
        """Raises: HostError."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.fanotify_init(_GROUP_FLAGS, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE))
        if fd < 0:
            raise _failed("fanotify_init")
        return cls(fd)

    def mark(self, target: int, *, is_dir: bool = False, remove: bool = False) -> None:
        """Watch openings (also by exec) of the inode behind descriptor `target`, O_PATH ones included; is_dir: it is a
        directory whose listing counts. Raises: HostError.

        A mark lives until it is removed or its file system is gone.
        """
        mask = FAN_OPEN_PERM | FAN_ONDIR if is_dir else FAN_OPEN_PERM | FAN_OPEN_EXEC_PERM
        done = self._libc.fanotify_mark(
            ctypes.c_int(self.fd),
            ctypes.c_uint(_FAN_MARK_REMOVE if remove else _FAN_MARK_ADD),
            ctypes.c_uint64(mask),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(f"/proc/self/fd/{target}".encode()),
        )
        if done < 0:
            raise _failed("fanotify_mark")

    def mark_all(self, objects: Iterable[M], open_object: Callable[[M], int]) -> int:
        """Mark each object through the descriptor `open_object` gives for it (closed here). Returns how many."""
        count = 0
        for item in objects:
            fd = open_object(item)
            try:
                self.mark(fd, is_dir=item.is_dir)
            finally:
                os.close(fd)
            count += 1
        return count

    def close(self) -> None:
        """The holder's copy, if any, keeps the group and its marks."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> FanotifyGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
