"""`PagedTensor`, the tensor that programs use: a geometry and a storage in a pool, without its own memory.

It is a wrapper subclass with size, strides, offset, dtype and everything that autograd needs. Operations go to
`farpool.tensors.dispatch`. This class overrides only methods that never reach the dispatcher: access to raw memory,
printing, copying, pickling, and changes of a tensor's identity.
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
"""Native property ``data`` of all tensors, which is overridden for paged ones and guarded for plain ones."""


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
    """Functions that implement methods of a paged tensor; `use_methods` sets them, because they need the class."""

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

    Made by `farpool.offload`, `farpool.load_safetensors`, `farpool.paged` and the factory methods of a pool, never by
    its constructor. Views share the storage. Copies (``clone()``, ``to(dtype)``, ``zeros_like``) are paged, and so are
    results of arithmetic on gradients and moments that are larger than the budget. All other results are plain tensors.
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
        """Make this tensor view the same bytes as `other`; it keeps its identity, autograd history and attributes."""
        NATIVE_DATA.__set__(self, other)
        self._footprint = other._footprint

    # -- identity ---------------------------------------------------------------------------------------------------

    @property
    def data(self) -> PagedTensor:
        """A view of the same bytes without history. Setting it rebinds; a plain value is copied to the pool."""
        return NATIVE_DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _methods.set_data(self, value)

    @property
    def requires_grad(self) -> bool:
        """True if autograd accumulates gradients into this tensor; these are paged, too."""
        return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch accumulation of gradients into this tensor on or off."""
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
        """The storage's size and identity, as one object for all its views; the memory itself is not accessible."""
        return _methods.storage_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as a NumPy array, with ``force=True``; an array cannot share memory with the tensor.

        Raises
        ------
        UnsupportedError
            `force` is False. The array would be a copy, and writes to it would not reach the tensor.
        """
        if not force:
            _refuse("numpy() without force=True or cpu()")(self)
        return self.detach().cpu().numpy()

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A plain copy in host memory, even of a tensor on the CPU; ``to("cpu")`` keeps such a tensor in its pool."""
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
