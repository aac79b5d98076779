"""What many programs did to shared keys, and a checker of it.

Every operation has the times at which it began and ended, by one monotonic clock. The rules (docs/store.md):

- A read gives what some put of that key wrote, whole, and not before that put began. A put that failed, or that found a
  copy present, may have written its value or not.
- It never gives what a drop has taken from all nodes before the read began, unless it was put again.
- Where nothing is evicted and nobody dropped it, a key that was confirmed with n copies is found while fewer than n
  nodes have lost their memory since: since the put, or the last sweep that began after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Event", "Losses", "violations"]


@dataclass(frozen=True, slots=True)
class Event:
    """One operation on one key.

    Attributes
    ----------
    kind : str
        ``put``, ``drop``, ``read`` or ``error``; the last says nothing.
    began, ended : float
        When it was called and when it returned.
    value : str or None
        Name and checksum of what was put or read; None for a drop or a miss. What an error says.
    confirmed : bool
        Of a put: it returned without an error. Of a drop: so, and no node was away.
    """

    kind: str
    key: str
    began: float
    ended: float
    value: str | None
    confirmed: bool = True

    @property
    def over(self) -> float:
        """When it can have no effect any more: never, if a node may still have the request before it."""
        return self.ended if self.confirmed else math.inf


@dataclass(frozen=True, slots=True)
class Losses:
    """What happened to the nodes.

    Attributes
    ----------
    copies : int
        On how many nodes a put was confirmed.
    lost : sequence of (str, float)
        Nodes that lost their memory, and when it was lost for certain.
    swept : sequence of (float, float)
        When sweeps that left nothing to mend began and ended.
    away : sequence of (str, float, float)
        Nodes that could not be asked, and from when to when.
    """

    copies: int = 1
    lost: Sequence[tuple[str, float]] = ()
    swept: Sequence[tuple[float, float]] = ()
    away: Sequence[tuple[str, float, float]] = ()

    def may_explain(self, put: Event, read: Event) -> bool:
        """Tell if so many nodes were lost since, or away when it was looked for, that a read may miss what was put."""
        sweeps = [(begin, end) for begin, end in self.swept if put.ended < begin and end < read.began]
        # A loss while a sweep is under way counts for what it finds and for what it leaves.
        begins = [put.began, *(begin for begin, _ in sweeps)]
        ends = [*(end for _, end in sweeps), read.ended]
        lost = [{node for node, at in self.lost if begin <= at <= end} for begin, end in zip(begins, ends, strict=True)]
        lost[-1] |= {node for node, begin, end in self.away if begin <= read.ended and read.began <= end}
        return any(len(nodes) >= self.copies for nodes in lost)


def violations(events: Iterable[Event], *, evicts: bool = True, losses: Losses | None = None) -> list[str]:
    """What should not have happened, one line each."""
    by_key: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_key[event.key].append(event)
    found = []
    for history in by_key.values():
        puts = [event for event in history if event.kind == "put"]
        drops = [event for event in history if event.kind == "drop"]
        of_value: defaultdict[str | None, list[Event]] = defaultdict(list)
        for put in puts:
            of_value[put.value].append(put)
        for read in history:
            if read.kind == "read":
                if read.value is not None:
                    what = _wrong(read, of_value[read.value], drops)
                else:
                    what = None if evicts else _lost(read, puts, drops, losses or Losses())
                if what is not None:
                    found.append(f"{what}: {read}")
    return found


def _wrong(read: Event, puts: list[Event], drops: list[Event]) -> str | None:
    """What is wrong with a value that was read; `puts`: those of this value."""
    if not puts:
        return "a value that was never put under this key"
    begun = [put for put in puts if put.began <= read.ended]
    if not begun:
        return f"a value that was put later ({puts[0]})"
    for drop in drops:
        if drop.over < read.began and all(put.over < drop.began for put in begun):
            return f"a value ({begun[-1]}) that was dropped ({drop})"
    return None


def _lost(read: Event, puts: list[Event], drops: list[Event], losses: Losses) -> str | None:
    """What is wrong with a miss, where nothing is evicted."""
    for put in puts:
        if not put.confirmed or put.ended >= read.began:
            continue
        # A drop that neither was over before the put began nor began after the read ended may have come between.
        if any(drop.over > put.began and drop.began < read.ended for drop in drops):
            continue
        if not losses.may_explain(put, read):
            return f"a miss although it was put ({put}) and not dropped"
    return None
