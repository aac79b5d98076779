"""The map of the arena: which range belongs to which block, what is still being read out of a range, how to make a gap.

A dirty victim's range is free for its successor as soon as the write-back is queued: the successor's transfer is
ordered after it, so the link never waits for the program to come back. Until the write has completed the range is a
hazard: a transfer into it must wait, and nothing may be moved there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from farpool._native import ExtentAllocator
from farpool.engine.messages import Move

__all__ = ["ALIGNMENT", "ArenaMap", "Gap"]

ALIGNMENT = 64
"""Bytes, at least. Plain torch tensors begin at such addresses; a kernel may give other bits for one that does not."""


class Gap(NamedTuple):
    """How to open a hole: the blocks to slide, each with its new place, in the order in which to do it."""

    slides: tuple[tuple[int, int], ...]
    moved: int


class ArenaMap:
    """Ranges of the arena, in bytes from its start."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        self.alignment = alignment
        self._ranges = ExtentAllocator(capacity, alignment)
        """A range's tag is its owner."""
        self._hazards: dict[int, tuple[int, int]] = {}
        self.version = 0
        """Counts the changes of the map."""

    def rounded(self, nbytes: int) -> int:
        """Bytes that a block of `nbytes` bytes takes."""
        return -(-nbytes // self.alignment) * self.alignment

    @property
    def capacity(self) -> int:
        return self._ranges.capacity

    @property
    def used(self) -> int:
        return self._ranges.used

    @property
    def free(self) -> int:
        return self._ranges.capacity - self._ranges.used

    @property
    def hazards(self) -> bool:
        """Whether any range is still being written back."""
        return bool(self._hazards)

    def find(self, nbytes: int) -> int:
        """Offset of a hole of `nbytes` bytes, -1 if there is none. Nothing is taken."""
        place = self._ranges.alloc(nbytes)
        if place >= 0:
            self._ranges.free(place)
        return place

    def fits(self, place: int, nbytes: int) -> bool:
        """Whether this very range is free."""
        if not self._ranges.alloc_at(place, nbytes):
            return False
        self._ranges.free(place)
        return True

    def take(self, block: int, place: int, nbytes: int) -> bool:
        """Give this very range to `block`; False if any byte of it is taken."""
        if not self._ranges.alloc_at(place, nbytes, block):
            return False
        self.version += 1
        return True

    def drop(self, place: int) -> None:
        """Take the range back from its block."""
        self._ranges.free(place)
        self.version += 1

    def add_hazard(self, transfer: int, place: int, nbytes: int) -> None:
        """The bytes of this range are read by `transfer` until it completes."""
        self._hazards[transfer] = (place, place + self.rounded(nbytes))

    def remove_hazard(self, transfer: int) -> None:
        self._hazards.pop(transfer, None)
        self.version += 1

    def hazards_of(self, place: int, nbytes: int) -> tuple[int, ...]:
        """Transfers that still read bytes of this range."""
        if not self._hazards:
            return ()
        stop = place + nbytes
        return tuple(number for number, (low, high) in self._hazards.items() if low < stop and place < high)

    def owners(self) -> list[int]:
        """Blocks that own a range, in order of place."""
        return self._ranges.tags()

    def owners_beyond(self, capacity: int) -> list[int]:
        """Blocks with bytes at or beyond `capacity`."""
        return [owner for owner, place, size in self._owned() if place + size > capacity]

    def _owned(self) -> Iterator[tuple[int, int, int]]:
        """``(owner, place, bytes)`` of each range, in order of place."""
        for owner, (place, size) in zip(self._ranges.tags(), self._ranges.ranges(), strict=True):
            yield owner, place, size

    def gap(self, nbytes: int, movable: Callable[[int], bool], most: int) -> Gap | None:
        """The cheapest way to open a hole of `nbytes` by sliding neighbours towards the start, if there is one.

        Looks at each stretch of the arena without an immovable range, and in it at each window whose holes add up.

        Parameters
        ----------
        movable : callable
            Whether a block may be moved.
        most : int
            Bytes to move at most.
        """
        best: tuple[list[tuple[int, int, int]], int] | None = None
        for low, high, stretch in self._stretches(movable):
            left = moved = 0
            start = low
            for right, (_, _, size) in enumerate(stretch):
                moved += size
                stop = stretch[right + 1][1] if right + 1 < len(stretch) else high
                while left <= right and stop - start - moved >= nbytes:
                    if moved <= most:
                        best, most = (stretch[left : right + 1], start), moved - 1
                    _, place, size = stretch[left]
                    start = place + size
                    moved -= size
                    left += 1
        if best is None:
            return None
        return Gap(_slides(*best), most + 1)

    def _stretches(self, movable: Callable[[int], bool]) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """``(start, stop, movable ranges with their owners)`` between immovable ranges and hazards."""
        obstacles = [*self._hazards.values(), (self.capacity, self.capacity)]
        ranges = []
        for owner, place, size in self._owned():
            if movable(owner):
                ranges.append((owner, place, size))
            else:
                obstacles.append((place, place + size))
        obstacles.sort()
        stretches = []
        low = index = 0
        for start, stop in obstacles:
            inside = []
            while index < len(ranges) and ranges[index][1] < start:
                inside.append(ranges[index])
                index += 1
            if start > low and inside:
                stretches.append((low, start, inside))
            low = max(low, stop)
        return stretches

    def slide(self, block: int, place: int, target: int, nbytes: int) -> Move:
        """Carry out one step of a gap in the map, and return the copy to make."""
        self.drop(place)
        if not self.take(block, target, nbytes):
            raise AssertionError(f"range {target}+{nbytes} is taken")
        return Move(place, target, nbytes)

    def resize(self, capacity: int) -> bool:
        """Change the capacity; False (and nothing changed) while something lies, or is still read, beyond it."""
        if capacity >= self.capacity:
            self._ranges.grow(capacity)
            return True
        if any(high > capacity for _, high in self._hazards.values()):
            return False
        return self._ranges.shrink(capacity)


def _slides(ranges: list[tuple[int, int, int]], target: int) -> tuple[tuple[int, int], ...]:
    slides = []
    for owner, place, size in ranges:
        if place != target:
            slides.append((owner, target))
        target += size
    return tuple(slides)
