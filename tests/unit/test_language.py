"""The rule language: what it accepts, what it means, and what it says about mistakes."""

from __future__ import annotations

import pytest

from dsec_guard.detect.engine import DetectorSet
from dsec_guard.detect.facts import BoxFacts, facts_from_record
from dsec_guard.detect.language import DetectorError, Names, compile_condition, compile_template
from dsec_guard.detect.paths import glob, has_controls, is_link_local, is_loopback, normalise, split_address
from dsec_guard.detect.view import View
from dsec_guard.model import Layer, LayerState, Level, ProcessExec, SyscallSeen

FACTS = BoxFacts(run_id="r", hidden=("/a/b",), harness=("/w/tests/**",), workspace="/w", home="/h", layers=(
    Layer("seccomp", LayerState.ENFORCED),))
NAMES = Names(lists={"CALLS": ("open", "openat"), "NUMBERS": ("1", "0x10")},
              macros={"bad": "evt.errno in (1, 13)", "loop": "not loop", "both": "bad and evt.name = open"})
SYS = frozenset({"syscall"})


def holds(condition: str, **fields: object) -> bool:
    view = View(FACTS)
    view.observe(ProcessExec(exe="/usr/bin/cat", argv=("cat", "/a/b/c"), tgid=5, seq=1))
    event = SyscallSeen(**{"name": "open", "nr": 2, "tgid": 5, "ret": -13, "path": "/a/b/c", **fields})  # type: ignore[arg-type]
    return bool(compile_condition(condition, NAMES, SYS)(event, view))


@pytest.mark.parametrize("condition", [
    "evt.name = open", "evt.name in (CALLS)", "evt.name != mount", "evt.errno in (NUMBERS, 13)", "not evt.ok", "bad", "both",
    "evt.name = mount or evt.name = open and bad", "(evt.name = mount or evt.name = open) and bad",
    "evt.path startswith /a", 'evt.path endswith ("/c", /d)', "evt.path contains b/", "evt.path glob /a/*/c",
    "evt.path glob (/x, /a/**)", "evt.path pmatch /a", "evt.path pmatch box.hidden", "not evt.path pmatch /a/b/c/d",
    "evt.args[1] has 0x41", "evt.int[2] = -1", "evt.int[2] < 0", "evt.args[1] >= 1", "evt.path exists", "not evt.path2 exists",
    "proc.argv in (cat)", "proc.argv contains /a/b/c", "proc.argv pmatch box.hidden", "proc.name = cat", "evt.ok = false",
    "evt.ret <= -13", "evt.written pmatch (/x) or evt.name = 'open'", "proc.exe = \"/usr/bin/cat\"",
])
def test_condition_holds(condition: str) -> None:
    assert holds(condition, args=(0, 0x41, 0xFFFFFFFF, 0, 0, 0))


@pytest.mark.parametrize("condition", [
    "evt.name = openat", "evt.name in (mount, umount2)", "evt.ok", "not bad", "evt.path glob /a/*", "evt.path pmatch /a/b/c/d",
    "evt.path pmatch /a/bb", "evt.args[0] has 0x1", "evt.args[1] > 0x41", "proc.argv contains /a/b", "evt.path2 exists",
    "evt.path pmatch box.harness", "evt.path contains box.package and box.package exists",
])
def test_condition_does_not_hold(condition: str) -> None:
    assert not holds(condition, args=(0, 0x41, 0, 0, 0, 0))


