"""Gradients of paged leaves are paged, with the bits of plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import farpool
from farpool import PagedTensor
from farpool.tensors.factories import from_tensor, zeros
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def test_gradients_accumulate_over_several_passes(evil: EvilPool) -> None:
    plain, paged = make(), farpool.offload(make(), evil)
    for module in (plain, paged):
        for seed in range(3):
            module(inputs(seed)).square().sum().backward()
    for left, right in zip(paged.parameters(), plain.parameters(), strict=True):
        assert type(left.grad) is PagedTensor
        assert_same(left.grad, right.grad)


def test_a_frozen_parameter_that_is_thawed_gets_a_paged_gradient(evil: EvilPool) -> None:
    module = make().requires_grad_(False)
    farpool.offload(module, evil)
    module[2].weight.requires_grad = True
    module[0].requires_grad_()
    module(inputs(0)).sum().backward()
    assert type(module[2].weight.grad) is PagedTensor
    assert type(module[0].bias.grad) is PagedTensor
    assert module[2].bias.grad is None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_history_keeps_it(evil: EvilPool) -> None:
    results = []
    for weight in (torch.ones(3, requires_grad=True), zeros(evil, 3).fill_(1).requires_grad_()):
        (weight**3).sum().backward(create_graph=True)
        gradient = weight.grad
        assert gradient.requires_grad
        weight.grad = None
        gradient.sum().backward()
        results.append(weight.grad)
    assert_same(results[1], results[0])


def test_gradients_can_be_asked_for_without_being_accumulated(evil: EvilPool) -> None:
    weight = from_tensor(evil, torch.arange(3.0)).requires_grad_()
    (gradient,) = torch.autograd.grad((weight**2).sum(), weight)
    assert type(gradient) is torch.Tensor
    assert weight.grad is None
    assert_same(gradient, torch.arange(3.0) * 2)


def test_a_program_may_set_and_drop_gradients(evil: EvilPool) -> None:
    module = farpool.offload(make(), evil)
    weight = module[0].weight
    weight.grad = torch.ones(7, 5)
    module(inputs(0)).sum().backward()
    assert type(weight.grad) is PagedTensor
    module.zero_grad(set_to_none=False)
    assert_same(weight.grad, torch.zeros(7, 5))
    module.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(reentrant: bool, evil: EvilPool) -> None:
    plain, paged = make(), farpool.offload(make(), evil)
    for module in (plain, paged):
        start = inputs(0).requires_grad_()
        checkpoint(module, start, use_reentrant=reentrant).square().sum().backward()
    for left, right in zip(paged.parameters(), plain.parameters(), strict=True):
        assert_same(left.grad, right.grad)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        value, weight = ctx.saved_tensors
        return gradient @ weight.t(), value.t() @ gradient


def test_a_function_of_the_program_sees_paged_tensors(evil: EvilPool) -> None:
    gradients = []
    for is_paged in (False, True):
        weight = torch.arange(15.0).view(5, 3)
        weight = (from_tensor(evil, weight) if is_paged else weight).requires_grad_()
        value = inputs(0).requires_grad_()
        Scaled.apply(value, weight).square().sum().backward()
        gradients.append([value.grad, weight.grad])
    assert_same(gradients[1], gradients[0])


def test_threads_compute_gradients_at_the_same_time() -> None:
    import threading

    with farpool.Pool("64KiB", dram="4MiB", timeout=20) as pool:
        modules = [farpool.offload(make(), pool) for _ in range(4)]
        errors: list[BaseException] = []

        def work(module: nn.Module) -> None:
            try:
                for seed in range(20):
                    module(inputs(seed)).square().sum().backward()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(module,)) for module in modules]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        plain = make()
        for seed in range(20):
            plain(inputs(seed)).square().sum().backward()
        for module in modules:
            for left, right in zip(module.parameters(), plain.parameters(), strict=True):
                assert_same(left.grad, right.grad)
        del modules, module, left
