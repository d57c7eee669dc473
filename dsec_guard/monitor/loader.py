"""The kernel side of the monitor: load the BPF object, attach it, keep its maps, take records off its rings.

One `KernelMonitor` belongs to one guard instance. Its cgroup programs sit on the instance's v2 directory; its sys_exit
program, which every task of the host pays for, is attached only while a box of level full is known.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsec_guard.errors import HostError, MonitorError
from dsec_guard.model import Level
from dsec_guard.monitor import syscalls, wire
from dsec_guard.monitor.libbpf import BpfError, BpfObject
from dsec_guard.monitor.linger import Lingering

__all__ = [
    "NETWORK_ALLOWLIST",
    "NETWORK_NONE",
    "NETWORK_OPEN",
    "PHASE_NUMBERS",
    "BoxConfig",
    "BoxCounters",
    "HookState",
    "KernelMonitor",
    "default_watch_prefixes",
    "lsm_loadable",
]

NETWORK_NONE, NETWORK_ALLOWLIST, NETWORK_OPEN = 0, 1, 2
PHASE_NUMBERS = {"setup": 0, "agent": 1, "verify": 2}

_NATIVE = Path(__file__).resolve().parent.parent / "_native"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_OPTIONAL = frozenset({"dg_capable", "dg_uring_create", "dg_uring_submit", "dg_oom_victim"})
_SYS_EXIT = "tp_btf/sys_exit"
_ONLY_FULL = "attached while a box of level full lives"
_HINT = "needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN (root), kernel BTF (/sys/kernel/btf/vmlinux) and libbpf 1.x"
_BATCH_BYTES = 1 << 20


def default_watch_prefixes() -> tuple[bytes, ...]:
    """Where a name that does not exist is worth a record: the kernel's own trees."""
    return (b"/proc/", b"/sys/", b"/dev/")


@dataclass(frozen=True)
class HookState:
    """One program: its hook (the section's name), whether it is attached, and if not, why."""

    name: str
    attached: bool
    why: str = ""


@dataclass(frozen=True)
class BoxConfig:
    """What the kernel side is told about a box.

    box_id: inode number of its v2 directory. network: NETWORK_*. event_budget: evidence records of its whole life;
    context_budget: exec, fork and exit records; reserved_budget: critical records, and as many for protected objects,
    beyond the event budget. watch_prefixes: absolute paths as seen inside; looking for something absent below one is
    reported. Compared in the kernel: beyond 24 prefixes or 64 bytes they are shortened, so that more is reported.
    """

    box_id: int
    level: Level = Level.FULL
    network: int = NETWORK_NONE
    event_budget: int = 20_000
    context_budget: int = 200_000
    reserved_budget: int = 1024
    watch_prefixes: tuple[bytes, ...] = field(default_factory=default_watch_prefixes)


@dataclass(frozen=True)
class BoxCounters:
    """What the kernel counted for one box; it stays exact when records are lost.

    events: evidence that asked for a place (emitted + lost_evidence + over_budget). suppressed: repeats that were only
    counted. calls: (name, result) -> how many were counted instead of sent. calls_other: the same for further kinds.
    """

    events: int = 0
    context: int = 0
    emitted: int = 0
    lost_evidence: int = 0
    lost_context: int = 0
    over_budget: int = 0
    suppressed: int = 0
    reserved: int = 0
    protected_seen: int = 0
    forks: int = 0
    threads: int = 0
    execs: int = 0
    exits: int = 0
    signals: int = 0
    caps_seen: int = 0
    calls_other: int = 0
    calls: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Box:
    config: BoxConfig
    phase: int = 1
    init_tgid: int = 0
    live: bool = False
    network: int = NETWORK_NONE
    watches: int = 0

    def pack(self) -> bytes:
        c = self.config
        return struct.pack(
            wire.BOX.format, c.event_budget, c.context_budget, c.reserved_budget, int(c.level is Level.FULL), self.network,
            self.phase, self.init_tgid, int(self.live), self.watches,
        )  # fmt: skip


