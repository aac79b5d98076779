"""What a pool holds of saved tensors, what stays in plain memory, and when both are freed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import farpool
from farpool import Pool
from tests.saved.programs import Attention, PlainBytes, activations, gradients, mlp, rows, saved_bytes
from tests.tensors.bits import assert_same

ACTIVATION = 512 * 128 * 4


def peak(pool: Pool, context: Any, layers: int) -> int:
    model, inputs = mlp(layers), rows(1024, 128)
    with PlainBytes(pool) as counted:
        with context:
            loss = model(inputs).square().mean()
        loss.backward()
    return counted.peak


def test_the_peak_of_plain_memory_does_not_grow_with_the_number_of_layers(pool: Pool) -> None:
    plain = [peak(pool, torch.enable_grad(), layers) for layers in (4, 12)]
    moved = [peak(pool, farpool.saved_tensors(pool), layers) for layers in (4, 12)]
    weights = 8 * (128 * 128 + 128) * 4  # gradients of the additional layers
    assert plain[1] - plain[0] >= 16 * ACTIVATION
    assert moved[1] - moved[0] <= weights + 2 * ACTIVATION
    assert moved[1] < plain[1] / 2


def test_a_result_that_two_operations_save_is_stored_once(pool: Pool) -> None:
    value = rows(512, 128).requires_grad_() * 1
    with saved_bytes(pool) as held:
        results = [value.exp() * value.t().t(), value.view(-1) * value.view(-1), value[:, :100] * value[:, :100]]
    assert held == [2 * ACTIVATION]  # `value`, and the result of `exp`
    del results


def test_slices_of_one_tensor_are_stored_once_and_share_memory_when_they_are_read_back(pool: Pool) -> None:
    attention, inputs = Attention(), rows(512, 64).requires_grad_()
    projected = 512 * 192 * 4
    with saved_bytes(pool) as held:
        loss = attention(inputs).sum()
    assert held[0] - projected < projected  # what else is saved is smaller
    with PlainBytes(pool) as counted:
        loss.backward()
    assert counted.peak < 4 * projected
    assert pool.live == 0


def test_a_view_of_few_bytes_does_not_keep_a_large_tensor(pool: Pool) -> None:
    whole = rows(512, 128).requires_grad_() * 1
    memory = StorageWeakRef(whole.untyped_storage())
    with saved_bytes(pool) as held:
        results = [whole[:, 0] * whole[:, 0], whole[:3] * whole[:3], whole[:0] * whole[:0]]
    del whole
    assert memory.expired()
    assert 0 < held[0] < 16 << 10
    sum(result.sum() for result in results).backward()


def test_an_expanded_tensor_is_stored_without_its_repetitions(pool: Pool) -> None:
    column = rows(1 << 15, 1).requires_grad_() * 1
    with saved_bytes(pool) as held:
        result = column.expand(-1, 50) * torch.ones(50, requires_grad=True)
    assert held == [column.nbytes]
    del result


def test_the_memory_of_a_saved_tensor_is_freed_when_the_program_drops_it(pool: Pool) -> None:
    value = rows(512, 128).requires_grad_() * 1
    memory = StorageWeakRef(value.untyped_storage())
    with farpool.saved_tensors(pool):
        result = value * value
    del value
    assert memory.expired()
    assert pool.live == 1
    del result
    assert pool.live == 0


def test_parameters_and_small_tensors_are_not_stored(pool: Pool) -> None:
    weight = nn.Parameter(torch.randn(256, 256))
    frozen = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    small = torch.randn(100, 100, requires_grad=True) * 1
    with saved_bytes(pool) as held:
        results = [weight.t() * frozen[:], weight @ frozen.t(), small * small]
    assert held == [0]
    del results


def test_a_paged_tensor_is_not_stored_again(pool: Pool) -> None:
    weight = pool.from_tensor(rows(256, 256)).requires_grad_()
    constant = pool.from_tensor(rows(256, 256, 2))
    with saved_bytes(pool) as held:
        result = (weight[:200] * constant[:200].t().t()).sum()
    assert held == [0]
    result.backward()
    assert_same(weight.grad[:200], rows(256, 256, 2)[:200])
    del result, weight, constant


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_and_subclasses_are_not_stored(pool: Pool) -> None:
    class Own(torch.Tensor):
        pass

    dense = rows(512, 128).requires_grad_()
    with saved_bytes(pool) as held:
        left = torch.eye(512).to_sparse_csr() @ dense
        right = (rows(512, 128).as_subclass(Own) * dense).as_subclass(torch.Tensor)
    assert held == [0]
    (left.sum() + right.sum()).backward()
    assert_same(dense.grad, torch.ones(512, 128) + rows(512, 128))


def test_a_buffer_is_stored_in_the_first_step_only(pool: Pool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", rows(512, 128))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.mask

    inputs, module, held = rows(512, 128).requires_grad_(), Masked(), []
    for _ in range(3):
        with saved_bytes(pool) as found:
            loss = module(inputs).sum()
        loss.backward()
        held += found
    assert held == [ACTIVATION, 0, 0]


def test_a_branch_that_is_dropped_does_not_keep_a_tensor_in_plain_memory(pool: Pool) -> None:
    value = rows(512, 128).requires_grad_() * 1
    with saved_bytes(pool) as held:
        (value * value).mean().item()  # only looked at
        result = value * value
    assert held == [ACTIVATION]
    del result


def test_memory_that_changes_between_two_operations_is_stored_again(pool: Pool) -> None:
    weight = torch.ones(512, 128, requires_grad=True)
    buffer = torch.ones(512, 128)
    with saved_bytes(pool) as held:
        results = [weight * buffer]
        buffer.mul_(2)
        results.append(weight * buffer)
        buffer.data.mul_(2)  # autograd does not see this
        results.append(weight * buffer)
        buffer.numpy()[:] = 8
        results.append(weight * buffer)
    assert held == [4 * ACTIVATION]
    for factor, result in zip((1, 2, 4, 8), results, strict=True):
        (gradient,) = torch.autograd.grad(result.sum(), weight)
        assert torch.equal(gradient, torch.full((512, 128), float(factor)))


@pytest.mark.parametrize("way", ["dropped", "raised", "backward", "retained", "inputs only"])
def test_a_pool_holds_nothing_after_a_step(way: str, pool: Pool) -> None:
    model, inputs = mlp(), rows(512, 128)
    try:
        with farpool.saved_tensors(pool):
            loss = model(inputs).square().mean()
            assert pool.live > 4
            if way == "raised":
                raise ValueError(way)
    except ValueError:
        pass
    if way == "retained":
        loss.backward(retain_graph=True)
        assert pool.live > 4
    if way in ("backward", "retained"):
        loss.backward()
        assert pool.live == 0
    if way == "inputs only":
        torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
    del loss
    gc.collect()
    assert pool.live == 0
    assert activations(pool) == 0


def test_nothing_is_stored_without_a_graph(pool: Pool) -> None:
    model, inputs = mlp(), rows(512, 128)
    for without in (torch.no_grad(), torch.inference_mode()):
        with saved_bytes(pool) as held, without:
            model(inputs)
        assert held == [0]


def test_a_reversed_order_of_reading_is_foretold_from_the_third_step_on() -> None:
    model, inputs = mlp(8), rows(512, 128)
    with Pool("512KiB", dram="8MiB", timeout=20) as pool:
        gradients(model, inputs, farpool.saved_tensors(pool), steps=3)
        before = pool.stats()
        gradients(model, inputs, farpool.saved_tensors(pool), steps=4)
        after = pool.stats()
    assert after.divergences == before.divergences
    assert after.prefetches_used - before.prefetches_used > after.demand_fetches - before.demand_fetches
