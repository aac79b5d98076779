"""The result of `Pool.stats`: frozen, versioned, in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["VERSION", "ClassStats", "LinkStats", "Stall", "Stats", "TableStats", "TierStats"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of one tier.

    Attributes
    ----------
    name, kind : str
    capacity : int
    requested : int
        Asked for by the blocks it holds.
    reserved : int
        Taken for them, alignment included.
    peak : int
        The most that was ever reserved.
    page_locked, touched : int
        Of the memory behind it: locked into RAM; touched so far, hence counted by the operating system.
    """

    name: str
    kind: str
    capacity: int
    requested: int
    reserved: int
    peak: int
    page_locked: int
    touched: int


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Bytes of one class of blocks: live altogether, and resident in the fast tier."""

    name: str
    live: int
    resident: int
    dirty: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Accesses to blocks of a table that is in use (with its moments), and those that found their block in place."""

    name: str
    row_accesses: int
    row_hits: int

    @property
    def row_hit_rate(self) -> float:
        """Share of the accesses that found their block in place."""
        return self.row_hits / self.row_accesses if self.row_accesses else 1.0


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Transfers from one tier to another; `seconds` adds up their own times."""

    source: str
    target: str
    transfers: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait: for which op, how long, and for which block from which tier (-1, empty: another thread)."""

    op: str
    seconds: float
    block: int
    tier: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Account of a pool since it was made."""

    fast: TierStats
    tiers: tuple[TierStats, ...]
    classes: tuple[ClassStats, ...]
    tables: tuple[TableStats, ...]
    """Those whose rows were picked by data, by name."""
    links: tuple[LinkStats, ...]
    accesses: int
    hits: int
    """Accesses that found everything in place."""
    row_accesses: int
    """Accesses to blocks of tables whose rows are picked by data."""
    row_hits: int
    rows_by_frequency: bool
    """True where such blocks are kept by how often they are used, False where by how recently."""
    late: int
    """Accesses whose transfer was already under way."""
    demand_fetches: int
    prefetches: int
    prefetches_used: int
    prefetches_wasted: int
    evictions: int
    write_backs: int
    moves: int
    moved_bytes: int
    divergences: int
    """Accesses that the tape had not foretold."""
    stalls: int
    stall_seconds: float
    last_stalls: tuple[Stall, ...]
    unpaged_peak: int | None
    """Most bytes of memory beyond what farpool holds (plain activations, temporaries, the interpreter); None if
    unknown."""
    version: int = field(default=VERSION)

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that found everything in place."""
        return self.hits / self.accesses if self.accesses else 1.0

    @property
    def row_hit_rate(self) -> float:
        """Share of the accesses to rows of tables that found their block in place."""
        return self.row_hits / self.row_accesses if self.row_accesses else 1.0

    @property
    def prefetch_accuracy(self) -> float:
        """Share of the prefetched blocks that were accessed before they left, of those whose fate is known."""
        known = self.prefetches_used + self.prefetches_wasted
        return self.prefetches_used / known if known else 1.0
