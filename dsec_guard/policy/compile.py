"""`Policy` + what the host can do -> `Plan`: the bytes and numbers a box is made with, once per policy.

A layer that the policy wants and the host lacks refuses the box; `if_unsupported: degrade` lets it run weaker, and the
plan lists what is weakened or missing. What no box can be built without is refused either way.
"""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsec_guard.errors import HostError, PolicyError
from dsec_guard.host.landlock import FULL, READ, READ_EXECUTE, WRITE_FILE, FsRight, LandlockPlan, build_plan
from dsec_guard.host.probe import PROBES, HostFeatures
from dsec_guard.host.seccomp import RET_ERRNO, build_exec_filter, build_notify_filter, simulate
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import Layer, LayerState, Level, Phase
from dsec_guard.policy.profile import decide
from dsec_guard.policy.schema import HiddenStyle, IfUnsupported, NetworkWord, Policy, RootKind, User
from dsec_guard.policy.tighten import phase_network

AGENT_UID = 1000

#: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: what package managers and service
#: accounts inside need. They count in the box's user namespace only. Source: capabilities(7) for the numbers.
ROOT_CAPS = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10))

_SIGPENDING = 4096
_MSGQUEUE_BYTES = 819_200
_MEMLOCK_BYTES = 8 << 20


class RlimitPlan(NamedTuple):
    """The fields of `sandbox.spec.Rlimit`, in its order; RLIMIT_* number, units of setrlimit(2)."""

    resource: int
    soft: int
    hard: int


@dataclass(frozen=True)
class Plan:
    """exec_filters, landlock: per phase, applied to each exec. notify_filter: b"" at level full. notify_errnos: how the
    listener answers a notified call, by number. agent_uid, agent_gid, caps: of the agent's command, inside the box.
    home: HOME inside. proofs: calls (number, errno) that the box's first process tries, to see the filter refuse them.
    notes: what of a foreign seccomp profile was left out. digest: sha256 over all of it.
    """

    policy_digest: str
    level: Level
    exec_filters: Mapping[Phase, bytes]
    notify_filter: bytes
    notify_errnos: Mapping[int, int]
    landlock: Mapping[Phase, LandlockPlan | None]
    rlimits: tuple[RlimitPlan, ...]
    agent_uid: int
    agent_gid: int
    caps: int
    home: str
    layers: tuple[Layer, ...]
    proofs: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    digest: str = field(default="")


@dataclass(frozen=True)
class _Wanted:
    """One layer: the features it stands on. essential: no box without it. present: what is said where it works."""

    name: str
    features: tuple[str, ...]
    essential: bool = False
    optional: bool = False
    present: str = ""


def needed_features(policy: Policy) -> tuple[str, ...]:
    """The host features that compiling this policy asks for: what to probe before `compile_policy`."""
    names: dict[str, None] = {}
    for layer in _wanted(policy):
        names.update(dict.fromkeys(layer.features))
    return tuple(names)


def compile_policy(policy: Policy, features: HostFeatures, *, workspace: str = "", readable: Sequence[str] = (),
                   writable: Sequence[str] = ()) -> Plan:
    """Compile one policy for this host.

    workspace: host path of the workspace, needed where the policy puts it at its own path (`target: same`).
    readable, writable: further paths inside, such as those of `--bind-ro`.
    Raises: PolicyError for a network word that cannot be compiled yet; HostError naming the first missing feature and
    its remedy where the policy refuses to run without it.
    """
    _refuse_network(policy)
    layers = tuple(_layer(layer, policy, features) for layer in _wanted(policy))
    decided = decide(policy.syscalls)
    cold = policy.monitor.level is Level.COLD and features.works("seccomp_notify")
    program = build_exec_filter(decided.silent if cold else decided.spec) if features.works("seccomp") else b""
    notified = decided.notify if cold and features.works("seccomp") else ()
    plan = _landlock(policy, features, workspace, readable, writable)
    root = policy.user is User.ROOT
    result = Plan(
        policy_digest=policy.digest,
        level=policy.monitor.level,
        exec_filters=dict.fromkeys(Phase, program),
        notify_filter=build_notify_filter(notified),
        notify_errnos={X86_64[r.name]: r.errno for r in reversed(notified)},
        landlock=dict.fromkeys(Phase, plan),
        rlimits=_rlimits(policy, features),
        agent_uid=0 if root else AGENT_UID,
        agent_gid=0 if root else AGENT_UID,
        caps=ROOT_CAPS if root else 0,
        home=policy.home,
        layers=layers,
        proofs=tuple(_proofs(program)),
        notes=decided.notes,
    )
    return _with_digest(result)


