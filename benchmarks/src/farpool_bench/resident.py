"""Measurement of plain, bare and paged tensors in turn, all resident: operations, layers and training steps."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from farpool import Pool, offload, restore
from farpool_bench.bare import BareTensor, wrap_parameters
from farpool_bench.measure import in_turn, mean_seconds
from farpool_bench.overhead_outcome import Layers, Operation, Training
from farpool_bench.stack import Stack, seconds_of, synchronize, tokens_for

if TYPE_CHECKING:
    from farpool_bench.benchmark import Progress

__all__ = ["measure_layers", "measure_operations", "measure_training"]

_WIDTH = 64
_ROWS = 8
_VOCABULARY = 1024
_LINEAR = 24
"""Number of linear layers that are trained."""
_WARM = 8
"""Number of passes before the first sample."""


class _Case(NamedTuple):
    """An operation as three calls: with plain arguments, with arguments in bare wrappers, and with paged ones."""

    name: str
    paged_arguments: int
    plain: Callable[[], object]
    bare: Callable[[], object]
    paged: Callable[[], object]


def measure_operations(device: str, calls: int, rounds: int, progress: Progress) -> tuple[Operation, ...]:
    """Measure the seconds of a call of each operation: plain, bare and paged in turn."""
    measured = []
    with torch.no_grad(), Pool(fast="16MiB", dram="16MiB", device=device) as pool:
        for case in _cases(pool, device):
            works = [partial(_calls, work, calls, device) for work in (case.plain, case.bare, case.paged)]
            for work in works * _WARM:
                work()
            measured.append(Operation.of(case.name, case.paged_arguments, *in_turn(works, rounds, case.name, progress)))
        del case, works  # nobody needs their tensors when the pool ends
    return tuple(measured)


def _calls(work: Callable[[], object], calls: int, device: str) -> float:
    synchronize(device)
    seconds = mean_seconds(work, calls)
    synchronize(device)
    return seconds


def _cases(pool: Pool, device: str) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    inputs, weight, bias = random(_ROWS, _WIDTH), random(_WIDTH, _WIDTH), random(_WIDTH)
    paged_weight, paged_bias = pool.from_tensor(weight), pool.from_tensor(bias)
    bare_weight, bare_bias = BareTensor(weight), BareTensor(bias)
    yield _Case(
        f"linear {_WIDTH}×{_WIDTH}",
        2,
        lambda: functional.linear(inputs, weight, bias),
        lambda: functional.linear(inputs, bare_weight, bare_bias),
        lambda: functional.linear(inputs, paged_weight, paged_bias),
    )
    scale = random(_WIDTH)
    bare_scale, paged_scale = BareTensor(scale), pool.from_tensor(scale)
    yield _Case(
        "layer_norm",
        2,
        lambda: functional.layer_norm(inputs, (_WIDTH,), scale, bias),
        lambda: functional.layer_norm(inputs, (_WIDTH,), bare_scale, bare_bias),
        lambda: functional.layer_norm(inputs, (_WIDTH,), paged_scale, paged_bias),
    )
    added, paged_added = random(_WIDTH, _WIDTH), pool.from_tensor(weight)
    bare_added = BareTensor(random(_WIDTH, _WIDTH))
    yield _Case(
        "add_", 1, lambda: added.add_(weight), lambda: bare_added.add_(weight), lambda: paged_added.add_(weight)
    )
    moment, paged_moment = random(_WIDTH, _WIDTH), pool.from_tensor(weight)
    bare_moment = BareTensor(random(_WIDTH, _WIDTH))

    def decay_and_add() -> None:
        bare_moment.mul_(0.9)
        bare_moment.add_(bare_added, alpha=0.1)

    yield _Case(
        "mul_, add_ (moment)",
        3,
        lambda: moment.mul_(0.9).add_(added, alpha=0.1),
        decay_and_add,
        lambda: paged_moment.mul_(0.9).add_(paged_added, alpha=0.1),
    )
    table = random(_VOCABULARY, _WIDTH)
    words, bare_words = (torch.nn.Embedding(_VOCABULARY, _WIDTH, _weight=table.clone()) for _ in range(2))
    wrap_parameters(bare_words)
    paged_words = offload(torch.nn.Embedding(_VOCABULARY, _WIDTH, _weight=table.clone()), pool)
    row = torch.tensor([7], device=device)
    yield _Case("embedding row", 1, lambda: words(row), lambda: bare_words(row), lambda: paged_words(row))
    restore(paged_words)


def measure_layers(device: str, seconds: float, layers: int, width: int, rounds: int, progress: Progress) -> Layers:
    """Measure passes through a stack whose layers take about `seconds` each: plain, bare and paged in turn."""
    plain, bare, paged = (Stack(layers, width).to(device) for _ in range(3))
    wrap_parameters(bare)
    step = f"Layers of {seconds * 1e3:g} ms"
    tokens = tokens_for(lambda count: seconds_of(plain, plain.inputs(count), device)[0], seconds * layers)
    inputs = plain.inputs(tokens)
    with Pool(fast=2 * paged.nbytes, dram=2 * paged.nbytes, device=device) as pool:
        offload(paged, pool)
        for _ in range(_WARM):
            expected, _, got = (seconds_of(model, inputs, device)[1] for model in (plain, bare, paged))
        works = [partial(_pass, model, inputs, device) for model in (plain, bare, paged)]
        samples = in_turn(works, rounds, step, progress)
        restore(paged)
    return Layers.of(tokens, layers, width, torch.equal(expected, got), *samples)


def _pass(model: torch.nn.Module, inputs: torch.Tensor, device: str) -> float:
    return seconds_of(model, inputs, device)[0]


def measure_training(device: str, rounds: int, progress: Progress) -> Training:
    """Measure training steps of small linear layers with fused AdamW: plain and paged in turn, all resident."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LINEAR))).to(device)
        inputs = torch.randn(_ROWS, _WIDTH).to(device)
    paged = copy.deepcopy(plain)
    losses: dict[int, list[torch.Tensor]] = {id(plain): [], id(paged): []}

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        synchronize(device)
        start = time.perf_counter()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds = time.perf_counter() - start
        losses[id(model)].append(loss.detach())
        return seconds

    with Pool(fast="64MiB", dram="64MiB", device=device) as pool:
        offload(paged, pool)
        works = [partial(step, model, torch.optim.AdamW(model.parameters(), fused=True)) for model in (plain, paged)]
        for work in works * _WARM:
            work()
        samples = in_turn(works, rounds, "Training steps", progress)
        restore(paged)
        equal = all(map(torch.equal, *losses.values()))
        del work, works  # nobody needs the optimizer's state when the pool ends
    parameters = len(list(plain.parameters()))
    more = statistics.median(theirs - ours for ours, theirs in zip(*samples, strict=True))
    on_plain, on_paged = samples
    return Training(parameters, on_plain, on_paged, more / parameters, equal)
