"""Overhead of paged tensors over plain ones with everything resident, and of picking rows of a large table.

Operations: the same call in turn with plain weights, with weights in a bare wrapper subclass that only unwraps them
(torch's own way into Python), and with paged ones. Inputs are plain. A difference over the number of paged arguments is
the cost of one of them.

Layers: stacks of transformer layers (pre-norm attention and MLP), plain, in bare wrappers and offloaded to a pool that
holds them whole, pass by pass in turn. The number of tokens sets how long a layer computes.

Training: steps of small linear layers with fused AdamW, plain and in such a pool, in turn.

Rows: rows of 16 KiB of a table ten times as large as the fast tier, picked at random, in front of a DRAM tier; compared
with ``index_select`` from a plain table, which has nothing to move.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row
from farpool_bench.render import COLOURS, INK, Grid, new_figure


class Bench(harness.Benchmark):
    """Operations, layers, training steps and random rows."""

    name = "overhead"
    limit = "the same calls with plain tensors"
    rivals = ("a bare tensor subclass",)
    parts = ("operations", "layers", "training", "rows")
    measured_in = "resident"
    rounds: Annotated[int, Option("Samples of each", least=1)] = 31
    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    calls: int = 200  # of an operation in a row for one sample
    layer_seconds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.010)  # that a layer should take with plain weights
    layers: int = 8  # of the stack
    width: int = 256
    table_rows: int = 32_768  # 16 KiB each, of which some are picked at random
    picked: tuple[int, ...] = (256, 1024)  # rows in a call
    QUICK: ClassVar = {
        "calls": 5,
        "rounds": 3,
        "layer_seconds": (0.0005,),
        "layers": 2,
        "width": 64,
        "table_rows": 512,
        "picked": (16,),
    }

    def facts(self) -> dict[str, Any]:
        import torch

        return {"device": self.device, "threads": torch.get_num_threads()}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "<operation {name}|plain {plain:1e6*.1f}|bare {bare:1e6*.1f}|paged {paged:1e6*.1f}"
        columns += "|paged arguments {paged_arguments}|for each {seconds_per_argument:1e6*.1f}"
        columns += "|over bare {seconds_over_bare:1e6*.1f}"
        yield Grid.of("One call, everything resident: median, in microseconds", columns, outcome.operations)
        columns = "plain, ms a layer {layer_seconds:1e3*.2f}|paged, ms a layer {paged_layer:1e3*.2f}"
        columns += "|paged / plain {ratio:.3f}|paged / bare {ratio_to_bare:.3f}|layers {layers}|width {width}"
        columns += "|tokens {tokens}|same bits {equal:yes}"
        rows = [Row(one, paged_layer=statistics.median(one.paged) / one.layers) for one in outcome.layers]
        yield Grid.of("A stack of transformer layers, everything resident", columns, rows)
        if (training := outcome.get("training")) is not None:
            columns = "parameters {parameters}|plain, ms {plain:1e3*.2f}|paged, ms {paged:1e3*.2f}"
            columns += "|µs more for each parameter {seconds_per_parameter:1e6*.0f}|same bits {equal:yes}"
            title = "A training step of small linear layers, fused AdamW, everything resident: medians"
            yield Grid.of(title, columns, [training])
        if outcome.get("rows"):
            columns = "rows a call {picked}|KiB a row {kib}|GB/s {bytes_per_second:1e-9*.2f}"
            columns += "|µs of the thread a row {thread_seconds_per_row:1e6*.1f}|index_select, GB/s {plain:1e-9*.2f}"
            rows = [
                Row(
                    one, kib=one.row_bytes >> 10, plain=one.picked * one.row_bytes / statistics.median(one.index_select)
                )
                for one in outcome.rows
            ]
            title = "Random rows of a table ten times as large as the budget: medians"
            yield Grid.of(title, columns + "|same bits {equal:yes}", rows)
        yield f"{outcome.device}, torch with {outcome.threads} threads"

    @staticmethod
    def figures(outcome: Any) -> Figures:
        bars, axes = new_figure("microseconds for each paged argument", "")
        costs = {one.name: one.seconds_per_argument * 1e6 for one in outcome.operations}
        axes.barh(list(costs), list(costs.values()), color=COLOURS[0], height=0.55)
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