@pytest.mark.parametrize(("condition", "says"), [
    ("", "empty"),
    ("evt.nmae = open", "did you mean evt.name"),
    ("nosuch", "no field and no macro"),
    ("evt.name in (CALL)", "did you mean CALLS"),
    ("evt.name = ", "expected a value"),
    ("evt.name", "needs an operator"),
    ("evt.name < 3", "of type str"),
    ("evt.errno = abc", "is a number"),
    ("evt.ok = yes", "true or false"),
    ("evt.name in open", "takes a list"),
    ("evt.name = (open)", "one value"),
    ("(evt.ok", "expected `)`"),
    ("evt.ok evt.ok", "expected `and`"),
    ("evt.name = 'open", "not closed"),
    ("loop", "uses itself"),
    ("file.change = added", "does not exist for events of kind syscall"),
    ("not " * 60 + "evt.ok", "nested deeper"),
    ("evt.ok" + " or evt.ok" * 3000, "more than 4000 words"),
    ("evt.name = evt.errno", "of type int"),
    ("evt.name ! open", "unexpected"),
    ("__import__('os').system('id')", "no field and no macro"),
    ("evt.name in (and)", "quote it"),
])
def test_mistake_is_named(condition: str, says: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compile_condition(condition, NAMES, SYS)
    assert says in str(caught.value)


def test_template_fills_fields_and_nothing_else() -> None:
    view = View(FACTS)
    event = SyscallSeen(name="open", nr=2, path="/{evt.name}\x1b[2J" + "x" * 500)
    text = compile_template("{evt.name} {{of}} {evt.path}", SYS)(event, view)
    assert text.startswith("open {of}} /{evt.name}\N{REPLACEMENT CHARACTER}[2J")
    assert len(text) < 230
    with pytest.raises(ValueError, match="no field"):
        compile_template("{evt.name.__class__}", SYS)


RULE = """
- rule: x.one
  class: tamper
  severity: 5
  outcome: attempted
  kinds: [syscall]
  syscalls: [open]
  condition: evt.ok
  object: evt.path
  explanation: text {evt.path}
  allow: nothing
  needs: [sys_exit]
"""


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(DetectorError) as caught:
        DetectorSet.from_texts([("x.yaml", text)])
    return caught.value.problems


@pytest.mark.parametrize(("old", "new", "line"), [
    ("class: tamper", "class: tampering", "x.yaml:2: x.one: class: want one of"),
    ("severity: 5", "severity: 11", "x.yaml:2: x.one: severity: want a whole number 1..10, got 11"),
    ("severity: 5", "severity: high", "severity: want a whole number"),
    ("kinds: [syscall]", "kinds: [sycall]", "no event is of kind sycall (did you mean syscall?)"),
    ("outcome: attempted", "outcome: maybe", "outcome: want attempted"),
    ("object: evt.path", "object: evt.pth", "object: no field is called evt.pth"),
    ("needs: [sys_exit]", "needs: [ebpf]", "no evidence source is called ebpf"),
    ("condition: evt.ok", "condition: evt.ko", "condition: no field and no macro is called evt.ko"),
    ("explanation: text {evt.path}", "explanation: text {evt.nope}", "explanation: no field"),
    ("  allow: nothing\n", "", "allow is missing"),
    ("  allow: nothing\n", "  allow: a\n  allow: b\n", "key allow is given twice"),
    ("  allow: nothing\n", "  allow: a\n  alow: b\n", "unknown key alow (did you mean allow?)"),
])
def test_rule_mistakes_name_file_line_and_rule(old: str, new: str, line: str) -> None:
    found = problems(RULE.replace(old, new))
    assert any(line in p and p.startswith("x.yaml:2: ") for p in found), found


def test_all_mistakes_are_reported_together() -> None:
    text = RULE.replace("severity: 5", "severity: 0") + RULE.replace("x.one", "x.two").replace("object: evt.path", "object: nope")
    assert len(problems(text)) == 2


@pytest.mark.parametrize("text", ["- 3", "a: b", "- rule: [1]", "- list: lower\n  items: [a]", "- macro: evt.ok\n  condition: a",
                                  "[" * 2000, "- list: A\n  items: [B]\n- list: B\n  items: [A]", "a: [", "\x00", RULE + RULE])
def test_odd_files_are_refused_with_a_place(text: str) -> None:
    assert all(p for p in problems(text))


def test_facts_survive_a_record() -> None:
    assert facts_from_record(FACTS.to_record()) == FACTS
    assert facts_from_record(FACTS.to_record()).level is Level.FULL


@pytest.mark.parametrize(("raw", "clean"), [
    ("/a/./b//c/../d", "/a/b/d"), ("/../../x", "/x"), ("a/../../b", "../b"), ("", ""), ("/", "/"),
    ("/proc/self/root/srv/x", "/srv/x"), ("/proc/thread-self/root/proc/self/root/x", "/x"), ("/proc/7/task/7/root/x", "/x"),
    ("/proc/1/root/x", "/proc/1/root/x"), ("/proc/self/cwd/x", "/proc/self/cwd/x"), ("/srv" + "/." * 3000 + "/k", "/srv/k"),
])
def test_paths_are_normalised(raw: str, clean: str) -> None:
    assert normalise(raw) == clean


@pytest.mark.parametrize(("pattern", "path", "hit"), [
    ("/a/*.py", "/a/x.py", True), ("/a/*.py", "/a/b/x.py", False), ("/a/**", "/a", True), ("/a/**", "/a/b/c", True),
    ("/a/**/x", "/a/x", True), ("/a/**/x", "/a/b/c/x", True), ("/a/[!b]?", "/a/cd", True), ("/a/[a-c]", "/a/d", False),
    ("**/x", "/q/x", True), ("/a/[", "/a/[", True), ("*a*a*a*a*b", "a" * 3000, False), ("/**/**/**/**/z", "/a" * 2000, False),
])
def test_globs_are_bounded_and_right(pattern: str, path: str, hit: bool) -> None:
    assert glob(pattern, path) is hit


def test_addresses() -> None:
    assert split_address("inet6:[::1]:80") == ("inet6", "::1", 80)
    assert split_address("unix:@a:b") == ("unix", "@a:b", 0)
    assert split_address("inet:x:y") == ("inet", "x", 0)
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("128.0.0.1")
    assert is_link_local("::ffff:169.254.169.254")
    assert has_controls("a\x1bb")
    assert not has_controls("caf\\xe9")
