"""Values under write-once keys in a pool of this process, for a cache of KV that needs no nodes.

The pool decides which bytes are in fast memory, in DRAM or in a file. This module decides which values are kept: if all
values need more than the capacity, `farpool.kv.eviction` chooses which are evicted, and which are not taken.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from farpool import forks
from farpool.abc.objects import About, Hold, Payload
from farpool.cluster.store import Demotion, PutOutcome
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.errors import (
    ConfigError,
    FarpoolError,
    NodeTimeoutError,
    ObjectTooLargeError,
    PoolClosedError,
    StoreClosedError,
)
from farpool.kv.eviction import Eviction, EvictionStats
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool.pool import blocks_of
from farpool.sizes import parse_size
from farpool.tensors.arena import arena_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from farpool.memory.pager.storage import Storage
    from farpool.memory.pool import Pool

__all__ = ["PoolObjects"]

_CHUNK_BYTES = 1 << 20
"""Bytes that are pinned at a time, or a sixteenth of the fast tier if that is less."""


@dataclass(slots=True, eq=False)
class _Value:
    """A value. It has a storage once all of its bytes are there."""

    key: bytes
    number: int
    nbytes: int
    expires: float
    storage: Storage | None = None
    held_until: float = 0.0


class PoolObjects:
    """Immutable values under keys in a pool, up to a number of bytes. Thread-safe.

    It has the calls of the store's `BestEffort`, so that a `BlockCache` uses it like nodes.

    Parameters
    ----------
    pool : Pool
        Holds the bytes. Its tiers need room for `capacity` in addition to everything else in the pool.
    capacity : int or str
        Bytes of all values together, such as ``"8GiB"``.

    Raises
    ------
    ConfigError
        The capacity is not a size above 0, or the pool computes on another device than the host's processor.
    """

    def __init__(self, pool: Pool, capacity: int | str) -> None:
        self._capacity = parse_size(capacity, "capacity")
        if self._capacity < 1:
            raise ConfigError(f"capacity is {capacity!r}, expected bytes above 0", setting="capacity")
        self._pool = pool  # the reference keeps the pool open
        self._blocks = blocks_of(pool)
        if self._blocks.device != "cpu":
            raise ConfigError(
                f"the pool computes on {self._blocks.device}, expected the host's processor", setting="pool"
            )
        self._views = arena_views(self._blocks)
        self._chunk = max(1, min(_CHUNK_BYTES, self._blocks.fast // 16))
        self._eviction: Eviction[bytes] = Eviction(self._capacity)
        self._values: dict[bytes, _Value] = {}
        self._held: dict[int, _Value] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()
        forks.begin_again(self)

    def forked(self) -> None:
        """Close the objects in a forked child, because their pool is closed there."""
        self._lock = threading.Lock()
        self._closed = True

    def best_effort(self) -> PoolObjects:
        """Return these objects themselves: they have the calls that a store returns for caches."""
        return self

    def close(self) -> None:
        """Drop all values, so that the pool can be closed. Idempotent."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._held.clear()
            self._eviction = Eviction(self._capacity)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("these objects in a pool were closed, or left in a child by a fork; make new ones")

    def is_mapped(self) -> bool:
        """Return True, because a lookup needs no message."""
        return True

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""
        with self._lock:
            found = [key for key, one in self._values.items() if key.startswith(prefix) and one.storage is not None]
        return iter(found)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values; None for a key that has none."""
        with self._lock:
            sizes = [None if (value := self._values.get(key)) is None else value.nbytes for key in keys]
        places = [bytearray(size or 0) for size in sizes]
        read = self.get_into_many(keys, [memoryview(place) for place in places], 1e6)
        return [bytes(place) if isinstance(nbytes, int) else None for place, nbytes in zip(places, read, strict=True)]

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Find out which keys have a value; see `BestEffort.lookup`."""
        self._check_open()
        now = time.monotonic()
        with self._lock:
            return [None if (found := self._find(key, now)) is None else found[0].nbytes for key in keys]

    def _find(self, key: bytes, now: float) -> tuple[_Value, Storage] | None:
        """Return a value that is complete and has not expired; called with the lock."""
        value = self._values.get(key)
        if value is None or value.storage is None or value.expires <= now:
            return None
        return value, value.storage

    def get_into_many(
        self, keys: Sequence[bytes], targets: Sequence[Payload], timeout: float
    ) -> Sequence[int | Exception | None]:
        """Read values into buffers; see `BestEffort.get_into_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[int | Exception | None] = []
        for key, into in zip(keys, targets, strict=True):
            with self._lock:
                found = self._find(key, time.monotonic())
                if found is None:
                    outcomes.append(None)
                    continue
                value, storage = found
                self._eviction.touch(key)
                self._eviction.pin(key)  # so that it is not evicted before it is read
            try:
                if value.nbytes > nbytes_of(into):
                    raise ValueError(f"the value has {value.nbytes} bytes, the target {nbytes_of(into)}")
                self._copy(storage, value.nbytes, into, deadline, write=False)
                outcomes.append(value.nbytes)
            except (FarpoolError, ValueError, OSError) as error:
                outcomes.append(error)
            finally:
                with self._lock:
                    self._unpin(value)
        return outcomes

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have none yet; see `BestEffort.put_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[PutOutcome | Exception] = []
        for key, payload in items:
            try:
                outcomes.append(self._put(key, payload, deadline, about))
            except (FarpoolError, OSError) as error:
                outcomes.append(error)
        return outcomes

    def _put(self, key: bytes, payload: Payload, deadline: float, about: About) -> PutOutcome:
        nbytes = nbytes_of(payload)
        now = time.monotonic()
        expires = now + about.ttl_ms / 1000 if about.ttl_ms else float("inf")
        if nbytes > self._capacity:
            raise ObjectTooLargeError(f"a value of {nbytes} bytes does not fit into {self._capacity}")
        with self._lock:
            self._check_open()
            if self._eviction.nbytes + nbytes > self._capacity:
                for one in [one for one in self._held.values() if one.held_until <= now]:
                    self._release(one)
            there = self._values.get(key)
            # If no cost is known, all values cost the same. A value that is there may get its parent again.
            seconds = max(1, about.cost_us) / 1e6
            for other in self._eviction.insert(key, max(1, nbytes), seconds, about.parents.get(key), about.tenant):
                self._forget(other)
            if there is not None:
                there.expires = max(there.expires, expires)
                return PutOutcome.PRESENT
            if key not in self._eviction:
                raise ObjectTooLargeError(
                    f"a value of {nbytes} bytes was not taken: held values leave no room for it, the block before it "
                    "is missing, or the values that would have to be evicted are worth more"
                )
            value = self._values[key] = _Value(key, next(self._numbers), nbytes, expires)
            self._eviction.pin(key)  # so that it is not evicted before it is complete
        try:
            storage = self._blocks.allocate(max(1, nbytes), cls="kv", name="KV block")
            self._copy(storage, nbytes, payload, deadline, write=True)
        except BaseException:
            with self._lock:
                if self._values.get(key) is value:
                    self._remove(value)
            raise
        with self._lock:
            self._check_open()
            value.storage = storage
            self._unpin(value)
        return PutOutcome.STORED

    def _unpin(self, value: _Value) -> None:
        """Remove one pin of a value, if the value is still there; called with the lock."""
        if self._values.get(value.key) is value:
            self._eviction.unpin(value.key)

    def _release(self, value: _Value) -> None:
        """End the hold of a value; called with the lock."""
        del self._held[value.number]
        self._unpin(value)

    def _forget(self, key: bytes) -> None:
        """Forget a value that was evicted, if it was there; called with the lock."""
        value = self._values.pop(key, None)
        if value is not None:
            self._held.pop(value.number, None)

    def _remove(self, value: _Value) -> None:
        """Remove a value; called with the lock."""
        self._eviction.remove(value.key)
        self._forget(value.key)

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Keep values from being evicted for a limited time; see `BestEffort.hold_many`."""
        self._check_open()
        now = time.monotonic()
        held: list[Hold | Exception | None] = []
        with self._lock:
            for key in keys:
                found = self._find(key, now)
                if found is not None:
                    value, _ = found
                    if value.number not in self._held:
                        self._held[value.number] = value
                        self._eviction.pin(key)
                        value.held_until = now
                    value.held_until = max(value.held_until, now + ttl_ms / 1000)  # another hold may be longer
                held.append(None if found is None else (b"", found[0].number, 0, 0))
        return held

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """Let values be evicted again; see `BestEffort.release_many`."""
        with self._lock:
            for _, number, _, _ in holds:
                if (value := self._held.get(number)) is not None:
                    self._release(value)

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values; return for each 1 if it was there."""
        dropped: list[int | Exception] = []
        with self._lock:
            for key in keys:
                value = self._values.get(key)
                if value is not None:
                    self._remove(value)
                dropped.append(int(value is not None))
        return dropped

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values out of the pool's fast tier into the tiers below; see `BestEffort.demote_many`."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[Demotion | Exception | None] = []
        for key in keys:
            now = time.monotonic()
            with self._lock:
                found = self._find(key, now)
                held = found is not None and found[0].number in self._held and found[0].held_until > now
            try:
                if found is None:
                    outcomes.append(None)
                elif not self._blocks.has_lower_tiers():
                    outcomes.append(Demotion.NO_LOWER_TIER)
                elif held:
                    outcomes.append(Demotion.PINNED)
                elif now > deadline:
                    raise NodeTimeoutError("the time of this call was over before its turn came")
                else:
                    outcomes.append(Demotion.LOWER if self._blocks.demote(found[1]) else Demotion.FULL)
            except FarpoolError as error:
                outcomes.append(error)
        return outcomes

    def drop(self, key: bytes) -> bool:
        """Drop one value; return True if it was there."""
        return self.drop_many([key], 1.0) == [1]

    def stats(self) -> EvictionStats:
        """Return counts of values, bytes and hits by tenant, the policy in use, and the hits of other policies."""
        with self._lock:
            return self._eviction.stats()

    def _copy(self, storage: Storage, nbytes: int, parts: Payload, deadline: float, *, write: bool) -> None:
        """Copy between a storage and consecutive buffers, a piece at a time.

        Raises
        ------
        NodeTimeoutError
            The copy did not end by the deadline.
        """
        views = [np.frombuffer(part, dtype=np.uint8) for part in parts_of(parts)]
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
