"""The BPF object on the running kernel: what boxed programs try shows with its real result, nothing else shows.

Programs run in v2 cgroups made for the test, most of them as an unprivileged user, so that what they try is refused.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from dsec_guard.errors import HostError, MonitorError
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import (
    Abi,
    CapabilityRefused,
    CgroupMoved,
    DeviceAttempt,
    Event,
    FileOpened,
    IoUringUsed,
    Level,
    NetworkAttempt,
    OomKilled,
    ProcessExec,
    ProcessExit,
    SignalSent,
    Source,
    SyscallSeen,
    SysctlAttempt,
    TaskCreated,
)
from dsec_guard.monitor import loader
from dsec_guard.monitor.loader import BoxConfig, BoxCounters, KernelMonitor, lsm_loadable
from dsec_guard.monitor.pump import BoxStream, ProtectedObject, Pump

NOBODY = 65534
E = TypeVar("E", bound=Event)


def _v2_root() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, fs, *_ = line.split(" ")
        if fs == "cgroup2":
            return Path(point)
    pytest.skip("no cgroup v2 tree is mounted")


class Yard:
    """A guard instance's directory with a few boxes in it, a loaded monitor, and streams of their events."""

    def __init__(self, name: str, monitor_options: dict[str, int | bool]) -> None:
        self.top = _v2_root() / f"dsec-guard-test-{os.getpid()}-{name}"
        self.top.mkdir()
        self.pump = Pump()
        self.streams: dict[str, BoxStream] = {}
        self.seen: dict[int, list[Event]] = {}
        self.objects: dict[int, ProtectedObject] = {}
        self.children: list[subprocess.Popen[bytes]] = []
        self._fd = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY)
        level = len(self.top.relative_to(_v2_root()).parts) + 1
        try:
            self.monitor = KernelMonitor.load(self._fd, level, **monitor_options)  # type: ignore[arg-type]
        except BaseException:
            self.top.rmdir()
            raise

    def box(self, name: str = "b1", *, live: bool = True, **config: object) -> int:
        path = self.top / name
        path.mkdir()
        box_id = path.stat().st_ino
        self.monitor.add_box(BoxConfig(box_id, **config))  # type: ignore[arg-type]
        self.streams[name] = BoxStream(box_id, 0, 0, self.objects)
        self.pump.add(self.streams[name])
        if live:
            self.monitor.go_live(box_id)
        return box_id

    def protect(self, path: Path, label: str = "hidden") -> None:
        status = path.stat()
        number = self.monitor.protect(status.st_dev, status.st_ino)
        self.objects[number] = ProtectedObject(str(path), label, dev=status.st_dev, ino=status.st_ino)

    def start(self, *argv: str | Path, box: str = "b1", uid: int = NOBODY, cwd: str | Path = "/") -> subprocess.Popen[bytes]:
        procs = os.open(self.top / box / "cgroup.procs", os.O_WRONLY)

        def enter() -> None:
            os.write(procs, b"0")
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)

        try:
            child = subprocess.Popen(
                [str(a) for a in argv], preexec_fn=enter, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}
            )
        finally:
            os.close(procs)
        self.children.append(child)
        return child

    def run(self, *argv: str | Path, box: str = "b1", uid: int = NOBODY, cwd: str | Path = "/", want: int | None = 0) -> str:
        child = self.start(*argv, box=box, uid=uid, cwd=cwd)
        out, _ = child.communicate(timeout=60)
        assert want is None or child.returncode == want, f"{argv} ended with {child.returncode}"
        return out.decode()

    def python(self, code: str, *, want: int | None = 0, box: str = "b1", uid: int = NOBODY, cwd: str | Path = "/") -> str:
        words = (sys.executable, "-I", "-S", "-c", textwrap.dedent(_PRELUDE) + textwrap.dedent(code))
        return self.run(*words, want=want, box=box, uid=uid, cwd=cwd)

    def collect(self) -> None:
        while records := self.monitor.drain():
            for box_id, events in self.pump.ingest(records).items():
                self.seen.setdefault(box_id, []).extend(events)

    def events(self, kind: type[E], box: str = "b1") -> list[E]:
        self.collect()
        return [e for e in self.seen.get(self.streams[box].box_id, []) if isinstance(e, kind)]

    def calls(self, name: str, box: str = "b1") -> list[SyscallSeen]:
        return [e for e in self.events(SyscallSeen, box) if e.name == name]

    def counters(self, box: str = "b1") -> BoxCounters:
        return self.monitor.counters(self.streams[box].box_id)

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        self.monitor.close()
        os.close(self._fd)
        for path in sorted((p for p in self.top.rglob("*") if p.is_dir()), reverse=True):
            path.rmdir()
        self.top.rmdir()


_PRELUDE = """
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    def call(nr, *args):
        words = [a if isinstance(a, (bytes, ctypes.Array, ctypes.Structure)) else ctypes.c_long(a) for a in args]
        return libc.syscall(ctypes.c_long(nr), *words)
"""


