"""The judge of an engine that tells nobody how long it computes: that is seen from its lookups, loads and saves.

An engine looks a run of blocks up. What is missing it computes, and offers it for saving: the time in between is what
computing took in this engine, under its load, and no less, as there is time in it that has other causes. So loading is
passed over only if it was measured to take longer than a time that computing does not exceed. Whatever cannot be seen
leaves things as the engine asks for them.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from farpool.kv.judge import Judge
from farpool.kv.reasons import Reason

__all__ = ["EngineJudge", "EngineLoad", "Run"]

_FEW = 8
"""Loads, and times of computing, from which something is decided."""
_MOST_KEYS = 1 << 17
"""Blocks that are followed; of more, the runs that were looked up first are not followed any longer."""
_LONGEST = 300.0
"""Seconds after which a save says nothing of computing: it was written back long after."""
_LEAST = 0.5
"""Share of the expected time that each time of computing counts at least. Blocks that the engine had, and offers late,
seem to have taken none; where it has become faster in truth, the expectation follows within a few measurements."""


@dataclass(eq=False, slots=True)
class Run:
    """Blocks of one sequence that an engine has looked up together.

    Attributes
    ----------
    is_bypassed : bool
        The engine is to be told that none of them is there, as computing is expected to take less time.
    """

    keys: Sequence[Hashable]
    before: int
    there: int
    asked: float
    """When it was looked up; later, when the last load of it ended."""
    since: float
    """When computing can have begun."""
    is_bypassed: bool = False
    is_weighed: bool = False
    is_held_out: bool = False
    computed: int = 0
    first: int = 0
    """Place of the first block that was computed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A block that an engine has looked up, and neither loaded nor saved yet."""

    run: Run
    place: int
    earlier: float
    """When somebody else asked for it first, who perhaps computes it; infinity if nobody has."""


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens: int
    context: int
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A load under way; the caller calls `ended` once, however the load ends."""

    _judge: EngineJudge
    _keys: Sequence[Hashable]
    _after: float
    _nbytes: int
    _under_way: int

    def ended(self, reasons: Sequence[Reason | None]) -> None:
        """Tell that the load has ended, and for each of its blocks None, or why it did not come."""
        self._judge.judge.ended(self._nbytes)
        self._judge._loaded(self._keys, self._after, self._under_way, reasons)


