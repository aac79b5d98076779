"""Statistics of a pool, and their text form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from farpool._native import Driver
from farpool.ledger import Ledger
from farpool.memory.pager import Pager, State
from farpool.memory.pager.storage import Storage
from farpool.memory.pool.account import Account
from farpool.memory.pool.space import TierSpace
from farpool.memory.pool.stats import ClassStats, DeviceTimes, Stats, TableStats, TierStats
from farpool.memory.tiers import HasNotes, HoldsMemory, Tier
from farpool.memory.tiers.wrapper import WrapperTier
from farpool.sizes import format_size

__all__ = ["explain", "take"]


def take(
    pager: Pager,
    kind: str,
    spaces: Iterable[TierSpace],
    ledger: Ledger,
    driver: Driver,
    live: Mapping[str, int],
    storages: Iterable[Storage],
    account: Account,
) -> Stats:
    """Return the statistics of a pool. The caller holds the pool's lock.

    Parameters
    ----------
    kind : str
        Kind of the fast tier.
    spaces : iterable of TierSpace
        Bookkeeping of the lower tiers.
    live : mapping of str to int
        Bytes of the storages in use, by class.
    storages : iterable of Storage
        The storages in use.
    """
    resident, dirty = _resident(pager)
    arena = ledger.total(tier="fast")
    fast = TierStats(
        "fast",
        kind,
        pager.capacity,
        sum(resident.values()),
        pager.used,
        driver.peak,
        arena.page_locked,
        arena.touched,
    )
    tiers = tuple(_lower_tier(space, ledger) for space in spaces)
    counters = pager.counters
    # The arena of a GPU is not in the process's memory, but the staging memory for its copies is.
    host = ledger.total(tier="host", owner="staging") if pager.late else arena
    touched = host.touched + sum(tier.touched for tier in tiers)
    return Stats(
        fast=fast,
        tiers=tiers,
        classes=tuple(
            ClassStats(cls, nbytes, resident.get(cls, 0), dirty.get(cls, 0)) for cls, nbytes in sorted(live.items())
        ),
        tables=_tables(pager, storages),
        links=account.links(driver.links()),
        accesses=counters.accesses,
        hits=counters.hits,
        row_accesses=counters.row_accesses,
        row_hits=counters.row_hits,
        rows_by_frequency=pager.rows_by_frequency,
        late=counters.late,
        demand_fetches=counters.demand_fetches,
        prefetches=counters.prefetches,
        prefetches_used=counters.prefetches_used,
        prefetches_wasted=counters.prefetches_wasted,
        evictions=counters.evictions,
        write_backs=counters.write_backs,
        moves=counters.moves,
        moved_bytes=counters.moved_bytes,
        divergences=pager.divergences,
        stalls=account.stalls,
        stall_seconds=account.stall_seconds,
        last_stalls=tuple(account.last_stalls),
        unpaged_peak=_unpaged_peak(touched),
        device=DeviceTimes(*driver.device_times()) if pager.late else None,
    )


def _resident(pager: Pager) -> tuple[dict[str, int], dict[str, int]]:
    """Return, by class, the bytes of all blocks in the fast tier, and the bytes of the dirty blocks among them."""
    resident: dict[str, int] = {}
    dirty: dict[str, int] = {}
    for block in pager.resident():
        cls, row = pager.class_of(block), pager.block(block)
        resident[cls] = resident.get(cls, 0) + row.size
        if row.dirty and row.state == State.RESIDENT:
            dirty[cls] = dirty.get(cls, 0) + row.size
    return resident, dirty


def _lower_tier(space: TierSpace, ledger: Ledger) -> TierStats:
    info = space.tier.info
    booked = ledger.total(tier=info.name)
    return TierStats(
        info.name,
        info.kind,
        info.capacity,
        booked.requested,
        space.tier.reserved,
        space.peak,
        booked.page_locked,
        max(_touched(space.tier), booked.page_locked),  # page-locked memory is backed, used or not
        _notes(space.tier),
    )


def _tables(pager: Pager, storages: Iterable[Storage]) -> tuple[TableStats, ...]:
    """Return the accesses to rows by table. Accesses to an optimizer's moments of a table count as the table's own."""
    counts = pager.row_counts
    named: dict[str, tuple[int, int]] = {}
    for storage in storages:
        accesses, hits = counts.get(storage.first, (0, 0))
        if accesses:
            before = named.get(storage.name, (0, 0))
            named[storage.name] = before[0] + accesses, before[1] + hits
    return tuple(TableStats(name, *counted) for name, counted in sorted(named.items()))


def _touched(tier: Tier) -> int:
    if isinstance(tier, WrapperTier):
        return sum(map(_touched, tier.inners))
    return tier.touched if isinstance(tier, HoldsMemory) else 0


def _notes(tier: Tier) -> tuple[str, ...]:
    if isinstance(tier, WrapperTier):
        return tuple(note for inner in tier.inners for note in _notes(inner))
    return tier.notes if isinstance(tier, HasNotes) else ()


def _device_lines(times: DeviceTimes) -> list[str]:
    whole = times.seconds

    def part(seconds: float) -> str:
        return f"{seconds:.3f} s ({seconds / whole if whole else 0:.0%})"

    return [
        f"device, by its own clock: computed {part(times.computing)} of {whole:.3f} s, "
        f"waited {part(times.waiting)} for operands",
        f"its link: fetched for {part(times.fetching)}, wrote back for {part(times.writing_back)}",
    ]


def _unpaged_peak(touched: int) -> int | None:
    """Return the process's peak resident set in bytes, less the bytes that farpool holds; None if it is unknown."""
    try:
        with open(f"/proc/{os.getpid()}/status") as status:
            peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return None
    return max(0, peak - touched)


