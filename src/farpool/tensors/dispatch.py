"""Every operation with a paged argument comes through here.

In this order: a rule written for the operation; a view; an operation made of others, which are dispatched in its place;
everything else computes on real tensors (`farpool.tensors.compute`).

This is the hot path of every step: plain loops, no tree walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farpool.errors import PoolClosedError, UnsupportedError
from farpool.tensors import survivors
from farpool.tensors.compute import compute
from farpool.tensors.lazy import lazy_bits, run
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.schema import Signature, signature_of
from farpool.tensors.viewing import change_geometry, view

__all__ = ["Rule", "dispatch", "family_rule", "rule"]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Handles an overload; returns NotImplemented to leave it to the general path."""

_rules: dict[Any, Rule] = {}
_families: dict[str, Rule] = {}
_handlers: dict[Any, Rule] = {}
"""What an overload that was seen before is handled by."""
_OWN = frozenset(("_storage", "_arena", "_footprint"))
"""What a paged tensor has and a plain one has not."""
_composite = torch._C.DispatchKey.CompositeImplicitAutograd
_views = torch._C.DispatchKey.ADInplaceOrView
_SetExclude = torch._C._SetExcludeDispatchKeyGuard


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


def dispatch(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run one operation of which at least one argument is paged."""
    for kind in types:
        if kind is not PagedTensor:
            return NotImplemented
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler_of(func)
    if survivors.in_use:
        return survivors.without_survivors(handler, func, args, kwargs or {})
    try:
        return handler(func, args, kwargs or {})
    except AttributeError as error:
        if error.name in _OWN and type(error.obj) is not PagedTensor:
            raise PoolClosedError(
                f"{func}: another thread took a tensor out of its pool (it left the pool, or called farpool.restore) "
                "while the operation was under way; it is plain now: repeat the operation"
            ) from error
        raise


def _handler_of(func: Any) -> Rule:
    """Analyse an overload that is seen for the first time."""
    signature = signature_of(func)
    general = _general(signature)
    chosen = _rules.get(func)
    if chosen is None and signature.namespace == "aten" and not signature.outputs:
        chosen = next((found for prefix, found in _families.items() if func._opname.startswith(prefix)), None)
    return general if chosen is None else _ruled(chosen, general)


def _ruled(rule: Rule, general: Rule) -> Rule:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lazy_bits():
            result = rule(func, args, kwargs)
            return general(func, args, kwargs) if result is NotImplemented else result

    return handle


def _general(signature: Signature) -> Rule:
    if signature.composite:
        return _decompose
    if signature.metadata:
        return _rebind
    if signature.view_of >= 0:
        return _view
    if signature.namespace in ("c10d", "_c10d_functional"):
        return _refuse
    return compute


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and not signature_of(func).marks_views:
        # A plain tensor's views are marked as views here, too, and require a gradient where it does. What multiplies
        # matrices looks at that and picks another kernel, with other bits.
        with _SetExclude(_views, False):
            return run(func._op_dk, (_composite, *args), kwargs)
    return run(func._op_dk, (_composite, *args), kwargs)


def _rebind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with lazy_bits():
        return change_geometry(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[signature_of(func).view_of]
    return view(func, args, kwargs, source) if type(source) is PagedTensor else compute(func, args, kwargs)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        f"{signature_of(func).name} needs raw memory, which a paged tensor does not have: "
        "pass it a plain copy, pool.materialize(t)"
    )


# The rules build on this module.
import farpool.tensors.rules as _all_rules  # noqa: E402, F401
