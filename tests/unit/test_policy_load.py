"""Policy files: what is accepted, and how each mistake is reported."""

# ruff: noqa: E501  (messages stay on one line, so that they can be searched for)

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsec_guard.errors import PolicyError, UsageError
from dsec_guard.model import Class, Level, Outcome, Phase
from dsec_guard.policy.load import MAX_DEPTH, digest_of, load_policy, override_limits, shipped_names, with_level
from dsec_guard.policy.profile import load_profile
from dsec_guard.policy.schema import NetworkWord, User

HEAD = "schema: dsec-guard/policy/v1\n"


def write(directory: Path, text: str, name: str = "p.yaml", *, head: str = HEAD) -> Path:
    path = directory / name
    path.write_text(head + text, "utf-8")
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    return [p.replace(str(path), "FILE") for p in caught.value.problems]


def test_values_with_units_become_bytes_and_milliseconds(tmp_path):
    policy = load_policy(str(write(tmp_path, "limits: {memory: 2GiB, disk: 1.5 GiB, wall_time: 1h30min, pids: 64, cpus: 1.5}\n")))
    assert policy.limits.memory == 2 << 30
    assert policy.limits.disk == 3 << 29
    assert policy.limits.wall_time == 90 * 60_000
    assert (policy.limits.pids, policy.limits.cpus) == (64, 1.5)
    assert policy.name == "p"


def test_a_plain_text_stands_for_a_path(tmp_path):
    policy = load_policy(str(write(tmp_path, "answers: {hidden: [/srv/a, {path: /srv/b, source: /host/b}], environment_state: [/srv/s]}\n")))
    assert [(h.path, h.source) for h in policy.answers.hidden] == [("/srv/a", None), ("/srv/b", "/host/b")]
    assert policy.answers.environment_state[0].path == "/srv/s"


def test_phases_detectors_and_penalties_are_read(tmp_path):
    policy = load_policy(str(write(tmp_path, """
phases: {setup: {network: none}}
detectors: {some.rule: {enabled: false, severity: 3, except: [{object: /a, because: known}]}}
penalties: {answer_peek: {attempted: -0.25, succeeded: -1}}
""")))
    assert policy.phases[Phase.SETUP].network is NetworkWord.NONE
    assert policy.detectors["some.rule"].except_[0].because == "known"
    assert policy.penalties[Class.ANSWER_PEEK][Outcome.SUCCEEDED] == -1.0


