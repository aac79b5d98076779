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
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row
from farpool_bench.render import Grid, against_limit, by_group, by_ratio, draw_strip, rate_text


class Bench(harness.Benchmark):
    """Each rate of the link with each ratio of transfer to compute.

    On the CPU the link is a throttled DRAM tier, on a GPU it is the one between host and device.
    """

    name = "streaming"
    limit = "computing while as many bytes are copied, or the fewest bytes over the link, whichever takes longer"
    rivals = ("demand fetching", "accelerate")
    measured_in = "streaming_cases"
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

    def open(self) -> None:
        from farpool_bench.link import core_for_link

        self.threads = self.stack.enter_context(core_for_link(self.device))

    def cases(self) -> Iterable[tuple[float | None, float]]:
        rates = (None,) if self.device == "cuda" else self.rates
        return [(rate, ratio) for rate in rates for ratio in self.ratios]

    def facts(self) -> dict[str, Any]:
        return {"device": self.device, "threads": self.threads}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        own = "=link {rate:rate}|transfer / compute {ratio:.2f}|farpool {efficiency:.0%}"
        own += "|first pass {first_efficiency:.0%}"
        first, *remarks = against_limit("Limit over measured time, and how much faster farpool is", own, outcome.cases)
        columns = "<link {rate:rate}|<model {layers} x {width}, {weight_bytes:MB}|<tokens {tokens}|"
        columns += "resident {resident_seconds:ms}|farpool {paged_seconds:ms}|waiting {stall_seconds:ms}|"
        columns += "fewest bytes {fewest_bytes:MB}|bytes moved {moved:.2f}x"
        rows = [Row(case, moved=case.moved_bytes / max(1, case.fewest_bytes)) for case in outcome.cases]
        return [first, Grid.of("One pass, in steady state", columns, rows), *remarks]

    @staticmethod
    def figures(outcome: Any) -> Figures:
        result = {}
        for rate, cases in by_group(outcome.cases, lambda case: case.rate).items():
            result[f"Efficiency over a link of {rate_text(rate)}; 1 is the limit."] = by_ratio(cases, rivals=True)
            middle = cases[len(cases) // 2]
            about = f"{rate_text(rate)} with {middle.ratio:.2g} times as much transfer as compute"
            result[f"Two passes over a link of {about}."] = draw_strip(middle.strip)
        return result
