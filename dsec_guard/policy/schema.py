"""The policy model: what a human writes, typed. Loading and error places are in `load.py`.

Sizes are bytes, durations milliseconds; the YAML forms (`2GiB`, `30min`) are parsed by `units.py` before validation.
Markers in `Annotated` (`Unit`, `Word`) tell the loader and the JSON Schema how a value is written in YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from dsec_guard.model import Class, Level, Outcome, Phase

SCHEMA_ID = "dsec-guard/policy/v1"


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Unit(Enum):
    """How a whole number is written in YAML: with a unit, always, so that nobody has to guess it."""

    SIZE = "size"          # 2GiB, 512MiB: bytes in the model
    DURATION = "duration"  # 30min, 1500ms: milliseconds in the model


class Word(Enum):
    """What a text has to be; checked by the loader, which knows the place."""

    INSIDE = "inside"        # absolute path as seen in the box, normalised
    PATTERN = "pattern"      # the same with `*`, `?`, `[...]` and `**`
    HOST = "host"            # absolute path of the host
    PLACE = "place"          # `same`, or an absolute path inside
    SYSCALL = "syscall"      # an x86-64 system call name
    ERRNO = "errno"          # such as EPERM
    VARIABLE = "variable"    # name of an environment variable; `*` at its end stands for any rest
    PROFILE = "profile"      # a name from profiles/, or a path (relative to the policy file)
    TEXT = "text"            # any text without NUL


Size = Annotated[int, Unit.SIZE, Field(le=(1 << 53) - 1)]
Duration = Annotated[int, Unit.DURATION, Field(le=(1 << 53) - 1)]
InsidePath = Annotated[str, Word.INSIDE]
Pattern = Annotated[str, Word.PATTERN]
HostPath = Annotated[str, Word.HOST]
Port = Annotated[int, Field(ge=0, le=65535)]


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

    memory: Annotated[Size, Field(ge=16 << 20)] = 1 << 30
    shm: Annotated[Size, Field(ge=0)] = 64 << 20
    pids: Annotated[int, Field(ge=4, le=1 << 31)] = 256
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 1.0
    disk: Annotated[Size, Field(ge=1 << 20)] = 512 << 20
    files: Annotated[int, Field(ge=64, le=1 << 31)] = 100_000
    file_size: Annotated[Size, Field(ge=1 << 20)] = 1 << 40
    open_files: Annotated[int, Field(ge=16, le=1 << 31)] = 1024
    ptys: Annotated[int, Field(ge=0, le=1 << 31)] = 64
    output: Annotated[Size, Field(ge=0)] = 64 << 20
    wall_time: Annotated[Duration, Field(ge=100)] = 3_600_000
    events: Annotated[int, Field(ge=1000, le=1 << 31)] = 200_000


class RootKind(str, Enum):
    HOST = "host"            # curated read-only binds of this host's system directories
    DIRECTORY = "directory"  # a directory prepared by the user, read-only below


class Root(Model):
    kind: RootKind = RootKind.HOST
    path: HostPath | None = None


class Bind(Model):
    """`source` of the host, read-only at `target` inside."""

    source: HostPath
    target: InsidePath


class Filesystem(Model):
    """read: readable and executable system paths of a `host` root. write: writable paths inside (backed by the box's
    own store). temporary: tmpfs-like places (dropped afterwards). binds: extra read-only host paths."""

    root: Root = Root()
    read: tuple[InsidePath, ...] = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
    write: tuple[InsidePath, ...] = ()
    temporary: tuple[InsidePath, ...] = ("/tmp", "/var/tmp", "/run")
    binds: tuple[Bind, ...] = ()


class Workspace(Model):
    """target: where the workspace appears; `same` = at its own host path."""

    target: Annotated[str, Word.PLACE] = "same"


class HiddenObject(Model):
    """path: inside the box. source: where the real thing is on the host (names and sizes of decoys are taken from it;
    its content never enters the box); None: the same path on the host, or nothing."""

    path: InsidePath
    source: HostPath | None = None


class HiddenStyle(str, Enum):
    DECOY = "decoy"
    ABSENT = "absent"


class StateObject(Model):
    """Environment state: readable inside from `source` (or the same host path), never writable."""

    path: InsidePath
    source: HostPath | None = None


class Repository(Model):
    path: InsidePath
    base: str = "HEAD"


class Answers(Model):
    hidden: tuple[HiddenObject, ...] = ()
    style: HiddenStyle = HiddenStyle.DECOY
    harness: tuple[Pattern, ...] = ()
    environment_state: tuple[StateObject, ...] = ()
    repository: Repository | None = None
    package: str | None = None
    allowed_reads: tuple[Pattern, ...] = ()


class SyscallRule(Model):
    """One call that is always refused with `errno`."""

    name: Annotated[str, Word.SYSCALL]
    errno: Annotated[str, Word.ERRNO] = "EPERM"
    because: str = ""


class Syscalls(Model):
    """profile: a name from profiles/ or a path; Docker/OCI seccomp JSON and our YAML form are told apart by content."""

    profile: Annotated[str, Word.PROFILE] = "default"
    deny: tuple[SyscallRule, ...] = ()
    allow: tuple[Annotated[str, Word.SYSCALL], ...] = ()
    io_uring: bool = False


class Landlock(Model):
    enabled: bool = True
    connect_tcp: tuple[Port, ...] | None = None
    bind_tcp: tuple[Port, ...] | None = None


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


class Choice(str, Enum):
    """What a child policy may switch on although it loosens: nothing else of that kind exists."""

    ROOT = "root"        # user: root
    DEGRADE = "degrade"  # if_unsupported: degrade


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
    environment: dict[Annotated[str, Word.VARIABLE], Annotated[str, Word.TEXT]] = {}
    pass_environment: tuple[Annotated[str, Word.VARIABLE], ...] = ("TERM", "TZ")
    answers: Answers = Answers()
    deliverables: tuple[Pattern, ...] = ()
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
    children_may: tuple[Choice, ...] = ()

    # Dotted key -> `file:line:col` of the file that decided it; left out of equality of content (compare digests).
    _places: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def home(self) -> str:
        """HOME inside: the environment's, else the usual one of the user."""
        return self.environment.get("HOME") or ("/root" if self.user is User.ROOT else "/home/agent")

    def place(self, key: str) -> str:
        """`file:line:col` of `key` or of the nearest part of the policy around it; `default` where nothing was written."""
        while key:
            if key in self._places:
                return self._places[key]
            key = key.rpartition(".")[0]
        return "default"

    def with_places(self, places: Mapping[str, str]) -> Policy:
        """A copy that knows where its keys were written."""
        copy = self.model_copy()
        copy._places = dict(places)
        return copy


#: Lists to which a child adds; every other list of a child replaces the parent's.
GROWING = frozenset({"answers.hidden", "answers.harness", "answers.environment_state", "syscalls.deny"})

#: Set by the loader, never written in a file.
COMPUTED = frozenset({"name", "digest"})


def yaml_fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys people write for a model, in order, with their field."""
    for name, info in model.model_fields.items():
        if not (model is Policy and name in COMPUTED):
            yield info.alias or name, info


def short_form(model: Any) -> bool:
    """Whether a plain text stands for `{path: text}`."""
    return model in (HiddenObject, StateObject)
