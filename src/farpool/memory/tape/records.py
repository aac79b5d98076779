"""Metadata and records of a tape file, as the reader returns them and the writer accepts them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Cut
from farpool.memory.tiers import TierInfo

__all__ = ["TICK", "Access", "Content", "Create", "Free", "Metadata", "Record", "Run"]

TICK = 1e-7
"""Resolution of times, in seconds. All times are multiples of it."""


class Content(IntEnum):
    """Place of a block's content when the block is created or the recording begins.

    `NONE` means that the block has no content yet.
    """

    NONE = 0
    POOL = 1
    """Only the pool has the bytes."""
    FILE = 2
    """A source file has the same bytes."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Origin of a tape: the writer's version, the date, and the pool that was recorded.

    Attributes
    ----------
    farpool : str
        Version of the writer.
    date : str
        Time when the recording began, in UTC, in the format of ISO 8601.
    device : str
        ``cpu`` or ``cuda``.
    budget : int
        Bytes of the fast tier.
    cut : Cut
        Sizes in bytes that the pool used to cut storages into blocks.
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
    """Record of consecutive blocks that were created, or that existed when the recording began.

    Attributes
    ----------
    first, count : int
        Number of the first block, and number of blocks.
    block_bytes, last_bytes : int
        Bytes of each block except the last one, and bytes of the last block.
    cls : str
        Class of the blocks.
    name : str
        Name of the storage, which may be empty. If several storages share the block, the name of the first one.
    content : Content
        Place of the blocks' content when they were created or the recording began.
    label : int
        Number of the first block on the pool's own tape. Block numbers may depend on timing; labels do not.
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
        """Return the bytes of each block."""
        return [self.block_bytes] * (self.count - 1) + [self.last_bytes]


@dataclass(frozen=True, slots=True)
class Free:
    """Record of consecutive blocks that the program dropped."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks that an operation has accessed. A file may contain a count that no pager allows."""

    first: int
    count: int
    mode: Mode
    table: int = -1
    """First block of the table, if these blocks hold rows that an operation selected by indexes; otherwise -1."""


@dataclass(frozen=True, slots=True)
class Access:
    """Record of one operation's access to its operands, all of which it needs at the same time.

    Attributes
    ----------
    thread : int
        Number of the thread. Threads are numbered from 0 in the order of their first accesses.
    op : str
        The operation.
    runs : tuple of Run
        The operands.
    think, stall, compute : float
        Seconds, multiples of `TICK`. Think: from the thread's previous release to this request. Stall: from the request
        to its grant. Compute: from the grant to the release.
    """

    thread: int
    op: str
    runs: tuple[Run, ...]
    think: float
    stall: float
    compute: float


Record = Create | Free | Access
