"""Measurement of one case of the streaming benchmark: a rate of the link and an amount of compute."""

from __future__ import annotations

import copy
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from farpool import Dram, Pool, offload
from farpool.memory.pager.storage import cut
from farpool.memory.pool.events import Event
from farpool_bench.accelerated import accelerated
from farpool_bench.link import Copier, fetched, link_rate, lower_tier
from farpool_bench.measure import median_ratio
from farpool_bench.peer import measured, missing
from farpool_bench.sequence import fewest_bytes
from farpool_bench.stack import Stack, block_bytes, seconds_of, tokens_for
from farpool_bench.streaming_outcome import Case, Settings
from farpool_bench.strip import Strip, strip_of

__all__ = ["measure_case"]

_SHARE = 4
"""The weights are this many times as large as the budget."""
_SETTLE = 8
"""Number of passes after the first one before samples are taken."""
_WIDTHS = 128
_PROBE_TOKENS = 8


def shape_for(settings: Settings, rate: float, ratio: float) -> tuple[int, int]:
    """Choose layers and width so that a layer computes long enough and everything fits into memory."""
    wanted = settings.layer_seconds * ratio * rate * _SHARE / (_SHARE - 1)
    width = _WIDTHS
    while block_bytes(width) < wanted:
        width += _WIDTHS
    layers = min(settings.layers, _most_bytes(settings) // block_bytes(width))
    return max(_SHARE, layers // _SHARE * _SHARE), width


def _most_bytes(settings: Settings) -> int:
    if settings.device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory) // settings.gpu_share
    return settings.weight_bytes


def fewest_of(model: Stack, budget: int, device: str) -> int:
    """Fewest bytes that one pass of a paged copy of the model has to bring in, in steady state."""
    inputs = model.inputs(_PROBE_TOKENS)
    with Pool(budget, [Dram(2 * model.nbytes)], device=device, prefetch=False) as pool:
        step = partial(seconds_of, offload(copy.deepcopy(model), pool), inputs, device)
        step()
        fewest = fewest_bytes(pool, step)
        del step  # nobody needs the copy's weights when the pool ends
        return fewest.fetched


@dataclass(slots=True)
class _Samples:
    """Samples of a case, one for each round."""

    resident: list[float] = field(default_factory=list)
    beside_copies: list[float] = field(default_factory=list)
    paged: list[float] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    demand: list[float] = field(default_factory=list)
    accelerate: list[float] = field(default_factory=list)


def measure_case(settings: Settings, rate: float | None, ratio: float, told: Callable[[int, int], None]) -> Case:
    """Measure farpool, demand fetching and accelerate beside the resident model.

    Parameters
    ----------
    rate : float or None
        Bytes per second of the link; None to use the real one.
    ratio : float
        Time on the link over time to compute.
    told : callable
        Told the number of rounds that are done, and of all rounds.
    """
    device = settings.device
    link = rate if rate is not None else link_rate(cut(_most_bytes(settings) // _SHARE).largest)
    layers, width = shape_for(settings, link, ratio)
    plain = Stack(layers, width).to(device).eval()
    budget = plain.nbytes // _SHARE
    fewest = fewest_of(plain, budget, device)
    transfer = fewest / link
    tokens = tokens_for(lambda count: seconds_of(plain, plain.inputs(count), device)[0], transfer / ratio)
    inputs = plain.inputs(tokens)
    seconds_of(plain, inputs, device)
    resident_seconds, expected = seconds_of(plain, inputs, device)

    def run(model: torch.nn.Module, name: str) -> float:
        seconds, outputs = seconds_of(model, inputs, device)
        if not torch.equal(outputs, expected):
            raise RuntimeError(f"{name}: the outputs differ from those of the resident model")
        return seconds

    capacity = plain.nbytes * 5 // 4
    peer, reason = _accelerated(plain, device, rate)
    samples = _Samples()
    with (
        nullcontext() if rate is None else Copier(rate) as copier,
        Pool(budget, [lower_tier(capacity, rate)], device=device) as pool,
        Pool(budget, [lower_tier(capacity, rate)], device=device, prefetch=False) as demand_pool,
    ):
        paged = offload(copy.deepcopy(plain), pool)
        demand = offload(copy.deepcopy(plain), demand_pool)
        first = run(paged, "farpool")
        for _ in range(_SETTLE):
            run(paged, "farpool")
        for _ in range(_SETTLE if device == "cuda" else 1):  # page-locking its memory must not disturb what counts
            run(demand, "demand fetching")
        if peer is not None:
            run(peer, "accelerate")
        for done in range(settings.rounds):
            told(done, settings.rounds)
            samples.resident.append(run(plain, "resident"))
            if copier is not None:
                samples.beside_copies.append(copier.beside(lambda: run(plain, "resident"), fewest))
            run(paged, "farpool")
            before = pool.stats()
            samples.paged.append(run(paged, "farpool"))
            after = pool.stats()
            samples.stalled.append(after.stall_seconds - before.stall_seconds)
            samples.moved.append(fetched(after) - fetched(before))
            samples.demand.append(run(demand, "demand fetching"))
            if peer is not None:
                samples.accelerate.append(run(peer, "accelerate"))
                _check_dropped(peer)
        told(settings.rounds, settings.rounds)
        strip = _strip(pool, lambda: run(paged, "farpool"))
        stats = pool.stats()
        paged = demand = plain  # nobody needs the copies' weights when the pools end
    limits = [max(seconds, transfer) for seconds in samples.beside_copies or samples.resident]
    peers = [measured("demand fetching", samples.demand, samples.paged, limits)]
    if peer is None:
        peers.append(missing("accelerate", reason))
    else:
        version = importlib.metadata.version("accelerate")
        peers.append(measured(f"accelerate {version}", samples.accelerate, samples.paged, limits))
    return Case(
        rate=link,
        wanted=ratio,
        ratio=transfer / statistics.median(samples.resident),
        layers=layers,
        width=width,
        tokens=tokens,
        weight_bytes=plain.nbytes,
        budget_bytes=budget,
        peak_bytes=stats.fast.peak,
        fewest_bytes=fewest,
        moved_bytes=round(statistics.median(samples.moved)),
        transfer_seconds=transfer,
        resident_seconds=tuple(samples.resident),
        paged_seconds=tuple(samples.paged),
        stall_seconds=statistics.median(samples.stalled),
        efficiency=median_ratio(limits, samples.paged),
        first_efficiency=max(resident_seconds, transfer) / first,
        equal=True,
        peers=tuple(peers),
        strip=strip,
        prefetches_used=stats.prefetches_used,
        prefetches_wasted=stats.prefetches_wasted,
        beside_copies_seconds=tuple(samples.beside_copies) or None,
    )


def _accelerated(plain: Stack, device: str, rate: float | None) -> tuple[Stack | None, str]:
    try:
        return accelerated(plain, device, rate), ""
    except ModuleNotFoundError as error:
        return None, f"the package {error.name!r} is not installed"


def _check_dropped(model: Stack) -> None:
    held = [name for name, parameter in model.named_parameters() if parameter.device.type != "meta"]
    if held:
        raise RuntimeError(f"accelerate: {', '.join(held[:3])} are still there after a pass: it measures nothing")


def _strip(pool: Pool, work: Callable[[], float]) -> Strip:
    """Record two passes in a row, after one that is left out."""
    events: list[Event] = []
    end_subscription = pool.subscribe(events.append)
    work()
    marks = []
    for _ in range(2):
        marks.append(time.monotonic())
        work()
    stop = time.monotonic()
    end_subscription()
    return strip_of(events, marks[0], stop, marks)
