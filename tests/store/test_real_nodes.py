"""The store on processes that are nodes, over sockets and through mapped memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from farpool import AsyncStore, NodeError, NodeTimeoutError, Store
from farpool.cluster.node.process import RunningNode, running_node
from tests.nodes import PATIENCE, eventually

LARGE = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_node()) for _ in range(3)]


@pytest.fixture(params=["mapped", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("value", [b"", b"value", LARGE], ids=["empty", "small", "large"])
def test_what_was_put_is_read_in_each_way(
    nodes: list[RunningNode], transport: str, replicas: int, value: bytes
) -> None:
    addresses = [node.address for node in nodes]
    with Store(*addresses, replicas=replicas, transport=transport, timeout=20) as store:  # type: ignore[arg-type]
        key = f"{transport} {replicas} {len(value)}"
        assert store.put(key, value, ttl=1000) == "stored"
        buffer = bytearray(len(value))
        for _ in range(2):
            assert store.get(key) == value
            assert store.get_into(key, buffer) == len(value)
            assert buffer == value
        with store.pin(key) as pin:
            assert pin.view == value
            assert pin.is_mapped == (transport == "mapped")
            pin.verify()
        info = store.stat(key)
        assert info is not None
        assert (info.nbytes, info.copies, info.pins) == (len(value), replicas, 0)
        assert info.ttl is not None
        assert store.touch(key, None)
        assert list(store.keys(key)) == [key.encode()]
        assert store.drop(key)
        assert not store.drop(key)
        assert store.get(key) is None
        with pytest.raises(KeyError):
            store.pin(key)
        assert [status.failing for status in store.nodes()] == [0.0] * 3


def test_batches_do_as_single_calls_do(nodes: list[RunningNode], transport: str) -> None:
    addresses = [node.address for node in nodes]
    with Store(*addresses, replicas=2, transport=transport, timeout=20) as store:  # type: ignore[arg-type]
        values = {f"key{number}": LARGE[: number * 300] for number in range(200)}
        assert set(store.put_many(values)) == {"stored"}
        assert store.get_many([*values, "none"]) == [*values.values(), None]
        buffers = [bytearray(len(value)) for value in values.values()]
        assert store.get_into_many(zip(values, buffers, strict=True)) == [len(value) for value in values.values()]
        assert [bytes(buffer) for buffer in buffers] == list(values.values())
        assert {key.decode() for key in store.keys("key1")} == {key for key in values if key.startswith("key1")}
        assert store.lookup(values).leading == 200
        assert all(store.drop(key) for key in values)
        assert list(store.keys("key")) == []


@pytest.mark.slow
def test_a_stopped_replica_does_not_hold_up_the_others() -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node()) for _ in range(3)]
        store = stack.enter_context(Store(*(node.address for node in nodes), replicas=2, timeout=4))
        keys = [f"{number}" for number in range(20)]
        store.put_many((key, b"old") for key in keys)
        nodes[0].stop()
        store.put_many((f"new{key}", b"new") for key in keys)
        assert store.get_many(keys) == [b"old"] * 20
        assert store.get_many(f"new{key}" for key in keys) == [b"new"] * 20
        nodes[0].cont()
        eventually(lambda: all(status.stats is not None for status in store.nodes()))
        store.repair()
        nodes[1].kill()
        assert store.get_many(keys) == [b"old"] * 20
        assert store.get_many(f"new{key}" for key in keys) == [b"new"] * 20


@pytest.mark.slow
def test_a_single_node_that_stops_is_an_error_at_the_deadline_that_tells_since_when() -> None:
    with running_node() as node, Store(node.address, timeout=0.5, transport="tcp") as store:
        persist(lambda: store.put("k", b"v"))
        node.stop()
        with pytest.raises(NodeTimeoutError, match=node.address):
            store.get("k")
        status = store.nodes()[0]
        assert status.failing > 0
        assert node.address in status.error
        node.cont()
        assert persist(lambda: store.get("k")) == b"v"
        persist(lambda: store.put("w", b"w"))
        assert persist(lambda: store.get("w")) == b"w"


def persist(act: Callable[[], object]) -> object:
    """Its result once it works: the store waits for no more than half a second, and leaves alone what has failed."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return act()
        except NodeError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
def test_a_node_that_was_restarted_has_its_objects(transport: str) -> None:
    with running_node() as node, Store(node.address, transport=transport, timeout=10) as store:  # type: ignore[arg-type]
        store.put("k", LARGE)
        assert store.get("k") == LARGE
        node.kill()
        node.restart()
        assert store.get("k") == LARGE
        assert store.put("k", b"new") == "present"
        assert store.get("k") == LARGE


def test_coroutines_do_as_calls_do_and_cancelling_them_breaks_nothing(nodes: list[RunningNode]) -> None:
    async def main() -> None:
        async with AsyncStore(*(node.address for node in nodes), replicas=2, timeout=20) as store:
            await asyncio.gather(*(store.put(f"{number}", b"%d" % number) for number in range(50)))
            assert await store.get_many([f"{number}" for number in range(50)]) == [b"%d" % n for n in range(50)]
            buffer = bytearray(2)
            assert await store.get_into("42", buffer) == 2
            assert buffer == b"42"
            async with store.pin("7") as pin:
                assert pin.view == b"7"
            calls = [asyncio.create_task(store.put("shared", LARGE)) for _ in range(30)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(end, asyncio.CancelledError) for end in ended)
            assert await store.put("shared", LARGE, check=True) in ("stored", "present")
            assert await store.get("shared") == LARGE
            assert {key async for key in store.keys("4")} == {b"4", *(b"4%d" % number for number in range(10))}
            assert (await store.lookup([f"{number}" for number in range(50)])).leading == 50
            assert await asyncio.gather(*(store.drop(f"{number}") for number in range(50))) == [True] * 50
            assert await store.drop("shared")

    asyncio.run(main())


def test_a_call_that_a_node_refuses_is_no_failure_of_the_node(nodes: list[RunningNode]) -> None:
    with Store(nodes[0].address, timeout=20) as store:
        store.put("k", b"v")
        member = store._open().members[0]
        with pytest.raises(NodeError, match="expected one of the calls") as caught:
            member.call("nonsense", time.monotonic() + 20)
        assert caught.value.refused
        assert store.nodes()[0].failing == 0
        assert store.put("w", b"w")


def test_a_node_is_known_to_be_mapped_before_anything_was_moved(nodes: list[RunningNode], transport: str) -> None:
    with Store(nodes[0].address, transport=transport, timeout=20) as store:  # type: ignore[arg-type]
        assert [status.mapped for status in store.nodes()] == [transport == "mapped"]
