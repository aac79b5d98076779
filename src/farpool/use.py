"""Uses: the byte ranges that one op touches, turned into runs of blocks and back into places in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from farpool.pager import Mode, Run
from farpool.sizes import format_size
from farpool.storage import Storage

__all__ = ["Use", "describe", "runs_of"]

_FEW = 4
"""As many uses as this are quicker compared with each other than sorted."""


class Use:
    """Bytes ``[start, stop)`` of a storage, and what is done with them. Nothing of it changes; it may be used again.

    Attributes
    ----------
    storage : Storage
    start, stop : int
    mode : Mode
    """

    __slots__ = ("_layout", "_span", "mode", "start", "stop", "storage")

    def __init__(self, storage: Storage, start: int, stop: int, mode: Mode) -> None:
        self.storage = storage
        self.start = start
        self.stop = stop
        self.mode = mode
        self._layout = (-1, -1)

    def span(self) -> tuple[Run, int]:
        """The blocks that cover it, and where it begins in them, in bytes. It must not be empty."""
        storage = self.storage
        layout = (storage.first, storage.offset)
        if self._layout != layout:  # small storages are packed anew when they are first used
            self._span = self.cover()
            self._layout = layout
        return self._span

    def cover(self, table: int = -1) -> tuple[Run, int]:
        """As `span`, worked out anew; as rows of the table that begins with block `table`, if it is not -1."""
        storage = self.storage
        step = storage.block_bytes
        low, high = self.start // step, (self.stop - 1) // step
        mode = self.mode
        whole = not storage.offset and self.start == low * step and self.stop == min((high + 1) * step, storage.nbytes)
        if mode == Mode.OVERWRITE and not (whole and (storage.count > 1 or not storage.shared)):
            mode = Mode.WRITE  # bytes beside it in its blocks are to be kept
        return Run(storage.first + low, high - low + 1, mode, table), storage.offset + self.start - low * step


def runs_of(uses: Sequence[Use], *, rows: bool = False) -> tuple[Sequence[Run], Sequence[tuple[int, int]]]:
    """Runs of blocks that cover the uses, and for each use its run and where it begins in that run, in bytes.

    Uses that share blocks share a run, so that aliases stay aliases. An empty use has run -1.

    Parameters
    ----------
    rows : bool
        The uses are rows picked by data.
    """
    if rows or len(uses) > _FEW:
        return _merged(uses, rows)
    runs: list[Run] = []
    places: list[tuple[int, int]] = []
    for use in uses:
        if use.stop <= use.start:
            places.append((-1, 0))
            continue
        run, offset = use.span()
        first = run.first
        for index, other in enumerate(runs):
            if first >= other.first + other.count or first + run.count <= other.first:
                continue
            if first != other.first or run.count != other.count or run.mode != other.mode:
                return _merged(uses, rows)
            places.append((index, offset))
            break
        else:
            places.append((len(runs), offset))
            runs.append(run)
    return runs, places


def _merged(uses: Sequence[Use], rows: bool) -> tuple[list[Run], list[tuple[int, int]]]:
    runs: list[Run] = []
    origins: list[tuple[int, int]] = []
    seen: set[tuple[int, int, Mode]] = set()
    for use in uses:
        if use.stop <= use.start:
            origins.append((-1, 0))
            continue
        run, offset = use.cover(use.storage.first) if rows else use.span()
        origins.append((run.first, offset))
        key = (run.first, run.count, run.mode)
        if key not in seen:
            seen.add(key)
            runs.append(run)
    overlapping = False
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


def describe(uses: Sequence[Use]) -> str:
    """The operands by size, largest first, for an error message."""
    sizes = {id(use.storage): (use.stop - use.start, use.storage.name, use.storage.cls) for use in uses}
    largest = sorted(sizes.values(), reverse=True)
    named = ", ".join(f"{name or 'a tensor'} ({cls}, {format_size(nbytes)})" for nbytes, name, cls in largest[:4])
    return named + (f" and {len(largest) - 4} more" if len(largest) > 4 else "")