def explain(stats: Stats, ledger: Ledger) -> str:
    """Format the statistics of a pool as text."""
    lines = [
        "tier         owner         requested    reserved  page-locked     touched",
        *(
            f"{tier:<12} {owner:<12} {format_size(a.requested):>10}  {format_size(a.reserved):>10}"
            f"   {format_size(a.page_locked):>10}  {format_size(a.touched):>10}"
            for (tier, owner), a in ledger.accounts().items()
        ),
        "",
        f"fast tier: {format_size(stats.fast.reserved)} in use, at most {format_size(stats.fast.peak)} so far, "
        f"of {format_size(stats.fast.capacity)}",
        "",
        "class              live    resident       dirty",
        *(
            f"{c.name:<12} {format_size(c.live):>10}  {format_size(c.resident):>10}  {format_size(c.dirty):>10}"
            for c in stats.classes
        ),
        "",
        "link                       transfers       bytes        time",
        *(
            f"{link.source + ' -> ' + link.target:<24} {link.transfers:>11}  {format_size(link.nbytes):>10}"
            f"  {link.seconds:>8.3f} s"
            for link in stats.links
        ),
        "",
        f"accesses: {stats.accesses}, {stats.hit_rate:.1%} in place, {stats.late} on their way, "
        f"{stats.divergences} not foretold",
        *(
            [
                f"rows of tables: {stats.row_accesses} blocks looked up, {stats.row_hit_rate:.1%} in place; "
                f"kept by {'frequency' if stats.rows_by_frequency else 'recency'}"
            ]
            if stats.row_accesses
            else []
        ),
        *(
            f"  {table.name or 'without a name'}: {table.row_accesses}, {table.row_hit_rate:.1%} in place"
            for table in stats.tables
            if len(stats.tables) > 1
        ),
        f"prefetched blocks: {stats.prefetches}, accuracy {stats.prefetch_accuracy:.1%}; "
        f"fetched on demand: {stats.demand_fetches}",
        f"stalls: {stats.stalls}, {stats.stall_seconds:.3f} s altogether",
        *(
            f"  {stall.op or 'access'} waited {stall.seconds * 1e3:.2f} ms for "
            + (f"block {stall.block} from {stall.tier}" if stall.tier else "another thread")
            for stall in stats.last_stalls
        ),
    ]
    if stats.device is not None:
        lines += _device_lines(stats.device)
    lines += [f"{tier.name}: {note}" for tier in stats.tiers for note in tier.notes]
    if stats.unpaged_peak is not None:
        lines.append(f"memory outside the pool, at its peak: {format_size(stats.unpaged_peak)}")
    return "\n".join(lines)
