"""Tensors that autograd saves for the backward pass, kept in a pool instead of in plain memory.

A saved tensor is stored as an *image*: the bytes of a range of the memory that it views. Tensors that view the same
memory share an image. A tensor that is read back has the same bits, shape and strides, and the same alignment in
memory, because kernels choose their order of computing by all of these.

Some tensors stay where they are, with a reference as autograd itself would keep it: those that cost no plain memory of
their own (parameters, paged tensors, and memory that turned out to live on after the backward pass, such as buffers),
and those that a pool cannot hold. Hooks switch autograd's own check for changes in place off, so it is made here.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from farpool.errors import FarpoolError, PoolClosedError
from farpool.memory.pager.storage import Storage
from farpool.memory.pool import Pool
from farpool.memory.pool.block_pool import BlockPool
from farpool.tensors.arena import arena_views, device_of
from farpool.tensors.arguments import inside_of
from farpool.tensors.geometry import element_range, is_strided, plain_empty
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.saving_steps import Step, plan_of
from farpool.tensors.transfer import copy_dense, equal_dense, streamable

__all__ = ["SavedBytes", "SavedTensors", "Saver", "saved_tensors"]

_OP = "farpool.saved_tensors"
_SMALL_BYTES = 64 << 10
"""Memory below this many bytes is not worth moving."""
_ALIGNMENT_BYTES = 512
"""Images begin at multiples of this in the memory that they are taken from."""
_ADDRESS_BYTES = 64
"""A tensor that is read back has the original's address modulo this, which is the widest alignment of CPU kernels."""
_WORD_BYTES = 8
_SIBLINGS_MAX = 4
"""A view with gaps is stored with the gaps if the whole memory is at most so many times as large as the view. The gaps
are other parts of a split as a rule, which autograd saves too."""
_SWEEP_MIN = 256
"""Number of known origins at which the dead ones among them are first looked for."""


class SavedTensors(saved_tensors_hooks):
    """The context manager that `saved_tensors` returns. It may be entered several times, also by several threads."""

    def __init__(self, saver: Saver) -> None:
        super().__init__(saver, _unpack)
        self._saver = saver

    def __enter__(self) -> Self:  # type: ignore[override]
        self._saver.plan.enter(self._saver.pool)
        try:
            super().__enter__()
        except BaseException:
            self._saver.plan.leave()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._saver.plan.leave()
        super().__exit__(*exc)

    def explain(self) -> str:
        """Return what each region of `farpool.checkpoint` costs in this pool, and the choice for its next call.

        A line tells the calls of the last step, the time to compute their forward pass again, the bytes that they
        save, the time to copy these into the pool and out of it, and how long the step would wait for the links to
        lower tiers in addition.
        """
        return self._saver.plan.report()


