"""State machine that decides if one member of a store counts as slow. It reads no clock and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farpool._native import LATE_ANSWER_S, LATE_ANSWERS

__all__ = ["Pace", "limit_of"]

_TIMES_MEDIAN = 4.0
"""Times the median of the other members that a member may take. Nodes in other racks or zones take two or three times
as long as the nearest one, which is no reason to leave them out."""
_SHARE_TO_RECOVER = 0.5
"""Share of its limit within which an answer of a slow member is prompt."""
_MIDDLE = 0.125
"""Prompt probes as which one between this share and the limit counts. A member that stays there recovers, but late."""
_UNDONE = 4
"""Number of prompt probes that a late one undoes. So a member recovers if fewer than a fifth of its probes are late,
which also happens to prompt nodes when this host is busy."""
_PROBES_MAX = 16 * LATE_ANSWERS
"""Largest number of prompt probes that a member needs, about a minute. It needs twice as many at each relapse."""
_RELAPSE_S = 60.0
"""Seconds after its recovery in which a member that is slow again has had a relapse: its probes are prompt, but its
other answers are not."""


class Pace:
    """Decides if one member counts as slow, from the times of its answers and of the other members.

    Attributes
    ----------
    is_slow : bool
        True while the member counts as slow.
    seconds : float
        How long the answers took at least for which the member counts as slow; 0.0 if it does not.
    times_slow : int
        How often the member has become slow.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self.seconds = 0.0
        self.times_slow = 0
        self._needed = LATE_ANSWERS
        self._prompt = 0.0
        self._recovered: float | None = None

    @property
    def is_recovering(self) -> bool:
        """True if the last probes of a slow member were prompt."""
        return self._prompt > 0

    def late(self, seconds: float, others: Sequence[float], now: float) -> bool:
        """Record that the member was late for many answers in a row; return True if it counts as slow from now on.

        Parameters
        ----------
        seconds : float
            Its smallest smoothed time during these answers.
        others : sequence of float
            Smoothed times of the other members. Without them nothing says that the member itself is slow.
        now : float
            Time by the monotonic clock.
        """
        if self.is_slow or not others or seconds <= limit_of(others):
            return False
        relapsed = self._recovered is not None and now - self._recovered < _RELAPSE_S
        self._needed = min(2 * self._needed, _PROBES_MAX) if relapsed else LATE_ANSWERS
        self._prompt = 0.0
        self.is_slow = True
        self.seconds = seconds
        self.times_slow += 1
        return True

    def probed(self, seconds: float, others: Sequence[float], now: float) -> bool:
        """Record the time of a probe, infinite if it failed; return True if the member has recovered with it."""
        if not self.is_slow:
            return False
        limit = limit_of(others) if others else math.inf
        if seconds > limit:
            self._prompt = max(0.0, self._prompt - _UNDONE)
        else:
            self._prompt += 1 if not others or seconds < _SHARE_TO_RECOVER * limit else _MIDDLE
        if self._prompt < self._needed:
            return False
        self.is_slow = False
        self.seconds = 0.0
        self._recovered = now
        return True


def limit_of(others: Sequence[float]) -> float:
    """Return the seconds above which an answer is late, from the times of the other members.

    Of an even number of them the larger one in the middle counts: at least half of the others have to be faster.
    """
    return max(_TIMES_MEDIAN * sorted(others)[len(others) // 2], LATE_ANSWER_S)
