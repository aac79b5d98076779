"""Rules that run before autograd, in front of an operator's native code.

They are registered for a dispatch key that only tensor subclasses have, so that calls with plain tensors cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keys_after", "register", "rules_included"]

_KEY = torch._C.DispatchKey.PythonTLSSnapshot
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def register(name: str, rule: Callable[..., Any]) -> None:
    """Make torch call a rule instead of an operator of ``aten``, with the dispatch keys as the first argument."""
    _library.impl(name, rule, _KEY.name, with_keyset=True)


def keys_after(keys: Any) -> Any:
    """Return the dispatch keys with which a rule redispatches a call, so that torch does not call the rule again."""
    return keys.remove(_KEY)


def rules_included() -> Any:
    """A context in which torch calls the rules although an operation is being handled in Python."""
    return torch._C._SetExcludeDispatchKeyGuard(_KEY, False)
