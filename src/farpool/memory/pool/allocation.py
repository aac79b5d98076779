"""Allocation of blocks to storages.

A large storage is cut into blocks, and small storages share a block. The blocks of dropped storages are freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.memory.pager import Pager
from farpool.memory.pager.storage import Blocks, Cut, Dropped, block_bytes
from farpool.memory.pool.recording import Made, Recorder

__all__ = ["Allocation", "Place"]

CREATED, USED = -1, -2
"""Each class has two shared blocks that are still being filled: `CREATED` in the order in which storages are made, and
`USED` in the order in which they are first used."""


@dataclass(slots=True, frozen=True)
class Place:
    """An extent of a lower tier that is reserved for one block."""

    tier: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Shared:
    """A block shared by small storages: its size, the bytes given out, and the number of live storages in it."""

    nbytes: int
    used: int = 0
    users: int = 0


class Allocation:
    """Allocator of the blocks of all storages of a pool.

    Attributes
    ----------
    storages : int
        Number of live storages.
    live : dict of str to int
        Bytes of live storages, by class.
    written : int
        Bytes of live storages that have no clean copy in a file.
    made : dict of int to Made
        Groups of blocks that were made together and are in use, by the number of the group's first block.
    """

    def __init__(self, pager: Pager, sizes: Cut, recorder: Recorder) -> None:
        self.sizes = sizes
        self.storages = 0
        self.live: dict[str, int] = {}
        self.written = 0
        self.made: dict[int, Made] = {}
        self._pager = pager
        self._recorder = recorder
        self._shared: dict[int, _Shared] = {}
        self._open: dict[tuple[str, int], int] = {}
        """The shared block that will hold the next small storage. The key is the class, and `CREATED`, `USED` or the
        number of the source file."""
        self.retired: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int, cls: str, row_bytes: int, pack: int = CREATED, *, name: str = "") -> Blocks:
        """Allocate blocks for a new storage. Small storages of a class share blocks, in order of allocation.

        Parameters
        ----------
        pack : int
            Selects the shared block for a small storage: `USED` if it is packed at its first use, else `CREATED`.
        name : str
            Name of the storage, for recordings.
        """
        self._count(nbytes, cls)
        if nbytes == 0:
            return Blocks(-1, 0, 0, 0, False)
        if nbytes <= self.sizes.small:
            block, offset = self._share(nbytes, cls, pack, name)
            return Blocks(block, 1, offset, self.sizes.shared, True)
        return self._create(nbytes, cls, row_bytes, name, adopted=False)

    def _count(self, nbytes: int, cls: str) -> None:
        self.storages += 1
        self.live[cls] = self.live.get(cls, 0) + nbytes
        self.written += nbytes

    def adopt(self, nbytes: int, cls: str, row_bytes: int, source: int, offset: int, *, name: str = "") -> Blocks:
        """Allocate blocks for a storage whose clean copy is `nbytes` bytes at `offset` of a source file.

        Small storages of a class and source share blocks.
        """
        self.storages += 1
        self.live[cls] = self.live.get(cls, 0) + nbytes
        if nbytes == 0:
            return Blocks(-1, 0, 0, 0, False, True)
        if nbytes <= self.sizes.small:
            block, inside = self._share(nbytes, cls, source, name)
            self._pager.adopt(block, source, offset, inside, nbytes)
            return Blocks(block, 1, inside, self.sizes.shared, True, True)
        blocks = self._create(nbytes, cls, row_bytes, name, adopted=True)
        for index in range(blocks.blocks):
            start = index * blocks.block_bytes
            size = min(blocks.block_bytes, nbytes - start)
            self._pager.adopt(blocks.first + index, source, offset + start, 0, size)
        return blocks._replace(adopted=True)

    def cut(self, nbytes: int, cls: str, row_bytes: int) -> tuple[int, list[int]]:
        """Return the `Storage.block_bytes` of a new storage that shares no block, and the sizes of its blocks."""
        step = nbytes if nbytes <= self.sizes.small else block_bytes(nbytes, self.sizes, row_bytes, cls)
        return step, [min(step, nbytes - start) for start in range(0, nbytes, step)]

    def enter(self, nbytes: int, cls: str, step: int, places: Sequence[Place], name: str) -> Blocks:
        """Allocate blocks for a storage whose bytes lower tiers have already, at a place for each block.

        A small storage gets a block of its own. If it is loose, it is packed at its first use all the same.
        """
        first = self._make([place.nbytes for place in places], cls, name, False, places)
        self._count(nbytes, cls)
        return Blocks(first, len(places), 0, step, nbytes <= self.sizes.small)

    def _create(self, nbytes: int, cls: str, row_bytes: int, name: str, *, adopted: bool) -> Blocks:
        step, sizes = self.cut(nbytes, cls, row_bytes)
        return Blocks(self._make(sizes, cls, name, adopted), len(sizes), 0, step, False)

    def _make(self, sizes: list[int], cls: str, name: str, adopted: bool, places: Sequence[Place] = ()) -> int:
        # One call of the pager makes all of them, so their numbers are consecutive and the first one identifies them.
        first = self._pager.create(sizes, cls)
        for block, place in enumerate(places, first):
            self._pager.note_copy(block, place.tier, place.offset)
        made = self.made[first] = Made(first, len(sizes), name, adopted)
        if self._recorder.recordings:
            self._recorder.created(self._pager, made)
        return first

    def _share(self, nbytes: int, cls: str, source: int, name: str) -> tuple[int, int]:
        key = (cls, source)
        block = self._open.get(key, -1)
        if block >= 0 and source >= 0 and not self._pager.can_adopt(block):
            block = -1  # the block is in use already, so its copy in the source cannot be extended
        if block < 0 or self._shared[block].used + nbytes > self._shared[block].nbytes:
            block = self._make([self.sizes.shared], cls, name, source >= 0)
            self._open[key] = block
            self._shared[block] = _Shared(self.sizes.shared)
        shared = self._shared[block]
        offset = shared.used
        shared.used = -(-(offset + nbytes) // self.sizes.packed) * self.sizes.packed
        shared.users += 1
        return block, offset

    def release(self, dropped: Dropped) -> None:
        """Retire the blocks of a storage whose last reference is gone. Keep a block that other storages still share."""
        self.storages -= 1
        self.live[dropped.cls] -= dropped.nbytes
        if not dropped.adopted:
            self.written -= dropped.nbytes
        if dropped.blocks == 0:
            return
        shared = self._shared.get(dropped.first)
        if shared is not None:
            shared.users -= 1
            if shared.users:
                return
            del self._shared[dropped.first]
            for key in [key for key, block in self._open.items() if block == dropped.first]:
                del self._open[key]
        del self.made[dropped.first]
        # A transfer may still use the blocks, so we retire them now and free them in `collect`.
        self._pager.retire(dropped.first, dropped.blocks)
        if self._recorder.recordings:
            self._recorder.freed(dropped.first, dropped.blocks)
        self.retired.append((dropped.first, dropped.blocks))

    def collect(self) -> None:
        """Free the retired blocks that no transfer or access uses any more."""
        for _ in range(len(self.retired)):
            first, count = self.retired.popleft()
            if not self._pager.forget(first, count):
                self.retired.append((first, count))
