"""Two interfaces for stores of immutable values under keys.

`ObjectStore` is for names (`farpool.cluster.names`). It stores a number of copies of each value, keeps them until they
are released, and gives each copy a *mark*: a number that changes when the copy is kept or released, or gets more time
to live. Only nodes have marks, so `farpool.Store` is the only implementation.

`Objects` is for caches (`farpool.kv`). It can hold values in memory for a time, drop them, and demote them to a lower
tier. Each call makes one attempt within a time limit. A `farpool.Store` and a pool of this process
(`farpool.kv.PoolObjects`) implement this interface; a pool has neither copies nor marks.

Rules for every implementation of either interface:

- A key identifies its bytes. If a key already has a value, a put of that key succeeds and the value stays.
- A read returns the whole value as it was put, or None if the key has no value. If a value is damaged, the read returns
  None or raises; it never returns damaged bytes.
- A value may be evicted at any time, unless it is held, pinned or kept. Its key can then be put again.
- When a call returns or raises, nothing writes into the caller's buffers any more.
- All methods are safe to call from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from farpool._native import Slices

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["About", "Demotion", "Hold", "ObjectCalls", "ObjectStore", "Objects", "Payload", "PutOutcome", "Touched"]

Payload = memoryview | tuple[memoryview | Slices, ...]
"""The bytes of a value: one buffer, or several buffers that together are the value."""


class PutOutcome(StrEnum):
    """Outcome of a put.

    Attributes
    ----------
    STORED
        All copies have the bytes of this put.
    PRESENT
        The key already had a value. That value stays; its bytes may differ from the bytes of this put.
    """

    STORED = "stored"
    PRESENT = "present"


class Demotion(StrEnum):
    """Outcome of moving a value out of memory.

    Attributes
    ----------
    LOWER
        The value is stored in the lower tier, or is being moved to it.
    PINNED
        The value stays in memory, because a program holds or reads it, or because it is kept without a time limit.
    FULL
        The value stays in memory, because the lower tier had no room for it in time.
    NO_LOWER_TIER
        The value stays in memory, because there is no lower tier.
    """

    LOWER = "lower"
    PINNED = "pinned"
    FULL = "full"
    NO_LOWER_TIER = "no_lower_tier"


@dataclass(frozen=True, slots=True)
class Touched:
    """Result of `ObjectStore.touch_many`: how many copies of each value were touched.

    Attributes
    ----------
    copies : sequence of int
        For each key, in the order of the keys, the number of nodes that touched their copy.
    complete : bool
        True if all nodes answered. Nodes that did not answer may have untouched copies.
    marks : sequence of mapping
        For each key, a mapping from the identity of each node that touched its copy to the mark of this copy. Nodes of
        earlier releases have no marks and return 0.
    refused : sequence of int
        Indices of keys. For each of them, a node did not touch its copy, because the copy did not have the mark that
        the caller gave.
    away : frozenset of str
        Addresses of the nodes that did not answer, or that have no marks.
    """

    copies: Sequence[int]
    complete: bool
    marks: Sequence[Mapping[bytes, int]] = ()
    refused: Sequence[int] = ()
    away: frozenset[str] = frozenset()


Hold = tuple[bytes, int, int, int]
"""An object that a program holds on a node: identity of the node, offset and serial of the object on that node, and
number of the pin that holds it."""


@dataclass(frozen=True, slots=True)
class About:
    """Properties of the values of one put.

    Attributes
    ----------
    ttl_ms : int
        Milliseconds after which the values expire; 0 if they never expire.
    kind : int
        Class of the objects (docs/wire.md).
    cost_us : int
        Microseconds that it takes to compute one of the values again; 0 if unknown.
    namespace : int
        64-bit number that groups objects, for example all KV of one model, its weights and one tenant.
    tenant : str
        Name of the values' owner, for a pool. Nodes ignore this and use the tenant of the access key.
    parents : mapping of bytes to bytes
        For each key, the key of its parent: the value without which this value cannot be used. Nodes ignore it.
    keep : bool
        If True, nodes never evict these values, which must be small. A pool evicts them like any other value.
    """

    ttl_ms: int = 0
    kind: int = 0
    cost_us: int = 0
    namespace: int = 0
    tenant: str = ""
    parents: Mapping[bytes, bytes] = field(default_factory=dict)
    keep: bool = False


class ObjectCalls(Protocol):
    """Calls for caches. Each makes one attempt within `timeout` seconds.

    If an object or a node causes an error, a call returns the error in place of that object's result. The only
    error that a call raises is `StoreClosedError`, if the `Objects` are closed.
    """

    def is_mapped(self) -> bool:
        """Return True if lookups find most values in memory of this host, without a request to a node."""

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Return, for each key, the size of its value in bytes; None if the key has no value."""

    def get_into_many(
        self, keys: list[bytes], targets: list[Payload], timeout: float
    ) -> Sequence[int | Exception | None]:
        """Read values into buffers; return, for each key, the size of its value in bytes, or None if it has no value.

        A key's result is a `ValueError` if its buffer is smaller than its value. If a key's result is not a size, the
        bytes of its buffer are unspecified.
        """

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have no value yet; return the outcome for each key."""

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Protect values from eviction for `ttl_ms` milliseconds; return the holds, None for a key without a value."""

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """End holds. If a hold's node cannot be reached, that hold ends when its `ttl_ms` has passed."""

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values; return, for each key, the number of copies that were dropped."""

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values to a lower tier, where reads still find them; return the outcomes, None if a key has no value."""

    def retain_many(
        self, keys: Sequence[bytes], priority: int, session: str | bytes | None, ttl_ms: int, timeout: float
    ) -> Sequence[int | Exception]:
        """Give values a priority and a session (`farpool.Store.retain`); return the number of copies that have it.

        The priority ends after `ttl_ms` milliseconds, or never if that is 0.
        """

    def end_session(self, session: str | bytes, timeout: float) -> int | Exception:
        """End a session, whose values are no longer retained; return the number of copies that it has retained."""


class Objects(Protocol):
    """Immutable values under keys, as a cache needs them: a `farpool.Store`, or `farpool.kv.PoolObjects`."""

    def best_effort(self) -> ObjectCalls:
        """Return the calls for caches, which return errors in place of results."""

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of keys, in the order of the keys; None for a key without a value."""

    def drop(self, key: bytes) -> bool:
        """Drop the value of a key; return True if the key had a value."""


class ObjectStore(Protocol):
    """Store of write-once objects, such as `farpool.Store`."""

    @property
    def confirming(self) -> int:
        """Number of copies that nodes must confirm before the write of an object succeeds."""

    def put_many(
        self, items: Iterable[tuple[str, Buffer]], /, *, ttl: float | None = None, check: bool = False
    ) -> object:
        """Store values. If a key already has a value, that value stays, with the longer of the two times to live."""

    def touch_many(
        self,
        keys: Iterable[str],
        ttl: float | None,
        /,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        """Renew the time to live of values; return how many copies of each value there are, with their marks.

        With `keep` True, the values do not expire and nodes never evict them. With `keep` False, nodes may evict the
        values, and `ttl` applies even if it is shorter than the time that was left. `seen` has the marks that an
        earlier touch returned. With it, nodes touch only copies that still have the same mark; with `keep` True, they
        also touch copies that are already kept.
        """

    def get(self, key: str, /) -> bytes | None:
        """Return the value of a key, or None if the key has no value."""

    def get_into_many(self, pairs: Iterable[tuple[str, Buffer]], /) -> list[int | None]:
        """Read values into buffers; return the size of each value in bytes, or None for a key without a value."""
