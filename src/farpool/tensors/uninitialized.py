"""Modules whose tensors have no shape until their first forward pass, such as ``torch.nn.LazyLinear``.

Such tensors have no bytes, so `farpool.offload` does not change them and registers a hook on their module. The hook
runs at each forward pass, after torch has set the shapes. When all tensors of the module have a shape, the hook moves
them into the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from farpool.errors import PoolMixError
from farpool.memory.pool.block_pool import BlockPool

__all__ = ["check_waits_for", "is_uninitialized", "move_when_initialized", "stop_waiting"]

Move = Callable[[torch.nn.Module, BlockPool], None]


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has no shape yet."""
    return bool(is_lazy(tensor))


def _has_uninitialized(part: torch.nn.Module) -> bool:
    return any(
        is_lazy(tensor) for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None
    )


class _MoveWhenInitialized:
    """Forward pre-hook that moves a module's tensors into a pool when all have a shape, and then removes itself."""

    __slots__ = ("move", "pool")

    def __init__(self, pool: BlockPool | None, move: Move) -> None:
        self.pool = pool
        self.move = move

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self.pool is not None and not self.pool.closed:
            if _has_uninitialized(module):
                return
            self.move(module, self.pool)
        _remove(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _MoveWhenInitialized:
        # A copy of the module waits for the same pool, which cannot be copied.
        return self

    def __reduce__(self) -> Any:
        # A pickle cannot contain a pool, so the module stays plain after loading.
        return _MoveWhenInitialized, (None, self.move)


def _hook_of(part: torch.nn.Module) -> _MoveWhenInitialized | None:
    return next((hook for hook in part._forward_pre_hooks.values() if isinstance(hook, _MoveWhenInitialized)), None)


def _remove(part: torch.nn.Module) -> None:
    for key, hook in list(part._forward_pre_hooks.items()):
        if isinstance(hook, _MoveWhenInitialized):
            del part._forward_pre_hooks[key]


def check_waits_for(module: torch.nn.Module, pool: BlockPool) -> None:
    """Raise if the first forward pass of a part of a module would move the part into another pool than `pool`.

    Raises
    ------
    PoolMixError
    """
    for name, part in module.named_modules():
        hook = _hook_of(part)
        if hook is not None and hook.pool not in (None, pool):
            raise PoolMixError(
                f"{name or 'the module'} goes into another pool at its first forward pass: call "
                "farpool.restore(module) first"
            )


def move_when_initialized(module: torch.nn.Module, pool: BlockPool, move: Move) -> None:
    """Register a hook on each part of a module that has tensors without a shape.

    The hook moves the part into the pool when all tensors of the part have a shape.
    """
    for part in module.modules():
        if _has_uninitialized(part):
            _remove(part)
            part.register_forward_pre_hook(_MoveWhenInitialized(pool, move))


def stop_waiting(module: torch.nn.Module) -> None:
    """Cancel the pending moves of a module.

    Each part with a pending move would have been moved at its first forward pass with a shape for all its tensors.
    """
    for part in module.modules():
        _remove(part)
