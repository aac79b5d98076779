"""Blocks in a pool of the same process: right under random use, inside the capacity, ends of prefixes gone first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import farpool
from farpool.abc.objects import About
from farpool.errors import ConfigError, NodeTimeoutError
from farpool.kv import BlockCache, Layer, PoolObjects, PrefixCache, Reason, TensorMemory
from farpool.kv.blocks import namespaces
from tests.forking import in_forked_child
from tests.kv.test_blocks import BLOCK, blocks, targets
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
        before = [b"key %d" % one for one in range(number // 3 * 3, number)]
        there = self.is_there(key)
        follows = not before or self.is_there(before[-1])
        about = About(cost_us=cost, parents={key: before[-1]} if before else {}, tenant=f"tenant {number // 9}")
        (outcome,) = self.objects.put_many([(key, memoryview(value))], PATIENCE, about)
        if isinstance(outcome, Exception):
            held = {one for held in self.held for one in first_to(held)} | set(before)
            assert not follows or sum(len(self.values.get(one, b"")) for one in held) + nbytes > CAPACITY - 9
        else:
            assert outcome == ("present" if there else "stored")
            assert there or follows
            if not there:
                self.values[key] = value

    def is_there(self, key: bytes) -> bool:
        return self.objects.lookup([key], PATIENCE)[0] is not None

    @rule(number=st.integers(0, 20), cut=st.integers(0, 200))
    def get(self, number: int, cut: int) -> None:
        key = b"key %d" % number
        (size,) = self.objects.lookup([key], PATIENCE)
        into = (bytearray(cut), bytearray(16 * KIB))
        (found,) = self.objects.get_into_many([key], [tuple(map(memoryview, into))], PATIENCE)
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
        there = self.is_there(key)
        assert self.objects.drop(key) == there
        self.held.pop(key, None)

    @invariant()
    def it_stays_inside_its_capacity(self) -> None:
        found = {key: max(1, len(self.values[key])) for key in list(self.objects.keys())}
        stats = self.objects.stats()
        assert (stats.blocks, stats.nbytes) == (len(found), sum(found.values()))
        assert stats.nbytes == sum(tenant.nbytes for tenant in stats.tenants.values())
        assert stats.nbytes <= CAPACITY
        assert set(self.held) <= set(found)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.objects.close()
            self.pool.close()


def first_to(key: bytes) -> list[bytes]:
    """Keys of a prefix of three, up to one of them."""
    number = int(key.removeprefix(b"key "))
    return [b"key %d" % one for one in range(number // 3 * 3, number + 1)]


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


def test_what_is_costly_and_used_again_stays_among_much_that_is_used_once() -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, _ = blocks(cache, 1640)
            wanted, once = keys[:40], keys[40:]
            for start in range(0, len(once), 80):  # more than fits comes between two uses
                for key, reason in zip(wanted, cache.load(wanted, [bytearray(6 * KIB) for _ in wanted]), strict=True):
                    if reason is not None:
                        cache.save([key], [bytes(6 * KIB)], cost=1.0)
                for key in once[start : start + 80]:
                    cache.save([key], [bytes(6 * KIB)], cost=0.001)
            found = cache.lookup(keys).found
        stats = objects.stats()
    assert sum(found[:40]) == 40
    assert stats.policy != "lru"
    assert stats.switches > 0
    saved = {shadow.policy: shadow.saved_seconds for shadow in stats.shadows}
    assert saved[stats.policy] > saved["lru"]


def test_prefixes_leave_from_their_ends() -> None:
    layers = [Layer(512, "sliding", 32), Layer(256), Layer(512, "recurrent")]
    memory = OneByteEach(layers)
    with (
        farpool.Pool(fast="64KiB", dram="512KiB") as pool,
        PrefixCache(
            objects := PoolObjects(pool, "240KiB"), layers, model="m", weights_id="1", dtype="uint8", timeout=PATIENCE
        ) as cache,
    ):
        prompts = [[*range(32), *range(1000 * one, 1000 * one + 48 + one * 16 % 80)] for one in range(1, 15)]
        cut = 0
        for newest in prompts:
            cache.save(newest, memory)
            for prompt in prompts:
                keys, *_ = cache._sequence(prompt, "")
                blocks = len(keys) // 3
                full, *others = (
                    cache._blocks.lookup(keys[group * blocks : (group + 1) * blocks]).found for group in (1, 0, 2)
                )
                assert full == sorted(full, reverse=True)
                cut += 2 < sum(full) < len(full)
                for other in others:
                    assert all(whole or not own for whole, own in zip(full, other, strict=True))
            assert cache.lookup(newest, leave=0).found == len(newest)
        assert cut > 0
        stats = objects.stats().tenants[""]
        assert stats.evicted > 30
        assert stats.refused == 0


class OneByteEach:
    """Memory whose bytes are all alike, of any layers."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers

    def parts(self, layer: int, start: int, stop: int) -> list[bytes]:
        one = self._layers[layer]
        return [bytes(one.nbytes * (1 if one.kind == "recurrent" else stop - start))]


