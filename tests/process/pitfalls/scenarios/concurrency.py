"""Threads, forks, data loaders."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import farpool
from farpool import Nvme, Pool, PoolClosedError
from tests.process.pitfalls.compare import integers, may_raise, randn, same, state_of
from tests.process.pitfalls.harness import scenario


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 10))


def train(module: nn.Module, steps: int = 5) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        module(integers(50, 8, seed=step)).pow(2).mean().backward()
        optimizer.step()
    return state_of(module)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Results of functions that run at the same time."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def run(index: int) -> None:
        try:
            torch.set_num_threads(1)
            barrier.wait(10)
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 45
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return results


@scenario()
def two_threads_run_forward_on_one_model(pool: Pool) -> None:
    batches = [integers(50, 8, seed=seed) for seed in range(60)]
    expected_model = model().eval()
    module = farpool.offload(model().eval(), pool)

    def forward(network: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            return [network(batch) for batch in batches]

    expected = forward(expected_model)
    for result in in_threads(*[lambda: forward(module)] * 2):
        same(result, expected)


@scenario()
def two_threads_train_two_models_on_one_pool(pool: Pool) -> None:
    expected = [train(model(seed)) for seed in (1, 2)]
    modules = [farpool.offload(model(seed), pool) for seed in (1, 2)]
    results = in_threads(*[lambda module=module: train(module) for module in modules])
    same(results, expected)


@scenario(fast="24KiB")
def four_threads_with_operands_near_the_budget_do_not_block_each_other(pool: Pool) -> None:
    expected = [train(model(seed)) for seed in range(4)]
    modules = [farpool.offload(model(seed), pool) for seed in range(4)]
    results = in_threads(*[lambda module=module: train(module) for module in modules])
    same(results, expected)


@scenario()
def tensors_made_and_dropped_in_threads_leave_nothing(pool: Pool) -> None:
    def work(seed: int) -> None:
        for step in range(40):
            tensor = pool.from_tensor(randn(500, seed=seed))
            view = tensor[step : step + 100]
            view.mul_(2)
            expected = randn(500, seed=seed)
            expected[step : step + 100] *= 2
            same(tensor, expected)

    in_threads(*[lambda seed=seed: work(seed) for seed in range(3)])
    gc.collect()
    assert pool.live == 0


@scenario()
def backward_and_garbage_collection_in_other_threads_are_safe(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            cycle: list[Any] = [pool.from_tensor(randn(64))]
            cycle.append(cycle)
            del cycle
            gc.collect()

    def work() -> Any:
        try:
            return train(module)
        finally:
            stop.set()

    result = in_threads(work, collect)[0]
    same(result, train(model()))


@scenario()
def closing_while_another_thread_computes_is_a_typed_error_or_a_result() -> None:
    for _ in range(5):
        pool = Pool("64KiB", [Nvme("closing.pool", "4MiB")])
        tensors = [pool.from_tensor(randn(3000, seed=seed)) for seed in range(12)]
        started, left = threading.Event(), threading.Event()
        outcome: list[str] = []

        def work(
            tensors: list[torch.Tensor] = tensors,
            started: threading.Event = started,
            left: threading.Event = left,
            outcome: list[str] = outcome,
        ) -> None:
            try:
                for step in range(100_000):
                    same(tensors[step % 12] * 1, randn(3000, seed=step % 12))
                    started.set()
                    if left.is_set():
                        break
            except PoolClosedError:
                outcome.append("closed")
            except BaseException as error:
                outcome.append(repr(error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert started.wait(60)
        with pool:
            pass
        left.set()
        thread.join(20)
        assert not thread.is_alive()
        assert outcome in ([], ["closed"]), outcome
        for seed, tensor in enumerate(tensors):
            assert type(tensor) is torch.Tensor
            same(tensor, randn(3000, seed=seed))


def _fork(work: Callable[[], None]) -> int:
    """Exit status of a forked child: 0 if `work` returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@scenario()
def in_a_forked_child_the_pool_is_closed_and_the_parent_goes_on(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    tensor = pool.from_tensor(randn(20_000))

    def child() -> None:
        for use in (
            lambda: tensor.add_(1),
            lambda: tensor[3].item(),
            lambda: module(integers(50, 3)),
            lambda: pool.zeros(3),
            lambda: pool.materialize(tensor),
            lambda: farpool.restore(module),
            lambda: pool.stats(),
        ):
            try:
                use()
            except PoolClosedError:
                continue
            raise AssertionError("a pool can be used in a forked child")
        repr(tensor)
        pool.close()
        with Pool("64KiB", [Nvme("child.pool", "1MiB")]) as own:
            other = own.from_tensor(randn(20_000))
            same(other, randn(20_000))

    assert _fork(child) == 0
    same(tensor, randn(20_000))
    same(train(module), train(model()))


@scenario()
def forking_while_threads_compute_does_not_hang_the_child(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    stop = threading.Event()

    def compute() -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            module(integers(50, 3))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()

    def child() -> None:
        try:
            module[1].weight.sum()
        except PoolClosedError:
            return
        raise AssertionError("a pool can be used in a forked child")

    try:
        for _ in range(10):
            assert _fork(child) == 0
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


class Rows(Dataset[torch.Tensor]):
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index] * 2


def _loaded(loader: DataLoader[Any]) -> list[torch.Tensor]:
    return [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in loader]


@scenario()
def a_data_loader_without_workers_reads_a_paged_data_set(pool: Pool) -> None:
    for make in (Rows, TensorDataset):
        expected = _loaded(DataLoader(make(randn(20, 3)), batch_size=6))
        same(_loaded(DataLoader(make(pool.from_tensor(randn(20, 3))), batch_size=6)), expected)


@scenario(each={"fork": "fork", "forkserver": "forkserver"})
def data_loader_workers_with_a_paged_data_set_are_right_or_raise(pool: Pool, method: str) -> None:
    expected = _loaded(DataLoader(Rows(randn(20, 3)), batch_size=6))
    loader = DataLoader(
        Rows(pool.from_tensor(randn(20, 3))), batch_size=6, num_workers=2, multiprocessing_context=method, timeout=100
    )
    with may_raise(Exception) as refusal:
        result = _loaded(loader)
    if (error := refusal.error) is not None:
        assert isinstance(error, farpool.FarpoolError) or "PoolClosedError" in str(error), error
    else:
        same(result, expected)
    del loader
    gc.collect()


@scenario()
def data_loader_workers_run_while_a_paged_model_trains(pool: Pool) -> None:
    def run(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for batch in DataLoader(
            Rows(randn(24, 6)), batch_size=6, num_workers=2, timeout=100, multiprocessing_context="fork"
        ):
            optimizer.zero_grad()
            module(batch).pow(2).sum().backward()
            optimizer.step()
        return state_of(module)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6))

    same(run(farpool.offload(make(), pool)), run(make()))


@scenario()
def a_sampler_and_collation_of_paged_tensors_work(pool: Pool) -> None:
    data = pool.from_tensor(randn(20, 3))
    torch.manual_seed(1)
    got = _loaded(DataLoader(TensorDataset(data), batch_size=5, shuffle=True))
    torch.manual_seed(1)
    same(got, _loaded(DataLoader(TensorDataset(randn(20, 3)), batch_size=5, shuffle=True)))
    same(list(torch.utils.data.random_split(data, [15, 5], torch.Generator().manual_seed(2))[1]),
         list(torch.utils.data.random_split(randn(20, 3), [15, 5], torch.Generator().manual_seed(2))[1]))  # fmt: skip