#: Calls whose arguments, all zero, could do no harm even if they came through.
_PROVEN = ("bpf", "init_module", "kexec_load", "userfaultfd", "io_uring_setup", "perf_event_open", "swapon")


def _proofs(program: bytes) -> Iterator[tuple[int, int]]:
    """What the filter itself answers; a notified call is answered by the listener instead."""
    for name in _PROVEN if program else ():
        action = simulate(program, X86_64[name])
        if action & 0xFFFF0000 == RET_ERRNO:
            yield X86_64[name], action & 0xFFFF


def _refuse_network(policy: Policy) -> None:
    problems = []
    for phase in Phase:
        word = phase_network(policy, phase)
        if word is not NetworkWord.NONE:
            setting = policy.phases.get(phase)
            own = setting is not None and setting.network is not None
            key = f"phases.{phase.value}.network" if own else "network"
            problem = f"{policy.place(key)}: {key}: {word.value} is not yet available: none"
            if problem not in problems:
                problems.append(problem)
    if problems:
        raise PolicyError(problems, hint="this version runs boxes without a network; fetch what the task needs beforehand")


# ------------------------------------------------------------------------------------------------------------ layers


def _wanted(policy: Policy) -> tuple[_Wanted, ...]:
    full = policy.monitor.level is Level.FULL
    layers = [
        _Wanted("architecture", ("x86_64",), essential=True),
        _Wanted("privilege", ("root",), essential=True),
        _Wanted("namespaces", ("namespaces", "user_namespaces", "clone_into_cgroup"), essential=True,
                present="user, pid, mount, net, ipc, uts, cgroup"),
        _Wanted("root filesystem", ("overlay",), essential=True, present="read-only scaffold, copy-on-write workspace"),
        _Wanted("file owners", ("idmapped_mounts",), present="id-mapped"),
        _Wanted("cgroup", ("cgroup_v2",), essential=True, present="identity, kill, freeze"),
        _Wanted("cgroup limits", ("cgroup_limits",), present="memory, pids, cpu"),
        _Wanted("rlimits", ()),
        _Wanted("capabilities", (), present="none" if policy.user is User.AGENT else "container-like, in the box's user namespace"),
        _Wanted("seccomp", ("seccomp",), present=f"profile {policy.syscalls.profile}"),
    ]
    if policy.landlock.enabled:
        layers.append(_Wanted("landlock", ("landlock",)))
    layers.append(_Wanted("cgroup BPF", ("bpf_cgroup",), present="connect, sendmsg, bind, sock_create, device, sysctl"))
    if policy.answers.hidden and policy.answers.style is HiddenStyle.DECOY:
        layers.append(_Wanted("decoys", ("fanotify",), present="fanotify permission events"))
    sensors = ("bpf_tracing",) if full else ("bpf_tracing", "seccomp_notify")
    layers.append(_Wanted("monitor", sensors, present=policy.monitor.level.value))
    layers.append(_Wanted("BPF-LSM", ("bpf_lsm",), optional=True))
    return tuple(layers)


def _layer(wanted: _Wanted, policy: Policy, features: HostFeatures) -> Layer:
    lacking = [name for name in wanted.features if not features.works(name)]
    if not lacking:
        weaker = _weaker(wanted.name, policy, features)
        return Layer(wanted.name, LayerState.WEAKENED if weaker else LayerState.ENFORCED, weaker or wanted.present)
    missing = lacking[0]
    detail = f"{missing}: {features.detail(missing)}"
    if wanted.essential or not (wanted.optional or policy.if_unsupported is IfUnsupported.DEGRADE):
        raise HostError(f"this host lacks {missing}, which the layer {wanted.name!r} needs: {PROBES[missing].tried}: "
                        f"{features.detail(missing)}", feature=missing, hint=_hint(missing, degradable=not wanted.essential))
    if wanted.name == "file owners":
        return Layer(wanted.name, LayerState.WEAKENED, f"{detail}; owners are changed by copying")
    return Layer(wanted.name, LayerState.MISSING, detail, optional=wanted.optional)


