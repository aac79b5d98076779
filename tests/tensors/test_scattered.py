"""Operations on columns and other views of a table larger than the budget: plain torch's bits, or a typed error."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from farpool import BudgetError, PagedTensor, Pool, TierError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.factories import from_tensor, materialize
from farpool.tensors.rules import scattered
from farpool.tensors.rules.scattered import narrow_strides
from tests.tensors.evil_pool import EvilPool

ROWS, WIDTH = 1500, 48
SLOW = pytest.mark.slow
View = Callable[[torch.Tensor], torch.Tensor]
DTYPES = [
    torch.bfloat16,
    *[pytest.param(dtype, marks=SLOW) for dtype in (torch.float32, torch.float64, torch.float16, torch.int64)],
]
VIEWS: dict[str, View] = {
    "column": lambda t: t[:, 5],
    "every third row": lambda t: t[::3],
    "steps": lambda t: t[1::2, 3::5],
    "left part": lambda t: t[:, :20],
    "middle part": lambda t: t[7:, 3:40],
    "transposed part": lambda t: t.t()[3:20],
    "permuted": lambda t: t.view(ROWS // 10, 10, WIDTH).permute(2, 0, 1)[::2, :, 1:7],
    "expanded": lambda t: t[:, None, 2:9].expand(ROWS, 3, 7),
    "diagonal": lambda t: t[: WIDTH * (ROWS // WIDTH)].view(-1, WIDTH, WIDTH).diagonal(dim1=1, dim2=2),
}
OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gt": lambda v: v > 0.3,
    "ne": lambda v: v != v,
    "isnan": lambda v: v.isnan(),
    "exp": lambda v: v.exp(),
    "tanh": lambda v: v.tanh(),
    "neg": lambda v: -v,
    "number": lambda v: v * 3 + 1,
    "itself": lambda v: v - v * 2,
    "plain": lambda v: v + torch.arange(v.numel(), dtype=v.dtype).view(v.size()),
    "row": lambda v: v * torch.arange(v.size(-1), dtype=v.dtype),
    "where": lambda v: torch.where(v > 0, v, 0),
    "mask": lambda v: v[v > 0],
    "to": lambda v: v.bool(),
    "out": lambda v: torch.mul(v, 2, out=torch.empty(0, dtype=v.dtype)),
    "sum": lambda v: (v.sum(), v.sum(0), v.sum(-1)),
    "max": lambda v: (v.max(), v.max(0), v.argmax(), v.amin(-1)),
    "nonzero": lambda v: (v.nonzero(), torch.count_nonzero(v), v.flip(0)),
    "mean": lambda v: (v.mean(), v.std(0), v.norm()) if v.is_floating_point() else v.prod(0),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda v: v.mul_(3),
    "itself": lambda v: v.mul_(v),
    "clamp_": lambda v: v.clamp_(-1, 1),
    "fill_": lambda v: v.fill_(3),
    "zero_": lambda v: v.zero_(),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 2),
    "by a mask": lambda v: v.__setitem__(v > 0, 1),
    "integers": lambda v: v.copy_(torch.arange(v.size(-1))),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, dtype=torch.float64) * 3
    if dtype.is_floating_point:
        for value, share in ((float("nan"), 0.05), (-0.0, 0.02), (float("inf"), 0.01)):
            table[torch.rand(table.size()) < share] = value
    return table.to(dtype)


def small_pool(table: torch.Tensor) -> EvilPool:
    return EvilPool(fast=table.nbytes // 6, largest=1 << 12)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """The same, also in the bits of NaNs, which tell how an element was computed."""
    if isinstance(expected, tuple):
        for left, right in zip(actual, expected, strict=True):
            assert_same_bits(left, right)
        return
    actual = materialize(actual)
    assert (actual.dtype, actual.size(), actual.stride()) == (expected.dtype, expected.size(), expected.stride())
    assert torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_table_larger_than_the_budget_are_computed_with_the_bits_of_plain_ones(
    view: str, dtype: torch.dtype
) -> None:
    plain = values(dtype)
    paged = from_tensor(small_pool(plain), plain)
    for name, operation in OPERATIONS.items():
        expected = operation(VIEWS[view](plain))
        result = operation(VIEWS[view](paged))
        assert (type(result) is PagedTensor) == (name == "to"), name  # to() makes a paged copy
        assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", [name for name in VIEWS if name != "expanded"])
def test_views_of_a_table_larger_than_the_budget_are_changed_in_place(view: str, dtype: torch.dtype) -> None:
    for operation in WRITES.values():
        plain = values(dtype)
        paged = from_tensor(small_pool(plain), plain)
        shown = VIEWS[view](paged)
        result = operation(shown)
        assert result is None or result is shown
        operation(VIEWS[view](plain))
        assert_same_bits(paged, plain)


def test_columns_of_one_table_change_each_other_and_gradients_reach_the_table() -> None:
    plain = values(torch.float64)
    paged: torch.Tensor = from_tensor(small_pool(plain), plain)
    for table in (plain, paged):
        table[:, 0].add_(table[:, 1]).mul_(table[:, 40])
    assert_same_bits(paged, plain)
    for table in (plain, paged):
        table.requires_grad_()
        (table[:, 3] * table[:, 4]).nansum().backward()
    assert plain.grad is not None
    assert_same_bits(paged.grad, plain.grad)


def test_dense_operands_in_different_orders_are_computed_together() -> None:
    plain = values(torch.bfloat16)
    other = values(torch.bfloat16).flip(1).t().contiguous()
    pool = small_pool(plain)
    paged, turned = from_tensor(pool, plain), from_tensor(pool, other)
    assert_same_bits(paged + turned.t(), plain + other.t())
    assert_same_bits(paged.t() < other, plain.t() < other)
    assert_same_bits(paged.mul_(turned.t()), plain.mul_(other.t()))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "shows elements several times": lambda t: t.unfold(1, 3, 2).exp(),
    "reads elements that it changes": lambda t: t[:, :30].add_(t[:, 10:40]),
    "changes elements several times": lambda t: t[:, :1].expand(ROWS, 4).fill_(0),
    "dense": lambda t: t.exp(),
    "dense sum": lambda t: t.sum(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_not_been_shown_to_have_the_same_bits_is_refused(kind: str) -> None:
    plain = values(torch.float32)
    paged = from_tensor(small_pool(plain), plain)
    with pytest.raises(BudgetError):
        REFUSED[kind](paged)
    assert_same_bits(paged, plain)


def test_copies_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = from_tensor(small_pool(values(torch.float32)), values(torch.float32))
    copied = 8 * ROWS  # every other element of the copy is used
    for available, fits in ((2 * copied, True), (2 * copied - 10, False)):
        monkeypatch.setattr(scattered, "available_memory", lambda available=available: available)
        with nullcontext() if fits else pytest.raises(BudgetError):
            paged[:, 0].exp()


@pytest.mark.parametrize(
    ("size", "stride", "narrow"),
    [
        ((100,), (32,), (2,)),
        ((100,), (1,), (1,)),
        ((100, 20), (48, 1), (32, 1)),  # 16 elements are a cache line
        ((100, 20), (50, 1), (34, 1)),
        ((100, 32), (32, 1), (32, 1)),
        ((20, 100), (1, 48), (1, 32)),
        ((100, 5), (96, 3), (9, 2)),
        ((100, 32), (96, 3), (64, 2)),  # one after the other, like a column of a longer table
        ((10, 3, 7), (48, 0, 1), (16, 0, 1)),
        ((10, 1, 7), (48, 48, 1), (16, 160, 1)),
        ((10, 3), (2, 1), None),
        ((), (), ()),
    ],
)
def test_narrow_strides_keep_what_torch_looks_at(
    size: tuple[int, ...], stride: tuple[int, ...], narrow: tuple[int, ...] | None
) -> None:
    assert narrow_strides(size, stride, 16) == narrow


def test_a_failed_write_says_that_elements_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = values(torch.float32)
    pool = small_pool(plain)
    paged = from_tensor(pool, plain)
    acquire, writes = pool.acquire, itertools.count()

    def failing(uses: Sequence[Use], *args: Any, **kwargs: Any) -> Any:
        if any(use.mode is not Mode.READ for use in uses) and next(writes) == 3:
            raise TierError("the link is down", tier="nvme")
        return acquire(uses, *args, **kwargs)

    monkeypatch.setattr(pool, "acquire", failing)
    with pytest.raises(TierError) as caught:
        paged[:, 0].mul_(3)
    monkeypatch.undo()
    assert "may have changed some of the elements" in caught.value.__notes__[0]
    assert next(writes) == 4  # some parts were written
    assert_same_bits(materialize(paged)[:, 1:].contiguous(), plain[:, 1:].contiguous())


@pytest.mark.slow
def test_views_that_count_as_apart_share_no_element() -> None:
    rng = random.Random(7)
    apart = 0
    with Pool(fast="64KiB", dram="1MiB") as pool:
        table = pool.from_tensor(torch.arange(400.0))
        for _ in range(2000):
            size, stride = ([rng.randint(1, limit) for _ in range(2)] for limit in (3, 8))
            one, other = (table.as_strided(size, stride, rng.randint(0, 9)) for _ in range(2))
            shared = {*one.flatten().tolist()} & {*other.flatten().tolist()}
            if scattered._apart(one, other) and one.storage_offset() != other.storage_offset():
                assert not shared, (size, stride, one.storage_offset(), other.storage_offset())
                apart += 1
        assert apart > 200
        assert scattered._apart(table.as_strided((2, 4), (8, 2), 0), table.as_strided((2, 4), (8, 2), 1))
