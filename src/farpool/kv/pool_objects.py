"""Stores values under write-once keys in a pool of this process, so that a KV cache needs no nodes.

The pool decides which bytes are in fast memory, in DRAM or in a file. This module decides which values are kept: if all
values together would exceed the capacity, `farpool.kv.eviction` chooses which values are evicted or refused.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farpool import forks
from farpool.abc.objects import About, Demotion, Hold, Payload, PutOutcome
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.errors import (
    ConfigError,
    FarpoolError,
    NodeTimeoutError,
    ObjectTooLargeError,
    PoolClosedError,
    StoreClosedError,
)
from farpool.kv.compression import flat
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

T = TypeVar("T")

_CHUNK_BYTES_MAX = 1 << 20
"""Maximum bytes that a copy pins in the fast tier at a time. A copy also pins at most a sixteenth of that tier."""
_GET_TIMEOUT_S = 1e6
"""Timeout in seconds of calls without a timeout argument."""


@dataclass(slots=True, eq=False)
class _Value:
    """A value of a key. Its `storage` is None until all of its bytes are written."""

    key: bytes
    number: int
    nbytes: int
    expires: float
    storage: Storage | None = None
    pinned_until: float = 0.0


class PoolObjects:
    """Keeps immutable values under keys in a pool, up to a number of bytes. Thread-safe.

    This class implements `farpool.abc.objects.Objects` and `ObjectCalls`, so a `BlockCache` can use it in place of
    nodes.

    Parameters
    ----------
    pool : Pool
        Pool that stores the bytes. Its tiers need room for `capacity` in addition to everything else in the pool.
    capacity : int or str
        Maximum bytes of all values together, such as ``"8GiB"``.

    Raises
    ------
    ConfigError
        The capacity is not a size above 0, or the pool computes on a device other than the host's processor.
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
        self._chunk_bytes = max(1, min(_CHUNK_BYTES_MAX, self._blocks.fast // 16))
        self._eviction: Eviction[bytes] = Eviction(self._capacity)
        self._values: dict[bytes, _Value] = {}
        self._pinned: dict[int, _Value] = {}  # values that `hold_many` has pinned, by their numbers
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()
        forks.begin_again(self)

    def forked(self) -> None:
        """Close this object in a forked child, because the pool is closed there."""
        self._lock = threading.Lock()
        self._closed = True

    def close(self) -> None:
        """Drop all values, so that the pool can be closed. Idempotent."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._pinned.clear()
            self._eviction = Eviction(self._capacity)

    def stats(self) -> EvictionStats:
        """Return the policy in use, the hits of the shadow caches, and the values, bytes and hits of each tenant."""
        with self._lock:
            return self._eviction.stats()

    # ---- Objects -------------------------------------------------------------------------------------------------

    def best_effort(self) -> PoolObjects:
        """Return this object itself, because it also implements `ObjectCalls`."""
        return self

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""
        with self._lock:
            found = [key for key, one in self._values.items() if key.startswith(prefix) and one.storage is not None]
        return iter(found)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key; None if the key has no value or the value could not be read."""
        found = self._each(self._read_whole, zip(keys, strict=True), _GET_TIMEOUT_S)
        return [one if isinstance(one, bytes) else None for one in found]

    def drop(self, key: bytes) -> bool:
        """Drop one value; return True if it was stored."""
        return self.drop_many([key], 0.0) == [1]

    # ---- ObjectCalls ---------------------------------------------------------------------------------------------

    def is_mapped(self) -> bool:
        """Return True, because a lookup sends no message."""
        return True

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Return, for each key, the size of its value in bytes; None if the key has no value."""
        self._check_open()
        now = time.monotonic()
        with self._lock:
            return [value.nbytes if (value := self._find(key, now)) else None for key in keys]

    def get_into_many(
        self, keys: Sequence[bytes], targets: Sequence[Payload], timeout: float
    ) -> Sequence[int | Exception | None]:
        """Read values into buffers; return, for each key, its size in bytes, None for no value, or the error."""
        return self._each(self._read, zip(keys, targets, strict=True), timeout)

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have no value yet; return, for each key, the outcome or the error."""
        return self._each(partial(self._put, about), items, timeout)

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Pin values for `ttl_ms` milliseconds; return, for each key, a pin, or None if the key has no value.

        All owners of a value share one pin. The pin ends when the time of every owner is over.
        """
        self._check_open()
        now = time.monotonic()
        with self._lock:
            return [self._pin(key, now, now + ttl_ms / 1000) for key in keys]

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """End pins that `hold_many` has returned."""
        with self._lock:
            for _, number, _, _ in holds:
                self._release(number)

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values; return, for each key, 1 if its value was stored, otherwise 0."""
        with self._lock:
            return [int(self._delete(key)) for key in keys]

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values from the pool's fast tier to the tiers below; return, for each key, the outcome or the error."""
        return self._each(self._demote, zip(keys, strict=True), timeout)

    def retain_many(
        self, keys: Sequence[bytes], priority: int, session: str | bytes | None, ttl_ms: int, timeout: float
    ) -> Sequence[int | Exception]:
        """Return an error for each key, because a pool has no priorities: it evicts what costs least to compute."""
        return [ConfigError("values in a pool of this process have no priority; use nodes", setting="priority")] * len(
            keys
        )

    def end_session(self, session: str | bytes, timeout: float) -> int | Exception:
        """Return 0, because no session retains a value of a pool."""
        return 0

    # ---- one value -----------------------------------------------------------------------------------------------

    def _each(self, call: Callable[..., T], items: Iterable[tuple[Any, ...]], timeout: float) -> list[T | Exception]:
        """Call `call` for each item, with one deadline for all calls; return the result or the error of each call."""
        self._check_open()
        deadline = time.monotonic() + timeout
        outcomes: list[T | Exception] = []
        for item in items:
            try:
                outcomes.append(call(*item, deadline))
            except (FarpoolError, ValueError, OSError) as error:
                outcomes.append(error)
        return outcomes

    def _read_whole(self, key: bytes, deadline: float) -> bytes | None:
        with self._reading(key) as value:
            if value is None:
                return None
            # Use the size of this value, because the key may have another value by now.
            place = bytearray(value.nbytes)
            self._copy(value.storage, value.nbytes, memoryview(place), deadline, write=False)
            return bytes(place)

    def _read(self, key: bytes, into: Payload, deadline: float) -> int | None:
        with self._reading(key) as value:
            if value is None:
                return None
            if value.nbytes > nbytes_of(into):
                raise ValueError(f"the value has {value.nbytes} bytes, the target {nbytes_of(into)}")
            self._copy(value.storage, value.nbytes, into, deadline, write=False)
            return value.nbytes

    @contextmanager
    def _reading(self, key: bytes) -> Iterator[_Value | None]:
        """Count a hit of a value, and yield the value, pinned until it has been read; yield None if there is none."""
        with self._lock:
            value = self._find(key, time.monotonic())
            if value is not None:
                self._eviction.touch(key)
                self._eviction.pin(key)
        if value is None:
            yield None
            return
        try:
            # The read is outside our lock, because it waits for the pool. Our reference keeps the bytes even if another
            # call drops the key.
            yield value
        finally:
            with self._lock:
                self._unpin(value)

    def _put(self, about: About, key: bytes, payload: Payload, deadline: float) -> PutOutcome:
        with self._lock:
            value = self._insert(key, nbytes_of(payload), about)
        if value is None:
            return PutOutcome.PRESENT
        try:
            storage = self._blocks.allocate(max(1, value.nbytes), cls="kv", name="KV block")
            self._copy(storage, value.nbytes, payload, deadline, write=True)
        except BaseException:
            with self._lock:
                # Another call may have dropped the key and stored a new value under it.
                if self._values.get(key) is value:
                    self._delete(key)
            raise
        with self._lock:
            self._check_open()
            # Readers see only values with a storage, so they see the value from here on, with all of its bytes.
            value.storage = storage
            self._unpin(value)
        return PutOutcome.STORED

    def _demote(self, key: bytes, deadline: float) -> Demotion | None:
        now = time.monotonic()
        with self._lock:
            value = self._find(key, now)
            is_pinned = value is not None and value.number in self._pinned and value.pinned_until > now
        if value is None or value.storage is None:
            return None
        if not self._blocks.has_lower_tiers():
            return Demotion.NO_LOWER_TIER
        if is_pinned:
            return Demotion.PINNED
        if now > deadline:
            raise NodeTimeoutError("the time of this call was over before its turn came")
        return Demotion.LOWER if self._blocks.demote(value.storage) else Demotion.FULL

    # ---- state; these methods are called with the lock -----------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("these objects in a pool were closed, or left in a child by a fork; make new ones")

    def _find(self, key: bytes, now: float) -> _Value | None:
        """Return the value of a key; None if it is missing, not completely written, or expired."""
        value = self._values.get(key)
        return None if value is None or value.storage is None or value.expires <= now else value

    def _insert(self, key: bytes, nbytes: int, about: About) -> _Value | None:
        """Make room for a value of `nbytes` bytes, and return the value; return None if the key already has a value.

        The new value is pinned until all of its bytes are written.
        """
        self._check_open()
        now = time.monotonic()
        expires = now + about.ttl_ms / 1000 if about.ttl_ms else float("inf")
        if nbytes > self._capacity:
            raise ObjectTooLargeError(f"a value of {nbytes} bytes does not fit into {self._capacity}")
        if self._eviction.nbytes + nbytes > self._capacity:
            for number in [number for number, one in self._pinned.items() if one.pinned_until <= now]:
                self._release(number)
        present = self._values.get(key)
        # If no cost is known, all values cost the same. A value that is present is linked again to a restored parent.
        seconds = max(1, about.cost_us) / 1e6
        for evicted in self._eviction.insert(key, max(1, nbytes), seconds, about.parents.get(key), about.tenant):
            self._forget(evicted)
        if present is not None:
            present.expires = max(present.expires, expires)
            return None
        if key not in self._eviction:
            raise ObjectTooLargeError(
                f"a value of {nbytes} bytes was not taken: pinned values leave no room for it, the block before it is "
                "missing, or the values that would have to be evicted are worth more"
            )
        self._eviction.pin(key)
        value = self._values[key] = _Value(key, next(self._numbers), nbytes, expires)
        return value

    def _pin(self, key: bytes, now: float, until: float) -> Hold | None:
        value = self._find(key, now)
        if value is None:
            return None
        if value.number not in self._pinned:
            self._pinned[value.number] = value
            self._eviction.pin(key)
            value.pinned_until = until
        value.pinned_until = max(value.pinned_until, until)  # the pin of another owner may be longer
        return b"", value.number, 0, 0

    def _release(self, number: int) -> None:
        """End the pin of the value with this number, if the value is pinned."""
        value = self._pinned.pop(number, None)
        if value is not None:
            self._unpin(value)

    def _unpin(self, value: _Value) -> None:
        """Remove one pin of a value from the eviction policy, if the value is still stored."""
        if self._values.get(value.key) is value:
            self._eviction.unpin(value.key)

    def _delete(self, key: bytes) -> bool:
        """Delete a value; return False if it is not stored."""
        self._eviction.remove(key)
        return self._forget(key)

    def _forget(self, key: bytes) -> bool:
        """Forget a value that `self._eviction` no longer has; return False if the value is not stored."""
        # The storage may die here. This takes no other lock, because its finalizer only leaves a note for the pool.
        value = self._values.pop(key, None)
        if value is not None:
            self._pinned.pop(value.number, None)
        return value is not None

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def _copy(self, storage: Storage | None, nbytes: int, parts: Payload, deadline: float, *, write: bool) -> None:
        """Copy between a storage and consecutive buffers, a chunk at a time.

        Raises
        ------
        NodeTimeoutError
            The copy did not end by the deadline.
        """
        assert storage is not None
        buffers = deque(flat(part) for part in parts_of(parts) if part.nbytes)
        for start in range(0, nbytes, self._chunk_bytes):
            if time.monotonic() > deadline:
                raise NodeTimeoutError("the time of this call was over before all bytes were copied")
            stop = min(nbytes, start + self._chunk_bytes)
            with self._in_fast_tier(storage, start, stop, Mode.OVERWRITE if write else Mode.READ) as chunk:
                while chunk.size:
                    count = min(chunk.size, buffers[0].size)
                    source, target = (buffers[0], chunk) if write else (chunk, buffers[0])
                    target[:count] = source[:count]
                    chunk, buffers[0] = chunk[count:], buffers[0][count:]
                    if not buffers[0].size:
                        buffers.popleft()

    @contextmanager
    def _in_fast_tier(self, storage: Storage, start: int, stop: int, mode: Mode) -> Iterator[NDArray[Any]]:
        """Pin some bytes of a storage in the fast tier, and yield a view of these bytes as an array."""
        if self._blocks.closed:
            raise PoolClosedError("the pool of this cache is closed")
        access = self._blocks.acquire([Use(storage, start, stop, mode)], "KV block")
        try:
            yield self._views.flat(torch.uint8, stop - start, access.offsets[0]).numpy()
        finally:
            self._blocks.release(access)
