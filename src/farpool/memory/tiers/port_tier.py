"""Base class of tiers with a native data path."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farpool._native import PythonPort, buffer_address
from farpool.abc.tier import Extent, HasPort, Tier
from farpool.errors import NodeError, NodeTimeoutError, TierError, TierTimeoutError
from farpool.memory.tiers.buffers import require_buffer

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["PortTier", "port_of"]


def port_of(tier: Tier) -> Port:
    """Return the native port of an open tier; if it has none, return a port that calls the tier's methods."""
    return tier.port if isinstance(tier, HasPort) else PythonPort(tier)


class PortTier(Tier):
    """A tier that is read and written through a native port.

    Subclasses acquire their resources in :meth:`_open_port` and release them in :meth:`_close_port`. This class
    remembers if the tier is open, and closes it only after the end of all transfers that were called from Python.
    """

    def __init__(self) -> None:
        self._port: Port | None = None
        # Reentrant, because wrappers hold it when they call methods of this class that take it again.
        self._lifecycle = threading.RLock()
        self._idle = threading.Condition(self._lifecycle)
        self._under_way = 0
        """Number of transfers under way that were called from Python."""
        self._closing = False
        self._process = os.getpid()

    @property
    def port(self) -> Port:
        """The native port of the tier, valid while it is open.

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
            self._wait_for_close()
            if self._port is None:
                self._port = self._open_port()
                self._process = os.getpid()

    def close(self) -> None:
        with self._lifecycle:
            self._wait_for_close()
            if self._port is None:
                return
            # Before the wait, so that no new transfer begins while the others end.
            self._port = None
            self._closing = True
            try:
                while self._under_way and os.getpid() == self._process:  # in a forked child they never end
                    self._idle.wait()
                self._close_port()
            finally:
                self._closing = False
                self._idle.notify_all()

    def _wait_for_close(self) -> None:
        """Wait until no other thread is closing the tier.

        The lock alone does not ensure this, because `close` releases the lock while it waits for transfers.
        """
        while self._closing and os.getpid() == self._process:
            self._idle.wait()

    def read_into(self, extent: Extent, into: memoryview) -> None:
        with self._transfer(extent) as port, require_buffer(extent, into, writable=True) as view:
            port.read(extent.offset, buffer_address(view), extent.nbytes)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        with self._transfer(extent) as port, require_buffer(extent, data, writable=False) as view:
            port.write(extent.offset, buffer_address(view), extent.nbytes)

    @contextmanager
    def _transfer(self, extent: Extent) -> Iterator[Port]:
        with self._lifecycle:
            port = self.port
            self._check_extent(extent)
            # Counted under the same lock in which the port was found open, so `close` cannot miss this transfer.
            self._under_way += 1
        try:
            # The transfer itself runs without the lock, so transfers of several threads overlap.
            yield port
        except NodeError as error:  # if a node fails the transfer, the tier has failed it
            kind = TierTimeoutError if isinstance(error, NodeTimeoutError) else TierError
            raise kind(f"{self.info.name}: {error}", tier=self.info.name) from error
        finally:
            with self._lifecycle:
                self._under_way -= 1
                self._idle.notify_all()

    @abstractmethod
    def _open_port(self) -> Port:
        """Acquire the tier's resources and return its port. On failure, keep no resources."""

    @abstractmethod
    def _close_port(self) -> None:
        """Release the tier's resources. Called while no transfer is under way."""

    @abstractmethod
    def _check_extent(self, extent: Extent) -> None:
        """Raise ValueError unless `extent` may be transferred. Called while the tier is open."""
