"""Blocks in a pool of the same process: right under random use, inside the capacity, the cheap ones gone first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import farpool
from farpool.errors import ConfigError
from farpool.kv import BlockCache, Layer, PoolObjects, PrefixCache, Reason, TensorMemory
from farpool.kv.blocks import namespaces
from tests.forking import in_forked_child
from tests.kv.test_blocks import blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 64 * KIB


class Machine(RuleBasedStateMachine):
    """Values in a small pool, beside a dictionary of what may be there."""

    @initialize()
    def begin(self) -> None:
        self.pool = farpool.Pool(fast="16KiB", dram="256KiB")
        self.objects = PoolObjects(self.pool, CAPACITY)
        self.values: dict[bytes, bytes] = {}
        self.held: dict[bytes, tuple[int, int, int, int]] = {}

    @rule(number=st.integers(0, 20), nbytes=st.sampled_from([0, 1, 100, 4 * KIB, 15 * KIB]), cost=st.integers(0, 9))
    def put(self, number: int, nbytes: int, cost: int) -> None:
        key, value = b"key %d" % number, bytes([number]) * nbytes
        there = self.objects.lookup([key], PATIENCE)[0] is not None
        (outcome,) = self.objects.put_many([(key, memoryview(value))], PATIENCE, cost_us=cost)
        if isinstance(outcome, Exception):
            assert sum(len(self.values[key]) for key in self.held) + nbytes > CAPACITY
        else:
            assert outcome == ("present" if there else "stored")
            if not there:
                self.values[key] = value

    @rule(number=st.integers(0, 20), cut=st.integers(0, 200))
    def get(self, number: int, cut: int) -> None:
        key = b"key %d" % number
        (size,) = self.objects.lookup([key], PATIENCE)
        into = (bytearray(cut), bytearray(16 * KIB))
        (found,) = self.objects.get_into_many([(key, tuple(map(memoryview, into)))], PATIENCE)
        assert found == size
        if isinstance(found, int):
            assert b"".join(into)[:found] == self.values[key]

    @rule(number=st.integers(0, 20))
    def hold(self, number: int) -> None:
        key = b"key %d" % number
        (held,) = self.objects.hold_many([key], 10_000_000, PATIENCE)
        if isinstance(held, tuple):
            self.held[key] = held

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.objects.release_many(list(self.held.values()), PATIENCE)
        self.held.clear()

    @rule(number=st.integers(0, 20))
    def drop(self, number: int) -> None:
        key = b"key %d" % number
        there = self.objects.lookup([key], PATIENCE)[0] is not None
        assert self.objects.drop(key) == there
        self.held.pop(key, None)

    @invariant()
    def it_stays_inside_its_capacity(self) -> None:
        found = {key: len(self.values[key]) for key in list(self.objects.keys())}
        stats = self.objects.stats()
        assert (stats["objects"], stats["bytes"]) == (len(found), sum(found.values()))
        assert stats["bytes"] <= CAPACITY
        assert set(self.held) <= set(found)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.objects.close()
            self.pool.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_blocks_are_saved_loaded_purged_and_verified() -> None:
    with farpool.Pool(fast="1MiB", dram="2MiB", nvme="8MiB") as pool:
        objects = PoolObjects(pool, "6MiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, values = blocks(cache, 300)
            assert cache.is_mapped()
            assert cache.save(keys, values) == [None] * 300
            assert cache.lookup(keys).leading == 300
            into = targets(300)
            assert cache.load(keys, into) == [None] * 300
            assert [b"".join(one) for one in into] == [b"".join(one) for one in values]
            assert cache.load(keys[:1], [bytearray(100)]) == [Reason.WRONG_SIZE]
            assert list(namespaces(objects).values()) == [NAMESPACE]
            assert cache.purge() == 300
            assert cache.lookup(keys).reasons == [Reason.ABSENT] * 300
            objects.close()
            assert cache.save(keys[:1], values[:1]) == [Reason.CLOSED]
    assert cache.lookup(keys).reasons == [Reason.CLOSED] * 300


def test_what_is_costly_to_compute_stays_longer() -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, _ = blocks(cache, 96)
            for number, key in enumerate(keys):
                cache.save([key], [bytes(8 * KIB)], cost=1.0 if number % 2 else 0.001)
            found = cache.lookup(keys).found
            assert sum(found[1::2]) > 2 * sum(found[0::2])


def test_a_prefix_cache_works_over_a_pool_as_over_nodes() -> None:
    layers = [Layer(2 * 2 * 8 * 4)] * 3
    tokens = list(range(70))
    torch.manual_seed(0)
    pairs = [(torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)) for _ in layers]
    with (
        farpool.Pool(fast="32KiB", dram="256KiB") as pool,
        PrefixCache(PoolObjects(pool, "128KiB"), layers, model="m", weights_id="1", dtype="float32") as cache,
    ):
        assert cache.save(tokens[:64], TensorMemory(pairs)) == 4
        into = [tuple(torch.zeros_like(one) for one in pair) for pair in pairs]
        assert cache.load(cache.lookup(tokens), TensorMemory(into)) == 64
        assert all(
            torch.equal(a, b) for old, new in zip(pairs, into, strict=True) for a, b in zip(old, new, strict=True)
        )
        assert cache.pin(tokens[:64], 100) == 4
        cache.weights_id = "2"
        assert cache.lookup(tokens).tokens == 0


def test_many_threads_use_one_pool() -> None:
    with farpool.Pool(fast="256KiB", dram="2MiB") as pool:
        objects = PoolObjects(pool, "1MiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, values = blocks(cache, 400)

            def work(seed: int) -> int:
                loaded = 0
                for turn in range(60):
                    at = (seed * 61 + turn * 17) % 396
                    assert set(cache.save(keys[at : at + 4], values[at : at + 4])) <= {None, Reason.FULL}
                    into = targets(4)
                    for number, reason in enumerate(cache.load(keys[at : at + 4], into)):
                        assert reason in (None, Reason.ABSENT)
                        if reason is None:
                            loaded += 1
                            assert b"".join(into[number]) == b"".join(values[at + number])
                return loaded

            with ThreadPoolExecutor(4) as threads:
                assert all(job.result(4 * PATIENCE) > 100 for job in [threads.submit(work, one) for one in range(4)])
        assert objects.stats()["bytes"] <= MIB


def test_wrong_settings_are_refused() -> None:
    with farpool.Pool(fast="32KiB", dram="64KiB") as pool:
        for wrong in (0, -1, "many"):
            with pytest.raises(ConfigError, match="capacity"):
                PoolObjects(pool, wrong)
    with pytest.raises(ConfigError, match="a list of addresses"):
        BlockCache("tcp://127.0.0.1:1", NAMESPACE)


def test_a_forked_child_is_told_that_its_objects_are_closed_also_while_a_thread_was_at_work() -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        cache = BlockCache(objects, NAMESPACE, timeout=PATIENCE)
        keys, values = blocks(cache, 2)
        assert cache.save(keys, values) == [None] * 2

        def child() -> None:
            assert cache.lookup(keys).reasons == [Reason.CLOSED] * 2
            assert cache.load(keys, targets(2)) == [Reason.CLOSED] * 2
            assert cache.save(keys, values) == [Reason.CLOSED] * 2
            assert cache.pin(keys, 1) == [False] * 2

        with objects._lock:  # as a thread that is just putting something has it
            in_forked_child(child)
        assert cache.load(keys, targets(2)) == [None] * 2
        objects.close()
        assert cache.load(keys, targets(2)) == [Reason.CLOSED] * 2
