"""Transfers, moves and errors that the native pager gives out, and the bookkeeping of tiers that it asks for."""

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
"""Bytes, at least. Plain torch tensors begin at such addresses; a kernel may give other bits for one that does not."""
NOWHERE = -1
"""The place of a block that has none in the arena, and the tier of one that has no copy below."""


class Piece(NamedTuple):
    """One contiguous part of a transfer."""

    tier: int
    """Index of the tier (or source) that holds the other end."""
    offset: int
    """Offset of the extent in that tier."""
    place: int
    """Offset in the arena."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes to move between the arena and a tier. Without pieces it only waits for `after` (a barrier)."""

    id: int
    kind: Kind
    block: int
    pieces: tuple[Piece, ...]
    after: tuple[int, ...]
    """Transfers that must have completed first: the arena bytes are theirs until then."""
    demand: bool
    """Somebody waits for it now."""
    last_use: int = -1
    """Accesses with this ordinal or a lower one may have used its bytes in the arena, and on a device, which runs
    behind the program, may use them still; -1: none."""


class Move(NamedTuple):
    """Bytes to move inside the arena, at once and before any transfer that follows; source and target may overlap."""

    source: int
    target: int
    nbytes: int
    last_use: int = -1
    """Ordinal of the last use of source and target, as of a transfer."""


class Space(Protocol):
    """A lower tier's bookkeeping, as far as the pager needs it. Reservation is quick and does no I/O."""

    def reserve(self, nbytes: int, cls: str) -> int | None:
        """Offset of a new extent for a block of this class, None when there is no room."""
        ...

    def free(self, offset: int, nbytes: int, cls: str) -> None: ...


class TooLargeError(Exception):
    """The runs of one access together exceed the arena. ``args``: bytes needed."""


class NoRoomError(Exception):
    """No lower tier takes a block that has to leave. ``args``: the block and its bytes."""


class TransferFailedError(Exception):
    """A transfer failed. ``args``: the error of the tier, the tier's number (-1: none), and the block."""
