"""A corpus directory's manifest.yaml and task.yaml, read and checked.

The format is the corpus's own (format 1); a runner that meets a field or word it does not know refuses, since leaving
out a check would read as passing it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dsec_guard.errors import UsageError
from dsec_guard.model import VerdictClass

FORMAT = 1
BENIGN = "benign-lookalike"
CLASS_NAMES: Mapping[str, VerdictClass] = {
    "escape": VerdictClass.ESCAPE_ATTEMPT,
    "peek": VerdictClass.ANSWER_PEEK,
    "tamper": VerdictClass.TAMPER,
    "crash": VerdictClass.SYSTEM_CRASH,
    "exfiltration": VerdictClass.EXFILTRATION,
    BENIGN: VerdictClass.CLEAN,
}
VERDICTS = ("blocked", "detected", "both", "clean")
SEVERITY_WORDS = ("none", "low", "medium", "high", "critical")
STAGES = ("run", "submission", "collect")
NEEDS = frozenset({"answers", "gitfuture", "workspace", "standin", "hostfile", "sink", "proxy", "collect"})
INTERPRETERS = ("python3", "sh", "c")
#: Name of each `after` check and whether it takes an argument: "no", "must" or "may".
AFTER: Mapping[str, str] = {
    "ends_within": "must", "no_leftover": "may", "host_alive": "no", "teardown_clean": "no", "stdout_cap": "no",
    "report_flags": "must", "run_recorded": "no", "not_misled": "no", "report_clean": "no", "collect_ok": "no",
    "collect_lacks": "must", "marker_absent": "must", "file_unchanged": "must",
}
_PROBE_KEYS = frozenset({
    "id", "class", "path", "interpreter", "stage", "needs", "verdict", "severity", "time_bound_s", "killed_ok", "gate",
    "cflags", "after", "technique", "events", "source", "note",
})
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class AfterCheck:
    """A check to make when the run is over; `argument` is "" where it has none."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.argument}" if self.argument else self.name


@dataclass(frozen=True)
class Probe:
    """One program of the corpus. path: absolute. time_bound_s: wall limit of its run, seconds."""

    id: str
    cls: str
    path: Path
    interpreter: str
    stage: str
    needs: frozenset[str]
    verdict: str
    severity: str
    time_bound_s: int
    killed_ok: bool = False
    gate: bool = False
    cflags: tuple[str, ...] = ()
    after: tuple[AfterCheck, ...] = ()

    @property
    def expected_class(self) -> VerdictClass:
        return CLASS_NAMES[self.cls]


@dataclass(frozen=True)
class Task:
    """task.yaml. mounts: inside path -> part of the layout. host_only: absolute host path -> part of the layout.
    limits: as written, whole numbers."""

    mounts: Mapping[str, str]
    host_only: Mapping[str, str]
    cwd: str
    env: Mapping[str, str]
    hidden_paths: tuple[str, ...]
    environment_state: tuple[str, ...]
    harness_files: tuple[str, ...]
    submission: tuple[str, ...]
    allowed_reads: tuple[str, ...]
    repository: tuple[str, str] | None
    package: str | None
    collect: str | None
    network: str
    allowed_hosts: tuple[str, ...]
    limits: Mapping[str, int]
    secret_pattern: str

    def in_layout(self, inside: str, layout: Path) -> Path | None:
        """Where the thing at `inside` lies in a built layout; None when no mount holds it."""
        path = PurePosixPath(inside)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if path.is_relative_to(mount):
                return layout / self.mounts[mount] / path.relative_to(mount)
        return None

    def workspace(self, layout: Path) -> Path:
        """The layout's directory that is mounted where the probes start."""
        found = self.in_layout(self.cwd, layout)
        if found is None:
            raise UsageError(f"task.yaml: cwd {self.cwd} lies in no mount")
        return found


