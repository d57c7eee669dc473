"""The task's repository without its future: a `.git` that holds what its base reaches, and nothing else.

It is made beside the real one and stands over it inside; the real one is never changed. git does the packing, in a
directory of our own: none of the repository's configuration, hooks, replacements, grafts or commit-graphs is read by it.
Where decoys are wanted, a made-up later history stands in it: naming it is harmless, opening its objects is evidence.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsec_guard.errors import HostError, SetupError, UsageError
from dsec_guard.host.walk import Walk, WalkLimits, open_regular
from dsec_guard.policy.schema import Repository
from dsec_guard.sandbox.decoys import Alias, Planted, git_object, plausible, word

GIT_TIMEOUT_S = 300.0
MAX_REFS = 100_000
MAX_TEXT = 16 << 20        # bytes of one text file of the repository (packed-refs is the largest)
MAX_ALTERNATES = 16
MAX_SEARCHED = 20_000      # names looked at for bundles
_SEARCH = "/usr/local/bin:/usr/bin:/bin"
_BUNDLE = re.compile(rb"# v[23] git bundle\n")
_HEX = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_NAME = re.compile(r"refs/[^\x00-\x20\x7f~^:?*\[\\]+\Z")
#: Settings that say how files are written down; anything that could name a program or a place is left out.
_KEPT_SETTINGS = frozenset({
    "core.filemode", "core.ignorecase", "core.symlinks", "core.autocrlf", "core.eol", "core.safecrlf",
    "core.precomposeunicode", "core.quotepath", "user.name", "user.email", "init.defaultbranch",
})


@dataclass(frozen=True)
class Seal:
    """target: where the sealed `.git` stands inside. directory: it on the host. writable: it lies in the workspace.

    planted: files to be shown inside it by mounts of their own. masked, bundles: what else holds history inside and has
    to be covered: directories (borrowed object stores, the real one where it shows again), and files of git's own format.
    """

    target: str
    directory: Path
    writable: bool
    planted: tuple[Planted, ...] = ()
    masked: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()


def seal_repository(
    repository: Repository, aliases: Sequence[Alias], directory: Path, *, workspace: str, owner: tuple[int, int],
    decoys: bool, seed: bytes,
) -> Seal | None:
    """Make the new directory `directory` the sealed `.git` of `repository`, owned by the host ids `owner`.

    aliases: what of the host shows where. workspace: the inside path of the writable one, "" for none. None where no
    repository shows at that place: then there is nothing to hide.
    Raises: UsageError for a repository or a base that cannot be sealed, HostError without git, SetupError when git fails.
    """
    place = _clean(repository.path)
    alias = max((a for a in aliases if _below(place, a.target) is not None), key=lambda a: len(a.target), default=None)
    if alias is None:
        return None
    below = _below(place, alias.target) or ""
    host = os.path.join(os.path.realpath(alias.source), below) if below else os.path.realpath(alias.source)
    if os.path.realpath(host) != host:
        raise UsageError(f"answers.repository: {place} is reached through a symbolic link",
                         hint="name the directory itself")
    source = os.path.join(host, ".git")
    if not os.path.lexists(source):
        if all(os.path.lexists(os.path.join(host, name)) for name in ("HEAD", "objects", "refs")):
            raise UsageError(f"answers.repository: {place} is a bare repository, which cannot be sealed",
                             hint="give the task a clone of it: git clone")
        return None
    if not stat.S_ISDIR(os.lstat(source).st_mode) or os.path.lexists(os.path.join(source, "commondir")):
        raise UsageError(f"answers.repository: the .git of {place} points to a directory elsewhere (a linked worktree or a "
                         "submodule), which cannot be sealed", hint="give the task a clone of its own: git clone")
    target = f"{place.rstrip('/')}/.git"
    elsewhere = [path for path in _shown(source, aliases) if path != target]
    maker = _Maker(Path(source), place, directory)
    maker.make(repository.base)
    planted: tuple[Planted, ...] = ()
    if decoys and maker.head:
        planted = _plant(maker, target, seed)
    bundles = maker.bundles(host)
    _give(directory, owner)
    masked = dict.fromkeys([*elsewhere, *(path for store in maker.borrowed for path in _shown(store, aliases))])
    return Seal(target, directory, bool(workspace) and _below(place, workspace) is not None, planted, tuple(masked),
                tuple(f"{place.rstrip('/')}/{name}" for name in bundles))


def _shown(real: str, aliases: Iterable[Alias]) -> list[str]:
    """Every place inside at which a directory of the host shows. Raises UsageError where a part of it is bound by itself."""
    places = []
    for alias in aliases:
        source = os.path.realpath(alias.source)
        if _below(source, real):
            raise UsageError(f"{alias.source} is part of a repository that is sealed, and would be shown at {alias.target}",
                             hint="do not bind it")
        below = _below(real, source)
        if below is not None:
            places.append(f"{alias.target.rstrip('/')}/{below}" if below else alias.target)
    return places


def _clean(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _below(path: str, top: str) -> str | None:
    if path == top:
        return ""
    prefix = top.rstrip("/") + "/"
    return path[len(prefix):] if path.startswith(prefix) else None


@dataclass
class _Maker:
    """source: the real git directory. place: the repository inside, for messages. directory: the sealed one."""

    source: Path
    place: str
    directory: Path
    borrowed: list[str] = field(default_factory=list)
    algorithm: str = "sha1"
    head: str = ""

    def make(self, base: str) -> None:
        self._look_at_objects()
        settings = self._settings()
        if settings.pop("extensions.refstorage", "files") != "files":
            raise UsageError(f"answers.repository: {self.place} keeps its refs in a format that cannot be sealed",
                             hint="git refs migrate --ref-format=files")
        self.algorithm = settings.pop("extensions.objectformat", "sha1")
        self._skeleton(settings)
        refs = dict(self._refs())
        branch, head = self._head(refs)
        if not head and base == "HEAD":
            (self.directory / "HEAD").write_text(f"ref: {branch or 'refs/heads/main'}\n")
            return  # nothing was ever committed
        start = self._resolve(base, refs, head)
        reached = set(self._git("rev-list", start).split())
        kept = self._kept_refs(refs, reached)
        self.head = head if head in reached else start
        if branch:
            kept[branch] = self.head
        wanted = sorted({start, *kept.values()})
        self._git("pack-objects", "--revs", "--delta-base-offset", "-q", "objects/pack/pack",
                  text="\n".join(wanted) + "\n")
        (self.directory / "packed-refs").write_text("".join(f"{kept[name]} {name}\n" for name in sorted(kept)))
        (self.directory / "HEAD").write_text(f"ref: {branch}\n" if branch else f"{self.head}\n")
        self._shallow(reached)
        # The real index may name blobs of later work: what was staged is unstaged, the files stay as they are.
        self._git("read-tree", self.head, borrow=False)

    def _look_at_objects(self) -> None:
        """Root reads these for the agent: nothing in them may lead to what the repository's owner does not own."""
        owner = os.lstat(self.source).st_uid
        todo, seen = [str(self.source / "objects")], set[str]()
        while todo:
            store = todo.pop()
            if store in seen:
                continue
            seen.add(store)
            if len(seen) > MAX_ALTERNATES:
                raise UsageError(f"answers.repository: {self.place} borrows from too many object stores",
                                 hint="git repack -a -d, then remove .git/objects/info/alternates")
            self._refuse_links(store, owner)
            text = _text(f"{store}/info/alternates")
            for line in text.split("\n"):  # as git splits it; its quoted form is not read here, and so refused
                if line.startswith('"'):
                    raise UsageError(f"answers.repository: {self.place} borrows objects from a path that is quoted",
                                     hint="git repack -a -d, then remove .git/objects/info/alternates")
                if line and not line.startswith("#"):
                    other = os.path.realpath(os.path.join(store, line))
                    todo.append(other)
                    self.borrowed.append(other)

    def _refuse_links(self, store: str, owner: int) -> None:
        try:
            info = os.lstat(store)
            found = [entry for name in ("", *os.listdir(store)) if os.path.isdir(f"{store}/{name}")
                     for entry in os.scandir(f"{store}/{name}")] if stat.S_ISDIR(info.st_mode) else []
        except OSError as problem:
            raise UsageError(f"answers.repository: the objects of {self.place} cannot be read: {problem.strerror}",
                             hint="check the repository with git fsck") from problem
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != owner or any(entry.is_symlink() for entry in found):
            raise UsageError(f"answers.repository: objects of {self.place} are links, or lie in a store of another owner",
                             hint="git repack -a -d, then remove .git/objects/info/alternates")

    def _settings(self) -> dict[str, str]:
        text = _text(str(self.source / "config"))
        out = self._git("config", "--file", "-", "--no-includes", "--null", "--list", text=text, borrow=False, cwd="/")
        settings: dict[str, str] = {}
        for item in out.split("\0"):
            key, _, value = item.partition("\n")
            if key in _KEPT_SETTINGS or key in ("extensions.objectformat", "extensions.refstorage"):
                settings[key] = value
        return settings

    def _skeleton(self, settings: dict[str, str]) -> None:
        for name in ("", "objects", "objects/pack", "objects/info", "refs", "refs/heads", "refs/tags", "info", "hooks"):
            (self.directory / name).mkdir(mode=0o755)
        settings = {"core.repositoryformatversion": "0" if self.algorithm == "sha1" else "1", "core.bare": "false",
                    "core.logallrefupdates": "true", **settings}
        if self.algorithm != "sha1":
            settings["extensions.objectformat"] = self.algorithm
        if (self.source / "modules").is_dir():
            settings["diff.ignoresubmodules"] = "all"  # their own repositories are not there
        (self.directory / "HEAD").write_text("ref: refs/heads/main\n")
        lines = []
        for key, value in settings.items():
            section, _, name = key.partition(".")
            clean = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines.append(f'[{section}]\n\t{name} = "{clean}"\n')
        (self.directory / "config").write_text("".join(lines))
        (self.directory / "info/exclude").write_text(_text(str(self.source / "info/exclude")))
        (self.directory / "description").write_text("Unnamed repository; edit this file 'description' to name it.\n")

    def _refs(self) -> Iterator[tuple[str, str]]:
        """Every ref that names an object, loose ones last: they win."""
        for line in _text(str(self.source / "packed-refs")).split("\n")[:MAX_REFS]:
            sha, _, name = line.partition(" ")
            if _HEX.match(sha) and _NAME.match(name):
                yield name, sha
        for folder, directories, files in os.walk(self.source / "refs", followlinks=False):
            directories.sort()
            for name in files:
                path = os.path.join(folder, name)
                sha = _text(path).strip()
                relative = os.path.relpath(path, self.source)
                if _HEX.match(sha) and _NAME.match(relative):
                    yield relative, sha

    def _head(self, refs: dict[str, str]) -> tuple[str, str]:
        """(the branch HEAD is on or "", its commit or "")."""
        text = _text(str(self.source / "HEAD")).strip()
        if _HEX.match(text):
            return "", text
        name = text.removeprefix("ref: ").strip()
        if not text.startswith("ref: refs/heads/") or not re.fullmatch(r"[\w./+@#=,-]+", name) or ".." in name:
            raise UsageError(f"answers.repository: the HEAD of {self.place} cannot be read",
                             hint="check out a branch or a commit in it")
        return name, refs.get(name, "")

    def _resolve(self, base: str, refs: dict[str, str], head: str) -> str:
        name = re.split(r"[~^@]", base, maxsplit=1)[0]
        found = head if name == "HEAD" else next(
            (refs[full] for full in (name, f"refs/{name}", f"refs/tags/{name}", f"refs/heads/{name}",
                                     f"refs/remotes/{name}") if full in refs), name)
        if re.fullmatch(r"[0-9a-f]{4,64}", found) and re.fullmatch(r"[~^@{}0-9a-z]*", base[len(name):]):
            try:
                return self._git("rev-parse", "--verify", "--quiet", f"{found}{base[len(name):]}^{{commit}}").strip()
            except SetupError:
                pass
        raise UsageError(f"answers.repository: the base {base!r} is no commit of {self.place}",
                         hint="set answers.repository.base to a commit, tag or branch that the repository has")

    def _kept_refs(self, refs: dict[str, str], reached: set[str]) -> dict[str, str]:
        """The branches and tags whose commit is part of the history of the base."""
        names = [n for n in sorted(refs) if n.startswith(("refs/heads/", "refs/tags/", "refs/remotes/"))]
        if not names:
            return {}
        answers = self._git("cat-file", "--batch-check=%(objectname)",
                            text="".join(f"{refs[n]}^{{commit}}\n" for n in names)).splitlines()
        return {n: refs[n] for n, commit in zip(names, answers, strict=True) if commit in reached}

    def _shallow(self, reached: set[str]) -> None:
        left = [line for line in _text(str(self.source / "shallow")).split() if line in reached]
        if left:
            (self.directory / "shallow").write_text("".join(f"{line}\n" for line in left))
        else:
            (self.directory / "shallow").unlink(missing_ok=True)

    def bundles(self, host: str) -> list[str]:
        """Bundles in the work tree that are no part of its history, as far as MAX_SEARCHED names go."""
        top = os.open(host, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found: list[str] = []
        try:
            for entry in Walk(top, WalkLimits(max_entries=MAX_SEARCHED), lambda e: e.name != b".git"):
                if entry.name.endswith(b".bundle") and stat.S_ISREG(entry.stat.st_mode):
                    with os.fdopen(open_regular(entry.parent_fd, entry.name), "rb") as file:
                        if _BUNDLE.match(file.read(20)):
                            found.append(os.fsdecode(entry.path))
        finally:
            os.close(top)
        tracked = set(self._git("ls-files", "-z", borrow=False).split("\0")) if found else set()
        return [name for name in found if name not in tracked]

    def _git(self, *words: str, text: str = "", borrow: bool = True, cwd: str = "") -> str:
        return self.git_bytes(*words, data=os.fsencode(text), borrow=borrow, cwd=cwd).decode("utf-8", "surrogateescape")

    def git_bytes(self, *words: str, data: bytes = b"", borrow: bool = False, cwd: str = "") -> bytes:
        """Run git on the sealed directory; borrow: with the real objects within reach."""
        environment = {
            "PATH": _SEARCH, "HOME": "/nonexistent", "LC_ALL": "C", "GIT_DIR": str(self.directory),
            "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "",
        }
        if borrow:
            store = str(self.source / "objects").replace("\\", "\\\\").replace('"', '\\"')
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f'"{store}"'
            shallow = _text(str(self.source / "shallow"))
            if shallow and all(_HEX.match(line) for line in shallow.split()):
                (self.directory / "shallow").write_text(shallow)  # a history ends there
        settings = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.commitGraph=false", "gc.auto=0",
                    "core.multiPackIndex=false", "pack.useBitmaps=false", "pack.threads=1")
        argv = ["git", *(w for s in settings for w in ("-c", s)), *words]
        try:
            done = subprocess.run(argv, input=data, capture_output=True, env=environment, cwd=cwd or self.directory,
                                  timeout=GIT_TIMEOUT_S, check=False)
        except FileNotFoundError as problem:
            raise HostError("answers.repository needs git on this host to seal the repository's later history",
                            feature="git", hint="install git") from problem
        except subprocess.TimeoutExpired as problem:
            raise SetupError(f"git {words[0]} did not end within {GIT_TIMEOUT_S:.0f} s", step="seal",
                             hint="git repack -a -d in the repository makes sealing fast") from problem
        if done.returncode != 0:
            said = done.stderr[-300:].decode("utf-8", "replace").strip()
            raise SetupError(f"the history of {self.place} cannot be sealed: git {words[0]} failed: {said!r}", step="seal",
                             hint="check the repository with git fsck")
        return done.stdout


