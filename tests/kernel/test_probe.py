"""Probes on the real kernel: what they say is what happens, and nothing of theirs stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dsec_guard.host.landlock import landlock_abi
from dsec_guard.host.probe import PRETEND_VARIABLE, PROBES, cgroup_mounts, probe

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def cgroup_leftovers() -> list[Path]:
    mounts = cgroup_mounts()
    return [p for parent in {mounts.v2, *mounts.v1.values()} - {None} for p in parent.glob("dsec-guard-probe.*")]


def test_every_feature_is_tried_and_says_how():
    features = probe()
    assert set(features.features) == set(PROBES)
    for feature in features.features.values():
        assert feature.tried == PROBES[feature.name].tried
        assert feature.detail


@pytest.mark.needs("namespaces", "overlay", "cgroup_v2", "landlock", "bpf_cgroup", "fanotify")
def test_probing_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mounts, descriptors = Path("/proc/self/mountinfo").read_text(), set(os.listdir("/proc/self/fd"))
    own = {entry.name for entry in os.scandir("/proc/self/ns")}
    before = {name: os.readlink(f"/proc/self/ns/{name}") for name in own}
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    probe()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert {name: os.readlink(f"/proc/self/ns/{name}") for name in own} == before
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
    assert Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text() == children
    assert cgroup_leftovers() == []
    assert list(tmp_path.iterdir()) == []
    assert (Path("/proc/self/status").read_text().split("NoNewPrivs:")[1].split()[0]) == "0"


def test_only_what_was_asked_for_is_tried_with_what_it_stands_on():
    assert set(probe(["bpf_tracing"]).features) == {"btf", "bpf_tracing"}
    assert set(probe(["idmapped_mounts"]).features) == {"user_namespaces", "idmapped_mounts"}


@pytest.mark.needs("landlock")
def test_the_landlock_abi_is_the_kernels():
    assert probe(["landlock"]).landlock_abi == landlock_abi() > 0


@pytest.mark.needs("btf")
def test_a_host_can_be_made_to_look_lesser(monkeypatch):
    monkeypatch.setenv(PRETEND_VARIABLE, "btf, landlock")
    features = probe(["bpf_tracing", "bpf_cgroup", "landlock", "seccomp"])
    assert not features.works("btf")
    assert features.detail("bpf_tracing") == "needs btf"
    assert not features.works("bpf_cgroup")
    assert (features.works("landlock"), features.landlock_abi) == (False, 0)
    assert features.works("seccomp")


@pytest.mark.needs("cgroup_v2")
def test_a_mount_that_cannot_be_id_mapped_is_found_out():
    # A cgroup file system does not take part in id mapping, whatever the kernel.
    assert cgroup_mounts().v2 is not None
    features = probe(["idmapped_mounts"], workspace=cgroup_mounts().v2)
    assert not features.works("idmapped_mounts")
    assert "EINVAL" in features.detail("idmapped_mounts")


def test_without_privilege_the_remedies_are_named():
    script = ("import os, json; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
              "from dsec_guard.host.probe import probe\n"
              "f = probe(['root', 'cgroup_v2', 'bpf_tracing', 'fanotify'])\n"
              "print(json.dumps({n: [x.works, x.detail] for n, x in f.features.items()}))")
    done = subprocess.run([sys.executable, "-c", "import dsec_guard.host.probe, dsec_guard.host.landlock\n" + script],
                          capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(
                              [str(Path(__file__).resolve().parents[2])])})
    found = json.loads(done.stdout)
    assert found["root"] == [False, "uid 65534"]
    assert not found["cgroup_v2"][0]
    assert not found["bpf_tracing"][0]
    for name in ("root", "cgroup_v2", "bpf_tracing", "fanotify"):
        assert PROBES[name].remedy.enable
