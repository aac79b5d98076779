"""Manifest of one version of a name: an object that lists the objects of which the version consists.

The bytes of this object are ``FPNAME``, a zero byte, the version of the format as one byte, and the manifest in
MessagePack. A value is cut into pieces. Each piece is one object, and each tensor is one object.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from farpool.decoding import prepared
from farpool.errors import ConfigError

__all__ = ["Manifest", "Piece", "TensorEntry", "decode_manifest", "encode_manifest"]

_MAGIC = b"FPNAME\0"
_VERSION = 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a value: the key of its object and its size in bytes."""

    key: str
    nbytes: _Count


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Entry of a manifest for one tensor.

    Attributes
    ----------
    name : str
        Name of the tensor.
    dtype : str
        PyTorch's name of the element type, for example ``bfloat16``.
    shape : tuple of int
        Sizes of the dimensions.
    nbytes : int
        Bytes of all elements.
    key : str
        Key of the object with the elements in row-major order; empty if the tensor has no elements.
    """

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    nbytes: _Count
    key: str


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Contents of one version of a name: the pieces of a value, or tensors."""

    pieces: tuple[Piece, ...] = ()
    tensors: tuple[TensorEntry, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the value, or of all tensors."""
        return sum(part.nbytes for part in self.pieces) + sum(part.nbytes for part in self.tensors or ())


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as the bytes of an object."""
    return _MAGIC + bytes([_VERSION]) + msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes, what: str) -> Manifest:
    """Decode a manifest. `what` is the name and version that has it, for errors.

    Raises
    ------
    ConfigError
        The bytes are not a manifest, or a newer farpool wrote it.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise ConfigError(f"{what} points to an object that is not a manifest; publish it again", setting="name")
    if data[len(_MAGIC)] != _VERSION:
        raise ConfigError(
            f"{what} has a manifest of version {data[len(_MAGIC)]}, this farpool reads version {_VERSION}",
            setting="name",
        )
    try:
        return msgspec.msgpack.decode(memoryview(data)[len(_MAGIC) + 1 :], type=prepared(Manifest))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{what} has a damaged manifest: {error}; publish it again", setting="name") from None
