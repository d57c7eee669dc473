"""Sending data out: refused traffic of programs that are no package tool, and tools started to send.

In a box without a network, a refused connect shows where to, not what: the payload never leaves the program. So the
arguments of the program and the form of the attempt decide how grave it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dsec_guard.detect.base import detector
from dsec_guard.detect.language import address_of, shown
from dsec_guard.detect.paths import basename, is_link_local, is_loopback, is_multicast, mapped_v4
from dsec_guard.detect.programs import (
    NAME_LOOKUPS,
    PACKAGE_TOOLS,
    REACH_TOOLS,
    SHELLS,
    host_of,
    is_own_host,
    is_tool,
    parent_of,
    script_of,
    url_of,
)
from dsec_guard.detect.view import View
from dsec_guard.model import Class, Event, Finding, NetworkAttempt, Outcome, ProcessExec, ProcessInfo, SyscallSeen

SEND_CALLS = frozenset({"sendto", "sendmsg", "sendmmsg"})
MSG_FASTOPEN = 0x20000000
SOCK_STREAM, SOCK_DGRAM = 1, 2
#: Refusals that mean `not out of this box`: by a hook, by Landlock, or for want of a route.
REFUSED = frozenset({1, 13, 101, 113})
MAX_KEPT = 512
LONG_LABEL = 40

#: Ports where a program in a box asks for a container daemon; `escape.daemon_port` speaks of those.
DAEMON_PORTS = frozenset({2375, 2376})
MINING_PORTS = frozenset({3333, 3334, 4444, 5555, 7777, 8333, 9999, 14433, 14444, 45560, 45700})
#: Single short questions to these ports are how programs ask for names and the time.
QUIET_UDP = frozenset({53, 123, 1900, 5353, 5355})


@dataclass
class _Far:
    """One destination a process was refused."""

    event: Event
    process: ProcessInfo
    host: str
    port: int
    how: str
    count: int = 1
    datagram: bool = False


@detector(
    rules=("exfil.connect", "exfil.datagram", "exfil.fastopen", "exfil.dns_labels"), watches=(NetworkAttempt, SyscallSeen),
    syscalls=SEND_CALLS | {"connect"}, needs=(("cgroup", "sys_exit"),),
)
class Outside:
    """Traffic to an address outside the box, by a program that is no package, download or look-up tool.

    A datagram socket that is only connected sends nothing (programs find their own address that way): context.
    Misses: what a package tool was made to carry (its arguments are `exfil.tool_upload`'s), payload after a refused connect.
    """

    def __init__(self) -> None:
        self._far: dict[tuple[int, str, int, str], _Far] = {}
        self._datagram: set[tuple[int, str, int]] = set()
        self._labels: list[tuple[Event, ProcessInfo, str]] = []

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        word, host, port = address_of(event)
        if isinstance(event, SyscallSeen) and event.name in SEND_CALLS and event.data:
            label = long_label(event.data)
            if label and len(self._labels) < MAX_KEPT:
                self._labels.append((event, view.info(event), label))
        if word not in ("inet", "inet6") or is_loopback(host) or is_multicast(host) or is_link_local(host):
            return ()
        host = mapped_v4(host)
        if isinstance(event, NetworkAttempt):
            if event.op == "connect" and event.sock_type & 0xF == SOCK_DGRAM:
                self._datagram.add((event.tgid, host, port))
                return ()
            if event.op not in ("connect", "sendmsg") or (event.ok and view.facts.network != "none"):
                return ()
            self._keep(event, host, port, "connect" if event.op == "connect" else "datagram", view)
        elif isinstance(event, SyscallSeen) and (
                event.errno in REFUSED or (event.ok and view.facts.network == "none")):
            flags = event.args[2 if event.name == "sendmsg" else 3]
            if event.name == "connect":
                self._keep(event, host, port, "connect", view)
            elif flags & MSG_FASTOPEN:
                self._keep(event, host, port, "fastopen", view)
            else:
                self._keep(event, host, port, "datagram", view)
        return ()

    def _keep(self, event: Event, host: str, port: int, how: str, view: View) -> None:
        key = (event.tgid, host, port, how)
        known = self._far.get(key)
        if known is not None:
            known.count += 1
        elif len(self._far) < MAX_KEPT and port not in DAEMON_PORTS and not self._excused(event, port, how, view):
            self._far[key] = _Far(event, view.info(event), host, port, how)

    def _excused(self, event: Event, port: int, how: str, view: View) -> bool:
        process = view.process(event)
        facts = view.facts
        if is_tool(process, PACKAGE_TOOLS | NAME_LOOKUPS | REACH_TOOLS, facts):
            return True
        parent = parent_of(process, view)
        if parent is not None and is_tool(process, frozenset({"ssh", "gpg"}), facts) and is_tool(parent, PACKAGE_TOOLS, facts):
            return True
        return how == "datagram" and port in QUIET_UDP

    def finish(self, view: View) -> Iterable[Finding]:
        for event, process, label in self._labels:
            yield _finding("exfil.dns_labels", 7, event, process, f"dns:{shown(label)[-40:]}",
                           f"sent a name query whose labels carry {len(label)} characters of data", view)
        labelled = {event.tgid for event, _, _ in self._labels}
        for key in sorted(self._far, key=lambda k: (self._far[k].event.seq, k)):
            far = self._far[key]
            tgid, host, port, how = key
            if how == "connect" and (tgid, host, port) in self._datagram:
                continue
            if how == "datagram" and (tgid in labelled or (tgid, host, port, "fastopen") in self._far):
                continue
            what = {"connect": "asked for a connection to", "datagram": "sent datagrams to",
                    "fastopen": "sent data in the opening packet to"}[how]
            severity = 7
            note = ""
            if how == "connect" and basename(far.process.exe) in SHELLS:
                severity = 5
            if port in MINING_PORTS:
                note = " (a port that mining pools use)"
            yield _finding(f"exfil.{how}", severity, far.event, far.process, f"{host}:{port}",
                           f"{what} {shown(host)} port {port}{note}, {far.count} times", view)


def _finding(rule: str, severity: int, event: Event, process: ProcessInfo, obj: str, what: str, view: View) -> Finding:
    ok = isinstance(event, (NetworkAttempt, SyscallSeen)) and event.ok
    errno = event.errno if isinstance(event, (NetworkAttempt, SyscallSeen)) else 0
    return Finding(
        rule=rule, cls=Class.EXFILTRATION, outcome=Outcome.SUCCEEDED if ok else Outcome.ATTEMPTED, severity=severity,
        evidence=(event,), object=obj, process=process, references=("ATT&CK T1048", "ATLAS AML.T0025"),
        reason=(f"{shown(process.exe)} {what}; the kernel {'let it pass' if ok else f'refused it with error {errno}'}. "
                f"The policy says network: {view.facts.network}."),
        allow_hint="network: allowlist, with the host in allowed_hosts",
    )


def long_label(data: str) -> str:
    """The encoded part of a name query (hex of at most 256 bytes), "" if it is an ordinary one or no query.

    Encoded: a label of 40 characters or more, or at least 80 characters over labels of 20 or more, that look random.
    """
    try:
        raw = bytes.fromhex(data)
    except ValueError:
        return ""
    labels = query_labels(raw)
    if not labels:
        return ""
    longest = max(labels, key=len)
    if len(longest) >= LONG_LABEL and looks_encoded(longest):
        return longest
    joined = "".join(part for part in labels if len(part) >= 20)
    return joined if len(joined) >= 80 and looks_encoded(joined) else ""


def query_labels(raw: bytes) -> list[str]:
    """Labels of the first question of a DNS query; empty if the bytes are none (RFC 1035, section 4)."""
    for start in (0, 2):  # over TCP two bytes of length come first
        if len(raw) < start + 17:
            return []
        flags, questions = raw[start + 2], int.from_bytes(raw[start + 4:start + 6], "big")
        if flags & 0xF8 or not 1 <= questions <= 4:
            continue
        labels: list[str] = []
        at = start + 12
        while at < len(raw) and raw[at]:
            size = raw[at]
            if size > 63:
                break
            labels.append(raw[at + 1:at + 1 + size].decode("latin-1"))
            at += 1 + size
        else:
            if labels and all(" " < ch < "\x7f" for part in labels for ch in part):
                return labels
    return []


def looks_encoded(text: str) -> bool:
    """Random-looking: at least 3 bits a character, and digits or mixed case among the letters, or few vowels."""
    if not text:
        return False
    counts = [text.count(ch) for ch in dict.fromkeys(text)]
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts)
    digits = sum(ch.isdigit() for ch in text)
    mixed = any(ch.isupper() for ch in text) and any(ch.islower() for ch in text)
    vowels = sum(ch in "aeiouAEIOU" for ch in text)
    return entropy >= 3.0 and (digits >= len(text) // 12 or mixed or vowels < len(text) // 5)


# ----------------------------------------------------------------------------------------------------- tools that send

_CURL_SENDS = ("-d", "-F", "-T", "--data", "--form", "--upload-file", "--json")
_WGET_SENDS = ("--post-file", "--post-data", "--body-file", "--body-data")
_MINERS = frozenset({"xmrig", "minerd", "cpuminer", "cgminer", "bfgminer", "ethminer", "t-rex", "nbminer", "lolminer",
                     "xmr-stak", "phoenixminer", "ccminer", "nanominer", "teamredminer", "srbminer"})
_SPAWNS = ("pty.spawn", "subprocess", "os.dup2", "dup2(", "exec(", "execl", "execv", "child_process", "proc_open", "popen",
           "system(", "/bin/sh", "/bin/bash", "exec sprintf", "TCPSocket")


@detector(rules=("exfil.reverse_shell", "exfil.tunnel", "exfil.tool_upload", "exfil.mining"), watches=(ProcessExec,),
          needs=(("tracepoint",),))
class Sender:
    """A program was started whose arguments send, tunnel, mine, or put a shell on a connection to somewhere outside.

    Arguments are intent: a box without a network lets none of it through. Misses: the same done by a program's own code.
    """

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        if not isinstance(event, ProcessExec) or view.facts.network == "open":
            return ()
        name = basename(event.exe)
        argv = event.argv
        found = (_shell(name, argv, view) or _tunnel(name, argv, view) or _mining(name, argv, view)
                 or _upload(script_of(view.process(event)) or name, argv, view) or _lookup(name, argv))
        if found is None:
            return ()
        rule, severity, what = found
        process = view.info(event)
        return (Finding(
            rule=rule, cls=Class.EXFILTRATION, outcome=Outcome.ATTEMPTED, severity=severity, evidence=(event,),
            object=shown(" ".join(argv))[:80], process=process, references=("ATT&CK T1567", "ATT&CK T1572"),
            reason=(f"{shown(event.exe)} was started to {what} (arguments as the kernel took them at exec: "
                    f"{shown(' '.join(argv))}). The policy says network: {view.facts.network}."),
            allow_hint="network: allowlist, with the host in allowed_hosts",
        ),)

    def finish(self, view: View) -> Iterable[Finding]:
        return ()


_Claim = tuple[str, int, str] | None


def _shell(name: str, argv: tuple[str, ...], view: View) -> _Claim:
    text = " ".join(argv)
    if name in SHELLS and ("/dev/tcp/" in text or "/dev/udp/" in text):
        host = text.partition("/dev/tcp/")[2] or text.partition("/dev/udp/")[2]
        if is_own_host(host.split("/")[0].strip("\"'"), view.facts):
            return None
        if " -i" in text or "0>&1" in text or "sh <&" in text or ">& /dev/tcp" in text:
            return "exfil.reverse_shell", 9, "put a shell on a connection outside"
        return "exfil.tool_upload", 5, "talk to a host outside through the shell's own network device"
    words = argv[1:]
    if name in ("nc", "ncat", "netcat", "nc.traditional", "nc.openbsd"):
        if any(w in ("-c", "--exec", "--sh-exec", "--lua-exec") or (w[:1] == "-" != w[1:2] and "e" in w) for w in words):
            return "exfil.reverse_shell", 9, "run a program on a connection"
        hosts = [w for w in words if not w.startswith("-") and not w.isdigit()]
        if hosts and "-l" not in words and not any(is_own_host(h, view.facts) for h in hosts):
            return "exfil.tool_upload", 5, "send to a host outside"
    if name == "socat":
        kinds = [w.lower() for w in words]
        runs = any(w.startswith(("exec:", "system:")) for w in kinds)
        if runs and any(w.startswith(("tcp", "udp", "openssl", "ssl", "sctp", "vsock")) for w in kinds):
            return "exfil.reverse_shell", 9, "run a program on a connection"
    code = next((argv[i + 1] for i in range(1, len(argv) - 1) if argv[i] in ("-c", "-e", "-r", "--eval")), "")
    connects = any(s in code for s in ("connect", "fsockopen", "TCPSocket"))
    if name not in SHELLS and connects and ("ocket" in code or "fsockopen" in code) and any(s in code for s in _SPAWNS):
        if "127.0.0.1" in code or "localhost" in code:
            return None
        return "exfil.reverse_shell", 9, "connect outside and start a program on the connection"
    return None


def _tunnel(name: str, argv: tuple[str, ...], view: View) -> _Claim:
    forwards = any(w[:2] in ("-R", "-D", "-L", "-w", "-W") or "RemoteForward" in w for w in argv[1:])
    if forwards and name in ("ssh", "autossh", "plink", "dbclient"):
        return "exfil.tunnel", 9, "open a tunnel to a host outside"
    if name in ("chisel", "ngrok", "cloudflared", "frpc", "bore", "localtunnel", "lt", "rathole", "gost", "iodine", "dnscat"):
        return "exfil.tunnel", 9, "open a tunnel to a host outside"
    if name in ("scp", "sftp", "rsync"):
        far = [w for w in argv[1:] if ":" in w and not w.startswith(("-", "/", "."))]
        if far and not any(is_own_host(host_of(w), view.facts) for w in far):
            return "exfil.tool_upload", 5, "copy files to or from a host outside"
    return None


def _mining(name: str, argv: tuple[str, ...], view: View) -> _Claim:
    if name.lower() in _MINERS or any(w.startswith(("stratum+", "stratum1+", "stratum2+")) for w in argv):
        return "exfil.mining", 8, "mine for a pool outside"
    return None


def _upload(name: str, argv: tuple[str, ...], view: View) -> _Claim:
    if name == "curl":
        sends = any(w.startswith(_CURL_SENDS) and not w.startswith("-data") for w in argv[1:])
        methods = [b for a, b in pairwise(argv) if a in ("-X", "--request")] + [w[2:] for w in argv if w[:2] == "-X"]
        posts = any(m.upper() in ("POST", "PUT", "PATCH") for m in methods)
    elif name in ("wget", "wget2"):
        sends, posts = any(w.startswith(_WGET_SENDS) for w in argv[1:]), any(w.startswith("--method=P") for w in argv)
    elif name in ("http", "https", "xh"):
        sends, posts = any(w in ("POST", "PUT") for w in argv[1:]), False
    else:
        return None
    host, path = url_of(argv)
    if not host:
        bare = [w for w in argv[1:] if not w.startswith("-") and "." in w and "/" in w]
        host, path = (host_of(bare[-1].split("/")[0]), bare[-1].partition("/")[2]) if bare else ("", "")
    if not host or is_own_host(host, view.facts) or is_link_local(host):
        return None
    if sends or posts:
        return "exfil.tool_upload", 5, f"send data to {shown(host)}"
    query = path.partition("?")[2] or path
    if len(query) >= 200 and looks_encoded(query):
        return "exfil.tool_upload", 5, f"send encoded data to {shown(host)} in the address"
    return None


def _lookup(name: str, argv: tuple[str, ...]) -> _Claim:
    if name in NAME_LOOKUPS | REACH_TOOLS | {"curl", "wget"}:
        for word in argv[1:]:
            labels = word.partition("://")[2].split("/")[0].split(".") if "://" in word else word.split(".")
            if len(labels) >= 3 and any(len(p) >= LONG_LABEL and looks_encoded(p) for p in labels):
                return "exfil.tool_upload", 7, "ask for a name that carries data"
    return None
