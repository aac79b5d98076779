"""Draws a timeline of a pool's work: resident bytes, transfers on each link, operations and stalls."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farpool.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from farpool.memory.pool.events import Event

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "SKY",
    "VERMILLION",
    "YELLOW",
    "Mark",
    "check_drawable",
    "draw_timeline",
    "resident_bytes",
]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
FORMATS = (".png", ".svg", ".pdf")
GREY, INK = "#9A9A9A", "#333333"

TRANSFERS = {"demand": (VERMILLION, "fetch on demand"), "prefetch": (BLUE, "prefetch"), "": (PURPLE, "write back")}
OPERATIONS = (GREEN, SKY, ORANGE, YELLOW)

Bar = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that the picture shows with a label.

    Attributes
    ----------
    time : float
        Seconds of the monotonic clock, like the times of events.
    label : str
        Text of the label.
    """

    time: float
    label: str


def resident_bytes(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Return the bytes in use in the fast tier after each event.

    Threads report events a little after the events have ended, so `events` may not be sorted by their ends. The bytes
    of an event were counted when it was reported. So this function keeps the order of the reports, and increases times
    if necessary, so that they never descend.

    Returns
    -------
    list of (float, int)
        Seconds of the monotonic clock, and the bytes in use from that time until the time of the next entry.
    """
    curve: list[tuple[float, int]] = []
    for event in events:
        end = event.time + event.duration
        curve.append((max(end, curve[-1][0]) if curve else end, event.resident))
    return curve


def check_drawable(path: Path, what: str = "timeline") -> None:
    """Check that a picture can be drawn into a file. Programs call this before a long run.

    Parameters
    ----------
    path : Path
        The file.
    what : str
        Name of the picture, for errors.

    Raises
    ------
    ConfigError
        Matplotlib is not installed, the format is unknown, or the folder is missing or cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"a {what} needs the package 'matplotlib'; pip install 'farpool[demo]'")
    if path.suffix not in FORMATS:
        raise ConfigError(f"{what} {path}: cannot draw the format {path.suffix!r}; use one of {', '.join(FORMATS)}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{what} {path}: the folder {path.parent} does not exist or cannot be written; choose another"
        )


def draw_timeline(
    events: Sequence[Event],
    path: Path,
    *,
    budget: int,
    title: str,
    window: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
) -> None:
    """Draw the events into an image file.

    Parameters
    ----------
    events : sequence of Event
        Events of the pool, in the order in which it reported them.
    path : Path
        The file; its suffix is the format (``.png``, ``.svg``, ``.pdf``).
    budget : int
        Bytes of the fast tier, drawn as a line.
    title : str
        Heading of the picture.
    window : (float, float), optional
        Start and end of the time to show, in seconds of the monotonic clock. By default, all events are shown.
    marks : sequence of Mark, optional
        Moments to label, for example when batches begin.

    Raises
    ------
    ConfigError
        Matplotlib is not installed, the format is unknown, or the file cannot be written.
    ValueError
        There is nothing to draw.
    """
    check_drawable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not events:
        raise ValueError("no events: nothing to draw")
    start, stop = window or (min(event.time for event in events), max(event.time + event.duration for event in events))
    shown = [event for event in events if event.time < stop and event.time + event.duration > start]

    links = _links(shown)
    # The figure stands alone: pyplot's global state belongs to the program that uses farpool.
    figure = Figure(figsize=(13, 5.6 + 0.42 * len(links)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK)
    memory, transfers, work = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [2.6, 0.5 + 0.55 * len(links), 1.5]}
    )
    _draw_resident(memory, events, start, stop, budget)
    _draw_links(transfers, links, start, stop)
    _draw_work(work, shown, start, stop)
    for axes in (memory, transfers, work):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    _draw_marks((memory, transfers, work), marks, start, stop)
    work.set_xlim(0, (stop - start) * 1e3)
    work.set_xlabel("milliseconds", color=INK)
    figure.align_ylabels()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"timeline {path}: cannot write it: {error.strerror}") from error


