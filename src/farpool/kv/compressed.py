"""Encodes and decodes the blocks of one cache, and measures whether encoding saves time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from farpool.abc.objects import Payload
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.errors import ConfigError
from farpool.kv.compression import CODECS, Codec, CodecError, Lossless, decode, element_bytes, encode, flat
from farpool.kv.compression_choice import CompressionChoice
from farpool.kv.keys import group_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool.kv.namespace import Namespace
    from farpool.kv.quantization import Axes

__all__ = ["Compression", "codec_for"]


class Compression:
    """Encodes and decodes payloads with a codec for each group of layers, and decides if encoding pays. Thread-safe.

    Encoding pays if it saves more time on the link than encoding and decoding take.

    Parameters
    ----------
    namespace : Namespace
        Namespace with a ``codec`` that is not empty.

    Attributes
    ----------
    choice : CompressionChoice or None
        With the codec ``auto``, decides for each group of layers whether to encode. None with other codecs, which
        encode every block.

    Raises
    ------
    ConfigError
        The codec is not known, or does not support the data type or the layout of the namespace.
    """

    def __init__(self, namespace: Namespace) -> None:
        axes: list[Axes | None] = [None] * len(namespace.groups)
        if namespace.codec.startswith("int"):
            from farpool.kv.quantization import Axes

            axes = [Axes.of(namespace, group) for group in range(len(namespace.groups))]
        self._codecs = [codec_for(namespace.codec, namespace.dtype, of_group) for of_group in axes]
        self.choice = CompressionChoice() if namespace.codec == "auto" else None

    def encode(self, key: bytes, payload: Payload) -> Payload:
        """Return the stored form of a payload: the encoded payload if it is smaller, otherwise the payload itself."""
        codec = self._codec(key)
        if codec is None:
            return payload
        parts = parts_of(payload)
        if self.choice is None:
            return tuple(memoryview(part) for part in encode(codec, parts))
        group = group_of(key)
        chosen = self.choice.pays(group)
        if not chosen and not self.choice.due(group):
            return payload
        nbytes = nbytes_of(payload)
        began = time.perf_counter()
        stored = tuple(memoryview(part) for part in encode(codec, parts))
        self.choice.encoded(nbytes, nbytes_of(stored), time.perf_counter() - began, group)
        if chosen:
            return stored
        self.decode(key, b"".join(stored), memoryview(bytearray(nbytes)))  # only to measure the codec
        return payload

    def decode(self, key: bytes, stored: Buffer, target: Payload) -> bool:
        """Decode a stored form into `target`; return False if the form is malformed or its payload has another size."""
        codec = self._codec(key)
        began = time.perf_counter()
        try:
            if codec is None:
                return False
            decode(codec, stored, parts_of(target))
        except CodecError:
            return False
        if self.choice is not None:
            self.choice.decoded(nbytes_of(target), time.perf_counter() - began, group_of(key))
        return True

    def decode_within(self, key: bytes, nbytes: int, target: Payload) -> bool:
        """Decode in place a stored form in the first `nbytes` bytes of `target`; return the same result as `decode`."""
        pieces = []
        for part in parts_of(target):
            pieces.append(flat(part)[:nbytes])
            nbytes -= len(pieces[-1])
        return self.decode(key, np.concatenate(pieces).data, target)

    def _codec(self, key: bytes) -> Codec | None:
        group = group_of(key)
        return self._codecs[group] if group < len(self._codecs) else None


def codec_for(name: str, dtype: str, axes: Axes | None = None) -> Codec | None:
    """Make the codec with this name.

    Parameters
    ----------
    name : str
        One of `CODECS`, or an empty name for no codec.
    dtype : str
        Logical type of the elements, such as ``bfloat16`` or ``fp8_e4m3``.
    axes : Axes or None
        Meaning and sizes of the payload's axes; required for ``int8`` and ``int4``.

    Returns
    -------
    Codec or None
        None if the name is empty.

    Raises
    ------
    ConfigError
        - The name or the type is not known.
        - The codec is lossy, and does not support the type.
        - The codec is lossy, and `axes` is None.
    """
    if not name:
        return None
    if name in ("zstd", "auto"):
        return Lossless(element_bytes(dtype), name)
    if name in ("int8", "int4"):
        from farpool.kv.quantization import Quantized  # imported here because it needs torch

        return Quantized(8 if name == "int8" else 4, dtype, axes)
    raise ConfigError(f"codec: {name!r} is not known; expected '' or one of {', '.join(CODECS)}", setting="codec")
