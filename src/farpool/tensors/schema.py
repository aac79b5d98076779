"""Signatures. A signature says how an operator uses its arguments. It is computed from the schema once and cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from farpool.tensors.treatment import Treatment, treatment_of

__all__ = ["Signature", "signature_of"]

_aten = torch.ops.aten

# Positions of statistics (running_mean, running_var) that operators update although their schemas do not say so.
_UNDECLARED_WRITES: dict[Any, frozenset[int]] = {
    _aten.native_batch_norm.default: frozenset((3, 4)),
    _aten.native_batch_norm.out: frozenset((3, 4)),
    _aten.cudnn_batch_norm.default: frozenset((3, 4)),
    _aten.miopen_batch_norm.default: frozenset((3, 4)),
    _aten.batch_norm_gather_stats.default: frozenset((3, 4)),
    _aten.batch_norm_gather_stats_with_counts.default: frozenset((3, 4)),
    _aten.batch_norm_update_stats.default: frozenset((1, 2)),
}


@dataclass(frozen=True, slots=True)
class Signature:
    """The way an operator uses its arguments, as its schema declares it.

    Attributes
    ----------
    name : str
        Name for errors and events, for example ``aten.addmm``.
    namespace : str
        ``aten``, or the library that registered the operation.
    view_of : int
        Position of the argument that the results are views of; -1 if the results are not views.
    treatment : Treatment
        The way to run the operator if no rule is written for it.
    marks_views : bool
        True if torch's autograd code marks the results as views after our code returns, so our code must not mark them.
    writes : frozenset of int
        Positions of arguments that are written in place.
    outputs : frozenset of str
        Names of keyword arguments that receive results, and that the operator may resize.
    simple : bool
        True if the operator is in the namespace ``aten`` and has no `outputs`.
    view_of_numbers : bool
        True if no argument after the first is a tensor.
    """

    name: str
    namespace: str
    view_of: int
    treatment: Treatment
    marks_views: bool
    writes: frozenset[int]
    outputs: frozenset[str]
    simple: bool
    view_of_numbers: bool


@cache
def signature_of(func: Any) -> Signature:
    """The signature of an operator overload."""
    schema = func._schema
    writes = set(_UNDECLARED_WRITES.get(func, ()))
    outputs = set()
    sources: dict[str, int] = {}
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        if not alias.is_write:
            for label in alias.before_set:
                sources.setdefault(label, position)
        elif argument.kwarg_only:
            outputs.add(argument.name)
        else:
            writes.add(position)
    view_of = -1
    if not writes and not outputs:
        for returned in schema.returns:
            alias = returned.alias_info
            if alias is not None:
                for label in alias.before_set:
                    view_of = sources.get(label, view_of)
        for position, argument in enumerate(schema.arguments):
            # The label of a list of views, "(a)[]", is lost; its argument's reads "(a -> *)".
            if argument.alias_info is not None and "*" in argument.alias_info.after_set:
                view_of = position
    kinds = [str(argument.type) for argument in schema.arguments]
    namespace = func.namespace
    treatment = treatment_of(func, views=view_of >= 0)
    return Signature(
        name=f"{namespace}.{func._opname}",
        namespace=namespace,
        view_of=view_of,
        treatment=treatment,
        marks_views=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView"),
        writes=frozenset(writes),
        outputs=frozenset(outputs),
        simple=namespace == "aten" and not outputs,
        view_of_numbers=not any("Tensor" in kind for kind in kinds[1:]),
    )
