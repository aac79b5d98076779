"""Objects on nodes: immutable values under write-once keys, with copies (docs/store.md)."""

from __future__ import annotations

from farpool.abc.objects import Demotion, PutOutcome, Touched
from farpool.cluster.store.asynchronous import AsyncOpenedName, AsyncStore
from farpool.cluster.store.messages import Lookup, ObjectInfo
from farpool.cluster.store.pin import Pin, Pins
from farpool.cluster.store.repair import Repaired, Unmended
from farpool.cluster.store.rotation import RotatedNode, Rotation
from farpool.cluster.store.store import NodeStatus, Store

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
]
