"""The probe of a connector: blocks are served only after a known one has come back through the engine's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ProbeError
from farpool.kv.blocks import BlockCache
from farpool.kv.journal import recorded
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock, Probe
from farpool.kv.reasons import Reason
from tests.forking import in_forked_child
from tests.nodes import PATIENCE

NBYTES = 4096
AWAY = "tcp://127.0.0.1:1"
"""Address at which there is no node."""
SPACE = Namespace(
    engine="test",
    model="tiny",
    weights="1",
    dtype="bfloat16",
    layout="plain",
    tokens_per_block=16,
    groups=(Group(("0..1",), NBYTES),),
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as one:
        yield one


class Memory:
    """An engine's memory of four blocks, of which a connector probes the second."""

    def __init__(self) -> None:
        self.bytes = bytearray(b"\x11" * 4 * NBYTES)

    def part(self, number: int) -> memoryview:
        return memoryview(self.bytes)[number * NBYTES : (number + 1) * NBYTES]

    def block(self, **changes: Any) -> EngineBlock:
        def write(data: bytes) -> None:
            self.part(1)[:] = data

        own = EngineBlock(NBYTES, write, lambda: bytes(self.part(1)), lambda: [self.part(1)], lambda: [self.part(1)])
        return replace(own, **changes)


def guarded(address: str, **settings: Any) -> tuple[BlockCache, Probe]:
    cache, probe = BlockCache([address], SPACE, **{"timeout": PATIENCE, **settings}), Probe("test")
    probe.guard(cache, cache)
    return cache, probe


def key(cache: BlockCache, number: int) -> bytes:
    return cache.key(bytes([number]) * 32)


def test_a_cache_serves_after_its_probe_has_passed_and_the_probe_leaves_nothing(node: RunningNode) -> None:
    cache, probe = guarded(node.address)
    memory = Memory()
    with cache, Store(node.address) as store:
        before = set(store.keys())
        probe.check(memory.block())
        assert (probe.reason, probe.error) == (None, None)
        assert set(store.keys()) == before
        assert memory.bytes == b"\x11" * 4 * NBYTES
        assert cache.stats() == {}
        assert cache.save([key(cache, 1)], [b"v" * NBYTES]) == [None]
        assert cache.lookup([key(cache, 1)]).found == [True]


