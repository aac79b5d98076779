"""Streaming: a model four times as large as the fast tier.

A stack of transformer blocks runs forward with a quarter of its weights resident; the rest is behind a link of a known
rate. The limit of a pass is the longer of two times. The first is the time of the same pass with everything resident;
on the CPU a dummy thread copies the same number of bytes during it, because copies take memory bandwidth from
computing. The second is the time to move, at the link's rate, the fewest bytes that any pool with this budget could
move (Belady: the block that is needed last leaves first). The efficiency is the limit over the measured time, in steady
state.

Passes run in turn: everything resident, in the pool, and with the rivals. In the pool each timed pass follows an
untimed one at once, because otherwise the pool could fetch, unmeasured, while the others run. All outputs must
be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import Grid, against_limit, by_group, by_ratio, megabytes, milliseconds, rate_text, times
from farpool_bench.strip import draw_strip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes; on the CPU the link is a throttled DRAM tier, on a GPU it is the one between host and device."""

    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    rates: tuple[float, ...] = (0.5e9, 2e9)  # bytes per second of the throttled link
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # time on the link over time to compute
    rounds: Annotated[int, Option("Passes of each", least=1)] = 15
    layers: int = 32  # transformer blocks at most; a multiple of 4
    layer_seconds: float = 0.010  # for which a block computes at least
    weight_bytes: int = 1_600_000_000  # of the weights at most
    gpu_share: int = 8  # on a GPU the weights take at most this fraction of its memory, which holds them up to 3 times
    QUICK: ClassVar = {
        "rates": (0.5e9,),
        "ratios": (1.0,),
        "rounds": 1,
        "layers": 4,
        "layer_seconds": 0.001,
        "gpu_share": 128,
    }


class Bench(harness.Benchmark):
    """Each rate of the link with each ratio of transfer to compute."""

    name = "streaming"
    limit = "computing while as many bytes are copied, or the fewest bytes over the link, whichever takes longer"
    rivals = ("demand fetching", "accelerate")
    Settings = Settings

    def open(self) -> None:
        from farpool_bench.link import core_for_link

        self.threads = self.stack.enter_context(core_for_link(self.settings.device))

    def cases(self) -> Iterable[tuple[float | None, float]]:
        rates = (None,) if self.settings.device == "cuda" else self.settings.rates
        return [(rate, ratio) for rate in rates for ratio in self.settings.ratios]

    def measure(self, case: tuple[float | None, float]) -> Row:
        from farpool_bench.streaming_cases import measure_case

        rate, ratio = case
        link = f"{rate_text(rate)}, " if rate else ""
        return measure_case(self.settings, rate, ratio, f"{link}transfer {ratio:g}x compute", self.progress)

    def outcome(self, found: list[Row]) -> Row:
        return Row(device=self.settings.device, threads=self.threads, cases=tuple(found))

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        title = "Limit over measured time, and how much faster farpool is"
        first, *remarks = against_limit(
            title,
            "=link|transfer / compute|farpool|first pass",
            outcome.cases,
            lambda case: [
                rate_text(case.rate),
                f"{case.ratio:.2f}",
                f"{case.efficiency:.0%}",
                f"{case.first_efficiency:.0%}",
            ],
        )
        heads = "<link|<model|<tokens|resident|farpool|waiting|fewest bytes|bytes moved"
        rows = [
            [
                rate_text(case.rate),
                f"{case.layers} x {case.width}, {megabytes(case.weight_bytes)}",
                str(case.tokens),
                milliseconds(case.resident_seconds),
                milliseconds(case.paged_seconds),
                milliseconds([case.stall_seconds]),
                megabytes(case.fewest_bytes),
                times(case.moved_bytes, case.fewest_bytes),
            ]
            for case in outcome.cases
        ]
        return [first, Grid("One pass, in steady state", heads, rows), *remarks]

    @staticmethod
    def figures(outcome: Any) -> dict[str, Figure]:
        result = {}
        for rate, cases in by_group(outcome.cases, lambda case: case.rate).items():
            result[f"Efficiency over a link of {rate_text(rate)}; 1 is the limit."] = by_ratio(cases, rivals=True)
            middle = cases[len(cases) // 2]
            about = f"{rate_text(rate)} with {middle.ratio:.2g} times as much transfer as compute"
            result[f"Two passes over a link of {about}."] = draw_strip(middle.strip)
        return result