@contextlib.contextmanager
def _yard(name: str, **options: int | bool) -> Iterator[Yard]:
    yard = Yard(name, options)
    try:
        yield yard
    finally:
        yard.close()


@pytest.fixture
def yard() -> Iterator[Yard]:
    with _yard("yard") as made:
        yield made


pytestmark = pytest.mark.needs("bpf_tracing", "bpf_cgroup", "cgroup_v2")


# ------------------------------------------------------------------------------------------------- loading


def test_every_hook_of_this_kernel_is_attached_and_sys_exit_only_with_a_full_box(yard: Yard) -> None:
    state = {hook.name: hook for hook in yard.monitor.layers}
    missing = [h for h in state.values() if not h.attached and h.name not in yard.monitor.optional_hooks]
    assert [h.name for h in missing] == ["tp_btf/sys_exit"]
    cold = yard.box("cold", level=Level.COLD)
    assert not {h.name: h for h in yard.monitor.layers}["tp_btf/sys_exit"].attached
    full, other = yard.box("full"), yard.box("other")
    assert {h.name: h for h in yard.monitor.layers}["tp_btf/sys_exit"].attached
    yard.monitor.remove_box(full)
    assert {h.name: h for h in yard.monitor.layers}["tp_btf/sys_exit"].attached
    yard.monitor.remove_box(other)
    assert not {h.name: h for h in yard.monitor.layers}["tp_btf/sys_exit"].attached
    yard.monitor.remove_box(cold)


def test_missing_object_is_a_host_error_that_names_the_feature(tmp_path: Path) -> None:
    shutil.copy(Path(loader.__file__).parent.parent / "_native" / "libdgdrain.so", tmp_path)
    with pytest.raises(HostError, match="is missing") as caught:
        KernelMonitor.load(-1, 1, native_dir=tmp_path)
    assert caught.value.feature == "bpf"
    (tmp_path / "dg_guard.bpf.o").write_bytes(b"\x7fELF not an object")
    with pytest.raises(HostError) as caught:
        KernelMonitor.load(-1, 1, native_dir=tmp_path)
    assert caught.value.feature == "bpf"
    assert caught.value.hint


def test_object_is_refused_with_a_reason_where_the_caller_may_not_load_it() -> None:
    code = "\n".join([
        "import os, sys",
        "from dsec_guard.errors import HostError",
        "from dsec_guard.monitor.loader import KernelMonitor",
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)",
        "try:\n    KernelMonitor.load(0, 1)",
        "except HostError as e:\n    print(e.feature, str(e).splitlines()[0])",
    ])
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                          cwd=Path(loader.__file__).parent.parent.parent)
    assert done.stdout.startswith("bpf the kernel refuses the monitor's programs: ")
    assert "EPERM" in done.stdout


def test_lsm_probe_says_what_it_saw() -> None:
    works, why = lsm_loadable()
    assert why
    assert works == ("an active LSM" in why or "cannot be read" in why)


def test_unknown_box_and_double_box_are_errors(yard: Yard) -> None:
    box = yard.box()
    with pytest.raises(MonitorError, match="known already"):
        yard.monitor.add_box(BoxConfig(box))
    yard.monitor.remove_box(box)
    with pytest.raises(MonitorError, match="not known"):
        yard.monitor.counters(box)


# -------------------------------------------------------------------------------------------- privileged calls


def test_refused_privileged_calls_show_with_their_arguments_and_result(yard: Yard) -> None:
    yard.box()
    yard.python(f"""
        assert call({X86_64["mount"]}, b"proc", b"/mnt", b"proc", 6, 0) == -1
        assert call({X86_64["unshare"]}, 0x00020000) == -1
        assert call({X86_64["ptrace"]}, 16, 1, 0, 0) == -1
        assert call({X86_64["setns"]}, 0, 0) == -1
        assert call({X86_64["bpf"]}, 99, 0, 0) == -1
        assert call(400) == -1
    """)
    (mount,) = yard.calls("mount")
    assert (mount.path, mount.path2, bytes.fromhex(mount.data), mount.flags, mount.errno) == ("/mnt", "proc", b"proc", 6, 1)
    assert (mount.uid, mount.comm[:6], mount.abi, mount.source) == (NOBODY, "python", Abi.X64, Source.SYS_EXIT)
    (unshare,) = yard.calls("unshare")
    assert (unshare.flags, unshare.errno) == (0x20000, 1)
    assert [e.args[:2] for e in yard.calls("ptrace")] == [(16, 1)]
    assert len(yard.calls("setns")) == len(yard.calls("bpf")) == 1
    assert [e.errno for e in yard.calls("nr_400")] == [38]


