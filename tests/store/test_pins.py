"""Many objects pinned together, and pins that end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from farpool import AsyncStore, Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store.messages import Ask
from farpool.cluster.wire.frames import PLACE, TTL, UNPIN, Op, Status
from farpool.errors import ChecksumError, ConfigError, NodeError, StoreClosedError
from tests.node.nodes import Peer, node, until, walked
from tests.nodes import eventually
from tests.store.local_nodes import Nodes, store_over

VALUES = {f"{number}": b"%d " % number * (1 + 999 * number) for number in range(40)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(running_node()) for _ in range(3)]
        with Store(*(one.address for one in running), timeout=20) as store:
            store.put_many(VALUES)
        yield running


@pytest.fixture(params=["mapped", "tcp"])
def store(request: pytest.FixtureRequest, nodes: list[RunningNode]) -> Iterator[Store]:
    with Store(*(one.address for one in nodes), transport=request.param, timeout=20) as store:
        yield store


def pinned(store: Store) -> int:
    """How many pins the nodes know."""
    return sum(info.pins for info in store.objects())


@pytest.mark.slow
def test_many_are_pinned_where_they_lie_and_those_that_are_missing_are_told(store: Store) -> None:
    keys = ["none", *VALUES, "nothing", "7"]
    mapped = store.nodes()[0].mapped
    with store.pin_many(keys) as pins:
        assert len(pins) == len(keys)
        assert (pins[0], pins[-2]) == (None, None)
        for key, pin in zip(keys, pins, strict=True):
            assert (None if pin is None else bytes(pin.view)) == VALUES.get(key)
            assert pin is None or pin.is_mapped == mapped
            if pin is not None:
                pin.verify()
        assert pinned(store) == (len(VALUES) + 1 if mapped else 0)
        pins[1:3][0].release()  # type: ignore[union-attr]
    assert pinned(store) == 0
    pins.release()
    with pytest.raises(ValueError, match="the pin of b'7' was released"):
        pins[8].view  # type: ignore[union-attr]  # noqa: B018
    assert list(store.pin_many([])) == []


def test_a_pin_ends_by_itself_and_what_is_done_with_it_later_harms_no_other(store: Store) -> None:
    with pytest.raises(ConfigError, match="ttl is 0, expected seconds above 0"):
        store.pin_many(["7"], ttl=0)
    pins = store.pin_many(["7", "8"], ttl=0.3)
    lasting = store.pin("7")
    time.sleep(0.3)
    for pin in pins:
        assert pin is not None
        with pytest.raises(ValueError, match="has ended with its time to live; pin it again"):
            pin.view  # noqa: B018
        with pytest.raises(ValueError, match="has ended"):
            pin.verify()
    left = int(lasting.is_mapped)
    eventually(lambda: pinned(store) == left)
    pins.release()
    assert pinned(store) == left
    assert lasting.view == VALUES["7"]
    lasting.release()
    assert pinned(store) == 0


def test_what_is_still_looked_at_stays_and_the_others_are_released(store: Store) -> None:
    pins = store.pin_many(["1", "2", "3"])
    mapped = pins[0] is not None and pins[0].is_mapped
    looked_at = memoryview(pins[1].view)[1:]  # type: ignore[union-attr]
    with pytest.raises(BufferError) if mapped else contextlib.nullcontext():
        pins.release()
    assert pinned(store) == mapped
    assert looked_at == VALUES["2"][1:]
    looked_at.release()
    pins.release()
    assert pinned(store) == 0


def test_coroutines_pin_as_calls_do(nodes: list[RunningNode]) -> None:
    async def main() -> None:
        async with AsyncStore(*(one.address for one in nodes), timeout=20) as store:
            async with store.pin_many(["1", "none"], ttl=50) as pins, store.pin("2", ttl=50) as pin:
                assert pins[0] is not None
                assert (pins[0].view, pins[1], pin.view) == (VALUES["1"], None, VALUES["2"])
                assert sum([info.pins async for info in store.objects()]) == 2
            assert sum([info.pins async for info in store.objects()]) == 0

    asyncio.run(main())


def test_where_a_key_cannot_be_looked_for_nothing_stays_pinned(local: Nodes) -> None:
    made = local(2, mapped=True)
    with store_over(made, timeout=1) as store:
        store.put_many(VALUES)
        made[1].kill()
        with pytest.raises(NodeError):
            store.pin_many(VALUES)
        assert made[0].server is not None
        assert {entry[4] for entry in walked(made[0].server, 0, b"", b"", 100)} == {0}
    with pytest.raises(StoreClosedError):
        store.pin_many(VALUES)


def test_all_copies_are_tried_for_a_mapped_view(local: Nodes) -> None:
    made = local(3, mapped=True)
    with store_over(made, 2) as store:
        store.put_many(VALUES)
        made[0].replace()
        eventually(lambda: all(status.stats is not None for status in store.nodes()))
        with store.pin_many(VALUES) as pins:
            assert [bytes(pin.view) for pin in pins if pin is not None and pin.is_mapped] == list(VALUES.values())


def test_a_damaged_object_among_many_is_named_and_the_others_are_whole(
    local: Nodes,
) -> None:
    made = local(1, mapped=True)
    with store_over(made) as store:
        store.put_many(VALUES)
        with store.pin_many(["none", *VALUES]) as pins:
            pins.verify()
            made[0].damage(VALUES["17"])
            with pytest.raises(ChecksumError, match=r"b'17': the bytes of the pinned object"):
                pins.verify()
            for key, pin in zip(VALUES, pins[1:], strict=True):
                assert pin is not None
                with pytest.raises(ChecksumError) if key == "17" else contextlib.nullcontext():
                    pin.verify()
        with pytest.raises(ValueError, match="was released"):
            pins.verify()


def test_each_pin_of_an_object_is_ended_by_its_own_number(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        serial = peer.published(b"k", b"v")

        def pin(ttl_ms: int) -> bytes:
            offset, _, _, number = PLACE.unpack(peer.ask(Op.PIN, TTL.pack(ttl_ms) + b"k").meta)
            return UNPIN.pack(offset, number)

        def unpin(place: bytes) -> int:
            return peer.ask(Op.UNPIN, place, serial=serial).status

        def pins() -> int:
            return walked(server, 0, b"", b"", 10)[0][4]

        lasting, brief, another = pin(0), pin(200), pin(200)
        assert len({lasting, brief, another}) == 3
        assert unpin(brief) == Status.DONE  # not the lasting one, which was first
        until(lambda: pins() == 1, "the other brief one has not ended")
        assert unpin(another) == unpin(brief) == Status.UNKNOWN
        assert pins() == 1
        assert peer.ask(Op.UNPIN, lasting[:12], serial=serial).status == Status.BAD_REQUEST
        assert unpin(lasting) == Status.DONE
        assert pins() == 0


def test_a_pin_of_a_node_with_other_files_by_now_gets_time_to_be_released(local: Nodes) -> None:
    with store_over(local(mapped=True), timeout=5) as store:
        store.put("key", b"value")
        cluster = store._cluster
        assert cluster is not None
        (member,) = cluster.members
        ask, left = cluster.ask, []

        def noted(asks: Sequence[Ask], deadline: float, **settings: bool) -> list[Any]:
            answers = ask(asks, deadline, **settings)
            if asks[0].op == Op.PIN:
                member.channel.reader = None
            elif asks[0].op == Op.UNPIN:
                left.append(deadline - time.monotonic())
            return answers

        cluster.ask = noted  # type: ignore[method-assign,assignment]
        with store.pin("key") as pin:
            assert not pin.is_mapped
            assert len(left) == 1
            assert left[0] > 4
            assert pinned(store) == 0
