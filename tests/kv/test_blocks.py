"""Blocks on real nodes: saved once, loaded whole, and everything that goes wrong a miss with its reason."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError, NodeTimeoutError
from farpool.kv import BlockCache, Reason, token_chain
from farpool.kv.blocks import namespaces, purge
from farpool.kv.header import HEADER_BYTES, pack_header
from farpool.kv.journal import recorded, runs
from tests.forking import in_forked_child
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE, eventually, stats
from tests.store.local_nodes import LocalNode, store_over

BLOCK = 4096


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("256MiB") as node:
        yield node


@pytest.fixture(params=["mapped", "tcp"])
def cache(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[BlockCache]:
    namespace = replace(NAMESPACE, extra=(("test", request.node.name),))
    with BlockCache([node.address], namespace, transport=request.param, timeout=PATIENCE) as cache:
        yield cache


def blocks(cache: BlockCache, count: int, first: int = 0) -> tuple[list[bytes], list[tuple[bytes, ...]]]:
    """Keys of a chain, and payloads of two parts each that say which block they are."""
    keys = [cache.key(chain) for chain in token_chain(range(first, first + 16 * count), 16)]
    return keys, [(bytes([n % 256]) * 96, bytes([first % 256, n % 256]) * (BLOCK // 2 - 48)) for n in range(count)]


def targets(count: int) -> list[tuple[bytearray, bytearray]]:
    return [(bytearray(1000), bytearray(BLOCK - 1000)) for _ in range(count)]


def test_blocks_are_loaded_as_they_were_saved_into_parts_of_other_sizes(cache: BlockCache) -> None:
    keys, values = blocks(cache, 5)
    assert cache.lookup(keys).reasons == [Reason.ABSENT] * 5
    assert cache.save(keys[:3], values[:3]) == [None] * 3
    found = cache.lookup(keys)
    assert found.leading == 3
    assert found.sizes == [BLOCK] * 3 + [None] * 2
    into = targets(5)
    assert cache.load(keys, into) == [None] * 3 + [Reason.ABSENT] * 2
    assert [b"".join(one) for one in into[:3]] == [b"".join(one) for one in values[:3]]


def test_blocks_that_are_there_are_not_sent_again_and_stay(cache: BlockCache, node: RunningNode) -> None:
    keys, values = blocks(cache, 4)
    assert cache.save(keys[:2], values[:2]) == [None] * 2
    before = cache.stats()["save.bytes"], stats(node.address)["objects"]
    assert cache.save(keys[:2], [b"other"] * 2) == [None] * 2
    assert (cache.stats()["save.bytes"], stats(node.address)["objects"]) == before
    assert cache.save(keys, values) == [None] * 4
    assert cache.stats()["save.bytes"] == 4 * (BLOCK + HEADER_BYTES)
    (into,) = targets(1)
    assert cache.load(keys[:1], [into]) == [None]
    assert b"".join(into) == b"".join(values[0])


def test_a_payload_of_another_size_is_a_miss(cache: BlockCache) -> None:
    keys, values = blocks(cache, 1)
    assert cache.save(keys, values) == [None]
    for nbytes in (0, BLOCK - 1, BLOCK + 1, 2 * BLOCK):
        assert cache.load(keys, [bytearray(nbytes)]) == [Reason.WRONG_SIZE]


@pytest.mark.parametrize("kind", ["short", "another key's", "another version's", "no header"])
def test_bytes_that_are_not_this_block_are_a_miss(cache: BlockCache, node: RunningNode, kind: str) -> None:
    keys, _ = blocks(cache, 2)
    header = pack_header(keys[1] if kind == "another key's" else keys[0], BLOCK, BLOCK)
    if kind == "another version's":
        header = header[:6] + b"\2\0" + header[8:]
    value = {"short": b"1", "no header": bytes(BLOCK + HEADER_BYTES)}.get(kind, header + bytes(BLOCK))
    with Store(node.address, timeout=PATIENCE) as store:
        store.put(keys[0], value)
    into = bytearray(BLOCK)
    expected = Reason.WRONG_VERSION if kind == "another version's" else Reason.FOREIGN
    assert cache.load(keys[:1], [into]) == [expected]


@pytest.mark.parametrize("field", ["weights", "dtype", "layout", "tenant", "codec"])
def test_who_disagrees_with_the_writer_finds_nothing(node: RunningNode, field: str) -> None:
    ours = replace(NAMESPACE, extra=(("test", field),))
    theirs = replace(ours, **{field: "zstd" if field == "codec" else "another"})
    with (
        BlockCache([node.address], ours, timeout=PATIENCE) as writer,
        BlockCache([node.address], theirs, timeout=PATIENCE) as reader,
    ):
        keys, values = blocks(writer, 1)
        assert writer.save(keys, values) == [None]
        (foreign,), _ = blocks(reader, 1)
        assert reader.load([foreign], [bytearray(BLOCK)]) == [Reason.ABSENT]


def test_more_than_one_piece_is_moved_in_several_requests(cache: BlockCache) -> None:
    keys, _ = blocks(cache, 5)
    values = [bytes([n]) * (20 << 20) for n in range(5)]
    assert cache.save(keys, values) == [None] * 5
    into = [bytearray(20 << 20) for _ in keys]
    assert cache.load(keys, into) == [None] * 5
    assert all(bytes(one) == value for one, value in zip(into, values, strict=True))


def test_pinned_blocks_outlive_those_that_push_them_out(tmp_path: Path) -> None:
    with running_node("64MiB") as node, BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        keys, _ = blocks(cache, 200)
        values = [bytes(1 << 20)] * len(keys)
        assert cache.save(keys[:4], values[:4]) == [None] * 4
        assert cache.pin([*keys[:2], keys[-1]], ttl=1000) == [None, None, Reason.ABSENT]
        for start in range(4, 200, 4):
            cache.save(keys[start : start + 4], values[:4])
        assert cache.lookup(keys[:4]).found == [True, True, False, False]
        with Store(node.address, timeout=PATIENCE) as store:
            assert [info.pins for key in keys[:2] if (info := store.stat(key))] == [1, 1]
            cache.pin(keys[:1], ttl=1000)
            cache.unpin(keys)
            assert [info.pins for key in keys[:2] if (info := store.stat(key))] == [0, 0]


def test_a_namespace_is_purged_and_others_stay(node: RunningNode) -> None:
    one, other = (replace(NAMESPACE, extra=(("purge", n),)) for n in range(2))
    with (
        BlockCache([node.address], one, timeout=PATIENCE) as first,
        BlockCache([node.address], other, timeout=PATIENCE) as second,
        Store(node.address, timeout=PATIENCE) as store,
    ):
        for cache in (first, second):
            assert cache.save(*blocks(cache, 3)) == [None] * 3
        assert {one.digest, other.digest} <= set(namespaces(store))
        assert namespaces(store)[one.digest] == one
        assert purge(store, one.digest) == 3
        assert one.digest not in namespaces(store)
        assert first.lookup(blocks(first, 3)[0]).leading == 0
        assert second.lookup(blocks(second, 3)[0]).leading == 3
        assert second.purge() == 3


def test_a_node_that_is_killed_costs_one_wait_and_its_blocks(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node()) for _ in range(2)]
        cache = stack.enter_context(
            BlockCache([one.address for one in nodes], NAMESPACE, transport="tcp", timeout=PATIENCE)
        )
        keys, values = blocks(cache, 40)
        assert cache.save(keys, values) == [None] * 40
        nodes[0].kill()
        into = targets(40)
        outcomes = cache.load(keys, into)
        assert set(outcomes) == {None, Reason.NODE_AWAY}
        for outcome, target, value in zip(outcomes, into, values, strict=True):
            assert outcome is not None or b"".join(target) == b"".join(value)
        again = cache.lookup(keys)
        assert [reason for reason in again.reasons] == outcomes
        more, _ = blocks(cache, 10, first=1000)
        assert cache.save(more, values[:10]) == [None] * 10


def test_a_node_that_stands_still_is_late_once_and_then_away(tmp_path: Path) -> None:
    with running_node() as node, BlockCache([node.address], NAMESPACE, transport="tcp", timeout=PATIENCE) as cache:
        keys, values = blocks(cache, 3)
        assert cache.save(keys, values) == [None] * 3
        with node.suspended():
            assert cache.load(keys, targets(3), timeout=0.2) == [Reason.LATE] * 3
            assert set(cache.load(keys, targets(3), timeout=0.2)) <= {Reason.LATE, Reason.NODE_AWAY}
            assert set(cache.save(*blocks(cache, 3, first=50), timeout=0.2)) <= {Reason.LATE, Reason.NODE_AWAY}
        eventually(lambda: cache.load(keys, targets(3)) == [None] * 3)


def test_nothing_waits_for_a_node_that_never_was(tmp_path: Path) -> None:
    with BlockCache(["tcp://127.0.0.1:1"], NAMESPACE, timeout=0.2) as cache:
        keys, values = blocks(cache, 2)
        cache.lookup(keys)
        assert cache.lookup(keys).reasons == [Reason.NODE_AWAY] * 2
        assert cache.load(keys, targets(2)) == [Reason.NODE_AWAY] * 2
        assert cache.save(keys, values) == [Reason.NODE_AWAY] * 2
        assert cache.pin(keys, 1) == [Reason.NODE_AWAY] * 2
        assert cache.drop(keys) == 0


def test_a_damaged_block_is_a_miss(tmp_path: Path) -> None:
    local = LocalNode(tmp_path, 0, mapped=True)
    try:
        with store_over([local]) as store, BlockCache(store, NAMESPACE) as cache:
            keys, values = blocks(cache, 3)
            assert cache.save(keys, values) == [None] * 3
            local.damage(values[1][1])
            assert cache.load(keys, targets(3)) == [None, Reason.CORRUPT, None]
    finally:
        local.kill()


def test_a_full_node_is_a_reason(tmp_path: Path) -> None:
    with running_node("64MiB") as node, BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        keys, _ = blocks(cache, 1)
        assert cache.save(keys, [bytes(100 << 20)]) == [Reason.FULL]


def test_many_threads_load_only_what_they_asked_for(cache: BlockCache) -> None:
    keys, values = blocks(cache, 64)

    def work(seed: int) -> None:
        for turn in range(30):
            number = (seed * 7 + turn) % 60
            chosen = slice(number, number + 4)
            assert cache.save(keys[chosen], values[chosen]) == [None] * 4
            into = targets(4)
            assert cache.load(keys[chosen], into) == [None] * 4
            assert [b"".join(one) for one in into] == [b"".join(one) for one in values[chosen]]

    with ThreadPoolExecutor(6) as threads:
        for one in [threads.submit(work, seed) for seed in range(6)]:
            one.result(PATIENCE)


def test_a_forked_child_has_connections_of_its_own(cache: BlockCache) -> None:
    keys, values = blocks(cache, 2)
    assert cache.save(keys, values) == [None] * 2

    def child() -> None:
        into = targets(2)
        assert cache.load(keys, into) == [None] * 2
        assert b"".join(into[1]) == b"".join(values[1])
        cache.close()

    in_forked_child(child)
    assert cache.load(keys, targets(2)) == [None] * 2


def test_jobs_are_drained_and_a_closed_cache_only_misses(node: RunningNode) -> None:
    cache = BlockCache([node.address], NAMESPACE, timeout=PATIENCE)
    gate = threading.Event()
    job = cache.submit(gate.wait, PATIENCE)
    assert not cache.drain(0.01)
    gate.set()
    assert cache.drain(PATIENCE)
    assert job.result() is True
    cache.close()
    cache.close()
    keys, values = blocks(cache, 1)
    assert cache.lookup(keys).reasons == [Reason.CLOSED]
    assert cache.load(keys, targets(1)) == [Reason.CLOSED]
    assert cache.save(keys, values) == [Reason.CLOSED]


def test_the_journal_says_what_became_of_a_request_also_to_other_processes(cache: BlockCache) -> None:
    keys, values = blocks(cache, 3)
    name = f"request {time.monotonic_ns()}"
    cache.save(keys[:2], values[:2], request=name)
    cache.load(keys, targets(3), request=name)
    entries = recorded(name)
    assert [(one.step, one.blocks, one.done, dict(one.reasons)) for one in entries] == [
        ("save", 2, 2, {}),
        ("load", 3, 2, {"absent": 1}),
    ]
    eventually(lambda: (os.getpid(), entries) in list(runs(name)))


@pytest.mark.parametrize(
    ("name", "value"), [("timeout", 0), ("timeout", float("nan")), ("threads", 0), ("replicas", 2), ("ttl", -1)]
)
def test_a_wrong_setting_is_refused_at_once(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        BlockCache(["tcp://127.0.0.1:1"], NAMESPACE, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", ["get_into_many", "put_many"])
def test_a_batch_of_many_pieces_ends_with_the_first_that_is_late(
    cache: BlockCache, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    keys, values = blocks(cache, 8)
    if slow == "get_into_many":
        cache.save(keys, values)
    monkeypatch.setattr("farpool.kv.pieces._PIECE_BYTES_MAX", 2 * (BLOCK + HEADER_BYTES))
    calls = cache._link.calls()
    moved = getattr(calls, slow)
    asked: list[int] = []

    def second_is_late(items: list[bytes | tuple[bytes, object]], *given: object) -> object:
        if len(items[0] if isinstance(items[0], bytes) else items[0][0]) == 64:  # not the namespace's description
            asked.append(len(items))
            if len(asked) == 2:
                return [NodeTimeoutError("too late")] * len(items)
        return moved(items, *given)

    monkeypatch.setattr(calls, slow, second_is_late)
    late = [None] * 2 + [Reason.LATE] * 6
    assert (cache.load(keys, targets(8)) if slow == "get_into_many" else cache.save(keys, values)) == late
    assert asked == [2, 2]


def test_a_block_of_another_version_is_left_to_programs_of_that_version(cache: BlockCache, node: RunningNode) -> None:
    (key,), _ = blocks(cache, 1)
    header = pack_header(key, BLOCK, BLOCK)
    with Store(node.address) as store:
        store.put_parts(key, [header[:6] + b"\2\0" + header[8:], bytes(BLOCK)])  # version 2 of the layout
    assert cache.load([key], targets(1)) == [Reason.WRONG_VERSION]
    assert cache.lookup([key]).leading == 1
