"""Two kinds of questions, timed in pairs: do the times reveal the kind of a question?

The two questions of a pair are asked one after the other, and a coin decides which one is first. If times do not depend
on the kind, then all outcomes of the coins are equally likely to have brought these times, whatever else happens on the
machine meanwhile: drift, other programs and pauses are as likely to meet one kind as the other. So both tests here go
through the other outcomes of the coins, and need nothing to be assumed of how times are distributed.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Comparison", "compared", "significant", "times_of_pairs"]

K = TypeVar("K")
Times = npt.NDArray[np.int64]

_OUTCOMES = 9999
"""Outcomes of the coins that are gone through for the distance of distributions, so no chance is below 1e-4."""
_AT_ONCE = 333
_ENOUGH = 30
"""Number of equally distant outcomes after which no more are drawn (Besag and Clifford, Biometrika 78, 1991)."""
_MARKS = 128
"""Number of times at which distributions are compared, with equally many measurements between neighbours."""
_SURE = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Comparison:
    """The result of timing pairs.

    Attributes
    ----------
    pairs : int
        Pairs of times.
    median : float
        Median of all times, in microseconds.
    difference, low, high : float
        Median of the first kind's time minus the second's, in microseconds, and its interval of 95 %.
    slower : float
        Share of pairs in which the first kind took longer; half of the equal pairs are counted.
    shift, shape : float
        Chance of signed ranks so one-sided, and of distributions so far apart, if times do not depend on the kind.
    """

    pairs: int
    median: float
    difference: float
    low: float
    high: float
    slower: float
    shift: float
    shape: float

    def __str__(self) -> str:
        spread = _SURE / 2 / math.sqrt(self.pairs)
        return (
            f"{self.difference:+.3f} us [{self.low:+.3f}, {self.high:+.3f}] of {self.median:.1f} us, longer in "
            f"{self.slower:.1%} +- {spread:.1%} of {self.pairs} pairs, p = {self.shift:.2g} (ranks), "
            f"{self.shape:.2g} (distance)"
        )


def times_of_pairs(
    ask: Callable[[K], object],
    undo: Callable[[K], object],
    one: Sequence[K],
    other: Sequence[K],
    rng: random.Random,
) -> tuple[Times, Times]:
    """Time the questions of each pair in a random order, in nanoseconds, and undo their changes in between."""
    times = np.zeros((2, len(one)), np.int64)
    collects = gc.isenabled()
    gc.disable()
    try:
        for number, pair in enumerate(zip(one, other, strict=True)):
            first = rng.getrandbits(1)
            for kind in (first, 1 - first):
                about = pair[kind]
                began = time.perf_counter_ns()
                ask(about)
                times[kind, number] = time.perf_counter_ns() - began
                undo(about)
    finally:
        if collects:
            gc.enable()
    return times[0], times[1]


def compared(one: Times, other: Times, seed: int = 0) -> Comparison:
    """Compare the times of pairs."""
    pairs = len(one)
    differences = np.sort(one - other)
    # The interval of a median by order statistics: which differences are around it also depends on the coins.
    aside = math.ceil(_SURE * math.sqrt(pairs) / 2)
    low, high = (differences[max(0, min(pairs - 1, pairs // 2 + place))] for place in (-aside, aside))
    return Comparison(
        pairs=pairs,
        median=float(np.median(np.concatenate([one, other]))) / 1e3,
        difference=float(np.median(differences)) / 1e3,
        low=float(low) / 1e3,
        high=float(high) / 1e3,
        slower=float(np.mean(differences > 0) + np.mean(differences == 0) / 2),
        shift=_chance_of_ranks(differences),
        shape=_chance_of_distance(one, other, seed),
    )


def _chance_of_ranks(differences: Times) -> float:
    """Wilcoxon's test of signed ranks, two-sided, by its normal limit; equal times are left out."""
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    _, places, counts = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    sum_of_ranks = float(np.sum(np.sign(differences) * ranks))
    return 2 * statistics.NormalDist().cdf(-abs(sum_of_ranks) / math.sqrt(float(np.sum(ranks**2))))


def _chance_of_distance(one: Times, other: Times, seed: int) -> float:
    """Largest distance of the two distributions, among what it is for random outcomes of the coins."""
    pairs = len(one)
    marks = np.unique(np.quantile(np.concatenate([one, other]), np.arange(1, _MARKS) / _MARKS))
    # The contribution of each pair to the difference between the numbers of times of both kinds below each mark.
    steps = (one[:, None] <= marks).astype(np.float32) - (other[:, None] <= marks)
    found = float(np.abs(steps.sum(axis=0)).max())
    coins = np.random.default_rng(seed)
    as_far = done = 0
    while done < _OUTCOMES:
        drawn = min(_AT_ONCE, _OUTCOMES - done)
        flips = coins.integers(0, 2, (drawn, pairs), np.int8).astype(np.float32) * 2 - 1
        far = np.flatnonzero(np.abs(flips @ steps).max(axis=1) >= found)
        if as_far + len(far) >= _ENOUGH:
            return _ENOUGH / (done + int(far[_ENOUGH - as_far - 1]) + 1)
        as_far += len(far)
        done += drawn
    return (as_far + 1) / (done + 1)


def significant(comparisons: Mapping[str, Comparison], alpha: float) -> list[str]:
    """Return the comparisons that differ, by Holm's correction over both tests; `alpha` is the chance of any error."""
    chances = sorted((chance, name) for name, one in comparisons.items() for chance in (one.shift, one.shape))
    told: list[str] = []
    for number, (chance, name) in enumerate(chances):
        if chance > alpha / (len(chances) - number):
            break
        told.append(name)
    return sorted(set(told))
