"""The README's table of what a command finds inside, measured inside."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.needs("run")

LOOK = r"""
import json, os, pwd, resource, socket, sys
def size(path):
    s = os.statvfs(path)
    return s.f_blocks * s.f_frsize
umask = os.umask(0o22)
me = pwd.getpwuid(os.getuid())
def lookup(name):
    try:
        return sorted({a[4][0] for a in socket.getaddrinfo(name, 80)})
    except OSError as e:
        return type(e).__name__
print(json.dumps({
    "env": dict(os.environ), "uid": os.getuid(), "gid": os.getgid(), "passwd": [me.pw_name, me.pw_dir, me.pw_shell],
    "home_writable": os.access(os.environ["HOME"], os.W_OK), "umask": umask,
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "hostname": socket.gethostname(), "localhost": lookup("localhost"), "outside": lookup("www.example.com"),
    "resolv": open("/etc/resolv.conf").read(), "shm": size("/dev/shm"), "tmp": size("/tmp"), "cwd": os.getcwd(),
    "certificates": len(os.listdir("/etc/ssl/certs")) if os.path.isdir("/etc/ssl/certs") else 0,
}))
"""


@pytest.fixture(scope="module")
def inside(tmp_path_factory, dsec_guard_cli):
    place = tmp_path_factory.mktemp("inside")
    (place / "work").mkdir()
    env = {**os.environ, "DSEC_GUARD_STATE": str(place / "state"), "A_TOKEN_OF_MINE": "secret", "TZ": "Europe/Berlin"}
    (place / "state").mkdir(mode=0o700)
    done = subprocess.run([*dsec_guard_cli, "run", "--quiet", "--report", str(place / "r.json"), "--", "python3", "-c", LOOK],
                          capture_output=True, timeout=120, cwd=place / "work", env=env, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:]
    found = json.loads(done.stdout)
    found["result"] = json.loads((place / "r.json").read_bytes())
    found["work"] = str(place / "work")
    return found


def test_looking_around_is_clean(inside):
    assert inside["result"]["verdict"]["class"] == "clean"
    assert inside["result"]["reward"]["dsec_penalty"] == 0


def test_the_caller_s_environment_stays_outside(inside):
    assert "A_TOKEN_OF_MINE" not in inside["env"]
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    named = set(re.findall(r"`([A-Za-z_]+)`", readme.split("## What a command finds inside", 1)[1].split("\n## ", 1)[0]))
    assert set(inside["env"]) - named - {"PWD", "LC_CTYPE"} == set()


def test_user_home_and_working_directory(inside):
    assert (inside["uid"], inside["gid"]) == (1000, 1000)
    assert inside["passwd"] == ["agent", "/home/agent", "/bin/sh"]
    assert inside["env"]["HOME"] == "/home/agent"
    assert inside["home_writable"]
    assert inside["cwd"] == inside["work"]


def test_the_policy_passes_the_time_zone_on(inside):
    assert inside["env"]["TZ"] == "Europe/Berlin"


def test_names_and_name_service(inside):
    assert inside["hostname"] == "sandbox"
    assert set(inside["localhost"]) <= {"127.0.0.1", "::1"}
    assert "127.0.0.1" in inside["localhost"]
    assert inside["outside"] == "gaierror"
    assert "127.0.0.1" in inside["resolv"]


def test_limits_show_as_they_are(inside):
    assert inside["umask"] == 0o022
    assert inside["nofile"] == 4096
    assert inside["shm"] == 256 << 20
    assert 0 < inside["tmp"] <= 4 << 30


def test_certificates_are_the_hosts(inside):
    host = Path("/etc/ssl/certs")
    if not host.is_dir():
        pytest.skip("this host has no certificates")
    assert inside["certificates"] == len(list(host.iterdir()))
