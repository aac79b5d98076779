"""Published objects on nodes: immutable values under keys, with copies (docs/store.md)."""

from __future__ import annotations

from farpool.store.asynchronous import AsyncStore
from farpool.store.messages import ObjectInfo
from farpool.store.pin import Pin
from farpool.store.store import NodeStatus, Store

__all__ = ["AsyncStore", "NodeStatus", "ObjectInfo", "Pin", "Store"]
