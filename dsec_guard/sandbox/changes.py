"""What a box left behind: its overlay upper layers and its other writable places, looked at by descriptor.

Runs after the agent's processes are gone and only reads. Names, contents and the shape of the tree are the agent's
choice. Overlay facts used (Documentation/filesystems/overlayfs.rst): a whiteout is a 0:0 character device, an opaque
directory carries `trusted.overlay.opaque`, a copied-up file `trusted.overlay.origin`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import stat
import sys
from dataclasses import dataclass, field

from dsec_guard.host.walk import Entry, Walk, WalkLimits, data_segments, open_beneath, open_dir, open_regular
from dsec_guard.model import FileChanged, Source, escape_bytes

DIGEST_LIMIT = 64 << 20
DIGEST_BUDGET = 1 << 30
HEAD_BYTES = 4096
HEAD_BUDGET = 4 << 20
_BLOCK = 1 << 20
_XATTR = "trusted.overlay."

# Files that a shell, an interpreter, git, a build tool or a test runner reads by itself when it starts.
_START_NAMES = frozenset(
    b"conftest.py sitecustomize.py usercustomize.py setup.py noxfile.py tasks.py manage.py Makefile GNUmakefile "
    b"makefile justfile CMakeLists.txt CMakePresets.json package.json .npmrc .yarnrc .yarnrc.yml .pypirc pip.conf "
    b".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin .kshrc "
    b".inputrc .envrc .env .pdbrc .pdbrc.py .pythonrc .pythonrc.py .pythonstartup .gdbinit .lldbinit .vimrc .exrc "
    b".curlrc .wgetrc .netrc .gitconfig .gitattributes .gitmodules .coveragerc .pylintrc .babelrc .eslintrc.js "
    b"authorized_keys ld.so.preload crontab build.rs .condarc .mocharc.js .mocharc.json .mocharc.cjs "
    b"pyvenv.cfg tsconfig.json .RProfile .Rprofile .irbrc .rspec .perldb".split()
)
_START_SUFFIXES = (b".pth", b".cfg", b".ini", b".toml", b".service", b".desktop", b".egg-link", b"._pth")
_START_PATTERN = re.compile(
    rb"(^|/)(\.git/(hooks/[^/]+|config|config\.worktree|info/attributes)|\.ssh/[^/]+|\.config/[^/]+/[^/]+"
    rb"|\.vscode/[^/]+\.json|\.cargo/config(\.toml)?|\.mvn/[^/]+|\.husky/[^/]+|\.github/workflows/[^/]+"
    rb"|[^/]+\.(config|conf|setup)\.[cm]?[jt]s|profile\.d/[^/]+|(jest|vitest|karma|babel)\.[^/]+)$"
)
_SOURCE_SUFFIXES = (b".py", b".sh", b".js", b".mjs", b".cjs", b".ts", b".rb", b".pl", b".c", b".go", b".rs", b".json")
_LIBRARY_DIRS = frozenset((b"site-packages", b"dist-packages", b"node_modules", b"__pycache__", b".git"))

_TEST_TOOLS = frozenset(("pytest", "_pytest", "pluggy", "unittest", "nose", "nose2", "hypothesis", "coverage", "tox"))
# Modules of the standard library nobody imports at start and whose names projects use for their own scripts.
_COMMON_NAMES = frozenset(("test", "this", "antigravity", "idlelib", "turtledemo", "turtle", "__main__"))
_SHADOWED = (frozenset(sys.stdlib_module_names) | _TEST_TOOLS) - _COMMON_NAMES
_MODULE_SUFFIXES = (".py", ".pyc", ".so")
_PROJECT_MARKS = (
    b"pyproject.toml", b"setup.py", b"setup.cfg", b"pytest.ini", b"tox.ini", b".git", b"tests", b"conftest.py",
)
_VENV_PARTS = frozenset(
    (b"lib", b"lib64", b"bin", b"include", b"share", b"etc", b"pyvenv.cfg", b".gitignore", b".lock", b"CACHEDIR.TAG")
)


@dataclass(frozen=True)
class ChangeLimits:
    """max_entries bounds the walked upper names and, once more, the removed names listed."""

    max_entries: int = 20_000
    max_depth: int = 8192
    digest_limit: int = DIGEST_LIMIT
    digest_budget: int = DIGEST_BUDGET
    head_budget: int = HEAD_BUDGET


@dataclass(frozen=True)
class ChangeReport:
    """events: by path bytes. complete: nothing was left out; `skipped` says what was, as (escaped path, why)."""

    events: tuple[FileChanged, ...]
    complete: bool
    skipped: tuple[tuple[str, str], ...] = ()
    entries: int = 0
    bytes_on_disk: int = 0


def overlay_xattr(path_fd: int, name: str) -> bytes | None:
    """The value of `trusted.overlay.<name>` of an open file or directory, None when it has none."""
    try:
        return os.getxattr(path_fd, _XATTR + name)
    except OSError as problem:
        if problem.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def file_type(mode: int) -> str:
    for test, word in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "symlink"),
                       (stat.S_ISFIFO, "fifo"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "char")):
        if test(mode):
            return word
    return "block"


def is_opaque(dir_fd: int) -> bool:
    return overlay_xattr(dir_fd, "opaque") == b"y"


@dataclass
class Layers:
    """An upper tree over an optional lower one, and what an overlay shows of the lower below each upper directory.

    The walk must be in pre-order, as `Walk` does it: `enter` of a directory comes before anything below it.
    """

    upper_fd: int
    lower_fd: int
    shown: dict[bytes, bool] = field(default_factory=dict)
    only_upper: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.shown[b""] = self.lower_fd >= 0

    def lower_shown_in(self, directory: bytes) -> bool:
        return self.shown.get(directory, False)

    def lower_stat(self, path: bytes) -> os.stat_result | None:
        """lstat of what shows through from the lower at `path`, None where nothing does."""
        if not self.lower_shown_in(parent_of(path)):
            return None
        return self.raw_lower_stat(path)

    def raw_lower_stat(self, path: bytes) -> os.stat_result | None:
        """lstat of what the lower has at `path`, shown or not."""
        if self.lower_fd < 0 or parent_of(path) in self.only_upper:
            return None
        try:
            handle = open_beneath(self.lower_fd, path, os.O_PATH)
        except OSError as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG):
                return None
            raise
        try:
            return os.fstat(handle)
        finally:
            os.close(handle)

    def enter(self, entry: Entry) -> bool:
        """Note what shows below the upper directory `entry`; returns whether it is opaque over a lower directory."""
        if self.raw_lower_stat(entry.path) is None:
            self.only_upper.add(entry.path)
        lower = self.lower_stat(entry.path)
        covers = lower is not None and stat.S_ISDIR(lower.st_mode)
        opaque = False
        if covers:
            handle = open_dir(entry.parent_fd, entry.name)
            try:
                opaque = is_opaque(handle)
            finally:
                os.close(handle)
        self.shown[entry.path] = covers and not opaque
        return opaque

    def exists(self, path: bytes) -> bool:
        """Whether the merged view has something at `path` (a name beside an entry already visited)."""
        try:
            handle = open_beneath(self.upper_fd, path, os.O_PATH)
        except OSError:
            return self.lower_stat(path) is not None
        try:
            return not is_whiteout(os.fstat(handle))
        finally:
            os.close(handle)


def parent_of(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def same_content(a_fd: int, b_fd: int, size: int) -> bool:
    """Whether two files of `size` bytes hold the same. Holes count as zeros, without being read."""
    segments = list(data_segments(a_fd, size))
    if any(not _same_range(a_fd, b_fd, offset, length) for offset, length in segments):
        return False
    # What is a hole in a must read as zeros in b: only b's own data there has to be looked at.
    return all(_zeros_outside(b_fd, offset, length, segments) for offset, length in data_segments(b_fd, size))


def _same_range(a_fd: int, b_fd: int, offset: int, length: int) -> bool:
    end = offset + length
    while offset < end:
        a = os.pread(a_fd, min(_BLOCK, end - offset), offset)
        b = os.pread(b_fd, len(a), offset)
        if not a or a != b:
            return False
        offset += len(a)
    return True


def _zeros_outside(fd: int, offset: int, length: int, compared: list[tuple[int, int]]) -> bool:
    end = offset + length
    for start, size in compared:
        if start >= end:
            break
        if start + size <= offset:
            continue
        if offset < start and not _all_zero(fd, offset, start):
            return False
        offset = max(offset, start + size)
    return offset >= end or _all_zero(fd, offset, end)


def _all_zero(fd: int, offset: int, end: int) -> bool:
    while offset < end:
        block = os.pread(fd, min(_BLOCK, end - offset), offset)
        if not block or block.count(0) != len(block):
            return not block
        offset += len(block)
    return True


def inspect_changes(
    upper_fd: int, lower_fd: int, inside_prefix: str, *, place: str = "workspace", limits: ChangeLimits | None = None
) -> ChangeReport:
    """Every difference that `upper_fd` makes to `lower_fd`, as events with paths below `inside_prefix`.

    upper_fd, lower_fd: directories; lower_fd -1 where there is no lower (the box's /tmp or HOME in the store): then
    everything is `added`. Rewrites with equal content and type are dropped, unless execute or set-id bits changed
    (trait `mode_only`). A removed or replaced directory is listed with everything that was in it.
    Traits: executable, setuid, sparse, hardlink, in_venv, shadows_stdlib, symlink_outside, mode_only, redirected.
    Source of all events is INSPECTION, their seq is 0. Raises OSError only if the two descriptors are unusable.
    """
    return _Inspection(upper_fd, lower_fd, inside_prefix, place, limits or ChangeLimits()).run()


class _Inspection:
    def __init__(self, upper_fd: int, lower_fd: int, prefix: str, place: str, limits: ChangeLimits) -> None:
        self.layers = Layers(upper_fd, lower_fd)
        self.prefix = os.fsencode(prefix.rstrip("/"))
        self.place = place
        self.limits = limits
        self.digest_left = limits.digest_budget
        self.head_left = limits.head_budget
        self.removed_left = limits.max_entries
        self.found: list[tuple[bytes, FileChanged]] = []
        self.skipped: list[tuple[bytes, str]] = []
        self.venvs: dict[bytes, bool] = {}
        self.disk = 0

    def run(self) -> ChangeReport:
        walk = Walk(self.layers.upper_fd, WalkLimits(self.limits.max_entries, self.limits.max_depth))
        for entry in walk:
            self.disk += entry.stat.st_blocks * 512
            try:
                self._visit(entry)
            except OSError:
                self.skipped.append((entry.path, "unreadable"))
                self.layers.shown.setdefault(entry.path, False)
        self.skipped += walk.skipped
        self.found.sort(key=lambda item: item[0])
        return ChangeReport(
            events=tuple(event for _, event in self.found),
            complete=not self.skipped,
            skipped=tuple((escape_bytes(path), why) for path, why in sorted(self.skipped)),
            entries=walk.entries,
            bytes_on_disk=self.disk,
        )

    # ------------------------------------------------------------------------------------------------ one entry

    def _visit(self, entry: Entry) -> None:
        if is_whiteout(entry.stat) and self.place == "workspace":
            if (gone := self.layers.lower_stat(entry.path)) is not None:
                self._removed(entry.path, gone)
            return
        # Also below a directory that was removed and made again: what is there with equal content is no change.
        lower = self.layers.raw_lower_stat(entry.path)
        if entry.is_dir:
            self._directory(entry, lower)
            return
        if lower is not None and stat.S_ISDIR(lower.st_mode) and self.layers.lower_shown_in(parent_of(entry.path)):
            self._removed_below(entry.path)
        change = "added"
        traits: list[str] = []
        if lower is not None:
            if stat.S_IFMT(lower.st_mode) != stat.S_IFMT(entry.stat.st_mode):
                change = "retyped"
            else:
                verdict = self._compare(entry, lower)
                if verdict == "same":
                    return
                change = "modified"
                traits += ["mode_only"] if verdict == "mode_only" else []
        self._add(entry, change, traits)

    def _directory(self, entry: Entry, lower: os.stat_result | None) -> None:
        opaque = self.layers.enter(entry)
        if lower is None:
            self._add(entry, "added", self._redirect_trait(entry))
        elif not stat.S_ISDIR(lower.st_mode):
            self._add(entry, "retyped", [])
        elif opaque:
            self._removed_below(entry.path, unless_in_upper=True)

    def _redirect_trait(self, entry: Entry) -> list[str]:
        """A directory renamed inside an overlay may show another lower directory's content; our mounts forbid it."""
        if self.place != "workspace":
            return []
        handle = open_dir(entry.parent_fd, entry.name)
        try:
            return ["redirected"] if overlay_xattr(handle, "redirect") is not None else []
        finally:
            os.close(handle)

    def _compare(self, entry: Entry, lower: os.stat_result) -> str:
        if stat.S_ISLNK(entry.stat.st_mode):
            return "same" if self._link(self.layers.upper_fd, entry.path) == self._link(
                self.layers.lower_fd, entry.path) else "differs"
        if not stat.S_ISREG(entry.stat.st_mode):
            return "same" if entry.stat.st_rdev == lower.st_rdev else "differs"
        if entry.stat.st_size != lower.st_size or not self._content_equal(entry):
            return "differs"
        return "mode_only" if (entry.stat.st_mode ^ lower.st_mode) & 0o6111 else "same"

    def _content_equal(self, entry: Entry) -> bool:
        size = entry.stat.st_size
        # Twice: both files are read. Beyond the budget a rewrite counts as a change, never as none.
        if entry.stat.st_blocks * 1024 > min(self.digest_left, 2 * self.limits.digest_limit):
            return False
        self.digest_left -= entry.stat.st_blocks * 1024
        with contextlib.ExitStack() as held:
            upper = open_regular(entry.parent_fd, entry.name)
            held.callback(os.close, upper)
            parent = open_beneath(self.layers.lower_fd, parent_of(entry.path), os.O_PATH | os.O_DIRECTORY)
            held.callback(os.close, parent)
            lower = open_regular(parent, entry.name)
            held.callback(os.close, lower)
            return same_content(upper, lower, size)

    @staticmethod
    def _link(root_fd: int, path: bytes) -> bytes:
        handle = open_beneath(root_fd, path, os.O_PATH)
        try:
            return os.readlink(b"", dir_fd=handle)
        finally:
            os.close(handle)

    # ------------------------------------------------------------------------------------------------- removals

    def _removed(self, path: bytes, lower: os.stat_result) -> None:
        if not self._room(path):
            return
        self._record(path, FileChanged(
            path=self._inside(path), change="removed", ftype=file_type(lower.st_mode), mode=lower.st_mode & 0o7777,
            size=lower.st_size, place=self.place, source=Source.INSPECTION,
        ))
        if stat.S_ISDIR(lower.st_mode):
            self._removed_below(path)

    def _removed_below(self, path: bytes, *, unless_in_upper: bool = False) -> None:
        try:
            handle = open_beneath(self.layers.lower_fd, path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self.skipped.append((path, "unreadable"))
            return
        try:
            walk = Walk(handle, WalkLimits(max(self.removed_left, 0), self.limits.max_depth))
            for entry in walk:
                full = path + b"/" + entry.path
                if unless_in_upper and self._in_upper(full):
                    continue
                self.removed_left -= 1
                self._record(full, FileChanged(
                    path=self._inside(full), change="removed", ftype=file_type(entry.stat.st_mode),
                    mode=entry.stat.st_mode & 0o7777, size=entry.stat.st_size, place=self.place,
                    source=Source.INSPECTION,
                ))
            self.skipped += [(path + b"/" + below if below else path, why) for below, why in walk.skipped]
        finally:
            os.close(handle)

    def _in_upper(self, path: bytes) -> bool:
        try:
            os.close(open_beneath(self.layers.upper_fd, path, os.O_PATH))
        except OSError:
            return False
        return True

    def _room(self, path: bytes) -> bool:
        if self.removed_left <= 0:
            self.skipped.append((path, "too_many"))
            return False
        self.removed_left -= 1
        return True

    # ------------------------------------------------------------------------------------------------- additions

    def _add(self, entry: Entry, change: str, traits: list[str]) -> None:
        info = entry.stat
        mode = info.st_mode
        digest, head, target = "", "", b""
        if self._in_venv(entry.path):
            traits.append("in_venv")
        if stat.S_ISREG(mode):
            if mode & 0o111:
                traits.append("executable")
            if info.st_size > info.st_blocks * 512 and info.st_size > 4096:
                traits.append("sparse")
            if info.st_nlink > 1:
                traits.append("hardlink")
            if change != "modified" and self._shadows(entry):
                traits.append("shadows_stdlib")
            digest, head = self._read(entry, "in_venv" in traits)
        elif stat.S_ISLNK(mode):
            target = os.readlink(entry.name, dir_fd=entry.parent_fd)
            if link_leaves(entry.path, target, self.prefix):
                traits.append("symlink_outside")
        if mode & 0o6000 and not stat.S_ISDIR(mode):
            traits.append("setuid")
        self._record(entry.path, FileChanged(
            path=self._inside(entry.path), change=change, ftype=file_type(mode), mode=mode & 0o7777,
            size=0 if stat.S_ISDIR(mode) else info.st_size, link_target=escape_bytes(target), digest=digest,
            place=self.place, head=head, traits=tuple(sorted(traits)), source=Source.INSPECTION,
        ))

    def _read(self, entry: Entry, in_venv: bool) -> tuple[str, str]:
        size = entry.stat.st_size
        want_head = self._wants_head(entry, in_venv)
        want_digest = size <= self.limits.digest_limit and size <= self.digest_left
        if not (want_head or want_digest):
            return "", ""
        fd = open_regular(entry.parent_fd, entry.name)
        try:
            head = ""
            if want_head:
                raw = os.pread(fd, HEAD_BYTES, 0)
                if b"\0" not in raw:
                    head = escape_bytes(raw)
                    self.head_left -= len(raw)
            digest = ""
            if want_digest:
                self.digest_left -= size
                hasher = hashlib.sha256()
                offset = 0
                # No more than what lstat said: the size is what the budget was asked for.
                while offset < size and (block := os.pread(fd, min(_BLOCK, size - offset), offset)):
                    hasher.update(block)
                    offset += len(block)
                digest = hasher.hexdigest()
            return digest, head
        finally:
            os.close(fd)

    def _wants_head(self, entry: Entry, in_venv: bool) -> bool:
        if self.head_left < HEAD_BYTES or not entry.stat.st_size:
            return False
        path = entry.path
        if entry.name in _START_NAMES or entry.name.endswith(_START_SUFFIXES):
            return True
        if _START_PATTERN.search(self.prefix.rpartition(b"/")[2] + b"/" + path):
            return True
        if in_venv or _LIBRARY_DIRS.intersection(path.split(b"/")[:-1]):
            return False
        script = b"." not in entry.name and bool(entry.stat.st_mode & 0o111)
        return script or entry.name.endswith(_SOURCE_SUFFIXES)

    def _in_venv(self, path: bytes) -> bool:
        """Below `<venv>/lib`, `bin` and the like, where <venv> has pyvenv.cfg and an interpreter.

        A pyvenv.cfg laid beside other files does not make them a virtual environment's.
        """
        parts = path.split(b"/")
        if _VENV_PARTS.isdisjoint(parts):
            return False
        for depth in range(len(parts)):
            if parts[depth] not in _VENV_PARTS:
                continue
            root = b"/".join(parts[:depth])
            if root not in self.venvs:
                base = root + b"/" if root else b""
                self.venvs[root] = self.layers.exists(base + b"pyvenv.cfg") and (
                    self.layers.exists(base + b"bin/python") or self.layers.exists(base + b"bin/python3"))
            if self.venvs[root]:
                return True
        return False

    def _shadows(self, entry: Entry) -> bool:
        """Whether an import would find this file instead of a module of the standard library or a test tool."""
        parts = entry.path.split(b"/")
        name = os.fsdecode(entry.name)
        if name.startswith("__init__.") and len(parts) > 1:
            top, parts = os.fsdecode(parts[-2]), parts[:-1]
        else:
            top = name.partition(".")[0]
        if top not in _SHADOWED or not name.endswith(_MODULE_SUFFIXES):
            return False
        directory = b"/".join(parts[:-1])
        base = directory + b"/" if directory else b""
        if _LIBRARY_DIRS.intersection(parts) or self.layers.exists(base + b"__init__.py"):
            return False
        marked = any(self.layers.exists(base + mark) for mark in _PROJECT_MARKS)
        return marked or self._other_module(directory, entry.name)

    def _other_module(self, directory: bytes, name: bytes) -> bool:
        for root in (self.layers.upper_fd, self.layers.lower_fd if self.layers.lower_shown_in(directory) else -1):
            if root < 0:
                continue
            try:
                fd = open_beneath(root, directory, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as problem:
                if problem.errno == errno.ENOENT:
                    continue
                raise
            try:
                with os.scandir(fd) as listing:
                    for item in itertools.islice(listing, 4096):
                        if item.name.endswith(".py") and os.fsencode(item.name) != name:
                            return True
            finally:
                os.close(fd)
        return False

    def _inside(self, path: bytes) -> str:
        return escape_bytes(self.prefix + b"/" + path)

    def _record(self, path: bytes, event: FileChanged) -> None:
        self.found.append((path, event))


def link_leaves(path: bytes, target: bytes, prefix: bytes) -> bool:
    """Whether the link at `path` (relative) may lead out of the tree that stands at `prefix`.

    `..` is only trusted at the front of a relative target: after a name it may step up from wherever that name, itself
    a link, leads.
    """
    if not target:
        return True
    if target.startswith(b"/"):
        below = prefix + b"/"
        if target == prefix:
            return False
        return not target.startswith(below) or b".." in target[len(below):].split(b"/")
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    ups = 0
    while ups < len(parts) and parts[ups] == b"..":
        ups += 1
    return ups > path.count(b"/") or b".." in parts[ups:]
