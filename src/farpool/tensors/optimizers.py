"""Moves plain moments of paged parameters into the pool of the parameters.

An optimizer makes moments "like" their parameter (``zeros_like``), so moments of a paged parameter are made in the
pool. Moments that existed before `offload` are plain, and this module pages them at the next step. Moments that
``load_state_dict`` loads are plain, too, and are paged while they are loaded. Other state of an optimizer stays plain:
step counters, tensors of another shape than the parameter, quantized moments, and slices of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as _optimizer
from torch.optim import Optimizer

from farpool.errors import BudgetError, PoolMixError, UnsupportedError
from farpool.tensors.factories import class_of_moments, enters, moved_in
from farpool.tensors.geometry import is_strided
from farpool.tensors.identity import swap
from farpool.tensors.paged_tensor import PagedTensor, describe

if TYPE_CHECKING:
    from farpool.memory.pager.storage import StorageOwner

__all__ = [
    "Moved",
    "apply",
    "moments_of",
    "note_offload",
    "offload_state",
    "page_moments",
    "page_moments_of",
    "require_room",
]

_native_policy: Any = Optimizer._process_value_according_to_param_policy
_NORM_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.Muon)
_MARK_ATTRIBUTE = "_farpool_offloads"
Moved = list[tuple[torch.Tensor, torch.device]]
"""Tensors that were moved into a pool, and the device on which each was plain."""
_offloads = 0
"""Number of modules offloaded so far. `page_moments_of` stores this number on each optimizer that it checks, and checks
the optimizer again only when the number has changed."""


def note_offload() -> None:
    """Record that a module was offloaded, so that each optimizer is checked for plain moments before its next step."""
    global _offloads
    _offloads += 1


def _is_moment(parameter: PagedTensor, key: object, value: object) -> bool:
    return (
        type(value) is torch.Tensor
        and key != "step"
        and value.dim() > 0
        and value.size() == parameter.size()
        and (value.is_floating_point() or value.is_complex())
        and is_strided(value)
        and enters(value, parameter._storage.pool)
        and not value.requires_grad
    )


def _paged(parameter: PagedTensor, value: torch.Tensor) -> PagedTensor:
    storage = parameter._storage
    return moved_in(storage.pool, value, "farpool.offload", cls=class_of_moments(parameter), name=storage.name)


def _plain_moments_of(parameter: torch.Tensor, state: Any) -> Iterator[tuple[PagedTensor, torch.Tensor]]:
    if type(parameter) is PagedTensor and isinstance(state, dict):
        for key, value in state.items():
            # A slice of a flat buffer stays plain, because its optimizer writes to the buffer.
            if _is_moment(parameter, key, value) and value.untyped_storage().nbytes() == value.nbytes:
                yield parameter, value


def _plain_moments(optimizer: Optimizer) -> Iterator[tuple[PagedTensor, torch.Tensor]]:
    """Yield each plain moment of each paged parameter, as a pair ``(parameter, moment)``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _plain_moments_of(parameter, optimizer.state.get(parameter))


def page_moments(parameter: torch.Tensor, state: Any) -> None:
    """Move the plain moments of one parameter into the parameter's pool."""
    for paged, value in list(_plain_moments_of(parameter, state)):
        swap(value, _paged(paged, value))


def moments_of(optimizer: Optimizer) -> list[PagedTensor]:
    """The tensors of an optimizer's state that live in a pool."""
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if type(value) is PagedTensor
    ]


