"""The rule language: Falco's nouns (list, macro, rule) in YAML, conditions compiled to closures, never evaluated as code.

    condition := and_part ("or" and_part)*
    and_part  := unary ("and" unary)*
    unary     := "not" unary | "(" condition ")" | MACRO | FIELD | FIELD "exists" | FIELD OP value
    OP        := = != < <= > >= in startswith endswith contains glob pmatch has
    value     := WORD | "text" | 'text' | NUMBER | FIELD | "(" item ("," item)* ")"       an item may be a list's name

On a field of several texts (`proc.argv`) an operator holds when it holds for one of them. `pmatch`: equal to or below
one of the paths. `has`: at least one of the bits. `exists`: not empty and not zero. Every field has a type and the
event kinds it exists for; a rule that could meet an event without the field is refused at load, not silent later.
Rules are the operator's; what they compare is the agent's, so no operator can take more than bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dsec_guard.detect.paths import (
    basename,
    below,
    glob,
    has_controls,
    is_link_local,
    is_loopback,
    is_multicast,
    split_address,
)
from dsec_guard.detect.programs import installed, script_of
from dsec_guard.detect.view import O_DIRECTORY, View, open_flags, signed32
from dsec_guard.errors import DsecGuardError
from dsec_guard.model import (
    EVENT_TYPES,
    Class,
    DeviceAttempt,
    Event,
    FileOpened,
    NetworkAttempt,
    Outcome,
    SyscallSeen,
    SysctlAttempt,
    printable,
)

MAX_DEPTH = 40
MAX_TOKENS = 4_000
MAX_FILE = 1 << 20
MAX_SHOWN = 200

Test = Callable[[Event, View], bool]
Getter = Callable[[Event, View], Any]


class DetectorError(DsecGuardError):
    """A detector file cannot be used; `problems` has one line each, `file:line: rule: what`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems), hint="correct the detector file; nothing was loaded")
        self.problems = tuple(problems)


class _Bad(Exception):
    """What is wrong with one condition or entry; the caller adds the place."""


# ------------------------------------------------------------------------------------------------------------ fields


@dataclass(frozen=True)
class Field_:
    """type: str | int | bool | strs. kinds: event kinds that have it, None for all."""

    type: str
    get: Getter
    kinds: frozenset[str] | None = None


def _attr(name: str) -> Getter:
    def get(event: Event, view: View) -> Any:
        return getattr(event, name)

    return get


def _call(event: Event) -> SyscallSeen:
    """Fields of system calls are only compiled into rules for them."""
    assert isinstance(event, SyscallSeen)
    return event


def succeeded(event: Event) -> bool:
    """The kernel's own result; compiled only into rules whose events have one."""
    assert isinstance(event, (SyscallSeen, FileOpened, NetworkAttempt, DeviceAttempt, SysctlAttempt))
    return event.ok


def _arg(index: int) -> Getter:
    def get(event: Event, view: View) -> Any:
        return _call(event).args[index]

    return get


def _sarg(index: int) -> Getter:
    def get(event: Event, view: View) -> Any:
        return signed32(_call(event).args[index])

    return get


def _box(name: str) -> Getter:
    def get(event: Event, view: View) -> Any:
        return getattr(view.facts, name)

    return get


def address_of(event: Event) -> tuple[str, str, int]:
    """Family word (`inet`, `inet6`, `unix`, `vsock`, `af_N`), host or name, port."""
    if isinstance(event, NetworkAttempt):
        word = {1: "unix", 2: "inet", 10: "inet6", 40: "vsock"}.get(event.family, f"af_{event.family}")
        return word, event.address, event.port
    if isinstance(event, SyscallSeen) and event.address:
        return split_address(event.address)
    return "", "", 0


def socket_family(event: Event) -> int:
    """The family of a socket(2) call or hook, -1 for other events."""
    if isinstance(event, NetworkAttempt):
        return event.family
    if isinstance(event, SyscallSeen) and event.name in ("socket", "socketpair"):
        return signed32(event.args[0])
    return -1


def socket_type(event: Event) -> int:
    """SOCK_STREAM 1, SOCK_DGRAM 2, SOCK_RAW 3 ... of a socket(2) call or a hook; -1 where not known."""
    if isinstance(event, NetworkAttempt):
        return event.sock_type & 0xF
    if isinstance(event, SyscallSeen) and event.name in ("socket", "socketpair"):
        return event.args[1] & 0xF
    return -1


def _far(event: Event, view: View) -> bool:
    family, host, _ = address_of(event)
    return family in ("inet", "inet6") and not is_loopback(host)


_SYS = frozenset({"syscall"})
_NET = frozenset({"syscall", "network"})
_RESULT = frozenset({"syscall", "file_opened", "network", "device", "sysctl"})
_PATH = frozenset({"syscall", "file_opened", "file_changed", "output_refused"})

