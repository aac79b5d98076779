"""Caches of KV blocks, by policy: simulated ones, with metadata only, and real ones, which move and verify bytes.

``node`` is the policy by which nodes evict: the native code itself, which receives the same reports as in a node, of
blocks loaded and blocks stored. ``pool`` chooses its policy while it runs, like a pool of one process; the other names
are single policies of a pool.

A real node lends as much memory as its share of the cache takes at the chosen bytes of a block, so it evicts as a large
one would. The requests are the same as `farpool.kv.PrefixCache` makes: look all blocks up, load the blocks before the
first missing one, save the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from farpool._native import Policy
from farpool.cluster.node.process import running_node
from farpool.kv import BlockCache, Group, Namespace, block_key
from farpool.kv.eviction import POLICIES, Eviction
from farpool.kv.header import HEADER_BYTES
from farpool_bench.harness import Progress, Row
from farpool_bench.kv_requests import Requests

if TYPE_CHECKING:
    from farpool.abc.objects import Objects

NODE, POOL = "node", "pool"
NAMES = (NODE, POOL, *POLICIES)
"""Names of all policies."""
_BESIDE_PAYLOAD = HEADER_BYTES + 256
"""Bytes that a block takes in addition to its payload: headers of block and object, key, and place in the index."""


class NodeCache:
    """Blocks of one size on a node, which knows neither of prefixes nor how deep in one a block is.

    `capacity` is the bytes of all blocks.
    """

    used = NODE, 0

    def __init__(self, capacity: int) -> None:
        self._policy = Policy(NODE, capacity)
        self._capacity = capacity
        self._slots: dict[int, int] = {}
        self._blocks: list[int] = []

    def touch(self, block: int) -> bool:
        """Count a hit; False if the block is not in."""
        slot = self._slots.get(block)
        if slot is not None:
            self._policy.touch(slot)
        return slot is not None

    def insert(self, block: int, size: int, cost: float, parent: int | None) -> bool:
        """Bring a block in that is not in; False if it is larger than the node."""
        if size > self._capacity:
            return False
        slot = len(self._blocks)
        if (slot + 1) * size <= self._capacity:
            self._blocks.append(block)
        else:
            slot = self._policy.victim(block, size)
            self._policy.remove(slot, evicted=True)
            del self._slots[self._blocks[slot]]
            self._blocks[slot] = block
        self._policy.insert(slot, block, size, cost=cost)
        self._slots[block] = slot
        return True

    def __contains__(self, block: int) -> bool:
        return block in self._slots


class PoolCache:
    """Blocks in a pool, which knows of each block the one before it.

    `capacity`: bytes of all blocks. `policy`: the one to use always; empty to choose.
    """

    def __init__(self, capacity: int, policy: str = "") -> None:
        self._eviction: Eviction[int] = Eviction(capacity, policy)
        self.touch = self._eviction.touch

    def insert(self, block: int, size: int, cost: float, parent: int | None) -> bool:
        """Bring a block in that is not in; False if it is not admitted."""
        gone = self._eviction.insert(block, size, cost, parent)
        return not (gone and gone[-1] == block)

    def __contains__(self, block: int) -> bool:
        return block in self._eviction

    @property
    def used(self) -> tuple[str, int]:
        """Name of the policy in use, and number of times that another policy took over."""
        stats = self._eviction.stats()
        return stats.policy, stats.switches


def move(requests: Requests, policy: str, blocks: int, nodes: int, nbytes: int, costs: Any, progress: Progress) -> Row:
    """Replay requests with blocks of `nbytes` real bytes, in `nodes` nodes that hold `blocks` together, or in a pool.

    `costs.prefill` is the time of computing the tokens of a prompt, from one to another.

    Raises
    ------
    RuntimeError
        A block was not moved, or was loaded with other bytes than were saved.
    """
    space = Namespace(
        engine="farpool",
        model="replay",
        weights=requests.name,
        dtype="uint8",
        layout="bytes",
        tokens_per_block=requests.block_tokens,
        groups=(Group(("0",), nbytes),),
    )
    hits = 0
    with (
        _objects(policy, blocks, nodes, nbytes) as objects,
        contextlib.closing(BlockCache(objects, space, timeout=30.0)) as cache,
    ):
        for number, (chain, length) in enumerate(zip(requests.chains, requests.tokens, strict=True)):
            if number % 64 == 0:
                progress(f"Moving real bytes, {policy}", number, len(requests.chains))
            names = [hashlib.sha256(b"%d" % block).digest() for block in chain]
            keys = [block_key(space.digest, name) for name in names]
            values = [(name * (nbytes // len(name) + 1))[:nbytes] for name in names]
            parents = dict(zip(keys[1:], keys[:-1], strict=True))
            run = cache.lookup(keys).leading
            targets = [bytearray(nbytes) for _ in range(run)]
            cost = costs.prefill(0, length) / max(1, len(chain))
            reasons = cache.load(keys[:run], targets)
            saved = cache.save(keys[run:], values[run:], cost=cost, parents=parents)
            # A pool may refuse a block that is worth less than the blocks it would evict; a node takes all.
            for reason in filter(None, [*reasons, *(saved if policy == NODE else ())]):
                raise RuntimeError(f"a block of request {number}, {nodes} nodes for {blocks}, was not moved: {reason}")
            if targets != values[:run]:
                raise RuntimeError(f"request {number} was given other bytes than were saved")
            hits += run
        progress(f"Moving real bytes, {policy}", len(requests.chains), len(requests.chains))
        stored = cache.stats().get("save.bytes", 0) // (nbytes + HEADER_BYTES) * nbytes
    return Row(hits=hits, loaded_bytes=hits * nbytes, stored_bytes=stored)


@contextlib.contextmanager
def _objects(policy: str, blocks: int, nodes: int, nbytes: int) -> Iterator[list[str] | Objects]:
    """Addresses of nodes that hold so many blocks together, or a pool."""
    if policy == NODE:
        dram = max(1 << 20, -(-blocks // nodes) * (nbytes + _BESIDE_PAYLOAD))
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(running_node(dram)).address for _ in range(nodes)]
        return
    # These need torch, which nodes do not.
    import farpool
    from farpool.kv import PoolObjects

    capacity = blocks * (nbytes + HEADER_BYTES)
    with (
        farpool.Pool(fast=16 << 20, dram=2 * capacity + (64 << 20)) as pool,
        contextlib.closing(PoolObjects(pool, capacity)) as objects,
    ):
        yield objects
