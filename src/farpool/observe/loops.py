"""Finds a loop in a sequence: the period at which the sequence repeats itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

__all__ = ["Loop", "find_loop"]

# We look for equal runs of this many entries, because a single entry may occur often within one turn.
_CONTEXT = 3
_CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop in a sequence. One turn of the loop is one repetition of the same entries.

    Attributes
    ----------
    period : int
        Number of entries in one turn.
    turns : int
        Number of turns, including the first one.
    repeated : float
        Share of the entries after the first turn that equal the entry one period earlier.
    """

    period: int
    turns: int
    repeated: float


def find_loop(entries: Sequence[int]) -> Loop | None:
    """Find the period at which the largest number of entries equal the entry one period before them.

    If several periods are equally good, the result has the shortest of them. If a loop contains inner loops, the result
    is an inner loop while the outer loop has been repeated only a few times. The result becomes the outer loop once
    more entries repeat at its period than at any inner loop's period.

    Returns
    -------
    Loop or None
        None if no sequence of three entries occurs twice.
    """
    distances: Counter[int] = Counter()
    latest: dict[tuple[int, ...], int] = {}
    for position, context in enumerate(zip(*(entries[start:] for start in range(_CONTEXT)), strict=False)):
        before = latest.get(context)
        if before is not None:
            distances[position - before] += 1
        latest[context] = position
    best: tuple[int, int] | None = None
    # Each candidate costs a pass over the whole sequence, so we try only the most frequent distances.
    for period, _ in distances.most_common(_CANDIDATES):
        equal = sum(map(eq, entries[period:], entries))
        if best is None or (equal, -period) > best:
            best = equal, -period
    if best is None:
        return None
    equal, period = best[0], -best[1]
    return Loop(period, equal // period + 1, equal / (len(entries) - period))
