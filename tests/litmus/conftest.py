"""A node on loopback, and programs that use it: each has a session, connections and caches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.channel import Transport

Programs = Callable[[int], list[Store]]


@pytest.fixture(scope="session", params=["tcp", "mapped"])
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@pytest.fixture(scope="session")
def node(transport: Transport) -> Iterator[RunningNode]:
    """A node for each transport, because the tests use the same keys with both."""
    with running_node("16MiB", ephemeral=True) as node:
        yield node


@pytest.fixture
def programs(transport: Transport, node: RunningNode, tmp_path: Path) -> Iterator[Programs]:
    """Makes stores as programs of their own make them."""
    with ExitStack() as stack:

        def start(count: int) -> list[Store]:
            registry = tmp_path / "names.sqlite"
            return [
                stack.enter_context(Store(node.address, registry=registry, transport=transport, timeout=30))
                for _ in range(count)
            ]

        yield start
