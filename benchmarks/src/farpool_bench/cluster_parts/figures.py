"""Figures of a part: each is a number with the target that it is to reach."""

from __future__ import annotations

from farpool_bench.harness import Row


def at_least(what: str, value: float, bound: float, unit: str = "") -> Row:
    """A number that should be at least `bound`."""
    return Row(what=what, value=value, unit=unit, target=f"≥ {bound:,g}", met=value >= bound)


def at_most(what: str, value: float, bound: float, unit: str = "") -> Row:
    """A number that should be at most `bound`."""
    return Row(what=what, value=value, unit=unit, target=f"≤ {bound:,g}", met=value <= bound)


def noted(what: str, value: float, unit: str = "") -> Row:
    """A number without a target, which explains another one."""
    return Row(what=what, value=value, unit=unit, target=None, met=None)


def skipped(reason: str) -> Row:
    """The row of a part that cannot be measured here."""
    return Row(figures=(), skipped=reason)
