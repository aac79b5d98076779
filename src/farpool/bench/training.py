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

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from farpool.bench.benchmark import Progress, check_device
from farpool.bench.figures import INK, new_figure
from farpool.bench.peer import Peer
from farpool.bench.strip import Strip, draw_strip
from farpool.bench.text import milliseconds, peer_cells, rate_text, remarks

__all__ = ["Case", "Outcome", "Phase", "Settings", "figures", "run", "table"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    device : str
        ``cpu``: the link is a throttled DRAM tier. ``cuda``: the link between host and device as it is.
    rate : float
        Bytes per second of the throttled link, in each direction.
    ratios : tuple of float
        Time on the link over time to compute.
    rounds : int
        Timed steps of each.
    layers, width : int
        Of the stack (on a GPU: chosen by its memory).
    gpu_share : int
        On a GPU the weights take this fraction of its memory, which the peers share.
    """

    device: str = "cpu"
    rate: float = 0.5e9
    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 8.0)
    rounds: int = 5
    layers: int = 8
    width: int = 384
    gpu_share: int = 32

    @classmethod
    def quick(cls) -> Settings:
        """Sizes so small that a run takes seconds."""
        return cls(ratios=(1.0,), rounds=1, layers=4, width=128, gpu_share=256)


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a step: seconds and bytes, medians over the rounds.

    Bytes count when their transfer has ended, in whichever phase that is; the fewest are those of the phase's own
    accesses.
    """

    name: str
    resident_seconds: float
    paged_seconds: float
    read: int
    written: int
    fewest_read: int
    fewest_written: int


@dataclass(frozen=True, slots=True)
class InBackward:
    """Steps of `farpool.step_in_backward`; attributes as of `Case`."""

    fewest_read: int
    fewest_written: int
    moved_read: int
    moved_written: int
    link_seconds: float
    paged_seconds: tuple[float, ...]
    efficiency: float


@dataclass(frozen=True, slots=True)
class Case:
    """One amount of compute.

    Attributes
    ----------
    wanted, ratio : float
        Time on the link over time to compute: as asked for, and as it came out.
    tokens : int
        Of the sequence that runs through the blocks.
    state_bytes, budget_bytes, peak_bytes : int
        Of weights, gradients and moments; of the fast tier; the most that was taken of it.
    fewest_read, fewest_written, moved_read, moved_written : int
        Bytes that a step has to move (Belady), and that it moved (median).
    link_seconds : float
        Of the busier direction, with the fewest bytes.
    resident_seconds, paged_seconds : tuple of float
        Of each round.
    stall_seconds : float
        Seconds of a step for which ops waited (median).
    efficiency, first_efficiency : float
        Limit over measured time: median over the rounds, and for the very first step.
    efficiency_by_phases : float
        The limit by phases over measured time: median over the rounds.
    phases : tuple of Phase
        Forward, backward, optimizer.
    equal : bool
        Whether all losses were the same, bit for bit.
    strip : Strip
        One step.
    in_backward : InBackward, optional
        The same steps inside the backward pass; results from before it could be done do not have it.
    """

    wanted: float
    ratio: float
    tokens: int
    state_bytes: int
    budget_bytes: int
    peak_bytes: int
    fewest_read: int
    fewest_written: int
    moved_read: int
    moved_written: int
    link_seconds: float
    resident_seconds: tuple[float, ...]
    paged_seconds: tuple[float, ...]
    stall_seconds: float
    efficiency: float
    first_efficiency: float
    efficiency_by_phases: float
    phases: tuple[Phase, ...]
    equal: bool
    peers: tuple[Peer, ...]
    strip: Strip
    in_backward: InBackward | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out, case by case."""

    device: str
    threads: int
    """With which everything computed: on the CPU the link has a core of its own."""
    rate: float
    layers: int
    width: int
    cases: tuple[Case, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each case.

    Raises
    ------
    ConfigError
        There is no such device.
    RuntimeError
        A loss differs from that of the resident model.
    """
    check_device(settings.device)
    from farpool.bench.link import core_for_link
    from farpool.bench.training_cases import fewest_of, link_of, measure_case, shape_of

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
    """One table of efficiencies, one of what lies behind them."""
    tables = [_efficiencies(outcome), _details(outcome), _phases(outcome)]
    if any(case.in_backward is not None for case in outcome.cases):
        tables.append(_in_backward(outcome))
    return Group(*tables, *remarks(outcome.cases[0].peers))


def _efficiencies(outcome: Outcome) -> Table:
    result = Table(title=f"Limit over measured time; {rate_text(outcome.rate)} in each direction")
    for name in ("transfer / compute", "farpool", "of the limit by phases", "in backward", "first step"):
        result.add_column(name, justify="right")
    peers = [number for number, peer in enumerate(outcome.cases[0].peers) if peer.efficiency is not None]
    for number in peers:
        result.add_column(outcome.cases[0].peers[number].name, justify="right")
        result.add_column("farpool is", justify="right")
    for case in outcome.cases:
        stepped = "" if case.in_backward is None else f"{case.in_backward.efficiency:.0%}"
        shares = [f"{case.efficiency:.0%}", f"{case.efficiency_by_phases:.0%}", stepped, f"{case.first_efficiency:.0%}"]
        cells = [f"{case.ratio:.2f}", *shares]
        for number in peers:
            cells += peer_cells(case.peers[number])
        result.add_row(*cells)
    return result


def _details(outcome: Outcome) -> Table:
    result = Table(title=f"One step of {outcome.layers} blocks of width {outcome.width}, in steady state")
    for name in ("tokens", "resident", "farpool", "waiting", "read at least", "read", "written at least", "written"):
        result.add_column(name, justify="right")
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
    result = Table(title="One step inside the backward pass (farpool.step_in_backward)")
    for name in ("transfer / compute", "farpool", "read at least", "read", "written at least", "written"):
        result.add_column(name, justify="right")
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
    result = Table(title="Phases of a step")
    for name in ("transfer / compute", "phase", "resident", "farpool", "read", "needed", "written", "needed"):
        result.add_column(name, justify="right")
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
    """Efficiency by ratio, and one step of the case in the middle."""
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
