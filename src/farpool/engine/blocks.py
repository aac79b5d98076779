"""The table of blocks: one column an attribute, so that a block costs tens of bytes and a million of them stay cheap.

Beside its number a block has a name, which the tape uses. Names are handed out lowest first and are free again as
soon as the program drops the block. A program that allocates and frees in the same order on every pass therefore
gets the same names on every pass: the name of a gradient or a temporary is its ordinal of birth. The number itself
comes free only when no transfer is under way on the block, which depends on timing.
"""

from __future__ import annotations

from array import array

from farpool._native import ExtentAllocator, State

__all__ = ["NOWHERE", "BlockTable", "State"]

NOWHERE = -1
_FIRST_CAPACITY = 1024
_GROWTH = 4
"""A full table grows by this fraction: what is not in use yet takes memory too."""


class BlockTable:
    """Columns indexed by block number."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self._numbers = ExtentAllocator(_FIRST_CAPACITY)
        self._names = ExtentAllocator(_FIRST_CAPACITY)
        self.size = array("q")
        self.place = array("q")
        """Offset in the arena; NOWHERE unless fetching, resident or writing back."""
        self.state = array("b")
        self.cls = array("b")
        self.dirty = array("b")
        self.pins = array("i")
        self.tier = array("h")
        """Tier of the copy below; NOWHERE without one. The copy is valid while the block is not dirty."""
        self.copy = array("q")
        """Offset of that copy in its tier."""
        self.next_use = array("q")
        """Key for eviction: the farther, the sooner it goes."""
        self.last_use = array("q")
        """Position on the tape of the latest access."""
        self.name = array("i")
        self._named = array("i")
        """The block that bears a name; NOWHERE if none does."""
        self._extend(_FIRST_CAPACITY)

    def _extend(self, count: int) -> None:
        zeros, nowhere = [0] * count, [NOWHERE] * count
        for column in (self.size, self.state, self.cls, self.dirty, self.pins, self.next_use, self.last_use):
            column.extend(zeros)
        for column in (self.place, self.tier, self.copy, self.name):
            column.extend(nowhere)

    def create(self, sizes: list[int], cls: str) -> int:
        """Take consecutive numbers and names, one for each size in bytes; returns the first number."""
        kind = self.classes.index(cls)
        count = len(sizes)
        first = self._numbers.alloc_lowest(count)
        if first < 0:
            self._extend(max(len(self.size) // _GROWTH, count))
            self._numbers.grow(len(self.size))
            first = self._numbers.alloc_lowest(count)
        name = self._names.alloc_lowest(count)
        if name < 0:
            self._names.grow(self._names.capacity + max(self._names.capacity // _GROWTH, count))
            name = self._names.alloc_lowest(count)
        if name + count > len(self._named):
            self._named.extend([NOWHERE] * (self._names.capacity - len(self._named)))
        for ordinal, size in enumerate(sizes):
            block = first + ordinal
            self.size[block] = size
            self.cls[block] = kind
            self.state[block] = State.ABSENT
            self.place[block] = self.tier[block] = self.copy[block] = NOWHERE
            self.dirty[block] = self.pins[block] = self.next_use[block] = self.last_use[block] = 0
            self.name[block] = name + ordinal
            self._named[name + ordinal] = block
        return first

    def class_of(self, block: int) -> str:
        return self.classes[self.cls[block]]

    def named(self, name: int) -> int:
        """Number of the block that bears this name now; NOWHERE if none does."""
        return self._named[name] if name < len(self._named) else NOWHERE

    def retire(self, first: int, count: int) -> None:
        """The program has dropped the blocks of one `create`: their names are free."""
        name = self.name[first]
        for ordinal in range(count):
            self._named[name + ordinal] = NOWHERE
        self._names.free(name)

    def forget(self, first: int, count: int) -> None:
        """Give the numbers of retired blocks back."""
        for block in range(first, first + count):
            self.state[block] = State.FREE
        self._numbers.free(first)

    def used(self) -> list[int]:
        """Numbers in use, in order."""
        return [number for offset, count in self._numbers.ranges() for number in range(offset, offset + count)]
