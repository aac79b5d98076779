"""The model that benchmarks stream and train: a stack of transformer blocks with seeded weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from farpool import step_in_backward

_HEAD = 64
"""Width of an attention head."""
_LEAST_TOKENS, _MOST_TOKENS = 16, 1 << 17
_SAMPLES = 4
_CORRECTIONS = 2


class Block(torch.nn.Module):
    """A transformer block: pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD
        self.attention_norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.mlp_norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of shape (sequences, tokens, width) to ones of the same shape."""
        sequences, tokens, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(sequences, tokens, 3, self.heads, _HEAD)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(sequences, tokens, width))
        result: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))
        return result


class Stack(torch.nn.Module):
    """A stack of transformer blocks; the same seed gives the same weights."""

    def __init__(self, layers: int, width: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.width = width

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of shape (sequences, tokens, width) to ones of the same shape."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def inputs(self, tokens: int, seed: int = 1) -> torch.Tensor:
        """Make one sequence of random hidden states, on the device of the weights."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, tokens, self.width, generator=generator).to(next(self.parameters()).device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.parameters())


def block_bytes(width: int) -> int:
    """Bytes of the weights of one block."""
    return 4 * (12 * width * width + 13 * width)


def synchronize(device: str) -> None:
    """Wait until the device has finished its queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(model: torch.nn.Module, inputs: torch.Tensor, device: str) -> tuple[float, torch.Tensor]:
    """Run one pass without gradients; returns its seconds and the output."""
    synchronize(device)
    start = time.perf_counter()
    with torch.no_grad():
        outputs: torch.Tensor = model(inputs)
    synchronize(device)
    return time.perf_counter() - start, outputs


def tokens_for(seconds_with: Callable[[int], float], seconds: float) -> int:
    """Number of tokens, a multiple of 8, with which some work takes about `seconds`; found by trial.

    `seconds_with`: does the work with a number of tokens and returns how long it took.
    """

    def measure(tokens: int) -> float:
        return min(seconds_with(tokens) for _ in range(_SAMPLES))

    tokens, measured = _LEAST_TOKENS, measure(_LEAST_TOKENS)
    before, shorter = tokens, measured
    while measured < seconds and tokens < _MOST_TOKENS:
        before, shorter = tokens, measured
        tokens *= 2
        measured = measure(tokens)
    if measured > shorter:
        share = min(1.0, max(0.0, (seconds - shorter) / (measured - shorter)))
        tokens = before + round(share * (tokens - before) / 8) * 8
    for _ in range(_CORRECTIONS):
        tokens = max(_LEAST_TOKENS, min(_MOST_TOKENS, round(tokens * seconds / measure(tokens) / 8) * 8))
    return tokens


def llama(**config: Any) -> Any:
    """Make a model of Llama's shape with weights by seed, for inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**config)).eval()  # type: ignore[no-untyped-call]


LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Step:
    """Loss of a training step, and the seconds of its phases: forward, backward and optimizer."""

    loss: torch.Tensor
    phases: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.phases)


class Trainer:
    """A trainer of a model on one batch, with the model's optimizer.

    `model`: the model to train; it may be paged. `inputs`: the batch; the model is to reproduce it in reverse order.
    `optimizer`: the fused AdamW unless given: it touches each parameter and its state once. `in_backward`: true to step
    each parameter during the backward pass.
    """

    def __init__(
        self, model: torch.nn.Module, inputs: torch.Tensor, optimizer: Any = None, in_backward: bool = False
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.targets = inputs.flip(1)
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self._in_backward = step_in_backward(self.optimizer) if in_backward else None

    def step(self, between: Callable[[], None] = lambda: None) -> Step:
        """Do one step; `between` is called between its phases, and not timed."""
        phases: list[float] = []

        def timed(work: Callable[[], Any]) -> Any:
            synchronize(self.inputs.device.type)
            start = time.perf_counter()
            result = work()
            synchronize(self.inputs.device.type)
            phases.append(time.perf_counter() - start)
            return result

        loss = timed(lambda: torch.nn.functional.mse_loss(self.model(self.inputs), self.targets))
        between()
        timed(loss.backward)
        between()
        timed(self._optimize)
        return Step(loss.detach(), tuple(phases))

    def _optimize(self) -> None:
        if self._in_backward is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
