"""The interface of detectors that need state, and their registry. Rules in YAML go through the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dsec_guard.detect.view import View
from dsec_guard.model import Event, Finding


class Detector(Protocol):
    """One box's instance: pure functions of the events so far, no I/O, no clock."""

    def feed(self, event: Event, view: View) -> Iterable[Finding]:
        """Called for each watched event, in order, after `view` has taken it in."""
        ...

    def finish(self, view: View) -> Iterable[Finding]:
        """Called once, after the last event."""
        ...


@dataclass(frozen=True)
class DetectorSpec:
    """rules: ids of the findings it may make. watches: event kinds; syscalls: names for kind `syscall`, empty = all.

    needs: evidence sources, each item a tuple of alternatives.
    """

    name: str
    rules: tuple[str, ...]
    watches: frozenset[str]
    syscalls: frozenset[str]
    needs: tuple[tuple[str, ...], ...]
    make: Callable[[], Detector]


REGISTRY: dict[str, DetectorSpec] = {}

D = TypeVar("D", bound=type)


def detector(
    *, rules: tuple[str, ...], watches: tuple[type[Event], ...], syscalls: Iterable[str] = (),
    needs: tuple[tuple[str, ...], ...],
) -> Callable[[D], D]:
    """Class decorator: register a stateful detector under its qualified name."""

    def register(cls: D) -> D:
        name = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
        kinds = frozenset(event.kind for event in watches)
        REGISTRY[name] = DetectorSpec(name, rules, kinds, frozenset(syscalls), needs, cls)
        return cls

    return register
