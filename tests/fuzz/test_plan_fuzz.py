"""Mutated plans and messages: the launcher answers each with an error by name and never crashes.

The cgroup descriptor is /dev/null, so that a plan which passes every check still fails at clone3 and builds nothing.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsec_guard.sandbox import plan
from dsec_guard.sandbox.spec import LandlockRule, LandlockSpec, MountFlag, OpKind, Rlimit, RootOp, SpawnSpec

NATIVE = Path(__file__).resolve().parents[2] / "dsec_guard/_native"

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.skipif(not (NATIVE / "dg-launcher").exists(), reason="dg-launcher is not built"),
]

LAUNCH_S = 10.0


def a_plan() -> bytes:
    """One of everything, so that each kind of span is there to be mutated."""
    rules = LandlockSpec(handled_fs=7, handled_net=3, scoped=3, rules=(LandlockRule("/usr", 5),), ports=((443, 2),))
    return plan.pack_plan(SpawnSpec(
        name="box", hostname="sandbox", base_uid=1 << 20, cgroup_fd=1, userns_fd=1, owner_map_fd=1, v1_tasks_fds=(1, 1),
        ops=(RootOp(OpKind.DIR, "etc/x"), RootOp(OpKind.FILE, "etc/hosts", content=b"abc"),
             RootOp(OpKind.BIND, "usr", source="/usr", flags=MountFlag.RO), RootOp(OpKind.TREE, "opt", fd=1),
             RootOp(OpKind.STORE, "tmp", source="tmp"), RootOp(OpKind.OVERLAY, "w", source="/usr", name="w"),
             RootOp(OpKind.TMPFS, "shm", size_bytes=1, inodes=1), RootOp(OpKind.SYMLINK, "bin", source="usr/bin")),
        store_bytes=1 << 20, store_inodes=100, notify_filter=bytes(16), exec_filters=(bytes(8), b""),
        landlock=(None, rules), rlimits=(Rlimit(7, 1, 2),), check_syscalls=((1, 2),),
    )).data


PLAN = a_plan()


class Target:
    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen([NATIVE / "dg-launcher", "--socket", str(theirs.fileno())],
                                        pass_fds=[theirs.fileno()])
        theirs.close()
        self.sock.settimeout(LAUNCH_S)
        self.null = os.open("/dev/null", os.O_RDWR)

    def ask(self, message: bytes, data: bytes | None, fds: int) -> dict[str, object]:
        descriptors = [self.null] * fds
        if data is not None:
            descriptors.insert(0, plan.sealed_memfd(data, "fuzz"))
        try:
            socket.send_fds(self.sock, [message], descriptors)
            raw = self.sock.recv(65536)
        finally:
            if data is not None:
                os.close(descriptors[0])
        assert len(raw) == plan.ANSWER.size
        return plan.ANSWER.unpack(raw)

    def close(self) -> None:
        self.sock.close()
        os.close(self.null)
        assert self.process.wait(LAUNCH_S) == 0


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


def step_of(answer: dict[str, object]) -> str:
    step = answer["step"]
    assert isinstance(step, bytes)
    return step.rstrip(b"\0").decode()


def test_the_unchanged_plan_passes_every_check_and_stops_at_clone(target):
    assert step_of(target.ask(plan.pack_request(plan.REQ_SPAWN), PLAN, 8)) == "clone"


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Words of the plan replaced by what overflows additions and points just past the end, then perhaps cut."""
    data = bytearray(PLAN)
    words = st.one_of(st.integers(0, 64), st.sampled_from([len(PLAN) - 1, len(PLAN), 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFF8]),
                      st.integers(0, 0xFFFFFFFF))
    for _ in range(draw(st.integers(1, 6))):
        struct.pack_into("<I", data, draw(st.integers(0, (len(data) - 4) // 4)) * 4, draw(words))
    if draw(st.booleans()):
        del data[draw(st.integers(1, len(data))):]
        if draw(st.booleans()) and len(data) >= 12:
            struct.pack_into("<I", data, 8, len(data))
    return bytes(data)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(), fds=st.integers(0, 10))
@example(data=PLAN[:-1], fds=8)
@example(data=b"\0", fds=0)
def test_a_mutated_plan_is_answered_by_name(target, data, fds):
    answer = target.ask(plan.pack_request(plan.REQ_SPAWN), data, fds)
    assert answer["kind"] == plan.ANS_ERROR
    assert step_of(answer) in ("check_plan", "clone")
    assert answer["errnum"] != 0
    assert target.process.poll() is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.binary(min_size=1, max_size=200) | st.binary(min_size=plan.REQUEST.size, max_size=plan.REQUEST.size),
       fds=st.integers(0, 5))
def test_any_message_is_answered_by_name(target, message, fds):
    answer = target.ask(message, None, fds)
    assert (answer["kind"], step_of(answer)) == (plan.ANS_ERROR, "request")
    assert target.process.poll() is None


def test_descriptors_of_refused_requests_are_closed(target):
    before = len(os.listdir(f"/proc/{target.process.pid}/fd"))
    for _ in range(50):
        target.ask(b"x", None, 5)
        target.ask(plan.pack_request(plan.REQ_SPAWN), b"x", 5)
    deadline = time.monotonic() + LAUNCH_S  # the answer comes before the last ones are closed
    while len(os.listdir(f"/proc/{target.process.pid}/fd")) != before:
        assert time.monotonic() < deadline
