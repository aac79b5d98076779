"""Training: weights, gradients and moments six times as large as the fast tier.

A stack of transformer blocks is trained with AdamW as it comes with PyTorch, all of its state behind a link of a known
rate in each direction. The limit of a step is the longest of three times: the time of the same step with everything
resident, and the times to read and to write, at the link's rates, the fewest bytes that any pool with this budget could
move (Belady: the block that is needed last leaves first). The efficiency is the limit over the measured time, in steady
state.

The phases of a step need the link in different measure: forward and backward compute much and move little, the
optimizer the other way round. So that limit can only be reached if one of the times is much the longest, or if the
budget allows one phase to move bytes for another. The limit by phases is the sum of the limits of forward,
backward and optimizer, each with the bytes of its own accesses.

The same is measured with `farpool.step_in_backward`, which steps each parameter as soon as its gradient is whole: fewer
bytes have to move, and they move while gradients are computed.

Steps run in turn, resident and in the pool; each timed step follows an untimed one at once, because
otherwise the pool could move bytes, unmeasured, while the other runs. All losses must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Option, Row, told
from farpool_bench.render import Grid, against_limit, by_ratio, megabytes, milliseconds, rate_text, times
from farpool_bench.strip import draw_strip

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes; on the CPU the link is a throttled DRAM tier, on a GPU it is the one between host and device."""

    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    rate: float = 0.5e9  # bytes per second of the throttled link, in each direction
    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 8.0)  # time on the link over time to compute
    rounds: Annotated[int, Option("Steps of each", least=1)] = 5
    layers: int = 8  # of the stack; on a GPU, as the width, fixed by its memory
    width: int = 384
    gpu_share: int = 32  # on a GPU the weights take this fraction of its memory, which the rivals share
    QUICK: ClassVar = {"ratios": (1.0,), "rounds": 1, "layers": 4, "width": 128, "gpu_share": 256}


class Bench(harness.Benchmark):
    """Each ratio of transfer to compute."""

    name = "training"
    limit = "the resident step, or the fewest bytes over the link in either direction, whichever takes longest"
    rivals = ("DeepSpeed ZeRO-Offload", "torchao's CPUOffloadOptimizer", "bitsandbytes' PagedAdamW")
    Settings = Settings

    def open(self) -> None:
        from farpool_bench import training_cases
        from farpool_bench.link import core_for_link

        self.rate = training_cases.link_of(self.settings)
        fewest = [
            training_cases.fewest_of(self.settings, in_backward=one)
            for one in told(self.progress, "Fewest bytes", (False, True))
        ]
        self.fewest = fewest[0], fewest[1]
        self.threads = self.stack.enter_context(core_for_link(self.settings.device))

    def cases(self) -> Iterable[float]:
        return self.settings.ratios  # type: ignore[no-any-return]

    def measure(self, case: float) -> Row:
        from farpool_bench.training_cases import Case

        with Case(self.settings, self.rate, self.fewest, case) as one:
            one.run(f"Transfer {case:g}x compute", self.progress)
        return one.row

    def outcome(self, found: list[Row]) -> Row:
        from farpool_bench.training_cases import shape_of

        settings, (layers, width) = self.settings, shape_of(self.settings)
        facts = {"device": settings.device, "threads": self.threads, "rate": self.rate}
        return Row(**facts, layers=layers, width=width, cases=tuple(found))

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        def shares(case: Any) -> list[str]:
            stepped = case.get("in_backward")
            found = [case.efficiency, case.efficiency_by_phases, stepped and stepped.efficiency, case.first_efficiency]
            return [f"{case.ratio:.2f}", *("" if share is None else f"{share:.0%}" for share in found)]

        first, *remarks = against_limit(
            f"Limit over measured time; {rate_text(outcome.rate)} in each direction",
            "transfer / compute|farpool|of the limit by phases|in backward|first step",
            outcome.cases,
            shares,
        )
        yield first
        title = f"One step of {outcome.layers} blocks of width {outcome.width}, in steady state"
        rows = [
            [
                str(case.tokens),
                *map(milliseconds, (case.resident_seconds, case.paged_seconds, [case.stall_seconds])),
                *_moves(case),
            ]
            for case in outcome.cases
        ]
        yield Grid(title, f"tokens|resident|farpool|waiting|{_MOVES}", rows)
        rows = [
            [
                f"{case.ratio:.2f}",
                phase.name,
                *(milliseconds([seconds]) for seconds in (phase.resident_seconds, phase.paged_seconds)),
                *map(megabytes, (phase.read, phase.fewest_read, phase.written, phase.fewest_written)),
            ]
            for case in outcome.cases
            for phase in case.phases
        ]
        heads = "transfer / compute|phase|resident|farpool|read|needed|written|needed"
        yield Grid("Phases of a step", heads, rows)
        rows = [
            [
                f"{stepped.link_seconds / case.link_seconds * case.ratio:.2f}",
                milliseconds(stepped.paged_seconds),
                *_moves(stepped),
            ]
            for case in outcome.cases
            if (stepped := case.get("in_backward")) is not None
        ]
        if rows:
            title = "One step inside the backward pass (farpool.step_in_backward)"
            yield Grid(title, f"transfer / compute|farpool|{_MOVES}", rows)
        yield from remarks

    @staticmethod
    def figures(outcome: Any) -> dict[str, Figure]:
        middle = outcome.cases[len(outcome.cases) // 2]
        about = f"AdamW steps with a sixth of their bytes resident, {rate_text(outcome.rate)} each way"
        return {
            f"{about}; 1 is the limit.": by_ratio(outcome.cases, rivals=False),
            f"One step with {middle.ratio:.2g} times as much transfer as compute.": draw_strip(middle.strip),
        }


_MOVES = "read at least|read|written at least|written"


def _moves(step: Any) -> tuple[str, ...]:
    read, written = times(step.moved_read, step.fewest_read), times(step.moved_written, step.fewest_written)
    return megabytes(step.fewest_read), read, megabytes(step.fewest_written), written