@pytest.mark.parametrize(("text", "expected"), [
    ("limits: {memory: 2}", "FILE:2:18: limits.memory: 2 has no unit: a size with a unit such as 512MiB or 2GiB; 2 bytes is 2B"),
    ("limits: {memory: 2Gib}", "FILE:2:18: limits.memory: '2Gib' is no size: a size with a unit such as 512MiB or 2GiB (did you mean 2GiB?)"),
    ("limits: {memory: 1KiB}", "FILE:2:18: limits.memory: 1KiB is out of range: a size with a unit such as 512MiB or 2GiB, at least 16MiB"),
    ("limits: {pids: lots}", "FILE:2:16: limits.pids: got lots: want a whole number >= 4"),
    ("limits: {pids: 0755}", "FILE:2:16: limits.pids: got 0755 (YAML 1.1 reads 0755 as the octal number 493): want a whole number >= 4"),
    ("limits: {wall_time: 1:30}", "FILE:2:21: limits.wall_time: got 1:30 (YAML 1.1 reads 1:30 as 90, minutes and seconds): want a time with a unit such as 1500ms, 90s, 30min or 2h, at least 100ms"),
    ("limits: {wall_time: 90}", "FILE:2:21: limits.wall_time: 90 has no unit: a time with a unit such as 1500ms, 90s, 30min or 2h; 90 seconds is 90s"),
    ("network: no", "FILE:2:10: network: no is not known (YAML 1.1 reads no as false): none | allowlist | open (did you mean none?)"),
    ("mode: enforec", "FILE:2:7: mode: enforec is not known: enforce | observe (did you mean enforce?)"),
    ("landlock: {enabled: yes}", "FILE:2:21: landlock.enabled: got yes: want true or false"),
    ("limits: {memroy: 2GiB}", "FILE:2:10: limits.memroy: unknown key: one of memory, shm, pids, cpus, disk, files, file_size, open_files, ptys, output, wall_time, events (did you mean memory?)"),
    ("mode: enforce\nmode: observe", "FILE:3:1: mode: written twice (first on line 2): each key once"),
    ("limits: [1]", "FILE:2:9: limits: is a list: a mapping with memory, shm, pids, cpus, disk, files, file_size, open_files, ptys, output, wall_time, events"),
    ("deliverables: /out", "FILE:2:15: deliverables: is the plain value /out: a list such as [a, b]"),
    ("deliverables: [out]", "FILE:2:16: deliverables.0: out is no plain absolute path: an absolute path inside the box, where *, ? and ** may stand, for instance /out"),
    ("filesystem: {write: [/a/../b]}", "FILE:2:22: filesystem.write.0: /a/../b is no plain absolute path: an absolute path inside the box, for instance /b"),
    ("syscalls: {deny: [{name: mounnt}]}", "FILE:2:26: syscalls.deny.0.name: mounnt is not known: the name of a system call (did you mean mount?)"),
    ("syscalls: {deny: [{name: mount, errno: EPREM}]}", "FILE:2:40: syscalls.deny.0.errno: EPREM is not known: an error name such as EPERM or ENOSYS (did you mean EPERM?)"),
    ("syscalls: {profile: nosuch}", "FILE:2:21: syscalls.profile: 'nosuch' is no profile: default, or a path to a YAML or OCI JSON file"),
    ("name: x", "FILE:2:1: name: set by the loader, not written in a file"),
    ("description: 12", "FILE:2:14: description: 12 is no text (YAML 1.1 reads it as int): a text; put quotes around it if it is meant so"),
    ("mode:", "FILE:2:6: mode: has no value: enforce | observe"),
    ("penalties: {answer_peek: {attempted: 0.5}}", "FILE:2:38: penalties.answer_peek.attempted: 0.5 is out of range: a number >= -1000 and <= 0"),
    ("penalties: {answer_peek: {attempted: -1, succeeded: -0.5}}", "FILE:2:53: penalties.answer_peek.succeeded: -0.5 is milder than attempted (-1): at most -1"),
    ("penalties: {answer_peak: {}}", "FILE:2:13: penalties.answer_peak: answer_peak is not known: escape_attempt | answer_peek | tamper | exfiltration | system_crash (did you mean answer_peek?)"),
    ("answers: {repository: {base: HEAD}}", "FILE:2:23: answers.repository: path is missing: a mapping with path, base"),
    ("filesystem: {root: {kind: directory}}", "FILE:2:20: filesystem.root: kind directory and path belong together: {kind: directory, path: /a/root}, or {kind: host}"),
    ("mode: !!python/object:os.system x", "FILE:2:7: the tag tag:yaml.org,2002:python/object:os.system is not accepted: plain YAML without tags"),
    ("environment: {'A B': x}", "FILE:2:15: environment.A B: A B is no name of an environment variable: letters, digits and _"),
    ("environment: {HOME: home}", "FILE:2:21: environment.HOME: home is no plain absolute path: an absolute path inside the box"),
    ("limits: &l {pids: 8}\nphases: {<<: *l}", "FILE:3:10: phases: merge keys (<<) are not accepted: write the values out, or use `extends`"),
])
def test_each_mistake_is_reported_with_its_place(tmp_path, text, expected):
    found = problems_of(write(tmp_path, text + "\n"))
    assert found[0].startswith(expected)


def test_all_mistakes_are_reported_together(tmp_path):
    found = problems_of(write(tmp_path, "limits: {memory: 5, pids: x}\nmoed: enforce\nuser: rooot\n"))
    assert [p.split(": ")[1] for p in found] == ["limits.memory", "limits.pids", "moed", "user"]


def test_a_file_must_say_its_schema(tmp_path):
    assert problems_of(write(tmp_path, "mode: enforce\n", head=""))[0].startswith("FILE:1:1: schema: is missing: `schema: dsec-guard")
    found = problems_of(write(tmp_path, "schema: dsec-guard/policy/v9\n", head=""))
    assert found == ["FILE:1:9: schema: dsec-guard/policy/v9 is not known to this version: dsec-guard/policy/v1"]


