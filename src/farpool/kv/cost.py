"""Decides between loading KV and computing it, from measured times, without a clock, a thread or a store.

An engine can compute the first part of a prefix while the last part is loaded, because a token needs only the KV of the
tokens before it. So a plan is a number of tokens to compute; the remaining tokens are loaded. (Jin et al. proposed to
compute from the front while loading from the back: "Compute Or Load KV Cache? Why Not Both?", 2024.)

To check the estimates, the cache makes a few requests compute although loading seems faster. These requests are called
the hold-out. If they take less time than the requests that load, the cache *stands aside*: most requests compute, and
only a few load.
"""

from __future__ import annotations

import math
import operator
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Literal

import msgspec

__all__ = ["Arm", "CostModel", "NetGain", "Plan"]

Arm = Literal["load", "hold-out", "probe"]

_DECAY = 0.98
"""Each new sample multiplies the weight of all earlier samples by this factor, so about the last fifty samples
count."""
_HOLD_OUT_PERIOD = 32
"""Number of requests in a period; only requests that could load are counted. One request of each period computes
instead. While the cache stands aside, one request of each period loads."""
_LOSS_SHARE_MAX = 0.02
"""The cache stands aside if loading costs more than this share of the compute time. The share is above 0 because
lookups in a cache that is still empty cost a little."""
_SAMPLES_MIN = 8
"""Minimum number of samples before a decision is based on their mean."""
_NEW_SHARE_MAX = 0.1
"""A fit is solved again when the number of new samples exceeds this share of the samples in it. It is not solved for
each sample, because solving takes longer than one decision."""
_EXPECTED_RATIOS = 0.5, 2.0
"""Expected range of the ratio of measured time to estimated time. If the ratio of a sample is outside this range, the
fit is solved again before the next decision."""
_RECENT_SAMPLES_MAX = 5
"""Number of recent samples whose median corrects the estimate."""


class _Fit:
    """Estimates a time as a weighted sum of features. The weights are not negative, and are fitted to recent times.

    The fit minimizes the squares of relative errors. When times become shorter, the fit follows at once. When times
    become longer, it needs about a hundred samples to follow. So the median of the most recent samples corrects the
    estimate.

    Parameters
    ----------
    features : int
        Number of features.
    subsets : sequence of tuple of int
        Sets of features that may be used together. If several sets fit equally well, the first of them is used.
    """

    def __init__(self, features: int, subsets: Sequence[tuple[int, ...]]) -> None:
        self._subsets = subsets
        self._latest: deque[float] = deque(maxlen=_RECENT_SAMPLES_MAX)
        self._correction = 1.0
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features
        self._squares = 0.0
        self._factors: tuple[float, ...] | None = None
        self._new: list[tuple[Sequence[float], float]] = []
        self._is_wrong = False

    def add(self, values: Sequence[float], seconds: float) -> None:
        """Add a sample: the features of a call, and its time in seconds, which must be above 0."""
        if estimate := self.seconds(values):
            ratio = seconds * self._correction / estimate
            self._latest.append(ratio)
            # One estimate outside the expected range is enough to solve the fit again before the next decision.
            self._is_wrong = self._is_wrong or not _EXPECTED_RATIOS[0] <= ratio <= _EXPECTED_RATIOS[1]
            self._correction = median(self._latest)
        self._new.append((values, seconds))

    def seconds(self, values: Sequence[float]) -> float | None:
        """Estimate the time of a call with these features; None before the first sample."""
        if self._is_wrong or len(self._new) > _NEW_SHARE_MAX * self._squares:
            self._take_in()
            self._factors, self._is_wrong = self._solved(), False
        factors = self._factors
        return None if factors is None else sum(map(operator.mul, factors, values)) * self._correction

    def _take_in(self) -> None:
        for values, seconds in self._new:
            scaled = [value / seconds for value in values]
            for row, one in zip(self._products, scaled, strict=True):
                row[:] = [_DECAY * old + one * other for old, other in zip(row, scaled, strict=True)]
            self._targets = [_DECAY * old + one for old, one in zip(self._targets, scaled, strict=True)]
            self._squares = _DECAY * self._squares + 1
        self._new.clear()

    def _solved(self) -> tuple[float, ...] | None:
        best, least = None, math.inf
        for subset in self._subsets:
            matrix = [[self._products[a][b] for b in subset] for a in subset]
            solution = _solve(matrix, [self._targets[a] for a in subset])
            if solution is None or min(solution) < 0:
                continue
            error = self._squares - sum(self._targets[a] * x for a, x in zip(subset, solution, strict=True))
            if error < least - 1e-6 * self._squares:
                factors = [0.0] * len(self._targets)
                for place, x in zip(subset, solution, strict=True):
                    factors[place] = x
                best, least = tuple(factors), error
        return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small system of linear equations by elimination; return None if the system is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) <= 1e-9 * abs(matrix[column][column]) or rows[pivot][column] == 0:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [row[size] / row[place] for place, row in enumerate(rows)]