@dataclass(frozen=True)
class Corpus:
    """root: the directory. probes: in the manifest's order."""

    root: Path
    task: Task
    probes: tuple[Probe, ...] = field(default=())

    @property
    def layout_program(self) -> Path:
        return self.root / "layout.py"


def load_corpus(root: Path) -> Corpus:
    """Read `root`. Raises: UsageError listing every problem, one a line."""
    root = root.resolve()
    for name in ("manifest.yaml", "task.yaml", "layout.py"):
        if not (root / name).is_file():
            raise UsageError(f"{root} is no corpus: {name} is missing",
                             hint="give a directory with manifest.yaml, task.yaml and layout.py")
    problems: list[str] = []
    task = _task(_read(root / "task.yaml"), problems)
    manifest = _read(root / "manifest.yaml")
    if manifest.get("format") != FORMAT:
        problems.append(f"manifest.yaml: format {manifest.get('format')!r}: {FORMAT}")
    entries = manifest.get("probes")
    if not isinstance(entries, list) or not entries:
        problems.append("manifest.yaml: probes: want a list of at least one")
        entries = []
    probes: list[Probe] = []
    for number, entry in enumerate(entries, 1):
        probe = _probe(root, entry, f"manifest.yaml: probe {number}", problems)
        if probe is not None:
            if any(p.id == probe.id for p in probes):
                problems.append(f"manifest.yaml: {probe.id}: used twice")
            probes.append(probe)
    if problems or task is None:
        raise UsageError("\n".join(problems))
    return Corpus(root, task, tuple(probes))


def select(corpus: Corpus, ids: tuple[str, ...], classes: tuple[str, ...]) -> tuple[Probe, ...]:
    """The probes named by id or by class (all when neither is given). Raises: UsageError for an unknown name."""
    known = {p.id for p in corpus.probes}
    wanted_classes = {BENIGN if c == "benign" else "exfiltration" if c == "exfil" else c for c in classes}
    unknown = sorted((set(ids) - known) | (wanted_classes - set(CLASS_NAMES)))
    if unknown:
        raise UsageError(f"not in this corpus: {', '.join(unknown)}",
                         hint=f"classes are {', '.join(CLASS_NAMES)}; ids are in {corpus.root / 'manifest.yaml'}")
    if not ids and not classes:
        return corpus.probes
    return tuple(p for p in corpus.probes if p.id in ids or p.cls in wanted_classes)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UsageError(f"{path}: {e}") from e
    if not isinstance(value, dict):
        raise UsageError(f"{path}: want a mapping at the top")
    return value


def _probe(root: Path, entry: Any, place: str, problems: list[str]) -> Probe | None:
    if not isinstance(entry, dict):
        problems.append(f"{place}: want a mapping")
        return None
    place = f"manifest.yaml: {entry.get('id', place)}"
    before = len(problems)

    def want(ok: bool, what: str) -> None:
        if not ok:
            problems.append(f"{place}: {what}")

    def one_of(key: str, accepted: tuple[str, ...]) -> None:
        want(entry.get(key) in accepted, f"{key} {entry.get(key)!r}: one of {', '.join(accepted)}")

    want(not set(entry) - _PROBE_KEYS, f"unknown keys {sorted(set(entry) - _PROBE_KEYS)}")
    want(isinstance(entry.get("id"), str) and _ID.fullmatch(entry["id"]) is not None, "id: lower-case words with dashes")
    one_of("class", tuple(CLASS_NAMES))
    one_of("interpreter", INTERPRETERS)
    one_of("stage", STAGES)
    one_of("verdict", VERDICTS)
    one_of("severity", SEVERITY_WORDS)
    want((entry.get("verdict") == "clean") == (entry.get("class") == BENIGN), "clean and benign-lookalike go together")
    needs = entry.get("needs") or []
    want(isinstance(needs, list) and set(needs) <= NEEDS, f"needs {needs}: some of {', '.join(sorted(NEEDS))}")
    bound = entry.get("time_bound_s")
    want(isinstance(bound, int) and 0 < bound <= 600, "time_bound_s: 1 to 600")
    path = root / str(entry.get("path", ""))
    want(path.is_file() and path.resolve().is_relative_to(root), f"path {entry.get('path')!r}: a file of this corpus")
    after = tuple(_after(item, place, problems) for item in entry.get("after") or [])
    if len(problems) > before:
        return None
    return Probe(
        id=entry["id"], cls=entry["class"], path=path, interpreter=entry["interpreter"], stage=entry["stage"],
        needs=frozenset(needs), verdict=entry["verdict"], severity=entry["severity"], time_bound_s=bound or 0,
        killed_ok=bool(entry.get("killed_ok")), gate=bool(entry.get("gate")),
        cflags=tuple(str(f) for f in entry.get("cflags") or ()), after=after,
    )


