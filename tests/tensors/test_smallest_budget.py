"""The budget that a BudgetError names works in a new pool, for the whole step, and a smaller one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import BudgetError, Pool
from farpool.tensors.factories import materialize
from tests.tensors.bits import assert_same

Operation = Callable[[nn.Module], torch.Tensor]


def alike() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6)])


def growing() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))


def recurrent() -> nn.Module:
    return nn.LSTM(16, 48, num_layers=2)


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 24, 5), nn.GroupNorm(4, 24), nn.Conv2d(24, 16, 3), nn.Flatten(), nn.LazyLinear(7))


INPUTS = {alike: (4, 64), growing: (4, 16), recurrent: (4, 16), pictures: (2, 1, 9, 9)}


def quick(first: str, names: Iterable[str]) -> list[Any]:
    """One name to be tried in each run, and the others, marked slow."""
    return [first, *[pytest.param(name, marks=pytest.mark.slow) for name in names if name != first]]


BUILDS = [alike, *[pytest.param(build, marks=pytest.mark.slow) for build in (growing, recurrent, pictures)]]


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = build()
    module(torch.zeros(INPUTS[build]))  # type: ignore[index]
    return module


def forward(module: nn.Module, build: Any) -> torch.Tensor:
    output = module(torch.randn(INPUTS[build], generator=torch.Generator().manual_seed(1)))
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate, with one of another dtype: then all are needed at once, not one after the other."""
    return torch.cat([*tensors, torch.ones(1, dtype=torch.float64)])


def run(budget: int, build: Callable[[], nn.Module], operation: Callable[[nn.Module], Any]) -> Any:
    with Pool(budget, dram="8MiB", timeout=60) as pool:
        module = farpool.offload(make(build), pool)
        return operation(module)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "name",
    ["forward", *quick("cat", ["cat of two", "stack of weights", "norm", "norms", "matrix", "exponential"])],
)
@pytest.mark.slow
def test_the_named_budget_works_and_one_byte_less_does_not(name: str, build: Callable[[], nn.Module]) -> None:
    def largest(module: nn.Module) -> nn.Parameter:
        return max(module.parameters(), key=lambda parameter: parameter.numel())

    operation: Callable[[nn.Module], Any] = {
        "forward": lambda m: forward(m, build),
        "cat": lambda m: joined([p.flatten() for p in m.parameters()]),
        "cat of two": lambda m: joined([p.flatten() for p in list(m.parameters())[-3::2]] + [largest(m).flatten()]),
        "stack of weights": lambda m: torch.stack([largest(m), largest(m) * 2]),
        "norm": lambda m: largest(m).norm(),
        "norms": lambda m: torch._foreach_norm(list(m.parameters())),
        "matrix": lambda m: largest(m).flatten(1) @ torch.ones(largest(m).flatten(1).shape[1], 2),
        "exponential": lambda m: [materialize(t) for t in torch._foreach_exp(list(m.parameters()))],
    }[name]
    with torch.no_grad():
        expected = operation(make(build))
        with pytest.raises(BudgetError) as caught:
            run(1024, build, operation)
        assert caught.value.budget == 1024
        needed = caught.value.needed
        assert f"{needed} bytes" in str(caught.value)
        assert_same(run(needed, build, operation), expected)
        with pytest.raises(BudgetError) as caught:
            run(needed - 1, build, lambda m: (operation(m), whole(m)))
        assert caught.value.needed == needed


def whole(module: nn.Module) -> None:
    """Take each weight with its bias, as layers do."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            bias = part._parameters.get(name.replace("weight", "bias"))
            joined([weight.flatten(), weight.flatten() if bias is None else bias.flatten()])


def test_an_error_of_a_list_names_what_its_largest_element_needs() -> None:
    sizes = [9000, 300, 20000, 50]

    def exponentials(budget: int) -> list[torch.Tensor]:
        with Pool(budget, dram="1MiB") as pool:
            tensors = [pool.from_tensor(torch.full((size,), float(size % 7))) for size in sizes]
            return [materialize(tensor) for tensor in torch._foreach_exp(tensors)]

    with pytest.raises(BudgetError, match=r"aten\._foreach_exp") as caught:
        exponentials(4096)
    needed = caught.value.needed
    assert_same(exponentials(needed), torch._foreach_exp([torch.full((size,), float(size % 7)) for size in sizes]))
    with pytest.raises(BudgetError) as caught:
        exponentials(needed - 1)
    assert caught.value.needed == needed


def test_small_tensors_in_shared_blocks_are_counted_by_block() -> None:
    # As many norms and biases as a model has, between weights in their order of use: a "no decay" group.
    torch.manual_seed(0)
    modules = [nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)) for _ in range(32)]) for _ in "ab"]
    for module in modules:
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    results = []
    with Pool("256KiB", dram="32MiB") as pool:
        for module in modules:
            if module is modules[1]:
                farpool.offload(module, pool)
            optimizer = torch.optim.AdamW(
                [
                    {"params": [p for p in module.parameters() if p.dim() > 1]},
                    {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
                ],
                fused=True,
            )
            for _ in range(2):
                module(torch.ones(2, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([parameter.detach() for parameter in farpool.restore(module).parameters()])
    assert_same(results[1], results[0])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=0.01, amsgrad=True, **form),
    "adagrad": lambda p, **form: torch.optim.Adagrad(p, lr=0.1, **form),
}
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("form", quick("fused", FORMS))
@pytest.mark.parametrize("optimizer", quick("adamw", OPTIMIZERS))
def test_one_error_names_the_budget_of_the_whole_step(
    optimizer: str, form: str, build: Callable[[], nn.Module]
) -> None:
    def steps(module: nn.Module) -> list[torch.Tensor]:
        optimize = OPTIMIZERS[optimizer](module.parameters(), **FORMS[form])
        for _ in range(2):
            forward(module, build).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimize.step()
            optimize.zero_grad()
        return [parameter.detach().clone() for parameter in module.parameters()]

    def paged(module: nn.Module) -> list[torch.Tensor]:
        steps(module)
        return [parameter.detach().clone() for parameter in farpool.restore(module).parameters()]

    expected = steps(make(build))
    with pytest.raises(BudgetError) as caught:
        run(2048, build, paged)
    needed = caught.value.needed
    assert_same(run(needed, build, paged), expected)
    with pytest.raises(BudgetError):
        run(needed - 1, build, paged)
