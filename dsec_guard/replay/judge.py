"""Judge a recording again: the same verdict under the same policy and detectors, or what another policy would say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_guard.detect.engine import Completeness, DetectorSet
from dsec_guard.detect.facts import facts_from_record
from dsec_guard.errors import RecordError
from dsec_guard.incident.result import verdict_json
from dsec_guard.replay.record import incident_record
from dsec_guard.scoring import Judgement, judge_events

if TYPE_CHECKING:
    from dsec_guard.policy.schema import Policy
    from dsec_guard.replay.record import Recording


@dataclass(frozen=True)
class Rejudged:
    """judgement: the new one. differences: one line for each thing that is not as recorded, empty when all agrees."""

    judgement: Judgement
    differences: tuple[str, ...]


def rejudge(recording: Recording, policy: Policy, detectors: DetectorSet) -> Rejudged:
    """Judge the recorded events and compare with what was recorded.

    An unfinished or truncated recording is judged as one whose events were lost: it cannot be clean. Raises:
    RecordError when the header's facts do not fit this version.
    """
    try:
        facts = facts_from_record(recording.header["facts"])
        started_ns = int(recording.header["started_ns"])
        completeness = _completeness(recording)
    except (KeyError, TypeError, ValueError) as err:
        raise RecordError(f"the recording's header does not fit this version: {type(err).__name__}: {err}", line=1) from err
    judgement = judge_events(recording.events, facts, policy, detectors, completeness)
    incidents = [incident_record(i, started_ns=started_ns) for i in judgement.incidents]
    return Rejudged(judgement, tuple(_differences(recording, incidents, judgement)))


def _completeness(recording: Recording) -> Completeness:
    if recording.verdict is None or not recording.finished:
        return Completeness(guard_failed="the recording ends before the run did")
    recorded: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                                for key, value in recording.verdict["completeness"].items()}
    completeness = Completeness(**recorded)
    if recording.truncated:
        lost = {**completeness.lost, "record": recording.truncated}
        completeness = dataclasses.replace(completeness, lost=lost)
    return completeness


def _differences(recording: Recording, incidents: list[dict[str, Any]], judgement: Judgement) -> list[str]:
    if recording.verdict is None or recording.reward is None:
        return ["nothing was recorded to compare with: the run did not finish"]
    result: list[str] = []
    was = {str(i["id"]): i for i in recording.incidents}
    now = {str(i["id"]): i for i in incidents}
    result += [f"gone: {_name(was[i])}" for i in was if i not in now]
    result += [f"new: {_name(now[i])}" for i in now if i not in was]
    for key in was:
        if key in now:
            result += _changed(_name(now[key]), was[key], now[key])
    result += _changed("verdict", recording.verdict, verdict_json(judgement.verdict))
    result += _changed("reward", recording.reward, judgement.reward.as_dict())
    return result


def _changed(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {key}: recorded {was.get(key)!r}, now {value!r}" for key, value in now.items() if was.get(key) != value]


def _name(incident: Mapping[str, Any]) -> str:
    return f"{incident['rule']} {incident['outcome']} {incident['object']}".rstrip()
