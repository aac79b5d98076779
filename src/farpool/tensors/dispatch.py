"""Dispatch of operations with paged arguments that the native core does not run itself.

An operation is run in the first of the following ways that applies:

- a rule, which is a function written for this operation;
- for an operation that returns views, the code that makes paged views;
- the operation's decomposition into other operations, which are dispatched instead;
- a computation on real tensors (`farpool.tensors.compute`). If the real tensors do not fit into the fast tier together,
  the operation's fallback runs: a rule that needs less room.

Some operators need only pinned blocks and real tensors, or a view whose geometry is cached. At its first call, such an
operator is registered with the native core, which runs all later calls (`farpool.tensors.calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from farpool._native import Calls
from farpool.errors import BudgetError, PoolClosedError, UnsupportedError
from farpool.memory.pager import NoRoomError, TooLargeError, TransferFailedError
from farpool.tensors import survivors
from farpool.tensors.before_autograd import rules_included
from farpool.tensors.calls import calls
from farpool.tensors.compute import compute, explain, wrap_results
from farpool.tensors.footprint import Footprint
from farpool.tensors.lazy import lazy_bits, run
from farpool.tensors.operands import paged_arguments
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.schema import signature_of
from farpool.tensors.treatment import Treatment
from farpool.tensors.viewing import change_geometry, view

__all__ = ["Rule", "dispatch", "fallback", "family_rule", "general_fallback", "rule", "rule_of"]

Kind = Calls.Kind
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that handles an operator overload. If it returns NotImplemented, the next way of the list above is tried."""

_rules: dict[Any, Rule] = {}
_for_sparse: set[Any] = set()
_families: dict[str, Rule] = {}
_fallbacks: dict[Any, Rule] = {}
_general_fallbacks: list[tuple[Callable[[Any], bool], Rule]] = []
_handlers: dict[Any, Rule] = {}
"""The handler of each operator overload that was called before."""
_OWN_ATTRIBUTES = frozenset(("_storage", "_arena", "_footprint"))
"""Attributes that a paged tensor has and a plain one lacks."""
_composite = torch._C.DispatchKey.CompositeImplicitAutograd
_views = torch._C.DispatchKey.ADInplaceOrView
_modes = torch._C._len_torch_dispatch_stack
_active = torch._C._get_dispatch_mode
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_SetExclude = torch._C._SetExcludeDispatchKeyGuard


