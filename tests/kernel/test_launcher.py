"""The launcher and dg-init on the real kernel: what is built, what binds root inside, and what is left afterwards."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_guard.errors import SetupError
from dsec_guard.sandbox import plan
from dsec_guard.sandbox.launch import BoxInit, Launcher
from dsec_guard.sandbox.spec import (
    BOX_CAPS,
    ExecRequest,
    LandlockRule,
    LandlockSpec,
    MountFlag,
    OpKind,
    Rlimit,
    RootOp,
    SpawnedBox,
    SpawnSpec,
)

REPOSITORY = Path(__file__).resolve().parents[2]
NATIVE = REPOSITORY / "dsec_guard/_native"
BASE = 1_500_000_000
AGENT = 1000
WAIT_S = 10.0

pytestmark = [
    pytest.mark.needs("namespaces", "user_namespaces", "overlay", "idmapped_mounts", "cgroup_v2", "clone_into_cgroup"),
    pytest.mark.skipif(not (NATIVE / "dg-launcher").exists(), reason="dg-launcher is not built"),
]

RO = MountFlag.RO | MountFlag.NOSUID | MountFlag.NODEV
PLAIN = MountFlag.NOSUID | MountFlag.NODEV
NR = {"getppid": 110, "sethostname": 170, "io_uring_setup": 425, "mount": 165, "getpgrp": 111}


def cgroup_mounts() -> tuple[Path, dict[str, Path]]:
    """The v2 tree, and the v1 hierarchies by controller."""
    v2, v1 = Path(), {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, fs, options = line.split(" ")[:4]
        if fs == "cgroup2":
            v2 = Path(point)
        elif fs == "cgroup":
            v1.update({option: Path(point) for option in options.split(",")})
    return v2, v1


def root_ops(workspace: Path | None = None) -> tuple[RootOp, ...]:
    ops = [RootOp(OpKind.BIND, "usr", source="/usr", flags=RO | MountFlag.IDMAP_BOX)]
    ops += [RootOp(OpKind.SYMLINK, name, source=f"usr/{name}") for name in ("bin", "sbin", "lib", "lib64")]
    ops += [RootOp(OpKind.PROC, "proc", flags=PLAIN | MountFlag.NOEXEC), RootOp(OpKind.READONLY, "proc/sys")]
    ops += [RootOp(OpKind.BIND, f"dev/{name}", source=f"/dev/{name}", flags=MountFlag.NOSUID | MountFlag.NOEXEC)
            for name in ("null", "zero", "full", "random", "urandom", "tty")]
    ops += [
        RootOp(OpKind.DEVPTS, "dev/pts", flags=MountFlag.NOSUID | MountFlag.NOEXEC, gid=5, inodes=16),
        RootOp(OpKind.SYMLINK, "dev/ptmx", source="pts/ptmx"),
        RootOp(OpKind.TMPFS, "dev/shm", flags=PLAIN, mode=0o1777, size_bytes=1 << 20, inodes=64),
        RootOp(OpKind.STORE, "tmp", source="tmp", flags=PLAIN, mode=0o1777),
        RootOp(OpKind.FILE, "etc/hostname", content=b"sandbox\n", mode=0o644),
        RootOp(OpKind.MASK_FILE, "proc/uptime"),
        RootOp(OpKind.MASK_FILE, "proc/no-such-file", flags=MountFlag.OPTIONAL),
        RootOp(OpKind.MASK_DIR, "proc/fs"),
    ]
    if workspace is not None:
        ops.append(RootOp(OpKind.OVERLAY, "workspace", source=str(workspace), name="workspace",
                          flags=PLAIN | MountFlag.IDMAP_OWNER))
    return tuple(ops)


def errno_filter(*rules: tuple[int, int]) -> bytes:
    """BPF: each (syscall number, return value of the filter); all else is allowed."""
    code = struct.pack("<HBBI", 0x20, 0, 0, 0)
    for number, verdict in rules:
        code += struct.pack("<HBBI", 0x15, 0, 1, number) + struct.pack("<HBBI", 0x06, 0, 0, verdict)
    return code + struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)


RET_ERRNO, RET_NOTIFY = 0x00050000, 0x7FC00000


class Rig:
    """A launcher, a cgroup and user namespaces for one test; boxes it made are killed at its end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.leaked = os.open("/", os.O_RDONLY | os.O_DIRECTORY)  # as a careless parent passes on
        self.process = subprocess.Popen([NATIVE / "dg-launcher", "--socket", str(theirs.fileno())],
                                        pass_fds=[theirs.fileno(), self.leaked], restore_signals=False)
        theirs.close()
        self.sock = ours
        self.launcher = Launcher(ours)
        v2, self.v1 = cgroup_mounts()
        self.cgroup = v2 / f"dsec-guard-test-{os.getpid()}-{id(self)}"
        self.cgroup.mkdir()
        self.cgroup_fd = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        self.userns = self.launcher.make_userns(BASE)
        self.fds = [self.cgroup_fd, self.userns, self.leaked]
        self.boxes: list[SpawnedBox] = []

    def spec(self, workspace: Path | None = None, **changes: object) -> SpawnSpec:
        owner_map = -1
        if workspace is not None:
            st = workspace.stat()
            owner_map = self.launcher.make_userns(BASE, owner=(st.st_uid, st.st_gid), agent_uid=AGENT)
            self.fds.append(owner_map)
        spec = SpawnSpec(
            name="test", hostname="sandbox", base_uid=BASE, cgroup_fd=self.cgroup_fd, userns_fd=self.userns,
            owner_map_fd=owner_map, ops=root_ops(workspace), store_bytes=4 << 20, store_inodes=256,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]

    def box(self, workspace: Path | None = None, **changes: object) -> Box:
        spawned = self.launcher.spawn(self.spec(workspace, **changes))
        self.boxes.append(spawned)
        return Box(spawned)

    def close(self) -> None:
        (self.cgroup / "cgroup.kill").write_text("1")
        for spawned in self.boxes:
            wait_for_end(spawned.pidfd)
            for fd in {spawned.pidfd, spawned.store_fd, spawned.root_fd, *spawned.overlay_fds.values(),
                       *spawned.upper_fds.values()} | ({spawned.listener_fd} - {-1}):
                os.close(fd)
        assert eventually(lambda: "populated 0" in (self.cgroup / "cgroup.events").read_text())
        self.cgroup.rmdir()
        self.launcher.close()
        for fd in self.fds:
            os.close(fd)
        assert self.process.wait(WAIT_S) == 0