FIELDS: dict[str, Field_] = {
    "evt.kind": Field_("str", _attr("kind")),
    "evt.phase": Field_("str", lambda e, v: e.phase.value),
    "evt.source": Field_("str", lambda e, v: e.source.value),
    "evt.uid": Field_("int", _attr("uid")),
    "evt.comm": Field_("str", _attr("comm")),
    "evt.exec": Field_("int", _attr("exec")),
    "evt.name": Field_("str", _attr("name"), frozenset({"syscall", "counted", "sysctl"})),
    "evt.nr": Field_("int", _attr("nr"), _SYS),
    "evt.abi": Field_("str", lambda e, v: _call(e).abi.value, _SYS),
    "evt.program32": Field_("bool", _attr("program32"), _SYS),
    "evt.ret": Field_("int", _attr("ret"), _RESULT | {"counted"}),
    "evt.errno": Field_("int", _attr("errno"), _RESULT),
    "evt.ok": Field_("bool", _attr("ok"), _RESULT),
    "evt.path": Field_("str", lambda e, v: v.path(e), _PATH),
    "evt.path2": Field_("str", lambda e, v: v.path2(e), _SYS),
    "evt.raw_path": Field_("str", lambda e, v: _call(e).raw_path or _call(e).path, _SYS),
    "evt.file": Field_("str", lambda e, v: basename(v.path(e)), _PATH),
    "evt.odd_name": Field_("bool", lambda e, v: has_controls(v.path(e)), _PATH),
    "evt.address": Field_("str", _attr("address"), _NET),
    "evt.data": Field_("str", _attr("data"), _SYS),
    "evt.flags": Field_("int", _attr("flags"), frozenset({"syscall", "task"})),
    "evt.open_flags": Field_("int", lambda e, v: open_flags(e) if isinstance(e, SyscallSeen) else 0, _SYS),
    "evt.writes": Field_("bool", lambda e, v: v.writes(e), frozenset({"syscall", "file_opened"})),
    "evt.written": Field_("strs", lambda e, v: v.written(e), frozenset({"syscall", "file_opened"})),
    "evt.lists": Field_("bool", lambda e, v: isinstance(e, SyscallSeen) and bool(open_flags(e) & O_DIRECTORY), _SYS),
    "net.word": Field_("str", lambda e, v: address_of(e)[0], _NET),
    "net.host": Field_("str", lambda e, v: address_of(e)[1], _NET),
    "net.port": Field_("int", lambda e, v: address_of(e)[2], _NET),
    "net.family": Field_("int", lambda e, v: socket_family(e), _NET),
    "net.type": Field_("int", lambda e, v: socket_type(e), _NET),
    "net.op": Field_("str", lambda e, v: e.op if isinstance(e, NetworkAttempt) else _call(e).name, _NET),
    "net.outside": Field_("bool", _far, _NET),
    "net.multicast": Field_("bool", lambda e, v: is_multicast(address_of(e)[1]), _NET),
    "net.link_local": Field_("bool", lambda e, v: is_link_local(address_of(e)[1]), _NET),
    "file.object": Field_("str", _attr("object"), frozenset({"file_opened"})),
    "file.label": Field_("str", _attr("label"), frozenset({"file_opened"})),
    "file.decoy": Field_("bool", _attr("decoy"), frozenset({"file_opened"})),
    "file.from_exec": Field_("bool", _attr("from_exec"), frozenset({"file_opened"})),
    "file.change": Field_("str", _attr("change"), frozenset({"file_changed"})),
    "file.type": Field_("str", _attr("ftype"), frozenset({"file_changed"})),
    "file.place": Field_("str", _attr("place"), frozenset({"file_changed"})),
    "file.mode": Field_("int", _attr("mode"), frozenset({"file_changed"})),
    "file.size": Field_("int", _attr("size"), frozenset({"file_changed"})),
    "file.head": Field_("str", _attr("head"), frozenset({"file_changed"})),
    "file.traits": Field_("strs", _attr("traits"), frozenset({"file_changed"})),
    "file.link_target": Field_("str", _attr("link_target"), frozenset({"file_changed", "output_refused"})),
    "out.why": Field_("str", _attr("why"), frozenset({"output_refused"})),
    "out.step": Field_("str", _attr("step"), frozenset({"output_refused"})),
    "sig.number": Field_("int", _attr("signal"), frozenset({"signal"})),
    "sig.in_box": Field_("bool", _attr("target_in_box"), frozenset({"signal"})),
    "sig.to_init": Field_("bool", _attr("target_is_init"), frozenset({"signal"})),
    "dev.type": Field_("str", _attr("dev_type"), frozenset({"device"})),
    "dev.major": Field_("int", _attr("major"), frozenset({"device"})),
    "dev.minor": Field_("int", _attr("minor"), frozenset({"device"})),
    "dev.access": Field_("str", _attr("access"), frozenset({"device"})),
    "sysctl.name": Field_("str", _attr("name"), frozenset({"sysctl"})),
    "sysctl.write": Field_("bool", _attr("write"), frozenset({"sysctl"})),
    "count.count": Field_("int", _attr("count"), frozenset({"counted"})),
    "proc.exe": Field_("str", lambda e, v: v.process(e).exe or e.comm),
    "proc.name": Field_("str", lambda e, v: basename(v.process(e).exe) or e.comm),
    "proc.argv": Field_("strs", lambda e, v: v.process(e).argv),
    "proc.arg0": Field_("str", lambda e, v: next(iter(v.process(e).argv), "")),
    "proc.script": Field_("str", lambda e, v: script_of(v.process(e))),
    "proc.installed": Field_("bool", lambda e, v: installed(v.process(e), v.facts)),
    "proc.memfd": Field_("bool", lambda e, v: v.process(e).memfd),
    "proc.ancestry": Field_("strs", lambda e, v: v.ancestry(v.process(e))),
    "box.hidden": Field_("strs", _box("hidden")),
    "box.hidden_parents": Field_("strs", _box("hidden_parents")),
    "box.hidden_style": Field_("str", _box("hidden_style")),
    "box.harness": Field_("strs", _box("harness")),
    "box.environment_state": Field_("strs", _box("environment_state")),
    "box.deliverables": Field_("strs", _box("deliverables")),
    "box.allowed_reads": Field_("strs", _box("allowed_reads")),
    "box.temporary": Field_("strs", _box("temporary")),
    "box.tool_dirs": Field_("strs", _box("tool_dirs")),
    "box.path_dirs": Field_("strs", _box("path_dirs")),
    "box.workspace": Field_("str", _box("workspace")),
    "box.home": Field_("str", _box("home")),
    "box.repository": Field_("str", _box("repository")),
    "box.package": Field_("str", _box("package")),
    "box.network": Field_("str", _box("network")),
    "box.user": Field_("str", _box("user")),
    "box.agent_uid": Field_("int", _box("agent_uid")),
    **{f"evt.args[{i}]": Field_("int", _arg(i), _SYS) for i in range(6)},
    **{f"evt.int[{i}]": Field_("int", _sarg(i), _SYS) for i in range(6)},
}



