"""Landlock: what the kernel's ABI offers, and the rules of a box as plain data.

The launcher applies a plan inside the box, after its last mount; nothing here restricts the calling process.
Source: landlock(7); include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag

from dsec_guard.host.syscall_table import X86_64

_CREATE_RULESET_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION


class FsRight(IntFlag):
    """LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


class NetRight(IntFlag):
    """LANDLOCK_ACCESS_NET_*."""

    BIND_TCP = 1 << 0
    CONNECT_TCP = 1 << 1


class Scope(IntFlag):
    """LANDLOCK_SCOPE_*."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


#: Rights by the ABI that brought them; a later ABI has all earlier ones.
_FS_SINCE: Mapping[int, FsRight] = {1: FsRight((1 << 13) - 1), 2: FsRight.REFER, 3: FsRight.TRUNCATE, 5: FsRight.IOCTL_DEV}
_NET_SINCE: Mapping[int, NetRight] = {4: NetRight.BIND_TCP | NetRight.CONNECT_TCP}
_SCOPE_SINCE: Mapping[int, Scope] = {6: Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL}

READ = FsRight.READ_FILE
READ_EXECUTE = FsRight.READ_FILE | FsRight.EXECUTE
WRITE_FILE = FsRight.READ_FILE | FsRight.WRITE_FILE | FsRight.TRUNCATE
#: Everything below a directory of the box's own, but device nodes.
FULL = FsRight((1 << 16) - 1) & ~(FsRight.MAKE_CHAR | FsRight.MAKE_BLOCK | FsRight.IOCTL_DEV)


@dataclass(frozen=True)
class LandlockRulePlan:
    """`access` below `path` (inside the box), in the kernel's bits, already masked to the ABI of this host.

    Rights that only directories have are kept apart by the launcher where `path` turns out to be a file.
    """

    path: str
    access: int


@dataclass(frozen=True)
class LandlockPlan:
    """The fields of `sandbox.spec.LandlockSpec`. ports: (port, access) pairs."""

    handled_fs: int
    handled_net: int = 0
    scoped: int = 0
    rules: tuple[LandlockRulePlan, ...] = ()
    ports: tuple[tuple[int, int], ...] = ()

    def allows(self, path: str, right: FsRight) -> str | None:
        """The path of a rule that grants `right` at `path`, or None. A right that is not handled is granted by ""."""
        if not self.handled_fs & right:
            return ""
        for rule in self.rules:
            below = rule.path == "/" or path == rule.path or path.startswith(rule.path + "/")
            if below and rule.access & right:
                return rule.path
        return None


def landlock_abi() -> int:
    """The ABI version the running kernel offers, 0 when Landlock is absent or switched off at boot."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(X86_64["landlock_create_ruleset"]), None, ctypes.c_size_t(0),
                               ctypes.c_uint32(_CREATE_RULESET_VERSION))
    return max(result, 0)


def fs_rights(abi: int) -> FsRight:
    """All file-system rights an ABI can handle."""
    return FsRight(sum(bits for since, bits in _FS_SINCE.items() if since <= abi))


def net_rights(abi: int) -> NetRight:
    return NetRight(sum(bits for since, bits in _NET_SINCE.items() if since <= abi))


def scopes(abi: int) -> Scope:
    return Scope(sum(bits for since, bits in _SCOPE_SINCE.items() if since <= abi))


def build_plan(abi: int, grants: Iterable[tuple[str, FsRight]], *, connect_tcp: Iterable[int] | None = None,
               bind_tcp: Iterable[int] | None = None) -> LandlockPlan:
    """The plan for paths and their rights at an ABI >= 1; grants of one path are joined.

    connect_tcp, bind_tcp: ports that stay allowed, None for no restriction. Raises ValueError for ABI 0 or a path that
    is not absolute and normalised.
    """
    if abi < 1:
        raise ValueError("no Landlock at ABI 0")
    handled = fs_rights(abi)
    joined: dict[str, FsRight] = {}
    for path, rights in grants:
        if not path.startswith("/") or os.path.normpath(path) != path:
            raise ValueError(f"{path!r} is no plain absolute path")
        joined[path] = joined.get(path, FsRight(0)) | (rights & handled)
    rules = tuple(LandlockRulePlan(path, int(rights)) for path, rights in joined.items() if rights)
    handled_net = NetRight(0)
    ports: dict[int, NetRight] = {}
    for wanted, right in ((connect_tcp, NetRight.CONNECT_TCP), (bind_tcp, NetRight.BIND_TCP)):
        if wanted is not None and net_rights(abi) & right:
            handled_net |= right
            for port in wanted:
                ports[port] = ports.get(port, NetRight(0)) | right
    return LandlockPlan(int(handled), int(handled_net), int(scopes(abi)), rules,
                        tuple((port, int(rights)) for port, rights in sorted(ports.items())))
