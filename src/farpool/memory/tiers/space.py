"""Bookkeeping of the reserved extents of one tier."""

from __future__ import annotations

import threading

from farpool._native import ExtentAllocator
from farpool.abc.tier import Extent
from farpool.errors import TierFullError

__all__ = ["CACHE_LINE_BYTES", "ExtentSpace"]

CACHE_LINE_BYTES = 64
"""Alignment in bytes of extents in memory. With less, vector instructions and device copies are slower."""


class ExtentSpace:
    """Allocator of extents in the range ``[0, capacity)``, safe to use from several threads.

    Parameters
    ----------
    name : str
        Name of the tier, for errors.
    capacity : int
        Bytes, a multiple of `alignment`.
    alignment : int
        Reservations are rounded up to a multiple of this many bytes.
    """

    def __init__(self, name: str, capacity: int, alignment: int) -> None:
        self._name = name
        self._allocator = ExtentAllocator(capacity, alignment)
        """Allocator of the ranges. The tag of a range is the number of bytes that the caller asked for."""
        self._lock = threading.Lock()

    @property
    def reserved(self) -> int:
        """Bytes reserved at the moment, alignment included."""
        with self._lock:
            return self._allocator.used

    def reserve(self, nbytes: int) -> Extent:
        """Reserve an extent. Raises TierFullError if no hole is large enough, ValueError if `nbytes` is less than 1."""
        if nbytes < 1:
            raise ValueError(f"{self._name}: an extent has at least 1 byte, got {nbytes}")
        with self._lock:
            offset = self._allocator.alloc(nbytes, tag=nbytes)
            if offset < 0:
                free = self._allocator.capacity - self._allocator.used
                raise TierFullError(
                    f"{self._name}: no room for {nbytes} bytes: {free} of {self._allocator.capacity} bytes are free, "
                    f"the largest hole has {self._allocator.largest_hole}",
                    tier=self._name,
                )
        return Extent(offset, nbytes)

    def free(self, extent: Extent) -> int:
        """Free an extent, and return its size in bytes, alignment included. Raises ValueError if it is not reserved."""
        with self._lock:
            self._require(extent)
            return self._allocator.free(extent.offset)

    def require(self, extent: Extent) -> None:
        """Raise ValueError unless `extent` is reserved."""
        with self._lock:
            self._require(extent)

    def _require(self, extent: Extent) -> None:
        if self._allocator.tag(extent.offset) != extent.nbytes:
            raise ValueError(f"{self._name}: {extent} is not reserved (freed already, or of another tier)")
