"""How an operator is run on paged arguments, told by its schema alone.

Real tensors over the arena are good only while their blocks are pinned. An operator that keeps one of them, in an
object with packed weights, in a tensor of another layout, or anywhere else, would read other bytes later and say
nothing. So only what is known to return plain tensors and numbers runs on them: PyTorch's own operators, unless they
take or give something else. All others are given copies that they may keep.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import torch

__all__ = ["Treatment", "treatment_of"]


class Treatment(StrEnum):
    """How an operator is run that has no rule of its own."""

    DECOMPOSED = "decomposed"
    """Made of other operators: these are dispatched in its place."""
    GEOMETRY = "geometry"
    """Changes the geometry of its first argument in place; reads no bytes."""
    VIEW = "view"
    """Views its argument; reads no bytes."""
    ARENA = "arena"
    """Runs on real tensors over the arena, while their blocks are pinned."""
    COPIES = "copies"
    """May keep its operands: runs on private copies of them."""
    REFUSED = "refused"
    """Needs memory that stays where it is, or takes tensors in containers that are not looked into."""


_OWN = frozenset(("aten", "prims"))
"""Libraries whose operators keep no operand, unless what they take or give is told apart below."""

_ADDRESSES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "inductor", "static_runtime", "symm_mem")
)
"""Libraries that hand memory to other processes, or make tensors of parts of it."""

_FORMATS = re.compile(
    r"(?<!fake_)quantiz|sparse|nested|jagged|to_mkldnn|mkldnn_reorder|fbgemm|prepack|(^|_)pack_|_(coo|[bc]s[rc])(_|$)"
)
"""Formats that hold other tensors: quantized (scales, zero points), sparse, nested, opaque and packed ones.

An operator that makes one of them of strided tensors says so in its name. Any other gives one only where it was given
one, which is never paged.
"""
_HOLDERS = frozenset(("zero_points", "crow_indices", "ccol_indices"))
"""Arguments that only such formats have."""
_OBJECTS = frozenset(("AnyType", "CapsuleType", "ClassType", "PyObjectType", "DictType", "StorageType"))
"""Types of which nothing is known, and objects that may hold tensors."""


def _kinds(kind: Any, found: set[str]) -> set[str]:
    found.add(kind.kind())
    for part in kind.containedTypes():
        _kinds(part, found)
    return found


def _is_composite(name: str) -> bool:
    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    own = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has("CompositeImplicitAutograd") and not any(has(key) for key in own)


def treatment_of(func: Any, *, views: bool) -> Treatment:
    """The treatment of an operator overload.

    Parameters
    ----------
    func : torch._ops.OpOverload
    views : bool
        Its schema declares results that alias an argument without writing.
    """
    schema = func._schema
    namespace = func.namespace
    name = func._opname
    if _is_composite(func.name()):
        return Treatment.DECOMPOSED
    arguments = [str(argument.type) for argument in schema.arguments]
    if namespace in _ADDRESSES or "..." in str(schema) or name == "data_ptr" or any(map(_is_nested, arguments)):
        return Treatment.REFUSED
    kinds: set[str] = set()
    for value in (*schema.arguments, *schema.returns):
        _kinds(value.type, kinds)
    keeps = (
        namespace not in _OWN
        or not _OBJECTS.isdisjoint(kinds)
        or _FORMATS.search(name) is not None
        or not _HOLDERS.isdisjoint([argument.name for argument in schema.arguments])
    )
    if keeps:
        return Treatment.COPIES
    if torch.Tag.inplace_view in func.tags:
        return Treatment.GEOMETRY
    return Treatment.VIEW if views else Treatment.ARENA


def _is_nested(kind: str) -> bool:
    """Whether a type holds tensors in more than one list."""
    return "Tensor" in kind and ("List[List[" in kind or "Dict[" in kind or "Tuple[" in kind)
