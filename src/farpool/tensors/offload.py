"""Moves the tensors of a module or an optimizer into a pool and back, in place.

The tensor objects stay the same, so optimizers, tied layers and weak references that were made before keep working.
Tensors that shared memory before the move share a storage after it. Only parameters, buffers and gradients of the
module are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.nn.utils.prune import BasePruningMethod as _Pruning
from torch.nn.utils.spectral_norm import SpectralNorm as _SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm as _WeightNorm

from farpool.errors import ArgumentError, PoolFullError, PoolMixError, UnsupportedError
from farpool.memory.pool import Pool
from farpool.memory.pool.block_pool import BlockPool
from farpool.tensors.arena import arena_views, device_of, is_device
from farpool.tensors.arguments import inside_of, require_movable
from farpool.tensors.compilation import invalidate_guards
from farpool.tensors.factories import enters, materialize, moved_in, store, to_cpu
from farpool.tensors.geometry import element_range, is_strided, plain_empty, row_bytes_of
from farpool.tensors.identity import check_swappable, swap
from farpool.tensors.optimizers import Moved, moments_of, note_offload, offload_state
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.stacked import class_of_weight
from farpool.tensors.uninitialized import check_waits_for, is_uninitialized, move_when_initialized, stop_waiting

__all__ = ["move_out", "offload", "paged_together", "restore"]

_Owner = TypeVar("_Owner", bound=torch.nn.Module | torch.optim.Optimizer)
_OP = "farpool.offload"
_ALIGNMENT_BYTES = 512
"""Alignment of torch's own memory, on any device."""


@dataclass(slots=True)
class _Shared:
    """A group of tensors of a module that share memory."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    embedding: bool = True

    def byte_range(self) -> tuple[int, int]:
        ranges = [
            (first * tensor.itemsize, last * tensor.itemsize)
            for tensor in self.tensors
            for first, last in (element_range(tensor),)
            if last > first
        ]
        if not ranges:
            return 0, 0
        # Rounded down, so that each tensor keeps its alignment.
        return min(start for start, _ in ranges) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, max(stop for _, stop in ranges)


def _tensors_of(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor, bool]]:
    """For each parameter and buffer of a module, yield its name, its tensor, and whether it is an embedding table.

    If several parts of the module have the same tensor, it is yielded once for each part.
    """
    for prefix, part in module.named_modules(remove_duplicate=True):
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{prefix or 'the module'} is scripted or traced, so its tensors cannot be exchanged: drop it and pass "
                "the original module. A module that is scripted after farpool.offload(module, pool) computes with "
                "paged tensors"
            )
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                table = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and name == "weight"
                yield f"{prefix}.{name}" if prefix else name, tensor, table


def _detach_computed(module: torch.nn.Module) -> None:
    """Detach computed weights from their autograd graphs, because a graph holds the parameters that will be exchanged.

    torch's older weight norm, spectral norm and pruning keep such weights as attributes of a module, and compute them
    again before each forward pass.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _WeightNorm | _SpectralNorm):
                name = hook.name
            elif isinstance(hook, _Pruning):
                name = hook._tensor_name
            else:
                continue
            value = vars(part).get(name)
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(part, name, value.detach())


def _check(tensor: torch.Tensor, name: str, pool: BlockPool) -> None:
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        raise UnsupportedError(f"{name} is a {kind.__name__}: a pool takes Parameters and plain tensors only")
    if not is_strided(tensor):
        raise UnsupportedError(
            f"{name} is {tensor.layout} on {tensor.device}{', quantized' if tensor.is_quantized else ''}: "
            "a pool takes strided tensors with memory only"
        )
    _check_device(tensor, name, pool)
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None and not _is_pageable(grad) and grad.device != device_of(pool):
        raise UnsupportedError(
            f"the gradient of {name} is {grad.layout} on {grad.device} and stays there, but its parameter would "
            f"compute on {device_of(pool)}: drop it first, with zero_grad()"
        )
    if not tensor.is_leaf:
        raise UnsupportedError(f"{name} is the result of a computation with history: detach it first")
    check_swappable(tensor, name)


