"""A remote tier's transfers with NIXL, which the native queue calls as it calls a tier written in Python."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.tiers.base import Extent
    from farpool.transport.channel import Channel
    from farpool.transport.lease import Lease
    from farpool.transport.nixl_memory import NodeMemory

__all__ = ["OneSidedStripes"]


class OneSidedStripes:
    """Leases of several nodes, striped, read and written one-sided.

    Parameters
    ----------
    channels : sequence of Channel
        The ways to the nodes, with the transport ``nixl``.
    leases : sequence of Lease
        What each of them lends.
    stripe : int
        Bytes of a stripe.
    timeout : float
        Seconds that a transfer may take.
    """

    def __init__(self, channels: Sequence[Channel], leases: Sequence[Lease], stripe: int, timeout: float) -> None:
        self._parts = [
            (channel.one_sided, lease)
            for channel, lease in zip(channels, leases, strict=True)
            if channel.one_sided is not None
        ]
        self._stripe = stripe
        self._timeout = timeout

    def read_into(self, extent: Extent, into: memoryview) -> None:
        """Read an extent."""
        deadline = time.monotonic() + self._timeout
        for memory, lease, offset, piece in self._pieces(extent, into):
            memory.read(lease.id, offset, piece, deadline)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        """Write an extent."""
        deadline = time.monotonic() + self._timeout
        for memory, lease, offset, piece in self._pieces(extent, data):
            memory.write(lease.id, offset, piece, deadline)

    def _pieces(self, extent: Extent, view: memoryview) -> Iterator[tuple[NodeMemory, Lease, int, memoryview]]:
        """What lies on one node each, and where."""
        done = 0
        while done < extent.nbytes:
            stripe, inside = divmod(extent.offset + done, self._stripe)
            row, node = divmod(stripe, len(self._parts))
            nbytes = extent.nbytes - done
            if len(self._parts) > 1:
                nbytes = min(nbytes, self._stripe - inside)
            memory, lease = self._parts[node]
            with view[done : done + nbytes] as piece:
                yield memory, lease, row * self._stripe + inside, piece
            done += nbytes
