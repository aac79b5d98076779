"""The picture of ``farpool demo --pool``: memory in use on each node over time, the events, and training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.demo.fleet import NAMES, Held
from farpool.errors import ConfigError
from farpool.observe.timeline import BLUE, GREEN, GREY, INK, ORANGE, VERMILLION, check_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Moment", "Sample", "draw"]

_MB = 1e6
_TEXT_SHARE = 0.25
"""Part of the picture's width that the text of an event may need."""
_HEADROOM = 1.5
"""Height of a node's panel over its highest memory, for the texts of events."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a node.

    Attributes
    ----------
    seconds : float
        Time since the first training step began.
    step : int
        Training steps that were done by then.
    node : str
        Name of the node.
    text : str
        The event.
    is_loss : bool
        True if the node, or its memory, goes away.
    """

    seconds: float
    step: int
    node: str
    text: str
    is_loss: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory that the nodes had in use at one time.

    Attributes
    ----------
    seconds : float
        Time since the first training step began.
    step : int
        Training steps that were done by then.
    nodes : tuple of Held
        Memory of each node, in the order of `NAMES`.
    """

    seconds: float
    step: int
    nodes: tuple[Held, ...]


def draw(samples: Sequence[Sample], moments: Sequence[Moment], path: Path) -> None:
    """Draw the picture into an image file.

    Parameters
    ----------
    samples : sequence of Sample
        Memory of the nodes, at least one sample, sorted by time.
    moments : sequence of Moment
        The events.
    path : Path
        The file; its suffix is the format (``.png``, ``.svg``, ``.pdf``).

    Raises
    ------
    ConfigError
        Matplotlib is not installed, the format is unknown, or the file cannot be written.
    """
    check_drawable(path, "picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The figure stands alone: pyplot's global state belongs to the program that uses farpool.
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "A model trains on leased memory while nodes come and go", fontsize=13, fontweight="bold", color=INK
    )
    panels = figure.subplots(len(NAMES) + 1, 1, sharex=True, gridspec_kw={"height_ratios": [2] * len(NAMES) + [1.3]})
    top = max((held.leased + held.objects for one in samples for held in one.nodes), default=0) / _MB * _HEADROOM or 1.0
    for number, (axes, name) in enumerate(zip(panels, NAMES, strict=False)):
        _draw_node(axes, samples, number, name, top)
        _draw_moments(axes, [one for one in moments if one.node == name], samples[-1].seconds)
    _draw_steps(panels[-1], samples)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        for moment in moments:
            axes.axvline(moment.seconds, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    panels[0].legend(loc="upper right", bbox_to_anchor=(1, 1.24), ncols=2, frameon=False, fontsize=9)
    panels[-1].set_xlim(0, samples[-1].seconds)
    panels[-1].set_xlabel("seconds of training", color=INK)
    figure.align_ylabels()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"picture {path}: cannot write it: {error.strerror}") from error


def _draw_node(axes: Axes, samples: Sequence[Sample], number: int, name: str, top: float) -> None:
    """Draw the memory that a node has in use: leased bytes, and above them bytes of objects."""
    times = [one.seconds for one in samples]
    leased = [one.nodes[number].leased / _MB for one in samples]
    both = [(one.nodes[number].leased + one.nodes[number].objects) / _MB for one in samples]
    axes.fill_between(times, leased, step="post", color=BLUE, alpha=0.75, linewidth=0, label="leased by trainer")
    axes.fill_between(
        times, leased, both, step="post", color=ORANGE, alpha=0.75, linewidth=0, label="objects of web (2 copies each)"
    )
    axes.set_ylim(0, top)
    axes.set_ylabel(f"{name}\nMB", color=INK)


def _draw_moments(axes: Axes, moments: Sequence[Moment], end: float) -> None:
    """Write the events of a node into its panel, each lower than the one before, so that no text covers another."""
    for row, moment in enumerate(moments):
        color = VERMILLION if moment.is_loss else INK
        is_late = moment.seconds > (1 - _TEXT_SHARE) * end  # its text would reach beyond the picture
        axes.annotate(
            moment.text, (moment.seconds, 1), (-4 if is_late else 4, -3 - 13 * row), fontsize=9, va="top",
            ha="right" if is_late else "left", color=color, zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            xycoords=axes.get_xaxis_transform(), textcoords="offset points",
        )  # fmt: skip
        axes.axvline(moment.seconds, color=color, linewidth=1.1, zorder=4)


def _draw_steps(axes: Axes, samples: Sequence[Sample]) -> None:
    axes.step([one.seconds for one in samples], [one.step for one in samples], where="post", color=GREEN, linewidth=1.3)
    axes.set_ylim(0)
    axes.set_ylabel("training\nsteps done", color=INK)
