"""Writes a tape file, chunk by chunk; written chunks stay readable even if a later write fails."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from farpool.errors import TapeFileError
from farpool.memory.tape.layout import DATA, DONE, HEADER_BYTES, MAGIC, META, pack_chunk, pack_header
from farpool.memory.tape.records import Metadata, Record
from farpool.memory.tape.wire import Encoder

__all__ = ["TapeWriter"]


class TapeWriter:
    """A tape file that is being written. Not thread-safe.

    Parameters
    ----------
    path : path
        The file. It is created, or overwritten if it is a tape file.
    metadata : Metadata

    Raises
    ------
    TapeFileError
        The file exists and is not a tape file, another writer writes to it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        self.path = Path(path)
        self._encoder = Encoder(metadata.classes)
        self._chunks = 0
        self._end = HEADER_BYTES
        self._fd = _open(self.path)
        try:
            # The file is emptied only now, with the lock held, because another recording could be under way in it.
            os.ftruncate(self._fd, 0)
            _write_at(self._fd, pack_header(), 0)
            self._append(META, self._encoder.map(metadata))
        except OSError as error:
            try:
                # Unlink before the close, which ends the lock: after that, the file could be another recording's.
                self.path.unlink(missing_ok=True)
            finally:
                os.close(self._fd)
            raise TapeFileError(f"{self.path}: cannot write it: {error.strerror}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Append records as one chunk.

        Raises
        ------
        OSError
            The chunk cannot be written. The file then ends with the previous chunk.
        """
        self._append(DATA, self._encoder.records(records))

    def finish(self) -> None:
        """Mark the file as complete. Raises the errors of `write`."""
        self._append(DONE, self._encoder.map(self._encoder.totals))

    def close(self) -> None:
        """Close the file. A file that is not marked as complete can still be read up to its last whole chunk."""
        os.close(self._fd)

    def _append(self, kind: bytes, payload: bytes) -> None:
        chunk = pack_chunk(kind, self._chunks, payload)
        try:
            _write_at(self._fd, chunk, self._end)
        except OSError:
            # A reader must find the end after the last whole chunk; half a chunk would look like a recording that was
            # cut off.
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(chunk)
        self._chunks += 1


def _open(path: Path) -> int:
    try:
        # No O_TRUNC: the file may be the user's, and we have not looked at its first bytes yet. O_NONBLOCK, because
        # opening a named pipe would wait for its other end.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise TapeFileError(f"{path}: cannot open it to record a tape: {error.strerror}") from error
    try:
        ours = stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, len(MAGIC), 0) in (b"", MAGIC)
        if not ours:
            raise TapeFileError(f"{path} is neither empty nor a tape file; it was not touched, choose another path")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise TapeFileError(f"{path}: another recording is under way in this file; choose another path") from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
