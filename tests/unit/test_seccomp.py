"""Compiled seccomp programs: held against their specification, against libseccomp, and against known ways around."""

from __future__ import annotations

import errno
import json
import os
import random
import socket

import pytest

from dsec_guard.errors import PolicyError
from dsec_guard.host.seccomp import (
    ALL64,
    AUDIT_ARCH_I386,
    AUDIT_ARCH_X86_64,
    LOW32,
    RET_ALLOW,
    RET_ERRNO,
    RET_KILL_PROCESS,
    RET_USER_NOTIF,
    ArgTest,
    FilterSpec,
    Refusal,
    action_text,
    build_exec_filter,
    build_notify_filter,
    decode,
    simulate,
)
from dsec_guard.host.syscall_table import X32_BIT, X86_64, X86_64_NAMES
from dsec_guard.policy.profile import covers, decide, find_profile, load_floor, load_profile
from dsec_guard.policy.schema import Syscalls

EPERM = RET_ERRNO | errno.EPERM
ENOSYS = RET_ERRNO | errno.ENOSYS


def interesting(spec: FilterSpec, name: str) -> list[list[int]]:
    """Arguments on both sides of every rule of a call, with and without high bits, and some random ones."""
    tests = [t for r in spec.refuse if r.name == name for t in r.when]
    tests += [t for conj in spec.allow.get(name, ()) for t in conj]
    rows = [[0] * 6, [ALL64] * 6]
    for test in tests:
        for value in test.values:
            for near in (value, value ^ 1, value + 1, value | 1 << 32, value | 1 << 63, value ^ test.mask):
                row = [0] * 6
                row[test.arg] = near & ALL64
                rows.append(row)
    # Combinations: rules that look at two arguments.
    values = {t.arg: sorted({v for u in tests if u.arg == t.arg for v in u.values}) for t in tests}
    rng = random.Random(name)
    for _ in range(200 if tests else 1):
        row = [rng.choice([0, rng.getrandbits(8), rng.getrandbits(32), rng.getrandbits(64)]) for _ in range(6)]
        for arg, known in values.items():
            if rng.random() < 0.7:
                row[arg] = rng.choice(known)
        rows.append(row)
    return rows


def assert_program_says(program: bytes, spec: FilterSpec) -> None:
    for number in [*range(max(X86_64.values()) + 50), 1000, X32_BIT - 1]:
        name = X86_64_NAMES.get(number, "")
        for args in interesting(spec, name):
            got, want = simulate(program, number, args), spec.expected(number, args)
            assert got == want, f"{name or number} {[hex(a) for a in args]}: {action_text(got)}, want {action_text(want)}"


@pytest.fixture(scope="module")
def default():
    return decide(Syscalls())


@pytest.fixture(scope="module")
def program(default):
    return build_exec_filter(default.spec)


def call(program: bytes, name: str, *args: int) -> str:
    return action_text(simulate(program, X86_64[name], args))


def test_the_default_program_says_what_its_specification_says(default, program):
    assert_program_says(program, default.spec)


def test_the_first_instructions_test_architecture_and_x32_bit(program):
    first = decode(program)[:8]
    assert (first[0].code, first[0].operand) == (0x20, 4)  # load seccomp_data.arch
    assert first[1].operand == AUDIT_ARCH_X86_64
    assert (first[2].code, first[2].operand) == (0x06, RET_KILL_PROCESS)
    assert (first[3].code, first[3].operand) == (0x20, 0)  # load seccomp_data.nr
    assert first[4].operand == X32_BIT


@pytest.mark.parametrize("number", sorted(X86_64.values()))
def test_foreign_numberings_are_killed_whatever_the_number(program, number):
    assert simulate(program, number, arch=AUDIT_ARCH_I386) == RET_KILL_PROCESS
    assert simulate(program, number | X32_BIT) == RET_KILL_PROCESS
    assert simulate(program, number | 1 << 31) == RET_KILL_PROCESS


def test_a_call_skipped_by_a_tracer_is_no_call(program):
    assert simulate(program, LOW32) == RET_ALLOW


@pytest.mark.parametrize("number", [337, 423, 470, 500, 1023, 1 << 20])
def test_numbers_nobody_knows_are_enosys(program, number):
    assert simulate(program, number) == ENOSYS


