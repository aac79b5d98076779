"""Looks up prefixes, and decides how much of each prefix the engine should load.

Blocks in the memory of this process are called near. All other blocks have to be loaded from nodes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from farpool.kv.blocks import BlockCache
from farpool.kv.cost import Arm, Plan
from farpool.kv.disagreement import Disagreements
from farpool.kv.found import Found
from farpool.kv.journal import record
from farpool.kv.judge import Judge
from farpool.kv.near import NearMemory
from farpool.kv.peers import Peers
from farpool.kv.plan import Match, Shape, Wanted, picked
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.kv.ranks import Exchange

__all__ = ["Lookups"]

_LOOKUP_TIMEOUT_MIN_S = 0.01
"""Minimum lookup timeout in seconds. With less, a thread that only waited for a CPU would count as late."""


class Lookups:
    """Looks up prefixes in the memory of this process and on the nodes. Thread-safe.

    Parameters
    ----------
    shape : Shape
        The engine's layers.
    blocks : BlockCache
        Blocks on the nodes.
    near : NearMemory
        Blocks in the memory of this process.
    judge : Judge
        Decides between loading and computing.
    peers : Peers
        The other ranks.
    decides : bool
        True if this rank decides whether a prefix is loaded. Otherwise it loads all blocks that it finds.
    """

    def __init__(
        self, shape: Shape, blocks: BlockCache, near: NearMemory, judge: Judge, peers: Peers, *, decides: bool
    ) -> None:
        self._shape = shape
        self._blocks = blocks
        self._near = near
        self._judge = judge
        self._peers = peers
        self._decides = decides
        self._disagreements = Disagreements(blocks.namespaces)

    def begin_in_child(self) -> None:
        """Start in the child of a fork without the threads and locks of the parent."""
        self._disagreements.begin_in_child()

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread that asks the nodes for their namespaces, if it runs."""
        self._disagreements.join(timeout)

    def match(
        self, wanted: Iterable[Wanted], split: bool, timeout: float | None, exchange: Exchange | None
    ) -> list[Match]:
        """Look up several sequences at once, and agree with the other ranks how much of each sequence to load.

        Parameters
        ----------
        wanted : iterable of Wanted
            Blocks of each sequence. If the iterable raises an error, the other ranks do not wait for this rank.
        split : bool
            True if the engine can compute the first tokens while the others are loaded.
        timeout : float or None
            Seconds that the lookup may take. None for the shorter of two times: the cache's own timeout, and the
            expected compute time if it is known.
        exchange : callable or None
            The exchange in which the ranks agree on this lookup; None if there are no ranks to agree with.
        """
        try:
            matches = self._match_here(list(wanted), split, timeout)
        except BaseException:
            # The other ranks wait for this rank's answer. Without it, they would wait until their time is over.
            self._peers.abandon(exchange)
            raise
        return self._peers.agree(matches, exchange)

    def _match_here(self, wanted: Sequence[Wanted], split: bool, timeout: float | None) -> list[Match]:
        """Look up sequences, and decide about each sequence before the ranks agree."""
        step = self._shape.block
        passed = [bool(one.blocks) and self._judge.passes_over(one.blocks * step, step, one.request) for one in wanted]
        asked = [one for one, over in zip(wanted, passed, strict=True) if not over]
        began = time.monotonic()
        if timeout is None:
            # An answer that takes longer than computing is useless.
            computing = sum(self._judge.prefill_seconds(one.blocks * step) for one in asked)
            timeout = min(max(computing, _LOOKUP_TIMEOUT_MIN_S) if computing else math.inf, self._blocks.time_for(0))
        found, near = self.find(asked, timeout)
        seconds = (time.monotonic() - began) / max(1, len(asked))
        answers = iter(found)
        return [
            _passed_over(one) if over else self.decided(one, next(answers), near, split, seconds)
            for one, over in zip(wanted, passed, strict=True)
        ]

    def find(self, wanted: Sequence[Wanted], timeout: float | None) -> tuple[list[Found], Collection[bytes]]:
        """Look up which blocks are stored; return the result for each sequence, and the keys of the near blocks."""
        keys = [key for one in wanted for key in one.keys]
        stored: list[int] = []
        for one in wanted:
            stored += self._shape.stored(one)
        names = wanted[0].request if len(wanted) == 1 else [one.request for one in wanted for _ in one.keys]
        near = self._near.present(keys)
        far = [number for number, key in enumerate(keys) if key not in near] if near else range(len(keys))
        answers = self._blocks.lookup(
            picked(keys, far),
            stored=picked(stored, far),
            request=names if isinstance(names, str) else picked(names, far),
            timeout=timeout,
        ).answers
        if near:
            rest = iter(answers)
            answers = [nbytes if key in near else next(rest) for key, nbytes in zip(keys, stored, strict=True)]
        ends = [*itertools.accumulate(len(one.keys) for one in wanted)]
        return [Found(answers[end - len(one.keys) : end]) for one, end in zip(wanted, ends, strict=True)], near

    def decided(
        self,
        wanted: Wanted,
        found: Found,
        near: Collection[bytes],
        split: bool,
        seconds: float,
        *,
        plan: Plan | None = None,
    ) -> Match:
        """Decide how much of a sequence should be loaded, given the blocks that were found.

        Parameters
        ----------
        wanted, found : Wanted and Found
            Blocks of the sequence, and the lookup's answers for them.
        near : collection of bytes
            Keys of blocks that are in the memory of this process.
        split : bool
            As in `match`.
        seconds : float
            Time that the lookup took.
        plan : Plan, optional
            Plan that was made earlier for loading all of these blocks from nodes. The plan is ignored if some of the
            blocks are missing or near.
        """
        shape = self._shape
        usable, reason = shape.usable(found, wanted.blocks)
        if reason is Reason.ABSENT and not any(found.found):
            reason = self._disagreements.reason(wanted.namespace, wanted.request, len(wanted.keys)) or reason
        there, far_bytes = usable * shape.block, self._far_bytes(wanted, usable, near)
        arm: Arm = "load"
        if far_bytes and not self._decides:
            computing = self._judge.prefill_seconds(there) or None
            plan = Plan(0, None, computing, "load: another rank or the engine decides")
        elif far_bytes:
            plan = None if near or usable < wanted.blocks else plan
            plan, arm = self._judge.decide(
                there, far_bytes, step=shape.block, request=wanted.request, split=split, plan=plan
            )
        elif there:
            plan = Plan(0, 0.0, None, "load: all of it is in the memory of this process")
            record(wanted.request, "decision", usable, usable, {}, 0.0, plan.why)
        else:
            plan = Plan(0, None, None, "no block was found")
            if wanted.blocks:
                self._judge.missed(wanted.blocks * shape.block, seconds)
        bypassed = plan.compute >= there
        whole = wanted.tokens - wanted.tokens % shape.block
        return Match(
            tokens=0 if bypassed else there,
            compute=0 if bypassed else plan.compute,
            found=there,
            reason=Reason.BYPASSED if there and bypassed else reason if there < whole else None,
            plan=plan,
            request=wanted.request,
            weights_id=wanted.namespace.weights,
            salt=wanted.salt,
            arm=arm,
            seconds=seconds,
            wanted=wanted,
            far_bytes=far_bytes,
            ends=shape.ends(found, wanted.blocks, usable) if self._peers.needs_ends else (),
        )

    def _far_bytes(self, wanted: Wanted, usable: int, near: Collection[bytes]) -> int:
        """Return how many bytes nodes have to send so that the first `usable` blocks of the sequence can be loaded."""
        if not near:
            return self._shape.nbytes(usable)
        return sum(
            self._shape.groups[number].group.block_bytes
            for number, blocks in self._shape.needed(usable)
            for key in wanted.keys_of(number, blocks)
            if key not in near
        )


def _passed_over(wanted: Wanted) -> Match:
    """Return the match of a sequence that was not looked up, because the cache stands aside."""
    plan = Plan(wanted.tokens, None, None, "compute: loading has cost time lately")
    weights = wanted.namespace.weights
    return Match(0, 0, 0, Reason.BYPASSED, plan, wanted.request, weights, wanted.salt, "hold-out", 0.0, wanted, 0)