def _check_device(tensor: torch.Tensor, name: str, pool: BlockPool) -> None:
    if not enters(tensor, pool):
        device = device_of(pool)
        raise UnsupportedError(
            f"{name} is on {tensor.device}, the pool on {device}: move the module first, with module.to('cpu') or "
            f"module.to({str(device)!r})"
        )


def _collect(module: torch.nn.Module, pool: BlockPool) -> list[_Shared]:
    """Return the tensors to move into the pool, grouped by shared memory. Raise if one of them cannot be moved."""
    check_waits_for(module, pool)
    _detach_computed(module)
    shared: dict[int, _Shared] = {}
    seen: dict[int, _Shared] = {}
    for name, tensor, table in _tensors_of(module):
        if type(tensor) is PagedTensor:
            if tensor._storage.pool is not pool:
                raise PoolMixError(
                    f"{name} is in another pool already: take it out first, with farpool.restore(module)"
                )
            continue
        if is_uninitialized(tensor):
            _check_device(tensor, name, pool)
            continue
        group = seen.get(id(tensor))
        if group is None:
            _check(tensor, name, pool)
            group = shared.setdefault(tensor.untyped_storage()._cdata, _Shared())
            group.names.append(name)
            group.tensors.append(tensor)
            seen[id(tensor)] = group
        group.embedding &= table
    return list(shared.values())


def _is_pageable(grad: torch.Tensor) -> bool:
    return type(grad) is torch.Tensor and is_strided(grad) and not grad.requires_grad


def _twins(group: _Shared, pool: BlockPool) -> list[PagedTensor]:
    """Paged copies of a group's tensors. The copies share a storage, because the tensors share memory."""
    start, stop = group.byte_range()
    largest = max(group.tensors, key=lambda tensor: tensor.numel())
    row_bytes = row_bytes_of(largest.size(), largest.stride(), largest.itemsize)
    cls = "embedding" if group.embedding else class_of_weight(pool, largest.size(), row_bytes)
    arena = arena_views(pool)
    memory = largest.untyped_storage()
    source = plain_empty((0,), (1,), torch.uint8, largest.device).set_(memory, start, (stop - start,), (1,))
    storage = store(pool, source, _OP, cls=cls, row_bytes=row_bytes, name=group.names[0])
    del source, memory
    # After the copy, which would otherwise count as the first use and pack the storage.
    pool.pack_at_first_use(storage)
    paged: list[PagedTensor] = []
    for tensor in group.tensors:
        offset = tensor.storage_offset() - start // tensor.itemsize if tensor.numel() else 0
        twin = PagedTensor(
            storage,
            arena,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            offset,
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
            requires_grad=tensor.requires_grad,
        )
        grad = tensor.grad
        if grad is not None and _is_pageable(grad):
            twin.grad = moved_in(pool, grad, _OP, cls="gradient", name=storage.gradient_name)
        paged.append(twin)
    return paged


def _move_in(group: _Shared, pool: BlockPool) -> None:
    for tensor, twin in zip(group.tensors, _twins(group, pool), strict=True):
        swap(tensor, twin)


def paged_together(tensors: Mapping[str, torch.Tensor], pool: BlockPool) -> dict[str, torch.Tensor]:
    """Return a copy of a mapping in which paged copies without history replace the plain tensors.

    If tensors share memory, their copies share a storage.
    """
    shared: dict[int, _Shared] = {}
    for name, tensor in tensors.items():
        if type(tensor) is not PagedTensor:
            group = shared.setdefault(tensor.untyped_storage()._cdata, _Shared(embedding=False))
            group.names.append(name)
            group.tensors.append(tensor.detach())
    found = dict(tensors)
    with torch.no_grad():
        for group in shared.values():
            found.update(zip(group.names, _twins(group, pool), strict=True))
    return found


