"""Streaming: a model four times as large as the fast tier.

A stack of transformer blocks runs forward with a quarter of its weights resident; the rest lies behind a link of a
known rate. The limit of a pass is the longer of two times: that of the same pass with everything resident (on the CPU,
where copies take memory bandwidth from what computes, beside as many copies for nobody), and that of the fewest bytes
that any pool with this budget could move (Belady: what is needed last leaves first) at the link's rate. The efficiency
is the limit over the measured time, in steady state.

Passes run in turn: everything resident, in the pool, and with what one would use otherwise. In the pool each timed pass
follows an untimed one at once, because while the others run the pool could fetch for nothing. All outputs
must be equal bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Group, RenderableType

from farpool.observe.tables import Table
from farpool_bench.benchmark import Progress, check_device
from farpool_bench.figures import INK, new_figure
from farpool_bench.streaming_outcome import Case, Outcome, Settings
from farpool_bench.strip import draw_strip
from farpool_bench.text import milliseconds, peer_cells, rate_text, remarks

__all__ = ["Case", "Outcome", "Settings", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each case: each rate of the link with each ratio of transfer to compute.

    Raises
    ------
    ConfigError
        There is no such device.
    RuntimeError
        Outputs differ from those of the resident model.
    """
    check_device(settings.device)
    from farpool_bench.link import core_for_link
    from farpool_bench.streaming_cases import measure_case

    rates: tuple[float | None, ...] = (None,) if settings.device == "cuda" else settings.rates
    cases = []
    for rate in rates:
        for ratio in settings.ratios:
            name = f"{rate_text(rate)}, transfer {ratio:g}x compute" if rate else f"transfer {ratio:g}x compute"

            def told(done: int, total: int, name: str = name) -> None:
                progress(name, done, total)

            told(0, settings.rounds)
            with core_for_link(settings.device) as threads:
                cases.append(measure_case(settings, rate, ratio, told))
    return Outcome(settings.device, threads, tuple(cases))


def table(outcome: Outcome) -> RenderableType:
    """Tables of efficiencies, and of the times and bytes behind them."""
    return Group(_efficiencies(outcome), _details(outcome), *remarks(outcome.cases[0].peers))


def _efficiencies(outcome: Outcome) -> Table:
    result = Table("Limit over measured time, and how much faster farpool is")
    result.add_names("link")
    result.add_figures("transfer / compute", "farpool", "first pass")
    for peer in outcome.cases[0].peers:
        result.add_figures(peer.name)
        result.add_figures("farpool is")
    for case in outcome.cases:
        cells = [rate_text(case.rate), f"{case.ratio:.2f}", f"{case.efficiency:.0%}", f"{case.first_efficiency:.0%}"]
        for peer in case.peers:
            cells += peer_cells(peer)
        result.add_row(*cells)
    return result


def _details(outcome: Outcome) -> Table:
    result = Table("One pass, in steady state")
    result.add_texts("link", "model", "tokens")
    result.add_figures("resident", "farpool", "waiting", "fewest bytes", "bytes moved")
    for case in outcome.cases:
        result.add_row(
            rate_text(case.rate),
            f"{case.layers} x {case.width}, {case.weight_bytes / 1e6:.0f} MB",
            str(case.tokens),
            milliseconds(case.resident_seconds),
            milliseconds(case.paged_seconds),
            f"{case.stall_seconds * 1e3:.0f} ms",
            f"{case.fewest_bytes / 1e6:.0f} MB",
            f"{case.moved_bytes / case.fewest_bytes:.2f}x",
        )
    return result


def figures(outcome: Outcome) -> dict[str, Any]:
    """Figures of efficiency by ratio, and of two passes of the middle case, for each rate."""
    by_rate: dict[float, list[Case]] = defaultdict(list)
    for case in outcome.cases:
        by_rate[case.rate].append(case)
    result: dict[str, Any] = {}
    for rate, cases in by_rate.items():
        result[f"Efficiency over a link of {rate_text(rate)}; 1 is the limit."] = _by_ratio(cases)
        middle = cases[len(cases) // 2]
        caption = (
            f"Two passes over a link of {rate_text(rate)} with {middle.ratio:.2g} times as much transfer as compute."
        )
        result[caption] = draw_strip(middle.strip)
    return result


def _by_ratio(cases: list[Case]) -> Any:
    figure, axes = new_figure("time on the link / time to compute", "limit / measured")
    ratios = [case.wanted for case in cases]
    axes.plot(ratios, [case.efficiency for case in cases], marker="o", label="farpool")
    for number, peer in enumerate(cases[0].peers):
        efficiencies = [case.peers[number].efficiency or 0.0 for case in cases]
        if peer.efficiency is not None:
            axes.plot(ratios, efficiencies, marker="o", label=peer.name)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.legend(loc="lower left")
    return figure
