"""Bringing the machine down: which limit was reached, who used it up, and whether that was an accident or a pattern.

A limit that is reached is an accident unless the kernel's facts show a pattern; then it is an attempt to exhaust.
Blame names the process, its share, the peak and whose limit it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dsec_guard.detect.base import detector
from dsec_guard.detect.language import shown
from dsec_guard.detect.programs import PACKAGE_TOOLS, is_tool
from dsec_guard.detect.view import Process, View
from dsec_guard.model import (
    CallsCounted,
    Class,
    Event,
    ExitReason,
    Finding,
    LimitHit,
    OomKilled,
    Outcome,
    ProcessExit,
    ProcessInfo,
    RunEnded,
    SyscallSeen,
    TaskCreated,
    UsageSummary,
)

EAGAIN, EMFILE, ENOSPC, EDQUOT, EPERM = 11, 24, 28, 122, 1
FORK_CALLS = frozenset({"fork", "vfork", "clone", "clone3"})
WRITE_CALLS = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate", "ftruncate", "open", "openat",
                         "openat2", "creat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat", "sendfile",
                         "copy_file_range", "mknod", "mknodat"})
F_SETPIPE_SZ = 1031

#: A limit filled within this time after its filler began was filled as fast as it went.
FAST_NS = 20_000_000_000
#: Forks in a row without an exec between them: no program nests that deep, a process that outruns its killer does.
CHAIN_DEPTH = 64
#: Refusals after which a program is no longer surprised by the limit.
INSISTS = 16
#: Output this many times over the limit is a flood, not a talkative test.
FLOOD_FACTOR = 8
SAME_SHORTAGE_NS = 200_000_000
DAEMON_FORK_NS = 1_000_000_000

BUILDERS = PACKAGE_TOOLS | frozenset({
    "make", "gmake", "ninja", "cmake", "cc1", "cc1plus", "gcc", "g++", "cc", "c++", "ld", "clang", "rustc", "javac",
    "java", "gradle", "mvn", "bazel", "tar", "unzip", "gzip", "xz", "zstd", "cp", "rsync", "ninja-build", "meson", "tsc",
})


@dataclass
class _Limit:
    """What is known of one limit over the run; the last event has the highest counts."""

    first: LimitHit
    last: LimitHit
    events: int = 1


@detector(
    rules=("crash.pids", "crash.memory", "crash.disk", "crash.files", "crash.output", "crash.open_files", "crash.wall",
           "crash.other_limit"),
    watches=(LimitHit, OomKilled, UsageSummary, RunEnded, SyscallSeen), syscalls=FORK_CALLS | WRITE_CALLS,
    needs=(("counter",),),
)
class Limits:
    """A limit of the box was reached: an accident (low, no penalty in shipped policies) or a pattern.

    pids: a pattern when one process holds most of the tasks without running other programs, or insists. memory: when it
    happens again and again. disk, files: when one process that is no build or package tool fills them at full speed.
    output: when it exceeds the limit many times over. wall, descriptors: always an accident.
    Misses: who used memory, where the kernel names only the victim.
    """

    def __init__(self) -> None:
        self._limits: dict[str, _Limit] = {}
        self._victims: list[tuple[OomKilled, ProcessInfo]] = []
        self._refused: dict[str, tuple[SyscallSeen, ProcessInfo]] = {}
        self._alive_at_refusal = 0
        self._usage: UsageSummary | None = None
        self._end: RunEnded | None = None

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        if isinstance(event, LimitHit):
            known = self._limits.get(event.limit)
            if known is None:
                self._limits[event.limit] = _Limit(event, event)
            else:
                known.last, known.events = event, known.events + 1
        elif isinstance(event, OomKilled):
            if len(self._victims) < 64:
                self._victims.append((event, _victim(event, view)))
        elif isinstance(event, UsageSummary):
            self._usage = event
        elif isinstance(event, RunEnded):
            self._end = event
        elif isinstance(event, SyscallSeen) and not event.ok:
            self._note(event, view)
        return ()

    def _note(self, event: SyscallSeen, view: View) -> None:
        if event.name in FORK_CALLS and event.errno == EAGAIN:
            kind = "pids"
            self._alive_at_refusal = max(self._alive_at_refusal, view.alive)
        elif event.errno in (ENOSPC, EDQUOT):
            kind = "disk"
        else:
            return
        if kind not in self._refused:
            self._refused[kind] = (event, view.info(event))

    def finish(self, view: View) -> Iterable[Finding]:
        limits = dict(self._limits)
        if "wall" not in limits and self._end is not None and self._end.reason is ExitReason.WALL_LIMIT:
            yield self._finding("wall", None, self._end, True, 2, "the run was still going", view, None)
        if "memory" not in limits and self._victims:
            event, info = self._victims[0]
            yield self._memory(None, event, info, view)
        for name in sorted(limits):
            limit = limits[name]
            if name == "events":
                continue  # the engine's evidence flood
            if name == "pids":
                yield self._pids(limit, view)
            elif name == "memory":
                victim = self._victims[0] if self._victims else None
                shown_event: Event = victim[0] if victim else limit.first
                yield self._memory(limit, shown_event, victim[1] if victim else view.info(limit.first), view)
            elif name in ("disk", "files", "shm"):
                yield self._storage(name, limit, view)
            elif name == "output":
                flood = limit.last.value > 0 and limit.last.peak >= FLOOD_FACTOR * limit.last.value
                yield self._finding(name, limit, limit.first, not flood, 3, "its output was cut", view, None)
            else:
                yield self._finding(name, limit, limit.first, True, 2, "", view, None)

    def _pids(self, limit: _Limit, view: View) -> Finding:
        value = limit.last.value or int(view.facts.limits.get("pids", 0))
        maker = max(view.processes.values(), key=lambda p: (p.children - p.children_execed + p.threads, -p.tgid), default=None)
        own = maker.children - maker.children_execed + maker.threads if maker else 0
        share = max(value // 2, 4)
        mostly_dead = 0 < self._alive_at_refusal + (maker.threads if maker else 0) < share
        insists = limit.last.count >= INSISTS
        pattern = own >= share or (insists and (own >= share // 2 or not view.created))
        if pattern and mostly_dead:
            return self._finding("pids", limit, limit.first, False, 3,
                                 f"{own} tasks of one process, most of them ended and never collected", view, _info(maker, view))
        note = f"one process made {own} of them without running another program" if pattern else ""
        return self._finding("pids", limit, limit.first, not pattern, 5 if pattern else 3, note, view, _info(maker, view))

    def _memory(self, limit: _Limit | None, event: Event, info: ProcessInfo, view: View) -> Finding:
        # One shortage may end a whole group within moments; again is when it happens anew.
        times = [v.at_ns for v, _ in self._victims]
        again = sum(1 for a, b in pairwise(times) if b - a > SAME_SHORTAGE_NS) >= 2
        note = f"{len(self._victims)} processes were killed for it" if self._victims else "the kernel refused more"
        return self._finding("memory", limit, event, not again, 5 if again else 3, note, view, info)

    def _storage(self, name: str, limit: _Limit, view: View) -> Finding:
        refused = self._refused.get("disk")
        event: Event = limit.first
        info: ProcessInfo | None = None
        fast = False
        if refused is not None:
            event, info = refused
            state = view.process(event)
            fast = event.at_ns - state.born_ns <= FAST_NS and not is_tool(state, BUILDERS, view.facts)
        elif limit.last.tgid == 0 and view.last_ns <= FAST_NS:
            first = view.processes.get(view.first_tgid)
            fast = first is not None and not is_tool(first, BUILDERS, view.facts)
            info = _info(first, view)
        shm = name == "shm" or limit.last.detail == "shm"
        pattern = fast and not shm
        note = "one process filled it as fast as it could write" if pattern else ""
        return self._finding(name, limit, event, not pattern, 5 if pattern else 3, note, view, info)

    def _finding(
        self, name: str, limit: _Limit | None, event: Event, accident: bool, severity: int, note: str, view: View,
        process: ProcessInfo | None,
    ) -> Finding:
        rule = f"crash.{name}" if name in _NAMED else "crash.other_limit"
        value = limit.last.value if limit else 0
        peak = limit.last.peak if limit else (self._usage.memory_peak if self._usage and name == "memory" else 0)
        count = limit.last.count if limit else 1
        own = limit.last.own if limit else True
        unit = _UNITS.get(name, "")
        if process is None and event.tgid == 0:
            process = _info(view.processes.get(view.first_tgid), view)
        who = shown(process.exe) if process is not None and process.exe else "the box"
        sized = f" of {value}{unit}" if value else ""
        reached = f"; peak {peak}{unit}" if peak else ""
        evidence = tuple(dict.fromkeys(e for e in (event, limit.last if limit else None) if e is not None))
        return Finding(
            rule=rule, cls=Class.SYSTEM_CRASH, outcome=Outcome.ATTEMPTED, severity=severity, evidence=evidence,
            object=name, process=process, accident=accident, references=("ATT&CK T1499",),
            reason=(f"{'The box' if own else 'The host'} reached {'its' if own else 'a'} limit{sized} on {name}"
                    f"{reached}, refused {count} times; {who} was at it{': ' + note if note else ''}. "
                    f"{'A limit reached without a pattern: an accident.' if accident else 'This is a pattern, not an accident.'}"),
            allow_hint=f"limits: {{{_KEYS.get(name, name)}: a higher value}}",
        )


_NAMED = frozenset({"pids", "memory", "disk", "files", "output", "open_files", "wall"})
_UNITS = {"memory": " bytes", "disk": " bytes", "shm": " bytes", "output": " bytes", "fsize": " bytes", "wall": " ms",
          "cpu": " ms"}
_KEYS = {"wall": "wall_time", "cpu": "cpus", "fsize": "file_size"}


def _info(process: Process | None, view: View) -> ProcessInfo | None:
    return None if process is None else ProcessInfo(process.exe, process.argv, process.tgid, view.ancestry(process))


def _victim(event: OomKilled, view: View) -> ProcessInfo:
    found = _info(view.processes.get(event.victim_tgid), view)
    return found if found is not None else ProcessInfo(event.comm, (), event.victim_tgid)


@detector(rules=("crash.fork_chain",), watches=(TaskCreated,), needs=(("tracepoint",),))
class ForkChain:
    """Processes that fork and go on in the child, over and over, without running another program.

    Misses: the same with an exec at each hop (then the tree shows it as many short programs).
    """

    def __init__(self) -> None:
        self._found: tuple[TaskCreated, ProcessInfo] | None = None

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        if self._found is None and isinstance(event, TaskCreated) and event.child_tgid != event.tgid:
            child = view.processes.get(event.child_tgid)
            if child is not None and child.depth >= CHAIN_DEPTH:
                self._found = (event, view.info(event))
        return ()

    def finish(self, view: View) -> Iterable[Finding]:
        if self._found is not None:
            event, process = self._found
            yield Finding(
                rule="crash.fork_chain", cls=Class.SYSTEM_CRASH, outcome=Outcome.ATTEMPTED, severity=5, evidence=(event,),
                object="pids", process=process, references=("ATT&CK T1499",),
                reason=(f"{shown(process.exe)} forked {CHAIN_DEPTH} times in a row, each child forking on (the kernel's record "
                        "of new tasks), so that its number changes faster than anyone can end it."),
                allow_hint="detectors: {crash.fork_chain: {enabled: false}}",
            )


@detector(rules=("crash.daemon_left",), watches=(ProcessExit,), needs=(("tracepoint",),))
class DaemonLeft:
    """A process detached from the command on purpose and outlived it.

    On purpose: its parent was made only to fork it and left at once with status 0. Jobs that merely still ran when the
    command ended are no finding. Misses: a daemon whose parent lived on for more than a second.
    """

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        return ()

    def finish(self, view: View) -> Iterable[Finding]:
        first = view.processes.get(view.first_tgid)
        if first is None or not first.ended_seq or first.signal == 9:
            return
        for tgid in sorted(view.processes):
            process = view.processes[tgid]
            parent = view.processes.get(process.parent)
            if parent is None or parent is first or process.born_seq > first.ended_seq:
                continue
            outlived = not process.ended_seq or (process.ended_seq > first.ended_seq and process.signal == 9)
            left = parent.ended_seq and parent.code == 0 and not parent.signal and not parent.has_execed
            if outlived and left and parent.ended_ns - process.born_ns <= DAEMON_FORK_NS and parent.tgid != view.facts.init_tgid:
                info = ProcessInfo(process.exe, process.argv, tgid, view.ancestry(process))
                marker = ProcessExit(seq=first.ended_seq, at_ns=first.ended_ns, tgid=first.tgid, exec=first.exec_index,
                                     code=first.code, signal=first.signal)
                yield Finding(
                    rule="crash.daemon_left", cls=Class.SYSTEM_CRASH, outcome=Outcome.ATTEMPTED, severity=2, evidence=(marker,),
                    object=shown(process.exe), process=info, references=("ATT&CK T1543",), accident=False,
                    reason=(f"{shown(process.exe)} was forked by a process that left at once, and still ran when the command "
                            "had ended (the kernel's record of new tasks and exits). Nothing of a run outlives it; it was ended."),
                    allow_hint="detectors: {crash.daemon_left: {enabled: false}}",
                )


@detector(rules=("crash.pipe_flood",), watches=(SyscallSeen, CallsCounted), syscalls=frozenset({"fcntl"}), needs=(("sys_exit",),))
class PipeFlood:
    """Many pipes were asked to hold more than the kernel grants: memory that belongs to no process.

    Misses: many pipes of the ordinary size, which the memory limit bounds.
    """

    def __init__(self) -> None:
        self._first: tuple[Event, ProcessInfo] | None = None
        self._count = 0

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        if isinstance(event, SyscallSeen) and event.args[1] & 0xFFFFFFFF == F_SETPIPE_SZ and event.errno == EPERM:
            self._count += 1
            self._first = self._first or (event, view.info(event))
        elif isinstance(event, CallsCounted) and event.name == "fcntl" and event.ret == -EPERM and self._first:
            self._count += event.count
        return ()

    def finish(self, view: View) -> Iterable[Finding]:
        if self._first is not None and self._count >= INSISTS:
            event, process = self._first
            yield Finding(
                rule="crash.pipe_flood", cls=Class.SYSTEM_CRASH, outcome=Outcome.ATTEMPTED, severity=5, evidence=(event,),
                object="pipes", process=process, references=("pipe(7)", "ATT&CK T1499"),
                reason=(f"{shown(process.exe)} asked {self._count} times for pipes larger than its user may have together "
                        "(fcntl F_SETPIPE_SZ, refused by the kernel): their buffers belong to no process."),
                allow_hint="detectors: {crash.pipe_flood: {enabled: false}}",
            )


