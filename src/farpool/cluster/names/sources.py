"""Turn tensors into bytes one at a time, so that memory never holds a state dict twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from farpool.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TensorSource", "source_of", "sources_of", "use_tensors"]


@runtime_checkable
class TensorSource(Protocol):
    """Interface of a tensor to publish."""

    @property
    def dtype(self) -> str:
        """PyTorch's name of the element type, for example ``float32``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    def data(self) -> Buffer:
        """Return the elements in row-major order, contiguous. `Names` calls this once or twice and keeps no result."""


class _Array:
    """Source for an array with the buffer protocol, such as an array of numpy."""

    def __init__(self, view: memoryview, dtype: str) -> None:
        self.dtype, self.shape, self._view = dtype, tuple(view.shape or ()), view

    def data(self) -> Buffer:
        return self._view if self._view.c_contiguous else self._view.tobytes()


_FORMATS = {
    **{"?": "bool", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32"},
    **{"l": "int64", "L": "uint64", "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64"},
}
_loader: Callable[[], Callable[[str, Any], TensorSource | None]] | None = None


def use_tensors(loader: Callable[[], Callable[[str, Any], TensorSource | None]]) -> None:
    """Set the loader, which `source_of` calls only for torch tensors, so that no other program has to import torch.

    The loader returns a function that takes a tensor's name and the tensor. This function returns the tensor's source,
    or None if it does not know the type.
    """
    global _loader
    _loader = loader


def sources_of(tensors: Mapping[Any, Any]) -> dict[str, TensorSource]:
    """Check tensors and return a source for each, by name. This copies no tensor.

    Raises
    ------
    TypeError
        A name is not a str, or its value is not a tensor.
    """
    sources = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is a {type(name).__name__}, expected a str as the name of each tensor")
        sources[name] = source_of(name, tensor)
    if not sources:
        raise ConfigError("there are no tensors to publish, expected at least one", setting="value")
    return sources


def source_of(name: str, tensor: Any) -> TensorSource:
    """Return a source for a tensor, which may be a source itself, an array with the buffer protocol, or a torch tensor.

    Raises
    ------
    TypeError
        The tensor is none of these.
    """
    # The module's name is enough to recognize a tensor, so a program that publishes none does not import torch.
    if _loader is not None and type(tensor).__module__.partition(".")[0] in ("torch", "farpool"):
        source = _loader()(name, tensor)
        if source is not None:
            return source
    if isinstance(tensor, TensorSource) and isinstance(tensor.dtype, str):
        return tensor
    try:
        view = memoryview(tensor)
        return _Array(view, _FORMATS[view.format.lstrip("@=<")])
    except (TypeError, ValueError, KeyError):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, expected a tensor or an array of numbers") from None
