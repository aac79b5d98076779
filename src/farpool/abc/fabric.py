"""One-sided fabrics: packages that read and write a node's memory without any action of the node (docs/nixl.md).

A fabric moves bytes and nothing else. The node decides which programs may use a segment, and the program verifies the
bytes that it reads. A package offers its fabric as an entry point of the group ``farpool.fabrics``: users give its
name to ``transport=`` and ``farpool node --fabric``; its value is a class of `Fabric`, which farpool calls without
arguments.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

__all__ = ["Endpoint", "Exposed", "Exposure", "Fabric", "Region"]


class Exposed(msgspec.Struct, frozen=True):
    """A segment file that can be read and written one-sided, as a node describes it to a program.

    `metadata` describes in the fabric's own terms how to reach it, in a few KiB at most, and is unique to this
    exposure; `address` is the address of its first byte in the process that exposes it.
    """

    metadata: bytes
    address: int
    nbytes: int


class Region(Protocol):
    """A program's access to the bytes of one segment. Thread-safe.

    Offsets count from the beginning of the file, buffers are contiguous, a deadline is a time of `time.monotonic`.
    Both directions raise `ValueError` for a range outside of the segment, `NodeTimeoutError` if a transfer did not
    end in time, and `NodeError` if it failed or the other end is gone; the caller then attaches again.
    """

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        """Fill a buffer. After a failure its bytes are unspecified; nothing writes into it once this call has ended."""
        ...

    def write(self, offset: int, data: memoryview, deadline: float) -> None:
        """Copy a buffer to the segment. After `NodeTimeoutError` it may still arrive, but before any later transfer."""
        ...

    def close(self) -> None:
        """Detach from the segment. No new transfer may be begun; those that other threads have begun may fail."""
        ...


class Endpoint(Protocol):
    """A program's end of all transfers with one node. Thread-safe."""

    def attach(self, exposed: Exposed) -> Region:
        """Attach to a segment; raises NodeError if the fabric cannot use the description."""
        ...

    def close(self) -> None:
        """Release everything. This object and its regions may not be used any more."""
        ...


class Exposure(Protocol):
    """A segment file that a node exposes."""

    @property
    def exposed(self) -> Exposed:
        """Description for the program that may access it."""
        ...

    def is_alive(self) -> bool:
        """Return True if the segment can still be reached; if it cannot, the node exposes it again."""
        ...

    def close(self) -> None:
        """End the exposure: later reads and writes of programs fail. Idempotent."""
        ...


@runtime_checkable
class Fabric(Protocol):
    """A one-sided fabric. Its constructor raises `ConfigError` if the fabric cannot be used on this host."""

    def endpoint(self, node: str) -> Endpoint:
        """Open a program's end of transfers with a node; errors name the node by its address `node`."""
        ...

    def expose(self, file: int, *, loopback: bool) -> Exposure:
        """Let programs (with `loopback`, of this host only) read and write a file; raises NodeError on failure.

        The descriptor is open for both; the caller closes it.
        """
        ...
