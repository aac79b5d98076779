"""The interface of devices with memory of their own: copies between their arena and page-locked host memory.

The CUDA one is in `farpool.memory.pager.executor.cuda`; the tests bring one of host memory.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Copy", "Device", "WatchesStaging"]


class Copy(Protocol):
    """A copy under way between the host's memory and the device."""

    def done(self) -> bool:
        """Return True if the copy has ended.

        Raises if that is unknown. The copy may be under way then, so its memory must not be touched; ask again later.
        """
        ...


class Device(Protocol):
    """A device with an arena; places are offsets in the arena, hosts are addresses in host memory, sizes are bytes.

    Copies of one direction end in the order in which they were started.
    """

    def begin_thread(self) -> None:
        """Prepare the calling thread, which is the executor's own and the one that will poll copies."""
        ...

    def note_use(self) -> None:
        """Prepare for work of the calling thread on the arena."""
        ...

    def fence(self) -> object:
        """Mark the current point in the program's work; copies that wait for it neither miss nor disturb that work."""
        ...

    def passed(self, fence: object) -> bool:
        """Return True if the program's work before a fence has ended; only debug mode calls this."""
        ...

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move inside the arena, ordered with the program's work. The ranges may overlap."""
        ...

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> Copy:
        """Start a copy into the arena; raises only if it has certainly not been started."""
        ...

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> Copy:
        """Start a copy out of the arena; raises only if it has certainly not been started."""
        ...


@runtime_checkable
class WatchesStaging(Protocol):
    """Interface of a device that wants to know when tiers read or write the staging memory."""

    def tier_leg(self, transfer: int, host: int, nbytes: int) -> None:
        """Record that a transfer starts to copy between its tier and the staging memory at address `host`."""
        ...

    def tier_leg_ended(self, transfer: int) -> None: ...
