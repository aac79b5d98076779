"""Storages, which hold the bytes of tensors as an ordered list of extents of blocks.

Pager, tape and tiers handle only blocks. A small storage shares a block with other storages of its class. A large
storage has several blocks, cut between rows if possible, so that rows of a table can be fetched and evicted without
other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from farpool._native import Grant, Layout
from farpool.memory.pager import ALIGNMENT
from farpool.memory.pager.use import Use

__all__ = ["CLASSES", "BlockExtent", "Blocks", "Cut", "Dropped", "Storage", "StorageOwner", "block_bytes", "cut"]

CLASSES = ("weights", "gradient", "optimizer", "activation", "embedding", "kv", "expert", "bytes")
"""Classes that blocks may have."""

_BLOCK_DIVISOR = 16
"""A block is at most as large as the fast tier divided by this, so that the blocks of several operands and prefetched
blocks fit at the same time."""
_SMALL_DIVISOR = 8
"""A storage shares a block with other storages if it is at most as large as a shared block divided by this."""
_SHARED_BYTES_MAX = 1 << 20
"""Maximum bytes of a shared block. Transfers of larger blocks would not be more efficient."""
_ROW_BLOCK_BYTES_MAX = 16 << 10
"""Maximum bytes of a block of a table whose rows are picked by data, unless a row is larger."""
_ROW_BLOCK_BYTES_MIN = 3200
"""Minimum bytes of a block of a table whose rows are picked by data. The native pager needs some 110 bytes to manage a
block, 1/30 of this."""
_ROUNDING_DIVISOR = 8
"""When a block of a table whose rows are picked by data is rounded up to pages in a file, it may grow by at most its
bytes divided by this."""
_PAGE_BYTES = 4096
_SECTOR_BYTES = 512
"""Alignment in bytes that memory must have for direct I/O without a copy."""
_DIRECT_SECTORS_MIN = 128
"""If the largest block has this many sectors or more, blocks are aligned to sectors: they then lose little to rounding,
and direct I/O needs no copy."""


class BlockExtent(NamedTuple):
    """A contiguous range of bytes in a block."""

    block: int
    offset: int
    nbytes: int


class Blocks(NamedTuple):
    """The blocks of a storage, and its position in them. `blocks` is `Storage.count`; see `Storage` for the others."""

    first: int
    blocks: int
    offset: int
    block_bytes: int
    shared: bool
    adopted: bool = False


class Dropped(NamedTuple):
    """Notice that the last reference to a storage is gone. It names the storage's blocks, which can be freed."""

    first: int
    blocks: int
    nbytes: int
    cls: str
    adopted: bool


class Cut(NamedTuple):
    """The sizes and alignments, in bytes, with which a pool cuts storages into blocks."""

    largest: int
    shared: int
    small: int
    alignment: int
    packed: int = ALIGNMENT
    """Alignment of storages that share a block."""


