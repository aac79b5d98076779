"""Measurement of plain, bare and paged tensors in turn: operations, layers, training steps, and rows of a table."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from farpool import Pool, offload, restore
from farpool_bench.harness import Row, told
from farpool_bench.measure import in_turn, mean_seconds, median_difference, median_ratio
from farpool_bench.stack import Stack, Trainer, seconds_of, synchronize, tokens_for

_WIDTH = 64
_ROWS = 8
_VOCABULARY = 1024
_LINEAR = 24
"""Number of linear layers that are trained."""
_WARM = 8
"""Number of passes before the first sample."""
_ROW_WIDTH = 4096
"""Elements of a row of the table, which take 16 KiB."""
_SHARE = 10
"""The table is this many times as large as the budget."""
_WARM_CALLS, _CALLS = 20, 60


class _Case(NamedTuple):
    """An operation as three calls: with plain arguments, with arguments in bare wrappers, and with paged ones."""

    name: str
    paged_arguments: int
    calls: tuple[Callable[[], object], ...]


def measure_case(bench: Any, case: str) -> Any:
    """Measure a part of the result."""
    measures = {"operations": _operations, "layers": _layers, "training": _training, "rows": _rows}
    return measures[case](bench)


def _operations(bench: Any) -> tuple[Row, ...]:
    """Measure the seconds of a call of each operation: plain, bare and paged in turn."""
    device, rows = bench.device, []
    with torch.no_grad(), Pool(fast="16MiB", dram="16MiB", device=device) as pool:
        for case in _cases(pool, device):
            works = [partial(_calls, work, bench.calls, device) for work in case.calls]
            for work in works * _WARM:
                work()
            plain, bare, paged = in_turn(works, bench.rounds, case.name, bench.progress)
            rows.append(
                Row(
                    name=case.name,
                    paged_arguments=case.paged_arguments,
                    plain=plain,
                    bare=bare,
                    paged=paged,
                    seconds_per_argument=median_difference(paged, plain) / case.paged_arguments,
                    seconds_over_bare=median_difference(paged, bare) / case.paged_arguments,
                )
            )
        del case, works  # their tensors must not outlive the pool
    return tuple(rows)


def _calls(work: Callable[[], object], calls: int, device: str) -> float:
    synchronize(device)
    seconds = mean_seconds(work, calls)
    synchronize(device)
    return seconds


def _cases(pool: Pool, device: str) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(0)

    def tensors(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make a plain tensor, one in a bare wrapper, and a paged one."""
        plain = torch.randn(*shape, generator=generator).to(device)
        return plain, BareTensor(plain.clone()), pool.from_tensor(plain)

    def case(name: str, work: Callable[..., object], *operands: tuple[torch.Tensor, ...], paged: int = 0) -> _Case:
        return _Case(name, paged or len(operands), tuple(partial(work, *one) for one in zip(*operands, strict=True)))

    inputs = torch.randn(_ROWS, _WIDTH, generator=generator).to(device)
    weight, bias, scale = tensors(_WIDTH, _WIDTH), tensors(_WIDTH), tensors(_WIDTH)
    yield case(f"linear {_WIDTH}×{_WIDTH}", lambda w, b: functional.linear(inputs, w, b), weight, bias)
    yield case("layer_norm", lambda w, b: functional.layer_norm(inputs, (_WIDTH,), w, b), scale, bias)
    added, moment = tensors(_WIDTH, _WIDTH), tensors(_WIDTH, _WIDTH)
    yield case("add_", lambda one: one.add_(weight[0]), added)

    yield case("mul_, add_ (moment)", lambda one, other: one.mul_(0.9).add_(other, alpha=0.1), moment, added, paged=3)
    table = torch.randn(_VOCABULARY, _WIDTH, generator=generator).to(device)
    words, bare, paged = (torch.nn.Embedding(_VOCABULARY, _WIDTH, _weight=table.clone()) for _ in range(3))
    wrap_parameters(bare)
    offload(paged, pool)
    row = torch.tensor([7], device=device)
    yield _Case("embedding row", 1, tuple(partial(module, row) for module in (words, bare, paged)))
    restore(paged)


def _layers(bench: Any) -> tuple[Row, ...]:
    """Measure passes through stacks whose layers take about so many seconds each: plain, bare and paged in turn."""
    return tuple(_stack(bench, seconds) for seconds in bench.layer_seconds)


