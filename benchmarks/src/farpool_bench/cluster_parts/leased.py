"""A pool whose far memory is a lease from the managers, against the same pool over a static list of nodes.

The list has the nodes on which the lease is: a lease stays together on one node if it fits.

Both pools have a fast tier of an eighth of the data. A program reads all of it in order, or reads and changes it, so
that all bytes come from the nodes, and go back if they were changed. The nodes are reached over TCP and mapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from farpool import PoolConfig
from farpool._native import Mode
from farpool.cluster.node.process import running_node
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tiers import Leased, Remote
from farpool_bench.cluster_parts.figures import at_least
from farpool_bench.cluster_parts.running import running_manager, running_sqlite, wait_for
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn, median_ratio

if TYPE_CHECKING:
    from farpool.abc.tier import Tier
    from farpool.cluster.wire.channel import Transport
    from farpool_bench.cluster import Bench

_NODES = 2
_BLOCK = 4 << 20
_FAST_PART = 8
_BLOCKS = 64
"""Blocks of the data for samples of a second or more; fewer for shorter ones."""
_TRANSPORTS: tuple[Transport, ...] = ("tcp", "mapped")


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure both pools in turn."""
    registry = stack.enter_context(running_sqlite(bench.folder))
    options: dict[str, Any] = {"ephemeral": True, "registry": registry, "slow_start": 0}
    for _ in range(_NODES):
        stack.enter_context(running_node("2GiB", **options))
    manager = stack.enter_context(running_manager(registry, "--repair-rate", "0"))
    wait_for(lambda: len(manager.get("/v1/members")["members"]) == _NODES, "the registration of the nodes")
    blocks = max(2 * _FAST_PART, min(_BLOCKS, round(_BLOCKS * bench.seconds)))
    location = f"farpool://{manager.url.removeprefix('http://')}?tenant=0"
    rows, figures = [], []
    for transport in _TRANSPORTS:
        with ExitStack() as open_pools:
            size = 2 * blocks * _BLOCK
            lease = Leased(location, size=size, transport=transport)
            leased = _Loop(open_pools, lease, blocks)
            listed = _Loop(open_pools, Remote(*lease.nodes, size=size, transport=transport), blocks)
            for change in (False, True):
                what = f"{'reads and changes' if change else 'reads'}, {transport}"
                works: list[Callable[[], float]] = [
                    partial(loop.mean_seconds, change, bench.seconds / 2) for loop in (leased, listed)
                ]
                ours, theirs = in_turn(works, bench.rounds, f"Leased pool: {what}", bench.progress)
                rows.append(Row(what=what, nbytes=blocks * _BLOCK, leased=ours, listed=theirs))
                figures.append(at_least(f"rate over a static list's, {what}", median_ratio(theirs, ours), 0.98))
    return Row(figures=tuple(figures), loops=tuple(rows))


class _Loop:
    """A program that goes through all blocks of a pool again and again."""

    def __init__(self, stack: ExitStack, tier: Tier, blocks: int) -> None:
        fast = blocks // _FAST_PART * _BLOCK
        self._pool = stack.enter_context(BlockPool(PoolConfig.make(fast=fast, tiers=[tier], prefetch=True)))
        self._blocks = [self._pool.allocate(_BLOCK) for _ in range(blocks)]
        self.mean_seconds(True)  # writes to each page of the memory of the nodes
        self.mean_seconds(True)

    def mean_seconds(self, change: bool, seconds: float = 0.0) -> float:
        """Go through all blocks once, and again until some seconds are over; return how long it took, the mean."""
        start, times = time.perf_counter(), 0
        while not times or time.perf_counter() - start < seconds:
            for block in self._blocks:
                self._touch(block, change)
            times += 1
        return (time.perf_counter() - start) / times

    def _touch(self, block: Storage, change: bool) -> None:
        grant = self._pool.acquire([Use(block, 0, block.nbytes, Mode.WRITE if change else Mode.READ)], "bench.touch")
        self._pool.release(grant)
