"""Reads and writes the files that users name in ``farpool store`` commands."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from farpool.errors import ConfigError

__all__ = ["as_shown", "open_source", "read_parts", "write_whole"]


def open_source(file: str) -> BinaryIO:
    """Open a file for reading. ``-`` is stdin, which stays open when the returned file is closed.

    Raises
    ------
    ConfigError
        The file cannot be opened.
    """
    try:
        return open(sys.stdin.fileno() if file == "-" else file, "rb", closefd=file != "-")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", setting="file") from error


def read_parts(source: BinaryIO, file: str, nbytes: int) -> Iterator[bytes]:
    """Yield parts of at most `nbytes` bytes until the end of a source; `file` is the source's name in errors.

    Raises
    ------
    ConfigError
        The source cannot be read.
    """
    while True:
        try:
            part = source.read(nbytes)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}", setting="file") from error
        if not part:
            return
        yield part


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file completely or not at all. A device or a FIFO receives each part as it arrives.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    try:
        if _is_special(path):
            with open(path, "wb") as file:
                file.writelines(parts)
            return
        path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        # In the same folder, because `os.replace` cannot move a file to another file system.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                # mkstemp lets only the owner use the file. A process can read its umask only by setting it.
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(descriptor, 0o666 & ~umask)
                file.writelines(parts)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if error.errno is None:  # an error of the node or the registry that the parts are read from
            raise
        raise ConfigError(f"{path} cannot be written: {error.strerror}", setting="output") from error


def as_shown(text: str | bytes) -> str:
    """Escape control characters, so that a terminal shows the characters instead of acting on them."""
    if isinstance(text, bytes):
        text = text.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _is_special(path: Path) -> bool:
    """Return True if the path names a device, a FIFO or a folder, which must not be replaced by a file."""
    try:
        return not S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
