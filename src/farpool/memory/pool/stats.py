"""Types of the statistics that `Pool.stats` returns, in bytes and seconds. `Stats` has a version number."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["VERSION", "ClassStats", "DeviceTimes", "LinkStats", "Stall", "Stats", "TableStats", "TierStats"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier, in bytes.

    Attributes
    ----------
    name, kind : str
    capacity : int
    requested : int
        Bytes of the blocks that the tier holds, without alignment.
    reserved : int
        Bytes that these blocks take in the tier, with alignment.
    peak : int
        The most bytes that were ever reserved.
    page_locked, touched : int
        Bytes of the tier's memory that are locked into RAM, and bytes that were touched so far (resident memory).
    notes : tuple of str
        Sentences in which the tier tells its user what to change, for example in the system's settings.
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
    """Bytes of one class.

    Attributes
    ----------
    name : str
    live : int
        Bytes of the class's storages that are in use.
    resident : int
        Bytes of its blocks in the fast tier.
    dirty : int
        Bytes of its dirty blocks in the fast tier.
    """

    name: str
    live: int
    resident: int
    dirty: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Accesses to blocks of a table and of its moments. An access is a hit if its block was resident."""

    name: str
    row_accesses: int
    row_hits: int

    @property
    def row_hit_rate(self) -> float:
        """Fraction of the accesses whose block was resident."""
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
class DeviceTimes:
    """Seconds in which a device computed, waited and moved bytes, by its own clock. Times that overlap count once.

    The end of an operation becomes known a little after it. So the latest operations may be missing.

    Attributes
    ----------
    seconds : float
        The whole time, from the first operation or transfer to the end of the last one.
    computing : float
        Seconds in which the device computed for operations on paged tensors.
    waiting : float
        Seconds in which the device did not compute, because the next operation waited for its operands.
    fetching, writing_back : float
        Seconds in which bytes were on their way to the device, and from it. If the lower tier is not page-locked, this
        includes the copy between the tier and the staging memory.
    """

    seconds: float
    computing: float
    waiting: float
    fetching: float
    writing_back: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of an operation for a block from a tier.

    If the operation waited for another thread, `block` is -1 and `tier` is empty.
    """

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
    """Tables whose rows are picked by data, sorted by name."""
    links: tuple[LinkStats, ...]
    accesses: int
    hits: int
    """Accesses whose blocks were all resident and contiguous in the arena."""
    row_accesses: int
    """Accesses to blocks of tables whose rows are picked by data."""
    row_hits: int
    rows_by_frequency: bool
    """True if the pager evicts the least frequently used blocks of tables whose rows are picked by data; False if it
    evicts the least recently used blocks."""
    late: int
    """Accesses that were not hits, but for which all missing blocks were already being fetched."""
    demand_fetches: int
    prefetches: int
    prefetches_used: int
    prefetches_wasted: int
    evictions: int
    write_backs: int
    moves: int
    moved_bytes: int
    divergences: int
    """Accesses that the tape did not predict."""
    stalls: int
    stall_seconds: float
    last_stalls: tuple[Stall, ...]
    unpaged_peak: int | None
    """Peak bytes of the process's memory, without the memory that farpool holds: plain activations, temporaries, the
    interpreter. None if unknown."""
    device: DeviceTimes | None = None
    """Times of the device; None if operations compute on the host."""
    version: int = field(default=VERSION)

    @property
    def hit_rate(self) -> float:
        """Fraction of the accesses whose blocks were all resident and contiguous in the arena."""
        return self.hits / self.accesses if self.accesses else 1.0

    @property
    def row_hit_rate(self) -> float:
        """Fraction of the accesses to blocks of tables whose block was resident."""
        return self.row_hits / self.row_accesses if self.row_accesses else 1.0

    @property
    def prefetch_accuracy(self) -> float:
        """Fraction of the prefetched blocks that an access used before they were evicted or overwritten."""
        known = self.prefetches_used + self.prefetches_wasted
        return self.prefetches_used / known if known else 1.0
