"""File owners where the kernel cannot map them: file systems such as overlay refuse id-mapped mounts (EINVAL).

System directories then show their files as nobody's, which is enough to read and run them; a workspace has to belong to
the agent, so it is copied. Each file system is asked by trying, never by its name.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dsec_guard.errors import SetupError
from dsec_guard.host import mount
from dsec_guard.sandbox.spec import MountFlag, OpKind, RootOp

MAX_COPIED_ENTRIES = 200_000


def can_idmap(path: str | os.PathLike[str], userns_fd: int) -> bool:
    """Whether a detached copy of the mount at `path` takes the id map of `userns_fd`. Raises OSError when it cannot be
    opened at all."""
    tree = mount.open_tree(-100, os.fsencode(path))
    try:
        mount.mount_setattr(tree, set_attributes=mount.MOUNT_ATTR_IDMAP, userns_fd=userns_fd)
    except OSError:
        return False
    finally:
        os.close(tree)
    return True


def without_refused_maps(ops: Iterable[RootOp], userns_fd: int) -> tuple[tuple[RootOp, ...], tuple[str, ...]]:
    """The steps with id maps taken off the binds whose file system refuses them, and where those stand inside."""
    known: dict[int, bool] = {}
    kept: list[RootOp] = []
    unmapped: list[str] = []
    for op in ops:
        if op.kind is OpKind.BIND and op.flags & MountFlag.IDMAP_BOX:
            try:
                device = os.stat(op.source).st_dev
            except OSError:
                kept.append(op)  # the launcher says what is missing
                continue
            if device not in known:
                known[device] = can_idmap(op.source, userns_fd)
            if not known[device]:
                op = replace(op, flags=op.flags & ~MountFlag.IDMAP_BOX)
                unmapped.append(f"/{op.target}")
        kept.append(op)
    return tuple(kept), tuple(unmapped)


def copy_workspace(source: Path, target: Path, owner: tuple[int, int], *, max_bytes: int) -> None:
    """Copy directories, files and links of `source` to the new directory `target`, owned by host ids `owner`.

    Devices, fifos and sockets are left out; links are copied as links. Raises SetupError beyond `max_bytes` or
    MAX_COPIED_ENTRIES; what was copied until then is the caller's to remove.
    """
    seen = copied = 0

    def skip(directory: str, names: list[str]) -> set[str]:
        nonlocal seen, copied
        out = set()
        for name in names:
            info = os.lstat(os.path.join(directory, name))
            seen += 1
            copied += info.st_size if stat.S_ISREG(info.st_mode) else 0
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                out.add(name)
        if seen > MAX_COPIED_ENTRIES or copied > max_bytes:
            raise SetupError(f"the workspace {str(source)!r} is too large to be copied", step="copy_workspace",
                             hint="use a file system that supports id-mapped mounts, such as ext4, xfs, btrfs or tmpfs")
        return out

    try:
        shutil.copytree(source, target, symlinks=True, ignore=skip)
        for directory, _, files in os.walk(target):
            os.chown(directory, *owner, follow_symlinks=False)
            for name in files:
                os.chown(os.path.join(directory, name), *owner, follow_symlinks=False)
            for name in os.listdir(directory):
                if os.path.islink(os.path.join(directory, name)):
                    os.chown(os.path.join(directory, name), *owner, follow_symlinks=False)
    except (OSError, shutil.Error) as problem:
        raise SetupError(f"the workspace {str(source)!r} cannot be copied: {problem}", step="copy_workspace") from problem
