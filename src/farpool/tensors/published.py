"""Tensors as one published object, which other processes map instead of loading them.

The object, little-endian: magic ``FPTENSOR``, u32 version 1, u32 bytes of JSON, the JSON (a list of name, dtype, shape
and offset of each tensor), then each tensor's elements in row-major order, at offsets that are multiples of 64.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

from farpool._native import buffer_address
from farpool.errors import ConfigError, UnsupportedError
from farpool.tensors.factories import materialize
from farpool.tensors.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from farpool.store import Store
    from farpool.store.pin import Pin

__all__ = ["map_tensors", "publish_tensors"]

_MAGIC, _VERSION = b"FPTENSOR", 1
_HEAD = struct.Struct("<8sII")
_ALIGNMENT = 64
"""That of torch's own memory: operands must be aligned alike, or other kernels compute other bits."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[_Count, ...]
    offset: _Count


def publish_tensors(
    store: Store, key: str | bytes, tensors: Mapping[str, torch.Tensor], *, ttl: float | None = None
) -> None:
    """Publish tensors under one key, for `map_tensors`. Those who have mapped an earlier publish keep that one.

    Parameters
    ----------
    store : Store
        Where to.
    key : str or bytes
        Their key.
    tensors : mapping of str to torch.Tensor
        For example ``model.state_dict()``; paged ones, too.
    ttl : float, optional
        Seconds after which they may go; None for no limit.

    Raises
    ------
    UnsupportedError
        One is not dense, or has no elements to publish (``meta``).
    TypeError
        A name is no text, or what it names is no tensor.
    NodeError
        As of ``store.put``.
    """
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    entries, nbytes = _laid_out(plain)
    table = msgspec.json.encode(entries)
    whole = torch.zeros(nbytes, dtype=torch.uint8)
    memory = whole.numpy().data
    memory[: _HEAD.size + len(table)] = _HEAD.pack(_MAGIC, _VERSION, len(table)) + table
    for entry in entries:
        tensor = plain[entry.name]
        whole[entry.offset : entry.offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    store.put(key, memory, ttl=ttl)


def map_tensors(store: Store, key: str | bytes) -> dict[str, torch.Tensor]:
    """The tensors published under a key, by name.

    On the node's host they lie in its memory: nothing is copied, however many processes map them. That memory is
    read-only, and a write to such a tensor ends the process: clone what is to change. From another host they are
    copied once. All bytes are verified.

    Parameters
    ----------
    store : Store
        Where from. What is mapped stays as it is for as long as one of the tensors lives, unless the store is closed.
    key : str or bytes
        Their key.

    Raises
    ------
    KeyError
        Nothing is published under this key.
    ChecksumError
        The bytes are not those that were published.
    ConfigError
        What is published there was not published by `publish_tensors`, or by a version that this one does not read.
    NodeError
        As of ``store.pin``.
    """
    unused = _UNUSED.setdefault(store, deque())
    while unused:
        unused.popleft().release()
    pin = store.pin(key)
    try:
        pin.verify()
        entries = _entries(pin.view, key)
        whole: ctypes.Array[ctypes.c_ubyte] | memoryview
        if pin.is_mapped:
            # torch.frombuffer would warn that the view is read-only; and this keeps store and pin for the tensors.
            whole = (ctypes.c_ubyte * pin.view.nbytes).from_address(buffer_address(pin.view))
            whole.held = store  # type: ignore[attr-defined]
        else:
            whole = torch.empty(pin.view.nbytes, dtype=torch.uint8).numpy().data
            whole[:] = pin.view
        tensors = {entry.name: _over(whole, pin.view.nbytes, entry, key) for entry in entries}
    except BaseException:
        pin.release()
        raise
    if pin.is_mapped:
        weakref.finalize(whole, unused.append, pin).atexit = False
    else:
        pin.release()
    return tensors


_UNUSED: weakref.WeakKeyDictionary[Store, deque[Pin]] = weakref.WeakKeyDictionary()
"""Pins whose tensors are gone. Released at the next call: a finalizer may run while locks are held."""


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, expected tensors under names that are text")
    plain = materialize(tensor) if isinstance(tensor, PagedTensor) else tensor.detach()
    if plain.is_meta:
        raise UnsupportedError(f"{name!r} is on the meta device: it has no elements that could be published")
    if plain.layout != torch.strided or plain.is_quantized:
        raise UnsupportedError(f"{name!r} is {plain.layout} and {plain.dtype}; only dense tensors can be published")
    return plain


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> tuple[list[_Entry], int]:
    """Where each tensor goes, and the bytes of the whole."""
    begin = 0
    while True:  # the table's length depends on the offsets in it
        entries, offset = [], begin
        for name, tensor in tensors.items():
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            entries.append(_Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            offset += tensor.nbytes
        needed = _HEAD.size + len(msgspec.json.encode(entries))
        if needed <= begin:
            return entries, max(offset, begin)
        begin = needed


def _entries(view: memoryview, key: str | bytes) -> list[_Entry]:
    if view.nbytes < _HEAD.size or bytes(view[:8]) != _MAGIC:
        raise ConfigError(f"the object {key!r} holds no tensors; farpool.publish_tensors publishes such", setting="key")
    _, version, nbytes = _HEAD.unpack_from(view)
    if version != _VERSION:
        raise ConfigError(
            f"the object {key!r} has version {version}, this farpool reads version {_VERSION}", setting="key"
        )
    if nbytes > view.nbytes - _HEAD.size:
        raise _damaged(key, f"a table of {nbytes} bytes does not fit into an object of {view.nbytes}")
    try:
        return msgspec.json.decode(bytes(view[_HEAD.size : _HEAD.size + nbytes]), type=list[_Entry])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(key, f"its table: {error}") from None


def _over(
    whole: ctypes.Array[ctypes.c_ubyte] | memoryview, nbytes: int, entry: _Entry, key: str | bytes
) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    # A quantized type is none of a dense tensor, and torch crashes when it is given one over a buffer.
    if not isinstance(dtype, torch.dtype) or entry.dtype.startswith("q"):
        raise _damaged(key, f"{entry.name!r} is of the type {entry.dtype!r}, which no dense tensor of this torch has")
    count = math.prod(entry.shape)
    if entry.offset % _ALIGNMENT or (count and entry.offset + count * dtype.itemsize > nbytes):
        raise _damaged(
            key, f"{entry.name!r} of shape {entry.shape} does not lie in its {nbytes} bytes at offset {entry.offset}"
        )
    try:
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(whole, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
    except (RuntimeError, ValueError) as error:
        raise _damaged(key, f"{entry.name!r} of {dtype} and shape {entry.shape}: {error}") from None


def _damaged(key: str | bytes, why: str) -> ConfigError:
    return ConfigError(f"the object {key!r} was not published by farpool.publish_tensors: {why}", setting="key")