def offload_state(
    optimizer: Optimizer, pool: StorageOwner, progress: Callable[[int, int], None] | None, moved: Moved
) -> None:
    """Page the moments of paged parameters one by one, in place, and append each to `moved`.

    Raises
    ------
    UnsupportedError
        No parameter of the optimizer is paged.
    PoolMixError
        A parameter of the optimizer is in another pool.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if type(p) is PagedTensor]
    if not parameters:
        raise UnsupportedError(
            f"no parameter of this {type(optimizer).__name__} is in a pool: offload the module first, with "
            "farpool.offload(module, pool)"
        )
    for parameter in parameters:
        if parameter._storage.pool is not pool:
            raise PoolMixError(
                f"{describe(parameter)} is in another pool, and its moments have to be where it is: give that pool"
            )
    moments = list(_plain_moments(optimizer))
    total = sum(value.nbytes for _, value in moments)
    for parameter, value in moments:
        device = value.device
        swap(value, _paged(parameter, value))
        moved.append((value, device))
        if progress is not None:
            progress(sum(moment.nbytes for moment, _ in moved), total)


def page_moments_of(optimizer: Optimizer) -> None:
    """Page an optimizer's plain moments. Do nothing if the optimizer was checked after the last `offload`."""
    if torch.compiler.is_compiling() or optimizer.__dict__.get(_MARK_ATTRIBUTE) == _offloads:
        return
    for parameter, value in list(_plain_moments(optimizer)):
        swap(value, _paged(parameter, value))
    optimizer.__dict__[_MARK_ATTRIBUTE] = _offloads


def _used_whole(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return the tensors that a step cannot process block by block: one tuple for each operation on whole tensors.

    Optimizers that compute norms have such operations, and so has fused SGD in half precision. All other operations of
    optimizers work block by block.
    """
    grad = parameter.grad
    if isinstance(optimizer, _NORM_OPTIMIZERS):
        return [(parameter,), (grad,)]
    if parameter.itemsize == 2:
        operands = [grad]
        if group["momentum"]:
            operands.append(optimizer.state.get(parameter, {}).get("momentum_buffer"))
        like = parameter.detach()  # moments that do not exist yet are made like the parameter
        return [(parameter, *(torch.empty_like(like) if tensor is None else tensor for tensor in operands))]
    return []


def require_room(optimizer: Optimizer, *, gradients_follow: bool) -> None:
    """Raise `BudgetError` now if a step would raise it later, after the step has changed some tensors.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    gradients_follow : bool
        True if parameters that have no gradient now will get one before the step.

    Raises
    ------
    BudgetError
        An operation of the optimizer needs whole tensors that do not fit into the fast tier together.
    """
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if not isinstance(optimizer, _NORM_OPTIMIZERS) and not (
            isinstance(optimizer, torch.optim.SGD) and group["fused"]
        ):
            continue
        for parameter in group["params"]:
            if type(parameter) is not PagedTensor or not (
                parameter.grad is not None or (gradients_follow and parameter.requires_grad)
            ):
                continue
            for operands in _used_whole(optimizer, group, parameter):
                paged = [tensor for tensor in operands if type(tensor) is PagedTensor]
                pool = parameter._storage.pool
                if sum(tensor.nbytes for tensor in paged) <= pool.fast // 2:
                    continue  # it fits anyway, so we do not fetch it
                kind = f"optim.{type(optimizer).__name__}"
                try:
                    # We ask the pool instead of adding sizes up, because blocks and shared storages decide if the
                    # tensors fit.
                    pool.release(pool.acquire([tensor._footprint.reader() for tensor in paged], kind))
                except BudgetError as error:
                    error.add_note(
                        f"{kind} takes these tensors whole, and the step has changed nothing; docs/tables.md names the "
                        "optimizers that work block by block"
                    )
                    raise


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    page_moments_of(optimizer)
    require_room(optimizer, gradients_follow=len(args) > 1 or kwargs.get("closure") is not None)


def _process_loaded(parameter: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    value = _native_policy(parameter, value, *args, **kwargs)
    key = kwargs.get("key", args[2] if len(args) > 2 else None)
    if type(parameter) is PagedTensor and _is_moment(parameter, key, value):
        return _paged(parameter, value)
    return value


def apply() -> None:
    """Register the hooks in torch's optimizers; a second call changes nothing."""
    if Optimizer._process_value_according_to_param_policy is not _process_loaded:
        # Page one moment after the other, so that no second copy of all moments exists.
        Optimizer._process_value_according_to_param_policy = staticmethod(_process_loaded)  # type: ignore[method-assign, assignment]
        _optimizer.register_optimizer_step_pre_hook(_before_step)