def offload(module: _Owner, pool: Pool, *, progress: Callable[[int, int], None] | None = None) -> _Owner:
    """Move all parameters and buffers of a module, or the moments of an optimizer, into a pool, in place.

    Parameters and buffers keep their identity, ties and aliases. Their existing gradients are paged, too, and so is
    each later gradient. Tensors that are already in this pool do not change. Parameters and buffers of lazy modules
    (``torch.nn.LazyLinear``) have no bytes yet; the first forward pass of a lazy module moves its tensors.

    You need not call this function for an optimizer: new moments of paged parameters are made in the pool,
    ``load_state_dict`` moves the moments that it loads, and the optimizer's next step moves moments that existed before
    the module was offloaded. Pass the optimizer if you want to move these moments now.

    Parameters
    ----------
    module : torch.nn.Module or torch.optim.Optimizer
        Any module on the pool's device or in host memory, or an optimizer whose parameters are in the pool. Bytes go
        from host memory to the lower tiers without passing a GPU, so a module may be larger than the GPU's memory.
    pool : Pool
        Pool that receives the tensors.
    progress : callable, optional
        Called after each storage with the bytes moved so far and the total.

    Returns
    -------
    torch.nn.Module or torch.optim.Optimizer
        The same object.

    Raises
    ------
    ArgumentError
        The arguments are swapped or have wrong types.
    UnsupportedError
        A tensor cannot be paged, or native code or an autograd graph holds it; the message names the tensor. Or no
        parameter of the optimizer is in the pool.
    PoolMixError
        A tensor is in another pool, or the first forward pass of its lazy module would move it into another pool.
    PoolFullError
        The pool has no room. The first forward pass of a lazy module may raise this, too. Run that pass again when the
        pool has room.

    Notes
    -----
    If `offload` raises, the module or the optimizer is as it was before the call.
    """
    require_movable(module, "offload")
    blocks = inside_of(pool, "offload")
    if isinstance(module, torch.optim.Optimizer):
        _offload_optimizer(module, blocks, progress)
        return module
    _move_module_in(module, blocks, progress)
    move_when_initialized(module, blocks, _move_module_in)
    return module


def _move_module_in(
    module: torch.nn.Module, blocks: BlockPool, progress: Callable[[int, int], None] | None = None
) -> None:
    groups = _collect(module, blocks)
    sizes = [stop - start for start, stop in (group.byte_range() for group in groups)]
    done = 0
    moved: Moved = []
    try:
        with torch.no_grad():
            for group, nbytes in zip(groups, sizes, strict=True):
                device = group.tensors[0].device
                _move_in(group, blocks)
                moved.extend((tensor, device) for tensor in group.tensors)
                done += nbytes
                if progress is not None:
                    progress(done, sum(sizes))
    except BaseException:
        _move_back(moved)
        raise
    finally:
        note_offload()
        invalidate_guards(module)


def _offload_optimizer(
    optimizer: torch.optim.Optimizer, pool: BlockPool, progress: Callable[[int, int], None] | None
) -> None:
    moved: Moved = []
    try:
        offload_state(optimizer, pool, progress, moved)
    except BaseException:
        _move_back(moved)
        raise


def _move_back(moved: Moved) -> None:
    for device in {device for _, device in moved}:
        move_out([tensor for tensor, of in moved if of == device and type(tensor) is PagedTensor], device)


def restore(module: _Owner, *, device: torch.device | str | None = None) -> _Owner:
    """Undo `offload`: make the paged tensors of a module (and their gradients) or of an optimizer plain, in place.

    The moments of the module's optimizer stay in the pool until you pass the optimizer, too.

    Parameters
    ----------
    module : torch.nn.Module or torch.optim.Optimizer
    device : torch.device or str, optional
        Device of the plain tensors: the pool's device by default, or ``"cpu"``, which a module needs that does not fit
        into the memory of the GPU.

    Returns
    -------
    torch.nn.Module or torch.optim.Optimizer
        The same object.

    Raises
    ------
    ArgumentError
        The first argument is neither a module nor an optimizer, or `device` is neither the CPU nor the pool's device.
    UnsupportedError
        Native code or an autograd graph holds a tensor; nothing was changed.
    PoolClosedError
        The pool is closed, so the bytes of the tensors are gone.
    """
    require_movable(module, "restore")
    if isinstance(module, torch.optim.Optimizer):
        move_out(moments_of(module), device)
        return module
    _detach_computed(module)
    paged: dict[int, PagedTensor] = {}
    for name, tensor, _ in _tensors_of(module):
        if type(tensor) is PagedTensor:
            check_swappable(tensor, name)
            paged[id(tensor)] = tensor
    try:
        move_out(list(paged.values()), device)
    finally:
        invalidate_guards(module)
    stop_waiting(module)
    return module