class Saver:
    """The function that stores saved tensors in a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.device = device_of(pool)
        self.plan = plan_of(pool, self.device)
        with _changing:
            origins = _origins.get(pool)
            if origins is None:
                origins = _origins[pool] = _Origins()
        self.origins = origins

    def __call__(self, tensor: torch.Tensor) -> _Saved | _Kept:
        if _stays(tensor, self.device):
            return _Kept.of(tensor)
        try:
            return self._store(tensor)
        except FarpoolError as error:
            traceback.clear_frames(error.__traceback__)  # they hold a tensor, which would live in the pool with them
            error.add_note(
                f"autograd was saving a tensor {list(tensor.size())} of {tensor.dtype} for the backward pass "
                "(farpool.saved_tensors). The operation has no result; weights and gradients are as before"
            )
            raise

    def _store(self, tensor: torch.Tensor) -> _Saved | _Kept:
        step = self.plan.step
        if step is None or not step.measured:
            return _pack(tensor, self.pool, self.origins, None)
        start = step.mark()
        saved = _pack(tensor, self.pool, self.origins, step)
        step.saved(start)
        return saved


def saved_tensors(pool: Pool) -> SavedTensors:
    """A context manager: tensors that autograd saves inside it live in a pool until the backward pass needs them.

    The saved tensors count in the pool's budget, as the class "activation", and move to lower tiers if the fast tier
    has no room. Run the forward pass inside; the backward pass may be inside or outside, before the pool is closed.
    Losses and gradients have the bits of a run without it. A tensor that is saved several times is stored once.

    These stay in plain memory, by reference, as without the context: parameters and views of them; paged tensors;
    memory below 64 KiB; sparse, quantized and nested tensors, and subclasses; tensors on another device than the
    pool's; and memory that outlived an earlier backward pass for which it had been stored (buffers, for example).

    Parameters
    ----------
    pool : Pool

    Returns
    -------
    SavedTensors
        The context manager, one of `torch.autograd.graph.saved_tensors_hooks`. It may be entered several times, also
        by several threads. Its `explain()` tells the choices for parts of the model inside `farpool.checkpoint`.

    Raises
    ------
    ArgumentError
        `pool` is not a `Pool`.
    PoolClosedError
        The pool is closed. A backward pass raises this too if its forward pass used a pool that has been closed since.
    PoolFullError
        Raised by operations inside: the pool has no room for a tensor. The graph lacks that operation, and everything
        else is as before.

    Examples
    --------
    >>> with farpool.saved_tensors(pool):
    ...     loss = model(inputs).square().mean()
    >>> loss.backward()
    """
    blocks = inside_of(pool, "saved_tensors")
    if blocks.closed:
        raise PoolClosedError("farpool.saved_tensors: the pool is closed: make a new one with farpool.Pool(...)")
    return SavedTensors(Saver(blocks))


# ---- tensors that stay -----------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A saved tensor that stays in its memory, and its version when it was saved."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kept:
        if tensor.numel() == 0 and type(tensor) is torch.Tensor and streamable(tensor) and is_strided(tensor):
            # A view without elements must not keep the memory that it views.
            return _Kept(plain_empty(tensor.size(), tensor.stride(), tensor.dtype, tensor.device), 0)
        # A reference to the tensor itself would form a cycle with its own graph.
        return _Kept(tensor.detach(), tensor._version)

    def unpack(self) -> torch.Tensor:
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.size())}] is at version {found}; expected version "
                f"{self.version} instead. It was saved inside farpool.saved_tensors, which keeps it by reference"
            )
        return self.tensor


def _has_own_place(tensor: torch.Tensor) -> bool:
    """Return True if a saved tensor takes no memory of its own: a leaf of the graph, a view of one, a paged tensor."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter | PagedTensor) or (base.is_leaf and base.requires_grad)