@pytest.mark.parametrize(("content", "expected"), [
    (b"", "is empty"),
    (b"schema: [", "is no YAML"),
    (b"\xff\xfe\xfa", "is no UTF-8"),
    (b"a\x00b", "is no YAML"),
    (b"- a\n", "is a list"),
    (b"a: b\n---\nc: d\n", "is no YAML"),
    (b"x: " + b"[" * 500, f"nested deeper than {MAX_DEPTH}"),
    (b"x: [" + b"1," * 25_000 + b"]", "nested deeper than"),
    (b"#" * (1 << 20) + b"#", "is larger than 1 MiB"),
    (b'description: "\\UFFFFFFFF"\n', "is no YAML"),
])
def test_what_is_no_policy_at_all_is_one_clear_problem(tmp_path, content, expected):
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    found = problems_of(path)
    assert len(found) == 1
    assert expected in found[0]


def test_aliases_are_counted_each_time_they_are_used(tmp_path):
    text = f"answers: {{hidden: &a [{'/x,' * 50}], harness: [{'/y,' * 10}]}}\n"
    path = write(tmp_path, text + "x: &b [" + "*a," * 40 + "]\nfilesystem: {read: *a}\n")
    assert "unknown key" in problems_of(path)[0]
    bomb = "a0: &a0 {errno: EPERM, name: mount}\n" + f"syscalls: {{deny: &d [{'*a0,' * 9000}]}}\nphases: {{}}\n"
    found = problems_of(write(tmp_path, bomb))
    assert any("aliases stand for more than" in p for p in found), found[-1]


def test_a_recursive_alias_ends(tmp_path):
    assert problems_of(write(tmp_path, "filesystem: &f {root: *f, read: &r [*r]}\n"))


def test_files_that_are_none_are_refused_at_once(tmp_path):
    fifo = tmp_path / "p.yaml"
    os.mkfifo(fifo)
    assert "is no regular file" in problems_of(fifo)[0]
    assert "cannot be read (No such file or directory)" in problems_of(tmp_path / "missing.yaml")[0]
    directory = tmp_path / "d.yaml"
    directory.mkdir()
    assert "is no regular file" in problems_of(directory)[0]


def test_messages_hold_no_control_characters(tmp_path):
    found = problems_of(write(tmp_path, 'mode: "\\e[2J\\u202eevil"\n"\\e]0;x": 1\n'))
    assert len(found) == 2
    assert all(p.isprintable() for p in found)


def test_an_unknown_name_is_met_with_the_known_ones():
    with pytest.raises(PolicyError, match=r"swe-tsk: no policy of that name: base, .*did you mean swe-task\?"):
        load_policy("swe-tsk")


def test_names_are_looked_up_in_the_search_path_after_the_shipped_ones(tmp_path):
    write(tmp_path, "mode: observe\n", "mine.yaml")
    write(tmp_path, "mode: observe\n", "base.yaml")
    assert load_policy("mine", search=[tmp_path]).mode.value == "observe"
    assert load_policy("base", search=[tmp_path]).mode.value == "enforce"


# ------------------------------------------------------------------------------------------------------------- extends


def test_a_child_inherits_replaces_and_adds(tmp_path):
    write(tmp_path, "limits: {pids: 100, memory: 1GiB}\nanswers: {hidden: [/a, /b], harness: [/t/**]}\ndeliverables: [/x]\n"
          "filesystem: {temporary: [/tmp, /run]}\nenvironment: {A: one, B: two}\n", "parent.yaml")
    child = load_policy(str(write(tmp_path, "extends: ./parent.yaml\nlimits: {pids: 50}\n"
                                  "answers: {hidden: [{path: /b, source: /host}, /c]}\ndeliverables: [/y]\nenvironment: {B: three}\n")))
    assert (child.limits.pids, child.limits.memory) == (50, 1 << 30)
    assert [(h.path, h.source) for h in child.answers.hidden] == [("/a", None), ("/b", "/host"), ("/c", None)]
    assert child.answers.harness == ("/t/**",)
    assert child.deliverables == ("/y",)
    assert child.environment == {"A": "one", "B": "three"}
    assert child.place("limits.pids") == f"{tmp_path}/p.yaml:3:16"
    assert child.place("limits.memory") == f"{tmp_path}/parent.yaml:2:29"
    assert child.place("answers.hidden.0") == f"{tmp_path}/parent.yaml:3:20"
    assert child.place("landlock.enabled") == "default"


