"""Public name of the object store; its modules are in `farpool.cluster.store` (docs/store.md)."""

from __future__ import annotations

import sys

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

sys.modules["farpool.store.names"] = names  # what `import farpool.store.names` finds
