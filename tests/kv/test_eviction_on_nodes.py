"""A real node keeps blocks longer if they cost more to compute, in memory and in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from farpool.cluster.node.process import running_node
from farpool.cluster.wire.channel import Transport
from farpool.kv import BlockCache
from tests.kv.test_blocks import blocks
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE, eventually, stats

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 256 * KIB


def use(cache: BlockCache, keys: list[bytes], cost: float) -> None:
    """Save blocks one after the other, and load each once, as the next request of a conversation does."""
    for number, key in enumerate(keys):
        assert cache.save([key], [bytes([number % 256]) * BLOCK], cost=cost) == [None]
        into = bytearray(BLOCK)
        assert cache.load([key], [into]) == [None]
        assert into[0] == into[-1] == number % 256


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_blocks_that_cost_more_outlive_a_flood_of_others_that_were_used_as_often(transport: Transport) -> None:
    with (
        running_node("32MiB") as node,
        BlockCache([node.address], NAMESPACE, transport=transport, timeout=PATIENCE) as cache,
    ):
        keys, _ = blocks(cache, 410)
        use(cache, keys[:10], cost=2.0)
        use(cache, keys[10:], cost=0.01)
        found = cache.lookup(keys).found
        assert found[:10] == [True] * 10
        assert sum(found[10:]) < 130
        assert stats(node.address)["evictions"] > 200


def test_blocks_of_equal_or_no_cost_are_evicted_in_order_of_insertion() -> None:
    with running_node("32MiB") as node, BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        for cost, first in ((0.5, 0), (0.0, 10_000_000)):
            keys, _ = blocks(cache, 400, first)
            use(cache, keys, cost)
            assert cache.lookup(keys[:10]).found == [False] * 10


def test_blocks_that_cost_more_stay_in_memory_and_all_are_read_from_the_file(tmp_path: Path) -> None:
    with (
        running_node("32MiB", nvme=(tmp_path / "far.nvme", "256MiB")) as node,
        BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache,
    ):
        keys, _ = blocks(cache, 410)
        use(cache, keys[:10], cost=2.0)
        use(cache, keys[10:], cost=0.01)
        eventually(lambda: stats(node.address)["nvme_objects"] > 200)  # others may be on their way still
        before = stats(node.address)
        assert before["evictions"] == 0
        for number, key in enumerate(keys[:10]):
            into = bytearray(BLOCK)
            assert cache.load([key], [into]) == [None]
            assert into == bytes([number]) * BLOCK
        assert stats(node.address)["promotions"] == before["promotions"]
        for number, key in enumerate(keys[10:110]):  # twice, because blocks that are read again return to memory
            into = bytearray(BLOCK)
            assert cache.load([key, key], [into, bytearray(BLOCK)]) == [None] * 2
            assert into == bytes([number]) * BLOCK
        assert stats(node.address)["promotions"] > before["promotions"]