def _stack(bench: Any, seconds: float) -> Row:
    device, layers, width = bench.device, bench.layers, bench.width
    plain, bare, paged = (Stack(layers, width).to(device) for _ in range(3))
    wrap_parameters(bare)
    tokens = tokens_for(lambda count: seconds_of(plain, plain.inputs(count), device)[0], seconds * layers)
    inputs = plain.inputs(tokens)

    def one_pass(model: torch.nn.Module) -> float:
        return seconds_of(model, inputs, device)[0]

    with Pool(fast=2 * paged.nbytes, dram=2 * paged.nbytes, device=device) as pool:
        offload(paged, pool)
        for _ in range(_WARM):
            expected, _, got = (seconds_of(model, inputs, device)[1] for model in (plain, bare, paged))
        works = [partial(one_pass, model) for model in (plain, bare, paged)]
        on_plain, on_bare, on_paged = in_turn(works, bench.rounds, f"Layers of {seconds * 1e3:g} ms", bench.progress)
        restore(paged)
    return Row(
        layer_seconds=statistics.median(on_plain) / layers,
        tokens=tokens,
        layers=layers,
        width=width,
        equal=torch.equal(expected, got),
        plain=on_plain,
        bare=on_bare,
        paged=on_paged,
        ratio=median_ratio(on_paged, on_plain),
        ratio_to_bare=median_ratio(on_paged, on_bare),
    )


def _training(bench: Any) -> Row:
    """Measure training steps of small linear layers with fused AdamW: plain and paged in turn, all resident."""
    device = bench.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LINEAR))).to(device)
        inputs = torch.randn(_ROWS, _WIDTH).to(device)
    paged = copy.deepcopy(plain)
    losses: list[list[torch.Tensor]] = [[], []]

    def step(trainer: Trainer, kept: list[torch.Tensor]) -> float:
        done = trainer.step()
        kept.append(done.loss)
        return done.seconds

    with Pool(fast="64MiB", dram="64MiB", device=device) as pool:
        offload(paged, pool)
        models = zip((plain, paged), losses, strict=True)
        works = [partial(step, Trainer(model, inputs), kept) for model, kept in models]
        for work in works * _WARM:
            work()
        on_plain, on_paged = in_turn(works, bench.rounds, "Training steps", bench.progress)
        restore(paged)
        equal = all(map(torch.equal, *losses))
        del work, works  # the optimizer's state must not outlive the pool
    parameters = len(list(plain.parameters()))
    more = median_difference(on_paged, on_plain) / parameters
    return Row(parameters=parameters, plain=on_plain, paged=on_paged, seconds_per_parameter=more, equal=equal)


def _rows(bench: Any) -> tuple[Row, ...]:
    """Pick rows of a large table at random, so many in a call, paged and plain in turn, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(_picked(bench, picked) for picked in bench.picked)
    finally:
        torch.set_num_threads(threads)


def _picked(bench: Any, picked: int) -> Row:
    device, count = bench.device, bench.table_rows
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(count, _ROW_WIDTH, generator=generator)
    table = torch.nn.Embedding(count, _ROW_WIDTH, _weight=weight.clone()).requires_grad_(False)
    plain, buffer = weight.to(device), torch.empty(picked, _ROW_WIDTH, device=device)
    nbytes = weight.nbytes
    samples: list[tuple[float, float, float]] = []
    equal = True
    with Pool(fast=nbytes // _SHARE, dram=nbytes + nbytes // 4, device=device) as pool:
        offload(table, pool)
        step = f"{picked} random rows of {_ROW_WIDTH * 4 >> 10} KiB"
        for _ in told(bench.progress, step, range(_WARM_CALLS + _CALLS)):
            rows = torch.randint(count, (picked,), generator=generator).to(device)
            synchronize(device)
            start, busy = time.perf_counter(), time.thread_time()
            result = functional.embedding(rows, table.weight)
            synchronize(device)
            taken, thread_taken = time.perf_counter() - start, time.thread_time() - busy
            start = time.perf_counter()
            torch.index_select(plain, 0, rows, out=buffer)
            synchronize(device)
            samples.append((taken, thread_taken, time.perf_counter() - start))
            equal = equal and torch.equal(result, buffer)
        del table
    seconds, thread_seconds, index_select = zip(*samples[_WARM_CALLS:], strict=True)
    return Row(
        row_bytes=_ROW_WIDTH * 4,
        table_bytes=nbytes,
        budget_bytes=nbytes // _SHARE,
        picked=picked,
        seconds=seconds,  # of a call of `embedding` on the paged table
        thread_seconds=thread_seconds,  # of the calling thread in these calls
        index_select=index_select,  # from a plain table into a buffer
        bytes_per_second=picked * _ROW_WIDTH * 4 / statistics.median(seconds),
        thread_seconds_per_row=statistics.median(thread_seconds) / picked,
        equal=equal,
    )


class BareTensor(torch.Tensor):
    """A tensor that wraps another one and computes with it; results are plain."""

    _held: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[BareTensor], held: torch.Tensor) -> BareTensor:
        self: BareTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )
        self._held = held
        return self

    @staticmethod
    def __torch_dispatch__(  # type: ignore[override]
        func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*[value._held if type(value) is BareTensor else value for value in args], **(kwargs or {}))


def wrap_parameters(module: torch.nn.Module) -> None:
    """Wrap the parameters of a module, which cannot be trained any more."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = BareTensor(parameter.detach())  # type: ignore[assignment]
