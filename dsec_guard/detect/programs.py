"""What is known of programs by name. A name shows intent at most: rules that lean on it only ever *excuse* a refused act.

The executable is the kernel's word; the script behind an interpreter is taken from the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsec_guard.detect.facts import BoxFacts
from dsec_guard.detect.paths import basename, below_any
from dsec_guard.detect.view import Process, View

PACKAGE_TOOLS = frozenset({
    "pip", "pip3", "pipx", "uv", "uvx", "poetry", "pdm", "hatch", "conda", "mamba", "micromamba", "easy_install",
    "npm", "npx", "yarn", "pnpm", "bun", "corepack", "npm-cli.js", "npx-cli.js", "yarn.js", "pnpm.cjs",
    "apt", "apt-get", "apt-cache", "aptitude", "apt-key", "dpkg", "http", "https", "dnf", "yum", "rpm", "apk",
    "pacman", "zypper", "brew", "snap", "flatpak", "cargo", "rustup", "go", "gem", "bundle", "composer", "mvn", "gradle",
    "dotnet", "nuget", "cabal", "stack", "opam", "cpan", "cpanm", "luarocks", "mix", "rebar3", "nix", "nix-env",
    "git", "git-remote-http", "git-remote-https", "git-remote-ftp", "svn", "hg", "bzr", "fossil", "cvs",
    "curl", "wget", "wget2", "aria2c", "axel", "lynx", "links", "w3m", "gpg", "dirmngr", "gpgsm", "ntpdate", "chronyc",
})
NAME_LOOKUPS = frozenset({"dig", "nslookup", "host", "getent", "drill", "kdig", "delv", "resolvectl", "systemd-resolve"})
REACH_TOOLS = frozenset({"ping", "ping6", "fping", "traceroute", "tracepath", "mtr", "arping"})
SEARCHERS = frozenset({
    "grep", "egrep", "fgrep", "rgrep", "zgrep", "rg", "ag", "ack", "ugrep", "find", "fd", "fdfind", "locate", "updatedb",
    "du", "tree", "ls", "ncdu", "tar", "rsync", "zip", "cpio", "chmod", "chown", "file", "wc", "md5sum", "sha1sum",
    "sha256sum", "strings", "xargs", "rmlint", "fdupes", "clamscan", "ctags", "cloc", "tokei", "scc",
})
PROCESS_TOOLS = frozenset({
    "ps", "top", "htop", "btop", "atop", "pgrep", "pkill", "killall", "pidof", "lsof", "fuser", "ss", "netstat", "pstree",
    "w", "uptime", "vmstat", "free", "lsns", "slabtop", "pmap", "pwdx", "systemd-cgls", "systemctl", "loginctl", "sar",
})
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "busybox", "tcsh", "csh", "mksh", "rbash"})
INTERPRETERS = ("python", "pypy", "node", "nodejs", "perl", "ruby", "php", "lua", "Rscript", "tclsh", "java", "deno", "bun")


def script_of(process: Process) -> str:
    """The script or module an interpreter was started with (`pip` for `python3 -m pip`), else "".

    A script counts by its name only where programs are installed: a directory called `bin`, or below `node_modules`.
    """
    argv = process.argv
    if not basename(process.exe).startswith(INTERPRETERS) and basename(process.exe) not in SHELLS:
        return ""
    at = 1
    while at < len(argv) and at < 12:
        word = argv[at]
        if word == "-m" and at + 1 < len(argv):
            return argv[at + 1].split(".")[0]
        if word in ("-c", "-e", "--eval", "-"):
            return ""
        if word in ("-W", "-X", "-r", "--require", "-o", "-O"):
            at += 2
            continue
        if not word.startswith("-"):
            return basename(word) if "/bin/" in word or "/node_modules/" in word or "/share/" in word else ""
        at += 1
    return ""


def installed(process: Process, facts: BoxFacts) -> bool:
    """The executable lies in a read-only system directory: it is what its name says."""
    return bool(below_any(process.exe, facts.tool_dirs)) and not process.memfd


def is_tool(process: Process, names: frozenset[str], facts: BoxFacts) -> bool:
    """An installed program of one of these names, or an installed interpreter running a script of one."""
    return installed(process, facts) and (basename(process.exe) in names or script_of(process) in names)


def parent_of(process: Process, view: View) -> Process | None:
    return view.processes.get(process.parent)


def words(argv: tuple[str, ...]) -> Iterator[str]:
    """Arguments and the values inside them (`--file=/x`, `file:///x`, `a:b`), the program's own name left out."""
    for word in argv[1:]:
        yield word
        if "=" in word:
            yield word.partition("=")[2]
        if "://" in word:
            yield word.partition("://")[2]


def url_of(argv: tuple[str, ...]) -> tuple[str, str]:
    """Host and the rest of the first URL among the arguments, ("", "") without one."""
    for word in words(argv):
        scheme, sep, rest = word.partition("://")
        if sep and scheme.isalnum() and len(scheme) < 10:
            netloc, _, path = rest.partition("/")
            return host_of(netloc), path
    return "", ""


def host_of(netloc: str) -> str:
    """`user@host:port` or `[::1]:80` -> the host."""
    netloc = netloc.rpartition("@")[2]
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.split(":")[0].split("?")[0]


def is_own_host(host: str, facts: BoxFacts) -> bool:
    """A name or address that stays inside the box."""
    low = host.lower().rstrip(".")
    return (not low or low in ("localhost", "ip6-localhost", "::1", "0.0.0.0", "::", facts.hostname.lower())
            or low.endswith(".localhost") or low.startswith("127."))
