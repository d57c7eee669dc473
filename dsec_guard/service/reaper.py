"""Finds and removes what dead guards left, from the kernel's own state.

A guard owns an *instance name* `<pid>-<start time>` and holds a lock on `<run_dir>/instances/<name>.lock` for as long as
it (or its holder) lives. A cgroup directory or lock file whose lock is free, and whose process is gone, is a leftover.
Normally the holder has removed everything already; this is for the case that both were killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from dsec_guard.errors import HostError
from dsec_guard.host.cgroup import CgroupHost
from dsec_guard.host.uids import ensure_run_dir

RUN_DIR = Path("/run/dsec-guard")

_INSTANCE = re.compile(r"(\d{1,10})-(\d{1,20})(?:-\d{1,6})?\Z")

#: See `Ownership.take`.
Cover = Callable[[tuple[Path, ...]], contextlib.AbstractContextManager[None]]


def _uncovered(_paths: tuple[Path, ...]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Ownership:
    """The right to an instance name. `fd`: the lock; give a copy to the holder. `directory`: scratch space of the
    instance (`<run_dir>/instances/<name>`, 0700), removed with it."""

    def __init__(self, name: str, fd: int, lock_path: Path, covered: contextlib.ExitStack) -> None:
        self.name = name
        self._covered = covered
        self.fd = fd
        self.lock_path = lock_path
        self.directory = lock_path.with_suffix("")

    @classmethod
    def take(cls, run_dir: Path = RUN_DIR, *, cover: Cover = _uncovered) -> Ownership:
        """Claim a name of this process that was never used. Take it before any directory is made under it.

        cover: entered with the paths of lock and directory before they are made, left when they are gone; for somebody
        who removes them at once if we are killed. Raises: HostError when `run_dir` cannot be used.
        """
        instances = ensure_run_dir(run_dir) / "instances"
        try:
            instances.mkdir(mode=0o700, exist_ok=True)
            stem = f"{os.getpid()}-{start_time(os.getpid())}"
            for number in range(1_000_000):
                name = f"{stem}-{number}" if number else stem
                path = instances / f"{name}.lock"
                with contextlib.ExitStack() as attempt:
                    if path.exists():
                        continue  # before it is covered: it is another guard's
                    attempt.enter_context(cover((path, path.with_suffix(""))))
                    try:
                        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    except FileExistsError:
                        continue
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    # Between making and locking it a reaper may have taken the file for a leftover.
                    if os.fstat(fd).st_nlink == 0:
                        os.close(fd)
                        continue
                    owner = cls(name, fd, path, attempt.pop_all())
                    owner.directory.mkdir(mode=0o700)
                    return owner
        except OSError as error:
            raise HostError(f"{error.filename or instances}: {error.strerror}", feature="run_dir") from error
        raise HostError(f"{instances} has a million locks of this process", feature="run_dir")

    def release(self) -> None:
        """Remove the lock file and the instance's directory; after everything else of the instance is gone."""
        if self.fd < 0:
            return
        _remove_tree(self.directory)
        self.lock_path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1
        self._covered.close()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def start_time(pid: int) -> int:
    """Clock ticks after boot at which `pid` began; 0 when there is no such process or only its status is left to be read.

    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def reap(run_dir: Path = RUN_DIR, *, host: CgroupHost | None = None, deadline_s: float = 2.0) -> list[str]:
    """Remove what dead guards left: processes, cgroup directories, scratch directories, lock files.

    Returns: the paths that were removed, [] when there was nothing. What could not be removed within `deadline_s`
    (a process in an uninterruptible call) stays for the next time.
    """
    host = host or CgroupHost.probe()
    instances = run_dir / "instances"
    names = {entry.removesuffix(".lock") for entry in _list(instances)}
    for base in host.bases():
        names.update(_list(base))
    removed: list[str] = []
    end = time.monotonic() + deadline_s
    for name in sorted(name for name in names if _INSTANCE.match(name)):
        lock = _lock_of_the_dead(instances / f"{name}.lock", name)
        if lock is None:
            continue
        try:
            removed += _reap_instance(host, instances, name, end)
        finally:
            if lock >= 0:
                os.close(lock)
    if removed and host.base_is_default:
        for base in host.bases():
            _rmdir(base)
    return removed


def _lock_of_the_dead(path: Path, name: str) -> int | None:
    """A locked descriptor (-1 where there is no lock file) when the owner of `name` is gone, else None."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Made by a guard with another run directory, maybe: then its process tells.
        return None if _is_alive(name) else -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    # Locked by us, yet its maker lives: it is between making and locking it.
    if _is_alive(name):
        os.close(fd)
        return None
    return fd


def _is_alive(name: str) -> bool:
    match = _INSTANCE.match(name)
    return match is not None and start_time(int(match.group(1))) == int(match.group(2))


def _reap_instance(host: CgroupHost, instances: Path, name: str, end: float) -> Iterator[str]:
    bases = host.bases()
    # Without a v2 directory there is no process either: every box's tasks start in it.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (bases[0] / name / "cgroup.kill").write_text("1")
    left = [base / name for base in bases if (base / name).is_dir()]
    pause_s = 0.0001
    while left:
        for path in list(left):
            if _remove_cgroup_tree(path):
                left.remove(path)
                yield str(path)
        if not left or time.monotonic() >= end:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.01)
    if left:
        return
    directory, lock = instances / name, instances / f"{name}.lock"
    if directory.is_dir() and _remove_tree(directory):
        yield str(directory)
    try:
        lock.unlink()
    except FileNotFoundError:
        return
    yield str(lock)


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _remove_cgroup_tree(path: Path) -> bool:
    """Remove a cgroup directory and all below it, deepest first. False while a task is left somewhere."""
    for current, dirs, _ in os.walk(path, topdown=False):
        for name in dirs:
            _rmdir(Path(current, name))
    return _rmdir(path)


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY, errno.EACCES, errno.EPERM):
            return False
        raise
    return True


def _remove_tree(path: Path) -> bool:
    """Remove a scratch directory by descriptor, following no link and entering no mount. False when something stays."""
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _remove_entry(parent, path.name, os.fstat(parent).st_dev)
    finally:
        os.close(parent)


def _remove_entry(parent: int, name: str, device: int) -> bool:
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if status.st_dev != device:
            return False
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            return True
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            left = [child for child in os.listdir(fd) if not _remove_entry(fd, child, device)]
            if left:
                return False
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
