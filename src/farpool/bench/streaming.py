"""Streaming: a model four times as large as the fast tier.

A stack of transformer blocks runs forward with a quarter of its weights resident; the rest lies behind a link of a
known rate. The limit of a pass is the longer of two times: that of the same pass with everything resident, and that of
the fewest bytes that any pool with this budget could move (Belady: what is needed last leaves first) at the
link's rate. The efficiency is the limit over the measured time, in steady state.

Passes run in turn: everything resident, in the pool, and with what one would use otherwise. In the pool each timed pass
follows an untimed one at once, because while the others run the pool could fetch for nothing. All outputs
must be equal bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from farpool.bench.benchmark import Progress, check_device
from farpool.bench.figures import INK, new_figure
from farpool.bench.peer import Peer
from farpool.bench.strip import Strip, draw_strip
from farpool.bench.text import milliseconds, peer_cells, rate_text, remarks

__all__ = ["Case", "Outcome", "Settings", "figures", "run", "table"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    device : str
        ``cpu``: the link is a throttled DRAM tier. ``cuda``: the link between host and device as it is.
    rates : tuple of float
        Bytes per second of the throttled link.
    ratios : tuple of float
        Time on the link over time to compute.
    rounds : int
        Timed passes of each.
    layers : int
        Transformer blocks at most; a multiple of 4.
    layer_seconds : float
        Seconds for which a block computes at least.
    weight_bytes : int
        Bytes of the weights at most.
    gpu_share : int
        On a GPU the weights take at most this fraction of its memory instead: it holds them up to three times.
    """

    device: str = "cpu"
    rates: tuple[float, ...] = (0.5e9, 2e9)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    rounds: int = 7
    layers: int = 32
    layer_seconds: float = 0.010
    weight_bytes: int = 640_000_000
    gpu_share: int = 8

    @classmethod
    def quick(cls) -> Settings:
        """Sizes so small that a run takes seconds."""
        return cls(rates=(0.5e9,), ratios=(1.0,), rounds=1, layers=4, layer_seconds=0.001, gpu_share=128)


@dataclass(frozen=True, slots=True)
class Case:
    """One rate of the link and one amount of compute.

    Attributes
    ----------
    rate : float
        Bytes per second of the link.
    wanted, ratio : float
        Time on the link over time to compute: as asked for, and as it came out.
    tokens : int
        Of the sequence that runs through the blocks.
    fewest_bytes, moved_bytes : int
        That a pass has to bring in (Belady), and that it brought in (median).
    transfer_seconds : float
        The fewest bytes over the rate.
    resident_seconds, paged_seconds : tuple of float
        Of each round.
    stall_seconds : float
        Seconds of a pass for which ops waited (median).
    efficiency, first_efficiency : float
        Limit over measured time: median over the rounds, and for the very first pass.
    strip : Strip
        Two passes in a row.
    prefetches_used, prefetches_wasted : int
        Blocks fetched ahead since the pool was made that were accessed, and that left without; None in results from
        before this was counted.
    """

    rate: float
    wanted: float
    ratio: float
    layers: int
    width: int
    tokens: int
    weight_bytes: int
    budget_bytes: int
    peak_bytes: int
    fewest_bytes: int
    moved_bytes: int
    transfer_seconds: float
    resident_seconds: tuple[float, ...]
    paged_seconds: tuple[float, ...]
    stall_seconds: float
    efficiency: float
    first_efficiency: float
    equal: bool
    peers: tuple[Peer, ...]
    strip: Strip
    prefetches_used: int | None = None
    prefetches_wasted: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out, case by case."""

    device: str
    threads: int
    """With which everything computed: on the CPU the link has a core of its own."""
    cases: tuple[Case, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each case.

    Raises
    ------
    ConfigError
        There is no such device.
    RuntimeError
        Outputs differ from those of the resident model.
    """
    check_device(settings.device)
    from farpool.bench.link import core_for_link
    from farpool.bench.streaming_cases import measure_case

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
    """One table of efficiencies, one of what lies behind them."""
    return Group(_efficiencies(outcome), _details(outcome), *remarks(outcome.cases[0].peers))


def _efficiencies(outcome: Outcome) -> Table:
    result = Table(title="Limit over measured time, and how much faster farpool is")
    result.add_column("link", no_wrap=True)
    for name in ("transfer / compute", "farpool", "first pass"):
        result.add_column(name, justify="right")
    for peer in outcome.cases[0].peers:
        result.add_column(peer.name, justify="right")
        result.add_column("farpool is", justify="right")
    for case in outcome.cases:
        cells = [rate_text(case.rate), f"{case.ratio:.2f}", f"{case.efficiency:.0%}", f"{case.first_efficiency:.0%}"]
        for peer in case.peers:
            cells += peer_cells(peer)
        result.add_row(*cells)
    return result


def _details(outcome: Outcome) -> Table:
    result = Table(title="One pass, in steady state")
    for name in ("link", "model", "tokens"):
        result.add_column(name)
    for name in ("resident", "farpool", "waiting", "fewest bytes", "bytes moved"):
        result.add_column(name, justify="right")
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
    """Efficiency by ratio for each rate, and two passes of the case in the middle."""
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
