"""Tracing of each operation on a tier, for tests and for understanding a program."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from farpool.abc.tier import Extent, Tier
from farpool.checks import require_whole
from farpool.errors import ConfigError
from farpool.memory.tiers.wrapper import WrapperTier

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["TraceRecord", "Traced"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Record of one operation on a tier.

    Attributes
    ----------
    tier : str
        Name of the tier.
    op : str
        ``reserve``, ``free``, ``read`` or ``write``.
    time : float
        Time when the operation began, in seconds of the monotonic clock.
    duration : float
        Seconds from the beginning of the operation to its end.
    offset : int or None
        Offset of the extent; None if a reservation failed.
    nbytes : int
        Bytes of the extent.
    error : str or None
        Type and message of the error that the operation raised; None if it succeeded.
    """

    tier: str
    op: str
    time: float
    duration: float
    offset: int | None
    nbytes: int
    error: str | None = None


class Traced(WrapperTier):
    """Wrapper that records each operation on a tier in memory, and if asked also calls a callback or writes a file.

    It records transfers in Python. So a pool needs the interpreter lock for each transfer, and runs slower.

    Parameters
    ----------
    inner : Tier
        The inner tier.
    callback : callable, optional
        Called with each `TraceRecord`, in the thread of the operation. The callback must not use the tier. An
        exception in the callback is logged and does not affect the operation.
    path : str or path-like, optional
        File for the records, one JSON object a line. Overwritten when the tier is opened.
    keep : int
        Number of records that are kept for :meth:`records`; older ones are dropped.

    Raises
    ------
    ConfigError
        `keep` is less than 0.
    """

    def __init__(
        self,
        inner: Tier,
        callback: Callable[[TraceRecord], object] | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        keep: int = 10_000,
    ) -> None:
        super().__init__(inner)
        require_whole(keep, "keep", 0, hint=" record")
        self._callback = callback
        self._path = None if path is None else os.path.abspath(os.fspath(path))
        self._file: BinaryIO | None = None
        self._kept: deque[TraceRecord] = deque(maxlen=keep)
        self._lock = threading.Lock()

    def records(self) -> tuple[TraceRecord, ...]:
        """Return the last records, in the order in which the operations ended."""
        with self._lock:
            return tuple(self._kept)

    def _wrap(self, *ports: Port) -> Port:
        if self._path is not None:
            try:
                # Unbuffered, so that each line is in the file even if the process is killed.
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - lives until close()
            except OSError as error:
                raise ConfigError(f"path of the trace: {self._path} cannot be written: {error.strerror}") from error
        return super()._wrap(*ports)

    def _close_port(self) -> None:
        super()._close_port()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def reserve(self, nbytes: int) -> Extent:
        begin = time.monotonic()
        try:
            extent = super().reserve(nbytes)
        except BaseException as error:
            self._note("reserve", begin, None, nbytes, error)
            raise
        self._note("reserve", begin, extent.offset, nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        begin = time.monotonic()
        try:
            super().free(extent)
        except BaseException as error:
            self._note("free", begin, extent.offset, extent.nbytes, error)
            raise
        self._note("free", begin, extent.offset, extent.nbytes)

    def read_into(self, extent: Extent, into: memoryview) -> None:
        self._traced("read", super().read_into, extent, into)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self._traced("write", super().write_from, extent, data)

    def _traced(
        self, op: str, transfer: Callable[[Extent, memoryview], None], extent: Extent, view: memoryview
    ) -> None:
        begin = time.monotonic()
        try:
            transfer(extent, view)
        except BaseException as error:
            self._note(op, begin, extent.offset, extent.nbytes, error)
            raise
        self._note(op, begin, extent.offset, extent.nbytes)

    def _note(self, op: str, begin: float, offset: int | None, nbytes: int, error: BaseException | None = None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        record = TraceRecord(self.info.name, op, begin, time.monotonic() - begin, offset, nbytes, text)
        try:
            with self._lock:
                self._kept.append(record)
                if self._file is not None:
                    self._file.write(msgspec.json.encode(record) + b"\n")
            if self._callback is not None:
                self._callback(record)
        except Exception:
            # The operation succeeded, so it must not look as if it had failed.
            _log.exception("%s: a trace record could not be delivered: %s", record.tier, record)
