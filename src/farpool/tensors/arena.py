"""Real tensors: views of the arena on which an operation runs. They are valid only while its blocks are pinned."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farpool.tensors.survivors import look_for_survivors, note

if TYPE_CHECKING:
    from farpool.memory.pager.storage import StorageOwner

__all__ = ["ArenaViews", "arena_views", "device_of", "is_device"]


class ArenaViews:
    """Views of a pool's whole arena, one for each dtype; a view is made when it is first needed.

    Each view covers all addresses that are reserved for the arena, so it stays valid when the budget changes.

    Attributes
    ----------
    start, stop : int
        Address of the arena's first byte, and the address after its last byte.
    storage : torch.UntypedStorage
        Storage of all bytes of the arena.
    device : torch.device
        The arena's device.
    debug : bool
        True to check that the tensors made here do not outlive their operation (`farpool.tensors.survivors`).
    """

    __slots__ = ("_bytes", "_typed", "debug", "device", "start", "stop", "storage")

    def __init__(self, pool: StorageOwner) -> None:
        self.debug = pool.debug
        if self.debug:
            look_for_survivors()
        # A view made under inference mode would refuse in-place operations outside of it.
        with torch.inference_mode(False):
            arena: Any = pool.arena
            self._bytes: torch.Tensor = (
                arena.tensor if pool.device == "cuda" else torch.frombuffer(arena.view(), dtype=torch.uint8)
            )
        self.storage = self._bytes.untyped_storage()
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self.device = self._bytes.device
        self.start = self._bytes.data_ptr()
        self.stop = self.start + self._bytes.numel()

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole arena as a one-dimensional tensor of `dtype`."""
        view = self._typed.get(dtype)
        if view is None:
            with torch.inference_mode(False):
                usable = self._bytes.numel() // dtype.itemsize * dtype.itemsize
                view = self._bytes[:usable].view(dtype)
            self._typed[dtype] = view
        return view

    def memory(self, start: int, stop: int) -> torch.UntypedStorage:
        """Bytes ``[start, stop)`` of the arena as a separate torch storage.

        A tensor on this storage cannot be resized into the bytes next to it.
        """
        memory: torch.UntypedStorage = self.storage[start:stop]
        if self.debug:
            note(memory)
        return memory

    def flat(self, dtype: torch.dtype, elements: int, address: int) -> torch.Tensor:
        """A real one-dimensional tensor of `elements` elements that begins `address` bytes after the arena's start."""
        view = torch.as_strided(self.typed(dtype), (elements,), (1,), address // dtype.itemsize)
        if self.debug:
            note(view)
        return view

    def shaped(self, dtype: torch.dtype, size: tuple[int, int, int, int], address: int) -> torch.Tensor:
        """A real contiguous tensor of four dimensions that begins `address` bytes after the arena's start."""
        _, second, third, fourth = size
        stride = (second * third * fourth, third * fourth, fourth, 1)
        view = torch.as_strided(self.typed(dtype), size, stride, address // dtype.itemsize)
        if self.debug:
            note(view)
        return view

    def windows(self, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A view ``[any, *size]`` of the arena as overlapping items. Item ``i`` begins at the arena's element ``i``."""
        typed = self.typed(dtype)
        extent = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        view = torch.as_strided(typed, (typed.numel() - extent + 1, *size), (1, *stride))
        if self.debug:
            note(view)
        return view

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Return True if a plain strided tensor shares memory with the arena."""
        if tensor.numel() == 0:
            # An empty view has no address of its own, but could be resized into its neighbours.
            return tensor.device == self.device and self.start <= tensor.untyped_storage().data_ptr() < self.stop
        return self.start <= tensor.data_ptr() < self.stop


def device_of(pool: StorageOwner) -> torch.device:
    """Device of a pool's tensors."""
    arena: Any = pool.arena
    return arena.tensor.device if pool.device == "cuda" else torch.device("cpu")


def is_device(asked: Any, device: torch.device) -> bool:
    """Return True if `asked`, which a call names as its device, is `device`.

    A device name without an index means the current device of its type.
    """
    named = torch.device(asked)
    if named.type != device.type or device.index is None:
        return named.type == device.type
    return device.index == (torch.cuda.current_device() if named.index is None else named.index)


# Weak keys are enough: the views refer to the arena's memory and not to the pool, so both can be collected.
_views: weakref.WeakKeyDictionary[StorageOwner, ArenaViews] = weakref.WeakKeyDictionary()


def arena_views(pool: StorageOwner) -> ArenaViews:
    """The views of a pool's arena, made when they are first needed."""
    views = _views.get(pool)
    if views is None:
        views = _views[pool] = ArenaViews(pool)
    return views