# ------------------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class Token:
    """kind: word | text | number | op | end."""

    kind: str
    text: str
    value: int = 0


_SYMBOLS = ("!=", "<=", ">=", "=", "<", ">", "(", ")", ",")
_STOP = frozenset(" \t\r\n()=<>!,\"'")


def tokenise(text: str) -> list[Token]:
    """Words, quoted texts, numbers (decimal and 0x) and symbols. Raises _Bad at an unclosed quote or too many tokens."""
    out: list[Token] = []
    i = 0
    while i < len(text):
        ch = text[i]
        if ch in " \t\r\n":
            i += 1
            continue
        if ch in "\"'":
            end = text.find(ch, i + 1)
            if end < 0:
                raise _Bad(f"the text that begins with {text[i:i + 20]} is not closed")
            out.append(Token("text", text[i + 1:end]))
            i = end + 1
        elif symbol := next((s for s in _SYMBOLS if text.startswith(s, i)), ""):
            out.append(Token("op", symbol))
            i += len(symbol)
        elif ch in _STOP:
            raise _Bad(f"unexpected {ch!r}")
        else:
            end = i
            while end < len(text) and text[end] not in _STOP:
                end += 1
            out.append(_word(text[i:end]))
            i = end
        if len(out) > MAX_TOKENS:
            raise _Bad(f"more than {MAX_TOKENS} words")
    out.append(Token("end", "the end"))
    return out


def _word(text: str) -> Token:
    digits = text[1:] if text[:1] == "-" else text
    if digits.isascii() and digits.isdigit() and len(digits) < 21:
        return Token("number", text, int(text))
    if text[:2] == "0x" and text.isascii() and 2 < len(text) < 19 and all(c in "0123456789abcdefABCDEF" for c in text[2:]):
        return Token("number", text, int(text, 16))
    return Token("word", text)


# ------------------------------------------------------------------------------------------------------------ parser


@dataclass
class Names:
    """What conditions may refer to. Macros keep their source until a rule uses them: kinds differ from rule to rule."""

    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    macros: dict[str, str] = field(default_factory=dict)


