"""The bytes of a tape file: header and chunks. See docs/tape-file.md."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from farpool._native import crc32c
from farpool.errors import TapeFileError

__all__ = ["CHUNK_BYTES", "DATA", "DONE", "HEADER_BYTES", "MAGIC", "META", "VERSION", "ChunkHeader"]
__all__ += ["check_header", "decompress", "pack_chunk", "pack_header"]

MAGIC = b"FARTAPE\0"
VERSION = 1
META, DATA, DONE = b"META", b"DATA", b"DONE"
_PAYLOAD_BYTES_MAX = 1 << 28
"""Maximum bytes of a payload. Without this limit, a damaged file could make the reader allocate all memory."""
_COMPRESSION_LEVEL = 1
_HEADER = struct.Struct("<8sIIQI")
_CHUNK = struct.Struct("<4sIII")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
CHUNK_BYTES = _CHUNK.size + _CHECKSUM.size


class ChunkHeader(NamedTuple):
    """Header of a chunk, which precedes the payload."""

    kind: bytes
    number: int
    stored: int
    """Bytes of the payload in the file."""
    nbytes: int
    """Bytes of the payload after decompression."""
    checksum: int

    @classmethod
    def unpack(cls, data: bytes) -> ChunkHeader:
        return cls(*_CHUNK.unpack_from(data), *_CHECKSUM.unpack_from(data, _CHUNK.size))

    def verified(self, payload: bytes) -> bool:
        """Return True if header and payload match the checksum."""
        fields = _CHUNK.pack(self.kind, self.number, self.stored, self.nbytes)
        return crc32c(payload, crc32c(fields)) == self.checksum


def pack_header() -> bytes:
    """Pack the header of a tape file."""
    fields = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0)
    return fields + _CHECKSUM.pack(crc32c(fields))


def check_header(data: bytes, path: str) -> None:
    """Raise TapeFileError unless the header belongs to a tape file that this farpool can read.

    Parameters
    ----------
    data : bytes
        The first `HEADER_BYTES` bytes of the file; fewer if the file is shorter.

    Raises
    ------
    TapeFileError
        The file is not a tape file, its header is damaged, or it has a newer version or unknown features.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise TapeFileError(f"{path} is not a tape file: expected one that pool.record() has written")
    # Check the version first: a newer one may have another layout and another checksum.
    version = int.from_bytes(data[8:12], "little") if len(data) >= 12 else VERSION
    if version > VERSION:
        raise TapeFileError(
            f"{path} is a tape file of version {version}, this farpool reads up to version {VERSION}; upgrade farpool"
        )
    if len(data) < HEADER_BYTES or crc32c(data[: _HEADER.size]) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise TapeFileError(f"the header of the tape file {path} is damaged; record it again")
    _, version, header_bytes, features, _ = _HEADER.unpack_from(data)
    if version < 1 or header_bytes != HEADER_BYTES or features != 0:
        raise TapeFileError(
            f"{path} is a tape file of version {version} with header size {header_bytes} and feature bits "
            f"{features:#x}, this farpool knows version {VERSION}, {HEADER_BYTES} and no features"
        )


def pack_chunk(kind: bytes, number: int, payload: bytes) -> bytes:
    """Compress a MessagePack payload and pack it into a chunk.

    Raises
    ------
    ValueError
        The payload is too large for one chunk.
    """
    if len(payload) > _PAYLOAD_BYTES_MAX:
        raise ValueError(f"a chunk of {len(payload)} bytes is too large; at most {_PAYLOAD_BYTES_MAX} are read back")
    stored = zlib.compress(payload, _COMPRESSION_LEVEL)
    fields = _CHUNK.pack(kind, number, len(stored), len(payload))
    return fields + _CHECKSUM.pack(crc32c(stored, crc32c(fields))) + stored


def decompress(header: ChunkHeader, stored: bytes) -> bytes:
    """Decompress the payload of a chunk.

    Raises
    ------
    ValueError
        The decompressed payload does not match the header.
    """
    if header.nbytes > _PAYLOAD_BYTES_MAX:
        raise ValueError(f"{header.nbytes} bytes, at most {_PAYLOAD_BYTES_MAX} are read")
    try:
        # One byte more than expected is enough to notice a longer payload, and bounds the memory that a damaged file
        # takes.
        payload = zlib.decompressobj().decompress(stored, header.nbytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(payload) != header.nbytes:
        raise ValueError(f"{len(payload)} bytes decompressed, expected {header.nbytes}")
    return payload
