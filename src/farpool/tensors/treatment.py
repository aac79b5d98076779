"""Treatments: the ways to run an operator on paged arguments, chosen from torch's description of the operator.

Real tensors over the arena are valid only while their blocks are pinned. An operator that keeps a real tensor, for
example in an object with packed weights or in a tensor of another layout, would later read other bytes without an
error. So only operators that are known to return plain tensors and numbers run on real tensors: PyTorch's own
operators, except those that take or return other objects. All other operators receive copies, which they may keep.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import torch

__all__ = ["Treatment", "treatment_of"]


class Treatment(StrEnum):
    """Way of running an operator that has no rule of its own."""

    DECOMPOSED = "decomposed"
    """The operator is computed by other operators, which are dispatched instead."""
    GEOMETRY = "geometry"
    """The operator changes the geometry of its first argument in place, and reads no bytes."""
    VIEW = "view"
    """The operator returns views of its argument, and reads no bytes."""
    ARENA = "arena"
    """The operator runs on real tensors over the arena, while their blocks are pinned."""
    COPIES = "copies"
    """The operator may keep its operands, so it runs on private copies of them."""
    REFUSED = "refused"
    """The operator is refused, because it needs memory that does not move, or takes tensors in nested containers."""


_OWN_NAMESPACES = frozenset(("aten", "prims"))
"""Namespaces whose operators do not keep their operands, with the exceptions below."""

_ADDRESSES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "inductor", "static_runtime", "symm_mem")
)
"""Namespaces whose operators pass the memory of tensors to other processes, or make tensors from parts of it."""

_FORMATS = re.compile(
    r"(?<!fake_)quantiz|sparse|nested|jagged|to_mkldnn|mkldnn_reorder|fbgemm|prepack|(^|_)pack_|_(coo|[bc]s[rc])(_|$)"
)
"""Pattern for names of operators that return tensors of other formats: quantized, sparse, nested, opaque, packed.

Such a tensor may keep an operand. An operator that makes it from strided tensors has the format in its name. Other
operators return it only if an argument has that format, and such an argument is never paged.
"""
_TENSOR_ARGUMENTS = frozenset(("zero_points", "crow_indices", "ccol_indices"))
"""Argument names that only operators for these formats have."""
_OBJECTS = frozenset(("AnyType", "CapsuleType", "ClassType", "PyObjectType", "DictType", "StorageType"))
"""Types in a schema that stand for any object, or for an object that may hold tensors."""


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
    """Choose the treatment of an operator overload.

    Parameters
    ----------
    func : torch._ops.OpOverload
    views : bool
        True if the overload's schema declares that its results are views of an argument.
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
        namespace not in _OWN_NAMESPACES
        or not _OBJECTS.isdisjoint(kinds)
        or _FORMATS.search(name) is not None
        or not _TENSOR_ARGUMENTS.isdisjoint([argument.name for argument in schema.arguments])
    )
    if keeps:
        return Treatment.COPIES
    if torch.Tag.inplace_view in func.tags:
        return Treatment.GEOMETRY
    return Treatment.VIEW if views else Treatment.ARENA


def _is_nested(kind: str) -> bool:
    """Return True if an argument's type holds tensors in nested lists, dicts or tuples."""
    return "Tensor" in kind and ("List[List[" in kind or "Dict[" in kind or "Tuple[" in kind)