def test_clone3_flags_are_read_from_memory_and_ordinary_clone3_is_silent(yard: Yard) -> None:
    yard.box()
    yard.python(f"""
        for flags in (0x10000000, 0x20000000, 0):
            args = (ctypes.c_uint64 * 11)(flags | 0x100000000 if flags == 0 else flags, *[0] * 3, 17)
            pid = call({X86_64["clone3"]}, args, 88)
            if pid == 0:
                os._exit(0)
            if pid > 0:
                os.waitpid(pid, 0)
    """)
    assert [e.flags for e in yard.calls("clone3")] == [0x10000000, 0x20000000]
    assert all(e.ret != 0 for e in yard.calls("clone3"))  # told by the parent only


def test_debugging_a_child_is_one_event_and_an_x32_number_shows_its_bit(yard: Yard) -> None:
    yard.box()
    yard.python(f"""
        pid = os.fork()
        if pid == 0:
            libc.pause()
        assert call({X86_64["ptrace"]}, 16, pid, 0, 0) == 0
        os.waitpid(pid, 0)
        for _ in range(20):
            assert call({X86_64["ptrace"]}, 12, pid, 0, (ctypes.c_ulong * 64)()) == 0
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        call(0x40000000 | {X86_64["unshare"]}, 0x10000000)
    """)
    assert [e.args[0] for e in yard.calls("ptrace")] == [16]
    (x32,) = yard.calls("unshare")
    assert (x32.abi, x32.nr, x32.args[0], x32.errno) == (Abi.X32, 0x40000000 | 272, 0x10000000, 38)


