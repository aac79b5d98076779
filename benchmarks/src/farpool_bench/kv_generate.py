"""KV generation: keys and values four times as large as the fast budget.

A language model generates token after token over a long context, whose keys and values are four times as large as the
budget; the rest is behind a link of a known rate. The weights are resident. The budget counts everything that
`FarpoolCache` holds in fast memory: the pool's arena, and next to it one layer's keys and values, which attention gets.

The limit of a token is the longer of two times. The first is the time to compute it with transformers' own
`DynamicCache`, all resident, while a dummy thread copies as many bytes as the link carries. The second is the time to
move the fewest bytes at the link's rate. Each token needs every key and value once, and at most as many as the budget
holds can have stayed, so the fewest bytes are the rest. The efficiency is the limit over the measured time, in steady
state.

Caches take turns, token by token. In a pool each timed token follows an untimed one at once, because
otherwise the pool could fetch, unmeasured, while the others run. All logits must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row
from farpool_bench.render import DOTTED, Grid, against_limit, new_figure, rate_text


class Bench(harness.Benchmark):
    """Each rate of the link, which is a throttled DRAM tier."""

    name = "kv-generate"
    limit = "a resident cache while as many bytes are copied, or the fewest bytes over the link"
    rivals = ("demand fetching",)
    over = "rates"
    measured_in = "kv_generate_cases"
    rounds: Annotated[int, Option("Tokens of each cache", least=1)] = 15
    rates: tuple[float, ...] = (0.5e9, 2e9)  # bytes per second of the link
    layers: int = 32
    kv_heads: int = 4
    query_heads: int = 8
    head_dim: int = 64
    context: int = 8192  # tokens whose keys and values are there before the first token is generated
    QUICK: ClassVar = {"rates": (0.5e9,), "rounds": 2, "layers": 8, "context": 512}

    def open(self) -> None:
        from farpool_bench.link import core_for_link

        self.threads = self.stack.enter_context(core_for_link("cpu"))

    def facts(self) -> dict[str, Any]:
        return {"threads": self.threads, "layers": self.layers, "context": self.context}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        title = "Limit over measured time, and how much faster farpool is"
        first, *remarks = against_limit(title, "=link {rate:rate}|farpool {efficiency:.0%}", outcome.cases)
        columns = "=link {rate:rate}|KV {kv_bytes:MB}|budget {budget_bytes:MB}|resident {resident_seconds:ms}"
        columns += "|next to copies {beside_copies_seconds:ms}|link {transfer_seconds:ms}|farpool {paged_seconds:ms}"
        columns += "|waiting {stall_seconds:ms}|bytes moved {moved:.2f}x"
        rows = [Row(case, moved=case.moved_bytes / max(1, case.fewest_bytes)) for case in outcome.cases]
        title = f"One token: {outcome.layers} layers, a context of {outcome.context} tokens, in steady state"
        return [first, Grid.of(title, columns, rows), *remarks]

    @staticmethod
    def figures(outcome: Any) -> Figures:
        result = {}
        for case in outcome.cases:
            figure, axes = new_figure("round", "milliseconds")
            limits = [max(seconds, case.transfer_seconds) * 1e3 for seconds in case.beside_copies_seconds]
            axes.plot(limits, label="limit", **DOTTED)
            axes.plot([seconds * 1e3 for seconds in case.paged_seconds], marker="o", label="farpool")
            axes.set_ylim(bottom=0)
            axes.legend(loc="lower left")
            result[f"Time of a token over a link of {rate_text(case.rate)}."] = figure
        return result