_WORD_OPS = frozenset({"in", "startswith", "endswith", "contains", "glob", "pmatch", "has", "exists"})
_KEYWORDS = _WORD_OPS | {"and", "or", "not"}
_ALLOWED: Mapping[str, frozenset[str]] = {
    "str": frozenset({"=", "!=", "in", "startswith", "endswith", "contains", "glob", "pmatch", "exists"}),
    "int": frozenset({"=", "!=", "<", "<=", ">", ">=", "in", "has", "exists"}),
    "bool": frozenset({"=", "!="}),
    "strs": frozenset({"in", "startswith", "endswith", "contains", "glob", "pmatch", "exists"}),
}


class _Parser:
    def __init__(self, names: Names, kinds: frozenset[str], used: frozenset[str], depth: int) -> None:
        self.names, self.kinds, self.used, self.depth = names, kinds, used, depth
        self.tokens: list[Token] = []
        self.at = 0
        self.writing: list[Test] = []  # parts that hold for events that ask to write, and for no others

    def is_writing(self, test: Test) -> bool:
        return any(test is known for known in self.writing)

    def compile(self, text: str) -> Test:
        self.tokens = tokenise(text)
        if self.tokens[0].kind == "end":
            raise _Bad("empty condition")
        test = self._or()
        if self._peek().kind != "end":
            raise _Bad(f"expected `and`, `or` or the end, found `{self._peek().text}`")
        return test

    def _peek(self) -> Token:
        return self.tokens[self.at]

    def _next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def _take(self, text: str) -> bool:
        token = self._peek()
        if token.kind in ("word", "op") and token.text == text:
            self.at += 1
            return True
        return False

    def _or(self) -> Test:
        parts = [self._and()]
        while self._take("or"):
            parts.append(self._and())
        test = _joined(parts, stops_at=True)
        if all(self.is_writing(part) for part in parts):
            self.writing.append(test)
        return test

    def _and(self) -> Test:
        parts = [self._unary()]
        while self._take("and"):
            parts.append(self._unary())
        test = _joined(parts, stops_at=False)
        if any(self.is_writing(part) for part in parts):
            self.writing.append(test)
        return test

    def _unary(self) -> Test:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Bad(f"nested deeper than {MAX_DEPTH}")
        try:
            return self._inner()
        finally:
            self.depth -= 1

    def _inner(self) -> Test:
        if self._take("not"):
            test = self._unary()
            return lambda event, view: not test(event, view)
        if self._take("("):
            test = self._or()
            if not self._take(")"):
                raise _Bad(f"expected `)`, found `{self._peek().text}`")
            return test
        token = self._next()
        if token.kind != "word" or token.text in _KEYWORDS:
            raise _Bad(f"expected a field, a macro, `not` or `(`, found `{token.text}`")
        if token.text in FIELDS:
            test = self._comparison(token.text)
            if token.text == "evt.written" or test is FIELDS["evt.writes"].get:
                self.writing.append(test)
            return test
        if token.text in self.names.macros:
            if token.text in self.used:
                raise _Bad(f"macro {token.text} uses itself")
            inner = _Parser(self.names, self.kinds, self.used | {token.text}, self.depth)
            test = inner.compile(self.names.macros[token.text])
            if inner.is_writing(test):
                self.writing.append(test)
            return test
        raise _Bad(f"no field and no macro is called {token.text}{_nearest(token.text, [*FIELDS, *self.names.macros])}")

    def _field(self, name: str) -> Field_:
        spec = FIELDS[name]
        if spec.kinds is not None and (lacking := sorted(self.kinds - spec.kinds)):
            raise _Bad(f"{name} does not exist for events of kind {', '.join(lacking)}")
        return spec

    def _comparison(self, name: str) -> Test:
        spec = self._field(name)
        token = self._peek()
        op = token.text if token.kind in ("op", "word") else ""
        if op not in _WORD_OPS and op not in ("=", "!=", "<", "<=", ">", ">="):
            if spec.type != "bool":
                raise _Bad(f"{name} needs an operator (only a yes/no field stands alone)")
            return spec.get
        self._next()
        if op not in _ALLOWED[spec.type]:
            raise _Bad(f"{name} is of type {spec.type}, which has no `{op}`: {' '.join(sorted(_ALLOWED[spec.type]))}")
        if op == "exists":
            get = spec.get
            return lambda event, view: bool(get(event, view))
        return _build(name, spec, op, self._values(name, spec, op))

    def _values(self, name: str, spec: Field_, op: str) -> _Values:
        """The right side, checked against the field's type."""
        many = op in ("in", "glob", "pmatch", "startswith", "endswith", "contains")
        if self._take("("):
            if not many:
                raise _Bad(f"`{op}` takes one value, not a list")
            values = _Values()
            while True:
                self._item(values, name, spec, in_list=True)
                if self._take(")"):
                    return values
                if not self._take(","):
                    raise _Bad(f"expected `,` or `)`, found `{self._peek().text}`")
        if op == "in" and self._peek().text not in FIELDS:
            raise _Bad("`in` takes a list in parentheses or a field")
        values = _Values()
        self._item(values, name, spec, in_list=False)
        return values

    def _item(self, values: _Values, name: str, spec: Field_, *, in_list: bool) -> None:
        token = self._next()
        if token.kind == "end" or token.kind == "op":
            raise _Bad(f"expected a value for {name}, found `{token.text}`")
        if token.kind == "word" and token.text in _KEYWORDS:
            raise _Bad(f"expected a value for {name}, found `{token.text}` (quote it if it is meant as text)")
        if token.kind == "word" and token.text in FIELDS:
            other = self._field(token.text)
            if other.type not in (("int",) if spec.type == "int" else ("bool",) if spec.type == "bool" else ("str", "strs")):
                raise _Bad(f"{name} is of type {spec.type}, {token.text} of type {other.type}")
            values.getters.append((other.type, other.get))
            return
        if token.kind == "word" and in_list and token.text in self.names.lists:
            for item in self.names.lists[token.text]:
                values.add(_typed(name, spec, _word(item) if spec.type == "int" else Token("text", item)))
            return
        if token.kind == "word" and in_list and token.text.isidentifier() and token.text.isupper():
            raise _Bad(f"no list is called {token.text}{_nearest(token.text, list(self.names.lists))}")
        values.add(_typed(name, spec, token))


