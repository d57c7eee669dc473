"""Copying a box's declared deliverables out, without trusting a name, a link or a size in them.

Reads the merged view of the workspace by descriptor after the agent's processes are gone. What is left out is reported,
never followed: links that lead out, devices, fifos, sockets, what is too large, too deep or too much. Archives are
copied as files and never unpacked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec_guard.errors import UsageError
from dsec_guard.host.walk import Entry, Walk, WalkLimits, data_segments, open_beneath, open_regular
from dsec_guard.model import OutputRefused, Source, escape_bytes
from dsec_guard.sandbox.changes import link_leaves, parent_of
from dsec_guard.sandbox.globs import compile_glob, has_magic, static_prefix

_COPY_BLOCK = 1 << 20


@dataclass(frozen=True)
class CollectLimits:
    """max_bytes: data copied in all; max_file_bytes: apparent size of one file; seconds: of the whole collection."""

    max_entries: int = 50_000
    max_depth: int = 256
    max_bytes: int = 1 << 30
    max_file_bytes: int = 4 << 30
    seconds: float = 60.0


@dataclass(frozen=True)
class Collected:
    """path: below the destination, escaped. ftype: file | dir | symlink. links: hard links the original had."""

    path: str
    ftype: str
    size: int = 0
    link_target: str = ""
    links: int = 1


@dataclass(frozen=True)
class CollectReport:
    """collected and refused by path. missing: deliverables that do not exist. complete: nothing was refused.

    why words of refused: link_outside, device, fifo, socket, too_big, too_many, too_deep, bytes, time, mount, vanished,
    unreadable, dest_conflict.
    """

    collected: tuple[Collected, ...] = ()
    refused: tuple[OutputRefused, ...] = ()
    missing: tuple[str, ...] = ()
    bytes_copied: int = 0

    @property
    def complete(self) -> bool:
        return not self.refused


def collect(
    roots: Mapping[str, int], deliverables: Sequence[str], dest: Path, *, limits: CollectLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CollectReport:
    """Copy `deliverables` (paths or patterns inside) below `dest`.

    roots: inside path -> directory descriptor, such as {"/workspace": merged view of the overlay}. A deliverable
    `/workspace/out` becomes `dest/out`: its path below the root it lies in. dest is made if it is missing; its last
    name must not be a link. Files get plain modes (no set-id) and the owner of this process.
    Raises UsageError when dest cannot be used or a deliverable lies in no root; OSError when dest cannot be written.
    """
    work = _Collection(roots, limits or CollectLimits(), clock)
    try:
        dest.mkdir(mode=0o755, parents=True, exist_ok=True)
        dest_fd = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise UsageError(f"--collect {str(dest)!r}: {problem.strerror}",
                         hint="name a directory (no link) that can be written") from problem
    try:
        work.run(deliverables, dest_fd)
    finally:
        os.close(dest_fd)
    return work.report()


@dataclass
class _Collection:
    roots: Mapping[str, int]
    limits: CollectLimits
    clock: Callable[[], float]
    collected: dict[bytes, Collected] = field(default_factory=dict)
    refused: dict[bytes, OutputRefused] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    bytes_copied: int = 0
    entries: int = 0
    ends: float = 0.0

    def run(self, deliverables: Sequence[str], dest_fd: int) -> None:
        self.ends = self.clock() + self.limits.seconds
        for deliverable in deliverables:
            root, root_fd, below = self._locate(deliverable)
            if has_magic(below):
                self._pattern(root, root_fd, below, dest_fd)
            else:
                self._one(root, root_fd, os.fsencode(below), deliverable, dest_fd)

    def report(self) -> CollectReport:
        return CollectReport(
            collected=tuple(self.collected[path] for path in sorted(self.collected)),
            refused=tuple(self.refused[path] for path in sorted(self.refused)),
            missing=tuple(self.missing), bytes_copied=self.bytes_copied,
        )

    def _locate(self, deliverable: str) -> tuple[str, int, str]:
        parts = [part for part in deliverable.split("/") if part not in ("", ".")]
        path = "/" + "/".join(parts)
        fitting = [root for root in self.roots if path == root or path.startswith(root.rstrip("/") + "/")]
        if not fitting or ".." in parts or not deliverable.startswith("/"):
            raise UsageError(f"deliverables: {deliverable!r} lies in none of {', '.join(sorted(self.roots))}",
                             hint="name an absolute path inside the workspace, without '..'")
        root = max(fitting, key=len)
        return root, self.roots[root], path[len(root.rstrip("/")) + 1:]

    # ------------------------------------------------------------------------------------------------- selection

    def _one(self, root: str, root_fd: int, below: bytes, deliverable: str, dest_fd: int) -> None:
        """One file or directory; links on the way to it are not followed, nor is the last name."""
        if not below:
            self._tree(root, root_fd, b"", dest_fd, keep=None)
            return
        try:
            parent = open_beneath(root_fd, parent_of(below), os.O_RDONLY | os.O_DIRECTORY)
        except OSError as problem:
            if problem.errno == errno.ENOENT:
                self.missing.append(deliverable)
            else:
                self._refuse(root, below, "link_outside" if problem.errno in (errno.ELOOP, errno.ENOTDIR) else "mount")
            return
        name = below.rpartition(b"/")[2]
        try:
            try:
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                self.missing.append(deliverable)
                return
            if not stat.S_ISDIR(info.st_mode):
                # A deliverable that is a link leaves what was declared, wherever it leads.
                self._copy(root, below, Entry(below, name, parent, info, 1), dest_fd, scope=below)
                return
        finally:
            os.close(parent)
        try:
            top = open_beneath(root_fd, below, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self._refuse(root, below, "mount")
            return
        try:
            self._tree(root, top, below, dest_fd, keep=None)
        finally:
            os.close(top)

    def _pattern(self, root: str, root_fd: int, pattern: str, dest_fd: int) -> None:
        base = static_prefix(pattern)
        below = b"" if base == "/" else os.fsencode(base)
        try:
            top = open_beneath(root_fd, below, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self.missing.append(f"{root.rstrip('/')}/{pattern}")
            return
        expression = compile_glob(pattern)
        before = len(self.collected)
        try:
            self._tree(root, top, below, dest_fd, keep=lambda path: bool(expression.fullmatch(os.fsdecode(path))))
        finally:
            os.close(top)
        if len(self.collected) == before:
            self.missing.append(f"{root.rstrip('/')}/{pattern}")

    def _tree(self, root: str, top: int, below: bytes, dest_fd: int, keep: Callable[[bytes], bool] | None) -> None:
        """Everything below the open directory `top`, which stands at `below` in its root."""
        if keep is None and below and not self._make_dirs(root, below, dest_fd):
            return
        left = WalkLimits(max(self.limits.max_entries - self.entries, 0), self.limits.max_depth)
        walk = Walk(top, left)
        base = below + b"/" if below else b""
        for entry in walk:
            path = base + entry.path
            if self.clock() > self.ends:
                self._refuse(root, path, "time")
                break
            if keep is not None and not keep(path):
                continue
            if not entry.is_dir:
                self._copy(root, path, entry, dest_fd, scope=below)
            elif self._make_dirs(root, path, dest_fd):
                self.collected.setdefault(path, Collected(escape_bytes(path), "dir"))
        self.entries += walk.entries
        for path, why in walk.skipped:
            self._refuse(root, base + path, why)

    # ----------------------------------------------------------------------------------------------------- copying

    def _make_dirs(self, root: str, path: bytes, dest_fd: int) -> bool:
        """Make the directory `path` and those above it below the destination; an existing link there is refused."""
        here = os.dup(dest_fd)
        try:
            for part in path.split(b"/"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = deeper
        except OSError as problem:
            if problem.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._refuse(root, path, "dest_conflict")
            return False
        finally:
            os.close(here)
        return True

    def _copy(self, root: str, path: bytes, entry: Entry, dest_fd: int, scope: bytes) -> None:
        mode, size = entry.stat.st_mode, entry.stat.st_size
        if stat.S_ISLNK(mode):
            self._link(root, path, entry, dest_fd, scope)
        elif not stat.S_ISREG(mode):
            self._refuse(root, path, "fifo" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device")
        elif size > self.limits.max_file_bytes:
            self._refuse(root, path, "too_big")
        else:
            self._file(root, path, entry, dest_fd)

    def _link(self, root: str, path: bytes, entry: Entry, dest_fd: int, scope: bytes) -> None:
        """Keep a link that stays inside what is collected, as a relative one."""
        try:
            target = os.readlink(entry.name, dir_fd=entry.parent_fd)
        except OSError:
            self._refuse(root, path, "vanished")
            return
        top = os.fsencode(root.rstrip("/")) + (b"/" + scope if scope else b"")
        below = path[len(scope):].lstrip(b"/") if scope else path
        if not below or link_leaves(below, target, top):
            self._refuse(root, path, "link_outside", target)
            return
        if target.startswith(b"/"):
            target = b"../" * below.count(b"/") + (target[len(top):].strip(b"/") or b".")
        parent = self._parent(root, path, dest_fd)
        if parent is None:
            return
        temporary = _temporary()
        try:
            os.symlink(target, temporary, dir_fd=parent)
            if self._place(root, path, parent, temporary):
                self.collected[path] = Collected(escape_bytes(path), "symlink", link_target=escape_bytes(target))
        finally:
            os.close(parent)

    def _file(self, root: str, path: bytes, entry: Entry, dest_fd: int) -> None:
        try:
            source = open_regular(entry.parent_fd, entry.name)
        except OSError as problem:
            self._refuse(root, path, "mount" if problem.errno == errno.EXDEV else "unreadable")
            return
        with contextlib.ExitStack() as held:
            held.callback(os.close, source)
            info = os.fstat(source)
            if info.st_size > self.limits.max_file_bytes:
                self._refuse(root, path, "too_big")
                return
            parent = self._parent(root, path, dest_fd)
            if parent is None:
                return
            held.callback(os.close, parent)
            temporary = _temporary()
            out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                          dir_fd=parent)
            try:
                why = self._copy_data(source, out, info.st_size)
                os.fchmod(out, (info.st_mode & 0o755) | 0o600)
                os.utime(out, ns=(info.st_mtime_ns, info.st_mtime_ns))
            except BaseException:
                os.unlink(temporary, dir_fd=parent)
                raise
            finally:
                os.close(out)
            if why:
                os.unlink(temporary, dir_fd=parent)
                self._refuse(root, path, why)
            elif self._place(root, path, parent, temporary):
                self.collected[path] = Collected(escape_bytes(path), "file", size=info.st_size, links=info.st_nlink)

    def _copy_data(self, source: int, out: int, size: int) -> str:
        """Copy the data parts only, within the byte and time limits; returns why it stopped, or ""."""
        os.ftruncate(out, size)
        for offset, length in data_segments(source, size):
            position, end = offset, offset + length
            while position < end:
                if self.clock() > self.ends:
                    return "time"
                if self.bytes_copied >= self.limits.max_bytes:
                    return "bytes"
                room = min(_COPY_BLOCK, end - position, self.limits.max_bytes - self.bytes_copied)
                block = os.pread(source, room, position)
                if not block:
                    return "vanished"
                view = memoryview(block)
                while view:
                    done = os.pwrite(out, view, position)
                    position += done
                    view = view[done:]
                self.bytes_copied += len(block)
        return ""

    def _parent(self, root: str, path: bytes, dest_fd: int) -> int | None:
        above = parent_of(path)
        if above and not self._make_dirs(root, above, dest_fd):
            return None
        return open_beneath(dest_fd, above, os.O_RDONLY | os.O_DIRECTORY)

    def _place(self, root: str, path: bytes, parent: int, temporary: bytes) -> bool:
        """Rename into place: a link that stands there is replaced, not followed."""
        try:
            os.rename(temporary, path.rpartition(b"/")[2], src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as problem:
            os.unlink(temporary, dir_fd=parent)
            if problem.errno not in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._refuse(root, path, "dest_conflict")
            return False
        return True

    def _refuse(self, root: str, path: bytes, why: str, target: bytes = b"") -> None:
        inside = os.fsencode(root.rstrip("/")) + (b"/" + path if path else b"")
        self.refused.setdefault(inside, OutputRefused(
            path=escape_bytes(inside), why=why, link_target=escape_bytes(target), step="collect", source=Source.INSPECTION))


def _temporary() -> bytes:
    return b".dsec-guard-" + secrets.token_hex(8).encode()
