"""The figures that the demo reports: times of the batches, and how much a pool's counters grew between two moments."""

from __future__ import annotations

from dataclasses import dataclass

from farpool.memory.pool.stats import Stats

__all__ = ["Counts", "LinkTraffic", "Timing", "counts_between"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the batches.

    Attributes
    ----------
    first_seconds, rest_seconds : float
        `first_seconds`: time of the first batch. `rest_seconds`: time of all other batches together.
    texts_per_second : float
        Throughput of all batches but the first; of the first batch if there is no other.
    """

    first_seconds: float
    rest_seconds: float
    texts_per_second: float


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Traffic over one link between two tiers, and the seconds for which the link was busy."""

    source: str
    target: str
    transfers: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Growth of a pool's counters between two moments, named as in :class:`farpool.memory.pool.stats.Stats`.

    Attributes
    ----------
    hits, late : int
        `hits`: accesses whose bytes were all resident. `late`: other accesses whose missing bytes were already being
        fetched.
    hit_rate : float or None
        Share of the accesses whose bytes were resident; None if there were no accesses.
    prefetch_accuracy : float or None
        Used prefetches divided by the sum of used and wasted prefetches; None if no prefetch was used or wasted.
    """

    accesses: int
    hits: int
    late: int
    hit_rate: float | None
    demand_fetches: int
    prefetches: int
    prefetches_used: int
    prefetches_wasted: int
    prefetch_accuracy: float | None
    stall_seconds: float
    links: tuple[LinkTraffic, ...]


def counts_between(before: Stats, after: Stats) -> Counts:
    """Return the differences between the statistics of one pool at two moments."""
    earlier = {(link.source, link.target): link for link in before.links}
    links = []
    for link in after.links:
        old = earlier.get((link.source, link.target))
        links.append(
            LinkTraffic(
                link.source,
                link.target,
                link.transfers - (old.transfers if old else 0),
                link.nbytes - (old.nbytes if old else 0),
                link.seconds - (old.seconds if old else 0.0),
            )
        )
    accesses, hits = after.accesses - before.accesses, after.hits - before.hits
    used = after.prefetches_used - before.prefetches_used
    wasted = after.prefetches_wasted - before.prefetches_wasted
    return Counts(
        accesses=accesses,
        hits=hits,
        late=after.late - before.late,
        hit_rate=hits / accesses if accesses else None,
        demand_fetches=after.demand_fetches - before.demand_fetches,
        prefetches=after.prefetches - before.prefetches,
        prefetches_used=used,
        prefetches_wasted=wasted,
        prefetch_accuracy=used / (used + wasted) if used + wasted else None,
        stall_seconds=after.stall_seconds - before.stall_seconds,
        links=tuple(links),
    )
