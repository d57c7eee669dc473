"""`dsec-guard judge`: a recording again, under the same or another policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dsec_guard.cli.options import guard_errors, write_stdout
from dsec_guard.model import printable

EXIT_DIFFERS = 1


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--policy", "policy_name", metavar="NAME|FILE", help="Judge under this policy instead of the recorded one.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON on stdout.")
@guard_errors
def judge(file: Path, policy_name: str | None, as_json: bool) -> None:
    """Judge the recording FILE again and compare. Exit status: 0 as recorded, 1 it differs, 125 it cannot be judged."""
    from dsec_guard.detect.engine import DetectorSet
    from dsec_guard.incident.result import incident_json, to_bytes, verdict_json
    from dsec_guard.policy.data import data_dir
    from dsec_guard.policy.load import load_policy
    from dsec_guard.replay.judge import rejudge
    from dsec_guard.replay.record import read_record

    recording = read_record(file)
    policy = load_policy(policy_name) if policy_name else recording.policy()
    detectors = DetectorSet.load(data_dir("detectors"))
    again = rejudge(recording, policy, detectors)
    judgement = again.judgement
    same_detectors = detectors.digest == dict(recording.header.get("detectors", {})).get("digest")
    if as_json:
        started_ns = int(recording.header["started_ns"])
        write_stdout(to_bytes({
            "schema": "dsec-guard/judgement/v1", "run_id": recording.header.get("run_id"),
            "policy": {"name": policy.name, "digest": policy.digest},
            "detectors": {"digest": detectors.digest, "as_recorded": same_detectors},
            "finished": recording.finished, "events": len(recording.events),
            "incidents": [incident_json(i, started_ns=started_ns) for i in judgement.incidents],
            "verdict": verdict_json(judgement.verdict), "reward": judgement.reward.as_dict(),
            "differences": list(again.differences),
        }))
    else:
        verdict = verdict_json(judgement.verdict)
        lines = [f"{verdict['class']} {verdict['outcome'] or ''}".rstrip()
                 + f", severity {verdict['severity']} ({verdict['severity_word']}), penalty {judgement.reward.penalty:g}, "
                   f"{len(judgement.incidents)} incidents in {len(recording.events)} events"]
        lines += [f"  {i.severity:>2} {i.rule} {i.outcome.value} {json.dumps(i.object)}" for i in judgement.incidents]
        if not same_detectors:
            lines.append("the detectors are not those of the recording")
        lines += [f"differs: {d}" for d in again.differences] or ["as recorded"]
        write_stdout("".join(printable(line) + "\n" for line in lines).encode("utf-8", "replace"))
    sys.exit(EXIT_DIFFERS if again.differences else 0)