def _joined(parts: Sequence[Test], *, stops_at: bool) -> Test:
    """`or` (stops at the first True) or `and` (at the first False) of the parts. Two and three are spelled out: this is
    the innermost loop of judging, and a generator costs more there than the comparisons."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        a, b = parts
        if stops_at:
            return lambda event, view: a(event, view) or b(event, view)
        return lambda event, view: a(event, view) and b(event, view)
    if len(parts) == 3:
        a, b, c = parts
        if stops_at:
            return lambda event, view: a(event, view) or b(event, view) or c(event, view)
        return lambda event, view: a(event, view) and b(event, view) and c(event, view)
    middle = len(parts) // 2  # halves, so that a long condition does not nest deeply
    halves = (_joined(parts[:middle], stops_at=stops_at), _joined(parts[middle:], stops_at=stops_at))
    return _joined(halves, stops_at=stops_at)


class _Values:
    """Constants and fields on the right of an operator."""

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.getters: list[tuple[str, Getter]] = []

    def add(self, value: Any) -> None:
        self.constants.append(value)


def _typed(name: str, spec: Field_, token: Token) -> Any:
    if spec.type == "int":
        if token.kind != "number":
            raise _Bad(f"{name} is a number, `{token.text}` is none")
        return token.value
    if spec.type == "bool":
        if token.text not in ("true", "false"):
            raise _Bad(f"{name} is true or false, not `{token.text}`")
        return token.text == "true"
    return token.text


def _nearest(word: str, known: Sequence[str]) -> str:
    import difflib  # only on the way to an error message

    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


_PAIR: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
    "has": lambda a, b: bool(a & b),
    "in": lambda a, b: bool(a == b),
    "startswith": lambda a, b: bool(a.startswith(b)),
    "endswith": lambda a, b: bool(a.endswith(b)),
    "contains": lambda a, b: b in a,
    "glob": lambda a, b: glob(b, a),
    "pmatch": lambda a, b: bool(b) and below(a, b),
}


def _build(name: str, spec: Field_, op: str, values: _Values) -> Test:
    """The closure of one comparison."""
    get, several = spec.get, spec.type == "strs"
    if several and op == "contains":
        op = "in"  # a list of texts contains a text when one of them equals it
    constants = tuple(dict.fromkeys(values.constants))
    getters = tuple(values.getters)
    if not getters:
        return _constant(get, op, constants, several)
    pair = _PAIR[op]

    def with_fields(event: Event, view: View) -> bool:
        left = get(event, view)
        lefts = left if several else (left,)
        for kind, other in getters:
            right = other(event, view)
            for value in right if kind == "strs" else (right,):
                if any(pair(one, value) for one in lefts):
                    return True
        return any(pair(one, value) for one in lefts for value in constants)

    return with_fields


def _constant(get: Getter, op: str, constants: tuple[Any, ...], several: bool) -> Test:
    """Comparisons with constants only: the common case, so each operator has its short form."""
    if op in ("in", "=") or (op == "in" and several):
        members = frozenset(constants)
        if several:
            return lambda event, view: not members.isdisjoint(get(event, view))
        return lambda event, view: get(event, view) in members
    if op in ("startswith", "endswith"):
        if several:
            if op == "startswith":
                return lambda event, view: any(one.startswith(constants) for one in get(event, view))
            return lambda event, view: any(one.endswith(constants) for one in get(event, view))
        if op == "startswith":
            return lambda event, view: bool(get(event, view).startswith(constants))
        return lambda event, view: bool(get(event, view).endswith(constants))
    if op == "pmatch":
        # `/a` is below `/a`: with a slash behind both, one call compares with all prefixes.
        heads = tuple(p.rstrip("/") + "/" for p in constants if p)
        if several:
            return lambda event, view: any((one + "/").startswith(heads) for one in get(event, view))
        return lambda event, view: bool((get(event, view) + "/").startswith(heads))
    pair = _PAIR[op]
    if several:
        return lambda event, view: any(pair(one, value) for one in get(event, view) for value in constants)
    if len(constants) == 1:
        only = constants[0]
        return lambda event, view: pair(get(event, view), only)
    return lambda event, view: any(pair(get(event, view), value) for value in constants)


def compile_condition(text: str, names: Names, kinds: frozenset[str]) -> Test:
    """Compile one condition for events of `kinds`. Raises ValueError with the reason."""
    return _compile(text, names, kinds)[0]


def _compile(text: str, names: Names, kinds: frozenset[str]) -> tuple[Test, bool]:
    """The same, and whether it holds only for events that ask to write."""
    parser = _Parser(names, kinds, frozenset(), 0)
    try:
        test = parser.compile(text)
    except _Bad as bad:
        raise ValueError(str(bad)) from None
    return test, parser.is_writing(test)


# --------------------------------------------------------------------------------------------------------- templates


def compile_template(text: str, kinds: frozenset[str]) -> Callable[[Event, View], str]:
    """`{field}` in `text` becomes the field's value, printable and cut; `{{` is a brace. Raises ValueError.

    Nothing of Python's format language is understood, so an attacker's braces in a value stay what they are.
    """
    pieces: list[str | Getter] = []
    i = 0
    while i < len(text):
        brace = text.find("{", i)
        if brace < 0:
            pieces.append(text[i:])
            break
        pieces.append(text[i:brace])
        if text.startswith("{{", brace):
            pieces.append("{")
            i = brace + 2
            continue
        end = text.find("}", brace)
        name = text[brace + 1:end] if end > 0 else ""
        if name not in FIELDS:
            raise ValueError(f"no field is called {name or text[brace:brace + 20]}{_nearest(name, list(FIELDS))}")
        spec = FIELDS[name]
        if spec.kinds is not None and (lacking := sorted(kinds - spec.kinds)):
            raise ValueError(f"{name} does not exist for events of kind {', '.join(lacking)}")
        pieces.append(spec.get)
        i = end + 1
    parts = tuple(pieces)

    def render(event: Event, view: View) -> str:
        return "".join(p if isinstance(p, str) else shown(p(event, view)) for p in parts)

    return render


def shown(value: object) -> str:
    """A value for people: printable, at most 200 characters."""
    text = printable(" ".join(str(v) for v in value) if isinstance(value, tuple) else str(value))
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN - 3] + "..."


# ------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """A compiled rule. syscalls: names that wake it for kind `syscall`, empty for all. needs: per item, alternatives.

    writes_only: the condition holds for no event that only reads, so the engine need not ask.
    """

    id: str
    cls: Class
    severity: int
    outcome: str
    kinds: frozenset[str]
    syscalls: frozenset[str]
    test: Test
    succeeds: Test | None
    object: Getter
    explanation: Callable[[Event, View], str]
    references: tuple[str, ...]
    allow: str
    needs: tuple[tuple[str, ...], ...]
    accident: bool
    tags: tuple[str, ...]
    place: str
    writes_only: bool = False

    def outcome_of(self, event: Event, view: View) -> Outcome:
        """attempted or succeeded, from the kernel's own result where the rule says so."""
        if self.outcome == "attempted":
            return Outcome.ATTEMPTED
        if self.outcome == "succeeded":
            return Outcome.SUCCEEDED
        if self.succeeds is not None:
            return Outcome.SUCCEEDED if self.succeeds(event, view) else Outcome.ATTEMPTED
        return Outcome.SUCCEEDED if succeeded(event) else Outcome.ATTEMPTED


