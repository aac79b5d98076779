"""Base class of wrappers with a native data path, whose port wraps the port of the inner tier."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from farpool._native import PythonPort
from farpool.abc.tier import Extent, HasPort, Tier, TierInfo
from farpool.memory.tiers.port_tier import PortTier

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["PortWrapper"]


class PortWrapper(PortTier):
    """A tier that reserves in an inner tier, and wraps that tier's port in one of its own.

    Works without the interpreter lock if the inner tier does. Subclasses make the port in :meth:`_wrap`.

    Parameters
    ----------
    inner : Tier
        The inner tier; opened and closed with the wrapper.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__()
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

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            return self._inner.reserve(nbytes)

    def free(self, extent: Extent) -> None:
        with self._lifecycle:
            self._inner.free(extent)

    @abstractmethod
    def _wrap(self, port: Port) -> Port:
        """Make the port that wraps the inner tier's port."""

    def _open_port(self) -> Port:
        self._inner.open()
        return self._wrap(self._inner.port if isinstance(self._inner, HasPort) else PythonPort(self._inner))

    def _close_port(self) -> None:
        self._inner.close()

    def _check_extent(self, extent: Extent) -> None:
        # A tier written in Python sees the extent itself, when the port calls it.
        if isinstance(self._inner, PortTier):
            self._inner._check_extent(extent)
