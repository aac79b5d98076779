"""Copies of the registry's entries that a node keeps in its folder, for a start without the registry.

A file begins with one line: a magic word, the version of the format, feature bits, and the SHA-256 of the rest, which
is JSON. A file that does not match is not used: the node then knows nothing, which is not the same as an empty copy.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from farpool.decoding import prepared

__all__ = ["Copied", "CopyFile"]

_VERSION = 1
_BYTES_MAX = 64 << 20


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a file.

    Attributes
    ----------
    registry : str
        Address of the registry that it is from, without secrets.
    """

    registry: str = ""


_Content = TypeVar("_Content", bound=Copied)


class CopyFile(Generic[_Content]):
    """File with a copy.

    Parameters
    ----------
    path : Path
        Path of the file.
    magic : str
        First word in the file.
    kind : type
        Type of its content.
    """

    def __init__(self, path: Path, magic: str, kind: type[_Content]) -> None:
        self.path = path
        self._magic = magic.encode()
        self._kind = kind

    def read(self) -> _Content | None:
        """Return the copy; None if there is none.

        Raises
        ------
        ValueError
            There is a file, and it is damaged, or a later release has written it.
        OSError
            The file cannot be read.
        """
        try:
            with open(self.path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                content = file.read(_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        head, separator, rest = content.partition(b"\n")
        words = head.split(b" ")
        if len(content) > _BYTES_MAX or not separator or len(words) != 4 or words[0] != self._magic:
            raise ValueError(f"it has {len(content)} bytes and begins with {content[:32]!r}, which is not such a file")
        if words[1] != b"%d" % _VERSION or words[2] != b"0":
            raise ValueError("it was written by a later release of farpool")
        if words[3] != hashlib.sha256(rest).hexdigest().encode():
            raise ValueError("it does not match its checksum")
        try:
            return msgspec.json.decode(rest, type=prepared(self._kind))
        except msgspec.MsgspecError as error:
            raise ValueError(f"it has another content: {error}") from error

    def write(self, copy: _Content) -> None:
        """Replace the copy. A crash leaves the old one or the new one.

        Raises
        ------
        OSError
            The file cannot be written; the old one stays.
        """
        rest = msgspec.json.encode(copy)
        head = b"%b %d 0 %b\n" % (self._magic, _VERSION, hashlib.sha256(rest).hexdigest().encode())
        made = self.path.with_name(f"{self.path.name}.new")
        with open(made, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(head + rest)
            file.flush()
            os.fsync(file.fileno())
        made.rename(self.path)

    def remove(self) -> None:
        """Delete the file, if there is one and it can be deleted."""
        with suppress(OSError):
            self.path.unlink()
