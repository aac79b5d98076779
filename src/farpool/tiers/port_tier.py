"""What tiers with a native data path have in common."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING

from farpool.errors import TierError
from farpool.tiers.base import Extent, Tier, Transfer
from farpool.tiers.transfers import PortTransfers

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["PortTier"]


class PortTier(Tier):
    """A tier that is read and written through a native port.

    Subclasses take their resources in :meth:`_open_port` and give them back in :meth:`_close_port`; this class keeps
    the state, and transfers for callers in Python, on a queue of its own that is made at the first one.
    """

    def __init__(self) -> None:
        self._port: Port | None = None
        self._transfers: PortTransfers | None = None
        self._lifecycle = threading.RLock()

    @property
    def port(self) -> Port:
        """The native end of the tier, valid while it is open.

        Raises
        ------
        TierError
            The tier is not open.
        """
        port = self._port
        if port is None:
            raise TierError(f"{self.info.name}: the tier is not open; call open() first", tier=self.info.name)
        return port

    def open(self) -> None:
        with self._lifecycle:
            if self._port is None:
                self._port = self._open_port()

    def close(self) -> None:
        with self._lifecycle:
            if self._port is None:
                return
            self._port = None
            if self._transfers is not None:
                self._transfers.close()
                self._transfers = None
            self._close_port()

    def start_read(self, extent: Extent, into: memoryview) -> Transfer:
        with self._lifecycle:
            port = self.port
            self._check_extent(extent)
            return self._queue().start_read(port, extent, into)

    def start_write(self, extent: Extent, data: memoryview) -> Transfer:
        with self._lifecycle:
            port = self.port
            self._check_extent(extent)
            return self._queue().start_write(port, extent, data)

    @abstractmethod
    def _open_port(self) -> Port:
        """Take the resources; on failure nothing is kept."""

    @abstractmethod
    def _close_port(self) -> None:
        """Give the resources back. No transfer is under way."""

    @abstractmethod
    def _check_extent(self, extent: Extent) -> None:
        """ValueError unless `extent` may be transferred. The tier is open."""

    def _queue(self) -> PortTransfers:
        if self._transfers is None:
            self._transfers = PortTransfers(self.info.name)
        return self._transfers