def _stays(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if a tensor is kept by reference, whatever is known of its memory."""
    return (
        _has_own_place(tensor)
        or type(tensor) is not torch.Tensor
        or tensor.device != device
        or not is_strided(tensor)
        or not torch._C._has_storage(tensor)
        or tensor.numel() == 0
        or tensor.untyped_storage().nbytes() < _SMALL_BYTES
    )


# ---- images ----------------------------------------------------------------------------------------------------------


class _Geometry(NamedTuple):
    """Where the elements of a view are in its memory; dimensions that repeat their elements have one element here."""

    dtype: torch.dtype
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Geometry:
        stride = tuple(tensor.stride())
        size = tuple(1 if step == 0 else extent for extent, step in zip(tensor.size(), stride, strict=True))
        return _Geometry(tensor.dtype, int(tensor.storage_offset()), size, stride)

    def needed(self) -> int:
        """Bytes of the elements."""
        count = self.dtype.itemsize
        for extent in self.size:
            count *= extent
        return count


class _Restored(NamedTuple):
    """Memory that an image was read back to, as long as it lives, and an empty tensor with its number of changes."""

    asker: object
    memory: StorageWeakRef
    changes: torch.Tensor


class _Image:
    """Bytes of a range of some memory, in a pool.

    Attributes
    ----------
    storage : Storage
    start : int
        Position in the original memory of the first byte.
    shift : int
        Bytes that are left free before the range when it is read back, so that its address has the same alignment.
    gapped : _Geometry or None
        The view whose elements alone are stored, one after the other. None if the image is a range of memory.
    """

    __slots__ = ("__weakref__", "_origin", "_restored", "gapped", "shift", "start", "storage")

    def __init__(self, storage: Storage, start: int, shift: int, gapped: _Geometry | None, origin: _Origin) -> None:
        self.storage = storage
        self.start = start
        self.shift = shift
        self.gapped = gapped
        self._origin = origin
        self._restored: _Restored | None = None

    def flat(self, start: int, stop: int) -> PagedTensor:
        """Bytes ``[start, stop)`` of the stored bytes as a paged tensor."""
        dtype = _word(start, stop)
        with torch.no_grad():
            count = (stop - start) // dtype.itemsize
            arena = arena_views(self.storage.pool)
            return PagedTensor(self.storage, arena, dtype, (count,), (1,), start // dtype.itemsize)

    def restore(self) -> tuple[torch.UntypedStorage, torch.Tensor]:
        """Plain memory with the stored bytes, `shift` bytes after its start.

        A node of a graph may save several views of one image, which then share the memory, as they did before. Once one
        of them was changed in place, the next one gets memory of its own.

        Returns
        -------
        torch.UntypedStorage, torch.Tensor
            The memory, and an empty tensor that counts the changes in place of all tensors of this memory.
        """
        asker = _asker(self.storage.pool.device)
        restored = self._restored  # another thread may exchange it
        if restored is not None and asker is not None and restored.asker == asker and restored.changes._version == 0:
            living: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(restored.memory.cdata)
            if living is not None:
                return living, restored.changes
        nbytes = self.storage.nbytes
        device = arena_views(self.storage.pool).device
        memory = plain_empty((nbytes + self.shift,), (1,), torch.uint8, device).untyped_storage()
        copy_dense(_raw(memory, self.shift, self.shift + nbytes), self.flat(0, nbytes), _OP)
        changes = plain_empty((0,), (1,), torch.uint8, device)
        self._restored = _Restored(asker, StorageWeakRef(memory), changes)  # type: ignore[no-untyped-call]
        return memory, changes

    def __del__(self) -> None:
        # May run at any moment, so it takes no lock. An image that was not read is of a graph without a backward pass.
        origin = self._origin
        if self._restored is not None and origin.alive():
            origin.outlived = True


class _Origin:
    """Memory of which a pool has images, as long as that memory lives.

    Attributes
    ----------
    memory : StorageWeakRef
        Does not keep the bytes, but no other memory gets the same identity while it exists.
    version : int
        Version of the tensors that the images were made of.
    images : list of weakref.ref
    outlived : bool
        True if the memory lived longer than an image that a backward pass has read: to store it frees nothing.
    """

    __slots__ = ("images", "memory", "outlived", "version")

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        self.version = -1
        self.images: list[weakref.ref[_Image]] = []
        self.outlived = False

    def alive(self) -> bool:
        return not self.memory.expired()  # type: ignore[no-untyped-call]


class _Origins:
    """All origins of one pool. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, _Origin] = {}
        self._lock = threading.RLock()  # the collector may run code of ours in a thread that holds it
        self._sweep_at = _SWEEP_MIN

    def of(self, memory: torch.UntypedStorage) -> _Origin:
        with self._lock:
            if len(self._known) >= self._sweep_at:
                self._known = {key: one for key, one in self._known.items() if one.alive()}
                self._sweep_at = max(_SWEEP_MIN, 2 * len(self._known))
            key = memory._cdata
            origin = self._known.get(key)
            if origin is None:
                origin = self._known[key] = _Origin(memory)
            return origin

    def images(self, origin: _Origin, version: int) -> list[_Image]:
        """The living images of this version of the memory."""
        with self._lock:
            if origin.version != version:
                origin.version, origin.images = version, []
            living = [(ref, image) for ref in origin.images if (image := ref()) is not None]
            origin.images = [ref for ref, _ in living]
            return [image for _, image in living]

    def add(self, origin: _Origin, version: int, image: _Image) -> None:
        with self._lock:
            if origin.version == version:
                origin.images.append(weakref.ref(image))


