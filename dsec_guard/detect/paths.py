"""Text work on paths, addresses and globs that an agent chose. All of it is linear or bounded: no regular expressions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

#: Longest text looked at; the kernel's PATH_MAX is 4096 bytes, escaping may quadruple it.
MAX_TEXT = 16_384


def normalise(path: str) -> str:
    """An absolute path without `.`, `..`, doubled slashes and without the ways around a mount-independent name.

    `/proc/self/root/x`, `/proc/thread-self/root/x`, `/proc/N/task/M/root/x` and the `cwd` of `/` all name `/x` when N is
    the caller; only `self` forms are folded, and numbers where a `task` part or a second lap follows. A relative path
    stays relative.
    """
    if not path:
        return ""
    if path[0] == "/" and "/." not in path and "//" not in path and "/root" not in path and len(path) < MAX_TEXT:
        return path.rstrip("/") or "/"  # nothing to do, as nearly always
    rooted = path.startswith("/")
    parts: list[str] = []
    for part in path[:MAX_TEXT].split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            if parts and parts[-1] != "..":
                parts.pop()
            elif not rooted:
                parts.append(part)
            continue
        parts.append(part)
        if part == "root" and rooted and _is_own_root(parts):
            parts.clear()
    return ("/" if rooted else "") + "/".join(parts)


def _is_own_root(parts: list[str]) -> bool:
    """`parts` ends in `root` below a directory of proc that stands for the caller."""
    if len(parts) < 3 or parts[0] != "proc":
        return False
    middle = parts[1:-1]
    if middle in (["self"], ["thread-self"]):
        return True
    return len(middle) == 3 and middle[1] == "task" and middle[2].isdigit() and (middle[0] == "self" or middle[0] == middle[2])


def below(path: str, prefix: str) -> bool:
    """`path` is `prefix` or lies below it."""
    return path == prefix or prefix == "/" or path.startswith(prefix + "/")


def below_any(path: str, prefixes: Iterable[str]) -> str:
    """The first of `prefixes` that `path` is or lies below, else ""."""
    for prefix in prefixes:
        if below(path, prefix):
            return prefix
    return ""


def basename(path: str) -> str:
    return path[path.rfind("/") + 1:]


def top(path: str) -> str:
    """`/srv` of `/srv/a/b`; "" for `/` and relative paths."""
    return "/" + path.split("/", 2)[1] if path.startswith("/") and len(path) > 1 else ""


def _segment(pattern: str, text: str) -> bool:
    """`*`, `?` and `[...]` within one path component; time is at most len(pattern) x len(text)."""
    p = t = 0
    star, mark = -1, 0
    while t < len(text):
        if p < len(pattern):
            c = pattern[p]
            if c == "*":
                star, mark = p, t
                p += 1
                continue
            if c == "[" and (end := pattern.find("]", p + 2)) > 0:
                if _in_set(pattern[p + 1:end], text[t]):
                    p, t = end + 1, t + 1
                    continue
            elif c in ("?", text[t]):
                p, t = p + 1, t + 1
                continue
        if star < 0:
            return False
        mark += 1
        p, t = star + 1, mark
    return all(c == "*" for c in pattern[p:])


def _in_set(body: str, char: str) -> bool:
    negated = body[:1] in ("!", "^")
    if negated:
        body = body[1:]
    i, hit = 0, False
    while i < len(body):
        if i + 2 < len(body) and body[i + 1] == "-":
            hit = hit or body[i] <= char <= body[i + 2]
            i += 3
        else:
            hit = hit or body[i] == char
            i += 1
    return hit != negated


@lru_cache(maxsize=4096)
def _split(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split("/"))


def glob(pattern: str, path: str) -> bool:
    """`*` within a component, `**` for any number of components (none included); bounded by parts x parts."""
    if "**" not in pattern:
        if "/" not in pattern:
            return _segment(pattern, path)
        pats, parts = _split(pattern), path[:MAX_TEXT].split("/")
        return len(pats) == len(parts) and all(_segment(p, s) for p, s in zip(pats, parts, strict=True))
    pats, parts = _split(pattern), path[:MAX_TEXT].split("/")
    reach = {0}
    for p in pats:
        if not reach:
            return False
        if p == "**":
            reach = set(range(min(reach), len(parts) + 1))
        else:
            reach = {i + 1 for i in reach if i < len(parts) and _segment(p, parts[i])}
    return len(parts) in reach


def glob_any(patterns: Iterable[str], path: str) -> str:
    """The first pattern that matches, else ""."""
    for pattern in patterns:
        if glob(pattern, path):
            return pattern
    return ""


def split_address(address: str) -> tuple[str, str, int]:
    """`inet:1.2.3.4:80`, `inet6:[::1]:80`, `unix:/p`, `unix:@n`, `vsock:1:2` -> (family word, host or name, port)."""
    family, _, rest = address.partition(":")
    if family in ("inet", "inet6", "vsock"):
        host, _, port = rest.rpartition(":")
        return family, host.strip("[]"), int(port) if port.isascii() and port.isdigit() and len(port) < 11 else 0
    return family, rest, 0


def mapped_v4(host: str) -> str:
    """`::ffff:1.2.3.4` -> `1.2.3.4`; anything else unchanged."""
    low = host.lower()
    return host[7:] if low.startswith("::ffff:") and "." in host else host


def is_loopback(host: str) -> bool:
    """Addresses that never leave the box: 127/8, ::1, the unspecified ones."""
    host = mapped_v4(host)
    return host.startswith("127.") or host in ("::1", "0.0.0.0", "::", "")


def is_multicast(host: str) -> bool:
    """Multicast and broadcast: discovery protocols send there at every start."""
    host = mapped_v4(host).lower()
    if ":" in host:
        return host.startswith("ff")
    first = host.split(".", 1)[0]
    return host == "255.255.255.255" or (first.isascii() and first.isdigit() and len(first) == 3 and 224 <= int(first) <= 239)


def is_link_local(host: str) -> bool:
    """Where clouds put their metadata services: 169.254/16, and the fixed addresses some vendors chose."""
    host = mapped_v4(host).lower()
    return host.startswith("169.254.") or host in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16",
                                                  "192.0.0.192")


def has_controls(text: str) -> bool:
    """C0, DEL or C1 characters, raw or escaped by `model.escape_bytes`."""
    if not text.isprintable() and any(ch < " " or "\x7f" <= ch <= "\x9f" for ch in text):
        return True
    return "\\x8" in text or "\\x9" in text
