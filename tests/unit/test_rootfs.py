"""The composed root: what is in it, what is not, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.policy.schema import (
    Answers,
    Bind,
    Filesystem,
    HiddenObject,
    HiddenStyle,
    Limits,
    Policy,
    Root,
    RootKind,
    StateObject,
    User,
    Workspace,
)
from dsec_guard.sandbox.decoys import DecoyMount, DecoyTree
from dsec_guard.sandbox.globs import matches, static_prefix
from dsec_guard.sandbox.rootfs import RootContext, aliases_of, compose_root, workspace_target
from dsec_guard.sandbox.spec import MountFlag, OpKind, RootOp


def host(tmp_path: Path) -> Path:
    """A small stand-in for the host's system directories."""
    top = tmp_path / "host"
    for name in ("usr/bin", "usr/lib", "etc/ssl/certs", "etc/ssl/private", "etc/alternatives", "etc/sudoers.d",
                 "etc/profile.d", "etc/python3.11", "var/lib/dpkg", "root", "home/user", "opt"):
        (top / name).mkdir(parents=True)
    for name in ("bin", "lib"):
        (top / name).symlink_to(f"usr/{name}")
    for name in ("shadow", "sudoers", "pip.conf", "gitconfig", "passwd", "services", "profile", "ssl/openssl.cnf"):
        (top / "etc" / name).write_text(f"host {name}")
    (top / "etc/mime.types").write_text("x" * 70_000)
    (top / "etc/localtime").symlink_to("../usr/share/zoneinfo/UTC")
    (top / "usr/share/zoneinfo").mkdir(parents=True)
    (top / "usr/share/zoneinfo/UTC").write_text("TZif")
    return top


def compose(tmp_path: Path, policy: Policy | None = None, **kwargs):
    context = RootContext(host_root=host(tmp_path), **kwargs)
    return compose_root(policy or Policy(), context)


def at(plan, target: str) -> list[RootOp]:
    return [op for op in plan.ops if op.target == target]


def test_targets_are_relative_and_unique_enough(tmp_path):
    plan = compose(tmp_path)
    for op in plan.ops:
        assert op.target
        assert not op.target.startswith("/")
        assert ".." not in op.target.split("/")
    files = [op.target for op in plan.ops if op.kind in (OpKind.FILE, OpKind.SYMLINK)]
    assert len(files) == len(set(files))


def test_system_directories_are_read_only_binds_and_links_as_on_the_host(tmp_path):
    plan = compose(tmp_path)
    (usr,) = at(plan, "usr")
    assert usr.kind is OpKind.BIND
    assert usr.flags == MountFlag.RO | MountFlag.NOSUID | MountFlag.NODEV | MountFlag.IDMAP_BOX
    assert [(op.kind, op.source) for op in at(plan, "bin")] == [(OpKind.SYMLINK, "usr/bin")]
    assert not at(plan, "lib64")  # this host has none


def test_every_bind_but_devices_is_read_only_and_without_devices(tmp_path):
    for op in compose(tmp_path).ops:
        if op.kind is OpKind.BIND:
            assert op.flags & MountFlag.RO, op.target
            assert op.flags & MountFlag.NOSUID, op.target
            assert op.flags & MountFlag.NODEV or op.target.startswith("dev/"), op.target


def test_secrets_of_etc_stay_outside(tmp_path):
    plan = compose(tmp_path)
    sources = {op.source for op in plan.ops}
    for name in ("shadow", "sudoers", "sudoers.d", "pip.conf", "gitconfig", "ssl", "ssl/private", "passwd"):
        assert str(tmp_path / "host/etc" / name) not in sources
    contents = b"".join(op.content for op in plan.ops)
    for name in ("shadow", "sudoers", "pip.conf", "gitconfig", "passwd"):
        assert f"host {name}".encode() not in contents
    assert at(plan, "etc/shadow")[0].mode == 0
    assert at(plan, "etc/shadow")[0].content == b""
    assert at(plan, "etc/services")[0].content == b"host services"
    assert at(plan, "etc/mime.types")[0].kind is OpKind.BIND
    assert at(plan, "etc/localtime")[0].source == "../usr/share/zoneinfo/UTC"
    assert not at(plan, "home/user")


def test_generated_files_make_names_and_look_ups_work(tmp_path):
    plan = compose(tmp_path, agent_uid=1000)
    assert b"agent:x:1000:1000:agent:/home/agent:/bin/sh\n" in at(plan, "etc/passwd")[0].content
    hosts = at(plan, "etc/hosts")[0].content
    assert b"127.0.0.1\tlocalhost" in hosts
    assert b"::1\tlocalhost" in hosts
    assert b"sandbox" in hosts
    assert at(plan, "etc/resolv.conf")[0].content.startswith(b"nameserver 127.0.0.1\n")


