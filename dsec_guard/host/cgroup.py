"""Control groups: one directory per box, the same limits on pure v2 and on hybrid hosts.

A box always has a directory in the v2 tree; its inode number is the box's identity for every kernel-side sensor. Limits
go to the hierarchy that has the controller: v2 (`memory.max`, ...) or v1 (`memory.limit_in_bytes`, ...).
Layout: `<root>/<base>/<instance>/<box>` in each hierarchy in use; `base` is `dsec-guard`, or DSEC_GUARD_CGROUP.
Source: cgroups(7); kernel Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dsec_guard.errors import HostError

BASE_VARIABLE = "DSEC_GUARD_CGROUP"
DEFAULT_BASE = "dsec-guard"
CONTROLLERS = ("memory", "pids", "cpu")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_CPU_PERIOD_US = 100_000
_CPU_QUOTA_MIN_US = 1_000  # the kernel refuses less
_SPIN_S = 0.0005
_IN_MODIFY = 0x2


@dataclass(frozen=True)
class Mount:
    """One mounted hierarchy. root: what of it is mounted, as /proc/PID/cgroup names it."""

    path: Path
    root: str
    controllers: frozenset[str]


@dataclass(frozen=True)
class CgroupLimits:
    """memory and swap in bytes, pids in tasks, cpus in CPUs (1.5 = one and a half)."""

    memory: int
    pids: int
    cpus: float
    swap: int = 0


@dataclass(frozen=True)
class CgroupUsage:
    """What a box used so far; 0 where the host cannot tell.

    memory_peak: bytes. memory_failcnt: how often the limit was run into (Linux 6.18 leaves it at 0 on v1, tried).
    oom_kills: tasks ended for it.
    pids_denied: forks refused. cpu_ns: nanoseconds of all its tasks, ended ones included.
    """

    memory_peak: int = 0
    memory_failcnt: int = 0
    oom_kills: int = 0
    pids_peak: int = 0
    pids_denied: int = 0
    pids_current: int = 0
    cpu_ns: int = 0


def parse_mountinfo(text: str) -> tuple[Mount | None, tuple[Mount, ...]]:
    """The v2 mount (None: not mounted) and the v1 mounts in a /proc/PID/mountinfo. Source: proc_pid_mountinfo(5)."""
    unified: Mount | None = None
    v1: list[Mount] = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        root, path = _unescape(fields[3]), Path(_unescape(fields[4]))
        if tail[0] == "cgroup2" and unified is None:
            unified = Mount(path, root, frozenset())
        elif tail[0] == "cgroup":
            v1.append(Mount(path, root, frozenset(tail[2].split(","))))
    return unified, tuple(v1)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


class CgroupHost:
    """What the host's cgroup set-up offers.

    v2: where the v2 tree is mounted. placed: controller -> its v1 mount, or None where v2 has it. missing: controllers
    that no hierarchy offers; boxes go without their limits and `BoxCgroup.missing` says so.
    """

    def __init__(self, v2: Mount, placed: Mapping[str, Mount | None], missing: tuple[str, ...], base: str) -> None:
        self.v2 = v2
        self.placed = dict(placed)
        self.missing = missing
        self.base = base
        self.base_is_default = base == DEFAULT_BASE

    @classmethod
    def probe(cls, *, mountinfo: str | None = None, environ: Mapping[str, str] | None = None) -> CgroupHost:
        """Look at this host. Raises: HostError when no v2 tree is mounted or DSEC_GUARD_CGROUP is no relative path."""
        text = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape") if mountinfo is None else mountinfo
        v2, v1 = parse_mountinfo(text)
        if v2 is None:
            raise HostError(
                "no cgroup v2 tree is mounted",
                feature="cgroup_v2",
                hint="mount -t cgroup2 none /sys/fs/cgroup/unified (or boot with systemd.unified_cgroup_hierarchy=1)",
            )
        base = (os.environ if environ is None else environ).get(BASE_VARIABLE, DEFAULT_BASE).strip("/")
        if not base or any(not _NAME.match(part) for part in base.split("/")):
            raise HostError(
                f"{BASE_VARIABLE} is {base!r}",
                feature="cgroup_v2",
                hint=f"name a directory below the cgroup root, for instance {DEFAULT_BASE}",
            )
        try:
            available = (v2.path / "cgroup.controllers").read_text().split()
        except OSError as error:
            raise HostError(f"{v2.path}/cgroup.controllers: {error.strerror}", feature="cgroup_v2") from error
        v2 = Mount(v2.path, v2.root, frozenset(available))
        placed: dict[str, Mount | None] = {}
        missing: list[str] = []
        for controller in CONTROLLERS:
            holder = next((m for m in v1 if controller in m.controllers), None)
            if controller in v2.controllers:
                placed[controller] = None
            elif holder is not None:
                placed[controller] = holder
            else:
                missing.append(controller)
        return cls(v2, placed, tuple(missing), base)

    @property
    def is_hybrid(self) -> bool:
        """Whether any limit goes through a v1 hierarchy."""
        return any(mount is not None for mount in self.placed.values())

    @property
    def v1_mounts(self) -> dict[Path, Mount]:
        """The v1 hierarchies in use, each once (cpu and cpuacct may be one mount)."""
        return {mount.path: mount for mount in self.placed.values() if mount is not None}

    def bases(self) -> tuple[Path, ...]:
        """The directories that hold instances, v2 first; they need not exist."""
        return tuple(path / self.base for path in (self.v2.path, *self.v1_mounts))

    def instance(self, name: str) -> Instance:
        """Create `<base>/<name>` in every hierarchy in use.

        Raises: HostError when a directory cannot be made or (v2) a controller cannot be handed down to it.
        """
        _check_name(name)
        # Another guard's end may remove the empty base between two steps of ours.
        for attempt in range(20):
            try:
                return self._make_instance(name)
            except FileNotFoundError as error:
                if attempt == 19:
                    raise HostError(f"cgroup {self.base}/{name}: {error}", feature="cgroup_v2") from error
        raise AssertionError("unreachable")

    def _make_instance(self, name: str) -> Instance:
        v2_dir = self.v2.path / self.base / name
        wanted = [c for c, mount in self.placed.items() if mount is None]
        made: list[Path] = []
        try:
            for root in (self.v2.path, *self.v1_mounts):
                directory = root
                for part in (*self.base.split("/"), name):
                    if root == self.v2.path:
                        _hand_down(directory, wanted)
                    directory = directory / part
                    try:
                        directory.mkdir()
                    except FileExistsError:
                        if directory.name == name and directory.parent == root / self.base:
                            raise HostError(f"cgroup {directory} exists already", feature="cgroup_v2") from None
                made.append(directory)
            _hand_down(v2_dir, wanted)
            return Instance(self, name, made)
        except PermissionError as error:
            _remove_quietly(made)
            raise HostError(
                f"cannot make cgroup {error.filename}: {error.strerror}",
                feature="cgroup_v2",
                hint=f"run as root with the cgroup tree writable, or name a delegated directory in {BASE_VARIABLE}",
            ) from error
        except OSError as error:
            _remove_quietly(made)
            if isinstance(error, FileNotFoundError):
                raise
            raise HostError(
                f"cannot make cgroup {error.filename}: {error.strerror}",
                feature="cgroup_v2",
                hint=f"name a writable directory below the cgroup root in {BASE_VARIABLE}",
            ) from error
        except HostError:
            _remove_quietly(made)
            raise


class Instance:
    """The directories of one guard; boxes live below. id: inode of the v2 directory. v2_fd: that directory.

    proc_path: as `0::` of /proc/PID/cgroup would show it here. v2_level: depth below the root of the v2 hierarchy, for
    bpf_get_current_ancestor_cgroup_id (valid where the guard is in the initial cgroup namespace). paths: v2 first.
    """

    def __init__(self, host: CgroupHost, name: str, paths: list[Path]) -> None:
        self.host = host
        self.name = name
        self.paths = tuple(paths)
        self.v2_dir = paths[0]
        self.v2_fd = os.open(self.v2_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.id = os.fstat(self.v2_fd).st_ino
        self.proc_path = f"{host.v2.root.rstrip('/')}/{host.base}/{name}"
        self.v2_level = self.proc_path.count("/")

    def create_box(self, name: str, limits: CgroupLimits) -> BoxCgroup:
        """Make a box's directories and set its limits.

        Raises: HostError naming the file that could not be made or written; nothing stays behind then.
        """
        _check_name(name)
        dirs: dict[Path, Path] = {}
        try:
            for parent in self.paths:
                directory = parent / name
                directory.mkdir()
                dirs[parent] = directory
            box = BoxCgroup(self, name, tuple(dirs.values()), limits)
        except OSError as error:
            _remove_quietly(list(dirs.values()))
            raise HostError(
                f"cgroup {error.filename or self.v2_dir / name}: {error.strerror}", feature="cgroup_limits"
            ) from error
        return box

    def kill(self) -> None:
        """End every task of every box."""
        _write(self.v2_dir / "cgroup.kill", "1")

    def remove(self, deadline_s: float = 2.0) -> bool:
        """Remove the directories (boxes first are the caller's). Returns whether all are gone; the base follows when
        it is the default one and empty."""
        self.close()
        gone = _remove_dirs(self.paths, deadline_s)
        if self.host.base_is_default:
            _remove_quietly([path.parent for path in self.paths])
        return gone

    def close(self) -> None:
        if self.v2_fd >= 0:
            os.close(self.v2_fd)
            self.v2_fd = -1

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


class BoxCgroup:
    """A box's control groups.

    id: inode number of its v2 directory. dir_fd: that directory (for CLONE_INTO_CGROUP). v1_tasks_fds: writable `tasks`
    files to join through: writing `cgroup.procs` waits 8 to 11 ms for a grace period after 60 ms of quiet.
    missing: controllers without a limit on this host. paths: v2 first.
    """

    def __init__(self, instance: Instance, name: str, paths: tuple[Path, ...], limits: CgroupLimits) -> None:
        self.host = instance.host
        self.name = name
        self.paths = paths
        self.v2_dir = paths[0]
        self.limits = limits
        self.missing = instance.host.missing
        self.proc_path = f"{instance.proc_path}/{name}"
        self.v2_level = instance.v2_level + 1
        self._by_controller = {
            controller: (self.v2_dir if mount is None else mount.path / instance.host.base / instance.name / name)
            for controller, mount in instance.host.placed.items()
        }
        self._set_limits()
        self.dir_fd = os.open(self.v2_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.id = os.fstat(self.dir_fd).st_ino
        self.v1_tasks_fds: tuple[int, ...] = ()
        try:
            for path in paths[1:]:
                self.v1_tasks_fds += (os.open(path / "tasks", os.O_WRONLY | os.O_CLOEXEC),)
        except OSError:
            self.close()
            raise

    def _is_v1(self, controller: str) -> bool:
        return self.host.placed[controller] is not None

    def _set_limits(self) -> None:
        limits = self.limits
        if memory := self._by_controller.get("memory"):
            if self._is_v1("memory"):
                _write(memory / "memory.limit_in_bytes", str(limits.memory))
                # After the limit of memory alone, which may never be above it.
                if not _write_if_there(memory / "memory.memsw.limit_in_bytes", str(limits.memory + limits.swap)):
                    _write_if_there(memory / "memory.swappiness", "0" if limits.swap == 0 else "60")
            else:
                _write(memory / "memory.max", str(limits.memory))
                _write_if_there(memory / "memory.swap.max", str(limits.swap))
                _write(memory / "memory.oom.group", "1")
        if pids := self._by_controller.get("pids"):
            _write(pids / "pids.max", str(limits.pids))
        if cpu := self._by_controller.get("cpu"):
            quota = max(_CPU_QUOTA_MIN_US, round(limits.cpus * _CPU_PERIOD_US))
            if self._is_v1("cpu"):
                _write(cpu / "cpu.cfs_period_us", str(_CPU_PERIOD_US))
                _write(cpu / "cpu.cfs_quota_us", str(quota))
            else:
                _write(cpu / "cpu.max", f"{quota} {_CPU_PERIOD_US}")

    # -------------------------------------------------------------------------------------------------- acting

    def kill(self) -> None:
        """SIGKILL to every task below, also to one being forked meanwhile. Does not wait: see `wait_empty`."""
        _write_at(self.dir_fd, "cgroup.kill", "1")

    def freeze(self, deadline_s: float = 1.0) -> bool:
        """Stop every task below. Returns whether all of them stood still before the deadline."""
        _write_at(self.dir_fd, "cgroup.freeze", "1")
        return self._wait_event("frozen", "1", deadline_s)

    def thaw(self) -> None:
        _write_at(self.dir_fd, "cgroup.freeze", "0")

    def populated(self) -> bool:
        """Whether any task (zombies of dead leaders aside) is left below."""
        return _keyed(_read_at(self.dir_fd, "cgroup.events")).get("populated", 0) != 0

    def wait_empty(self, deadline_s: float) -> bool:
        """Wait until no task is left. Returns whether that happened within `deadline_s` seconds."""
        return self._wait_event("populated", "0", deadline_s)

    def _wait_event(self, key: str, value: str, deadline_s: float) -> bool:
        """Wait for a line of cgroup.events. Spins first: the kernel holds notifications back for up to 10 ms."""
        end = time.monotonic() + deadline_s
        spin_end = time.monotonic() + min(_SPIN_S, deadline_s)
        line = f"{key} {value}"
        fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.dir_fd)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLPRI | select.POLLERR)
            pause_ms = 1.0
            while True:
                if line in os.pread(fd, 4096, 0).decode("ascii").splitlines():
                    return True
                now = time.monotonic()
                if now >= end:
                    return False
                if now >= spin_end:
                    poller.poll(min(pause_ms, (end - now) * 1000))
                    pause_ms = min(pause_ms * 2, 50.0)
        finally:
            os.close(fd)

    def close_tasks(self) -> None:
        """Close the `tasks` descriptors once the box's first process has joined: an idle box keeps one descriptor."""
        for fd in self.v1_tasks_fds:
            os.close(fd)
        self.v1_tasks_fds = ()

    def close(self) -> None:
        self.close_tasks()
        if self.dir_fd >= 0:
            os.close(self.dir_fd)
            self.dir_fd = -1

    def remove(self, deadline_s: float = 2.0) -> bool:
        """Remove the directories of an empty box, retrying while ended tasks are still being reaped.

        Returns whether all are gone. Descriptors are closed either way.
        """
        self.close()
        return _remove_dirs(self.paths, deadline_s)

    # -------------------------------------------------------------------------------------------------- reading

    def usage(self) -> CgroupUsage:
        """Counters of now. Raises: nothing for a file the host lacks; OSError when the box's directories are gone."""
        peak = failcnt = oom_kills = 0
        if memory := self._by_controller.get("memory"):
            if self._is_v1("memory"):
                peak = _number(memory / "memory.max_usage_in_bytes")
                # With swap at 0 both limits are equal, and the one of both together is tried first.
                failcnt = _number(memory / "memory.failcnt") + _number(memory / "memory.memsw.failcnt")
                oom_kills = _keyed_file(memory / "memory.oom_control").get("oom_kill", 0)
            else:
                events = _keyed_file(memory / "memory.events")
                peak = _number(memory / "memory.peak") or _number(memory / "memory.current")
                failcnt, oom_kills = events.get("max", 0), events.get("oom_kill", 0)
        pids_peak = pids_denied = pids_current = 0
        if pids := self._by_controller.get("pids"):
            pids_current = _number(pids / "pids.current")
            pids_peak = _number(pids / "pids.peak") or pids_current
            pids_denied = _keyed_file(pids / "pids.events").get("max", 0)
        # v2 keeps this file in every cgroup, with or without a cpu controller.
        cpu_us = _keyed(_read_at(self.dir_fd, "cpu.stat") if self.dir_fd >= 0 else "").get("usage_usec", 0)
        return CgroupUsage(peak, failcnt, oom_kills, pids_peak, pids_denied, pids_current, cpu_us * 1000)

    def memory_current(self) -> int:
        """Bytes charged now; 0 where the host cannot tell."""
        if memory := self._by_controller.get("memory"):
            return _number(memory / ("memory.usage_in_bytes" if self._is_v1("memory") else "memory.current"))
        return 0

    def oom_watch(self) -> OomWatch:
        """News of memory exhaustion. Needed for v1, where the kernel ends one task only: the guard then ends the box,
        as v2 does by itself (memory.oom.group). Without a memory controller it stays silent. Raises: HostError."""
        memory = self._by_controller.get("memory")
        if memory is None:
            return OomWatch(None, v1=False)
        return OomWatch(memory, v1=self._is_v1("memory"))


class OomWatch:
    """A descriptor that becomes readable when a cgroup ran out of memory: an eventfd (v1) or inotify on memory.events
    (v2). A context manager."""

    _SETTLE_S = 0.02
    _SETTLE_ROUNDS = 10

    def __init__(self, directory: Path | None, *, v1: bool) -> None:
        self.directory = directory
        self.v1 = v1
        self._rounds = 0
        try:
            if directory is None:
                self._fd = _new_eventfd()
            elif v1:
                self._fd = self._register_eventfd(directory)
            else:
                self._fd = self._register_inotify(directory)
        except OSError as error:
            raise HostError(f"{directory}: cannot watch for OOM: {error.strerror}", feature="cgroup_limits") from error
        self._kills = self._read_kills()

    @staticmethod
    def _register_eventfd(directory: Path) -> int:
        fd = _new_eventfd()
        control = os.open(directory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _write(directory / "cgroup.event_control", f"{fd} {control}")
        except OSError:
            os.close(fd)
            raise
        finally:
            os.close(control)
        return fd

    @staticmethod
    def _register_inotify(directory: Path) -> int:
        libc = _libc()
        fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if fd < 0:
            raise _last_error()
        if libc.inotify_add_watch(fd, os.fsencode(directory / "memory.events"), _IN_MODIFY) < 0:
            error = _last_error()
            os.close(fd)
            raise error
        return fd

    def _read_kills(self) -> int:
        if self.directory is None:
            return 0
        name = "memory.oom_control" if self.v1 else "memory.events"
        return _keyed_file(self.directory / name).get("oom_kill", 0)

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> int:
        """Take what is queued. Returns how many tasks the kernel ended for memory since the last call.

        v1 tells of the exhaustion first and ends a task then: this waits up to 20 ms for that, and leaves the
        descriptor readable for a few more calls when it has not happened by then.
        """
        woken = False
        try:
            while os.read(self._fd, 4096):
                woken = True
        except BlockingIOError:
            pass  # drained
        end = time.monotonic() + self._SETTLE_S
        while (kills := self._read_kills()) <= self._kills and woken and self.v1 and time.monotonic() < end:
            time.sleep(0.0005)
        new, self._kills = kills - self._kills, max(kills, self._kills)
        if new > 0 or not woken:
            self._rounds = 0
        elif self.v1 and self._rounds < self._SETTLE_ROUNDS:
            self._rounds += 1
            os.eventfd_write(self._fd, 1)
        return max(0, new)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> OomWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------------ small files


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _new_eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise ValueError(f"no cgroup name: {name!r}")


def _hand_down(directory: Path, controllers: list[str]) -> None:
    """Enable v2 controllers for the children of `directory`."""
    if not controllers:
        return
    control = directory / "cgroup.subtree_control"
    absent = sorted(set(controllers) - set(control.read_text().split()))
    if not absent:
        return
    try:
        _write(control, " ".join(f"+{name}" for name in absent))
    except OSError as error:
        hint = ""
        if error.errno == errno.EBUSY:
            hint = (
                f"processes sit in {directory} itself; move them into a child first, for instance: mkdir "
                f"{directory}/main && for p in $(cat {directory}/cgroup.procs); do echo $p > "
                f"{directory}/main/cgroup.procs; done; or name another delegated directory in {BASE_VARIABLE}"
            )
        raise HostError(
            f"{control}: cannot enable {', '.join(absent)}: {error.strerror}", feature="cgroup_limits", hint=hint
        ) from error


def _remove_quietly(paths: list[Path]) -> None:
    """Remove what is empty; what others use stays."""
    for path in reversed(paths):
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS):
                raise


def _remove_dirs(paths: tuple[Path, ...], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    left = list(paths)
    pause_s = 0.0001
    while True:
        left = [path for path in left if not _rmdir(path)]
        if not left:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.005)


def _rmdir(path: Path) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)


def _write_if_there(path: Path, text: str) -> bool:
    try:
        _write(path, text)
    except FileNotFoundError:
        return False
    return True


def _write_at(dir_fd: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _read_at(dir_fd: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return os.read(fd, 65536).decode("ascii", "replace")
    finally:
        os.close(fd)


def _keyed(text: str) -> dict[str, int]:
    """`key value` lines, as in cgroup.events or memory.events; lines of another form are left out."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            out[key] = int(value)
    return out


def _keyed_file(path: Path) -> dict[str, int]:
    return _keyed(_read_if_there(path))


def _number(path: Path) -> int:
    """A file with one number; 0 where it is missing or says `max`."""
    text = _read_if_there(path).strip()
    return int(text) if text.isdigit() else 0


def _read_if_there(path: Path) -> str:
    """By plain descriptor: a file object costs more than the read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 65536).decode("ascii", "replace")
    finally:
        os.close(fd)