def _compile(tmp_path: Path, source: str) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc makes the test program")
    (tmp_path / "p.c").write_text(source)
    subprocess.run(["gcc", "-O1", "-o", tmp_path / "p", tmp_path / "p.c"], check=True)
    tmp_path.chmod(0o755)
    return tmp_path / "p"


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that an unprivileged program can reach and write."""
    path = Path("/tmp") / f"dsec-guard-test-{os.getpid()}"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def _filesystem(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True).stdout.strip()


def test_32_bit_entry_is_told_apart_and_its_open_of_a_protected_file_is_seen(yard: Yard, shared: Path) -> None:
    secret = shared / "key"
    secret.write_text("x")
    program = _compile(shared, """
        #define _GNU_SOURCE
        #include <string.h>
        #include <sys/mman.h>
        static long low(long nr, long a, long b, long c)
        {
            long r;
            __asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(a), "c"(b), "d"(c) : "memory", "r8", "r9", "r10", "r11");
            return r;
        }
        int main(int argc, char **argv)
        {
            char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
            strcpy(p, argv[1]);
            low(20, 0, 0, 0);
            return low(5, (long)p, 0, 0) < 0;
        }
    """)
    yard.box()
    yard.protect(secret)
    yard.run(program, secret)
    assert [(e.name, e.abi) for e in yard.events(SyscallSeen) if e.abi is not Abi.X64][:2] == [
        ("getpid", Abi.I386), ("open", Abi.I386),
    ]  # fmt: skip
    assert [(e.path, e.object) for e in yard.events(FileOpened)] == [(str(secret), str(secret))]


# ------------------------------------------------------------------------------------------------------- files


def test_refused_relative_open_shows_the_directory_the_kernel_used(yard: Yard, shared: Path) -> None:
    (shared / "private").mkdir(mode=0o755)
    (shared / "private" / "key").touch(mode=0o600)
    yard.box()
    yard.python("""
        os.chdir("private")
        d = os.open("..", os.O_RDONLY)
        for path, at in (("./key", None), ("private//key", d)):
            try:
                os.open(path, os.O_RDWR, dir_fd=at)
            except PermissionError:
                continue
            sys.exit(1)
    """, cwd=shared)
    found = [e for e in yard.calls("openat") if e.errno == 13]
    assert [(e.path, e.raw_path) for e in found] == [(f"{shared}/private/key", "./key"), (f"{shared}/private/key", "private//key")]
    assert all(e.flags & 3 == 2 for e in found)


def test_directory_below_a_mount_of_its_own_is_named_through_it(yard: Yard, shared: Path) -> None:
    yard.box()
    # As root, to make the mount in a namespace of its own; it is read-only in the end, so the open is refused.
    yard.python(f"""
        assert libc.unshare(0x20000) == 0
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
        assert libc.mount(b"tmpfs", b"{shared}", b"tmpfs", 0, None) == 0
        os.makedirs("{shared}/a/b")
        assert libc.mount(b"tmpfs", b"{shared}", b"tmpfs", 0x21, None) == 0
        os.chdir("{shared}/a/b")
        try:
            os.open("new", os.O_CREAT | os.O_WRONLY)
        except OSError as e:
            sys.exit(e.errno != 30)
        sys.exit(1)
    """, uid=0)
    assert [e.path for e in yard.calls("openat") if e.errno == 30] == [f"{shared}/a/b/new"]


@pytest.mark.parametrize("how", ["plain", "hard link", "symlink", "proc root", "dot dot", "O_PATH", "exec", "open_by_fd"])
def test_protected_inode_is_seen_under_every_name(yard: Yard, shared: Path, how: str) -> None:
    if how == "hard link" and _filesystem(shared) == "overlayfs":
        pytest.skip("an overlay without index=on gives a linked file another inode")
    secret = shared / "key"
    shutil.copy("/bin/true", secret)
    os.link(secret, shared / "hard")
    (shared / "sub").mkdir()
    (shared / "soft").symlink_to("key")
    yard.box()
    yard.protect(secret)
    names = {"hard link": "hard", "symlink": "soft", "proc root": f"/proc/self/root{secret}", "dot dot": "sub/../key",
             "open_by_fd": "key"}
    if how == "exec":
        yard.run(shared / "hard")
    elif how == "O_PATH":
        yard.python("os.open('key', os.O_PATH)", cwd=shared)
    elif how == "open_by_fd":
        yard.python("f = os.open('key', os.O_PATH); os.open(f'/proc/self/fd/{f}', os.O_RDONLY)", cwd=shared)
    else:
        yard.python(f"os.open({names.get(how, str(secret))!r}, os.O_RDONLY)", cwd=shared)
    found = [e for e in yard.events(FileOpened) if e.source is Source.SYS_EXIT] or yard.events(FileOpened)
    assert {e.object for e in found} == {str(secret)}
    assert [e.for_read for e in found] == {"O_PATH": [False], "open_by_fd": [False, True]}.get(how, [True])
    assert found[0].from_exec == (how == "exec")
    if how not in ("hard link", "symlink", "exec"):
        assert found[0].path == str(secret)


def test_open_is_silent_again_when_the_object_is_no_longer_protected(yard: Yard, shared: Path) -> None:
    secret = shared / "key"
    secret.write_text("x")
    yard.box()
    yard.protect(secret)
    yard.python(f"os.open('{secret}', os.O_RDONLY)")
    status = secret.stat()
    yard.monitor.unprotect(status.st_dev, status.st_ino)
    yard.python(f"os.open('{secret}', os.O_RDONLY)")
    assert len(yard.events(FileOpened)) == 1


def test_absent_names_show_below_watched_places_only(yard: Yard, shared: Path) -> None:
    yard.box(watch_prefixes=(b"/proc/", f"{shared}/gone/".encode()))
    (shared / "here").mkdir()
    yard.python(f"""
        for path in ("/proc/no-such", "{shared}/gone/key", "../gone/./key", "gone", "/nowhere/else"):
            try:
                os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            sys.exit(1)
    """, cwd=shared / "here")
    paths = [e.path for e in yard.calls("openat") if e.errno == 2]
    assert paths == ["/proc/no-such", f"{shared}/gone/key", f"{shared}/gone/key"]


def test_refused_changes_of_names_and_attributes_show_both_paths(yard: Yard, shared: Path) -> None:
    (shared / "closed").mkdir(mode=0o755)
    (shared / "closed" / "f").touch(mode=0o644)
    yard.box()
    yard.python("""
        for act in (lambda: os.rename("closed/f", "g"), lambda: os.chmod("closed/f", 0o777), lambda: os.unlink("closed/f"),
                    lambda: os.symlink("/etc/shadow", "closed/s"), lambda: os.fchmod(os.open("closed/f", 0), 0o777)):
            try:
                act()
            except PermissionError:
                continue
            sys.exit(1)
    """, cwd=shared)
    f = f"{shared}/closed/f"
    assert [(e.path, e.path2) for e in yard.calls("rename")] == [(f, f"{shared}/g")]
    assert [e.path for e in yard.calls("chmod")] == [f]
    assert [e.path for e in yard.calls("unlink")] == [f]
    assert [(e.path, e.path2) for e in yard.calls("symlink")] == [(f"{shared}/closed/s", "/etc/shadow")]
    assert [(e.path, e.raw_path) for e in yard.calls("fchmod")] == [(f, "")]


def test_refused_exec_shows_its_path(yard: Yard, shared: Path) -> None:
    (shared / "tool").write_text("#!/bin/true\n")
    yard.box()
    yard.python(f"""
        try:
            os.execv("{shared}/tool", ["tool"])
        except PermissionError:
            pass
    """)
    assert [(e.path, e.errno) for e in yard.calls("execve")] == [(f"{shared}/tool", 13)]


def test_ioctl_of_the_list_shows_with_the_file_behind_the_descriptor(yard: Yard) -> None:
    yard.box()
    yard.python("""
        import fcntl
        m, s = os.openpty()
        try:
            fcntl.ioctl(s, 0x5412, b"x")
        except OSError:
            pass
    """)
    (pushed,) = [e for e in yard.calls("ioctl") if e.args[1] == 0x5412]
    assert pushed.path.startswith("/dev/pts/")


# ----------------------------------------------------------------------------------------------------- network


def test_connect_beyond_loopback_is_refused_by_the_hook_and_shown_twice(yard: Yard) -> None:
    yard.box()
    yard.python("""
        import socket
        for family, where in ((socket.AF_INET, ("198.51.100.1", 80)), (socket.AF_INET6, ("2001:db8::1", 443))):
            s = socket.socket(family)
            try:
                s.connect(where)
            except OSError as problem:
                if problem.errno == 101:
                    continue
            sys.exit(1)
    """)
    hooks = [e for e in yard.events(NetworkAttempt) if not e.ok]
    assert [(e.op, e.address, e.port, e.errno) for e in hooks] == [
        ("connect", "198.51.100.1", 80, 101), ("connect", "2001:db8::1", 443, 101),
    ]  # fmt: skip
    assert [(e.address, e.errno) for e in yard.calls("connect")] == [
        ("inet:198.51.100.1:80", 101), ("inet6:[2001:db8::1]:443", 101),
    ]  # fmt: skip


def test_network_word_is_switched_live_and_loopback_is_always_open(yard: Yard) -> None:
    box = yard.box()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import socket
            socket.create_connection(("127.0.0.1", {port})).close()
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                s.connect(("192.0.2.1", 9))  # a datagram socket sends nothing when it connects
            except OSError:
                pass  # there may be no route either: the hook's own word counts
        """
        yard.python(code)
        yard.monitor.set_network(box, loader.NETWORK_OPEN)
        yard.python(code)
        yard.monitor.set_network(box, loader.NETWORK_NONE)
        yard.python(code)
    attempts = yard.events(NetworkAttempt)
    assert [e.ok for e in attempts if e.port == port] == [True, True, True]
    assert [e.ok for e in attempts if e.port == 9] == [False, True, False]


