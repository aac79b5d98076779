"""Training: weights, gradients and moments six times as large as the fast tier.

A stack of transformer blocks is trained with AdamW as it comes with PyTorch, all of its state behind a link of a known
rate in each direction. The limit of a step is the longest of three times: that of the same step with everything
resident, and those of the fewest bytes that any pool with this budget could read and write (Belady: what is needed last
leaves first) at the link's rates. The efficiency is the limit over the measured time, in steady state.

The phases of a step need the link in different measure: forward and backward compute much and move little, the
optimizer the other way round. So that limit can only be reached where one of the times is much the longer, or where the
budget lets bytes be moved in one phase for the other. The limit by phases is the sum of the limits of forward,
backward and optimizer, each with the bytes that it needs moved itself.

The same is measured with `farpool.step_in_backward`, which steps each parameter as soon as its gradient is whole: fewer
bytes have to move, and they move while gradients are computed.

Steps run in turn, resident and in the pool; each timed step follows an untimed one at once, because while the
other runs the pool could move bytes for nothing. All losses must be equal bit for bit.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from farpool.observe.tables import Table
from farpool_bench.benchmark import Progress, check_device
from farpool_bench.figures import INK, new_figure
from farpool_bench.strip import draw_strip
from farpool_bench.text import milliseconds, peer_cells, rate_text, remarks
from farpool_bench.training_outcome import Case, Outcome, Phase, Settings

__all__ = ["Case", "Outcome", "Phase", "Settings", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each case, that is, each ratio of transfer to compute.

    Raises
    ------
    ConfigError
        There is no such device.
    RuntimeError
        A loss differs from that of the resident model.
    """
    check_device(settings.device)
    from farpool_bench.link import core_for_link
    from farpool_bench.training_cases import fewest_of, link_of, measure_case, shape_of

    rate = link_of(settings)
    progress("Fewest bytes", 0, 2)
    fewest = fewest_of(settings)
    progress("Fewest bytes", 1, 2)
    fewest_in_backward = fewest_of(settings, in_backward=True)
    progress("Fewest bytes", 2, 2)
    cases = []
    for ratio in settings.ratios:

        def told(done: int, total: int, name: str = f"Transfer {ratio:g}x compute") -> None:
            progress(name, done, total)

        told(0, settings.rounds)
        with core_for_link(settings.device) as threads:
            cases.append(measure_case(settings, rate, fewest, fewest_in_backward, ratio, told))
    return Outcome(settings.device, threads, rate, *shape_of(settings), tuple(cases))


def table(outcome: Outcome) -> RenderableType:
    """Tables of efficiencies, and of the times and bytes behind them."""
    tables = [_efficiencies(outcome), _details(outcome), _phases(outcome)]
    if any(case.in_backward is not None for case in outcome.cases):
        tables.append(_in_backward(outcome))
    return Group(*tables, *remarks(outcome.cases[0].peers))


def _efficiencies(outcome: Outcome) -> Table:
    result = Table(f"Limit over measured time; {rate_text(outcome.rate)} in each direction")
    result.add_figures("transfer / compute", "farpool", "of the limit by phases", "in backward", "first step")
    peers = [number for number, peer in enumerate(outcome.cases[0].peers) if peer.efficiency is not None]
    for number in peers:
        result.add_figures(outcome.cases[0].peers[number].name)
        result.add_figures("farpool is")
    for case in outcome.cases:
        stepped = "" if case.in_backward is None else f"{case.in_backward.efficiency:.0%}"
        shares = [f"{case.efficiency:.0%}", f"{case.efficiency_by_phases:.0%}", stepped, f"{case.first_efficiency:.0%}"]
        cells = [f"{case.ratio:.2f}", *shares]
        for number in peers:
            cells += peer_cells(case.peers[number])
        result.add_row(*cells)
    return result


def _details(outcome: Outcome) -> Table:
    result = Table(f"One step of {outcome.layers} blocks of width {outcome.width}, in steady state")
    result.add_figures(
        "tokens", "resident", "farpool", "waiting", "read at least", "read", "written at least", "written"
    )
    for case in outcome.cases:
        result.add_row(
            str(case.tokens),
            milliseconds(case.resident_seconds),
            milliseconds(case.paged_seconds),
            milliseconds([case.stall_seconds]),
            f"{case.fewest_read / 1e6:.0f} MB",
            f"{case.moved_read / max(1, case.fewest_read):.2f}x",
            f"{case.fewest_written / 1e6:.0f} MB",
            f"{case.moved_written / max(1, case.fewest_written):.2f}x",
        )
    return result


def _in_backward(outcome: Outcome) -> Table:
    result = Table("One step inside the backward pass (farpool.step_in_backward)")
    result.add_figures("transfer / compute", "farpool", "read at least", "read", "written at least", "written")
    for case in outcome.cases:
        stepped = case.in_backward
        if stepped is not None:
            result.add_row(
                f"{stepped.link_seconds / case.link_seconds * case.ratio:.2f}",
                milliseconds(stepped.paged_seconds),
                f"{stepped.fewest_read / 1e6:.0f} MB",
                f"{stepped.moved_read / max(1, stepped.fewest_read):.2f}x",
                f"{stepped.fewest_written / 1e6:.0f} MB",
                f"{stepped.moved_written / max(1, stepped.fewest_written):.2f}x",
            )
    return result


def _phases(outcome: Outcome) -> Table:
    result = Table("Phases of a step")
    result.add_figures("transfer / compute", "phase", "resident", "farpool", "read", "needed", "written", "needed")
    for case in outcome.cases:
        for phase in case.phases:
            result.add_row(
                f"{case.ratio:.2f}",
                phase.name,
                milliseconds([phase.resident_seconds]),
                milliseconds([phase.paged_seconds]),
                f"{phase.read / 1e6:.0f} MB",
                f"{phase.fewest_read / 1e6:.0f} MB",
                f"{phase.written / 1e6:.0f} MB",
                f"{phase.fewest_written / 1e6:.0f} MB",
            )
    return result


def figures(outcome: Outcome) -> dict[str, Any]:
    """Figures of efficiency by ratio, and of one step of the middle case."""
    figure, axes = new_figure("time on the link / time to compute", "limit / measured")
    ratios = [case.wanted for case in outcome.cases]
    axes.plot(ratios, [case.efficiency for case in outcome.cases], marker="o")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    middle = outcome.cases[len(outcome.cases) // 2]
    rate = rate_text(outcome.rate)
    return {
        f"AdamW steps with a sixth of their bytes resident, {rate} each way; 1 is the limit.": figure,
        f"One step with {middle.ratio:.2g} times as much transfer as compute.": draw_strip(middle.strip),
    }
