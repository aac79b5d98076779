"""Checksums of a tier's extents, so that a read gives the bytes that were written, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farpool._native import VerifiedPort
from farpool.abc.tier import Extent, Tier
from farpool.memory.tiers.port_wrapper import PortWrapper

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Verified"]


class Verified(PortWrapper):
    """Wrapper that computes the CRC32C of each extent when it is written and compares it when it is read.

    A read of bytes that are not those written raises ChecksumError; so does a read of an extent that was never written.
    The checksums are in this process's memory, so corruption inside the tier cannot hide itself. Works natively,
    without the interpreter lock, if the inner tier does.

    Parameters
    ----------
    inner : Tier
        The inner tier; opened and closed with this one.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._verified: VerifiedPort | None = None

    def free(self, extent: Extent) -> None:
        # One step against reserve(): the next owner of this place must not lose its checksum.
        with self._lifecycle:
            self._inner.free(extent)
            if self._verified is not None:
                self._verified.forget(extent.offset)

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""
        port = self._verified
        return 0 if port is None else port.tracked

    def _wrap(self, port: Port) -> Port:
        self._verified = VerifiedPort(port, self.info.name)
        return self._verified

    def _close_port(self) -> None:
        self._verified = None
        super()._close_port()
