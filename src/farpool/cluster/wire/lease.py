"""Leases at one node: private memory that the node has lent to this program."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from farpool._native import RemoteEnd, buffer_address
from farpool.errors import NodeError

__all__ = ["SEGMENT_HEADER_BYTES", "ClaimedExtent", "Lease", "Lender", "map_lease"]

SEGMENT_HEADER_BYTES = 4096
"""Size of the header of a segment file, in bytes; the lent memory follows it (docs/segment-file.md)."""


class Lender(Protocol):
    """Interface to a node that lends memory; `Channel` implements it."""

    def end(self, lease: int, nbytes: int, memory: mmap.mmap | None, timeout: float) -> RemoteEnd:
        """Make the object through which a `RemotePort` moves bytes of a lease: over `memory`, or over connections."""
        ...

    def release(self, lease: int, deadline: float) -> None:
        """Give a lease back to the node."""
        ...


class Lease:
    """Private memory that a node has lent. A new lease contains zeros.

    Attributes
    ----------
    id : int
        Number of the lease at the node.
    nbytes : int
        Bytes lent.
    """

    def __init__(self, lender: Lender, number: int, nbytes: int, memory: mmap.mmap | None) -> None:
        self.id = number
        self.nbytes = nbytes
        self._lender = lender
        self._memory = memory

    @property
    def address(self) -> int | None:
        """Address of the mapped memory in this process, valid until `release`; None if the memory is not mapped."""
        memory = self._memory  # read once, because another thread may release the lease
        return None if memory is None else buffer_address(memory) + SEGMENT_HEADER_BYTES

    def end(self, timeout: float) -> RemoteEnd:
        """Make the object through which a `RemotePort` moves bytes. Mapped memory stays mapped while the object exists.

        Parameters
        ----------
        timeout : float
            Seconds that opening a connection may take.
        """
        return self._lender.end(self.id, self.nbytes, self._memory, timeout)

    def release(self, deadline: float) -> None:
        """Give the memory back. No transfer of its bytes may be under way.

        Raises
        ------
        NodeError
            The node cannot be reached. The node frees the memory by itself once the session has ended.
        """
        # From now on `address` is None. The mapping itself lives as long as a `RemoteEnd` uses it.
        self._memory = None
        self._lender.release(self.id, deadline)


@dataclass(frozen=True, slots=True)
class ClaimedExtent:
    """Extent of a pool's lease that a node lets this program use after a ticket was shown.

    Attributes
    ----------
    number : int
        Number of the extent in the ticket.
    lease : Lease
        The extent at the node. `Lease.release` ends this program's use of it; only a manager's order frees it.
    made : bool
        True if the node has just made the extent, so that it contains zeros.
    """

    number: int
    lease: Lease
    made: bool


def map_lease(call: Callable[[], list[int]], nbytes: int, node: str) -> mmap.mmap:
    """Map the file of a lease.

    `call` asks the node for the file, and returns a list that contains the file's descriptor.
    """
    files = call()
    try:
        if len(files) != 1:
            raise NodeError(f"{node} passed {len(files)} files for a lease, expected 1", node=node)
        size = os.fstat(files[0]).st_size
        # An access beyond the end of the file would kill this process with SIGBUS.
        if size < SEGMENT_HEADER_BYTES + nbytes:
            raise NodeError(f"{node}: the file of a lease of {nbytes} bytes has only {size}", node=node)
        return mmap.mmap(files[0], SEGMENT_HEADER_BYTES + nbytes)
    except (OSError, ValueError) as error:
        if isinstance(error, NodeError):
            raise
        raise NodeError(f"{node}: the memory of a lease cannot be mapped: {error}", node=node) from error
    finally:
        for file in files:
            os.close(file)
