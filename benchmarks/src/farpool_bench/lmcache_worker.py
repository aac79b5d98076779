"""A worker process of LMCache: one of its tiers puts and gets objects.

``fs FOLDER`` or ``L1 BYTES`` prints ``ready``, and then, for each line ``put|get|find NBYTES COUNT BATCH SECONDS`` on
its standard input, the seconds that an object took; of ``find`` those that a call took which asks for all keys.

The fs tier (an L2 adapter of LMCache's server) keeps objects as files in a folder. It is driven as LMCache's own bench
does it: a task is submitted, its event is waited for, its result is taken. L1 is memory of the server's own process. It
is driven as the server's storage manager does it: a lookup reserves the objects for reading, reading them gives their
memory without a copy, and they are released.
"""

from __future__ import annotations

import hashlib
import select
from functools import partial
from typing import Any

from farpool.errors import FarpoolError
from farpool_bench.users import Ring, User, serve

_WAIT_TIMEOUT_S = 60.0


def _keys_of(ring: Ring) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    hashes = (hashlib.sha256(key.encode()).digest() for key in ring.keys)
    return [ObjectKey(chunk_hash=one, model_name="bench", kv_rank=0) for one in hashes]


class _FsUser(User):
    """A user of LMCache's fs adapter."""

    def __init__(self, folder: str, ring: Ring) -> None:
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
        from lmcache.v1.memory_management import BytesBufferMemoryObj

        super().__init__("LMCache", ring)
        self._adapter: Any = FSL2Adapter(FSL2AdapterConfig(folder))
        self._keys = _keys_of(ring)
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
    if not poller.poll(_WAIT_TIMEOUT_S * 1000):
        raise FarpoolError(f"LMCache: a task was not done within {_WAIT_TIMEOUT_S:g} s")
    consume_fd(event)


class _L1User(User):
    """A user of LMCache's L1; the ring's buffers become views of its memory when objects are got."""

    def __init__(self, size: int, ring: Ring) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        super().__init__("LMCache", ring)
        # Without a name its memory is not in a file in /dev/shm, which would stay when this process is killed.
        memory = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
        self._manager: Any = L1Manager(L1ManagerConfig(memory))
        self._layout = MemoryLayoutDesc([torch.Size([ring.nbytes])], [torch.uint8])
        self._keys = _keys_of(ring)
        self._stored: list[Any] = []

    def remove(self) -> None:
        _done(self._manager.finish_read(self._stored))
        _done(self._manager.delete(self._stored))
        self._stored = []

    def put(self, part: slice) -> None:
        keys = self._keys[part]
        reserved = self._manager.reserve_write(keys, [False] * len(keys), self._layout)
        for memory, payload in zip(_memory(reserved), self.ring.payloads[part], strict=True):
            memory.byte_array.cast("B")[:] = payload
        # Kept for readers from now on, as `get` finds them when a lookup has reserved them.
        _memory(self._manager.finish_write_and_reserve_read(keys))
        self._stored += keys

    def get(self, part: slice) -> None:
        objects = _memory(self._manager.unsafe_read(self._keys[part]))
        self.ring.buffers[part] = [memory.byte_array for memory in objects]

    def find(self) -> int:
        found = [key for key, (_, memory) in self._manager.reserve_read(self._keys).items() if memory is not None]
        _done(self._manager.finish_read(found))
        return len(found)

    def close(self) -> None:
        self.remove()
        self._manager.close()


def _memory(answers: dict[Any, tuple[Any, Any]]) -> list[Any]:
    """Return the memory of each object, in order."""
    _done({key: error for key, (error, _) in answers.items()})
    return [memory for _, memory in answers.values()]


def _done(answers: dict[Any, Any]) -> None:
    """Raise if L1 refused its request for any object."""
    failed = {error.name for error in answers.values()} - {"SUCCESS"}
    if failed:
        raise FarpoolError(f"LMCache: L1 refused an object: {', '.join(sorted(failed))}")


def main(tier: str, where: str) -> None:
    """Store and load objects until the standard input ends."""
    serve(partial(_FsUser, where) if tier == "fs" else partial(_L1User, int(where)))
