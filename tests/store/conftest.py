"""Nodes in this process, for tests of the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.local_nodes import LocalNode, Nodes


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Nodes]:
    """Makes nodes, which end with the test."""
    made: list[LocalNode] = []

    def make(count: int = 1, **settings: object) -> list[LocalNode]:
        nodes = [LocalNode(tmp_path, len(made) + number, **settings) for number in range(count)]  # type: ignore[arg-type]
        made.extend(nodes)
        return nodes

    yield make
    for node in made:
        node.kill()
