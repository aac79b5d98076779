"""Footprints. A footprint is the part of a storage that a paged tensor views, with cached objects for operations.

The cached objects are the footprint's uses (byte ranges to pin), its real tensors and the footprints of its views.
Making these objects for each operation would cost more than a small operation itself. With the cache, the geometry of
``weight.t()``, for example, is computed only once.
"""

from __future__ import annotations

from typing import Any

import torch

from farpool._native import Footprint as NativeFootprint
from farpool.memory.pager.storage import Storage
from farpool.tensors.arena import ArenaViews

__all__ = ["Footprint"]

_VIEWS_MAX = 64
"""Maximum number of views cached in one footprint, so that a loop over a table's rows does not fill the memory."""
# The native method, because `farpool.tensors.integration` puts a guard in front of ``torch.Tensor.set_``.
_set = torch._C.TensorBase.set_


class Footprint(NativeFootprint):
    """An immutable geometry (size, strides, offset, dtype) over a storage, with a cached real tensor and cached views.

    Attributes
    ----------
    storage : Storage
    arena : ArenaViews
    dtype : torch.dtype
    size, stride : tuple of int
    offset : int
        Elements from the start of the storage to the first element.
    conj, neg : bool
        True if the values are still to be conjugated or negated.
    start, stop : int
        The elements are in bytes ``[start, stop)`` of the storage.
    views : dict
        Cached footprints of views. The key is the operation that made the view, with its arguments.
    """

    __slots__ = ()
    storage: Storage
    arena: ArenaViews

    def real(self, memory: torch.UntypedStorage, origin: int, *, requires_grad: bool) -> torch.Tensor:
        """Make a real tensor over `memory`. The first byte of `memory` is byte `origin` of the storage."""
        if torch.is_inference_mode_enabled():
            # The tensor is cached, and may be used again outside of inference mode.
            with torch.inference_mode(False):
                return self.real(memory, origin, requires_grad=requires_grad)
        offset = self.offset - origin // self.dtype.itemsize
        real = torch.ops.aten.empty.memory_format((0,), dtype=self.dtype, device=self.arena.device)
        _set(real, memory, offset, self.size, self.stride)
        if self.conj:
            torch._C._set_conj(real, True)
        if self.neg:
            torch._C._set_neg(real, True)
        if requires_grad:
            # Some kernels check this, and then compute values that the backward pass will need.
            real.requires_grad_()
        return real  # type: ignore[no-any-return]

    def real_at(self, place: int, requires_grad: bool) -> torch.Tensor:
        """Return the real tensor whose first byte is at `place` in the arena, from the cache or newly made."""
        kept = self.kept_real(place, requires_grad)
        if kept is not None:
            return kept
        memory = self.arena.memory(place, place + self.stop - self.start)
        real = self.real(memory, self.start, requires_grad=requires_grad)
        # Debug mode checks that each real tensor is gone after its operation, so it caches none.
        if not self.arena.debug:
            self.keep_real(place, requires_grad, real)
        return real

    def remember_view(self, key: Any, view: Footprint | tuple[Footprint, ...]) -> None:
        """Cache the footprint of a view, or the footprints of several views; `key` is the operation with arguments."""
        if len(self.views) >= _VIEWS_MAX:
            self.views.clear()
        self.views[key] = view