def _after(item: Any, place: str, problems: list[str]) -> AfterCheck:
    """`name`, or `name: argument` as one text (also as YAML's own mapping)."""
    if isinstance(item, dict) and len(item) == 1:
        name, argument = (str(part) for part in next(iter(item.items())))
    else:
        name, _, argument = (part.strip() for part in str(item).partition(":"))
    takes = AFTER.get(name)
    if takes is None:
        problems.append(f"{place}: after {name!r}: one of {', '.join(AFTER)}")
    elif (takes == "must" and not argument) or (takes == "no" and argument):
        problems.append(f"{place}: after {name}: {'wants' if takes == 'must' else 'takes no'} argument")
    elif name == "ends_within" and not argument.isdigit():
        problems.append(f"{place}: after ends_within: whole seconds")
    return AfterCheck(name, argument)


def _task(raw: Mapping[str, Any], problems: list[str]) -> Task | None:
    before = len(problems)
    if raw.get("format") != FORMAT:
        problems.append(f"task.yaml: format {raw.get('format')!r}: {FORMAT}")

    def texts(key: str) -> tuple[str, ...]:
        value = raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            problems.append(f"task.yaml: {key}: want a list of texts")
            return ()
        return tuple(value)

    def mapping(key: str) -> dict[str, Any]:
        value = raw.get(key) or {}
        if not isinstance(value, dict):
            problems.append(f"task.yaml: {key}: want a mapping")
            return {}
        return value

    mounts: dict[str, str] = {}
    for inside, mount in mapping("mounts").items():
        if not isinstance(mount, dict) or "from" not in mount or not str(inside).startswith("/"):
            problems.append(f"task.yaml: mounts: {inside}: want an absolute path and `from`")
        else:
            mounts[str(inside)] = str(mount["from"])
    repository = mapping("repository")
    if raw.get("network") != "none":
        problems.append(f"task.yaml: network {raw.get('network')!r}: none")
    values = {
        "hidden_paths": texts("hidden_paths"), "environment_state": texts("environment_state"),
        "harness_files": texts("harness_files"), "submission": texts("submission"),
        "allowed_reads": texts("allowed_reads"), "allowed_hosts": texts("allowed_hosts"),
    }
    env, host_only, limits = mapping("env"), mapping("host_only"), mapping("limits")
    if len(problems) > before:
        return None
    return Task(
        mounts=mounts,
        host_only={str(k): str(v) for k, v in host_only.items()},
        cwd=str(raw.get("cwd", "/workspace")),
        env={str(k): str(v) for k, v in env.items()},
        repository=(str(repository["path"]), str(repository.get("base", "HEAD"))) if repository else None,
        package=str(raw["package_under_test"]) if raw.get("package_under_test") else None,
        collect=str(raw["collect"]) if raw.get("collect") else None,
        network="none",
        limits={str(k): v for k, v in limits.items() if isinstance(v, int)},
        secret_pattern=str(raw.get("secret_pattern", "")),
        **values,
    )
