"""Metadata and records of a tape file, as a reader gets them and a writer gives them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Cut
from farpool.memory.tiers import TierInfo

__all__ = ["TICK", "Access", "Content", "Create", "Free", "Metadata", "Record", "Run"]

TICK = 1e-7
"""Resolution of times, in seconds: all are multiples of it."""


class Content(IntEnum):
    """Content of blocks when they are created, or when the recording begins."""

    NONE = 0
    POOL = 1
    """Bytes that only the pool has."""
    FILE = 2
    """A clean copy in a source file."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Origin of a tape: the writer's version, the date, and the pool that was recorded.

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
        Sizes, in bytes, by which the pool cut storages into blocks.
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
    """Record of consecutive blocks that were created, or were there when the recording began.

    Attributes
    ----------
    first, count : int
        The blocks.
    block_bytes, last_bytes : int
        Bytes of each block, and of the last one.
    cls : str
        Their class.
    name : str
        Name of the storage; of the first one, if several share the block. May be empty.
    content : Content
        Content of the blocks at that time.
    label : int
        Number under which the pool's own tape knows the first block. Labels do not depend on timing, block numbers may.
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
    """Record of consecutive blocks that the program dropped."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks that an operation has accessed. A file may name more of them than a pager can have."""

    first: int
    count: int
    mode: Mode
    table: int = -1
    """First block of the table, for a run of rows that are picked by data; -1 for any other."""


@dataclass(frozen=True, slots=True)
class Access:
    """Record of one operation's access to its operands, which it needs at once.

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