def test_proc_is_masked_after_it_is_mounted_and_sysfs_is_not_mounted(tmp_path):
    plan = compose(tmp_path)
    kinds = [op.kind for op in plan.ops]
    proc = kinds.index(OpKind.PROC)
    masks = [i for i, op in enumerate(plan.ops) if op.kind in (OpKind.MASK_FILE, OpKind.MASK_DIR, OpKind.READONLY)]
    assert min(masks) > proc
    masked = {op.target for op in plan.ops if op.kind is OpKind.MASK_FILE}
    assert {"proc/kcore", "proc/sysrq-trigger", "proc/keys", "proc/kpagecgroup", "proc/kmsg"} <= masked
    assert {op.target for op in plan.ops if op.kind is OpKind.READONLY} >= {"proc/sys", "proc/bus", "proc/irq", "proc/fs"}
    assert not [op for op in plan.ops if op.target.startswith("sys") and op.kind is not OpKind.FILE]
    assert not at(plan, "sys/kernel/uevent_helper")


def test_cgroup_files_show_the_boxs_limits(tmp_path):
    plan = compose(tmp_path, Policy(limits=Limits(memory=384 << 20, pids=128, cpus=1.5)))
    for name, text in (("memory.max", b"402653184\n"), ("pids.max", b"128\n"), ("cpu.max", b"150000 100000\n")):
        (op,) = at(plan, f"sys/fs/cgroup/{name}")
        assert (op.content, op.mode) == (text, 0o444)


def test_writable_places_come_from_the_store(tmp_path):
    plan = compose(tmp_path, Policy(filesystem=Filesystem(write=("/data/cache",))))
    stores = {op.target: op for op in plan.ops if op.kind is OpKind.STORE}
    assert set(stores) == {"tmp", "var/tmp", "run", "data/cache", "home/agent"}
    assert stores["tmp"].mode == 0o1777
    assert (stores["home/agent"].uid, stores["home/agent"].gid) == (1000, 1000)
    assert all(op.flags == MountFlag.NOSUID | MountFlag.NODEV for op in stores.values())
    assert set(plan.store_places.values()) == {"/" + target for target in stores}
    assert len({op.source for op in stores.values()}) == len(stores)


def test_shared_memory_is_bounded_and_none_is_no_tmpfs_without_limit(tmp_path):
    (shm,) = [op for op in compose(tmp_path).ops if op.kind is OpKind.TMPFS]
    assert (shm.target, shm.size_bytes, shm.mode) == ("dev/shm", 64 << 20, 0o1777)
    assert shm.inodes > 0
    none = compose(tmp_path / "b", Policy(limits=Limits(shm=0)))
    assert not [op for op in none.ops if op.kind is OpKind.TMPFS]


def test_workspace_is_an_overlay_at_its_own_path_or_the_policys(tmp_path):
    (tmp_path / "w").mkdir()
    plan = compose(tmp_path, workspace=tmp_path / "w")
    (op,) = [op for op in plan.ops if op.kind is OpKind.OVERLAY]
    assert plan.workspace == str(tmp_path / "w")
    assert op.flags & MountFlag.IDMAP_OWNER
    assert op.name == "workspace"
    policy = Policy(workspace=Workspace(target="/workspace"), environment={"HOME": "/workspace/home"},
                    filesystem=Filesystem(write=("/workspace", "/workspace/x")))
    plan = compose(tmp_path / "b", policy, workspace=tmp_path / "w")
    assert (plan.workspace, plan.home) == ("/workspace", "/workspace/home")
    assert not at(plan, "home/agent")
    assert [op.kind for op in at(plan, "workspace")] == [OpKind.OVERLAY]


def test_root_inside_owns_its_home(tmp_path):
    plan = compose(tmp_path, Policy(user=User.ROOT))
    assert plan.home == "/root"
    assert [op.uid for op in at(plan, "root") if op.kind is OpKind.STORE] == [0]


@pytest.mark.parametrize("target", ["/", "/usr", "/proc/x", "/dev", "relative", "/a/../b"])
def test_impossible_workspace_targets_are_refused(tmp_path, target):
    with pytest.raises(UsageError):
        workspace_target(Policy(workspace=Workspace(target=target)), tmp_path)


@pytest.mark.parametrize("read", ["/", "/root", "/home", "/proc/1", "/run"])
def test_host_places_that_are_never_shown_are_refused(tmp_path, read):
    with pytest.raises(UsageError):
        compose(tmp_path, Policy(filesystem=Filesystem(read=("/usr", read))))


def test_binds_are_checked(tmp_path):
    (tmp_path / "data").mkdir()
    good = compose(tmp_path, binds=(Bind(source=str(tmp_path / "data"), target="/data"),))
    assert at(good, "data")[0].source == str(tmp_path / "data")
    for number, (source, target) in enumerate((("/nowhere/x", "/data"), (str(tmp_path / "data"), "/proc/x"),
                                               (str(tmp_path / "data"), "/usr/not-there"), ("/proc/self", "/d"),
                                               ("/dev/null", "/d"))):
        with pytest.raises(UsageError):
            compose(tmp_path / str(number), binds=(Bind(source=source, target=target),))


