"""Uses: the byte ranges that one op touches, turned into runs of blocks and back into places in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from farpool.engine import ALIGNMENT, Mode, Run
from farpool.sizes import format_size
from farpool.storage import Storage, block_bytes, cut

__all__ = ["Use", "describe", "runs_of", "smallest_budget"]


class Use(NamedTuple):
    """Bytes ``[start, stop)`` of a storage, and what is done with them."""

    storage: Storage
    start: int
    stop: int
    mode: Mode


def runs_of(uses: Sequence[Use], *, rows: bool = False) -> tuple[list[Run], list[tuple[int, int]]]:
    """Runs of blocks that cover the uses, and for each use its run and where it begins in that run, in bytes.

    Uses that share blocks share a run, so that aliases stay aliases. An empty use has run -1.

    Parameters
    ----------
    rows : bool
        The uses are rows picked by data.
    """
    spans: list[tuple[int, int, Mode, int]] = []
    origins: list[tuple[int, int]] = []
    for storage, start, stop, mode in uses:
        if stop <= start:
            origins.append((-1, 0))
            continue
        step = storage.block_bytes
        low, high = start // step, (stop - 1) // step
        whole = not storage.offset and start == low * step and stop == min((high + 1) * step, storage.nbytes)
        if mode == Mode.OVERWRITE and not (whole and (storage.count > 1 or not storage.shared)):
            mode = Mode.WRITE  # bytes beside it in its blocks are to be kept
        origins.append((storage.first + low, storage.offset + start - low * step))
        spans.append((storage.first + low, storage.first + high + 1, mode, storage.first))
    if len(spans) == 1:
        low, high, mode, table = spans[0]
        runs = [Run(low, high - low, mode, table if rows else -1)]
        return runs, [(0 if block >= 0 else -1, offset) for block, offset in origins]
    return _merged(spans, origins, uses, rows)


def _merged(
    spans: list[tuple[int, int, Mode, int]], origins: list[tuple[int, int]], uses: Sequence[Use], rows: bool
) -> tuple[list[Run], list[tuple[int, int]]]:
    runs: list[Run] = []
    seen: dict[tuple[int, int, Mode], int] = {}
    overlapping = False
    for low, high, mode, table in spans:
        if (low, high, mode) not in seen:
            seen[low, high, mode] = len(runs)
            runs.append(Run(low, high - low, mode, table if rows else -1))
    ordered = sorted(range(len(runs)), key=lambda i: runs[i].first)
    for left, right in pairwise(ordered):
        overlapping |= runs[left].first + runs[left].count > runs[right].first
    if overlapping:
        joined: list[Run] = []
        for run in (runs[i] for i in ordered):
            last = joined[-1] if joined else None
            if last is not None and last.first + last.count > run.first:
                stop = max(last.first + last.count, run.first + run.count)
                same = (last.first, last.count, last.mode) == (run.first, run.count, run.mode)
                mode = last.mode if same or last.mode == run.mode == Mode.READ else Mode.WRITE
                joined[-1] = Run(last.first, stop - last.first, mode, last.table)
            else:
                joined.append(run)
        runs = joined
    places: list[tuple[int, int]] = []
    index = {run.first: number for number, run in enumerate(runs)}
    for (block, offset), use in zip(origins, uses, strict=True):
        if block < 0:
            places.append((-1, 0))
            continue
        number = index.get(block, -1)
        if number < 0:
            number = next(i for i, run in enumerate(runs) if run.first <= block < run.first + run.count)
            offset += (block - runs[number].first) * use.storage.block_bytes
        places.append((number, offset))
    return runs, places


def smallest_budget(uses: Sequence[Use]) -> int:
    """Bytes of fast tier with which these uses fit together, in a pool made with that budget.

    Blocks are cut in proportion to the budget, so it is found by trying.
    """
    budget = ALIGNMENT
    while (needed := _needed(uses, budget)) > budget:
        budget = needed
    return budget


def _needed(uses: Sequence[Use], budget: int) -> int:
    sizes = cut(budget)
    spans: set[tuple[int, int, int]] = set()
    total = 0
    for storage, start, stop, _ in uses:
        if stop <= start:
            continue
        if storage.nbytes <= sizes.small:
            total += sizes.shared  # each might lie in a shared block of its own
            continue
        step = block_bytes(storage.nbytes, sizes, storage.row_bytes, storage.cls)
        spans.add((id(storage), start // step * step, min(-(-stop // step) * step, storage.nbytes)))
    return total + sum(-(-(stop - start) // sizes.alignment) * sizes.alignment for _, start, stop in spans)


def describe(uses: Sequence[Use]) -> str:
    """The operands by size, largest first, for an error message."""
    sizes = {id(use.storage): (use.stop - use.start, use.storage.name, use.storage.cls) for use in uses}
    largest = sorted(sizes.values(), reverse=True)
    named = ", ".join(f"{name or 'a tensor'} ({cls}, {format_size(nbytes)})" for nbytes, name, cls in largest[:4])
    return named + (f" and {len(largest) - 4} more" if len(largest) > 4 else "")
