"""Registers rules that torch calls instead of an operator's native code, before autograd records the operation.

The rules are registered for a dispatch key that only tensor subclasses have, so they do not slow down calls with plain
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keys_after", "register", "rules_included"]

_KEY = torch._C.DispatchKey.PythonTLSSnapshot
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def register(name: str, rule: Callable[..., Any]) -> None:
    """Make torch call `rule` instead of the operator ``aten::name``. The rule's first argument is the dispatch keys."""
    _library.impl(name, rule, _KEY.name, with_keyset=True)


def keys_after(keys: Any) -> Any:
    """Return the dispatch keys for the operator call inside a rule. With these keys, torch skips the rule."""
    return keys.remove(_KEY)


def rules_included() -> Any:
    """A context in which torch calls the registered rules even while it handles another operation in Python."""
    return torch._C._SetExcludeDispatchKeyGuard(_KEY, False)