def move_out(tensors: list[PagedTensor], device: torch.device | str | None = None) -> None:
    """Make leaves and their gradients plain, in place. Tensors that shared a storage share memory afterwards.

    The plain tensors are on `device`, which is the CPU or, like None, the pool's device.

    Storages are moved one by one. After an error, the tensors of the storages moved so far are plain, and all other
    tensors are still paged.
    """
    groups: dict[int, list[PagedTensor]] = {}
    for tensor in tensors:
        if device is not None and not is_device(device, tensor.device) and torch.device(device).type != "cpu":
            raise ArgumentError(
                f"device is {str(device)!r}, and the tensors can become plain on 'cpu' or {str(tensor.device)!r}"
            )
        groups.setdefault(id(tensor._storage), []).append(tensor)
    waiting = list(groups.values())
    plain_copy = to_cpu if device is not None and torch.device(device).type == "cpu" else materialize
    with torch.no_grad():
        while waiting:
            # In a full pool there may be no room to fetch a storage. Resident storages need no room, and release some.
            full: list[tuple[list[PagedTensor], PoolFullError]] = []
            for group in waiting:
                try:
                    _move_group_out(group, plain_copy)
                except PoolFullError as error:
                    full.append((group, error.with_traceback(None)))  # the error's frames hold tensors
            if len(full) == len(waiting):
                raise full[0][1]
            waiting = [group for group, _ in full]


def _move_group_out(group: list[PagedTensor], plain_copy: Callable[[PagedTensor], torch.Tensor]) -> None:
    """Make leaves of one storage plain. Release the storage at once, because the next storage may need its room."""
    # All copies exist before the first tensor changes, so a tier that fails leaves the whole group paged.
    plain = _plain_group(group, plain_copy)
    gradients = [
        _plain_gradient(tensor.grad, twin.device, plain_copy) for tensor, twin in zip(group, plain, strict=True)
    ]
    for tensor, twin, gradient in zip(group, plain, gradients, strict=True):
        if gradient is not None:
            former = tensor.grad
            assert former is not None
            tensor.grad = None
            swap(former, gradient)
            twin.grad = former
        swap(tensor, twin)


def _plain_gradient(
    gradient: torch.Tensor | None, device: torch.device, plain_copy: Callable[[PagedTensor], torch.Tensor]
) -> torch.Tensor | None:
    """The plain gradient of a leaf that becomes plain on a device; None if the gradient can stay as it is."""
    if type(gradient) is PagedTensor:
        return plain_copy(gradient)
    if gradient is None or gradient.device == device:
        return None
    return gradient.to(device)  # a sparse one, or one that the program has set; torch wants it beside its leaf


def _plain_group(group: list[PagedTensor], plain_copy: Callable[[PagedTensor], torch.Tensor]) -> list[torch.Tensor]:
    """Plain copies of paged tensors that share one storage; the copies share memory."""
    storage = group[0]._storage
    source = PagedTensor(storage, group[0]._arena, torch.uint8, (storage.nbytes,), (1,))
    memory = plain_copy(source).untyped_storage()
    made = []
    for tensor in group:
        plain = plain_empty((0,), (1,), tensor.dtype, memory.device)
        plain.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            torch._C._set_conj(plain, True)
        if tensor.is_neg():
            torch._C._set_neg(plain, True)
        if isinstance(tensor, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, tensor.requires_grad)
        else:
            plain.requires_grad_(tensor.requires_grad)
        made.append(plain)
    return made
