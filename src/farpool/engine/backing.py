"""Backing: where below the arena the bytes of blocks lie, in tiers or in sources, and room for them.

Placement below is static: a block that has to leave goes to the first tier with room and keeps its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farpool.engine.arena import ArenaMap
from farpool.engine.blocks import NOWHERE, BlockTable
from farpool.engine.messages import NoRoomError, Piece, Space

__all__ = ["Backing"]


class Backing:
    """The copies of blocks; a block has one in a tier, or some of its parts in sources, or none.

    Parameters
    ----------
    blocks : BlockTable
        Its columns `tier` and `copy` say where in a tier the copies lie.
    arena : ArenaMap
    spaces : sequence of Space or None
        Lower tiers from fast to slow; None stands for a read-only source, which blocks only come from.
    may_lose : callable
        Whether the arena has a block's bytes safe, so that it can do without its copy.

    Attributes
    ----------
    sources : dict of int to list of Piece
        Clean copies in sources, by block; `Piece.place` is relative to the block's start.
    """

    def __init__(
        self,
        blocks: BlockTable,
        arena: ArenaMap,
        spaces: Sequence[Space | None],
        may_lose: Callable[[int], bool],
    ) -> None:
        self.sources: dict[int, list[Piece]] = {}
        self._blocks = blocks
        self._arena = arena
        self._spaces = list(spaces)
        self._may_lose = may_lose
        self._barred: dict[int, set[int]] = {}
        """Tiers that failed to take a block."""

    def add_source(self) -> int:
        """Make known another read-only source; returns its index among the tiers."""
        self._spaces.append(None)
        return len(self._spaces) - 1

    def adopt(self, block: int, piece: Piece) -> None:
        """Part of a block's copy lies in a source."""
        self.sources.setdefault(block, []).append(piece)

    def has(self, block: int) -> bool:
        """Whether there is a copy, clean or stale."""
        return self._blocks.tier[block] != NOWHERE or block in self.sources

    def pieces(self, block: int, place: int) -> tuple[Piece, ...]:
        """What to read to have the block at `place` in the arena. It has a copy."""
        if block in self.sources:
            return tuple(piece._replace(place=place + piece.place) for piece in self.sources[block])
        return (self.extent(block, place),)

    def extent(self, block: int, place: int) -> Piece:
        """The block's copy in its tier, and its range in the arena."""
        blocks = self._blocks
        return Piece(blocks.tier[block], blocks.copy[block], place, blocks.size[block])

    def reserve(self, block: int) -> None:
        """Have a place for the block's copy in a tier.

        Raises
        ------
        NoRoomError
            No tier has room, or none that has not failed to take it.
        """
        blocks = self._blocks
        if blocks.tier[block] != NOWHERE:
            return
        size = blocks.size[block]
        for tier, space in enumerate(self._spaces):
            if space is None or tier in self._barred.get(block, ()):
                continue
            offset = space.reserve(size, blocks.class_of(block))
            while offset is None and self._give_way(tier, size):
                offset = space.reserve(size, blocks.class_of(block))
            if offset is not None:
                blocks.tier[block], blocks.copy[block] = tier, offset
                return
        raise NoRoomError(block, size)

    def _give_way(self, tier: int, size: int) -> bool:
        """In a full tier, drop the copy of a block that is resident anyway: a stale one, else a clean one."""
        blocks = self._blocks
        found = NOWHERE
        for block in self._arena.owners():
            if blocks.tier[block] == tier and blocks.size[block] >= size and self._may_lose(block):
                if found == NOWHERE or blocks.dirty[block]:
                    found = block
                if blocks.dirty[block]:
                    break
        if found == NOWHERE:
            return False
        self.drop(found)
        blocks.dirty[found] = 1
        return True

    def drop(self, block: int) -> None:
        """The block has no copy any more."""
        self.sources.pop(block, None)
        if self._blocks.tier[block] != NOWHERE:
            self._free(block)

    def _free(self, block: int) -> None:
        blocks = self._blocks
        space = self._spaces[blocks.tier[block]]
        assert space is not None
        space.free(blocks.copy[block], blocks.size[block], blocks.class_of(block))
        blocks.tier[block] = blocks.copy[block] = NOWHERE

    def bar(self, block: int) -> bool:
        """The block's tier failed to take it, and is not tried again; False if no other is left."""
        barred = self._barred.setdefault(block, set())
        barred.add(self._blocks.tier[block])
        self._free(block)
        return not all(space is None or index in barred for index, space in enumerate(self._spaces))

    def unbar(self, block: int) -> None:
        """Any tier may be tried again."""
        self._barred.pop(block, None)
