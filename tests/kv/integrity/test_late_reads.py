"""A read went on after the cache had given it up, and wrote into a buffer that the engine used for another block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import BlockCache, Reason
from tests.kv.test_blocks import BLOCK, blocks
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE, eventually, stats

COUNT = 16


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as one:
        yield one


def reused(cache: BlockCache, node: RunningNode, keys: list[bytes]) -> tuple[set[Reason | None], int]:
    """Load from a node that is suspended, use the buffers for other blocks, and count those that change afterwards."""
    into = [bytearray(BLOCK) for _ in keys]
    with node.suspended():
        reasons = set(cache.load(keys, into, timeout=0.3))
        for one in into:
            one[:] = b"\x5a" * BLOCK
    stats(node.address)  # the node goes on, and has come to what it was asked for before
    # What the node had been asked for arrives before the answer to a further request on the same connections.
    eventually(lambda: cache.lookup(keys, timeout=PATIENCE).is_whole)
    for thread in threading.enumerate():
        if thread.name == "late":
            thread.join(PATIENCE)
    return reasons, sum(one != b"\x5a" * BLOCK for one in into)


def test_nothing_is_written_into_a_buffer_after_the_load_has_returned(node: RunningNode) -> None:
    with BlockCache([node.address], NAMESPACE, transport="tcp", timeout=PATIENCE) as cache:
        keys, values = blocks(cache, COUNT)
        assert cache.save(keys, values) == [None] * COUNT
        reasons, changed = reused(cache, node, keys)
        assert reasons <= {Reason.LATE, Reason.NODE_AWAY}
        assert changed == 0


def test_a_read_that_goes_on_would_be_seen(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with BlockCache([node.address], NAMESPACE, transport="tcp", timeout=PATIENCE) as cache:
        keys, values = blocks(cache, COUNT)
        assert cache.save(keys, values) == [None] * COUNT
        calls = cache._link.calls()
        read = calls.get_into_many

        def goes_on(keys: Sequence[bytes], places: Sequence[Any], timeout: float) -> list[Exception]:
            """Answer by the deadline, while a thread that has more time fills the same buffers."""
            threading.Thread(target=read, args=(keys, places, PATIENCE), name="late").start()
            return [TimeoutError("late")] * len(keys)

        monkeypatch.setattr(calls, "get_into_many", goes_on)
        _, changed = reused(cache, node, keys)
        assert changed == COUNT