def test_refused_datagrams_show_what_they_carried(yard: Yard) -> None:
    yard.box()
    yard.python("""
        import socket
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for send in (lambda: s.sendto(b"secret-1", ("198.51.100.1", 53)),
                     lambda: s.sendmsg([b"secret-2"], [], 0, ("198.51.100.2", 9))):
            try:
                send()
            except OSError as problem:
                if problem.errno == 101:
                    continue
            sys.exit(1)
    """)
    assert [(e.address, bytes.fromhex(e.data)) for e in yard.calls("sendto")] == [("inet:198.51.100.1:53", b"secret-1")]
    assert [(e.address, bytes.fromhex(e.data)) for e in yard.calls("sendmsg")] == [("inet:198.51.100.2:9", b"secret-2")]
    assert [(e.op, e.address) for e in yard.events(NetworkAttempt)] == [("sendmsg", "198.51.100.1"), ("sendmsg", "198.51.100.2")]


def test_queries_to_a_local_name_server_show_even_when_they_are_taken(yard: Yard) -> None:
    yard.box()
    yard.python("""
        import socket
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.connect(("127.0.0.1", 53))
        s.send(b"query")
        t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        t.sendto(b"elsewhere", ("127.0.0.1", 5353))
    """)
    assert [bytes.fromhex(e.data) for e in yard.calls("sendto")] == [b"query"]


def test_unix_and_odd_sockets_show_their_names(yard: Yard, shared: Path) -> None:
    yard.box()
    yard.python("""
        import socket
        for name in ("/run/no-such.sock", "near.sock", "\\0abstract-name"):
            try:
                socket.socket(socket.AF_UNIX).connect(name)
            except OSError:
                pass
        try:
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        except PermissionError:
            pass
        try:
            socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
        except PermissionError:
            pass
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        call(41, 40, 1, 0)
    """, cwd=shared)
    assert [e.address for e in yard.calls("connect")] == [
        "unix:/run/no-such.sock", f"unix:{shared}/near.sock", "unix:@abstract-name",
    ]  # fmt: skip
    assert [e.args[0] for e in yard.calls("socket")] == [17, 2, 40]
    assert [(e.op, e.sock_type) for e in yard.events(NetworkAttempt)] == []  # a user without the right never gets to the hook


def test_raw_socket_of_a_capable_task_is_refused_by_the_hook(yard: Yard) -> None:
    yard.box()
    yard.python("""
        import socket
        try:
            socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
        except PermissionError:
            sys.exit(0)
        sys.exit(1)
    """, uid=0)
    assert [(e.op, e.sock_type, e.errno) for e in yard.events(NetworkAttempt)] == [("socket", 3, 1)]


def test_connection_from_below_the_instance_but_from_no_box_is_refused(yard: Yard) -> None:
    (yard.top / "stray").mkdir()
    code = """
        import socket
        try:
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
        except PermissionError:
            sys.exit(0)
        sys.exit(1)
    """
    yard.python(code, box="stray")


# -------------------------------------------------------------------------------------- devices, settings, signals


