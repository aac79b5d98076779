"""Values under write-once keys in a pool of this process, for a cache of KV that needs no nodes.

The pool decides which bytes are in fast memory, in DRAM or in a file. This decides which values are there at all: when
they come to more than the capacity, one leaves that is worth the least, by the time that computing it anew would take,
its size, and how often it is used (GDSF; Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
Caching Policy", 1998).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from farpool._native import Policy
from farpool.errors import (
    ConfigError,
    FarpoolError,
    NodeTimeoutError,
    ObjectTooLargeError,
    PoolClosedError,
    StoreClosedError,
)
from farpool.pager import Mode
from farpool.pager.use import Use
from farpool.pool.pool import blocks_of
from farpool.sizes import parse_size
from farpool.store import Demotion, PutOutcome
from farpool.store.arguments import Payload, nbytes_of
from farpool.store.best_effort import Hold
from farpool.tensors.arena import arena_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from farpool.pager.storage import Storage
    from farpool.pool import Pool

__all__ = ["PoolObjects"]

_CHUNK = 1 << 20
"""Bytes that are pinned at a time; a sixteenth of the fast tier, if that is less."""


@dataclass(slots=True, eq=False)
class _Value:
    """A value, its slot in the policy, and who needs it."""

    key: bytes
    storage: Storage
    nbytes: int
    slot: int
    readers: int = 0
    held_until: float = 0.0
    expires: float = float("inf")


class PoolObjects:
    """Immutable values under keys in a pool, up to a number of bytes. Thread-safe.

    It has the calls of `farpool.store.best_effort.BestEffort`, so that a `BlockCache` works over it as over nodes.

    Parameters
    ----------
    pool : Pool
        Holds the bytes. Its tiers have to have room for `capacity` beside what else is in it.
    capacity : int or str
        Bytes of all values together, such as ``"8GiB"``.

    Raises
    ------
    ConfigError
        The capacity is no size above 0, or the pool computes on another device than the host's processor.
    """

    def __init__(self, pool: Pool, capacity: int | str) -> None:
        self._capacity = parse_size(capacity, "capacity")
        if self._capacity < 1:
            raise ConfigError(f"capacity is {capacity!r}, expected bytes above 0", setting="capacity")
        self._pool = pool  # which ends with its last reference
        self._blocks = blocks_of(pool)
        if self._blocks.device != "cpu":
            raise ConfigError(
                f"the pool computes on {self._blocks.device}, expected the host's processor", setting="pool"
            )
        self._views = arena_views(self._blocks)
        self._chunk = max(1, min(_CHUNK, self._blocks.fast // 16))
        self._policy = Policy("gdsf", self._capacity)
        self._values: dict[bytes, _Value] = {}
        self._by_slot: dict[int, _Value] = {}
        self._free_slots: list[int] = []
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()
        _OBJECTS.add(self)

    def best_effort(self) -> PoolObjects:
        """Return itself, as a store returns its calls for caches."""
        return self

    def close(self) -> None:
        """Drop all values, so that the pool can be closed. Idempotent."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._by_slot.clear()
            self._used = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("these objects in a pool were closed, or left in a child by a fork; make new ones")

    def is_mapped(self) -> bool:
        """Return True: a lookup asks nobody."""
        return True

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""
        with self._lock:
            found = [key for key in self._values if key.startswith(prefix)]
        return iter(found)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values; None where there is none."""
        with self._lock:
            sizes = [None if (value := self._values.get(key)) is None else value.nbytes for key in keys]
        places = [bytearray(size or 0) for size in sizes]
        read = self.get_into_many([(key, memoryview(place)) for key, place in zip(keys, places, strict=True)], 1e6)
        return [bytes(place) if isinstance(nbytes, int) else None for place, nbytes in zip(places, read, strict=True)]

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Find out which keys have a value; see `BestEffort.lookup`."""
        self._check_open()
        now = time.monotonic()
        with self._lock:
            return [
                value.nbytes if (value := self._values.get(key)) is not None and value.expires > now else None
                for key in keys
            ]

    def get_into_many(self, pairs: Sequence[tuple[bytes, Payload]], timeout: float) -> Sequence[int | Exception | None]:
        """Read values into buffers; see `BestEffort.get_into_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[int | Exception | None] = []
        for key, into in pairs:
            now = time.monotonic()
            with self._lock:
                value = self._values.get(key)
                if value is None or value.expires <= now:
                    outcomes.append(None)
                    continue
                value.readers += 1  # it stays until it is read
                self._policy.touch(value.slot)
            try:
                if value.nbytes > nbytes_of(into):
                    raise ValueError(f"the value has {value.nbytes} bytes, the target {nbytes_of(into)}")
                self._copy(value.storage, value.nbytes, into, deadline, write=False)
                outcomes.append(value.nbytes)
            except (FarpoolError, ValueError, OSError) as error:
                outcomes.append(error)
            finally:
                with self._lock:
                    value.readers -= 1
        return outcomes

    def put_many(
        self,
        items: Sequence[tuple[bytes, Payload]],
        timeout: float,
        *,
        ttl_ms: int = 0,
        kind: int = 0,
        cost_us: int = 0,
        namespace: int = 0,
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have none yet; see `BestEffort.put_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[PutOutcome | Exception] = []
        for key, payload in items:
            try:
                outcomes.append(self._put(key, payload, deadline, ttl_ms, cost_us))
            except (FarpoolError, OSError) as error:
                outcomes.append(error)
        return outcomes

    def _put(self, key: bytes, payload: Payload, deadline: float, ttl_ms: int, cost_us: int) -> PutOutcome:
        nbytes = nbytes_of(payload)
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        expires = time.monotonic() + ttl_ms / 1000 if ttl_ms else float("inf")
        if nbytes > self._capacity:
            raise ObjectTooLargeError(f"a value of {nbytes} bytes does not fit into {self._capacity}")
        with self._lock:
            if (there := self._values.get(key)) is not None:
                there.expires = max(there.expires, expires)
                return PutOutcome.PRESENT
            self._make_room(number, nbytes)
            self._used += nbytes
        try:
            storage = self._blocks.allocate(max(1, nbytes), cls="kv", name="KV block")
            self._copy(storage, nbytes, payload, deadline, write=True)
        except BaseException:
            with self._lock:
                self._used -= nbytes
            raise
        with self._lock:
            self._check_open()
            if key in self._values:  # another thread was first
                self._used -= nbytes
                return PutOutcome.PRESENT
            slot = self._free_slots.pop() if self._free_slots else len(self._by_slot)
            value = _Value(key, storage, nbytes, slot, expires=expires)
            # What computing costs is known of KV; of anything else its size stands for it.
            self._policy.insert(slot, number, max(1, nbytes), cost=float(max(1, cost_us)))
            self._values[key] = self._by_slot[slot] = value
        return PutOutcome.STORED

    def _make_room(self, number: int, nbytes: int) -> None:
        """Evict values until one of `nbytes` bytes fits; called with the lock.

        Raises
        ------
        ObjectTooLargeError
            What is held or being read leaves no room.
        """
        now = time.monotonic()
        held: set[int] | None = None
        while self._used + nbytes > self._capacity:
            if held is None:
                held = {slot for slot, one in self._by_slot.items() if one.readers or one.held_until > now}
            try:
                victim = self._policy.victim(number, max(1, nbytes), held)
            except IndexError:
                raise ObjectTooLargeError(f"{nbytes} bytes do not fit beside what is held") from None
            self._remove(self._by_slot[victim], evicted=True)

    def _remove(self, value: _Value, *, evicted: bool) -> None:
        self._policy.remove(value.slot, evicted=evicted)
        del self._values[value.key], self._by_slot[value.slot]
        self._free_slots.append(value.slot)
        self._used -= value.nbytes

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Keep values from being evicted for a limited time; see `BestEffort.hold_many`."""
        self._check_open()
        until = time.monotonic() + ttl_ms / 1000
        held: list[Hold | Exception | None] = []
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is not None:
                    value.held_until = until
                held.append(None if value is None else (0, value.slot, int.from_bytes(key[-44:-12], "big"), 0))
        return held

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """Let values be evicted again; see `BestEffort.release_many`."""
        with self._lock:
            for _, slot, mark, _ in holds:
                value = self._by_slot.get(slot)
                if value is not None and int.from_bytes(value.key[-44:-12], "big") == mark:
                    value.held_until = 0.0

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values; return for each 1 if it was there."""
        dropped: list[int | Exception] = []
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is not None:
                    self._remove(value, evicted=False)
                dropped.append(int(value is not None))
        return dropped

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values out of the pool's fast tier into those below; see `BestEffort.demote_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[Demotion | Exception | None] = []
        for key in keys:
            now = time.monotonic()
            with self._lock:
                value = self._values.get(key)
                held = value is not None and (value.readers > 0 or value.held_until > now)
            try:
                if value is None or value.expires <= now:
                    outcomes.append(None)
                elif not self._blocks.has_lower_tiers():
                    outcomes.append(Demotion.NO_LOWER_TIER)
                elif held:
                    outcomes.append(Demotion.PINNED)
                elif now > deadline:
                    raise NodeTimeoutError("the time of this call was over before its turn came")
                else:
                    outcomes.append(Demotion.LOWER if self._blocks.demote(value.storage) else Demotion.FULL)
            except FarpoolError as error:
                outcomes.append(error)
        return outcomes

    def drop(self, key: bytes) -> bool:
        """Drop one value; return True if it was there."""
        return self.drop_many([key], 1.0) == [1]

    def stats(self) -> dict[str, int]:
        """Return the number of values and their bytes."""
        with self._lock:
            return {"objects": len(self._values), "bytes": self._used, "capacity": self._capacity}

    def _copy(self, storage: Storage, nbytes: int, parts: Payload, deadline: float, *, write: bool) -> None:
        """Copy between a storage and buffers that follow each other, a piece at a time.

        Raises
        ------
        NodeTimeoutError
            It was not done by the deadline.
        """
        views = [np.frombuffer(part, dtype=np.uint8) for part in (parts if isinstance(parts, tuple) else (parts,))]
        part, at, start = 0, 0, 0
        while start < nbytes:
            if time.monotonic() > deadline:
                raise NodeTimeoutError("the time of this call was over before all bytes were copied")
            stop = min(nbytes, start + self._chunk)
            with self._pinned(storage, start, stop, Mode.OVERWRITE if write else Mode.READ) as memory:
                done = 0
                while done < stop - start:
                    count = min(stop - start - done, len(views[part]) - at)
                    own, far = views[part][at : at + count], memory[done : done + count]
                    if write:
                        far[:] = own
                    else:
                        own[:] = far
                    done, at = done + count, at + count
                    if at == len(views[part]):
                        part, at = part + 1, 0
            start = stop

    @contextmanager
    def _pinned(self, storage: Storage, start: int, stop: int, mode: Mode) -> Iterator[NDArray[np.uint8]]:
        if self._blocks.closed:
            raise PoolClosedError("the pool of this cache is closed")
        access = self._blocks.acquire([Use(storage, start, stop, mode)], "KV block")
        try:
            yield self._views.flat(torch.uint8, stop - start, access.offsets[0]).numpy()
        finally:
            self._blocks.release(access)


_OBJECTS: weakref.WeakSet[PoolObjects] = weakref.WeakSet()


def _forked() -> None:
    """Close what a fork left in the child, as its pool is closed there; a thread of the parent may hold its lock."""
    for objects in _OBJECTS:
        objects._lock = threading.Lock()
        objects._closed = True


os.register_at_fork(after_in_child=_forked)
