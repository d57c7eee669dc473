"""From a policy and a host to the bytes and numbers of a box."""

from __future__ import annotations

import resource

import pytest

from dsec_guard.errors import HostError, PolicyError
from dsec_guard.host.landlock import FULL, FsRight, Scope, build_plan, fs_rights
from dsec_guard.host.probe import PROBES, Feature, HostFeatures
from dsec_guard.host.seccomp import RET_ALLOW, RET_ERRNO, RET_USER_NOTIF, simulate
from dsec_guard.host.syscall_table import X86_64
from dsec_guard.model import LayerState, Level, Phase
from dsec_guard.policy.compile import ROOT_CAPS, compile_policy, needed_features
from dsec_guard.policy.load import load_policy, with_level
from dsec_guard.policy.schema import Policy


def host(*missing: str, abi: int = 7, rlimit_hard: dict[int, int] | None = None) -> HostFeatures:
    """A host on which everything works but what is named, and the optional."""
    found = {name: Feature(name, name not in missing and not probe.optional, probe.tried, "not here" if name in missing else "",
                           abi if name == "landlock" else 0) for name, probe in PROBES.items()}
    return HostFeatures(found, rlimit_hard or {})


def policy(tmp_path, text: str = "") -> Policy:
    path = tmp_path / "p.yaml"
    path.write_text("schema: dsec-guard/policy/v1\n" + text)
    return load_policy(str(path))


def state(plan, name: str) -> LayerState:
    return next(layer.state for layer in plan.layers if layer.name == name)


def test_a_plan_is_the_same_for_the_same_policy_and_host(tmp_path):
    one, two = compile_policy(policy(tmp_path), host()), compile_policy(policy(tmp_path), host())
    assert one == two
    assert len(one.digest) == 64
    assert one.digest != compile_policy(policy(tmp_path, "limits: {open_files: 99}\n"), host()).digest
    assert one.digest != compile_policy(policy(tmp_path), host(abi=3)).digest


def test_all_phases_have_a_filter_and_landlock(tmp_path):
    plan = compile_policy(policy(tmp_path), host())
    for phase in Phase:
        assert simulate(plan.exec_filters[phase], X86_64["mount"]) & RET_ERRNO
        assert plan.landlock[phase] is not None
    assert plan.notify_filter == b""
    assert plan.notify_errnos == {}


def test_level_cold_notifies_instead_of_refusing_silently(tmp_path):
    plan = compile_policy(with_level(policy(tmp_path), Level.COLD), host())
    number = X86_64["mount"]
    assert simulate(plan.exec_filters[Phase.AGENT], number) == RET_ALLOW
    assert simulate(plan.notify_filter, number) == RET_USER_NOTIF
    assert plan.notify_errnos[number] == 1
    assert plan.notify_errnos[X86_64["socket"]] == 97
    for notified in plan.notify_errnos:
        assert plan.notify_errnos[notified] > 0


def test_level_cold_without_notifications_still_refuses(tmp_path):
    weak = with_level(policy(tmp_path, "if_unsupported: degrade\n"), Level.COLD)
    plan = compile_policy(weak, host("seccomp_notify"))
    assert plan.notify_filter == b""
    assert simulate(plan.exec_filters[Phase.AGENT], X86_64["mount"]) == RET_ERRNO | 1
    assert state(plan, "monitor") is LayerState.MISSING


@pytest.mark.parametrize("feature", ["landlock", "bpf_tracing", "bpf_cgroup", "cgroup_limits", "seccomp"])
def test_a_missing_layer_refuses_or_is_listed(tmp_path, feature):
    with pytest.raises(HostError, match=feature) as caught:
        compile_policy(policy(tmp_path), host(feature))
    assert caught.value.feature == feature
    assert PROBES[feature].remedy.enable in caught.value.hint
    assert "if_unsupported: degrade" in caught.value.hint
    plan = compile_policy(policy(tmp_path, "if_unsupported: degrade\n"), host(feature))
    assert [layer.name for layer in plan.layers if layer.state is LayerState.MISSING and feature in layer.detail]


