"""Rules for operations whose native code computes in another way if an operand is a tensor subclass.

If an operand is a subclass, torch avoids operations that some subclasses do not support: it does not read values on the
host, and does not write to plain tensors that it has made. docs/subclasses.md lists all places in torch that check
this. In most places both ways compute the same bits. In the places below the bits differ, so our rule replaces the
operand by a plain copy before torch checks the operand, and torch computes as for plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.before_autograd import keys_after, register
from farpool.tensors.copies import private_copy
from farpool.tensors.paged_tensor import PagedTensor, describe

__all__ = ["BRANCHES", "FORWARD_BRANCHES", "Branch"]

_aten = torch.ops.aten
_MEAN_REDUCTION = 1
"""ATen's number for ``reduction="mean"``."""


@dataclass(frozen=True)
class Branch:
    """A place in torch's code that computes other bits if an operand is a tensor subclass."""

    overloads: tuple[Any, ...]
    operand: int
    """Position of the argument that torch checks."""
    function: str
    """Name of the native function that checks the operand, in torch's sources."""
    when: str
    """Text for the documentation: the calls in which the check changes bits."""
    is_reached: Callable[[Sequence[Any]], bool]
    """Function that returns True if the check changes bits in a call. It receives the call's arguments, in the order of
    the schema."""


def _always(args: Sequence[Any]) -> bool:
    return True


def _first_is_differentiated(args: Sequence[Any]) -> bool:
    return bool(args[0].requires_grad and torch.is_grad_enabled()) or _is_forward_mode(args)


def _value_is_differentiated(args: Sequence[Any]) -> bool:
    return bool(args[2].requires_grad and torch.is_grad_enabled())


def _is_forward_mode(args: Sequence[Any]) -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _is_smoothed_mean(args: Sequence[Any]) -> bool:
    reduction = args[3] if len(args) > 3 else _MEAN_REDUCTION
    return bool(reduction == _MEAN_REDUCTION and len(args) > 5 and args[5] > 0)


def _is_broadcast(operand: int, args: Sequence[Any]) -> bool:
    one, other = args[operand], args[1 - operand]
    return bool(one.dim() == 3 == other.dim() and one.size(0) == 1 != other.size(0) and not one.requires_grad)


BRANCHES = (
    Branch(
        (_aten.cross_entropy_loss.default,),
        2,
        "cross_entropy_loss",
        '`label_smoothing` above 0 and `reduction="mean"`',
        _is_smoothed_mean,
    ),
    *(
        Branch(
            (_aten.matmul.default, _aten.matmul.out),
            operand,
            "_matmul_impl",
            "both operands have three dimensions, only this one is a batch of one, and it needs no gradient",
            partial(_is_broadcast, operand),
        )
        for operand in (0, 1)
    ),
    Branch(
        (_aten.prod.default, _aten.prod.dim_int),
        0,
        "prod_backward",
        "the gradient is computed",
        _first_is_differentiated,
    ),
    Branch(
        (_aten._linalg_det.default,),
        0,
        "linalg_det_backward",
        "the gradient is itself differentiated (`create_graph=True`)",
        _first_is_differentiated,
    ),
    Branch((_aten.cumprod.default,), 0, "cumprod_backward", "the gradient is computed", _first_is_differentiated),
    Branch(
        (_aten.min.default, _aten.max.default, _aten.median.default, _aten.nanmedian.default),
        0,
        "evenly_distribute_backward",
        "the gradient is computed",
        _first_is_differentiated,
    ),
    Branch(
        (_aten.masked_fill.Tensor, _aten.masked_fill_.Tensor),
        1,
        "masked_fill_backward",
        "the gradient of the value is computed",
        _value_is_differentiated,
    ),
    Branch((_aten.linalg_svdvals.default,), 0, "linalg_svdvals", "always", _always),
    Branch((_aten.linalg_eigvals.default,), 0, "linalg_eigvals", "always", _always),
    Branch((_aten.linalg_eigvalsh.default,), 0, "linalg_eigvalsh", "always", _always),
    Branch(
        (_aten.quantile.default, _aten.quantile.out, _aten.nanquantile.default, _aten.nanquantile.out),
        1,
        "quantile_compute",
        "always: values outside of [0, 1] are only refused if they can be read",
        _always,
    ),
    Branch(
        (_aten.tensor_split.tensor_indices_or_sections,),
        1,
        "tensor_split",
        "always: the values are read before anything is dispatched",
        _always,
    ),
)
"""The branches that change bits, in the supported versions of torch."""

FORWARD_BRANCHES = (
    Branch(
        (
            _aten.native_layer_norm.default,
            _aten.native_group_norm.default,
            _aten.native_batch_norm.default,
            _aten.cudnn_batch_norm.default,
            _aten.miopen_batch_norm.default,
        ),
        0,
        "_norm_jvp, _invstd_jvp",
        "differentiated by `torch.autograd.forward_ad`",
        _is_forward_mode,
    ),
)
"""Branches that only forward-mode differentiation reaches."""


class _Plain(torch.autograd.Function):
    """Autograd function that makes a plain copy of a paged tensor and passes the copy's gradient to that tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: PagedTensor) -> torch.Tensor:
        return private_copy(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent


def _plain(func: Any, tensor: PagedTensor) -> torch.Tensor:
    if tensor.nbytes > tensor._storage.pool.fast:
        raise UnsupportedError(
            f"{func} of {describe(tensor)} runs on a plain copy, because torch computes it with other bits for any "
            f"tensor subclass, and {tensor.nbytes} bytes are more than the pool's fast tier holds: pass the copy "
            "yourself, pool.materialize(t), or (t * 1) if a gradient is to flow"
        )
    if not (tensor.requires_grad and torch.is_grad_enabled()) and not _is_forward_mode(()):
        return private_copy(tensor).detach()
    copy: torch.Tensor = _Plain.apply(tensor)  # type: ignore[no-untyped-call]
    return copy


def _rule(func: Any, branches: Sequence[Branch]) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for branch in branches:
            operand = given[branch.operand] if branch.operand < len(given) else None
            if type(operand) is PagedTensor and branch.is_reached(args):
                given[branch.operand] = _plain(func, operand)
        return func.redispatch(keys_after(keys), *given, **kwargs)

    return run


def _register(branches: Sequence[Branch]) -> None:
    for overload in {overload: None for branch in branches for overload in branch.overloads}:
        register(
            overload.name().removeprefix("aten::"),
            _rule(overload, [branch for branch in branches if overload in branch.overloads]),
        )


_registering = Lock()  # with a cache alone, two threads could both make the first call


@cache
def _register_forward() -> None:
    _register(FORWARD_BRANCHES)


def _make_dual(keys: Any, primal: torch.Tensor, tangent: torch.Tensor, level: int) -> Any:
    # Most models compute norms in every step, and almost none uses forward-mode derivatives of them. The rules for
    # norms cost time in each call, so we register them when a program first uses forward mode on a paged tensor.
    with _registering:
        _register_forward()
    return _aten._make_dual.default.redispatch(keys_after(keys), primal, tangent, level)


_register(BRANCHES)
register("_make_dual", _make_dual)
