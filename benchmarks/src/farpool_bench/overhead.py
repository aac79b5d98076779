"""Overhead of paged tensors over plain ones with everything resident, and of picking rows of a large table.

Operations: the same call in turn with plain weights, with weights in a bare wrapper subclass that only unwraps them
(torch's own way into Python), and with paged ones. Inputs are plain. A difference over the number of paged arguments is
what one of them costs.

Layers: stacks of transformer layers (pre-norm attention and MLP), plain, in bare wrappers and offloaded to a pool that
holds them whole, pass by pass in turn. The number of tokens sets how long a layer computes.

Training: steps of small linear layers with fused AdamW, plain and in such a pool, in turn.

Rows: rows of 16 KiB of a table ten times as large as the fast tier, picked at random, behind a DRAM tier; beside
``index_select`` from a plain table, which has nothing to move.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool.observe.tables import Table
from farpool_bench.overhead_outcome import Layers, Operation, Outcome, Rows, Settings, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Layers", "Operation", "Outcome", "Rows", "Settings", "Training", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure operations, layers, training steps and random rows.

    Raises
    ------
    ConfigError
        The device is not there or has too little memory.
    """
    import torch

    from farpool_bench.random_rows import measure_rows
    from farpool_bench.resident import measure_layers, measure_operations, measure_training

    operations = measure_operations(settings.device, settings.calls, settings.rounds, progress)
    layers = tuple(
        measure_layers(settings.device, seconds, settings.layers, settings.width, settings.rounds, progress)
        for seconds in settings.layer_seconds
    )
    training = measure_training(settings.device, settings.rounds, progress)
    rows = tuple(measure_rows(settings.device, settings.table_rows, picked, progress) for picked in settings.picked)
    return Outcome(settings.device, torch.get_num_threads(), operations, layers, training, rows)


def table(outcome: Outcome) -> Group:
    """Tables of operations and layers, then of training and rows where these were measured."""
    operations = Table("One call, everything resident: median, in microseconds")
    operations.add_texts("operation")
    operations.add_figures("plain", "bare", "paged", "paged arguments", "for each", "over bare")
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
    layers = Table("A stack of transformer layers, everything resident")
    layers.add_figures(
        "plain, ms a layer",
        "paged, ms a layer",
        "paged / plain",
        "paged / bare",
        "layers",
        "width",
        "tokens",
        "same bits",
    )
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
    parts: list[Table | Text] = [operations, layers]
    if outcome.training is not None:
        parts.append(_training(outcome.training))
    if outcome.rows:
        parts.append(_rows(outcome.rows))
    return Group(*parts, Text(f"{outcome.device}, torch with {outcome.threads} threads"))


def _training(training: Training) -> Table:
    result = Table("A training step of small linear layers, fused AdamW, everything resident: medians")
    result.add_figures("parameters", "plain, ms", "paged, ms", "µs more for each parameter", "same bits")
    result.add_row(
        str(training.parameters),
        f"{statistics.median(training.plain) * 1e3:.2f}",
        f"{statistics.median(training.paged) * 1e3:.2f}",
        f"{training.seconds_per_parameter * 1e6:.0f}",
        "yes" if training.equal else "NO",
    )
    return result


def _rows(rows: tuple[Rows, ...]) -> Table:
    result = Table("Random rows of a table ten times as large as the budget: medians")
    result.add_figures("rows a call", "KiB a row", "GB/s", "µs of the thread a row", "index_select, GB/s", "same bits")
    for one in rows:
        result.add_row(
            str(one.picked),
            str(one.row_bytes >> 10),
            f"{one.bytes_per_second / 1e9:.2f}",
            f"{one.thread_seconds_per_row * 1e6:.1f}",
            f"{one.picked * one.row_bytes / statistics.median(one.index_select) / 1e9:.2f}",
            "yes" if one.equal else "NO",
        )
    return result


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Figures of the cost of a paged argument by operation, and of the ratio by the time of a layer."""
    from farpool_bench.figures import COLOURS, INK, new_figure

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
