"""Types of the result of `Pool.stats`: frozen and versioned, in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["VERSION", "ClassStats", "LinkStats", "Stall", "Stats", "TableStats", "TierStats"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier, in bytes.

    Attributes
    ----------
    name, kind : str
    capacity : int
    requested : int
        Bytes that the blocks it holds asked for.
    reserved : int
        Bytes taken for them, alignment included.
    peak : int
        The most that was ever reserved.
    page_locked, touched : int
        Bytes of the memory behind it that are locked into RAM, and that were touched so far (resident memory).
    notes : tuple of str
        Sentences of the tier about conditions that its user should change; see `farpool.abc.tier.HasNotes`.
    """

    name: str
    kind: str
    capacity: int
    requested: int
    reserved: int
    peak: int
    page_locked: int
    touched: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Bytes of one class of blocks: live in all, resident in the fast tier, and dirty there."""

    name: str
    live: int
    resident: int
    dirty: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Accesses to blocks of a table and its moments, and the hits among them, which found their block resident."""

    name: str
    row_accesses: int
    row_hits: int

    @property
    def row_hit_rate(self) -> float:
        """Share of the accesses that found their block resident."""
        return self.row_hits / self.row_accesses if self.row_accesses else 1.0


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Totals of the transfers from one tier to another; `seconds` is the sum of their durations."""

    source: str
    target: str
    transfers: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of an operation for a block from a tier; block -1 and tier "" if it waited for another thread."""

    op: str
    seconds: float
    block: int
    tier: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a pool since it was made."""

    fast: TierStats
    tiers: tuple[TierStats, ...]
    classes: tuple[ClassStats, ...]
    tables: tuple[TableStats, ...]
    """Tables whose rows were picked by data, in order of name."""
    links: tuple[LinkStats, ...]
    accesses: int
    hits: int
    """Accesses that found all their blocks resident, in one contiguous place."""
    row_accesses: int
    """Accesses to blocks of tables whose rows are picked by data."""
    row_hits: int
    rows_by_frequency: bool
    """True if the least frequently used blocks of such tables are evicted, False if the least recently used are."""
    late: int
    """Accesses that were no hits, but whose missing blocks were all being fetched already."""
    demand_fetches: int
    prefetches: int
    prefetches_used: int
    prefetches_wasted: int
    evictions: int
    write_backs: int
    moves: int
    moved_bytes: int
    divergences: int
    """Accesses that differ from the tape's prediction."""
    stalls: int
    stall_seconds: float
    last_stalls: tuple[Stall, ...]
    unpaged_peak: int | None
    """Maximum bytes of memory in addition to farpool's own (plain activations, temporaries, the interpreter); None if
    unknown."""
    version: int = field(default=VERSION)

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that found all their blocks resident, in one contiguous place."""
        return self.hits / self.accesses if self.accesses else 1.0

    @property
    def row_hit_rate(self) -> float:
        """Share of the accesses to rows of tables that found their block resident."""
        return self.row_hits / self.row_accesses if self.row_accesses else 1.0

    @property
    def prefetch_accuracy(self) -> float:
        """Share of prefetched blocks that were used, among prefetched blocks that were used or wasted."""
        known = self.prefetches_used + self.prefetches_wasted
        return self.prefetches_used / known if known else 1.0
