"""Contract of the places where blocks can lie: a store's nodes, or a pool of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from farpool.cluster.store import Demotion, PutOutcome
    from farpool.cluster.store.arguments import Payload
    from farpool.cluster.store.best_effort import About, Hold

__all__ = ["ObjectCalls", "Objects"]


class ObjectCalls(Protocol):
    """Calls that make one attempt within a stated time; `BestEffort` of the store describes each of them."""

    def is_mapped(self) -> bool: ...

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]: ...

    def get_into_many(
        self, keys: list[bytes], targets: list[Payload], timeout: float
    ) -> Sequence[int | Exception | None]: ...

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]: ...

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]: ...

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None: ...

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]: ...

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]: ...


class Objects(Protocol):
    """Immutable values under keys: a `farpool.Store`, or `farpool.kv.PoolObjects`."""

    def best_effort(self) -> ObjectCalls:
        """Return the calls for caches."""

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that begin with `prefix`."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read values; None where there is none."""

    def drop(self, key: bytes) -> bool:
        """Drop one value; return True if it was there."""
