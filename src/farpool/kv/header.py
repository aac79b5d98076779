"""The 64 bytes before each payload, which say once more whose it is.

A key that is found leads to bytes that are whole (the store's CRC32C). The header says that they are the bytes of this
key and namespace, in a layout of this version, so that a mistake in any engine, connector or key becomes a miss and
never somebody else's KV.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from farpool.kv.reasons import Reason

__all__ = ["HEADER_BYTES", "check_header", "pack_header"]

_MAGIC = b"fpkv"
_VERSION = 1
_HEADER = struct.Struct("<4sHHQ16s16sQ8x")
"""Magic, version of this header, version of the layout, bytes of the payload before compression, digest of the
namespace, digest of the key, bytes of the payload as they are stored."""
HEADER_BYTES = _HEADER.size


def pack_header(key: bytes, nbytes: int, stored: int, layout_version: int = 1) -> bytes:
    """Pack the header of a payload.

    Parameters
    ----------
    key : bytes
        The block's key, 64 bytes; its namespace is taken from it.
    nbytes : int
        Bytes of the payload before compression.
    stored : int
        Bytes of the payload as they are stored.
    layout_version : int
        Version of the layout.
    """
    digest = blake2b(key, digest_size=16).digest()
    return _HEADER.pack(_MAGIC, _VERSION, layout_version, nbytes, key[4:20], digest, stored)


def check_header(
    header: bytes | bytearray | memoryview, key: bytes, nbytes: int, stored: int, layout_version: int = 1
) -> Reason | None:
    """Compare a header with what the reader expects.

    Parameters
    ----------
    header : buffer
        Its 64 bytes.
    key, nbytes, stored, layout_version
        As of `pack_header`.

    Returns
    -------
    Reason or None
        Why the payload must not be used; None if it may be.
    """
    expected = pack_header(key, nbytes, stored, layout_version)
    if header == expected:
        return None
    magic, version, layout, payload, namespace, digest, kept = _HEADER.unpack(header)
    if magic != _MAGIC or namespace != key[4:20] or digest != _HEADER.unpack(expected)[5]:
        return Reason.FOREIGN
    if version != _VERSION or layout != layout_version:
        return Reason.WRONG_VERSION
    return None if (payload, kept) == (nbytes, stored) else Reason.WRONG_SIZE
