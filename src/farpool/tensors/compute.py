"""Runs an operation on paged arguments: pins the bytes that the arguments view, computes, and unpins the bytes.

The operation computes on *real tensors*, which are plain tensors over the pinned bytes in the arena.

All bytes are pinned in one call, so two threads cannot wait for each other. The native core (`farpool.tensors.calls`)
handles the common case of a few paged arguments of different storages; this module handles all other cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farpool.errors import PoolClosedError, PoolMixError, UnsupportedError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.arena import ArenaViews
from farpool.tensors.calls import calls
from farpool.tensors.copies import compute_on_copies
from farpool.tensors.footprint import Footprint
from farpool.tensors.lazy import lazy_bits
from farpool.tensors.operands import Operands, paged_arguments
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.schema import Signature, signature_of
from farpool.tensors.treatment import Treatment
from farpool.tensors.viewing import check_open

__all__ = ["compute", "explain", "wrap_results"]


def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation with its paged arguments replaced by real tensors, or copies if the operation may keep them."""
    result = calls.compute(func, args, kwargs)
    if result is not NotImplemented:
        return result
    try:
        with lazy_bits():
            return _compute_any(signature_of(func), func, args, kwargs)
    except RuntimeError as error:
        explain(error, func, args, kwargs)
        raise


def explain(error: BaseException, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
    """Raise a clearer error if `error`, which an operator raised, would mislead the user; otherwise return.

    Raises
    ------
    UnsupportedError
        The operator would have resized memory of the arena.
    """
    if "storage that is not resizable" in str(error):
        target = describe(paged_arguments(args, kwargs or {})[0])
        raise UnsupportedError(
            f"{signature_of(func).name} would resize {target} or a view of it: "
            "pass it a plain copy, pool.materialize(t)"
        ) from error


def wrap_results(pairs: Sequence[tuple[PagedTensor, torch.Tensor]], arena: ArenaViews, result: Any) -> Any:
    """Wrap results: a result that shares memory with the arena becomes a paged argument, a paged view or a copy.

    `pairs` has each paged argument of the operation with its real tensor.
    """
    with lazy_bits():
        return Operands.of(pairs, arena).wrap_all(result)


def _compute_any(signature: Signature, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    outputs: dict[str, Any] = {}
    if signature.outputs:
        for name in signature.outputs:
            value = kwargs.get(name)
            if value is not None and paged_arguments((value,), {}):
                outputs[name] = value
    if outputs:
        return _compute_out(func, tuple(args), kwargs, outputs)
    if signature.treatment is Treatment.COPIES:
        return compute_on_copies(signature, func, args, kwargs)

    found = paged_arguments(args, kwargs)
    if not found:  # another thread has just taken them out of the pool
        return func(*args, **kwargs)
    first = found[0]
    operands = Operands()
    writes = signature.writes
    for position, value in enumerate(args):
        operands.add_all(value, Mode.WRITE if position in writes else Mode.READ)
    for value in kwargs.values():
        operands.add_all(value, Mode.READ)

    pool = first._storage.pool
    uses: list[Use] = []
    used: list[PagedTensor] = []
    footprints: list[Footprint] = []
    for key, tensor in operands.tensors.items():
        storage = tensor._storage
        if storage.pool is not pool:
            raise PoolMixError(
                f"{signature.name} was given tensors of two pools: {describe(first)} and {describe(tensor)}; "
                "copy one into the other's pool with pool.from_tensor(t)"
            )
        start, stop = tensor.byte_range()
        if start == stop:
            operands.reals[key] = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            continue
        uses.append(Use(storage, start, stop, operands.modes[key]))
        used.append(tensor)
        footprints.append(tensor._footprint)

    # `acquire` of no bytes touches no block, so it would not notice that the pool is closed.
    if not uses:
        check_open(first)
    access = pool.acquire(uses, signature.name)
    try:
        for tensor, use in zip(used, uses, strict=True):
            # The uses were read before the pin. Until then another thread could rebind the tensor or move it out of the
            # pool.
            if tensor._storage is not use.storage:
                raise PoolClosedError(
                    f"{signature.name}: another thread moved {describe(tensor)} while the operation was under way: "
                    "repeat the operation"
                )
        operands.build_all(used, uses, access.offsets)
        result = func(
            *[operands.replace(value) for value in args],
            **{name: operands.replace(value) for name, value in kwargs.items()},
        )
        # An operator may change the geometry of a real tensor that it writes to, and such a tensor must not stay in the
        # cache.
        if writes:
            for tensor, footprint in zip(used, footprints, strict=True):
                footprint.check_real(operands.reals[id(tensor)])
        return operands.wrap_all(result)
    except BaseException:
        for footprint in footprints:
            # An operator that failed may have changed the geometry, too.
            footprint.forget_real()
        raise
    finally:
        pool.release(access)


def _stand_in(value: Any) -> Any:
    if type(value) is PagedTensor:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    if type(value) is list or type(value) is tuple:
        return [_stand_in(item) for item in value]
    return value


def _compute_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """Run an operation that has ``out=`` with plain outputs, and copy these to the paged outputs.

    The operation may resize its outputs, and a real tensor that grows would overwrite the bytes next to it.
    """
    plain = {name: _stand_in(value) for name, value in outputs.items()}
    result = func(*args, **{**kwargs, **plain})
    replaced: dict[int, Any] = {}
    pairs: list[tuple[PagedTensor, torch.Tensor]] = []
    for name, value in outputs.items():
        targets, sources = ((value,), (plain[name],)) if type(value) is PagedTensor else (value, plain[name])
        for target, source in zip(targets, sources, strict=True):
            replaced[id(source)] = target
            if type(target) is PagedTensor:
                if target.size() != source.size():
                    raise UnsupportedError(
                        f"{func} would resize its output, {describe(target)}, to {list(source.size())}: "
                        "give it an output of that shape"
                    )
                pairs.append((target, source))
    for target, source in pairs:
        torch.ops.aten.copy_.default(target, source)
    if isinstance(result, torch.Tensor):
        return replaced.get(id(result), result)
    if type(result) is tuple or type(result) is list:
        return type(result)(replaced.get(id(item), item) for item in result)
    return result
