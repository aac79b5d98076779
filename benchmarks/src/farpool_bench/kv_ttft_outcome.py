"""Settings and outcome of the benchmark of the time to first token."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from farpool_bench.measure import median_interval, median_ratio

__all__ = ["Outcome", "Point", "Row", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Has no effect: all is computed on the CPU.
    rounds : int
        Samples of each row behind a long prefix; there are up to four times as many behind short ones.
    tokens : tuple of int
        Lengths of the prefix, multiples of 16.
    hidden, layers : int
        Width and depth of the model.
    lmcache : str
        A Python that has farpool and LMCache; empty for this process's own.
    """

    device: str = "cpu"
    rounds: int = 28
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    hidden: int = 512
    layers: int = 8
    lmcache: str = ""

    def rounds_for(self, tokens: int) -> int:
        """Samples of each row behind so many tokens: what is short takes less time, and varies more."""
        return self.rounds * max(1, min(4, 512 // tokens))

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(rounds=2, tokens=(16, 64), hidden=128, layers=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one way to the KV of the prefix.

    Attributes
    ----------
    name : str
    seconds : tuple of float or None
        Seconds to the first token, of each round; None if it could not run.
    fetching : tuple of float or None
        Seconds of that until the KV is in the engine's memory.
    speedup : float or None
        Median over the rounds of the time with the KV computed again over this.
    share : tuple of float or None
        Seconds of `fetching` as a share of the time with the KV computed again: median, and the ends of its 95 %
        interval.
    equal : bool or None
        True if the logits are, bit for bit, those of a `DynamicCache` with the prefix computed here; None for peers
        whose blocks are not the model's.
    remark : str or None
        The reason why it could not run.
    """

    name: str
    seconds: tuple[float, ...] | None
    fetching: tuple[float, ...] | None
    speedup: float | None
    share: tuple[float, float, float] | None
    equal: bool | None
    remark: str | None

    @classmethod
    def of(
        cls,
        name: str,
        compute: tuple[float, ...],
        fetching: tuple[float, ...],
        recompute: tuple[float, ...],
        equal: bool | None,
    ) -> Row:
        """Make the results from the samples of one row and of computing again."""
        seconds = tuple(map(sum, zip(compute, fetching, strict=True)))
        shares = [mine / whole for mine, whole in zip(fetching, recompute, strict=True)]
        share = (statistics.median(shares), *median_interval(shares))
        return cls(name, seconds, fetching, median_ratio(recompute, seconds), share, equal, None)


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one length of the prefix.

    Attributes
    ----------
    tokens : int
        Tokens of the prefix; the prompt has one more.
    nbytes : int
        Bytes of the prefix's KV.
    recompute : tuple of float
        Seconds to the first token with the KV computed again, of each round.
    rows : tuple of Row
        The other ways.
    """

    tokens: int
    nbytes: int
    recompute: tuple[float, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    threads : int
        Threads that compute.
    peers : tuple of str
        Names and versions of the peers that run here.
    points : tuple of Point
        One for each length of the prefix.
    """

    threads: int
    peers: tuple[str, ...]
    points: tuple[Point, ...]
