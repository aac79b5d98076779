"""`PagedTensor`, the tensor that programs use: a geometry and a storage in a pool, without its own memory.

A `PagedTensor` is a wrapper subclass of torch's tensor with size, strides, offset, dtype and everything that autograd
needs. torch passes operations on it to `farpool.tensors.dispatch`. This class overrides only methods that torch does
not pass to that module: access to raw memory, printing, copying, pickling, and changes of a tensor's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import torch

from farpool.errors import UnsupportedError
from farpool.memory.pool import Pool, pool_of
from farpool.tensors.calls import calls
from farpool.tensors.footprint import Footprint

if TYPE_CHECKING:
    from farpool.memory.pager.storage import Storage
    from farpool.tensors.arena import ArenaViews

__all__ = ["NATIVE_DATA", "Methods", "PagedTensor", "describe", "use_methods"]

NATIVE_DATA: Any = torch._C.TensorBase.data
"""torch's own property ``data``. We override it for paged tensors, and check the values set to it for plain tensors."""


def describe(tensor: PagedTensor) -> str:
    """The name of a paged tensor in an error, for example ``'encoder.weight' [30522, 384]``."""
    name = tensor._storage.name
    shape = list(tensor.size())
    return f"{name!r} {shape}" if name else f"paged tensor {shape}"


def _refuse(what: str) -> Callable[..., NoReturn]:
    def method(self: PagedTensor, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"{what} needs the raw memory of {describe(self)}, which moves between the tiers of its pool: "
            "take a plain copy with pool.materialize(t) first"
        )

    return method


class Methods(Protocol):
    """Functions that implement methods of a paged tensor. They need the class, so `use_methods` sets them later."""

    def deep_copy(self, tensor: PagedTensor, memo: dict[int, Any], /) -> PagedTensor: ...
    def materialize(self, tensor: torch.Tensor, /) -> torch.Tensor: ...
    def page_gradients_of(self, tensor: PagedTensor, /) -> None: ...
    def reduce(self, tensor: PagedTensor, protocol: Any, /) -> Any: ...
    def set_data(self, tensor: PagedTensor, value: torch.Tensor, /) -> None: ...
    def shallow_copy(self, tensor: PagedTensor, /) -> PagedTensor: ...
    def storage_of(self, tensor: PagedTensor, /) -> torch.UntypedStorage: ...
    def text(self, tensor: PagedTensor, /) -> str: ...
    def to_cpu(self, tensor: PagedTensor, /) -> torch.Tensor: ...


_methods: Methods


def use_methods(methods: Methods) -> None:
    """Set the functions that implement the methods of paged tensors."""
    global _methods
    _methods = methods


class PagedTensor(torch.Tensor):
    """A tensor whose bytes live in a pool.

    Programs get paged tensors from `farpool.offload`, `farpool.load_safetensors`, `farpool.paged` and the factory
    methods of a pool, never from the constructor. Views share the storage. Copies (``clone()``, ``to(dtype)``) and
    tensors made like a paged one (``zeros_like``) are paged. Results of arithmetic on gradients and moments are paged
    if the operands do not fit into the fast tier together. Most other results are plain tensors.
    """

    _footprint: Footprint

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[PagedTensor],
        storage: Storage,
        arena: ArenaViews,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int = 0,
        *,
        conj: bool = False,
        neg: bool = False,
        requires_grad: bool = False,
    ) -> PagedTensor:
        footprint = Footprint(storage, arena, dtype, size, stride, offset, conj=conj, neg=neg)
        return PagedTensor.over(footprint, requires_grad=requires_grad)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    __torch_dispatch__ = staticmethod(calls.dispatch)  # type: ignore[assignment]

    @staticmethod
    def over(footprint: Footprint, *, requires_grad: bool = False) -> PagedTensor:
        """A paged tensor with the given footprint."""
        return calls.wrap(footprint, requires_grad)  # type: ignore[return-value]

    @property
    def _storage(self) -> Storage:
        return self._footprint.storage

    @property
    def _arena(self) -> ArenaViews:
        return self._footprint.arena

    @property
    def pool(self) -> Pool:
        """The pool that holds the bytes."""
        return pool_of(self._storage.pool)

    def byte_range(self) -> tuple[int, int]:
        """Bytes ``[start, stop)`` of the storage that this view touches."""
        return self._footprint.start, self._footprint.stop

    def like(
        self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype | None = None
    ) -> PagedTensor:
        """Another view of the same storage."""
        return PagedTensor(self._storage, self._arena, self.dtype if dtype is None else dtype, size, stride, offset)

    def rebind(self, other: PagedTensor) -> None:
        """Make this tensor view the bytes of `other`. Its own identity, autograd history and attributes stay."""
        NATIVE_DATA.__set__(self, other)
        self._footprint = other._footprint

    # -- identity ---------------------------------------------------------------------------------------------------

    @property
    def data(self) -> PagedTensor:
        """A view of the same bytes without history.

        If a paged value is set, this tensor becomes a view of the value's bytes. A plain value is copied into the pool
        first.
        """
        return NATIVE_DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _methods.set_data(self, value)

    @property
    def requires_grad(self) -> bool:
        """True if autograd accumulates a gradient in this tensor; the gradient is paged, too."""
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Choose if autograd accumulates a gradient in this tensor. The gradient is paged, too."""
        torch.Tensor.requires_grad_(self, requires_grad)
        if requires_grad:
            _methods.page_gradients_of(self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        return _methods.deep_copy(self, memo)

    def __copy__(self) -> PagedTensor:
        return _methods.shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _methods.reduce(self, protocol)

    # -- values -----------------------------------------------------------------------------------------------------

    def tolist(self) -> Any:
        """The values as nested lists."""
        return _methods.materialize(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return _methods.text(self)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    # -- raw memory -------------------------------------------------------------------------------------------------

    def untyped_storage(self) -> torch.UntypedStorage:
        """An object that has the storage's size and identity, but no memory. All views return the same object."""
        return _methods.storage_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Copy the values to a NumPy array. Requires ``force=True``, because the array does not share memory.

        Raises
        ------
        UnsupportedError
            `force` is False. Writes to the array, which is a copy, would not change the tensor.
        """
        if not force:
            _refuse("numpy() without force=True or cpu()")(self)
        return self.detach().cpu().numpy()

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A plain copy in host memory, even if the tensor is on the CPU.

        If the tensor is on the CPU, ``to("cpu")`` returns the tensor itself, which stays in its pool.
        """
        plain = _methods.to_cpu(self)
        return plain if memory_format is torch.preserve_format else plain.contiguous(memory_format=memory_format)

    data_ptr = _refuse("data_ptr()")
    const_data_ptr = _refuse("const_data_ptr()")
    mutable_data_ptr = _refuse("mutable_data_ptr()")
    __array__ = _refuse("numpy")
    __dlpack__ = _refuse("DLPack")
    __dlpack_device__ = _refuse("DLPack")
    storage = _refuse("storage()")
    _typed_storage = _refuse("storage()")
    storage_type = _refuse("storage_type()")
    share_memory_ = _refuse("share_memory_()")
    is_shared = _refuse("is_shared()")
    pin_memory = _refuse("pin_memory()")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        if self.device.type == "cuda":
            _refuse("the CUDA array interface")(self)
        raise AttributeError("__cuda_array_interface__ exists on CUDA tensors only")
