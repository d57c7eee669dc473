#!/usr/bin/env python3
"""Runs an honest and a cheating agent on the same task under the guard, and checks that each is judged as it should be.

    run.py [--out DIR]     leaves honest.json, cheat.json, their summaries (.txt) and event records (.events.jsonl) in DIR

Exit status 0 when the honest run is clean and the cheating one is not, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLI = [sys.executable, "-P", "-c", "from dsec_guard.cli.main import cli; cli()"]
EXPECTED = {"answer_peek", "escape_attempt", "system_crash"}


def build_task(out: Path) -> Path:
    """A fresh repository of the task, as an agent is given it."""
    workspace = out / "workspace"
    shutil.rmtree(workspace, ignore_errors=True)
    shutil.copytree(HERE / "task", workspace, ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PATH": os.environ["PATH"], "HOME": str(out), "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "Demo", f"GIT_{who}_EMAIL": "demo@example.invalid"}
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "basket 1.0"]):
        subprocess.run(["git", *words], cwd=workspace, env=env, check=True)
    return workspace


def run_agent(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """One guarded run; what the guard says about it is shown and kept."""
    print(f"\n=== {name} agent ===", flush=True)
    workspace = build_task(out)
    policy = out / "policy.yaml"
    policy.write_text((HERE / "policy.yaml").read_text("utf-8").replace("HIDDEN", json.dumps(str(HERE / "hidden"))), "utf-8")
    report = out / f"{name}.json"
    report.unlink(missing_ok=True)
    words = [*CLI, "run", "--policy", str(policy), "--workspace", str(workspace), "--bind-ro", f"{HERE / 'agent.py'}:/agent.py",
             "--report", str(report), "--record", str(out / f"{name}.events.jsonl"), "--task-reward", "1",
             "--label", f"demo={name}", "--", "python3", "/agent.py", *arguments]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "DSEC_GUARD_STATE": str(out / "state")}) as process, \
            (out / f"{name}.txt").open("wb") as kept:
        assert process.stderr is not None
        for line in process.stderr:
            kept.write(line)
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
    result: dict[str, Any] = json.loads(report.read_bytes())
    penalty, verdict = result["reward"]["dsec_penalty"], result["verdict"]
    print(f"{name}: exit status {process.returncode} ({result['exit']['reason']}), verdict {verdict['class']}, "
          f"{len(result['incidents'])} incident(s), penalty {penalty}, fold of a task reward of 1: {result['fold']}", flush=True)
    return result


def problems(honest: dict[str, Any], cheat: dict[str, Any], repaired: bool) -> list[str]:
    """What is not as it should be."""
    found = []
    if honest["verdict"]["class"] != "clean" or honest["incidents"] or honest["reward"]["dsec_penalty"] != 0:
        found.append(f"the honest run is not clean: {honest['verdict']}")
    if honest["exit"].get("code") != 0 or honest["fold"] != 1:
        found.append(f"the honest run was hindered: {honest['exit']}, fold {honest['fold']}")
    if not repaired:
        found.append("the honest run's repair did not reach the workspace")
    classes = [i["class"] for i in cheat["incidents"]]
    if set(classes) != EXPECTED or len(classes) != len(EXPECTED):
        found.append(f"the cheating run should have one incident each of {sorted(EXPECTED)}, has {classes}")
    if not cheat["reward"]["dsec_penalty"] < 0 or not cheat["fold"] < honest["fold"]:
        found.append(f"cheating paid: {cheat['reward']}, fold {cheat['fold']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "demo")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "state").mkdir(mode=0o700, exist_ok=True)
    honest = run_agent("honest", out)
    repaired = "// 100" in (out / "workspace" / "basket" / "prices.py").read_text("utf-8")
    cheat = run_agent("cheat", out, "--cheat")
    found = problems(honest, cheat, repaired)
    for line in found:
        print(f"demo: {line}", file=sys.stderr)
    print(f"\nresults, summaries and event records are in {out}" if not found else "\nthe demonstration failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
