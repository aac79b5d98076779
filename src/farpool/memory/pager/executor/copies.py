"""The interface of devices with memory of their own: copies between their arena and page-locked host memory.

CUDA devices are in `farpool.memory.pager.executor.cuda`; the tests have a device that simulates its memory on the host.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Copy", "Device", "WatchesStaging"]


class Copy(Protocol):
    """A copy under way between the host's memory and the device."""

    def done(self) -> bool:
        """Return True if the copy has ended.

        Raises an error if the device cannot tell. The copy may still be under way then, so do not touch its memory, and
        call this again later.
        """
        ...


class Device(Protocol):
    """A device with an arena in its own memory.

    A `place` is an offset in the arena, a `host` is an address in host memory, and sizes are in bytes.

    Copies of one direction end in the order in which they were started.
    """

    def begin_thread(self) -> None:
        """Prepare the calling thread, which is the executor's own thread and will poll copies."""
        ...

    def note_use(self) -> None:
        """Prepare for work on the arena that the calling thread is about to queue."""
        ...

    def fence(self) -> object:
        """Return a mark for the current point in the program's work.

        A copy with this fence starts when all work before the mark has ended.
        """
        ...

    def passed(self, fence: object) -> bool:
        """Return True if the program's work before a fence has ended; only debug mode calls this."""
        ...

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move bytes inside the arena, after the program's earlier work and before its later work.

        The ranges may overlap.
        """
        ...

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> Copy:
        """Start a copy into the arena. Raises an error only if the copy has certainly not been started."""
        ...

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> Copy:
        """Start a copy out of the arena. Raises an error only if the copy has certainly not been started."""
        ...


@runtime_checkable
class WatchesStaging(Protocol):
    """Interface of a device whose executor reports when tiers read or write the staging memory."""

    def tier_leg(self, transfer: int, host: int, nbytes: int) -> None:
        """Record that a transfer starts to copy between its tier and the staging memory at address `host`."""
        ...

    def tier_leg_ended(self, transfer: int) -> None: ...
