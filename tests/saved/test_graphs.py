"""Saved tensors together with other features of autograd, and the errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import farpool
from farpool import ArgumentError, Dram, Faulty, Pool, PoolClosedError, PoolFullError, TierError
from tests.saved.programs import PROGRAMS, activations, gradients, mlp, rows, saved_bytes
from tests.tensors.bits import assert_same

ACTIVATION = 512 * 128 * 4


def test_double_backward_has_the_bits_of_a_plain_run(pool: Pool) -> None:
    def penalty(inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Softplus())
        inputs = rows(512, 128).requires_grad_()
        with farpool.saved_tensors(pool) if inside else torch.enable_grad():
            loss = model(inputs).square().mean()
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            total = loss + gradient.square().sum()
        total.backward()
        return [total.detach(), inputs.grad, *(parameter.grad for parameter in model.parameters())]

    assert_same(penalty(True), penalty(False))
    assert pool.live == 0


def test_a_graph_may_be_gone_through_again(pool: Pool) -> None:
    model, inputs = mlp(), rows(512, 128)
    with farpool.saved_tensors(pool):
        loss = model(inputs).square().mean()
    found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(3)]
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert_same(list(found[0]), gradients(model, inputs)[2:])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_checkpoints_inside_and_outside_of_the_context(where: str, reentrant: bool, pool: Pool) -> None:
    def run(moved: bool) -> list[torch.Tensor]:
        model, inputs = mlp(), rows(512, 128).requires_grad_()

        def first(value: torch.Tensor) -> torch.Tensor:
            with farpool.saved_tensors(pool) if moved and where != "inside" else torch.enable_grad():
                result: torch.Tensor = model[:4](value)
                return result

        with farpool.saved_tensors(pool) if moved and where != "outside" else torch.enable_grad():
            middle = checkpoint(first, inputs * 1, use_reentrant=reentrant)
            loss = model[4:](middle).square().mean()
        loss.backward()
        return [loss.detach(), inputs.grad, *(parameter.grad for parameter in model.parameters())]

    assert_same(run(True), run(False))
    assert pool.live == 0


def test_the_inputs_of_checkpoints_are_stored_and_nothing_else_of_them(pool: Pool) -> None:
    model, inputs = mlp(8), rows(512, 128).requires_grad_() * 1
    with saved_bytes(pool) as held:
        result = checkpoint_sequential(model, 4, inputs, use_reentrant=False)
    # The last of four parts is not checkpointed: it saves the results of two layers in addition.
    assert held == [6 * ACTIVATION]
    result.sum().backward()
    assert pool.live == 0


def test_the_inner_of_two_contexts_stores_what_is_saved_in_it(pool: Pool) -> None:
    value = rows(512, 128).requires_grad_() * 1
    with Pool("1MiB", dram="8MiB") as other, farpool.saved_tensors(pool):
        left = value * value
        with farpool.saved_tensors(other):
            right = value * value
        again = value * value
        assert (pool.live, other.live) == (1, 1)
        (left + right + again).sum().backward()
        assert (pool.live, other.live) == (0, 0)


def test_a_context_may_be_used_again_and_inside_itself(pool: Pool) -> None:
    context = farpool.saved_tensors(pool)
    value = rows(512, 128).requires_grad_() * 1
    results = []
    for _ in range(2):
        with context, context:
            results.append(value * value)
    assert pool.live == 1
    assert_same(torch.autograd.grad(sum(results).sum(), value)[0], 4 * value)


def test_a_backward_pass_in_another_thread(pool: Pool) -> None:
    model, inputs = mlp(), rows(512, 128)
    expected = gradients(model, inputs)[2:]
    model.zero_grad()
    with farpool.saved_tensors(pool):
        loss = model(inputs).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert_same([parameter.grad for parameter in model.parameters()], expected)
    del loss, thread
    assert pool.live == 0


def test_a_tensor_that_a_backward_function_changes_is_read_anew_for_the_next(pool: Pool) -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            return value.mul_(2) * gradient

    value = rows(512, 128).requires_grad_() * 1
    with farpool.saved_tensors(pool):
        result = Careless.apply(Careless.apply(value * 1) + value) + Careless.apply(value)
    found = [torch.autograd.grad(result.sum(), value, retain_graph=True)[0] for _ in range(2)]
    assert_same(found[1], found[0])


@pytest.mark.parametrize("way", ["twice", "other node", "other view", "as gradient"])
def test_a_backward_function_that_changes_a_saved_tensor_does_not_change_other_ones(way: str, pool: Pool) -> None:
    taken: list[torch.Tensor] = []

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            result = value * 2 * gradient
            if way == "as gradient":
                return value
            taken.append(value.mul_(3))  # lives on
            if way == "twice":
                (value,) = ctx.saved_tensors
                result = value * 2 * gradient
            return result

    leaf = rows(512, 128).requires_grad_()
    value = leaf * 1
    other = value.t() if way == "other view" else value
    with farpool.saved_tensors(pool):
        results = [Careless.apply(value), Careless.apply(value), (other * other.detach()).exp()]
        total = results[0].sum() + results[1].sum() + results[2].mean()
    total.backward()
    plain = rows(512, 128).requires_grad_()
    if way == "as gradient":
        expected = [plain.detach() * 2]
    else:
        expected = [torch.autograd.grad((plain * plain).sum() * 2, plain)[0]]
    (rest,) = torch.autograd.grad((plain * plain.detach()).exp().mean(), plain)
    torch.testing.assert_close(leaf.grad, expected[0] + rest)
    taken.clear()


@pytest.mark.parametrize("what", ["weight", "small"])
def test_a_tensor_that_is_kept_by_reference_must_not_change_before_the_backward_pass(what: str, pool: Pool) -> None:
    weight = torch.randn(256, 256, requires_grad=True) if what == "weight" else torch.randn(9, requires_grad=True) * 1
    messages = []
    for context in (farpool.saved_tensors(pool), torch.enable_grad()):
        with context:
            result = (weight * weight).sum()
        with torch.no_grad():
            weight += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            result.backward()
        messages.append(str(raised.value))
    assert "farpool.saved_tensors" in messages[0]


def test_a_stored_tensor_may_change_before_the_backward_pass(pool: Pool) -> None:
    leaf = rows(512, 128).requires_grad_()
    value = leaf * 1
    with farpool.saved_tensors(pool):
        result = value * value
    value.data.zero_()
    result.sum().backward()
    assert_same(leaf.grad, 2 * rows(512, 128))


def test_a_full_pool_is_refused_and_training_goes_on_with_a_larger_one() -> None:
    model, inputs = mlp(), rows(512, 128)
    with Pool("128KiB", [Dram("448KiB")], timeout=20) as pool:
        with pytest.raises(PoolFullError, match="set the size of 'dram'") as raised, farpool.saved_tensors(pool):
            model(inputs)
        assert "autograd was saving a tensor [512, 128]" in raised.value.__notes__[-1]
        del raised
        assert activations(pool) == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        with farpool.saved_tensors(pool):
            loss = model[:2](inputs).square().mean()
        loss.backward()
        del loss
    model.zero_grad()
    with Pool("128KiB", [Dram("4MiB")], timeout=20) as pool:
        assert_same(gradients(model, inputs, farpool.saved_tensors(pool)), gradients(mlp(), inputs))


@pytest.mark.parametrize("name", ["mlp", "attention", "odd"])
def test_a_pool_that_takes_a_forward_pass_has_room_for_the_backward_pass(name: str) -> None:
    make, shape = PROGRAMS[name]
    torch.manual_seed(0)
    model, inputs, fast = make(), rows(*shape), 128 << 10
    with Pool("64MiB") as pool:
        with saved_bytes(pool) as held:
            loss = model(inputs.clone().requires_grad_()).float().square().mean()
        del loss
    refused = []
    for blocks in range(-1, 3):  # more than the bytes that are stored
        with Pool(fast, [Dram(held[0] - fast + blocks * fast // 16)], timeout=20) as pool:
            try:
                with farpool.saved_tensors(pool):
                    loss = model(inputs.clone().requires_grad_()).float().square().mean()
            except PoolFullError:
                refused.append(blocks)
                continue
            loss.backward()
            del loss
    assert -1 in refused
    assert 2 not in refused


def test_steps_that_a_failing_tier_has_ended_can_be_repeated() -> None:
    model, inputs = mlp(), rows(512, 128)
    expected = gradients(mlp(), inputs)
    faulty = Faulty(Dram("8MiB"), seed=3, fail_reads=0.01, fail_writes=0.01)
    failed = {"forward": 0, "backward": 0}
    done = 0
    with Pool("128KiB", [faulty], timeout=20) as pool:
        for _ in range(60):
            model.zero_grad()
            phase = "forward"
            leaf = inputs.clone().requires_grad_()
            loss = None
            try:
                with farpool.saved_tensors(pool):
                    loss = model(leaf).square().mean()
                phase = "backward"
                loss.backward()
            except TierError:
                failed[phase] += 1
                continue
            done += 1
            found = [loss.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())]
            assert_same(found, expected)
        del loss
        assert activations(pool) == 0
    assert done > 5
    assert min(failed.values()) > 0, failed


def test_a_pool_without_lower_tiers_stores_what_fits() -> None:
    model, inputs = mlp(2), rows(512, 128)
    with Pool("2MiB") as pool:
        assert_same(gradients(model, inputs, farpool.saved_tensors(pool)), gradients(mlp(2), inputs))
    with Pool("128KiB") as pool, pytest.raises(PoolFullError, match="add a lower tier"), farpool.saved_tensors(pool):
        model(inputs)


def test_a_closed_pool_is_refused_before_the_forward_pass_and_in_the_backward_pass() -> None:
    value = rows(512, 128).requires_grad_()
    with Pool("1MiB") as pool, farpool.saved_tensors(pool):
        result = (value * 1).exp().sum()
    with pytest.raises(PoolClosedError, match="make a new one"):
        farpool.saved_tensors(pool)
    with pytest.raises(PoolClosedError) as raised:
        result.backward()
    assert "closed before the backward pass" in raised.value.__notes__[-1]
    assert value.grad is None


def test_a_pool_that_stores_tensors_is_not_closed_by_mistake() -> None:
    value = rows(512, 128).requires_grad_()
    pool = Pool("1MiB")
    with farpool.saved_tensors(pool):
        result = (value * 1).exp().sum()
    with pytest.raises(PoolClosedError, match="live storages"):
        pool.close()
    result.backward()
    del result
    pool.close()


@pytest.mark.parametrize("wrong", [None, "1MiB", nn.Linear(1, 1)])
def test_anything_but_a_pool_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"farpool\.saved_tensors: the pool is"):
        farpool.saved_tensors(wrong)
