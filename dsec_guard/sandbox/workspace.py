"""The workspace directory: which one may be used, and how a box's changes come back to it.

Write-back stages every new file in one directory of its own inside the workspace, makes it durable, checks that nothing
changed on the host meanwhile, and then renames file by file: after a kill at any moment each file is the old or the new
one, and `recover` of the next run removes what was staged. Everything goes by descriptor; the agent's names, links and
modes are never trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import zstandard

from dsec_guard.errors import RecordError, UsageError
from dsec_guard.host.mount import RENAME_NOREPLACE, renameat2, syncfs
from dsec_guard.host.newfile import new_file
from dsec_guard.host.walk import Entry, Walk, WalkLimits, data_segments, open_beneath, open_regular
from dsec_guard.model import OutputRefused, Source, escape_bytes, unescape_bytes
from dsec_guard.sandbox.changes import (
    Layers,
    is_opaque,
    is_whiteout,
    link_leaves,
    overlay_xattr,
    parent_of,
    same_content,
)

PACK_SCHEMA = "dsec-guard/changes/v1"
_STAGE_PREFIX = b".dsec-guard-"
_COPY_BLOCK = 1 << 20
_FSYNC_EACH = 64
_SYSTEM_DIRS = (b"/usr/", b"/bin/", b"/sbin/", b"/lib/", b"/lib64/")
_MAX_MANIFEST = 256 << 20


# ------------------------------------------------------------------------------------------------ which directory


@dataclass(frozen=True)
class WorkspaceDir:
    """A checked workspace: canonical path and the owner whose files the agent's uid stands for."""

    path: Path
    uid: int
    gid: int
    device: int
    inode: int


def check_workspace(path: str | os.PathLike[str], *, named: bool, home: str | None = None) -> WorkspaceDir:
    """The workspace at `path`, links resolved. `named`: the user gave it on the command line.

    Raises UsageError for what is no directory, and, unless named, for `/`, the home directory and what contains it:
    an agent in a careless current directory would get all of it to change.
    """
    given = Path(path)
    try:
        real = given.resolve(strict=True)
        info = real.stat()
    except (OSError, RuntimeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "too many links"
        raise UsageError(f"the workspace {str(given)!r} cannot be used: {reason}",
                         hint="name an existing directory with --workspace DIR") from problem
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"the workspace {str(given)!r} is no directory", hint="name a directory with --workspace DIR")
    if not named:
        homes = {Path("/")}
        place = home if home is not None else os.path.expanduser("~")
        if place.startswith("/"):
            with contextlib.suppress(OSError, RuntimeError):  # no such home: nothing to protect
                homes.add(Path(place).resolve(strict=True))
        for protected in homes:
            if real == protected or real in protected.parents:
                whose = "the root" if real == Path("/") else "your home"
                raise UsageError(
                    f"the current directory {str(real)!r} is or contains {whose} directory: "
                    "not used as a workspace unless named",
                    hint=f"change into a project directory, or say so with --workspace {real}")
    for reserved in ("/proc", "/sys", "/dev"):
        if real == Path(reserved) or Path(reserved) in real.parents:
            raise UsageError(f"the workspace {str(real)!r} lies in {reserved}", hint="use a directory of a disk")
    return WorkspaceDir(real, info.st_uid, info.st_gid, info.st_dev, info.st_ino)


# ----------------------------------------------------------------------------------------------- what is to be done


@dataclass(frozen=True)
class Change:
    """One step. kind: mkdir | write | symlink | remove | chmod. path relative to the workspace.

    existed: the agent changed something of the host's (a file copied up, here or under another name). replace_dir: a directory
    of the host stands in the way and goes. segments: (offset, length) of a file's data, the rest is a hole.
    """

    kind: str
    path: bytes
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    existed: bool = False
    replace_dir: bool = False
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class WriteBackReport:
    """What happened. stopped: nothing was applied because of `conflicts` (paths changed on the host since the start).

    applied and removed: escaped relative paths. refused: what was left out and why: `device`, `fifo`, `socket`,
    `link_outside`, `link_system` (into the system's own directories, as interpreters of virtual environments do),
    `git_config` (hooks and configuration of git, which run programs), `setuid` (applied without the bit), `mount`,
    `changed_on_host`, `redirect`, `too_many`, `too_deep`, `unreadable`, `in_the_way`, `name_taken`.
    """

    applied: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refused: tuple[OutputRefused, ...] = ()
    conflicts: tuple[str, ...] = ()
    stopped: bool = False
    bytes_written: int = 0


