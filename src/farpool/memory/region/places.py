"""Room for the pages of a region in the lower tiers of a pool."""

from __future__ import annotations

from farpool._native import Port, VerifiedPort
from farpool.errors import PoolFullError, UnsupportedError
from farpool.memory.pool.guests import Guests, Room
from farpool.memory.tiers import Tier
from farpool.memory.tiers.port_tier import port_of
from farpool.sizes import format_size

__all__ = ["PAGE_BYTES", "Place", "Places"]

PAGE_BYTES = 4096
_SMALLEST_BYTES = 1 << 20
"""A tier gets no smaller extent, except the last one of a region, because many extents make runs of pages short."""

Place = tuple[Port, int, int, str, bool]
"""Room as the native core takes it: port, offset, pages, name of the tier, and if the core verifies the pages."""


class Places:
    """The extents of a region, in the order of its pages.

    A region moves parts of extents, and its native threads must never wait for the interpreter lock: a program's thread
    may hold the lock while it waits for a page. So the pool's checksums, which are of whole extents, are left out, and
    the native core keeps a checksum of each page instead.

    Raises
    ------
    UnsupportedError
        No lower tier of the pool can serve a region.
    """

    def __init__(self, guests: Guests, name: str) -> None:
        self._guests = guests
        self._name = name
        self._rooms: list[Room] = []
        self._ports: dict[int, tuple[Port, bool]] = {}
        refused = []
        for number, tier in enumerate(guests.tiers):
            port, checked = _bare(tier)
            if port.serves_faults:
                self._ports[number] = port, checked
            else:
                refused.append(tier.info.name)
        if not self._ports:
            raise UnsupportedError(
                f"{name}: "
                + (
                    f"none of the pool's lower tiers ({', '.join(refused)}) can serve a region, because each is "
                    "written in Python or moves only whole extents"
                    if refused
                    else "the pool has no lower tiers, to which pages could leave"
                )
                + "; give the pool a tier such as dram='1GiB' or nvme='8GiB'"
            )

    @property
    def pages(self) -> int:
        """Number of pages for which there is room."""
        return sum(room.nbytes for room in self._rooms) // PAGE_BYTES

    def extend(self, pages: int) -> list[Place]:
        """Reserve room for `pages` more pages, in the faster tiers first.

        Raises
        ------
        PoolFullError
            The lower tiers lack room; nothing was reserved.
        """
        rooms: list[Room] = []
        try:
            left = pages * PAGE_BYTES
            for number in self._ports:
                left -= self._fill(number, left, rooms)
            if left:
                names = ", ".join(self._guests.tiers[number].info.name for number in self._ports)
                raise PoolFullError(
                    f"{self._name}: the lower tiers that can serve a region ({names}) lack {format_size(left)} of the "
                    f"{format_size(pages * PAGE_BYTES)} that it needs below: make them larger, or the region smaller",
                    lacking=left,
                )
        except BaseException:
            for room in rooms:
                self._guests.free(room)
            raise
        self._rooms += rooms
        return [self._place(room) for room in rooms]

    def cut(self, pages: int) -> None:
        """Free the extents beyond the first `pages` pages; the extent with the last page stays whole."""
        held = sum(room.nbytes for room in self._rooms)
        while self._rooms and held - self._rooms[-1].nbytes >= pages * PAGE_BYTES:
            room = self._rooms.pop()
            held -= room.nbytes
            self._guests.free(room)

    def _fill(self, number: int, nbytes: int, rooms: list[Room]) -> int:
        """Reserve up to `nbytes` bytes in one tier, in as few extents as possible; return how many."""
        size, got = nbytes, 0
        while got < nbytes and size:
            room = self._guests.reserve(number, min(size, nbytes - got))
            if room is not None:
                rooms.append(room)
                got += room.nbytes
            elif size <= _SMALLEST_BYTES:
                break
            else:
                size = max(size // 2 // PAGE_BYTES * PAGE_BYTES, _SMALLEST_BYTES)
        return got

    def _place(self, room: Room) -> Place:
        port, checked = self._ports[room.tier]
        return port, room.offset, room.nbytes // PAGE_BYTES, self._guests.tiers[room.tier].info.name, checked


def _bare(tier: Tier) -> tuple[Port, bool]:
    """Return a tier's port without the checksums around it, and whether there were any."""
    port, checked = port_of(tier), False
    while isinstance(port, VerifiedPort):
        port, checked = port.inner, True
    return port, checked
