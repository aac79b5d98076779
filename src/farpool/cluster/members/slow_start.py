"""Slow start: an empty member that joins a pool begins with a part of its weight, which grows in steps.

With its full weight from the start, the member would get its whole share of the new objects at once, next to members
that are full and whose programs already know them.
"""

from __future__ import annotations

__all__ = ["STEPS", "step_of", "weight_at"]

FIRST_PART = 0.1
"""Part of the full weight with which an empty member begins."""
GROWTH = 1.6
"""Factor between the weights of two steps."""
STEPS = 5
"""Number of steps until the member has its full weight: the smallest N with ``FIRST_PART * GROWTH**N >= 1``."""


def weight_at(full: float, step: int) -> float:
    """Return a member's weight at a step, from 0 to `STEPS`, if its full weight is `full`."""
    return full if step >= STEPS else full * FIRST_PART * GROWTH**step


def step_of(weight: float, full: float) -> int:
    """Return the step from which a member goes on that was stopped with `weight` of its `full` weight."""
    steps = [step for step in range(STEPS + 1) if weight_at(full, step) <= weight]
    # A weight below the first step is of an earlier release, or a person wrote it.
    return max(steps, default=0)