class Plan(msgspec.Struct, frozen=True):
    """Decision how much of a stored prefix is loaded.

    Attributes
    ----------
    compute : int
        Number of leading tokens that the engine computes. The KV of the remaining tokens is loaded at the same time.
    seconds : float or None
        Expected time of the plan; None if too little was measured.
    recompute_seconds : float or None
        Expected time of computing all tokens; None if too little was measured.
    why : str
        Explanation in words.
    """

    compute: int
    seconds: float | None
    recompute_seconds: float | None
    why: str


class CostModel:
    """Estimates how long computing and loading KV take, from recent measurements.

    Computing ``n`` tokens after ``c`` others takes ``a + b n + d n (c + n/2)`` seconds: a fixed time, the linear
    layers, and attention. Loading takes a fixed time, plus a time in proportion to the bytes under way: the bytes of
    this load and of all other loads that run in this process.
    """

    def __init__(self) -> None:
        orders = [subset for size in (1, 2, 3) for subset in combinations((1, 2, 0), size)]
        self._prefill = _Fit(3, orders)
        self._load = _Fit(2, [(1,), (0, 1), (0,)])

    def computed(self, tokens: int, context: int, seconds: float) -> None:
        """Record that computing `tokens` tokens after `context` others took `seconds`."""
        if tokens > 0 and seconds > 0:
            self._prefill.add(_prefill_features(tokens, context), seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Record that a load took `seconds` while `nbytes` bytes were under way, including bytes of other loads."""
        if nbytes > 0 and seconds > 0:
            self._load.add((1.0, float(nbytes)), seconds)

    def prefill_seconds(self, tokens: int, context: int = 0) -> float | None:
        """Estimate the seconds of computing `tokens` tokens after `context` others; None if nothing was measured."""
        return self._prefill.seconds(_prefill_features(tokens, context)) if tokens else 0.0

    def load_seconds(self, nbytes: int) -> float | None:
        """Estimate the seconds that a load takes while `nbytes` bytes are under way; None if nothing was measured."""
        return self._load.seconds((1.0, float(nbytes))) if nbytes else 0.0

    def plan(
        self, tokens: int, nbytes: int, *, step: int, queued: int = 0, split: bool = False, context: int = 0
    ) -> Plan:
        """Decide how much of a prefix is loaded.

        Parameters
        ----------
        tokens : int
            Number of tokens whose KV can be loaded.
        nbytes : int
            Bytes of this KV.
        step : int
            Number of tokens in a block; only whole blocks are loaded.
        queued : int
            Bytes of other loads that are under way.
        split : bool
            True if the engine can compute the first tokens while the others are loaded.
        context : int
            Number of earlier tokens in the sequence, whose KV the engine already has.
        """
        whole = self.prefill_seconds(tokens, context)
        loading = self.load_seconds(nbytes + queued)
        if whole is None or loading is None:
            return Plan(0, loading, whole, "load: not enough has been measured to compare")

        first, best = 0, loading
        if split:
            first, best = self._split(tokens, nbytes, step, queued, context)
        computing = f"computing all {tokens} tokens: {_shown(whole)}"
        if best >= whole:
            return Plan(tokens, whole, whole, f"compute: {computing}, loading them: {_shown(loading)}")
        if first:
            why = f"compute {first * step} tokens while loading {tokens - first * step}: {_shown(best)}; {computing}"
            return Plan(first * step, best, whole, why)
        return Plan(0, best, whole, f"load {tokens} tokens: {_shown(best)}; {computing}")

    def _split(self, tokens: int, nbytes: int, step: int, queued: int, context: int) -> tuple[int, float]:
        """Return the number of blocks to compute while the others are loaded, and the time until all are done."""

        def load_after(blocks: int) -> float:
            left = nbytes - nbytes * blocks * step // tokens
            return (self.load_seconds(left + queued) or 0.0) if left else 0.0

        def compute_of(blocks: int) -> float:
            return self.prefill_seconds(blocks * step, context) or 0.0

        # The smallest number of blocks that take at least as long to compute as the other blocks take to load.
        first = bisect_left(range(tokens // step), True, key=lambda blocks: compute_of(blocks) >= load_after(blocks))
        # This number of blocks is the fastest choice, or one block less is.
        times = [(max(compute_of(blocks), load_after(blocks)), blocks) for blocks in (max(0, first - 1), first)]
        best, first = min(times)
        return first, best


def _prefill_features(tokens: int, context: int) -> tuple[float, float, float]:
    return 1.0, float(tokens), tokens * (context + tokens / 2)


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


class _Mean:
    """Mean of values in which recent values count most, and the standard error of this mean."""

    def __init__(self) -> None:
        self.count = 0.0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count = _DECAY * self.count + 1
        self._sum = _DECAY * self._sum + value
        self._squares = _DECAY * self._squares + value * value

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 1.0

    @property
    def error(self) -> float:
        if self.count < _SAMPLES_MIN:
            return math.inf
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2) / self.count)


class NetGain:
    """Compares requests that load with a few that compute, to check the cost model by measurement.

    The two sets of requests are called arms: ``load`` and ``hold-out``. The time of each request is divided by its
    expected compute time, because requests differ in length. While loading takes longer than computing, the cache
    stands aside: only a few requests load, to see whether loading has become faster.
    """

    def __init__(self) -> None:
        self.stands_aside = False
        self._requests = 0
        # Choose a random request of each period, because the requests themselves may repeat with a period.
        self._chance = random.Random(0)
        self._place = self._chance.randrange(_HOLD_OUT_PERIOD)
        self._shares: dict[Arm, _Mean] = {"load": _Mean(), "hold-out": _Mean()}

    def arm(self) -> Arm:
        """Choose the arm of the next request that could load, and count this request."""
        arm = self.next_arm
        self._requests += 1
        if self._requests % _HOLD_OUT_PERIOD == 0:
            self._place = self._chance.randrange(_HOLD_OUT_PERIOD)
        return arm

    @property
    def next_arm(self) -> Arm:
        """The arm that `arm` will choose for the next request."""
        chosen = self._requests % _HOLD_OUT_PERIOD == self._place
        return "load" if chosen == self.stands_aside else "hold-out"

    def add(self, arm: Arm, seconds: float, expected: float | None) -> None:
        """Record the time of a request of this arm, and the expected time of computing the request's prefix."""
        if expected is None or expected <= 0:
            return
        self._shares[arm].add(seconds / expected)
        error = math.hypot(self._shares["load"].error, self._computing[1])
        if self.gain + error < -_LOSS_SHARE_MAX:
            self.stands_aside = True
        elif self.gain - error > -_LOSS_SHARE_MAX:
            self.stands_aside = False

    @property
    def gain(self) -> float:
        """Mean share of the compute time that loading saves; negative if loading costs time."""
        return self._computing[0] - self._shares["load"].mean

    @property
    def _computing(self) -> tuple[float, float]:
        """Mean of the hold-out requests' time divided by their expected time, and the standard error of this mean.

        With too few samples, the mean is 1 and the error is 0, as if computing took as long as the cost model expects.
        """
        held = self._shares["hold-out"]
        return (held.mean, held.error) if held.count >= _SAMPLES_MIN else (1.0, 0.0)

    def stats(self) -> dict[str, float | bool]:
        """Return the gain, the means of both arms, and whether the cache stands aside."""
        return {
            "gain": self.gain,
            "load_share": self._shares["load"].mean,
            "hold_out_share": self._shares["hold-out"].mean,
            "load_requests": self._shares["load"].count,
            "hold_out_requests": self._shares["hold-out"].count,
            "stands_aside": self.stands_aside,
        }
