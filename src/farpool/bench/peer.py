"""What one would use instead of a pool, as far as it is installed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farpool.bench.measure import median_ratio

__all__ = ["Peer", "measured", "missing"]


@dataclass(frozen=True, slots=True)
class Peer:
    """How long something else took for the same work.

    Attributes
    ----------
    name : str
    seconds : tuple of float or None
        Of each round; None if it could not run.
    speedup : float or None
        Median over the rounds of its time over the pool's.
    efficiency : float or None
        Median over the rounds of the limit over its time; None, as `speedup`, where its run cannot be compared.
    remark : str or None
        Why it could not run, or how its run differs.
    """

    name: str
    seconds: tuple[float, ...] | None
    speedup: float | None
    efficiency: float | None
    remark: str | None


def measured(name: str, seconds: Sequence[float], ours: Sequence[float], limits: Sequence[float]) -> Peer:
    """A peer that ran once in each round."""
    return Peer(name, tuple(seconds), median_ratio(seconds, ours), median_ratio(limits, seconds), None)


def missing(name: str, remark: str) -> Peer:
    """A peer that could not run."""
    return Peer(name, None, None, None, remark)