_origins: weakref.WeakKeyDictionary[BlockPool, _Origins] = weakref.WeakKeyDictionary()
_changing = threading.Lock()


@dataclass(slots=True, eq=False)
class _Saved:
    """A saved tensor whose bytes are in an image."""

    image: _Image
    geometry: _Geometry
    size: torch.Size
    conj: bool
    neg: bool
    step: Step | None

    def unpack(self) -> torch.Tensor:
        if self.step is None:
            return self._restored()
        start = self.step.mark()
        tensor = self._restored()
        self.step.read(start)
        return tensor

    def _restored(self) -> torch.Tensor:
        image, geometry = self.image, self.geometry
        memory, version = image.restore()
        itemsize = geometry.dtype.itemsize
        if image.gapped is None:
            first = (image.shift - image.start) // itemsize + geometry.first
        else:
            packed = _view(memory, geometry.dtype, 0, geometry.size, _row_major(geometry.size))
            extent = 1 + sum((count - 1) * step for count, step in zip(geometry.size, geometry.stride, strict=True))
            memory = plain_empty((extent,), (1,), geometry.dtype, packed.device).untyped_storage()
            first = 0
            _view(memory, geometry.dtype, 0, geometry.size, geometry.stride).copy_(packed)
            version = packed
        # All views of the memory count changes in place together, as views of the original memory do.
        tensor = version.detach()
        tensor.data = _view(memory, geometry.dtype, first, self.size, geometry.stride)
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        return tensor


def _pack(tensor: torch.Tensor, pool: BlockPool, origins: _Origins, step: Step | None) -> _Saved | _Kept:
    memory = tensor.untyped_storage()
    origin = origins.of(memory)
    if origin.outlived:
        return _Kept.of(tensor)
    geometry, version = _Geometry.of(tensor), tensor._version
    itemsize = geometry.dtype.itemsize
    first, last = element_range(tensor)
    start, stop = first * itemsize, last * itemsize
    image = _find(origins.images(origin, version), memory, geometry, start, stop)
    if image is None:
        whole, needed = memory.nbytes(), geometry.needed()
        gapped = None
        if stop - start > needed:
            if whole <= _SIBLINGS_MAX * needed:
                start, stop = 0, whole
            else:
                gapped = geometry
        image = _store(memory, start, stop, gapped, pool, origin)
        origins.add(origin, version, image)
        if step is not None:
            step.stored += image.storage.nbytes
    return _Saved(image, geometry, tensor.size(), tensor.is_conj(), tensor.is_neg(), step)


