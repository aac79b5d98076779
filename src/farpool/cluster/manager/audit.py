"""The audit log: one line of JSON for each grant, denial and change, in a file that is only appended to.

A thread writes the lines, so a slow disk does not stop the event loop. If the file cannot be written, the lines wait in
memory and the manager refuses further changes until they are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import stat
import threading
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from farpool.closing import Closing
from farpool.errors import ConfigError

__all__ = ["AuditLog"]

_LINES_WAITING_MAX = 10_000
_RETRY_INTERVAL_S = 0.5


class AuditLog(Closing):
    """An append-only file that is rotated by size. Thread-safe.

    The file has mode 0600. A full file gets the name ``FILE.1``, the former ``FILE.1`` becomes ``FILE.2``, and so on.

    Parameters
    ----------
    path : Path
        The file.
    bytes_max : int
        Size in bytes at which the file is rotated.
    files_max : int
        Number of rotated files to keep.

    Raises
    ------
    ConfigError
        The file cannot be opened, is no regular file, can be read by other users, or another manager writes it.

    Attributes
    ----------
    lines : int
        Lines written.
    lost : int
        Lines about denials that were dropped because the file could not be written and too many lines waited.
    trouble : str
        Why the file cannot be written now; empty if it can.
    """

    def __init__(self, path: Path, *, bytes_max: int = 16 << 20, files_max: int = 8) -> None:
        self.lines = self.lost = 0
        self.trouble = ""
        self._path, self._bytes_max, self._files_max = path, bytes_max, files_max
        self._waiting: queue.Queue[tuple[bytes, Future[None]] | None] = queue.Queue(_LINES_WAITING_MAX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = _opened(path)
        except OSError as error:
            raise ConfigError(f"--audit: {path} cannot be written: {error.strerror}", setting="audit") from error
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write, name="farpool-audit", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True if the next line can probably be written."""
        return not self.trouble and not self._waiting.full()

    def add(self, event: str, **fields: object) -> Future[None]:
        """Add a line; return a future that is done once the line is in the file.

        If too many lines wait already, the line is dropped and counted, and the future has an error.
        """
        done: Future[None] = Future()
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        try:
            self._waiting.put_nowait((msgspec.json.encode(line) + b"\n", done))
        except queue.Full:
            self.lost += 1
            done.set_exception(OSError(f"{self._path} cannot be written: {self.trouble or 'it is too slow'}"))
        return done

    def close(self) -> None:
        """Write the lines that wait, and close the file. Idempotent. Lines that cannot be written now are dropped."""
        if not self._ending.is_set():
            self._ending.set()
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join()
            os.close(self._file)

    def _write(self) -> None:
        while True:
            try:
                one = self._waiting.get(timeout=_RETRY_INTERVAL_S)
            except queue.Empty:
                if self._ending.is_set():
                    return
                continue
            if one is None:
                return
            line, done = one
            while not self._written(line):
                if self._ending.wait(_RETRY_INTERVAL_S):
                    done.set_exception(OSError(self.trouble))
                    break
            else:
                self.lines += 1
                done.set_result(None)

    def _written(self, line: bytes) -> bool:
        begun = -1
        try:
            self._follow_path()
            size = os.fstat(self._file).st_size
            if size and size + len(line) > self._bytes_max:
                self._rotate()
            begun = os.fstat(self._file).st_size
            if os.write(self._file, line) < len(line):
                raise OSError(0, "the disk is full")
        except (OSError, ConfigError) as error:  # the latter for a file in the place of the new one
            self.trouble = getattr(error, "strerror", None) or str(error)
            # A part of a line would make the next line unreadable, too.
            with contextlib.suppress(OSError):
                if begun >= 0:
                    os.ftruncate(self._file, begun)
            return False
        self.trouble = ""
        return True

    def _follow_path(self) -> None:
        """Open the file again if a person has moved or deleted it, because its lines would be lost with it."""
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            new = _opened(self._path)
            os.close(self._file)
            self._file = new

    def _rotate(self) -> None:
        # The new file comes first: without it, nothing is renamed.
        made = self._path.with_name(f"{self._path.name}.new")
        new = _opened(made)
        try:
            for number in range(self._files_max, 0, -1):
                newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(newer, self._path.with_name(f"{self._path.name}.{number}"))
            os.replace(made, self._path)
        except BaseException:
            os.close(new)  # its lock would be in the way of the next try
            raise
        os.close(self._file)
        self._file = new


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o077:
            raise ConfigError(
                f"--audit: {path} has mode {stat.filemode(state.st_mode)}, expected a file that only its owner may "
                f"use: chmod 600 {path}",
                setting="audit",
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--audit: another manager writes {path}; give each manager a file of its own", setting="audit"
            ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