def rule(*overloads: Any, sparse: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operator overloads.

    Parameters
    ----------
    *overloads : torch._ops.OpOverload
    sparse : bool
        True if the rule handles only calls with a tensor that is not strided.
    """

    def register(function: Rule) -> Rule:
        for overload in overloads:
            _rules[overload] = function
            if sparse:
                _for_sparse.add(overload)
        return function

    return register


def family_rule(*prefixes: str) -> Callable[[Rule], Rule]:
    """Register a rule for all operations of aten without ``out=`` whose names begin with one of `prefixes`."""

    def register(function: Rule) -> Rule:
        _families.update(dict.fromkeys(prefixes, function))
        return function

    return register


def fallback(*overloads: Any) -> Callable[[Rule], Rule]:
    """Register a rule that runs these overloads if the operands of a call do not fit into the fast tier together."""

    def register(function: Rule) -> Rule:
        _fallbacks.update(dict.fromkeys(overloads, function))
        return function

    return register


def general_fallback(handles: Callable[[Any], bool]) -> Callable[[Rule], Rule]:
    """Register a fallback for all overloads for which `handles` returns True.

    This fallback runs if the overload has no fallback of its own, or if that fallback returns NotImplemented.
    """

    def register(function: Rule) -> Rule:
        _general_fallbacks.append((handles, function))
        return function

    return register


def _fallbacks_of(func: Any) -> list[Rule]:
    found = [_fallbacks[func]] if func in _fallbacks else []
    if signature_of(func).treatment is Treatment.ARENA:
        found += [function for handles, function in _general_fallbacks if handles(func)]
    return found


def dispatch(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run one operation that has at least one paged argument."""
    if _modes() and any(_active(key) is not None for key in _TRACERS):
        _refuse_tracing(func, args, kwargs or {})
    for kind in types:
        if kind is not PagedTensor:
            if kind is FakeTensor:
                _refuse_tracing(func, args, kwargs or {})
            return NotImplemented
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler_of(func)
    try:
        if survivors.in_use:
            return survivors.without_survivors(handler, func, args, kwargs or {})
        return handler(func, args, kwargs or {})
    except AttributeError as error:
        # `swap` in another thread may change the class of an argument at any point of a handler.
        if error.name in _OWN_ATTRIBUTES and type(error.obj) is not PagedTensor:
            raise PoolClosedError(
                f"{func}: another thread took a tensor out of its pool (it left the pool, or called farpool.restore) "
                "while the operation was under way; it is plain now: repeat the operation"
            ) from error
        raise


def _handler_of(func: Any) -> Rule:
    """Choose an overload's handler. If the native core can run the overload itself, register the overload there."""
    signature = signature_of(func)
    general = _TREATMENTS[signature.treatment]
    fallbacks = _fallbacks_of(func)
    if fallbacks:
        general = _retried(general, fallbacks)
    chosen = rule_of(func)
    if signature.treatment is Treatment.ARENA and signature.simple:
        writes = sum(1 << position for position in signature.writes)
        calls.learn(
            func,
            func._op,
            signature.name,
            Kind.COMPUTE,
            writes=writes,
            retried=bool(fallbacks),
            ruled=chosen is not None and func not in _for_sparse,
            strided=func in _for_sparse,
        )
    elif (
        chosen is None
        and signature.treatment is Treatment.VIEW
        and signature.view_of == 0
        and signature.view_of_numbers
    ):
        calls.learn(func, func._op, signature.name, Kind.VIEW)
    elif chosen is None and signature.treatment is Treatment.DECOMPOSED and not fallbacks:
        kind = Kind.COMPOSED_OF_VIEWS if signature.marks_views else Kind.COMPOSED
        calls.learn(func, func._op_dk, signature.name, kind)
    return general if chosen is None else _ruled(chosen, general)


def rule_of(func: Any) -> Rule | None:
    """The rule that is written for an overload; None if there is no such rule."""
    chosen = _rules.get(func)
    if chosen is None:
        signature = signature_of(func)
        if signature.namespace == "aten" and not signature.outputs:
            chosen = next((found for prefix, found in _families.items() if func._opname.startswith(prefix)), None)
    return chosen


def _ruled(rule: Rule, general: Rule) -> Rule:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with lazy_bits():
            result = rule(func, args, kwargs)
            return general(func, args, kwargs) if result is NotImplemented else result

    return handle


def _retried(general: Rule, fallbacks: Sequence[Rule]) -> Rule:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return general(func, args, kwargs)
        except BudgetError:
            with lazy_bits():
                for fallback in fallbacks:
                    result = fallback(func, args, kwargs)
                    if result is not NotImplemented:
                        return result
            raise

    return handle


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Make our rules before autograd run for the inner operators, as they do when torch decomposes this operator.
    with rules_included():
        if torch.is_inference_mode_enabled() and not signature_of(func).marks_views:
            # For plain tensors torch marks views as views even here, and a view of a tensor that requires a gradient
            # requires one, too. Matrix products check that and pick another kernel, which gives other bits.
            with _SetExclude(_views, False):
                return run(func._op_dk, (_composite, *args), kwargs)
        return run(func._op_dk, (_composite, *args), kwargs)


def _rebind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with lazy_bits():
        return change_geometry(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[signature_of(func).view_of]
    return view(func, args, kwargs, source) if type(source) is PagedTensor else compute(func, args, kwargs)


def _refuse_tracing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    # A traced graph would contain the real tensors as constants.
    paged = paged_arguments(args, kwargs)
    raise UnsupportedError(
        f"{func} of {describe(paged[0]) if paged else 'a paged tensor'} cannot be traced (torch.export, make_fx, "
        "FakeTensorMode), because its bytes move: take its module out of the pool first, with "
        "farpool.restore(module), or pass a plain copy, pool.materialize(t)"
    )


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        f"{signature_of(func).name} needs raw memory, which a paged tensor does not have, or takes lists of lists: "
        "pass it plain copies, pool.materialize(t)"
    )


_TREATMENTS: dict[Treatment, Rule] = {
    Treatment.DECOMPOSED: _decompose,
    Treatment.GEOMETRY: _rebind,
    Treatment.VIEW: _view,
    Treatment.ARENA: compute,
    Treatment.COPIES: compute,
    Treatment.REFUSED: _refuse,
}

calls.bind(
    torch,
    PagedTensor,
    Footprint,
    SimpleNamespace(
        dispatch=dispatch,
        wrap_results=wrap_results,
        explain=explain,
        refusals=(TooLargeError, NoRoomError, TransferFailedError),
        budget_error=BudgetError,
    ),
)
