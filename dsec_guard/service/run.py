"""One guarded run, from building the box to the outcome. `guard.py` says what is shared and in which order it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dsec_guard.detect.engine import Completeness, Judge
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.errors import DsecGuardError, MonitorError, SetupError, UsageError
from dsec_guard.host.cgroup import CgroupUsage, OomWatch
from dsec_guard.incident.result import result_json
from dsec_guard.incident.store import RunDir
from dsec_guard.model import (
    Event,
    EvidenceLost,
    ExitReason,
    Layer,
    LayerState,
    Level,
    LimitHit,
    OutputRefused,
    RunEnded,
    Source,
    SyscallSeen,
    UsageSummary,
    escape_bytes,
)
from dsec_guard.monitor.pump import BoxStream
from dsec_guard.policy.compile import Plan
from dsec_guard.policy.schema import User
from dsec_guard.replay.record import RecordWriter
from dsec_guard.sandbox.box import OWN_TASKS, SEAL_OVERLAY, Box
from dsec_guard.sandbox.changes import ChangeLimits, ChangeReport, inspect_changes
from dsec_guard.sandbox.collect import collect
from dsec_guard.sandbox.environment import HOSTNAME, compose_environment
from dsec_guard.sandbox.holder import (
    ChildExited,
    EventsMissed,
    FloodKilled,
    HolderDied,
    RequestRefused,
    Sensor,
    SensorDied,
    Totals,
)
from dsec_guard.sandbox.launch import ExecExit, StartedExec
from dsec_guard.sandbox.rootfs import WORKSPACE_OVERLAY
from dsec_guard.sandbox.stdio import BoxIO
from dsec_guard.sandbox.submission import scan_submission
from dsec_guard.sandbox.workspace import WorkspaceDir, check_workspace, now_ns, pack, write_back
from dsec_guard.scoring import Judgement, score
from dsec_guard.service.request import (
    ExitInfo,
    KeepMode,
    MonitorStats,
    RefusedPath,
    RunOutcome,
    RunRequest,
    TransferReport,
    Usage,
)
from dsec_guard.service.watched import BoxShape, WatchedBox

if TYPE_CHECKING:
    from dsec_guard.monitor.loader import KernelMonitor
    from dsec_guard.service.guard import Guard

GRACE_S = 5.0            # between a forwarded signal and the end of the box
SAMPLE_S = 0.25          # how often the store's use is looked at
DELIVER_S = 10.0         # for a slow reader of the command's output after its end
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_EMPTY_DIR_BYTES = 40    # of a tmpfs
WITHHOLD_SEVERITY = 7    # from here on changes are packed, not written back
_NOT_RUN = {
    "ENOENT": ExitReason.NOT_FOUND, "ENOTDIR": ExitReason.NOT_FOUND, "EACCES": ExitReason.NOT_EXECUTABLE,
    "ENOEXEC": ExitReason.NOT_EXECUTABLE, "EPERM": ExitReason.NOT_EXECUTABLE, "ELOOP": ExitReason.NOT_EXECUTABLE,
    "EISDIR": ExitReason.NOT_EXECUTABLE, "E2BIG": ExitReason.NOT_EXECUTABLE, "ETXTBSY": ExitReason.NOT_EXECUTABLE,
}


@dataclass
class _Peaks:
    disk_bytes: int = 0
    files: int = 0
    shm_bytes: int = 0
    full: dict[str, int] = field(default_factory=dict)


class Run:
    """One command in one box. `execute` is called once."""

    def __init__(self, guard: Guard, request: RunRequest, plan: Plan, io: BoxIO, run_dir: RunDir) -> None:
        self.guard = guard
        self.request = request
        self.policy = request.policy
        self.plan = plan
        self.environment = compose_environment(self.policy, outer=os.environ, extra=request.env, tty=request.tty)
        self.io = io
        self.run_dir = run_dir
        self.workspace: WorkspaceDir | None = None
        self.shape: BoxShape
        self.monitor: KernelMonitor | None = None
        self.started_ns = now_ns()
        self._started_mono = time.monotonic_ns()
        self._exited_ns = self.started_ns
        self.box: Box | None = None
        self.stream: BoxStream | None = None
        self.judge: Judge | None = None
        self.record: RecordWriter | None = None
        self.events = 0
        self.flags: dict[str, None] = {}
        self.warnings: list[str] = []
        self.peaks = _Peaks()
        self.sensors_dead: set[str] = set()
        self._counted: dict[int, int] = {}
        self._exit: ExecExit | None = None
        self._reason: ExitReason | None = None
        self._stop_at: float | None = None
        self._signals: list[int] = []
        self._interrupted = False
        self._oom = 0
        self._missed = 0
        self._totals: dict[Sensor, Totals] = {}
        self._wake_fd = -1
        self.lost: dict[str, int] = {}
        self.over_budget = 0

    # ---------------------------------------------------------------------------------------------------- the course

    def execute(self) -> RunOutcome:
        """Build, run, end, judge, record, write back."""
        request = self.request
        if request.workspace is not None:
            self.workspace = check_workspace(request.workspace, named=request.workspace_named)
            self._keep_apart(self.workspace.path)
        self.shape = self.guard.shape(request, self.plan, self.workspace)
        self.monitor = self.guard.monitor if self.shape.monitored else None
        error: DsecGuardError | None = None
        # From here to the written result a signal is noted, never fatal.
        with self._signals_noted(), ExitStack() as stack:
            box = self._build(stack)
            try:
                self._run_command(box)
            except (DsecGuardError, OSError) as problem:
                error = _as_guard_error(problem)
            if self.judge is None:  # nothing was started
                self._open_judge(box)
            return self._conclude(box, error)

    def _keep_apart(self, workspace: Path) -> None:
        for own in self.guard.own_places:
            if workspace == own or own in workspace.parents:
                raise UsageError(f"the workspace {str(workspace)!r} lies in dsec-guard's own directory {str(own)!r}",
                                 hint="use another directory as workspace, or set DSEC_GUARD_STATE to another place")

    def _build(self, stack: ExitStack) -> Box:
        """A box made ahead if there is one, else one of this run's name."""
        guard, shape = self.guard, self.shape
        watched = guard.ready.take(shape) or WatchedBox.create(guard, shape, self.run_dir.run_id)
        stack.callback(watched.close)
        self.box, self.stream = watched.box, watched.stream
        self._started_mono = watched.begin()
        own = self.request.record_file
        self.record = RecordWriter(own or self.run_dir.events_file, when_due=own is None)
        return watched.box

    def _open_judge(self, box: Box) -> None:
        """Once, before the first event is taken in."""
        assert self.record is not None
        self.facts = self._facts(box)
        self.judge = Judge(self.policy, self.facts, self.guard.detectors)
        self.record.header(run_id=self.run_dir.run_id, started_ns=self.started_ns, argv=self.request.argv,
                           policy=self.policy, detectors_digest=self.guard.detectors.digest,
                           facts=self.facts.to_record(), layers=self.plan.layers)

    def _facts(self, box: Box) -> BoxFacts:
        policy, answers = self.policy, self.policy.answers
        limits = {k: v for k, v in policy.limits.model_dump().items() if isinstance(v, int | float)}
        return BoxFacts(
            run_id=self.run_dir.run_id, box=str(box.id), level=policy.monitor.level,
            argv=tuple(escape_bytes(a) for a in self.request.argv), workspace=box.root.workspace, home=self.plan.home,
            user="root" if policy.user is User.ROOT else "agent", agent_uid=self.plan.agent_uid,
            init_tgid=box.spawned.pid, hostname=HOSTNAME, hidden=tuple(h.path for h in answers.hidden),
            hidden_style=answers.style.value, harness=answers.harness,
            environment_state=tuple(s.path for s in answers.environment_state), deliverables=policy.deliverables,
            repository=answers.repository.path if answers.repository else "", allowed_reads=answers.allowed_reads,
            package=answers.package or "", limits=limits, network=policy.network.value,
            path_dirs=tuple(self.environment.get("PATH", "").split(":")), layers=self.plan.layers,
        )

    # ------------------------------------------------------------------------------------------------- while it runs

    def _run_command(self, box: Box) -> None:
        """Start the command and stay with it to its end. What needs no answer of the box is done while it starts."""
        stdio = self.io.prepare(limit_bytes=self.policy.limits.output, owner=box.agent_owner, root_fd=box.spawned.root_fd)
        with ExitStack() as stack:
            watches: list[OomWatch] = []

            def meanwhile() -> None:
                self._open_judge(box)
                self.io.start()
                watches.append(stack.enter_context(box.cgroup.oom_watch()))

            try:
                started = box.exec(self.request.argv, environment=self.environment, stdio=stdio, tty=self.request.tty,
                                   meanwhile=meanwhile)
            except SetupError as problem:
                reason = _NOT_RUN.get(problem.errno_name)
                if problem.step != "execve" or reason is None:
                    raise
                self._reason = reason
                self.warnings.append(str(problem))
                return
            self._loop(box, started, watches[0])

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """INT, TERM, HUP and QUIT are noted and wake the loop; a pty's Ctrl-C is a byte and never comes here."""
        import threading

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_fd = wake_r
        before_fd = signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)

        def note(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            os.close(wake_r)
            os.close(wake_w)

    def _loop(self, box: Box, started: StartedExec, oom: OomWatch) -> None:
        guard = self.guard
        wall_ms = min(self.request.wall_ms or self.policy.limits.wall_time, self.policy.limits.wall_time)
        deadline = time.monotonic() + wall_ms / 1000
        with selectors.DefaultSelector() as selector:
            wake = self._wake_fd
            sources: list[tuple[int, Callable[[], object]]] = [
                (box.init.fileno(), lambda: self._read_exits(box, started)),
                (guard.holder.fileno(), self._read_holder),
                (guard.holder.records_fd, self._drain_holder),
                (oom.fileno(), lambda: self._note_oom(oom.drain())),
            ]
            if self.monitor is not None:
                sources.append((self.monitor.fileno(), self._drain_kernel))
            if wake >= 0:
                sources.append((wake, lambda: _empty(wake)))
            for fd, action in sources:
                selector.register(fd, selectors.EVENT_READ, action)
            next_sample = time.monotonic()
            while self._exit is None and self._reason is None:
                now = time.monotonic()
                if now >= next_sample:
                    self._sample(box)
                    next_sample = now + SAMPLE_S
                if now >= deadline:
                    self._reason = ExitReason.WALL_LIMIT
                    break
                if self._stop_at is not None and now >= self._stop_at:
                    self._reason = ExitReason.INTERRUPTED
                    break
                wait = min(deadline, next_sample, self._stop_at or deadline) - now
                for key, _mask in selector.select(max(wait, 0)):
                    key.data()
                self._forward_signals(box, started)
            self._note_oom(oom.drain())

    def _forward_signals(self, box: Box, started: StartedExec) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._interrupted:
                self._reason = self._reason or ExitReason.INTERRUPTED
                return
            self._interrupted = True
            self._stop_at = time.monotonic() + GRACE_S
            box.init.signal(started.exec_id, number)

    def _read_exits(self, box: Box, started: StartedExec) -> None:
        for ended in box.init.read_exits():
            if ended.exec_id == started.exec_id:
                self._exit = ended

    def _read_holder(self) -> None:
        for message in self.guard.holder.read_messages():
            if isinstance(message, SensorDied):
                self.sensors_dead.add(message.name)
            elif isinstance(message, EventsMissed):
                self._missed += 1
            elif isinstance(message, FloodKilled):
                self._reason = self._reason or ExitReason.KILLED_BY_POLICY
            elif isinstance(message, RequestRefused):
                raise MonitorError(f"the holder could not set up a sensor: {os.strerror(message.errno)}")
            elif isinstance(message, HolderDied):
                raise MonitorError("the holder process died; its boxes ended with it")
            elif isinstance(message, ChildExited) and self._is_init(message.pid) and self._exit is None:
                self._reason = self._reason or (ExitReason.MEMORY_LIMIT if self._oom else ExitReason.GUARD_ERROR)

    def _is_init(self, pid: int) -> bool:
        return self.box is not None and pid == self.box.spawned.pid

    def _note_oom(self, kills: int) -> None:
        """One victim ends the box: a tree with a hole in it would go on with wrong results."""
        if kills:
            self._oom += kills
            self._reason = self._reason or ExitReason.MEMORY_LIMIT

    def _drain_kernel(self) -> int:
        monitor = self.monitor
        assert monitor is not None
        assert self.stream is not None
        records = monitor.drain(4096)
        for raw in records:
            if raw.head.box == self.stream.box_id:
                self._take(self.stream.ingest(raw))
        return len(records)

    def _drain_holder(self) -> int:
        assert self.stream is not None
        if self.monitor is not None:
            self._drain_kernel()  # who a process is comes from there, and before what it did
        records = self.guard.holder.read_records()
        for raw in records:
            if raw.box_id == self.stream.box_id:
                self._take(self.stream.ingest(raw))
        return len(records)

    def _take(self, events: Iterable[Event]) -> None:
        """Every event goes the same way: counted, recorded, judged."""
        assert self.judge is not None
        assert self.record is not None
        for event in events:
            self.events += 1
            if isinstance(event, SyscallSeen) and event.errno in (errno.ENOSPC, errno.EMFILE, errno.EFBIG, errno.EDQUOT):
                self._counted[event.errno] = self._counted.get(event.errno, 0) + 1
                if event.errno != errno.EMFILE and self.box is not None:
                    self._sample(self.box)
            self.record.events((event,))
            self.judge.feed(event)

    def _emit(self, *events: Event) -> None:
        assert self.stream is not None
        at_ns = time.monotonic_ns() - self._started_mono
        self._take([self.stream.number(replace(event, at_ns=at_ns)) for event in events])

    def _sample(self, box: Box) -> None:
        """Look at what can only be seen while it lasts; called a few times a second."""
        if self.record is not None:
            self.record.flush_if_due()
        for name, fd, opened in (("store", box.spawned.store_fd, ""), ("shm", box.spawned.root_fd, "dev/shm")):
            try:
                at = os.open(opened, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd) if opened else fd
            except FileNotFoundError:
                continue
            try:
                info = os.fstatvfs(at)
            finally:
                if opened:
                    os.close(at)
            used, files = (info.f_blocks - info.f_bfree) * info.f_frsize, info.f_files - info.f_ffree
            if name == "shm":
                self.peaks.shm_bytes = max(self.peaks.shm_bytes, used)
                if info.f_blocks and not info.f_bfree:
                    self.peaks.full["shm"] = used
                continue
            self.peaks.disk_bytes = max(self.peaks.disk_bytes, used)
            self.peaks.files = max(self.peaks.files, files)
            if not info.f_bfree:
                self.peaks.full["disk"] = used
            if not info.f_ffree:
                self.peaks.full["files"] = files

    # ------------------------------------------------------------------------------------------------------- the end

    def _conclude(self, box: Box, error: DsecGuardError | None) -> RunOutcome:
        self._exited_ns = time.time_ns()
        try:
            self._sample(box)
            ended_mono = time.monotonic_ns()
            self._settle_exit(error)
            box.kill()
            self.io.finish()
            self._drain_all()
            usage = self._account(box, ended_mono)
            collected = self._collect(box)
            self._inspect(box)
        except (DsecGuardError, OSError) as problem:
            # What was seen until here is judged and kept; the verdict says that the guard failed.
            error = error or _as_guard_error(problem)
            usage, collected = Usage(), TransferReport(state="failed", why=str(problem))
            self.io.finish()
        if not self.io.wait(DELIVER_S):
            self.warnings.append("the reader of the command's output did not take all of it")
            self.io.abort()
        exit_info = self._exit_info(error)
        self._emit(RunEnded(reason=exit_info.reason, code=exit_info.code, signal=exit_info.signal))
        completeness = self._completeness(box, error)
        judgement = self._judge(completeness)
        outcome = self._outcome(exit_info, judgement, usage, collected, completeness, error)
        try:
            outcome = self._write_back(box, outcome)
        except (DsecGuardError, OSError) as problem:
            outcome = replace(outcome, write_back=self._rescue(box, problem))
        self._store(outcome, completeness)
        return outcome

    def _settle_exit(self, error: DsecGuardError | None) -> None:
        """An exit that came with the last wake-up still counts; an out-of-memory kill explains any other end."""
        if error is None and self._exit is None and self._reason is None:
            self._reason = ExitReason.GUARD_ERROR

    def _drain_all(self) -> None:
        """The box is empty: what its tasks caused is in the buffers, take all of it."""
        assert self.box is not None
        self._totals = self.guard.holder.totals(self.box.id)
        self._read_holder()
        while self._drain_holder():
            pass
        if self.monitor is not None:
            while self._drain_kernel():
                pass

    def _account(self, box: Box, ended_mono: int) -> Usage:
        """Turn counters into events: refused calls beyond the first few, limits reached, losses, and the sums."""
        cgroup = box.cgroup.usage()
        stdio = self.io.report()
        monitor = self.monitor
        assert self.stream is not None
        forks = 0
        if monitor is not None:
            counters = monitor.counters(box.id)
            forks = counters.forks
            for (_name, ret), count in counters.calls.items():
                self._counted[-ret] = self._counted.get(-ret, 0) + count
            held = {"fanotify": 0, "notify": 0} | {s.name.lower(): t.lost for s, t in self._totals.items()}
            held["fanotify"] += self._missed
            self.lost = {"evidence": counters.lost_evidence, "context": counters.lost_context, **held}
            self.over_budget = counters.over_budget
            self._take(self.stream.summary(counters, held["fanotify"], held["notify"]))
        wall_ms = (ended_mono - self._started_mono) // 1_000_000
        self._limits_hit(cgroup, stdio.limited, stdio.output_bytes, wall_ms)
        summary = UsageSummary(
            source=Source.COUNTER, wall_ms=wall_ms, cpu_ms=cgroup.cpu_ns // 1_000_000, memory_peak=cgroup.memory_peak,
            pids_peak=max(0, cgroup.pids_peak - OWN_TASKS), forks=forks, disk_bytes=self.peaks.disk_bytes,
            files=self.peaks.files, output_bytes=stdio.output_bytes, shm_bytes=self.peaks.shm_bytes,
        )
        self._emit(summary)
        return Usage(wall_s=wall_ms / 1000, cpu_s=cgroup.cpu_ns / 1e9, memory_peak=cgroup.memory_peak,
                     pids_peak=summary.pids_peak, disk_bytes=self.peaks.disk_bytes, files=self.peaks.files,
                     output_bytes=stdio.output_bytes)

    def _limits_hit(self, cgroup: CgroupUsage, streams: tuple[str, ...], output_bytes: int, wall_ms: int) -> None:
        limits = self.policy.limits
        hits: list[tuple[str, LimitHit]] = []

        def hit(flag: str, limit: str, value: int, peak: int, count: int = 1, detail: str = "") -> None:
            hits.append((flag, LimitHit(source=Source.COUNTER, limit=limit, value=value, peak=peak, count=max(1, count),
                                        detail=detail)))

        if cgroup.oom_kills or self._oom:
            hit("oom", "memory", limits.memory, cgroup.memory_peak, max(cgroup.oom_kills, self._oom))
        if cgroup.pids_denied:
            hit("pids", "pids", limits.pids, max(0, cgroup.pids_peak - OWN_TASKS), cgroup.pids_denied)
        refused = self._counted.get(errno.ENOSPC, 0) + self._counted.get(errno.EDQUOT, 0)
        full = self.peaks.full
        if "files" in full:
            hit("files", "files", limits.files, full["files"], refused)
        if "disk" in full:
            hit("disk", "disk", limits.disk, full["disk"], refused)
        if "shm" in full:
            hit("disk", "shm", limits.shm, full["shm"], refused)
        if refused and not full:
            hit("disk", "disk", limits.disk, self.peaks.disk_bytes, refused)
        if count := self._counted.get(errno.EMFILE, 0):
            hit("open_files", "open_files", limits.open_files, limits.open_files, count)
        if count := self._counted.get(errno.EFBIG, 0):
            hit("file_size", "fsize", limits.file_size, limits.file_size, count)
        for stream in streams:
            hit("output", "output", limits.output, output_bytes, detail=stream)
        if self._reason is ExitReason.WALL_LIMIT:
            hit("timeout", "wall", self.request.wall_ms or limits.wall_time, wall_ms)
        for flag, event in hits:
            self.flags[flag] = None
            self._emit(event)

    def _collect(self, box: Box) -> TransferReport:
        destination = self.request.collect_dir
        if destination is None:
            return TransferReport()
        roots = {box.root.workspace: box.spawned.overlay_fds[WORKSPACE_OVERLAY]} if self.workspace is not None else {}
        try:
            report = collect(roots, self.policy.deliverables, destination)
        except (DsecGuardError, OSError) as problem:  # the place given for it, not the run, is at fault
            self.warnings.append(f"nothing was collected: {problem}")
            return TransferReport(state="failed", why=str(problem))
        self._emit(*report.refused)
        return TransferReport(
            state="collected", written=len(report.collected), refused=_refused(report.refused), refused_total=len(report.refused))

    def _inspect(self, box: Box) -> None:
        """What the agent left behind, read by descriptor now that nobody can change it any more."""
        limits = ChangeLimits(max_entries=max(20_000, self.policy.limits.files))
        if self.workspace is not None:
            lower = os.open(self.workspace.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found = inspect_changes(box.spawned.upper_fds[WORKSPACE_OVERLAY], lower, box.root.workspace, limits=limits)
                self._inspected(found)
                self._scan(box, lower, found)
            finally:
                os.close(lower)
        if box.seal is not None and SEAL_OVERLAY in box.spawned.upper_fds:
            lower = os.open(box.seal.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found = inspect_changes(box.spawned.upper_fds[SEAL_OVERLAY], lower, box.seal.target, limits=limits)
            finally:
                os.close(lower)
            self._inspected(found)
            made = any(event.path.startswith(f"{box.seal.target}/objects/") for event in found.events)
            if made and box.seal.writable and self.request.keep is not KeepMode.DISCARD:
                self.warnings.append(f"{box.seal.target} was sealed for the run: commits made inside stay in the box, "
                                     "files in the work tree do not")
        for name, place in box.root.store_places.items():
            if _is_empty(name, box.spawned.store_fd):
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=box.spawned.store_fd)
            except FileNotFoundError:
                continue
            try:
                self._inspected(inspect_changes(fd, -1, place, place="store", limits=limits))
            finally:
                os.close(fd)

    def _scan(self, box: Box, lower: int, found: ChangeReport) -> None:
        """What a grader would load: everything handed in, the harness, and the repository that both are about."""
        answers = self.policy.answers
        patterns = (*self.policy.deliverables, *answers.harness, *((answers.repository.path,) if answers.repository else ()))
        hidden = tuple(h.path for h in answers.hidden)
        upper = box.spawned.upper_fds[WORKSPACE_OVERLAY]
        report = scan_submission(upper, lower, box.root.workspace, found.events, patterns, hidden=hidden)
        self._emit(*report.facts)
        self._not_inspected(report.skipped)

    def _inspected(self, found: ChangeReport) -> None:
        self._emit(*found.events)
        self._not_inspected(found.skipped)

    def _not_inspected(self, skipped: Sequence[tuple[str, str]]) -> None:
        for path, why in skipped[:10]:
            self.warnings.append(f"not inspected: {path} ({why})")
        if skipped:  # whatever lies there may matter: no clean verdict without having looked
            count = len(skipped)
            self.lost["inspection"] = self.lost.get("inspection", 0) + count
            self._emit(EvidenceLost(source=Source.INSPECTION, ring="inspection", count=count))

    def _exit_info(self, error: DsecGuardError | None) -> ExitInfo:
        if error is not None:
            return ExitInfo(reason=ExitReason.GUARD_ERROR)
        status = self._exit.status if self._exit is not None else None
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        if self._reason is not None:
            if self._reason is ExitReason.MEMORY_LIMIT and code is None and number is None:
                number = signal.SIGKILL
            return ExitInfo(reason=self._reason, code=code, signal=number)
        return ExitInfo(reason=ExitReason.SIGNAL if number is not None else ExitReason.EXITED, code=code, signal=number)

    def _completeness(self, box: Box, error: DsecGuardError | None) -> Completeness:
        missing: list[str] = []
        monitor = self.monitor
        if monitor is None:
            missing += ["sys_exit", "tracepoint", "cgroup"]
        else:
            optional = monitor.optional_hooks
            for hook in monitor.layers:
                if hook.attached or hook.name in optional:
                    continue
                kind, _, name = hook.name.partition("/")
                missing.append("sys_exit" if name == "sys_exit" else "cgroup" if kind == "cgroup" else "tracepoint")
        if self.policy.monitor.level is Level.FULL:
            missing.append("notify")
        return Completeness(
            lost=self.lost, over_budget=self.over_budget, sensors_missing=tuple(dict.fromkeys(missing)),
            sensors_dead=tuple(sorted(self.sensors_dead)),
            missing_layers=tuple(x.name for x in self.plan.layers if x.state is LayerState.MISSING and not x.optional),
            guard_failed=str(error) if error is not None else "",
        )

    def _judge(self, completeness: Completeness) -> Judgement:
        assert self.judge is not None
        return score(self.judge.finish(completeness), self.policy)

    def _outcome(self, exit_info: ExitInfo, judgement: Judgement, usage: Usage, collected: TransferReport,
                 completeness: Completeness, error: DsecGuardError | None) -> RunOutcome:
        request, policy = self.request, self.policy
        task_reward = self._task_reward()
        return RunOutcome(
            run_id=self.run_dir.run_id, run_dir=self.run_dir.path, policy_name=policy.name, policy_digest=policy.digest,
            argv=request.argv, exit=exit_info, verdict=judgement.verdict, reward=judgement.reward,
            started_ns=self.started_ns, exited_ns=self._exited_ns, ended_ns=time.time_ns(),
            mode=policy.mode.value, layers=self._layers(),
            monitor=MonitorStats(level=policy.monitor.level if self.monitor else None, events=self.events,
                                 lost=sum(completeness.lost.values()), over_budget=completeness.over_budget),
            usage=usage, flags=tuple(self.flags), incidents=judgement.incidents, task_reward=task_reward,
            fold=judgement.fold(task_reward), workspace=request.workspace, collect=collected,
            record_file=request.record_file, stdio=self.io.report().as_record(), labels=request.labels,
            warnings=tuple(self.warnings), error=str(error) if error else "", hint=error.hint if error else "",
        )

    def _task_reward(self) -> float | None:
        """A reward file is read when the command has ended; a bad one is the caller's trouble, not the agent's."""
        try:
            return self.request.known_task_reward()
        except UsageError as problem:
            self.warnings.append(str(problem))
            return None

    def _layers(self) -> tuple[Layer, ...]:
        checks = self.box.spawned.checks if self.box is not None else ()
        proven = Layer("self-check", LayerState.ENFORCED, ", ".join(c.name for c in checks))
        unmapped = self.box.unmapped if self.box is not None else ()
        shown = ", ".join(unmapped[:3]) + (f" and {len(unmapped) - 3} more" if len(unmapped) > 3 else "")
        layers = [Layer(x.name, LayerState.WEAKENED, f"the file system maps no owners at {shown}")
                  if x.name == "file owners" and unmapped else x for x in self.plan.layers]
        return (*layers, *((proven,) if checks else ()))

    def _write_back(self, box: Box, outcome: RunOutcome) -> RunOutcome:
        """After the verdict: apply, pack or drop what the command changed in the workspace."""
        keep = self.request.keep
        if self.workspace is None or WORKSPACE_OVERLAY not in box.spawned.upper_fds:
            return outcome
        if keep is KeepMode.DISCARD:
            return replace(outcome, write_back=TransferReport(state="discarded"))
        upper, inside = box.spawned.upper_fds[WORKSPACE_OVERLAY], box.root.workspace
        why = ""
        if keep is KeepMode.KEEP:
            if outcome.error:
                why = "the guard failed"
            elif outcome.verdict.severity >= WITHHOLD_SEVERITY:
                why = f"an incident of severity {outcome.verdict.severity}"
        if keep is KeepMode.PACK or why:
            target = self.request.pack_file if keep is KeepMode.PACK else self.run_dir.changes_file
            assert target is not None
            packed = pack(upper, self.workspace, target, inside_prefix=inside, started_ns=self.started_ns)
            command = ("dsec-guard", "apply", str(target), "--to", str(self.workspace.path))
            return replace(outcome, write_back=TransferReport(
                state="packed" if not why else "withheld", written=len(packed.applied), removed=len(packed.removed),
                refused=_refused(packed.refused), refused_total=len(packed.refused), pack=target, apply_command=command,
                why=why))
        done = write_back(upper, self.workspace, inside_prefix=inside, journal_dir=self.guard.journal_dir,
                          started_ns=self.started_ns, force=keep is KeepMode.KEEP_ALWAYS, cover=self.guard.cover)
        if done.stopped:
            target = self.run_dir.changes_file
            pack(upper, self.workspace, target, inside_prefix=inside, started_ns=self.started_ns)
            return replace(outcome, write_back=TransferReport(
                state="withheld", refused=_refused(done.refused), refused_total=len(done.refused), pack=target,
                apply_command=("dsec-guard", "apply", str(target), "--to", str(self.workspace.path)),
                why="files changed on the host meanwhile"))
        return replace(outcome, write_back=TransferReport(
            state="partial" if done.refused else "applied", written=len(done.applied), removed=len(done.removed),
            refused=_refused(done.refused), refused_total=len(done.refused)))

    def _rescue(self, box: Box, problem: Exception) -> TransferReport:
        """The workspace could not be written: keep the changes in the run's own directory, if that can be done."""
        assert self.workspace is not None
        target = self.run_dir.changes_file
        try:
            pack(box.spawned.upper_fds[WORKSPACE_OVERLAY], self.workspace, target, inside_prefix=box.root.workspace,
                 started_ns=self.started_ns)
        except (DsecGuardError, OSError) as again:
            return TransferReport(state="failed", why=f"{problem}; and they could not be packed: {again}")
        return TransferReport(state="failed", pack=target, why=str(problem),
                              apply_command=("dsec-guard", "apply", str(target), "--to", str(self.workspace.path)))

    def _store(self, outcome: RunOutcome, completeness: Completeness) -> None:
        """Nothing is acknowledged before it is on disk."""
        assert self.record is not None
        if outcome.incidents or outcome.error or self.request.record_file is not None:
            self.record.finish(outcome, completeness=asdict(completeness))
        else:
            self.record.discard()
        if outcome.incidents:
            self.guard.state.append_incidents(outcome)
        self.run_dir.write_result(result_json(outcome))


def _as_guard_error(problem: Exception) -> DsecGuardError:
    return problem if isinstance(problem, DsecGuardError) else SetupError(f"{type(problem).__name__}: {problem}")


def _refused(events: Iterable[OutputRefused]) -> tuple[RefusedPath, ...]:
    return tuple(RefusedPath(path=e.path, why=e.why) for e in events)[:1000]


def _is_empty(name: str, store_fd: int) -> bool:
    """Whether a directory of the store holds nothing; one that is not there does not. Source: mm/shmem.c, the size of a
    tmpfs directory is that of two entries and grows by one for each name in it."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=store_fd, follow_symlinks=False).st_size == _EMPTY_DIR_BYTES
    return True


def _empty(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # an earlier turn may have read it
        os.read(fd, 4096)
