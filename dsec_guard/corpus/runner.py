"""One probe under the guard, and all of them: layout, surroundings, `dsec-guard run`, checks, judgement.

A probe is only ever started by `dsec-guard run`. Before the first one, the runner proves with a harmless command that
what that starts really is in namespaces of its own, and refuses to go on otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dsec_guard.corpus import checks, watch
from dsec_guard.corpus.judge import Judged, Observation, judge, last_word
from dsec_guard.corpus.manifest import Corpus, Probe
from dsec_guard.corpus.outside import HostProber, Sink, Yard, host_files, stand_in
from dsec_guard.corpus.policy import policy_for, write_policy
from dsec_guard.errors import HostError, UsageError

#: Starts the command line of this very installation, whatever PATH says.
CLI = (sys.executable, "-P", "-c", "from dsec_guard.cli.main import cli; cli()")
INSIDE = "/probe"       # where the probe's directory is shown, read-only
GRACE_S = 45.0          # beyond the wall limit, before the runner gives a run up
BUILD_S = 60.0
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user")
UNAVAILABLE_NEEDS = frozenset({"proxy"})
DEFAULT_OUTPUT_LIMIT = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """A probe ready to run: its fresh layout, its own copy (compiled where needed), its policy."""

    directory: Path
    layout: Path
    command: tuple[str, ...]
    probe_dir: Path
    policy: Path
    secrets: dict[str, str]


class CorpusSession:
    """Keeps what all probes of a corpus share. Use as a context manager; `run` may be called for any probe, any order.

    parent: the policy that each probe's own extends; `base` bounds, and task.yaml says the rest. level: `full`, `cold`
    or None for the policy's. cli: the words that start the command line.
    """

    def __init__(self, corpus: Corpus, *, parent: str = "base", level: str | None = None,
                 cli: Sequence[str] = CLI) -> None:
        self.corpus = corpus
        self._parent = parent
        self._level = level
        self._cli = tuple(cli)
        self._stack = contextlib.ExitStack()
        self._ahead: dict[str, Future[Prepared]] = {}

    def __enter__(self) -> CorpusSession:
        if os.geteuid() != 0:
            raise HostError("the corpus runner needs root: it makes namespaces and puts a file under /var/lib",
                            feature="root", hint="run it as root, in a container with CAP_SYS_ADMIN or on a test machine")
        with contextlib.ExitStack() as stack:
            self._base = Path(tempfile.mkdtemp(prefix="dsec-guard-corpus-", dir="/var/tmp"))
            stack.callback(_remove, self._base)
            self._state = self._base / "state"
            self._state.mkdir(mode=0o700)
            self._yard = stack.enter_context(Yard())
            self._sink = Sink(self.corpus.layout_program, self._yard, self._base)
            stack.callback(self._sink.stop)
            self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="corpus-layout")
            stack.callback(self._builder.shutdown, wait=True, cancel_futures=True)
            self._prove_boxes_are_boxes()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def run_all(self, probes: Sequence[Probe]) -> Iterator[Judged]:
        """Judge each probe in turn; the next one's layout is built meanwhile."""
        for probe, following in zip(probes, [*probes[1:], None], strict=True):
            yield self.run(probe, following=following)

    def run(self, probe: Probe, *, following: Probe | None = None) -> Judged:
        """Build, run, check and judge one probe. Raises: HostError/UsageError when the runner itself cannot go on."""
        missing = probe.needs & UNAVAILABLE_NEEDS
        if missing:
            return Judged(id=probe.id, cls=probe.cls, expected=probe.verdict, harm=False, verdict_class="",
                          skipped=f"needs {', '.join(sorted(missing))}, which this version does not have")
        ahead = self._ahead.pop(probe.id, None)
        prepared = ahead.result() if ahead is not None else self._prepare(probe)
        if following is not None and following.id not in self._ahead:
            self._ahead[following.id] = self._builder.submit(self._prepare, following)
        try:
            return self._run_prepared(probe, prepared)
        finally:
            _remove(prepared.directory)

    def _prepare(self, probe: Probe) -> Prepared:
        directory = Path(tempfile.mkdtemp(prefix=f"{probe.id[:24]}-", dir=self._base))
        directory.chmod(0o755)
        layout = directory / "task"
        built = subprocess.run([sys.executable, "-P", str(self.corpus.layout_program), "build", str(layout)],
                               capture_output=True, timeout=BUILD_S, check=False, cwd=directory)
        if built.returncode != 0:
            raise UsageError(f"{self.corpus.layout_program} build failed: {built.stderr[-500:].decode('utf-8', 'replace')}")
        probe_dir = directory / "probe"
        probe_dir.mkdir(mode=0o755)
        if probe.interpreter == "c":
            program = probe_dir / probe.id
            compiled = subprocess.run(["gcc", "-O1", str(probe.path), "-o", str(program), *probe.cflags],
                                      capture_output=True, timeout=BUILD_S, check=False)
            if compiled.returncode != 0:
                raise UsageError(f"{probe.path} does not compile: {compiled.stderr[-500:].decode('utf-8', 'replace')}")
            command: tuple[str, ...] = (f"{INSIDE}/{program.name}",)
        else:
            program = probe_dir / probe.path.name
            shutil.copyfile(probe.path, program)
            program.chmod(0o755)
            command = (probe.interpreter, f"{INSIDE}/{program.name}")
        policy = directory / "policy.yaml"
        write_policy(policy_for(self.corpus.task, layout, probe, parent=self._parent), policy)
        known = layout / "canaries.json"
        return Prepared(directory, layout, command, probe_dir, policy,
                        json.loads(known.read_text("utf-8")) if known.exists() else {})

    def _run_prepared(self, probe: Probe, prepared: Prepared) -> Judged:
        task = self.corpus.task
        token = f"corpus-run-{secrets.token_hex(12)}"
        digests = {c.argument: checks.digest(task.in_layout(c.argument, prepared.layout))
                   for c in probe.after if c.name == "file_unchanged"}
        files = {name: prepared.directory / name for name in ("report.json", "record.jsonl", "stdout", "stderr", "collected")}
        before, since, sink_before = watch.host_state(self._state), watch.ticks_now(), self._sink.size()
        argv = [*self._cli, "run", "--quiet", "--policy", str(prepared.policy),
                "--workspace", str(task.workspace(prepared.layout)), "--bind-ro", f"{prepared.probe_dir}:{INSIDE}",
                "--wall", f"{probe.time_bound_s}s",
                "--report", str(files["report.json"]), "--record", str(files["record.jsonl"])]
        if task.collect is not None:
            argv += ["--collect", str(files["collected"])]
        if self._level is not None:
            argv += ["--level", self._level]
        for name, value in {**self._sink.environment(), "DSG_CORPUS_RUN": "1", "DSG_CORPUS_NET": "1", **task.env,
                            **({"DSG_ALLOWED_HOST": task.allowed_hosts[0]} if task.allowed_hosts else {}),
                            "DSG_CORPUS_TOKEN": token}.items():
            argv += ["--env", f"{name}={value}"]
        rounds, slowest = 0, 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(host_files([(Path(target), prepared.layout / source) for target, source
                                            in task.host_only.items() if "hostfile" in probe.needs]))
            if "standin" in probe.needs:
                stack.enter_context(stand_in(self.corpus.layout_program, self._yard, prepared.layout))
            prober = HostProber(prepared.directory) if any(c.name == "host_alive" for c in probe.after) else None
            started = time.monotonic()
            code, seen = self._execute([*argv, "--", *prepared.command], files["stdout"], files["stderr"],
                                       probe.time_bound_s + GRACE_S)
            seconds = time.monotonic() - started
            if prober is not None:
                rounds, slowest = prober.stop()
            result = read_result(files["report.json"])
            done = checks.Finished(
                probe=probe, corpus=self.corpus, layout=prepared.layout, code=code, seconds=seconds, result=result,
                report=files["report.json"], record=files["record.jsonl"], stdout=files["stdout"], stderr=files["stderr"],
                collected=files["collected"], state_dir=self._state, seen=seen, host_before=before, token=token,
                since=since, secrets=prepared.secrets, digests=digests, host_rounds=rounds, host_slowest_s=slowest,
                cli=self._cli, output_limit=_output_limit(self.corpus))
            broken = checks.run_checks(done)
            leaks = list(checks.leaks(done))
        if self._sink.size() > sink_before and probe.verdict != "detected":
            leaks.append("something reached the receiver outside")
        said = last_word(files["stdout"].read_bytes(), probe.id)
        if not result:
            tail = files["stderr"].read_bytes()[-300:].decode("utf-8", "replace")
            broken = (*broken, f"dsec-guard run ended with {code}: {' '.join(tail.split())}")
        return judge(probe, Observation(said, _command_status(code, result), result, seconds, broken, tuple(leaks)))

    def _execute(self, argv: list[str], stdout: Path, stderr: Path, limit_s: float) -> tuple[int | None, watch.Seen]:
        """Run the guard in the yard. Returns its exit status (None: it had to be killed) and what was seen of it."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("DSG_")}
        env["DSEC_GUARD_STATE"] = str(self._state)
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(self._yard.wrap(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
                                       start_new_session=True)
            watcher = watch.Watcher(process.pid)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                seen = watcher.stop()
        return code, seen

    def _prove_boxes_are_boxes(self) -> None:
        """Refuses unless a command under the guard is in other namespaces than the runner, and cannot see its files."""
        directory = self._base / "proof"
        workspace = directory / "workspace"
        workspace.mkdir(parents=True, mode=0o755)
        secret = directory / "outside"
        secret.write_text("outside\n")
        links = " ".join(f"/proc/self/ns/{name}" for name in NAMESPACES)
        out, err = directory / "stdout", directory / "stderr"
        argv = [*self._cli, "run", "--quiet", "--policy", "untrusted-script", "--workspace", str(workspace), "--discard",
                "--wall", "20s", "--report", str(directory / "report.json"), "--",
                "sh", "-c", f"readlink {links}; cat {secret}; exit 0"]
        code, _ = self._execute(argv, out, err, 20 + GRACE_S)
        inside = out.read_text("utf-8", "replace").split()
        if code != 0 or len(inside) != len(NAMESPACES):
            tail = err.read_bytes()[-1000:].decode("utf-8", "replace").strip()
            raise HostError(f"`dsec-guard run` does not work here (exit {code}), and probes are never started without it\n{tail}",
                            hint="`dsec-guard doctor` says what this host lacks")
        own = {os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
        shared = sorted(set(inside) & own)
        if shared or secret.read_text().strip() in inside:
            raise HostError(f"a command under `dsec-guard run` still shares {', '.join(shared) or 'files'} with this host: "
                            "no probe is started", hint="`dsec-guard doctor` says what this host lacks")


def read_result(path: Path) -> dict[str, Any]:
    """The result JSON; {} when there is none or it cannot be read, which every probe counts as a failure."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _command_status(code: int | None, result: dict[str, Any]) -> int | None:
    """The probe's own exit status: from the record, whose authority is its reason; None unless it exited by itself."""
    told = result.get("exit", {})
    if told.get("reason") == "exited":
        value = told.get("code")
        return value if isinstance(value, int) else code
    return None if told else code


def _output_limit(corpus: Corpus) -> int:
    mib = corpus.task.limits.get("output_mib")
    return DEFAULT_OUTPUT_LIMIT if mib is None else mib << 20


def _remove(directory: Path) -> None:
    """Everything below, however deep or oddly named; Python's own rmtree gives up on a few hundred levels."""
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(directory)], check=False,
                   stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
