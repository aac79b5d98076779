"""Keeps near blocks: blocks that were loaded into the memory of this process before a request needs them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from farpool.cluster.store.arguments import parts_of

if TYPE_CHECKING:
    from farpool.abc.objects import Payload

__all__ = ["NearMemory"]


class NearMemory:
    """Near blocks by key, up to a number of bytes. The least recently used blocks are evicted first. Thread-safe.

    Parameters
    ----------
    nbytes : int
        Maximum bytes of all blocks together; 0 to keep no blocks.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Start without blocks.

        The child of a fork does this, too, because threads of the parent may have been changing the blocks.
        """
        self._left = self.nbytes
        self._blocks: OrderedDict[bytes, bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def present(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the keys whose blocks are in this memory, and mark these blocks as recently used."""
        if not self._blocks:
            return set()
        with self._lock:
            here = self._blocks.keys() & set(keys)
            for key in here:
                self._blocks.move_to_end(key)
            return here

    def copy(self, keys: Sequence[bytes], targets: Sequence[Payload]) -> Sequence[int]:
        """Copy blocks that are in this memory into their targets; return the indices of the missing blocks."""
        if not self._blocks:
            return range(len(keys))
        far: list[int] = []
        for number, (key, target) in enumerate(zip(keys, targets, strict=True)):
            block = self._blocks.get(key)  # no thread writes into it any more
            if block is None:
                far.append(number)
                continue
            at, source = 0, memoryview(block)
            for part in parts_of(target):
                view = part.cast("B")
                view[:] = source[at : at + view.nbytes]
                at += view.nbytes
        return far

    def reserve(self, wanted: Sequence[tuple[bytes, int]]) -> dict[bytes, bytearray]:
        """Reserve memory for the wanted blocks that are missing here, in the given order, until no room is left.

        Blocks are evicted to make room, the least recently used first. Wanted blocks are not evicted.

        Parameters
        ----------
        wanted : sequence of tuple of bytes and int
            Key and size in bytes of each block.

        Returns
        -------
        dict
            The reserved memory by key. The caller has to pass the memory of each key to `keep` or `release`.
        """
        here = self.present(key for key, _ in wanted)
        places: dict[bytes, bytearray] = {}
        with self._lock:
            for key, nbytes in wanted:
                if key in self._blocks or key in places:
                    continue
                while self._left < nbytes and self._blocks and next(iter(self._blocks)) not in here:
                    self._left += len(self._blocks.popitem(last=False)[1])
                if self._left < nbytes:
                    break
                # The room is taken before the load, so that several loads together stay within the limit.
                self._left -= nbytes
                places[key] = bytearray(nbytes)
        return places

    def keep(self, key: bytes, place: bytearray) -> None:
        """Keep a block whose bytes were loaded into memory from `reserve`."""
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = place
                return
        # Call `release` outside the lock, because it takes the lock itself.
        self.release(place)

    def release(self, place: bytearray) -> None:
        """Give back memory from `reserve` into which no block was loaded."""
        with self._lock:
            self._left += len(place)

    def clear(self) -> None:
        """Evict all blocks."""
        with self._lock:
            self._left += sum(map(len, self._blocks.values()))
            self._blocks.clear()
