"""Measurement of one case of the benchmark of generation with keys and values in a pool."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from farpool import Pool
from farpool.kv.transformers import FarpoolCache
from farpool.kv.transformers_config import cache_argument
from farpool.kv.transformers_layer import PagedLayer
from farpool.memory.pool.pool import blocks_of
from farpool_bench.kv_generate_outcome import Case, Settings
from farpool_bench.link import Copier, fetched, lower_tier
from farpool_bench.measure import median_ratio
from farpool_bench.peer import measured, missing

__all__ = ["measure_case"]

_SHARE = 4
"""Keys and values are this many times as large as the budget."""
_SETTLE = 12
"""Number of tokens before samples are taken."""
_VOCABULARY = 1024


@dataclass(slots=True)
class _Samples:
    """Samples of a case, one for each round."""

    resident: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    paged: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    demand: list[float] = field(default_factory=list)


def measure_case(settings: Settings, rate: float, told: Callable[[int], None]) -> Case:
    """Measure the pool, and demand fetching, beside a cache that is wholly resident.

    Parameters
    ----------
    rate : float
        Bytes per second of the link.
    told : callable
        Told the number of rounds that are done.
    """
    model = _model(settings)
    kv_bytes = settings.layers * 2 * settings.kv_heads * settings.context * settings.head_dim * torch.float32.itemsize
    budget = kv_bytes // _SHARE
    tokens = settings.context + 2 * (settings.rounds + _SETTLE)
    # As much as `OperandMemory` takes for the keys and values of a layer.
    operands = kv_bytes // settings.layers // settings.context * tokens * 33 // 32
    fewest = kv_bytes - budget
    transfer = fewest / rate
    capacity = kv_bytes * 3 // 2
    samples = _Samples()
    with (
        Copier(rate) as copier,
        Pool(budget - operands, [lower_tier(capacity, rate)]) as pool,
        Pool(budget - operands, [lower_tier(capacity, rate)], prefetch=False) as demand_pool,
    ):
        resident = DynamicCache(config=model.config)
        paged, demand = (FarpoolCache(model.config, pool=one) for one in (pool, demand_pool))
        for cache in (resident, paged, demand):
            _fill(cache, settings)

        argument = cache_argument(model)

        def step(cache: Any, token: int) -> tuple[float, torch.Tensor]:
            inputs = torch.tensor([[token % _VOCABULARY]])
            start = time.perf_counter()
            with torch.no_grad():
                logits: torch.Tensor = model(inputs, use_cache=True, **{argument: cache}).logits
            return time.perf_counter() - start, logits

        def same(cache: Any, token: int, expected: torch.Tensor, name: str) -> float:
            seconds, logits = step(cache, token)
            if not torch.equal(logits, expected):
                raise RuntimeError(f"{name}: the logits differ from those of the resident cache")
            return seconds

        told(0)
        for done in range(-_SETTLE // 2, settings.rounds):
            first, second = 2 * done, 2 * done + 1
            alone, one = step(resident, first)
            after: list[torch.Tensor] = []

            def work(second: int = second, after: list[torch.Tensor] = after) -> float:
                seconds, logits = step(resident, second)
                after.append(logits)
                return seconds

            beside = copier.beside(work, fewest)
            same(paged, first, one, "farpool")
            before = pool.stats()
            seconds = same(paged, second, after[0], "farpool")
            stats = pool.stats()
            same(demand, first, one, "demand fetching")
            on_demand = same(demand, second, after[0], "demand fetching")
            if done < 0:
                continue
            samples.resident.append(alone)
            samples.beside.append(beside)
            samples.paged.append(seconds)
            samples.stalled.append(stats.stall_seconds - before.stall_seconds)
            samples.moved.append(fetched(stats) - fetched(before))
            samples.demand.append(on_demand)
            told(done + 1)
        peak = pool.stats().fast.peak
        booked = blocks_of(pool).ledger.total(owner="KV operands").reserved
        if booked > operands:
            raise RuntimeError(f"operands take {booked} bytes, {operands} are counted against the budget")
    limits = [max(seconds, transfer) for seconds in samples.beside]
    return Case(
        rate=rate,
        kv_bytes=kv_bytes,
        budget_bytes=budget,
        operand_bytes=operands,
        peak_bytes=peak,
        fewest_bytes=fewest,
        moved_bytes=round(statistics.median(samples.moved)),
        transfer_seconds=transfer,
        resident_seconds=tuple(samples.resident),
        beside_copies_seconds=tuple(samples.beside),
        paged_seconds=tuple(samples.paged),
        stall_seconds=statistics.median(samples.stalled),
        efficiency=median_ratio(limits, samples.paged),
        equal=True,
        peers=(
            measured("demand fetching", samples.demand, samples.paged, limits),
            missing("transformers' offloaded cache", "needs CUDA"),
        ),
    )


def _model(settings: Settings) -> Any:
    width = settings.query_heads * settings.head_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=_VOCABULARY,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.query_heads,
                num_key_value_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                max_position_embeddings=2 * settings.context,
            )
        )
        return model.eval()  # type: ignore[no-untyped-call]


def _fill(cache: Any, settings: Settings) -> None:
    """Put a context of random keys and values into a cache, the same into each.

    To compute one of this length would take many times as long as all that is measured.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (1, settings.kv_heads, settings.context, settings.head_dim)
    for number, layer in enumerate(cache.layers):
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        if type(layer) is PagedLayer:
            layer.extend(keys, values)
        else:
            cache.update(keys, values, number)
