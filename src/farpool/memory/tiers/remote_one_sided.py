"""Transfers of a remote tier over a one-sided fabric. The native port calls them like a tier written in Python."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.abc.tier import Extent
    from farpool.cluster.wire.node_memory import NodeMemory

__all__ = ["OneSidedLease"]


class OneSidedLease:
    """One node's lease, read and written with one-sided operations. A transfer may take `timeout` seconds."""

    def __init__(self, memory: NodeMemory, lease: int, timeout: float) -> None:
        self._memory = memory
        self._lease = lease
        self._timeout = timeout

    def read_into(self, extent: Extent, into: memoryview) -> None:
        """Read a part of the lease into a buffer."""
        self._memory.read(self._lease, extent.offset, into, time.monotonic() + self._timeout)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        """Write a part of the lease from a buffer."""
        self._memory.write(self._lease, extent.offset, data, time.monotonic() + self._timeout)
