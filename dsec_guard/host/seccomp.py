"""seccomp programs: compiled here from a specification, and read back by a simulator.

A program tests the architecture and the x32 bit first, then walks a binary tree over ranges of call numbers. A leaf is
a verdict, or the block of one call whose arguments decide. Arguments are compared in the low 32 bits under a mask where
the kernel reads them as int: a comparison of all 64 bits would be passed by setting a high bit.

Why not libseccomp: for the default profile it makes 1,636 instructions, which take 0.5 ms to install with every exec;
this makes a quarter of them (docs/decisions/0005-own-seccomp-compiler.md). `FilterSpec.expected` says in plain Python
what a program has to answer, `simulate` interprets a program as the kernel would, and the tests hold one against the other
and both against libseccomp.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsec_guard.errors import HostError
from dsec_guard.host.syscall_table import X32_BIT, X86_64, X86_64_NAMES

AUDIT_ARCH_X86_64 = 0xC000003E  # linux/audit.h: EM_X86_64 | 64-bit | little endian
AUDIT_ARCH_I386 = 0x40000003

RET_KILL_PROCESS = 0x80000000  # linux/seccomp.h
RET_ERRNO = 0x00050000
RET_USER_NOTIF = 0x7FC00000
RET_ALLOW = 0x7FFF0000

LOW32 = 0xFFFFFFFF
ALL64 = (1 << 64) - 1
MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS, linux/bpf_common.h
MAX_VALUES = 64          # of one test: the jumps past them have 8 bits

#: io_uring is one switch of the policy; clone3 hides its flags in memory, where no filter can look.
IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")


@dataclass(frozen=True)
class ArgTest:
    """Whether `args[arg] & mask` is one of `values` (or none of them, when not `inside`).

    A mask that reaches above 32 bits takes exactly one value. Raises ValueError otherwise, and for values outside the mask.
    """

    arg: int
    values: tuple[int, ...]
    mask: int = LOW32
    inside: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.arg <= 5 or not 0 < self.mask <= ALL64:
            raise ValueError(f"arg {self.arg} or mask {self.mask:#x} is out of range: arg 0..5, mask of 64 bits")
        if not 0 < len(self.values) <= (1 if self.mask > LOW32 else MAX_VALUES):
            raise ValueError(f"{len(self.values)} values: 1 to {MAX_VALUES}, and 1 under a mask of more than 32 bits")
        if any(value & ~self.mask for value in self.values):
            raise ValueError(f"one of {[hex(v) for v in self.values]} has bits outside the mask {self.mask:#x}")

    def holds(self, args: Sequence[int]) -> bool:
        return (args[self.arg] & self.mask in self.values) == self.inside


#: All tests hold; () always does.
Conjunction = tuple[ArgTest, ...]


@dataclass(frozen=True)
class Refusal:
    """Refuse `name` with `errno` when all of `when` holds (always, when it is empty).

    notify: worth a notification at level cold, because it is refused anyway and honest programs rarely try it.
    """

    name: str
    errno: int
    when: Conjunction = ()
    notify: bool = False
    because: str = ""

    def applies(self, args: Sequence[int]) -> bool:
        return all(test.holds(args) for test in self.when)


@dataclass(frozen=True)
class FilterSpec:
    """What a filter has to say. allow: name -> conjunctions one of which must hold (none: always). Anything not in
    `allow` gets `default_errno`, a number no table knows ENOSYS. `refuse` wins over `allow`, its first match decides."""

    allow: Mapping[str, tuple[Conjunction, ...]]
    refuse: tuple[Refusal, ...] = ()
    default_errno: int = errno.EPERM

    def expected(self, number: int, args: Sequence[int], arch: int = AUDIT_ARCH_X86_64) -> int:
        """The action that a program built from this has to return: the specification that tests compare with."""
        if arch != AUDIT_ARCH_X86_64:
            return RET_KILL_PROCESS
        if number == LOW32:
            return RET_ALLOW
        if number >= X32_BIT:
            return RET_KILL_PROCESS
        name = X86_64_NAMES.get(number)
        if name is None:
            return RET_ERRNO | errno.ENOSYS
        for refusal in self.refuse:
            if refusal.name == name and refusal.applies(args):
                return RET_ERRNO | refusal.errno
        alternatives = self.allow.get(name)
        if alternatives is None:
            return RET_ERRNO | self.default_errno
        if not alternatives or any(all(test.holds(args) for test in conj) for conj in alternatives):
            return RET_ALLOW
        return RET_ERRNO | self.default_errno


# ---------------------------------------------------------------------------------------------------------- building

_LD_W_ABS = 0x20
_JMP_JA, _JMP_JEQ, _JMP_JGT, _JMP_JGE, _JMP_JSET = 0x05, 0x15, 0x25, 0x35, 0x45
_ALU_AND = 0x54
_RET = 0x06

_NR, _ARCH, _ARGS = 0, 4, 16  # offsetof(struct seccomp_data, ...)
_INSN = struct.Struct("=HBBI")
_FAR = 255  # the longest conditional jump

_Insn = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def build_exec_filter(spec: FilterSpec) -> bytes:
    """The program that an exec gets, as an array of `struct sock_filter`.

    Raises: ValueError for a name that the table lacks, HostError when it outgrows what the kernel takes.
    """
    _check_names([*spec.allow, *(r.name for r in spec.refuse)])
    verdicts: dict[int, list[_Insn]] = {}
    for name, number in X86_64.items():
        refusals = [r for r in spec.refuse if r.name == name]
        block = [insn for r in refusals for insn in _guarded(r.when, RET_ERRNO | r.errno)]
        if not any(not r.when for r in refusals):
            block += _allowance(spec.allow.get(name), spec.default_errno)
        verdicts[number] = block
    return _pack([*_prologue(), *_tree(_ranges(verdicts, unknown=RET_ERRNO | errno.ENOSYS))])


def build_notify_filter(refusals: Sequence[Refusal]) -> bytes:
    """The program of level cold, installed once per box: every call that a refusal covers goes to the listener.

    The exec filter has to let these calls through (the stricter of two filters wins, and an errno is stricter than a
    notification); the listener answers each with an error and never continues one, so none of them is ever made. When
    the listener is gone the kernel answers ENOSYS. Returns b"" when there is nothing to notify.
    """
    if not refusals:
        return b""
    _check_names([r.name for r in refusals])
    verdicts: dict[int, list[_Insn]] = {}
    for refusal in refusals:
        block = verdicts.setdefault(X86_64[refusal.name], [])
        block += _guarded(refusal.when, RET_USER_NOTIF)
    for block in verdicts.values():
        block.append((_RET, 0, 0, RET_ALLOW))
    return _pack([*_prologue(), *_tree(_ranges(verdicts, unknown=RET_ALLOW))])


def _check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in X86_64]
    if unknown:
        raise ValueError(f"no system call is called {', '.join(unknown)}")


def _prologue() -> list[_Insn]:
    """Architecture and x32 bit. -1 is what a tracer leaves to skip a call: the kernel makes none."""
    return [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JMP_JEQ, 1, 0, AUDIT_ARCH_X86_64),
        (_RET, 0, 0, RET_KILL_PROCESS),
        (_LD_W_ABS, 0, 0, _NR),
        (_JMP_JGE, 0, 3, X32_BIT),
        (_JMP_JEQ, 0, 1, LOW32),
        (_RET, 0, 0, RET_ALLOW),
        (_RET, 0, 0, RET_KILL_PROCESS),
    ]


def _ranges(verdicts: Mapping[int, list[_Insn]], *, unknown: int) -> list[tuple[int, list[_Insn]]]:
    """(first number, what to do), ascending; neighbours that do the same are one range."""
    nothing: list[_Insn] = [(_RET, 0, 0, unknown)]
    result: list[tuple[int, list[_Insn]]] = []
    for number in range(max(verdicts) + 2):
        block = verdicts.get(number, nothing)
        if not result or result[-1][1] != block:
            result.append((number, block))
    return result


def _tree(ranges: Sequence[tuple[int, list[_Insn]]]) -> list[_Insn]:
    """A binary search over ranges, with the number in the accumulator."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    left, right = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(left) <= _FAR:
        return [(_JMP_JGE, len(left), 0, ranges[middle][0]), *left, *right]
    return [(_JMP_JGE, 0, 1, ranges[middle][0]), (_JMP_JA, 0, 0, len(left)), *left, *right]


