"""Codecs, which make KV blocks smaller before they are sent over a link.

``zstd`` is lossless. First it regroups the bytes of all elements by significance (byte shuffle). This separates signs
and exponents, whose values repeat, from the low bits of the mantissas, whose values do not repeat. Then Zstandard
compresses each of these groups of bytes (planes); a plane that would not become smaller is stored as it is. Zstandard
is set to code single bytes by their frequency, with hardly any search for repeated strings, because KV contains no
repeated strings and the search takes most of the time.

``int8`` and ``int4`` are lossy (see `farpool.kv.quantization`). ``auto`` uses ``zstd`` for the blocks for which
compressing saves time (see `farpool.kv.compression_choice`).

A stored form either is smaller than its payload or is the payload itself. Its size tells a reader which of the two it
is. Decoders check the structure of their input but not its values, because the checksum of the stored object detects
flipped bits. Encoding and decoding run outside the interpreter lock.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import zstandard

from farpool.errors import ConfigError, FarpoolError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["CODECS", "Codec", "CodecError", "Lossless", "decode", "element_bytes", "encode", "flat"]

CODECS = ("auto", "zstd", "int8", "int4")
"""Names of the codecs. Settings also accept an empty name, which means that blocks are stored as they are."""

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
_SLICE_ELEMENTS = 1 << 16
"""Number of elements that are joined from their planes at a time. It is small to keep these elements in the core's
cache."""


class CodecError(FarpoolError, ValueError):
    """The stored bytes cannot be the codec's output for a block of this size."""


class Codec(Protocol):
    """Interface of a codec, which `encode` and `decode` call. Safe to use from several threads and after a fork."""

    @property
    def name(self) -> str:
        """Name of the codec, as in `CODECS`."""

    def pack(self, payload: NDArray[np.uint8]) -> list[Buffer] | None:
        """Encode a payload; return the stored form in parts, or None if the codec cannot represent the payload.

        Raises
        ------
        ConfigError
            The payload does not have the size for which the codec was made.
        """

    def unpack(self, stored: NDArray[np.uint8], payload: NDArray[np.uint8]) -> None:
        """Decode a stored form into `payload`, an array of the payload's size.

        Raises
        ------
        CodecError
            The stored form is malformed, or belongs to a payload of another size.
        """


def element_bytes(dtype: str) -> int:
    """Return the size in bytes of one element of a logical type.

    Raises
    ------
    ConfigError
        The type is not known.
    """
    size = 1 if dtype.startswith(("fp8", "float8")) else _ELEMENT_BYTES.get(dtype)
    if size is None:
        known = ", ".join(_ELEMENT_BYTES)
        raise ConfigError(f"dtype: {dtype!r} is not known; a codec needs fp8_... or one of {known}", setting="dtype")
    return size


def encode(codec: Codec, parts: Sequence[Buffer]) -> list[Buffer]:
    """Encode a block.

    Parameters
    ----------
    codec : Codec
        The codec to use.
    parts : sequence of buffer
        The payload, in contiguous buffers.

    Returns
    -------
    list of buffer
        Parts of the stored form, which may share the payload's memory. The stored form has fewer bytes than the
        payload, or is the payload itself. The same payload always gives the same bytes.

    Raises
    ------
    ConfigError
        The payload does not have the size for which the codec was made.
    """
    payload = _gathered(parts)
    packed = codec.pack(payload)
    if packed is None or sum(memoryview(part).nbytes for part in packed) >= len(payload):
        return [payload.data]
    return packed


def decode(codec: Codec, stored: Buffer, targets: Sequence[Buffer]) -> None:
    """Decode a block.

    Parameters
    ----------
    codec : Codec
        The codec that encoded the block.
    stored : buffer
        The stored form, contiguous. It must not overlap the targets.
    targets : sequence of buffer
        Contiguous writable buffers that together are as large as the payload. The codec writes only into these buffers.

    Raises
    ------
    CodecError
        The stored form is malformed, or belongs to a payload of another size. The bytes in the targets are then
        unspecified.
    """
    source = flat(stored)
    arrays = [flat(target) for target in targets]
    nbytes = sum(map(len, arrays))
    if len(source) > nbytes:
        raise CodecError(f"{len(source)} bytes are more than the payload's {nbytes}")
    # The codec decodes into one array; with several targets we decode into new memory and copy.
    payload = arrays[0] if len(arrays) == 1 else np.empty(nbytes, np.uint8)
    if len(source) == nbytes:
        payload[:] = source
    else:
        codec.unpack(source, payload)
    if len(arrays) > 1:
        place = 0
        for array in arrays:
            array[:] = payload[place : place + len(array)]
            place += len(array)


