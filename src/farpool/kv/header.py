"""The header: 64 bytes before each payload that identify the payload's block.

The store's CRC32C shows that the bytes stored under a key are whole. The header shows that the bytes belong to this key
and namespace, in this version of the layout. So a mistake in an engine, a connector or a key becomes a miss, and never
gives an engine the KV of another request.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from farpool.kv.reasons import Reason

__all__ = ["HEADER_BYTES", "check_header", "pack_header"]

_MAGIC = b"fpkv"
_VERSION = 1
_LAYOUT_VERSION = 1
_HEADER = struct.Struct("<4sHHQ16s16sQ8x")
"""Fields: magic, version of this header, version of the layout, bytes of the payload before compression, digest of the
namespace, digest of the key, bytes of the stored payload."""
HEADER_BYTES = _HEADER.size


def pack_header(key: bytes, nbytes: int, stored: int) -> bytes:
    """Pack the header of a payload.

    Parameters
    ----------
    key : bytes
        The block's key, 64 bytes; it contains the namespace.
    nbytes : int
        Bytes of the payload before compression.
    stored : int
        Bytes of the stored payload, after compression.
    """
    digest = blake2b(key, digest_size=16).digest()
    return _HEADER.pack(_MAGIC, _VERSION, _LAYOUT_VERSION, nbytes, key[4:20], digest, stored)


def check_header(header: bytes | bytearray | memoryview, key: bytes, nbytes: int, stored: int) -> Reason | None:
    """Compare a header with the header that the reader expects.

    Parameters
    ----------
    header : buffer
        The 64 bytes that were read.
    key, nbytes, stored
        As in `pack_header`.

    Returns
    -------
    Reason or None
        Why the payload must not be used; None if it may be used.
    """
    expected = pack_header(key, nbytes, stored)
    if header == expected:
        return None
    magic, version, layout, payload, namespace, digest, kept = _HEADER.unpack(header)
    if magic != _MAGIC or namespace != key[4:20] or digest != _HEADER.unpack(expected)[5]:
        return Reason.FOREIGN
    if (version, layout) != (_VERSION, _LAYOUT_VERSION):
        return Reason.WRONG_VERSION
    return None if (payload, kept) == (nbytes, stored) else Reason.WRONG_SIZE
