"""Rules for grouped matrix products with stacked experts. Only experts that have tokens are fetched.

The first operand of ``torch._grouped_mm`` is the tokens, sorted by expert, and the second has one matrix for each
expert. The operation multiplies each group of tokens with the matrix of their expert. The CPU kernel computes one group
after the other, so a call with a single group gives the same bits as a call with all groups;
`tests/tensors/test_experts.py` compares them. We have not compared the kernels of other devices, so there all experts
are fetched.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.dispatch import fallback, rule
from farpool.tensors.geometry import element_range, plain_empty
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.rows import is_table

_aten = torch.ops.aten
# Experts that are fetched together take at most this part of the budget, so that other experts stay resident.
_TOGETHER = 4


def _groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]] | None:
    """Token range ``(start, stop)`` of each group; None if this module does not handle the call.

    It does not handle calls without paged experts, and calls with wrong arguments, for which the kernel itself raises.
    """
    tokens, experts, offsets = (*args, None)[:3]
    if kwargs or type(experts) is not PagedTensor or not isinstance(tokens, torch.Tensor):
        return None
    if experts.dim() != 3 or experts.device.type != "cpu" or not is_table(experts):
        return None
    if type(tokens) is PagedTensor or tokens.dim() != 2 or type(offsets) is not torch.Tensor:
        return None
    if offsets.dtype is not torch.int32 or offsets.size() != (experts.size(0),):
        return None
    groups = list(pairwise((0, *offsets.tolist())))
    if groups[-1][1] > tokens.size(0) or any(stop < start for start, stop in groups):
        return None
    return groups


@rule(_aten._grouped_mm.default)
def _routed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    groups = _groups(args, kwargs)
    if groups is None or all(stop > start for start, stop in groups):
        # If all experts are used, acquire them together: the tape predicts that access.
        return NotImplemented
    return _one_by_one(func, args, groups, picked=True)


@fallback(_aten._grouped_mm.default)
def _all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    groups = _groups(args, kwargs)
    return NotImplemented if groups is None else _one_by_one(func, args, groups, picked=False)


def _one_by_one(func: Any, args: tuple[Any, ...], groups: list[tuple[int, int]], *, picked: bool) -> torch.Tensor:
    """Multiply each group that has tokens with its expert.

    As many experts as fit into a quarter of the budget are pinned together, but at least one.

    Parameters
    ----------
    picked : bool
        True if the tokens decide which experts the call needs, so that the next call may need other experts.
    """
    tokens, experts, offsets, *options = args
    size, stride = (1, *experts.size()[1:]), experts.stride()
    # Without tokens the kernel reads no weights; it checks its arguments and allocates the result.
    weightless = plain_empty(size, stride, experts.dtype, experts.device)
    result: torch.Tensor = func(tokens, weightless, offsets.new_zeros(1), *options)
    chosen = [expert for expert, (start, stop) in enumerate(groups) if stop > start]
    if not chosen:
        return result
    storage = experts._storage
    step = stride[0] * experts.itemsize
    elements = element_range(weightless)[1]
    origins = [experts.storage_offset() * experts.itemsize + expert * step for expert in chosen]
    uses = [Use(storage, origin, origin + elements * experts.itemsize, Mode.READ) for origin in origins]
    together = max(storage.pool.fast // _TOGETHER // step, 1)
    for first in range(0, len(uses), together):
        access = storage.pool.acquire(uses[first : first + together], "aten._grouped_mm", rows=picked)
        try:
            for expert, place in zip(chosen[first : first + together], access.offsets, strict=True):
                weight = experts._arena.flat(experts.dtype, elements, place).as_strided(size, stride)
                start, stop = groups[expert]
                result[start:stop] = func(tokens[start:stop], weight, offsets.new_tensor([stop - start]), *options)
        finally:
            storage.pool.release(access)
    return result