def faults() -> dict[str, Callable[[Memory], EngineBlock]]:
    """Return faults of a connector that no checksum detects, by name."""

    def swapped(memory: Memory) -> EngineBlock:
        halves = [memory.part(1)[NBYTES // 2 :], memory.part(1)[: NBYTES // 2]]
        return memory.block(targets=lambda: [tuple(halves)])

    def damaged(memory: Memory) -> EngineBlock:
        def land(targets: Sequence[Any]) -> None:
            memory.part(1)[NBYTES - 1] ^= 1

        return memory.block(land=land)

    def raises(memory: Memory) -> EngineBlock:
        def read() -> bytes:
            raise AttributeError("get_data_page")

        return memory.block(read=read)

    return {
        "another block is saved": lambda memory: memory.block(values=lambda: [memory.part(0)]),
        "it is loaded into another place": lambda memory: memory.block(targets=lambda: [memory.part(2)]),
        "two halves are swapped": swapped,
        "one bit is damaged after the checksum": damaged,
        "the engine's function has gone": raises,
    }


@pytest.mark.parametrize("fault", faults())
@pytest.mark.parametrize("is_there", [True, False])
def test_a_probe_with_other_bytes_stops_the_cache_with_and_without_a_node(
    node: RunningNode, fault: str, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with BlockCache([node.address], SPACE, timeout=PATIENCE) as other:
        assert other.save([key(other, 2)], [b"w" * NBYTES]) == [None]  # it is there for the taking
    cache, probe = guarded(node.address) if is_there else guarded(AWAY, timeout=0.05)
    with cache, caplog.at_level(logging.ERROR, "farpool.kv"):
        probe.check(faults()[fault](Memory()))
        assert isinstance(probe.error, ProbeError)
        assert "This cache loads and saves no blocks" in caplog.text
        assert cache.lookup([key(cache, 2)], request=fault).reasons == [Reason.UNPROVED]
        target = bytearray(NBYTES)
        assert cache.load([key(cache, 2)], [target]) == [Reason.UNPROVED]
        assert target == bytes(NBYTES)
        assert cache.save([key(cache, 3)], [b"x" * NBYTES]) == [Reason.UNPROVED]
        assert recorded(fault)[0].reasons == {"unproved": 1}
        probe.check(Memory().block())  # another part of the memory that is whole changes nothing
        assert cache.lookup([key(cache, 2)]).found == [False]


def test_a_node_that_starts_later_is_probed_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_node() as node:
        address, caches = node.address, []
        for _ in range(2):
            cache, probe = guarded(AWAY, timeout=0.05)
            probe.check(Memory().block())
            assert probe.reason in (Reason.NODE_AWAY, Reason.LATE)
            assert cache.lookup([key(cache, 4)]).reasons == [probe.reason]
            assert probe.error is None
            cache.close()
            cache = BlockCache([address], SPACE, timeout=PATIENCE)  # the node, which has come
            probe.guard(cache, cache)
            caches.append((cache, probe))
        (good, good_probe), (bad, bad_probe) = caches
        assert good.lookup([key(good, 4)], timeout=PATIENCE).reasons == [good_probe.reason]  # too short for a probe
        assert good.save([key(good, 4)], [b"y" * NBYTES]) == [None]
        assert good_probe.reason is None
        load = BlockCache.load

        def damaging(self: BlockCache, keys: Sequence[bytes], targets: Sequence[Any], **named: Any) -> Any:
            reasons = load(self, keys, targets, **named)
            memoryview(targets[0])[7] ^= 1
            return reasons

        monkeypatch.setattr(BlockCache, "load", damaging)
        assert bad.lookup([key(bad, 4)]).reasons == [Reason.UNPROVED]
        assert isinstance(bad_probe.error, ProbeError)
        good.close()
        bad.close()


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_a_codec_does_not_change_the_probe(node: RunningNode, codec: str) -> None:
    space = replace(SPACE, codec=codec, layout="slthd", heads=2, head_dim=16, groups=(Group(("0",), NBYTES),))
    cache, probe = BlockCache([node.address], space, timeout=PATIENCE), Probe("test")
    probe.guard(cache, cache)
    with cache:
        probe.check(Memory().block())
        assert (probe.reason, probe.error) == (None, None)


def test_the_memory_is_checked_even_if_nodes_store_no_block(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCache, "save", lambda self, keys, *args, **named: [Reason.REFUSED] * len(keys))
    cache, probe = guarded(node.address)
    with cache:
        probe.check(Memory().block())
        assert (probe.reason, probe.error) == (None, None)
    cache, probe = guarded(node.address)
    with cache:
        probe.check(faults()["two halves are swapped"](Memory()))
        assert probe.error is not None


def test_a_probe_whose_block_does_not_fit_leaves_nothing_that_stays() -> None:
    with running_node("1MiB") as small:
        cache, probe = guarded(small.address)
        memory = bytearray(2 << 20)

        def write(data: bytes) -> None:
            memory[:] = data

        own = EngineBlock(len(memory), write, lambda: bytes(memory), lambda: [memoryview(memory)], lambda: [memory])
        with cache, Store(small.address) as store:
            probe.check(own)
            left = [one for one in store.objects() if one.kept or not one.ttl]
        assert (probe.error, left) == (None, [])


def test_a_forked_child_asks_through_a_probe_that_was_under_way(node: RunningNode) -> None:
    cache, probe = guarded(node.address)

    def child() -> None:
        with cache:
            probe.check(Memory().block())
            assert probe.reason is None

    with cache, probe._lock:
        in_forked_child(child)
