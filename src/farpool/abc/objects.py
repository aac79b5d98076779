"""Contracts of places that store immutable values under keys.

There are two, because their users need different things. `ObjectStore` is for names (`farpool.cluster.names`): it keeps
values until they are released, in a number of copies, and marks each copy. Only nodes can do that, so a `farpool.Store`
is its one implementation. `Objects` is for caches (`farpool.kv`): it holds, drops and demotes values, and each of its
calls makes one attempt within a time limit. A `farpool.Store` and a pool of this process (`farpool.kv.PoolObjects`)
implement it; a pool has neither copies nor marks. The two protocols share no method.

Rules for every implementation of either:

- A key identifies its bytes. A put of a key that has a value keeps that value and succeeds.
- A read returns the whole value as it was put, or None if there is none. A value that is damaged counts as missing or
  raises; its bytes are never returned.
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
"""The bytes of a value: one buffer, or several that follow each other."""


class PutOutcome(StrEnum):
    """Outcome of a put.

    Attributes
    ----------
    STORED
        Each copy is the value that was put.
    PRESENT
        The key had a value already, which has stayed; its bytes may differ from the bytes of the put.
    """

    STORED = "stored"
    PRESENT = "present"


class Demotion(StrEnum):
    """Outcome of moving a value out of memory.

    Attributes
    ----------
    LOWER
        It is stored in the lower tier, or is being moved there.
    PINNED
        It stays in memory, because a program holds it there, reads it, or keeps it for good.
    FULL
        It stays in memory, because the lower tier had no room for it in time.
    NO_LOWER_TIER
        It stays in memory, because there is no lower tier.
    """

    LOWER = "lower"
    PINNED = "pinned"
    FULL = "full"
    NO_LOWER_TIER = "no_lower_tier"


@dataclass(frozen=True, slots=True)
class Touched:
    """Result of a touch: the number of copies that it has reached.

    Attributes
    ----------
    copies : sequence of int
        Number of nodes that have touched their copy, for each key in the order of the keys.
    complete : bool
        True if all nodes have answered. The other nodes may hold untouched copies.
    marks : sequence of mapping
        For each key the mark of each touched copy, by the identity of its node. A copy's mark changes when it is kept
        or released, or gets more time to live. Nodes of earlier releases have no marks and return 0.
    refused : sequence of int
        Positions of the keys of which a node did not touch its copy, because the copy had another mark.
    away : frozenset of str
        Addresses of the nodes that did not answer, or that have no marks.
    """

    copies: Sequence[int]
    complete: bool
    marks: Sequence[Mapping[bytes, int]] = ()
    refused: Sequence[int] = ()
    away: frozenset[str] = frozenset()


Hold = tuple[bytes, int, int, int]
"""An object that is held on a node: the identity of the node, the object's offset and serial there, the number of the
pin."""


@dataclass(frozen=True, slots=True)
class About:
    """Properties of values that are stored together.

    Attributes
    ----------
    ttl_ms : int
        Milliseconds after which they expire; 0 for never.
    kind : int
        Class of the objects (docs/wire.md).
    cost_us : int
        Microseconds that it takes to make one of them again; 0 if that is not known.
    namespace : int
        64-bit number that all objects of one origin have in common.
    tenant : str
        Name of their owner, for a pool. Nodes take the tenant from the access key and ignore this one.
    parents : mapping of bytes to bytes
        For each key, the key of the value that it needs: a value cannot be used without its parent. Nodes ignore it.
    keep : bool
        If True, nodes never evict these values (small ones only). A pool evicts them like any other.
    """

    ttl_ms: int = 0
    kind: int = 0
    cost_us: int = 0
    namespace: int = 0
    tenant: str = ""
    parents: Mapping[bytes, bytes] = field(default_factory=dict)
    keep: bool = False


class ObjectCalls(Protocol):
    """Calls that make one attempt within `timeout` seconds and return an error in the place of a result.

    They raise `StoreClosedError` when the objects are closed, and no other error that an object or a node causes.
    """

    def is_mapped(self) -> bool:
        """Return True if lookups find most values in memory of this host, without a request."""

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Return for each key the bytes of its value; None if there is none."""

    def get_into_many(
        self, keys: list[bytes], targets: list[Payload], timeout: float
    ) -> Sequence[int | Exception | None]:
        """Read values into buffers; return for each its bytes, or None if there is none.

        The result is a `ValueError` if the target is smaller than the value. The bytes of a target without a value are
        unspecified.
        """

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have none yet."""

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Keep values from being evicted for `ttl_ms` milliseconds; None if there is no such value."""

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """End holds. A hold that cannot be reached ends after its time."""

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values; return for each the number of copies that were dropped."""

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values out of the fastest memory; None if there is no such value. A later read finds them as before."""


class Objects(Protocol):
    """Immutable values under keys, as a cache needs them: a `farpool.Store`, or `farpool.kv.PoolObjects`."""

    def best_effort(self) -> ObjectCalls:
        """Return the calls for caches."""

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values; None for a key without a value."""

    def drop(self, key: bytes) -> bool:
        """Drop one value; return True if it was there."""


class ObjectStore(Protocol):
    """Store of write-once objects, such as `farpool.Store`."""

    @property
    def confirming(self) -> int:
        """Number of copies that confirm the write of an object."""

    def put_many(
        self, items: Iterable[tuple[str, Buffer]], /, *, ttl: float | None = None, check: bool = False
    ) -> object:
        """Store values. A key that has a value keeps it; the longer time to live counts."""

    def touch_many(
        self,
        keys: Iterable[str],
        ttl: float | None,
        /,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        """Renew the time to live of values, and return how many copies of each there are, with their marks.

        With `keep` True nodes never evict the values, and they do not expire. With False nodes may evict them, and
        `ttl` counts even if it is shorter than the time that was left. With `seen`, the marks of an earlier touch,
        nodes touch only copies that still have that mark, and with `keep` True also copies that are kept by now.
        """

    def get(self, key: str, /) -> bytes | None:
        """Return the value of a key; None if there is none."""

    def get_into_many(self, pairs: Iterable[tuple[str, Buffer]], /) -> list[int | None]:
        """Read values into buffers; return the size of each in bytes, or None if there is none."""