def test_a_bind_that_would_show_hidden_material_is_refused(tmp_path):
    answers = tmp_path / "task/answers"
    answers.mkdir(parents=True)
    (answers / "key").write_text("secret")
    (answers / "sub").mkdir()
    policy = Policy(answers=Answers(hidden=(HiddenObject(path="/srv/answers", source=str(answers)),),
                                    style=HiddenStyle.ABSENT))
    for number, source in enumerate((tmp_path / "task", answers, answers / "sub")):
        with pytest.raises(UsageError, match="hidden material"):
            compose(tmp_path / str(number), policy, binds=(Bind(source=str(source), target="/data"),))
    with pytest.raises(UsageError, match="hidden material"):
        compose(tmp_path / "w", policy, workspace=tmp_path / "task")
    compose(tmp_path / "ok", policy)


def test_decoys_come_after_what_they_cover(tmp_path):
    work = tmp_path / "w"
    (work / "secret").mkdir(parents=True)
    policy = Policy(answers=Answers(hidden=(HiddenObject(path=f"{work}/secret"),)))
    tree = DecoyTree(mounts=[DecoyMount(f"{work}/secret", 77, True)])
    plan = compose(tmp_path, policy, workspace=work, decoys=tree)
    kinds = {op.kind: index for index, op in enumerate(plan.ops)}
    (op,) = [op for op in plan.ops if op.kind is OpKind.TREE]
    assert (op.fd, op.target) == (77, f"{work}/secret".lstrip("/"))
    assert kinds[OpKind.TREE] > kinds[OpKind.OVERLAY]
    with pytest.raises(UsageError):
        compose(tmp_path / "b", policy, workspace=work)  # nothing covers it


def test_environment_state_is_bound_read_only(tmp_path):
    (tmp_path / "state").mkdir()
    policy = Policy(answers=Answers(environment_state=(StateObject(path="/srv/state", source=str(tmp_path / "state")),)))
    (op,) = at(compose(tmp_path, policy), "srv/state")
    assert op.flags & MountFlag.RO
    assert op.flags & MountFlag.NOEXEC


def test_a_prepared_root_is_shown_entry_by_entry_with_our_own_places(tmp_path):
    root = host(tmp_path / "r")
    (root / "srv/answers").mkdir(parents=True)
    policy = Policy(filesystem=Filesystem(root=Root(kind=RootKind.DIRECTORY, path=str(root))))
    plan = compose(tmp_path, policy)
    assert at(plan, "usr")[0].source == str(root / "usr")
    assert at(plan, "opt")[0].kind is OpKind.BIND
    assert [op.kind for op in at(plan, "bin")] == [OpKind.SYMLINK]
    assert [op.kind for op in at(plan, "etc/passwd")] == [OpKind.FILE]
    assert str(root / "etc/shadow") not in {op.source for op in plan.ops}
    assert str(root / "root") not in {op.source for op in plan.ops}
    hidden = Answers(hidden=(HiddenObject(path="/srv/answers"),), style=HiddenStyle.ABSENT)
    with pytest.raises(UsageError, match="hidden material"):
        compose(tmp_path / "b", policy.model_copy(update={"answers": hidden}))
    covered = DecoyTree(mounts=[DecoyMount("/srv/answers", 5, True)])
    plan = compose(tmp_path / "c", policy.model_copy(update={"answers": hidden}), decoys=covered)
    assert any("holds hidden material" in note for note in plan.notes)


def test_aliases_name_every_host_directory_that_shows(tmp_path):
    (tmp_path / "w").mkdir()
    policy = Policy(workspace=Workspace(target="/workspace"))
    context = RootContext(workspace=tmp_path / "w", binds=(Bind(source="/opt", target="/data"),))
    pairs = {(alias.source, alias.target) for alias in aliases_of(policy, context)}
    assert {(str(tmp_path / "w"), "/workspace"), ("/opt", "/data"), ("/usr", "/usr")} <= pairs


@pytest.mark.parametrize(("pattern", "path", "hit"), [
    ("/a/**", "/a/b/c", True), ("/a/**", "/a", False), ("/a/**/x.py", "/a/x.py", True), ("/a/**/x.py", "/a/b/c/x.py", True),
    ("/a/*.py", "/a/b/x.py", False), ("/a/?.py", "/a/b.py", True), ("/a/[!b].py", "/a/b.py", False),
    ("/a/[ab].py", "/a/b.py", True), ("/a/*", "/a/two\nlines", True), ("/a.b", "/axb", False),
])
def test_patterns(pattern, path, hit):
    assert matches(pattern, path) is hit


def test_the_static_part_of_a_pattern():
    assert static_prefix("/a/b/*.py") == "/a/b"
    assert static_prefix("/**") == "/"
    assert os.fspath(static_prefix("/a/b")) == "/a/b"
