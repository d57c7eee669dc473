"""Policy YAML -> `Policy`: every mistake of a file at once, each with its place.

The text is never turned into objects by YAML itself: `yaml.compose` gives nodes with line and column, and the model's
annotations say what each node has to be. Size, nesting and node count are bounded before anything is built, aliases
are counted each time they are used.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import itertools
import os
import re
import stat
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import rfc8785
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dsec_guard.errors import PolicyError, UsageError
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import Level, Outcome
from dsec_guard.policy.data import data_dir
from dsec_guard.policy.profile import covers, find_profile
from dsec_guard.policy.schema import (
    COMPUTED,
    GROWING,
    SCHEMA_ID,
    Limits,
    Policy,
    RootKind,
    Unit,
    Word,
    short_form,
    yaml_fields,
)
from dsec_guard.policy.tighten import limit_text, violations
from dsec_guard.policy.units import parse_duration, parse_size

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 20_000
MAX_PROBLEMS = 100
MAX_CHAIN = 16

# libyaml's where PyYAML was built with it; both are only asked for events and nodes.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INT = re.compile(r"0|-?[1-9][0-9]*")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_STR = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"


@dataclass(frozen=True)
class _Placed:
    """One value of a file: `value` is a dict of these, a list of these, or plain."""

    value: Any
    place: str


@dataclass(frozen=True)
class _Parsed:
    extends: _Placed | None
    tree: dict[str, _Placed]


class _Unreadable(Exception):
    """Nothing sensible can be said about the rest of the file."""


# ------------------------------------------------------------------------------------------------------- public


def load_policy(name_or_path: str, *, search: Sequence[Path] = ()) -> Policy:
    """Read a policy and its parents.

    name_or_path: a name (shipped policies first, then `<dir>/<name>.yaml` of each directory in `search`), or a path when
    it has a slash or ends in .yaml or .yml. Raises: PolicyError with every mistake found.
    """
    problems: list[str] = []
    path = _locate(name_or_path, search, relative_to=None)
    if isinstance(path, str):
        raise PolicyError([path], hint="`dsec-guard policy validate FILE` checks a file; names are those of the shipped policies")
    policy = _load_chain(path, search, problems, [])
    if problems or policy is None:
        raise PolicyError(_cut(problems))
    return policy


def shipped_names() -> tuple[str, ...]:
    """The policies that come with the package, by name."""
    return tuple(sorted(p.stem for p in data_dir("policies").glob("*.yaml")))


def digest_of(policy: Policy) -> str:
    """sha256, in hex, of the RFC 8785 form of everything that binds or judges: all but name, digest and description."""
    content = policy.model_dump(mode="json", by_alias=True, exclude={*COMPUTED, "description"})
    return hashlib.sha256(rfc8785.dumps({"schema": SCHEMA_ID, **content})).hexdigest()


def override_limits(policy: Policy, overrides: Mapping[str, str]) -> Policy:
    """`{"memory": "256MiB"}` on top of a policy. Raises UsageError for an unknown name, a bad value or a wider limit."""
    values: dict[str, Any] = {}
    for name, text in overrides.items():
        if name not in Limits.model_fields:
            known = f"{', '.join(Limits.model_fields)}{_nearest(name, Limits.model_fields)}"
            raise UsageError(f"--limit {_show(name)}: no such limit", hint=f"limits are {known}")
        reader = _Reader(f"--limit {name}={_show(text)}")
        node = yaml.ScalarNode(_STR, text, start_mark=None, end_mark=None)
        info = Limits.model_fields[name]
        value = reader.value(node, info.annotation, info.metadata, ())
        if value is None:
            raise UsageError(reader.problems[0])
        bound = getattr(policy.limits, name)
        if value.value > bound:
            raise UsageError(f"--limit {name}={text} is above the policy's {limit_text(name, bound)}",
                             hint=f"--limit only tightens: at most {limit_text(name, bound)}, or choose another --policy")
        values[name] = value.value
    return _changed(policy, limits=policy.limits.model_copy(update=values))


def with_level(policy: Policy, level: Level) -> Policy:
    """The same policy watched at `level`; its digest changes with it."""
    return _changed(policy, monitor=policy.monitor.model_copy(update={"level": level}))


def _changed(policy: Policy, **update: Any) -> Policy:
    changed = policy.model_copy(update=update)
    return changed.model_copy(update={"digest": digest_of(changed)})


# ------------------------------------------------------------------------------------------------- files and chains


def _looks_like_path(text: str) -> bool:
    return "/" in text or text.endswith((".yaml", ".yml"))


def _locate(text: str, search: Sequence[Path], *, relative_to: Path | None) -> Path | str:
    """The file meant by a name or path, or what is wrong with it."""
    if _looks_like_path(text):
        return Path(text) if relative_to is None else relative_to / text
    if _NAME.fullmatch(text):
        for directory in (data_dir("policies"), *search):
            candidate = directory / f"{text}.yaml"
            if candidate.is_file():
                return candidate
    names = {*shipped_names(), *(p.stem for d in search for p in d.glob("*.yaml"))}
    return f"{_show(text)}: no policy of that name: {', '.join(sorted(names))}, or a path to a YAML file{_nearest(text, names)}"


def _load_chain(path: Path, search: Sequence[Path], problems: list[str], chain: list[Path]) -> Policy | None:
    """The effective policy of one file; None (with `problems` filled) when there is none to go on with."""
    merged = _load_merged(path, search, problems, chain)
    return None if merged is None else merged[0]


def _load_merged(path: Path, search: Sequence[Path], problems: list[str],
                 chain: list[Path]) -> tuple[Policy, dict[str, _Placed]] | None:
    before = len(problems)
    parsed = _parse_file(path, problems)
    if parsed is None:
        return None
    parent: tuple[Policy, dict[str, _Placed]] | None = None
    if parsed.extends is not None:
        parent = _load_parent(parsed.extends, path, search, problems, [*chain, path.resolve()])
        if parent is None:
            return None
    tree = parsed.tree if parent is None else _merge(parent[1], parsed.tree, "")
    if len(problems) > before:
        return None
    places: dict[str, str] = {}
    plain = _strip(tree, "", places)
    try:
        policy = Policy.model_validate({**plain, "name": path.stem}).with_places(places)
    except ValidationError as error:  # the reader checks the same rules with better words; this is the second lock
        for one in error.errors():
            key = ".".join(str(p) for p in one["loc"])
            problems.append(f"{places.get(key, path)}: {key}: {one['msg']}")
        return None
    _check_sense(policy, str(path), problems)
    if parent is not None:
        own: dict[str, str] = {}
        _strip(parsed.tree, "", own)
        for v in violations(parent[0], policy, covers=covers):
            place = next((own[k] for k in _outwards(v.key) if k in own), parsed.extends.place if parsed.extends else str(path))
            problems.append(f"{place}: {v.key}: {v.what}: a child only tightens {parent[0].name}: {v.accepted}")
    if len(problems) > before:
        return None
    return policy.model_copy(update={"digest": digest_of(policy)}), tree


def _load_parent(extends: _Placed, child: Path, search: Sequence[Path], problems: list[str],
                 chain: list[Path]) -> tuple[Policy, dict[str, _Placed]] | None:
    found = _locate(extends.value, search, relative_to=child.parent)
    if isinstance(found, str):
        problems.append(f"{extends.place}: extends: {found}")
        return None
    if found.resolve() in chain:
        names = " -> ".join(p.name for p in [*chain[chain.index(found.resolve()):], found])
        problems.append(f"{extends.place}: extends: the policies extend each other ({names}): a chain that ends")
        return None
    if len(chain) >= MAX_CHAIN:
        problems.append(f"{extends.place}: extends: more than {MAX_CHAIN} policies on top of each other: a shorter chain")
        return None
    return _load_merged(found, search, problems, chain)


def _outwards(key: str) -> Iterable[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _merge(parent: Mapping[str, _Placed], child: Mapping[str, _Placed], prefix: str) -> dict[str, _Placed]:
    result = dict(parent)
    for key, new in child.items():
        old = result.get(key)
        dotted = f"{prefix}{key}"
        if old is not None and isinstance(old.value, dict) and isinstance(new.value, dict):
            result[key] = _Placed(_merge(old.value, new.value, f"{dotted}."), new.place)
        elif old is not None and dotted in GROWING:
            replaced = {_identity(item) for item in new.value}
            kept = [item for item in old.value if _identity(item) not in replaced]
            result[key] = _Placed([*kept, *new.value], new.place)
        else:
            result[key] = new
    return result


def _identity(item: _Placed) -> str:
    """What an entry of a growing list is about; a child's entry about the same thing takes the parent's place."""
    if isinstance(item.value, dict):
        return str(next(item.value[k].value for k in ("path", "name") if k in item.value))
    return str(item.value)


def _strip(tree: Mapping[str, _Placed], prefix: str, places: dict[str, str]) -> dict[str, Any]:
    def one(placed: _Placed, dotted: str) -> Any:
        places[dotted] = placed.place
        if isinstance(placed.value, dict):
            return _strip(placed.value, f"{dotted}.", places)
        if isinstance(placed.value, list):
            return [one(item, f"{dotted}.{i}") for i, item in enumerate(placed.value)]
        return placed.value

    return {key: one(value, f"{prefix}{key}") for key, value in tree.items()}


def _check_sense(policy: Policy, file: str, problems: list[str]) -> None:
    """What single values cannot show."""

    def problem(key: str, text: str) -> None:
        place = policy.place(key)
        problems.append(f"{file if place == 'default' else place}: {key}: {text}")

    root = policy.filesystem.root
    if (root.kind is RootKind.DIRECTORY) != (root.path is not None):
        problem("filesystem.root", "kind directory and path belong together: {kind: directory, path: /a/root}, or {kind: host}")
    if not policy.home.startswith("/") or policy.home.startswith("//") or os.path.normpath(policy.home) != policy.home:
        problem("environment.HOME", f"{_show(policy.home)} is no plain absolute path: an absolute path inside the box")
    order = list(Outcome)
    for cls, row in policy.penalties.items():
        for better, worse in itertools.pairwise(order):
            if better in row and worse in row and row[worse] > row[better]:
                problem(f"penalties.{cls.value}.{worse.value}",
                        f"{row[worse]:g} is milder than {better.value} ({row[better]:g}): at most {row[better]:g}")


def _cut(problems: list[str]) -> list[str]:
    if len(problems) <= MAX_PROBLEMS:
        return problems
    return [*problems[:MAX_PROBLEMS], f"... and {len(problems) - MAX_PROBLEMS} more"]


# ------------------------------------------------------------------------------------------------------ one file


def _read(path: Path, problems: list[str]) -> str | None:
    """The text of a policy file; None and a problem for anything that is no small regular UTF-8 file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        problems.append(f"{_show(str(path))}: cannot be read ({why}): a readable YAML file")
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        problems.append(f"{_show(str(path))}: is no regular file: a YAML file")
        return None
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        problems.append(f"{_show(str(path))}: is larger than 1 MiB: a policy of a few hundred lines")
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        problems.append(f"{_show(str(path))}:{line}: byte {raw[error.start]:#04x} is no UTF-8: a file in UTF-8")
        return None


