"""Interface of the object store that names need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from farpool.cluster.store.messages import Touched

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObjectStore"]


class ObjectStore(Protocol):
    """Store of write-once objects, such as `farpool.Store`."""

    @property
    def replicas(self) -> int:
        """Number of copies that each object is to have."""

    def put_many(
        self, items: Iterable[tuple[str, Buffer]], /, *, ttl: float | None = None, check: bool = False
    ) -> object:
        """Store values. Those that are there already stay; the longer time to live counts."""

    def touch_many(
        self,
        keys: Iterable[str],
        ttl: float | None,
        /,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[int, int]] | None = None,
    ) -> Touched:
        """Renew the time to live of values, and return how many copies of each there are, with their marks.

        With `keep` True nodes never evict the values, and they do not expire. With False they may, and `ttl` counts
        even if it is shorter than the time that was left. With `seen`, the marks of an earlier touch, nodes touch only
        copies that still have that mark, and with `keep` True also copies that are kept by now.
        """

    def get(self, key: str, /) -> bytes | None:
        """Return the value of a key; None if there is none."""

    def get_into_many(self, pairs: Iterable[tuple[str, Buffer]], /) -> list[int | None]:
        """Read values into buffers; return the size of each in bytes, or None if there is none."""
