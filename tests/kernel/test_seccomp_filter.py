"""The default profile on the real kernel: what must work works, what must not gives the errno that the simulator gives."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from dsec_guard.host.seccomp import RET_ERRNO, build_exec_filter, build_notify_filter, decode, simulate
from dsec_guard.host.syscall_table import X32_BIT, X86_64
from dsec_guard.policy.profile import decide
from dsec_guard.policy.schema import Syscalls

pytestmark = pytest.mark.needs("seccomp")

DECIDED = decide(Syscalls())
PROGRAM = build_exec_filter(DECIDED.spec)

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class Fprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes, flags: int = 0) -> int:
    """Puts the calling process under `program`, for good; returns what seccomp(2) did."""
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    result = int(libc.syscall(ctypes.c_long(X86_64["seccomp"]), ctypes.c_long(1), ctypes.c_long(flags),
                              ctypes.byref(Fprog(len(decode(program)), program))))
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result


def in_child(action: Callable[[], int]) -> int:
    """The wait status of a child that ran `action` and exited with its result."""
    child = os.fork()
    if child == 0:
        code = 111
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def errno_of(number: int, args: Sequence[int]) -> int:
    """The errno of one raw call under the program, 0 for success."""
    def action() -> int:
        install(PROGRAM)
        result = libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(a) for a in args))
        return ctypes.get_errno() if result < 0 else 0

    status = in_child(action)
    assert os.WIFEXITED(status), status
    return os.WEXITSTATUS(status)


@pytest.mark.parametrize(("name", "args"), [
    ("mount", (0,)), ("clone3", (0, 0)), ("io_uring_setup", (1, 0)), ("unshare", (0x10000000,)), ("socket", (17, 3, 0)),
    ("socket", (2, 3, 0)), ("socket", (2, 1, 132)), ("ioctl", (0, 0x5412, 0)), ("ioctl", (0, 1 << 32 | 0x5412, 0)),
    ("personality", (0x400000,)), ("bpf", (0, 0, 0)), ("userfaultfd", (0,)), ("keyctl", (0,)),
    ("sched_setscheduler", (0, 1, 0)), ("prctl", (35, 1)), ("setns", (0, 0)), ("statmount", (0,)),
])
def test_the_kernel_gives_the_errno_that_the_simulator_gives(name, args):
    action = simulate(PROGRAM, X86_64[name], args)
    assert action & 0xFFFF0000 == RET_ERRNO
    assert errno_of(X86_64[name], args) == action & 0xFFFF


@pytest.mark.parametrize("number", [470, 500, 350])
def test_an_unknown_number_is_enosys(number):
    assert errno_of(number, ()) == errno.ENOSYS


def test_the_x32_numbering_kills():
    def action() -> int:
        install(PROGRAM)
        libc.syscall(ctypes.c_long(X32_BIT | X86_64["getpid"]))
        return 0

    status = in_child(action)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSYS


@pytest.mark.needs("gcc")
def test_the_32_bit_entry_kills(tmp_path):
    source = tmp_path / "a.c"
    source.write_text("int main(void) { int r;\n"
                      "__asm__ volatile(\"int $0x80\" : \"=a\"(r) : \"a\"(20) : \"memory\"); return r < 0; }\n")
    subprocess.run(["gcc", "-o", tmp_path / "a", source], check=True)
    done = subprocess.run([tmp_path / "a"], preexec_fn=lambda: install(PROGRAM), check=False)
    assert done.returncode == -signal.SIGSYS


def under_filter(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, preexec_fn=lambda: install(PROGRAM), input=stdin, capture_output=True, text=True,
                          timeout=120, check=False)


@pytest.mark.parametrize("code", [
    "import multiprocessing as m; print(m.Pool(2).map(abs, [-1]))",
    "import asyncio; print(asyncio.run(asyncio.sleep(0, [1])))",
    "import threading, queue; q = queue.Queue(); threading.Thread(target=q.put, args=([1],)).start(); print(q.get(timeout=20))",
    "import subprocess; print([len(subprocess.check_output(['true'])) + 1])",
    "import socket; a, b = socket.socketpair(); a.send(b'x'); print([len(b.recv(9))])",
    "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); print([1])",
    "import sqlite3; print([sqlite3.connect(':memory:').execute('select 1').fetchone()[0]])",
    "import os; fd = os.memfd_create('x'); print([os.write(fd, b'x')])",
    "import resource, signal, time; signal.setitimer(signal.ITIMER_REAL, 100); print([len(resource.getrusage(0)) - 15])",
    "import mmap; m = mmap.mmap(-1, 4096); m[0] = 1; print([m[0]])",
], ids=lambda code: code.split(";")[0])
def test_python_works(code):
    done = under_filter(sys.executable, "-c", code)
    assert (done.stdout, done.returncode) == ("[1]\n", 0), done.stderr


PROGRAMS = [
    ("node", ["-e", "new (require('worker_threads').Worker)('', {eval: true}).on('exit', c => console.log('ok', c))"], "ok 0"),
    ("java", ["-version"], ""),
    ("gdb", ["-batch", "-ex", "run", "/bin/true"], "exited normally"),
    ("strace", ["-f", "-o", "/dev/null", "sh", "-c", "echo ok"], "ok"),
    ("git", ["version"], "git version"),
    ("perl", ["-e", "print 'ok'"], "ok"),
    ("dpkg-query", ["-W", "-f", "ok", "dpkg"], "ok"),
    ("ip", ["-br", "addr"], "lo"),
    ("sh", ["-c", "mkfifo $0.f; (echo ok > $0.f &); cat $0.f; rm $0.f"], "ok"),
]


@pytest.mark.parametrize(("program", "args", "output"), PROGRAMS, ids=[p[0] for p in PROGRAMS])
def test_programs_work(program, args, output, tmp_path, monkeypatch):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    monkeypatch.chdir(tmp_path)
    done = under_filter(program, *args)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout


@pytest.mark.needs("gcc")
def test_compiling_and_threads_work(tmp_path):
    source = tmp_path / "a.c"
    source.write_text('#include <pthread.h>\n#include <stdio.h>\nstatic void *f(void *x) { return x; }\n'
                      'int main(void) { pthread_t t; if (pthread_create(&t, 0, f, 0)) return 1;\n'
                      'pthread_join(t, 0); puts("ok"); return 0; }\n')
    assert under_filter("gcc", "-pthread", "-o", str(tmp_path / "a"), str(source)).returncode == 0
    assert under_filter(str(tmp_path / "a")).stdout == "ok\n"


@pytest.mark.needs("seccomp_notify")
def test_at_level_cold_a_refused_call_reaches_the_listener_and_is_answered(tmp_path):
    """The listener's side as the holder plays it: read one notification, answer it with an errno."""
    silent, notify = build_exec_filter(DECIDED.silent), build_notify_filter(DECIDED.notify)
    ready_r, ready_w = os.pipe()
    target = str(tmp_path).encode()

    child = os.fork()
    if child == 0:
        code = 111
        try:
            listener = install(notify, 1 << 3)
            os.write(ready_w, struct.pack("=i", listener))
            install(silent)
            result = libc.mount(b"none", target, b"tmpfs", ctypes.c_ulong(0), None)
            code = ctypes.get_errno() if result < 0 else 0
        finally:
            os._exit(code)
    (number,) = struct.unpack("=i", os.read(ready_r, 4))
    pidfd = os.pidfd_open(child)
    words = [ctypes.c_long(word) for word in (X86_64["pidfd_getfd"], pidfd, number, 0)]
    listener = int(libc.syscall(*words))
    assert listener >= 0, os.strerror(ctypes.get_errno())
    # struct seccomp_notif: id, pid, flags, seccomp_data{nr, arch, ip, args[6]}; ioctls SECCOMP_IOCTL_NOTIF_RECV and _SEND
    request = ctypes.create_string_buffer(80)
    assert libc.ioctl(listener, ctypes.c_ulong(0xC0502100), request) == 0, os.strerror(ctypes.get_errno())
    cookie, _pid, _flags, nr = struct.unpack_from("=QIIi", request.raw)
    assert nr == X86_64["mount"]
    assert libc.ioctl(listener, ctypes.c_ulong(0xC0182101), struct.pack("=QqiI", cookie, 0, -errno.EPERM, 0)) == 0
    status = os.waitpid(child, 0)[1]
    for descriptor in (ready_r, ready_w, pidfd, listener):
        os.close(descriptor)
    assert os.WEXITSTATUS(status) == errno.EPERM
