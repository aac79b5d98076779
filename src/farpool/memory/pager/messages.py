"""Messages of the native pager: transfers, moves and errors, and the interface of a tier's space that it calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from farpool._native import Kind

__all__ = [
    "ALIGNMENT",
    "NOWHERE",
    "Move",
    "NoRoomError",
    "Piece",
    "Space",
    "TooLargeError",
    "Transfer",
    "TransferFailedError",
]

ALIGNMENT = 64
"""Minimum alignment of blocks in bytes, as of plain torch tensors: with less, a kernel may compute other bits."""
NOWHERE = -1
"""Place of a block that is not in the arena, and tier of a block that has no copy in a lower tier."""


class Piece(NamedTuple):
    """A contiguous part of a transfer."""

    tier: int
    """Index of the tier (or source) that holds the other end."""
    offset: int
    """Offset of the extent in that tier."""
    place: int
    """Offset in the arena."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Command to move bytes between the arena and a tier; without pieces it is a barrier that waits for `after`."""

    id: int
    kind: Kind
    block: int
    pieces: tuple[Piece, ...]
    after: tuple[int, ...]
    """Transfers that must have completed first: the arena bytes are theirs until then."""
    demand: bool
    """True if an access waits for it already."""
    last_use: int = -1
    """Ordinal of the last access that may have used its bytes in the arena; -1 for none. On a device, which runs
    behind the program, such accesses may use them still."""


class Move(NamedTuple):
    """Command to move bytes inside the arena, at once and before any later transfer; source and target may overlap."""

    source: int
    target: int
    nbytes: int
    last_use: int = -1
    """Ordinal of the last access that may have used source or target; see `Transfer.last_use`."""


class Space(Protocol):
    """Interface of a lower tier's reservations, which are quick and do no I/O."""

    def reserve(self, nbytes: int, cls: str) -> int | None:
        """Reserve an extent for a block of this class; returns its offset, or None if there is no room."""
        ...

    def free(self, offset: int, nbytes: int, cls: str) -> None: ...


class TooLargeError(Exception):
    """Raised when the operands of one access together exceed the arena. ``args``: bytes needed."""


class NoRoomError(Exception):
    """Raised when a block must be evicted and no lower tier has room for it. ``args``: the block and its bytes."""


class TransferFailedError(Exception):
    """Raised when a transfer failed. ``args``: the error of the tier, the tier's number (-1: none), and the block."""
