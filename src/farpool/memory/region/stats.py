"""Statistics of a region."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RegionStats"]


@dataclass(frozen=True, slots=True)
class RegionStats:
    """Counts of events in a region since it was made. Pages have 4096 bytes.

    Attributes
    ----------
    faults : int
        Accesses that had to wait for an answer.
    reused : int
        Faults on pages that were still in memory, and on runs loaded ahead.
    write_faults : int
        First writes to pages that were clean.
    demand_pages, ahead_pages : int
        Pages loaded because a thread waited for them, and pages loaded ahead.
    ahead_used, ahead_wasted : int
        Pages loaded ahead in runs to which the program came, and pages loaded ahead that left memory before.
    evicted_pages : int
        Pages that left memory.
    saved_pages : int
        Pages written to lower tiers.
    read_bytes, written_bytes : int
        Bytes read from lower tiers, and written to them.
    waits_for_room : int
        Faults that waited until dirty pages were saved.
    lost_pages : int
        Pages that a lower tier did not give back.
    resident_bytes, peak_bytes : int
        Bytes of pages in memory now, and at most.
    backed_bytes : int
        Bytes in memory now, as the operating system counts them.
    """

    faults: int
    reused: int
    write_faults: int
    demand_pages: int
    ahead_pages: int
    ahead_used: int
    ahead_wasted: int
    evicted_pages: int
    saved_pages: int
    read_bytes: int
    written_bytes: int
    waits_for_room: int
    lost_pages: int
    resident_bytes: int
    peak_bytes: int
    backed_bytes: int
