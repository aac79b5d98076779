"""What paged tensors cost when everything is resident.

Operations: the same call in turn with plain weights, with weights in a bare wrapper subclass that only unwraps them
(torch's own way into Python), and with paged ones. Inputs are plain. A difference over the number of paged arguments is
what one of them costs.

Layers: stacks of transformer layers (pre-norm attention and MLP), plain, in bare wrappers and offloaded to a pool that
holds them whole, pass by pass in turn. The number of tokens sets how long a layer computes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from farpool.bench.measure import median_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool.bench.benchmark import Progress

__all__ = ["Layers", "Operation", "Outcome", "Settings", "figures", "run", "table"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Where it computes.
    calls : int
        Calls of an operation in a row for one sample.
    rounds : int
        Samples of each, of plain, bare and paged.
    layer_seconds : tuple of float
        How long a layer is to take with plain weights.
    layers, width : int
        Of the stack.
    """

    device: str = "cpu"
    calls: int = 200
    rounds: int = 31
    layer_seconds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.010)
    layers: int = 8
    width: int = 256

    @classmethod
    def quick(cls) -> Settings:
        """Sizes so small that a run takes seconds."""
        return cls(calls=5, rounds=3, layer_seconds=(0.0005,), layers=2, width=64)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Seconds of a call, one for each round.

    Attributes
    ----------
    paged_arguments : int
        How many of its arguments are paged.
    seconds_per_argument : float
        Median over the rounds of paged less plain, over the number of paged arguments.
    seconds_over_bare : float
        The same of paged less bare.
    """

    name: str
    paged_arguments: int
    plain: tuple[float, ...]
    bare: tuple[float, ...]
    paged: tuple[float, ...]
    seconds_per_argument: float
    seconds_over_bare: float

    @classmethod
    def of(
        cls, name: str, arguments: int, plain: tuple[float, ...], bare: tuple[float, ...], paged: tuple[float, ...]
    ) -> Operation:
        """An operation from its samples."""
        over_plain, over_bare = (
            statistics.median(theirs - ours for ours, theirs in zip(other, paged, strict=True)) / arguments
            for other in (plain, bare)
        )
        return cls(name, arguments, plain, bare, paged, over_plain, over_bare)


@dataclass(frozen=True, slots=True)
class Layers:
    """A stack of layers. Seconds of a pass, one for each round.

    Attributes
    ----------
    layer_seconds : float
        Seconds of one layer with plain weights: median.
    tokens : int
        In each pass.
    equal : bool
        Whether paged gave the same bits as plain.
    ratio : float
        Paged over plain: median over the rounds.
    ratio_to_bare : float
        Paged over bare, likewise.
    """

    layer_seconds: float
    tokens: int
    layers: int
    width: int
    equal: bool
    plain: tuple[float, ...]
    bare: tuple[float, ...]
    paged: tuple[float, ...]
    ratio: float
    ratio_to_bare: float

    @classmethod
    def of(
        cls,
        tokens: int,
        layers: int,
        width: int,
        equal: bool,
        plain: tuple[float, ...],
        bare: tuple[float, ...],
        paged: tuple[float, ...],
    ) -> Layers:
        """A stack from its samples."""
        each = statistics.median(plain) / layers
        ratios = median_ratio(paged, plain), median_ratio(paged, bare)
        return cls(each, tokens, layers, width, equal, plain, bare, paged, *ratios)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    threads : int
        With which torch computes.
    """

    device: str
    threads: int
    operations: tuple[Operation, ...]
    layers: tuple[Layers, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure.

    Raises
    ------
    ConfigError
        The device is not there or has too little memory.
    """
    import torch

    from farpool.bench.resident import measure_layers, measure_operations

    operations = measure_operations(settings.device, settings.calls, settings.rounds, progress)
    layers = tuple(
        measure_layers(settings.device, seconds, settings.layers, settings.width, settings.rounds, progress)
        for seconds in settings.layer_seconds
    )
    return Outcome(settings.device, torch.get_num_threads(), operations, layers)


def table(outcome: Outcome) -> Group:
    """Operations, then layers."""
    operations = Table(title="One call, everything resident: median, in microseconds")
    operations.add_column("operation")
    for name in ("plain", "bare", "paged", "paged arguments", "for each", "over bare"):
        operations.add_column(name, justify="right")
    for item in outcome.operations:
        operations.add_row(
            item.name,
            f"{statistics.median(item.plain) * 1e6:.1f}",
            f"{statistics.median(item.bare) * 1e6:.1f}",
            f"{statistics.median(item.paged) * 1e6:.1f}",
            str(item.paged_arguments),
            f"{item.seconds_per_argument * 1e6:.1f}",
            f"{item.seconds_over_bare * 1e6:.1f}",
        )
    layers = Table(title="A stack of transformer layers, everything resident")
    for name in (
        "plain, ms a layer",
        "paged, ms a layer",
        "paged / plain",
        "paged / bare",
        "layers",
        "width",
        "tokens",
        "same bits",
    ):
        layers.add_column(name, justify="right")
    for stack in outcome.layers:
        layers.add_row(
            f"{stack.layer_seconds * 1e3:.2f}",
            f"{statistics.median(stack.paged) / stack.layers * 1e3:.2f}",
            f"{stack.ratio:.3f}",
            f"{stack.ratio_to_bare:.3f}",
            str(stack.layers),
            str(stack.width),
            str(stack.tokens),
            "yes" if stack.equal else "NO",
        )
    return Group(operations, layers, Text(f"{outcome.device}, torch with {outcome.threads} threads"))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Cost of an argument by operation; ratio by the time of a layer."""
    from farpool.bench.figures import COLOURS, INK, new_figure

    bars, axes = new_figure("microseconds for each paged argument", "")
    names = [operation.name for operation in outcome.operations]
    axes.barh(names, [item.seconds_per_argument * 1e6 for item in outcome.operations], color=COLOURS[0], height=0.55)
    axes.invert_yaxis()
    curve, axes = new_figure("milliseconds of a layer with plain weights", "paged over plain")
    times = [stack.layer_seconds * 1e3 for stack in outcome.layers]
    for time, stack in zip(times, outcome.layers, strict=True):
        ratios = [paged / plain for plain, paged in zip(stack.plain, stack.paged, strict=True)]
        axes.plot([time] * len(ratios), ratios, ".", color=INK, alpha=0.35, markersize=3)
    axes.plot(times, [stack.ratio for stack in outcome.layers], "o-", color=COLOURS[0])
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.set_xlim(left=0)
    return {
        "Bookkeeping for one paged argument: median over the rounds.": bars,
        "Passes through a stack of layers: median (line) and each round (dots); 1 is no cost.": curve,
    }
