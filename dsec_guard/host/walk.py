"""Walking a directory tree that somebody hostile filled, by descriptor only.

Every step opens one name relative to a descriptor, never follows a link and never crosses a mount. Names are bytes.
Depth is bounded by `WalkLimits`, not by descriptors or recursion: at most `_OPEN_FRAMES` directories stay open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dsec_guard.host.mount import (
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    openat2,
)

BENEATH = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
_OPEN_FRAMES = 64
_PATH_CHUNK = 3500  # PATH_MAX is 4096 with its NUL; openat2 takes no longer one


@dataclass(frozen=True)
class WalkLimits:
    """max_entries: of the whole walk. max_depth: of an entry, 1 for those in the root itself.

    max_path_bytes: of all paths together, since a chain of long names makes every path below it long.
    """

    max_entries: int = 100_000
    max_depth: int = 8192
    max_path_bytes: int = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One name. `path` is relative to the root; `parent_fd` is only valid until the walk goes on; `stat` is lstat."""

    path: bytes
    name: bytes
    parent_fd: int
    stat: os.stat_result
    depth: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)


@dataclass
class _Frame:
    path: bytes
    fd: int
    identity: tuple[int, int]
    names: list[bytes]
    next: int = 0


@dataclass
class Walk:
    """Iterate to get every entry below `root_fd`, parents before children, names in byte order.

    `enter(entry)` says whether to go down into a directory. After the iteration `skipped` holds (path, why) of what
    was left out: `too_many`, `too_deep`, `mount`, `vanished`, `unreadable`; `truncated` is true for the first two.
    """

    root_fd: int
    limits: WalkLimits = WalkLimits()
    enter: Callable[[Entry], bool] | None = None
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    entries: int = 0
    path_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return any(why in ("too_many", "too_deep") for _, why in self.skipped)

    def __iter__(self) -> Iterator[Entry]:
        stack: list[_Frame] = []
        try:
            root = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.root_fd)
            stack.append(self._frame(b"", root))
            while stack:
                frame = stack[-1]
                if frame.next >= len(frame.names):
                    stack.pop()
                    if frame.fd >= 0:
                        os.close(frame.fd)
                    continue
                name = frame.names[frame.next]
                frame.next += 1
                self.path_bytes += len(frame.path) + len(name) + 1
                if self.entries >= self.limits.max_entries or self.path_bytes > self.limits.max_path_bytes:
                    self.skipped.append((frame.path, "too_many"))
                    return
                if frame.fd < 0 and not self._reopen(frame):
                    frame.next = len(frame.names)
                    continue
                entry = self._look(frame, name, len(stack))
                if entry is None:
                    continue
                self.entries += 1
                yield entry
                if entry.is_dir and (self.enter is None or self.enter(entry)):
                    self._descend(stack, frame, entry)
        finally:
            for frame in stack:
                if frame.fd >= 0:
                    os.close(frame.fd)

    def _frame(self, path: bytes, fd: int) -> _Frame:
        info = os.fstat(fd)
        room = self.limits.max_entries - self.entries
        names: list[bytes] = []
        with os.scandir(fd) as listing:
            for item in listing:
                # One beyond the room is enough to notice that there is more: a flood is not read to its end.
                if len(names) > room:
                    break
                names.append(os.fsencode(item.name))
        names.sort()
        return _Frame(path, fd, (info.st_dev, info.st_ino), names)

    def _look(self, frame: _Frame, name: bytes, depth: int) -> Entry | None:
        path = frame.path + b"/" + name if frame.path else name
        try:
            info = os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
        except FileNotFoundError:
            self.skipped.append((path, "vanished"))
            return None
        except OSError:
            self.skipped.append((path, "unreadable"))
            return None
        return Entry(path, name, frame.fd, info, depth)

    def _descend(self, stack: list[_Frame], frame: _Frame, entry: Entry) -> None:
        if entry.depth >= self.limits.max_depth:
            self.skipped.append((entry.path, "too_deep"))
            return
        try:
            fd = open_dir(frame.fd, entry.name)
        except OSError as problem:
            self.skipped.append((entry.path, _why(problem)))
            return
        try:
            child = self._frame(entry.path, fd)
        except OSError:
            os.close(fd)
            self.skipped.append((entry.path, "unreadable"))
            return
        stack.append(child)
        if len(stack) > _OPEN_FRAMES:
            old = stack[-_OPEN_FRAMES - 1]
            if old.fd >= 0:
                os.close(old.fd)
                old.fd = -1

    def _reopen(self, frame: _Frame) -> bool:
        """Open a directory again whose descriptor was given up; it must still be the same one."""
        try:
            fd = open_beneath(self.root_fd, frame.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as problem:
            self.skipped.append((frame.path, _why(problem)))
            return False
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != frame.identity:
            os.close(fd)
            self.skipped.append((frame.path, "vanished"))
            return False
        frame.fd = fd
        return True


def _why(problem: OSError) -> str:
    if problem.errno == errno.EXDEV:
        return "mount"
    if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return "vanished"
    return "unreadable"


def open_dir(dir_fd: int, name: bytes) -> int:
    """Open the directory `name`, no link followed and no mount crossed (EXDEV)."""
    return openat2(dir_fd, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, resolve=BENEATH)


def open_beneath(root_fd: int, path: bytes, flags: int) -> int:
    """Open `path` (relative; b"" is the root itself) below `root_fd`: no link, no `..`, no other mount.

    A path longer than the kernel takes at once is walked in pieces. Raises OSError; EXDEV also for a leading slash.
    """
    framed = b"/" + path + b"/"
    if path and (b"//" in framed or b"/./" in framed or b"/../" in framed):
        raise OSError(errno.EXDEV, "open_beneath: the path is not in normal form")
    base, rest = root_fd, path or b"."
    with contextlib.ExitStack() as held:
        while len(rest) > _PATH_CHUNK:
            cut = rest.rfind(b"/", 0, _PATH_CHUNK)
            if cut < 0:
                raise OSError(errno.ENAMETOOLONG, "open_beneath: a name longer than any can be")
            base = openat2(base, rest[:cut], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, resolve=BENEATH)
            held.callback(os.close, base)
            rest = rest[cut + 1:]
        return openat2(base, rest, flags | os.O_NOFOLLOW, resolve=BENEATH)


def open_regular(dir_fd: int, name: bytes) -> int:
    """Open the regular file `name` for reading. Raises OSError(EINVAL) for anything else, without having opened it.

    An O_PATH descriptor is looked at first: opening a fifo may hang and opening a device may act.
    """
    handle = openat2(dir_fd, name, os.O_PATH | os.O_NOFOLLOW, resolve=BENEATH)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "open_regular: no regular file")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    finally:
        os.close(handle)


def data_segments(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts of a file that hold data; holes, however large, cost nothing."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        if start >= size:
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, end - start
        position = end
