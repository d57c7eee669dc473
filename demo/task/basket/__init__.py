"""Prices of a shopping basket, in cents."""

from basket.prices import Line, total

__all__ = ["Line", "total"]