class Box:
    def __init__(self, spawned: SpawnedBox) -> None:
        self.spawned = spawned
        self.init = BoxInit(spawned.init_fd)

    def start(self, *argv: str, stdio: tuple[int, int, int], **changes: object) -> int:
        req = ExecRequest(argv=tuple(map(os.fsencode, argv)), env=(b"PATH=/usr/bin:/bin",), cwd=b"/", uid=AGENT, gid=AGENT,
                          stdio=stdio)
        return self.init.exec(replace(req, **changes), WAIT_S).exec_id  # type: ignore[arg-type]

    def end_of(self, exec_id: int) -> int:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            select.select([self.init], [], [], WAIT_S)
            for end in self.init.read_exits():
                if end.exec_id == exec_id:
                    return end.status
        raise AssertionError(f"exec {exec_id} has not ended")

    def run(self, *argv: str, **changes: object) -> tuple[int, str]:
        """Exit code (negative: signal) and what the command wrote to stdout and stderr."""
        out_r, out_w = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            exec_id = self.start(*argv, stdio=(null, out_w, out_w), **changes)
        finally:
            os.close(out_w)
            os.close(null)
        with os.fdopen(out_r, "rb") as pipe:
            text = pipe.read().decode()
        return os.waitstatus_to_exitcode(self.end_of(exec_id)), text

    def python(self, body: str, **changes: object) -> object:
        """Runs Python inside and returns what it left in `result`."""
        code = PRELUDE + textwrap.dedent(body) + "\nprint(json.dumps(result))"
        status, text = self.run("/usr/bin/python3", "-I", "-S", "-c", code, **changes)
        assert status == 0, text
        return json.loads(text)

    def as_root(self, body: str) -> object:
        return self.python(body, uid=0, gid=0, caps=BOX_CAPS)


PRELUDE = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    value = getattr(libc, name)(*args)
    return errno.errorcode[ctypes.get_errno()] if value == -1 else "worked"