class _Ring:
    """One ring buffer, read by libdgdrain.so."""

    def __init__(self, drain: Any, map_fd: int, size: int) -> None:
        self._drain = drain
        self._handle = ctypes.c_void_p()
        if code := drain.dg_ring_open(map_fd, size, ctypes.byref(self._handle)):
            raise MonitorError(f"cannot map a ring buffer: {os.strerror(-code)}")
        self._buffer = ctypes.create_string_buffer(_BATCH_BYTES)
        self._taken = ctypes.c_uint32()

    def take(self, max_records: int) -> list[wire.RawRecord]:
        """Up to `max_records` records, one batch of at most 1 MiB."""
        used = self._drain.dg_ring_drain(
            self._handle, self._buffer, _BATCH_BYTES, max_records, ctypes.byref(self._taken)
        )
        if used < 0:
            raise MonitorError(f"cannot read a ring buffer: {os.strerror(-used)}")
        if not used:
            return []
        return [wire.decode(frame) for frame in wire.frames(memoryview(self._buffer)[:used].cast("B"))]

    def close(self) -> None:
        if self._handle.value:
            self._drain.dg_ring_close(self._handle)
            self._handle = ctypes.c_void_p()


def _load_drain(directory: Path) -> Any:
    path = directory / "libdgdrain.so"
    try:
        lib: Any = ctypes.CDLL(os.fspath(path), use_errno=True)
    except OSError as exc:
        raise HostError(
            f"{path} cannot be loaded: {exc}", feature="bpf", hint="build the native parts: make setup"
        ) from exc
    lib.dg_ring_open.restype = ctypes.c_int
    lib.dg_ring_open.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
    lib.dg_ring_drain.restype = ctypes.c_long
    lib.dg_ring_drain.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32),
    ]  # fmt: skip
    lib.dg_ring_close.restype = None
    lib.dg_ring_close.argtypes = [ctypes.c_void_p]
    return lib


