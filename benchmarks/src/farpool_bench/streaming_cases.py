"""Measurement of one case of the streaming benchmark: a rate of the link and an amount of compute."""

from __future__ import annotations

import copy
import importlib.metadata
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from farpool import Dram, Pool, offload
from farpool.memory.pager.storage import cut
from farpool_bench.harness import Row, told
from farpool_bench.link import Copier, Pooled, fewest_by_phase, link_rate, lower_tier, record_strip
from farpool_bench.measure import Rival
from farpool_bench.render import rate_text
from farpool_bench.stack import Stack, block_bytes, seconds_of, tokens_for

_SHARE = 4
"""The weights are this many times as large as the budget."""
_SETTLE = 8
"""Number of passes after the first one before samples are taken."""
_WIDTHS = 128
_PROBE_TOKENS = 8


class _Model:
    """The resident model of a case, with its inputs and the outputs that all others have to give."""

    def __init__(self, bench: Any, rate: float | None, ratio: float) -> None:
        self.device = bench.device
        self.link = rate if rate is not None else link_rate(cut(_most_bytes(bench) // _SHARE).largest)
        self.plain = Stack(*_shape(bench, self.link, ratio)).to(self.device).eval()
        self.budget = self.plain.nbytes // _SHARE
        self.fewest = self._fewest()
        self.transfer = self.fewest / self.link
        one_pass = lambda tokens: seconds_of(self.plain, self.plain.inputs(tokens), self.device)[0]  # noqa: E731
        self.tokens = tokens_for(one_pass, self.transfer / ratio)
        self.inputs = self.plain.inputs(self.tokens)
        seconds_of(self.plain, self.inputs, self.device)
        self.seconds, self._expected = seconds_of(self.plain, self.inputs, self.device)

    def run(self, model: torch.nn.Module, name: str) -> float:
        """Seconds of a pass of a copy of the model, whose outputs are compared."""
        seconds, outputs = seconds_of(model, self.inputs, self.device)
        if not torch.equal(outputs, self._expected):
            raise RuntimeError(f"{name}: the outputs differ from the resident model's outputs")
        return seconds

    def _fewest(self) -> int:
        """Fewest bytes that one pass of a paged copy of the model has to bring in, in steady state."""
        inputs = self.plain.inputs(_PROBE_TOKENS)
        with Pool(self.budget, [Dram(2 * self.plain.nbytes)], device=self.device, prefetch=False) as pool:
            paged = [offload(copy.deepcopy(self.plain), pool)]

            def step(between: object) -> None:
                seconds_of(paged[0], inputs, self.device)

            step(None)
            (fewest,) = fewest_by_phase(pool, step)
            paged.clear()  # the copy's weights must not outlive the pool
            return fewest.fetched


def _shape(bench: Any, rate: float, ratio: float) -> tuple[int, int]:
    """Choose layers and width so that a layer computes long enough and everything fits into memory."""
    wanted = bench.layer_seconds * ratio * rate * _SHARE / (_SHARE - 1)
    width = _WIDTHS
    while block_bytes(width) < wanted:
        width += _WIDTHS
    layers = min(bench.layers, _most_bytes(bench) // block_bytes(width))
    return max(_SHARE, layers // _SHARE * _SHARE), width


def _most_bytes(bench: Any) -> int:
    if bench.device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory // bench.gpu_share)
    return int(bench.weight_bytes)


def measure_case(bench: Any, case: tuple[float | None, float]) -> Row:
    """Measure the pool and its rivals in turn with the resident model; without a rate the link is the real one."""
    rate, ratio = case
    model = _Model(bench, rate, ratio)
    link = f"{rate_text(rate)}, " if rate else ""
    plain, device = model.plain, model.device
    capacity = plain.nbytes * 5 // 4
    rival = _accelerate(model, rate)
    resident, with_copies = [], []
    with (
        nullcontext() if rate is None else Copier(rate) as copier,
        Pool(model.budget, [lower_tier(capacity, rate)], device=device) as pool,
        Pool(model.budget, [lower_tier(capacity, rate)], device=device, prefetch=False) as demand_pool,
    ):
        paged: torch.nn.Module = offload(copy.deepcopy(plain), pool)
        demand: torch.nn.Module = offload(copy.deepcopy(plain), demand_pool)
        on_demand = Rival("demand fetching", lambda: model.run(demand, "demand fetching"))
        ours = Pooled(pool, lambda between: model.run(paged, "farpool"))
        first = ours.step(lambda: None)
        for _ in range(_SETTLE):
            model.run(paged, "farpool")
        for _ in range(_SETTLE if device == "cuda" else 1):  # page-locking its memory must not disturb what counts
            model.run(demand, "demand fetching")
        if rival.work is not None:
            rival.work()
        for _ in told(bench.progress, f"{link}transfer {ratio:g}x compute", range(bench.rounds)):
            resident.append(model.run(plain, "resident"))
            if copier is not None:
                with_copies.append(copier.while_copying(lambda: model.run(plain, "resident"), model.fewest))
            ours.measure()
            on_demand.sample()
            rival.sample()
        strip = record_strip(pool, lambda mark: ours.step(mark), passes=2)
        stats = pool.stats()
        paged = demand = plain  # the copies' weights must not outlive the pools
    return Row(
        ours.row(model.transfer, resident, with_copies, (on_demand, rival)),
        rate=model.link,
        wanted=ratio,  # time on the link over time to compute: as asked for, and measured
        ratio=model.transfer / statistics.median(resident),
        layers=len(plain.blocks),
        width=plain.width,
        tokens=model.tokens,
        weight_bytes=plain.nbytes,
        budget_bytes=model.budget,
        peak_bytes=stats.fast.peak,
        fewest_bytes=model.fewest,  # that a pass has to bring in
        first_efficiency=max(model.seconds, model.transfer) / first,  # of the very first pass, without copies
        strip=strip,
        prefetches_used=stats.prefetches_used,
        prefetches_wasted=stats.prefetches_wasted,
    )


def _accelerate(model: _Model, rate: float | None) -> Rival:
    try:
        copied = accelerated(model.plain, model.device, rate)
    except ModuleNotFoundError as error:
        return Rival("accelerate", None, f"the package {error.name!r} is not installed")

    def step() -> float:
        seconds = model.run(copied, "accelerate")
        held = [name for name, parameter in copied.named_parameters() if parameter.device.type != "meta"]
        if held:
            raise RuntimeError(f"accelerate: {', '.join(held[:3])} are still there after a pass: it measures nothing")
        return seconds

    return Rival(f"accelerate {importlib.metadata.version('accelerate')}", step)


class PacedWeights(Mapping[str, torch.Tensor]):
    """Mapping of weights behind a simulated link: reading one takes its bytes over the rate, the copy included.

    `weights`: the weights, by name. `rate`: bytes per second; None where the link is real.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], rate: float | None) -> None:
        self._weights = weights
        self._rate = rate

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        if self._rate is None:
            return weight
        end = time.perf_counter() + weight.nbytes / self._rate
        copy = weight.clone()
        time.sleep(max(0.0, end - time.perf_counter()))
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def accelerated(plain: Stack, device: str, rate: float | None) -> Stack:
    """Make a copy of a stack under accelerate: each module fetches its weights before it runs and drops them after."""
    from accelerate.hooks import attach_align_device_hook

    weights = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    if device == "cuda":
        weights = {name: tensor.cpu().pin_memory() for name, tensor in weights.items()}
    with torch.device("meta"):
        model = Stack(len(plain.blocks), plain.width)
    attach_align_device_hook(
        model, execution_device=torch.device(device), offload=True, weights_map=PacedWeights(weights, rate)
    )
    return model