def _text(path: str) -> str:
    """A text file of the repository, "" when there is none. A link is not followed, nothing but a file is read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return file.read(MAX_TEXT).decode("utf-8", "surrogateescape")


def _give(directory: Path, owner: tuple[int, int]) -> None:
    os.chown(directory, *owner)
    for folder, directories, files in os.walk(directory):
        for name in (*directories, *files):
            os.chown(os.path.join(folder, name), *owner, follow_symlinks=False)


# ------------------------------------------------------------------------------------------------ a made-up future


def _plant(maker: _Maker, target: str, seed: bytes) -> tuple[Planted, ...]:
    """A later history that never was: a remote branch two commits ahead, and a commit taken back in the reflog.

    What lists, decorates or completes names opens only the tips, which are plain files. Their parents are opened by who
    walks there (`later_commit`), trees and files by who looks at their content (`later_content`).
    """
    rng = random.Random(hashlib.sha256(b"history\0" + seed).digest())
    token = hashlib.sha256(b"token\0" + seed + target.encode("utf-8", "surrogateescape")).hexdigest()[:16].encode()
    raw = maker.git_bytes("cat-file", "tree", f"{maker.head}^{{tree}}")
    marked: dict[str, tuple[bytes, str]] = {}

    def put(kind: bytes, body: bytes, label: str) -> str:
        name, packed = git_object(kind, body, maker.algorithm)
        if label:
            marked[name] = (packed, label)
        else:
            path = maker.directory / "objects" / name[:2] / name[2:]
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(packed)
        return name

    def tree(mark: bytes) -> str:
        blob = bytes.fromhex(put(b"blob", plausible(b"a.py", 900, rng, mark), "later_content"))
        return put(b"tree", _with_file(raw, blob, len(blob)), "later_content")

    moment = 1_000_000 + max(int(maker.git_bytes("log", "-1", "--format=%ct", maker.head) or 0), 0)

    def commit(root: str, parent: str, label: str) -> str:
        nonlocal moment
        moment += rng.randrange(10_000, 500_000)
        who = f"{word(rng).capitalize()} <dev@example.invalid> {moment} +0000"
        text = f"tree {root}\nparent {parent}\nauthor {who}\ncommitter {who}\n\nFix {word(rng)} {word(rng)}\n"
        return put(b"commit", text.encode(), label)

    first = commit(tree(b""), maker.head, "later_commit")
    last = tree(token)
    tip = commit(last, first, "")
    taken_back = commit(last, maker.head, "")
    with (maker.directory / "packed-refs").open("r+") as file:
        lines = sorted([*file.read().splitlines(), f"{tip} refs/remotes/origin/fix-{word(rng)}"], key=lambda x: x.split()[1])
        file.seek(0)
        file.write("".join(f"{line}\n" for line in lines))
    (maker.directory / "logs").mkdir()
    who = f"dev <dev@example.invalid> {moment} +0000"
    (maker.directory / "logs/HEAD").write_text(
        f"{maker.head} {taken_back} {who}\tcommit: Fix {word(rng)}\n"
        f"{taken_back} {maker.head} {who}\treset: moving to {maker.head}\n")
    planted = []
    for name, (packed, label) in sorted(marked.items()):
        path = maker.directory / "objects" / name[:2] / name[2:]
        path.parent.mkdir(exist_ok=True)
        path.touch(0o444)
        planted.append(Planted(f"{target}/objects/{name[:2]}/{name[2:]}", packed, label, token))
    # Who opens this one reads the repository's directory as a whole, as copying and searching do.
    text = (maker.directory / "description").read_bytes()
    planted.append(Planted(f"{target}/description", text, "whole_tree", b""))
    return tuple(planted)


def _with_file(raw: bytes, blob: bytes, width: int) -> bytes:
    """A tree object's entries with the first plain file's blob exchanged, or one file where there is none."""
    entries = list(_entries(raw, width))
    plain = [i for i, (mode, name, _) in enumerate(entries) if mode == b"100644" and name.endswith((b".py", b".c", b".js"))]
    plain = plain or [i for i, (mode, _, _) in enumerate(entries) if mode == b"100644"]
    if plain:
        mode, name, _ = entries[plain[0]]
        entries[plain[0]] = (mode, name, blob)
    else:
        entries = [(b"100644", b"fix.py", blob)]
    return b"".join(mode + b" " + name + b"\0" + sha for mode, name, sha in entries)


def _entries(raw: bytes, width: int) -> Iterable[tuple[bytes, bytes, bytes]]:
    at = 0
    while at < len(raw):
        space, end = raw.index(b" ", at), raw.index(b"\0", at)
        yield raw[at:space], raw[space + 1:end], raw[end + 1:end + 1 + width]
        at = end + 1 + width