def test_a_cycle_of_parents_is_named(tmp_path):
    write(tmp_path, "extends: ./b.yaml\n", "a.yaml")
    path = write(tmp_path, "extends: ./a.yaml\n", "b.yaml")
    assert "extends: the policies extend each other (b.yaml -> a.yaml -> b.yaml)" in problems_of(path)[0]


def test_mistakes_of_a_parent_are_reported_at_the_parent(tmp_path):
    write(tmp_path, "limits: {pids: x}\n", "parent.yaml")
    with pytest.raises(PolicyError) as caught:
        load_policy(str(write(tmp_path, "extends: ./parent.yaml\n")))
    assert caught.value.problems[0].startswith(f"{tmp_path}/parent.yaml:2:16: limits.pids")


@pytest.mark.parametrize(("parent", "child", "key"), [
    ("limits: {memory: 1GiB}", "limits: {memory: 2GiB}", "limits.memory"),
    ("limits: {wall_time: 1h}", "limits: {wall_time: 61min}", "limits.wall_time"),
    ("network: none", "network: open", "network"),
    ("network: allowlist", "phases: {agent: {network: open}}", "phases.agent.network"),
    ("allowed_hosts: [a.example]", "allowed_hosts: [a.example, b.example]", "allowed_hosts"),
    ("filesystem: {read: [/usr]}", "filesystem: {read: [/usr/lib, /root]}", "filesystem.read"),
    ("filesystem: {read: [/usr]}", "filesystem: {write: [/usr/local]}", "filesystem.write"),
    ("filesystem: {read: [/usr]}", "filesystem: {temporary: [/]}", "filesystem.temporary"),
    ("filesystem: {read: [/usr]}", "filesystem: {binds: [{source: /root, target: /mnt}]}", "filesystem.binds"),
    ("filesystem: {read: [/usr]}", "workspace: {target: /usr/src}", "workspace.target"),
    ("filesystem: {read: [/usr]}", "environment: {HOME: /usr/home}", "environment.HOME"),
    ("answers: {environment_state: [/srv/s]}", "filesystem: {write: [/srv/s]}", "filesystem.write"),
    ("filesystem: {root: {kind: directory, path: /r}}", "filesystem: {root: {kind: directory, path: /q}}", "filesystem.root"),
    ("answers: {hidden: [/srv/a]}", "answers: {allowed_reads: [/srv/a/x]}", "answers.allowed_reads"),
    ("answers: {hidden: [/srv/a]}", "answers: {allowed_reads: [/srv/**]}", "answers.allowed_reads"),
    ("answers: {hidden: [/srv/a]}", "answers: {environment_state: [/srv/a/x]}", "answers.environment_state"),
    ("answers: {repository: {path: /r}}", "answers: {repository: {path: /q}}", "answers.repository"),
    ("syscalls: {io_uring: false}", "syscalls: {io_uring: true}", "syscalls.io_uring"),
    ("syscalls: {allow: [kcmp]}", "syscalls: {allow: [kcmp, syslog]}", "syscalls.allow"),
    ("landlock: {enabled: true}", "landlock: {enabled: false}", "landlock.enabled"),
    ("landlock: {connect_tcp: [80]}", "landlock: {connect_tcp: [80, 81]}", "landlock.connect_tcp"),
    ("user: agent", "user: root", "user"),
    ("if_unsupported: refuse", "if_unsupported: degrade", "if_unsupported"),
    ("children_may: [root]", "children_may: [root, degrade]", "children_may"),
    ("pass_environment: [TERM]", "pass_environment: [TERM, AWS_SECRET]", "pass_environment"),
])
def test_a_child_that_loosens_is_refused_at_its_line(tmp_path, parent, child, key):
    write(tmp_path, parent + "\n", "parent.yaml")
    found = problems_of(write(tmp_path, "extends: ./parent.yaml\n" + child + "\n"))
    assert len(found) == 1
    place, named, rest = found[0].split(": ", 2)
    assert place.startswith("FILE:3:")
    assert named == key
    assert "a child only tightens parent" in rest


