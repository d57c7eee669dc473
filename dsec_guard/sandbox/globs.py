"""Path patterns of policies: `*` and `?` stay within one name, `**` spans directories."""

from __future__ import annotations

import functools
import re

_MAGIC = re.compile(r"[*?\[]")


def has_magic(pattern: str) -> bool:
    return _MAGIC.search(pattern) is not None


def static_prefix(pattern: str) -> str:
    """The directories before the first pattern part: `/a/b/*.py` -> `/a/b`, `/a/b` -> `/a/b`."""
    kept: list[str] = []
    for part in pattern.split("/"):
        if has_magic(part):
            break
        kept.append(part)
    return "/".join(kept) or "/"


@functools.lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """A regular expression for whole paths. `a/**` matches everything below a, and not a itself."""
    out: list[str] = []
    i = 0
    while i < len(pattern):
        ch = pattern[i]
        if pattern.startswith("**/", i) and (i == 0 or pattern[i - 1] == "/"):
            out.append("(?:[^/]+/)*")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif ch == "*":
            out.append("[^/]*")
            i += 1
        elif ch == "?":
            out.append("[^/]")
            i += 1
        elif ch == "[" and (end := pattern.find("]", i + 2)) > 0:
            body = pattern[i + 1:end].replace("\\", "\\\\").replace("/", "")
            out.append("[" + ("^" + body[1:] if body.startswith("!") else body.replace("^", "\\^", 1)) + "]")
            i = end + 1
        else:
            out.append(re.escape(ch))
            i += 1
    return re.compile("".join(out), re.DOTALL)


def matches(pattern: str, path: str) -> bool:
    return compile_glob(pattern).fullmatch(path) is not None