@dataclass
class _Planned:
    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[bytes, str, bytes]] = field(default_factory=list)


def _refusals(planned: list[tuple[bytes, str, bytes]]) -> tuple[OutputRefused, ...]:
    return tuple(
        OutputRefused(path=escape_bytes(path), why=why, link_target=escape_bytes(link), step="write_back",
                      source=Source.INSPECTION)
        for path, why, link in sorted(planned)
    )


def is_git_control(layers: Layers | None, root_fd: int, path: bytes) -> bool:
    """Whether `path` is, or lies in, what git runs programs from: hooks and configuration, of any repository.

    Also a `.git` file (it points git to a directory elsewhere), worktree configuration, nested repositories and
    directories that git takes for a bare repository, or would after one more file; and the list of commands of a rebase in
    progress. Letter case is ignored, as some file systems do.
    """
    parts = path.split(b"/")
    inside_git = False
    for i, part in enumerate(parts):
        inside_git = inside_git or (i > 0 and parts[i - 1].lower().rstrip(b". ") == b".git")
        word = part.lower().rstrip(b". ")
        if word in (b"hooks", b"config", b"config.worktree", b"commondir", b"gitdir") or (
                word == b"attributes" and i and parts[i - 1].lower() == b"info"):
            if inside_git:
                return True
            if word != b"attributes" and _looks_bare(layers, root_fd, b"/".join(parts[:i])):
                return True
        if inside_git and word in (b"rebase-merge", b"rebase-apply", b"sequencer"):
            return True
    return False


def _looks_bare(layers: Layers | None, root_fd: int, directory: bytes) -> bool:
    """Two of the three places that git asks for: the third may come later, or lie where `commondir` says."""
    base = directory + b"/" if directory else b""
    found = sum(_present(layers, root_fd, base + name) for name in (b"HEAD", b"objects", b"refs", b"commondir"))
    return found >= 2


def _present(layers: Layers | None, root_fd: int, path: bytes) -> bool:
    if layers is not None and layers.exists(path):
        return True
    try:
        os.close(open_beneath(root_fd, path, os.O_PATH))
    except OSError:
        return False
    return True


def _plan_changes(
    upper_fd: int, lower_fd: int, inside_prefix: str, host_path: Path, limits: WalkLimits | None = None
) -> _Planned:
    """Turn an overlay's upper layer over the directory `lower_fd` into steps, parents before children."""
    planned = _Planned()
    layers = Layers(upper_fd, lower_fd)
    prefixes = os.fsencode(inside_prefix.rstrip("/")), os.fsencode(host_path)
    closed: set[bytes] = set()  # directories that are refused with all that is in them

    def enter(entry: Entry) -> bool:
        return entry.path not in closed

    walk = Walk(upper_fd, limits or WalkLimits(), enter)
    for entry in walk:
        try:
            _plan_entry(entry, layers, prefixes, planned, closed)
        except OSError:
            planned.refused.append((entry.path, "unreadable", b""))
            closed.add(entry.path)
    planned.refused += [(path, why, b"") for path, why in walk.skipped]
    return planned


def _plan_entry(
    entry: Entry, layers: Layers, prefixes: tuple[bytes, bytes], planned: _Planned, closed: set[bytes]
) -> None:
    info, path = entry.stat, entry.path
    # What stands on the host counts here, also where a directory made anew hides it inside.
    lower = layers.raw_lower_stat(path)
    if is_whiteout(info) and lower is None:
        return
    if (entry.name.lower() == b".git" and not entry.is_dir) or is_git_control(layers, layers.lower_fd, path):
        planned.refused.append((path, "git_config", b""))
        closed.add(path)
        return
    if path.startswith(_STAGE_PREFIX) and b"/" not in path:
        planned.refused.append((path, "name_taken", b""))
        closed.add(path)
        return
    if lower is not None and stat.S_ISDIR(lower.st_mode) and not entry.is_dir and _holds_git(layers.lower_fd, path):
        planned.refused.append((path, "git_config", b""))
        return
    if is_whiteout(info):
        planned.changes.append(Change("remove", path, existed=True))
        return
    if entry.is_dir:
        _plan_directory(entry, layers, lower, planned, closed)
        return
    replace_dir = lower is not None and stat.S_ISDIR(lower.st_mode)
    if stat.S_ISREG(info.st_mode):
        _plan_file(entry, layers, lower, planned, replace_dir)
    elif stat.S_ISLNK(info.st_mode):
        target = os.readlink(entry.name, dir_fd=entry.parent_fd)
        if lower is not None and stat.S_ISLNK(lower.st_mode) and _read_link(layers.lower_fd, path) == target:
            return
        if link_leaves(path, target, prefixes[0]):
            planned.refused.append((path, _link_word(target), target))
        else:
            planned.changes.append(Change("symlink", path, link=_link_on_host(path, target, prefixes),
                                          existed=lower is not None, replace_dir=replace_dir))
    else:
        word = "fifo" if stat.S_ISFIFO(info.st_mode) else "socket" if stat.S_ISSOCK(info.st_mode) else "device"
        planned.refused.append((path, word, b""))


