"""Indexing, reading and writing, in all common forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import farpool
from farpool import Pool
from tests.process.pitfalls.compare import integers, randn, twins
from tests.process.pitfalls.harness import scenario

long = torch.tensor

INDEXES: dict[str, Callable[[], Any]] = {
    "int": lambda: 2,
    "negative int": lambda: -1,
    "int out of range": lambda: 9,
    "two ints": lambda: (1, 2),
    "three ints": lambda: (1, 2, 3),
    "too many ints": lambda: (1, 2, 3, 0),
    "slice": lambda: slice(1, 4),
    "slice with a step": lambda: slice(None, None, 2),
    "slice to the end": lambda: slice(-2, None),
    "empty slice": lambda: slice(3, 3),
    "slice out of range": lambda: slice(4, 100),
    "slices": lambda: (slice(1, None), slice(None, 3), slice(0, 4, 3)),
    "ellipsis": lambda: ...,
    "ellipsis and int": lambda: (..., 1),
    "int and ellipsis": lambda: (1, ..., slice(1, 3)),
    "None": lambda: None,
    "None between": lambda: (slice(None), None, 1),
    "bool": lambda: True,
    "false": lambda: False,
    "list": lambda: [0, 3, 3],
    "list of negatives": lambda: [-1, 0],
    "list out of range": lambda: [0, 8],
    "empty list": lambda: [],
    "list in the middle": lambda: (slice(None), [0, 2]),
    "two lists": lambda: ([0, 1], [2, 0]),
    "lists apart": lambda: ([0, 1], slice(None), [2, 0]),
    "lists that broadcast": lambda: ([[0], [1]], [2, 0]),
    "tensor": lambda: long([1, 1, 4]),
    "int32 tensor": lambda: long([1, 0], dtype=torch.int32),
    "uint8 tensor": lambda: long([1, 0, 0, 1, 0, 1], dtype=torch.uint8),
    "matrix of indices": lambda: long([[0, 1], [5, 4]]),
    "scalar tensor": lambda: long(3),
    "empty tensor": lambda: torch.empty(0, dtype=torch.int64),
    "float tensor": lambda: long([1.0]),
    "tensor and int": lambda: (long([0, 2]), 1),
    "int and tensor": lambda: (1, long([0, 2])),
    "tensor, None, tensor": lambda: (long([0, 2]), None, long([1, 1])),
    "mask of rows": lambda: long([True, False, True, False, False, True]),
    "mask of all false": lambda: torch.zeros(6, dtype=torch.bool),
    "mask of two dimensions": lambda: randn(6, 4) > 0,
    "mask of all dimensions": lambda: randn(6, 4, 5) > 0,
    "mask of the wrong size": lambda: torch.ones(5, dtype=torch.bool),
    "mask and int": lambda: (long([True, False, True, False, False, True]), 2),
    "mask in the middle": lambda: (slice(None), long([True, False, True, True])),
    "list of bools": lambda: [True, False, True, False, False, True],
    "range": lambda: range(2, 5),
    "tuple of tuples": lambda: ((0, 1), (1, 2)),
    "numpy integer": lambda: __import__("numpy").int64(2),
    "numpy array": lambda: __import__("numpy").array([0, 2]),
}


def _set(index: Callable[[], Any], value: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def program(tensor: torch.Tensor) -> Any:
        tensor[index()] = value(tensor)
        return tensor.sum()

    return program


def _add(index: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    def program(tensor: torch.Tensor) -> Any:
        tensor[index()] += 1
        return tensor.sum()

    return program


def _paged_index(index: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    def program(tensor: torch.Tensor) -> Any:
        chosen = index()
        if not isinstance(chosen, torch.Tensor):
            return None
        return tensor[tensor.pool.from_tensor(chosen) if type(tensor) is farpool.PagedTensor else chosen]

    return program


SMALL, LARGE = (6, 4, 5), (6, 4, 500)


def _reading() -> dict[str, Callable[..., Any]]:
    return {name: (lambda t, index=index: t[index()]) for name, index in INDEXES.items()}


@scenario(each={"one_block": SMALL, "many_blocks": LARGE})
def reading_by_index_is_as_in_torch(pool: Pool, shape: tuple[int, ...]) -> None:
    cases = _reading()
    if shape is LARGE:
        del cases["mask of all dimensions"]
    twins(pool, lambda: randn(*shape), cases)


@scenario()
def reading_a_view_by_index_is_as_in_torch(pool: Pool) -> None:
    cases = {name: (lambda t, f=f: f(t.permute(2, 0, 1)[1:7])) for name, f in _reading().items()}
    twins(pool, lambda: randn(4, 5, 8), cases)


@scenario(each={"one_block": SMALL, "many_blocks": LARGE})
def writing_a_number_by_index_is_as_in_torch(pool: Pool, shape: tuple[int, ...]) -> None:
    indexes = {n: i for n, i in INDEXES.items() if shape is SMALL or n != "mask of all dimensions"}
    twins(pool, lambda: randn(*shape), {name: _set(index, lambda t: 7.0) for name, index in indexes.items()})


@scenario()
def writing_a_tensor_by_index_is_as_in_torch(pool: Pool) -> None:
    values: dict[str, Callable[[torch.Tensor], Any]] = {
        "scalar": lambda t: torch.tensor(2.5),
        "row": lambda t: torch.arange(5.0),
        "own element": lambda t: t[0, 0, 0],
        "own row": lambda t: t[0, 0],
        "other type": lambda t: torch.tensor(3),
    }
    for what, value in values.items():
        print(what)
        twins(pool, lambda: randn(*SMALL), {name: _set(index, value) for name, index in INDEXES.items()})


@scenario()
def adding_by_index_is_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(*SMALL), {name: _add(index) for name, index in INDEXES.items()})


@scenario(each={"one_block": SMALL, "many_blocks": LARGE})
def a_paged_index_is_as_a_plain_one(pool: Pool, shape: tuple[int, ...]) -> None:
    indexes = {n: i for n, i in INDEXES.items() if shape is SMALL or n != "mask of all dimensions"}
    twins(pool, lambda: randn(*shape), {name: _paged_index(index) for name, index in indexes.items()})


i2 = lambda: integers(6, 3, 5)  # noqa: E731

METHODS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_select": lambda t: (t.index_select(0, long([5, 0, 0])), t.index_select(1, long([2]))),
    "index_select of a negative": lambda t: t.index_select(0, long([-1])),
    "index_select out of range": lambda t: t.index_select(0, long([6])),
    "gather": lambda t: t.gather(0, i2()),
    "gather out of range": lambda t: t.gather(0, i2() + 9),
    "take": lambda t: t.take(long([0, 7, 29])),
    "take_along_dim": lambda t: torch.take_along_dim(t, i2(), 0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "nonzero": lambda t: ((t > 0).nonzero(), t.nonzero(), torch.nonzero(t, as_tuple=True)),
    "argwhere": lambda t: torch.argwhere(t > 0),
    "select_scatter": lambda t: t.select_scatter(torch.ones(5), 0, 2),
    "slice_scatter": lambda t: t.slice_scatter(torch.ones(2, 5), 0, 1, 3),
    "diagonal_scatter": lambda t: t.diagonal_scatter(torch.ones(5)),
    "as_strided_scatter": lambda t: t.as_strided_scatter(torch.ones(3), (3,), (2,), 1),
    "masked_scatter": lambda t: t.masked_scatter(t > 0, torch.arange(30.0)),
    "scatter": lambda t: t.scatter(0, i2(), randn(3, 5)),
    "scatter_add": lambda t: t.scatter_add(0, i2(), randn(3, 5)),
    "index_fill": lambda t: t.index_fill(1, long([1, 3]), -1),
    "put_": lambda t: t.put_(long([0, 29]), torch.tensor([8.0, 9.0])),
    "put_ accumulating": lambda t: t.put_(long([0, 0]), torch.tensor([8.0, 9.0]), accumulate=True),
    "index_put_": lambda t: t.index_put_((long([0, 1]), long([1, 1])), torch.tensor([1.0, 2.0])),
    "index_put_ accumulating": lambda t: t.index_put_((long([1, 1]),), randn(2, 5), accumulate=True),
    "index_put_ with None": lambda t: torch.ops.aten.index_put_(t, [None, long([1, 1])], torch.tensor(1.0), True),
    "index_put_ of a mask": lambda t: t.index_put_((t > 0,), torch.tensor(1.0)),
    "index_put": lambda t: t.index_put((long([0]),), torch.tensor(3.0)),
    "index_put_ out of range": lambda t: t.index_put_((long([7]),), torch.tensor(3.0)),
    "index_add_": lambda t: t.index_add_(0, long([0, 0, 5]), randn(3, 5), alpha=2),
    "index_add_ along a column": lambda t: t.index_add_(1, long([0, 0]), randn(6, 2)),
    "index_copy_": lambda t: t.index_copy_(0, long([4, 2]), randn(2, 5)),
    "index_copy_ from itself": lambda t: t.index_copy_(0, long([4, 2]), t[:2]),
    "index_fill_": lambda t: t.index_fill_(0, long([3]), 0.5),
    "index_reduce_": lambda t: t.index_reduce_(0, long([0, 0]), randn(2, 5), "amax"),
    "scatter_": lambda t: t.scatter_(0, i2(), randn(3, 5)),
    "scatter_ of a number": lambda t: t.scatter_(0, i2(), 1.5),
    "scatter_ reducing": lambda t: t.scatter_(0, long([[0, 1, 2, 3, 4]]), 2.0, reduce="multiply"),
    "scatter_add_": lambda t: t.scatter_add_(0, i2(), randn(3, 5)),
    "scatter_reduce_": lambda t: t.scatter_reduce_(0, i2(), randn(3, 5), "mean"),
    "scatter_ of itself": lambda t: t.scatter_(1, long([[0], [1]]), t[2:4, :1].clone()),
    "masked_fill_": lambda t: t.masked_fill_(randn(6, 5) > 0, 4.0),
    "masked_fill_ by a tensor": lambda t: t.masked_fill_(t > 0, torch.tensor(2.0)),
    "masked_scatter_": lambda t: t.masked_scatter_(randn(6, 5) > 0, randn(30)),
    "where": lambda t: (torch.where(t > 0, t, -t), torch.where(t > 0), t.where(t > 0, 0.0)),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
    "repeat": lambda t: t.repeat(2, 1),
    "tile": lambda t: t.tile(2),
    "roll": lambda t: t.roll(2, 0),
    "flip": lambda t: t.flip(0, 1),
    "rot90": lambda t: t.rot90(),
    "triu": lambda t: (t.triu(), t.tril(1)),
    "item": lambda t: (t[0, 0].item(), float(t[1, 1]), int(t[1, 2]), bool(t[2, 2] > 0), complex(t[0, 1])),
    "item of many": lambda t: t.item(),
    "bool of many": lambda t: bool(t),
    "tolist": lambda t: (t.tolist(), t[0].tolist(), t[0, 0].tolist()),
    "len and in": lambda t: (len(t), 99.0 in t, float(t[0, 0]) in t),
    "as an index": lambda t: [10, 20, 30][(t[0, 0] * 0).long() + 1],
    "iteration": lambda t: [row.sum() for row in t],
    "reversed": lambda t: list(reversed(t)),
    "unpacking": lambda t: (lambda a, *rest: (a, len(rest)))(*t),
    "searchsorted": lambda t: torch.searchsorted(t.flatten().sort().values, torch.tensor([0.0, 1.0])),
    "bucketize": lambda t: torch.bucketize(randn(5), t.flatten().sort().values),
    "dictionary key": lambda t: {t: 1}[t],
    "sum of a slice": lambda t: sum(t[i, i] for i in range(4)),
}


@scenario(each={"one_block": 5, "many_blocks": 5000})
def indexing_methods_are_as_in_torch(pool: Pool, width: int) -> None:
    if width == 5:
        twins(pool, lambda: randn(6, 5), METHODS)
        return
    wide = {n: METHODS[n] for n in ("gather", "scatter_", "masked_fill_ by a tensor", "where", "roll", "triu")}
    twins(pool, lambda: randn(6, 1500), wide | {"narrow": lambda t: t.narrow(1, 700, 3) * 2})
    rows = {n: f for n, f in METHODS.items() if n.startswith("index_") and "column" not in n}
    twins(pool, lambda: randn(2000, 5), rows)
