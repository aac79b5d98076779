"""What many programs did to shared keys, and a checker of it.

Every operation has the times at which it began and ended, by one monotonic clock. The rules (docs/store.md):

- A read gives what some publish of that key wrote, under that publish's generation, and not before it began. A publish
  that met a newer one tries again under a higher generation; while it is under way, the first may be seen.
- It never gives what a confirmed publish or deletion has replaced before the read began. Generations follow the clock
  of the host, so of two writes one of which ended before the other began the second is the newer one, and of two
  publishes the one with the higher generation.
- Where nothing is ever evicted, it also finds what was confirmed and not deleted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Event", "violations"]


@dataclass(frozen=True, slots=True)
class Event:
    """One operation on one key.

    Attributes
    ----------
    kind : str
        ``put``, ``delete``, ``read`` or ``error``; the last says nothing.
    began, ended : float
        When it was called and when it returned.
    value : str or None
        Name and checksum of what was written or read; None for a deletion or a miss. What an error says.
    generation : int
        Of the publish, where the program was told; else 0.
    confirmed : bool
        Of a write: it returned without an error.
    """

    kind: str
    key: str
    began: float
    ended: float
    value: str | None
    generation: int = 0
    confirmed: bool = True


def violations(events: Iterable[Event], *, evicts: bool = True) -> list[str]:
    """What should not have happened, one line each."""
    by_key: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_key[event.key].append(event)
    return [line for history in by_key.values() for line in _violations_of(history, evicts)]


def _violations_of(history: list[Event], evicts: bool) -> list[str]:
    puts = {event.value: event for event in history if event.kind == "put"}
    deletes = [event for event in history if event.kind == "delete"]
    confirmed = sorted(
        (e for e in history if e.kind in ("put", "delete") and e.confirmed), key=lambda event: event.ended
    )
    ends = [write.ended for write in confirmed]
    # Of the first n of them, the one that began last and the one with the highest generation.
    latest = list(accumulate(confirmed, lambda a, b: max(a, b, key=lambda write: write.began)))
    highest = list(accumulate(confirmed, lambda a, b: max(a, b, key=lambda write: write.generation)))
    found = []
    for read in history:
        if read.kind != "read":
            continue
        count = bisect_left(ends, read.began)
        if read.value is None:
            what = None if evicts else _lost(read, confirmed[:count], deletes)
        else:
            what = _wrong(read, puts.get(read.value), [latest[count - 1], highest[count - 1]] if count else [])
        if what is not None:
            found.append(f"{what}: {read}")
    return found


def _wrong(read: Event, put: Event | None, replacing: list[Event]) -> str | None:
    """What is wrong with a value that was read; `replacing`: writes that were confirmed before the read."""
    if put is None:
        return "a value that was never published under this key"
    if put.began > read.ended:
        return f"a value that was published later ({put})"
    tried_before = read.generation < put.generation and read.began < put.ended
    if put.generation and read.generation and put.generation != read.generation and not tried_before:
        return f"a value under the generation of another publish ({put})"
    generation = read.generation or put.generation
    for write in replacing:
        if write.began > put.ended or (generation and write.generation > generation):
            return f"a value that was replaced ({put}) by one that was confirmed ({write})"
    return None


def _lost(read: Event, before: list[Event], deletes: list[Event]) -> str | None:
    """What is wrong with a miss, where nothing is evicted."""
    for put in before:
        if put.kind != "put":
            continue
        # A deletion that neither ended before the publish began nor began after the read ended may have come between.
        if not any(delete.ended > put.began and delete.began < read.ended for delete in deletes):
            return f"a miss although it was published ({put}) and not deleted"
    return None
