"""Calm: while everything fits and nothing has had to leave for a while, accesses need no bookkeeping.

Pins, the tape and the keys of eviction are there to decide what leaves. Where nothing does, an access only has to know
that its blocks stay where they are until it has ended. So accesses *pass*: they are counted in and out. Whoever changes
the arena (any access that cannot pass, a change of the budget) first waits until nobody is inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.pager import Pager
from farpool.use import Use

__all__ = ["Calm"]

_LONG_ENOUGH = 256
"""Accesses without an eviction. What is accessed meanwhile is not on the tape, so it is not begun lightly."""


class Calm:
    """Lets accesses pass. Its methods are called with the pool's lock held.

    Attributes
    ----------
    open : bool
        Whether accesses may pass now.
    inside : int
        How many have passed and not ended.
    """

    __slots__ = ("_accesses", "_evictions", "_pager", "inside", "open")

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._evictions = 0
        self._accesses = 0
        self.open = False
        self.inside = 0

    def observe(self) -> None:
        """An access that did not pass has been granted."""
        counters = self._pager.counters
        if counters.evictions != self._evictions or not self._pager.still:
            self._evictions = counters.evictions
            self._accesses = 0
        else:
            self._accesses += 1
        self.open = self._accesses > _LONG_ENOUGH

    def end(self) -> None:
        """Nobody may pass until so many accesses have been calm again."""
        self.open = False
        self._accesses = 0

    def enter(self, uses: Sequence[Use]) -> tuple[int, ...] | None:
        """Let an access pass; returns where its uses begin in the arena, None if it cannot."""
        spans = []
        for use in uses:
            if use.storage.loose or use.stop <= use.start:
                return None
            spans.append(use.span())
        offsets = self._pager.touch(spans)
        if offsets is not None:
            self.inside += 1
        return offsets
