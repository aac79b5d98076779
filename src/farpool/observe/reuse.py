"""Reuse distances: the bytes that a program touches between two uses of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from farpool.memory.pager import Mode
from farpool.memory.pager.belady import BlockAccess

__all__ = ["quantiles", "reuse_distances"]


def reuse_distances(accesses: Sequence[BlockAccess]) -> Counter[int]:
    """Return how many bytes were reused at each reuse distance.

    The reuse distance of a use is the sum of the sizes of all blocks that were touched since the previous use of the
    same block. Each block counts once. The reused block counts, and freed blocks do not count. A cache that evicts the
    least recently used blocks still has the reused block if the cache is at least as large as the distance (R. L.
    Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970). The first use of a
    block after its creation is no reuse, and a use that overwrites a block is none either, because these uses do not
    need the block's content.
    """
    touches = sum(len(access.operands) for access in accesses)
    tree = _PrefixSums(touches)
    latest: dict[int, tuple[int, int]] = {}
    """Position of the latest touch of each block, and the block's bytes."""
    total = position = 0
    distances: Counter[int] = Counter()
    for access in accesses:
        for block in access.created:
            total -= _forget(block, latest, tree)
        for block, nbytes, mode in access.operands:
            before = latest.get(block)
            if before is not None:
                if mode != Mode.OVERWRITE:
                    distances[total - tree.before(before[0])] += nbytes
                total -= _forget(block, latest, tree)
            latest[block] = position, nbytes
            tree.add(position, nbytes)
            total += nbytes
            position += 1
        for block in access.freed:
            total -= _forget(block, latest, tree)
    return distances


def quantiles(distances: Counter[int], shares: Iterable[float]) -> list[tuple[float, int]]:
    """Return, for each share, the smallest distance within which this share of the reused bytes was reused.

    The shares must ascend. Each entry of the result is a share and its distance. The result is empty if no bytes were
    reused.
    """
    ordered = sorted(distances.items())
    whole = sum(distances.values())
    found: list[tuple[float, int]] = []
    covered = index = 0
    for share in shares:
        while index < len(ordered) and (covered < share * whole or not index):
            covered += ordered[index][1]
            index += 1
        if index:
            found.append((share, ordered[index - 1][0]))
    return found


def _forget(block: int, latest: dict[int, tuple[int, int]], tree: _PrefixSums) -> int:
    position, nbytes = latest.pop(block, (0, 0))
    if nbytes:
        tree.add(position, -nbytes)
    return nbytes


class _PrefixSums:
    """An array whose entries can change, with fast sums of its first entries (a Fenwick tree)."""

    def __init__(self, length: int) -> None:
        self._nodes = [0] * (length + 1)

    def add(self, index: int, value: int) -> None:
        index += 1
        while index < len(self._nodes):
            self._nodes[index] += value
            index += index & -index

    def before(self, index: int) -> int:
        """Return the sum of all entries before `index`."""
        value = 0
        while index:
            value += self._nodes[index]
            index &= index - 1
        return value
