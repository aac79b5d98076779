"""Transfers between an engine's memory, the memory of this process and the nodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farpool.kv.blocks import BlockCache
from farpool.kv.engine_memory import EngineMemory, Uses
from farpool.kv.judge import Judge
from farpool.kv.memory import KVMemory
from farpool.kv.namespace import Namespace
from farpool.kv.near import NearMemory
from farpool.kv.peers import Peers
from farpool.kv.plan import Current, Match, Prompt, Shape, Wanted, picked
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.abc.objects import Payload
    from farpool.kv.ranks import Exchange
    from farpool.kv.tally import Requests

__all__ = ["Transfers", "seconds_to"]


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
        Learns how long loads take.
    peers : Peers
        The other ranks.
    current : Current
        The weights in use.

    Attributes
    ----------
    memory : EngineMemory
        Finds blocks in the engine's memory, and probes it at its first use.
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
        """Load some groups of layers of prompts; return for each prompt how many tokens all ranks can use afterwards.

        Parameters
        ----------
        matches, memories
            For each prompt its match, and the engine's memory.
        groups : sequence of int
            Numbers of the groups.
        until : float
            Deadline of the load, by the monotonic clock.
        exchange : callable or None
            The exchange in which the ranks agree on this load; None if there is nothing to agree on.
        """
        try:
            usable, under_way, seconds = self._load_here(matches, memories, groups, until)
        except BaseException:
            self._peers.agree_load(matches, [0] * len(matches), 0.0, exchange)  # the other ranks wait for this one
            raise
        usable, seconds = self._peers.agree_load(matches, usable, seconds, exchange)
        if seconds:
            self._judge.loaded(under_way, seconds)
        return usable

    def _load_here(
        self, matches: Sequence[Match], memories: Sequence[KVMemory], groups: Sequence[int], until: float
    ) -> tuple[list[int], int, float]:
        """Load this rank's blocks; return the tokens that it can use of each prompt, and `move`'s measurement."""
        keys: list[bytes] = []
        targets: list[Payload] = []
        sizes: list[int] = []
        places: list[list[int]] = []
        uses, step = Uses(), self._shape.block
        for match, memory in zip(matches, memories, strict=True):
            needed = list(self._shape.needed(match.tokens // step, match.compute // step, groups))
            if self._current.is_outdated(match):
                needed = []
            own_sizes, own_targets = self.memory.targets(memory, needed)
            sizes += own_sizes
            targets += own_targets
            for number, blocks in needed:
                keys += match.wanted.keys_of(number, blocks)
                if blocks:
                    uses.loads(memory, number, blocks.start)
            places.append([block for _, blocks in needed for block in blocks])
        names: Requests = (
            matches[0].request
            if len(matches) == 1
            else [match.request for match, own in zip(matches, places, strict=True) for _ in own]
        )
        came, under_way, seconds = self.move(uses, keys, targets, sizes, names, until)
        outcomes = iter(came)
        usable = [
            self.usable(match, own, list(itertools.islice(outcomes, len(own))))
            for match, own in zip(matches, places, strict=True)
        ]
        return usable, under_way, seconds

    def usable(self, match: Match, blocks: Sequence[int], outcomes: Sequence[Reason | None]) -> int:
        """Return how many tokens of a prompt the engine can use, given the outcomes of loading some of its blocks."""
        if match.tokens and self._current.is_outdated(match):  # the weights may have changed during the load
            said = f"it is of weights {match.weights_id!r}, and {self._current.namespace.weights!r} are in use"
            self._blocks.missed("load", match.request, match.tokens // self._shape.block, Reason.OTHER_WEIGHTS, said)
            return 0
        return self._shape.loaded(match, blocks, outcomes)

    def fetch(
        self, wanted: Wanted, memory: KVMemory, until: float
    ) -> tuple[list[Reason | None], list[int], int, float]:
        """Load all blocks of a prompt without a lookup; return the results of `move`, with the sizes after the list."""
        needed = list(self._shape.needed(wanted.blocks))
        sizes, targets = self.memory.targets(memory, needed)
        uses = Uses()
        for number, _ in needed:
            uses.loads(memory, number, 0)
        outcomes, under_way, seconds = self.move(uses, wanted.keys, targets, sizes, wanted.request, until)
        return outcomes, sizes, under_way, seconds

    def move(
        self,
        uses: Uses,
        keys: Sequence[bytes],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        request: Requests,
        until: float,
    ) -> tuple[list[Reason | None], int, float]:
        """Copy the blocks that this process has in near memory, and load the others from the store.

        Memory of the engine that is used for the first time is probed before.

        Parameters
        ----------
        uses : Uses
            Memory of the engine that contains the targets; empty if the targets are other memory.
        keys, targets, sizes : sequences
            For each block its key, the memory that receives it, and its bytes.
        request : str or sequence of str
            Name of the request, or one name for each block.
        until : float
            Deadline of the load, by the monotonic clock.

        Returns
        -------
        list of Reason or None
            For each block None if it is in its target, or the reason why it is missing.
        int
            Bytes of all loads under way when this load began, its own included.
        float
            Seconds that the load took, for the judge; 0 if the judge cannot use this time.
        """
        # If all blocks are near, the nodes may be away: none of them is asked, so the probe needs none either.
        is_near = self._near.nbytes and len(self._near.held(keys)) == len(keys)
        if uses:
            refused = self.memory.admit("load", request, len(keys), uses, until, through_nodes=not is_near)
            if refused is not None:
                return [refused] * len(keys), 0, 0.0
        outcomes: list[Reason | None] = [None] * len(keys)
        far = self._near.copy(keys, targets) if self._near.nbytes else range(len(keys))
        if not far:
            return outcomes, 0, 0.0
        if len(far) < len(keys):
            keys, targets, sizes = picked(keys, far), picked(targets, far), picked(sizes, far)
            request = request if isinstance(request, str) else picked(request, far)
        began = time.monotonic()
        nbytes = sum(sizes)
        under_way = self._judge.begun(nbytes)
        try:
            loaded = self._blocks.load(keys, targets, request=request, timeout=seconds_to(until))
        finally:
            self._judge.ended(nbytes)
        seconds = 0.0
        if not any(loaded) or Reason.LATE in loaded:  # a late load has taken at least so long
            seconds = time.monotonic() - began
        for number, outcome in zip(far, loaded, strict=True):
            outcomes[number] = outcome
        return outcomes, under_way, seconds

    def save(
        self,
        namespace: Namespace,
        prompts: Sequence[Prompt],
        memories: Sequence[KVMemory],
        groups: Sequence[int],
        until: float,
    ) -> list[int]:
        """Save some groups of layers of sequences; return for each sequence how many of its blocks are stored.

        Parameters
        ----------
        namespace : Namespace
            Namespace of the weights that have computed the KV.
        prompts, memories
            For each sequence its tokens, and the engine's memory.
        groups : sequence of int
            Numbers of the groups.
        until : float
            Deadline of the save, by the monotonic clock.
        """
        values: dict[bytes, Payload] = {}
        parents: dict[bytes, bytes] = {}
        names: list[str] = []
        saved: list[list[bytes]] = []
        uses, shape = Uses(), self._shape
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
                        names.append(prompt.request)
                        last = block
                        if (parent := shape.parent(wanted, number, block)) is not None:
                            parents[key] = parent
                if last >= 0:
                    uses.saves(memory, number, last)
                own += [key for key in wanted.keys_of(number, blocks) if key in values]
            saved.append(own)
        if self.memory.admit("save", names, len(names), uses, until) is not None:
            return [0] * len(saved)
        computing = sum(self._judge.prefill_seconds(len(prompt.tokens)) for prompt in prompts)
        outcomes = self._blocks.save(
            list(values),
            list(values.values()),
            request=prompts[0].request if len(prompts) == 1 else names,
            timeout=seconds_to(until),
            cost=computing / max(1, len(values)),
            parents=parents,
            namespace=namespace,
        )
        there = {key for key, outcome in zip(values, outcomes, strict=True) if outcome is None}
        return [sum(key in there for key in own) for own in saved]

    def bring_near(self, wanted: Wanted, usable: int, until: float) -> int:
        """Load the usable blocks of a sequence into the memory of this process, or let the nodes keep them in theirs.

        Returns
        -------
        int
            Number of blocks that are near.
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
        views = [memoryview(place) for place in places.values()]
        sizes = [len(place) for place in places.values()]
        came, under_way, seconds = self.move(Uses(), list(places), views, sizes, wanted.request, until)
        if seconds:
            self._judge.loaded(under_way, seconds)
        for (key, place), outcome in zip(places.items(), came, strict=True):
            if outcome is None:
                self._near.keep(key, place)
            else:
                self._near.release(place)
        return len(self._near.held(keys))


def seconds_to(until: float) -> float:
    """Return the seconds that are left until a time of `time.monotonic`."""
    return max(0.0, until - time.monotonic())
