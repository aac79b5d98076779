"""Peers of the training benchmark: libraries that one would train with instead of a pool."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from farpool_bench.peer import Peer, measured, missing
from farpool_bench.stack import Stack
from farpool_bench.trainer import LEARNING_RATE, Trainer
from farpool_bench.worker import Worker

__all__ = ["Candidate", "open_candidates"]

_GPU_ONLY = "needs a GPU: it keeps the optimizer's state in page-locked or managed memory beside CUDA memory"
_NO_LINK = "not comparable: host and device are the same memory here, it moves nothing over the link"


@dataclass(slots=True)
class Candidate:
    """A peer under measurement.

    Attributes
    ----------
    name : str
    step : callable or None
        Does a step, then a timed one, and returns its seconds; None if it cannot run.
    remark : str
        The reason why it cannot run, or how its run differs.
    comparable : bool
        True if it does the same work over the same link.
    """

    name: str
    step: Callable[[], float] | None
    remark: str = ""
    comparable: bool = True
    samples: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Take a sample, if it can run."""
        if self.step is None:
            return
        try:
            self.samples.append(self.step())
        except (OSError, ValueError) as error:
            self.step, self.remark = None, str(error)

    def result(self, ours: Sequence[float], limits: Sequence[float]) -> Peer:
        """Make the peer's results, from farpool's samples and the limits of each round."""
        if self.step is None:
            return missing(self.name, self.remark)
        if not self.comparable:
            return Peer(self.name, tuple(self.samples), None, None, self.remark)
        return measured(self.name, self.samples, ours, limits)


def open_candidates(stack: ExitStack, plain: Stack, inputs: torch.Tensor) -> list[Candidate]:
    """Start the peers, ready to step; `stack` closes them."""
    return [
        _deepspeed(stack, plain, inputs),
        _in_process("torchao CPUOffloadOptimizer", "torchao", _torchao, plain, inputs),
        _in_process("bitsandbytes PagedAdamW", "bitsandbytes", _bitsandbytes, plain, inputs),
    ]


def _in_process(
    name: str, package: str, make: Callable[[Stack], torch.optim.Optimizer], plain: Stack, inputs: torch.Tensor
) -> Candidate:
    if inputs.device.type != "cuda":
        return Candidate(name, None, _GPU_ONLY)
    if importlib.util.find_spec(package) is None:
        return Candidate(name, None, f"the package {package!r} is not installed")
    model = copy.deepcopy(plain)
    trainer = Trainer(model, inputs, make(model))

    def step() -> float:
        trainer.step()
        return trainer.step().seconds

    step()
    return Candidate(name, step)


def _torchao(model: Stack) -> torch.optim.Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    optimizer: torch.optim.Optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LEARNING_RATE
    )
    return optimizer


def _bitsandbytes(model: Stack) -> torch.optim.Optimizer:
    from bitsandbytes.optim import PagedAdamW32bit

    optimizer: torch.optim.Optimizer = PagedAdamW32bit(model.parameters(), lr=LEARNING_RATE)
    return optimizer


def _deepspeed(stack: ExitStack, plain: Stack, inputs: torch.Tensor) -> Candidate:
    name = "DeepSpeed ZeRO-Offload"
    if importlib.util.find_spec("deepspeed") is None:
        return Candidate(name, None, "the package 'deepspeed' is not installed")
    name = f"DeepSpeed {version('deepspeed')} ZeRO-Offload"
    arguments = [str(len(plain.blocks)), str(plain.width), str(inputs.shape[1]), inputs.device.type]
    try:
        worker = Worker("farpool_bench.deepspeed_worker", arguments).started(stack)
    except (OSError, ValueError) as error:
        return Candidate(name, None, str(error))

    def step() -> float:
        """Seconds of a step, after an untimed one."""
        return float(worker.ask("step", "seconds"))

    if inputs.device.type == "cpu":
        return Candidate(name, step, _NO_LINK, comparable=False)
    return Candidate(name, step)
