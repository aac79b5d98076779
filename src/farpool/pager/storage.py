"""Storages: what a tensor's bytes live in, as an ordered list of extents of blocks.

Pager, tape and tiers know only blocks. A small storage shares a block with others of its class; a large one spans
several blocks, cut at rows where that is possible, so that rows of a table can come and go without the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from farpool._native import Grant, Layout
from farpool.pager import ALIGNMENT
from farpool.pager.use import Use

__all__ = ["CLASSES", "BlockExtent", "Blocks", "Cut", "Dropped", "Storage", "StorageOwner", "block_bytes", "cut"]

CLASSES = ("weights", "gradient", "optimizer", "activation", "embedding", "kv", "expert", "bytes")
"""Classes that blocks may have."""

_PARTS = 16
"""A block is at most this fraction of the fast tier, so that several operands and what comes next fit beside each
other."""
_SMALL = 8
"""A storage below this fraction of the largest block shares a block."""
_SHARED = 1 << 20
"""Bytes of a shared block at most: beyond it, a larger transfer is no faster."""
_ROWS = 16 << 10
"""Bytes of a block of a table whose rows are picked by data, at most, unless a row is larger."""
_LEAST = 3200
"""Bytes of such a block at least: the native pager takes some 110 bytes for a block, which is a thirtieth."""
_ROUNDED = 8
"""Rounding it to pages in a file may take this part of its bytes."""
_PAGE = 4096
_SECTOR = 512
"""Direct I/O goes straight to memory that is aligned to it; elsewhere through a copy."""
_DIRECT = 128
"""Blocks of this many sectors or more are aligned to them: less is lost to rounding than is won."""


class BlockExtent(NamedTuple):
    """A contiguous piece of a block."""

    block: int
    offset: int
    nbytes: int


class Blocks(NamedTuple):
    """The blocks of a storage; see the attributes of `Storage`."""

    first: int
    blocks: int
    offset: int
    block_bytes: int
    shared: bool
    adopted: bool = False


class Dropped(NamedTuple):
    """The blocks to free of a storage that nobody refers to any more."""

    first: int
    blocks: int
    nbytes: int
    cls: str
    adopted: bool


class Cut(NamedTuple):
    """Sizes, in bytes, into which a pool cuts storages."""

    largest: int
    shared: int
    small: int
    alignment: int
    packed: int = ALIGNMENT
    """Alignment of storages that share a block."""


def cut(fast: int, alignment: int = 0, packed: int = ALIGNMENT) -> Cut:
    """Block sizes for a fast tier of `fast` bytes.

    Parameters
    ----------
    alignment : int
        Of an arena that there is already; 0 to choose it.
    packed : int
        What storages are to be aligned to at least.
    """
    largest = fast // _PARTS
    if alignment == 0:
        alignment = _SECTOR if largest >= _DIRECT * _SECTOR else packed
    largest = max(alignment, largest // alignment * alignment)
    if largest > _PAGE * _PARTS:
        largest = largest // _PAGE * _PAGE
    shared = min(largest, _SHARED)
    return Cut(largest, shared, shared // _SMALL, alignment, packed)


def block_bytes(nbytes: int, sizes: Cut, row_bytes: int, cls: str) -> int:
    """Bytes of the blocks of a large storage (the last may be shorter); a multiple of the alignment.

    Cut at whole rows if some number of rows is aligned and no larger than a block; preferably also a multiple of the
    page, in which files are read and written. Each expert of stacked experts gets blocks of its own if its bytes can be
    divided so.
    """
    if cls == "expert" and row_bytes > 0:
        step = _part_of_row(row_bytes, sizes)
        if step > 0:
            return step
    limit = sizes.largest
    if cls == "embedding" and limit >= _PAGE:
        limit = _table_block_bytes(row_bytes, limit // _PAGE * _PAGE)
        return -(-min(nbytes, limit) // sizes.alignment) * sizes.alignment
    if nbytes <= limit:
        return -(-nbytes // sizes.alignment) * sizes.alignment
    if row_bytes > 0:
        for unit in (_PAGE, sizes.alignment):
            step = math.lcm(row_bytes, unit)
            if step <= limit:
                return limit // step * step
    return limit


def _part_of_row(row_bytes: int, sizes: Cut) -> int:
    """The largest block of which a whole number makes up a row; 0 if that takes blocks that are small."""
    fewest = -(-row_bytes // sizes.largest)
    most = row_bytes // max(sizes.small, sizes.alignment)
    for unit in (_PAGE, sizes.alignment):
        for parts in range(fewest, most + 1):
            if row_bytes % (parts * unit) == 0:
                return row_bytes // parts
    return 0


def _table_block_bytes(row_bytes: int, limit: int) -> int:
    """Bytes of a block of a table whose rows are picked by data, so that a miss brings few rows that nobody asked for.

    As few whole rows as bookkeeping and the rounding to pages in files allow: one, if it is 4 KiB or a multiple. Rows
    that fit neither sectors nor pages are cut into single pages, or as many as a row fills; some of them then lie in
    two blocks, which have to be brought together.
    """
    if row_bytes > 0:
        step = math.lcm(row_bytes, _SECTOR)
        for nbytes in range(step, min(limit, max(_ROWS, row_bytes)) + 1, step):
            if nbytes >= _LEAST and -nbytes % _PAGE <= nbytes // _ROUNDED:
                return nbytes
    return min(limit, max(_PAGE, row_bytes // _PAGE * _PAGE))


class StorageOwner(Protocol):
    """The pool of a storage, as tensors use it; a `BlockPool` is one."""

    @property
    def arena(self) -> Any:
        """Memory of the fast tier: its ``tensor`` on a GPU, its ``view()`` elsewhere."""
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
        """Bytes up to which storages share a block."""
        ...

    def allocate(self, nbytes: int, *, cls: str = ..., row_bytes: int = ..., name: str = ...) -> Storage:
        """A new storage."""
        ...

    def acquire(self, uses: Sequence[Use], op: str = ..., *, rows: bool = ...) -> Grant:
        """Bring byte ranges into the arena and pin them."""
        ...

    def release(self, grant: Grant) -> None:
        """Unpin what `acquire` has granted."""
        ...

    def drop(self, dropped: Dropped) -> None:
        """Take note of a storage that nobody refers to any more."""
        ...


class Storage:
    """Bytes in a pool. Dropping the last reference frees them.

    Attributes
    ----------
    pool : StorageOwner
    nbytes : int
    cls : str
        Class of its blocks.
    name : str
        For errors; may be empty.
    row_bytes : int
        Bytes of a row, where it has rows; else 0.
    first, count : int
        Its blocks, consecutive.
    offset : int
        Where it begins in its block, in bytes; 0 unless it shares one.
    block_bytes : int
        Bytes of each of its blocks but the last; the bytes of the block if it shares one.
    shared : bool
        Whether it shares its block with other storages.
    adopted : bool
        Whether its bytes came from a file that keeps the clean copy.
    loose : bool
        Whether it is still to be packed, if it is small, with what is used next to it, at its first use.
    made, first_used : int
        Its places in the orders in which storages were made and, of those that are packed at their first use, first
        used; -1 if it was not.
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
        """The name for the storage of its gradient."""
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
        """Byte ranges ``(start, stop)``, one for each block, in order."""
        step = max(self.block_bytes, 1)
        for start in range(0, self.nbytes, step):
            yield start, min(start + step, self.nbytes)

    def extents(self) -> list[BlockExtent]:
        """The blocks that hold it, in order."""
        return [
            BlockExtent(self.first + index, self.offset, stop - start)
            for index, (start, stop) in enumerate(self.pieces())
        ]

    def __del__(self) -> None:
        # Runs wherever the last reference dies, perhaps in the middle of a pool's method: it only leaves a note.
        layout = self.layout
        self.pool.drop(Dropped(layout.first, layout.count, self.nbytes, self.cls, self.adopted))
