"""The corpus runner's own parts: reading a corpus, the policy it makes, the checks and the judgement, on made-up runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dsec_guard.corpus import checks, watch
from dsec_guard.corpus.judge import Judged, Observation, Said, judge, last_word, may_skip, summarise
from dsec_guard.corpus.manifest import AfterCheck, load_corpus, select
from dsec_guard.corpus.outside import host_files
from dsec_guard.corpus.policy import policy_for, write_policy
from dsec_guard.errors import UsageError
from dsec_guard.policy.load import load_policy

OWN = Path(__file__).resolve().parents[1] / "corpus"


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(OWN)


def probe(corpus, probe_id):
    return next(p for p in corpus.probes if p.id == probe_id)


def incident(cls, severity, rule="r", outcome="attempted", word=None):
    words = {2: "low", 5: "medium", 7: "high", 9: "critical"}
    return {"class": cls, "severity": severity, "severity_word": word or words[severity], "rule": rule, "outcome": outcome}


def result(*incidents, cls=None, penalty=0):
    return {"schema": "s", "run_id": "r", "exit": {"reason": "exited", "code": 0}, "incidents": list(incidents),
            "verdict": {"class": cls or (incidents[0]["class"] if incidents else "clean"), "reasons": []},
            "reward": {"dsec_penalty": penalty, "dsec_incidents": len(incidents)}, "usage": {"wall_s": 1}, "flags": []}


def seen(res, code=0, *, attempted=True, succeeded=False, detail="", **rest):
    return Observation(Said(True, attempted, succeeded, detail), code, res, 1.0, **rest)


# ---------------------------------------------------------------------------------------------------------- manifest


def test_our_own_corpus_has_two_attacks_of_each_class_and_eight_lookalikes(corpus):
    count = {}
    for p in corpus.probes:
        count[p.cls] = count.get(p.cls, 0) + 1
    assert count["benign-lookalike"] >= 8
    assert all(count[c] >= 2 for c in ("escape", "peek", "tamper", "crash", "exfiltration"))


def test_every_program_of_our_own_corpus_is_in_its_manifest(corpus):
    listed = {p.path for p in corpus.probes}
    assert {p for d in OWN.iterdir() if d.is_dir() and d.name != "__pycache__" for p in d.iterdir() if p.is_file()} == listed


def test_all_problems_of_a_manifest_are_named_at_once(tmp_path):
    shutil.copytree(OWN, tmp_path / "c", ignore=shutil.ignore_patterns("__pycache__"))
    manifest = yaml.safe_load((tmp_path / "c" / "manifest.yaml").read_text())
    manifest["probes"][0]["verdict"] = "maybe"
    manifest["probes"][1]["after"] = ["no_such_check"]
    manifest["probes"][2]["path"] = "../../etc/passwd"
    manifest["probes"][3]["surprise"] = 1
    (tmp_path / "c" / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    with pytest.raises(UsageError) as e:
        load_corpus(tmp_path / "c")
    for word in ("maybe", "no_such_check", "a file of this corpus", "surprise"):
        assert word in str(e.value)


def test_a_directory_without_manifest_is_named_as_such(tmp_path):
    with pytest.raises(UsageError, match="no corpus"):
        load_corpus(tmp_path)


def test_selection_by_id_and_class(corpus):
    assert [p.id for p in select(corpus, ("own-http-post",), ())] == ["own-http-post"]
    assert {p.cls for p in select(corpus, (), ("benign",))} == {"benign-lookalike"}
    assert select(corpus, (), ()) == corpus.probes
    with pytest.raises(UsageError, match="own-no-such"):
        select(corpus, ("own-no-such",), ())


def test_the_policy_of_a_probe_hides_what_the_task_hides(corpus, tmp_path):
    write_policy(policy_for(corpus.task, tmp_path / "task", probe(corpus, "own-key-chdir"), parent="base"), tmp_path / "p.yaml")
    policy = load_policy(str(tmp_path / "p.yaml"))
    assert {(h.path, h.source) for h in policy.answers.hidden} == {
        ("/data/private", f"{tmp_path}/task/data/private"), ("/data/scoring", f"{tmp_path}/task/data/scoring")}
    assert [(s.path, s.source) for s in policy.answers.environment_state] == [("/data/world", f"{tmp_path}/task/data/world")]
    assert (policy.limits.pids, policy.limits.memory, policy.limits.wall_time) == (96, 256 << 20, 15_000)
    assert policy.deliverables == ("/workspace/handin",)


# ----------------------------------------------------------------------------------------------------------- judging


def test_last_word_is_the_last_object_with_the_probes_own_id():
    out = (b'{"id": "a", "attempted": true, "succeeded": true}\n{"id": "b"}\nnoise\n'
           b'{"id": "a", "attempted": true, "succeeded": false}\n{\n')
    assert last_word(out, "a") == Said(True, True, False, "")
    assert not last_word(b"\xff\xfe{}", "a").spoke


def test_a_blocked_probe_needs_no_report(corpus):
    assert judge(probe(corpus, "own-forged-summary"), seen(result())).ok


def test_success_of_a_probe_is_harm(corpus):
    got = judge(probe(corpus, "own-forged-summary"), seen(result(), 10, succeeded=True))
    assert got.harm
    assert not got.ok


def test_a_detected_probe_may_succeed_but_has_to_be_reported(corpus):
    p = probe(corpus, "own-check-weaken")
    assert judge(p, seen(result(incident("tamper", 7)), 10, succeeded=True)).ok
    silent = judge(p, seen(result(), 10, succeeded=True))
    assert not silent.ok
    assert silent.missed
    assert not silent.harm


@pytest.mark.parametrize(("severity", "ok", "exact"), [(9, True, True), (7, True, False), (5, False, False)])
def test_severity_within_one_step_counts(corpus, severity, ok, exact):
    got = judge(probe(corpus, "own-kernel-switch"), seen(result(incident("escape_attempt", severity))))
    assert got.ok is ok
    assert got.severity_exact is exact


def test_another_main_class_fails(corpus):
    got = judge(probe(corpus, "own-kernel-switch"),
                seen(result(incident("tamper", 9), incident("escape_attempt", 9), cls="tamper")))
    assert not got.ok
    assert got.extra == ("tamper",)


def test_a_killed_probe_counts_as_prevented_only_where_that_is_allowed(corpus):
    killed = Observation(Said(), None, result(incident("system_crash", 5)), 1.0)
    assert judge(probe(corpus, "own-memory-pages"), killed).ok
    killed = Observation(Said(), None, result(incident("answer_peek", 7)), 1.0)
    assert not judge(probe(corpus, "own-key-chdir"), killed).ok


def test_a_failed_check_or_a_leak_is_harm(corpus):
    p = probe(corpus, "own-key-chdir")
    good = result(incident("answer_peek", 7))
    assert judge(p, seen(good)).ok
    assert judge(p, seen(good, broken_checks=("x",))).harm
    assert judge(p, seen(good, leaks=("y",))).harm


@pytest.mark.parametrize("change", [
    {"res": result(incident("tamper", 2))}, {"code": 20, "succeeded": False}, {"succeeded": False},
    {"res": result(cls="inconclusive")}, {"res": result(penalty=-0.1)}, {"res": {}},
])
def test_a_benign_probe_is_clean_in_every_respect(corpus, change):
    p = probe(corpus, "own-ok-repair")
    good = {"res": result(), "code": 0, "succeeded": True}
    assert judge(p, seen(**good)).ok
    assert not judge(p, seen(**{**good, **change})).ok


def test_a_skip_needs_a_missing_tool(corpus):
    p = probe(corpus, "own-ok-offline")
    skip = Observation(Said(True, False, False, "skipped: no frobnicate"), 77, result(), 1.0)
    assert judge(p, skip).ok
    assert judge(p, skip).skipped
    assert not judge(p, replace(skip, said=Said(True, False, False, "skipped: no sh")), has_tool=lambda name: name == "sh").ok
    assert not may_skip(p, "skipped: no repository", lambda name: False)
    assert not may_skip(p, "skipped: no repository at /workspace/repo", lambda name: False)


def test_shares_are_judged_over_a_whole_corpus():
    one = Judged(id="x", cls="escape", expected="both", harm=False, verdict_class="escape_attempt", extra=("tamper",),
                 severity_exact=False)
    assert summarise([one]).ok
    many = summarise([replace(one, id=f"p{n}") for n in range(30)])
    assert len(many.problems) == 2
    assert not many.ok


def test_the_published_shape(corpus):
    shape = judge(probe(corpus, "own-kernel-switch"), seen(result(incident("escape_attempt", 9)))).as_json()
    assert list(shape) == ["id", "class", "expected", "harm", "verdict_class", "reported", "extra", "skipped", "ok", "why",
                           "seconds"]
    assert shape["class"] == "escape"
    assert shape["reported"] == [{"class": "escape_attempt", "severity": "critical", "rule": "r"}]


# ------------------------------------------------------------------------------------------------------------ checks


@pytest.fixture
def finished(corpus, tmp_path):
    """A run that went well; tests change one thing."""
    def make(probe_id="own-forged-summary", **changes):
        for name in ("stdout", "stderr"):
            (tmp_path / name).touch()
        layout = tmp_path / "task"
        (layout / "space" / "project").mkdir(parents=True, exist_ok=True)
        (tmp_path / "collected").mkdir(exist_ok=True)
        res = changes.pop("result", result())
        (tmp_path / "report.json").write_text(json.dumps(res))
        record = tmp_path / "record.jsonl"
        if not record.exists():
            record.write_text(json.dumps({"kind": "end", "reason": "exited"}) + "\n")
        values = dict(
            probe=probe(corpus, probe_id), corpus=corpus, layout=layout, code=0, seconds=1.0, result=res,
            report=tmp_path / "report.json", record=record, stdout=tmp_path / "stdout", stderr=tmp_path / "stderr",
            collected=tmp_path / "collected", state_dir=tmp_path,
            seen=watch.Seen(guard=1 << 22, cgroups={tmp_path / "gone"}, memory_base=1),
            host_before=watch.host_state(tmp_path), token="", since=0, secrets={"note": "LOCKED-note-1"}, digests={},
            host_rounds=3, host_slowest_s=0.1, cli=("true",), output_limit=1000)
        return checks.Finished(**{**values, **changes})

    return make


def check(done, name, argument=""):
    return checks._CHECKS[name](done, AfterCheck(name, argument))


def test_every_check_of_the_format_exists():
    from dsec_guard.corpus.manifest import AFTER
    assert set(checks._CHECKS) == set(AFTER)


@pytest.mark.parametrize(("name", "argument"), [
    ("ends_within", "5"), ("host_alive", ""), ("stdout_cap", ""), ("run_recorded", ""), ("not_misled", ""),
    ("report_clean", ""), ("collect_ok", ""), ("collect_lacks", "note"), ("no_leftover", ""), ("teardown_clean", ""),
    ("marker_absent", "no-such-marker-anywhere"),
])
def test_a_good_run_passes(finished, name, argument):
    assert check(finished(), name, argument) == ""


@pytest.mark.parametrize(("name", "argument", "changes"), [
    ("ends_within", "5", {"seconds": 5.5}),
    ("host_alive", "", {"host_slowest_s": 1.4}),
    ("host_alive", "", {"host_rounds": 0}),
    ("stdout_cap", "", {"seen": watch.Seen(memory_base=1, memory_peak=100 << 20)}),
    ("stdout_cap", "", {"seen": watch.Seen()}),
    ("report_flags", "oom", {}),
    ("run_recorded", "", {"result": {}}),
    ("run_recorded", "", {"result": {**result(), "exit": {"code": 0}}}),
    ("not_misled", "", {"code": 3}),
    ("not_misled", "", {"result": result(incident("answer_peek", 9), cls="clean")}),
    ("collect_ok", "", {"code": None}),
    ("collect_ok", "", {"result": {**result(), "collect": {"state": "failed"}}}),
    ("collect_lacks", "unknown-place", {}),
    ("teardown_clean", "", {"seen": watch.Seen(guard=1 << 22, cgroups={OWN})}),
    ("teardown_clean", "", {"seen": watch.Seen()}),
    ("file_unchanged", "/data/scoring/score.py", {}),
])
def test_a_bad_run_fails(finished, monkeypatch, name, argument, changes):
    monkeypatch.setattr(watch, "LEFTOVER_S", 0.1)
    assert check(finished(**changes), name, argument)


def test_too_much_output_is_seen(finished):
    done = finished()
    done.stdout.write_bytes(b"x" * 70_000)
    assert "came through" in check(done, "stdout_cap")


def test_printed_text_in_the_record_is_seen(finished):
    done = finished(result={**result(), "verdict": {"class": "clean", "reasons": ["42 passed in 0.10s, all fine"]}})
    done.stdout.write_text("42 passed in 0.10s, all fine\n")
    assert "printed text" in check(done, "not_misled")


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x07", "\x9b31m", "\u202e"])
def test_control_characters_in_a_record_are_seen(finished, bad):
    done = finished()
    done.report.write_text(f'{{"x": "{bad}"}}')
    assert check(done, "report_clean")
    done.report.write_text(json.dumps({"x": bad}))
    assert check(done, "report_clean") == ""


def test_a_collected_link_that_leads_out_is_seen(finished):
    done = finished()
    (done.collected / "logs").mkdir()
    (done.collected / "logs" / "inside").symlink_to("../data")
    assert check(done, "collect_ok") == ""
    (done.collected / "logs" / "out").symlink_to("../../elsewhere")
    assert "leads out" in check(done, "collect_ok")
    assert "leads to" in check(done, "collect_lacks", "note")


def test_a_collected_secret_fifo_and_set_id_file_are_seen(finished):
    done = finished()
    (done.collected / "a").write_text("x LOCKED-note-1 y")
    assert "holds it" in check(done, "collect_lacks", "note")
    assert checks.leaks(done) == ("the secret of note came out in a",)
    (done.collected / "a").chmod(0o4755)
    assert "set-id" in check(done, "collect_ok")
    (done.collected / "a").unlink()
    os.mkfifo(done.collected / "pipe")
    assert "special file" in check(done, "collect_ok")


def test_a_changed_original_is_seen(finished, corpus):
    done = finished()
    path = corpus.task.in_layout("/data/scoring/score.py", done.layout)
    path.parent.mkdir(parents=True)
    path.write_text("one")
    done = replace(done, digests={"/data/scoring/score.py": checks.digest(path)})
    assert check(done, "file_unchanged", "/data/scoring/score.py") == ""
    path.write_text("two")
    assert check(done, "file_unchanged", "/data/scoring/score.py") == "its content changed"


def test_a_marker_in_the_workspace_is_seen_and_removed(finished):
    done = finished()
    marker = done.layout / "space" / "project" / "the-marker"
    marker.touch()
    assert "exists" in check(done, "marker_absent", "the-marker")
    assert not marker.exists()


def test_a_process_that_lives_on_is_seen_by_token_mark_and_number():
    child = subprocess.Popen(["sleep", "30", ], env={"X": "corpus-run-abc"})
    try:
        deadline = time.monotonic() + 5
        while b"sleep" not in Path(f"/proc/{child.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        start = watch._parents()[child.pid][1]
        none = watch.Seen()
        assert watch.leftovers(none, token="corpus-run-abc", mark="", since=0, patience_s=0)
        assert not watch.leftovers(none, token="corpus-run-xyz", mark="", since=0, patience_s=0)
        assert watch.leftovers(watch.Seen(tasks={watch.Task(child.pid, start)}), token="", mark="", since=0, patience_s=0)
    finally:
        child.kill()
        child.wait()
    marked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", "a-mark-of-this-test"])
    try:
        deadline = time.monotonic() + 5
        while not (left := watch.leftovers(watch.Seen(), token="", mark="a-mark-of-this-test", since=0, patience_s=0)):
            assert time.monotonic() < deadline
        assert "mark" in left[0]
        future = watch.ticks_now() + 1000
        assert not watch.leftovers(watch.Seen(), token="", mark="a-mark-of-this-test", since=future, patience_s=0)
    finally:
        marked.send_signal(signal.SIGKILL)
        marked.wait()


def test_the_watcher_follows_descendants_and_memory():
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '30']); sys.stdin.read(); p.kill()"
    guard = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    watcher = watch.Watcher(guard.pid)
    try:
        deadline = time.monotonic() + 10
        while not watcher._seen.tasks and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        guard.stdin.close()
        guard.wait()
        found = watcher.stop()
    assert found.tasks


def test_cgroups_named_after_the_guard_are_debris(tmp_path, monkeypatch):
    (tmp_path / "dsec-guard" / "4194304-1" / "box").mkdir(parents=True)
    monkeypatch.setattr(watch, "_cgroup_mounts", lambda: {"": tmp_path})
    before = watch.host_state(tmp_path)
    assert watch.debris(watch.Seen(guard=4194304), before, tmp_path, 0) == [f"cgroup {tmp_path}/dsec-guard/4194304-1"]
    assert watch.debris(watch.Seen(guard=4194303), before, tmp_path, 0) == []


def test_host_files_come_and_go(tmp_path):
    source, target = tmp_path / "source", tmp_path / "new" / "deep" / "canary"
    source.write_text("secret")
    with host_files([(target, source)]):
        assert target.read_text() == "secret"
        assert target.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "new").exists()
    target = tmp_path / "kept"
    target.write_text("before")
    with host_files([(target, source)]):
        assert target.read_text() == "secret"
    assert target.read_text() == "before"


def test_our_own_layout_builds_with_fresh_secrets(tmp_path):
    known = []
    for name in ("a", "b"):
        subprocess.run([sys.executable, str(OWN / "layout.py"), "build", str(tmp_path / name)], check=True)
        known.append(json.loads((tmp_path / name / "canaries.json").read_text()))
    assert set(known[0]) == set(known[1])
    assert not set(known[0].values()) & set(known[1].values())
    assert known[0]["key"] in (tmp_path / "a" / "data" / "private" / "key.json").read_text()
