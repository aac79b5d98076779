"""A node on loopback, and programs that use it: each has a session, connections and caches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node

Programs = Callable[[int], list[Store]]


@pytest.fixture(scope="session")
def node() -> Iterator[RunningNode]:
    with running_node("16MiB", ephemeral=True) as node:
        yield node


@pytest.fixture(params=["tcp", "mapped"])
def programs(request: pytest.FixtureRequest, node: RunningNode, tmp_path: Path) -> Iterator[Programs]:
    """Makes stores as programs of their own make them."""
    with ExitStack() as stack:

        def start(count: int) -> list[Store]:
            registry = tmp_path / "names.sqlite"
            return [
                stack.enter_context(Store(node.address, registry=registry, transport=request.param, timeout=30))
                for _ in range(count)
            ]

        yield start
