"""Lazy conjugation and negation, which torch switches off while an operation is handled in Python."""

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
    """Let operations conjugate and negate lazily, as they do for plain tensors.

    While an operation is handled in Python torch excludes these dispatch keys, so a computation would read the values
    of a conjugated tensor as if it were not conjugated.
    """
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - _LAZY
    )


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation with lazy conjugation and negation, in half the time that the guard of `lazy_bits` takes."""
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
