"""Lines of a basket and their sum."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """price: cents for one piece. discount: percent off, 0 to 100."""

    name: str
    price: int
    pieces: int = 1
    discount: int = 0


def total(lines):
    """The sum in cents; each line is rounded down to whole cents."""
    return sum(line.price * line.pieces * (100 - line.discount) // 10 for line in lines)
