"""Ranges of user and group ids, one per box, never shared by two living boxes of this host.

Range i is 65536 ids from 0x70000000 + i * 0x10000; 4094 of them end below 0x7FFE0000. systemd's documentation of ids
(UIDS-GIDS) lists 1879048192..2147352575 as unused: above container ranges (0x00080000-0x6FFFFFFF), above what useradd
puts into /etc/subuid (from 100000), below the foreign-id range and below 2^31, so that no signed 32-bit field turns
negative. Ranges that /etc/subuid or /etc/subgid give to someone are left out all the same.

A range is taken by locking one byte of `<run_dir>/uids.lock` (an open-file-description lock, fcntl(2)): the kernel frees
it when the last copy of the descriptor is closed. Hand a copy to the holder, so that the range of a killed guard is
not reused before its box is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from dsec_guard.errors import HostError

FIRST = 0x70000000
SIZE = 0x10000
COUNT = 4094

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of x86-64


class UidRange:
    """base .. base + 65535, owned while `fd` or a copy of it is open."""

    def __init__(self, base: int, fd: int) -> None:
        self.base = base
        self.fd = fd

    @classmethod
    def acquire(cls, run_dir: Path, *, count: int = COUNT) -> UidRange:
        """Take a free range. run_dir: the guard's run-time directory (made by `ensure_run_dir`).

        Raises: HostError when all are taken or the lock file cannot be used.
        """
        path = run_dir / "uids.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise HostError(f"{path}: {error.strerror}", feature="uid_range") from error
        reserved = reserved_ranges()
        # Neighbouring starts would let guards probe each other's ranges; a used range rests before it comes again.
        start = time.monotonic_ns() // 1000 * 2654435761 % count
        try:
            for step in range(count):
                index = (start + step) % count
                if not _overlaps(FIRST + index * SIZE, reserved) and _try_lock(fd, index):
                    return cls(FIRST + index * SIZE, fd)
        except OSError as error:
            os.close(fd)
            raise HostError(f"{path}: {error.strerror}", feature="uid_range") from error
        os.close(fd)
        raise HostError(
            f"all {count} user id ranges are in use",
            feature="uid_range",
            hint="end some boxes; every running box owns 65536 ids",
        )

    def release(self) -> None:
        """Give the range back. Only after every process of the box is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> UidRange:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def ensure_run_dir(run_dir: Path) -> Path:
    """Make `run_dir` (0700, root's) where it is missing. Raises: HostError when it is another's or no directory."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"{run_dir}: {error.strerror}", feature="run_dir") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise HostError(f"{run_dir} belongs to uid {status.st_uid}", feature="run_dir", hint=f"remove {run_dir}")
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return run_dir


def reserved_ranges(paths: Iterable[Path] = (Path("/etc/subuid"), Path("/etc/subgid"))) -> tuple[tuple[int, int], ...]:
    """(first, end) of the ids that subuid(5) files give to users and that reach into ours; malformed lines are skipped."""
    out: list[tuple[int, int]] = []
    for path in paths:
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostError(f"{path}: {error.strerror}", feature="uid_range") from error
        for line in lines:
            fields = line.split(":")
            if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                first, end = int(fields[1]), int(fields[1]) + int(fields[2])
                if first < FIRST + COUNT * SIZE and end > FIRST:
                    out.append((first, end))
    return tuple(out)


def _overlaps(base: int, reserved: tuple[tuple[int, int], ...]) -> bool:
    return any(first < base + SIZE and end > base for first, end in reserved)


def _try_lock(fd: int, index: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
