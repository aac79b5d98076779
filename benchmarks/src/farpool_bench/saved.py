"""Saved tensors: what autograd keeps between the forward and the backward pass, in plain memory or in a pool.

A stack of linear layers and one of transformer blocks make training steps without an optimizer, in five ways: plain;
with `torch.autograd.graph.save_on_cpu`; with `torch.utils.checkpoint` around each block; inside
`farpool.saved_tensors`, with a pool whose budget is a fraction of the plain step's peak, before a DRAM tier; and in a
second such pool with `farpool.checkpoint` around each block, which keeps the block's tensors or computes it again, by
the costs that it has measured (`choices` in the result).

The peak is that of the bytes that operations of one step make in plain memory, counted operation by operation, outside
of the times. Weights and gradients exist before and are not in it, nor is the pool's budget, which stands next to it.
The steps run in turn after untimed ones, and the medians of the ratios to the plain step are shown. All losses and
gradients must be equal bit for bit.

On a CPU, a DRAM tier is in the same memory as the plain tensors, so this shows the time that it takes to move them and
not a gain. `save_on_cpu` does not move tensors there: it copies them, so it can only lose. On a GPU both move them to
the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import Grid


class Bench(harness.Benchmark):
    """Training steps of linear layers and of transformer blocks."""

    name = "saved"
    limit = "the same step with everything that autograd saves in plain memory"
    rivals = ("torch.autograd.graph.save_on_cpu", "torch.utils.checkpoint")
    over = "models"
    measured_in = "saved_cases"
    device: Annotated[str, Option("Where the model computes", "cpu|cuda")] = "cpu"
    rounds: Annotated[int, Option("Steps of each", least=1)] = 7
    models: tuple[str, ...] = ("mlp", "transformer")
    layers: int = 8
    width: int = 256
    tokens: int = 1024
    share: int = 4  # the plain step's peak is this many times the budget
    QUICK: ClassVar = {"rounds": 1, "layers": 4, "width": 128, "tokens": 256}

    def facts(self) -> dict[str, Any]:
        import torch

        return {
            "device": self.device,
            "threads": torch.get_num_threads(),
            "layers": self.layers,
            "width": self.width,
            "tokens": self.tokens,
        }

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        for case in outcome.cases:
            columns = "<way {way}|peak of plain memory {peak:MB}|of the plain peak {peak_ratio:.0%}"
            columns += (
                "|budget in addition {budget:MB}|a step {seconds:ms}|over plain {ratio:.2f}|same bits {equal:yes}"
            )
            title = (
                f"One step of {outcome.layers} layers ({case.model}) of width {outcome.width}, {outcome.tokens} tokens"
            )
            yield Grid.of(title, columns, case.ways)
            columns = "model {model}|stored {stored:MB}|stored by cost {stored_by_cost:MB}|blocks kept by cost {kept:d}"
            columns += (
                "|to lower tiers {written:MB}|back {read:MB}|fetched on demand {demand:.1f}|prefetched {prefetched:.1f}"
            )
            yield Grid.of("Saved tensors of a step in the pool; blocks that were fetched", columns, [Row(case)])
        yield f"{outcome.device}, torch with {outcome.threads} threads"
