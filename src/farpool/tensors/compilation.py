"""Keeps torch from compiling code that computes with paged tensors, and refuses ``torch.export`` of such code.

Compiled code reads a parameter at an address that never changes, and a paged tensor has no such address. Without this
module, torch would break the graph at each operation with a paged argument and trace into farpool's own code. So we
examine each call that the compiler is about to trace. If the call can reach paged tensors, the interpreter runs the
call, and all calls inside it. We decide for each call separately, so the same code is still compiled for plain modules
and for modules that were restored. An export cannot fall back to the interpreter, so it is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from farpool.errors import FarpoolWarning, UnsupportedError
from farpool.tensors.imports import when_imported
from farpool.tensors.paged_tensor import PagedTensor, describe

__all__ = ["apply", "invalidate_guards"]

_LEVELS_MAX = 2
"""Levels of nested lists, tuples and dicts that are searched for paged tensors."""
_warned = False


def apply() -> None:
    """Patch torch's compiler and exporter when the program imports them; importing them here would take seconds."""
    when_imported("torch._dynamo.convert_frame", _step_aside_in)
    when_imported("torch.export._trace", _refuse_exports_in)


def _step_aside_in(compiler: Any) -> None:
    """Make the compiler skip each frame (a call of a Python function) that can reach paged tensors."""
    entry: Any = compiler.CatchErrorsWrapper
    compile_frame = entry.__call__
    skipped = compiler.ConvertFrameReturn
    left_alone = compiler.FrameExecStrategy(compiler.FrameAction.SKIP, compiler.FrameAction.SKIP)
    # Older torch, such as 2.11, does not take a reason.
    reason = {"skip_reason": "it computes with paged tensors"} if "skip_reason" in _fields_of(skipped) else {}

    def call(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        paged = _paged_in_reach(frame)
        if paged is None:
            return compile_frame(self, frame, cache_entry, frame_state)
        if getattr(self._torchdynamo_orig_backend, "_one_graph", False):
            raise UnsupportedError(
                f"fullgraph=True and torch.export need all of {frame.f_code.co_name}() as one graph, but it computes "
                f"with {describe(paged)}, whose bytes move. Without fullgraph it runs uncompiled; to compile it, take "
                "its tensors out of the pool first, with farpool.restore(module)"
            )
        _warn(paged)
        # For this call only, because the same code may be compiled for a plain module.
        return skipped(frame_exec_strategy=left_alone, apply_to_code=False, **reason)

    entry.__call__ = call


def _refuse_exports_in(exporter: Any) -> None:
    """Make the exporter refuse modules and inputs that have paged tensors."""
    for name in ("_export", "_export_for_training", "_export_to_torch_ir"):
        setattr(exporter, name, _refusing(getattr(exporter, name)))


def _refusing(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def call(*args: Any, **kwargs: Any) -> Any:
        paged = _first_paged((*args, *kwargs.values()), _LEVELS_MAX)
        if paged is not None:
            raise UnsupportedError(
                f"torch.export cannot take {describe(paged)} into a program: its bytes move between the tiers of its "
                "pool. Take the module out of the pool first, with farpool.restore(module), and pass plain inputs"
            )
        return export(*args, **kwargs)

    return call


def _fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _warn(paged: PagedTensor) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"torch.compile leaves code uncompiled that computes with {describe(paged)} or other paged tensors; "
            "results are the same. Compile modules that stay plain by themselves (this warning appears once)",
            FarpoolWarning,
            stacklevel=3,
        )


def _paged_in_reach(frame: Any) -> PagedTensor | None:
    """Find a paged tensor that a frame can reach; None if it can reach none.

    We search the frame's arguments, also inside lists, tuples and dicts, and the globals that its code names. If one of
    these values is a module or an optimizer, we search its parameters and buffers, too.
    """
    found = _first_paged(frame.f_locals.values(), _LEVELS_MAX)
    if found is None:
        names = frame.f_globals
        found = _first_paged([names[name] for name in frame.f_code.co_names if name in names], 0)
    return found


def _first_paged(values: Iterable[Any], depth: int) -> PagedTensor | None:
    for value in values:
        kind = type(value)
        found: PagedTensor | None = None
        if kind is PagedTensor:
            return value  # type: ignore[no-any-return]
        if isinstance(value, torch.nn.Module):
            found = _paged_in(value)
        elif isinstance(value, torch.optim.Optimizer):
            found = _first_paged([group["params"] for group in value.param_groups], 1)
        elif depth and (kind is list or kind is tuple):
            found = _first_paged(value, depth - 1)
        elif depth and kind is dict:
            found = _first_paged(value.values(), depth - 1)
        if found is not None:
            return found
    return None


def _paged_in(module: torch.nn.Module) -> PagedTensor | None:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                if type(tensor) is PagedTensor:
                    return tensor
    return None


def invalidate_guards(module: torch.nn.Module) -> None:
    """Make compiled code check its guards on the module's tensors again.

    Compiled code checks them again only after a dict that holds the tensors was modified, but `farpool.offload` changes
    only the tensors. So we assign each tensor to its dict again.
    """
    for part in module.modules():
        groups: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in groups:
            for name, tensor in list(tensors.items()):
                tensors[name] = None
                tensors[name] = tensor