def _parse_file(path: Path, problems: list[str]) -> _Parsed | None:
    text = _read(path, problems)
    return None if text is None else _parse_text(text, _show(str(path)), path.parent, problems)


def _parse_text(text: str, file: str, directory: Path, problems: list[str]) -> _Parsed | None:
    reader = _Reader(file, directory)
    try:
        root = _compose(text, reader)
        return reader.document(root)
    except _Unreadable:
        return None
    finally:
        problems.extend(reader.problems)


def _compose(text: str, reader: _Reader) -> yaml.Node:
    """Bounded: the event stream is checked for depth, count and tags before the recursive composer sees the text."""
    depth = nodes = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if isinstance(event, yaml.NodeEvent):
                nodes += 1
                tag = getattr(event, "tag", None)
                if tag is not None:
                    reader.problem(event.start_mark, "", f"the tag {_show(str(tag))} is not accepted: plain YAML without tags")
            if depth > MAX_DEPTH or nodes > MAX_NODES:
                reader.problem(event.start_mark, "", f"nested deeper than {MAX_DEPTH} or more than {MAX_NODES} values: "
                               "a policy of a few hundred lines")
                raise _Unreadable
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        reader.problem(error.problem_mark or error.context_mark, "", f"is no YAML ({_show(what)}): well-formed YAML")
        raise _Unreadable from error
    except yaml.YAMLError as error:
        reader.problem(None, "", f"is no YAML ({_show(str(error).splitlines()[0])}): well-formed YAML")
        raise _Unreadable from error
    except (ValueError, RecursionError) as error:  # PyYAML lets int() and chr() of odd escapes through
        reader.problem(None, "", f"is no YAML ({type(error).__name__}): well-formed YAML")
        raise _Unreadable from error
    if root is None:
        reader.problem(None, "", f"is empty: a policy that begins with `schema: {SCHEMA_ID}`")
        raise _Unreadable
    return root