class SavedBytes:
    """Counts what tensors would take in a pool, without storing them. Memory of the tensors `known` does not count."""

    def __init__(self, saver: Saver, known: Iterable[torch.Tensor]) -> None:
        self._saver = saver
        # A reference keeps the identity of freed memory from being used again.
        self._memories: dict[int, StorageWeakRef] = {}
        self._counted: dict[tuple[int, int], tuple[bool, int]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known if torch._C._has_storage(tensor)}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that autograd saves."""
        if _has_own_place(tensor) or not is_strided(tensor) or not torch._C._has_storage(tensor):
            return
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._known or self._saver.origins.of(memory).outlived:
            return
        self._memories.setdefault(key, StorageWeakRef(memory))  # type: ignore[no-untyped-call]
        stays = _stays(tensor, self._saver.device)
        _, needed = self._counted.get((key, tensor._version), (stays, 0))
        self._counted[key, tensor._version] = stays, min(memory.nbytes(), needed + _Geometry.of(tensor).needed())

    def total(self, *, stays: bool) -> int:
        """Bytes that would go into the pool, or that would stay in plain memory."""
        return sum(needed for kind, needed in self._counted.values() if kind == stays)


def _find(
    images: list[_Image], memory: torch.UntypedStorage, geometry: _Geometry, start: int, stop: int
) -> _Image | None:
    """Find an image with the bytes of a view.

    The bytes are compared: code outside of autograd, and a tensor's `data`, change memory without changing its version.
    """
    for image in images:
        if image.gapped is not None:
            if image.gapped == geometry:
                packed = _packed(memory, geometry)
                if equal_dense(image.flat(0, packed.nbytes()), _raw(packed, 0, packed.nbytes()), _OP):
                    return image
        elif image.start <= start and stop <= image.start + image.storage.nbytes:
            begin = start // _WORD_BYTES * _WORD_BYTES
            end = min(-(-stop // _WORD_BYTES) * _WORD_BYTES, image.start + image.storage.nbytes)
            stored = image.flat(begin - image.start, end - image.start)
            if equal_dense(stored, _raw(memory, begin, end), _OP):
                return image
    return None


def _store(
    memory: torch.UntypedStorage, start: int, stop: int, gapped: _Geometry | None, pool: BlockPool, origin: _Origin
) -> _Image:
    """Copy bytes ``[start, stop)`` of some memory, or the elements of a view with gaps, into a pool."""
    if gapped is None:
        start = start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        stop = min(-(-stop // _WORD_BYTES) * _WORD_BYTES, memory.nbytes())
        source = memory
        shift = (memory.data_ptr() + start) % _ADDRESS_BYTES
        if shift % 16:  # no allocator aligns to less, and no element is larger
            shift = 0
    else:
        source = _packed(memory, gapped)
        start, stop, shift = 0, source.nbytes(), 0
    # A backward pass that ends in the middle has changed gradients, so what is stored has to be readable.
    image = _Image(pool.allocate(stop - start, cls="activation", exchange=True), start, shift, gapped, origin)
    copy_dense(image.flat(0, stop - start), _raw(source, start, stop), _OP)
    return image


def _unpack(saved: _Saved | _Kept) -> torch.Tensor:
    try:
        with torch.no_grad():
            return saved.unpack()
    except PoolClosedError as error:
        error.add_note(
            "the forward pass ran inside farpool.saved_tensors(pool), and the pool was closed before the backward pass"
        )
        raise


# ---- raw memory ------------------------------------------------------------------------------------------------------


def _word(start: int, stop: int) -> torch.dtype:
    """The type of elements in which a range of bytes is moved and compared; larger ones are compared faster."""
    return torch.uint8 if start % _WORD_BYTES or stop % _WORD_BYTES else torch.int64


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _view(
    memory: torch.UntypedStorage, dtype: torch.dtype, first: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    empty = plain_empty((0,), (1,), dtype, memory.device)
    return torch.ops.aten.set_.source_Storage_storage_offset(empty, memory, first, size, stride)  # type: ignore[no-any-return]


def _raw(memory: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """Bytes ``[start, stop)`` of plain memory as a one-dimensional tensor."""
    dtype = _word(start, stop)
    return _view(memory, dtype, start // dtype.itemsize, ((stop - start) // dtype.itemsize,), (1,))


def _packed(memory: torch.UntypedStorage, geometry: _Geometry) -> torch.UntypedStorage:
    """A plain copy of the elements of a view, one after the other."""
    size = geometry.size
    packed = plain_empty(size, _row_major(size), geometry.dtype, memory.device)
    packed.copy_(_view(memory, geometry.dtype, geometry.first, size, geometry.stride))
    return packed.untyped_storage()


def _asker(device: str) -> Any:
    """The backward pass, thread and stream that a saved tensor is read back for; None outside of a backward pass."""
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    return task, threading.get_ident(), stream
