"""Measurement of one case of the training benchmark, which is an amount of compute."""

from __future__ import annotations

import copy
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch

from farpool import Dram, Pool, offload
from farpool.errors import FarpoolError
from farpool.memory.pager.belady import Moved, total_of
from farpool.memory.pager.storage import cut
from farpool_bench.harness import Row, told
from farpool_bench.link import Pooled, fewest_by_phase, link_rate, lower_tier, record_strip
from farpool_bench.measure import Rival, median_ratio
from farpool_bench.stack import LEARNING_RATE, Stack, Step, Trainer, block_bytes, tokens_for
from farpool_bench.worker import Worker

_STATE, _SHARE = 4, 6
"""Size of weights, gradients and two moments as a multiple of the weights; the budget is that divided by the second."""
_LOWER = 5
"""Size of the lower tier, as a multiple of the weights."""
_SETTLE = {"cpu": 3, "cuda": 12}
"""Number of steps after the first one before samples are taken; on a GPU host memory is page-locked in these."""
_PHASES = ("forward", "backward", "optimizer")
_PROBE_TOKENS = 8
_GPU_WIDTH = 2048
_GPU_ONLY = "needs a GPU: it keeps the optimizer's state in page-locked or managed memory next to CUDA memory"
_NO_LINK = "not comparable: host and device are the same memory here, it moves nothing over the link"