@pytest.mark.parametrize("feature", ["root", "x86_64", "namespaces", "user_namespaces", "overlay", "cgroup_v2"])
def test_what_no_box_can_do_without_refuses_even_when_degrading(tmp_path, feature):
    with pytest.raises(HostError, match=feature) as caught:
        compile_policy(policy(tmp_path, "if_unsupported: degrade\n"), host(feature))
    assert "degrade" not in caught.value.hint


def test_decoys_need_fanotify_only_where_something_is_hidden(tmp_path):
    assert compile_policy(policy(tmp_path), host("fanotify"))
    with pytest.raises(HostError, match="fanotify"):
        compile_policy(policy(tmp_path, "answers: {hidden: [/srv/a]}\n"), host("fanotify"))


def test_optional_layers_are_listed_and_never_refuse(tmp_path):
    assert state(compile_policy(policy(tmp_path), host()), "BPF-LSM") is LayerState.MISSING


def test_needed_features_are_what_compiling_asks_for(tmp_path):
    chosen = policy(tmp_path, "answers: {hidden: [/srv/a]}\n")
    for level in Level:
        levelled = with_level(chosen, level)
        full = host()
        names = needed_features(levelled)
        assert compile_policy(levelled, HostFeatures({n: full.features[n] for n in {*names, "landlock", "seccomp_notify"}}))
        assert set(names) <= set(PROBES)


def test_no_landlock_when_switched_off(tmp_path):
    plan = compile_policy(policy(tmp_path, "landlock: {enabled: false}\n"), host("landlock"))
    assert plan.landlock[Phase.AGENT] is None
    assert "landlock" not in [layer.name for layer in plan.layers]


def test_an_older_landlock_is_weaker_and_said_so(tmp_path):
    plan = compile_policy(policy(tmp_path), host(abi=1))
    assert state(plan, "landlock") is LayerState.WEAKENED
    ruleset = plan.landlock[Phase.AGENT]
    assert ruleset is not None
    assert ruleset.scoped == 0
    assert ruleset.handled_fs == (1 << 13) - 1
    assert all(rule.access & ~ruleset.handled_fs == 0 for rule in ruleset.rules)


def test_landlock_grants_what_the_policy_names(tmp_path):
    text = """
filesystem: {read: [/usr], write: [/data], temporary: [/tmp], binds: [{source: /opt/jdk, target: /jdk}]}
workspace: {target: /workspace}
environment: {HOME: /workspace/home}
answers: {hidden: [/srv/a], environment_state: [/srv/s]}
"""
    rules = compile_policy(policy(tmp_path, text), host()).landlock[Phase.AGENT]
    assert rules is not None
    for path, right in [("/workspace/x", FsRight.WRITE_FILE), ("/data/x", FsRight.MAKE_DIR), ("/tmp/x", FsRight.REFER),
                        ("/usr/bin/x", FsRight.EXECUTE), ("/jdk/bin/java", FsRight.EXECUTE), ("/srv/a/key", FsRight.READ_FILE),
                        ("/srv/s", FsRight.READ_FILE), ("/dev/null", FsRight.WRITE_FILE), ("/dev/pts/0", FsRight.IOCTL_DEV),
                        ("/anything", FsRight.READ_DIR), ("/proc/self/comm", FsRight.WRITE_FILE), ("/dev/shm/x", FsRight.MAKE_REG)]:
        assert rules.allows(path, right) is not None, (path, right)
    for path, right in [("/usr/bin/x", FsRight.WRITE_FILE), ("/root/x", FsRight.READ_FILE), ("/srv/a/key", FsRight.WRITE_FILE),
                        ("/srv/s", FsRight.WRITE_FILE), ("/jdk/x", FsRight.MAKE_REG), ("/srv/a/run", FsRight.EXECUTE),
                        ("/sys/x", FsRight.WRITE_FILE), ("/database", FsRight.WRITE_FILE), ("/dev/mem", FsRight.MAKE_CHAR),
                        ("/workspace/dev", FsRight.MAKE_BLOCK)]:
        assert rules.allows(path, right) is None, (path, right)
    assert rules.scoped == Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL


