"""Blocks that are brought near before they are needed: into this process's memory, or into that of the nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.cache import PrefixCache
from farpool.kv.journal import recorded
from farpool.kv.near import NearMemory
from tests.forking import in_forked_child
from tests.kv.test_demote import GIVEN, LAYERS
from tests.kv.test_prefix import BLOCK, FULL, KINDS, TOKENS, check, keys_of, make, node, save_steps, target, teach
from tests.nodes import PATIENCE, eventually, stats

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]


@pytest.fixture(scope="module")
def with_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    file: Path = tmp_path_factory.mktemp("nvme") / "far.nvme"
    with running_node("256MiB", nvme=(str(file), "256MiB")) as node:
        yield node


def test_what_is_near_costs_nothing_and_says_nothing_of_the_link(make: Make) -> None:
    cache = make([FULL], near_bytes=1 << 20, hold_out=False)
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.prefetch_by(TOKENS[:17], PATIENCE).result(PATIENCE) == 4
    teach(cache, linear=1e-9, seconds_a_byte=1e-3)  # computing is far faster than the link
    measured = cache.judge._cost.load_seconds(1000)
    asked = cache.stats()["lookup.done"]
    match = cache.lookup(TOKENS[:17], request="near")
    assert (match.tokens, match.reason) == (16, None)
    assert "memory of this process" in match.plan.why
    assert [entry.note for entry in recorded("near") if entry.step == "decision"] == [match.plan.why]
    for _ in range(10):
        assert cache.load(match, target([FULL], TOKENS)) == 16
    assert cache.judge._cost.load_seconds(1000) == measured
    assert cache.stats()["lookup.done"] == asked
    assert cache.lookup(TOKENS[:13], leave=0).tokens == 12


def test_of_a_prefix_that_is_partly_near_only_the_rest_is_charged_and_loaded(make: Make) -> None:
    layers = KINDS["full"]
    cache = make(layers, near_bytes=1 << 20)
    save_steps(cache, layers, TOKENS[:24])
    assert cache.prefetch_by(TOKENS[:8], PATIENCE, leave=0).result(PATIENCE) == 2
    before = cache.stats()
    match = cache.lookup(TOKENS)
    assert match.tokens == 24
    assert match.far_bytes == 4 * BLOCK * sum(layer.nbytes for layer in layers)
    into = target(layers, TOKENS)
    assert cache.load(match, into) == 24
    check(layers, TOKENS, into, 24)
    assert cache.stats()["load.done"] == before["load.done"] + 4


def test_only_what_a_lookup_would_load_is_prefetched(make: Make) -> None:
    layers = KINDS["all"]
    cache = make(layers, near_bytes=1 << 20)
    save_steps(cache, layers, TOKENS[:24])
    before = cache.stats().get("load.done", 0)
    # Two groups need all six blocks, the window of seven tokens two of them, and the state the last one.
    assert cache.prefetch_by(TOKENS, PATIENCE, request="ahead").result(PATIENCE) == 6 + 6 + 2 + 1
    assert cache.stats()["load.done"] == before + 15
    assert [(one.step, one.done) for one in recorded("ahead")] == [("lookup", 24), ("load", 15)]
    into = target(layers, TOKENS)
    assert cache.load(cache.lookup(TOKENS), into) == 24
    check(layers, TOKENS, into, 24)
    assert cache.stats()["load.done"] == before + 15


def test_without_near_memory_blocks_come_back_into_that_of_the_nodes(with_file: RunningNode) -> None:
    with PrefixCache([with_file.address], LAYERS, weights_id="warmed", **GIVEN) as cache:
        save_steps(cache, LAYERS, TOKENS[:24])
        assert cache.demote(TOKENS[:24]).blocks == 6
        eventually(lambda: stats(with_file.address)["nvme_objects"] >= 6)
        before = stats(with_file.address)["promotions"]
        assert cache.prefetch_by(TOKENS[:24], PATIENCE, request="warm", leave=0).result(PATIENCE) == 6
        assert stats(with_file.address)["promotions"] == before + 6
        assert [(one.step, one.done) for one in recorded("warm")] == [("lookup", 6), ("pin", 6)]
        assert cache.prefetch_by(TOKENS[:24], 0.0).result(PATIENCE) == 0
        assert cache.prefetch_by([5] * 24, PATIENCE).result(PATIENCE) == 0
        with Store(with_file.address, timeout=PATIENCE) as store:
            assert [info.pins for key in keys_of(cache, TOKENS[:24]) if (info := store.stat(key))] == [1] * 6


def test_a_child_of_a_fork_needs_no_lock_that_a_thread_of_its_parent_held(make: Make) -> None:
    cache = make([FULL], near_bytes=1 << 20)
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.prefetch_by(TOKENS, PATIENCE).result(PATIENCE) == 4
    locks = [cache._near._lock, cache._lookups._disagreements._lock, cache._background._changed]
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1], locks[2]:
            holding.set()
            over.wait(PATIENCE)

    def child() -> None:
        into = target([FULL], TOKENS)
        assert cache.load(cache.lookup(TOKENS), into, wait=False).result(PATIENCE) == 16
        check([FULL], TOKENS, into, 16)
        assert cache.lookup([3] * 16).found == 0
        assert cache.prefetch_by(TOKENS, PATIENCE).result(PATIENCE) == 4
        cache.close()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(PATIENCE)
    try:
        in_forked_child(child)
    finally:
        over.set()
        thread.join(PATIENCE)


def test_blocks_that_were_used_longest_ago_leave_and_those_wanted_again_stay() -> None:
    near = NearMemory(30)

    def bring(*names: bytes) -> list[bytes]:
        places = near.reserve([(name, 10) for name in names])
        for name, place in places.items():
            place[:] = name * 10
            near.keep(name, place)
        return list(places)

    assert bring(b"a", b"b", b"c") == [b"a", b"b", b"c"]
    assert bring(b"a", b"d", b"e", b"f") == [b"d", b"e"]  # `a` is wanted, and for `f` there is no room
    assert near.present([b"a", b"b", b"c", b"d", b"e", b"f"]) == {b"a", b"d", b"e"}
    into = [bytearray(10) for _ in range(2)]
    assert near.copy([b"b", b"d"], [memoryview(one) for one in into]) == [0]
    assert into == [bytes(10), b"d" * 10]
    near.clear()
    places = near.reserve([(b"g", 10), (b"g", 10), (b"h", 30)])
    assert list(places) == [b"g"]
    near.release(places[b"g"])
    assert bring(b"h", b"i", b"j") == [b"h", b"i", b"j"]
