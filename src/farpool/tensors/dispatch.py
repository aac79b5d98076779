"""Every operation with a paged argument comes through here.

In this order: a rule written for the operation; a view, whose geometry is computed on the meta device; an operation
made of others, which are dispatched in its place; everything else acquires the bytes that its arguments view, runs on
real tensors over the arena, and releases. All bytes are acquired in one call, so two threads cannot wait for each
other.

This is the hot path of every step: plain loops, no tree walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farpool.engine import Mode
from farpool.errors import PoolClosedError, PoolMixError, UnsupportedError
from farpool.tensors.geometry import element_range, meta_view
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.schema import Signature, signature_of
from farpool.use import Use

__all__ = ["Rule", "compute", "dispatch", "family_rule", "paged_arguments", "rule", "view"]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Handles an overload; returns NotImplemented to leave it to the general path."""

_rules: dict[Any, Rule | None] = {}
_families: dict[str, Rule] = {}
_signatures: dict[Any, Signature] = {}
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_LAZY = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)
)
_composite = torch._C.DispatchKey.CompositeImplicitAutograd


def rule(*overloads: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operator overloads."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            _rules[overload] = function
        return function

    return register


def family_rule(*prefixes: str) -> Callable[[Rule], Rule]:
    """Register a rule for all aten operations whose names begin with one of `prefixes` and that have no ``out=``."""

    def register(function: Rule) -> Rule:
        _families.update(dict.fromkeys(prefixes, function))
        return function

    return register


def _learn(func: Any) -> Rule | None:
    """Analyse an overload that is seen for the first time."""
    signature = _signatures[func] = signature_of(func)
    if func not in _rules:
        _rules[func] = next(
            (
                function
                for prefix, function in _families.items()
                if signature.namespace == "aten" and func._opname.startswith(prefix) and not signature.outputs
            ),
            None,
        )
    return _rules[func]


def _lazy_bits() -> Any:
    """Let operations conjugate and negate lazily, as they do for plain tensors.

    While an operation is handled in Python these keys are excluded, and whatever is computed would read the values of a
    conjugated tensor as if it were none.
    """
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - _LAZY
    )


