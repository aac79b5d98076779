"""Random numbers, initialisation, and what is made in a paged context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import farpool
from farpool import PagedTensor, Pool
from tests.process.pitfalls.compare import assert_usable, plain, randn, same, twins
from tests.process.pitfalls.harness import scenario

INIT: dict[str, Callable[[torch.Tensor], Any]] = {
    name: getattr(nn.init, name)
    for name in (
        "uniform_", "normal_", "ones_", "zeros_", "eye_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
        "kaiming_normal_", "trunc_normal_", "orthogonal_",
    )
} | {
    "constant_": lambda t: nn.init.constant_(t, 0.25),
    "sparse_": lambda t: nn.init.sparse_(t, 0.3),
    "dirac_": lambda t: nn.init.dirac_(t.view(4, 6, 2)) if t.is_leaf and not t.requires_grad else None,
}  # fmt: skip

RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda t: t.uniform_(-2, 3),
    "normal_": lambda t: t.normal_(1, 0.5),
    "bernoulli_": lambda t: t.bernoulli_(0.4),
    "bernoulli_ by a tensor": lambda t: t.bernoulli_(t.sigmoid()),
    "exponential_": lambda t: t.exponential_(2),
    "random_": lambda t: t.random_(3, 90),
    "dropout_": lambda t: torch.dropout_(t, 0.3, True),
    "a generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(9)),
    "transposed": lambda t: t.t().normal_(),
    "every second": lambda t: t[::2].uniform_(),
    "like": lambda t: (torch.rand_like(t), torch.randn_like(t), torch.randint_like(t, 9), torch.bernoulli(t.sigmoid())),
    "like in another type": lambda t: torch.randn_like(t, dtype=torch.float64),
    "dropout": lambda t: F.dropout(t, 0.2),
    "two draws": lambda t: (t.normal_(), torch.randn(3)),
}


@scenario(fast="256KiB", each={"one_block": (8, 6), "many_blocks": (300, 60), "odd": (7, 1, 1)})
def random_numbers_are_those_of_torch(pool: Pool, shape: tuple[int, ...]) -> None:
    initial = {n: f for n, f in INIT.items() if len(shape) == 2 and not (n == "dirac_" and shape[0] > 8)}
    if shape == (300, 60):
        initial.pop("sparse_")
    twins(
        pool,
        lambda: randn(*shape),
        initial | ({n: f for n, f in RANDOM.items() if len(shape) == 2 or "trans" not in n}),
    )
    twins(pool, lambda: nn.Parameter(randn(*shape)), {n: f for n, f in initial.items() if n != "dirac_"})


@scenario()
def modules_made_in_a_paged_context_have_the_bits_of_torch(pool: Pool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(9, 9), nn.LSTM(9, 4), nn.Embedding(7, 5), nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3))

    expected = make().state_dict()
    with farpool.paged(pool):
        module = make()
        outside = torch.randn(3)
        assert type(outside) is PagedTensor
    assert all(type(p) is PagedTensor for p in module.parameters())
    same(module.state_dict(), expected)
    assert type(torch.randn(3)) is torch.Tensor
    assert_usable(pool)


FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones": lambda: torch.ones((2, 3), dtype=torch.int32),
    "empty": lambda: torch.empty(2, 2).fill_(1),
    "full": lambda: torch.full((2,), 7),
    "tensor": lambda: torch.tensor([[1, 2], [3, 4]]),
    "tensor with a gradient": lambda: torch.tensor([1.0], requires_grad=True),
    "rand": lambda: torch.rand(5, generator=torch.Generator().manual_seed(3)),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(3, 9, (7,)),
    "randperm": lambda: torch.randperm(9),
    "arange": lambda: torch.arange(2, 9, 3),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "eye": lambda: torch.eye(3),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "zeros_like": lambda: torch.zeros_like(torch.ones(3)),
    "complex": lambda: torch.complex(torch.ones(2), torch.zeros(2)),
    "hann_window": lambda: torch.hann_window(6),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "with a name": lambda: torch.empty_strided((2, 3), (1, 2)).zero_(),
    "from a tensor": lambda: torch.tensor(torch.ones(2).tolist()),
    "Tensor": lambda: torch.Tensor([1, 2]),
    "LongTensor": lambda: torch.LongTensor([1, 2]),
    "cat": lambda: torch.cat([torch.ones(2), torch.zeros(1)]),
    "stack": lambda: torch.stack([torch.arange(3), torch.arange(3)]),
    "scalar_tensor": lambda: torch.scalar_tensor(3),
    "meta": lambda: torch.ones(torch.zeros(2, device="meta").shape),
    "arithmetic": lambda: (torch.ones(3) + torch.arange(3)) * torch.tensor(2.0),
}


@scenario()
def factories_in_a_paged_context_give_the_values_of_torch(pool: Pool) -> None:
    for name, make in FACTORIES.items():
        torch.manual_seed(2)
        expected = make()
        torch.manual_seed(2)
        with farpool.paged(pool):
            got = make()
        same(got, expected, name)
        same(plain(got), expected.detach(), name)