class _Reader:
    """Turns nodes into placed values by the model's annotations, and collects what does not fit."""

    def __init__(self, file: str, directory: Path | None = None) -> None:
        self.file = file
        self.directory = directory
        self.problems: list[str] = []
        self._visited = 0

    def problem(self, mark: Any, key: str, text: str) -> None:
        place = self.file if mark is None else f"{self.file}:{mark.line + 1}:{mark.column + 1}"
        self.problems.append(f"{place}: {key}: {text}" if key else f"{place}: {text}")

    def place(self, node: yaml.Node) -> str:
        mark = node.start_mark
        return self.file if mark is None else f"{self.file}:{mark.line + 1}:{mark.column + 1}"

    def _bad(self, node: yaml.Node, key: tuple[str, ...], text: str) -> None:
        self.problem(node.start_mark, ".".join(key), text)

    def document(self, root: yaml.Node) -> _Parsed | None:
        if not isinstance(root, yaml.MappingNode):
            self._bad(root, (), f"is {_kind(root)}: a mapping that begins with `schema: {SCHEMA_ID}`")
            return None
        extra = {"schema": FieldInfo(annotation=str), "extends": FieldInfo(annotation=str)}
        fields = {**extra, **dict(yaml_fields(Policy))}
        tree = self._fields(root, fields, (), note=dict.fromkeys(COMPUTED, "set by the loader, not written in a file"))
        schema = tree.pop("schema", None)
        if schema is None:
            if not any(isinstance(k, yaml.ScalarNode) and k.value == "schema" for k, _ in root.value):
                self._bad(root, ("schema",), f"is missing: `schema: {SCHEMA_ID}`")
        elif schema.value != SCHEMA_ID:
            self.problems.append(f"{schema.place}: schema: {_show(schema.value)} is not known to this version: {SCHEMA_ID}")
        return _Parsed(tree.pop("extends", None), tree)

    def _fields(self, node: yaml.MappingNode, fields: Mapping[str, FieldInfo], key: tuple[str, ...],
                note: Mapping[str, str] = types.MappingProxyType({})) -> dict[str, _Placed]:
        result: dict[str, _Placed] = {}
        for name, key_node, value_node in self._pairs(node, key):
            info = fields.get(name)
            if info is None:
                why = note.get(name, "unknown key")
                self._bad(key_node, (*key, _show(name)), f"{why}: one of {', '.join(fields)}{_nearest(name, fields)}")
                continue
            value = self.value(value_node, info.annotation, info.metadata, (*key, name))
            if value is not None:
                result[name] = value
        return result

    def _pairs(self, node: yaml.MappingNode, key: tuple[str, ...]) -> Iterable[tuple[str, yaml.ScalarNode, yaml.Node]]:
        """Key text, key node, value node; what is no plain key, or comes twice, is reported and left out."""
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._bad(key_node, key, f"a key is {_kind(key_node)}: a plain word")
                continue
            name = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._bad(key_node, key, "merge keys (<<) are not accepted: write the values out, or use `extends`")
            elif name in seen:
                first = seen[name].start_mark
                self._bad(key_node, (*key, _show(name)), f"written twice (first on line {first.line + 1}): each key once")
            else:
                seen[name] = key_node
                yield name, key_node, value_node

    def value(self, node: yaml.Node, annotation: Any, metadata: Sequence[Any], key: tuple[str, ...]) -> _Placed | None:
        """The value of one node, or None after a problem was noted."""
        self._visited += 1
        if self._visited > MAX_NODES:
            self._bad(node, key, f"aliases stand for more than {MAX_NODES} values: a policy of a few hundred lines")
            raise _Unreadable
        origin = get_origin(annotation)
        if origin is Annotated:
            inner, *more = get_args(annotation)
            flat = [m for item in more for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
            return self.value(node, inner, [*metadata, *flat], key)
        if origin in (Union, types.UnionType):
            inner = next(a for a in get_args(annotation) if a is not type(None))
            if isinstance(node, yaml.ScalarNode) and node.tag == _NULL:
                return _Placed(None, self.place(node))
            return self.value(node, inner, metadata, key)
        if origin is tuple:
            return self._list(node, get_args(annotation)[0], key)
        if origin is dict:
            key_type, item = get_args(annotation)
            return self._dict(node, key_type, item, key)
        if issubclass(annotation, BaseModel):
            return self._model(node, annotation, key)
        return self._scalar(node, annotation, metadata, key)

    def _model(self, node: yaml.Node, model: type[BaseModel], key: tuple[str, ...]) -> _Placed | None:
        if isinstance(node, yaml.ScalarNode) and short_form(model) and node.tag != _NULL:
            info = model.model_fields["path"]
            path = self.value(node, info.annotation, info.metadata, key)
            return None if path is None else _Placed({"path": path}, path.place)
        fields = dict(yaml_fields(model))
        if not isinstance(node, yaml.MappingNode):
            self._bad(node, key, f"is {_kind(node)}: a mapping with {', '.join(fields)}")
            return None
        before = len(self.problems)
        result = self._fields(node, fields, key)
        missing = [n for n, info in fields.items() if info.is_required() and n not in result]
        if missing and len(self.problems) == before:
            self._bad(node, key, f"{', '.join(missing)} is missing: a mapping with {', '.join(fields)}")
        return _Placed(result, self.place(node))

    def _list(self, node: yaml.Node, item: Any, key: tuple[str, ...]) -> _Placed | None:
        if not isinstance(node, yaml.SequenceNode):
            self._bad(node, key, f"is {_kind(node)}: a list such as [a, b]")
            return None
        values = [self.value(n, item, (), (*key, str(i))) for i, n in enumerate(node.value)]
        return _Placed([v for v in values if v is not None], self.place(node))

    def _dict(self, node: yaml.Node, key_type: Any, item: Any, key: tuple[str, ...]) -> _Placed | None:
        if not isinstance(node, yaml.MappingNode):
            self._bad(node, key, f"is {_kind(node)}: a mapping")
            return None
        result: dict[str, _Placed] = {}
        for name, key_node, value_node in self._pairs(node, key):
            checked = self.value(_as_text(key_node), key_type, (), (*key, _show(name)))
            value = self.value(value_node, item, (), (*key, _show(name)))
            if checked is not None and value is not None:
                result[name] = value
        return _Placed(result, self.place(node))

    def _scalar(self, node: yaml.Node, kind: type, metadata: Sequence[Any], key: tuple[str, ...]) -> _Placed | None:
        accepted = _accepted(kind, metadata)
        if not isinstance(node, yaml.ScalarNode):
            self._bad(node, key, f"is {_kind(node)}: {accepted}")
            return None
        if node.tag == _NULL and _is_plain(node):
            self._bad(node, key, f"has no value: {accepted}")
            return None
        try:
            value = self._convert(node, kind, metadata)
        except ValueError as error:
            self._bad(node, key, str(error))
            return None
        return _Placed(value, self.place(node))

    def _convert(self, node: yaml.ScalarNode, kind: type, metadata: Sequence[Any]) -> Any:
        """Raises ValueError with `what is wrong: what is accepted`."""
        text, accepted = node.value, _accepted(kind, metadata)
        if issubclass(kind, Enum):
            values = [m.value for m in kind]
            if text not in values:
                raise ValueError(f"{_show(text)} is not known{_trap(node)}: {accepted}{_nearest(text, values)}")
            return text
        for unit, parse in ((Unit.SIZE, parse_size), (Unit.DURATION, parse_duration)):
            if unit in metadata:
                if ":" in text and _trap(node):
                    raise ValueError(f"got {_show(text)}{_trap(node)}: want {accepted}")
                return _bounded(parse(text), metadata, text, accepted)
        if kind is bool:
            if text not in ("true", "false"):
                raise ValueError(f"got {_show(text)}: want true or false")
            return text == "true"
        if kind is int:
            if not _INT.fullmatch(text):
                raise ValueError(f"got {_show(text)}{_trap(node)}: want {accepted}")
            if len(text) > 18:
                raise ValueError(f"{_show(text)} is too large: {accepted}")
            return _bounded(int(text), metadata, text, accepted)
        if kind is float:
            if not _FLOAT.fullmatch(text) or len(text) > 32:
                raise ValueError(f"got {_show(text)}{_trap(node)}: want {accepted}")
            return _bounded(float(text), metadata, text, accepted)
        if node.tag != _STR:
            raise ValueError(f"{_show(text)} is no text{_trap(node)}: {accepted}; put quotes around it if it is meant so")
        return self._word(text, next((m for m in metadata if isinstance(m, Word)), Word.TEXT))

    def _word(self, text: str, word: Word) -> str:
        if "\0" in text:
            raise ValueError(f"{_show(text)} holds a NUL byte: {_WORDS[word]}")
        if word in (Word.INSIDE, Word.PATTERN, Word.HOST) or (word is Word.PLACE and text != "same"):
            if not text.startswith("/") or text.startswith("//") or os.path.normpath(text) != text or len(text) > 4000:
                better = os.path.normpath("/" + text.lstrip("/"))
                raise ValueError(f"{_show(text)} is no plain absolute path: {_WORDS[word]}, for instance {_show(better)}")
            if word is not Word.PATTERN and word is not Word.HOST and any(ord(c) < 32 for c in text):
                raise ValueError(f"{_show(text)} holds a control character: {_WORDS[word]}")
        elif word is Word.SYSCALL and text not in X86_64:
            raise ValueError(f"{_show(text)} is not known: {_WORDS[word]}{_nearest(text, X86_64)}")
        elif word is Word.ERRNO and text not in _ERRNO_NAMES:
            raise ValueError(f"{_show(text)} is not known: {_WORDS[word]}{_nearest(text, _ERRNO_NAMES)}")
        elif word is Word.VARIABLE and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", text):
            raise ValueError(f"{_show(text)} is no name of an environment variable: {_WORDS[word]}")
        elif word is Word.PROFILE:
            return find_profile(text, self.directory)
        return text


_ERRNO_NAMES = frozenset(errno.errorcode.values())

_WORDS: Mapping[Word, str] = {
    Word.INSIDE: "an absolute path inside the box",
    Word.PATTERN: "an absolute path inside the box, where *, ? and ** may stand",
    Word.HOST: "an absolute path of the host",
    Word.PLACE: "same, or an absolute path inside the box",
    Word.SYSCALL: "the name of a system call",
    Word.ERRNO: "an error name such as EPERM or ENOSYS",
    Word.VARIABLE: "letters, digits and _",
    Word.PROFILE: "a name from profiles/ or the path of a profile",
    Word.TEXT: "a text",
}


def _accepted(kind: type, metadata: Sequence[Any]) -> str:
    """What would do here, in words."""
    if issubclass(kind, Enum):
        return " | ".join(str(m.value) for m in kind)
    low, high = _bounds(metadata)
    unit = next((m for m in metadata if isinstance(m, Unit)), None)
    if unit is Unit.SIZE:
        return f"a size with a unit such as 512MiB or 2GiB{'' if not low else f', at least {_size(low)}'}"
    if unit is Unit.DURATION:
        return f"a time with a unit such as 1500ms, 90s, 30min or 2h{'' if not low else f', at least {low:g}ms'}"
    if kind is bool:
        return "true | false"
    if kind in (int, float):
        text = "a whole number" if kind is int else "a number"
        strict = any(isinstance(m, annotated_types.Gt) for m in metadata)
        if low is not None:
            text += f" {'>' if strict else '>='} {low:g}"
        if high is not None and high < 1 << 31:  # beyond is only a guard against nonsense
            text += f"{' and' if low is not None else ''} <= {high:g}"
        return text
    return _WORDS[next((m for m in metadata if isinstance(m, Word)), Word.TEXT)]


def _size(count: float) -> str:
    return limit_text("memory", count)


def _bounds(metadata: Sequence[Any]) -> tuple[Any, Any]:
    low: list[Any] = [m.ge if isinstance(m, annotated_types.Ge) else m.gt for m in metadata
                      if isinstance(m, annotated_types.Ge | annotated_types.Gt)]
    high: list[Any] = [m.le for m in metadata if isinstance(m, annotated_types.Le)]
    return (max(low) if low else None), (min(high) if high else None)


def _bounded(value: Any, metadata: Sequence[Any], text: str, accepted: str) -> Any:
    for m in metadata:
        if ((isinstance(m, annotated_types.Ge) and value < m.ge) or (isinstance(m, annotated_types.Gt) and value <= m.gt)
                or (isinstance(m, annotated_types.Le) and value > m.le)):
            raise ValueError(f"{_show(text)} is out of range: {accepted}")
    return value


def _as_text(node: yaml.ScalarNode) -> yaml.ScalarNode:
    """A mapping's key counts as the text that was written, whatever YAML 1.1 would make of it."""
    return yaml.ScalarNode(_STR, node.value, node.start_mark, node.end_mark, style=node.style)


def _is_plain(node: yaml.ScalarNode) -> bool:
    """Written without quotes: None from the parser in Python, "" from libyaml's."""
    return not node.style


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "empty" if node.tag == _NULL else f"the plain value {_show(node.value)}"


def _trap(node: yaml.ScalarNode) -> str:
    """YAML 1.1 reads some plain words as something else; say so where it did."""
    if not _is_plain(node) or node.start_mark is None or node.tag == _STR:
        return ""
    if node.tag == _BOOL:
        return f" (YAML 1.1 reads {node.value} as {'true' if node.value.lower() in ('yes', 'on', 'true', 'y') else 'false'})"
    if re.fullmatch(r"[-+]?0[0-7_]+", node.value):
        return f" (YAML 1.1 reads {node.value} as the octal number {int(node.value.replace('_', ''), 8)})"
    if re.fullmatch(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+", node.value):
        total = 0
        for part in node.value.replace("_", "").lstrip("+-").split(":"):
            total = total * 60 + int(part)
        return f" (YAML 1.1 reads {node.value} as {total}, minutes and seconds)"
    return f" (YAML 1.1 reads it as {node.tag.rpartition(':')[2]})"


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    if not match and word.lower() in ("no", "off", "false", "n") and "none" in known:
        match = ["none"]
    return f" (did you mean {match[0]}?)" if match else ""


def _show(text: str) -> str:
    """A text of a file for a message: one line, nothing that a terminal would act on, not endless."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= 200 else clean[:197] + "..."
