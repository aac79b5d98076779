"""The contract of a device with memory of its own: copies between its arena and page-locked memory of the host.

The CUDA one is in `farpool.pager.executor.cuda`; the tests bring one of host memory.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Copy", "Device", "WatchesStaging"]


class Copy(Protocol):
    """A copy under way between the host's memory and the device."""

    def done(self) -> bool:
        """Tell if the copy has ended.

        Raises if that cannot be told. It may be under way then, so nobody may touch its memory; ask again later.
        """
        ...


class Device(Protocol):
    """Copies between the arena and the host. Places are offsets in the arena, hosts are addresses, sizes are bytes.

    Copies of one direction end in the order in which they were started.
    """

    def begin_thread(self) -> None:
        """The calling thread is the executor's own, and the one that will ask copies whether they have ended."""
        ...

    def note_use(self) -> None:
        """The calling thread is about to have work of its own on the arena."""
        ...

    def fence(self) -> object:
        """A point in the program's own work: copies that wait for it see its effects and do not disturb it."""
        ...

    def passed(self, fence: object) -> bool:
        """Tells if the program's work in front of a fence has ended. Only debug mode asks."""
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
    """A device that wants to know when tiers are at work on the staging memory."""

    def tier_leg(self, transfer: int, host: int, nbytes: int) -> None:
        """A transfer begins between its tier and the staging memory at this address."""
        ...

    def tier_leg_ended(self, transfer: int) -> None: ...
