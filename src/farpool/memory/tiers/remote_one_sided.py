"""Transfers of a remote tier over a one-sided fabric, called by the native queue like a tier written in Python."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.abc.tier import Extent
    from farpool.cluster.wire.node_memory import NodeMemory

__all__ = ["OneSidedStripes"]


class OneSidedStripes:
    """Leases from several nodes, striped, which are read and written with one-sided operations.

    `parts` holds each node's memory and the lease in it, `stripe` is in bytes, `timeout` in seconds for a transfer.
    """

    def __init__(self, parts: Sequence[tuple[NodeMemory, int]], stripe: int, timeout: float) -> None:
        self._parts = parts
        self._stripe = stripe
        self._timeout = timeout

    def read_into(self, extent: Extent, into: memoryview) -> None:
        """Read an extent into a buffer."""
        deadline = time.monotonic() + self._timeout
        for memory, lease, offset, piece in self._pieces(extent, into):
            memory.read(lease, offset, piece, deadline)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        """Write an extent from a buffer."""
        deadline = time.monotonic() + self._timeout
        for memory, lease, offset, piece in self._pieces(extent, data):
            memory.write(lease, offset, piece, deadline)

    def _pieces(self, extent: Extent, view: memoryview) -> Iterator[tuple[NodeMemory, int, int, memoryview]]:
        """Split an extent by node: yields each piece's node memory, lease, offset in the lease, and buffer part."""
        done = 0
        while done < extent.nbytes:
            stripe, inside = divmod(extent.offset + done, self._stripe)
            row, node = divmod(stripe, len(self._parts))
            nbytes = extent.nbytes - done
            if len(self._parts) > 1:
                nbytes = min(nbytes, self._stripe - inside)
            with view[done : done + nbytes] as piece:
                yield *self._parts[node], row * self._stripe + inside, piece
            done += nbytes
