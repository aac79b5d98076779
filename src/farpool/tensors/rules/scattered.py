"""Elementwise operations and reductions on views whose bytes are spread over more memory than the fast tier has.

For example, a column of a table touches all rows, but has only few bytes of each row. So we copy the elements of such a
view to plain memory, reading a part of the table at a time, and run torch's operation on the copy.

torch chooses its loops by the strides of a tensor. The copy has the smallest strides for which torch chooses the same
loops: the same dimension is contiguous, the dimensions have the same order, and the same dimensions can be merged. If a
dimension is contiguous, each run of elements along it also begins at the same place in a cache line as in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from farpool.available import available_memory
from farpool.errors import FarpoolError
from farpool.memory.pager import ALIGNMENT
from farpool.tensors.dispatch import general_fallback
from farpool.tensors.geometry import is_dense, plain_empty
from farpool.tensors.operands import paged_arguments
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.schema import signature_of
from farpool.tensors.transfer import same_layout

_aten = torch.ops.aten
_COPIES_DIVISOR = 2
"""The copies of one operation take at most the available memory divided by this."""
_UNTAGGED = frozenset(
    (
        *("allclose", "copy_", "equal", "fill_", "flip", "index", "index_put_", "isin"),
        *("masked_fill_", "masked_select", "median", "nanmedian", "nonzero", "zero_"),
    )
)
"""Operations that only move or compare elements, and that torch does not mark as elementwise or as reductions."""
_TAGS = [getattr(torch.Tag, name) for name in ("pointwise", "reduction") if hasattr(torch.Tag, name)]


def _handles(func: Any) -> bool:
    return func.namespace == "aten" and (func._opname in _UNTAGGED or any(tag in func.tags for tag in _TAGS))


def narrow_strides(size: Sequence[int], stride: Sequence[int], period: int) -> tuple[int, ...] | None:
    """The smallest strides for which torch's operations visit the elements in the same order as for `stride`.

    Parameters
    ----------
    size, stride : sequence of int
        The geometry of a view.
    period : int
        Number of elements in a cache line.

    Returns
    -------
    tuple of int or None
        None if the view repeats an element in another way than along an expanded dimension.
    """
    narrow = [0] * len(size)
    contiguous = any(step == 1 and extent > 1 for extent, step in zip(size, stride, strict=True))
    # Elements that the dimensions so far span, and the stride with which the next dimension can be merged with them.
    reach, joined = 1, 1
    new_reach, new_joined = 1, 1
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if step):
        if size[dim] == 1:
            narrow[dim] = new_joined
            continue
        if step < reach:
            return None
        if step == joined:
            new = new_joined
        else:
            new = new_reach
            if contiguous:
                new += (step - new) % period
            if new == new_joined:
                new += period if contiguous else 1
        narrow[dim] = new
        reach, joined = reach + (size[dim] - 1) * step, size[dim] * step
        new_reach, new_joined = new_reach + (size[dim] - 1) * new, size[dim] * new
    return tuple(narrow)


class _Copy:
    """A plan for a plain copy of a paged view; `read` makes the copy."""

    __slots__ = ("elements", "offset", "strides", "tensor")

    def __init__(self, tensor: PagedTensor, strides: tuple[int, ...]) -> None:
        period = max(ALIGNMENT // tensor.itemsize, 1)
        self.tensor = tensor
        self.strides = strides
        self.offset = int(tensor.storage_offset()) % period
        reach = sum((extent - 1) * step for extent, step in zip(tensor.size(), strides, strict=True))
        self.elements = self.offset + 1 + reach

    @property
    def nbytes(self) -> int:
        return self.elements * self.tensor.itemsize

    def read(self) -> torch.Tensor:
        """Make the copy. Each element is read once, even if an expanded dimension repeats it."""
        tensor = self.tensor
        memory = plain_empty((self.elements,), (1,), tensor.dtype, tensor.device)
        copy = memory.as_strided(tensor.size(), self.strides, self.offset)
        once, shown = copy, tensor.detach()
        for dim, step in enumerate(self.strides):
            if step == 0:
                once, shown = once.narrow(dim, 0, 1), shown.narrow(dim, 0, 1)
        _aten.copy_.default(once, shown)
        return copy


def _place(tensor: PagedTensor) -> tuple[Any, ...]:
    return id(tensor._storage), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _copies(paged: Sequence[PagedTensor]) -> dict[tuple[Any, ...], _Copy] | None:
    """The copies to make, one for each distinct view. None if one is impossible, or if all need too much memory."""
    found: dict[tuple[Any, ...], _Copy] = {}
    for tensor in paged:
        if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            return None
        strides = narrow_strides(tensor.size(), tensor.stride(), max(ALIGNMENT // tensor.itemsize, 1))
        if strides is None:
            return None
        found.setdefault(_place(tensor), _Copy(tensor, strides))
    needed = sum(copy.nbytes for copy in found.values())
    return found if needed <= available_memory() // _COPIES_DIVISOR else None


def _is_scattered(func: Any, paged: Sequence[PagedTensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if a view is not dense, or if an elementwise operation has operands of different layouts."""
    if any(not is_dense(tensor) for tensor in paged):
        return True
    return torch.Tag.pointwise in func.tags and any(
        left.size() == right.size() and not same_layout(left, right) for left, right in combinations(tensors, 2)
    )


def _apart(written: PagedTensor, other: PagedTensor) -> bool:
    """Return True if two views share no element, or if they are equal and so share all elements."""
    if written._storage is not other._storage or _place(written) == _place(other):
        return True
    (start, stop), (other_start, other_stop) = written.byte_range(), other.byte_range()
    if start >= other_stop or other_start >= stop:
        return True
    if written.stride() != other.stride() or written.size() != other.size() or written.dtype is not other.dtype:
        return False
    distance = abs(int(written.storage_offset() - other.storage_offset()))
    span = 0  # elements that the dimensions with smaller strides span
    for step, extent in sorted(zip(written.stride(), written.size(), strict=True)):
        if extent > 1:
            if distance >= step - span:  # two elements may meet that differ along this dimension
                return False
            span += (extent - 1) * step
    return True


@general_fallback(_handles)
def _on_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    paged = [tensor for tensor in tensors if type(tensor) is PagedTensor]
    # Other fallbacks handle tensors in lists.
    if len(paged) < len(paged_arguments(args, kwargs)) or any(one.layout is not torch.strided for one in tensors):
        return NotImplemented
    writes = signature_of(func).writes
    written = [args[position] for position in writes if position < len(args)]
    written = [tensor for tensor in written if type(tensor) is PagedTensor]
    if any(0 in tensor.stride() for tensor in written):  # torch defines the result of this
        return NotImplemented
    if not _is_scattered(func, paged, tensors) or not all(_apart(one, other) for one in written for other in paged):
        return NotImplemented
    if (copies := _copies(paged)) is None:
        return NotImplemented
    made = {place: copy.read() for place, copy in copies.items()}

    def replaced(value: Any) -> Any:
        return made[_place(value)] if type(value) is PagedTensor else value

    result = func(*map(replaced, args), **{name: replaced(value) for name, value in kwargs.items()})
    for tensor in written:
        try:
            _aten.copy_.default(tensor, made[_place(tensor)])
        except FarpoolError as error:
            error.add_note(f"{func} may have changed some of the elements already; do not simply try it again")
            raise
        if result is made[_place(tensor)]:
            result = tensor
    return result
