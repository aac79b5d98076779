"""Draws a picture of a tape: the blocks that each access touches, and the reuse distances of blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.errors import ConfigError
from farpool.observe.reuse import reuse_distances
from farpool.observe.tape_trace import Trace
from farpool.observe.timeline import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, check_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_tape"]

COLOURS = {
    "weights": BLUE, "gradient": ORANGE, "optimizer": GREEN, "activation": SKY, "embedding": PURPLE, "kv": YELLOW,
    "expert": INK, "bytes": GREY,
}  # fmt: skip
_POINTS_MAX = 200_000
"""Maximum number of points. If there are more, evenly spaced points are drawn, because a picture has fewer pixels."""


def draw_tape(trace: Trace, path: Path) -> None:
    """Draw accesses over time and the curve of reuse distances.

    Parameters
    ----------
    trace : Trace
    path : Path
        The file; its suffix is the format (``.png``, ``.svg``, ``.pdf``).

    Raises
    ------
    ConfigError
        Matplotlib is not installed, the format is unknown, the file cannot be written, or there is no access to draw.
    """
    check_drawable(path, "figure")
    if not trace.accesses:
        raise ConfigError(f"figure {path}: the tape has no access to draw; record a program that uses the pool")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The figure stands alone: pyplot's global state belongs to the program that uses farpool.
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    accesses, reuse = figure.subplots(2, 1, gridspec_kw={"height_ratios": [2, 1]})
    _draw_accesses(accesses, trace)
    _draw_reuse(reuse, reuse_distances(trace.blocks), trace.metadata.budget)
    for axes in (accesses, reuse):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"figure {path}: cannot write it: {error.strerror}") from error


def _draw_accesses(axes: Axes, trace: Trace) -> None:
    step = -(-sum(len(touched) for touched in trace.touched) // _POINTS_MAX)
    points: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    ordinal = 0
    for number, touched in enumerate(trace.touched):
        for info in touched:
            if ordinal % step == 0:
                numbers, labels = points[info.cls]
                numbers.append(number)
                labels.append(info.label)
            ordinal += 1
    for cls, (numbers, labels) in sorted(points.items()):
        axes.plot(
            numbers, labels, linestyle="", marker="s", markersize=1.5, markeredgewidth=0,
            color=COLOURS.get(cls, GREY), label=cls, rasterized=True,
        )  # fmt: skip
    axes.set_xlim(0, len(trace.accesses))
    axes.set_xlabel("access", color=INK)
    axes.set_ylabel("block", color=INK)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, markerscale=5)


def _draw_reuse(axes: Axes, distances: Counter[int], budget: int) -> None:
    ordered = sorted(distances.items())
    whole = sum(distances.values())
    shares = [0.0]
    for _, nbytes in ordered:
        shares.append(shares[-1] + nbytes / whole)
    if ordered:
        axes.step([0, *(distance / 1e6 for distance, _ in ordered)], shares, where="post", color=BLUE)
    else:
        axes.annotate("nothing is used again", (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY)
    axes.axvline(budget / 1e6, color=VERMILLION, linewidth=1)
    axes.annotate(
        f"recorded budget {budget / 1e6:.1f} MB", (budget / 1e6, 1), (4, -10), color=VERMILLION, fontsize=9,
        xycoords=axes.get_xaxis_transform(), textcoords="offset points",
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("reuse distance, MB", color=INK)
    axes.set_ylabel("share of the bytes\nthat are used again", color=INK)
