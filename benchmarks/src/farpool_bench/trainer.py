"""Timed training steps on a stack of transformer blocks, with AdamW by default."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from farpool import step_in_backward
from farpool_bench.stack import Stack, synchronize

__all__ = ["LEARNING_RATE", "Step", "Trainer"]

LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Step:
    """Loss of a training step, and the seconds of its phases."""

    loss: torch.Tensor
    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.optimizer


class Trainer:
    """A trainer of a model on one batch, with the model's optimizer.

    Parameters
    ----------
    model : Stack
        The model to train; it may be paged.
    inputs : torch.Tensor
        The batch; the model is to reproduce it in reverse order.
    optimizer : torch.optim.Optimizer, optional
        The fused AdamW unless given: it touches each parameter and its state once.
    in_backward : bool
        True to step each parameter during the backward pass.
    """

    def __init__(
        self,
        model: Stack,
        inputs: torch.Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        in_backward: bool = False,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.targets = inputs.flip(1)
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self._in_backward = step_in_backward(self.optimizer) if in_backward else None

    def step(self, between: Callable[[], None] = lambda: None) -> Step:
        """Do one step; `between` is called between its phases, and not timed."""
        device = self.inputs.device.type
        synchronize(device)
        start = time.perf_counter()
        loss = torch.nn.functional.mse_loss(self.model(self.inputs), self.targets)
        synchronize(device)
        forward = time.perf_counter() - start
        between()
        start = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        synchronize(device)
        backward = time.perf_counter() - start
        between()
        start = time.perf_counter()
        if self._in_backward is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        synchronize(device)
        return Step(loss.detach(), forward, backward, time.perf_counter() - start)