def _read_link(root_fd: int, path: bytes) -> bytes:
    handle = open_beneath(root_fd, path, os.O_PATH)
    try:
        return os.readlink(b"", dir_fd=handle)
    finally:
        os.close(handle)


def _link_on_host(path: bytes, target: bytes, prefixes: tuple[bytes, bytes]) -> bytes:
    """An absolute target below the inside prefix, made relative where the workspace stands elsewhere on the host."""
    inside, host = prefixes
    if not target.startswith(b"/") or inside == host:
        return target
    below = target[len(inside):].strip(b"/")
    return b"../" * path.count(b"/") + below or b"."


def _holds_git(root_fd: int, path: bytes) -> bool:
    """Whether a directory of the host has a git repository in it (or cannot be searched): it is not removed then."""
    if path.rpartition(b"/")[2].lower() == b".git":
        return True
    handle = open_beneath(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        walk = Walk(handle)
        return any(entry.name.lower() == b".git" for entry in walk) or bool(walk.skipped)
    finally:
        os.close(handle)


def _link_word(target: bytes) -> str:
    system = target.startswith(_SYSTEM_DIRS) and b".." not in target.split(b"/")
    return "link_system" if system else "link_outside"


def _plan_directory(entry: Entry, layers: Layers, lower: os.stat_result | None, planned: _Planned,
                    closed: set[bytes]) -> None:
    fd = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry.parent_fd)
    try:
        redirect = overlay_xattr(fd, "redirect")
        opaque = is_opaque(fd)
    finally:
        os.close(fd)
    if redirect is not None:
        planned.refused.append((entry.path, "redirect", b""))
        closed.add(entry.path)
        return
    layers.enter(entry)
    mode = entry.stat.st_mode & 0o777
    if lower is None:
        planned.changes.append(Change("mkdir", entry.path, mode=mode))
    elif not stat.S_ISDIR(lower.st_mode):
        planned.changes.append(Change("remove", entry.path, existed=True))
        planned.changes.append(Change("mkdir", entry.path, mode=mode, existed=True))
    else:
        if opaque:
            planned.changes += _removed_below(entry.path, layers, planned)
        if mode != lower.st_mode & 0o777:
            planned.changes.append(Change("chmod", entry.path, mode=mode, existed=True))


