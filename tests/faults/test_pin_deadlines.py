"""A pin whose nodes stop in the middle of the call ends within its timeout, with another copy where there is one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from farpool.errors import NodeError
from farpool.store import Store
from farpool.store import pin as pinning
from farpool.store.member import Member
from farpool.store.messages import Operation
from farpool.store.reading import Found
from farpool.transport.frames import Op
from tests.faults.forge import Forge, ForgedNode
from tests.faults.given import GivenDeadlines

TIMEOUT = 3.0
VALUE = bytes(range(256)) * 40


@pytest.fixture
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge


@contextlib.contextmanager
def published(nodes: list[ForgedNode], transport: Any = "auto") -> Iterator[Store]:
    """A store of two copies with the object ``key``, in contact with all nodes."""
    with Store(*(node.address for node in nodes), replicas=2, timeout=TIMEOUT, transport=transport) as store:
        for number in range(20):  # each node refuses what is not newer than its start, and the store learns from that
            store.put(f"{number}", b"")
        store.put("key", VALUE)
        assert all(status.stats is not None for status in store.nodes())
        store.pin("key").release()
        yield store


def stop_in_between(nodes: list[ForgedNode], count: int, monkeypatch: pytest.MonkeyPatch, newer: int = 0) -> None:
    """Stop so many of the nodes when a pin has found where its object is, those first that have it.

    With `newer` it takes the newest object for so much newer than it is.
    """
    find = pinning.find

    def find_and_stop(*arguments: Any) -> Operation[Found | None]:
        found = yield from find(*arguments)
        assert found is not None
        others = [number for number in range(len(nodes)) if number not in found.nodes]
        for number in [*found.nodes, *others][:count]:
            nodes[number].stop()
        return dataclasses.replace(found, generation=found.generation + newer)

    monkeypatch.setattr(pinning, "find", find_and_stop)


def test_a_first_holder_that_stops_leaves_time_for_the_second(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [forge.node() for _ in range(3)]
    with published(nodes) as store:
        stop_in_between(nodes, 1, monkeypatch)
        given = GivenDeadlines(monkeypatch)
        with store.pin("key") as pin:
            assert pin.view == VALUE
            assert pin.is_mapped
            given.assert_one(store, TIMEOUT)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_holder_that_stops_leaves_time_to_read_another_copy(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    nodes = [forge.node() for _ in range(2)]  # one of them is enough to know what is the newest
    with published(nodes, transport) as store:
        stop_in_between(nodes, 1, monkeypatch)
        given = GivenDeadlines(monkeypatch)
        with store.pin("key") as pin:
            assert pin.view == VALUE
            given.assert_one(store, TIMEOUT)


def test_nodes_that_all_stop_share_one_timeout(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [forge.node() for _ in range(3)]
    with published(nodes) as store:
        stop_in_between(nodes, 3, monkeypatch)
        given = GivenDeadlines(monkeypatch)
        with pytest.raises(NodeError):
            store.pin("key")
        given.assert_one(store, TIMEOUT)


def test_letting_older_objects_go_counts_towards_the_timeout(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder pins an older object and then stops, so that it cannot be told to let it go."""
    nodes = [forge.node() for _ in range(3)]
    exchange = Member.exchange
    stopped = []

    def exchange_and_stop(member: Member, op: Op, *arguments: Any, **fields: Any) -> Any:
        reply = exchange(member, op, *arguments, **fields)
        if op == Op.PIN:
            [node] = [node for node in nodes if node.address == member.name]
            node.stop()
            stopped.append(node)
        return reply

    with published(nodes) as store:
        stop_in_between(nodes, 0, monkeypatch, newer=1)
        monkeypatch.setattr(Member, "exchange", exchange_and_stop)
        given = GivenDeadlines(monkeypatch)
        with contextlib.suppress(NodeError):
            store.pin("key")
        given.assert_one(store, TIMEOUT)
    assert len(stopped) == 2
