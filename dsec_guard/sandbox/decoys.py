"""What stands where hidden material would: the same names and sizes, other content, different in every box.

The decoys of a box are one tmpfs that was never mounted anywhere on the host; its parts are attached inside the box,
read-only. Names and sizes are taken from the real objects, content never: no byte of a real file is read. Opening a
decoy is evidence, and a word of its content in what the agent hands in says where that came from.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.util
import json
import marshal
import os
import pickle
import random
import stat
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dsec_guard.errors import SetupError
from dsec_guard.host import mount
from dsec_guard.host.walk import Walk, WalkLimits, open_beneath
from dsec_guard.model import escape_bytes, unescape_bytes
from dsec_guard.policy.schema import Answers, HiddenStyle
from dsec_guard.sandbox.globs import has_magic, matches, static_prefix

MAX_ENTRIES = 10_000
MAX_DEPTH = 64
MAX_CONTENT = 1 << 20       # bytes of made-up content per file; larger files end in a hole
MAX_TOTAL_CONTENT = 16 << 20
MAX_MATCHES = 256           # objects one pattern may stand for
_ATTRIBUTES = mount.MOUNT_ATTR_RDONLY | mount.MOUNT_ATTR_NOSUID | mount.MOUNT_ATTR_NODEV | mount.MOUNT_ATTR_NOEXEC

_WORDS = (
    "amber", "anchor", "apple", "arrow", "atlas", "basin", "beacon", "birch", "bridge", "cabin", "candle",
    "canyon", "cedar", "circle", "cloud", "copper", "coral", "crane", "delta", "dune", "eagle", "ember", "falcon",
    "fern", "field", "flint", "forest", "garden", "glacier", "grove", "harbor", "hazel", "heron", "hollow",
    "island", "ivory", "juniper", "kettle", "lagoon", "lantern", "lemon", "maple", "marble", "meadow", "mirror",
    "mosaic", "nectar", "north", "oasis", "olive", "orchid", "otter", "pebble", "pepper", "pine", "planet",
    "prairie", "quartz", "quiver", "raven", "reed", "ridge", "river", "saddle", "sage", "sierra", "silver",
    "spruce", "stone", "summit", "thistle", "timber", "topaz", "tulip", "valley", "velvet", "violet", "walnut",
    "willow", "winter",
)


@dataclass(frozen=True)
class DecoyObject:
    """A protected file or directory. object: its path inside. dev: as `s_dev` in the kernel, (major << 20) | minor.

    label: `hidden` (a decoy for something the policy hides), `environment_state` (the real thing, read-only), or that of
    a planted file.
    decoy: what stands inside is made up, whether or not there is a real one elsewhere.
    """

    object: str
    dev: int
    ino: int
    is_dir: bool
    label: str = "hidden"
    decoy: bool = False


@dataclass(frozen=True)
class DecoyMount:
    """One detached, read-only mount to be attached at `target` (absolute, inside). The tree owns the descriptor."""

    target: str
    fd: int
    is_dir: bool


@dataclass(frozen=True)
class Canary:
    """A word that exists nowhere but in the decoy `object` of this one box."""

    token: bytes
    object: str


@dataclass(frozen=True)
class Planted:
    """One made-up file of its own at `target` inside, where a mount point exists; token: in its content, or empty."""

    target: str
    content: bytes
    label: str
    token: bytes = b""


@dataclass
class DecoyTree:
    """Everything made by `build_decoys`; a context manager, or call `close` once the box has its mounts.

    objects: for fanotify marks and the table of protected inodes (directories included: `is_dir`).
    tree_fd: the root of the tmpfs, kept open so that inode numbers stay pinned; -1 where there is nothing to hide.
    """

    tree_fd: int = -1
    mounts: list[DecoyMount] = field(default_factory=list)
    objects: list[DecoyObject] = field(default_factory=list)
    canaries: list[Canary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        for item in self.mounts:
            os.close(item.fd)
        self.mounts = []
        if self.tree_fd >= 0:
            os.close(self.tree_fd)
            self.tree_fd = -1

    def __enter__(self) -> DecoyTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_object(self, item: DecoyObject) -> int:
        """An O_PATH descriptor of a decoy, for marking its inode; the caller closes it."""
        for index, part in enumerate(self.mounts):
            if item.object == part.target:
                return os.open(f"/proc/self/fd/{part.fd}", os.O_PATH | os.O_CLOEXEC)
            if item.object.startswith(part.target + "/"):
                below = unescape_bytes(item.object[len(part.target) + 1:])
                return open_beneath(self.tree_fd, b"%d/" % index + below, os.O_PATH)
        raise KeyError(item.object)


@dataclass(frozen=True)
class Alias:
    """The host directory or file `source` stands at `target` inside (the workspace, a read-only bind)."""

    source: str
    target: str


@dataclass(frozen=True)
class Hidden:
    """One place inside that must be covered, and the real object its shape is taken from (None: invented)."""

    path: str
    source: str | None


def hidden_places(answers: Answers, aliases: Sequence[Alias] = ()) -> list[Hidden]:
    """Every path inside at which hidden material would be met, outermost only, by path.

    Patterns are expanded against the host: at their `source`, or below an alias they fall into. A hidden source that
    also lies inside an alias (a workspace or bind that contains it) gets a second place there.
    """
    found: dict[str, Hidden] = {}
    for item in answers.hidden:
        path = _normal(item.path)
        if has_magic(path):
            for place in _expand(path, item.source, aliases):
                found.setdefault(place.path, place)
            continue
        source = item.source or _through(path, aliases) or path
        real = os.path.realpath(source) if os.path.lexists(source) else None
        found.setdefault(path, Hidden(path, real))
        for again in _exposed(real, aliases) if real else ():
            found.setdefault(again, Hidden(again, real))
    ordered = sorted(found)
    kept: list[Hidden] = []
    for path in ordered:
        if not any(path.startswith(item.path.rstrip("/") + "/") for item in kept):
            kept.append(found[path])
    return kept


def _normal(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _through(path: str, aliases: Sequence[Alias]) -> str | None:
    """The host path behind an inside path, where an alias covers it."""
    best: str | None = None
    length = -1
    for alias in aliases:
        below = _below(path, alias.target)
        if below is not None and len(alias.target) > length:
            best, length = (f"{alias.source}/{below}" if below else alias.source), len(alias.target)
    return best


def _below(path: str, top: str) -> str | None:
    if path == top:
        return ""
    prefix = top.rstrip("/") + "/"
    return path[len(prefix):] if path.startswith(prefix) else None


def _exposed(real: str, aliases: Sequence[Alias]) -> list[str]:
    places: list[str] = []
    for alias in aliases:
        below = _below(real, os.path.realpath(alias.source))
        if below is not None:
            places.append(f"{alias.target.rstrip('/')}/{below}" if below else alias.target)
    return places


def _expand(pattern: str, source: str | None, aliases: Sequence[Alias]) -> list[Hidden]:
    base = static_prefix(pattern)
    host = source or _through(base, aliases) or base
    places: list[Hidden] = []
    try:
        top = os.open(host, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return places
    try:
        matched: set[bytes] = set()
        walk = Walk(top, WalkLimits(max_entries=MAX_ENTRIES * 10), lambda entry: entry.path not in matched)
        for entry in walk:
            inside = base.rstrip("/") + "/" + os.fsdecode(entry.path)
            if matches(pattern, inside) and not stat.S_ISLNK(entry.stat.st_mode):
                matched.add(entry.path)
                places.append(Hidden(inside, os.path.join(host, os.fsdecode(entry.path))))
                if len(places) > MAX_MATCHES:
                    raise SetupError(f"the hidden pattern {pattern!r} matches more than {MAX_MATCHES} objects",
                                     step="decoys", hint="name the directory that holds them instead")
        if walk.truncated:
            raise SetupError(f"{host!r} holds too many files to look for {pattern!r}", step="decoys",
                             hint="name the hidden directory instead of a pattern")
    finally:
        os.close(top)
    return places


def build_decoys(
    answers: Answers, seed: bytes, *, owner_uid: int = 0, owner_gid: int = 0, aliases: Sequence[Alias] = (),
    planted: Sequence[Planted] = (), force_namespace: bool = False,
) -> DecoyTree:
    """Make the decoys for everything `answers.hidden` names, and list the protected objects.

    seed: differs per box; the same seed gives the same content. owner: host ids the files belong to. aliases: host
    directories that show inside (workspace, binds). planted: files beside what is hidden. force_namespace: clone the parts
    the way older kernels need it.
    With style `absent` there are no decoys, and only what lies inside an alias is covered, by empty ones.
    Raises SetupError when something hidden cannot be covered.
    """
    tree = DecoyTree()
    places = hidden_places(answers, aliases)
    if answers.style is HiddenStyle.ABSENT:
        places = [place for place in places if _through(place.path, aliases) is not None]
    # What does not exist in a workspace or a bind is left absent there: covering it would need a mount point.
    places = [place for place in places
              if _through(place.path, aliases) is None or os.path.lexists(_through(place.path, aliases) or "")]
    try:
        if places or planted:
            _Builder(tree, seed, owner_uid, owner_gid, empty=answers.style is HiddenStyle.ABSENT).build(
                places, planted, force_namespace)
        _state_objects(tree, answers)
    except OSError as problem:
        tree.close()
        raise SetupError(f"the decoys of hidden material could not be made: {problem}", step="decoys",
                         errno_name=errno.errorcode.get(problem.errno or 0, "")) from problem
    except BaseException:
        tree.close()
        raise
    return tree


def _state_objects(tree: DecoyTree, answers: Answers) -> None:
    """The real files of `environment_state`: the same inodes stand, read-only, inside."""
    for item in answers.environment_state:
        source = item.source or item.path
        try:
            handle = os.open(os.path.realpath(source), os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            tree.notes.append(f"environment state {escape_bytes(os.fsencode(source))} does not exist on this host")
            continue
        try:
            path = _normal(item.path)
            _note_state(tree, path, os.fstat(handle))
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                walk = Walk(handle, WalkLimits(max_entries=MAX_ENTRIES))
                for entry in walk:
                    _note_state(tree, f"{path}/{escape_bytes(entry.path)}", entry.stat)
                if walk.skipped:
                    tree.notes.append(f"environment state {path} is too large to be watched file by file")
        finally:
            os.close(handle)


def _note_state(tree: DecoyTree, path: str, info: os.stat_result) -> None:
    tree.objects.append(DecoyObject(path, mount.kernel_dev(info.st_dev), info.st_ino, stat.S_ISDIR(info.st_mode),
                                    label="environment_state"))


@dataclass(frozen=True)
class _Shape:
    """A file or directory to imitate. path: relative to its object, b"" for the object itself."""

    path: bytes
    is_dir: bool
    size: int = 0
    executable: bool = False
    mtime_ns: int = 0
    content: bytes | None = None


class _Builder:
    def __init__(self, tree: DecoyTree, seed: bytes, uid: int, gid: int, *, empty: bool) -> None:
        self.tree = tree
        self.seed = seed
        self.uid = uid
        self.gid = gid
        self.empty = empty
        self.content_left = MAX_TOTAL_CONTENT

    def build(self, places: list[Hidden], planted: Sequence[Planted], force_namespace: bool) -> None:
        shapes = [self._shapes(place) for place in places]
        labels = {len(places) + index: item.label for index, item in enumerate(planted)}
        shapes += [[_Shape(b"", False, size=len(item.content), mtime_ns=1_700_000_000 * 10**9, content=item.content)]
                   for item in planted]
        places = [*places, *(Hidden(item.target, None) for item in planted)]
        self.tree.canaries += [Canary(item.token, item.target) for item in planted if item.token]
        count = sum(len(found) for found in shapes) + len(places) + 2
        # Room in blocks, not bytes: every file begins a page of its own, and holes take none.
        room = MAX_TOTAL_CONTENT + 4096 * 4 * count
        self.tree.tree_fd = mount.new_tmpfs(size_bytes=room, inodes=2 * count + 16, mode=0o755)
        names: list[bytes] = []
        for index, (place, found) in enumerate(zip(places, shapes, strict=True)):
            name = b"%d" % index
            names.append(name)
            self._write(name, place, found, labels.get(index, "hidden"))
        if force_namespace:
            fds = mount.in_private_mount_namespace(
                lambda: mount.clone_attached(self.tree.tree_fd, names))
        else:
            fds = mount.clone_parts(self.tree.tree_fd, names)
        for place, found, fd in zip(places, shapes, fds, strict=True):
            self.tree.mounts.append(DecoyMount(place.path, fd, found[0].is_dir))
        for fd in fds:
            mount.mount_setattr(fd, set_attributes=_ATTRIBUTES)

    # -------------------------------------------------------------------------------------------------- shapes

    def _shapes(self, place: Hidden) -> list[_Shape]:
        """What to imitate, the object itself first, parents before children."""
        if self.empty:
            return [_Shape(b"", place.source is None or os.path.isdir(place.source))]
        if place.source is None:
            return self._invented(place.path)
        try:
            handle = os.open(place.source, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._invented(place.path)
        try:
            info = os.fstat(handle)
            if not stat.S_ISDIR(info.st_mode):
                return [_shape(b"", info)]
            if _is_repository(handle):
                return self._repository(place.path, info.st_mtime_ns)
            shapes = [_shape(b"", info)]
            walk = Walk(handle, WalkLimits(max_entries=MAX_ENTRIES, max_depth=MAX_DEPTH))
            for entry in walk:
                if stat.S_ISDIR(entry.stat.st_mode) or stat.S_ISREG(entry.stat.st_mode):
                    shapes.append(_shape(entry.path, entry.stat))
            if walk.skipped:
                self.tree.notes.append(
                    f"the decoy for {place.path} shows only a part of what is there ({len(shapes)} entries)")
            return shapes
        finally:
            os.close(handle)

    def _invented(self, path: str) -> list[_Shape]:
        name = path.rsplit("/", 1)[-1]
        if name.endswith(".git"):
            return self._repository(path, 1_700_000_000 * 10**9)
        rng = self._random(path)
        if "." in name.strip("."):
            return [_Shape(b"", False, size=rng.randrange(200, 4000), mtime_ns=1_700_000_000 * 10**9)]
        files = [f"{rng.choice(_WORDS)}.{suffix}" for suffix in ("json", "txt", "py", "md")]
        files.append(f"{rng.choice(_WORDS)}/{rng.choice(_WORDS)}_01.txt")
        shapes = [_Shape(b"", True)]
        for item in sorted(set(files)):
            if "/" in item:
                shapes.append(_Shape(item.rpartition("/")[0].encode(), True))
            shapes.append(_Shape(item.encode(), False, size=rng.randrange(150, 3000), mtime_ns=1_700_000_000 * 10**9))
        return shapes

    def _repository(self, path: str, mtime_ns: int) -> list[_Shape]:
        token = self._token_for(path, b"")
        # It stands in a compressed object: only a checkout or `git show` brings it to light.
        self.tree.canaries.append(Canary(token, path))
        return _git_repository(self._random(path), token, mtime_ns)

    def _random(self, path: str, below: bytes = b"") -> random.Random:
        digest = hashlib.sha256(self.seed + b"\0" + os.fsencode(path) + b"\0" + below).digest()
        return random.Random(digest)  # repeatable from the seed on purpose: it protects nothing

    def _token_for(self, path: str, below: bytes) -> bytes:
        digest = hashlib.sha256(b"token\0" + self.seed + b"\0" + os.fsencode(path) + b"\0" + below).hexdigest()
        return digest[:16].encode()

    # ------------------------------------------------------------------------------------------------- writing

    def _write(self, top: bytes, place: Hidden, shapes: list[_Shape], label: str) -> None:
        root = self.tree.tree_fd
        dev = mount.kernel_dev(os.fstat(root).st_dev)
        directories: list[tuple[bytes, _Shape]] = []
        for shape in shapes:
            path = top + b"/" + shape.path if shape.path else top
            inside = f"{place.path}/{escape_bytes(shape.path)}" if shape.path else place.path
            parent_path, _, name = path.rpartition(b"/")
            parent = open_beneath(root, parent_path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if shape.is_dir:
                    os.mkdir(name, 0o755, dir_fd=parent)
                    directories.append((path, shape))
                else:
                    self._write_file(parent, name, place.path, inside, shape)
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(parent)
            self.tree.objects.append(DecoyObject(inside, dev, info.st_ino, shape.is_dir, label=label, decoy=True))
        for path, shape in reversed(directories):
            handle = open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fchown(handle, self.uid, self.gid)
                os.fchmod(handle, 0o555)
                os.utime(handle, ns=(shape.mtime_ns, shape.mtime_ns))
            finally:
                os.close(handle)

    def _write_file(self, parent: int, name: bytes, place: str, inside: str, shape: _Shape) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            token = self._token_for(place, shape.path)
            content = shape.content
            if content is None:
                wanted = 0 if self.empty else min(shape.size, MAX_CONTENT, self.content_left)
                leaf = (shape.path or os.fsencode(place)).rpartition(b"/")[2]
                content = plausible(leaf, wanted, self._random(place, shape.path), token)
            self.content_left -= len(content)
            os.pwrite(fd, content, 0)
            if shape.content is None and not self.empty:
                os.ftruncate(fd, shape.size)
            if token in content:
                self.tree.canaries.append(Canary(token, inside))
            os.fchown(fd, self.uid, self.gid)
            os.fchmod(fd, 0o555 if shape.executable else 0o444)
            os.utime(fd, ns=(shape.mtime_ns, shape.mtime_ns))
        finally:
            os.close(fd)


def _shape(path: bytes, info: os.stat_result) -> _Shape:
    is_dir = stat.S_ISDIR(info.st_mode)
    return _Shape(path, is_dir, size=0 if is_dir else info.st_size, executable=bool(info.st_mode & 0o111),
                  mtime_ns=info.st_mtime_ns)


# ---------------------------------------------------------------------------------------------------------- content


def plausible(name: bytes, size: int, rng: random.Random, token: bytes) -> bytes:
    """`size` bytes that look like a file of this name and hold `token` where there is room for it.

    The kind is told by the suffix alone; the content says nothing about any real file.
    """
    if size <= 0:
        return b""
    suffix = name.rpartition(b".")[2].lower() if b"." in name else b""
    if suffix in (b"json", b"jsonl", b"ipynb"):
        return _json(size, rng, token)
    make = {
        b"py": _python, b"pyi": _python, b"patch": _patch, b"diff": _patch, b"csv": _csv, b"tsv": _csv,
        b"yaml": _yaml, b"yml": _yaml, b"toml": _yaml, b"md": _prose, b"rst": _prose,
    }.get(suffix)
    if suffix in _LOADABLE:
        body = _LOADABLE[suffix](_fill(max(size // 4, 16), rng, token, _python))
        if len(body) <= size:
            return body + bytes(size - len(body))  # readers of these formats stop at their end
    if make is None and suffix in _BINARY:
        head = _BINARY[suffix] + token
        return (head + rng.randbytes(max(size - len(head), 0)))[:size]
    return _fill(size, rng, token, make or _lines)


def _bytecode(text: bytes) -> bytes:
    code = compile(f"DATA = {text!r}\n", "<string>", "exec")
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


#: What a program loads as a whole: a broken one would tell at once that it is no real file.
_LOADABLE: dict[bytes, Callable[[bytes], bytes]] = {
    b"pyc": _bytecode, b"pkl": lambda text: pickle.dumps({"data": text}, protocol=4),
    b"gz": lambda text: gzip.compress(text, mtime=0),
}
_BINARY = {
    b"pyc": b"\xa7\r\r\n\0\0\0\0", b"png": b"\x89PNG\r\n\x1a\n", b"gz": b"\x1f\x8b\x08\0", b"zip": b"PK\x03\x04",
    b"pkl": b"\x80\x04\x95", b"npy": b"\x93NUMPY\x01\0", b"so": b"\x7fELF\x02\x01\x01", b"bin": b"", b"tar": b"",
    b"db": b"SQLite format 3\0", b"sqlite": b"SQLite format 3\0", b"pt": b"PK\x03\x04", b"whl": b"PK\x03\x04",
}


def _fill(size: int, rng: random.Random, token: bytes, make: Callable[[random.Random, bytes], bytes]) -> bytes:
    out = bytearray()
    first = True
    while len(out) < size:
        out += make(rng, token if first else b"")
        first = False
    del out[size:]
    if size and out[-1:] != b"\n":
        out[-1:] = b"\n"
    return bytes(out)


def word(rng: random.Random) -> str:
    return rng.choice(_WORDS)


def _json(size: int, rng: random.Random, token: bytes) -> bytes:
    """A valid object of exactly `size` bytes where that is possible: padded by blanks before its end."""
    record: dict[str, object] = {"id": token.decode()}
    text = json.dumps(record)
    while True:
        value: object = rng.choice((rng.randrange(1000), round(rng.random() * 100, 2), f"{word(rng)} {word(rng)}"))
        record[f"{word(rng)}_{len(record)}"] = value
        longer = json.dumps(record)
        if len(longer) + 1 > size:
            break
        text = longer
    raw = text.encode()
    if len(raw) + 1 > size:
        return (b'{"' + token + b'":0}\n')[:size]
    return raw[:-1] + b" " * (size - len(raw) - 1) + b"}\n"


def _python(rng: random.Random, token: bytes) -> bytes:
    name = word(rng)
    mark = f'    """{word(rng).capitalize()} {token.decode()}."""\n' if token else ""
    call = rng.choice(("sum", "max", "min", "len"))
    return (f"def {name}_{rng.randrange(100)}({word(rng)}):\n{mark}    {word(rng)} = {rng.randrange(1000)}\n"
            f"    return {call}([{rng.randrange(9)}, {rng.randrange(99)}])\n\n\n").encode()


def _patch(rng: random.Random, token: bytes) -> bytes:
    name = f"{word(rng)}.py"
    line = rng.randrange(1, 90)
    return (f"--- a/{name}\n+++ b/{name}\n@@ -{line},3 +{line},3 @@ {token.decode()}\n     {word(rng)} = {word(rng)}\n"
            f"-    return {word(rng)}\n+    return {word(rng)} + {rng.randrange(9)}\n").encode()


def _csv(rng: random.Random, token: bytes) -> bytes:
    return f"{token.decode() or word(rng)},{rng.randrange(1000)},{rng.random():.4f}\n".encode()


def _yaml(rng: random.Random, token: bytes) -> bytes:
    return f"{word(rng)}_{rng.randrange(100)} = \"{token.decode() or word(rng)}\"\n".encode()


def _prose(rng: random.Random, token: bytes) -> bytes:
    words = " ".join(word(rng) for _ in range(rng.randrange(6, 14)))
    return f"{words.capitalize()}{' ' + token.decode() if token else ''}.\n\n".encode()


def _lines(rng: random.Random, token: bytes) -> bytes:
    return f"{token.decode() or rng.randrange(1000)} {word(rng)}\n".encode()


# ------------------------------------------------------------------------------------------------ git repositories


def _is_repository(dir_fd: int) -> bool:
    for name in (b"HEAD", b"objects", b"refs"):
        try:
            os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            return False
    return True


def git_object(kind: bytes, body: bytes, algorithm: str = "sha1") -> tuple[str, bytes]:
    """(name, content of the loose file) of a git object."""
    raw = kind + b" %d\0" % len(body) + body
    return hashlib.new(algorithm, raw, usedforsecurity=False).hexdigest(), zlib.compress(raw)


def _git_repository(rng: random.Random, token: bytes, mtime_ns: int) -> list[_Shape]:
    """A small bare repository that git reads without complaint: two commits of made-up files on `main`."""
    objects: dict[str, bytes] = {}

    def put(kind: bytes, body: bytes) -> str:
        name, packed = git_object(kind, body)
        objects[name] = packed
        return name

    def tree(files: dict[str, bytes]) -> str:
        return put(b"tree", b"".join(b"100644 " + name.encode() + b"\0" + bytes.fromhex(put(b"blob", body))
                                     for name, body in sorted(files.items())))

    files = {"README.md": plausible(b"README.md", 200, rng, b""), f"{word(rng)}.py": plausible(b"a.py", 600, rng, b"")}
    parent = ""
    for number in range(2):
        if number:
            files[f"{word(rng)}_fix.py"] = plausible(b"a.py", 500, rng, token)
        moment = 1_690_000_000 + rng.randrange(10**6) + number * 10**6
        who = f"{word(rng).capitalize()} <dev@example.invalid> {moment} +0000"
        lines = [f"tree {tree(files)}", *([f"parent {parent}"] if parent else []), f"author {who}", f"committer {who}"]
        parent = put(b"commit", ("\n".join(lines) + f"\n\n{word(rng).capitalize()} {word(rng)}\n").encode())
    text = {
        b"HEAD": b"ref: refs/heads/main\n",
        b"config": b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n",
        b"description": b"Unnamed repository; edit this file 'description' to name the repository.\n",
        b"packed-refs": b"# pack-refs with: peeled fully-peeled sorted \n" + parent.encode() + b" refs/heads/main\n",
    }
    shapes = [_Shape(b"", True, mtime_ns=mtime_ns)]
    for directory in (b"branches", b"hooks", b"info", b"objects", b"objects/info", b"objects/pack", b"refs",
                      b"refs/heads", b"refs/tags"):
        shapes.append(_Shape(directory, True, mtime_ns=mtime_ns))
    shapes += [_Shape(name, False, size=len(body), mtime_ns=mtime_ns, content=body) for name, body in text.items()]
    for prefix in sorted({name[:2] for name in objects}):
        shapes.append(_Shape(b"objects/" + prefix.encode(), True, mtime_ns=mtime_ns))
    shapes += [_Shape(f"objects/{name[:2]}/{name[2:]}".encode(), False, size=len(body), mtime_ns=mtime_ns, content=body)
               for name, body in sorted(objects.items())]
    return shapes
