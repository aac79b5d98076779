"""Base class of tiers that add a behaviour to another tier."""

from __future__ import annotations

from farpool.abc.tier import Extent, Tier, TierInfo

__all__ = ["WrapperTier"]


class WrapperTier(Tier):
    """A tier that passes each operation on to an inner tier; subclasses override what they change.

    A wrapper has no port even where the inner tier has one: transfers through that would bypass its behaviour.

    Parameters
    ----------
    inner : Tier
        The inner tier; opened and closed with the wrapper.
    """

    def __init__(self, inner: Tier) -> None:
        self._inner = inner

    @property
    def inner(self) -> Tier:
        """The inner tier."""
        return self._inner

    @property
    def info(self) -> TierInfo:
        return self._inner.info

    @property
    def reserved(self) -> int:
        return self._inner.reserved

    def open(self) -> None:
        self._inner.open()

    def close(self) -> None:
        self._inner.close()

    def reserve(self, nbytes: int) -> Extent:
        return self._inner.reserve(nbytes)

    def free(self, extent: Extent) -> None:
        self._inner.free(extent)

    def read_into(self, extent: Extent, into: memoryview) -> None:
        self._inner.read_into(extent, into)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self._inner.write_from(extent, data)
