"""Results of peers, which are what one would use instead of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farpool_bench.measure import median_ratio

__all__ = ["Peer", "measured", "missing"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Times that an alternative to the pool took for the same work.

    Attributes
    ----------
    name : str
    seconds : tuple of float or None
        Seconds of each round; None if it could not run.
    speedup : float or None
        Median over the rounds of its time over the pool's.
    efficiency : float or None
        Median over the rounds of the limit over its time; None, as `speedup`, where its run cannot be compared.
    remark : str or None
        The reason why it could not run, or how its run differs.
    """

    name: str
    seconds: tuple[float, ...] | None
    speedup: float | None
    efficiency: float | None
    remark: str | None


def measured(name: str, seconds: Sequence[float], ours: Sequence[float], limits: Sequence[float]) -> Peer:
    """Make the results of a peer that ran once in each round."""
    return Peer(name, tuple(seconds), median_ratio(seconds, ours), median_ratio(limits, seconds), None)


def missing(name: str, remark: str) -> Peer:
    """Make the results of a peer that could not run."""
    return Peer(name, None, None, None, remark)
