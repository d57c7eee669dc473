"""What a detector may know about a box besides its events: plain values, recorded with the run, so that a replay agrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsec_guard.model import Layer, LayerState, Level


@dataclass(frozen=True, kw_only=True)
class BoxFacts:
    """Facts of one box; every path is as seen inside, absolute and normalised.

    run_id, box: names of the run and of its box (the v2 directory's inode number as text). level: what was watched.
    argv: the first command, escaped. started: RFC 3339. home, workspace, temporary: writable places.
    agent_uid: inside. init_tgid: host number of the box's pid 1 (0 = not known). hidden: paths the agent must not read;
    hidden_style: `decoy` or `absent`. harness: globs of files that belong to the grading; environment_state: readable,
    never written. deliverables: globs of what is collected. repository: the task's checkout or "". allowed_reads: globs.
    package: the package under test or "". limits: name -> value in the policy's units. network: none | allowlist | open.
    tool_dirs: read-only system directories (interpreters, compilers, libraries). path_dirs: the PATH of the first
    command. layers: what was enforced.
    """

    run_id: str
    box: str = ""
    level: Level = Level.FULL
    argv: tuple[str, ...] = ()
    started: str = ""
    workspace: str = ""
    home: str = ""
    temporary: tuple[str, ...] = ("/tmp", "/var/tmp", "/run", "/dev/shm")
    user: str = "agent"
    agent_uid: int = 1000
    init_tgid: int = 0
    hostname: str = ""
    hidden: tuple[str, ...] = ()
    hidden_style: str = "decoy"
    harness: tuple[str, ...] = ()
    environment_state: tuple[str, ...] = ()
    deliverables: tuple[str, ...] = ()
    repository: str = ""
    allowed_reads: tuple[str, ...] = ()
    package: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    network: str = "none"
    tool_dirs: tuple[str, ...] = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
    path_dirs: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()

    @property
    def hidden_parents(self) -> tuple[str, ...]:
        """Directories that hold hidden paths and nothing of the agent's own: naming one is naming what is below."""
        mine = {"/", self.home, self.workspace, *self.temporary}
        out: dict[str, None] = {}
        for path in self.hidden:
            parent = path.rpartition("/")[0]
            while parent and parent not in mine:
                out[parent] = None
                parent = parent.rpartition("/")[0]
        return tuple(out)

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values; the inverse is `facts_from_record`."""
        record: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "layers":
                record[f.name] = [
                    {"name": y.name, "state": y.state.value, "detail": y.detail, "optional": y.optional} for y in value]
            elif isinstance(value, tuple):
                record[f.name] = list(value)
            elif isinstance(value, Level):
                record[f.name] = value.value
            else:
                record[f.name] = dict(value) if isinstance(value, Mapping) else value
        return record


def facts_from_record(record: Mapping[str, Any]) -> BoxFacts:
    """Rebuild facts from `BoxFacts.to_record`. Raises KeyError/TypeError/ValueError on anything else."""
    values: dict[str, Any] = dict(record)
    if "level" in values:
        values["level"] = Level(values["level"])
    if "layers" in values:
        values["layers"] = [
            Layer(y["name"], LayerState(y["state"]), y["detail"], y.get("optional", False)) for y in values["layers"]]
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return BoxFacts(**values)
