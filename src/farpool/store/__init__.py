"""Objects on nodes: immutable values under write-once keys, with copies (docs/store.md)."""

from __future__ import annotations

from farpool.store.asynchronous import AsyncOpenedName, AsyncStore
from farpool.store.messages import Demotion, Lookup, ObjectInfo, PutOutcome, Touched
from farpool.store.pin import Pin, Pins
from farpool.store.repair import Repaired, Unmended
from farpool.store.rotation import RotatedNode, Rotation
from farpool.store.store import NodeStatus, Store

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
