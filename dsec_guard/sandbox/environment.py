"""The environment variables of a command inside: a fixed table, the policy's, the user's, and nothing else.

The caller's own environment only comes in by names the policy lists in `pass_environment`: it holds tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsec_guard.errors import UsageError
from dsec_guard.policy.schema import Policy, User

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOSTNAME = "sandbox"
UMASK = 0o022
AGENT_NAME = "agent"
ROOT_NAME = "root"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_VALUE = 128 * 1024 - 256  # MAX_ARG_STRLEN is 32 pages, name and `=` included: execve(2)


def user_name(policy: Policy) -> str:
    return ROOT_NAME if policy.user is User.ROOT else AGENT_NAME


def home_directory(policy: Policy) -> str:
    """HOME inside: the policy's, else /root or /home/agent."""
    given = policy.environment.get("HOME")
    return given or ("/root" if policy.user is User.ROOT else f"/home/{AGENT_NAME}")


def default_environment(policy: Policy) -> dict[str, str]:
    """What every command finds, before the policy and the user add theirs."""
    home, name = home_directory(policy), user_name(policy)
    return {
        "PATH": f"{home}/.local/bin:{PATH}",
        "HOME": home,
        "USER": name,
        "LOGNAME": name,
        "SHELL": "/bin/sh",
        "TMPDIR": "/tmp",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOSTNAME": HOSTNAME,
        "XDG_CACHE_HOME": f"{home}/.cache",
        "PIP_CACHE_DIR": f"{home}/.cache/pip",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_cache": f"{home}/.cache/npm",
        "npm_config_update_notifier": "false",
        "SSL_CERT_DIR": "/etc/ssl/certs",
    }


def compose_environment(
    policy: Policy, *, outer: Mapping[str, str], extra: Mapping[str, str] | None = None, tty: bool = False
) -> dict[str, str]:
    """The whole environment of a command: defaults < passed on from `outer` < policy < `extra` (--env).

    outer: the caller's environment; only names in `policy.pass_environment` are looked up in it. tty: a terminal is
    attached, so that TERM matters. Raises UsageError for a name or value that no environment can hold.
    """
    result = default_environment(policy)
    result.update({name: outer[name] for name in policy.pass_environment if name in outer})
    if not tty and "TERM" not in policy.environment:
        result["TERM"] = "dumb"
    result.update(policy.environment)
    for name, value in (extra or {}).items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"--env {name!r}: no name of a variable", hint="letters, digits and _ only, as in --env CI=1")
        result[name] = value
    for name, value in result.items():
        if "\0" in value or len(value.encode("utf-8", "surrogateescape")) + len(name) > _MAX_VALUE:
            raise UsageError(f"the value of {name} cannot be passed to a program",
                             hint="no NUL bytes, and less than 128 KiB")
    return result


def encode_environment(environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """`NAME=value` as bytes, by name: the form of `ExecRequest.env`."""
    return tuple(f"{name}={environment[name]}".encode("utf-8", "surrogateescape") for name in sorted(environment))
