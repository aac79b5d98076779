"""Decides for each request whether found KV is loaded, counts the decisions, and measures how much time loading saves.

A few requests, the hold-out, compute although they could load, to measure the gain. A few others, the probes, load
although computing seems faster. While loading takes longer than computing, the cache stands aside: most requests
compute.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from farpool.kv.cost import Arm, CostModel, NetGain, Plan
from farpool.kv.journal import record
from farpool.kv.reasons import Reason

__all__ = ["Judge"]

_PROBE_PERIOD = 32
"""Among the requests for which computing seems faster, one of this many loads anyway (a probe). So the judge notices
that a slow link has recovered."""
_ASIDE = "loading has cost time lately"
_LOAD_SHARE_MAX = 2.0
"""A load counts with at most this many times the expected compute time, because an engine that abandons a load and
computes loses no more time than that. Without the bound, a few loads over a stalled link would dominate the mean."""


class Judge:
    """Decides between loading and computing by measured times, and checks the decisions with a hold-out. Thread-safe.

    A cache calls `decide` before it loads, and reports how long loads and computing have taken.

    Parameters
    ----------
    hold_out : bool
        If True, a few requests that could load compute instead, to measure how much time loading saves. The cache
        stands aside while loading takes longer than computing.
    """

    def __init__(self, *, hold_out: bool = True) -> None:
        self._cost = CostModel()
        self._gain = NetGain() if hold_out else None
        self._slower = 0
        self._under_way = 0
        self._saved = 0.0
        self._decisions = Counter({"load": 0, "compute": 0, "hold-out": 0})
        self._lock = threading.Lock()

    def begin_in_child(self) -> None:
        """Reset the lock and the bytes under way in the child of a fork. The child has none of the parent's loads."""
        self._lock = threading.Lock()
        self._under_way = 0

    def planned(self, tokens: int, nbytes: int, *, step: int) -> Plan | None:
        """Return a plan that loads all blocks of a request, or None if the judge would compute.

        This call records no decision.

        Parameters
        ----------
        tokens, nbytes, step
            As in `CostModel.plan`.
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
        """Decide how much of a found prefix the engine should load, and write the decision into the journal.

        Parameters
        ----------
        tokens, nbytes, step, split, context
            As in `CostModel.plan`.
        request : str
            Name of the request, for ``farpool why``.
        plan : Plan, optional
            Result of `planned` for the same request; None to make the plan now.

        Returns
        -------
        tuple of Plan and Arm
            The plan, and the arm ``load``, ``hold-out`` or ``probe``. If the plan computes all tokens, load nothing.
            After a hold-out, call `computed` with ``held_out``. After a probe, do not call `gained`, because without
            the probe the request would have computed.
        """
        arm: Arm = "load"
        with self._lock:
            if plan is None:
                plan = self._cost.plan(tokens, nbytes, step=step, queued=self._under_way, split=split, context=context)
            # A hold-out can be compared only after a load time and a compute time have been measured.
            known = plan.seconds is not None and plan.recompute_seconds is not None
            if plan.compute < tokens and known and self._gain is not None:
                arm = self._gain.arm()
                if arm == "hold-out":
                    aside = _ASIDE if self._gain.stands_aside else "to measure what loading gains"
                    plan = Plan(tokens, plan.recompute_seconds, plan.recompute_seconds, f"compute: {aside}")
            elif plan.compute >= tokens:
                # Without these loads, the judge would never notice that a slow link has recovered.
                self._slower += 1
                if self._slower % _PROBE_PERIOD == 0:
                    arm = "probe"
                    plan = Plan(
                        0, plan.seconds, plan.recompute_seconds, f"load: to see how long it takes now; {plan.why}"
                    )
            bypassed = plan.compute >= tokens
            self._decisions["hold-out" if arm == "hold-out" else "compute" if bypassed else "load"] += 1
        # The journal is written without the lock, because its first entry opens a socket.
        blocks = tokens // step
        reasons = {str(Reason.BYPASSED): blocks} if bypassed else {}
        record(request, "decision", blocks, blocks - sum(reasons.values()), reasons, plan.seconds or 0.0, plan.why)
        return plan, arm

    def begun(self, nbytes: int) -> int:
        """Record that a load begins; return the bytes of all loads under way, including this one."""
        with self._lock:
            self._under_way += nbytes
            return self._under_way

    def ended(self, nbytes: int) -> None:
        """Record that a load has ended, with success or failure."""
        with self._lock:
            self._under_way -= nbytes

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Record that a complete load took `seconds` while `nbytes` bytes, including other loads, were under way."""
        with self._lock:
            self._cost.loaded(nbytes, seconds)

    def gained(self, tokens: int, usable: int, seconds: float, *, compute: int = 0) -> None:
        """Record the time of a load, and compare it with the expected time of computing the same tokens.

        Parameters
        ----------
        tokens : int
            Tokens whose KV the engine should have after the load, including the `compute` tokens.
        usable : int
            Tokens whose KV the engine really has. The engine computes the rest of `tokens`.
        seconds : float
            Time that the load took, including the lookup.
        compute : int
            Leading tokens that the engine computed during the load.
        """
        with self._lock:
            taken = seconds + (self._cost.prefill_seconds(tokens - usable, usable) or 0.0)
            expected = self._cost.prefill_seconds(tokens - compute, compute)
            if expected is not None:
                self._saved += expected - taken
            if self._gain is not None:
                self._gain.add("load", taken if expected is None else min(taken, _LOAD_SHARE_MAX * expected), expected)

    def missed(self, tokens: int, seconds: float) -> None:
        """Record a lookup that found nothing, and that cost `seconds` compared with having no cache."""
        with self._lock:
            self._saved -= seconds
            expected = self._cost.prefill_seconds(tokens)
            if self._gain is not None and expected is not None:
                if self._gain.stands_aside:  # this request tested whether loading saves time again
                    self._gain.arm()
                self._gain.add("load", expected + min(seconds, expected), expected)

    def passes_over(self, tokens: int, step: int, request: str = "") -> bool:
        """Return True if a request should compute without a lookup, because the cache stands aside.

        Such a request counts as a hold-out.

        Parameters
        ----------
        tokens : int
            Tokens of the request.
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
        """Record that computing `tokens` tokens after `context` others took `seconds`.

        Parameters
        ----------
        tokens, context : int
            `tokens`: number of tokens computed; `context`: number of tokens before them.
        seconds : float
            Compute time without the time of the lookup, because an engine without a cache makes no lookup.
        held_out : bool
            True if the decision for the request was a hold-out.
        """
        with self._lock:
            if self._gain is not None and held_out:
                self._gain.add("hold-out", seconds, self._cost.prefill_seconds(tokens, context))
            self._cost.computed(tokens, context, seconds)

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """Estimate the time of computing `tokens` tokens after `context` others; 0 if nothing was measured."""
        with self._lock:
            return self._cost.prefill_seconds(tokens, context) or 0.0

    def stats(self) -> dict[str, Any]:
        """Return how much time loading has saved.

        Returns
        -------
        dict
            ``gain``: result of `NetGain.stats`, or None without a hold-out. ``saved_seconds``: expected compute time
            minus load time, summed over all loads; negative if loads took longer. ``decisions``: number of decisions of
            each kind.
        """
        with self._lock:
            gain = None if self._gain is None else self._gain.stats()
            return {"gain": gain, "saved_seconds": self._saved, "decisions": dict(self._decisions)}
