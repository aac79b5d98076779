"""The judge of a cache: if what could be loaded is loaded, what that has gained, and how often it was decided how."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farpool.kv.cost import Arm, CostModel, NetGain, Plan
from farpool.kv.journal import record

__all__ = ["Judge"]


class Judge:
    """Measured times of computing and loading, the hold-out that checks them, and the decisions. Thread-safe.

    Whoever loads asks it first (`decide`), and tells it what loads and computing have taken.

    Parameters
    ----------
    hold_out : bool
        Compute a few requests that could load, to measure what loading gains, and stand aside while it costs time.
    """

    def __init__(self, *, hold_out: bool = True) -> None:
        self._cost = CostModel()
        self._gain = NetGain() if hold_out else None
        self._under_way = 0
        self._saved = 0.0
        self._decisions = Counter({"load": 0, "compute": 0, "hold-out": 0})
        self._lock = threading.Lock()

    def leave_to_parent(self) -> None:
        """Begin anew in the child of a fork, where no load is under way and no thread holds the lock."""
        self._lock = threading.Lock()
        self._under_way = 0

    def decide(
        self, tokens: int, nbytes: int, *, step: int, request: str = "", split: bool = False
    ) -> tuple[Plan, Arm]:
        """Decide how much of a prefix that is there is loaded, and write that into the journal.

        Parameters
        ----------
        tokens, nbytes, step, split
            As of `CostModel.plan`.
        request : str
            Name of the request, for ``farpool why``.

        Returns
        -------
        tuple of Plan and Arm
            Nothing is loaded if all tokens are to be computed; of a hold-out, the time of that is to be told.
        """
        arm: Arm = "load"
        with self._lock:
            plan = self._cost.plan(tokens, nbytes, step=step, queued=self._under_way, split=split)
            if plan.compute < tokens and plan.seconds is not None and self._gain is not None:
                arm = self._gain.arm()
                if arm == "hold-out":
                    aside = (
                        "loading has cost time lately" if self._gain.stands_aside else "to measure what loading gains"
                    )
                    plan = Plan(tokens, plan.recompute_seconds, plan.recompute_seconds, f"compute: {aside}")
            bypassed = plan.compute >= tokens
            self._decisions["hold-out" if arm == "hold-out" else "compute" if bypassed else "load"] += 1
        blocks = tokens // step
        record(request, "decision", blocks, 0 if bypassed else blocks, {}, plan.seconds or 0.0, plan.why)
        return plan, arm

    @contextmanager
    def loading(self, nbytes: int) -> Iterator[int]:
        """Count bytes as under way while a load goes on; the value is that of all loads together."""
        with self._lock:
            self._under_way += nbytes
            under_way = self._under_way
        try:
            yield under_way
        finally:
            with self._lock:
                self._under_way -= nbytes

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Take in that a load which brought everything took `seconds`, with `nbytes` bytes under way in all."""
        with self._lock:
            self._cost.loaded(nbytes, seconds)

    def gained(self, tokens: int, usable: int, seconds: float, *, compute: int = 0) -> None:
        """Compare a load with computing the same.

        Parameters
        ----------
        tokens : int
            Tokens that were to be there after it, `compute` included.
        usable : int
            Tokens that are; what did not come has to be computed.
        seconds : float
            Time that it took, the lookup included.
        compute : int
            Tokens at the front that were computed meanwhile.
        """
        with self._lock:
            taken = seconds + (self._cost.prefill_seconds(tokens - usable, usable) or 0.0)
            expected = self._cost.prefill_seconds(tokens - compute, compute)
            if expected is not None:
                self._saved += expected - taken
            if self._gain is not None:
                self._gain.add("load", taken, expected)

    def computed(self, tokens: int, context: int, seconds: float, *, held_out: float | None = None) -> None:
        """Take in that computing `tokens` tokens behind `context` others took `seconds`.

        Parameters
        ----------
        held_out : float, optional
            For a hold-out: seconds that its lookup took.
        """
        with self._lock:
            if self._gain is not None and held_out is not None:
                self._gain.add("hold-out", held_out + seconds, self._cost.prefill_seconds(tokens, context))
            self._cost.computed(tokens, context, seconds)

    def prefill_seconds(self, tokens: int) -> float:
        """Estimate the time of computing the first tokens of a sequence; 0 if nothing was measured."""
        with self._lock:
            return self._cost.prefill_seconds(tokens) or 0.0

    def stats(self) -> dict[str, Any]:
        """Return what loading has gained.

        Returns
        -------
        dict
            ``gain``: see `NetGain.stats`, None without a hold-out; ``saved_seconds``: what loads have taken less than
            computing was expected to take, negative if more; ``decisions``: their number by kind.
        """
        with self._lock:
            gain = None if self._gain is None else self._gain.stats()
            return {"gain": gain, "saved_seconds": self._saved, "decisions": dict(self._decisions)}
