"""What a paged tensor touches of its storage, and what was made of that before: uses, real tensors, views.

Computing these again for each operation would cost more than a small operation itself. Paged tensors of the same
geometry share a footprint where one was derived from the other's views, so ``weight.t()`` is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farpool.pager import Mode
from farpool.pager.use import Use

if TYPE_CHECKING:
    from farpool.pager.storage import Storage
    from farpool.tensors.arena import ArenaViews

__all__ = ["Footprint"]

_VIEWS = 64
"""Views to remember of one footprint: a loop over the rows of a table must not fill the memory."""
_set = torch._C.TensorBase.set_


class Footprint:
    """A geometry over a storage. Nothing of it changes but what it remembers.

    Attributes
    ----------
    storage : Storage
    arena : ArenaViews
    dtype : torch.dtype
    size, stride : tuple of int
    offset : int
        In elements, from the storage's start.
    conj, neg : bool
        Whether the values are to be conjugated, negated.
    start, stop : int
        Bytes of the storage that the elements touch.
    """

    __slots__ = (
        "_kept",
        "_reader",
        "_views",
        "_writer",
        "arena",
        "conj",
        "dtype",
        "neg",
        "offset",
        "size",
        "start",
        "stop",
        "storage",
        "stride",
    )

    def __init__(
        self,
        storage: Storage,
        arena: ArenaViews,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        *,
        conj: bool = False,
        neg: bool = False,
    ) -> None:
        self.storage = storage
        self.arena = arena
        self.dtype = dtype
        self.size = tuple(size)
        self.stride = tuple(stride)
        self.offset = offset
        self.conj = conj
        self.neg = neg
        if 0 in self.size:
            self.start = self.stop = 0
        else:
            reach = sum([(extent - 1) * step for extent, step in zip(self.size, self.stride, strict=True)])
            self.start, self.stop = offset * dtype.itemsize, (offset + reach + 1) * dtype.itemsize
        self._reader: Use | None = None
        self._writer: Use | None = None
        self._kept: tuple[int, bool, torch.Tensor] | None = None
        self._views: dict[Any, Footprint | tuple[Footprint, ...]] = {}

    def reader(self) -> Use:
        """Its bytes, to be read."""
        use = self._reader
        if use is None:
            use = self._reader = Use(self.storage, self.start, self.stop, Mode.READ)
        return use

    def writer(self) -> Use:
        """Its bytes, to be written."""
        use = self._writer
        if use is None:
            use = self._writer = Use(self.storage, self.start, self.stop, Mode.WRITE)
        return use

    def real(self, memory: torch.UntypedStorage, origin: int, *, requires_grad: bool) -> torch.Tensor:
        """A real tensor over memory that begins with byte `origin` of the storage."""
        if torch.is_inference_mode_enabled():
            # It may be used again outside.
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
            # Some kernels look at it, to compute what backward will need.
            real.requires_grad_()
        return real  # type: ignore[no-any-return]

    def real_at(self, place: int, requires_grad: bool) -> torch.Tensor:
        """The real tensor whose first byte lies at `place` in the arena; the one made before if that is still it."""
        kept = self._kept
        if kept is not None and kept[0] == place and kept[1] is requires_grad:
            return kept[2]
        memory = self.arena.memory(place, place + self.stop - self.start)
        real = self.real(memory, self.start, requires_grad=requires_grad)
        if not self.arena.debug:
            self._kept = (place, requires_grad, real)
        return real

    def check_real(self, real: torch.Tensor) -> None:
        """Do not use a real tensor again whose geometry an operation has changed."""
        if real.size() != self.size or real.stride() != self.stride:
            self._kept = None

    def forget_real(self) -> None:
        """Make a new real tensor next time."""
        self._kept = None

    def view(self, key: Any) -> Footprint | tuple[Footprint, ...] | None:
        """What `remember_view` was told under this key."""
        return self._views.get(key)

    def remember_view(self, key: Any, view: Footprint | tuple[Footprint, ...]) -> None:
        """Keep what an operation that makes views made of this footprint."""
        if len(self._views) >= _VIEWS:
            self._views.clear()
        self._views[key] = view
