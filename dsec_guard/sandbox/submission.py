"""The Python files that an agent hands in, found by descriptor and looked at by `source.py`."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dsec_guard.host.walk import open_beneath, open_regular
from dsec_guard.model import FileChanged, Source, SourceFact, escape_bytes, unescape_bytes
from dsec_guard.sandbox.globs import matches
from dsec_guard.sandbox.source import MAX_FACTS, Fact, Unscannable, scan_source

_LIBRARY_DIRS = ("site-packages", "dist-packages", "node_modules", ".git")


@dataclass(frozen=True)
class ScanLimits:
    """max_file_bytes: of one file; max_bytes: of all; seconds: of all. What lies beyond is not seen and said so."""

    max_files: int = 2_000
    max_file_bytes: int = 1 << 20
    max_bytes: int = 16 << 20
    max_facts: int = 1_000
    seconds: float = 20.0


@dataclass(frozen=True)
class ScanReport:
    """skipped: (escaped path, why) with why too_big, too_many, time, too_deep or unreadable."""

    facts: tuple[SourceFact, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


def scan_submission(
    upper_fd: int, lower_fd: int, inside_prefix: str, changed: Iterable[FileChanged], patterns: Sequence[str], *,
    hidden: Sequence[str] = (), limits: ScanLimits | None = None, clock: Callable[[], float] = time.monotonic,
) -> ScanReport:
    """Facts of the Python files among `changed` (of the tree at `upper_fd`) that `patterns` hand in.

    patterns: inside paths or globs; a path stands for all below it. Installed packages and virtual environments are left
    out, and so are facts that a modified file had before (lower_fd, -1 for none).
    A file cannot change any more; a name that became something else is `unreadable`. Raises nothing of the files'.
    """
    limits = limits or ScanLimits()
    prefix = os.fsencode(inside_prefix.rstrip("/")) + b"/"
    ends = clock() + limits.seconds
    left, files = limits.max_bytes, 0
    facts: list[SourceFact] = []
    skipped: list[tuple[str, str]] = []
    for event in changed:
        path = unescape_bytes(event.path)
        if not _handed_in(event, path, patterns) or not path.startswith(prefix):
            continue
        if event.size > limits.max_file_bytes:
            skipped.append((event.path, "too_big"))
            continue
        if event.size > left or files >= limits.max_files or len(facts) >= limits.max_facts:
            skipped.append((event.path, "too_many"))
            continue
        if clock() > ends:
            skipped.append((event.path, "time"))
            continue
        files += 1
        left -= event.size
        try:
            raw = _read(upper_fd, path[len(prefix):], event.size)
            found = scan_source(raw, hidden=hidden)
            if found and event.change == "modified" and lower_fd >= 0:
                found = _new_facts(found, _before(lower_fd, path[len(prefix):], limits.max_file_bytes, hidden))
        except OSError:
            skipped.append((event.path, "unreadable"))
        except Unscannable:
            skipped.append((event.path, "too_deep"))
        else:
            facts += [SourceFact(path=event.path, line=fact.line, what=fact.what, sure=fact.sure,
                                 detail=escape_bytes(fact.detail.encode("utf-8", "replace")), source=Source.INSPECTION)
                      for fact in found[:MAX_FACTS]]
    return ScanReport(tuple(facts), tuple(skipped))


def _handed_in(event: FileChanged, path: bytes, patterns: Sequence[str]) -> bool:
    if event.change == "removed" or event.ftype != "file" or "in_venv" in event.traits:
        return False
    if not path.endswith((b".py", b".pyw")) or any(f"/{name}/" in event.path for name in _LIBRARY_DIRS):
        return False
    text = os.fsdecode(path)
    return any(text == p or text.startswith(p.rstrip("/") + "/") or matches(p, text) for p in patterns)


def _before(lower_fd: int, below: bytes, max_bytes: int, hidden: Sequence[str]) -> tuple[Fact, ...]:
    """What the file said before; nothing where that cannot be known, so that no fact is excused by it."""
    try:
        raw = _read(lower_fd, below, max_bytes + 1)
        return scan_source(raw, hidden=hidden) if len(raw) <= max_bytes else ()
    except (OSError, Unscannable):
        return ()


def _new_facts(now: Sequence[Fact], before: Sequence[Fact]) -> tuple[Fact, ...]:
    """By what they say, wherever it moved to; one more of a kind than before is new."""
    left = Counter((fact.what, fact.detail, fact.sure) for fact in before)
    new: list[Fact] = []
    for fact in now:
        key = (fact.what, fact.detail, fact.sure)
        if left[key]:
            left[key] -= 1
        else:
            new.append(fact)
    return tuple(new)


def _read(root_fd: int, below: bytes, size: int) -> bytes:
    directory, _, name = below.rpartition(b"/")
    parent = open_beneath(root_fd, directory, os.O_PATH | os.O_DIRECTORY)
    try:
        fd = open_regular(parent, name)
    finally:
        os.close(parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("no regular file")
        blocks: list[bytes] = []
        while size > 0 and (block := os.read(fd, size)):
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)
    finally:
        os.close(fd)