def _removed_below(path: bytes, layers: Layers, planned: _Planned) -> list[Change]:
    """What an opaque directory hides of the lower one and does not have itself; whole directories where possible."""
    changes: list[Change] = []
    handle = open_beneath(layers.lower_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        gone: set[bytes] = set()
        walk = Walk(handle, WalkLimits(), lambda entry: entry.path not in gone)
        for entry in walk:
            full = path + b"/" + entry.path
            if layers.exists(full):
                continue
            gone.add(entry.path)
            if is_git_control(layers, layers.lower_fd, full) or (entry.is_dir and _holds_git(layers.lower_fd, full)):
                planned.refused.append((full, "git_config", b""))
            else:
                changes.append(Change("remove", full, existed=True))
        planned.refused += [(path + b"/" + below if below else path, why, b"") for below, why in walk.skipped]
    finally:
        os.close(handle)
    return changes


def _plan_file(
    entry: Entry, layers: Layers, lower: os.stat_result | None, planned: _Planned, replace_dir: bool
) -> None:
    info = entry.stat
    mode = info.st_mode & 0o777
    if info.st_mode & 0o7000:
        planned.refused.append((entry.path, "setuid", b""))
    fd = open_regular(entry.parent_fd, entry.name)
    try:
        copied_up = overlay_xattr(fd, "origin") is not None
        if lower is not None and stat.S_ISREG(lower.st_mode) and lower.st_size == info.st_size and _equals_lower(
                fd, layers, entry):
            if mode != lower.st_mode & 0o777:
                planned.changes.append(Change("chmod", entry.path, mode=mode, existed=True))
            return
        planned.changes.append(Change(
            "write", entry.path, mode=mode, size=info.st_size, mtime_ns=info.st_mtime_ns,
            existed=copied_up or lower is not None, replace_dir=replace_dir,
            segments=tuple(data_segments(fd, info.st_size))))
    finally:
        os.close(fd)


def _equals_lower(upper_fd: int, layers: Layers, entry: Entry) -> bool:
    with contextlib.ExitStack() as held:
        parent = open_beneath(layers.lower_fd, parent_of(entry.path), os.O_PATH | os.O_DIRECTORY)
        held.callback(os.close, parent)
        lower = open_regular(parent, entry.name)
        held.callback(os.close, lower)
        return same_content(upper_fd, lower, entry.stat.st_size)


# ------------------------------------------------------------------------------------------------------ application


class _Source:
    """Where the data of `write` steps comes from; asked once per step, in the order of the steps."""

    def copy(self, change: Change, out_fd: int) -> None:
        raise NotImplementedError


class _UpperSource(_Source):
    def __init__(self, upper_fd: int) -> None:
        self.upper_fd = upper_fd

    def copy(self, change: Change, out_fd: int) -> None:
        parent = open_beneath(self.upper_fd, parent_of(change.path), os.O_PATH | os.O_DIRECTORY)
        try:
            fd = open_regular(parent, change.path.rpartition(b"/")[2])
        finally:
            os.close(parent)
        try:
            for offset, length in change.segments:
                _copy_range(lambda size, at: os.pread(fd, size, at), out_fd, offset, length)
        finally:
            os.close(fd)


def _copy_range(read: Callable[[int, int], bytes], out_fd: int, offset: int, length: int) -> None:
    end = offset + length
    while offset < end:
        block = read(min(_COPY_BLOCK, end - offset), offset)
        if not block:
            raise OSError(errno.EIO, "the data ended early")
        view = memoryview(block)
        while view:
            written = os.pwrite(out_fd, view, offset)
            offset += written
            view = view[written:]


def now_ns() -> int:
    """The clock that change times of files are compared with (CLOCK_REALTIME): take it when the lower is mounted.

    The kernel stamps files with a coarser clock, at most one tick (4 to 10 ms) behind: a host change in the first tick
    of a run is taken for one from before it.
    """
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


#: See `write_back`.
Cover = Callable[[tuple[Path, ...]], contextlib.AbstractContextManager[None]]


def _uncovered(_paths: tuple[Path, ...]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def write_back(
    upper_fd: int, workspace: WorkspaceDir, *, inside_prefix: str, journal_dir: Path, started_ns: int,
    limits: WalkLimits | None = None, force: bool = False, cover: Cover = _uncovered,
) -> WriteBackReport:
    """Apply what `upper_fd` holds to the workspace directory.

    started_ns: `now_ns()` of the run's start; a file, or a directory to be removed, with a later change time is a
    conflict: then nothing at all is applied and the report says `stopped` (force=True applies the rest all the same).
    journal_dir: where the note stands that `recover` reads after a kill. cover: entered with the paths of note and staging
    directory while they may exist, for somebody who removes them at once if we are killed. Raises UsageError when the
    workspace is no longer the directory it was, OSError when staging fails (nothing is applied then).
    """
    dir_fd = _open_workspace(workspace)
    try:
        planned = _plan_changes(upper_fd, dir_fd, inside_prefix, workspace.path, limits)
        return _apply(planned, _UpperSource(upper_fd), dir_fd, workspace, journal_dir, started_ns, force,
                      cover)
    finally:
        os.close(dir_fd)


def _open_workspace(workspace: WorkspaceDir) -> int:
    try:
        fd = os.open(workspace.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        raise UsageError(f"the workspace {str(workspace.path)!r} cannot be opened: {problem.strerror}") from problem
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != (workspace.device, workspace.inode):
        os.close(fd)
        raise UsageError(f"the workspace {str(workspace.path)!r} was replaced by another directory during the run",
                         hint="apply the packed changes by hand")
    return fd


def _apply(planned: _Planned, source: _Source, dir_fd: int, workspace: WorkspaceDir, journal_dir: Path,
           started_ns: int, force: bool, cover: Cover = _uncovered) -> WriteBackReport:
    work = _Application(planned, source, dir_fd, workspace, started_ns)
    conflicts = work.conflicts()
    if conflicts and not force:
        refused = [*planned.refused, *((path, "changed_on_host", b"") for path in sorted(conflicts))]
        return WriteBackReport(refused=_refusals(refused), stopped=True,
                               conflicts=tuple(escape_bytes(path) for path in sorted(conflicts)))
    work.leave_out(conflicts)
    if planned.changes:
        with _journal(journal_dir, workspace, cover) as stage_name:
            work.run(stage_name)
    refused = planned.refused + [(path, "changed_on_host", b"") for path in conflicts]
    return WriteBackReport(
        applied=tuple(escape_bytes(path) for path in work.applied),
        removed=tuple(escape_bytes(path) for path in work.removed),
        refused=_refusals(refused), conflicts=tuple(escape_bytes(path) for path in sorted(conflicts)),
        bytes_written=work.bytes_written,
    )


class _Application:
    def __init__(
        self, planned: _Planned, source: _Source, dir_fd: int, workspace: WorkspaceDir, started_ns: int
    ) -> None:
        self.planned = planned
        self.source = source
        self.dir_fd = dir_fd
        self.workspace = workspace
        self.started_ns = started_ns
        self.applied: list[bytes] = []
        self.removed: list[bytes] = []
        self.bytes_written = 0

    # ------------------------------------------------------------------------------------------------ conflicts

    def conflicts(self) -> set[bytes]:
        # What stands below something that goes anyway is judged by that.
        going = {change.path for change in self.planned.changes if change.kind == "remove"}

        def below_going(path: bytes) -> bool:
            return any(path.startswith(top + b"/") for top in going) if going else False

        return {path for change in self.planned.changes if not below_going(change.path)
                for path in self._conflict(change)}

    def _conflict(self, change: Change) -> Iterator[bytes]:
        try:
            handle = open_beneath(self.dir_fd, change.path, os.O_PATH)
        except OSError as problem:
            # ELOOP, ENOTDIR: a directory on the way became something else.
            moved = problem.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV)
            if moved or (change.existed and change.kind != "remove" and self._place_changed(change.path)):
                yield change.path
            return
        try:
            info = os.fstat(handle)
        finally:
            os.close(handle)
        if stat.S_ISDIR(info.st_mode):
            if change.kind in ("mkdir", "chmod"):
                return  # already there, or only its mode: entries of a directory are judged one by one
            if not (change.kind == "remove" or change.replace_dir):
                yield change.path
                return
            yield from self._changed_below(change.path)
        elif not change.existed or info.st_ctime_ns > self.started_ns:
            yield change.path

    def _place_changed(self, path: bytes) -> bool:
        """Whether the host changed the nearest directory there is above a missing `path`.

        A copied-up file may be missing because the agent renamed or linked it to this name, or because the host removed
        it meanwhile: only the second leaves a trace on the host.
        """
        while path:
            path = parent_of(path)
            with contextlib.suppress(FileNotFoundError):
                handle = open_beneath(self.dir_fd, path, os.O_PATH | os.O_DIRECTORY)
                try:
                    return os.fstat(handle).st_ctime_ns > self.started_ns
                finally:
                    os.close(handle)
        return True

    def _changed_below(self, path: bytes) -> Iterator[bytes]:
        fd = open_beneath(self.dir_fd, path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            walk = Walk(fd)
            for entry in walk:
                if entry.stat.st_ctime_ns > self.started_ns:
                    yield path + b"/" + entry.path
            if walk.skipped:
                yield path
        finally:
            os.close(fd)

    def leave_out(self, conflicts: set[bytes]) -> None:
        """Drop the steps in conflict and those below them."""
        if not conflicts:
            return

        def hit(change: Change) -> bool:
            parts = change.path.split(b"/")
            if any(b"/".join(parts[:n]) in conflicts for n in range(1, len(parts) + 1)):
                return True
            below = change.path + b"/"
            takes_all = change.kind == "remove" or change.replace_dir
            return takes_all and any(path.startswith(below) for path in conflicts)

        self.planned.changes[:] = [change for change in self.planned.changes if not hit(change)]

    # ------------------------------------------------------------------------------------------------- the steps

    def run(self, stage_name: bytes) -> None:
        os.mkdir(stage_name, 0o700, dir_fd=self.dir_fd)
        stage = open_beneath(self.dir_fd, stage_name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._stage_all(stage)
            self._commit_all(stage)
            os.fsync(self.dir_fd)
        finally:
            _remove_stage(self.dir_fd, stage_name, stage)

    def _stage_all(self, stage: int) -> None:
        writes = 0
        for number, change in enumerate(self.planned.changes):
            name = b"%d" % number
            if change.kind == "symlink":
                os.symlink(change.link, name, dir_fd=stage)
                os.chown(name, self.workspace.uid, self.workspace.gid, dir_fd=stage, follow_symlinks=False)
            elif change.kind == "write":
                writes += 1
                self._stage_file(stage, name, change, sync=writes <= _FSYNC_EACH)
        if writes > _FSYNC_EACH:
            syncfs(stage)  # many fsync calls cost more than one flush of the file system

    def _stage_file(self, stage: int, name: bytes, change: Change, *, sync: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=stage)
        try:
            os.ftruncate(fd, change.size)
            self.source.copy(change, fd)
            os.fchown(fd, self.workspace.uid, self.workspace.gid)
            os.fchmod(fd, change.mode)  # after chown, which may clear bits
            os.utime(fd, ns=(change.mtime_ns, change.mtime_ns))
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        self.bytes_written += sum(length for _, length in change.segments)

    def _commit_all(self, stage: int) -> None:
        directory_modes: list[Change] = []
        for number, change in enumerate(self.planned.changes):
            try:
                self._commit(stage, b"%d" % number, change)
            except OSError as problem:
                why = "mount" if problem.errno in (errno.EXDEV, errno.EBUSY) else "in_the_way"
                self.planned.refused.append((change.path, why, b""))
                continue
            if change.kind == "mkdir":
                directory_modes.append(change)
        # Last, and children first: a directory without write permission must not lock its own content out.
        for change in reversed(directory_modes):
            with contextlib.suppress(FileNotFoundError):
                self._chmod(change)

    def _commit(self, stage: int, name: bytes, change: Change) -> None:
        parent = open_beneath(self.dir_fd, parent_of(change.path), os.O_RDONLY | os.O_DIRECTORY)
        last = change.path.rpartition(b"/")[2]
        try:
            if change.kind == "mkdir":
                self._mkdir(parent, last)
            elif change.kind == "remove":
                _remove_tree(parent, last)
                self.removed.append(change.path)
                return
            elif change.kind == "chmod":
                self._chmod(change)
            else:
                if change.replace_dir:
                    _remove_tree(parent, last)
                self._rename(stage, name, parent, last, replace=change.existed)
            self.applied.append(change.path)
        finally:
            os.close(parent)

    @staticmethod
    def _rename(stage: int, name: bytes, parent: int, last: bytes, *, replace: bool) -> None:
        if not replace:
            try:
                renameat2(stage, name, parent, last, RENAME_NOREPLACE)
            except OSError as problem:
                if problem.errno != errno.EINVAL:  # the file system has no such flag
                    raise
            else:
                return
        os.rename(name, last, src_dir_fd=stage, dst_dir_fd=parent)

    def _mkdir(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
            return
        os.chown(name, self.workspace.uid, self.workspace.gid, dir_fd=parent, follow_symlinks=False)

    def _chmod(self, change: Change) -> None:
        handle = open_beneath(self.dir_fd, change.path, os.O_PATH)
        try:
            if stat.S_ISLNK(os.fstat(handle).st_mode):
                raise OSError(errno.ELOOP, "chmod: a link stands there")
            os.chmod(f"/proc/self/fd/{handle}", change.mode)
        finally:
            os.close(handle)


def _remove_tree(parent: int, name: bytes) -> None:
    """Unlink `name` and all below it; no link followed, no mount crossed (raises EXDEV). A missing name is fine."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    top = open_beneath(parent, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        walk = Walk(top, WalkLimits(max_entries=1 << 40, max_depth=1 << 30))
        directories: list[bytes] = []
        for entry in walk:
            if entry.is_dir:
                directories.append(entry.path)
            else:
                os.unlink(entry.name, dir_fd=entry.parent_fd)
        if any(why == "mount" for _, why in walk.skipped):
            raise OSError(errno.EXDEV, "a file system is mounted below")
        for path in reversed(directories):
            above = open_beneath(top, parent_of(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.rmdir(path.rpartition(b"/")[2], dir_fd=above)
            finally:
                os.close(above)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _remove_stage(dir_fd: int, stage_name: bytes, stage: int) -> None:
    try:
        with os.scandir(stage) as listing:
            names = [item.name for item in listing]
        for name in names:
            os.unlink(name, dir_fd=stage)
    finally:
        os.close(stage)
    os.rmdir(stage_name, dir_fd=dir_fd)


# ---------------------------------------------------------------------------------------------------------- journal


@contextlib.contextmanager
def _journal(journal_dir: Path, workspace: WorkspaceDir, cover: Cover) -> Iterator[bytes]:
    """Note, locked while we live, that a staging directory exists; gone when it is."""
    journal_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    stage_name = _STAGE_PREFIX + token.encode()
    note = journal_dir / f"write-back-{token}.json"
    text = json.dumps({
        "workspace": escape_bytes(os.fsencode(workspace.path)), "device": workspace.device, "inode": workspace.inode,
        "stage": stage_name.decode(),
    })
    # Locked under a name that `recover` does not read, so that it never sees a note of ours without its lock.
    hidden = journal_dir / f".{token}"
    with cover((hidden, note, workspace.path / os.fsdecode(stage_name))):
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, text.encode())
            os.fsync(fd)
            os.rename(hidden, note)
            yield stage_name
            os.unlink(note)
        finally:
            os.close(fd)


def recover(journal_dir: Path) -> tuple[str, ...]:
    """Remove what write-backs that were killed left staged; returns the workspaces cleaned. Those still running stay.

    Call it once at the start of a run. A workspace that moved away keeps its note, so that a later call finds it.
    """
    cleaned: list[str] = []
    for note in sorted(journal_dir.glob("write-back-*.json")) if journal_dir.is_dir() else []:
        try:
            fd = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another run was quicker
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            record = json.loads(os.read(fd, 1 << 16) or b"{}")
            if _recover_one(record):
                cleaned.append(str(record["workspace"]))
                with contextlib.suppress(FileNotFoundError):
                    note.unlink()
        except ValueError:
            note.unlink()  # cut short before anything was staged: the note is durable before the directory is made
        finally:
            os.close(fd)
    return tuple(cleaned)


def _recover_one(record: dict[str, Any]) -> bool:
    stage_name = str(record["stage"]).encode()
    if not stage_name.startswith(_STAGE_PREFIX) or b"/" in stage_name:
        raise ValueError("no name of a staging directory")
    try:
        dir_fd = os.open(unescape_bytes(str(record["workspace"])), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(dir_fd)
        if (info.st_dev, info.st_ino) != (record["device"], record["inode"]):
            return False
        try:
            stage = open_beneath(dir_fd, stage_name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return True
        _remove_stage(dir_fd, stage_name, stage)
        return True
    finally:
        os.close(dir_fd)


# ------------------------------------------------------------------------------------------------------------- packs


def pack(
    upper_fd: int, workspace: WorkspaceDir, target: Path, *, inside_prefix: str, started_ns: int
) -> WriteBackReport:
    """Write what `write_back` would apply to `target` (tar under zstd), instead of applying it.

    The members are `manifest.json` and `data/<number>`: nothing in the archive has a name, link or mode that the agent
    chose, so unpacking it with any tool is harmless. Holes are not stored. The report lists what was left out.
    """
    dir_fd = _open_workspace(workspace)
    try:
        planned = _plan_changes(upper_fd, dir_fd, inside_prefix, workspace.path)
    finally:
        os.close(dir_fd)
    manifest = json.dumps({
        "schema": PACK_SCHEMA, "started_ns": started_ns,
        "changes": [_to_record(change) for change in planned.changes],
    }).encode()
    written = 0
    with new_file(target, sync=True) as fd, os.fdopen(fd, "wb", closefd=False) as out, \
            zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False) as stream, \
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add_member(tar, "manifest.json", len(manifest), BytesIO(manifest))
        for number, change in enumerate(planned.changes):
            if change.kind == "write":
                size = sum(length for _, length in change.segments)
                with _Packed(upper_fd, change) as data:
                    _add_member(tar, f"data/{number}", size, data)
                written += size
    return WriteBackReport(
        applied=tuple(escape_bytes(change.path) for change in planned.changes if change.kind != "remove"),
        removed=tuple(escape_bytes(change.path) for change in planned.changes if change.kind == "remove"),
        refused=_refusals(planned.refused), bytes_written=written,
    )


def _add_member(tar: tarfile.TarFile, name: str, size: int, data: IO[bytes]) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o600
    tar.addfile(member, data)


class _Packed(BytesIO):
    """The data segments of one file of the upper, one after another, as a stream."""

    def __init__(self, upper_fd: int, change: Change) -> None:
        super().__init__()
        parent = open_beneath(upper_fd, parent_of(change.path), os.O_PATH | os.O_DIRECTORY)
        try:
            self._fd = open_regular(parent, change.path.rpartition(b"/")[2])
        finally:
            os.close(parent)
        self._left = list(change.segments)

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = _COPY_BLOCK if size is None or size < 0 else size
        out = b""
        while wanted > len(out) and self._left:
            offset, length = self._left[0]
            block = os.pread(self._fd, min(wanted - len(out), length), offset)
            if not block:
                raise OSError(errno.EIO, "a file became shorter while it was packed")
            out += block
            self._left[0] = (offset + len(block), length - len(block))
            if not self._left[0][1]:
                self._left.pop(0)
        return out

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


class _PackSource(_Source):
    def __init__(self, tar: tarfile.TarFile, order: dict[bytes, str]) -> None:
        self.tar = tar
        self.order = order

    def copy(self, change: Change, out_fd: int) -> None:
        wanted = self.order[change.path]
        member = self.tar.next()
        # Steps that were left out because of a conflict still have their data in the archive.
        while member is not None and member.name != wanted:
            member = self.tar.next()
        data = self.tar.extractfile(member) if member is not None and member.isreg() else None
        if data is None:
            raise RecordError(f"the archive lacks {wanted}")
        for offset, length in change.segments:
            _copy_range(lambda size, _: data.read(size), out_fd, offset, length)


def apply_pack(file: Path, workspace: WorkspaceDir, *, journal_dir: Path, force: bool = False) -> WriteBackReport:
    """Apply an archive made by `pack` to a directory, with the checks of `write_back`.

    Raises RecordError when the archive is not ours or damaged; then nothing was applied.
    """
    dir_fd = _open_workspace(workspace)
    try:
        with open(file, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream, \
                tarfile.open(fileobj=stream, mode="r|") as tar:
            started_ns, changes = _read_manifest(tar, file)
            planned = _Planned()
            for change in changes:
                pointer = change.path.rpartition(b"/")[2].lower() == b".git" and change.kind not in ("mkdir", "chmod")
                if pointer or is_git_control(None, dir_fd, change.path):
                    planned.refused.append((change.path, "git_config", b""))
                elif change.kind == "symlink" and link_leaves(change.path, change.link, os.fsencode(workspace.path)):
                    planned.refused.append((change.path, _link_word(change.link), change.link))
                else:
                    planned.changes.append(change)
            order = {change.path: f"data/{number}" for number, change in enumerate(changes) if change.kind == "write"}
            return _apply(planned, _PackSource(tar, order), dir_fd, workspace, journal_dir, started_ns, force)
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as problem:
        raise RecordError(f"{file}: no readable archive of changes: {problem}") from problem
    finally:
        os.close(dir_fd)


def _read_manifest(tar: tarfile.TarFile, file: Path) -> tuple[int, list[Change]]:
    member = tar.next()
    data = tar.extractfile(member) if member is not None and member.name == "manifest.json" else None
    if member is None or data is None or member.size > _MAX_MANIFEST:
        raise RecordError(f"{file}: no archive of changes: it does not begin with a manifest")
    try:
        record = json.loads(data.read())
        if record["schema"] != PACK_SCHEMA:
            raise ValueError(f"schema {record['schema']!r}")
        return int(record["started_ns"]), [_from_record(item) for item in record["changes"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise RecordError(f"{file}: its manifest cannot be used: {problem}") from problem


def _to_record(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind, "path": escape_bytes(change.path), "mode": change.mode, "size": change.size,
        "mtime_ns": change.mtime_ns, "link": escape_bytes(change.link), "existed": change.existed,
        "replace_dir": change.replace_dir, "segments": [list(segment) for segment in change.segments],
    }


def _from_record(record: dict[str, Any]) -> Change:
    change = Change(
        kind=str(record["kind"]), path=unescape_bytes(record["path"]), mode=int(record["mode"]) & 0o777,
        size=int(record["size"]), mtime_ns=int(record["mtime_ns"]), link=unescape_bytes(record["link"]),
        existed=bool(record["existed"]), replace_dir=bool(record["replace_dir"]),
        segments=tuple((int(offset), int(length)) for offset, length in record["segments"]),
    )
    if change.kind not in ("mkdir", "write", "symlink", "remove", "chmod"):
        raise ValueError(f"step {change.kind!r}")
    if not change.path or any(part in (b"", b".", b"..") for part in change.path.split(b"/")) or b"\0" in change.path:
        raise ValueError(f"path {record['path']!r}")
    position = 0
    for offset, length in change.segments:
        if offset < position or length <= 0 or offset + length > change.size:
            raise ValueError(f"segments of {record['path']!r}")
        position = offset + length
    return change