@pytest.mark.parametrize("name", [
    "mount", "umount2", "pivot_root", "chroot", "setns", "open_by_handle_at", "init_module", "finit_module", "kexec_load", "bpf",
    "perf_event_open", "userfaultfd", "keyctl", "add_key", "request_key", "pidfd_getfd", "process_vm_writev", "kcmp", "iopl",
    "syslog",
    "clock_settime", "swapon", "reboot", "fsopen", "move_mount", "open_tree", "mount_setattr", "quotactl", "acct", "sethostname",
])
def test_what_acts_on_the_host_is_eperm(program, name):
    assert call(program, name) == "errno EPERM"


@pytest.mark.parametrize("name", ["clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "statmount"])
def test_what_programs_fall_back_from_is_enosys(program, name):
    assert call(program, name) == "errno ENOSYS"


@pytest.mark.parametrize("name", [
    "read", "openat", "execve", "fork", "vfork", "futex", "ptrace", "seccomp", "landlock_restrict_self", "memfd_create", "rseq",
    "clone", "unshare", "mmap", "mseal", "fchmodat2", "epoll_pwait2", "prlimit64", "setuid", "capset", "name_to_handle_at",
])
def test_ordinary_work_is_allowed(program, name):
    assert call(program, name) == "allow"


@pytest.mark.parametrize(("name", "args", "verdict"), [
    ("clone", (0x11,), "allow"),                                   # fork
    ("clone", (0x3D0F00,), "allow"),                               # a thread of the C library
    ("clone", (0x10000011,), "errno EPERM"),                       # CLONE_NEWUSER
    ("clone", (0x20011,), "errno EPERM"),                          # CLONE_NEWNS
    ("clone", (1 << 63 | 0x40000011,), "errno EPERM"),             # CLONE_NEWNET behind a high bit
    ("unshare", (0x400,), "allow"),                                # CLONE_FILES
    ("unshare", (0x80,), "errno EPERM"),                           # CLONE_NEWTIME
    ("socket", (1, 1, 0), "allow"),
    ("socket", (2, 1 | 0x80800, 6), "allow"),                      # CLOEXEC and NONBLOCK
    ("socket", (10, 2, 17), "allow"),
    ("socket", (2, 2, 1), "allow"),                                # ping
    ("socket", (16, 3, 0), "allow"),                               # route netlink is a raw socket
    ("socket", (16, 3, 15), "errno EPROTONOSUPPORT"),              # udev events
    ("socket", (16, 3, 1 << 32), "allow"),                         # the kernel reads an int: this is route netlink
    ("socket", (2, 3, 0), "errno EPERM"),
    ("socket", (2, 3 | 0x80000, 255), "errno EPERM"),
    ("socket", (10, 10, 0), "errno EPERM"),                        # SOCK_PACKET
    ("socket", (2, 1, 132), "errno EPROTONOSUPPORT"),              # SCTP
    ("socket", (17, 3, 0), "errno EAFNOSUPPORT"),                  # packet
    ("socket", (40, 1, 0), "errno EAFNOSUPPORT"),                  # vsock
    ("socket", (1 << 32 | 40, 1, 0), "errno EAFNOSUPPORT"),
    ("socket", (38, 5, 0), "errno EAFNOSUPPORT"),                  # alg
    ("socketpair", (1, 1, 0), "allow"),
    ("socketpair", (30, 1, 0), "errno EAFNOSUPPORT"),              # tipc
    ("ioctl", (0, 0x5401), "allow"),                               # TCGETS
    ("ioctl", (0, 0x5412), "errno EPERM"),                         # TIOCSTI
    ("ioctl", (0, 1 << 32 | 0x5412), "errno EPERM"),               # the way around a 64-bit comparison
    ("ioctl", (0, 0xFFFFFFFF00005412), "errno EPERM"),
    ("ioctl", (0, 0x541C), "errno EPERM"),                         # TIOCLINUX
    ("ioctl", (0, 0xC0045877), "errno EPERM"),                     # FIFREEZE
    ("ioctl", (0, 0xC0C0586D), "errno EPERM"),                     # XFS_IOC_SWAPEXT
    ("ioctl", (0, 0x801C581F), "allow"),                           # FS_IOC_FSGETXATTR
    ("ioctl", (0, 0x6611), "errno EPERM"),                         # EXT4_IOC_SWAP_BOOT
    ("ioctl", (0, 0x80086601), "allow"),                           # FS_IOC_GETFLAGS
    ("ioctl", (0, 0x40049409), "allow"),                           # FICLONE
    ("ioctl", (0, 0x5000940E), "errno EPERM"),                     # BTRFS_IOC_SUBVOL_CREATE
    ("mknodat", (0, 0, 0o020644, 0x0103), "errno EPERM"),          # a character device
    ("mknodat", (0, 0, 0o060644, 0x0801), "errno EPERM"),          # a block device
    ("mknodat", (0, 0, 0o010644, 0), "allow"),                     # a fifo
    ("mknod", (0, 0o060644), "errno EPERM"),
    ("personality", (0xFFFFFFFF,), "allow"),
    ("personality", (0x40000,), "allow"),
    ("personality", (0x400000,), "errno EPERM"),                   # READ_IMPLIES_EXEC
    ("sched_setscheduler", (0, 0), "allow"),
    ("sched_setscheduler", (0, 1), "errno EPERM"),                 # SCHED_FIFO
    ("sched_setscheduler", (0, 0x40000002), "errno EPERM"),        # SCHED_RR | RESET_ON_FORK
    ("prctl", (35,), "errno EPERM"),                               # PR_SET_MM
    ("prctl", (38,), "allow"),                                     # PR_SET_NO_NEW_PRIVS
    ("seccomp", (1, 0, 0), "allow"),
    ("seccomp", (1, 8, 0), "errno EBUSY"),                         # NEW_LISTENER
])
def test_arguments_decide(program, name, args, verdict):
    assert call(program, name, *args) == verdict


def test_a_policy_adds_refusals_and_they_win():
    rules = [{"name": "socket", "errno": "EACCES"}, {"name": "mount", "errno": "ENOSYS"}]
    decided = decide(Syscalls.model_validate({"deny": rules}))
    denied = build_exec_filter(decided.spec)
    assert call(denied, "socket", 1, 1, 0) == call(denied, "socket", 17, 3, 0) == "errno EACCES"
    assert call(denied, "mount") == "errno ENOSYS"
    assert_program_says(denied, decided.spec)


def test_allowing_cannot_lift_the_floor():
    decided = decide(Syscalls(allow=("mount", "vserver")))
    allowed = build_exec_filter(decided.spec)
    assert call(allowed, "mount") == "errno EPERM"
    assert call(allowed, "vserver") == "allow"


def test_io_uring_is_one_switch():
    switched = build_exec_filter(decide(Syscalls(io_uring=True)).spec)
    assert {call(switched, n) for n in ("io_uring_setup", "io_uring_enter", "io_uring_register")} == {"allow"}


def test_at_level_cold_each_refusal_is_an_errno_or_a_notification(default):
    silent, notify = build_exec_filter(default.silent), build_notify_filter(default.notify)
    assert_program_says(silent, default.silent)
    for number in range(max(X86_64.values()) + 20):
        for args in interesting(default.spec, X86_64_NAMES.get(number, "")):
            plain = default.spec.expected(number, args)
            pair = (simulate(silent, number, args), simulate(notify, number, args))
            # The kernel takes the stricter answer of the two, and an errno is stricter than a notification. Where two
            # rules of one call apply, the errno may be the other rule's; it stays refused.
            if plain == RET_ALLOW:
                assert pair == (RET_ALLOW, RET_ALLOW)
            else:
                assert pair == (RET_ALLOW, RET_USER_NOTIF) or pair[0] & 0xFFFF0000 == RET_ERRNO
    assert simulate(notify, X86_64["mount"]) == RET_USER_NOTIF
    assert simulate(notify, X86_64["clone3"]) == RET_ALLOW
    assert simulate(notify, 272 | X32_BIT) == RET_KILL_PROCESS
    assert build_notify_filter(()) == b""


def test_every_call_of_the_floor_has_a_reason():
    assert [r.name for r in load_floor().refuse if not r.because] == []


# ------------------------------------------------------------------------------------------------- the compiler itself


@pytest.mark.parametrize("test", [
    ArgTest(0, (1, 5, 9)), ArgTest(2, (1, 5), inside=False), ArgTest(1, (0x20,), 0x60), ArgTest(1, (0,), 0xF0, inside=False),
    ArgTest(3, (7,), ALL64), ArgTest(3, (7 << 32 | 5,), ALL64, inside=False), ArgTest(3, (1 << 40,), 1 << 40),
    ArgTest(3, (1 << 40,), 1 << 40, inside=False), ArgTest(5, (1 << 40 | 2,), 1 << 40 | 3),
], ids=repr)
def test_each_form_of_test_is_compiled_right(test):
    spec = FilterSpec({"getpid": ((test,),), "read": ()},
                      (Refusal("read", errno.EIO, (test,)), Refusal("read", errno.EPIPE, (test, ArgTest(4, (1,))))))
    compiled = build_exec_filter(spec)
    for name in ("getpid", "read"):
        for args in interesting(spec, name):
            assert simulate(compiled, X86_64[name], args) == spec.expected(X86_64[name], args), args


def test_far_subtrees_are_reached():
    # Every other call: as many ranges as there can be, and left subtrees longer than a conditional jump.
    names = [n for i, n in enumerate(sorted(X86_64, key=X86_64.__getitem__)) if i % 2]
    spec = FilterSpec(dict.fromkeys(names, ()))
    assert_program_says(build_exec_filter(spec), spec)


@pytest.mark.parametrize("bad", [
    lambda: ArgTest(6, (0,)), lambda: ArgTest(0, ()), lambda: ArgTest(0, (2,), 1), lambda: ArgTest(0, (1, 2), ALL64),
    lambda: ArgTest(0, tuple(range(65))), lambda: build_exec_filter(FilterSpec({"no_such_call": ()})),
])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=r"range|values|mask|no system call"):
        bad()


@pytest.mark.parametrize("program", [b"\0" * 7, b"", b"\xff" * 8], ids=["short", "empty", "unknown"])
def test_the_simulator_refuses_what_the_kernel_would(program):
    with pytest.raises(ValueError, match=r"multiple of 8|without a verdict|is not one of"):
        simulate(program, 0)


def libseccomp_program(default_action: int, rules: list[tuple[int, int, list[tuple[int, int, int]]]]) -> bytes:
    """A program of libseccomp's own; rules: (action, number, [(arg, mask, value)])."""
    pyseccomp = pytest.importorskip("pyseccomp")
    made = pyseccomp.SyscallFilter(default_action)
    made.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    for action, number, tests in rules:
        made.add_rule_exactly(action, number, *(pyseccomp.Arg(a, pyseccomp.MASKED_EQ, m, v) for a, m, v in tests))
    with os.fdopen(os.memfd_create("program"), "w+b") as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()


def test_libseccomp_gives_the_same_allow_list(default):
    plain = FilterSpec(dict.fromkeys(default.spec.allow, ()))
    ours = build_exec_filter(plain)
    theirs = libseccomp_program(EPERM, [(RET_ALLOW, X86_64[name], []) for name in plain.allow])
    for number in [*X86_64.values(), X32_BIT | 1, X32_BIT | 272]:
        assert simulate(ours, number) == simulate(theirs, number), X86_64_NAMES.get(number, number)
    assert simulate(ours, 1, arch=AUDIT_ARCH_I386) == simulate(theirs, 1, arch=AUDIT_ARCH_I386) == RET_KILL_PROCESS


def test_libseccomp_gives_the_same_refusals_by_argument(default):
    refusals = [r for r in default.spec.refuse if len(r.when) == 1 and r.when[0].inside]
    assert len(refusals) >= 4
    for refusal in refusals:
        (test,) = refusal.when
        spec = FilterSpec(dict.fromkeys(X86_64, ()), (refusal,))
        ours = build_exec_filter(spec)
        rules = [(RET_ERRNO | refusal.errno, X86_64[refusal.name], [(test.arg, test.mask, v)]) for v in test.values]
        theirs = libseccomp_program(RET_ALLOW, rules)
        for args in interesting(spec, refusal.name):
            assert simulate(ours, X86_64[refusal.name], args) == simulate(theirs, X86_64[refusal.name], args), (refusal, args)


# -------------------------------------------------------------------------------------------------- Docker, OCI profiles


def oci(tmp_path, **content):
    path = tmp_path / "oci.json"
    path.write_text(json.dumps(content))
    return find_profile(str(path), None)


def test_a_docker_profile_is_taken_within_the_floor(tmp_path):
    name = oci(tmp_path, defaultAction="SCMP_ACT_ERRNO", defaultErrnoRet=38, architectures=["SCMP_ARCH_X86_64"], syscalls=[
        {"names": ["read", "write", "mount", "clone", "arm_fadvise64_64"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_NE"}]},
        {"names": ["getpriority"], "action": "SCMP_ACT_ALLOW",
         "args": [{"index": 0, "value": 0xF0, "valueTwo": 0x10, "op": "SCMP_CMP_MASKED_EQ"}]},
        {"names": ["bpf", "syslog"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["s390_pci_mmio_read"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
    ])
    decided = decide(Syscalls(profile=name))
    made = build_exec_filter(decided.spec)
    assert_program_says(made, decided.spec)
    assert call(made, "read") == "allow"
    assert call(made, "mount") == "errno EPERM"                      # the floor
    assert call(made, "clone", 0x10000000) == "errno EPERM"          # the floor, by argument
    assert call(made, "clone3") == "errno ENOSYS"                    # the floor's number
    assert call(made, "getpid") == "errno ENOSYS"                    # the profile's default
    assert [call(made, "personality", p) for p in (0, 8, 9)] == ["allow", "allow", "errno ENOSYS"]
    assert call(made, "socket", 40, 1) == "errno EAFNOSUPPORT"
    assert call(made, "socket", 1, 1) == "allow"
    assert [call(made, "getpriority", v) for v in (0x10, 0x1F, 0x20)] == ["allow", "allow", "errno ENOSYS"]
    assert call(made, "syslog") == "errno EPERM"
    assert any("CAP_SYS_ADMIN" in note for note in decided.notes)
    assert any("arm_fadvise64_64" in note for note in decided.notes)


def test_a_profile_that_allows_by_default_is_bound_by_the_floor_too(tmp_path):
    name = oci(tmp_path, defaultAction="SCMP_ACT_ALLOW", syscalls=[
        {"names": ["ptrace"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13},
        {"names": ["kill"], "action": "SCMP_ACT_KILL", "args": [{"index": 1, "value": 9, "op": "SCMP_CMP_EQ"}]}])
    made = build_exec_filter(decide(Syscalls(profile=name)).spec)
    assert call(made, "ptrace") == "errno EACCES"
    assert [call(made, "kill", 1, s) for s in (9, 15)] == ["errno EPERM", "allow"]
    assert call(made, "vserver") == "allow"
    assert call(made, "mount") == "errno EPERM"
    assert simulate(made, 480) == ENOSYS


@pytest.mark.parametrize(("content", "expected"), [
    ({"defaultAction": "SCMP_ACT_NOTIFY"}, "action 'SCMP_ACT_NOTIFY' is not supported"),
    ({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW",
      "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_GE"}]}]}, "comparison 'SCMP_CMP_GE' is not supported"),
    ({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW",
      "args": [{"index": 9, "value": 1, "op": "SCMP_CMP_EQ"}]}]}, "index 9"),
    ({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": 5}, "an OCI seccomp profile"),
])
def test_an_oci_profile_that_cannot_be_honoured_is_refused(tmp_path, content, expected):
    with pytest.raises(ValueError, match=r"oci\.json") as caught:
        oci(tmp_path, **content)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("text", "expected"), [
    ("schema: dsec-guard/syscalls/v1\nallow: [raed]\n", "raed: no such system call"),
    ("schema: dsec-guard/syscalls/v1\nalow: [read]\n", "alow: unknown key"),
    ("allow: [read]\n", "schema: None is not known"),
    ("schema: dsec-guard/syscalls/v1\nrefuse: [{name: read, arg: 7, is: [1]}]\n", "out of range"),
    ("schema: dsec-guard/syscalls/v1\nrefuse: [{name: read, argument: 7}]\n", "argument: no key"),
    ("- x\n", "holds no mapping"),
    ("a: [", "is neither YAML nor JSON"),
])
def test_a_profile_with_a_mistake_is_refused(tmp_path, text, expected):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"p\.yaml") as caught:
        load_profile(str(path))
    assert expected in caught.value.problems[0]


def test_covering_is_decided_by_names_and_conditions(tmp_path):
    def profile(name, text):
        path = tmp_path / f"{name}.yaml"
        path.write_text("schema: dsec-guard/syscalls/v1\n" + text)
        return str(path)

    few = profile("few", "allow: [read, write]\n")
    many = profile("many", "allow: [read, write, ptrace]\n")
    careful = profile("careful", "allow: [read, write]\nrefuse: [{name: read, arg: 0, is: [9]}]\n")
    assert covers(many, few)
    assert not covers(few, many)
    assert covers(few, careful)
    assert not covers(careful, few)
    assert covers("default", few)


def test_the_families_are_what_python_calls_them():
    assert (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK) == (1, 2, 10, 16)