class KernelMonitor:
    """The loaded object. Use `load`; end with `close`, which detaches everything. Not thread-safe."""

    def __init__(
        self, obj: BpfObject, cgroup_fd: int, skipped: dict[str, str], drain: Any, sizes: tuple[int, int], linger_s: float
    ) -> None:
        self._obj = obj
        self._sys_exit = Lingering(lambda: obj.attach("dg_sys_exit"), obj.detach, linger_s)
        self._boxes_of: dict[int, _Box] = {}
        self._full: set[int] = set()
        self._hooks: dict[str, HookState] = {}
        self._rings: list[_Ring] = []
        self._epoll = select.epoll()
        w, q = wire, 8
        self._boxes = obj.map("boxes", key_size=q, value_size=w.BOX.size)
        self._stats = obj.map("stats", key_size=q, value_size=w.STATS.size)
        self._watches = obj.map("watches", key_size=q, value_size=w.WATCH_SIZE)
        self._objects = obj.map("objects", key_size=w.OBJECT_KEY.size, value_size=q)
        self._counts = obj.map("counts", key_size=w.COUNT_KEY.size, value_size=q)
        ioctls = obj.map("ioctls", key_size=4, value_size=4)
        for request in syscalls.WATCHED_IOCTLS:
            ioctls.update(_U32.pack(request), _U32.pack(1))
        # Mapped, because one word is ours and the others the kernel's: an update would write them all.
        global_fd = obj.map(".bss.dg", key_size=4, value_size=w.GLOBAL.size).fd
        self._global = mmap.mmap(global_fd, mmap.PAGESIZE)
        self._protected: dict[tuple[int, int], tuple[int, int]] = {}  # inode -> its number, how many want it
        self._object_id = 0
        for name, size, how in (
            ("evidence", sizes[0], select.EPOLLIN),
            # Context wakes nobody by itself, so readiness alone must not either.
            ("context", sizes[1], select.EPOLLIN | select.EPOLLET),
        ):
            ring_fd = obj.map(name, key_size=0, value_size=0).fd
            self._rings.append(_Ring(drain, ring_fd, size))
            self._epoll.register(ring_fd, how)
        self._attach(cgroup_fd, skipped)

    @classmethod
    def load(
        cls,
        cgroup_dir_fd: int,
        ancestor_level: int,
        *,
        max_boxes: int = 64,
        max_objects: int = 1024,
        evidence_bytes: int = 4 << 20,
        context_bytes: int = 1 << 20,
        fail_closed: bool = True,
        linger_s: float = 0.0,
        native_dir: Path = _NATIVE,
    ) -> KernelMonitor:
        """Load and attach.

        cgroup_dir_fd: the instance's v2 directory, above its boxes. ancestor_level: depth of a box's directory below
        the v2 root (a child of the root is 1). Ring sizes are powers of two. fail_closed: connections from below the
        instance but from no known box are refused unless they stay on loopback. linger_s: how long the program on
        sys_exit stays attached after the last box of level full.
        Raises: HostError(feature="bpf") when the kernel refuses the object, with the verifier's last lines.
        """
        drain = _load_drain(native_dir)
        path = native_dir / "dg_guard.bpf.o"
        if not path.exists():
            raise HostError(f"{path} is missing", feature="bpf", hint="build the native parts: make setup")
        config = wire.pack_config(ancestor_level, fail_closed, syscalls.class_table(), syscalls.class_table_i386())
        skipped: dict[str, str] = {}
        while True:
            try:
                obj = BpfObject(os.fspath(path))
            except BpfError as exc:
                raise HostError(f"{exc}\n{exc.log}".rstrip(), feature="bpf", hint=_HINT) from exc
            try:
                for name in skipped:
                    obj.skip_program(name)
                for name, entries in (
                    ("boxes", max_boxes), ("stats", max_boxes), ("watches", max_boxes), ("objects", max_objects),
                    ("counts", max(1024, 256 * max_boxes)), ("evidence", evidence_bytes), ("context", context_bytes),
                ):  # fmt: skip
                    obj.set_max_entries(name, entries)
                obj.set_initial_value(".rodata.dg", config)
                obj.load()
            except BpfError as exc:
                obj.close()
                refused = next((p for p in _OPTIONAL - skipped.keys() if f"prog '{p}'" in exc.log), None)
                if refused is None:
                    raise HostError(
                        f"the kernel refuses the monitor's programs: {exc}\n{exc.log}".rstrip(),
                        feature="bpf",
                        hint=_HINT,
                    ) from exc
                skipped[refused] = str(exc)
                continue
            try:
                return cls(obj, cgroup_dir_fd, skipped, drain, (evidence_bytes, context_bytes), linger_s)
            except BaseException:
                obj.close()
                raise

    def _attach(self, cgroup_fd: int, skipped: dict[str, str]) -> None:
        for program, section in self._obj.programs().items():
            if program in skipped:
                self._hooks[section] = HookState(section, False, skipped[program])
                continue
            if program == "dg_sys_exit":
                self._hooks[section] = HookState(section, False, _ONLY_FULL)
                continue
            try:
                self._obj.attach(program, cgroup_fd if section.startswith("cgroup/") else -1)
            except BpfError as exc:
                self._hooks[section] = HookState(section, False, str(exc))
            else:
                self._hooks[section] = HookState(section, True)

    @property
    def layers(self) -> tuple[HookState, ...]:
        """Every hook of the object in its order, with its present state."""
        return tuple(self._hooks.values())

    @property
    def optional_hooks(self) -> frozenset[str]:
        """Sections whose absence leaves no detector without its source."""
        return frozenset(section for program, section in self._obj.programs().items() if program in _OPTIONAL)

    # ------------------------------------------------------------------------------------------------------- boxes

    def add_box(self, config: BoxConfig) -> None:
        """Make a box known. Nothing of it is reported before `go_live`; its network word holds at once.

        Raises: MonitorError when it is known already or the monitor is full, HostError when level full cannot attach.
        """
        if config.box_id in self._boxes_of:
            raise MonitorError(f"box {config.box_id} is known already")
        key = _U64.pack(config.box_id)
        watches = wire.fit_watches(config.watch_prefixes)
        box = _Box(config, network=config.network, watches=len(watches))
        if config.level is Level.FULL:
            self._want_sys_exit(config.box_id)
        try:
            self._watches.update(key, wire.pack_watches(watches))
            self._stats.update(key, bytes(wire.STATS.size))
            self._boxes.update(key, box.pack())
        except BpfError as exc:
            self._forget(key)
            self._unwant_sys_exit(config.box_id)
            raise MonitorError(f"box {config.box_id} cannot be added: {exc}") from exc
        self._boxes_of[config.box_id] = box

    def set_init(self, box_id: int, tgid: int) -> None:
        """Host pid of the box's dg-init: it is not reported, and each process it makes is the next command."""
        self._change(box_id, init_tgid=tgid)

    def reset_exec(self, box_id: int) -> None:
        """Start counting commands anew: the next process of dg-init is command 1. Only before `go_live`."""
        if self._box(box_id).live:
            raise MonitorError(f"box {box_id} is live: its counters are evidence")
        self._stats.update(_U64.pack(box_id), bytes(wire.STATS.size))

    def go_live(self, box_id: int) -> None:
        """Report from here on; dg-init must not have started any command yet."""
        self._change(box_id, live=True)

    def set_phase(self, box_id: int, phase: int) -> None:
        """The number that records carry: PHASE_NUMBERS."""
        self._change(box_id, phase=phase)

    def set_network(self, box_id: int, word: int) -> None:
        """Switch what the address hooks allow, for connections made from now on: NETWORK_*."""
        if word not in (NETWORK_NONE, NETWORK_ALLOWLIST, NETWORK_OPEN):
            raise ValueError(f"no such network word: {word}")
        self._change(box_id, network=word)

    def counters(self, box_id: int) -> BoxCounters:
        """Read the box's counters; may be called at any time before `remove_box`."""
        self._box(box_id)
        raw = self._stats.lookup(_U64.pack(box_id))
        if raw is None:
            raise MonitorError(f"box {box_id} has no counters")
        values = dict(zip(wire.STATS.fields, struct.unpack(wire.STATS.format, raw), strict=True))
        calls: dict[tuple[str, int], int] = {}
        for key in self._count_keys(box_id):
            _, number, result = struct.unpack(wire.COUNT_KEY.format, key)
            if value := self._counts.lookup(key):
                name = syscalls.counted_name(number)
                calls[name, result] = calls.get((name, result), 0) + _U64.unpack(value)[0]
        del values["exec_counter"], values["count_keys"]
        return BoxCounters(**values, calls=dict(sorted(calls.items())))

    def remove_box(self, box_id: int) -> None:
        """Forget a box and its counters. Records of it that are still in the rings can be drained."""
        self._box(box_id)
        key = _U64.pack(box_id)
        self._forget(key)
        for count in self._count_keys(box_id):
            self._counts.delete(count)
        del self._boxes_of[box_id]
        self._unwant_sys_exit(box_id)

    def _box(self, box_id: int) -> _Box:
        try:
            return self._boxes_of[box_id]
        except KeyError:
            raise MonitorError(f"box {box_id} is not known to the monitor") from None

    def _change(self, box_id: int, **values: Any) -> None:
        box = replace(self._box(box_id), **values)
        self._boxes.update(_U64.pack(box_id), box.pack())
        self._boxes_of[box_id] = box

    def _forget(self, key: bytes) -> None:
        for table in (self._boxes, self._stats, self._watches):
            table.delete(key)

    def _count_keys(self, box_id: int) -> list[bytes]:
        prefix = _U64.pack(box_id)
        return [key for key in self._counts.scan() if key.startswith(prefix)]

    def _want_sys_exit(self, box_id: int) -> None:
        if not self._full:
            try:
                self._sys_exit.want()
            except BpfError as exc:
                raise HostError(f"level full: {exc}", feature="bpf", hint=_HINT) from exc
            self._hooks[_SYS_EXIT] = HookState(_SYS_EXIT, True)
        self._full.add(box_id)

    def _unwant_sys_exit(self, box_id: int) -> None:
        if box_id not in self._full:
            return
        self._full.discard(box_id)
        if not self._full:
            self._sys_exit.unwant()
            self._hooks[_SYS_EXIT] = HookState(_SYS_EXIT, False, _ONLY_FULL)

    # --------------------------------------------------------------------------------------------- protected objects

    def protect(self, dev: int, ino: int) -> int:
        """Report every successful open of the inode, by boxes of level full. dev, ino: as stat(2) gives them.

        Returns the number that records name it by, the same for every caller until the last one has called `unprotect`.
        The caller keeps a descriptor of the object, else its inode number could be given to another file.
        """
        known = self._protected.get((dev, ino))
        if known is not None:
            self._protected[dev, ino] = known[0], known[1] + 1
            return known[0]
        self._object_id += 1
        self._objects.update(_object_key(dev, ino), _U64.pack(self._object_id))
        self._protected[dev, ino] = self._object_id, 1
        self._publish_protected()
        return self._object_id

    def unprotect(self, dev: int, ino: int) -> None:
        """Take back one `protect`."""
        number, users = self._protected[dev, ino]
        if users > 1:
            self._protected[dev, ino] = number, users - 1
            return
        self._objects.delete(_object_key(dev, ino))
        del self._protected[dev, ino]
        self._publish_protected()

    @property
    def protected(self) -> int:
        """How many inodes are protected now."""
        return len(self._protected)

    def _publish_protected(self) -> None:
        at = wire.GLOBAL.offsets()["protected_objects"]
        self._global[at : at + 8] = _U64.pack(len(self._protected))

    # ---------------------------------------------------------------------------------------------------- records

    def fileno(self) -> int:
        """Readable when evidence waits or context piles up. Drain every 250 ms even if it is not: context alone wakes
        nobody before its ring is a quarter full."""
        return self._epoll.fileno()

    def drain(self, max_records: int = 4096) -> list[wire.RawRecord]:
        """Take what the rings hold, at most `max_records` of each and about 1 MiB, oldest first. [] when empty.

        Evidence is read before context, so that what led to it (exec, fork) is in the same batch, and all is ordered by
        the kernel's time.
        """
        self._epoll.poll(0, 2)  # takes the edge, so that the next pile-up makes a new one
        records = [record for ring in self._rings for record in ring.take(max_records)]
        records.sort(key=_at_ns)
        return records

    def lost(self) -> tuple[int, int]:
        """Records of all boxes that found no place: (evidence, context)."""
        values = dict(zip(wire.GLOBAL.fields, struct.unpack_from(wire.GLOBAL.format, self._global), strict=True))
        return values["lost_evidence"], values["lost_context"]

    def close(self) -> None:
        """Detach and free everything; safe to call twice."""
        for ring in self._rings:
            ring.close()
        self._rings.clear()
        if not self._epoll.closed:
            self._epoll.close()
        if not self._global.closed:
            self._global.close()
        self._boxes_of.clear()
        self._full.clear()
        self._sys_exit.close()
        self._obj.close()

    def __enter__(self) -> KernelMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _at_ns(record: wire.RawRecord) -> int:
    return record.head.at_ns


def _object_key(dev: int, ino: int) -> bytes:
    # The kernel's own dev_t has 20 minor bits: include/linux/kdev_t.h.
    return struct.pack(wire.OBJECT_KEY.format, os.major(dev) << 20 | os.minor(dev), ino)


def lsm_loadable() -> tuple[bool, str]:
    """Would the kernel take a BPF-LSM program, and would it be called? Returns (yes or no, what was seen).

    This is where an optional BPF-LSM object belongs: loaded beside the first one when this says yes, never the only
    layer for anything. Loading is tried by `host.probe`; a program that loads is still not called unless `bpf` is among
    the active LSMs.
    """
    from dsec_guard.host.probe import probe  # rarely needed, and it brings much with it

    feature = probe({"bpf_lsm"}).features["bpf_lsm"]
    if not feature.works:
        return False, feature.detail
    try:
        active = Path("/sys/kernel/security/lsm").read_text(encoding="ascii").strip()
    except OSError as exc:
        return True, f"a program loads; the list of active LSMs cannot be read: {exc.strerror}"
    if "bpf" not in active.split(","):
        return False, f"a program loads, but `bpf` is not an active LSM ({active}): boot with lsm={active},bpf"
    return True, "a program loads and `bpf` is an active LSM"
