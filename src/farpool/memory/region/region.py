"""`Region`: ordinary memory, usable by any library, whose pages are in lower tiers while the program does not use them.

A native thread answers the program's page faults; it never takes the interpreter lock. This module gives the region its
part of the pool, and is what a program sees. It does not import NumPy before a program asks for an array.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex

from farpool import forks
from farpool._native import RegionMemory
from farpool.errors import BudgetError, ConfigError, PoolClosedError, UnsupportedError
from farpool.memory.pool.guests import Guests
from farpool.memory.pool.pool import Pool, blocks_of
from farpool.memory.region.places import PAGE_BYTES, Places
from farpool.memory.region.stats import RegionStats
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

__all__ = ["Advice", "Region"]

Advice = Literal["normal", "sequential", "random", "willneed", "dontneed", "pin"]

_READING = {"normal": 0, "sequential": 1, "random": 2}
_LEAST_FAST_BYTES = 1 << 20
_GROWTH = 64
"""A region may reach so many times its first size: addresses are reserved for it, which costs no memory."""
_LEAST_ADDRESS_BYTES = 1 << 30
_MOST_ADDRESS_BYTES = 1 << 42
_LONGEST_RUN_PAGES = 512
_WORKERS = 2


class Region(RegionMemory):
    """Memory larger than its part of a pool's fast tier.

    A region supports the buffer protocol, so NumPy, SciPy, pandas, Arrow, Polars and ``torch.from_numpy`` use it like
    any other memory. The program reads and writes it with ordinary loads and stores. Pages that the program has not
    used for a while leave memory, to the pool's lower tiers, and come back when the program uses them.

    Fresh bytes are zero. A region is used by the process that made it: in a forked child, calls raise, and an access to
    the memory ends the child with SIGSEGV. If a lower tier does not give bytes back, an access to them ends the process
    with SIGBUS, after a message on stderr that names the tier and the bytes; there are never wrong bytes.

    System calls can read into a region and write from it. Direct reads (``O_DIRECT``) and other devices write to memory
    unseen, so pin the bytes before, and write to each page after.

    Parameters
    ----------
    nbytes : int or str
        Size in bytes, or a size such as ``"8GiB"``.
    pool : Pool
        Pool on the CPU that has lower tiers. The region reserves all its bytes in them.
    fast : int or str, optional
        Bytes of the pool's fast tier that the region uses; the pool's tensors have so much less until the region is
        closed. By default the region takes what it needs, and at most half of the tier.
    name : str
        Name for messages.

    Raises
    ------
    ConfigError
        A size is wrong, or `fast` is less than 1 MiB.
    UnsupportedError
        The kernel or its settings do not allow regions, the pool computes on a GPU, or none of its lower tiers can
        serve a region. The message names the remedy.
    PoolFullError
        The lower tiers lack room.
    BudgetError
        The fast tier is too small for this part.

    Examples
    --------
    >>> with farpool.Pool(fast="64MiB", nvme="4GiB") as pool, farpool.Region("1GiB", pool) as region:
    ...     table = region.array((1 << 17, 1024), "float64")
    ...     table[:] = 1.0
    ...     del table
    """

    def __init__(
        self,
        nbytes: int | str,
        pool: Pool,
        *,
        fast: int | str | None = None,
        name: str = "region",
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"pool is {pool!r}, expected a farpool.Pool")
        size = parse_size(nbytes, "nbytes")
        self.name = name
        blocks = blocks_of(pool)
        if pool.closed:
            raise PoolClosedError(f"{name}: the pool is closed")
        if pool.device != "cpu":
            raise UnsupportedError(
                f"{name}: the pool computes on {pool.device!r}; a region needs a pool with device='cpu'"
            )
        pages = -(-size // PAGE_BYTES)
        share = _share(fast, pages, pool.fast)
        longest = min(_LONGEST_RUN_PAGES, max(8, share // PAGE_BYTES // 64))
        staging = (_WORKERS * longest + 2) * PAGE_BYTES
        reach = min(max(_GROWTH * size, _LEAST_ADDRESS_BYTES), _MOST_ADDRESS_BYTES)
        most = max(pages, reach // PAGE_BYTES)
        self._guests: Guests = blocks.guests
        self._places = Places(self._guests, name)
        self._most = most
        self._owner = os.getpid()
        self._ended = False
        self._resizing = threading.Lock()
        super().__init__(
            f"{name} of {format_size(size)}",
            most=most,
            budget=(share - staging) // PAGE_BYTES,
            longest=longest,
            workers=_WORKERS,
            timeout=pool.config.timeout,
        )
        self._fast = share
        with self._resizing:  # the pool may be closed now by another thread, which ends its regions
            try:
                self._guests.enter(self, share)
                self.grow(size, self._places.extend(pages))
            except BaseException:
                self._ended = True
                self.unmap()
                self._leave()
                raise
        forks.begin_again(self)

    def forked(self) -> None:
        """Mark the region as gone in a forked child, which has no such memory."""
        self._ended = True
        self._resizing = threading.Lock()

    # ---- size and state -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.nbytes

    @property
    def closed(self) -> bool:
        """True if the region was closed, or belongs to the parent process."""
        return self._ended

    @property
    def fast(self) -> int:
        """Bytes of the pool's fast tier that the region may use, its transfers included."""
        return self._fast

    def __repr__(self) -> str:
        state = " (closed)" if self._ended else f", {format_size(self._fast)} of them in memory at most"
        return f"<farpool.Region {self.name!r}: {format_size(self.nbytes)}{state}>"

    def stats(self) -> RegionStats:
        """Statistics since the region was made."""
        self._check_open()
        return RegionStats(**self.counters())

    def _check_unused(self, what: str) -> None:
        if self.uses:
            raise BufferError(
                f"{self.name} cannot {what} while {self.uses} arrays, other buffers or calls use it: delete the "
                "arrays, and let the calls end, first"
            )

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise PoolClosedError(f"{self.name} belongs to the parent process: a forked child has no access to it")
        if self._ended:
            raise PoolClosedError(f"{self.name} is closed")

    # ---- bytes --------------------------------------------------------------------------------------------------

    def array(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = "uint8", *, offset: int = 0
    ) -> np.ndarray[Any, Any]:
        """A NumPy array over the region's bytes from `offset` on; it copies nothing.

        Raises
        ------
        ValueError
            The array does not fit into the region.
        """
        import numpy as np

        self._check_open()
        kind = np.dtype(dtype)
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(dimensions, dtype=object)) if dimensions else 1
        if min(dimensions, default=0) < 0 or offset < 0 or offset + count * kind.itemsize > self.nbytes:
            raise ValueError(
                f"{self.name}: an array of shape {dimensions} and dtype {kind} at offset {offset} needs "
                f"{offset + count * kind.itemsize} bytes, expected at most {self.nbytes}; resize the region"
            )
        if count == 0:
            return np.empty(dimensions, kind)
        # Unlike numpy.ndarray(buffer=...), this array keeps a buffer, so the region cannot be closed under it.
        return np.frombuffer(memoryview(self), kind, count, offset).reshape(dimensions)

    def __getitem__(self, key: SupportsIndex | slice) -> int | bytes:
        """A byte, or a copy of the bytes of a slice, as `mmap.mmap` returns them."""
        self._check_open()
        with memoryview(self) as view:
            return bytes(view[key]) if isinstance(key, slice) else view[key]

    def __setitem__(self, key: SupportsIndex | slice, value: Any) -> None:
        self._check_open()
        with memoryview(self) as view:
            view[key] = value

    # ---- advice, durability, size -------------------------------------------------------------------------------

    def advise(self, where: range | slice | None, advice: Advice) -> None:
        """Tell how the program will use bytes. Advice changes speed, never bytes; it is given for whole pages.

        Parameters
        ----------
        where : range, slice or None
            Bytes, with step 1; None for all.
        advice : str
            ``sequential``: the program reads on and on, so pages are loaded ahead at once. ``random``: no page is
            loaded ahead. ``willneed``: load pages now, as far as there is room; returns at once. ``dontneed``: let
            pages leave memory; no byte is lost. ``pin``: load pages, wait for them, and keep them in memory. ``normal``
            ends ``sequential``, ``random`` and ``pin``.

        Raises
        ------
        BudgetError
            More than half of the region's part of the fast tier would be pinned; nothing was changed.
        TierError
            Bytes to pin cannot be loaded; they are not pinned.
        """
        first, count = self._pages(where)
        if advice in _READING:
            if advice == "normal":
                self.unpin(first, count)
            self.set_reading(first, count, _READING[advice])
        elif advice == "willneed":
            self.will_need(first, count)
        elif advice == "dontneed":
            self.dont_need(first, count)
        elif advice == "pin":
            if not self.pin(first, count):
                raise BudgetError(
                    f"{self.name}: {format_size(count * PAGE_BYTES)} cannot be pinned in addition to what is pinned: "
                    f"at most half of the region's {format_size(self._fast)} can be; make it with a larger fast=",
                    op="pin",
                    needed=count * PAGE_BYTES,
                    budget=self._fast // 2,
                )
        else:
            raise ValueError(f"advice is {advice!r}, expected normal, sequential, random, willneed, dontneed or pin")

    def sync(self, where: range | slice | None = None) -> None:
        """Return when all bytes written before the call are in the lower tiers.

        Raises
        ------
        TierError
            A tier refuses bytes. They stay in memory.
        """
        first, count = self._pages(where)
        self.save(first, count)

    def resize(self, nbytes: int | str) -> None:
        """Change the size. The address stays the same, and new bytes are zero.

        Raises
        ------
        BufferError
            The region would become smaller while arrays, other buffers or calls use it.
        ConfigError
            The size is wrong, or more than 64 times the first size and 1 GiB.
        PoolFullError
            The lower tiers lack room; nothing was changed.
        """
        size = parse_size(nbytes, "nbytes")
        with self._resizing:
            self._check_open()
            self._resize(size)

    def _resize(self, size: int) -> None:
        pages = -(-size // PAGE_BYTES)
        if pages > self._most:
            raise ConfigError(
                f"nbytes is {size}, expected at most {self._most * PAGE_BYTES}: addresses are reserved for that size; "
                "make a new region",
                setting="nbytes",
            )
        if size < self.nbytes:
            self._check_unused("become smaller")
            self.shrink(size)
            self._places.cut(pages)
            return
        before, room = self.nbytes, self._places.pages
        places = self._places.extend(pages - room) if pages > room else []
        try:
            self.grow(size, places)
        except BaseException:
            self._places.cut(room)
            raise
        # The last page may hold bytes from before the region became smaller.
        self[before : min(size, -(-before // PAGE_BYTES) * PAGE_BYTES)] = bytes(
            min(size - before, -before % PAGE_BYTES)
        )

    def _pages(self, where: range | slice | None) -> tuple[int, int]:
        """The first page and the number of pages of a range of bytes."""
        self._check_open()
        if isinstance(where, slice):
            where = range(*where.indices(self.nbytes))
        elif where is None:
            where = range(self.nbytes)
        if not isinstance(where, range) or where.step != 1 or where.start < 0 or where.stop > self.nbytes:
            raise ValueError(
                f"where is {where!r}, expected a range or slice of step 1 within {self.nbytes} bytes, or None"
            )
        first = where.start // PAGE_BYTES
        return first, max(-(-where.stop // PAGE_BYTES) - first, 0) if len(where) else 0

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory back to the pool; the bytes are gone. Closing a closed region does nothing.

        Raises
        ------
        BufferError
            Arrays, other buffers or calls use the region; nothing was changed.
        """
        if self._ended:
            return
        with self._resizing:
            if not self._ended:
                self._check_unused("be closed")
                self.unmap()
                self._ended = True
                self._leave()

    def end(self) -> bool:
        """Close the region because its pool is closed; return False if the program still uses its memory."""
        try:
            self.close()
        except BufferError:
            return False
        return True

    def _leave(self) -> None:
        self._places.cut(0)
        self._guests.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BufferError as used:
            if error is None:
                raise
            error.add_note(f"{used}; it stays open")


def _share(fast: int | str | None, pages: int, budget: int) -> int:
    """Return the region's bytes of a fast tier that has `budget` bytes."""
    if fast is None:
        # The memory for transfers is a part of it: with a quarter more, all pages of a small region fit.
        return max(_LEAST_FAST_BYTES, min(budget // 2, (pages + pages // 4) * PAGE_BYTES)) // PAGE_BYTES * PAGE_BYTES
    nbytes = parse_size(fast, "fast")
    if nbytes < _LEAST_FAST_BYTES:
        raise ConfigError(f"fast is {nbytes} bytes, expected at least 1 MiB for a region", setting="fast")
    return nbytes // PAGE_BYTES * PAGE_BYTES