@pytest.mark.parametrize(("parent", "child"), [
    ("children_may: [root]", "user: root"),
    ("children_may: [degrade]", "if_unsupported: degrade"),
    ("user: root", "user: agent"),
    ("network: open", "network: none"),
    ("network: open\nallowed_hosts: []", "network: allowlist\nallowed_hosts: [a.example]"),
    ("filesystem: {read: [/usr]}", "filesystem: {read: [/usr/lib], write: [/data], binds: [{source: /usr/share, target: /s}]}"),
    ("pass_environment: ['LC_*']", "pass_environment: [LC_ALL]"),
    ("answers: {hidden: [/srv/a]}", "answers: {allowed_reads: [/srv/other]}"),
    ("filesystem: {root: {kind: host}}", "filesystem: {root: {kind: directory, path: /r}}"),
    ("mode: enforce", "mode: observe\nmonitor: {level: cold}\npenalties: {tamper: {attempted: -0.1}}"),
])
def test_a_child_that_tightens_or_judges_is_accepted(tmp_path, parent, child):
    write(tmp_path, parent + "\n", "parent.yaml")
    assert load_policy(str(write(tmp_path, "extends: ./parent.yaml\n" + child + "\n")))


def test_a_policy_without_a_parent_is_bound_by_nothing_but_the_model(tmp_path):
    assert load_policy(str(write(tmp_path, "user: root\nlimits: {memory: 100GiB}\n"))).user is User.ROOT


# ----------------------------------------------------------------------------------------------- digest and overrides


def test_the_digest_follows_content_and_not_name_or_description(tmp_path):
    one = load_policy(str(write(tmp_path, "limits: {pids: 9}\n", "one.yaml")))
    two = load_policy(str(write(tmp_path, "description: other words\nlimits: {pids: 9}  # a remark\n", "two.yaml")))
    three = load_policy(str(write(tmp_path, "limits: {pids: 10}\n", "three.yaml")))
    assert one.digest == two.digest == digest_of(one)
    assert len(one.digest) == 64
    assert one.digest != three.digest


def test_limits_can_be_tightened_for_one_run():
    base = load_policy("untrusted-script")
    tight = override_limits(base, {"memory": "256MiB", "pids": "32", "wall_time": "10s", "cpus": "0.5"})
    assert (tight.limits.memory, tight.limits.pids, tight.limits.wall_time, tight.limits.cpus) == (256 << 20, 32, 10_000, 0.5)
    assert tight.digest == digest_of(tight) != base.digest
    assert base.limits.pids == 512


@pytest.mark.parametrize(("name", "value", "message"), [
    ("memory", "64GiB", r"--limit memory=64GiB is above the policy's 2GiB"),
    ("memory", "12", r"--limit memory=12: 12 has no unit"),
    ("pids", "many", r"--limit pids=many: got many: want a whole number >= 4"),
    ("memry", "1GiB", r"--limit memry: no such limit"),
])
def test_a_wrong_or_wider_limit_is_a_usage_error(name, value, message):
    with pytest.raises(UsageError, match=message) as caught:
        override_limits(load_policy("untrusted-script"), {name: value})
    assert name != "memry" or "did you mean memory?" in caught.value.hint


def test_the_level_is_part_of_the_digest():
    base = load_policy("base")
    cold = with_level(base, Level.COLD)
    assert cold.monitor.level is Level.COLD
    assert cold.digest != base.digest


def test_the_shipped_policies_are_these():
    assert shipped_names() == ("base", "corpus", "swe-task", "terminal-task", "untrusted-script")


@pytest.mark.parametrize("word", ["\x1f", "\x1b[2J", "open\n/etc/passwd", "\u202eopen", "\udc80"])
def test_a_profile_cannot_send_control_characters_to_the_terminal(tmp_path: Path, word: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"schema": "dsec-guard/syscalls/v1", "allow": [word]}))
    with pytest.raises(PolicyError) as caught:
        load_profile(str(file))
    assert all(problem.isprintable() for problem in caught.value.problems)
    assert "no such system call" in str(caught.value)