def _guarded(when: Conjunction, action: int) -> list[_Insn]:
    """Return `action` when all tests hold, else fall out of the end."""
    block: list[_Insn] = [(_RET, 0, 0, action)]
    for test in reversed(when):
        block = [*_test(test, len(block)), *block]
    return block


def _allowance(alternatives: Sequence[Conjunction] | None, default_errno: int) -> list[_Insn]:
    refused: _Insn = (_RET, 0, 0, RET_ERRNO | default_errno)
    if alternatives is None:
        return [refused]
    if not alternatives:
        return [(_RET, 0, 0, RET_ALLOW)]
    return [*(insn for conj in alternatives for insn in _guarded(conj, RET_ALLOW)), refused]


def _test(test: ArgTest, size: int) -> list[_Insn]:
    """Fall into the next `size` instructions when the test holds, else jump over them."""
    low, high = test.mask & LOW32, test.mask >> 32
    if not high:
        return _word_test(test.arg, 0, low, [v & LOW32 for v in test.values], test.inside, size)
    (value,) = test.values
    if test.inside:  # both halves match
        second = _word_test(test.arg, 0, low, [value & LOW32], True, size) if low else []
        return [*_word_test(test.arg, 4, high, [value >> 32], True, size + len(second)), *second]
    # One half differs: when the high one does, skip the test of the low one.
    second = _word_test(test.arg, 0, low, [value & LOW32], False, size) if low else [(_JMP_JA, 0, 0, size)]
    return [*_word_test(test.arg, 4, high, [value >> 32], True, len(second)), *second]


