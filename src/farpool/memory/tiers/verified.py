"""Checksums of a tier's extents, so that a read either returns the written bytes or raises an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farpool._native import VerifiedPort
from farpool.abc.tier import Extent, Tier
from farpool.memory.tiers.wrapper import WrapperTier

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Verified"]


class Verified(WrapperTier):
    """Wrapper that computes the CRC32C of each extent that is written, and compares it when the extent is read.

    A read raises ChecksumError if its bytes differ from the bytes that were written, or if the extent was never
    written. The checksums are in this process's memory, where corruption inside the tier cannot change them. The
    wrapper works natively, without the interpreter lock, if the inner tier does.

    Parameters
    ----------
    inner : Tier
        The inner tier; opened and closed with this one.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._verified: VerifiedPort | None = None

    def free(self, extent: Extent) -> None:
        # reserve() must not come between the two steps, or the next owner of this offset would lose its checksum.
        with self._lifecycle:
            self.inner.free(extent)
            if self._verified is not None:
                self._verified.forget(extent.offset)

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""
        port = self._verified
        return 0 if port is None else port.tracked

    def _wrap(self, *ports: Port) -> Port:
        self._verified = VerifiedPort(ports[0], self.info.name)
        return self._verified

    def _close_port(self) -> None:
        self._verified = None
        super()._close_port()
