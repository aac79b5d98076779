"""A worker process of LMCache: its fs tier (an L2 adapter of its server) puts and gets objects as files in a folder.

``FOLDER`` prints ``ready``, and then, for each line ``put|get|find NBYTES COUNT BATCH SECONDS`` on its standard input,
the seconds that an object took; of ``find`` those that a call took which asks for all keys. The adapter is driven as
LMCache's own bench does it: a task is submitted, its event is waited for, its result is taken.
"""

from __future__ import annotations

import hashlib
import select
import sys
from functools import partial
from typing import Any

from farpool.bench.ring import Ring
from farpool.bench.users import User, serve
from farpool.errors import FarpoolError

__all__ = ["main"]

_PATIENCE = 60.0


class _LMCacheUser(User):
    """A user of LMCache's fs adapter."""

    def __init__(self, folder: str, ring: Ring) -> None:
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
        from lmcache.v1.memory_management import BytesBufferMemoryObj

        super().__init__("LMCache", ring)
        self._adapter: Any = FSL2Adapter(FSL2AdapterConfig(folder))
        hashes = (hashlib.sha256(key.encode()).digest() for key in ring.keys)
        self._keys = [ObjectKey(chunk_hash=one, model_name="bench", kv_rank=0) for one in hashes]
        self._sources = [BytesBufferMemoryObj(payload) for payload in ring.payloads]
        self._targets = [BytesBufferMemoryObj(buffer) for buffer in ring.buffers]

    def remove(self) -> None:
        self._adapter.delete(self._keys)

    def put(self, part: slice) -> None:
        task = self._adapter.submit_store_task(self._keys[part], self._sources[part])
        done: dict[int, Any] = {}
        while task not in done:
            _wait(self._adapter.get_store_event_fd())
            done.update(self._adapter.pop_completed_store_tasks())
        expected = self.ring.nbytes * len(self._keys[part])
        if int(done[task]) != expected:
            raise FarpoolError(f"LMCache: a task stored {int(done[task])} bytes, expected {expected}")

    def get(self, part: slice) -> None:
        adapter, keys = self._adapter, self._keys[part]
        task = adapter.submit_load_task(keys, self._targets[part])
        if self._taken(adapter.get_load_event_fd(), adapter.query_load_result, task) != len(keys):
            raise FarpoolError("LMCache: an object that was stored was not loaded")

    def find(self) -> int:
        adapter = self._adapter
        task = adapter.submit_lookup_and_lock_task(self._keys, {})
        found = self._taken(adapter.get_lookup_and_lock_event_fd(), adapter.query_lookup_and_lock_result, task)
        adapter.submit_unlock(self._keys)
        return found

    def close(self) -> None:
        self.remove()
        self._adapter.close()

    def _taken(self, event: int, query: Any, task: int) -> int:
        """Return the number of objects for which a task was done."""
        while (bitmap := query(task)) is None:
            _wait(event)
        return int(bitmap.popcount())


def _wait(event: int) -> None:
    """Wait for an event of the adapter, and take it."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(event, select.POLLIN)
    if not poller.poll(_PATIENCE * 1000):
        raise FarpoolError(f"LMCache: a task was not done within {_PATIENCE:g} s")
    consume_fd(event)


def main(arguments: list[str]) -> None:
    """Store and load objects until the standard input ends."""
    (folder,) = arguments
    serve(partial(_LMCacheUser, folder))


if __name__ == "__main__":
    main(sys.argv[1:])
