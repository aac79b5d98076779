"""Where a store looks for a key."""

from __future__ import annotations

import time
from collections.abc import Sequence

from farpool.cluster.store import Store
from tests.faults.forge import PATIENCE, ForgedNode

__all__ = ["ranked"]


def ranked(store: Store, nodes: Sequence[ForgedNode], key: str) -> list[ForgedNode]:
    """The nodes in the order of their ranks for a key."""
    cluster = store._open()
    by_name = {node.address: node for node in nodes}
    order = cluster.view(time.monotonic() + PATIENCE).order(key.encode())
    return [by_name[member.name] for member in order]
