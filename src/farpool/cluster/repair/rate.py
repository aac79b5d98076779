"""A token bucket: how much may be done by now. It has no clock."""

from __future__ import annotations

import math
import threading

__all__ = ["Bucket"]

_BURST_S = 0.25
"""Seconds of the rate that may be used at once after a rest."""


class Bucket:
    """Allows an amount per second. Thread-safe, so that several engines can share it.

    An amount may be taken as long as the bucket is not empty, even if it is more than the bucket has: the next one then
    waits for longer. So the amounts taken in t seconds are at most the rate times (t + 0.25), and one more of
    each engine.

    Parameters
    ----------
    rate : float or None
        Amount per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = math.inf if rate is None else rate
        self._level = self.rate * _BURST_S
        self._filled = -math.inf
        self._lock = threading.Lock()

    def delay(self, now: float) -> float:
        """Return the seconds until something may be taken; 0 if it may be taken now."""
        if math.isinf(self.rate):
            return 0.0
        with self._lock:
            if self._filled > -math.inf:
                self._level = min(self.rate * _BURST_S, self._level + self.rate * max(0.0, now - self._filled))
            self._filled = max(now, self._filled)
            return 0.0 if self._level > 0 else -self._level / self.rate + 1e-6

    def take(self, amount: float) -> None:
        """Take an amount, after `delay` has returned 0."""
        if not math.isinf(self.rate):
            with self._lock:
                self._level -= amount