def tried(fn):
    try:
        fn()
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "worked"
result = None
"""


def eventually(condition: Callable[[], object], seconds: float = WAIT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def wait_for_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], WAIT_S)[0], "the box's first process lives"


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "file").write_text("old\n")
    return place


# ---- commands -------------------------------------------------------------------------------------------------------


def test_a_command_runs_and_its_exit_status_comes_back(rig):
    box = rig.box()
    assert box.run("/bin/sh", "-c", "echo $0; exit 7", ) == (7, "/bin/sh\n")
    assert box.run("sh", "-c", "kill -TERM $$") == (-signal.SIGTERM, "")


def test_a_program_is_searched_along_the_path_of_its_own_environment(rig):
    box = rig.box()
    assert box.run("echo", "x", env=(b"PATH=/nowhere:/usr/bin",)) == (0, "x\n")
    with pytest.raises(SetupError) as caught:
        box.run("echo", "x", env=(b"PATH=/nowhere",))
    assert (caught.value.step, caught.value.errno_name) == ("execve", "ENOENT")


@pytest.mark.parametrize(("changes", "step", "name"), [
    ({"argv": (b"/bin/no-such-program",)}, "execve", "ENOENT"),
    ({"argv": (b"/etc/hostname",)}, "execve", "EACCES"),
    ({"cwd": b"/no/such/place"}, "chdir", "ENOENT"),
    ({"uid": plan.INIT_UID}, "prepare", "EINVAL"),
    ({"caps": 1 << 21}, "prepare", "EPERM"),
    ({"phase": 5}, "prepare", "EINVAL"),
])
def test_what_keeps_a_command_from_starting_is_named_and_the_box_lives_on(rig, changes, step, name):
    box = rig.box()
    with pytest.raises(SetupError) as caught:
        box.run("/bin/true", **changes)
    assert (caught.value.step, caught.value.errno_name) == (step, name)
    assert box.run("/bin/true") == (0, "")


def test_a_command_gets_three_descriptors_and_a_session_of_its_own(rig):
    result = rig.box().python("result = [sorted(os.listdir('/proc/self/fd')), os.getsid(0) == os.getpid()]")
    assert result == [["0", "1", "2", "3"], True]  # 3 is the directory being listed


def test_dg_init_holds_nothing_of_the_host(rig):
    """A directory of the host in any process of the box would be a way out."""
    box = rig.box(landlock=(LandlockSpec(handled_fs=1),))
    held = [os.readlink(f"/proc/{box.spawned.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{box.spawned.pid}/fd")]
    kinds = sorted(re.sub(r"\[\d+\]$", "", link) for link in held)
    assert kinds == ["/dev/null"] * 3 + ["anon_inode:[landlock-ruleset]", "anon_inode:[signalfd]", "socket:"]


def test_a_guard_that_ignores_sigpipe_does_not_pass_that_on(rig):
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    status, text = rig.box().run("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    assert re.findall(r"[0-9a-f]{16}", text) == ["0" * 16] * 2, text
    assert status == 0


def test_orphans_are_reaped_and_only_commands_are_reported(rig):
    box = rig.box()
    assert box.run("sh", "-c", "(sh -c 'exit 3' & ) ; true") == (0, "")
    assert eventually(lambda: (rig.cgroup / "cgroup.procs").read_text().split() == [str(box.spawned.pid)])
    assert box.init.read_exits() == []


def test_many_commands_at_once_each_report_their_own_end(rig):
    box = rig.box()
    null = os.open("/dev/null", os.O_RDWR)
    ids = [box.start("sh", "-c", f"exit {n}", stdio=(null, null, null)) for n in range(20)]
    os.close(null)
    seen: dict[int, int] = {}
    assert eventually(lambda: seen.update({e.exec_id: os.waitstatus_to_exitcode(e.status)
                                           for e in box.init.read_exits()}) or len(seen) == len(ids))
    assert [seen[i] for i in ids] == list(range(20))


def test_a_signal_reaches_the_commands_whole_process_group(rig):
    box = rig.box()
    read, write = os.pipe()
    exec_id = box.start("sh", "-c", "sleep 100 & echo ready; wait", stdio=(read, write, write))
    os.close(write)
    assert os.read(read, 6) == b"ready\n"
    box.init.signal(exec_id, signal.SIGKILL)
    assert os.WTERMSIG(box.end_of(exec_id)) == signal.SIGKILL
    assert os.read(read, 1) == b""  # `sleep` held the pipe too
    os.close(read)


def test_a_signal_to_all_spares_dg_init(rig):
    box = rig.box()
    null = os.open("/dev/null", os.O_RDWR)
    ids = [box.start("sleep", "100", stdio=(null, null, null)) for _ in range(2)]
    os.close(null)
    box.init.signal(None, signal.SIGKILL)
    assert [os.WTERMSIG(box.end_of(i)) for i in ids[:1]] == [signal.SIGKILL]
    assert box.run("/bin/true") == (0, "")


def test_rlimits_and_umask_hold_and_a_hard_limit_above_ours_is_cut(rig):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    box = rig.box(rlimits=(Rlimit(resource.RLIMIT_NOFILE, 77, hard + 1000), Rlimit(resource.RLIMIT_CORE, 0, 0)))
    status, text = box.run("sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -Hc; umask", umask=0o027)
    assert (status, text.split()) == (0, ["77", str(hard), "0", "0027"])


def test_a_pty_becomes_the_controlling_terminal(rig):
    box = rig.box()
    master, slave = pty.openpty()
    exec_id = box.start("sh", "-c", "sleep 100 & echo on >/dev/tty; wait", stdio=(slave, slave, slave), tty=True)
    os.close(slave)
    assert select.select([master], [], [], WAIT_S)[0]
    assert os.read(master, 10) == b"on\r\n"
    os.write(master, b"\x03")
    assert os.WTERMSIG(box.end_of(exec_id)) == signal.SIGINT
    os.close(master)


# ---- what binds -----------------------------------------------------------------------------------------------------


def test_root_inside_cannot_undo_what_binds_it(rig, workspace):
    result = rig.box(workspace).as_root("""
        MS_REMOUNT, MS_BIND, NEWNS, NEWUSER = 32, 4096, 0x20000, 0x10000000
        result = {
            "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
            "bind": call("mount", b"/tmp", b"/dev/shm", None, MS_BIND, None),
            "remount": call("mount", None, b"/usr", None, MS_REMOUNT | MS_BIND, None),
            "umount": call("umount2", b"/workspace", 2),
            "new_mount_ns": call("unshare", NEWNS),
            "new_user_ns": call("unshare", NEWUSER),
            "pivot_root": call("syscall", 155, b"/tmp", b"/tmp"),
            "hostname": call("sethostname", b"x", 1),
            "device": tried(lambda: os.mknod("/tmp/vda", 0o60600, os.makedev(254, 0))),
            "write_usr": tried(lambda: open("/usr/x", "w")),
            "write_root": tried(lambda: os.mkdir("/x")),
            "sysctl": tried(lambda: open("/proc/sys/kernel/core_pattern", "w")),
            "own_namespace_limit": tried(lambda: open("/proc/sys/user/max_user_namespaces", "w")),
            "uid_map": tried(lambda: os.write(os.open("/proc/self/uid_map", os.O_WRONLY), b"0 0 1")),
            "module": call("syscall", 313, 0, b"", 0),
            "ptrace_init": call("ptrace", 0x4206, 1, 0, 0),
            "init_memory": tried(lambda: open("/proc/1/mem")),
            "init_fds": tried(lambda: os.listdir("/proc/1/fd")),
            "init_environ": tried(lambda: open("/proc/1/environ").read()),
            "init_root": tried(lambda: os.listdir("/proc/1/root")),
            "masked": tried(lambda: open("/proc/uptime").read(1)),
        }
        os.kill(1, 9); os.kill(1, 15)
    """)
    assert "worked" not in result.values(), result
    assert result["new_user_ns"] == "ENOSPC"
    assert result["write_usr"] == result["write_root"] == "EROFS"


def test_honest_root_inside_can_do_its_work(rig):
    result = rig.box().as_root("""
        open("/tmp/f", "w").close(); os.chown("/tmp/f", 33, 33)
        st = os.stat("/tmp/f"); os.setgroups([5]); os.setgid(33); os.setuid(33)
        result = [st.st_uid, st.st_gid, os.getuid(), tried(lambda: os.setuid(0))]
    """)
    assert result == [33, 33, 33, "EPERM"]


@pytest.mark.parametrize(("uid", "caps"), [(AGENT, 0), (0, 0), (0, BOX_CAPS), (AGENT, 1 << 10)])
def test_a_command_holds_exactly_the_capabilities_it_was_given(rig, uid, caps):
    _, text = rig.box().run("grep", "-E", "^(Cap|NoNew)", "/proc/self/status", uid=uid, caps=caps)
    sets = dict(re.findall(r"^(\w+):\s*(\w+)$", text, re.MULTILINE))
    assert [int(sets[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")] == [caps] * 3
    assert sets["NoNewPrivs"] == "1"


def test_ids_inside_are_a_range_of_the_host(rig):
    box = rig.box()
    read, write = os.pipe()
    exec_id = box.start("sh", "-c", "echo ready; exec sleep 100", stdio=(read, write, write))
    os.close(write)
    assert os.read(read, 6) == b"ready\n"
    status = {p: Path(f"/proc/{p}/status").read_text() for p in (rig.cgroup / "cgroup.procs").read_text().split()}
    uids = {tuple(map(int, re.findall(r"^Uid:(.*)$", s, re.MULTILINE)[0].split())) for s in status.values()}
    assert uids == {(BASE + plan.INIT_UID,) * 4, (BASE + AGENT,) * 4}
    box.init.signal(exec_id, signal.SIGKILL)
    os.close(read)


def test_every_namespace_is_another_and_the_user_namespace_owns_none_of_them(rig):
    box = rig.box()
    kinds = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
    pid = box.spawned.pid
    ours = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
    theirs = {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in kinds}
    assert [kind for kind in kinds if ours[kind] == theirs[kind]] == []
    for kind in ("pid", "mnt", "net", "ipc", "uts", "cgroup"):
        with open(f"/proc/{pid}/ns/{kind}") as ns:
            owner = fcntl.ioctl(ns, 0xB701)  # NS_GET_USERNS
        try:
            assert os.fstat(owner).st_ino == os.stat("/proc/self/ns/user").st_ino, kind
        finally:
            os.close(owner)


def test_the_network_is_loopback_and_nothing_else(rig):
    result = rig.box().python("""
        import socket
        server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
        socket.create_connection(server.getsockname()).close()
        result = [[name for _, name in socket.if_nameindex()],
                  tried(lambda: socket.create_connection(("192.0.2.1", 80)))]
    """)
    assert result == [["lo"], "ENETUNREACH"]


def test_a_filter_of_the_phase_binds_only_that_phase(rig):
    deny = errno_filter((NR["getpgrp"], RET_ERRNO | errno.EDOM))
    box = rig.box(exec_filters=(b"", deny), check_phase=1, check_syscalls=((NR["getpgrp"], errno.EDOM),))
    body = f"result = call('syscall', {NR['getpgrp']})"
    assert (box.python(body, phase=0), box.python(body, phase=1)) == ("worked", "EDOM")
    assert ("syscall_111", True) in {(check.name, check.refused) for check in box.spawned.checks}


def test_a_denial_that_does_not_hold_stops_the_box(rig):
    with pytest.raises(SetupError) as caught:
        rig.box(check_syscalls=((NR["getpgrp"], errno.EPERM),))
    assert caught.value.step == "self_check"
    assert "syscall_111" in str(caught.value)
    assert eventually(lambda: (rig.cgroup / "cgroup.procs").read_text() == "")


@pytest.mark.needs("landlock")
def test_landlock_binds_root_too_and_covers_mounts_made_before(rig, workspace):
    read, write = 0b1100, 0b1110 | 1 << 4 | 1 << 8  # READ_FILE+READ_DIR; and WRITE_FILE, REMOVE_DIR, MAKE_REG
    rules = LandlockSpec(handled_fs=read | write, scoped=2, rules=(
        LandlockRule("/usr", read), LandlockRule("/lib", read), LandlockRule("/dev/null", write),
        LandlockRule("/workspace", write), LandlockRule("/no/such/place", read), LandlockRule("/proc", read)))
    box = rig.box(workspace, landlock=(rules,))
    result = box.as_root("""
        result = [tried(lambda: open("/workspace/new", "w")), tried(lambda: open("/tmp/new", "w")),
                  tried(lambda: open("/dev/null", "w")), tried(lambda: os.kill(1, 0))]
    """)
    assert result == ["worked", "EACCES", "worked", "EPERM"]
    assert ("signal_init", True) in {(check.name, check.refused) for check in box.spawned.checks}


@pytest.mark.needs("seccomp_notify")
def test_the_listener_reaches_the_guard_and_the_check_does_not_wait_for_it(rig):
    box = rig.box(notify_filter=errno_filter((NR["sethostname"], RET_NOTIFY), (NR["mount"], RET_NOTIFY)))
    assert box.spawned.listener_fd >= 0
    assert not select.select([box.spawned.listener_fd], [], [], 0)[0]
    null = os.open("/dev/null", os.O_RDWR)
    exec_id = box.start("/usr/bin/python3", "-I", "-S", "-c", PRELUDE + "raise SystemExit(call('sethostname', b'x', 1) != 'EDOM')",
                        stdio=(null, null, null))
    os.close(null)
    assert select.select([box.spawned.listener_fd], [], [], WAIT_S)[0]
    request = bytearray(80)
    fcntl.ioctl(box.spawned.listener_fd, 0xC0502100, request)  # SECCOMP_IOCTL_NOTIF_RECV
    assert struct.unpack_from("<i", request, 16)[0] == NR["sethostname"]
    answer = bytearray(struct.pack("<Qqii", struct.unpack_from("<Q", request)[0], 0, -errno.EDOM, 0))
    fcntl.ioctl(box.spawned.listener_fd, 0xC0182101, answer)  # SECCOMP_IOCTL_NOTIF_SEND
    assert os.waitstatus_to_exitcode(box.end_of(exec_id)) == 0


# ---- cgroups --------------------------------------------------------------------------------------------------------


def test_the_box_is_in_its_cgroups_and_sees_none_of_their_paths(rig):
    if not rig.v1:
        pytest.skip("no v1 hierarchy on this host")
    own = [rig.v1[c] / rig.cgroup.name for c in ("pids", "memory") if c in rig.v1]
    for path in own:
        path.mkdir()
    tasks = [os.open(path / "tasks", os.O_WRONLY) for path in own]
    try:
        box = rig.box(v1_tasks_fds=tuple(tasks))
        for path in own:
            assert str(box.spawned.pid) in (path / "tasks").read_text().split()
        _, text = box.run("cat", "/proc/self/cgroup")
        assert rig.cgroup.name not in text
    finally:
        (rig.cgroup / "cgroup.kill").write_text("1")
        for fd in tasks:
            os.close(fd)
        for path in own:
            assert eventually(lambda path=path: not (path / "tasks").read_text())
            path.rmdir()


# ---- the file tree --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [(0, 0), (AGENT, AGENT), (33, 44), (70_000, 80_000)])
def test_the_workspace_belongs_to_the_agent_and_stays_untouched(rig, workspace, owner):
    for path in (workspace, workspace / "file"):
        os.chown(path, *owner)
    box = rig.box(workspace)
    result = box.python("""
        with open("/workspace/file", "w") as f: f.write("new\\n")
        os.rename("/workspace/file", "/workspace/renamed"); os.mkdir("/workspace/made")
        result = [[os.stat(p).st_uid, os.stat(p).st_gid] for p in ("/workspace", "/workspace/renamed", "/workspace/made")]
    """)
    assert result == [[AGENT, AGENT]] * 3
    assert (workspace / "file").read_text() == "old\n"
    assert sorted(os.listdir(workspace)) == ["file"]
    upper = box.spawned.upper_fds["workspace"]
    assert sorted(os.listdir(upper)) == ["file", "made", "renamed"]
    assert os.stat("renamed", dir_fd=upper).st_uid == BASE + AGENT
    assert stat.S_ISCHR(os.stat("file", dir_fd=upper, follow_symlinks=False).st_mode)  # a whiteout


def test_the_owner_map_swaps_two_ids_and_leaves_the_rest(rig, workspace):
    for uid in (0, 33, 44, AGENT):
        (workspace / str(uid)).touch()
        os.chown(workspace / str(uid), uid, uid)
    os.chown(workspace, 33, 33)
    result = rig.box(workspace).python("result = {n: os.stat(f'/workspace/{n}').st_uid for n in ('0', '33', '44', '1000')}")
    assert result == {"0": 0, "33": AGENT, "44": 44, "1000": 33}


def test_the_handles_outlive_the_box(rig, workspace):
    box = rig.box(workspace)
    box.run("sh", "-c", "echo new > /workspace/made")
    box.init.close()
    wait_for_end(box.spawned.pidfd)
    for fd in (box.spawned.overlay_fds["workspace"], box.spawned.upper_fds["workspace"]):
        made = os.open("made", os.O_RDONLY, dir_fd=fd)
        assert os.read(made, 10) == b"new\n"
        os.close(made)
    assert sorted(os.listdir(box.spawned.overlay_fds["workspace"])) == ["file", "made"]
    assert "tmp" in os.listdir(box.spawned.store_fd)


def test_overlay_options_are_in_force_and_no_host_path_shows(rig, workspace):
    _, text = rig.box(workspace).run("grep", " /workspace ", "/proc/self/mounts")
    options = text.split(" ")[3].split(",")
    assert {"index=on", "xino=on", "nosuid", "nodev"} <= set(options)
    assert "/" + str(workspace).strip("/") not in text


def test_bytes_and_inodes_of_all_writable_places_are_bounded_together(rig, workspace):
    result = rig.box(workspace).python("""
        def fill(path):
            with open(path, "wb", buffering=0) as f:
                while True: f.write(bytes(65536))
        def flood():
            for n in range(10000): open(f"/tmp/{n}", "w").close()
        result = [tried(lambda: fill("/workspace/big")), os.stat("/workspace/big").st_size, tried(lambda: fill("/tmp/more")),
                  os.stat("/tmp/more").st_size, tried(flood), len(os.listdir("/tmp")) < 300]
    """)
    assert result[0] == result[2] == result[4] == "ENOSPC"
    assert result[1] <= 4 << 20
    assert result[3] < 65536
    assert result[5]


def test_a_scaffold_file_can_stand_over_a_proc_file(rig):
    ops = (*root_ops(), RootOp(OpKind.FILE, "etc/fake-uptime", content=b"1 1\n", mode=0o444),
           RootOp(OpKind.MASK_FILE, "proc/loadavg", source="etc/fake-uptime"))
    assert rig.box(ops=ops).run("cat", "/proc/loadavg") == (0, "1 1\n")


def test_a_masked_file_and_directory_tell_nothing(rig):
    result = rig.box().python("result = [tried(lambda: open('/proc/uptime').read()), os.listdir('/proc/fs')]")
    assert result == ["EACCES", []]


def test_a_target_is_never_resolved_through_a_link(rig, workspace):
    (workspace / "link").symlink_to("/tmp")
    ops = (*root_ops(workspace), RootOp(OpKind.FILE, "workspace/link/x", content=b"x"))
    with pytest.raises(SetupError) as caught:
        rig.box(workspace, ops=ops)
    assert (caught.value.step, caught.value.errno_name) == ("build_root", "ELOOP")


def test_a_detached_tree_of_the_guard_is_attached(rig, tmp_path):
    (tmp_path / "in-tree").write_text("tree\n")
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(428, -100, os.fsencode(tmp_path), 1 | os.O_CLOEXEC)  # open_tree(OPEN_TREE_CLONE)
    assert tree >= 0
    try:
        ops = (*root_ops(), RootOp(OpKind.TREE, "opt/tree", fd=tree, flags=RO | MountFlag.IDMAP_BOX))
        result = rig.box(ops=ops).python("""
            result = [open("/opt/tree/in-tree").read(), tried(lambda: open("/opt/tree/x", "w"))]
        """, uid=0)
        assert result == ["tree\n", "EROFS"]
    finally:
        os.close(tree)


def test_a_directory_can_be_the_whole_root(rig, tmp_path):
    tmp_path.chmod(0o755)
    for name in ("usr", "proc", "tmp", "dev"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "lib64").symlink_to("usr/lib64")
    ops = (RootOp(OpKind.BIND, "", source=str(tmp_path), flags=RO | MountFlag.IDMAP_BOX),
           RootOp(OpKind.BIND, "usr", source="/usr", flags=RO), RootOp(OpKind.STORE, "tmp", source="tmp", mode=0o1777),
           RootOp(OpKind.BIND, "dev", source="/dev", flags=MountFlag.NOSUID))
    status, text = rig.box(ops=ops).run("sh", "-c", "ls / | tr '\\n' ' '; echo x > /tmp/x && cat /tmp/x; echo y > /y")
    assert text.startswith("bin dev lib lib64 proc tmp usr x\n"), text
    assert "Read-only file system" in text
    assert status != 0


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_missing_source_is_named_unless_it_is_optional(rig):
    missing = RootOp(OpKind.BIND, "opt", source="/no/such/source", flags=RO)
    with pytest.raises(SetupError) as caught:
        rig.box(ops=(*root_ops(), missing))
    assert (caught.value.step, caught.value.errno_name) == ("build_root", "ENOENT")
    assert "/no/such/source" in str(caught.value)
    optional = replace(missing, flags=RO | MountFlag.OPTIONAL)
    assert rig.box(ops=(*root_ops(), optional)).run("/bin/true") == (0, "")


def test_a_lower_tree_that_cannot_be_id_mapped_says_so(rig):
    op = RootOp(OpKind.OVERLAY, "w", source="/proc/fs", name="w", flags=PLAIN | MountFlag.IDMAP_BOX)
    with pytest.raises(SetupError) as caught:
        rig.box(ops=(*root_ops(), op))
    assert caught.value.step == "build_root"
    assert "mount_setattr idmap" in str(caught.value)
    assert caught.value.hint


def test_a_first_process_that_sticks_is_given_up_in_time(rig):
    (rig.cgroup / "cgroup.freeze").write_text("1")
    began = time.monotonic()
    try:
        with pytest.raises(SetupError) as caught:
            rig.box(deadline_ms=200)
        assert (caught.value.step, caught.value.errno_name) == ("deadline", "ETIMEDOUT")
        assert time.monotonic() - began < 2
    finally:
        (rig.cgroup / "cgroup.freeze").write_text("0")
    assert eventually(lambda: (rig.cgroup / "cgroup.procs").read_text() == "")
    assert rig.box().run("/bin/true") == (0, "")


def test_a_broken_request_is_answered_and_the_launcher_goes_on(rig):
    for message in (b"x", bytes(plan.REQUEST.size), plan.pack_request(99), plan.pack_request(plan.REQ_SPAWN)):
        rig.sock.send(message)
        answer = plan.ANSWER.unpack(rig.sock.recv(4096))
        assert answer["kind"] == plan.ANS_ERROR
        assert answer["errnum"]
    assert rig.box().run("/bin/true") == (0, "")


def test_a_plan_that_somebody_could_still_change_is_refused(rig):
    fd = os.memfd_create("plan", os.MFD_ALLOW_SEALING)
    packed = plan.pack_plan(rig.spec())
    os.write(fd, packed.data)
    socket.send_fds(rig.sock, [plan.pack_request(plan.REQ_SPAWN)], [fd, *packed.fds])
    os.close(fd)
    answer = plan.ANSWER.unpack(rig.sock.recv(4096))
    assert (answer["kind"], answer["step"].rstrip(b"\0"), answer["errnum"]) == (plan.ANS_ERROR, b"check_plan", errno.EINVAL)


@pytest.mark.parametrize("changes", [{"base_uid": 0}, {"base_uid": 1000}, {"deadline_ms": 0}, {"store_bytes": 0},
                                     {"ops": (RootOp(OpKind.DIR, "../x"),)}, {"ops": (RootOp(OpKind.DIR, "/x"),)},
                                     {"ops": (RootOp(OpKind.STORE, "x", source="../y"),)},
                                     {"ops": (RootOp(OpKind.STORE, "x", source=".dg/root"),)},
                                     {"ops": (RootOp(OpKind.OVERLAY, "x", source="/usr", name="a,b"),)},
                                     {"stage_dir": "relative"}, {"check_phase": 3}])
def test_a_plan_that_asks_for_nonsense_is_refused_before_anything_is_made(rig, changes):
    with pytest.raises(SetupError) as caught:
        rig.box(**changes)
    assert caught.value.step == "check_plan"


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_nothing_remains_when_the_first_process_is_gone(rig, workspace):
    before = Path("/proc/self/mountinfo").read_text()
    box = rig.box(workspace)
    null = os.open("/dev/null", os.O_RDWR)
    box.start("sh", "-c", "sleep 100 & setsid sleep 100 & wait", stdio=(null, null, null))
    os.close(null)
    assert Path("/proc/self/mountinfo").read_text() == before
    os.kill(box.spawned.pid, signal.SIGKILL)
    wait_for_end(box.spawned.pidfd)
    os.waitid(os.P_PIDFD, box.spawned.pidfd, os.WEXITED)
    assert eventually(lambda: (rig.cgroup / "cgroup.procs").read_text() == "")
    assert Path("/proc/self/mountinfo").read_text() == before
    assert box.init.read_exits() == []
    assert box.init.closed_by_box


def test_a_guard_that_goes_away_takes_the_box_along(rig):
    box = rig.box()
    box.init.close()
    wait_for_end(box.spawned.pidfd)


HOLDER = """
import os, signal, socket, subprocess, sys
sys.path.insert(0, sys.argv[1])
from tests.kernel.test_launcher import Rig
rig = Rig()
box = rig.box()
out = socket.socket(fileno=int(sys.argv[2]))
socket.send_fds(out, [f"{box.spawned.pid} {rig.process.pid} {rig.cgroup}".encode()], [box.spawned.pidfd, box.spawned.init_fd])
signal.pause()
"""


def test_killing_the_parent_kills_launcher_and_box_also_when_the_socket_lives_on():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = subprocess.Popen([sys.executable, "-c", HOLDER, str(REPOSITORY), str(theirs.fileno())], cwd=REPOSITORY,
                              pass_fds=[theirs.fileno()])
    theirs.close()
    text, (pidfd, init_fd), _, _ = socket.recv_fds(ours, 4096, 2)
    _, launcher, cgroup = text.decode().split(" ")
    launcher_fd = os.pidfd_open(int(launcher))
    assert not select.select([pidfd], [], [], 0)[0]
    parent.kill()
    parent.wait()
    wait_for_end(pidfd)
    wait_for_end(launcher_fd)
    for fd in (pidfd, init_fd, launcher_fd):
        os.close(fd)
    ours.close()
    assert eventually(lambda: "populated 0" in (Path(cgroup) / "cgroup.events").read_text())
    Path(cgroup).rmdir()


# ---- order ----------------------------------------------------------------------------------------------------------


def test_the_steps_stand_in_an_order_that_holds_what_each_needs():
    steps = subprocess.run([NATIVE / "dg-launcher", "--print-steps"], check=True, capture_output=True, text=True).stdout.split()
    chain = (
        ("join_v1_cgroups", "new_cgroup_ns"), ("isolate_mounts", "build_root"), ("build_root", "make_rulesets"),
        ("build_root", "enter_root"), ("loopback_up", "enter_user_ns"), ("set_hostname", "enter_user_ns"),
        ("enter_root", "enter_user_ns"), ("enter_user_ns", "limit_namespaces"), ("enter_user_ns", "drop_bounding_set"),
        ("drop_bounding_set", "switch_user"), ("switch_user", "die_with_parent"), ("set_no_new_privs", "install_notify"),
        ("install_notify", "hand_over"), ("hand_over", "close_fds"), ("close_fds", "exec_init"),
    )
    assert [pair for pair in chain if not steps.index(pair[0]) < steps.index(pair[1])] == []
    assert steps[-1] == "exec_init"
