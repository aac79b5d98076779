"""Finds the variable or attribute that refers to a tensor, for messages that ask the user to drop that tensor."""

from __future__ import annotations

import gc
import os
import sys
from types import FrameType
from typing import Any

import torch

__all__ = ["referrer_of"]


def referrer_of(tensor: torch.Tensor) -> str:
    """Name the variable or attribute that refers to a tensor, or say that it is unknown, as text for a message."""
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, FrameType):
            found = _in_frame(referrer, tensor)
        else:
            found = _in_dict(referrer, tensor) if isinstance(referrer, dict) else _in_object(referrer, tensor)
        if found:
            return found
    return "a variable of a running function, a container or an autograd graph (a loss, outputs)"


def _key(names: dict[str, Any], tensor: torch.Tensor) -> str:
    return next((str(name) for name, value in names.items() if value is tensor), "")


def _in_frame(frame: FrameType, tensor: torch.Tensor) -> str:
    # Before Python 3.13, reading the variables of a running function copies them, and the copies keep tensors alive.
    if _is_running(frame):
        return ""
    name = _key(dict(frame.f_locals), tensor)
    if not name:
        return ""
    where = f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
    return (
        f"the variable {name!r} of {frame.f_code.co_name}() ({where}), which "
        "the traceback of an exception keeps: drop the exception, or call traceback.clear_frames(error.__traceback__)"
    )


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _in_dict(names: dict[str, Any], tensor: torch.Tensor) -> str:
    name = _key(names, tensor)
    if "__name__" in names and "__builtins__" in names:
        return f"the global variable {name!r} of {names['__name__']}"
    for owner in gc.get_referrers(names):
        if getattr(owner, "__dict__", None) is names:
            return f"the attribute {name!r} of a {type(owner).__name__}"
        if isinstance(owner, torch.nn.Module):
            return f"{name!r} of a {type(owner).__name__}"
    return f"a dict, under the key {name!r}"


def _in_object(owner: Any, tensor: torch.Tensor) -> str:
    name = _key(getattr(owner, "__dict__", {}), tensor)
    return f"the attribute {name!r} of a {type(owner).__name__}" if name else ""