def test_device_nodes_and_kernel_settings_are_refused_to_a_live_box(yard: Yard, shared: Path) -> None:
    yard.box()
    setting = Path("/proc/sys/kernel/core_uses_pid")
    before = setting.read_text()
    yard.python(f"""
        for act in (lambda: os.mknod("{shared}/disk", 0o60600, os.makedev(8, 0)),
                    lambda: os.write(os.open("{setting}", os.O_WRONLY), {before.encode()!r})):
            try:
                act()
            except PermissionError:
                continue
            sys.exit(1)
        os.read(os.open("/dev/urandom", 0), 1)
    """, uid=0)
    assert [(e.dev_type, e.major, e.access, e.errno) for e in yard.events(DeviceAttempt)] == [("block", 8, "m", 1)]
    assert [(e.name, e.write, e.errno) for e in yard.events(SysctlAttempt)] == [("kernel/core_uses_pid", True, 1)]
    assert [e.path for e in yard.calls("mknodat") + yard.calls("mknod")] == [f"{shared}/disk"]
    assert [(e.path, bytes.fromhex(e.data)) for e in yard.calls("write")] == [(str(setting), before.encode())]


def test_signal_out_of_the_box_is_evidence_and_one_within_is_counted(yard: Yard) -> None:
    yard.box()
    outside = subprocess.Popen(["sleep", "60"])
    try:
        yard.python(f"""
            pid = os.fork()
            if pid == 0:
                libc.pause()
            os.kill(pid, 15)
            os.waitpid(pid, 0)
            os.kill({outside.pid}, 15)
        """, uid=0)
        assert outside.wait(timeout=10) == -15
    finally:
        if outside.poll() is None:
            outside.kill()
    (sent,) = yard.events(SignalSent)
    assert (sent.signal, sent.target_tgid, sent.target_in_box) == (15, outside.pid, False)
    assert yard.counters().signals == 1