class EngineJudge:
    """Decides for an engine whether blocks that are there are loaded, from times that it sees itself. Thread-safe.

    Parameters
    ----------
    judge : Judge
        Measured times and decisions.
    step : int
        Tokens of a block.
    is_on : bool
        False to see and decide nothing: all that is there is loaded.
    clock : callable
        Seconds that never go back.

    Attributes
    ----------
    judge : Judge
        The measured times and decisions.
    is_on : bool
        As it was given.
    clock : callable
        As it was given; times that it is told are of this clock.
    """

    def __init__(
        self, judge: Judge, step: int, *, is_on: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_on = is_on
        self.judge = judge
        self._step = step
        self.clock = clock
        self._begin()
        _JUDGES.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._followed = 0
        self._early: list[_Sample] | None = []
        self._loads = 0
        self._bypassed = 0
        self._last_load = -math.inf

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
        """Take in what a lookup has found, and decide if it is loaded.

        Parameters
        ----------
        keys : sequence of hashable
            Blocks of the sequence in their order, from the first on that the engine needs.
        there : int
            Number of them, from the first on, that can be loaded.
        nbytes : int
            Bytes of these.
        began : float or None
            When the lookup began, by this judge's clock; None for now.
        request : str
            The engine's name of the request, for ``farpool why``.
        before : int
            Blocks before these that the engine has already; 0 if it does not say.
        """
        now = self.clock()
        began = now if began is None else began
        run = Run(keys[:_MOST_KEYS], before, there, began, now)
        if not self.is_on:
            return run
        with self._lock:
            if there and self._early is None and self._loads >= _FEW:
                step = self._step
                plan, arm = self.judge.decide(there * step, nbytes, step=step, request=request, context=before * step)
                run.is_bypassed = plan.compute > 0
                run.is_weighed = arm == "load" and not run.is_bypassed
                self._bypassed += there if run.is_bypassed else 0
                run.is_held_out = arm == "hold-out"
            self._follow(run)
        return run

    def asked_again(self, run: Run) -> None:
        """Take in that an engine asks for blocks of a run once more: it has not begun to compute them."""
        with self._lock:
            if not run.computed:
                run.since = self.clock()

    def loading(self, keys: Sequence[Hashable], nbytes: int) -> EngineLoad:
        """Take in that a load of blocks begins, or waits for others."""
        return EngineLoad(self, keys, self._last_load, nbytes, self.judge.begun(nbytes))

    def _loaded(self, keys: Sequence[Hashable], after: float, under_way: int, reasons: Sequence[Reason | None]) -> None:
        now = self.clock()
        with self._lock:
            self._last_load = now
            pending = next((one for key in keys if (one := self._pending.get(key)) is not None), None)
            if pending is None:
                return
            run = pending.run
            usable = next((n for n, reason in enumerate(reasons) if reason is not None), len(reasons))
            if usable == len(reasons) or Reason.LATE in reasons:  # what was late took this long at least
                self._loads += 1
                # An engine that begins one load after the other lets this one wait for those before, which are not
                # under way any more.
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
        """Take in that the engine offers blocks to be saved: those that it had looked up it has computed."""
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
                if not 0 < now - since <= _LONGEST:
                    continue
                # All of it since the lookup, and not the last part since the save before: two may come at once.
                held_out = run.is_held_out and run.computed >= run.there
                run.is_held_out = run.is_held_out and not held_out
                context = (run.before + run.first) * self._step
                self._computed(_Sample(run.computed * self._step, context, now - since, held_out))

    def finished(self, run: Run) -> None:
        """Take in that the request of a run has ended, or begins anew."""
        with self._lock:
            self._leave(run)

    def stats(self) -> dict[str, int]:
        """Return the number of blocks that were there and were not loaded, as ``load.bypassed``."""
        with self._lock:
            return {f"load.{Reason.BYPASSED}": self._bypassed} if self._bypassed else {}

    def _follow(self, run: Run) -> None:
        """Wait for what becomes of the blocks of a run."""
        for place, key in enumerate(run.keys):
            before, earlier = self._pending.get(key), math.inf
            if before is not None:
                earlier = min(before.earlier, before.run.since)
            self._pending[key] = _Pending(run, place, earlier if run.since - earlier < _LONGEST else math.inf)
        self._runs[id(run)] = run
        self._followed += len(run.keys)
        while self._followed > _MOST_KEYS:
            self._leave(next(iter(self._runs.values())))

    def _leave(self, run: Run) -> None:
        if self._runs.pop(id(run), None) is not None:
            self._followed -= len(run.keys)
            for key in run.keys:
                if (one := self._pending.get(key)) is not None and one.run is run:
                    del self._pending[key]

    def _computed(self, sample: _Sample) -> None:
        """Take in a time of computing; the first ones are sorted, so that none that is far too short stands alone."""
        if self._early is None:
            self._learn(sample)
            return
        self._early.append(sample)
        if len(self._early) >= _FEW:
            for early in sorted(self._early, key=lambda one: one.seconds / one.tokens, reverse=True):
                self._learn(early)
            self._early = None

    def _learn(self, sample: _Sample) -> None:
        least = _LEAST * self.judge.prefill_seconds(sample.tokens, sample.context)
        seconds = max(sample.seconds, least)
        self.judge.computed(sample.tokens, sample.context, seconds, held_out=sample.held_out)


_JUDGES: weakref.WeakSet[EngineJudge] = weakref.WeakSet()


def _forked() -> None:
    """Let judges in the child of a fork begin anew: what their parents have asked for comes to the parents."""
    for judge in _JUDGES:
        judge._begin()


os.register_at_fork(after_in_child=_forked)
