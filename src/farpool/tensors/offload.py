"""Moving the tensors of a module into a pool and back, in place.

The objects stay what the program holds: an optimizer, a tied layer or a weak reference made before goes on working.
Tensors that shared memory share a storage; what is not a parameter or buffer of the module is left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from farpool.errors import PoolMixError, UnsupportedError
from farpool.tensors.arena import arena_views, device_of
from farpool.tensors.arguments import require_module, require_pool
from farpool.tensors.compilation import invalidate_guards
from farpool.tensors.factories import from_tensor, materialize
from farpool.tensors.geometry import element_range, is_strided, plain_empty, row_bytes_of
from farpool.tensors.identity import check_swappable, swap
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.transfer import copy_dense

if TYPE_CHECKING:
    from farpool.pool import BlockPool

__all__ = ["materialize_all", "offload", "paged_together", "restore"]

_ALIGNMENT = 512
"""What torch's own memory is aligned to, on any device."""


@dataclass(slots=True)
class _Shared:
    """Tensors of a module that share memory."""

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
        # Rounded, so that each tensor keeps its alignment.
        return min(start for start, _ in ranges) // _ALIGNMENT * _ALIGNMENT, max(stop for _, stop in ranges)


def _tensors_of(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor, bool]]:
    """Name, tensor, and whether it is a table of embeddings; a tensor comes once for each place that holds it."""
    for prefix, part in module.named_modules(remove_duplicate=True):
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{prefix or 'the module'} is scripted, its tensors cannot be exchanged: offload before"
            )
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                table = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and name == "weight"
                yield f"{prefix}.{name}" if prefix else name, tensor, table


def _check(tensor: torch.Tensor, name: str, pool: BlockPool) -> None:
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        raise UnsupportedError(f"{name} is a {kind.__name__}: a pool takes Parameters and plain tensors only")
    if not is_strided(tensor):
        raise UnsupportedError(
            f"{name} is {tensor.layout} on {tensor.device}{', quantized' if tensor.is_quantized else ''}: "
            "a pool takes strided tensors with memory only"
        )
    device = device_of(pool)
    if tensor.device != device:
        raise UnsupportedError(
            f"{name} is on {tensor.device}, the pool on {device}: move the module first, with "
            f"module.to({str(device)!r})"
        )
    if not tensor.is_leaf:
        raise UnsupportedError(f"{name} is the result of a computation with history: detach it first")
    check_swappable(tensor, name)


def _collect(module: torch.nn.Module, pool: BlockPool) -> list[_Shared]:
    """What there is to move, checked, grouped by shared memory."""
    shared: dict[int, _Shared] = {}
    seen: dict[int, _Shared] = {}
    for name, tensor, table in _tensors_of(module):
        if type(tensor) is PagedTensor:
            if tensor._storage.pool is not pool:
                raise PoolMixError(
                    f"{name} is in another pool already: take it out first, with farpool.restore(module)"
                )
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


def _twins(group: _Shared, pool: BlockPool) -> list[PagedTensor]:
    """Paged copies of the group's tensors, which share a storage as these share memory."""
    start, stop = group.byte_range()
    largest = max(group.tensors, key=lambda tensor: tensor.numel())
    storage = pool.allocate(
        stop - start,
        cls="embedding" if group.embedding else "weights",
        row_bytes=row_bytes_of(largest),
        name=group.names[0],
    )
    arena = arena_views(pool)
    memory = largest.untyped_storage()
    source = plain_empty((0,), (1,), torch.uint8, largest.device).set_(memory, start, (stop - start,), (1,))
    copy_dense(PagedTensor(storage, arena, torch.uint8, (stop - start,), (1,)), source, "farpool.offload")
    del source, memory
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
        if grad is not None and type(grad) is torch.Tensor and is_strided(grad) and not grad.requires_grad:
            twin.grad = from_tensor(pool, grad, cls="gradient", name=f"{storage.name}.grad")
        paged.append(twin)
    return paged


def _move_in(group: _Shared, pool: BlockPool) -> None:
    for tensor, twin in zip(group.tensors, _twins(group, pool), strict=True):
        swap(tensor, twin)


def paged_together(tensors: Mapping[str, torch.Tensor], pool: BlockPool) -> dict[str, torch.Tensor]:
    """Paged copies of those that are plain, without history; what shared memory shares a storage."""
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


