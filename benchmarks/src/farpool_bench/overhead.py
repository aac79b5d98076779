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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import COLOURS, INK, Grid, new_figure, yes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes of a run."""

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


class Bench(harness.Benchmark):
    """Operations, layers, training steps and random rows."""

    name = "overhead"
    limit = "the same calls with plain tensors"
    rivals = ("a bare tensor subclass",)
    Settings = Settings

    def cases(self) -> Iterable[str]:
        return ("operations", "layers", "training", "rows")

    def measure(self, case: str) -> Any:
        from farpool_bench import resident

        settings = self.settings
        match case:
            case "operations":
                return resident.measure_operations(settings, self.progress)
            case "layers":
                return tuple(resident.measure_layers(settings, one, self.progress) for one in settings.layer_seconds)
            case "training":
                return resident.measure_training(settings, self.progress)
        return tuple(resident.measure_rows(settings, picked, self.progress) for picked in settings.picked)

    def outcome(self, found: list[Any]) -> Row:
        import torch

        facts = {"device": self.settings.device, "threads": torch.get_num_threads()}
        return Row(**facts, **dict(zip(self.cases(), found, strict=True)))

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        rows = [
            [
                one.name,
                *(f"{statistics.median(samples) * 1e6:.1f}" for samples in (one.plain, one.bare, one.paged)),
                str(one.paged_arguments),
                f"{one.seconds_per_argument * 1e6:.1f}",
                f"{one.seconds_over_bare * 1e6:.1f}",
            ]
            for one in outcome.operations
        ]
        heads = "<operation|plain|bare|paged|paged arguments|for each|over bare"
        yield Grid("One call, everything resident: median, in microseconds", heads, rows)
        rows = [
            [
                f"{one.layer_seconds * 1e3:.2f}",
                f"{statistics.median(one.paged) / one.layers * 1e3:.2f}",
                f"{one.ratio:.3f}",
                f"{one.ratio_to_bare:.3f}",
                *map(str, (one.layers, one.width, one.tokens)),
                yes(one.equal),
            ]
            for one in outcome.layers
        ]
        heads = "plain, ms a layer|paged, ms a layer|paged / plain|paged / bare|layers|width|tokens|same bits"
        yield Grid("A stack of transformer layers, everything resident", heads, rows)
        if (training := outcome.get("training")) is not None:
            seconds = [f"{statistics.median(samples) * 1e3:.2f}" for samples in (training.plain, training.paged)]
            more = f"{training.seconds_per_parameter * 1e6:.0f}"
            rows = [[str(training.parameters), *seconds, more, yes(training.equal)]]
            heads = "parameters|plain, ms|paged, ms|µs more for each parameter|same bits"
            title = "A training step of small linear layers, fused AdamW, everything resident: medians"
            yield Grid(title, heads, rows)
        if outcome.get("rows"):
            rows = [
                [
                    str(one.picked),
                    str(one.row_bytes >> 10),
                    f"{one.bytes_per_second / 1e9:.2f}",
                    f"{one.thread_seconds_per_row * 1e6:.1f}",
                    f"{one.picked * one.row_bytes / statistics.median(one.index_select) / 1e9:.2f}",
                    yes(one.equal),
                ]
                for one in outcome.rows
            ]
            heads = "rows a call|KiB a row|GB/s|µs of the thread a row|index_select, GB/s|same bits"
            yield Grid("Random rows of a table ten times as large as the budget: medians", heads, rows)
        yield f"{outcome.device}, torch with {outcome.threads} threads"

    @staticmethod
    def figures(outcome: Any) -> dict[str, Figure]:
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
