"""Credit: fetching ahead has to pay for itself.

A fetch gains the time in which, meanwhile, the program computes or other blocks are written back; fetched on demand
it would be waited for. Against that stands the room that lies ready, which others have to do without: in each turn
of a loop as many bytes more are fetched. And a block that leaves without having been accessed costs several times
its transfer: the link was busy with it, and what it pushed out, and what left early because the future looked
otherwise, comes back.

While the balance is positive, fetching ahead goes on. When it is used up, the pool fetches on demand until there is
evidence: fetches that were foretold, and waited for although the program had computed before them. Each time that
the evidence was misleading, twice as much is asked for. So a program that becomes predictable is found out, and one
that never does pays next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Busy", "Credit", "Rate"]

_EVIDENCE = 4
"""Of what could have been gained, this fraction is taken for gained."""
_STAKE = 2
"""The balance must cover what lies ready this many times."""
_LOSS = 8
"""What a block fetched in vain costs, in transfers of it. With less, programs that branch lose more than they gain."""
_MOST_PATIENCE = 64
_REMEMBERED = 4096
"""Ends of busy times."""


class Credit:
    """An account in bytes: time times the link's rate.

    Parameters
    ----------
    capacity : int
        Bytes of the arena.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._balance = 0.0
        self._patience = 1
        self._usual = 0.0
        """Share of a fetch on demand beside which others are written back: what fetching ahead does not gain."""
        self.active = False
        """Whether fetching ahead is worth it."""
        self.ample = False
        """Whether it has gained so much that the arena may be filled anew for its sake."""

    def foretold(self, nbytes: float, enough: int) -> None:
        """These bytes could have been fetched ahead; `enough` bytes may be at stake when it is tried."""
        if not self.active:
            self._balance += nbytes / _EVIDENCE
            self.active = self._balance >= _STAKE * enough * self._patience

    def fetched(self, nbytes: int, computing: float, writing: float, *, ahead: bool) -> None:
        """A fetch has ended; these shares of it ran while the program computed, and while others were written back."""
        if not ahead:
            self._usual += 0.05 * (writing - self._usual)
        if not ahead or not self.active:
            return
        gain = min(1.0, computing + max(0.0, writing - self._usual))
        self._balance = min(_STAKE * self.capacity, self._balance + gain * nbytes)
        if self._balance >= self.capacity:
            self.ample, self._patience = True, 1
        self._check()

    def rent(self, nbytes: float) -> None:
        """So much less is kept because of what lies ready."""
        if self.active:
            self._balance -= nbytes
            self._check()

    def lost(self, nbytes: int) -> None:
        """These bytes were fetched ahead in vain."""
        if self.active:
            self._balance -= _LOSS * nbytes
            self._check()

    def _check(self) -> None:
        if self._balance < 0.0:
            self.active = self.ample = False
            self._balance = 0.0
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)

    def covers(self, nbytes: int) -> bool:
        """Whether so many bytes may be at stake."""
        return self.active and _STAKE * nbytes <= self._balance


class Busy:
    """When something was busy, lately."""

    def __init__(self) -> None:
        self._times = [0.0]
        self._totals = [0.0]

    def note(self, start: float, end: float) -> float:
        """It was busy from `start` to `end`. Returns the seconds of it that had not been noted before."""
        start = max(start, self._times[-1])
        if end <= start:
            return 0.0
        total = self._totals[-1]
        self._times += (start, end)
        self._totals += (total, total + end - start)
        if len(self._times) > 2 * _REMEMBERED:
            del self._times[:_REMEMBERED], self._totals[:_REMEMBERED]
        return end - start

    def _until(self, time: float) -> float:
        at = bisect_right(self._times, time) - 1
        if at < 0:
            return self._totals[0]
        if at + 1 == len(self._times) or self._totals[at + 1] == self._totals[at]:
            return self._totals[at]
        return self._totals[at] + time - self._times[at]

    def between(self, start: float, end: float) -> float:
        """Busy seconds between two times."""
        return self._until(end) - self._until(start)


class Rate:
    """Seconds a byte of a link, over the latest transfers, which may overlap."""

    def __init__(self) -> None:
        self._busy = Busy()
        self._bytes = 0.0
        self._seconds = 0.0

    def note(self, nbytes: int, start: float, end: float) -> None:
        """One more transfer; each counts a tenth less than the one after it."""
        self._bytes = 0.9 * self._bytes + nbytes
        self._seconds = 0.9 * self._seconds + self._busy.note(start, end)

    @property
    def seconds_per_byte(self) -> float:
        """0 before anything was moved."""
        return self._seconds / self._bytes if self._bytes else 0.0
