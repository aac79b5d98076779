"""Base class of tiers that add a behaviour to other tiers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from farpool._native import PythonPort
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.memory.tiers.port_tier import PortTier, port_of

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["WrapperTier"]


class WrapperTier(PortTier):
    """A tier over one or several inner tiers, which it opens and closes together with itself.

    The first inner tier carries out each operation, unless a subclass overrides that operation. A wrapper with a native
    data path overrides :meth:`_wrap`, and works without the interpreter lock if its inner tiers do. If a wrapper has no
    native data path, the pool's queue calls the wrapper's `read_into` and `write_from`, so that no transfer bypasses
    the wrapper's behaviour.

    Parameters
    ----------
    *inners : Tier
        The inner tiers, at least one.
    """

    def __init__(self, *inners: Tier) -> None:
        super().__init__()
        self._inners = inners

    @property
    def inner(self) -> Tier:
        """The inner tier, or the first of several."""
        return self._inners[0]

    @property
    def inners(self) -> tuple[Tier, ...]:
        """All inner tiers."""
        return self._inners

    @property
    def info(self) -> TierInfo:
        return self.inner.info

    @property
    def in_process(self) -> bool:
        return all(inner.in_process for inner in self._inners)

    @property
    def reserved(self) -> int:
        return self.inner.reserved

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            return self.inner.reserve(nbytes)

    def free(self, extent: Extent) -> None:
        with self._lifecycle:
            self.inner.free(extent)

    def read_into(self, extent: Extent, into: memoryview) -> None:
        # A `PythonPort` would call this method again, so we call the inner tier ourselves.
        if isinstance(self.port, PythonPort):
            self.inner.read_into(extent, into)
        else:
            super().read_into(extent, into)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        if isinstance(self.port, PythonPort):
            self.inner.write_from(extent, data)
        else:
            super().write_from(extent, data)

    def _wrap(self, *ports: Port) -> Port:
        """Make the wrapper's port from the ports of the inner tiers. Called while the inner tiers are open."""
        return PythonPort(self)

    def _open_port(self) -> Port:
        with ExitStack() as opened:
            for number, inner in enumerate(self._inners, 1):
                try:
                    inner.open()
                except Exception as error:
                    if len(self._inners) > 1:
                        error.add_note(f"{self.info.name}: inner tier {number} of {len(self._inners)} cannot be opened")
                    raise
                opened.callback(inner.close)
            port = self._wrap(*map(port_of, self._inners))
            opened.pop_all()
            return port

    def _close_port(self) -> None:
        with ExitStack() as all_inners:  # closes the others, too, if one cannot be closed
            for inner in self._inners:
                all_inners.callback(inner.close)

    def _check_extent(self, extent: Extent) -> None:
        # A tier written in Python checks the extent itself, when the port calls it.
        if isinstance(self.inner, PortTier):
            self.inner._check_extent(extent)
