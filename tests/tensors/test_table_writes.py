"""Rows of a table named by indices, written and read: the plain program's bits, and only the touched blocks move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import farpool
from farpool import BudgetError, Pool
from farpool.tensors.factories import from_tensor, materialize
from tests.tensors.evil_pool import EvilPool

COUNT = 700
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.tensor([3, 699, 0, 3, 250, 251, 3, 699])
"""With duplicates, neighbours and both ends."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF = (torch.float16, torch.bfloat16)
WIDTHS = (1, 16, 19, 40)
"""Rows of less than a cache line, of one, of no whole number of them."""


def values(*size: int) -> torch.Tensor:
    """Numbers of which some are not, and zeros of both signs."""
    tensor = torch.randn(size, generator=GENERATOR)
    tensor.view(-1)[::17] = float("nan")
    tensor.view(-1)[::13] = -0.0
    tensor.view(-1)[::11] = float("inf")
    tensor[251:254] = 0.0
    return tensor


def bits(tensor: Any) -> torch.Tensor:
    plain = materialize(tensor).contiguous()
    if not plain.is_floating_point():
        return plain
    return plain.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize])


def mask(count: int = COUNT) -> torch.Tensor:
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[ROWS] = True
    return chosen


def sparse(table: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows.unsqueeze(0), chosen, table.size(), check_invariants=False)