SOURCES = frozenset({"sys_exit", "notify", "tracepoint", "cgroup", "fanotify", "counter", "inspection", "guard"})
_REQUIRED = ("class", "severity", "outcome", "kinds", "condition", "object", "explanation", "allow", "needs")
_OPTIONAL = ("syscalls", "references", "mitre", "accident", "tags")


@dataclass
class RuleFile:
    """The raw entries of one file, with the line of each."""

    name: str
    lists: list[tuple[str, Any, int]] = field(default_factory=list)
    macros: list[tuple[str, Any, int]] = field(default_factory=list)
    rules: list[tuple[str, dict[str, Any], int]] = field(default_factory=list)


def read_rule_file(name: str, text: str) -> tuple[RuleFile, list[str]]:
    """Parse the YAML of one file: a sequence of `list:`/`items:`, `macro:`/`condition:` and `rule:` entries.

    Returns the entries and the problems found, each `file:line: what`.
    """
    out, problems = RuleFile(name), list[str]()
    if len(text) > MAX_FILE:
        return out, [f"{name}:1: larger than {MAX_FILE} bytes"]
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        return out, [f"{name}:{mark.line + 1 if mark else 1}: no YAML: {getattr(error, 'problem', None) or 'nested too deeply'}"]
    if root is None:
        return out, []
    if not isinstance(root, yaml.SequenceNode):
        return out, [f"{name}:1: want a sequence of list, macro and rule entries"]
    for node in root.value:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            problems.append(f"{name}:{line}: want a mapping that begins with list, macro or rule")
            continue
        try:
            entry = _plain(node, 0)
        except _Bad as bad:
            problems.append(f"{name}:{line}: {bad}")
            continue
        _sort_entry(out, entry, line, problems)
    return out, problems


