"""The judge of a cache: if what could be loaded is loaded, what that has gained, and how often it was decided how."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from farpool.kv.cost import Arm, CostModel, NetGain, Plan
from farpool.kv.journal import record
from farpool.kv.reasons import Reason

__all__ = ["Judge"]

_PROBES = 32
"""One of so many requests for which computing seems to take less time loads all the same."""
_ASIDE = "loading has cost time lately"
_WORST = 2.0
"""Times of computing that a load counts at most: one that is given up after the first costs no more. Of a link that
stood still for a while, a few of others' loads would otherwise outweigh all that come after."""


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
        self._slower = 0
        self._under_way = 0
        self._saved = 0.0
        self._decisions = Counter({"load": 0, "compute": 0, "hold-out": 0})
        self._lock = threading.Lock()

    def leave_to_parent(self) -> None:
        """Begin anew in the child of a fork, where no load is under way and no thread holds the lock."""
        self._lock = threading.Lock()
        self._under_way = 0

    def planned(self, tokens: int, nbytes: int, *, step: int) -> Plan | None:
        """Return a plan that loads all of a request; None if the request would compute. Nothing is decided yet.

        Parameters
        ----------
        tokens, nbytes, step
            As of `CostModel.plan`.
        """
        with self._lock:
            if self._gain is not None and self._gain.next_arm != "load":
                return None
            plan = self._cost.plan(tokens, nbytes, step=step, queued=self._under_way)
            return None if plan.compute else plan

    def decide(
        self,
        tokens: int,
        nbytes: int,
        *,
        step: int,
        request: str = "",
        split: bool = False,
        context: int = 0,
        plan: Plan | None = None,
    ) -> tuple[Plan, Arm]:
        """Decide how much of a prefix that is there is loaded, and write that into the journal.

        Parameters
        ----------
        tokens, nbytes, step, split, context
            As of `CostModel.plan`.
        request : str
            Name of the request, for ``farpool why``.
        plan : Plan, optional
            Result of `planned` for the same request; None to make the plan now.

        Returns
        -------
        tuple of Plan and Arm
            Nothing is loaded if all tokens are to be computed; of a hold-out, the time of that is to be told. What a
            probe gains is not to be told: it would not have loaded.
        """
        arm: Arm = "load"
        with self._lock:
            if plan is None:
                plan = self._cost.plan(tokens, nbytes, step=step, queued=self._under_way, split=split, context=context)
            # A hold-out says nothing while the engine has not told how long it computes.
            known = plan.seconds is not None and plan.recompute_seconds is not None
            if plan.compute < tokens and known and self._gain is not None:
                arm = self._gain.arm()
                if arm == "hold-out":
                    aside = _ASIDE if self._gain.stands_aside else "to measure what loading gains"
                    plan = Plan(tokens, plan.recompute_seconds, plan.recompute_seconds, f"compute: {aside}")
            elif plan.compute >= tokens:
                # Else nobody would see that a slow link has recovered.
                self._slower += 1
                if self._slower % _PROBES == 0:
                    arm = "probe"
                    plan = Plan(0, plan.seconds, plan.recompute_seconds, f"load: to see what it takes now; {plan.why}")
            bypassed = plan.compute >= tokens
            self._decisions["hold-out" if arm == "hold-out" else "compute" if bypassed else "load"] += 1
        blocks = tokens // step
        reasons = {str(Reason.BYPASSED): blocks} if bypassed else {}
        record(request, "decision", blocks, blocks - sum(reasons.values()), reasons, plan.seconds or 0.0, plan.why)
        return plan, arm

    def begun(self, nbytes: int) -> int:
        """Record that a load begins, until `ended` is called; return the bytes of all loads under way, this one too."""
        with self._lock:
            self._under_way += nbytes
            return self._under_way

    def ended(self, nbytes: int) -> None:
        """Record the end of a load, however it ended."""
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
                self._gain.add("load", taken if expected is None else min(taken, _WORST * expected), expected)

    def missed(self, tokens: int, seconds: float) -> None:
        """Take in that a lookup which found nothing took `seconds`: so much longer than without a cache."""
        with self._lock:
            self._saved -= seconds
            expected = self._cost.prefill_seconds(tokens)
            if self._gain is not None and expected is not None:
                if self._gain.stands_aside:  # this was the one that looks if that has changed
                    self._gain.arm()
                self._gain.add("load", expected + min(seconds, expected), expected)

    def passes_over(self, tokens: int, step: int, request: str = "") -> bool:
        """Tell if a request is not even to be looked up, as loading costs time; it counts as one of the hold-out.

        Parameters
        ----------
        tokens : int
            Tokens that would be looked up.
        step : int
            Tokens of a block.
        request : str
            Name of the request, for ``farpool why``.
        """
        with self._lock:
            if self._gain is None or not self._gain.stands_aside or self._gain.next_arm == "load":
                return False
            self._gain.arm()
            self._decisions["hold-out"] += 1
        blocks = tokens // step
        record(request, "decision", blocks, 0, {str(Reason.BYPASSED): blocks}, 0.0, f"compute: {_ASIDE}")
        return True

    def computed(self, tokens: int, context: int, seconds: float, *, held_out: bool = False) -> None:
        """Take in that computing `tokens` tokens behind `context` others took `seconds`; `held_out` for a hold-out.

        The lookup of a hold-out does not count: without a cache there would be none.
        """
        with self._lock:
            if self._gain is not None and held_out:
                self._gain.add("hold-out", seconds, self._cost.prefill_seconds(tokens, context))
            self._cost.computed(tokens, context, seconds)

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """Estimate the time of computing `tokens` tokens behind `context` others; 0 if nothing was measured."""
        with self._lock:
            return self._cost.prefill_seconds(tokens, context) or 0.0

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