Case = Callable[[torch.Tensor, torch.Tensor], Any]
"""Takes the table, and as many rows of values as there are indices."""
WRITES: dict[str, Case] = {
    "rows set": lambda t, v: t.__setitem__(torch.unique(ROWS), v[:5]),
    "rows set to one value": lambda t, v: t.__setitem__(ROWS, 2.5),
    "rows set by list": lambda t, v: t.__setitem__([5, -1, -700], v[0]),
    "rows set by a mask": lambda t, v: t.__setitem__(mask(), v[:5]),
    "rows set to one value by a mask": lambda t, v: t.__setitem__(mask(), -0.0),
    "rows set by a matrix": lambda t, v: t.__setitem__((ROWS[:6] + torch.arange(6)).view(2, 3) % COUNT, v[0]),
    "rows set by int32": lambda t, v: t.index_put_((torch.unique(ROWS).int(),), v[:5]),
    "no rows set": lambda t, v: t.__setitem__(ROWS[:0], v[:0]),
    "elements set": lambda t, v: t.__setitem__((ROWS, torch.zeros(8, dtype=torch.int64)), v[:, 0]),
    "elements set by a mask": lambda t, v: t.__setitem__(mask().unsqueeze(1).expand(t.size()), 0.5),
    "rows put and added": lambda t, v: t.index_put_((ROWS,), v, accumulate=True),
    "one row put and added": lambda t, v: t.index_put_((torch.tensor(7),), v[0], accumulate=True),
    "index_add_": lambda t, v: t.index_add_(0, ROWS, v),
    "index_add_ alpha": lambda t, v: t.index_add_(0, ROWS, v, alpha=-0.3),
    "index_add_ int32": lambda t, v: t.index_add_(-2, ROWS.int(), v),
    "index_copy_": lambda t, v: t.index_copy_(0, ROWS, v),
    "index_copy_ by overlapping windows": lambda t, v: t.__setitem__(ROWS.unfold(0, 3, 1), v[0]),
    "index_fill_": lambda t, v: t.index_fill_(0, ROWS, -0.0),
    "index_fill_ from the end": lambda t, v: t.index_fill_(0, ROWS - COUNT, torch.tensor(3.0)),
    "index_reduce_ amax": lambda t, v: t.index_reduce_(0, ROWS, v, "amax"),
    "index_reduce_ mean": lambda t, v: t.index_reduce_(0, ROWS, v, "mean", include_self=False),
    "scatter_": lambda t, v: t.scatter_(0, torch.unique(ROWS).unsqueeze(1).expand(5, t.size(1)), v[:5]),
    "scatter_ value": lambda t, v: t.scatter_(0, ROWS.unsqueeze(1), 4.0),
    "scatter_ of some columns": lambda t, v: t.scatter_(0, torch.unique(ROWS).unsqueeze(1), v),
    "scatter_ add": lambda t, v: t.scatter_(0, ROWS.unsqueeze(1).expand_as(v), v, reduce="add"),
    "scatter_ value multiply": lambda t, v: t.scatter_(0, ROWS.unsqueeze(1).expand_as(v), 1.1, reduce="multiply"),
    "scatter_add_": lambda t, v: t.scatter_add_(0, ROWS.unsqueeze(1).expand_as(v), v),
    "scatter_add_ of other rows in each column": lambda t, v: t.scatter_add_(
        0, (ROWS.unsqueeze(1) + torch.arange(t.size(1))) % COUNT, v
    ),
    **{
        f"scatter_reduce_ {reduce}{'' if include else ' without self'}": lambda t, v, r=reduce, i=include: (
            t.scatter_reduce_(0, ROWS.unsqueeze(1).expand_as(v), v, r, include_self=i)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
    "embedding_renorm_": lambda t, v: torch.embedding_renorm_(t, ROWS, 1.5, 2.0),
    "embedding_renorm_ to less than nothing": lambda t, v: torch.embedding_renorm_(t, ROWS, -1.0, 2.0),
    "embedding_renorm_ L1": lambda t, v: torch.embedding_renorm_(t, ROWS.view(2, 4), 0.5, 1.0),
    "sparse add_": lambda t, v: t.add_(sparse(t, ROWS, v), alpha=-0.3),
    "sparse add_ coalesced": lambda t, v: t.add_(sparse(t, ROWS, v).coalesce()),
}
READS: dict[str, Case] = {
    "rows by a mask": lambda t, v: t[mask()],
    "no rows by a mask": lambda t, v: t[torch.zeros(COUNT, dtype=torch.bool)],
    "elements": lambda t, v: t[ROWS, torch.zeros(8, dtype=torch.int64)],
    "elements by a mask": lambda t, v: t[mask().unsqueeze(1).expand(t.size())],
    "elements of rows from the end": lambda t, v: t[-ROWS.view(2, 4) - 1, torch.tensor([0])],
    "columns of rows": lambda t, v: t[ROWS, :][:, :1],
    "gather": lambda t, v: t.gather(0, ROWS.unsqueeze(1).expand_as(v)),
    "gather of other rows in each column": lambda t, v: t.gather(
        0, (ROWS.unsqueeze(1) + torch.arange(t.size(1))) % COUNT
    ),
    "gather of one column": lambda t, v: t.gather(0, ROWS.unsqueeze(1)),
    "gather of nothing": lambda t, v: t.gather(0, torch.empty(0, 1, dtype=torch.int64)),
    "sparse_mask": lambda t, v: t.sparse_mask(sparse(t, torch.unique(ROWS), v[:5]).coalesce()).to_dense(),
}
WRONG: dict[str, Case] = {
    "rows set": lambda t, v: t.__setitem__([0, COUNT], 1.0),
    "rows set from the end": lambda t, v: t.__setitem__([0, -COUNT - 1], 1.0),
    "rows set by a mask of another length": lambda t, v: t.__setitem__(torch.ones(COUNT + 1, dtype=torch.bool), v[0]),
    "index_add_": lambda t, v: t.index_add_(0, torch.tensor([1, COUNT]), v[:2]),
    "index_add_ of another shape": lambda t, v: t.index_add_(0, ROWS, v[:2]),
    "index_copy_": lambda t, v: t.index_copy_(0, torch.tensor([1, -1]), v[:2]),
    "index_fill_": lambda t, v: t.index_fill_(0, torch.tensor([1, COUNT]), 1.0),
    "scatter_": lambda t, v: t.scatter_(0, torch.tensor([[1], [COUNT]]), 1.0),
    "scatter_add_": lambda t, v: t.scatter_add_(0, torch.tensor([[1], [-1]]), v),
    "scatter_ within rows": lambda t, v: t.scatter_(1, torch.tensor([[1], [19]]).expand(2, 3), v),
    "scatter_add_ within rows": lambda t, v: t.scatter_add_(1, torch.tensor([[1], [19]]).repeat(300, 1), v[:, :1]),
    "element": lambda t, v: t[[1, COUNT], [0, 0]] * 1,
    "element of no column": lambda t, v: t[[1, 2], [0, 19]] * 1,
    "rows by a mask of another length": lambda t, v: t[torch.ones(COUNT + 1, dtype=torch.bool)] * 1,
    "gather": lambda t, v: t.gather(0, torch.tensor([[1], [COUNT]])),
    "gather along no dimension": lambda t, v: t.gather(4, torch.tensor([[1], [2]])),
    "gather within rows": lambda t, v: t.gather(1, torch.tensor([[1], [19]])),
    "gather of more columns": lambda t, v: t.gather(0, torch.zeros(1, 100, dtype=torch.int64)),
    "embedding_renorm_": lambda t, v: torch.embedding_renorm_(t, torch.tensor([1, COUNT]), 1.0, 2.0),
}


def tight(table: torch.Tensor) -> EvilPool:
    """A pool with room for a few rows."""
    return EvilPool(fast=max(1024, table.nbytes // 20), largest=max(64, table.nbytes // 100 // 64 * 64))


def outcome(case: Case, table: torch.Tensor, others: torch.Tensor) -> Any:
    result = case(table, others)
    return None if result is None or result is table else bits(result)


def changes_others(name: str, table: torch.Tensor) -> bool:
    """Whether torch itself may change the bits of a NaN in rows that nobody named."""
    if "mean" in name:
        return True
    return table.dtype in HALF and ("scatter" in name or ("index_add_" in name and table.size(1) == 1))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        pytest.param(dtype, width, marks=[] if dtype is torch.float32 or width == 19 else pytest.mark.slow)
        for dtype in DTYPES
        for width in WIDTHS
    ],
)
@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
def test_rows_are_written_with_the_bits_of_the_whole_operation(dtype: torch.dtype, width: int) -> None:
    table, others = values(COUNT, width).to(dtype), values(len(ROWS), width).to(dtype)
    pool = tight(table)
    for name, case in (WRITES | READS).items():
        plain, paged = table.clone(), from_tensor(pool, table)
        expected = outcome(case, plain, others)
        if changes_others(name, table):
            with pytest.raises(BudgetError):
                case(paged, others)
            assert torch.equal(bits(paged), bits(table)), name
            continue
        got = outcome(case, paged, others)
        assert torch.equal(bits(paged), bits(plain)), name
        if expected is not None:
            assert torch.equal(got, expected), name


@pytest.mark.parametrize("size", [(COUNT, 3, 7), (40 * COUNT,)])
def test_rows_of_other_dimensions_are_written_alike(size: tuple[int, ...]) -> None:
    table, others = values(*size), values(len(ROWS), *size[1:])
    pool = tight(table)
    for name in ("rows set to one value", "rows put and added", "index_add_ alpha", "index_copy_", "index_fill_"):
        plain, paged = table.clone(), from_tensor(pool, table)
        WRITES[name](plain, others)
        WRITES[name](paged, others)
        assert torch.equal(bits(paged), bits(plain)), name


def columns(table: torch.Tensor, count: int) -> torch.Tensor:
    return (torch.arange(count).unsqueeze(1) + torch.tensor([0, 3, 0, 5, 5])) % table.size(1)


WITHIN: dict[str, Case] = {
    "gather": lambda t, v: t.gather(1, columns(t, COUNT)),
    "gather of the first rows": lambda t, v: t.gather(-1, columns(t, 300).int().long()),
    "scatter_": lambda t, v: t.scatter_(1, columns(t, 300)[:, 1:3], v[:300]),
    "scatter_ value": lambda t, v: t.scatter_(1, columns(t, COUNT), 2.0),
    "scatter_ multiply": lambda t, v: t.scatter_(1, columns(t, COUNT), v, reduce="multiply"),
    "scatter_add_": lambda t, v: t.scatter_add_(1, columns(t, COUNT), v),
    "scatter_reduce_ amax": lambda t, v: t.scatter_reduce_(1, columns(t, COUNT), v, "amax", include_self=False),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_elements_within_rows_are_picked_and_written_a_few_rows_at_a_time(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        table, others = values(COUNT, 19).to(dtype), values(COUNT, 5).to(dtype)
        plain, paged = table.clone(), from_tensor(tight(table), table)
        expected, got = outcome(WITHIN[name], plain, others), outcome(WITHIN[name], paged, others)
        assert torch.equal(bits(paged), bits(plain))
        assert (got is None and expected is None) or torch.equal(got, expected)


@pytest.mark.slow
def test_many_rows_are_written_alike() -> None:
    """More elements than one thread takes."""
    table = values(6 * COUNT, 40)
    rows = torch.randint(0, 5 * COUNT, (3 * COUNT,), generator=GENERATOR)
    others = values(3 * COUNT, 40)
    cases: dict[str, Case] = {
        "index_add_": lambda t, v: t.index_add_(0, rows, v.to(t.dtype)),
        "index_copy_": lambda t, v: t.index_copy_(0, rows.unique(), v[: len(rows.unique())].to(t.dtype)),
        "scatter_add_": lambda t, v: t.scatter_add_(0, rows.unsqueeze(1).expand_as(v), v.to(t.dtype)),
        "scatter_add_ of copied rows": lambda t, v: t.scatter_add_(0, rows.unsqueeze(1).repeat(1, 40), v.to(t.dtype)),
        "sparse": lambda t, v: t.add_(sparse(t, rows, v.to(t.dtype))),
        "gather": lambda t, v: t.gather(0, rows.unsqueeze(1).expand_as(v)),
    }
    for dtype in DTYPES:
        for name, case in cases.items():
            plain, paged = table.to(dtype), from_tensor(tight(table.to(dtype)), table.to(dtype))
            expected = outcome(case, plain, others)
            if "scatter" in name and dtype in HALF:
                with pytest.raises(BudgetError):
                    case(paged, others)
                continue
            got = outcome(case, paged, others)
            assert torch.equal(bits(paged), bits(plain)), name
            assert (got is None and expected is None) or torch.equal(got, expected), name


def test_operands_that_are_paged_themselves_are_taken() -> None:
    table, others = values(COUNT, 19), values(len(ROWS), 19)
    pool = tight(table)
    plain, paged = table.clone(), from_tensor(pool, table)
    rows = from_tensor(pool, ROWS)
    for t, r, v in ((plain, ROWS, others), (paged, rows, from_tensor(pool, others))):
        t.index_add_(0, r, v)
        t[r[1:3]] = v[:2]
        t.scatter_add_(0, r.unsqueeze(1).expand_as(v), v)
    assert torch.equal(bits(paged), bits(plain))
    assert torch.equal(bits(paged.gather(0, rows.unsqueeze(1))), bits(plain.gather(0, ROWS.unsqueeze(1))))


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_raises_its_error_and_changes_nothing(name: str) -> None:
    table, others = values(COUNT, 19), values(len(ROWS), 19)
    paged = from_tensor(tight(table), table)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        WRONG[name](table.clone(), others)
    with pytest.raises(type(expected.value)) as got:
        WRONG[name](paged, others)
    assert not isinstance(got.value, BudgetError)
    if "mask" in name:
        assert str(got.value) == str(expected.value)
    assert torch.equal(bits(paged), bits(table))


def moved(pool: Pool) -> int:
    return sum(link.nbytes for link in pool.stats().links)


@pytest.mark.parametrize("fast", ["256KiB", "8MiB"])
def test_only_the_blocks_of_the_touched_rows_move(fast: str) -> None:
    """Also where the table fits: beside a filler it has to leave."""
    table = torch.randn(20_000, 64, generator=GENERATOR)
    rows = torch.arange(96) * 200
    others = torch.randn(96, 64, generator=GENERATOR)
    with Pool(fast, dram="64MiB") as pool:
        embedding = torch.nn.Embedding.from_pretrained(table, freeze=True)
        farpool.offload(embedding, pool)
        weight = embedding.weight
        for case in (
            lambda t: t.index_add_(0, rows, others),
            lambda t: t.__setitem__(rows, others),
            lambda t: t.scatter_add_(0, rows.unsqueeze(1).expand_as(others), others),
            lambda t: t.gather(0, rows.unsqueeze(1)),
            lambda t: torch.embedding_renorm_(t, rows, 1.0, 2.0),
            lambda t: t.add_(sparse(t, rows, others)),
            lambda t: torch.nn.functional.embedding_bag(rows.view(4, 24), t),
        ):
            filler = pool.empty(int(pool.fast * 0.8) // 4)
            filler.zero_()
            before = moved(pool)
            case(weight)
            # Each block comes in twice at most, and leaves once; and the filler leaves.
            assert moved(pool) - before <= 96 * 3 * weight._storage.block_bytes + pool.fast
            case(table)
            del filler
        assert torch.equal(bits(weight), bits(table))
        farpool.restore(embedding)
        del weight
