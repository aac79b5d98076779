"""Gradients of rows picked without an `Embedding` have the plain program's bits, and go to the pool at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool
from farpool.tensors.factories import from_tensor, materialize
from tests.tensors.evil_pool import EvilPool

SLOW = pytest.mark.slow
COUNT = 700
Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a table and rows, some of them several times."""


def mask(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(table), dtype=torch.bool).index_fill(0, rows, True)


ROWS: dict[str, Pick] = {
    "index_select": lambda t, r: t.index_select(0, r),
    "index_select by int32": lambda t, r: t.index_select(-t.dim(), r.int()),
    "rows": lambda t, r: t[r],
    "rows from the end": lambda t, r: t[r - len(t)],
    "rows by a matrix": lambda t, r: t[r.view(2, -1)],
    "rows by a mask": lambda t, r: t[mask(t, r)],
    "no rows": lambda t, r: t[r[:0]],
}
ELEMENTS: dict[str, Pick] = {
    "elements": lambda t, r: t[r, r % t.size(1)],
    "elements from the end": lambda t, r: t[r.unsqueeze(1).expand(-1, 2) - len(t), torch.tensor([0, -1])],
    "elements by a mask": lambda t, r: t[mask(t, r).unsqueeze(1).expand(t.size())],
    "gather": lambda t, r: t.gather(0, r.unsqueeze(1).expand(-1, t.size(1))),
    "gather by copied indices": lambda t, r: t.gather(-2, r.unsqueeze(1).repeat(1, t.size(1))),
    "gather of other rows in each column": lambda t, r: t.gather(
        0, (r.unsqueeze(1) + torch.arange(t.size(1))) % len(t)
    ),
    "gather of one column": lambda t, r: t.gather(0, r.unsqueeze(1)),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("64KiB", dram="64MiB") as pool:
        yield pool


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = materialize(tensor.detach()).contiguous()
    return plain.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize]).clone()


def gradient(pick: Pick, table: torch.Tensor, rows: torch.Tensor, *, paged: bool) -> torch.Tensor:
    """Of a table that is twenty times the budget, and of a gradient with NaN and zeros of both signs."""
    leaf = table.clone()
    if paged:
        pool = EvilPool(fast=max(1024, table.nbytes // 20), largest=max(64, table.nbytes // 100 // 64 * 64))
        leaf = from_tensor(pool, table, cls="embedding")
    picked = pick(leaf.requires_grad_(), rows)
    grad = torch.randn(picked.size(), generator=torch.Generator().manual_seed(5)).to(table.dtype)
    grad.view(-1)[::13], grad.view(-1)[1::7] = float("nan"), -0.0
    picked.backward(grad)
    assert leaf.grad is not None
    assert (type(leaf.grad) is PagedTensor) == paged
    return bits(leaf.grad)


@pytest.mark.parametrize("size", [(COUNT, 19), (COUNT, 64), *[pytest.param(s, marks=SLOW) for s in ((COUNT, 1),)]])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, *[pytest.param(d, marks=SLOW) for d in (torch.float64, torch.float16)]]
)
@pytest.mark.parametrize("number", [pytest.param(1, marks=SLOW), 2])
@pytest.mark.slow
def test_gradients_of_picked_rows_have_the_bits_of_the_plain_program(
    number: int, dtype: torch.dtype, size: tuple[int, ...], threads: Callable[[int], None]
) -> None:
    threads(number)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(size, generator=generator).to(dtype)
    for count in (8, 4096):
        rows = torch.randint(0, COUNT if count == 8 else 200, (count,), generator=generator)
        rows[1], rows[2], rows[-1] = rows[0], 0, COUNT - 1
        # Else two threads of torch add up many elements in an order that differs from run to run.
        torch.use_deterministic_algorithms(count > 8)
        for name, pick in (ROWS | ELEMENTS).items():
            expected, got = (gradient(pick, table, rows, paged=paged) for paged in (False, True))
            assert torch.equal(got, expected), name


