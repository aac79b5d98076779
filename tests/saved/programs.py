"""Programs whose forward passes save tensors, and the bytes of plain memory that they use."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import farpool
from farpool import Pool
from farpool.memory.pool import blocks_of
from farpool.tensors.arena import arena_views

__all__ = ["ACTIVATIONS", "PROGRAMS", "PlainBytes", "activations", "gradients", "mlp", "rows", "saved_bytes"]

ACTIVATIONS = "activation"


def rows(count: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def mlp(layers: int = 4, width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


class Attention(nn.Module):
    """Heads are transposed views of three slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.project(inputs.reshape(4, 128, 64)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        result = value**3
        ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        value, result = ctx.saved_tensors
        return gradient * (3 * result / value)


class Odd(nn.Module):
    """Saves expanded, strided, complex, boolean, overlapping and empty tensors, and those of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(1, 512)), nn.Parameter(torch.randn(256, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wide = (inputs[:256, :1] * self.shift).expand(256, 512)
        mixed = wide * self.scale.expand(256, 512)
        columns = mixed.t()[::3] * mixed.t()[1::3][:171]
        waves = torch.fft.fft(mixed)
        power = (waves * waves.conj()).real + (waves.conj().imag * mixed)
        windows = mixed.flatten().unfold(0, 1024, 512)
        chosen = torch.where(mixed > 0, mixed, mixed.sin()).masked_fill(mixed < -1, 0.5)
        half = (mixed.half() * mixed.half()).float()
        empty = mixed[:, :0] * mixed[:, :0]
        small = (windows * windows).mean() + columns.sum() + empty.sum() + (mixed[0] * mixed[1]).sum()
        return power.mean() + small + chosen.mean() + half.mean() + Cube.apply(mixed).mean()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(32, 64, 2), nn.GRUCell(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(inputs[:, :32].reshape(16, -1, 32))
        hidden = states[0]
        for state in states[1:6]:
            hidden = self.gru(state, hidden)
        return hidden


class Bfloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(inputs)


def _conv() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last), nn.SiLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Unflatten(1, (3, 16, 16)), *layers, nn.Flatten(), nn.LogSoftmax(1))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "mlp": (mlp, (512, 128)),
    "conv": (_conv, (64, 768)),
    "attention": (Attention, (512, 64)),
    "cells": (Cells, (1024, 128)),
    "odd": (Odd, (256, 16)),
    "bfloat16": (Bfloat, (512, 128)),
    "encoder": (lambda: nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), (512, 64)),
}
"""Modules, and the shapes of their inputs."""


def gradients(
    module: nn.Module, inputs: torch.Tensor, context: AbstractContextManager[Any] | None = None, steps: int = 1
) -> list[torch.Tensor]:
    """Losses and all gradients of training steps without an optimizer. The forward pass runs in a context."""
    found = []
    torch.manual_seed(2)
    for _ in range(steps):
        module.zero_grad()
        leaf = inputs.clone().requires_grad_()
        with contextlib.nullcontext() if context is None else context:
            loss = module(leaf).float().square().mean()
        loss.backward()
        found += [loss.detach(), leaf.grad, *(parameter.grad.clone() for parameter in module.parameters())]
    return found


def activations(pool: Pool) -> int:
    """Live bytes of saved tensors in a pool."""
    gc.collect()
    return sum(one.live for one in pool.stats().classes if one.name == ACTIVATIONS)


@contextlib.contextmanager
def saved_bytes(pool: Pool) -> Iterator[list[int]]:
    """Save tensors in a pool; the list then has the bytes that they take."""
    found: list[int] = []
    with farpool.saved_tensors(pool):
        yield found
    found.append(activations(pool))


class PlainBytes(TorchDispatchMode):
    """Counts the bytes of all memory that operations make, while it lives, and its peak. A pool's arena is left out."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.peak = 0
        self._arena = arena_views(blocks_of(pool)).storage._cdata
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._living = {key: one for key, one in self._living.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes in self._living.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if type(result) is torch.Tensor and torch._C._has_storage(result):
                memory = result.untyped_storage()
                if memory._cdata not in self._living and memory._cdata != self._arena:
                    self._living[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
        self.peak = max(self.peak, self.now)
        return results
