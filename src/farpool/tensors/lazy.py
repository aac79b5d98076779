"""Switches on lazy conjugation and negation, which torch switches off while Python code handles an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["lazy_bits", "run"]

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_ZERO = torch._C.DispatchKey.ZeroTensor
_LAZY = torch._C.DispatchKeySet(_CONJUGATE) | torch._C.DispatchKeySet(_NEGATIVE) | torch._C.DispatchKeySet(_ZERO)


def lazy_bits() -> Any:
    """Context in which operations respect lazy conjugation and negation, as they do for plain tensors.

    ``conj()`` only sets a bit on a tensor, and the next operation conjugates the values. While Python code handles an
    operation, torch ignores this bit, so a computation would read the values as if they were not conjugated. The same
    holds for negation.
    """
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - _LAZY
    )


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation as inside the context `lazy_bits`, but with half of the context's overhead."""
    if not _is_excluded(_CONJUGATE):
        return func(*args, **kwargs)
    _set_excluded(_CONJUGATE, False)
    _set_excluded(_NEGATIVE, False)
    _set_excluded(_ZERO, False)
    try:
        return func(*args, **kwargs)
    finally:
        _set_excluded(_CONJUGATE, True)
        _set_excluded(_NEGATIVE, True)
        _set_excluded(_ZERO, True)