def _hint(feature: str, *, degradable: bool) -> str:
    remedy = PROBES[feature].remedy
    parts = [remedy.enable]
    if remedy.container:
        parts.append(f"in a container: {remedy.container}")
    if degradable:
        parts.append("or run weaker with `if_unsupported: degrade` in the policy")
    parts.append("`dsec-guard doctor` shows all layers")
    return "; ".join(parts)


def _weaker(name: str, policy: Policy, features: HostFeatures) -> str:
    """What an enforced layer cannot do on this host, or ""."""
    if name != "landlock":
        return ""
    abi = features.landlock_abi
    lost = [text for since, text in ((2, "renames across directories"), (3, "truncation"), (5, "device ioctls"),
                                     (6, "abstract sockets and signals")) if abi < since]
    if abi < 4 and (policy.landlock.connect_tcp is not None or policy.landlock.bind_tcp is not None):
        lost.append("TCP ports")
    return f"ABI {abi} does not bind {', '.join(lost)}" if lost else ""


# ---------------------------------------------------------------------------------------------------------- landlock


def _landlock(policy: Policy, features: HostFeatures, workspace: str, readable: Sequence[str],
              writable: Sequence[str]) -> LandlockPlan | None:
    if not policy.landlock.enabled or not features.works("landlock"):
        return None
    grants = [*grants_of(policy, workspace), *((p, READ_EXECUTE) for p in readable), *((p, FULL) for p in writable)]
    return build_plan(features.landlock_abi, grants, connect_tcp=policy.landlock.connect_tcp,
                      bind_tcp=policy.landlock.bind_tcp)


def grants_of(policy: Policy, workspace: str) -> tuple[tuple[str, FsRight], ...]:
    """Paths inside and the rights below them. Directories may be listed everywhere: the root is curated, and a search by
    name is honest work. A path that does not exist in a box is skipped there."""
    files, answers = policy.filesystem, policy.answers
    target = workspace if policy.workspace.target == "same" else policy.workspace.target
    roots = ("/",) if files.root.kind is RootKind.DIRECTORY else files.read
    grants: list[tuple[str, FsRight]] = [("/", FsRight.READ_DIR)]
    grants += [(path, READ_EXECUTE) for path in (*roots, "/etc", *(b.target for b in files.binds))]
    # What must not be read is not there, or is a decoy: opening one is evidence, so it has to be possible.
    grants += [(path, READ) for path in ("/sys", *(h.path for h in answers.hidden), *(s.path for s in answers.environment_state))]
    # /proc/self/{oom_score_adj,comm,...}; what concerns the host there is masked or on a read-only mount.
    grants += [("/proc", WRITE_FILE), ("/dev", WRITE_FILE | FsRight.IOCTL_DEV), ("/dev/shm", FULL)]
    grants += [(path, FULL) for path in (*files.write, *files.temporary, policy.home, *((target,) if target else ()))]
    return tuple(grants)


# ----------------------------------------------------------------------------------------------------------- rlimits


def _rlimits(policy: Policy, features: HostFeatures) -> tuple[RlimitPlan, ...]:
    """Soft and hard alike, cut to what this process may still set: a hard limit cannot be raised again."""
    wanted = (
        (resource.RLIMIT_NOFILE, policy.limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, policy.limits.file_size),
        (resource.RLIMIT_MSGQUEUE, _MSGQUEUE_BYTES),
        (resource.RLIMIT_SIGPENDING, _SIGPENDING),
        (resource.RLIMIT_MEMLOCK, min(_MEMLOCK_BYTES, policy.limits.memory)),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
    )
    return tuple(RlimitPlan(number, value, value) for number, want in wanted
                 for value in (min(want, features.rlimit_hard.get(number, want)),))


def _with_digest(plan: Plan) -> Plan:
    parts = [plan.policy_digest, plan.level.value, repr(plan.landlock), repr(plan.rlimits), repr(plan.notify_errnos),
             repr((plan.agent_uid, plan.agent_gid, plan.caps, plan.home))]
    state = hashlib.sha256("\n".join(parts).encode())
    for phase in Phase:
        state.update(plan.exec_filters[phase])
    state.update(plan.notify_filter)
    return Plan(**{**vars(plan), "digest": state.hexdigest()})
