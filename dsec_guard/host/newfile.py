"""Files that appear whole or not at all, and whose unfinished half has no name a killed process could leave behind."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_file(path: Path, *, mode: int = 0o600, sync: bool = False) -> Iterator[int]:
    """A descriptor to write to; `path` becomes that file when the block ends well, replacing what was there.

    sync: fsync before it gets its name. Until then the file has no name (open(2), O_TMPFILE), except where the file system
    cannot do that; a `path` that exists is replaced through a second name that lives for two calls. Raises: OSError.
    """
    try:
        fd = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
        temporary: Path | None = None
    except OSError as error:
        # EISDIR: a kernel or file system that takes the flag for an ordinary opening of the directory.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        temporary = _other_name(path)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        yield fd
        if sync:
            os.fsync(fd)
        if temporary is None:
            try:
                _give_name(fd, path)
                return
            except FileExistsError:
                another = _other_name(path)
                _give_name(fd, another)
                temporary = another
        temporary.rename(path)
        temporary = None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        os.close(fd)


def _give_name(fd: int, path: Path) -> None:
    # With a directory given, Python calls linkat with AT_SYMLINK_FOLLOW; plain link(2) would link the symlink itself.
    parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=True)
    finally:
        os.close(parent)


def _other_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.tmp")
