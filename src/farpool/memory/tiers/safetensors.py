"""A read-only tier over an existing safetensors file, so that weights are read from their own file.

The file begins with eight bytes that give the length of the header (little-endian). The header follows, as JSON, and
then the data. The header maps each tensor's name to its dtype, its shape, and the offsets at which its bytes begin and
end, counted from the first byte after the header.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from farpool._native import FilePort
from farpool.abc.tier import Extent, TierInfo
from farpool.errors import ConfigError, TierError
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.safetensors_header import HEADER_BYTES_MAX, TensorEntry, parse_header

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["SafetensorsFile"]

_NO_TENSORS: Mapping[str, TensorEntry] = MappingProxyType({})


class SafetensorsFile(PortTier):
    """A read-only tier over a safetensors file.

    The header is read and checked at open. Reads raise TierError if another program has since truncated the file or
    written to it. If another file is renamed over this path, reads still return the old file's bytes.

    Parameters
    ----------
    path : str or path-like
        The file.
    name : str, optional
        Name of the tier; the name of the file if not given.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        super().__init__()
        self._path = os.path.abspath(os.fspath(path))
        self._name = os.path.basename(self._path) if name is None else name
        self._nbytes: int | None = None
        self._tensors = _NO_TENSORS
        self._metadata: Mapping[str, str] = MappingProxyType({})
        self._extents: frozenset[Extent] = frozenset()
        self._fd = -1

    @property
    def info(self) -> TierInfo:
        return TierInfo(self._name, "nvme", self._size(), 1)

    @property
    def path(self) -> str:
        """Absolute path of the file."""
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Entries of the tensors by name, in the order of the header; empty while the tier is closed."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's ``__metadata__`` entry; empty while the tier is closed."""
        return self._metadata

    @property
    def reserved(self) -> int:
        """Bytes of all tensors in the file; 0 while the tier is closed."""
        return sum(entry.extent.nbytes for entry in self._tensors.values())

    def reserve(self, nbytes: int) -> Extent:
        raise self._read_only()

    def free(self, extent: Extent) -> None:
        raise ValueError(f"{self._name}: {extent} cannot be freed, the file is read-only")

    def write_from(self, extent: Extent, data: memoryview) -> None:
        raise self._read_only()

    def _read_only(self) -> TierError:
        return TierError(f"{self._name}: {self._path} is read-only", tier=self._name)

    def _size(self) -> int:
        if self._nbytes is not None:
            return self._nbytes
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _open_port(self) -> Port:
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for its other end.
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(f"{self._name}: {self._path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{self._name}: {self._path} is not a file")
            # Before the header is read, so that the port notices a change from here on.
            port = FilePort(fd, self._name, direct=False, read_only=True)
            header = parse_header(self._header_bytes(fd, status.st_size), status.st_size, self._path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._nbytes = status.st_size
        self._tensors = header.tensors
        self._metadata = header.metadata
        self._extents = frozenset(entry.extent for entry in header.tensors.values())
        return port

    def _close_port(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._nbytes = None
        self._tensors = _NO_TENSORS
        self._metadata = MappingProxyType({})
        self._extents = frozenset()

    def _check_extent(self, extent: Extent) -> None:
        if extent not in self._extents:
            raise ValueError(f"{self._name}: {extent} is not the extent of a tensor of {self._path}")

    def _header_bytes(self, fd: int, file_bytes: int) -> bytes:
        try:
            prefix = os.pread(fd, 8, 0)
            if len(prefix) < 8:
                raise ConfigError(f"{self._path} is no safetensors file: it has {file_bytes} bytes, expected 8 or more")
            length = int.from_bytes(prefix, "little")
            if length > min(HEADER_BYTES_MAX, file_bytes - 8):
                raise ConfigError(
                    f"{self._path} is no safetensors file: its header would have {length} bytes, the file has "
                    f"{file_bytes}"
                )
            header = b""
            while len(header) < length:
                piece = os.pread(fd, length - len(header), 8 + len(header))
                if not piece:
                    raise ConfigError(f"{self._path} ends within its header: it was truncated while it was opened")
                header += piece
            return header
        except OSError as error:
            raise ConfigError(f"{self._name}: {self._path} cannot be read: {error.strerror}") from error
