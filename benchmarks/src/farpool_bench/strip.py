"""Timelines of a pool's activity, small enough to be kept in a result, and figures of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farpool.memory.pool.events import Event
from farpool_bench.harness import Row
from farpool_bench.render import COLOURS, DOTTED, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool import Pool

_GAP_S = 1e-4
"""Bars with less time between them are drawn as one."""
_LANES = {"reading": "fetch", "writing": "writeback", "computing": "compute", "waiting": "stall"}


def record_strip(pool: Pool, step: Callable[[Callable[[], None]], object], passes: int) -> Row:
    """Record some steps in a row, after one that is left out; each is marked, and its phases as it calls its argument.

    The row has the length in seconds, the seconds of the marks, and the beginning and end of each bar by lane.
    """
    events: list[Event] = []
    marks: list[float] = []

    def mark() -> None:
        marks.append(time.monotonic())

    step(lambda: None)
    end_subscription = pool.subscribe(events.append)
    for _ in range(passes):
        mark()
        step(mark)
    stop = time.monotonic()
    end_subscription()
    start = marks[0]
    lanes = {name: _bars(events, kind, start, stop) for name, kind in _LANES.items()}
    return Row(
        seconds=stop - start,
        marks=tuple(round(one - start, 5) for one in marks),
        lanes=Row({name: bars for name, bars in lanes.items() if bars}),
    )


def _bars(events: Sequence[Event], kind: str, start: float, stop: float) -> tuple[tuple[float, float], ...]:
    bars: list[tuple[float, float]] = []
    for event in sorted((event for event in events if event.kind == kind), key=lambda event: event.time):
        left, right = max(event.time, start) - start, min(event.time + event.duration, stop) - start
        if right <= left:
            continue
        if bars and left - bars[-1][1] < _GAP_S:
            bars[-1] = (bars[-1][0], max(bars[-1][1], right))
        else:
            bars.append((left, right))
    return tuple((round(left, 5), round(right, 5)) for left, right in bars)


def draw_strip(strip: Any) -> Figure:
    """Draw a timeline with one row for each lane and the share of the time that it was busy."""
    figure, axes = new_figure("milliseconds", "")
    for row, (bars, colour) in enumerate(zip(strip.lanes.values(), COLOURS, strict=False)):
        axes.broken_barh(
            [(left * 1e3, (right - left) * 1e3) for left, right in bars], (row - 0.36, 0.72), color=colour, linewidth=0
        )
    busy = {name: sum(right - left for left, right in bars) / strip.seconds for name, bars in strip.lanes.items()}
    axes.set_yticks(range(len(busy)), [f"{name}\n{share:.0%}" for name, share in busy.items()])
    axes.set_ylim(len(busy) - 0.4, -0.6)
    axes.set_xlim(0, strip.seconds * 1e3)
    axes.grid(visible=False)
    for mark in strip.marks:
        axes.axvline(mark * 1e3, zorder=0, **DOTTED)
    figure.set_size_inches(6.6, 1.0 + 0.55 * len(busy))
    return figure
