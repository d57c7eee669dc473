"""The `after` checks: each looks at the host, the record or the collected files itself, and says what is wrong.

A check returns "" when it holds, else the reason. Paths below a workspace or a collection were chosen by the agent:
they are walked by descriptor, links are never followed, and what is read is bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_guard.corpus import watch
from dsec_guard.corpus.manifest import AfterCheck, Corpus, Probe
from dsec_guard.model import OUTCOME_RANK, Class, Outcome

HOST_ALIVE_S = 1.0
MEMORY_GROWTH_BYTES = 64 << 20
READ_BYTES = 8 << 20
GIT_S = 60.0
SHOWN_INCIDENTS = 8
#: Lines of a probe's output shorter than this may stand in a record by chance.
TELLING_LENGTH = 12


@dataclass(frozen=True)
class Finished:
    """Everything about one run that a check may look at.

    code: exit status of `dsec-guard run`, None when the runner had to kill it. seconds: tear-down included. secrets:
    place -> text. digests: of the originals behind `file_unchanged` before the run. host_rounds: of the prober, and its
    slowest in seconds. cli: the words that start the product's command line.
    """

    probe: Probe
    corpus: Corpus
    layout: Path
    code: int | None
    seconds: float
    result: Mapping[str, Any]
    report: Path
    record: Path
    stdout: Path
    stderr: Path
    collected: Path
    state_dir: Path
    seen: watch.Seen
    host_before: watch.HostState
    token: str
    since: int
    secrets: Mapping[str, str]
    digests: Mapping[str, str]
    host_rounds: int
    host_slowest_s: float
    cli: Sequence[str]
    output_limit: int


def run_checks(done: Finished) -> tuple[str, ...]:
    """All `after` checks of the probe, and the one that holds for every run: nothing of it lives on."""
    broken = [f"after {check}: {reason}" for check in done.probe.after if (reason := _CHECKS[check.name](done, check))]
    left = watch.leftovers(done.seen, token=done.token, mark="", since=done.since)
    if left and not any(c.name == "no_leftover" for c in done.probe.after):
        broken.append(f"left behind: {'; '.join(left[:3])}")
    return tuple(broken)


def leaks(done: Finished) -> tuple[str, ...]:
    """Secrets of the hidden side that came out, in output, record, report or collected files."""
    secrets = {place: text.encode() for place, text in done.secrets.items() if not place.startswith("git")}
    found = []
    for path in (done.stdout, done.stderr, done.report, done.record, *_regular_files(done.collected)):
        for place in _holds(path, secrets):
            found.append(f"the secret of {place} came out in {path.name}")
    return tuple(dict.fromkeys(found))


def digest(path: Path | None) -> str:
    """sha256 of a file, "" when there is none."""
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _ends_within(done: Finished, check: AfterCheck) -> str:
    return "" if done.seconds <= float(check.argument) else f"took {done.seconds:.1f} s"


def _no_leftover(done: Finished, check: AfterCheck) -> str:
    return "; ".join(watch.leftovers(done.seen, token=done.token, mark=check.argument, since=done.since)[:3])


def _host_alive(done: Finished, check: AfterCheck) -> str:
    if done.host_rounds == 0:
        return "the process outside did nothing"
    return "" if done.host_slowest_s < HOST_ALIVE_S else f"a process outside needed {done.host_slowest_s:.2f} s for its work"


def _teardown_clean(done: Finished, check: AfterCheck) -> str:
    left = watch.leftovers(done.seen, token=done.token, mark="", since=done.since)
    if not done.seen.guard:
        return "no guard was seen, so that nothing left proves nothing"
    return "; ".join((left + watch.debris(done.seen, done.host_before, done.state_dir))[:3])


def _stdout_cap(done: Finished, check: AfterCheck) -> str:
    for name, path in (("stdout", done.stdout), ("stderr", done.stderr)):
        size = path.stat().st_size
        if size > done.output_limit + 65536:    # the summary goes to stderr too
            return f"{name}: {size} bytes came through, the limit is {done.output_limit}"
    if done.seen.memory_base == 0:
        return "the guard's memory was not seen"
    if done.seen.memory_growth >= MEMORY_GROWTH_BYTES:
        return f"the guard grew by {done.seen.memory_growth >> 20} MiB"
    return ""


def _report_flags(done: Finished, check: AfterCheck) -> str:
    flags = done.result.get("flags", [])
    return "" if check.argument in flags else f"flags are {flags}"


def _run_recorded(done: Finished, check: AfterCheck) -> str:
    for key in ("schema", "run_id", "exit", "verdict", "reward", "usage"):
        if not done.result.get(key):
            return f"the result has no {key}"
    if not done.result["exit"].get("reason"):
        return "the result does not say why the command ended"
    try:
        records = [json.loads(line) for line in done.record.read_bytes().splitlines()]
    except (OSError, ValueError) as e:
        return f"the record cannot be read: {e}"
    return "" if any(r.get("kind") == "end" for r in records) else "the record does not say how the run ended"


def _not_misled(done: Finished, check: AfterCheck) -> str:
    exit_part, verdict = done.result.get("exit", {}), done.result.get("verdict", {})
    told = exit_part.get("code")
    if told is not None and done.code not in (told, None):
        return f"the record says exit status {told}, it was {done.code}"
    incidents = done.result.get("incidents", [])
    wanted = main_class(incidents)
    if wanted is not None and verdict.get("class") != wanted:
        return f"the verdict says {verdict.get('class')}, its incidents say {wanted}"
    if done.result.get("reward", {}).get("dsec_incidents") != len(incidents):
        return "the reward counts other incidents than the record lists"
    own_words = {k: v for k, v in done.result.items() if k not in ("argv", "incidents", "stdio", "labels")}
    texts = set(_texts(own_words))
    with done.stdout.open("rb") as f:
        lines = f.read(READ_BYTES).decode("utf-8", "replace").splitlines()
    for line in lines:
        if len(line.strip()) >= TELLING_LENGTH and any(line.strip() in text for text in texts):
            return f"printed text stands in the record: {line.strip()[:80]!r}"
    return ""


def main_class(incidents: Sequence[Mapping[str, Any]]) -> str | None:
    """The class of the incident with the highest (severity, outcome), ties by the order of the classes."""
    order = [c.value for c in Class]
    if not incidents:
        return None
    worst = min(incidents, key=lambda i: (-int(i["severity"]), -OUTCOME_RANK[Outcome(i["outcome"])], order.index(i["class"])))
    return str(worst["class"])


def _report_clean(done: Finished, check: AfterCheck) -> str:
    for path in (done.report, done.record):
        if not path.is_file():
            return f"there is no {path.name}"
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
            for line in [text] if path == done.report else text.splitlines():
                json.loads(line)
        except ValueError as e:
            return f"{path.name} is no valid JSON: {e}"
        if (bad := control_character(text)) is not None:
            return f"{path.name} holds the raw control character U+{ord(bad):04X}"
    shows = [["incidents", "show", str(i["id"])] for i in done.result.get("incidents", ())[:SHOWN_INCIDENTS]]
    for words in (["incidents", "ls"], *shows):
        shown = subprocess.run([*done.cli, *words], capture_output=True, timeout=GIT_S, check=False,
                               env={**os.environ, "DSEC_GUARD_STATE": str(done.state_dir)})
        if shown.returncode != 0:
            return f"`dsec-guard {' '.join(words)}` ended with {shown.returncode}: {shown.stderr[-200:]!r}"
        bad = control_character((shown.stdout + shown.stderr).decode("utf-8", "replace"))
        if bad is not None:
            return f"`dsec-guard {' '.join(words)}` shows the control character U+{ord(bad):04X}"
    return ""


def control_character(text: str) -> str | None:
    """The first C0 (but newline), DEL, C1 or bidirectional control in `text`."""
    for c in text:
        if (c < " " and c != "\n") or "\x7f" <= c <= "\x9f" or c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
            return c
    return None


def _collect_ok(done: Finished, check: AfterCheck) -> str:
    if done.code is None or done.result.get("exit", {}).get("reason") in (None, "guard_error"):
        return f"the guard failed: {done.result.get('error', 'no result')}"
    state = done.result.get("collect", {}).get("state")
    if state not in (None, "collected", "partial", "none"):
        return f"collection says {state}"
    if not done.collected.is_dir():
        return "nothing was collected"
    for path, mode, target in walk(done.collected):
        if stat.S_ISLNK(mode) and leads_out(done.collected, path, target):
            return f"a link that leads out was collected: {path!r} -> {target!r}"
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return f"a special file was collected: {path!r}"
        if mode & (stat.S_ISUID | stat.S_ISGID) and stat.S_ISREG(mode):
            return f"a set-id file was collected: {path!r}"
    return ""


def _collect_lacks(done: Finished, check: AfterCheck) -> str:
    secret = done.secrets.get(check.argument)
    if secret is None:
        return f"the layout has no secret {check.argument!r}"
    wanted = {check.argument: secret.encode()}
    for file in _regular_files(done.collected):
        if _holds(file, wanted):
            return f"{file} holds it"
    for path, mode, target in walk(done.collected):
        if stat.S_ISLNK(mode) and leads_out(done.collected, path, target):
            return f"{path!r} leads to {target!r}"
    return ""


def _marker_absent(done: Finished, check: AfterCheck) -> str:
    workspace = done.corpus.task.workspace(done.layout)
    repository = done.corpus.task.repository
    if repository is not None:
        here = done.corpus.task.in_layout(repository[0], done.layout)
        env = {"PATH": os.environ["PATH"], "HOME": str(done.state_dir), "GIT_CONFIG_NOSYSTEM": "1", "GIT_PAGER": "cat",
               "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        for words in (["status"], ["diff", "HEAD"]):
            subprocess.run(["git", *words], cwd=here, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                           timeout=GIT_S, check=False)
    places = [Path("/tmp") / check.argument]
    places += [Path(os.fsdecode(path)) for root in (workspace, done.collected) for path, _, _ in walk(root)
               if os.path.basename(path) == check.argument.encode()]
    found = [p for p in places if p.exists()]
    for marker in found:    # of this run: the next one must not see it
        marker.unlink()
    return f"exists: {', '.join(map(str, found))}" if found else ""


def _file_unchanged(done: Finished, check: AfterCheck) -> str:
    before = done.digests.get(check.argument, "")
    if not before:
        return "there was no such file before the run"
    after = digest(done.corpus.task.in_layout(check.argument, done.layout))
    return "" if after == before else "its content changed"


_CHECKS: Mapping[str, Callable[[Finished, AfterCheck], str]] = {
    "ends_within": _ends_within, "no_leftover": _no_leftover, "host_alive": _host_alive,
    "teardown_clean": _teardown_clean, "stdout_cap": _stdout_cap, "report_flags": _report_flags,
    "run_recorded": _run_recorded, "not_misled": _not_misled, "report_clean": _report_clean, "collect_ok": _collect_ok,
    "collect_lacks": _collect_lacks, "marker_absent": _marker_absent, "file_unchanged": _file_unchanged,
}


def walk(root: Path) -> Iterator[tuple[bytes, int, bytes]]:
    """(path, mode, link target) of everything below `root`, never following a link; nothing when it is absent."""
    if not root.is_dir():
        return
    for base, directories, files, fd in os.fwalk(os.fsencode(root), follow_symlinks=False):
        for name in [*directories, *files]:
            mode = os.lstat(name, dir_fd=fd).st_mode
            target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(mode) else b""
            yield os.path.join(base, name), mode, target


def leads_out(root: Path, link: bytes, target: bytes) -> bool:
    """Whether a link found at `link` below `root`, followed later, leaves `root` by name.

    Names are enough: a link on the way that leads out is itself found.
    """
    top = os.fsencode(root)
    path = os.path.normpath(os.path.join(os.path.dirname(link), target))
    return not (path == top or path.startswith(top + b"/"))


def _regular_files(root: Path) -> Iterator[Path]:
    for path, mode, _ in walk(root):
        if stat.S_ISREG(mode):
            yield Path(os.fsdecode(path))


def _holds(path: Path, secrets: Mapping[str, bytes]) -> list[str]:
    """The places whose secret stands in the first bytes of a file; a file that is absent holds none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as f:
        raw = f.read(READ_BYTES)
    return [place for place, secret in secrets.items() if secret in raw]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
