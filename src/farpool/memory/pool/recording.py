"""Recordings of a program's accesses to its pool, written to tape files while it runs.

The pool appends a note to a queue whenever blocks are made or freed, with its lock held, and whenever an access is
granted, while the operands are pinned. The next thread that releases operands turns the notes into bytes and writes
them, many records at a time, without the pool's lock. If the tape file cannot be written any more, the recording ends
and the pool goes on without it. `Recording.close` then raises the error.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from types import TracebackType
from typing import Self

from farpool.errors import TapeFileError
from farpool.memory.pager import NOWHERE, Pager, Run, State
from farpool.memory.pager.storage import Cut
from farpool.memory.tape import Access, Content, Create, Free, Metadata, Record, TapeWriter
from farpool.memory.tape import Run as TapeRun
from farpool.memory.tape.records import TICK
from farpool.memory.tiers import Tier

__all__ = ["Made", "Note", "Recorder", "Recording", "metadata"]

_TICK_NS = round(TICK * 1e9)
_CHUNK_RECORDS = 2048
"""Number of records that are written at once. Each run of consecutive blocks in an access counts as one record."""
_WRITE_INTERVAL_NS = 1_000_000_000
"""Nanoseconds after one write when the next is due, so that little is lost if the process is killed."""


@dataclass(frozen=True, slots=True)
class Made:
    """A group of consecutive blocks that were made together."""

    first: int
    count: int
    name: str
    adopted: bool
    """True if a source file had a clean copy of the blocks when they were made."""


class Note:
    """An access that the pool has granted, and that recordings will write to their files.

    Times are nanoseconds of the monotonic clock; `released` is 0 until the access is released.
    """

    __slots__ = ("asked", "granted", "op", "released", "runs", "thread")

    def __init__(self, runs: Sequence[Run], op: str, waited: float) -> None:
        self.runs = runs
        self.op = op
        self.thread = threading.get_ident()
        self.granted = time.perf_counter_ns()
        self.asked = self.granted - round(waited * 1e9)
        self.released = 0


class Recording:
    """A recording to a tape file. If it is used as a context manager, it ends when the ``with`` block ends.

    Attributes
    ----------
    path : Path
        The file.
    """

    def __init__(self, recorder: Recorder, writer: TapeWriter, living: Iterable[Record]) -> None:
        self.path = writer.path
        self.noted: deque[Record | Note] = deque(living)
        """Records to write, in the order of the program, except that overlapping accesses may come in either order."""
        self._recorder = recorder
        self._writer = writer
        self._writing = threading.Lock()
        self._owner = os.getpid()
        self._ended = False
        self._error: Exception | None = None
        self._written = time.perf_counter_ns()
        self._began = self._written // _TICK_NS
        self._threads: dict[int, tuple[int, int]] = {}
        """For each thread, by its identity: its number, and the time of its last release in ticks."""

    def advance(self, now: int) -> None:
        """Write the records that are complete, if many records are queued or the last write was long ago.

        An `Exception` is not raised here. It is kept, and `close` raises an error for it.
        """
        if len(self.noted) < _CHUNK_RECORDS and now - self._written < _WRITE_INTERVAL_NS:
            return
        if self._is_parents():
            return
        # If another thread writes already, we do not wait for its disk: this thread is about to continue its
        # computation.
        if self._writing.acquire(blocking=False):
            try:
                if not self._ended and self._error is None:
                    self._write(last=False)
            finally:
                self._writing.release()
            if self._error is not None:
                self.end()

    def end(self) -> None:
        """Stop recording and complete the file. An error is kept, and `close` raises an error for it."""
        # Before any lock: a thread of the parent may have held it at the fork.
        if self._is_parents():
            return
        # New records stop first, so that the loop in `_write` comes to an end while other threads use the pool.
        self._recorder.forget(self)
        with self._writing:
            if self._ended:
                return
            self._ended = True
            if self._error is None:
                self._write(last=True)
            self._writer.close()

    def close(self) -> None:
        """Stop recording and complete the file; the pool stays open.

        Raises
        ------
        TapeFileError
            The file could not be written up to its end (a full disk, for example). Its first part is readable.
        """
        self.end()
        error, self._error = self._error, None
        if error is not None:
            raise TapeFileError(
                f"the recording ended early, {self.path} could not be written: {error}; "
                "the part written before can be read"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the block's error says more than an error of close()
            self.end()

    def _is_parents(self) -> bool:
        """Return True in the child of a fork. The child does not write, because the file belongs to its parent."""
        return os.getpid() != self._owner

    def _write(self, *, last: bool) -> None:
        try:
            while records := self._take(last=last):
                self._writer.write(records)
            self._written = time.perf_counter_ns()
            if last:
                self._writer.finish()
        except BaseException as error:  # even an interrupt leaves a gap: the records taken are not written
            self._error = error if isinstance(error, Exception) else InterruptedError(repr(error))
            if not isinstance(error, Exception):
                raise

    def _take(self, *, last: bool) -> list[Record]:
        """Remove a chunk of records from the queue, and return it.

        The chunk ends before the first access that is not released yet. If `last` is True, it does not end there, and
        accesses that are not released are dropped.
        """
        records: list[Record] = []
        weight = 0
        while self.noted and weight < _CHUNK_RECORDS:
            noted = self.noted[0]
            if not isinstance(noted, Note):
                records.append(noted)
            elif noted.released:
                records.append(self._access(noted))
                weight += len(noted.runs)
            # Records stay in the order of notes, so an access that is not released yet holds back all later ones.
            elif not last:
                break
            self.noted.popleft()
            weight += 1
        return records

    def _access(self, note: Note) -> Access:
        # Differences of rounded times: the errors of rounding do not add up.
        asked, granted, released = (moment // _TICK_NS for moment in (note.asked, note.granted, note.released))
        thread, before = self._threads.get(note.thread, (len(self._threads), self._began))
        self._threads[note.thread] = thread, released
        return Access(
            thread,
            note.op,
            tuple([TapeRun(run.first, run.count, run.mode, run.table) for run in note.runs]),
            max(0, asked - before) * TICK,
            (granted - asked) * TICK,
            (released - granted) * TICK,
        )


class Recorder:
    """The recordings of a pool that are under way. Callers of `created` and `freed` hold the pool's lock.

    Attributes
    ----------
    recordings : tuple of Recording
        The recordings under way. Callers call `created`, `freed` and `granted` only if there are any.
    """

    def __init__(self) -> None:
        self.recordings: tuple[Recording, ...] = ()
        self._changing = threading.Lock()

    def start(self, writer: TapeWriter, pager: Pager, living: Iterable[Made]) -> Recording:
        """Start a recording; its first records describe the blocks that exist already."""
        # The caller holds the pool's lock, so no block is made or freed between this list and the first record after
        # it.
        recording = Recording(self, writer, [create for made in living for create in _creates(pager, made)])
        with self._changing:
            self.recordings = (*self.recordings, recording)
        return recording

    def forget(self, recording: Recording) -> None:
        """Remove a recording, so that it receives no more records."""
        with self._changing:
            self.recordings = tuple(other for other in self.recordings if other is not recording)

    def created(self, pager: Pager, made: Made) -> None:
        """Record that blocks were made. The program has not used them yet."""
        creates = _creates(pager, made)
        for recording in self.recordings:
            recording.noted.extend(creates)

    def freed(self, first: int, count: int) -> None:
        """Record that the program has dropped blocks."""
        for recording in self.recordings:
            recording.noted.append(Free(first, count))

    def granted(self, runs: Sequence[Run], op: str, waited: float) -> Note:
        """Record that an access was granted. Called without the pool's lock, while the operands are pinned.

        If accesses of two threads overlap in time, the threads may call this in either order.

        Parameters
        ----------
        waited : float
            Seconds that the operation waited for its operands.
        """
        note = Note(runs, op, waited)
        for recording in self.recordings:
            recording.noted.append(note)
        return note

    def deliver(self) -> None:
        """Write queued records to the files of all recordings; called without the pool's lock."""
        now = time.perf_counter_ns()
        for recording in self.recordings:
            recording.advance(now)

    def end(self) -> None:
        """End all recordings, because the pool is closed."""
        for recording in self.recordings:
            recording.end()


