"""Embedding tables larger than the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farpool
from farpool import BudgetError, PagedTensor, Pool
from tests.process.pitfalls.compare import assert_usable, churn, integers, may_raise, plain, randn, refused, same
from tests.process.pitfalls.harness import scenario

ROWS, WIDTH = 4096, 64  # 1 MiB of float32: four times the budget
FAST = "256KiB"
FEW = torch.tensor([0, 4095, 17, 17, 2048])


def table(seed: int = 3) -> torch.Tensor:
    return randn(ROWS, WIDTH, seed=seed)


def embedding(**options: Any) -> nn.Embedding:
    module = nn.Embedding(ROWS, WIDTH, **options)
    with torch.no_grad():
        module.weight.copy_(table())
    return module


def moved(pool: Pool) -> int:
    return sum(link.nbytes for link in pool.stats().links)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "embedding": lambda t: nn.functional.embedding(FEW, t),
    "embedding of a matrix": lambda t: nn.functional.embedding(integers(ROWS, 3, 5), t),
    "embedding with padding": lambda t: nn.functional.embedding(FEW, t, padding_idx=17),
    "embedding of int32": lambda t: nn.functional.embedding(FEW.int(), t),
    "embedding of nothing": lambda t: nn.functional.embedding(torch.empty(0, dtype=torch.int64), t),
    "embedding of a paged index": lambda t: nn.functional.embedding(
        t.pool.from_tensor(FEW) if type(t) is PagedTensor else FEW, t
    ),
    "embedding out of range": lambda t: nn.functional.embedding(torch.tensor([ROWS]), t),
    "embedding of a negative": lambda t: nn.functional.embedding(torch.tensor([-1]), t),
    "index_select": lambda t: t.index_select(0, FEW),
    "index_select out of range": lambda t: t.index_select(0, torch.tensor([ROWS])),
    "rows by list": lambda t: t[[5, 4000, -1]],
    "rows by tensor": lambda t: t[FEW],
    "rows by matrix": lambda t: t[integers(ROWS, 2, 3)],
    "rows out of range": lambda t: t[[0, ROWS]],
    "one row": lambda t: t[1234] * 1,
    "one element": lambda t: t[4000, 3].item(),
    "a slice": lambda t: t[100:120] + 0,
    "a slice with a step": lambda t: t[100:110:3] + 0,
    "the last rows": lambda t: t[-3:].sum(),
}


@scenario(fast=FAST)
def reading_rows_moves_the_touched_blocks_only(pool: Pool) -> None:
    paged, reference = pool.from_tensor(table()), table()
    tables = {"weights": paged, "embedding": farpool.offload(embedding(), pool).weight.detach()}
    for kind, tensor in tables.items():
        for name, read in READS.items():
            churn(pool)
            before = moved(pool)
            try:
                got: Any = read(tensor)
            except (IndexError, RuntimeError) as error:
                got = type(error)
            nbytes = moved(pool) - before
            try:
                expected: Any = read(reference)
            except (IndexError, RuntimeError) as error:
                expected = type(error)
            same(got, expected, name)
            # The filler of a whole budget leaves dirty: writing it back is not the read's doing.
            limit = pool.fast + (32 << 10) * 20
            assert nbytes <= limit < reference.nbytes, f"{kind}, {name}: {nbytes} bytes moved for a few rows"
        assert type(tensor[FEW]) is torch.Tensor
    assert_usable(pool)


@scenario(fast=FAST)
def few_rows_of_an_embedding_cost_few_bytes(pool: Pool) -> None:
    module = farpool.offload(embedding(), pool)
    churn(pool)
    plain(module.weight[0])
    before = moved(pool)
    rows = torch.arange(8) * 500
    for _ in range(5):
        same(module(rows).detach(), table()[rows])
    nbytes = moved(pool) - before
    assert nbytes <= 8 * (16 << 10) + pool.fast, f"{nbytes} bytes moved for 8 rows of {module.weight.nbytes} bytes"


@scenario(fast=FAST)
def more_rows_than_the_budget_holds_can_be_read_at_once(pool: Pool) -> None:
    paged = pool.from_tensor(table())
    indices = integers(ROWS, 3 * ROWS)
    same(nn.functional.embedding(indices, paged), table()[indices])
    same(paged[torch.arange(ROWS).flip(0)], table().flip(0))
    same(paged.index_select(0, indices), table()[indices])
    same(paged.clone(), table())
    assert torch.equal(paged, table())


def _steps(module: nn.Embedding, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = (module(integers(ROWS, 30, seed=seed)) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


SPARSE: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def _trains_or_names_the_budget(pool: Pool, options: dict[str, Any], make: Any) -> None:
    """Train in the pool; as long as a budget is too small, in a new one with the budget that the error names."""
    reference = embedding(**options)
    losses = _steps(reference, make(list(reference.parameters())))
    target, refusals = pool, set()
    while True:
        module = farpool.offload(embedding(**options), target)
        with may_raise(BudgetError) as refusal:
            got = _steps(module, make(list(module.parameters())))
        if (error := refusal.error) is not None:
            assert error.op
            assert error.needed > target.fast
            assert f"{error.needed} bytes" in str(error)
            assert (error.op, error.needed) not in refusals, f"the budget that the error named does not work: {error}"
            assert "weight" in str(error), f"the parameter is not named: {error}"
            refusals.add((error.op, error.needed))
            needed = error.needed
        else:
            same(got, losses)
            same(module.weight.detach(), reference.weight.detach())
            needed = 0
        del module
        assert_usable(target)
        if target is not pool:
            target.close()
        if not needed:
            return
        target = Pool(needed, dram="16MiB")


@scenario(fast=FAST, each=SPARSE)
def a_table_trains_with_sparse_gradients_or_names_the_budget_that_works(pool: Pool, make: Any) -> None:
    _trains_or_names_the_budget(pool, {"sparse": True}, make)


@scenario(fast=FAST)
def a_table_trains_with_dense_gradients_or_names_the_budget_that_works(pool: Pool) -> None:
    _trains_or_names_the_budget(pool, {}, lambda p: torch.optim.AdamW(p, lr=0.1))


@scenario(fast=FAST)
def a_table_with_a_norm_limit_trains_or_names_the_budget_that_works(pool: Pool) -> None:
    _trains_or_names_the_budget(pool, {"max_norm": 2.0, "padding_idx": 4}, lambda p: torch.optim.SGD(p, lr=0.1))


@scenario(fast=FAST)
def an_embedding_bag_over_a_large_table_is_equal_or_names_the_budget(pool: Pool) -> None:
    reference = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    module = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    module.load_state_dict(reference.state_dict())
    farpool.offload(module, pool)
    indices = integers(ROWS, 4, 6)
    with may_raise(BudgetError) as refusal:
        got = module(indices)
    if (error := refusal.error) is not None:
        assert error.needed > pool.fast
    else:
        same(got.detach(), reference(indices).detach())
    assert_usable(pool)


@scenario(fast=FAST)
def operations_on_the_whole_table_are_equal_or_name_the_budget(pool: Pool) -> None:
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum": lambda t: t.sum(),
        "product": lambda t: t @ torch.ones(WIDTH, 2),
        "addition": lambda t: t + 1,
        "addition in place": lambda t: t.add_(1),
        "fill": lambda t: t.fill_(2),
        "zero": lambda t: t.zero_(),
        "copy": lambda t: t.copy_(table(5)),
        "type": lambda t: t.to(torch.float64),
        "transposed copy": lambda t: t.t().contiguous(),
        "uniform": lambda t: t.uniform_(),
        "normal": lambda t: t.normal_(),
        "xavier": lambda t: nn.init.xavier_normal_(t),
        "zeros_like": lambda t: torch.zeros_like(t),
        "row in place": lambda t: t[7].add_(1),
        "rows in place": lambda t: t[100:200].mul_(2),
        "row set": lambda t: t.__setitem__(5, 3.0),
        "rows set by list": lambda t: t.__setitem__([5, 4000], 3.0),
        "index_add_": lambda t: t.index_add_(0, FEW, torch.ones(5, WIDTH)),
        "norm": lambda t: t.norm(),
        "argmax of a column": lambda t: t[:, 3].argmax(),
        "reshape": lambda t: t.view(-1)[100_000:100_010] * 2,
        "split": lambda t: [part[0] + 0 for part in t.split(512)],
        "isnan": lambda t: t.isnan().any(),
        "materialize": plain,
        "gather": lambda t: t.gather(0, integers(ROWS, 2, WIDTH)),
    }
    problems = []
    for name, case in cases.items():
        torch.manual_seed(1)
        reference = table()
        expected = case(reference)
        paged = pool.from_tensor(table())
        torch.manual_seed(1)
        try:
            got = case(paged)
        except BudgetError as error:
            if error.needed <= pool.fast or not error.op or f"{error.needed} bytes" not in str(error):
                problems.append(f"{name}: {error}")
            error.__traceback__ = None
            got, expected, reference = None, None, table()
        except Exception as error:
            problems.append(f"{name}: {error!r}")
            error.__traceback__ = None
            continue
        try:
            same(got, expected, name)
            same(paged, reference, f"{name}: table")
        except AssertionError as error:
            problems.append(str(error))
            error.__traceback__ = None
        del got, paged
    assert not problems, "\n".join(problems)
    assert_usable(pool)


@scenario(fast=FAST)
def a_table_is_paged_without_ever_being_resident(pool: Pool) -> None:
    with farpool.paged(pool):
        module = nn.Embedding(ROWS, WIDTH)
    torch.manual_seed(4)
    nn.init.normal_(module.weight)
    torch.manual_seed(4)
    reference = nn.init.normal_(torch.empty(ROWS, WIDTH))
    same(module(FEW).detach(), reference[FEW])
    farpool.restore(module)
    same(module.weight.detach(), reference)


@scenario(fast=FAST)
def a_table_beyond_all_tiers_is_refused_and_the_module_is_as_it_was(pool: Pool) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Embedding(80_000, WIDTH))  # 20 MB; the tiers hold 16.5
    before = [id(p) for p in module.parameters()]
    with refused(pool, farpool.PoolFullError, "1.weight"):
        farpool.offload(module, pool)
    assert [id(p) for p in module.parameters()] == before
    assert all(type(p) is nn.Parameter for p in module.parameters())
