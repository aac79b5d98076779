"""A pin whose nodes stop ends within its timeout, with another copy where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from farpool.cluster.store import Store
from farpool.errors import NodeError
from tests.faults.forge import Forge, ForgedNode
from tests.faults.given import GivenDeadlines
from tests.faults.ranks import ranked

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
        store.put("key", VALUE)
        assert all(status.stats is not None for status in store.nodes())
        store.pin("key").release()
        yield store


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_first_holder_that_stops_leaves_time_for_the_second(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, transport: str, count: int
) -> None:
    nodes = [forge.node() for _ in range(count)]
    with published(nodes, transport) as store:
        first = ranked(store, nodes, "key")[0]
        first.stop()
        given = GivenDeadlines(monkeypatch)
        with store.pin("key") as pin:
            assert pin.view == VALUE
            assert pin.is_mapped == (transport == "auto")
        given.assert_share(first.address, TIMEOUT)


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_nodes_that_all_stop_share_one_timeout(forge: Forge, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    nodes = [forge.node() for _ in range(3)]
    with published(nodes, transport) as store:
        for node in nodes:
            node.stop()
        given = GivenDeadlines(monkeypatch)
        with pytest.raises(NodeError):
            store.pin("key")
        given.assert_one(TIMEOUT)
