"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

__all__ = ["Kind", "Mode", "Move", "Piece", "Run", "Space", "Transfer"]


class Mode(IntEnum):
    """What an access does with the bytes."""

    READ = 0
    WRITE = 1
    """Reads and changes them, or changes only some."""
    OVERWRITE = 2
    """Writes each byte without looking at the old ones, which therefore need not be fetched."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one storage, wanted contiguous in the arena."""

    first: int
    count: int
    mode: Mode
    table: int = -1
    """For rows picked by data: the first block of their table. Such an access says nothing about the rows of the
    next pass, so the tape only notes the table."""


class Kind(IntEnum):
    """Direction of a transfer."""

    FETCH = 0
    WRITE_BACK = 1


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


class Move(NamedTuple):
    """Bytes to move inside the arena, at once and before any transfer that follows; source and target may overlap."""

    source: int
    target: int
    nbytes: int


class Space(Protocol):
    """A lower tier's bookkeeping, as far as the engine needs it. Reservation is quick and does no I/O."""

    def reserve(self, nbytes: int, cls: str) -> int | None:
        """Offset of a new extent for a block of this class, None when there is no room."""
        ...

    def free(self, offset: int, nbytes: int, cls: str) -> None: ...