def metadata(device: str, budget: int, sizes: Cut, tiers: Iterable[Tier], classes: tuple[str, ...]) -> Metadata:
    """Make the header of a tape file, which describes the pool."""
    return Metadata(
        farpool=version("farpool"),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=device,
        budget=budget,
        cut=sizes,
        tiers=tuple(tier.info for tier in tiers),
        classes=classes,
    )


def _creates(pager: Pager, made: Made) -> list[Create]:
    """Make creation records for blocks that exist already.

    Consecutive blocks with the same `Content` share one record.
    """
    members = range(made.first, made.first + made.count)
    creates = []
    for content, group in groupby(members, key=lambda block: _content(pager, block, made.adopted)):
        same = list(group)
        creates.append(_create(pager, made, same[0], len(same), content))
    return creates


def _create(pager: Pager, made: Made, first: int, count: int, content: Content) -> Create:
    return Create(
        first,
        count,
        pager.block(first).size,
        pager.block(first + count - 1).size,
        pager.class_of(first),
        made.name,
        content,
        pager.block(first).name,
    )


def _content(pager: Pager, block: int, adopted: bool) -> Content:
    row = pager.block(block)
    if row.tier == NOWHERE and not row.dirty:
        if adopted:
            return Content.FILE
        if row.state == State.ABSENT:
            return Content.NONE
    return Content.POOL
