"""Public import name of the object store; the code is in `farpool.cluster.store` (docs/store.md)."""

from __future__ import annotations

from farpool.cluster import names
from farpool.cluster.store import (
    AsyncOpenedName,
    AsyncStore,
    Demotion,
    Lookup,
    NodeStatus,
    ObjectInfo,
    Pin,
    Pins,
    PutOutcome,
    Repaired,
    RotatedNode,
    Rotation,
    Store,
    Touched,
    Unmended,
)

__all__ = [
    "AsyncOpenedName",
    "AsyncStore",
    "Demotion",
    "Lookup",
    "NodeStatus",
    "ObjectInfo",
    "Pin",
    "Pins",
    "PutOutcome",
    "Repaired",
    "RotatedNode",
    "Rotation",
    "Store",
    "Touched",
    "Unmended",
    "names",
]

__path__: list[str] = []  # a package for imports: `farpool._renamed` finds the modules inside
