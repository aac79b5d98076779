"""Transfers of blocks between an engine's memory, the memory of this process and the nodes.

Blocks in the memory of this process are called near.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from farpool.kv.background import seconds_to
from farpool.kv.blocks import BlockCache
from farpool.kv.engine_memory import Batch, EngineMemory
from farpool.kv.found import Found
from farpool.kv.judge import Judge
from farpool.kv.memory import KVMemory
from farpool.kv.namespace import Namespace
from farpool.kv.near import NearMemory
from farpool.kv.peers import Peers
from farpool.kv.plan import Current, Match, Prompt, Shape, Wanted
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.abc.objects import Payload
    from farpool.kv.ranks import Exchange

__all__ = ["Transfers"]


class _Moved(NamedTuple):
    """Result of loading a batch.

    Attributes
    ----------
    outcomes : list of Reason or None
        For each block, the reason why it was not loaded; None if it was loaded.
    under_way : int
        Number of bytes that all loads had under way when this load began, including this load.
    seconds : float
        Time that the load took; 0 if the judge must not use it.
    """

    outcomes: list[Reason | None]
    under_way: int = 0
    seconds: float = 0.0


class Transfers:
    """Loads blocks into an engine's memory, saves blocks from it, and brings blocks near. Thread-safe.

    Parameters
    ----------
    shape : Shape
        The engine's layers.
    blocks : BlockCache
        Blocks on the nodes.
    near : NearMemory
        Blocks in the memory of this process.
    judge : Judge
        Receives the times of loads.
    peers : Peers
        Agrees with the other ranks.
    current : Current
        The weights in use.

    Attributes
    ----------
    memory : EngineMemory
        Finds blocks in the engine's memory, and probes this memory at its first use.
    """

    def __init__(
        self, shape: Shape, blocks: BlockCache, near: NearMemory, judge: Judge, peers: Peers, current: Current
    ) -> None:
        self.memory = EngineMemory(shape, blocks)
        self._shape = shape
        self._blocks = blocks
        self._near = near
        self._judge = judge
        self._peers = peers
        self._current = current

    def load(
        self,
        matches: Sequence[Match],
        memories: Sequence[KVMemory],
        groups: Sequence[int],
        until: float,
        exchange: Exchange | None,
    ) -> list[int]:
        """Load the KV of some groups of layers for prompts.

        Return, for each prompt, how many tokens all ranks can use after the load.

        Parameters
        ----------
        matches, memories
            For each prompt, its match, and the engine's memory of its KV.
        groups : sequence of int
            Numbers of the groups.
        until : float
            Deadline of the load, by the monotonic clock.
        exchange : callable or None
            The exchange in which the ranks agree on this load; None if there is nothing to agree on.
        """
        try:
            usable, moved = self._load_here(matches, memories, groups, until)
        except BaseException:
            # The other ranks wait for this rank's numbers, and without them would wait until their timeout.
            self._peers.abandon(exchange)
            raise
        usable, seconds = self._peers.agree_load(matches, usable, moved.seconds, exchange)
        self._learn(moved.under_way, seconds)
        return usable

    def _load_here(
        self, matches: Sequence[Match], memories: Sequence[KVMemory], groups: Sequence[int], until: float
    ) -> tuple[list[int], _Moved]:
        """Load this rank's blocks.

        Return how many tokens of each prompt this rank can use, and the result of the load.
        """
        batch, step = Batch(matches[0].request if len(matches) == 1 else []), self._shape.block
        numbers: list[list[int]] = []
        for match, memory in zip(matches, memories, strict=True):
            needed = list(self._shape.needed(match.tokens // step, match.compute // step, groups))
            # Nothing is loaded for other weights; `usable` records the reason.
            if self._current.is_outdated(match):
                needed = []
            self.memory.add_targets(batch, match.wanted, memory, needed)
            numbers.append([block for _, blocks in needed for block in blocks])
        moved = self._move(batch, until)
        outcomes = iter(moved.outcomes)
        usable = [
            self.usable(match, own, list(itertools.islice(outcomes, len(own))))
            for match, own in zip(matches, numbers, strict=True)
        ]
        return usable, moved

    def _learn(self, under_way: int, seconds: float) -> None:
        """Report the time of a load to the judge, unless the time is 0."""
        if seconds:
            self._judge.loaded(under_way, seconds)

    def usable(self, match: Match, blocks: Sequence[int], outcomes: Sequence[Reason | None]) -> int:
        """Return how many tokens of a prompt the engine can use after loading blocks with these outcomes."""
        if match.tokens and self._current.is_outdated(match):  # the weights may have changed during the load
            said = f"it is of weights {match.weights_id!r}, and {self._current.namespace.weights!r} are in use"
            self._blocks.missed("load", match.request, match.tokens // self._shape.block, Reason.OTHER_WEIGHTS, said)
            return 0
        return self._shape.loaded(match, blocks, outcomes)

    def fetch(self, wanted: Wanted, memory: KVMemory, until: float) -> Found:
        """Load all blocks of a prompt without a lookup; return the result that a lookup would have returned.

        Call this only if all layers of the model need all blocks of a prefix.
        """
        batch = Batch(wanted.request)
        self.memory.add_targets(batch, wanted, memory, self._shape.needed(wanted.blocks))
        moved = self._move(batch, until)
        self._learn(moved.under_way, moved.seconds)
        stored = self._shape.stored(wanted)
        if not any(moved.outcomes):
            return Found(stored)
        return Found([reason or nbytes for reason, nbytes in zip(moved.outcomes, stored, strict=True)])

    def _move(self, batch: Batch, until: float) -> _Moved:
        """Probe memory that is used for the first time, then copy blocks that are near, and load the other blocks."""
        keys = batch.keys
        if batch.uses:
            # If all blocks are near, the load needs no node, so the probe must not need one either: all nodes may be
            # away.
            is_near = len(self._near.present(keys)) == len(keys)
            refused = self.memory.admit("load", batch, until, through_nodes=not is_near)
            if refused is not None:
                return _Moved([refused] * len(keys))
        outcomes: list[Reason | None] = [None] * len(keys)
        far = self._near.copy(keys, batch.payloads)
        if not far:
            return _Moved(outcomes)
        rest = batch if len(far) == len(keys) else batch.only(far)
        began, nbytes = time.monotonic(), sum(rest.sizes)
        under_way = self._judge.begun(nbytes)
        try:
            loaded = self._blocks.load(rest.keys, rest.payloads, request=rest.request, timeout=seconds_to(until))
        finally:
            self._judge.ended(nbytes)
        is_measured = not any(loaded) or Reason.LATE in loaded  # a late load has taken at least this time
        seconds = time.monotonic() - began if is_measured else 0.0
        if rest is batch:
            return _Moved(loaded, under_way, seconds)
        for number, outcome in zip(far, loaded, strict=True):
            outcomes[number] = outcome
        return _Moved(outcomes, under_way, seconds)

    def save(
        self,
        namespace: Namespace,
        prompts: Sequence[Prompt],
        memories: Sequence[KVMemory],
        groups: Sequence[int],
        until: float,
    ) -> list[int]:
        """Save the KV of some groups of layers for sequences.

        Return, for each sequence, how many of its blocks are stored after the save.

        Parameters
        ----------
        namespace : Namespace
            Namespace of the weights that have computed the KV.
        prompts, memories
            For each sequence, its tokens, and the engine's memory of its KV.
        groups : sequence of int
            Numbers of the groups.
        until : float
            Deadline of the save, by the monotonic clock.
        """
        values: dict[bytes, Payload] = {}
        parents: dict[bytes, bytes] = {}
        saved: list[list[bytes]] = []
        batch, shape = Batch(prompts[0].request if len(prompts) == 1 else []), self._shape
        for prompt, memory in zip(prompts, memories, strict=True):
            wanted = shape.wanted(namespace, prompt)
            own: list[bytes] = []
            for number in shape.to_save(groups):
                blocks = range(prompt.start // shape.block, wanted.blocks)
                fresh = [block for block in blocks if wanted.key(number, block) not in values]
                span = range(fresh[0], fresh[-1] + 1) if fresh else range(0)
                last = -1
                for block, payload in zip(span, self.memory.payloads(number, memory, span), strict=True):
                    key = wanted.key(number, block)
                    if payload is not None and key not in values:
                        values[key] = payload
                        if isinstance(batch.request, list):
                            batch.request.append(prompt.request)
                        last = block
                        if (parent := shape.parent(wanted, number, block)) is not None:
                            parents[key] = parent
                if last >= 0:
                    batch.use("save", number, memory, last)
                own += [key for key in wanted.keys_of(number, blocks) if key in values]
            saved.append(own)
        batch.keys, batch.payloads = list(values), list(values.values())
        if self.memory.admit("save", batch, until) is not None:
            return [0] * len(saved)
        computing = sum(self._judge.prefill_seconds(len(prompt.tokens)) for prompt in prompts)
        outcomes = self._blocks.save(
            batch.keys,
            batch.payloads,
            request=batch.request,
            timeout=seconds_to(until),
            cost=computing / max(1, len(values)),
            parents=parents,
            namespace=namespace,
        )
        there = {key for key, outcome in zip(values, outcomes, strict=True) if outcome is None}
        return [sum(key in there for key in own) for own in saved]

    def bring_near(self, wanted: Wanted, usable: int, until: float) -> int:
        """Bring blocks of a sequence into the memory of this process.

        These are the blocks that the engine needs to continue after the first `usable` blocks of the sequence. If this
        process keeps no memory for near blocks, pin them in the memory of the nodes instead.

        Returns
        -------
        int
            Number of these blocks that are now in the memory of this process, or pinned.
        """
        needed = [
            (key, self._shape.groups[number].group.block_bytes)
            for number, blocks in self._shape.needed(usable)
            for key in wanted.keys_of(number, blocks)
        ]
        keys, left = [key for key, _ in needed], seconds_to(until)
        if not needed or not left:
            return 0
        if not self._near.nbytes:
            # A node reads a block from its file before it can keep the block in memory.
            return self._blocks.pin(keys, left, owner=b"prefetch", request=wanted.request, timeout=left).count(None)
        places = self._near.reserve(needed)
        batch = Batch(wanted.request)
        for key, place in places.items():
            batch.keys.append(key)
            batch.payloads.append(memoryview(place))
            batch.sizes.append(len(place))
        moved = self._move(batch, until)
        self._learn(moved.under_way, moved.seconds)
        for (key, place), outcome in zip(places.items(), moved.outcomes, strict=True):
            if outcome is None:
                self._near.keep(key, place)
            else:
                self._near.release(place)
        return len(self._near.present(keys))
