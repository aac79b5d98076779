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
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row, told
from farpool_bench.render import Grid, against_limit, by_ratio, draw_strip, rate_text


class Bench(harness.Benchmark):
    """Each ratio of transfer to compute.

    On the CPU the link is a throttled DRAM tier, on a GPU it is the one between host and device.
    """

    name = "training"
    limit = "the resident step, or the fewest bytes over the link in either direction, whichever takes longest"
    rivals = ("DeepSpeed ZeRO-Offload", "torchao's CPUOffloadOptimizer", "bitsandbytes' PagedAdamW")
    over = "ratios"
    measured_in = "training_cases"
    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    rate: float = 0.5e9  # bytes per second of the throttled link, in each direction
    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 8.0)  # time on the link over time to compute
    rounds: Annotated[int, Option("Steps of each", least=1)] = 5
    layers: int = 8  # of the stack; on a GPU, as the width, fixed by its memory
    width: int = 384
    gpu_share: int = 32  # on a GPU the weights take this fraction of its memory, which the rivals share
    QUICK: ClassVar = {"ratios": (1.0,), "rounds": 1, "layers": 4, "width": 128, "gpu_share": 256}

    def open(self) -> None:
        from farpool_bench.link import core_for_link
        from farpool_bench.training_cases import fewest_of, link_of

        self.link = link_of(self)
        self.fewest = [fewest_of(self, in_backward=one) for one in told(self.progress, "Fewest bytes", (False, True))]
        self.threads = self.stack.enter_context(core_for_link(self.device))

    def facts(self) -> dict[str, Any]:
        from farpool_bench.training_cases import shape_of

        layers, width = shape_of(self)
        return {"device": self.device, "threads": self.threads, "rate": self.link, "layers": layers, "width": width}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        own = (
            "transfer / compute {ratio:.2f}|farpool {efficiency:.0%}|of the limit by phases {efficiency_by_phases:.0%}|"
        )
        own += "in backward {in_backward.efficiency:.0%}|first step {first_efficiency:.0%}"
        title = f"Limit over measured time; {rate_text(outcome.rate)} in each direction"
        first, *remarks = against_limit(title, own, outcome.cases)
        yield first
        title = f"One step of {outcome.layers} blocks of width {outcome.width}, in steady state"
        columns = "tokens {tokens}|resident {resident_seconds:ms}|farpool {paged_seconds:ms}|waiting {stall_seconds:ms}"
        yield Grid.of(title, columns + _MOVES, map(_with_moves, outcome.cases))
        columns = (
            "transfer / compute {ratio:.2f}|phase {name}|resident {resident_seconds:ms}|farpool {paged_seconds:ms}"
        )
        columns += "|read {read:MB}|needed {fewest_read:MB}|written {written:MB}|needed {fewest_written:MB}"
        phases = [Row(phase, ratio=case.ratio) for case in outcome.cases for phase in case.phases]
        yield Grid.of("Phases of a step", columns, phases)
        rows = [
            Row(_with_moves(stepped), ratio=stepped.link_seconds / case.link_seconds * case.ratio)
            for case in outcome.cases
            if (stepped := case.get("in_backward")) is not None
        ]
        if rows:
            title = "One step inside the backward pass (farpool.step_in_backward)"
            yield Grid.of(title, "transfer / compute {ratio:.2f}|farpool {paged_seconds:ms}" + _MOVES, rows)
        yield from remarks

    @staticmethod
    def figures(outcome: Any) -> Figures:
        middle = outcome.cases[len(outcome.cases) // 2]
        about = f"AdamW steps with a sixth of their bytes resident, {rate_text(outcome.rate)} each way"
        return {
            f"{about}; 1 is the limit.": by_ratio(outcome.cases, rivals=False),
            f"One step with {middle.ratio:.2g} times as much transfer as compute.": draw_strip(middle.strip),
        }


_MOVES = "|read at least {fewest_read:MB}|read {r:.2f}x|written at least {fewest_written:MB}|written {w:.2f}x"


def _with_moves(step: Any) -> Row:
    """Row of a step with the bytes that it moved, over the fewest ones."""
    read, written = step.moved_read / max(1, step.fewest_read), step.moved_written / max(1, step.fewest_written)
    return Row(step, r=read, w=written)
