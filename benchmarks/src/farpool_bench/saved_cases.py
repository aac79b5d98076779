"""Measurement of one model of the benchmark of saved tensors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import farpool
from farpool import Dram, Event, Pool, Stats, saved_tensors
from farpool.errors import FarpoolError
from farpool.memory.pool import blocks_of
from farpool.tensors.arena import arena_views
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.stack import Stack, synchronize

_WARM = 3
"""Steps of each way before samples are taken; from the third on, the pool foretells the order of reading."""
_LOWER = 2
"""Size of the lower tier, as a multiple of the plain step's peak."""


class _Layers(torch.nn.Module):
    """Linear layers with an activation function, which have the parts of a stack of blocks."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)
        )
        for part in self.parameters():
            torch.nn.init.normal_(part, std=width**-0.5)


class _PlainBytes(TorchDispatchMode):
    """Counts the bytes of plain memory that operations make, and the peak. `left_out`: memory that is not counted."""

    def __init__(self, left_out: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._left_out = left_out
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if type(result) is torch.Tensor and torch._C._has_storage(result):
                memory = result.untyped_storage()
                if memory._cdata not in self._living and memory._cdata not in self._left_out:
                    self._living[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())  # type: ignore[no-untyped-call]
        self._living = {key: one for key, one in self._living.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._living.values()))
        return results


def _call(block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return block(hidden)  # type: ignore[no-any-return]


class _Way:
    """One way to make a step, with its own copy of the model."""

    def __init__(
        self, model: torch.nn.Module, inputs: torch.Tensor, context: Callable[[], Any], call: Callable[..., Any] = _call
    ) -> None:
        self._model, self._inputs, self._context, self._call = copy.deepcopy(model), inputs, context, call
        self.loss = torch.empty(0)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """Make a step; returns its seconds."""
        device = self._inputs.device.type
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        synchronize(device)
        start = time.perf_counter()
        with self._context():
            hidden = self._inputs
            for block in self._model.blocks:  # type: ignore[union-attr]
                hidden = self._call(block, hidden)
            loss = hidden.square().mean()
        del hidden
        loss.backward()  # type: ignore[no-untyped-call]
        synchronize(device)
        self.loss = loss.detach()
        return time.perf_counter() - start

    def peak(self, left_out: set[int]) -> int:
        """Bytes of plain memory in another step, at its peak, without the memory that exists before."""
        known = {tensor.untyped_storage()._cdata for tensor in self._tensors()}
        with _PlainBytes(known | left_out) as counted:
            self.step()
        return int(counted.peak)

    def results(self) -> list[torch.Tensor]:
        """Loss and gradients of the latest step."""
        return [self.loss, *(one.grad for one in self._model.parameters() if one.grad is not None)]

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield self._inputs
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad


def measure_case(bench: Any, model: str) -> Row:
    """Measure all ways to make a step of a model in turn."""
    made = (Stack if model == "transformer" else _Layers)(bench.layers, bench.width).to(bench.device)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1, bench.tokens, bench.width, generator=generator).to(bench.device)
    plain = _Way(made, inputs, nullcontext)
    plain.step()
    whole = plain.peak(set())
    budget = max(whole // bench.share, 1 << 20)
    with _pool(bench, budget, whole) as pool, _pool(bench, budget, whole) as other:
        arenas = _arena_of(pool) | _arena_of(other)
        on_cpu: Callable[[], AbstractContextManager[Any]] = partial(torch.autograd.graph.save_on_cpu, pin_memory=False)
        again = partial(torch_checkpoint.checkpoint, use_reentrant=False)
        ways = {
            "plain": plain,
            "save_on_cpu": _Way(made, inputs, on_cpu),
            "checkpoint": _Way(made, inputs, nullcontext, again),
            "farpool": _Way(made, inputs, partial(saved_tensors, pool)),
            "farpool, by cost": _Way(made, inputs, partial(saved_tensors, other), farpool.checkpoint),
        }
        for way in list(ways.values()) * _WARM:
            way.step()
        before = pool.stats()
        samples = in_turn([way.step for way in ways.values()], bench.rounds, model, bench.progress)
        after = pool.stats()
        _check(ways)
        choices = saved_tensors(other).explain().splitlines()
        peaks = [way.peak(arenas) for way in ways.values()]
        stored = [_stored(one, ways[name]) for one, name in ((pool, "farpool"), (other, "farpool, by cost"))]
    rows = [
        Row(
            way=name,
            seconds=taken,
            ratio=median_ratio(taken, samples[0]),
            peak=peak,
            peak_ratio=peak / peaks[0],
            budget=budget if name.startswith("farpool") else 0,
            equal=True,
        )
        for name, taken, peak in zip(ways, samples, peaks, strict=True)
    ]
    return Row(
        model=model,
        ways=tuple(rows),
        stored=stored[0],
        stored_by_cost=stored[1],
        kept=sum(line.endswith("kept") for line in choices),
        choices=tuple(choices),
        **_moved(before, after, bench.rounds),
    )


def _pool(bench: Any, budget: int, whole: int) -> Pool:
    return Pool(budget, [Dram(_LOWER * whole)], device=bench.device)


def _arena_of(pool: Pool) -> set[int]:
    """Identities of the memory of a pool's fast tier, which its budget counts."""
    return {arena_views(blocks_of(pool)).storage._cdata}


def _check(ways: dict[str, _Way]) -> None:
    """Raise FarpoolError unless all ways gave the same loss and gradients."""
    expected = ways["plain"].results()
    for name, way in ways.items():
        if not all(torch.equal(one, other) for one, other in zip(way.results(), expected, strict=True)):
            raise FarpoolError(f"the loss or the gradients of {name} are not those of the plain step")


def _stored(pool: Pool, way: _Way) -> int:
    """Bytes of the storages that one step makes in a pool."""
    made: list[int] = []

    def note(event: Event) -> None:
        if event.kind == "create":
            made.append(event.nbytes)

    end = pool.subscribe(note)
    way.step()
    end()
    return sum(made)


def _moved(before: Stats, after: Stats, steps: int) -> dict[str, float]:
    """Bytes that moved, and blocks that were fetched, in one step of several."""

    def written(stats: Stats) -> int:
        return sum(link.nbytes for link in stats.links if link.source == "fast")

    def read(stats: Stats) -> int:
        return sum(link.nbytes for link in stats.links if link.target == "fast")

    return {
        "written": (written(after) - written(before)) / steps,
        "read": (read(after) - read(before)) / steps,
        "demand": (after.demand_fetches - before.demand_fetches) / steps,
        "prefetched": (after.prefetches_used - before.prefetches_used) / steps,
    }
