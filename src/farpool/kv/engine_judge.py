"""Decides between loading and computing for an engine that does not report its compute time.

This module infers the compute time from the engine's lookups, loads and saves. An engine looks up consecutive blocks of
a sequence (a run), computes the missing blocks, and then offers them for saving. The time between the lookup and the
offer is an upper bound of the compute time, because the engine may have done other work in between. So the judge skips
a load only if loading is expected to take longer than this upper bound. If the judge cannot see whether the engine
loaded or computed a block, it lets the engine load the block.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from farpool import forks
from farpool.kv.judge import Judge
from farpool.kv.reasons import Reason

__all__ = ["EngineJudge", "Run"]

_SAMPLES_MIN = 8
"""The judge skips no load before it has measured at least this many loads, and at least this many compute times."""
_FOLLOWED_BLOCKS_MAX = 1 << 17
"""Maximum number of looked-up blocks that the judge remembers. If there are more, it forgets the oldest runs.
"""
_COMPUTE_TIME_MAX_S = 300.0
"""Maximum time from a lookup to a save that counts as a compute time. A longer time is not counted, because the engine
is probably writing back blocks that it computed much earlier."""
_SHARE_OF_ESTIMATE_MIN = 0.5
"""Each measured compute time counts as at least this share of the estimate. Otherwise blocks that the engine already
had and offered late would seem to have taken no time at all. If the engine has really become faster, the estimate
follows within a few samples."""


@dataclass(eq=False, slots=True)
class Run:
    """Blocks of one sequence that an engine has looked up together.

    Attributes
    ----------
    is_bypassed : bool
        If True, report to the engine that none of the blocks was found, because computing them is expected to take less
        time than loading.
    """

    keys: Sequence[Hashable]
    before: int
    there: int
    asked: float
    """Time of the lookup or, if blocks of the run were loaded after it, the time when the latest load ended."""
    since: float
    """Earliest time at which the engine can have begun to compute the blocks."""
    is_bypassed: bool = False
    is_weighed: bool = False
    is_held_out: bool = False
    computed: int = 0
    first: int = 0
    """Index in the run of the first block that the engine has computed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A block that an engine has looked up, but has neither loaded nor saved yet."""

    run: Run
    place: int
    earlier: float
    """Time at which an earlier request looked up the same block; infinity if there was no earlier request. That request
    may have begun to compute the block at this time.
    """


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens: int
    context: int
    seconds: float
    held_out: bool


class EngineJudge:
    """Decides whether an engine loads the blocks that a lookup has found. Thread-safe.

    It measures the time of loads, and infers the compute time from lookups and saves (see the top of this module).

    Parameters
    ----------
    judge : Judge
        Keeps the measured times and makes the decisions.
    step : int
        Tokens of a block.
    is_on : bool
        If False, nothing is measured, and the engine loads all blocks that a lookup finds.
    clock : callable
        Returns the present time in seconds. The time must never decrease.

    Attributes
    ----------
    judge : Judge
        The argument.
    is_on : bool
        The argument.
    clock : callable
        The argument. All times that this class receives are times of this clock.
    """

    def __init__(
        self, judge: Judge, step: int, *, is_on: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_on = is_on
        self.judge = judge
        self._step = step
        self.clock = clock
        self.forked()
        forks.begin_again(self)

    def forked(self) -> None:
        """Forget all lookups in the child of a fork, because only the parent receives their results."""
        self._lock = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._followed = 0
        self._early: list[_Sample] | None = []
        self._loads = 0
        self._bypassed = 0
        self._last_load = -math.inf

    def cost(self, blocks: int, before: int, payloads: int) -> float:
        """Estimate the seconds that computing one payload again takes; 0 if nothing was measured.

        Parameters
        ----------
        blocks : int
            Number of blocks.
        before : int
            Number of blocks before them in the sequence.
        payloads : int
            Number of payloads in which the blocks are stored. Each payload gets an equal part of the blocks' compute
            time.
        """
        return self.judge.prefill_seconds(blocks * self._step, before * self._step) / max(1, payloads)

    def looked_up(
        self,
        keys: Sequence[Hashable],
        there: int,
        nbytes: int,
        *,
        began: float | None = None,
        request: str = "",
        before: int = 0,
    ) -> Run:
        """Record the result of a lookup, and decide if the engine loads the blocks. Return the run with the decision.

        Parameters
        ----------
        keys : sequence of hashable
            Blocks of the sequence in their order, from the first block that the engine needs.
        there : int
            Number of leading blocks that can be loaded.
        nbytes : int
            Bytes of these leading blocks.
        began : float or None
            Time of this judge's clock at which the lookup began; None for now.
        request : str
            The engine's name of the request, for ``farpool why``.
        before : int
            Number of blocks before `keys` whose KV the engine already has; 0 if the engine does not report that.
        """
        now = self.clock()
        began = now if began is None else began
        run = Run(keys[:_FOLLOWED_BLOCKS_MAX], before, there, began, now)
        if not self.is_on:
            return run
        with self._lock:
            if there and self._early is None and self._loads >= _SAMPLES_MIN:
                step = self._step
                plan, arm = self.judge.decide(there * step, nbytes, step=step, request=request, context=before * step)
                run.is_bypassed = plan.compute > 0
                run.is_weighed = arm == "load" and not run.is_bypassed
                self._bypassed += there if run.is_bypassed else 0
                run.is_held_out = arm == "hold-out"
            self._follow(run)
        return run

    def asked_again(self, run: Run) -> None:
        """Record that an engine looks up the blocks of a run again.

        The repeated lookup shows that the engine has not begun to compute them.
        """
        with self._lock:
            if not run.computed:
                run.since = self.clock()

    def loading(self, keys: Sequence[Hashable], nbytes: int) -> Callable[[Sequence[Reason | None]], None]:
        """Record that a load of blocks begins, or begins to wait for other loads.

        Returns
        -------
        callable
            Records the end of the load. Its argument is a list with, for each block, None if it was loaded, otherwise
            the reason why not. Call it exactly once, also if the load fails.
        """
        after, under_way = self._last_load, self.judge.begun(nbytes)

        def ended(reasons: Sequence[Reason | None]) -> None:
            self.judge.ended(nbytes)
            self._loaded(keys, after, under_way, reasons)

        return ended

    def _loaded(self, keys: Sequence[Hashable], after: float, under_way: int, reasons: Sequence[Reason | None]) -> None:
        now = self.clock()
        with self._lock:
            self._last_load = now
            pending = next((one for key in keys if (one := self._pending.get(key)) is not None), None)
            if pending is None:
                return
            run = pending.run
            usable = next((n for n, reason in enumerate(reasons) if reason is not None), len(reasons))
            if usable == len(reasons) or Reason.LATE in reasons:  # a late load took at least this long
                self._loads += 1
                # An engine that runs one load at a time lets this load wait for earlier loads. `under_way` does not
                # include the bytes of earlier loads that have ended, so we count the time from the end of the last
                # earlier load.
                self.judge.loaded(under_way, now - max(run.asked, after))
            if run.is_weighed:
                front, step = run.before + pending.place, self._step
                self.judge.gained(
                    (front + len(keys)) * step, (front + usable) * step, now - run.asked, compute=front * step
                )
            for key in keys[:usable]:
                self._pending.pop(key, None)
            run.asked = run.since = now

    def saved(self, keys: Iterable[Hashable]) -> None:
        """Record that the engine offers blocks for saving, and measure its compute time.

        If the engine had looked up one of these blocks and had not loaded it, the engine has computed the block.
        """
        now = self.clock()
        earliest: dict[int, tuple[Run, float]] = {}
        with self._lock:
            for key in keys:
                if (one := self._pending.pop(key, None)) is not None:
                    run = one.run
                    run.first = min(run.first, one.place) if run.computed else one.place
                    run.computed += 1
                    _, since = earliest.get(id(run), (run, run.since))
                    earliest[id(run)] = run, min(since, one.earlier)
            for run, since in earliest.values():
                run.since = since
                if not 0 < now - since <= _COMPUTE_TIME_MAX_S:
                    continue
                # Count all blocks of the run and all time since the lookup, not only the time since the save before
                # this one, because an engine may offer two batches at once.
                held_out = run.is_held_out and run.computed >= run.there
                run.is_held_out = run.is_held_out and not held_out
                context = (run.before + run.first) * self._step
                self._computed(_Sample(run.computed * self._step, context, now - since, held_out))

    def finished(self, run: Run) -> None:
        """Forget a run, because its request has ended or has started again."""
        with self._lock:
            self._leave(run)

    def stats(self) -> dict[str, int]:
        """Return the counter ``load.bypassed``: the number of found blocks that the engine had to compute."""
        with self._lock:
            return {f"load.{Reason.BYPASSED}": self._bypassed} if self._bypassed else {}

    def _follow(self, run: Run) -> None:
        """Remember the blocks of a run until the engine loads or saves them."""
        for place, key in enumerate(run.keys):
            before, earlier = self._pending.get(key), math.inf
            if before is not None:
                earlier = min(before.earlier, before.run.since)
            self._pending[key] = _Pending(
                run, place, earlier if run.since - earlier < _COMPUTE_TIME_MAX_S else math.inf
            )
        # The entry keeps the run alive, so that no other run gets its identity.
        self._runs[id(run)] = run
        self._followed += len(run.keys)
        while self._followed > _FOLLOWED_BLOCKS_MAX:
            self._leave(next(iter(self._runs.values())))

    def _leave(self, run: Run) -> None:
        """Forget a run and its blocks, except for blocks that a later run has looked up again."""
        if self._runs.pop(id(run), None) is not None:
            self._followed -= len(run.keys)
            for key in run.keys:
                if (one := self._pending.get(key)) is not None and one.run is run:
                    del self._pending[key]

    def _computed(self, sample: _Sample) -> None:
        """Record a measured compute time.

        The judge collects the first samples, and then learns them from slowest to fastest. In this way an estimate
        already exists when a sample that is far too short is learned, and limits the effect of that sample
        (`_SHARE_OF_ESTIMATE_MIN`).
        """
        if self._early is None:
            self._learn(sample)
            return
        self._early.append(sample)
        if len(self._early) >= _SAMPLES_MIN:
            for early in sorted(self._early, key=lambda one: one.seconds / one.tokens, reverse=True):
                self._learn(early)
            self._early = None

    def _learn(self, sample: _Sample) -> None:
        least = _SHARE_OF_ESTIMATE_MIN * self.judge.prefill_seconds(sample.tokens, sample.context)
        seconds = max(sample.seconds, least)
        self.judge.computed(sample.tokens, sample.context, seconds, held_out=sample.held_out)
