"""Elementwise operations on tensors larger than the fast tier, computed in pieces with bit-identical results.

torch divides a tensor among threads; the part of one thread is its *share*. torch's kernels for the CPU compute the
elements of a share in vector registers, and the last few elements of the share one by one. Nearly always both ways give
the same bits, but a NaN in bfloat16 gets other bits, and the compiler may fuse a multiplication with an addition in one
way and not in the other. So each element must be computed in the same way in a piece as in the whole tensor.

- Operations on one tensor (also on each tensor of a ``_foreach_`` list) have shares of equal size. We cut at the
  beginning of each share, and inside a share only between vectors. torch divides a piece among threads, too, so we
  compute a piece in several calls, in which torch also cuts only between vectors.
- Fused optimizers divide a tensor at cache lines, so only the very last elements of the tensor are computed one by one.
  We cut at whole vectors.

`tests/tensors/test_pieces.py` checks this for each operator with NaNs whose bits show how they were computed.

On a GPU torch has two kernels for most operations, one for aligned vectors and one for everything else, and the
compiler may fuse operations in one kernel and not in the other. Fused optimizers use the first kernel if the address is
aligned and the number of elements is a multiple of four. So if a tensor of whole vectors is cut at whole vectors, its
pieces use the first kernel, too; `tests/gpu/test_pieces.py` compares the bits. Other operations are computed in pieces
on a GPU only if they round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from farpool.memory.pager import Mode
from farpool.tensors.factories import materialize
from farpool.tensors.geometry import meta_view
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.schema import signature_of
from farpool.tensors.transfer import block_cuts, same_layout, stream

__all__ = ["compute_in_pieces"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GRAIN_ELEMENTS = 32768
"""Fewest elements that a thread gets when torch divides a tensor among threads (``GRAIN_SIZE`` of ATen)."""
_VECTOR_ELEMENTS = 64
"""A multiple of the number of elements that a kernel computes at once, which fill two registers of at most 64 bytes."""
_ROUNDING_OPERATORS = frozenset(
    (
        *("add", "sub", "mul", "div", "sqrt", "neg", "abs", "reciprocal"),
        *("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "copy", "zero"),
        *("sign", "where", "gt", "lt", "eq"),
    )
)
_TRUTH_OPERATORS = frozenset(("where", "gt", "lt", "eq"))
"""Operations that have operands or results of both booleans and numbers. They do not round."""
_EXACT_DTYPES = (torch.float32, torch.float64)
"""Data types that kernels compute in directly. For other types, kernels compute in float32 and round the result."""


class _Operand:
    """A tensor argument that is divided into pieces."""

    __slots__ = ("mode", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.mode = Mode.READ


def _proven(func: Any, tensor: PagedTensor, kwargs: dict[str, Any]) -> bool:
    """Return True if the operation is known to give the same bits in pieces as on the whole tensor on this device."""
    if func._opname == "_fused_sgd_" and tensor.dtype not in _EXACT_DTYPES:
        return (
            False  # on the CPU, torch's own implementation gives other bits in half-precision moments from run to run
        )
    if tensor.device.type == "cpu":
        return tensor.dtype in _DTYPES
    if func._opname.startswith("_fused_"):
        return tensor.dtype in _DTYPES and tensor.numel() % _VECTOR_ELEMENTS == 0
    name = func._opname.removeprefix("_foreach_").removesuffix("_")
    return name in _ROUNDING_OPERATORS and tensor.dtype in _EXACT_DTYPES and kwargs.get("alpha", 1) == 1


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """An identifier of the memory that a tensor views, and the position in that memory at which the view begins."""
    if type(tensor) is PagedTensor:
        return id(tensor._storage), tensor.byte_range()[0]
    return tensor.untyped_storage()._cdata, tensor.data_ptr()


def _collect(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, _Operand]:
    """The tensor arguments to divide into pieces, each with its access mode; keys are the ids of the tensors."""
    signature = signature_of(func)
    operands: dict[int, _Operand] = {}
    named = [(position in signature.writes, value) for position, value in enumerate(args)]
    named += [(name in signature.outputs, value) for name, value in kwargs.items()]
    for written, value in named:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and (tensor.dim() or (written and type(tensor) is PagedTensor)):
                operand = operands.setdefault(id(tensor), _Operand(tensor))
                if written:
                    operand.mode = Mode.WRITE
    return operands


def _alike(operands: Sequence[_Operand], dtypes: Sequence[torch.dtype]) -> bool:
    """Return True if the operands have one layout, device and pool and allowed dtypes, and no two overlap in part."""
    first = operands[0].tensor
    pool = next(operand.tensor for operand in operands if type(operand.tensor) is PagedTensor)._storage.pool
    starts: dict[int, int] = {}
    for operand in operands:
        tensor = operand.tensor
        if tensor.dtype not in dtypes or tensor.device != first.device or not same_layout(first, tensor):
            return False
        if type(tensor) is PagedTensor and tensor._storage.pool is not pool:
            return False
        memory, start = _place(tensor)
        if starts.setdefault(memory, start) != start:
            return False
    return True


def _replace(value: Any, instead: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return instead[id(value)]
    if isinstance(value, list | tuple):
        return [_replace(item, instead) for item in value]
    return value


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], instead: dict[int, torch.Tensor]) -> Any:
    """Call the operation with its tensor arguments replaced by the tensors in `instead`; return its only result."""
    result = func(
        *[_replace(value, instead) for value in args],
        **{name: _replace(value, instead) for name, value in kwargs.items()},
    )
    return result[0] if isinstance(result, list | tuple) else result


def _share(count: int) -> int:
    """Number of elements in each thread's share of a tensor of `count` elements."""
    threads = min(torch.get_num_threads(), -(-count // _GRAIN_ELEMENTS))
    return -(-count // threads)


def _steps(count: int, tensors: Sequence[PagedTensor], share: int) -> Iterator[tuple[int, int]]:
    """Element ranges of the pieces. Each range touches few blocks of each tensor and begins at a vector of a share."""
    cuts = {0, count, *range(0, count, share)}
    for cut in block_cuts(tensors, tensors[0]._storage.pool.fast):
        within = cut % share
        cuts.add(cut - within % _VECTOR_ELEMENTS)
    return pairwise(sorted(cuts))


def _calls(count: int) -> Iterator[slice]:
    """The parts of a piece, each of which is computed in one call.

    In a call, either one thread computes the whole part, or the share of each thread is a whole number of vectors.
    """
    threads = torch.get_num_threads()
    body = count if threads == 1 else count // (threads * _GRAIN_ELEMENTS) * (threads * _GRAIN_ELEMENTS)
    if body:
        yield slice(0, body)
    for start in range(body, count, _GRAIN_ELEMENTS):
        yield slice(start, min(start + _GRAIN_ELEMENTS, count))


def compute_in_pieces(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    make_result: Callable[[torch.Tensor], torch.Tensor],
    *,
    fused: bool = False,
) -> Any:
    """Run an elementwise operation block by block.

    Parameters
    ----------
    func : operator overload
    args, kwargs
        Arguments of the operation. A list of tensors has one element.
    make_result : callable
        Makes the tensor for the result of an operation that is not in place. The argument is a tensor on the meta
        device with the geometry and dtype of the result.
    fused : bool
        True if the operation is a fused optimizer, which divides tensors among threads in another way.

    Returns
    -------
    torch.Tensor or None
        The result; None for an operation in place. NotImplemented if pieces are not known to give the same bits.
    """
    operands = _collect(func, args, kwargs)
    paged = [operand.tensor for operand in operands.values() if type(operand.tensor) is PagedTensor]
    if not paged:
        return NotImplemented
    number = next((tensor for tensor in paged if tensor.dtype is not torch.bool), paged[0])
    dtypes = (number.dtype, torch.bool) if func._opname in _TRUTH_OPERATORS else (number.dtype,)
    if not _proven(func, number, kwargs) or not _alike(list(operands.values()), dtypes):
        return NotImplemented
    # Tensors without dimensions (the learning rate, the count of steps) are the same for each piece.
    constants = {
        id(tensor): materialize(tensor)
        for value in (*args, *kwargs.values())
        for tensor in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(tensor, torch.Tensor) and id(tensor) not in operands
    }
    used = list(operands.values())
    result: torch.Tensor | None = None
    if all(operand.mode is Mode.READ for operand in used):
        on_meta = {key: meta_view(operand.tensor) for key, operand in operands.items()}
        described = _call(func, args, kwargs, on_meta | constants)
        if described.dtype not in dtypes or not same_layout(number, described):
            return NotImplemented
        result = make_result(described)
        if type(result) is PagedTensor:
            paged.append(result)

    def compute(*pieces: torch.Tensor) -> None:
        for part in [slice(None)] if fused else _calls(len(pieces[0])):
            parts = {key: piece[part] for key, piece in zip(operands, pieces, strict=False)} | constants
            computed = _call(func, args, kwargs, parts)
            if result is not None:
                pieces[-1][part].copy_(computed)

    count = paged[0].numel()
    streamed = [(operand.tensor, operand.mode) for operand in used]
    if result is not None:
        streamed.append((result, Mode.OVERWRITE))
    steps = _steps(count, paged, count if fused else _share(count))
    stream(signature_of(func).name, compute, *streamed, steps=steps)
    return result