def dispatch(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of which at least one argument is paged."""
    for kind in types:
        if kind is not PagedTensor:
            return NotImplemented
    signature = _signatures.get(func)
    handler = _learn(func) if signature is None else _rules[func]
    with _lazy_bits():
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _general(_signatures[func], func, args, kwargs)


def _general(signature: Signature, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if signature.composite:
        return func._op_dk(_composite, *args, **kwargs)
    if signature.metadata:
        return _change_geometry(func, args, kwargs)
    if signature.view_of >= 0 and type(args[signature.view_of]) is PagedTensor:
        return view(func, args, kwargs, args[signature.view_of])
    if signature.namespace in ("c10d", "_c10d_functional"):
        raise UnsupportedError(
            f"{signature.name} needs raw memory, which a paged tensor does not have: "
            "pass it a plain copy, pool.materialize(t)"
        )
    return compute(func, args, kwargs)


# ---- views -------------------------------------------------------------------------------------------------------


def _on_meta(value: Any) -> Any:
    if type(value) is PagedTensor:
        return meta_view(value)
    if type(value) is list or type(value) is tuple:
        return [meta_view(item) if type(item) is PagedTensor else item for item in value]
    return value


def _view_like(source: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    if element_range(shape)[1] * shape.itemsize > source._storage.nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(shape.size())}, strides {list(shape.stride())}, storage offset "
            f"{shape.storage_offset()} are out of bounds for the storage of {describe(source)}, "
            f"which has {source._storage.nbytes} bytes"
        )
    result = source.like(shape.size(), shape.stride(), int(shape.storage_offset()), shape.dtype)
    if shape.is_conj():
        torch._C._set_conj(result, True)
    if shape.is_neg():
        torch._C._set_neg(result, True)
    return result


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: PagedTensor) -> Any:
    """Run an operation whose results view `source`."""
    _check_open(source)
    shapes = func(*[_on_meta(value) for value in args], **{name: _on_meta(value) for name, value in kwargs.items()})
    if isinstance(shapes, torch.Tensor):
        return _view_like(source, shapes)
    return [_view_like(source, shape) for shape in shapes]


def _change_geometry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if type(target) is not PagedTensor:
        raise UnsupportedError(f"{func} would make a plain tensor view paged memory: use plain.copy_(paged)")
    _check_open(target)
    shape = func(meta_view(target), *args[1:], **kwargs)
    target.rebind(_view_like(target, shape))
    return target


def _check_open(tensor: PagedTensor) -> None:
    if tensor._storage.pool.closed:
        raise PoolClosedError(f"the pool of {describe(tensor)} is closed")


# ---- computing ---------------------------------------------------------------------------------------------------


def paged_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[PagedTensor]:
    """The paged tensors among the arguments, also those in lists, in order."""
    found = []
    for value in (*args, *kwargs.values()):
        if type(value) is PagedTensor:
            found.append(value)
        elif type(value) is list or type(value) is tuple:
            found.extend(item for item in value if type(item) is PagedTensor)
    return found


class _Operands:
    """The paged arguments of one operation, each once, and what stands for them while it runs."""

    __slots__ = ("modes", "reals", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[int, PagedTensor] = {}
        self.modes: dict[int, Mode] = {}
        self.reals: dict[int, torch.Tensor] = {}

    def add(self, tensor: PagedTensor, mode: Mode) -> None:
        key = id(tensor)
        if key not in self.tensors:
            self.tensors[key] = tensor
            self.modes[key] = mode
        elif mode is Mode.WRITE:
            self.modes[key] = mode

    def add_all(self, value: Any, mode: Mode) -> None:
        if type(value) is PagedTensor:
            self.add(value, mode)
        elif type(value) is list or type(value) is tuple:
            for item in value:
                if type(item) is PagedTensor:
                    self.add(item, mode)

    def replace(self, value: Any) -> Any:
        if type(value) is PagedTensor:
            return self.reals[id(value)]
        if type(value) is list or type(value) is tuple:
            return [self.reals[id(item)] if type(item) is PagedTensor else item for item in value]
        return value

    def build(self, tensor: PagedTensor, memory: torch.UntypedStorage, origin: int) -> None:
        """Make the real tensor of `tensor` over memory that begins with byte `origin` of its storage."""
        offset = tensor.storage_offset() - origin // tensor.itemsize
        real = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        real.set_(memory, offset, tensor.size(), tensor.stride())
        if tensor.is_conj():
            torch._C._set_conj(real, True)
        if tensor.is_neg():
            torch._C._set_neg(real, True)
        if _requires_grad(tensor):
            # Some kernels look at it, to compute what backward will need.
            real.requires_grad_()
        self.reals[id(tensor)] = real

    def build_all(self, tensors: list[PagedTensor], uses: list[Use], places: Sequence[int]) -> None:
        """Make all real tensors. Views of one storage share memory, as plain views do; others do not."""
        if len({id(use.storage) for use in uses}) == len(uses):
            for tensor, use, place in zip(tensors, uses, places, strict=True):
                self.build(tensor, tensor._arena.memory(place, place + use.stop - use.start), use.start)
            return
        shared: dict[tuple[int, int], tuple[int, int]] = {}
        for use, place in zip(uses, places, strict=True):
            key = (id(use.storage), place - use.start)
            start, stop = shared.get(key, (use.start, use.stop))
            shared[key] = (min(start, use.start), max(stop, use.stop))
        memories: dict[tuple[int, int], torch.UntypedStorage] = {}
        for tensor, use, place in zip(tensors, uses, places, strict=True):
            key = (id(use.storage), place - use.start)
            start, stop = shared[key]
            if key not in memories:
                memories[key] = tensor._arena.memory(key[1] + start, key[1] + stop)
            self.build(tensor, memories[key], start)

    def wrap_all(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.wrap(result)
        if type(result) is tuple or type(result) is list:
            return type(result)(self.wrap_all(item) for item in result)
        return result

    def wrap(self, result: torch.Tensor) -> torch.Tensor:
        """A result as the program may see it: no plain tensor aliases the arena."""
        for key, real in self.reals.items():
            if result is real:
                return self.tensors[key]
        if result.layout is not torch.strided:
            # A sparse tensor may have taken one of the operands for its values.
            return result.clone()
        arena = next(iter(self.tensors.values()))._arena
        if not arena.aliases(result):
            return result
        for key, real in self.reals.items():
            tensor = self.tensors[key]
            if tensor._arena.aliases(real):
                start, stop = tensor.byte_range()
                origin = real.data_ptr() - tensor.storage_offset() * tensor.itemsize
                position = result.data_ptr() - origin
                if start <= position < stop and position % result.itemsize == 0:
                    return _view_like(
                        tensor,
                        meta_view(result).as_strided(result.size(), result.stride(), position // result.itemsize),
                    )
        return result.clone()


def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on real tensors."""
    signature = _signatures[func]
    outputs: dict[str, Any] = {}
    if signature.outputs:
        for name in signature.outputs:
            value = kwargs.get(name)
            if value is not None and paged_arguments((value,), {}):
                outputs[name] = value
    if outputs:
        return _compute_out(func, tuple(args), kwargs, outputs)

    first = paged_arguments(args, kwargs)[0]
    operands = _Operands()
    writes = signature.writes
    for position, value in enumerate(args):
        operands.add_all(value, Mode.WRITE if position in writes else Mode.READ)
    for value in kwargs.values():
        operands.add_all(value, Mode.READ)

    pool = first._storage.pool
    uses: list[Use] = []
    used: list[PagedTensor] = []
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

    if not uses:
        _check_open(first)
    access = pool.acquire(uses, signature.name)
    try:
        operands.build_all(used, uses, access.offsets)
        result = func(
            *[operands.replace(value) for value in args],
            **{name: operands.replace(value) for name, value in kwargs.items()},
        )
        return operands.wrap_all(result)
    finally:
        pool.release(access)


def _stand_in(value: Any) -> Any:
    if type(value) is PagedTensor:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    if type(value) is list or type(value) is tuple:
        return [_stand_in(item) for item in value]
    return value


def _compute_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """Run an ``out=`` form: into plain tensors first, as an output may be resized over its neighbours in the arena."""
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


# The rules build on this module.
import farpool.tensors.rules as _all_rules  # noqa: E402, F401
