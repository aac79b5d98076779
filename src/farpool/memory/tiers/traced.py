"""Tracing of each operation on a tier, for tests and for finding out what a program does."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from farpool.abc.tier import Extent, Tier
from farpool.errors import ConfigError
from farpool.memory.tiers.wrapper import WrapperTier

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
        When it began, in seconds on the monotonic clock.
    duration : float
        Seconds until it had ended.
    offset : int or None
        Where the extent begins; None if a reservation failed.
    nbytes : int
        Bytes of the extent.
    error : str or None
        Type and message of the error with which it ended.
    """

    tier: str
    op: str
    time: float
    duration: float
    offset: int | None
    nbytes: int
    error: str | None = None


class Traced(WrapperTier):
    """Wrapper that records each operation on a tier: in memory, for a callback, or in a file.

    Transfers are noted in Python, so a pool calls the inner tier with the interpreter lock; everything is slower.

    Parameters
    ----------
    inner : Tier
        The inner tier.
    callback : callable, optional
        Called with each `TraceRecord`, from whichever thread sees the end of the operation. It must not use the tier.
        What it raises is logged and does no harm to the operation.
    path : str or path-like, optional
        File for the records, one JSON object a line. Begun anew when the tier is opened.
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
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ConfigError(f"keep is {keep!r}, expected a number of records, 0 or more")
        self._callback = callback
        self._path = None if path is None else os.path.abspath(os.fspath(path))
        self._file: BinaryIO | None = None
        self._kept: deque[TraceRecord] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self._lifecycle = threading.Lock()

    def records(self) -> tuple[TraceRecord, ...]:
        """The last records, in the order in which the operations ended."""
        with self._lock:
            return tuple(self._kept)

    def open(self) -> None:
        with self._lifecycle:
            super().open()
            if self._path is None or self._file is not None:
                return
            try:
                # Unbuffered, so that the lines are there when the process is killed.
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - lives until close()
            except OSError as error:
                super().close()
                raise ConfigError(f"path of the trace: {self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        with self._lifecycle:
            super().close()
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
        self._transfer("read", super().read_into, extent, into)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self._transfer("write", super().write_from, extent, data)

    def _transfer(
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
            # The operation has happened; it must not look as if it had failed.
            _log.exception("%s: a trace record could not be delivered: %s", record.tier, record)
