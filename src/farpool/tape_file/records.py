"""What a tape file tells, as a reader gets it and a writer gives it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from farpool.pager import Mode
from farpool.pager.storage import Cut
from farpool.tiers import TierInfo

__all__ = ["TICK", "Access", "Content", "Create", "Free", "Metadata", "Record", "Run"]

TICK = 1e-7
"""Seconds; times are multiples of it."""


class Content(IntEnum):
    """What blocks hold when they are created, or when the recording begins."""

    NONE = 0
    POOL = 1
    """Bytes that only the pool has."""
    FILE = 2
    """A clean copy in a source file."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where a tape comes from.

    Attributes
    ----------
    farpool : str
        Version of the writer.
    date : str
        Beginning of the recording, UTC, ISO 8601.
    device : str
        ``cpu`` or ``cuda``.
    budget : int
        Bytes of the fast tier.
    cut : Cut
        How the pool cut storages into blocks, in bytes.
    tiers : tuple of TierInfo
        Lower tiers from fast to slow.
    classes : tuple of str
        Classes that blocks may have.
    """

    farpool: str
    date: str
    device: str
    budget: int
    cut: Cut
    tiers: tuple[TierInfo, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Create:
    """Consecutive blocks came to be, or were there when the recording began.

    Attributes
    ----------
    first, count : int
        The blocks.
    block_bytes, last_bytes : int
        Bytes of each block, and of the last one.
    cls : str
        Their class.
    name : str
        Of the storage; of the first one, if several share the block. May be empty.
    content : Content
        What they hold.
    label : int
        Under which the pool's own tape knows the first block. Labels do not depend on timing, block numbers may.
    """

    first: int
    count: int
    block_bytes: int
    last_bytes: int
    cls: str
    name: str
    content: Content
    label: int

    def sizes(self) -> list[int]:
        """Bytes of each block."""
        return [self.block_bytes] * (self.count - 1) + [self.last_bytes]


@dataclass(frozen=True, slots=True)
class Free:
    """The program dropped these blocks."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks that an operation has accessed. A file may name more of them than a pager can have."""

    first: int
    count: int
    mode: Mode
    table: int = -1
    """For rows picked by data: the first block of their table."""


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's operands, needed at once.

    Attributes
    ----------
    thread : int
        Ordinal of the thread.
    op : str
        The operation.
    runs : tuple of Run
        The operands.
    think, stall, compute : float
        Seconds, multiples of `TICK`: between the thread's previous release and this request; from request to grant;
        from grant to release.
    """

    thread: int
    op: str
    runs: tuple[Run, ...]
    think: float
    stall: float
    compute: float


Record = Create | Free | Access
