"""Figures for reports in one style, as SVG that stands inside a page and follows its colours.

Lines and letters are drawn in one ink, which becomes the page's own text colour; so a picture is readable on light and
on dark ground. The letters stay letters and take the page's typeface.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "new_figure", "svg"]

INK = "#0a0b0c"
"""Colour that stands for the page's text colour."""
COLOURS = ("#3b82d0", "#e0872a", "#2f9e74", "#d05a3f", "#9a6fc4", "#3aa7b8")
"""Colours of series, in order: readable on white and near-black, and distinct for colour-blind readers."""

_SIZE = (6.6, 3.7)


def new_figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Make an empty figure with one pair of axes in the reports' style."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_prop_cycle(color=COLOURS)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.tick_params(which="both", colors=INK, labelcolor=INK)
    axes.grid(visible=True, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
        spine.set_alpha(0.5)
    return figure, axes


def svg(figure: Figure, number: int = 0) -> str:
    """Render a figure as an ``<svg>`` element without references to anything outside.

    Parameters
    ----------
    number : int
        Number of the figure on its page, from which names inside it are made.
    """
    import matplotlib as mpl

    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_visible(False)
            for text in legend.get_texts():
                text.set_color(INK)
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"farpool-{number}"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :]
    picture = re.sub(r"<metadata>.*?</metadata>\s*", "", picture, flags=re.DOTALL)
    picture = re.sub(r' xmlns(:\w+)?="[^"]*"', "", picture)
    # The same in each picture, and a page must not have a name twice.
    picture = re.sub(r' id="[\w.]+_\d{1,4}"', "", picture)
    picture = re.sub(r"font: ?([\d.]+px) [^;\"]*", r"font-size: \1", picture)
    picture = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", picture, count=1)
    picture = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", picture, count=1)
    return picture.replace(INK, "currentColor").strip()
