"""PyTorch tensors in a store: published under a name, read into new memory, or mapped without a copy.

This module does not import paged tensors. Importing their operator rules would take a program that only maps weights
longer than the mapping itself.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from farpool._native import buffer_address
from farpool.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from farpool.cluster.names import NameInfo, OpenedName, TensorEntry, TensorSource
    from farpool.cluster.store import Pin, Pins, Store

__all__ = ["map_tensors", "publish_tensors", "read_tensor", "read_tensors", "tensor_source"]

_BATCH_BYTES = 4 << 20
"""Bytes of tensors in the first call that pins objects, and in each call after one that copied objects. The number is
small because copying must not exceed the timeout of the call."""
_MAPPED_BATCH_BYTES = 256 << 20
"""Bytes of tensors in each call that pins objects after a call whose objects were all mapped, without copies."""


def publish_tensors(
    store: Store, name: str, tensors: Mapping[str, torch.Tensor], *, expect: int | None = None
) -> NameInfo:
    """Publish tensors as the next version of a name, for `map_tensors` and `read_tensors`; see `Store.publish`.

    Tensors that have not changed since another version are not sent again.

    Raises
    ------
    UnsupportedError
        A tensor is not dense, or is on the device ``meta``, so it has no data.
    TypeError
        A name is not text, or a value is not a tensor.
    ConfigError
        There are no tensors.
    NameHeldError, NameMovedError, RegistryAwayError, NodeError
        As for ``store.publish``.
    """
    return store.publish(name, tensors, expect=expect)


class _Source:
    """Source of bytes to publish, made from a tensor.

    If a plain copy of a paged tensor is necessary, it exists only while it is sent.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)

    def data(self) -> memoryview:
        # cpu() of a paged tensor is a plain copy of it.
        return _bytes_of(self._tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def tensor_source(name: str, tensor: object) -> TensorSource | None:
    """Return a source from which `Store.publish` reads a tensor's bytes; None if `tensor` is not a PyTorch tensor.

    `name` is the tensor's name for errors.

    Raises
    ------
    UnsupportedError
        The tensor is not dense, or is on the device ``meta``, so it has no data.
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_meta:
        raise UnsupportedError(f"{name!r} is on the meta device: it has no elements that could be published")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"{name!r} is {tensor.layout} and {tensor.dtype}; only dense tensors can be published")
    return _Source(tensor)


def read_tensors(opened: OpenedName) -> dict[str, torch.Tensor]:
    """Read all tensors of an opened name into new memory; return them by their names. All bytes are verified.

    Parameters
    ----------
    opened : OpenedName
        From ``store.open(name)``.

    Raises
    ------
    NameLostError
        One of the version's objects is not on any node any more.
    ConfigError
        The name holds no tensors, or this version of torch lacks the data type of a tensor.
    """
    tensors = {entry.name: _empty(entry) for entry in opened.tensors()}
    opened.read_tensors_into((entry, _bytes_of(tensors[entry.name])) for entry in opened.tensors())
    return tensors


def read_tensor(opened: OpenedName, entry: TensorEntry) -> torch.Tensor:
    """Read one tensor of an opened name into new memory; errors as for `read_tensors`."""
    tensor = _empty(entry)
    opened.read_tensors_into([(entry, _bytes_of(tensor))])
    return tensor


def map_tensors(store: Store, name: str, version: int | None = None) -> dict[str, torch.Tensor]:
    """Map published tensors into this process, and return them by their names. Tensors on this host are not copied.

    A tensor on a node of this host exists once, however many processes map it. Its memory is read-only, and a write to
    it ends the process, so clone a tensor before you change it. A tensor that cannot be mapped is copied into new
    memory. All bytes are verified.

    Parameters
    ----------
    store : Store
        The store to map from. The mapped bytes do not change, and their version is held, until the last tensor is
        deleted or the store is closed.
    name : str
        Name under which the tensors are published.
    version : int, optional
        An older version that is still held; None for the current version.

    Raises
    ------
    NameMissingError
        Nothing is published under the name, or that version is not held any more.
    NameLostError
        One of the version's objects is not on any node any more.
    ChecksumError
        The bytes differ from the bytes that were published.
    ConfigError
        The name holds no tensors, or this version of torch lacks the data type of a tensor.
    NodeError
        As for ``store.pin``.
    """
    opened = store.open(name, version)
    held = _Held(store)
    # The finalizer only defers the closing, because its thread may hold a lock at that moment (`OpenedName.defer`). At
    # exit the store closes everything.
    weakref.finalize(held, opened.defer, opened.close).atexit = False
    tensors: dict[str, torch.Tensor] = {}
    try:
        entries = iter(opened.tensors())
        room = _BATCH_BYTES
        while batch := _batch(entries, room):
            pins = store.pin_many(entry.key for entry in batch if entry.nbytes)
            is_mapped = all(pin is not None and pin.is_mapped for pin in pins)
            room = _MAPPED_BATCH_BYTES if is_mapped else _BATCH_BYTES
            tensors.update(_over_pins(pins, opened, batch, held))
    except BaseException:
        opened.close()
        raise
    return tensors


class _Held:
    """Object that all mapped tensors of a version share. When the last tensor is deleted, the version is closed."""

    def __init__(self, store: Store) -> None:
        self.store = store


def _batch(entries: Iterator[TensorEntry], room: int) -> list[TensorEntry]:
    """Return the next tensors, enough of them for at least `room` bytes; an empty list if none are left."""
    batch: list[TensorEntry] = []
    for entry in entries:
        batch.append(entry)
        room -= entry.nbytes
        if room <= 0:
            break
    return batch


def _over_pins(
    pins: Pins, opened: OpenedName, entries: Sequence[TensorEntry], held: _Held
) -> Iterator[tuple[str, torch.Tensor]]:
    """Verify pinned objects, and yield a tensor for each entry.

    `pins` has one item for each entry that is not empty.
    """
    try:
        pins.verify()
        left = iter(pins)
        for entry in entries:
            if not entry.nbytes:
                yield entry.name, _empty(entry)
                continue
            pin = next(left)
            if pin is None:
                raise opened.lost(entry.key)
            yield entry.name, _over(pin, opened, entry, held)
    except BaseException:
        pins.release()
        raise


def _over(pin: Pin, opened: OpenedName, entry: TensorEntry, held: _Held) -> torch.Tensor:
    """Make a tensor over the bytes of a verified object; copy the bytes if the object is not mapped."""
    dtype = _dtype_of(entry)
    if pin.view.nbytes != entry.nbytes:
        raise ConfigError(
            f"the object of the tensor {entry.name!r} has {pin.view.nbytes} bytes, expected {entry.nbytes}",
            setting="name",
        )
    if not pin.is_mapped:
        tensor = _empty(entry)
        _bytes_of(tensor)[:] = pin.view
        return tensor
    # torch.frombuffer would warn that the view is read-only. And this object keeps store, version and pin alive.
    memory = (ctypes.c_ubyte * entry.nbytes).from_address(buffer_address(pin.view))
    memory.held = held  # type: ignore[attr-defined]
    weakref.finalize(memory, opened.defer, pin.release).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(entry.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def _empty(entry: TensorEntry) -> torch.Tensor:
    dtype = _dtype_of(entry)
    try:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise ConfigError(
            f"the tensor {entry.name!r} of {dtype} and shape {entry.shape} cannot be made: {error}", setting="name"
        ) from None


def _dtype_of(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    # Dense tensors do not have quantized types, and torch crashes if it makes a quantized tensor over a buffer.
    if not isinstance(dtype, torch.dtype) or entry.dtype.startswith("q"):
        raise ConfigError(
            f"the tensor {entry.name!r} has the type {entry.dtype!r}, which no dense tensor of this torch has; use a "
            "newer one",
            setting="name",
        )
    expected = math.prod(entry.shape) * dtype.itemsize
    if entry.nbytes != expected:
        raise ConfigError(
            f"the tensor {entry.name!r} of {dtype} and shape {entry.shape} has {entry.nbytes} bytes, expected "
            f"{expected}",
            setting="name",
        )
    return dtype
