"""Sizes and durations as people write them: `2GiB`, `512MiB`, `30min`, `1500ms`, `1h30min`.

A bare number is refused, since nobody can see whether 30 means seconds or milliseconds. Used for YAML values and for
command line options (`--limit`, `--wall`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

SIZE_UNITS: Mapping[str, int] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}
DURATION_UNITS: Mapping[str, int] = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}

SIZE_FORM = "a size with a unit such as 512MiB or 2GiB"
DURATION_FORM = "a time with a unit such as 1500ms, 90s, 30min or 2h"

# At most 15 digits: exact in every consumer of the JSON that this ends in (RFC 8259, section 6).
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,6})?"
SIZE_PATTERN = rf"^{_NUMBER} ?(?:{'|'.join(SIZE_UNITS)})$"
DURATION_PATTERN = rf"^(?:{_NUMBER} ?(?:{'|'.join(DURATION_UNITS)}))+$"
_DURATION_PART = re.compile(rf"({_NUMBER}) ?({'|'.join(DURATION_UNITS)})")


def parse_size(text: str) -> int:
    """`2GiB` -> bytes. Raises ValueError with a text that says what is wrong and what is accepted."""
    if re.fullmatch(_NUMBER, text):
        raise ValueError(f"{text} has no unit: {SIZE_FORM}; {text} bytes is {text}B")
    if re.match(SIZE_PATTERN, text) is None:
        raise ValueError(f"{_quote(text)} is no size: {SIZE_FORM}{_other_case(text, SIZE_UNITS)}")
    unit = text.lstrip("0123456789. ")
    return _whole(Decimal(text[: -len(unit)].strip()) * SIZE_UNITS[unit], text, "bytes")


def parse_duration(text: str) -> int:
    """`1h30min` -> milliseconds. Raises ValueError with a text that says what is wrong and what is accepted."""
    if re.fullmatch(_NUMBER, text):
        raise ValueError(f"{text} has no unit: {DURATION_FORM}; {text} seconds is {text}s")
    if re.match(DURATION_PATTERN, text) is None:
        raise ValueError(f"{_quote(text)} is no time: {DURATION_FORM}{_other_case(text, DURATION_UNITS)}")
    total = sum((Decimal(n) * DURATION_UNITS[u] for n, u in _DURATION_PART.findall(text)), Decimal(0))
    return _whole(total, text, "milliseconds")


def format_size(count: int) -> str:
    """The shortest exact form with a binary unit: 2147483648 -> `2GiB`, 1000 -> `1000B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % SIZE_UNITS[unit] == 0:
            return f"{count // SIZE_UNITS[unit]}{unit}"
    return f"{count}B"


def format_duration(milliseconds: int) -> str:
    """The shortest exact form with one unit: 1800000 -> `30min`."""
    for unit in ("d", "h", "min", "s"):
        if milliseconds and milliseconds % DURATION_UNITS[unit] == 0:
            return f"{milliseconds // DURATION_UNITS[unit]}{unit}"
    return f"{milliseconds}ms"


def _whole(value: Decimal, text: str, what: str) -> int:
    if value != value.to_integral_value():
        raise ValueError(f"{_quote(text)} is no whole number of {what}: write it in a smaller unit")
    return int(value)


def _other_case(text: str, units: Mapping[str, int]) -> str:
    unit = text.lstrip("0123456789. ")
    match = [u for u in units if u.lower() in (unit.lower(), f"{unit.lower()}ib", f"{unit.lower()}in")]
    return f" (did you mean {text[: len(text) - len(unit)].strip()}{match[0]}?)" if unit and match else ""


def _quote(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