class _Contexts(threading.local):
    """Zstandard's compression and decompression contexts, separate for each thread."""

    def __init__(self) -> None:
        # Few hashes and long matches mean hardly any search. A target length would disable the coding of single bytes.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, min_match=7, target_length=0
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


class Lossless:
    """Lossless codec: byte shuffle, then Zstandard. Payloads may have any size.

    A plane consists of all bytes of the same significance. The stored form has three sections: the stored length of
    each plane (64 bits, little endian, least significant plane first); the planes; and, unchanged, the bytes after the
    payload's last whole element. A plane whose stored length is its full length is stored as it is. Any other plane is
    a Zstandard frame that records the size of its content.

    Parameters
    ----------
    element : int
        Bytes of an element: 1, 2, 4 or 8.
    name : str
        Name of the codec.
    """

    def __init__(self, element: int, name: str = "zstd") -> None:
        self.name = name
        self._element = element
        self._lengths = struct.Struct(f"<{element}Q")
        self._contexts = _Contexts()

    def pack(self, payload: NDArray[np.uint8]) -> list[Buffer] | None:
        count = len(payload) // self._element
        elements = payload[: count * self._element].view(f"<u{self._element}")
        compressor = self._contexts.compressor
        planes: list[Buffer] = []
        for index in range(self._element):
            if self._element == 1:
                plane = elements
            else:
                plane = np.empty(count, np.uint8)
                np.right_shift(elements, 8 * index, out=plane, casting="unsafe")
            coded = compressor.compress(plane.data)
            planes.append(coded if len(coded) < count else plane.data)
        lengths = self._lengths.pack(*(memoryview(plane).nbytes for plane in planes))
        return [lengths, *planes, payload[count * self._element :].data]

    def unpack(self, stored: NDArray[np.uint8], payload: NDArray[np.uint8]) -> None:
        count, tail = divmod(len(payload), self._element)
        if len(stored) < self._lengths.size:
            raise CodecError(f"{len(stored)} bytes are too few for the lengths of {self._element} planes")
        lengths = self._lengths.unpack_from(stored.data)
        if max(lengths) > count or self._lengths.size + sum(lengths) + tail != len(stored):
            raise CodecError(
                f"planes of {lengths} bytes do not fit {len(stored)} stored bytes of a payload of {len(payload)}"
            )
        planes = []
        place = self._lengths.size
        for length in lengths:
            planes.append(self._plane(stored[place : place + length], count))
            place += length
        elements = payload[: len(payload) - tail].view(f"<u{self._element}")
        for start in range(0, count, _SLICE_ELEMENTS):
            some = elements[start : start + _SLICE_ELEMENTS]
            some[:] = planes[-1][start : start + _SLICE_ELEMENTS]
            for plane in reversed(planes[:-1]):
                some <<= 8
                some |= plane[start : start + _SLICE_ELEMENTS]
        payload[len(payload) - tail :] = stored[place:]

    def _plane(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
        if len(coded) == count:
            return coded
        try:
            # Check the claimed size first, because the decompressor allocates that much memory.
            claimed = zstandard.frame_content_size(coded.data)
            content = (
                self._contexts.decompressor.decompress(coded.data, allow_extra_data=False) if claimed == count else b""
            )
        except zstandard.ZstdError as error:
            raise CodecError(f"a plane cannot be decompressed: {error}") from error
        if len(content) != count:
            raise CodecError(f"a plane of {len(coded)} bytes is not {count} bytes in one frame")
        return np.frombuffer(content, np.uint8)


def _gathered(parts: Sequence[Buffer]) -> NDArray[np.uint8]:
    arrays = [flat(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, np.uint8)])


def flat(buffer: Buffer) -> NDArray[Any]:
    """Return the bytes of a contiguous buffer of any shape as an array of one dimension, without a copy."""
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
