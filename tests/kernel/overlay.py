"""A workspace overlay as the launcher mounts it, in a private mount namespace of one thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec_guard.host import mount

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Left:
    """What a box leaves: descriptors of the upper, merged and lower directories, usable after its mounts are gone."""

    upper: int
    merged: int
    lower: int
    lower_path: Path


@contextmanager
def overlay(tmp_path: Path, fill: Callable[[Path], None], act: Callable[[Path], None],
            *, disk: int = 64 << 20, inodes: int = 40_000) -> Iterator[Left]:
    """`fill` makes the host directory, `act` is what the agent does in the merged view; both get a path."""
    lower, point, merged = tmp_path / "lower", tmp_path / "store", tmp_path / "merged"
    for path in (lower, point, merged):
        path.mkdir(exist_ok=True)
    fill(lower)
    store = mount.new_tmpfs(size_bytes=disk, inodes=inodes)
    for name in ("upper", "work"):
        os.mkdir(name, dir_fd=store)

    def run() -> tuple[int, int]:
        mount.move_mount(store, mount.AT_FDCWD, os.fsencode(point))
        options = f"lowerdir={lower},upperdir={point}/upper,workdir={point}/work,index=on,xino=on".encode()
        if _libc.mount(b"overlay", os.fsencode(merged), b"overlay", ctypes.c_ulong(0), options) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mount(overlay): {os.strerror(number)}")
        act(merged)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(point / "upper", flags), os.open(merged, flags)

    upper, merged_fd = mount.in_private_mount_namespace(run)
    lower_fd = os.open(lower, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Left(upper, merged_fd, lower_fd, lower)
    finally:
        for fd in (upper, merged_fd, lower_fd, store):
            os.close(fd)


def put(path: Path, text: str | bytes = "x", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)


def dig(top: Path, depth: int, name: str = "d") -> None:
    """A chain of directories deeper than any path may be long."""
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        deeper = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = deeper
    fd = os.open("leaf", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here)
    os.write(fd, b"bottom")
    os.close(fd)
    os.close(here)