def offload(
    module: torch.nn.Module, pool: BlockPool, *, progress: Callable[[int, int], None] | None = None
) -> torch.nn.Module:
    """Move all parameters and buffers of a module into a pool, in place.

    Parameters and buffers keep their identity, ties and aliases. Their gradients, those that exist and those that are
    computed from now on, are paged too. What is in this pool already stays there.

    Parameters
    ----------
    module : torch.nn.Module
        Any module on the pool's device.
    pool : BlockPool
        Where its tensors go.
    progress : callable, optional
        Called with the bytes moved and the bytes altogether after each storage.

    Returns
    -------
    torch.nn.Module
        The same module.

    Raises
    ------
    ArgumentError
        The arguments are swapped, or are no module and no pool.
    UnsupportedError
        A tensor is of a kind that cannot be paged, or something holds it; its name is in the message.
    PoolMixError
        A tensor is in another pool.
    PoolFullError
        The pool has no room.

    Notes
    -----
    If it fails, the module is plain as it was before.
    """
    require_module(module, "offload")
    require_pool(pool, "offload")
    groups = _collect(module, pool)
    sizes = [stop - start for start, stop in (group.byte_range() for group in groups)]
    done = 0
    moved: list[torch.Tensor] = []
    try:
        with torch.no_grad():
            for group, nbytes in zip(groups, sizes, strict=True):
                _move_in(group, pool)
                moved.extend(group.tensors)
                done += nbytes
                if progress is not None:
                    progress(done, sum(sizes))
    except BaseException:
        _move_out([tensor for tensor in moved if type(tensor) is PagedTensor])
        raise
    finally:
        invalidate_guards(module)
    return module


def restore(module: torch.nn.Module) -> torch.nn.Module:
    """Undo `offload`: all paged parameters and buffers of a module, and their gradients, become plain again, in place.

    Raises
    ------
    ArgumentError
        It is no module.
    UnsupportedError
        A tensor is held by an autograd graph; nothing was changed.
    PoolClosedError
        The pool is closed, its bytes are gone.
    """
    require_module(module, "restore")
    paged: dict[int, PagedTensor] = {}
    for name, tensor, _ in _tensors_of(module):
        if type(tensor) is PagedTensor:
            check_swappable(tensor, name)
            paged[id(tensor)] = tensor
    try:
        _move_out(list(paged.values()))
    finally:
        invalidate_guards(module)
    return module


def materialize_all(pool: BlockPool) -> None:
    """Make every tensor that lives in a pool plain, in place.

    Raises
    ------
    UnsupportedError
        A tensor has history or is held by an autograd graph; nothing was changed.
    """
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) is PagedTensor and value._storage.pool is pool]
    gradients = {id(tensor.grad) for tensor in found if tensor.is_leaf and tensor.grad is not None}
    found = [tensor for tensor in found if id(tensor) not in gradients]
    bases = {id(tensor._base) for tensor in found if tensor._base is not None}
    for tensor in found:
        if not tensor.is_leaf:
            raise UnsupportedError(f"{describe(tensor)} is a view with history: drop it, or detach it first")
        # A base is held by its views, which become plain before it.
        if id(tensor) not in bases:
            check_swappable(tensor, describe(tensor))
    found.sort(key=lambda tensor: id(tensor) in bases)
    _move_out(found)


def _move_out(tensors: list[PagedTensor]) -> None:
    groups: dict[int, list[PagedTensor]] = {}
    for tensor in tensors:
        groups.setdefault(id(tensor._storage), []).append(tensor)
    with torch.no_grad():
        for group in groups.values():
            storage = group[0]._storage
            source = PagedTensor(storage, group[0]._arena, torch.uint8, (storage.nbytes,), (1,))
            memory = materialize(source).untyped_storage()
            del source
            for tensor in group:
                plain = plain_empty((0,), (1,), tensor.dtype, tensor.device)
                plain.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
                if tensor.is_conj():
                    torch._C._set_conj(plain, True)
                if tensor.is_neg():
                    torch._C._set_neg(plain, True)
                if isinstance(tensor, torch.nn.Parameter):
                    plain = torch.nn.Parameter(plain, tensor.requires_grad)
                else:
                    plain.requires_grad_(tensor.requires_grad)
                if type(tensor.grad) is PagedTensor:
                    plain.grad = materialize(tensor.grad)
                swap(tensor, plain)
