"""Whatever a rule file holds, loading ends with rules or with named mistakes; whatever a path holds, matching ends."""

from __future__ import annotations

import contextlib
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_guard.detect.engine import DetectorSet
from dsec_guard.detect.exfil import long_label, query_labels
from dsec_guard.detect.facts import BoxFacts
from dsec_guard.detect.language import FIELDS, DetectorError, Names, compile_condition, compile_template
from dsec_guard.detect.paths import glob, normalise, split_address
from dsec_guard.detect.tamper import git_settings, runs_program
from dsec_guard.detect.view import View
from dsec_guard.model import SyscallSeen

PIECES = st.sampled_from([
    *sorted(FIELDS), "and", "or", "not", "(", ")", ",", "=", "!=", "<", ">=", "in", "has", "glob", "pmatch", "startswith",
    "contains", "exists", "0x10", "-1", "'a'", '"b', "/x/**", "MACRO", "LIST", "true", "é", "\x00",
])
NAMES = Names(lists={"LIST": ("a", "1")}, macros={"MACRO": "evt.name = a"})


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=30).map(" ".join) | st.text(max_size=60))
def test_any_condition_compiles_or_is_refused_with_a_reason(text: str) -> None:
    reason, test = "", None
    try:
        test = compile_condition(text, NAMES, frozenset({"syscall"}))
    except ValueError as error:
        reason = str(error)
    assert (test is None) is bool(reason)
    event = SyscallSeen(name="openat", nr=257, path="/x/y", address="inet:1.2.3.4:5")
    assert test is None or test(event, View(BoxFacts(run_id="r"))) in (True, False)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_file_loads_or_names_its_mistakes(text: str) -> None:
    problems: tuple[str, ...] = ()
    try:
        DetectorSet.from_texts([("f.yaml", text)])
    except DetectorError as error:
        problems = error.problems
    assert all(p.startswith("f.yaml:") for p in problems)


@given(st.text(max_size=80))
def test_any_template_renders_or_is_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        render = compile_template(text, frozenset({"syscall"}))
        assert isinstance(render(SyscallSeen(name="a", nr=1), View(BoxFacts(run_id="r"))), str)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["*", "**", "?", "[a-z]", "[", "a", "/", "b"]), max_size=40).map("".join),
       st.sampled_from(["a", "ab", "/a", "/", "]"]).map(lambda s: s * 1500))
def test_globs_end_soon(pattern: str, path: str) -> None:
    began = time.process_time()
    glob(pattern, path)
    assert time.process_time() - began < 2.0


@given(st.text(max_size=300))
def test_agent_text_is_only_text(text: str) -> None:
    assert "//" not in normalise("/" + text)
    assert len(split_address(text)) == 3
    for key, value in git_settings(text):
        assert runs_program(key, value) in (True, False)
    assert isinstance(long_label(text), str)


@given(st.binary(max_size=256))
def test_any_datagram_is_read_without_an_error(raw: bytes) -> None:
    assert sum(len(label) for label in query_labels(raw)) <= len(raw)
    assert isinstance(long_label(raw.hex()), str)