def _draw_marks(panels: Sequence[Axes], marks: Sequence[Mark], start: float, stop: float) -> None:
    """Draw a line through all panels at each mark, and the mark's label into the first panel."""
    for mark in marks:
        if not start <= mark.time < stop:
            continue
        left = (mark.time - start) * 1e3
        if mark.time > start:  # a line on the left edge would hide the axis
            for axes in panels:
                axes.axvline(left, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        panels[0].annotate(
            mark.label, (left, 1), (4, -2), fontsize=8.5, color=INK, va="top",
            xycoords=panels[0].get_xaxis_transform(), textcoords="offset points", zorder=5,
        )  # fmt: skip


def _draw_resident(axes: Axes, events: Sequence[Event], start: float, stop: float, budget: int) -> None:
    curve = resident_bytes(events)
    before = [level for time, level in curve if time <= start]
    inside = [(time, level) for time, level in curve if start < time < stop]
    points = [(start, before[-1] if before else 0), *inside]
    points.append((stop, points[-1][1]))
    unit, name = (1e9, "GB") if budget >= 1e9 else (1e6, "MB") if budget >= 1e6 else (1e3, "kB")
    times = [(time - start) * 1e3 for time, _ in points]
    levels = [level / unit for _, level in points]
    axes.fill_between(times, levels, step="post", color=SKY, alpha=0.45, linewidth=0)
    axes.step(times, levels, where="post", color=BLUE, linewidth=0.9)
    axes.axhline(budget / unit, color=VERMILLION, linewidth=1.0)
    axes.annotate(
        f"budget {budget / unit:.1f} {name}", (1, budget / unit), (-4, 4), color=VERMILLION, fontsize=9,
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right",
    )  # fmt: skip
    axes.set_ylim(0, budget / unit * 1.28)
    axes.set_ylabel(f"resident, {name}", color=INK)


def _draw_links(axes: Axes, links: dict[tuple[str, str], list[Event]], start: float, stop: float) -> None:
    seen: set[str] = set()
    for lane, events in enumerate(links.values()):
        by_cause: dict[str, list[Bar]] = defaultdict(list)
        for event in events:
            by_cause[event.cause if event.kind == "fetch" else ""].append(_bar(event, start, stop))
        for cause, bars in by_cause.items():
            colour, label = TRANSFERS.get(cause, TRANSFERS[""])
            axes.broken_barh(
                _visible(bars, stop - start), (lane - 0.36, 0.72), facecolor=colour, linewidth=0,
                label=None if label in seen else label,
            )  # fmt: skip
            seen.add(label)
        bars = [_bar(event, start, stop) for event in events]
        busy = _covered(bars) / 1e3
        moved = sum(
            event.nbytes * (width / 1e3 / event.duration if event.duration else 1)
            for event, (_, width) in zip(events, bars, strict=True)
        )
        rate = f", {moved / busy / 1e9:.1f} GB/s" if busy else ""
        axes.annotate(
            f"{moved / 1e6:.0f} MB, busy {busy / (stop - start):.0%}{rate}", (1.006, lane), fontsize=8.5, va="center",
            xycoords=axes.get_yaxis_transform(), color=INK, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(links)), [f"{source} → {target}" for source, target in links])
    axes.set_ylim(len(links) - 0.45, -0.55)
    if not links:
        axes.set_yticks([])
        axes.annotate("no transfers", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=GREY)
    axes.set_ylabel("links\n", color=INK)
    _legend(axes)


def _draw_work(axes: Axes, events: Sequence[Event], start: float, stop: float) -> None:
    computing: dict[str, list[Bar]] = defaultdict(list)
    for event in events:
        if event.kind == "compute":
            computing[event.op].append(_bar(event, start, stop))
    stalls = [_bar(event, start, stop) for event in events if event.kind == "stall"]
    ranked = sorted(computing, key=lambda op: (-sum(width for _, width in computing[op]), op))
    named = ranked if len(ranked) <= len(OPERATIONS) else ranked[: len(OPERATIONS) - 1]
    for op, colour in zip(named, OPERATIONS, strict=False):
        axes.broken_barh(
            _visible(computing[op], stop - start), (-0.36, 0.72), facecolor=colour, linewidth=0, label=_short(op)
        )
    others = [bar for op in ranked[len(named) :] for bar in computing[op]]
    if others:
        axes.broken_barh(_visible(others, stop - start), (-0.36, 0.72), facecolor=GREY, linewidth=0, label="others")
    if stalls:
        axes.broken_barh(
            _visible(stalls, stop - start), (0.64, 0.72), facecolor=VERMILLION, linewidth=0, label="waiting for bytes"
        )
    bars = [bar for op in ranked for bar in computing[op]]
    for lane, lane_bars in enumerate((bars, stalls)):
        axes.annotate(
            f"{_covered(lane_bars) / 1e3 / (stop - start):.0%} of the time", (1.006, lane), fontsize=8.5, va="center",
            xycoords=axes.get_yaxis_transform(), color=INK, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks([0, 1], ["operation", "stall"])
    axes.set_ylim(1.55, -0.55)
    axes.set_ylabel("computation\non paged tensors", color=INK)
    _legend(axes)


def _links(events: Sequence[Event]) -> dict[tuple[str, str], list[Event]]:
    """Group transfers by link. The links that bring bytes into the fast tier are first."""
    links: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in {"fetch", "writeback"}:
            links[event.source, event.target].append(event)
    return dict(sorted(links.items(), key=lambda item: (item[1][0].kind != "fetch", item[0])))


def _bar(event: Event, start: float, stop: float) -> Bar:
    """Return the left end and the width of an event's bar in milliseconds, cut to the window."""
    left, right = max(event.time, start), min(event.time + event.duration, stop)
    return (left - start) * 1e3, (right - left) * 1e3


def _visible(bars: list[Bar], seconds: float) -> list[Bar]:
    """Return the bars. Bars narrower than about a pixel are widened, so that they are visible."""
    thinnest = seconds * 1e3 / 1700
    return [(left, max(width, thinnest)) for left, width in bars]


def _covered(bars: list[Bar]) -> float:
    """Return the milliseconds that the bars cover together; overlaps count once."""
    edges: list[list[float]] = []
    for left, width in sorted(bars):
        if edges and left <= edges[-1][1]:
            edges[-1][1] = max(edges[-1][1], left + width)
        else:
            edges.append([left, left + width])
    return sum(right - left for left, right in edges)


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        options: dict[str, Any] = {"ncols": len(handles), "frameon": False, "fontsize": 8.5, "handlelength": 1.2}
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 0.98), borderaxespad=0.1, **options)
