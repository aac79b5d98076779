"""Races: an operation of farpool timed in turn with alternatives that do the same work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from farpool.errors import FarpoolError
from farpool_bench.measure import in_turn, median_ratio

__all__ = ["Entrant", "Other", "Race", "hold", "opened"]

_PeerT = TypeVar("_PeerT", bound=AbstractContextManager[Any])


@dataclass(frozen=True, slots=True)
class Other:
    """Results of an alternative that did the same work.

    Attributes
    ----------
    name : str
    seconds : tuple of float or None
        Seconds for one object, of each round; None if it could not run.
    ratio : float or None
        Median over the rounds of its time over ours: above 1 we are faster.
    remark : str or None
        The reason why it could not run.
    """

    name: str
    seconds: tuple[float, ...] | None
    ratio: float | None
    remark: str | None


@dataclass(frozen=True, slots=True)
class Race:
    """Results of one kind of operation, for farpool and the others.

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
    """An alternative that is timed beside farpool.

    Attributes
    ----------
    name : str
    work : callable or None
        Returns the seconds that one object took; None if it cannot run.
    remark : str
        The reason why it cannot run.
    """

    name: str
    work: Callable[[], float] | None
    remark: str = ""

    def sample(self) -> float:
        """Take a sample: seconds for one object, or NaN if it cannot run or has failed."""
        if self.work is None:
            return math.nan
        try:
            return self.work()
        except FarpoolError as error:
            self.work, self.remark = None, str(error)
            return math.nan

    def result(self, samples: tuple[float, ...], ours: Sequence[float]) -> Other:
        """Make the results from all samples, and from farpool's."""
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
    """Run a race: take `rounds` samples of farpool and each entrant in turn."""
    works = [ours, *(entrant.sample for entrant in entrants)]
    mine, *theirs = in_turn(works, rounds, step, progress)
    others = tuple(entrant.result(samples, mine) for entrant, samples in zip(entrants, theirs, strict=True))
    return Race(what, nbytes, batch, way, mine, others)


def opened(stack: ExitStack, make: Callable[[], _PeerT] | None, reason: str) -> tuple[_PeerT | None, str]:
    """Start a peer if it is installed; None and the reason if it is not, or does not start."""
    if make is None:
        return None, reason
    try:
        return stack.enter_context(make()), ""
    except FarpoolError as error:
        return None, str(error)
