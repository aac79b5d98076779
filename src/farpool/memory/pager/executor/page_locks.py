"""Page-locking of tiers' memory, so that a device copies directly from and to that memory, without staging.

Locking is slow, because the operating system first gives each page physical memory. So a thread locks chunk by chunk
from the start of a tier's space, up to the last byte that a transfer has used. Until a chunk is locked, its bytes are
copied through staging memory, so no transfer waits for the locking. Memory that is never used is never locked.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from farpool import _native
from farpool.available import available_memory
from farpool.errors import FarpoolWarning
from farpool.ledger import Account, Ledger
from farpool.memory.tiers import Mapped, Tier
from farpool.sizes import format_size

__all__ = ["PageLocker", "PageLocks", "TierLocks", "most_locked"]

_CHUNK_BYTES = 64 << 20
"""Bytes locked at once, a multiple of any page size. A larger chunk would delay other threads that allocate or free
memory of the process."""
_SHARE = 2
"""Tiers may page-lock a half of the available host memory: locked pages cannot be swapped out, and other programs need
memory, too."""
_OWNER = "page locks"


def most_locked() -> int:
    """Return the bytes of its tiers that this process may page-lock, for all its pools together.

    This is half of the host memory that is available now, as `available_memory` reports it within the limits of the
    process's control groups. What tiers of this process have locked already counts as available.
    """
    return (available_memory() + _native.PageLocks.locked_in_process()) // _SHARE


class TierLocks:
    """Page locks of a pool's tiers, which a native thread takes, on the pool's ledger.

    Only tiers that are `Mapped` are locked. At most `most_locked` bytes are locked, by all pools of this process
    together: what is beyond this limit is copied through staging memory, and so is what the device refuses to lock.
    About each tier of which something is refused, one `FarpoolWarning` is given at the next look at the ledger.

    Parameters
    ----------
    device : _native.Device
        The device for which the memory is locked.
    tiers : sequence of Tier
        The open tiers. They must stay open until `native` is closed.
    ports : sequence of Port
        The tiers' native ports, in the same order.
    ledger : Ledger
        The ledger, which shows the locked bytes as they are whenever it is read.
    chunk : int
        Bytes to lock at once; a multiple of the page size.

    Attributes
    ----------
    native : _native.PageLocks
        The locks, for the queue that runs the transfers. Whoever closes the queue closes them, too.
    """

    def __init__(
        self,
        device: _native.Device,
        tiers: Sequence[Tier],
        ports: Sequence[_native.Port],
        ledger: Ledger,
        chunk: int = _CHUNK_BYTES,
    ) -> None:
        self.native = _native.PageLocks(device, chunk, most_locked())
        for tier, port in zip(tiers, ports, strict=True):
            if isinstance(tier, Mapped):
                self.native.add(port, tier.address(0), tier.info.capacity, tier.info.name)
        self._warned: set[str] = set()
        ledger.follow(_OWNER, self._accounts)

    def warn(self) -> None:
        """Warn about each tier of which something was refused since the last call."""
        self._warn(self.native.totals())

    def _accounts(self) -> list[tuple[str, Account]]:
        totals = self.native.totals()
        self._warn(totals)
        return [(space.name, Account(page_locked=space.locked)) for space in totals]

    def _warn(self, totals: Sequence[_native.SpaceLocks]) -> None:
        for space in totals:
            if space.refused and space.name not in self._warned:
                self._warned.add(space.name)
                warnings.warn(
                    f"{space.name}: only {format_size(space.locked)} of its {format_size(space.nbytes)} can be "
                    f"page-locked ({space.refused}); the rest is copied through staging memory, which is slower",
                    FarpoolWarning,
                    stacklevel=2,
                )


class PageLocker(Protocol):
    """Interface for page-locking host memory for a device."""

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock a range that begins at a page boundary.

        The caller splits its copies so that none crosses from one locked range into another.

        Raises
        ------
        OSError
            The system refuses to lock the range.
        """
        ...

    def unlock(self, address: int) -> None:
        """Unlock the range that was locked at this address. No copy may be using the range."""
        ...


@dataclass(slots=True)
class _Space:
    name: str
    address: int
    nbytes: int
    wanted: int = 0
    locked: int = 0
    refused: bool = False


class PageLocks:
    """Page-locks the memory of tiers in a thread of its own, chunk by chunk, up to the last byte that is asked for.

    Parameters
    ----------
    locker : PageLocker
        Locks and unlocks ranges of memory.
    tiers : sequence of Tier
        Open tiers, indexed as the pager indexes them. Tiers that are not `Mapped` are never locked.
    ledger : Ledger
        Ledger on which the locked bytes are booked.
    chunk : int
        Bytes to lock at once; a multiple of the page size.
    """

    def __init__(self, locker: PageLocker, tiers: Sequence[Tier], ledger: Ledger, chunk: int = _CHUNK_BYTES) -> None:
        self._locker = locker
        self._ledger = ledger
        self._chunk = chunk
        self._spaces = {
            index: _Space(tier.info.name, tier.address(0), tier.info.capacity)
            for index, tier in enumerate(tiers)
            if isinstance(tier, Mapped)
        }
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def parts(self, tier: int, offset: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Split an extent into parts that are each inside one locked range; return address and bytes of each part.

        If any byte of the extent is not locked yet, this returns None and asks the thread to lock the extent. It also
        returns None if the tier is not `Mapped`.
        """
        space = self._spaces.get(tier)
        if space is None:
            return None
        stop = offset + nbytes
        if stop > space.locked:
            self._want(space, stop)
            return None
        cuts = [offset, *range((offset // self._chunk + 1) * self._chunk, stop, self._chunk), stop]
        return [(space.address + low, high - low) for low, high in pairwise(cuts)]

    def close(self, timeout: float) -> bool:
        """Stop the thread and unlock everything; no copy may be under way.

        Returns False, and unlocks nothing, if the thread still runs after `timeout` seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        for space in self._spaces.values():
            for start in range(0, space.locked, self._chunk):
                self._locker.unlock(space.address + start)
            self._ledger.subtract(space.name, _OWNER, page_locked=space.locked)
            space.locked = 0
        return True

    def _want(self, space: _Space, stop: int) -> None:
        # We read `wanted` without the lock: it only grows, and the staging thread asks again for each transfer.
        if space.refused or stop <= space.wanted:
            return
        with self._changed:
            if self._closing:
                return
            space.wanted = stop
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="farpool-page-locks", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                space = self._next()
                if self._closing or space is None:
                    return
            # Outside the lock: locking a chunk is slow, and the staging thread needs the lock in `_want`.
            self._lock_chunk(space)

    def _next(self) -> _Space | None:
        return next((s for s in self._spaces.values() if s.locked < s.wanted and not s.refused), None)

    def _lock_chunk(self, space: _Space) -> None:
        nbytes = min(self._chunk, space.nbytes - space.locked)
        try:
            self._locker.lock(space.address + space.locked, nbytes)
        except OSError as error:
            space.refused = True
            with contextlib.suppress(FarpoolWarning):  # if warnings are errors, no caller can catch it
                warnings.warn(
                    f"{space.name}: only {format_size(space.locked)} of its {format_size(space.nbytes)} can be "
                    f"page-locked ({error}); the rest is copied through staging memory, which is slower",
                    FarpoolWarning,
                    stacklevel=2,
                )
            return
        self._ledger.add(space.name, _OWNER, page_locked=nbytes)
        space.locked += nbytes  # the last step: from now on, copies may use this chunk directly
