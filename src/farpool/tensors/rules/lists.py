"""``_foreach_*`` and ``_fused_*``: lists of tensors, streamed element by element.

Each large element of a list is computed alone, so an optimizer step over a whole model needs the fast tier to hold one
parameter and its state, not all of them. Small neighbours go together, which saves bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farpool.tensors.compute import compute
from farpool.tensors.dispatch import family_rule
from farpool.tensors.factories import from_tensor
from farpool.tensors.operands import paged_arguments
from farpool.tensors.paged_tensor import PagedTensor

_SHARE = 64
"""Elements that take no more than this fraction of the budget together are computed together."""
# One number for each tensor: results that stay plain.
_REDUCTIONS = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is tuple


def _elements(name: str, value: Any, part: slice) -> Any:
    if _is_list(value):
        return list(value[part])
    if name == "scalars" and isinstance(value, torch.Tensor):
        return value[part]
    return value


def _parts(lists: Sequence[Sequence[Any]], count: int) -> Iterator[slice]:
    """Stretches of the lists that take little room together, or have one element."""
    start = total = most = 0
    for index in range(count):
        paged = [value[index] for value in lists if type(value[index]) is PagedTensor]
        if paged and not most:
            most = paged[0]._storage.pool.fast // _SHARE
        nbytes = sum(tensor.nbytes for tensor in paged)
        if index > start and total + nbytes > most:
            yield slice(start, index)
            start, total = index, 0
        total += nbytes
    yield slice(start, count)


def _run(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    paged = paged_arguments(args, kwargs)
    if not paged:
        return func(*args, **kwargs)
    results = compute(func, args, kwargs)
    if results is None or func._opname in _REDUCTIONS:
        return results
    storage = paged[0]._storage
    cls = "optimizer" if storage.cls in ("weights", "embedding", "gradient") else storage.cls
    return [item if type(item) is PagedTensor else from_tensor(storage.pool, item, cls=cls) for item in results]


@family_rule("_foreach_", "_amp_foreach_", "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
def _streamed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count = next(len(value) for value in args if _is_list(value))
    if any(len(value) not in (0, count) for value in (*args, *kwargs.values()) if _is_list(value)):
        # Lists of different lengths: torch says what is wrong.
        return NotImplemented
    names = [argument.name for argument in func._schema.arguments]
    results: list[Any] = []
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value) and value]
    for part in _parts(lists, count):
        result = _run(
            func,
            [_elements(name, value, part) for name, value in zip(names, args, strict=False)],
            {name: _elements(name, value, part) for name, value in kwargs.items()},
        )
        if result is not None:
            results.extend(result)
    return results if func._schema.returns else None