def shape_of(bench: Any) -> tuple[int, int]:
    """Number of layers and width of the stack."""
    if bench.device != "cuda":
        return bench.layers, bench.width
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return max(1, memory // bench.gpu_share // block_bytes(_GPU_WIDTH)), _GPU_WIDTH


def link_of(bench: Any) -> float:
    """Bytes per second of the link, in each direction."""
    if bench.device != "cuda":
        return float(bench.rate)
    return link_rate(cut(_budget(Stack(*shape_of(bench)))).largest)


def fewest_of(bench: Any, *, in_backward: bool) -> tuple[Moved, ...]:
    """Fewest bytes that each phase of a step has to move, in steady state; the tokens make no difference."""
    model = Stack(*shape_of(bench)).to(bench.device)
    inputs = model.inputs(_PROBE_TOKENS)
    with Pool(_budget(model), [Dram(_LOWER * model.nbytes)], device=bench.device, prefetch=False) as pool:
        offload(model, pool)
        trainer = Trainer(model, inputs, in_backward=in_backward)
        for _ in range(2):
            trainer.step()
        fewest = fewest_by_phase(pool, trainer.step)
        del model, trainer  # their tensors must not outlive the pool
        return fewest


def _budget(model: Stack) -> int:
    return model.nbytes * _STATE // _SHARE


class _Kept:
    """A trainer whose steps are kept."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Trainer | None = trainer
        self.steps: list[Step] = []

    def step(self, between: Callable[[], None] = lambda: None) -> float:
        """Do a step; returns its seconds."""
        assert self.trainer is not None
        self.steps.append(self.trainer.step(between))
        return self.steps[-1].seconds


class _Paged(_Kept):
    """A trainer in a pool of its own."""

    def __init__(self, bench: Any, plain: Stack, inputs: torch.Tensor, fewest: Moved, *, in_backward: bool) -> None:
        self.fewest = fewest
        self.link_seconds = max(fewest.fetched, fewest.written) / bench.link
        lower = lower_tier(_LOWER * plain.nbytes, bench.rate if bench.device == "cpu" else None)
        self.pool = Pool(_budget(plain), [lower], device=bench.device)
        model = copy.deepcopy(plain)
        offload(model, self.pool)
        super().__init__(Trainer(model, inputs, in_backward=in_backward))
        self.timed = Pooled(self.pool, self.step)

    def close(self) -> None:
        """Close the pool."""
        self.trainer = None  # its tensors must not outlive the pool
        self.pool.__exit__(None, None, None)

    def row(self, resident: Sequence[float]) -> Row:
        """Make the part of a row that both ways of training have."""
        limits = [max(seconds, self.link_seconds) for seconds in resident]
        return Row(
            fewest_read=self.fewest.fetched,  # bytes that a step has to move (Belady), and that it moved
            fewest_written=self.fewest.written,
            moved_read=self.timed.moved("read"),
            moved_written=self.timed.moved("written"),
            link_seconds=self.link_seconds,  # of the fewest bytes of the busier direction
            paged_seconds=tuple(self.timed.seconds),
            efficiency=median_ratio(limits, self.timed.seconds),
        )


def measure_case(bench: Any, ratio: float) -> Row:
    """Measure the pools and the rivals in turn with the resident model."""
    with ExitStack() as stack:
        return _Case(stack, bench, ratio).run()


class _Case:
    """One case: the resident model, the pools and the rivals, which `stack` closes.

    `ratio` is the time on the link over the time to compute.
    """

    def __init__(self, stack: ExitStack, bench: Any, ratio: float) -> None:
        self._bench, self._ratio = bench, ratio
        after, inside = map(total_of, bench.fewest)
        plain = self._plain = Stack(*shape_of(bench)).to(bench.device)
        self._inputs = plain.inputs(_tokens(plain, max(after.fetched, after.written) / bench.link / ratio))
        self._rivals = open_rivals(stack, plain, self._inputs)
        self._paged = _Paged(bench, plain, self._inputs, after, in_backward=False)
        stack.callback(self._paged.close)
        self._inside = _Paged(bench, plain, self._inputs, inside, in_backward=True)
        stack.callback(self._inside.close)
        self._resident = _Kept(Trainer(plain, self._inputs))

    def run(self) -> Row:
        """Take all samples, and put them together."""
        trainers = self._resident, self._paged, self._inside
        first = max(self._resident.step(), self._paged.link_seconds) / self._paged.step()
        self._inside.step()
        for _ in range(_SETTLE[self._bench.device]):
            for trainer in trainers:
                trainer.step()
        timed: list[tuple[Step, Step]] = []
        for _ in told(self._bench.progress, f"Transfer {self._ratio:g}x compute", range(self._bench.rounds)):
            self._resident.step()
            self._resident.step()
            self._paged.timed.measure()
            timed.append((self._resident.steps[-1], self._paged.steps[-1]))
            self._inside.timed.measure()
            for rival in self._rivals:
                rival.sample()
        for number, steps in enumerate(zip(*(trainer.steps for trainer in trainers), strict=True)):
            loss, *others = (step.loss for step in steps)
            for other in others:
                if not torch.equal(loss, other):
                    raise RuntimeError(
                        f"farpool: the loss of step {number} is {other.item()!r}, resident {loss.item()!r}"
                    )
        return self._row(timed, first)

    def _row(self, timed: list[tuple[Step, Step]], first_efficiency: float) -> Row:
        resident = [plain.seconds for plain, _ in timed]
        strip = record_strip(self._paged.pool, self._paged.step, passes=1)
        needs = [max(needed.fetched, needed.written) / self._bench.link for needed in self._bench.fewest[0]]
        by_phases = [sum(map(max, plain.phases, needs)) for plain, _ in timed]
        compared = self._paged.timed.row(self._paged.link_seconds, resident, (), self._rivals)
        return Row(
            self._paged.row(resident),
            wanted=self._ratio,  # time on the link over time to compute: as asked for, and measured
            ratio=self._paged.link_seconds / statistics.median(resident),
            tokens=self._inputs.shape[1],
            state_bytes=_STATE * self._plain.nbytes,  # of weights, gradients and moments
            budget_bytes=_budget(self._plain),
            peak_bytes=self._paged.pool.stats().fast.peak,
            first_efficiency=first_efficiency,  # of the very first step
            efficiency_by_phases=median_ratio(by_phases, self._paged.timed.seconds),
            phases=tuple(self._phase(timed, index) for index in range(len(_PHASES))),
            strip=strip,
            in_backward=self._inside.row(resident),
            **{name: compared[name] for name in ("resident_seconds", "stall_seconds", "equal", "peers")},
        )

    def _phase(self, timed: list[tuple[Step, Step]], index: int) -> Row:
        """Medians of a phase; bytes count when their transfer ends, and the fewest count its own accesses alone."""
        part, fewest = slice(index, index + 1), self._bench.fewest[0][index]
        return Row(
            name=_PHASES[index],
            resident_seconds=statistics.median(plain.phases[index] for plain, _ in timed),
            paged_seconds=statistics.median(paged.phases[index] for _, paged in timed),
            read=self._paged.timed.moved("read", part),
            written=self._paged.timed.moved("written", part),
            fewest_read=fewest.fetched,
            fewest_written=fewest.written,
        )


def _tokens(plain: Stack, seconds: float) -> int:
    """Number of tokens with which a resident step takes about `seconds`; the model itself is not changed."""
    trial = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(trial.parameters(), lr=0.0)

    def seconds_with(tokens: int) -> float:
        return Trainer(trial, trial.inputs(tokens), optimizer).step().seconds

    seconds_with(_PROBE_TOKENS)
    return tokens_for(seconds_with, seconds)


def open_rivals(stack: ExitStack, plain: Stack, inputs: torch.Tensor) -> list[Rival]:
    """Start the rivals, ready to step; `stack` closes them."""
    return [
        _deepspeed(stack, plain, inputs),
        _in_process("torchao CPUOffloadOptimizer", "torchao", _torchao, plain, inputs),
        _in_process("bitsandbytes PagedAdamW", "bitsandbytes", _bitsandbytes, plain, inputs),
    ]


def _in_process(name: str, package: str, make: Callable[[Any], Any], plain: Stack, inputs: torch.Tensor) -> Rival:
    if inputs.device.type != "cuda":
        return Rival(name, None, _GPU_ONLY)
    if importlib.util.find_spec(package) is None:
        return Rival(name, None, f"the package {package!r} is not installed")
    model = copy.deepcopy(plain)
    trainer = Trainer(model, inputs, make(model.parameters()))

    def step() -> float:
        trainer.step()
        return trainer.step().seconds

    step()
    return Rival(name, step)


def _torchao(parameters: Any) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=True, lr=LEARNING_RATE)


def _bitsandbytes(parameters: Any) -> Any:
    from bitsandbytes.optim import PagedAdamW32bit

    return PagedAdamW32bit(parameters, lr=LEARNING_RATE)


def _deepspeed(stack: ExitStack, plain: Stack, inputs: torch.Tensor) -> Rival:
    name = "DeepSpeed ZeRO-Offload"
    if importlib.util.find_spec("deepspeed") is None:
        return Rival(name, None, "the package 'deepspeed' is not installed")
    name = f"DeepSpeed {version('deepspeed')} ZeRO-Offload"
    arguments = [str(len(plain.blocks)), str(plain.width), str(inputs.shape[1]), inputs.device.type]
    try:
        worker = Worker("deepspeed_worker", arguments).started(stack)
    except (FarpoolError, OSError) as error:
        return Rival(name, None, str(error))
    on_cpu = inputs.device.type == "cpu"
    step = lambda: float(worker.ask("step", "seconds"))  # noqa: E731 - a step after an untimed one
    return Rival(name, step, _NO_LINK if on_cpu else "", comparable=not on_cpu)