def test_a_block_whose_predecessor_is_gone_is_not_taken() -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        with BlockCache(objects, NAMESPACE, timeout=PATIENCE) as cache:
            keys, values = blocks(cache, 3)
            parents = dict(zip(keys[1:], keys, strict=False))
            assert cache.save(keys[1:], values[1:], parents=parents) == [Reason.FULL] * 2
            assert cache.save(keys, values, parents=parents) == [None] * 3


def test_use_is_counted_for_each_tenant() -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        for tenant, count in (("a", 3), ("b", 2)):
            with BlockCache(objects, replace(NAMESPACE, tenant=tenant), timeout=PATIENCE) as cache:
                keys, values = blocks(cache, count)
                cache.save(keys, values, cost=0.5)
                for _ in range(count):
                    assert cache.load(keys, targets(count)) == [None] * count
                assert cache.load([cache.key(b"another")], targets(1)) == [Reason.ABSENT]
        stats = objects.stats()
        assert {name: (one.hits, one.inserted, one.saved_seconds) for name, one in stats.tenants.items()} == {
            "a": (9, 4, 4.5),  # with the description of the namespace
            "b": (4, 3, 2.0),
        }
        assert sum(one.nbytes for one in stats.tenants.values()) == stats.nbytes > 5 * BLOCK


def test_what_is_being_written_is_neither_found_nor_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        copying, go_on = threading.Event(), threading.Event()
        copy = PoolObjects._copy

        def slowly(self: PoolObjects, *args: Any, **settings: Any) -> None:
            copying.set()
            assert go_on.wait(PATIENCE)
            copy(self, *args, **settings)

        monkeypatch.setattr(PoolObjects, "_copy", slowly)
        item = (b"key", memoryview(bytes(KIB)))
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(objects.put_many, [item], PATIENCE, About())
            assert copying.wait(PATIENCE)
            assert objects.lookup([b"key"], PATIENCE) == [None]
            assert list(objects.keys()) == []
            assert objects.put_many([item], PATIENCE, About()) == ["present"]
            go_on.set()
            assert first.result(PATIENCE) == ["stored"]
        assert objects.lookup([b"key"], PATIENCE) == [KIB]
        assert isinstance(objects.put_many([(b"late", memoryview(bytes(KIB)))], -1.0, About())[0], NodeTimeoutError)
        assert objects.stats().blocks == 1
        objects.close()


@pytest.mark.parametrize("nbytes", [10, 2 * KIB])
def test_a_value_that_was_replaced_before_it_is_read_has_its_own_length(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    with farpool.Pool(fast="256KiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "512KiB")
        assert objects.put_many([(b"key", memoryview(b"a" * KIB))], PATIENCE, About()) == ["stored"]
        each = PoolObjects._each

        def replaced_first(self: PoolObjects, *args: Any) -> Any:
            monkeypatch.setattr(PoolObjects, "_each", each)
            assert objects.drop(b"key")
            assert objects.put_many([(b"key", memoryview(b"b" * nbytes))], PATIENCE, About()) == ["stored"]
            return each(self, *args)

        monkeypatch.setattr(PoolObjects, "_each", replaced_first)
        assert objects.get_many([b"key", b"absent"]) == [b"b" * nbytes, None]
        objects.close()


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
        assert objects.stats().nbytes <= MIB


def test_wrong_settings_are_refused() -> None:
    with farpool.Pool(fast="32KiB", dram="64KiB") as pool:
        for wrong in (0, -1, "many"):
            with pytest.raises(ConfigError, match="capacity"):
                PoolObjects(pool, wrong)
    with pytest.raises(ConfigError, match="expected addresses of nodes or one registry"):
        BlockCache(["tcp://127.0.0.1:1", "etcd://127.0.0.1:2"], NAMESPACE)


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
            assert cache.pin(keys, 1) == [Reason.CLOSED] * 2

        with objects._lock:  # as a thread that is just putting something has it
            in_forked_child(child)
        assert cache.load(keys, targets(2)) == [None] * 2
        objects.close()
        assert cache.load(keys, targets(2)) == [Reason.CLOSED] * 2