def _sort_entry(out: RuleFile, entry: dict[str, Any], line: int, problems: list[str]) -> None:
    where = f"{out.name}:{line}"
    noun = next((n for n in ("list", "macro", "rule") if n in entry), "")
    label = entry.get(noun)
    if not noun or not isinstance(label, str) or not label:
        problems.append(f"{where}: want an entry that begins with `list: NAME`, `macro: NAME` or `rule: ID`")
        return
    known = {"list": {"list", "items"}, "macro": {"macro", "condition"},
             "rule": {"rule", *_REQUIRED, *_OPTIONAL}}[noun]
    for key in sorted(set(entry) - known):
        problems.append(f"{where}: {label}: unknown key {key}{_nearest(key, sorted(known))}")
    if noun == "list":
        items = entry.get("items")
        if not isinstance(items, list) or not all(isinstance(i, (str, int)) for i in items):
            problems.append(f"{where}: {label}: items: want a sequence of texts")
        elif not (label.isidentifier() and label.isupper()):
            problems.append(f"{where}: {label}: a list's name is written in capitals")
        else:
            out.lists.append((label, [str(i) for i in items], line))
    elif noun == "macro":
        if not isinstance(entry.get("condition"), str):
            problems.append(f"{where}: {label}: condition: want a text")
        elif label in FIELDS or label in _KEYWORDS:
            problems.append(f"{where}: {label}: the name is taken by the language")
        else:
            out.macros.append((label, entry["condition"], line))
    else:
        out.rules.append((label, entry, line))


def _plain(node: yaml.Node, depth: int) -> Any:
    """A node as plain values: texts stay texts (no YAML 1.1 yes/no), whole numbers become ints, keys must be unique."""
    if depth > 8:
        raise _Bad("nested too deeply")
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:int":
            token = _word(node.value)
            return token.value if token.kind == "number" else node.value
        if node.tag == "tag:yaml.org,2002:null":
            return ""
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, depth + 1) for item in node.value]
    out: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _Bad("a key is no text")
        if key.value in out:
            raise _Bad(f"key {key.value} is given twice")
        out[key.value] = _plain(value, depth + 1)
    return out


def compile_rules(files: Sequence[RuleFile]) -> tuple[tuple[Rule, ...], list[str]]:
    """Rules of all files, which share their lists and macros; and the problems, each `file:line: rule: what`."""
    names, problems = Names(), list[str]()
    for f in files:
        for label, items, line in f.lists:
            if label in names.lists:
                problems.append(f"{f.name}:{line}: {label}: a list of this name exists")
            names.lists[label] = tuple(items)
        for label, condition, line in f.macros:
            if label in names.macros:
                problems.append(f"{f.name}:{line}: {label}: a macro of this name exists")
            names.macros[label] = condition
    for f in files:
        for label, _, line in f.lists:
            try:
                names.lists[label] = _spread(label, names.lists, ())
            except _Bad as bad:
                problems.append(f"{f.name}:{line}: {label}: {bad}")
    rules: dict[str, Rule] = {}
    for f in files:
        for label, entry, line in f.rules:
            if label in rules:
                problems.append(f"{f.name}:{line}: {label}: a rule of this name exists")
                continue
            found: list[str] = []
            rule = _rule(label, entry, names, f"{f.name}:{line}", found)
            problems += [f"{f.name}:{line}: {label}: {p}" for p in found]
            if rule is not None:
                rules[label] = rule
    return tuple(rules.values()), problems


