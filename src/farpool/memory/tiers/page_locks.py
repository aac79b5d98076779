"""Page-locking of tiers' memory, so that a device copies directly from and to that memory, without staging.

Locking is slow, because the operating system first gives each page physical memory. So a thread locks chunk by chunk
from the start of a tier's space, up to the last byte that a transfer has used. Until a chunk is locked, its bytes are
copied through staging memory, so no transfer waits for the locking. Memory that is never used is never locked.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from farpool import _native
from farpool.available import available_memory
from farpool.errors import FarpoolWarning
from farpool.ledger import Account, Ledger
from farpool.memory.tiers import HasPort, Mapped, Tier
from farpool.sizes import format_size

__all__ = ["TierLocks", "most_locked"]

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
    process's control groups. Bytes that tiers of this process have locked already count as available.
    """
    return (available_memory() + _native.PageLocks.locked_in_process()) // _SHARE


class TierLocks:
    """Page locks of a pool's tiers. A native thread takes them, and the pool's ledger shows the locked bytes.

    The thread locks only the memory of tiers that are `Mapped` and have a native port of their own. All pools of this
    process together lock at most `most_locked` bytes. Memory beyond this limit stays unlocked, and so does memory that
    the device refuses to lock; transfers copy it through staging memory. If memory of a tier stays unlocked for one of
    these reasons, a `FarpoolWarning` says so once, when the ledger is read next.

    Parameters
    ----------
    device : _native.Device
        The device for which the memory is locked.
    tiers : sequence of Tier
        The open tiers. They must stay open until `native` is closed.
    ledger : Ledger
        The ledger. It asks for the number of locked bytes whenever it is read.
    chunk : int
        Bytes to lock at once; a multiple of the page size.

    Attributes
    ----------
    native : _native.PageLocks
        The locks, for the queue that runs the transfers. Closing the queue closes them, too.
    """

    def __init__(
        self,
        device: _native.Device,
        tiers: Sequence[Tier],
        ledger: Ledger,
        chunk: int = _CHUNK_BYTES,
    ) -> None:
        self.native = _native.PageLocks(device, chunk, most_locked())
        for tier in tiers:
            if isinstance(tier, Mapped) and isinstance(tier, HasPort):
                self.native.add(tier.port, tier.address(0), tier.info.capacity, tier.info.name)
        self._warned: set[str] = set()
        ledger.follow(_OWNER, self._accounts)

    def warn(self) -> None:
        """Warn about each tier of which the device or the limit has refused memory since the last call."""
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
