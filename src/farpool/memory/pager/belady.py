"""Belady's bound: the bytes that a cache with perfect foresight moves, for comparison with a measured run.

Belady's rule (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
5(2), 1966): when room is needed, the block whose next use is farthest away is evicted. Content that is never needed
again, because its block is freed or is overwritten before the program reads it, is dropped at once and costs no
transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from farpool.memory.pager import Mode

__all__ = ["BlockAccess", "Moved", "Operand", "belady_bytes", "belady_moves", "total_of"]

_NEVER = 1 << 62
"""Stands in place of the next use if the program keeps the content, but does not use it in the rest of the accesses."""
_DEAD = -1
"""Stands in place of the next use if the program never needs the content again."""


class Operand(NamedTuple):
    """A block that an access touches, with its size and the mode of access."""

    block: int
    nbytes: int
    mode: Mode


class BlockAccess(NamedTuple):
    """An access to blocks, which must all be in the cache at the same time.

    Attributes
    ----------
    operands : sequence of Operand
        The blocks. A block that several operands name counts once. It counts as overwritten only if each of these
        operands overwrites it.
    created : sequence of int
        Blocks made since the previous access. They have no content until the program writes to them.
    freed : sequence of int
        Blocks that the program drops before the next access. New blocks may get the numbers of dropped blocks.
    """

    operands: Sequence[Operand]
    created: Sequence[int] = ()
    freed: Sequence[int] = ()


class Moved(NamedTuple):
    """Bytes moved between the cache and the tier below it: fetched into the cache, and written back from it."""

    fetched: int
    written: int

    @property
    def total(self) -> int:
        """Bytes in both directions together."""
        return self.fetched + self.written


def total_of(moves: Collection[Moved]) -> Moved:
    """Return the sum of several amounts, separately for each direction."""
    return Moved(sum(moved.fetched for moved in moves), sum(moved.written for moved in moves))


def belady_bytes(accesses: Iterable[BlockAccess], capacity: int) -> Moved:
    """Return the sum of the bytes that `belady_moves` returns for these accesses."""
    return total_of(belady_moves(accesses, capacity))


def belady_moves(accesses: Iterable[BlockAccess], capacity: int) -> list[Moved]:
    """Return, for each access, the bytes that a cache moves if it always evicts the block with the farthest next use.

    All operands of an access are in the cache at once. An evicted block is written back only if it is dirty. Blocks
    that the accesses do not create are below the cache at first. Blocks that are dirty at the end are not written back.

    If all blocks have the same size, no order of evictions fetches fewer bytes. If sizes differ, this usual greedy rule
    may fetch more than the minimum, which is hard to compute. The bytes written by these evictions are not minimized.

    Parameters
    ----------
    accesses : iterable of BlockAccess
        In the order of the program.
    capacity : int
        Bytes of the cache.

    Raises
    ------
    ValueError
        The operands of one access are together larger than `capacity`.
    """
    merged = [(_merged(access.operands), access) for access in accesses]
    _check_sizes(merged, capacity)
    upcoming = _next_needs(merged)
    resident: dict[int, int] = {}
    needs: dict[int, int] = {}
    """Next use of the content of each resident block."""
    queue: list[tuple[int, bool, int]] = []
    """Heap of resident blocks with the farthest next use first, and clean blocks before dirty ones. An entry is stale
    if its next use differs from the one in `needs`."""
    dirty, empty = set[int](), set[int]()
    used = 0
    moves: list[Moved] = []
    for number, (operands, access) in enumerate(merged):
        for block in access.created:
            used -= resident.pop(block, 0)
            needs.pop(block, None)
            dirty.discard(block)
            empty.add(block)
        fetched = written = 0
        for block, nbytes, mode in operands:
            if block not in resident:
                resident[block] = nbytes
                used += nbytes
                if mode != Mode.OVERWRITE and block not in empty:
                    fetched += nbytes
            if mode != Mode.READ:
                dirty.add(block)
                empty.discard(block)
            needs[block] = number
        # None of the operands is evicted, because they are needed now.
        while used > capacity:
            farthest, _, block = heapq.heappop(queue)
            # We never remove entries from the middle of the heap, so we skip an entry here if the next use of its block
            # has changed since.
            if needs.get(block) != -farthest or -farthest == number:
                continue
            nbytes = resident.pop(block)
            del needs[block]
            used -= nbytes
            if block in dirty:
                written += nbytes
                dirty.remove(block)
        for (block, nbytes, _), need in zip(operands, upcoming[number], strict=True):
            if need == _DEAD:
                del resident[block], needs[block]
                dirty.discard(block)
                used -= nbytes
            else:
                needs[block] = need
                heapq.heappush(queue, (-need, block in dirty, block))
        moves.append(Moved(fetched, written))
    return moves


def _check_sizes(merged: Iterable[tuple[Sequence[Operand], BlockAccess]], capacity: int) -> None:
    """Raise `ValueError` if the operands of one access are together larger than `capacity`."""
    for number, (operands, _) in enumerate(merged):
        needed = sum(operand.nbytes for operand in operands)
        if needed > capacity:
            raise ValueError(
                f"access {number} needs {needed} bytes at once, the cache has {capacity}; "
                f"take a capacity of at least {needed}"
            )


def _merged(operands: Sequence[Operand]) -> list[Operand]:
    """Merge the operands of an access so that each block appears once."""
    if len(operands) == 1:
        return [operands[0]]
    merged: dict[int, Operand] = {}
    for operand in operands:
        before = merged.get(operand.block)
        if before is None:
            merged[operand.block] = operand
        elif before.mode != operand.mode:
            merged[operand.block] = operand._replace(mode=Mode.WRITE)
    return list(merged.values())


def _next_needs(merged: Sequence[tuple[list[Operand], BlockAccess]]) -> list[list[int]]:
    """Return, for each operand of each access, the index of the next access that needs its content.

    In place of an index, `_DEAD` means that the content is freed or overwritten first, and `_NEVER` that no later
    access touches the block.
    """
    following: dict[int, int] = {}
    needs: list[list[int]] = []
    for number in range(len(merged) - 1, -1, -1):
        operands, access = merged[number]
        # We go backwards, so the steps of one access come in reverse: freed, used, created.
        for block in access.freed:
            following[block] = _DEAD
        needs.append([following.get(operand.block, _NEVER) for operand in operands])
        for block, _, mode in operands:
            following[block] = _DEAD if mode == Mode.OVERWRITE else number
        for block in access.created:
            following[block] = _DEAD
    needs.reverse()
    return needs
