"""Users of farpool for the benchmark of KV blocks: the cache of blocks, the store below it, and plain memory."""

from __future__ import annotations

import hashlib

from farpool.cluster.store import Store
from farpool.cluster.wire.channel import Transport
from farpool.errors import FarpoolError
from farpool.kv.blocks import BlockCache
from farpool.kv.namespace import Group, Namespace
from farpool_bench.ring import Ring
from farpool_bench.users import User

__all__ = ["BlockUser", "MemoryUser", "StoreUser"]

_TOKENS = 16
_PATIENCE = 30.0
"""Seconds that a call may take: here a late answer is to be measured, not to be given up."""


class BlockUser(User):
    """A user of `BlockCache`."""

    def __init__(self, node: str, transport: Transport, ring: Ring) -> None:
        super().__init__("farpool", ring)
        namespace = Namespace(
            engine="farpool",
            model="bench",
            weights="none",
            dtype="float16",
            layout="ring",
            tokens_per_block=_TOKENS,
            groups=(Group(("0",), ring.nbytes),),
        )
        self._cache = BlockCache([node], namespace, transport=transport, timeout=_PATIENCE)
        self._keys = [self._cache.key(hashlib.sha256(key.encode()).digest()) for key in ring.keys]

    def remove(self) -> None:
        self._cache.drop(self._keys)

    def put(self, part: slice) -> None:
        self._check("saved", self._cache.save(self._keys[part], self.ring.payloads[part]))

    def get(self, part: slice) -> None:
        self._check("loaded", self._cache.load(self._keys[part], self.ring.buffers[part]))

    def find(self) -> int:
        return self._cache.lookup(self._keys).leading

    def close(self) -> None:
        self.remove()
        self._cache.close()

    def _check(self, what: str, reasons: object) -> None:
        if isinstance(reasons, list) and any(reasons):
            raise FarpoolError(f"farpool: blocks were not {what}: {sorted(set(filter(None, reasons)))}")


class StoreUser(User):
    """A user of the store's own calls, of which the cache of blocks is made."""

    def __init__(self, node: str, transport: Transport, ring: Ring) -> None:
        super().__init__("farpool's store", ring)
        self._store = Store(node, transport=transport, timeout=_PATIENCE)

    def remove(self) -> None:
        for key in self.ring.keys:
            self._store.drop(key)

    def put(self, part: slice) -> None:
        self._store.put_many(zip(self.ring.keys[part], self.ring.payloads[part], strict=True))

    def get(self, part: slice) -> None:
        self._store.get_into_many(zip(self.ring.keys[part], self.ring.buffers[part], strict=True))

    def find(self) -> int:
        return self._store.lookup(self.ring.keys).leading

    def close(self) -> None:
        self.remove()
        self._store.close()


class MemoryUser(User):
    """A user of plain memory, between which and the ring one thread copies."""

    def __init__(self, ring: Ring) -> None:
        super().__init__("memcpy", ring)
        self._memory = Ring(ring.nbytes, len(ring)).buffers

    def remove(self) -> None:
        pass

    def put(self, part: slice) -> None:
        for place, payload in zip(self._memory[part], self.ring.payloads[part], strict=True):
            place[:] = payload

    def get(self, part: slice) -> None:
        for buffer, place in zip(self.ring.buffers[part], self._memory[part], strict=True):
            buffer[:] = place

    def find(self) -> int:
        return len(self._memory)
