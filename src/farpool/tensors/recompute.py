"""Parts of a forward pass whose saved tensors are kept in a pool or computed again, by measured cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from farpool.errors import ArgumentError
from farpool.tensors.region_cost import Choice, Region
from farpool.tensors.saved import SavedBytes, Saver
from farpool.tensors.saving_steps import Step, modules_of

__all__ = ["checkpoint"]

_Result = TypeVar("_Result")
_REFUSED = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Options of torch's function, which a region that is kept could not follow."""


def checkpoint(function: Callable[..., _Result], /, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> _Result:
    """Call a function, and keep its saved tensors in a pool or compute them again in the backward pass: what is faster.

    Use it as `torch.utils.checkpoint.checkpoint`, around a part of the model, inside `farpool.saved_tensors`. The first
    step computes each part again, except parts of modules with buffers, which it keeps. It measures the time of each
    forward pass, the bytes that it saves, and the speed of the pool and of its links. Later steps keep a part if its
    copies, and waiting for links that are full, take less time than its forward pass. `explain()` of the context
    manager shows the costs and the choices. A choice changes only if the other one costs a fifth less. A part is
    computed again if most of what it saves would stay in plain memory.

    Losses and gradients have the bits of a plain call, whatever is chosen. Dropout gets the same random numbers, and
    autocast is as it was. A part is known by its function (code, and modules that it is, belongs to or refers to) and
    by the sizes of the tensors in its arguments.

    Outside of `farpool.saved_tensors`, and directly inside other hooks for saved tensors, such as those of a checkpoint
    that is computed again, this is torch's checkpoint.

    Parameters
    ----------
    function : callable
        A module, a method or a function. It must compute the same when it is called again with the same arguments. If
        it is a module (or belongs to one, or refers to one) whose buffers its forward pass changes, as a batch norm
        does, it is always kept.
    *args, **kwargs
        Arguments for `function`.
    use_reentrant : bool
        Must be False, as for torch's own way that this uses.

    Returns
    -------
    object
        The result of `function`.

    Raises
    ------
    ArgumentError
        `function` cannot be called, or an option of torch's function was given.
    PoolFullError
        A part is kept, and the pool has no room for what it saves.

    Examples
    --------
    >>> with farpool.saved_tensors(pool) as saved:
    ...     for block in model.blocks:
    ...         hidden = farpool.checkpoint(block, hidden)
    ...     loss = hidden.square().mean()
    >>> loss.backward()
    """
    _check(function, use_reentrant, kwargs)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    saver = hooks[0] if hooks is not None and isinstance(hooks[0], Saver) else None
    step = saver.plan.step if saver is not None else None
    if saver is None or step is None or not torch.is_grad_enabled():
        return cast("_Result", _again(function, args, kwargs))
    saver.plan.measure(step, saver.pool)
    modules = modules_of(function, (args, kwargs))
    region, new = saver.plan.region(function, modules, (args, kwargs))
    if new and (buffers := _buffers(modules)):
        with saver.plan.first_call(region):
            result = function(*args, **kwargs)
            region.choice = Choice.ALWAYS if _changed(modules, buffers) else Choice.MEASURE
    elif region.kept:
        begin = step.begin_region()
        result = function(*args, **kwargs)
        step.computed(region, begin, kept=True)
    else:
        result = _again(_Measured(function, region, step, saver), args, kwargs)
    step.called(region)
    return result


class _Measured:
    """A function whose first call is measured. Later calls compute it again."""

    def __init__(self, function: Callable[..., Any], region: Region, step: Step, saver: Saver) -> None:
        self._function = function
        self._measured: tuple[Region, Step, Saver] | None = (region, step, saver)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        measured, self._measured = self._measured, None
        if measured is None:
            return self._function(*args, **kwargs)
        region, step, saver = measured
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert hooks is not None
        pack, unpack = hooks
        count = SavedBytes(saver, (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)))

        def counted(tensor: torch.Tensor) -> Any:
            count.add(tensor)
            return pack(tensor)

        begin = step.begin_region()
        with saved_tensors_hooks(counted, unpack):
            result = self._function(*args, **kwargs)
        step.computed(region, begin, kept=False)
        region.nbytes, region.plain = count.total(stays=False), count.total(stays=True)
        return result


def _again(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def _check(function: Any, use_reentrant: Any, kwargs: dict[str, Any]) -> None:
    if not callable(function):
        raise ArgumentError(
            f"farpool.checkpoint: the first argument is {type(function).__name__}, expected a function or a module; "
            "its arguments come after it: farpool.checkpoint(block, hidden)"
        )
    if use_reentrant is not False:
        raise ArgumentError(
            f"farpool.checkpoint: use_reentrant={use_reentrant!r}, expected False: a part that may be kept has to "
            "record its graph; leave the option out"
        )
    refused = [name for name in _REFUSED if name in kwargs]
    if refused:
        raise ArgumentError(
            f"farpool.checkpoint: {refused[0]}={kwargs[refused[0]]!r} is an option of torch.utils.checkpoint, which a "
            "part that is kept does not follow; leave it out, or call torch's function"
        )


def _buffers(modules: Sequence[torch.nn.Module]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """Buffers of modules, their versions and copies of them."""
    return [(buffer, buffer._version, buffer.detach().clone()) for module in modules for buffer in module.buffers()]


def _changed(modules: Sequence[torch.nn.Module], before: list[tuple[torch.Tensor, int, torch.Tensor]]) -> bool:
    """Return True if a buffer was exchanged or has other bits than before."""
    after = [buffer for module in modules for buffer in module.buffers()]
    if len(after) != len(before):
        return True
    return any(
        now is not buffer or now._version != version or not torch.equal(now, copy)
        for now, (buffer, version, copy) in zip(after, before, strict=True)
    )
