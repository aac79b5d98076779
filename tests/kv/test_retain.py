"""KV of prefixes that nodes evict later than other KV, until a session ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import farpool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import Store
from farpool.errors import ConfigError
from farpool.kv import BlockCache, PoolObjects, Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.journal import recorded
from farpool.kv.memory import Layer
from tests.kv.test_blocks import blocks
from tests.kv.test_keys import NAMESPACE
from tests.kv.test_prefix import BLOCK, TOKENS, check, save_steps, target
from tests.nodes import PATIENCE, stats

LAYERS = [Layer(8 << 10)] * 2
GIVEN = {"model": "m", "dtype": "float16", "block": BLOCK, "timeout": PATIENCE, "hold_out": False}
FILL = bytes(100_000)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("8MiB") as node:
        yield node


def fill(node: RunningNode, name: str) -> None:
    """Put three times what the node has room for."""
    with Store(node.address, timeout=PATIENCE) as store:
        for number in range(250):
            store.put(f"{name} {number}", FILL)


def test_a_retained_prefix_outlives_others_until_its_session_ends(node: RunningNode) -> None:
    with PrefixCache([node.address], LAYERS, weights_id="retained", near_bytes=0, **GIVEN) as cache:
        save_steps(cache, LAYERS, TOKENS[:24])
        assert cache.retain(TOKENS[:16], 5, session="conversation", request="kept for later") == 4
        (entry,) = recorded("kept for later")
        assert (entry.step, entry.blocks, entry.done) == ("retain", 4, 4)
        fill(node, "first")
        into = target(LAYERS, TOKENS)
        assert cache.load(cache.lookup(TOKENS), into) == 16
        check(LAYERS, TOKENS, into, 16)
        assert stats(node.address)["retained_objects"] == 4
        assert cache.end_session("conversation") == 4
        assert cache.end_session("conversation") == 0
        fill(node, "second")
        assert cache.lookup(TOKENS).tokens == 0
        assert stats(node.address)["retained_objects"] == 0


def test_blocks_that_are_not_there_and_wrong_arguments_are_named(node: RunningNode) -> None:
    with BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        assert cache.retain([b"k" * 64], 1) == [Reason.ABSENT]
        with pytest.raises(ConfigError, match="priority"):
            cache.retain([b"k" * 64], 8)
        with pytest.raises(ConfigError):
            cache.retain([b"k" * 64], 1, session="")


def test_a_node_that_is_away_is_a_reason_and_no_error() -> None:
    with BlockCache(["tcp://127.0.0.1:9"], NAMESPACE, timeout=0.2) as cache:
        assert cache.retain([b"k" * 64], 1) == [Reason.NODE_AWAY]
        assert cache.end_session("s") == 0


def test_a_pool_of_this_process_has_no_priorities_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with farpool.Pool(fast="4MiB") as pool, BlockCache(PoolObjects(pool, "2MiB"), NAMESPACE) as cache:
        keys, values = blocks(cache, 1)
        assert cache.save(keys, values) == [None]
        assert cache.retain(keys, 1, session="s") == [Reason.FAILED]
        assert "values in a pool of this process have no priority; use nodes" in caplog.text
        assert cache.end_session("s") == 0
        assert cache.lookup(keys).found == [True]