def _spread(label: str, lists: Mapping[str, tuple[str, ...]], above: tuple[str, ...]) -> tuple[str, ...]:
    """Items of a list; an item that is another list's name stands for that list's items."""
    if label in above:
        raise _Bad("the list contains itself")
    out: list[str] = []
    for item in lists[label]:
        out += _spread(item, lists, (*above, label)) if item in lists else (item,)
        if len(out) > 10_000:
            raise _Bad("more than 10000 items")
    return tuple(out)


def _rule(label: str, entry: dict[str, Any], names: Names, place: str, problems: list[str]) -> Rule | None:
    for key in _REQUIRED:
        if key not in entry:
            problems.append(f"{key} is missing")
    if problems:
        return None
    kinds = frozenset(_texts(entry["kinds"], "kinds", problems))
    for kind in sorted(kinds - set(EVENT_TYPES)):
        problems.append(f"kinds: no event is of kind {kind}{_nearest(kind, list(EVENT_TYPES))}")
    calls: list[str] = []
    for item in _texts(entry.get("syscalls", []), "syscalls", problems):
        calls += names.lists.get(item, (item,))
    if calls and "syscall" not in kinds:
        problems.append("syscalls: the rule does not watch kind syscall")
    if entry["class"] not in [c.value for c in Class]:
        problems.append(f"class: want one of {', '.join(c.value for c in Class)}, got {entry['class']}")
    severity = entry["severity"]
    if not isinstance(severity, int) or not 1 <= severity <= 10:
        problems.append(f"severity: want a whole number 1..10, got {severity}")
    accident = entry.get("accident", "false")
    if accident not in ("true", "false"):
        problems.append(f"accident: want true or false, got {accident}")
    needs = []
    for item in _texts(entry["needs"], "needs", problems):
        options = tuple(item.split("|"))
        needs.append(options)
        for option in options:
            if option not in SOURCES:
                problems.append(f"needs: no evidence source is called {option}{_nearest(option, sorted(SOURCES))}")
    texts = {key: entry[key] for key in ("condition", "object", "explanation", "outcome", "allow")}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            problems.append(f"{key}: want a text")
    if problems:
        return None
    return _compiled(label, entry, names, place, kinds, frozenset(calls), tuple(needs), problems)


def _compiled(
    label: str, entry: dict[str, Any], names: Names, place: str, kinds: frozenset[str], calls: frozenset[str],
    needs: tuple[tuple[str, ...], ...], problems: list[str],
) -> Rule | None:
    test: Test | None = None
    succeeds: Test | None = None
    explanation: Callable[[Event, View], str] | None = None
    writes_only = False
    try:
        test, writes_only = _compile(entry["condition"], names, kinds)
    except ValueError as error:
        problems.append(f"condition: {error}")
    outcome = entry["outcome"].strip()
    if outcome == "from_result":
        if lacking := sorted(kinds - _RESULT):
            problems.append(f"outcome: events of kind {', '.join(lacking)} have no result; use attempted, succeeded or a condition")
    elif outcome not in ("attempted", "succeeded"):
        try:
            succeeds = compile_condition(outcome, names, kinds)
        except ValueError as error:
            problems.append(f"outcome: want attempted, succeeded, from_result or a condition: {error}")
    try:
        explanation = compile_template(" ".join(entry["explanation"].split()), kinds)
    except ValueError as error:
        problems.append(f"explanation: {error}")
    name = entry["object"].strip()
    spec = FIELDS.get(name)
    if spec is None:
        problems.append(f"object: no field is called {name}{_nearest(name, list(FIELDS))}")
    elif spec.kinds is not None and not kinds <= spec.kinds:
        problems.append(f"object: {name} does not exist for events of kind {', '.join(sorted(kinds - spec.kinds))}")
    references = [*_texts(entry.get("references", []), "references", problems), *_mitre(entry.get("mitre", {}), problems)]
    if problems or test is None or explanation is None or spec is None:
        return None
    return Rule(
        label, Class(entry["class"]), entry["severity"], outcome, kinds, calls, test, succeeds, spec.get, explanation,
        tuple(references), entry["allow"].strip(), needs, entry.get("accident") == "true",
        tuple(_texts(entry.get("tags", []), "tags", problems)), place, writes_only,
    )


def _mitre(value: Any, problems: list[str]) -> list[str]:
    if not isinstance(value, dict) or set(value) - {"attack", "atlas"}:
        problems.append("mitre: want a mapping of attack and atlas to identifiers")
        return []
    return [f"{'ATT&CK' if key == 'attack' else 'ATLAS'} {item}" for key in sorted(value)
            for item in _texts(value[key], f"mitre.{key}", problems)]


def _texts(value: Any, key: str, problems: list[str]) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(v, (str, int)) for v in value):
        problems.append(f"{key}: want a text or a sequence of texts")
        return []
    return [str(v) for v in value]