@pytest.mark.parametrize("size", [(COUNT, 3, 7), (20 * COUNT,)])
def test_gradients_of_tables_of_other_dimensions_are_alike(size: tuple[int, ...]) -> None:
    table = torch.randn(size, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([3, 699, 0, 3, 250, 251, 3, 699])
    for name, pick in ROWS.items():
        expected, got = (gradient(pick, table, rows, paged=paged) for paged in (False, True))
        assert torch.equal(got, expected), name


class _Picker(nn.Module):
    """A table that is no `Embedding`, looked up in all ways at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2500, 19))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        table = self.table
        columns = rows.unsqueeze(1).expand(-1, 19)
        picked = (
            table[rows],
            table.index_select(0, rows),
            table.gather(0, columns),
            nn.functional.embedding(rows, table),
        )
        return torch.cat((*picked, table[5:9]))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop])
def test_a_parameter_that_is_picked_from_in_several_ways_trains_alike(kind: Any, pool: Pool) -> None:
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = _Picker()
        if paged:
            farpool.offload(module, pool)
            assert module.table.nbytes > 2 * pool.fast
        optimizer = kind(module.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        seen: list[torch.Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            rows = torch.randint(0, 2500, (30,), generator=generator)
            rows[3] = rows[7]
            result = module(rows)
            seen.append(bits(result))
            result.square().sum().backward()
            optimizer.step()
        assert module.table.grad is not None
        results.append([*seen, bits(module.table.grad), bits(module.table)])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["index_select", "rows", "elements", "gather"])
def test_gradients_of_gradients_of_picked_rows_are_alike(name: str, pool: Pool) -> None:
    rows = torch.tensor([3, 699, 0, 3])
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        table = torch.randn(2500, 19)
        leaf = from_tensor(farpool.memory.pool.pool.blocks_of(pool), table, cls="embedding") if paged else table
        result = (ROWS | ELEMENTS)[name](leaf.requires_grad_(), rows).pow(3).sum()
        (grad,) = torch.autograd.grad(result, leaf, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        results.append([bits(grad), bits(second)])
        del grad, second, result, leaf
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.slow
def test_the_gradient_of_picked_rows_is_never_whole_in_plain_memory() -> None:
    with Pool("256KiB", dram="128MiB") as pool:
        table = pool.zeros(105_000, 64).requires_grad_()  # 26 MiB
        rows = torch.arange(0, 105_000, 4200)
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                if type(result) is torch.Tensor:
                    largest = max(largest, result.nbytes)
                return result

        for pick in (ROWS["rows"], ROWS["index_select"], ELEMENTS["gather"], ELEMENTS["elements"]):
            table.grad = None
            picked = pick(table, rows).sum()
            with Watch():
                picked.backward()
            assert type(table.grad) is PagedTensor
            assert 0 < largest < 1 << 20
            assert table.grad[4200, 0] == (0 if pick is ELEMENTS["elements"] else 1)
        del table, picked


@pytest.mark.parametrize("name", ["index_select", "rows", "elements", "gather"])
def test_several_gradients_at_once_have_the_plain_bits(name: str) -> None:
    pick = (ROWS | ELEMENTS)[name]
    plain = torch.randn(COUNT, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = torch.tensor([1, 5, 5, COUNT - 1])
    with Pool("16KiB", dram="4MiB") as pool:
        table = pool.from_tensor(plain.detach(), table=True).requires_grad_()
        found = []
        for leaf in (plain, table):
            picked = pick(leaf, rows)
            several = torch.randn(2, *picked.shape, generator=torch.Generator().manual_seed(2))
            found += torch.autograd.grad(picked, leaf, several, is_grads_batched=True)
        assert torch.equal(*found)
        del table, leaf, picked


@pytest.mark.parametrize("dim", [2, -4])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "not trained"])
def test_a_dimension_that_is_not_there_is_an_error_as_in_torch(dim: int, trained: bool) -> None:
    with Pool("256KiB", dram="4MiB") as pool:
        table = pool.from_tensor(torch.randn(COUNT, 16), table=True).requires_grad_(trained)
        with pytest.raises(IndexError, match="Dimension out of range"):
            table.index_select(dim, torch.tensor([1, 2]))
        with pytest.raises(IndexError, match="Dimension out of range"):
            table.gather(dim, torch.zeros(2, 16, dtype=torch.long))
        del table
