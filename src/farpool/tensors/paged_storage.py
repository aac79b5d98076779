"""Storage objects that stand for a paged tensor's bytes: they have a size and an identity, but no memory.

Programs that save tensors use the identity to find out which tensors share memory. ``torch.save`` receives a
`SavedStorage`, whose bytes are read from the pool when they are written to the file. So ``torch.save`` writes storage
by storage, and the file may be larger than memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.factories import to_cpu
from farpool.tensors.paged_tensor import PagedTensor, describe

__all__ = ["PagedStorage", "SavedStorage", "storage_of"]


class PagedStorage(torch.UntypedStorage):
    """The result of ``untyped_storage()`` of paged tensors: one object without memory for all views of the same bytes.

    Native code sees a storage on the meta device, so it cannot read or write the bytes.
    """

    _bytes: PagedTensor

    @classmethod
    def over(cls, tensor: PagedTensor) -> PagedStorage:
        """Make the object for the whole storage that `tensor` views."""
        storage = tensor._storage
        self = cls(storage.nbytes, device="meta")
        with torch.no_grad():
            self._bytes = PagedTensor(storage, tensor._arena, torch.uint8, (storage.nbytes,), (1,))
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the tensors compute on."""
        return self._bytes.device

    @property
    def is_cuda(self) -> bool:
        """True if the tensors compute on a GPU."""
        return self.device.type == "cuda"

    @property
    def _cdata(self) -> int:
        # torch's own savers identify storages by this number. The identified object lives as long as the bytes.
        return id(self._bytes._storage)

    def get_device(self) -> int:
        """The index of the GPU, or -1 on the CPU."""
        return self.device.index if self.is_cuda else -1

    def cpu(self) -> torch.UntypedStorage:
        """A plain copy of all bytes."""
        return to_cpu(self._bytes).untyped_storage()

    def clone(self) -> torch.UntypedStorage:
        """A plain copy of all bytes."""
        return self.cpu()

    def __repr__(self) -> str:
        return f"PagedStorage({self.nbytes()} bytes of {describe(self._bytes)})"

    __str__ = __repr__


def _refuse(what: str) -> Callable[..., NoReturn]:
    def method(self: PagedStorage, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{what} of a storage needs the raw memory of {describe(self._bytes)}, which moves between the tiers of "
            "its pool: take a plain copy with pool.materialize(t) first. To see whether two tensors share memory, "
            "compare the objects that untyped_storage() returns"
        )

    return method


# All methods are refused except those that describe the storage without reading its memory.
_ANSWERED_METHODS = frozenset(("element_size", "nbytes", "resizable", "size", "untyped"))
_SPECIAL_METHODS = ("__copy__", "__deepcopy__", "__delitem__", "__getitem__", "__iter__", "__reduce__", "__setitem__")
for _name in (*_SPECIAL_METHODS, *[name for name in dir(torch.UntypedStorage) if not name.startswith("__")]):
    if (
        _name not in _ANSWERED_METHODS
        and _name not in vars(PagedStorage)
        and callable(getattr(torch.UntypedStorage, _name, None))
    ):
        setattr(PagedStorage, _name, _refuse(_name))


class SavedStorage(PagedStorage):
    """A storage for ``torch.save``, which reads the bytes from the pool only when it writes them to the file."""

    def data_ptr(self) -> int:
        """A number that identifies the storage. ``torch.save`` uses it to refuse a storage that has two dtypes."""
        return self._cdata

    def __reduce__(self) -> Any:
        return self.cpu().__reduce__()  # type: ignore[no-untyped-call]

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)  # type: ignore[no-untyped-call]


# A file contains the name of its storages' class, which must exist in a program without farpool.
PagedStorage.__name__ = SavedStorage.__name__ = torch.UntypedStorage.__name__

# Each value holds the `Storage` whose identity is its key, so no other object gets that identity before it is gone.
_known: weakref.WeakValueDictionary[int, PagedStorage] = weakref.WeakValueDictionary()


def storage_of(tensor: PagedTensor) -> PagedStorage:
    """The object that ``tensor.untyped_storage()`` returns. All views share it as long as the program holds it."""
    key = id(tensor._storage)
    storage = _known.get(key)
    if storage is None:
        storage = _known[key] = PagedStorage.over(tensor)
    return storage
