"""Messages of the native pager: transfers, moves and errors; and the interface for reserving room in tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from farpool._native import Kind

__all__ = [
    "ALIGNMENT",
    "NOWHERE",
    "Ended",
    "Move",
    "NoRoomError",
    "Piece",
    "Space",
    "TooLargeError",
    "Transfer",
    "TransferFailedError",
]

ALIGNMENT = 64
"""Minimum alignment of blocks in bytes, as torch aligns plain tensors. With a smaller alignment, the results of kernels
may differ in some bits."""
NOWHERE = -1
"""The place of a block that is not in the arena, and the tier number of a block without a copy in a lower tier."""


class Piece(NamedTuple):
    """A contiguous part of a transfer."""

    tier: int
    """Number of the tier or source file that the bytes are copied from or to."""
    offset: int
    """Offset of the bytes in that tier or file."""
    place: int
    """Offset of the bytes in the arena."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Command to copy bytes between the arena and a tier.

    A transfer without pieces copies nothing and ends when all transfers in `after` have ended.
    """

    id: int
    kind: Kind
    block: int
    pieces: tuple[Piece, ...]
    after: tuple[int, ...]
    """Transfers that must end before this one, because they use the same bytes of the arena."""
    demand: bool
    """True if an access already waits for this transfer."""
    last_use: int = -1
    """Ordinal of the last access that may have used the transfer's bytes in the arena; -1 for none. The work of this
    access may still use the bytes, because a device runs work later than the program queues it."""


Ended: TypeAlias = tuple[Transfer, float, float, int]
"""An ended transfer: the transfer, the times of its start and end, and the bytes of the arena in use at its end."""


class Move(NamedTuple):
    """Command to move bytes inside the arena. It takes effect before any later transfer. The ranges may overlap."""

    source: int
    target: int
    nbytes: int
    last_use: int = -1
    """Ordinal of the last access that may have used the bytes of source or target; -1 for none."""


class Space(Protocol):
    """Interface through which the pager reserves room in a lower tier. Its methods are quick and do no I/O."""

    def reserve(self, nbytes: int, cls: str) -> int | None:
        """Reserve room for a block of class `cls`; return the offset in the tier, or None if the tier has no room."""
        ...

    def free(self, offset: int, nbytes: int, cls: str) -> None: ...


class TooLargeError(Exception):
    """Raised when the operands of one access together are larger than the arena. ``args``: the bytes needed."""


class NoRoomError(Exception):
    """Raised when a block must be evicted and no lower tier has room for it. ``args``: the block and its bytes."""


class TransferFailedError(Exception):
    """Raised when a transfer has failed. ``args``: the tier's error, the tier's number (-1 for none), and the block."""
