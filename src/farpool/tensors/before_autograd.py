"""Rules that run before autograd, in front of an operator's native code.

They hang on a dispatch key that only tensor subclasses pass, so plain calls cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keys_after", "register", "rules_included"]

_KEY = torch._C.DispatchKey.PythonTLSSnapshot
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def register(name: str, rule: Callable[..., Any]) -> None:
    """Have a rule called in place of an operator of ``aten``; the dispatch keys come before its other arguments."""
    _library.impl(name, rule, _KEY.name, with_keyset=True)


def keys_after(keys: Any) -> Any:
    """Return the dispatch keys with which a rule redispatches its call, which does not come back to the rule."""
    return keys.remove(_KEY)


def rules_included() -> Any:
    """A context in which torch calls rules even while it handles an operation in Python, when it would skip them."""
    return torch._C._SetExcludeDispatchKeyGuard(_KEY, False)
