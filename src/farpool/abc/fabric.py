"""Interface of one-sided fabrics, which read and write a node's memory without any work by the node (docs/nixl.md).

A fabric only moves bytes. The node decides which programs may use a segment (a file in its memory), and each program
verifies the bytes that it reads. A package offers its fabric as an entry point of the group ``farpool.fabrics``. Users
give the entry point's name to ``transport=`` and ``farpool node --fabric``. The entry point's value is a class that
implements `Fabric`; farpool calls it without arguments.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

__all__ = ["Endpoint", "Exposed", "Exposure", "Fabric", "Region"]


class Exposed(msgspec.Struct, frozen=True):
    """Description of an exposed segment file. A program needs it to read and write the file one-sided.

    `metadata` tells the fabric how to reach the segment. It has at most a few KiB, is in the fabric's own format, and
    differs for each exposure. `address` is the address of the segment's first byte in the process that exposes it.
    """

    metadata: bytes
    address: int
    nbytes: int


class Region(Protocol):
    """A program's access to the bytes of one segment. Thread-safe.

    Offsets count from the beginning of the file, buffers are contiguous, and a deadline is a time of `time.monotonic`.
    `read` and `write` raise `ValueError` for a range outside of the segment, and `NodeTimeoutError` if the transfer did
    not end in time. They raise `NodeError` if the transfer failed or the other end is gone; the caller then attaches
    again.
    """

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        """Fill a buffer from the segment. After a failure the buffer's bytes are unspecified.

        After this call has returned or raised, nothing writes into the buffer any more.
        """
        ...

    def write(self, offset: int, data: memoryview, deadline: float) -> None:
        """Copy a buffer to the segment.

        If this raises `NodeTimeoutError`, the bytes may still reach the segment, but not after the bytes of a later
        transfer.
        """
        ...

    def close(self) -> None:
        """Detach from the segment. Transfers by other threads may fail; after this call no transfer may begin."""
        ...


class Endpoint(Protocol):
    """A program's side of all transfers with one node. Thread-safe."""

    def attach(self, exposed: Exposed) -> Region:
        """Attach to the segment that a node has described; raises NodeError if the description cannot be used."""
        ...

    def close(self) -> None:
        """Release everything. This object and its regions may not be used any more."""
        ...


class Exposure(Protocol):
    """A node's side of an exposed segment file."""

    @property
    def exposed(self) -> Exposed:
        """Description of the segment, for the program that may access it."""
        ...

    def is_alive(self) -> bool:
        """Return True if programs can still reach the segment. If they cannot, the node exposes the segment again."""
        ...

    def close(self) -> None:
        """End the exposure: later reads and writes by programs fail. Idempotent."""
        ...


@runtime_checkable
class Fabric(Protocol):
    """A one-sided fabric. Its constructor raises `ConfigError` if the fabric cannot be used on this host."""

    def endpoint(self, node: str) -> Endpoint:
        """Open a program's side of transfers with a node. `node` is the node's address, for errors."""
        ...

    def expose(self, file: int, *, loopback: bool) -> Exposure:
        """Let programs read and write a file one-sided. With `loopback`, only programs on this host can do so.

        `file` is a descriptor that is open for reading and writing; the caller closes it. Raises NodeError on failure.
        """
        ...
