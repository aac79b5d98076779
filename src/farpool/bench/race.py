"""One thing that farpool does, timed in turn with others that do the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farpool.bench.measure import in_turn, median_ratio
from farpool.errors import FarpoolError

__all__ = ["Entrant", "Other", "Race", "hold"]


@dataclass(frozen=True, slots=True)
class Other:
    """How long something else took for the same work.

    Attributes
    ----------
    name : str
    seconds : tuple of float or None
        For one object, of each round; None if it could not run.
    ratio : float or None
        Median over the rounds of its time over ours: above 1 we are faster.
    remark : str or None
        Why it could not run.
    """

    name: str
    seconds: tuple[float, ...] | None
    ratio: float | None
    remark: str | None


@dataclass(frozen=True, slots=True)
class Race:
    """How long one kind of operation took.

    Attributes
    ----------
    what : str
        The operation and how it was asked for.
    nbytes : int
        Bytes of an object.
    batch : int
        Objects in one call.
    way : str
        The transport that farpool took.
    ours : tuple of float
        Seconds for one object, of each round.
    others : tuple of Other
    """

    what: str
    nbytes: int
    batch: int
    way: str
    ours: tuple[float, ...]
    others: tuple[Other, ...]


@dataclass(slots=True)
class Entrant:
    """Something that is timed beside us.

    Attributes
    ----------
    name : str
    work : callable or None
        Returns the seconds that one object took; None if it cannot run.
    remark : str
        Why not.
    """

    name: str
    work: Callable[[], float] | None
    remark: str = ""

    def sample(self) -> float:
        """Seconds for one object; not a number once it has failed."""
        if self.work is None:
            return math.nan
        try:
            return self.work()
        except FarpoolError as error:
            self.work, self.remark = None, str(error)
            return math.nan

    def result(self, samples: tuple[float, ...], ours: Sequence[float]) -> Other:
        """What came out."""
        if self.work is None:
            return Other(self.name, None, None, self.remark)
        return Other(self.name, samples, median_ratio(samples, ours), None)


def hold(
    what: str,
    nbytes: int,
    batch: int,
    way: str,
    ours: Callable[[], float],
    entrants: Sequence[Entrant],
    rounds: int,
    step: str,
    progress: Callable[[str, int, int], None],
) -> Race:
    """Take `rounds` samples of each in turn."""
    works = [ours, *(entrant.sample for entrant in entrants)]
    mine, *theirs = in_turn(works, rounds, step, progress)
    others = tuple(entrant.result(samples, mine) for entrant, samples in zip(entrants, theirs, strict=True))
    return Race(what, nbytes, batch, way, mine, others)
