"""What the tests run on a GPU, plain and in a pool. Without a GPU, a simulated one copies and the host computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the operations run."""
WIDTH, LAYERS = 512, 12


class Block(torch.nn.Module):
    """Its parameters are of very different sizes: some share a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def build(layers: int = LAYERS, width: int = WIDTH) -> torch.nn.Sequential:
    """A model with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(*[Block(width) for _ in range(layers)]).to(DEVICE)


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def batch(tokens: int = 64, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    """Losses of each step."""
    losses = []
    for step in range(steps):
        loss = model(batch(seed=step)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def within(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
