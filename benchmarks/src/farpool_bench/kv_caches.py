"""Simulated caches of KV blocks, by policy: metadata only.

``node`` is the policy by which nodes evict: the native code itself, which receives the same reports as in a node, of
blocks loaded and blocks stored. ``pool`` chooses its policy while it runs, like a pool of one process; the other names
are single policies of a pool.
"""

from __future__ import annotations

from farpool._native import Policy
from farpool.kv.eviction import POLICIES, Eviction

NODE, POOL = "node", "pool"
NAMES = (NODE, POOL, *POLICIES)
"""Names of all policies."""


class NodeCache:
    """Blocks on a node, which knows neither of prefixes nor how deep in one a block is.

    `capacity` is the bytes of all blocks.
    """

    used, switches = NODE, 0

    def __init__(self, capacity: int) -> None:
        self._policy = Policy(NODE, capacity)
        self._capacity = capacity
        self._nbytes = 0
        self._slots: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int]] = {}
        self._free: list[int] = []

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
        while self._nbytes + size > self._capacity:
            slot = self._policy.victim(block, size)
            self._policy.remove(slot, evicted=True)
            gone, nbytes = self._blocks.pop(slot)
            del self._slots[gone]
            self._nbytes -= nbytes
            self._free.append(slot)
        slot = self._free.pop() if self._free else len(self._slots)
        self._policy.insert(slot, block, size, cost=cost)
        self._slots[block] = slot
        self._blocks[slot] = block, size
        self._nbytes += size
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
    def used(self) -> str:
        """Name of the policy in use."""
        return self._eviction.stats().policy

    @property
    def switches(self) -> int:
        """Number of times that another policy took over."""
        return self._eviction.stats().switches


def make(policy: str, capacity: int) -> NodeCache | PoolCache:
    """Make a cache under one of the policies of `NAMES`."""
    return NodeCache(capacity) if policy == NODE else PoolCache(capacity, "" if policy == POOL else policy)
