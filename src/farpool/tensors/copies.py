"""Runs an operator that may keep its operands: it receives private plain copies, so keeping them does no harm.

Each copy has the strides and the alignment of its operand, so that kernels take the same path and give the same bits.
Copies do not count against the budget, and an operand may be larger than the fast tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.memory.pager import ALIGNMENT, Mode
from farpool.tensors.factories import materialize
from farpool.tensors.geometry import meta_view
from farpool.tensors.operands import Operands
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.schema import Signature
from farpool.tensors.viewing import view_like

__all__ = ["compute_on_copies", "private_copy"]


def private_copy(tensor: PagedTensor) -> torch.Tensor:
    """A plain copy of a paged tensor with the same strides and alignment, in memory of its own."""
    # The operator may keep the copy, and a copy made in inference mode would remain an inference tensor.
    with torch.inference_mode(False), torch.no_grad():
        start, stop = tensor.byte_range()
        before = start % ALIGNMENT // tensor.itemsize
        offset = int(tensor.storage_offset()) - before if start != stop else 0
        memory = tensor.like(((stop - start) // tensor.itemsize + before,), (1,), offset)
        copy = materialize(memory).as_strided(tensor.size(), tensor.stride(), before)
        if tensor.is_conj():
            torch._C._set_conj(copy, True)
        if tensor.is_neg():
            torch._C._set_neg(copy, True)
    return copy.requires_grad_(tensor.requires_grad)


def compute_on_copies(signature: Signature, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on copies of its paged arguments, and write the changed copies back to the arguments.

    Raises
    ------
    UnsupportedError
        The operator returns a view of a paged argument, writes to memory that two arguments share, or changes the shape
        of an argument.
    """
    operands = Operands()
    for position, value in enumerate(args):
        operands.add_all(value, Mode.WRITE if position in signature.writes else Mode.READ)
    for value in kwargs.values():
        operands.add_all(value, Mode.READ)
    written = [operands.tensors[key] for key, mode in operands.modes.items() if mode is Mode.WRITE]
    _check(signature, args, written, list(operands.tensors.values()))
    for key, tensor in operands.tensors.items():
        operands.reals[key] = private_copy(tensor)
    result = func(
        *[operands.replace(value) for value in args],
        **{name: operands.replace(value) for name, value in kwargs.items()},
    )
    for target in written:
        # All sizes are checked before the first copy is written back, so that a refusal changes nothing.
        if operands.reals[id(target)].size() != target.size():
            raise UnsupportedError(
                f"{signature.name} would resize {describe(target)}: pass it a plain copy, pool.materialize(t)"
            )
    for target in written:
        torch.ops.aten.copy_.default(target, operands.reals[id(target)])
    return _own(operands, result)


def _check(
    signature: Signature, args: Sequence[Any], written: Sequence[PagedTensor], tensors: Sequence[PagedTensor]
) -> None:
    if signature.view_of >= 0 and type(args[signature.view_of]) is PagedTensor:
        raise UnsupportedError(
            f"the result of {signature.name} would view {describe(args[signature.view_of])}, whose bytes move: "
            "pass it a plain copy, pool.materialize(t)"
        )
    for target in written:
        start, stop = target.byte_range()
        for other in tensors:
            if other is not target and other._storage is target._storage:
                first, last = other.byte_range()
                if start < last and first < stop:
                    raise UnsupportedError(
                        f"{signature.name} writes to {describe(target)} and was given the same memory once more: "
                        "pass it plain copies, pool.materialize(t)"
                    )


def _own(operands: Operands, result: Any) -> Any:
    """Replace a result that is a copy by the copied operand, and a view of a copy by a paged view of the operand."""
    if type(result) is tuple or type(result) is list:
        return type(result)(_own(operands, item) for item in result)
    if not isinstance(result, torch.Tensor):
        return result
    for key, copy in operands.reals.items():
        tensor = operands.tensors[key]
        if result is copy:
            return tensor
        if type(result) is torch.Tensor and _is_view(result, copy):
            # The operator's schema does not say that its result views an operand, so we find out only here.
            start = tensor.byte_range()[0] + result.data_ptr() - copy.data_ptr()
            offset = start // result.itemsize
            return view_like(tensor, meta_view(result).as_strided(result.size(), result.stride(), offset))
    return result


def _is_view(result: torch.Tensor, copy: torch.Tensor) -> bool:
    return (
        result.layout is torch.strided
        and not result.is_nested
        and not result.is_quantized
        and result.untyped_storage()._cdata == copy.untyped_storage()._cdata
    )