_TIMER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
os.sched_setaffinity(0, {0})
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
timer, every_ms = ctypes.c_void_p(), (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000)
if libc.timer_create(1, None, ctypes.byref(timer)) or libc.timer_settime(timer, 0, every_ms, None):
    sys.exit(1)
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGALRM})
"""


def test_timer_of_another_process_is_not_a_signal_of_the_task_that_it_interrupts(yard: Yard) -> None:
    yard.box()
    outside = subprocess.Popen([sys.executable, "-c", _TIMER], stdout=subprocess.PIPE)
    try:
        assert outside.stdout is not None
        assert outside.stdout.readline() == b"ready\n"
        # On the same CPU: each time the timer runs out, the kernel makes the signal in our task's name.
        yard.python("""
            import time
            os.sched_setaffinity(0, {0})
            end = time.process_time() + 0.5
            while time.process_time() < end:
                pass
        """)
    finally:
        outside.kill()
        outside.communicate()
    assert yard.events(SignalSent) == []


@pytest.mark.parametrize("code", [-1, -2, -60])
def test_a_signal_with_a_made_up_origin_is_a_signal_of_its_sender(yard: Yard, code: int) -> None:
    yard.box()
    outside = subprocess.Popen(["sleep", "60"])
    try:
        yard.python(f"""
            info = (ctypes.c_int * 32)(15, 0, {code})
            if libc.syscall(129, {outside.pid}, 15, info):
                sys.exit(1)
        """, uid=0)
        assert outside.wait(timeout=10) == -15
    finally:
        if outside.poll() is None:
            outside.kill()
    assert [(e.signal, e.target_tgid) for e in yard.events(SignalSent)] == [(15, outside.pid)]


def test_refused_kill_and_kill_of_all_show(yard: Yard) -> None:
    yard.box()
    yard.python(f"""
        for target in ({os.getpid()}, 1):
            try:
                os.kill(target, 0)
            except PermissionError:
                continue
            sys.exit(1)
        try:
            os.kill(2 ** 22, 0)
        except ProcessLookupError:
            pass
    """)
    assert [(e.args[0], e.errno) for e in yard.calls("kill")] == [(os.getpid(), 1), (1, 1)]
    assert yard.counters().calls["kill", -3] == 1


def test_fault_of_the_task_itself_is_context(yard: Yard) -> None:
    yard.box()
    yard.python("ctypes.string_at(0)", want=-11)
    assert [(e.signal, e.target_in_box) for e in yard.events(SignalSent)] == [(11, True)]
    assert [e.signal for e in yard.events(ProcessExit)] == [11]


def test_first_refused_capability_of_each_kind_is_context(yard: Yard) -> None:
    if not {h.name: h for h in yard.monitor.layers}["tp_btf/cap_capable"].attached:
        pytest.skip("this kernel has no cap_capable tracepoint")
    yard.box()
    yard.python("for _ in range(5):\n    call(161, b'/')")
    assert [e.cap for e in yard.events(CapabilityRefused)].count(18) == 1


def test_io_uring_creation_shows(yard: Yard) -> None:
    yard.box()
    made = yard.python(f"print(call({X86_64['io_uring_setup']}, 4, (ctypes.c_uint32 * 32)()))")
    if int(made) < 0:
        pytest.skip("io_uring is switched off")
    assert [e.op for e in yard.events(IoUringUsed)] == ["create"]
    assert len(yard.calls("io_uring_setup")) == 1


def test_leaving_the_cgroup_is_evidence_and_does_not_shake_off_the_monitor(yard: Yard) -> None:
    yard.box()
    (yard.top / "away").mkdir()
    yard.python(f"""
        if os.fork() == 0:
            os.write(os.open("{yard.top}/away/cgroup.procs", os.O_WRONLY), b"0")
            assert call({X86_64["setns"]}, 0, 0) == -1
            os._exit(0)
        sys.exit(os.wait()[1] != 0)
    """, uid=0)
    (moved,) = yard.events(CgroupMoved)
    assert moved.destination.endswith("/away")
    assert len(yard.calls("setns")) == 1


@pytest.mark.needs("cgroup_limits")
def test_out_of_memory_victim_is_named(yard: Yard) -> None:
    hierarchy = Path("/sys/fs/cgroup/memory") / yard.top.name
    if not hierarchy.parent.is_dir():
        pytest.skip("memory limits of version 1 are used here")
    yard.box()
    hierarchy.mkdir()
    try:
        (hierarchy / "memory.limit_in_bytes").write_text(str(32 << 20))
        yard.python(f"""
            open("{hierarchy}/tasks", "w").write("0")
            os.setuid(65534)
            bytearray(256 << 20)
        """, uid=0, want=-9)
        (killed,) = yard.events(OomKilled)
        assert killed.victim_tgid == yard.children[-1].pid
    finally:
        deadline = time.monotonic() + 5
        while True:
            try:
                hierarchy.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


# ------------------------------------------------------------------------------------------------ process life


def test_life_of_processes_is_context_with_words_and_status(yard: Yard) -> None:
    yard.box()
    yard.run("/bin/sh", "-c", "/bin/sh -c 'exit 7'; kill -9 $$", want=-9)
    execs = yard.events(ProcessExec)
    assert [e.argv for e in execs] == [("/bin/sh", "-c", "/bin/sh -c 'exit 7'; kill -9 $$"), ("/bin/sh", "-c", "exit 7")]
    assert execs[0].exe == "/bin/sh"
    assert not execs[0].memfd
    assert [(e.code, e.signal) for e in yard.events(ProcessExit)] == [(7, 0), (0, 9)]
    (task,) = yard.events(TaskCreated)
    assert (task.tgid, task.child_tgid) == (execs[0].tgid, execs[1].tgid)
    assert execs[1].ppid == execs[0].tgid
    counters = yard.counters()
    assert (counters.forks, counters.execs, counters.exits) == (1, 2, 2)


def test_program_without_a_name_is_marked(yard: Yard) -> None:
    yard.box()
    yard.python("""
        f = os.memfd_create("x", 0)
        os.write(f, open("/bin/true", "rb").read())
        os.execve(f, ["hidden"], {})
    """)
    assert [(e.argv, e.memfd) for e in yard.events(ProcessExec)][-1] == (("hidden",), True)


def test_each_process_of_init_is_the_next_command_and_descendants_belong_to_it(yard: Yard) -> None:
    box = yard.box(live=False)
    words = (sys.executable, "-I", "-S", "-c", textwrap.dedent("""
        import os, sys
        sys.stdin.readline()
        # init itself is not reported
        try:
            os.chroot("/")
        except PermissionError:
            pass
        for _ in range(2):
            if os.fork() == 0:
                if os.fork() == 0:
                    try:
                        os.chroot("/")
                    except PermissionError:
                        pass
                    os._exit(0)
                os.wait()
                os._exit(0)
            os.wait()
    """))
    init = yard.start(*words)
    yard.monitor.set_init(box, init.pid)
    yard.monitor.reset_exec(box)
    yard.monitor.go_live(box)
    with pytest.raises(MonitorError, match="is live"):
        yard.monitor.reset_exec(box)
    init.communicate(b"go\n", timeout=30)
    assert [e.exec for e in yard.calls("chroot")] == [1, 2]
    assert [e.exec for e in yard.events(TaskCreated)] == [1, 1, 2, 2]
    assert yard.calls("chroot")[0].phase.value == "agent"


def test_nothing_is_reported_before_the_box_is_live_and_phases_follow_the_switch(yard: Yard) -> None:
    box = yard.box(live=False)
    yard.python("call(161, b'/')")
    assert yard.events(Event) == []
    yard.monitor.go_live(box)
    yard.monitor.set_phase(box, loader.PHASE_NUMBERS["verify"])
    yard.python("call(161, b'/')")
    assert [e.phase.value for e in yard.calls("chroot")] == ["verify"]


# --------------------------------------------------------------------------------------------- floods and losses


def test_repeats_are_counted_exactly(yard: Yard) -> None:
    yard.box()
    yard.python("""
        for _ in range(5000):
            try:
                os.open("/etc/shadow", os.O_RDONLY)
            except PermissionError:
                continue
            sys.exit(1)
    """)
    sent = len([e for e in yard.calls("openat") if e.errno == 13])
    counted = yard.counters().calls["openat", -13]
    assert sent + counted == 5000
    assert 8 <= sent <= 8 * 60


def test_flood_of_different_names_does_not_hide_a_protected_object(yard: Yard, shared: Path) -> None:
    secret = shared / "key"
    secret.write_text("x")
    (shared / "closed").mkdir(mode=0o700)
    yard.box(event_budget=100)
    yard.protect(secret)
    yard.python("""
        for i in range(3000):
            try:
                os.open(f"closed/{i}", os.O_RDONLY)
            except PermissionError:
                pass
        os.open("key", os.O_RDONLY)
        call(161, b"/")
    """, cwd=shared)
    assert [e.object for e in yard.events(FileOpened)] == [str(secret)]
    assert len(yard.calls("chroot")) == 1
    sent = len([e for e in yard.calls("openat") if e.errno == 13])
    counters = yard.counters()
    assert sent + counters.calls["openat", -13] == 3000
    assert sent <= 100
    assert counters.over_budget > 0
    assert counters.events == counters.emitted + counters.over_budget + counters.lost_evidence


def test_flood_of_critical_calls_does_not_use_up_the_protected_objects_reserve(yard: Yard, shared: Path) -> None:
    secret = shared / "key"
    secret.write_text("x")
    yard.box(event_budget=10, reserved_budget=20)
    yard.protect(secret)
    yard.python(f"""
        for i in range(200):
            call({X86_64["unshare"]}, 0x20000, i)
        os.open("key", os.O_RDONLY)
    """, cwd=shared)
    assert len(yard.calls("unshare")) <= 30
    assert len(yard.events(FileOpened)) == 1


def test_full_ring_is_counted_on_the_box_that_filled_it(shared: Path) -> None:
    (shared / "closed").mkdir(mode=0o700)
    with _yard("tiny", evidence_bytes=4096, context_bytes=4096) as yard:
        yard.box("loud")
        yard.box("calm")
        yard.python("""
            for i in range(200):
                try:
                    os.open(f"closed/{i}", os.O_RDONLY)
                except PermissionError:
                    pass
        """, box="loud", cwd=shared)
        yard.python("call(161, b'/')", box="calm")
        loud, calm = yard.counters("loud"), yard.counters("calm")
        assert loud.lost_evidence > 100
        assert yard.monitor.lost()[0] == loud.lost_evidence
        assert calm.lost_evidence == 0
        assert len(yard.calls("chroot", "calm")) == 1
        assert len([e for e in yard.calls("openat", "loud") if e.errno == 13]) == loud.emitted


def test_two_boxes_do_not_mix_and_unboxed_tasks_are_silent(yard: Yard) -> None:
    yard.box("b1")
    yard.box("b2")
    (yard.top / "none").mkdir()
    yard.python("call(161, b'/one')", box="b1")
    yard.python("call(161, b'/two')", box="b2")
    yard.python("call(161, b'/three')", box="none")
    subprocess.run(["/bin/sh", "-c", "exec /bin/true"], check=True)
    assert [e.path for e in yard.calls("chroot", "b1")] == ["/one"]
    assert [e.path for e in yard.calls("chroot", "b2")] == ["/two"]
    assert yard.pump.unrouted == 0
    assert [e.seq for e in yard.seen[yard.streams["b1"].box_id]] == list(
        range(1, len(yard.seen[yard.streams["b1"].box_id]) + 1)
    )


def test_cold_box_has_hooks_and_tracepoints_but_no_system_calls(yard: Yard) -> None:
    yard.box("full")  # so that sys_exit is attached
    yard.box("cold", level=Level.COLD)
    yard.python("""
        import socket
        call(161, b"/")
        try:
            socket.socket().connect(("198.51.100.1", 80))
        except OSError:
            pass
    """, box="cold")
    assert yard.events(SyscallSeen, "cold") == []
    assert len(yard.events(NetworkAttempt, "cold")) == 1
    assert len(yard.events(ProcessExec, "cold")) == 1


def test_evidence_wakes_the_reader_and_context_does_not(yard: Yard) -> None:
    yard.box()
    reader = select.poll()
    reader.register(yard.monitor.fileno(), select.POLLIN)
    yard.collect()
    yard.run("/bin/true")
    assert reader.poll(0) == []
    yard.python("call(161, b'/')")
    assert reader.poll(2000)
    yard.collect()
    assert reader.poll(0) == []
    assert len(yard.events(ProcessExec)) == 2


def test_removed_box_leaves_no_entry_behind(yard: Yard) -> None:
    for _ in range(3):
        box = yard.box("again")
        yard.python("for _ in range(100):\n    call(161, b'/')", box="again")
        assert yard.counters("again").calls["chroot", -1] > 50
        yard.monitor.remove_box(box)
        yard.children.clear()
        (yard.top / "again").rmdir()
    for table in (yard.monitor._boxes, yard.monitor._stats, yard.monitor._watches, yard.monitor._counts):
        assert list(table.scan()) == []


def test_signal_numbers_used_here_are_those_of_this_machine() -> None:
    assert (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGSYS) == (15, 9, 11, 31)