def cut(fast: int, alignment: int = 0, packed: int = ALIGNMENT) -> Cut:
    """Return the sizes and alignments of blocks for a fast tier of `fast` bytes.

    Parameters
    ----------
    alignment : int
        Alignment of blocks in an arena that exists already; 0 to choose an alignment.
    packed : int
        Minimum alignment of storages that share a block.
    """
    largest = fast // _BLOCK_DIVISOR
    if alignment == 0:
        alignment = _SECTOR_BYTES if largest >= _DIRECT_SECTORS_MIN * _SECTOR_BYTES else packed
    largest = max(alignment, largest // alignment * alignment)
    if largest > _PAGE_BYTES * _BLOCK_DIVISOR:
        largest = largest // _PAGE_BYTES * _PAGE_BYTES
    shared = min(largest, _SHARED_BYTES_MAX)
    return Cut(largest, shared, shared // _SMALL_DIVISOR, alignment, packed)


def block_bytes(nbytes: int, sizes: Cut, row_bytes: int, cls: str) -> int:
    """Return the size in bytes of the blocks of a large storage, a multiple of the alignment. The last may be shorter.

    If possible, a block has a whole number of rows. If possible, its size is also a multiple of the page size, because
    files are read and written in pages. A row of stacked experts is one expert. If the size of an expert allows it,
    each expert is cut into equal blocks, so that no block has bytes of two experts.
    """
    if cls == "expert" and row_bytes > 0:
        step = _part_of_row(row_bytes, sizes)
        if step > 0:
            return step
    limit = sizes.largest
    if cls == "embedding" and limit >= _PAGE_BYTES:
        limit = _table_block_bytes(row_bytes, limit // _PAGE_BYTES * _PAGE_BYTES)
        return -(-min(nbytes, limit) // sizes.alignment) * sizes.alignment
    if nbytes <= limit:
        return -(-nbytes // sizes.alignment) * sizes.alignment
    if row_bytes > 0:
        for unit in (_PAGE_BYTES, sizes.alignment):
            step = math.lcm(row_bytes, unit)
            if step <= limit:
                return limit // step * step
    return limit


def _part_of_row(row_bytes: int, sizes: Cut) -> int:
    """Return the bytes of the largest block that divides a row into equal parts; 0 if all such blocks are too small."""
    fewest = -(-row_bytes // sizes.largest)
    most = row_bytes // max(sizes.small, sizes.alignment)
    for unit in (_PAGE_BYTES, sizes.alignment):
        for parts in range(fewest, most + 1):
            if row_bytes % (parts * unit) == 0:
                return row_bytes // parts
    return 0


def _table_block_bytes(row_bytes: int, limit: int) -> int:
    """Return the bytes of a block of a table whose rows are picked by data.

    A block has few whole rows, because the fetch of a row fetches the other rows of its block, too. But it has enough
    rows that bookkeeping and the rounding to pages in files cost little. A row of 4 KiB or a multiple of that has its
    own block. If no number of rows comes close to whole pages, a block is one page, or as many pages as a row fills.
    Then some rows are in two blocks, which have to be fetched together.
    """
    if row_bytes > 0:
        step = math.lcm(row_bytes, _SECTOR_BYTES)
        for nbytes in range(step, min(limit, max(_ROW_BLOCK_BYTES_MAX, row_bytes)) + 1, step):
            if nbytes >= _ROW_BLOCK_BYTES_MIN and -nbytes % _PAGE_BYTES <= nbytes // _ROUNDING_DIVISOR:
                return nbytes
    return min(limit, max(_PAGE_BYTES, row_bytes // _PAGE_BYTES * _PAGE_BYTES))


class StorageOwner(Protocol):
    """Interface of a pool as its storages and tensors use it; `BlockPool` implements it."""

    @property
    def arena(self) -> Any:
        """Memory of the fast tier. On a GPU, use its ``tensor``; on the host, its ``view()``."""
        ...

    @property
    def closed(self) -> bool: ...
    @property
    def debug(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def fast(self) -> int:
        """Budget of the fast tier, in bytes."""
        ...

    @property
    def small(self) -> int:
        """Largest size in bytes of storages that share a block."""
        ...

    def allocate(self, nbytes: int, *, cls: str = ..., row_bytes: int = ..., name: str = ...) -> Storage:
        """Make a new storage."""
        ...

    def enter(
        self, address: int, nbytes: int, owner: object, *, cls: str = ..., row_bytes: int = ..., name: str = ...
    ) -> Storage | None:
        """Make a storage with bytes from host memory in lower tiers; None if it has to be allocated and written."""
        ...

    def acquire(self, uses: Sequence[Use], op: str = ..., *, rows: bool = ...) -> Grant:
        """Bring byte ranges into the arena and pin them."""
        ...

    def release(self, grant: Grant) -> None:
        """Unpin operands that `acquire` has granted."""
        ...

    def drop(self, dropped: Dropped) -> None:
        """Record that the last reference to a storage is gone."""
        ...


class Storage:
    """A range of bytes in a pool, which is freed when the last reference is dropped.

    Attributes
    ----------
    pool : StorageOwner
    nbytes : int
    cls : str
        Class of its blocks.
    name : str
        Name of the storage, for errors; may be empty.
    row_bytes : int
        Bytes of a row; 0 if it has no rows.
    first, count : int
        Number of its first block, and count of its blocks, whose numbers are consecutive.
    offset : int
        Bytes from the start of its shared block to the start of the storage; 0 if it shares no block.
    block_bytes : int
        Bytes of each of its blocks except the last, which may be shorter; the bytes of its shared block if it has one.
    shared : bool
        True if it shares its block with other storages.
    adopted : bool
        True if its bytes came from a file that keeps the clean copy.
    loose : bool
        True if the storage is still to be packed: at its first use, a small storage is copied into a block of storages
        that are first used at about the same time (see `farpool.memory.pool.packing`).
    made : int
        Ordinal that grows in the order in which storages were made.
    first_used : int
        Ordinal that grows in the order in which loose storages were first used; -1 if the storage was never loose or
        has not been used yet.
    """

    __slots__ = (
        "__weakref__",
        "adopted",
        "cls",
        "first_used",
        "layout",
        "made",
        "name",
        "nbytes",
        "pool",
        "row_bytes",
    )

    def __init__(
        self, pool: StorageOwner, nbytes: int, cls: str, name: str, row_bytes: int, blocks: Blocks, made: int = -1
    ) -> None:
        self.pool = pool
        self.nbytes = nbytes
        self.cls = cls
        self.name = name
        self.row_bytes = row_bytes
        self.layout = Layout(blocks.first, blocks.blocks, blocks.offset, blocks.block_bytes, nbytes, blocks.shared)
        self.adopted = blocks.adopted
        self.made = made
        self.first_used = -1

    def __repr__(self) -> str:
        return f"Storage({self.name or self.cls}, {self.nbytes} bytes in {self.count} blocks)"

    @property
    def gradient_name(self) -> str:
        """Name for the storage of the gradient; empty if the storage itself has no name."""
        return f"{self.name}.grad" if self.name else ""

    @property
    def first(self) -> int:
        return self.layout.first

    @property
    def count(self) -> int:
        return self.layout.count

    @property
    def offset(self) -> int:
        return self.layout.offset

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def shared(self) -> bool:
        return self.layout.shared

    @property
    def loose(self) -> bool:
        return self.layout.loose

    @loose.setter
    def loose(self, loose: bool) -> None:
        self.layout.loose = loose

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield byte ranges ``(start, stop)`` of the storage, one for each of its blocks, in order."""
        step = max(self.block_bytes, 1)
        for start in range(0, self.nbytes, step):
            yield start, min(start + step, self.nbytes)

    def extents(self) -> list[BlockExtent]:
        """Return the parts of blocks that hold the storage's bytes, in order."""
        return [
            BlockExtent(self.first + index, self.offset, stop - start)
            for index, (start, stop) in enumerate(self.pieces())
        ]

    def __del__(self) -> None:
        # This runs at any moment when the last reference dies, perhaps in the middle of a pool's method. So it only
        # leaves a note for the pool.
        layout = self.layout
        self.pool.drop(Dropped(layout.first, layout.count, self.nbytes, self.cls, self.adopted))