def test_the_workspace_at_its_own_path_is_writable(tmp_path):
    rules = compile_policy(policy(tmp_path), host(), workspace="/home/me/project", readable=["/opt/tool"],
                           writable=["/scratch"]).landlock[Phase.AGENT]
    assert rules is not None
    assert rules.allows("/home/me/project/a", FsRight.WRITE_FILE)
    assert rules.allows("/home/me/other", FsRight.WRITE_FILE) is None
    assert rules.allows("/opt/tool/x", FsRight.EXECUTE)
    assert rules.allows("/opt/tool/x", FsRight.WRITE_FILE) is None
    assert rules.allows("/scratch/x", FsRight.MAKE_DIR)


def test_tcp_ports_are_handled_only_where_listed(tmp_path):
    without = compile_policy(policy(tmp_path), host()).landlock[Phase.AGENT]
    listed = compile_policy(policy(tmp_path, "landlock: {connect_tcp: [80, 443], bind_tcp: []}\n"), host()).landlock[Phase.AGENT]
    assert without is not None
    assert listed is not None
    assert (without.handled_net, without.ports) == (0, ())
    assert (listed.handled_net, listed.ports) == (3, ((80, 2), (443, 2)))


def test_limits_become_rlimits_cut_to_what_may_still_be_set(tmp_path):
    plan = compile_policy(policy(tmp_path, "limits: {open_files: 4096, file_size: 1GiB, memory: 16MiB}\n"),
                          host(rlimit_hard={resource.RLIMIT_NOFILE: 1000}))
    limits = {r.resource: (r.soft, r.hard) for r in plan.rlimits}
    assert limits[resource.RLIMIT_NOFILE] == (1000, 1000)
    assert limits[resource.RLIMIT_FSIZE] == (1 << 30, 1 << 30)
    assert limits[resource.RLIMIT_CORE] == limits[resource.RLIMIT_RTPRIO] == limits[resource.RLIMIT_NICE] == (0, 0)
    assert limits[resource.RLIMIT_MEMLOCK] == (8 << 20, 8 << 20)


def test_who_runs_and_with_what(tmp_path):
    agent, root = compile_policy(policy(tmp_path), host()), compile_policy(policy(tmp_path, "user: root\n"), host())
    assert (agent.agent_uid, agent.agent_gid, agent.caps, agent.home) == (1000, 1000, 0, "/home/agent")
    assert (root.agent_uid, root.caps, root.home) == (0, ROOT_CAPS, "/root")
    # DAC_READ_SEARCH, NET_ADMIN, NET_RAW, SYS_*, MKNOD, AUDIT_READ, PERFMON, BPF
    for forbidden in (2, 12, 13, 16, 17, 18, 19, 21, 27, 37, 38, 39):
        assert not ROOT_CAPS >> forbidden & 1


@pytest.mark.parametrize(("text", "key", "column"), [
    ("network: open\n", "network", 10), ("network: allowlist\n", "network", 10),
    ("phases: {setup: {network: open}}\n", "phases.setup.network", 27),
])
def test_networks_to_come_are_refused_at_their_line(tmp_path, text, key, column):
    with pytest.raises(PolicyError) as caught:
        compile_policy(policy(tmp_path, text), host())
    assert caught.value.problems[0].startswith(f"{tmp_path}/p.yaml:2:{column}: {key}: ")
    assert "is not yet available: none" in caught.value.problems[0]


def test_a_landlock_plan_needs_a_kernel_that_has_it():
    with pytest.raises(ValueError, match="ABI 0"):
        build_plan(0, [])
    with pytest.raises(ValueError, match="plain absolute"):
        build_plan(1, [("/a/../b", FULL)])
    assert int(fs_rights(7)) == 0xFFFF
    assert int(fs_rights(1)) == 0x1FFF
