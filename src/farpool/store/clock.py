"""Generations: a hybrid logical clock.

Close to the time of day, so that programs that know nothing of each other agree on what is newer; and above everything
that this program has met, so that what it publishes next is newer even if its clock is behind.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

__all__ = ["GenerationClock"]

_RANDOM_BITS = 12


class GenerationClock:
    """Hands out generations, each above the one before. Thread-safe.

    Parameters
    ----------
    microseconds : callable
        The time of day.
    seed : int or None
        Of the random bits; None for one from the system.
    """

    def __init__(
        self, microseconds: Callable[[], int] = lambda: time.time_ns() // 1000, seed: int | None = None
    ) -> None:
        self._microseconds = microseconds
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._highest = 0

    def next(self) -> int:
        """A generation above all that were handed out or met."""
        with self._lock:
            # Random bits also above what was met: two programs that have met the same do not choose the same next.
            ticks = max(self._microseconds(), (self._highest >> _RANDOM_BITS) + 1)
            self._highest = ticks << _RANDOM_BITS | self._random.getrandbits(_RANDOM_BITS)
            return self._highest

    def observe(self, generation: int) -> None:
        """A node knows this generation."""
        with self._lock:
            self._highest = max(self._highest, generation)
