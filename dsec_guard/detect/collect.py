"""What was left for whoever collects the results: links that lead out, and traps for walkers."""

from __future__ import annotations

from collections.abc import Iterable

from dsec_guard.detect.base import detector
from dsec_guard.detect.language import shown
from dsec_guard.detect.paths import below_any, glob, normalise
from dsec_guard.detect.view import View
from dsec_guard.model import Class, Event, FileChanged, Finding, Outcome, OutputRefused

#: Targets that stand for the whole tree: a walker that follows never ends.
_ROOTS = frozenset({"/", "/proc", "/sys", "/dev"})


@detector(rules=("escape.link_out", "crash.link_trap"), watches=(FileChanged, OutputRefused), needs=(("inspection", "guard"),))
class LinkOut:
    """A symbolic link in what is collected that leads out of it: followed by the collector, it reads the host.

    A link to the root of the tree is a trap for walkers. Links to installed programs (virtual environments) are ordinary,
    as are links within the workspace. Misses: links inside archives, which the collector does not unpack.
    """

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        if isinstance(event, FileChanged):
            if event.ftype != "symlink" or event.change == "removed" or not _collected(event.path, view):
                return ()
        elif not isinstance(event, OutputRefused) or event.step != "collect" or not event.link_target:
            return ()
        target = resolve(event.path, event.link_target)
        facts = view.facts
        inside = (facts.workspace, facts.home, facts.repository, *facts.temporary)
        if target in _ROOTS:
            rule, cls, severity = "crash.link_trap", Class.SYSTEM_CRASH, 3
            what = "the root of the tree: a collector that follows it never ends"
        elif below_any(target, [p for p in inside if p]) or below_any(target, facts.tool_dirs):
            return ()
        else:
            rule, cls, severity = "escape.link_out", Class.ESCAPE_ATTEMPT, 7
            what = "outside what is collected: a collector that follows it reads the host's file"
        return (Finding(
            rule=rule, cls=cls, outcome=Outcome.ATTEMPTED, severity=severity, evidence=(event,), object=event.path,
            references=("ATT&CK T1611", "ATT&CK T1083"),
            reason=(f"{shown(event.path)} is a link to {shown(event.link_target)}, which is {what}. The guard never follows "
                    "links; it found this one by looking at the link itself."),
            allow_hint="deliverables: without this path",
        ),)

    def finish(self, view: View) -> Iterable[Finding]:
        return ()


def _collected(path: str, view: View) -> bool:
    return any(glob(p, path) or below_any(path, (p.removesuffix("/**"),)) for p in view.facts.deliverables)


def resolve(path: str, target: str) -> str:
    """Where a link's text leads, without looking: relative to the link's directory, `..` beyond `/` stays at `/`."""
    return normalise(target if target.startswith("/") else path.rpartition("/")[0] + "/" + target)
