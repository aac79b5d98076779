"""Figures of a tape: sizes, times, the loop of accesses, reuse distances, and the least bytes moved per budget."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from farpool.memory.pager.belady import belady_bytes
from farpool.observe.loops import Loop, find_loop
from farpool.observe.reuse import quantiles, reuse_distances
from farpool.observe.tape_trace import Trace

__all__ = ["ClassSummary", "LeastMoved", "OpSummary", "Reuse", "TapeSummary", "summarize"]

_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_BUDGETS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
"""Budgets for which `LeastMoved` is computed, as shares of the most bytes of blocks that existed at once."""


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Figures of one class of blocks: how many were created, and the most bytes that existed at once."""

    name: str
    blocks: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class OpSummary:
    """Figures of one operation: the number of its accesses, and the seconds for which it computed."""

    name: str
    accesses: int
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """The smallest reuse distance, in bytes, within which a share of the reused bytes was reused."""

    share: float
    distance: int


@dataclass(frozen=True, slots=True)
class LeastMoved:
    """Bytes that are fetched and bytes that are written with a fast tier of `budget` bytes under Belady's rule.

    Belady's rule chooses victims, and knows all later accesses (see `farpool.memory.pager.belady`).
    """

    budget: int
    fetched: int
    written: int


@dataclass(frozen=True, slots=True)
class TapeSummary:
    """Figures of a tape.

    Attributes
    ----------
    classes : tuple of ClassSummary
    peak_bytes : int
        The most bytes of blocks that existed at once.
    largest_access : int
        Bytes of the largest access, which must fit into the budget.
    accesses, threads : int
    touched_bytes : int
        Bytes of all operands of all accesses.
    ops : tuple of OpSummary
        Operations, sorted by compute time, longest first.
    compute_seconds, think_seconds, stall_seconds : float
        Sums over all threads. Compute: from the grant of an access's operands to their release. Think: from a release
        to the thread's next request. Stall: from a request to its grant.
    loop : Loop or None
        The loop whose period makes the most accesses repeat; None if the accesses have no loop.
    reuse : tuple of Reuse
    least_moved : tuple of LeastMoved
        Bytes moved with the recorded budget and with budgets that are shares of `peak_bytes`, sorted by budget. Budgets
        smaller than the largest access are left out.
    cut_off : str
        Reason why the file could not be read to its end; empty if the file was read completely.
    """

    classes: tuple[ClassSummary, ...]
    peak_bytes: int
    largest_access: int
    accesses: int
    threads: int
    touched_bytes: int
    ops: tuple[OpSummary, ...]
    compute_seconds: float
    think_seconds: float
    stall_seconds: float
    loop: Loop | None
    reuse: tuple[Reuse, ...]
    least_moved: tuple[LeastMoved, ...]
    cut_off: str


def summarize(trace: Trace) -> TapeSummary:
    """Compute the figures of a tape. This takes about ten seconds for a million operands."""
    sizes = [sum(info.nbytes for info in touched) for touched in trace.touched]
    largest = max(sizes, default=0)
    budgets = {trace.metadata.budget, *(int(trace.peak * part) for part in _BUDGETS)}
    moved = [(budget, belady_bytes(trace.blocks, budget)) for budget in sorted(budgets) if budget >= largest]
    return TapeSummary(
        classes=tuple(ClassSummary(name, use.blocks, use.peak) for name, use in sorted(trace.classes.items())),
        peak_bytes=trace.peak,
        largest_access=largest,
        accesses=len(trace.accesses),
        threads=len({access.thread for access in trace.accesses}),
        touched_bytes=sum(sizes),
        ops=_ops(trace),
        compute_seconds=sum(access.compute for access in trace.accesses),
        think_seconds=sum(access.think for access in trace.accesses),
        stall_seconds=sum(access.stall for access in trace.accesses),
        loop=find_loop(trace.entries),
        reuse=tuple(Reuse(*entry) for entry in quantiles(reuse_distances(trace.blocks), _SHARES)),
        least_moved=tuple(LeastMoved(budget, bytes_.fetched, bytes_.written) for budget, bytes_ in moved),
        cut_off=trace.cut_off,
    )


def _ops(trace: Trace) -> tuple[OpSummary, ...]:
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for access in trace.accesses:
        counts[access.op] += 1
        seconds[access.op] += access.compute
    ranked = sorted(counts, key=lambda op: (-seconds[op], op))
    return tuple(OpSummary(op, counts[op], seconds[op]) for op in ranked)
