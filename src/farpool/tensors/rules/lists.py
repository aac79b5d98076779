"""Rules for ``_foreach_*`` and ``_fused_*`` operations, whose arguments are lists of tensors.

An *element* here consists of the tensors at one position of all lists. Each large element is computed alone, and block
by block if it does not fit into the fast tier. So for an optimizer step over a whole model, the fast tier must hold
only a few blocks of each list. Consecutive small elements are computed together, which saves time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farpool.errors import BudgetError
from farpool.tensors.calls import calls
from farpool.tensors.compute import compute
from farpool.tensors.dispatch import family_rule
from farpool.tensors.factories import allocate, class_of_moments, from_tensor
from farpool.tensors.operands import paged_arguments
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.pieces import compute_in_pieces
from farpool.tensors.rules.norms import ADVICE
from farpool.tensors.schema import signature_of

_aten = torch.ops.aten
_ELEMENTS_DIVISOR = 64
"""Elements are computed together if their bytes are at most the budget divided by this."""
_BLOCKS_DIVISOR = 2
"""Elements are computed together only if the bytes of their blocks are at most the budget divided by this."""
# Operations with one number for each tensor as results, which stay plain.
_REDUCTIONS = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))
_FUSED = frozenset(("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"))
_NAMES = (
    *("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp"),
    *("sqrt", "neg", "sign", "abs", "reciprocal", "maximum", "minimum", "clamp_min", "clamp_max", "copy", "zero"),
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_ELEMENTWISE = _FUSED | {f"_foreach_{name}{ending}" for name in _NAMES for ending in ("", "_")} | {_UNSCALE}
"""Operations that give the same bits in pieces as on whole tensors."""


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is tuple


def _elements(name: str, value: Any, part: slice) -> Any:
    if _is_list(value):
        return list(value[part])
    if name == "scalars" and isinstance(value, torch.Tensor):
        return value[part]
    return value


def _ask_for_the_largest(op: str, lists: Sequence[Sequence[Any]], count: int) -> None:
    """Raise `BudgetError` if the largest element does not fit. The error names a budget that is enough for all."""
    elements = [[value[index] for value in lists if type(value[index]) is PagedTensor] for index in range(count)]
    largest = max(elements, key=lambda tensors: sum(tensor.nbytes for tensor in tensors))
    pool = largest[0]._storage.pool
    pool.release(pool.acquire([tensor._footprint.reader() for tensor in largest], op))


def _run(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    paged = paged_arguments(args, kwargs)
    if not paged:
        return func(*args, **kwargs)
    storage = paged[0]._storage
    cls = class_of_moments(paged[0])
    try:
        results = compute(func, args, kwargs)
    except BudgetError:
        name = func._opname
        if name not in _ELEMENTWISE or any(len(value) > 1 for value in args if _is_list(value)):
            raise

        def make_result(like: torch.Tensor) -> torch.Tensor:
            return allocate(storage.pool, like.size(), like.stride(), like.dtype, cls=cls)

        result = compute_in_pieces(func, args, kwargs, make_result, fused=name in _FUSED)
        if result is NotImplemented:
            raise
        return None if result is None else [result]
    if results is None or func._opname in _REDUCTIONS:
        return results
    return [item if type(item) is PagedTensor else from_tensor(storage.pool, item, cls=cls) for item in results]


def _add_one_by_one(tensors: Sequence[Any], others: Sequence[Any], alpha: Any = 1) -> None:
    """Add two lists of tensors pair by pair, as torch does if some of the tensors are sparse."""
    for tensor, other in zip(tensors, others, strict=True):
        _aten.add_.Tensor(tensor, other, alpha=alpha)


@family_rule("_foreach_", "_amp_foreach_", "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
def _streamed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count = next(len(value) for value in args if _is_list(value))
    if any(len(value) not in (0, count) for value in (*args, *kwargs.values()) if _is_list(value)):
        # Lists of different lengths: torch raises its own error.
        return NotImplemented
    if func is _aten._foreach_add_.List and any(value.layout is not torch.strided for value in args[1]):
        return _add_one_by_one(*args, **kwargs)
    names = [argument.name for argument in func._schema.arguments]
    results: list[Any] = []
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value) and value]
    for part in calls.stretches(lists, count, _ELEMENTS_DIVISOR, _BLOCKS_DIVISOR):
        try:
            result = _run(
                func,
                [_elements(name, value, part) for name, value in zip(names, args, strict=False)],
                {name: _elements(name, value, part) for name, value in kwargs.items()},
            )
        except BudgetError:
            try:
                _ask_for_the_largest(signature_of(func).name, lists, count)
            except BudgetError as error:
                if func._opname == "_foreach_norm":
                    error.add_note(ADVICE)
                raise
            raise
        if result is not None:
            results.extend(result)
    return results if func._schema.returns else None
