"""KV generation: keys and values four times as large as the fast budget.

A language model generates token after token over a long context, whose keys and values are four times as large as the
budget; the rest lies behind a link of a known rate. The weights are resident. The budget counts everything that
`FarpoolCache` holds in fast memory: the pool's arena, and beside it one layer's keys and values, which attention is
given.

The limit of a token is the longer of two times: that of computing it with transformers' own `DynamicCache`, all
resident, beside as many copies for nobody as the link carries, and that of the fewest bytes at the link's rate. Each
token needs every key and value once and no more than the budget can have stayed, so the fewest bytes are what does not
fit. The efficiency is the limit over the measured time, in steady state.

Caches take turns, token by token. In a pool each timed token follows an untimed one at once, because while the others
run the pool could fetch for nothing. All logits must be equal bit for bit.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from farpool.errors import ConfigError
from farpool.observe.tables import Table
from farpool_bench.benchmark import Progress, check_device
from farpool_bench.figures import INK, new_figure
from farpool_bench.kv_generate_outcome import Case, Outcome, Settings
from farpool_bench.text import milliseconds, peer_cells, rate_text, remarks

__all__ = ["Case", "Outcome", "Settings", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each rate of the link.

    Raises
    ------
    ConfigError
        The device is not the CPU.
    RuntimeError
        Logits differ from those of the resident cache.
    """
    check_device(settings.device)
    if settings.device != "cpu":
        raise ConfigError(f"device: {settings.device!r}; kv-generate measures a throttled link on the CPU only")
    from farpool_bench.kv_generate_cases import measure_case
    from farpool_bench.link import core_for_link

    cases = []
    for rate in settings.rates:

        def told(done: int, rate: float = rate) -> None:
            progress(rate_text(rate), done, settings.rounds)

        with core_for_link("cpu") as threads:
            cases.append(measure_case(settings, rate, told))
    return Outcome(threads, settings.layers, settings.context, tuple(cases))


def table(outcome: Outcome) -> RenderableType:
    """Tables of efficiencies, and of the times and bytes behind them."""
    return Group(_efficiencies(outcome), _details(outcome), *remarks(outcome.cases[0].peers))


def _efficiencies(outcome: Outcome) -> Table:
    result = Table("Limit over measured time, and how much faster farpool is")
    result.add_names("link")
    result.add_figures("farpool")
    for peer in outcome.cases[0].peers:
        result.add_figures(peer.name)
        result.add_figures("farpool is")
    for case in outcome.cases:
        cells = [rate_text(case.rate), f"{case.efficiency:.0%}"]
        for peer in case.peers:
            cells += peer_cells(peer)
        result.add_row(*cells)
    return result


def _details(outcome: Outcome) -> Table:
    result = Table(f"One token: {outcome.layers} layers, a context of {outcome.context} tokens, in steady state")
    result.add_names("link")
    result.add_figures("KV", "budget", "resident", "beside copies", "link", "farpool", "waiting", "bytes moved")
    for case in outcome.cases:
        result.add_row(
            rate_text(case.rate),
            f"{case.kv_bytes / 1e6:.0f} MB",
            f"{case.budget_bytes / 1e6:.0f} MB",
            milliseconds(case.resident_seconds),
            milliseconds(case.beside_copies_seconds),
            f"{case.transfer_seconds * 1e3:.0f} ms",
            milliseconds(case.paged_seconds),
            f"{case.stall_seconds * 1e3:.0f} ms",
            f"{case.moved_bytes / case.fewest_bytes:.2f}x",
        )
    return result


def figures(outcome: Outcome) -> dict[str, Any]:
    """A figure of the time of each token beside its limit, for each rate."""
    result: dict[str, Any] = {}
    for case in outcome.cases:
        figure, axes = new_figure("round", "milliseconds")
        limits = [max(seconds, case.transfer_seconds) * 1e3 for seconds in case.beside_copies_seconds]
        axes.plot(limits, color=INK, linestyle=(0, (1, 2)), label="limit")
        axes.plot([seconds * 1e3 for seconds in case.paged_seconds], marker="o", label="farpool")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left")
        result[f"Time of a token over a link of {rate_text(case.rate)}."] = figure
    return result
