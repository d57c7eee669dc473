"""What a command finds in its environment."""

from __future__ import annotations

import pytest

from dsec_guard.errors import UsageError
from dsec_guard.policy.schema import Policy
from dsec_guard.sandbox.environment import compose_environment, encode_environment, home_directory


def test_nothing_of_the_callers_environment_comes_in_unasked():
    outer = {"AWS_SECRET_ACCESS_KEY": "s", "LD_PRELOAD": "/x.so", "PYTHONPATH": "/x", "TERM": "xterm", "TZ": "Asia/Tokyo"}
    result = compose_environment(Policy(pass_environment=("TZ",)), outer=outer)
    assert result["TZ"] == "Asia/Tokyo"
    assert result["TERM"] == "dumb"
    assert not {"AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "PYTHONPATH"} & set(result)


def test_the_defaults_are_the_documented_ones():
    result = compose_environment(Policy(), outer={})
    assert result == {
        "PATH": "/home/agent/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh", "TMPDIR": "/tmp", "TERM": "dumb",
        "LANG": "C.UTF-8", "TZ": "UTC", "HOSTNAME": "sandbox", "XDG_CACHE_HOME": "/home/agent/.cache",
        "PIP_CACHE_DIR": "/home/agent/.cache/pip", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_cache": "/home/agent/.cache/npm", "npm_config_update_notifier": "false",
        "SSL_CERT_DIR": "/etc/ssl/certs",
    }


def test_the_order_is_default_outer_policy_option():
    policy = Policy(environment={"LANG": "policy", "HOME": "/workspace/home"}, pass_environment=("LANG", "A"))
    result = compose_environment(policy, outer={"LANG": "outer", "A": "outer"}, extra={"A": "option", "B": "new"})
    assert (result["LANG"], result["A"], result["B"]) == ("policy", "option", "new")
    assert result["PIP_CACHE_DIR"] == "/workspace/home/.cache/pip"
    assert compose_environment(policy, outer={"TERM": "xterm"}, tty=True)["TERM"] == "dumb"
    assert compose_environment(Policy(), outer={"TERM": "xterm"}, tty=True)["TERM"] == "xterm"


def test_root_inside_has_a_home_of_its_own():
    assert home_directory(Policy(user="root")) == "/root"
    assert compose_environment(Policy(user="root"), outer={})["USER"] == "root"


@pytest.mark.parametrize("extra", [{"A=B": "x"}, {"": "x"}, {"1A": "x"}, {"A": "a\0b"}, {"A": "x" * (1 << 17)}])
def test_what_no_environment_can_hold_is_refused(extra):
    with pytest.raises(UsageError):
        compose_environment(Policy(), outer={}, extra=extra)


def test_bytes_that_are_no_text_pass_unchanged():
    assert encode_environment({"B": "\udcff", "A": "é"}) == (b"A=\xc3\xa9", b"B=\xff")
