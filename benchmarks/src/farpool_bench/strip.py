"""Timelines of a pool's activity, small enough to be kept in a result, and figures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.memory.pool.events import Event
from farpool_bench.figures import COLOURS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Strip", "draw_strip", "strip_of"]

_GAP = 1e-4
"""Bars that lie fewer seconds apart are drawn as one."""

Spans = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """A timeline of a pool's activity: bars in lanes on a common axis of time.

    Attributes
    ----------
    seconds : float
        Length of the stretch.
    marks : tuple of float
        Seconds at which something began, such as a pass.
    lanes : dict of str to tuple
        Beginning and end of each bar in seconds, by what was done.
    """

    seconds: float
    marks: tuple[float, ...]
    lanes: dict[str, Spans]


_LANES: dict[str, Callable[[Event], bool]] = {
    "reading": lambda event: event.kind == "fetch",
    "writing": lambda event: event.kind == "writeback",
    "computing": lambda event: event.kind == "compute",
    "waiting": lambda event: event.kind == "stall",
}


def strip_of(events: Sequence[Event], start: float, stop: float, marks: Sequence[float]) -> Strip:
    """Make the timeline between two moments of the monotonic clock; lanes without bars are left out."""
    lanes: dict[str, Spans] = {}
    for name, belongs in _LANES.items():
        bars: list[tuple[float, float]] = []
        for event in sorted(filter(belongs, events), key=lambda event: event.time):
            left, right = max(event.time, start) - start, min(event.time + event.duration, stop) - start
            if right <= left:
                continue
            if bars and left - bars[-1][1] < _GAP:
                bars[-1] = (bars[-1][0], max(bars[-1][1], right))
            else:
                bars.append((left, right))
        if bars:
            lanes[name] = tuple((round(left, 5), round(right, 5)) for left, right in bars)
    return Strip(stop - start, tuple(round(mark - start, 5) for mark in marks), lanes)


def draw_strip(strip: Strip) -> Figure:
    """Draw a timeline with one row for each lane and the share of the time that it was busy."""
    figure, axes = new_figure("milliseconds", "")
    for row, ((_, bars), colour) in enumerate(zip(strip.lanes.items(), COLOURS, strict=False)):
        axes.broken_barh(
            [(left * 1e3, (right - left) * 1e3) for left, right in bars], (row - 0.36, 0.72), color=colour, linewidth=0
        )
    busy = {name: sum(right - left for left, right in bars) / strip.seconds for name, bars in strip.lanes.items()}
    axes.set_yticks(range(len(busy)), [f"{name}\n{share:.0%}" for name, share in busy.items()])
    axes.set_ylim(len(busy) - 0.4, -0.6)
    axes.set_xlim(0, strip.seconds * 1e3)
    axes.grid(visible=False)
    for mark in strip.marks:
        axes.axvline(mark * 1e3, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    figure.set_size_inches(6.6, 1.0 + 0.55 * len(busy))
    return figure
