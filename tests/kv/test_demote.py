"""KV that is moved to a node's NVMe file, or a pool's lower tier, when a program says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import farpool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import Demotion, Store
from farpool.errors import ConfigError
from farpool.kv import BlockCache, PoolObjects, Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.journal import recorded
from farpool.kv.memory import Layer
from tests.kv.test_blocks import blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.kv.test_prefix import BLOCK, TOKENS, Made, check, save_steps, target
from tests.nodes import PATIENCE, eventually, stats

MIB = 1 << 20
LAYERS = [Layer(8 << 10)] * 2
GIVEN = {"model": "m", "dtype": "float16", "block": BLOCK, "timeout": PATIENCE, "hold_out": False}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node("256MiB", nvme=(str(tmp_path_factory.mktemp("nvme") / "far.nvme"), "256MiB")) as node:
        yield node


@pytest.fixture(scope="module")
def without_file() -> Iterator[RunningNode]:
    with running_node("8MiB") as node:
        yield node


def test_a_prefix_leaves_memory_and_comes_back_when_it_is_read(node: RunningNode) -> None:
    nbytes = 24 * sum(layer.nbytes for layer in LAYERS)
    with PrefixCache([node.address], LAYERS, weights_id="moved", near_bytes=2 * nbytes, **GIVEN) as cache:
        save_steps(cache, LAYERS, TOKENS[:24])
        before = stats(node.address)
        demoted = cache.demote(TOKENS[:24], request="to the file")
        assert (demoted.blocks, demoted.reasons) == (6, {})
        (entry,) = recorded("to the file")
        assert (entry.step, entry.blocks, entry.done) == ("demote", 6, 6)
        assert cache.stats()["demote.done"] == 6
        eventually(lambda: stats(node.address)["nvme_objects"] >= before["nvme_objects"] + 6)
        after = stats(node.address)
        assert after["demotions"] == before["demotions"] + 6
        assert after["used"] <= before["used"] - nbytes + 6 * 4096
        assert cache.demote(TOKENS[:24]).blocks == 6  # they are there already
        assert stats(node.address)["demotions"] == after["demotions"]
        assert cache.prefetch_by(TOKENS[:8], PATIENCE, leave=0).result(PATIENCE) == 2
        into = target(LAYERS, TOKENS)
        assert cache.load(cache.lookup(TOKENS), into) == 24
        check(LAYERS, TOKENS, into, 24)
        assert cache.load(cache.lookup(TOKENS), into) == 24
        eventually(lambda: stats(node.address)["promotions"] > before["promotions"])


def test_what_is_pinned_stays_in_memory_and_what_is_not_there_is_said_to_be_absent(node: RunningNode) -> None:
    with PrefixCache([node.address], LAYERS, weights_id="pinned", **GIVEN) as cache:
        save_steps(cache, LAYERS, TOKENS[:16])
        assert cache.pin(TOKENS[:8], 60) == 2
        demoted = cache.demote(TOKENS[:24])
        assert (demoted.blocks, demoted.reasons) == (2, {Reason.PINNED: 2, Reason.ABSENT: 2})
        cache.unpin(TOKENS[:8])
        assert cache.demote(TOKENS[:8]).blocks == 2
        into = target(LAYERS, TOKENS)
        assert cache.load(cache.lookup(TOKENS), into) == 16
        check(LAYERS, TOKENS, into, 16)


def test_without_a_lower_tier_or_a_node_the_blocks_stay_and_the_result_says_so(without_file: RunningNode) -> None:
    with PrefixCache([without_file.address], LAYERS, weights_id="1", **GIVEN) as cache:
        cache.save(TOKENS[:16], Made(LAYERS, TOKENS, 16).computed())
        demoted = cache.demote(TOKENS[:16])
        assert (demoted.blocks, demoted.reasons) == (0, {Reason.NO_LOWER_TIER: 4})
        assert cache.lookup(TOKENS).tokens == 16
        with pytest.raises(ConfigError, match="expected 1 to 256"):
            cache._blocks.demote([b""])
    assert cache.demote(TOKENS[:16]).reasons == {Reason.CLOSED: 4}
    with PrefixCache(["tcp://127.0.0.1:1"], LAYERS, weights_id="1", **{**GIVEN, "timeout": 0.1}) as cache:
        assert cache.demote(TOKENS[:16]).reasons == {Reason.NODE_AWAY: 4}


def test_more_than_may_be_on_its_way_is_demoted_in_turns(node: RunningNode) -> None:
    values = {b"key %d" % number: bytes([number]) * MIB for number in range(100)}
    with Store(node.address, timeout=PATIENCE) as store:
        for key, value in values.items():
            store.put(key, value)
        assert store.best_effort().demote_many([*values, b"other"], PATIENCE) == [*[Demotion.LOWER] * 100, None]
        assert store.get_many(list(values)) == list(values.values())


def test_of_copies_those_that_stay_count(tmp_path: Path, node: RunningNode, without_file: RunningNode) -> None:
    with (
        running_node("8MiB", nvme=(str(tmp_path / "small.nvme"), "1MiB")) as small,
        Store(node.address, without_file.address, replicas=2, timeout=PATIENCE) as store,
        Store(small.address, timeout=PATIENCE) as other,
    ):
        store.put("two copies", bytes(1000))
        assert store.best_effort().demote_many([b"two copies"], PATIENCE) == [Demotion.NO_LOWER_TIER]
        other.put("larger than the file", bytes(2 * MIB))
        assert other.best_effort().demote_many([b"larger than the file"], PATIENCE) == [Demotion.FULL]


def test_blocks_in_a_pool_leave_its_fast_tier() -> None:
    with farpool.Pool(fast="4MiB", dram="4MiB") as pool:
        objects = PoolObjects(pool, "2MiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, values = blocks(cache, 16)
            assert cache.save(keys, values) == [None] * 16
            before = pool.stats().fast.reserved
            cache.pin(keys[:1], 60)
            outcomes = cache.demote(keys)
            assert outcomes[0] is Reason.PINNED
            assert outcomes[1:] == [None] * 15
            eventually(lambda: pool.stats().fast.reserved < before)
            into = targets(16)
            assert cache.load(keys, into) == [None] * 16
            assert [b"".join(one) for one in into] == [b"".join(one) for one in values]
            objects.close()
            assert cache.demote(keys[:1]) == [Reason.CLOSED]
    with farpool.Pool(fast="4MiB") as pool, BlockCache(PoolObjects(pool, "2MiB"), NAMESPACE) as cache:
        keys, values = blocks(cache, 1)
        assert cache.save(keys, values) == [None]
        assert cache.demote([*keys, b"other"]) == [Reason.NO_LOWER_TIER, Reason.ABSENT]
        assert cache.lookup(keys).found == [True]
