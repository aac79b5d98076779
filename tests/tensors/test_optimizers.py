"""Unmodified optimizers over offloaded modules: state in the pool, same bits, whatever their form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **form),
    "adam": lambda p, **form: torch.optim.Adam(p, lr=0.01, amsgrad=True, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=0.01, **form),
    "adagrad": lambda p, **form: torch.optim.Adagrad(p, lr=0.1, **form),
    "rmsprop": lambda p, **form: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **form),
    "adadelta": lambda p, **form: torch.optim.Adadelta(p, **form),
    "nadam": lambda p, **form: torch.optim.NAdam(p, **form),
    "lbfgs": lambda p, **form: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
SAMPLE = {
    ("sgd", "loop", "before"),
    ("adam", "foreach", "after"),
    ("adamw", "fused", "before"),
    ("adagrad", "fused", "after"),
    ("rmsprop", "foreach", "before"),
    ("adadelta", "loop", "after"),
    ("nadam", "foreach", "after"),
    ("lbfgs", "loop", "before"),
}
"""Each optimizer, and each form before and after offloading; the slow tests try every combination."""
CASES = [
    pytest.param(
        name,
        form,
        when,
        id=f"{name}-{form}-{when}",
        marks=[] if (name, form, when) in SAMPLE else pytest.mark.slow,
    )
    for (name, form), when in itertools.product(itertools.product(OPTIMIZERS, FORMS), ("before", "after"))
    if not (form == "fused" and name not in ("sgd", "adam", "adamw", "adagrad"))
    and not (name == "lbfgs" and form != "loop")
]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 29), nn.LayerNorm(29), nn.Tanh(), nn.Linear(29, 7))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, clip: bool = False) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        inputs = torch.randn(5, 13, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=bool(step % 2))  # noqa: B023  (called at once)
            loss = module(inputs).square().mean()
            loss.backward()
            if clip:
                losses.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05))
            return loss

        losses.append(optimizer.step(closure))
    return losses


@pytest.mark.parametrize(("name", "form", "when"), CASES)
def test_an_optimizer_trains_to_the_same_bits(name: str, form: str, when: str, evil: EvilPool) -> None:
    plain, paged = make(), make()
    build = OPTIMIZERS[name]
    expected = train(plain, build(plain.parameters(), **FORMS[form]), 4)
    if when == "before":
        optimizer = build(paged.parameters(), **FORMS[form])
        farpool.offload(paged, evil)
    else:
        farpool.offload(paged, evil)
        optimizer = build(paged.parameters(), **FORMS[form])
    assert_same(train(paged, optimizer, 4), expected)
    for left, right in zip(paged.parameters(), plain.parameters(), strict=True):
        assert type(left) is PagedTensor
        assert_same(left, right)


@pytest.mark.parametrize("form", FORMS)
def test_the_state_of_adamw_lives_in_the_pool(form: str, evil: EvilPool) -> None:
    module = farpool.offload(make(), evil)
    optimizer = torch.optim.AdamW(module.parameters(), **FORMS[form])
    train(module, optimizer, 1)
    for parameter in module.parameters():
        state = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            assert type(state[name]) is PagedTensor
            assert state[name]._storage.cls == "optimizer"
        assert parameter.grad._storage.cls == "gradient"


@pytest.mark.parametrize("foreach", [True, False])
def test_clipped_gradients_are_the_same(foreach: bool, evil: EvilPool) -> None:
    plain, paged = make(), farpool.offload(make(), evil)
    results = [
        train(module, torch.optim.SGD(module.parameters(), lr=0.1, foreach=foreach), 3, clip=True)
        for module in (plain, paged)
    ]
    assert_same(results[1], results[0])
    for left, right in zip(paged.parameters(), plain.parameters(), strict=True):
        assert_same(left.grad, right.grad)


def test_an_optimizer_step_needs_no_more_than_one_parameter_with_its_state() -> None:
    pool = EvilPool(fast=7000, largest=512)
    plain, paged = make(), farpool.offload(make(), pool)
    assert sum(p.numel() * 4 for p in paged.parameters()) < 7000 < sum(p.numel() * 16 for p in paged.parameters())
    results = []
    for module in (plain, paged):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)
        results.append(train(module, optimizer, 2))
    assert_same(results[1], results[0])


def test_training_goes_on_when_a_module_is_moved_in_and_out(evil: EvilPool) -> None:
    plain, moved = make(), make()
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (plain, moved)]
    for step in range(6):
        if step % 2:
            farpool.offload(moved, evil)
        else:
            farpool.restore(moved)
        for module, optimizer in zip((plain, moved), optimizers, strict=True):
            optimizer.zero_grad()
            loss = module(torch.full((2, 13), float(step))).square().mean()
            loss.backward()
            optimizer.step()
        for left, right in zip(moved.parameters(), plain.parameters(), strict=True):
            assert_same(left, right)
            assert_same(left.grad, right.grad)


def test_gradients_scaled_for_half_precision_are_unscaled_alike(evil: EvilPool) -> None:
    plain, paged = make(), farpool.offload(make(), evil)
    results = []
    for module in (plain, paged):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(5, 13, generator=torch.Generator().manual_seed(step))
            scaler.scale(module(inputs * (float("inf") if step == 1 else 1)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([scaler.get_scale(), *[p.detach() for p in module.parameters()]])
    assert_same(results[1], results[0])


def test_lists_of_tensors_give_what_torch_gives(evil: EvilPool) -> None:
    from farpool.tensors.factories import from_tensor

    plain = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2, 2)]
    paged = [from_tensor(evil, value) for value in plain]
    for function in (
        lambda v: torch._foreach_add(v, 1.5),
        lambda v: torch._foreach_mul(v, [1.0, 2.0, 3.0]),
        lambda v: torch._foreach_addcdiv(v, v, [t.abs() + 1 for t in plain], torch.tensor([1.0, 2.0, 3.0])),
        lambda v: torch._foreach_lerp(v, [t * 2 for t in plain], 0.3),
        lambda v: torch._foreach_sqrt(torch._foreach_abs(v)),
        lambda v: torch._foreach_norm(v, 2),
        lambda v: torch._foreach_max(v),
        lambda v: torch._foreach_sub([plain[0], v[1], plain[2]], v),
    ):
        assert_same(function(paged), function(plain))
    for function in (
        lambda v: torch._foreach_mul_(v, 3),
        lambda v: torch._foreach_add_(v, [1.0, 2.0, 3.0]),
        lambda v: torch._foreach_copy_(v, [t.flip(0) for t in plain]),
        lambda v: torch._foreach_zero_(v),
    ):
        function(paged)
        function(plain)
        assert_same(paged, plain)
    assert all(type(value) is PagedTensor for value in torch._foreach_neg(paged))
    assert all(type(value) is torch.Tensor for value in torch._foreach_norm(paged))
    with pytest.raises(RuntimeError, match="same number"):
        torch._foreach_add(paged, plain[:2])