def _word_test(arg: int, offset: int, mask: int, values: Sequence[int], inside: bool, size: int) -> list[_Insn]:
    load: list[_Insn] = [(_LD_W_ABS, 0, 0, _ARGS + 8 * arg + offset)]  # little endian: the low word first
    if mask != LOW32:
        load.append((_ALU_AND, 0, 0, mask))
    last = len(values) - 1
    if size + last > _FAR:
        raise HostError("a seccomp rule of this policy is too long", feature="seccomp", hint="list fewer values in the profile")
    if inside:
        return [*load, *((_JMP_JEQ, last - i, 0 if i < last else size, value) for i, value in enumerate(values))]
    return [*load, *((_JMP_JEQ, size + last - i, 0, value) for i, value in enumerate(values))]


def _pack(program: Sequence[_Insn]) -> bytes:
    if len(program) > MAX_INSTRUCTIONS:
        raise HostError(f"the seccomp program has {len(program)} instructions, the kernel takes {MAX_INSTRUCTIONS}",
                        feature="seccomp", hint="use fewer argument rules in the profile")
    return b"".join(_INSN.pack(*insn) for insn in program)


# --------------------------------------------------------------------------------------------------------- simulating


@dataclass(frozen=True)
class Instruction:
    code: int
    jump_true: int
    jump_false: int
    operand: int


def decode(program: bytes) -> tuple[Instruction, ...]:
    """The instructions of an exported program. Raises ValueError when its length is no multiple of 8."""
    if len(program) % _INSN.size:
        raise ValueError("a seccomp program is a multiple of 8 bytes")
    return tuple(Instruction(*insn) for insn in _INSN.iter_unpack(program))


def simulate(program: bytes, nr: int, args: Sequence[int] = (), *, arch: int = AUDIT_ARCH_X86_64) -> int:
    """The 32-bit action that the kernel would take for one call; missing arguments are 0.

    Raises ValueError for an instruction that seccomp would not accept, or a program that does not return.
    Source: kernel/seccomp.c, seccomp_check_filter; net/core/filter.c for what each instruction does.
    """
    values = [*args, *([0] * (6 - len(args)))]
    data = struct.pack("=IIQ6Q", nr & LOW32, arch, 0, *(v & (1 << 64) - 1 for v in values))
    instructions = decode(program)
    accumulator = at = 0
    while at < len(instructions):
        insn = instructions[at]
        at += 1
        if insn.code == _LD_W_ABS:
            if insn.operand % 4 or insn.operand + 4 > len(data):
                raise ValueError(f"load from offset {insn.operand}")
            (accumulator,) = struct.unpack_from("=I", data, insn.operand)
        elif insn.code == _ALU_AND:
            accumulator &= insn.operand
        elif insn.code == _JMP_JA:
            at += insn.operand
        elif insn.code in _COMPARE:
            at += insn.jump_true if _COMPARE[insn.code](accumulator, insn.operand) else insn.jump_false
        elif insn.code == _RET:
            return insn.operand
        else:
            raise ValueError(f"instruction {insn.code:#x} is not one of a seccomp program's")
    raise ValueError("the program ends without a verdict")


_COMPARE: Mapping[int, Callable[[int, int], bool]] = {
    _JMP_JEQ: lambda a, k: a == k,
    _JMP_JGT: lambda a, k: a > k,
    _JMP_JGE: lambda a, k: a >= k,
    _JMP_JSET: lambda a, k: bool(a & k),
}


def action_text(action: int) -> str:
    """`allow`, `kill`, `notify` or `errno EPERM`."""
    if action == RET_ALLOW:
        return "allow"
    if action == RET_USER_NOTIF:
        return "notify"
    if action & 0xFFFF0000 == RET_ERRNO:
        return f"errno {errno.errorcode.get(action & 0xFFFF, str(action & 0xFFFF))}"
    return "kill" if action == RET_KILL_PROCESS else f"action {action:#x}"
