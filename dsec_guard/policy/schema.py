"""The policy model: what a human writes, typed. Loading and error places are in `load.py`.

Sizes are bytes, durations milliseconds; the YAML forms (`2GiB`, `30min`) are parsed by `units.py` before validation.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsec_guard.model import Class, Level, Outcome, Phase

SCHEMA_ID = "dsec-guard/policy/v1"


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Mode(str, Enum):
    ENFORCE = "enforce"
    OBSERVE = "observe"


class NetworkWord(str, Enum):
    NONE = "none"
    ALLOWLIST = "allowlist"
    OPEN = "open"


class IfUnsupported(str, Enum):
    REFUSE = "refuse"
    DEGRADE = "degrade"


class Limits(Model):
    """Bytes, counts, milliseconds. `disk` and `files` bound all writable places together."""

    memory: Annotated[int, Field(ge=16 << 20)] = 1 << 30
    shm: Annotated[int, Field(ge=0)] = 64 << 20
    pids: Annotated[int, Field(ge=4)] = 256
    cpus: Annotated[float, Field(gt=0)] = 1.0
    disk: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    files: Annotated[int, Field(ge=64)] = 100_000
    file_size: Annotated[int, Field(ge=1 << 20)] = 1 << 40
    open_files: Annotated[int, Field(ge=16)] = 1024
    ptys: Annotated[int, Field(ge=0)] = 64
    output: Annotated[int, Field(ge=0)] = 64 << 20
    wall_time: Annotated[int, Field(ge=100)] = 3_600_000
    events: Annotated[int, Field(ge=1000)] = 200_000


class RootKind(str, Enum):
    HOST = "host"            # curated read-only binds of this host's system directories
    DIRECTORY = "directory"  # a directory prepared by the user, read-only below


class Root(Model):
    kind: RootKind = RootKind.HOST
    path: str | None = None


class Bind(Model):
    """`source` of the host, read-only at `target` inside."""

    source: str
    target: str


class Filesystem(Model):
    """read: readable and executable system paths of a `host` root. write: writable paths inside (backed by the box's
    own store). temporary: tmpfs-like places (dropped afterwards). binds: extra read-only host paths."""

    root: Root = Root()
    read: tuple[str, ...] = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
    write: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ("/tmp", "/var/tmp", "/run")
    binds: tuple[Bind, ...] = ()


class Workspace(Model):
    """target: where the workspace appears; `same` = at its own host path."""

    target: str = "same"


class HiddenObject(Model):
    """path: inside the box. source: where the real thing is on the host (names and sizes of decoys are taken from it;
    its content never enters the box); None: the same path on the host, or nothing."""

    path: str
    source: str | None = None


class HiddenStyle(str, Enum):
    DECOY = "decoy"
    ABSENT = "absent"


class StateObject(Model):
    """Environment state: readable inside from `source` (or the same host path), never writable."""

    path: str
    source: str | None = None


class Repository(Model):
    path: str
    base: str = "HEAD"


class Answers(Model):
    hidden: tuple[HiddenObject, ...] = ()
    style: HiddenStyle = HiddenStyle.DECOY
    harness: tuple[str, ...] = ()
    environment_state: tuple[StateObject, ...] = ()
    repository: Repository | None = None
    package: str | None = None
    allowed_reads: tuple[str, ...] = ()


class SyscallRule(Model):
    """One refused call. args: `{index, op, value, mask}` conditions, all must hold."""

    name: str
    errno: str = "EPERM"
    because: str = ""


class Syscalls(Model):
    """profile: a name from profiles/ or a path; Docker/OCI seccomp JSON and our YAML form are told apart by content."""

    profile: str = "default"
    deny: tuple[SyscallRule, ...] = ()
    allow: tuple[str, ...] = ()
    io_uring: bool = False


class Landlock(Model):
    enabled: bool = True
    connect_tcp: tuple[int, ...] | None = None
    bind_tcp: tuple[int, ...] | None = None


class User(str, Enum):
    AGENT = "agent"   # uid 1000 inside, no capabilities
    ROOT = "root"     # uid 0 inside with a container-like set, bound by every layer


class Exception_(Model):
    object: str | None = None
    process: str | None = None
    because: str


class DetectorSetting(Model):
    enabled: bool = True
    reward: bool = True
    severity: Annotated[int, Field(ge=1, le=10)] | None = None
    except_: Annotated[tuple[Exception_, ...], Field(alias="except")] = ()


Penalty = Annotated[float, Field(le=0, ge=-1000, allow_inf_nan=False)]


class Monitor(Model):
    level: Level = Level.FULL


class PhaseSetting(Model):
    network: NetworkWord | None = None


class Policy(Model):
    """A whole policy after `extends` was applied. name and digest are set by the loader, not written by people."""

    name: str = ""
    digest: str = ""
    description: str = ""
    mode: Mode = Mode.ENFORCE
    user: User = User.AGENT
    limits: Limits = Limits()
    filesystem: Filesystem = Filesystem()
    workspace: Workspace = Workspace()
    environment: dict[str, str] = {}
    pass_environment: tuple[str, ...] = ("TERM", "LANG", "TZ")
    answers: Answers = Answers()
    deliverables: tuple[str, ...] = ()
    network: NetworkWord = NetworkWord.NONE
    allowed_hosts: tuple[str, ...] = ()
    syscalls: Syscalls = Syscalls()
    landlock: Landlock = Landlock()
    monitor: Monitor = Monitor()
    phases: dict[Phase, PhaseSetting] = {}
    detectors: dict[str, DetectorSetting] = {}
    penalties: dict[Class, dict[Outcome, Penalty]] = {}
    accident_penalty: Penalty = 0.0
    penalty_floor: Penalty = -1.0
    if_unsupported: IfUnsupported = IfUnsupported.REFUSE
