"""Measurement of one case of the training benchmark, which is an amount of compute."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch

from farpool import Dram, Pool, offload
from farpool.memory.pager.belady import Moved, total_of
from farpool.memory.pager.storage import cut
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import Stats
from farpool_bench.link import fetched, link_rate, lower_tier, written
from farpool_bench.measure import median_ratio
from farpool_bench.sequence import fewest_by_phase
from farpool_bench.stack import Stack, block_bytes, tokens_for
from farpool_bench.strip import strip_of
from farpool_bench.trainer import Step, Trainer
from farpool_bench.training_outcome import Case, InBackward, Phase, Settings
from farpool_bench.training_peers import open_candidates

__all__ = ["fewest_of", "link_of", "measure_case", "shape_of"]

_STATE, _SHARE = 4, 6
"""Size of weights, gradients and two moments as a multiple of the weights; the budget is that divided by the second."""
_LOWER = 5
"""Size of the lower tier, as a multiple of the weights."""
_SETTLE = {"cpu": 3, "cuda": 12}
"""Number of steps after the first one before samples are taken; on a GPU host memory is page-locked meanwhile."""
_PHASES = ("forward", "backward", "optimizer")
_PROBE_TOKENS = 8
_GPU_WIDTH = 2048
"""Width of the transformer blocks on a GPU."""


def shape_of(settings: Settings) -> tuple[int, int]:
    """Number of layers and width of the stack."""
    if settings.device != "cuda":
        return settings.layers, settings.width
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return max(1, memory // settings.gpu_share // block_bytes(_GPU_WIDTH)), _GPU_WIDTH


def link_of(settings: Settings) -> float:
    """Bytes per second of the link, in each direction."""
    if settings.device != "cuda":
        return settings.rate
    return link_rate(cut(_budget(Stack(*shape_of(settings)))).largest)


def fewest_of(settings: Settings, *, in_backward: bool = False) -> tuple[Moved, ...]:
    """Fewest bytes that each phase of a step has to move, in steady state; the tokens make no difference."""
    model = Stack(*shape_of(settings)).to(settings.device)
    inputs = model.inputs(_PROBE_TOKENS)
    with Pool(_budget(model), [Dram(_LOWER * model.nbytes)], device=settings.device, prefetch=False) as pool:
        offload(model, pool)
        trainer = Trainer(model, inputs, in_backward=in_backward)
        for _ in range(2):
            trainer.step()
        fewest = fewest_by_phase(pool, trainer.step)
        del model, trainer  # nobody needs their tensors when the pool ends
        return fewest


def _budget(model: Stack) -> int:
    return model.nbytes * _STATE // _SHARE


@dataclass(slots=True)
class _Samples:
    """Samples of a case, one for each round."""

    resident: list[Step] = field(default_factory=list)
    paged: list[Step] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)


def measure_case(
    settings: Settings,
    rate: float,
    phases: Sequence[Moved],
    phases_in_backward: Sequence[Moved],
    ratio: float,
    told: Callable[[int, int], None],
) -> Case:
    """Measure farpool and its peers beside the resident model.

    Parameters
    ----------
    rate : float
        Bytes per second of the link, in each direction.
    phases, phases_in_backward : sequence of Moved
        What each phase of a step has to move, where parameters are stepped after the backward pass and inside it.
    ratio : float
        Time on the link over time to compute.
    told : callable
        Told the number of rounds that are done, and of all rounds.
    """
    device = settings.device
    fewest, fewest_in_backward = total_of(phases), total_of(phases_in_backward)
    link_seconds = max(fewest.fetched, fewest.written) / rate
    plain = Stack(*shape_of(settings)).to(device)
    inputs = plain.inputs(_tokens(plain, link_seconds / ratio))
    budget = _budget(plain)
    lower = lower_tier(_LOWER * plain.nbytes, settings.rate if device == "cpu" else None)
    samples = _Samples()
    losses: list[torch.Tensor] = []
    paged_losses: list[torch.Tensor] = []
    with ExitStack() as stack:
        candidates = open_candidates(stack, plain, inputs)
        pool = stack.enter_context(Pool(budget, [lower], device=device))
        paged_model = copy.deepcopy(plain)
        offload(paged_model, pool)
        paged = Trainer(paged_model, inputs)
        in_backward = stack.enter_context(_InBackward(plain, inputs, settings, fewest_in_backward, rate))
        resident = Trainer(plain, inputs)

        def step(trainer: Trainer, kept: list[torch.Tensor], between: Callable[[], None] = lambda: None) -> Step:
            done = trainer.step(between)
            kept.append(done.loss)
            return done

        between_phases: list[Stats] = []

        def note() -> None:
            between_phases.append(pool.stats())

        first = step(resident, losses), step(paged, paged_losses)
        in_backward.settle(1)
        for _ in range(_SETTLE[settings.device]):
            step(resident, losses)
            step(paged, paged_losses)
            in_backward.settle(1)
        for done in range(settings.rounds):
            told(done, settings.rounds)
            step(resident, losses)
            samples.resident.append(step(resident, losses))
            step(paged, paged_losses)
            before = pool.stats()
            samples.paged.append(step(paged, paged_losses, note))
            ends = [before, *between_phases, pool.stats()]
            between_phases.clear()
            samples.stalled.append(ends[-1].stall_seconds - before.stall_seconds)
            samples.read.append([fetched(after) - fetched(start) for start, after in pairwise(ends)])
            samples.written.append([written(after) - written(start) for start, after in pairwise(ends)])
            in_backward.measure()
            for candidate in candidates:
                candidate.measure()
        told(settings.rounds, settings.rounds)
        for kept in (paged_losses, in_backward.losses):
            for number, (loss, other) in enumerate(zip(losses, kept, strict=True)):
                if not torch.equal(loss, other):
                    raise RuntimeError(
                        f"farpool: the loss of step {number} is {other.item()!r}, resident {loss.item()!r}"
                    )
        events: list[Event] = []
        step(paged, paged_losses)
        end_subscription = pool.subscribe(events.append)
        start = time.monotonic()
        marks = [start]
        step(paged, paged_losses, lambda: marks.append(time.monotonic()))
        strip = strip_of(events, start, time.monotonic(), marks)
        end_subscription()
        peak = pool.stats().fast.peak
        limits = [max(one.seconds, link_seconds) for one in samples.resident]
        ours = [one.seconds for one in samples.paged]
        peers = tuple(candidate.result(ours, limits) for candidate in candidates)
        by_phases = [
            sum(
                max(seconds, max(needed.fetched, needed.written) / rate)
                for seconds, needed in zip(_seconds(one), phases, strict=True)
            )
            for one in samples.resident
        ]
        stepped = in_backward.result([one.seconds for one in samples.resident])
        del paged, paged_model  # nobody needs their tensors when the pool ends
    resident_seconds = [one.seconds for one in samples.resident]
    return Case(
        wanted=ratio,
        ratio=link_seconds / statistics.median(resident_seconds),
        tokens=inputs.shape[1],
        state_bytes=_STATE * plain.nbytes,
        budget_bytes=budget,
        peak_bytes=peak,
        fewest_read=fewest.fetched,
        fewest_written=fewest.written,
        moved_read=_median([sum(parts) for parts in samples.read]),
        moved_written=_median([sum(parts) for parts in samples.written]),
        link_seconds=link_seconds,
        resident_seconds=tuple(resident_seconds),
        paged_seconds=tuple(ours),
        stall_seconds=statistics.median(samples.stalled),
        efficiency=median_ratio(limits, ours),
        first_efficiency=max(first[0].seconds, link_seconds) / first[1].seconds,
        efficiency_by_phases=median_ratio(by_phases, ours),
        phases=_phases(samples, phases),
        equal=True,
        peers=peers,
        strip=strip,
        in_backward=stepped,
    )


class _InBackward:
    """A trainer that steps inside the backward pass, with a pool of its own."""

    def __init__(self, plain: Stack, inputs: torch.Tensor, settings: Settings, fewest: Moved, rate: float) -> None:
        self.losses: list[torch.Tensor] = []
        self._fewest = fewest
        self._link_seconds = max(fewest.fetched, fewest.written) / rate
        self._seconds: list[float] = []
        self._read: list[int] = []
        self._written: list[int] = []
        lower = lower_tier(_LOWER * plain.nbytes, settings.rate if settings.device == "cpu" else None)
        self._pool = Pool(_budget(plain), [lower], device=settings.device)
        model = copy.deepcopy(plain)
        offload(model, self._pool)
        self._trainer: Trainer | None = Trainer(model, inputs, in_backward=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer = None  # nobody needs its tensors when the pool ends
        self._pool.__exit__(None, None, None)

    def settle(self, steps: int) -> None:
        """Do steps that are not timed."""
        for _ in range(steps):
            self._step()

    def measure(self) -> None:
        """Do one timed step, after one that is not."""
        self._step()
        before = self._pool.stats()
        self._seconds.append(self._step())
        after = self._pool.stats()
        self._read.append(fetched(after) - fetched(before))
        self._written.append(written(after) - written(before))

    def _step(self) -> float:
        assert self._trainer is not None
        done = self._trainer.step()
        self.losses.append(done.loss)
        return done.seconds

    def result(self, resident: Sequence[float]) -> InBackward:
        limits = [max(seconds, self._link_seconds) for seconds in resident]
        return InBackward(
            self._fewest.fetched,
            self._fewest.written,
            _median(self._read),
            _median(self._written),
            self._link_seconds,
            tuple(self._seconds),
            median_ratio(limits, self._seconds),
        )


def _tokens(plain: Stack, seconds: float) -> int:
    """Number of tokens with which a resident step takes about `seconds`; the model itself is not changed."""
    trial = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(trial.parameters(), lr=0.0)

    def seconds_with(tokens: int) -> float:
        return Trainer(trial, trial.inputs(tokens), optimizer).step().seconds

    seconds_with(_PROBE_TOKENS)
    return tokens_for(seconds_with, seconds)


def _seconds(step: Step) -> tuple[float, float, float]:
    return step.forward, step.backward, step.optimizer


def _phases(samples: _Samples, fewest: Sequence[Moved]) -> tuple[Phase, ...]:
    return tuple(
        Phase(
            name,
            statistics.median(_seconds(one)[index] for one in samples.resident),
            statistics.median(_seconds(one)[index] for one in samples.paged),
            _median([parts[index] for parts in samples.read]),
            _median([parts[index] for parts in samples.written]),
            fewest[index].fetched,
            fewest[index].written,
        )
        for index, name in enumerate(_PHASES)
    )


def _median(samples: list[int]) -> int:
    return round(statistics.median(samples))
