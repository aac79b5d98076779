"""Transfers between tiers and a device that has its own memory: through page-locked host memory, in two legs.

A fetch is read from its tier into the staging memory by a native thread, then copied to the device on a stream of
its own; a write-back goes the other way. The legs of different transfers overlap. Only the leg that writes the arena
waits for the transfers named in `Transfer.after`, so a tier is read while the range that the bytes are for is still
being emptied. It waits until they have reached their tier: a write that fails there must find its bytes in the arena
still.

The device is behind a small protocol: the CUDA one is in `farpool.executor.cuda`, the tests bring one of host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

from farpool import _native
from farpool.engine.messages import Kind, Move, Transfer
from farpool.executor.base import Done, Executor

__all__ = ["Copy", "Device", "StagedExecutor", "WatchesStaging"]

_IDLE = 0.05
"""Seconds after which the thread looks again even if nobody woke it."""
_BUSY = 20e-6
"""Seconds between two looks at copies under way: a device tells that a copy has ended only when it is asked."""


class Copy(Protocol):
    """A copy under way between staging memory and the device."""

    def done(self) -> bool:
        """Whether it has ended; raises if it failed."""
        ...


class Device(Protocol):
    """Copies between the arena on a device and staging memory on the host; offsets and sizes are bytes."""

    def note_use(self) -> None:
        """The calling thread's work is on the arena from now on."""
        ...

    def fence(self) -> object:
        """A point in the program's own work: copies that wait for it see its effects and do not disturb it."""
        ...

    def passed(self, fence: object) -> bool:
        """Whether the program's work in front of a fence has ended. Only debug mode asks."""
        ...

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move inside the arena, ordered with the program's work. The ranges may overlap."""
        ...

    def to_device(self, staging: int, place: int, nbytes: int, fence: object) -> Copy: ...

    def to_host(self, place: int, staging: int, nbytes: int, fence: object) -> Copy: ...


@runtime_checkable
class WatchesStaging(Protocol):
    """A device that wants to know when tiers are at work on the staging memory."""

    def tier_leg(self, transfer: int, staging: int, nbytes: int) -> None:
        """A transfer begins between its tier and this part of the staging memory."""
        ...

    def tier_leg_ended(self, transfer: int) -> None: ...


class _Leg(IntEnum):
    WAITING = 0
    TIER = 1
    READY = 2
    DEVICE = 3


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    fence: object
    urgent: bool
    nbytes: int
    leg: _Leg = _Leg.WAITING
    staging: int = -1
    start: float = 0.0
    copies: list[Copy] = field(default_factory=list)
    """Those that have not ended."""
    error: Exception | None = None
    """Why one of its copies failed. The job ends when the others have: the staging memory is theirs until then."""
    dropped: bool = False
    """Cancelled while its bytes were on their way into the staging memory; ends when they have arrived."""


class StagedExecutor(Executor):
    """Drives both legs from one thread of its own; the bytes themselves are moved without the interpreter lock.

    Parameters
    ----------
    device : Device
        Where the arena is.
    address, nbytes : int
        Staging memory: page-locked host memory, at least as large as the largest block.
    ports : list of Port
        The tiers' native ends, indexed as the engine indexes tiers; may grow.
    """

    def __init__(self, device: Device, address: int, nbytes: int, ports: list[_native.Port]) -> None:
        self._device = device
        self._watch = device if isinstance(device, WatchesStaging) else None
        self._address = address
        self._ports = ports
        self._space = _native.ExtentAllocator(nbytes, 64)
        self._queue = _native.Queue()
        self._jobs: dict[int, _Job] = {}
        self._done: list[Done] = []
        self._lock = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="farpool-staging", daemon=True)
        self._thread.start()

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        fence: object | None = None
        for command in commands:
            if isinstance(command, Move):
                self._device.move(command.source, command.target, command.nbytes)
                fence = None
                continue
            fence = fence if fence is not None else self._device.fence()
            nbytes = sum(-(-piece.nbytes // 64) * 64 for piece in command.pieces)
            with self._lock:
                if any(done.id in command.after and (done.error or done.cancelled) for done in self._done):
                    now = time.monotonic()
                    self._done.append(Done(command.id, None, True, now, now))
                    self._lock.notify_all()
                    continue
                self._jobs[command.id] = _Job(command, fence, command.demand, nbytes)
                self._lock.notify_all()

    def expedite(self, transfers: Sequence[int]) -> None:
        with self._lock:
            todo = list(transfers)
            while todo:
                job = self._jobs.get(todo.pop())
                if job is not None and not job.urgent:
                    job.urgent = True
                    todo.extend(job.transfer.after)

    def note_use(self) -> None:
        self._device.note_use()

    def poll(self) -> list[Done]:
        with self._lock:
            done, self._done = self._done, []
            return done

    def wait(self, timeout: float) -> bool:
        with self._lock:
            return bool(self._lock.wait_for(lambda: self._done or self._closing, timeout)) and bool(self._done)

    def close(self, timeout: float) -> bool:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout)
        return self._queue.close(timeout) and not self._thread.is_alive()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                if not self._jobs:
                    self._lock.wait(_IDLE)
                    continue
                progressed = self._step()
                copying = any(job.leg == _Leg.DEVICE for job in self._jobs.values())
            if not progressed:
                self._queue.wait(_BUSY if copying else _IDLE / 10)

    def _step(self) -> bool:
        """Take each job as far as it goes; True if any went on."""
        progressed = False
        for completion in self._queue.poll():
            job = self._jobs[completion.id]
            progressed = True
            if self._watch is not None:
                self._watch.tier_leg_ended(completion.id)
            if job.dropped:
                self._finish(job, None, cancelled=True)
            elif completion.error is not None:
                self._finish(job, completion.error)
            elif job.transfer.kind == Kind.FETCH:
                job.leg = _Leg.READY
            else:
                self._finish(job, None)
        for job in sorted(self._jobs.values(), key=_rank):
            if job.transfer.id in self._jobs:
                try:
                    progressed |= self._advance(job)
                except Exception as error:  # the thread must go on for the others
                    self._finish(job, error)
                    progressed = True
        return progressed

    def _advance(self, job: _Job) -> bool:
        fetch = job.transfer.kind == Kind.FETCH
        if job.leg == _Leg.WAITING:
            if not job.nbytes:
                if self._blocked(job):
                    return False
                self._finish(job, None)
                return True
            if any(self._jobs[n].leg == _Leg.WAITING for n in job.transfer.after if n in self._jobs):
                return False  # what it comes after needs staging memory first, or neither would ever go on
            job.staging = self._space.alloc(job.nbytes)
            if job.staging < 0:
                return False
            job.start = time.monotonic()
            if fetch:
                job.leg = _Leg.TIER
                self._submit(job, _native.Queue.READ)
                return True
            job.leg = _Leg.READY
        if job.leg == _Leg.READY:
            if self._blocked(job):
                return False
            self._start_copies(job)
            job.leg = _Leg.DEVICE
            return True
        if job.leg == _Leg.DEVICE:
            if not self._copied(job):
                return False
            if fetch or job.error is not None:
                self._finish(job, job.error)
            else:
                job.leg = _Leg.TIER
                self._submit(job, _native.Queue.WRITE)
            return True
        return False

    def _start_copies(self, job: _Job) -> None:
        fetch = job.transfer.kind == Kind.FETCH
        copy = self._device.to_device if fetch else self._device.to_host
        try:
            for staging, place, nbytes in _layout(job):
                ends = (staging, place) if fetch else (place, staging)
                job.copies.append(copy(*ends, nbytes, job.fence))
        except Exception as error:
            job.error = error

    def _copied(self, job: _Job) -> bool:
        """Whether all copies of a job have ended, well or badly."""
        under_way = []
        for copy in job.copies:
            try:
                if not copy.done():
                    under_way.append(copy)
            except Exception as error:
                job.error = job.error or error
        job.copies = under_way
        return not under_way

    def _blocked(self, job: _Job) -> bool:
        """Whether the arena range is still needed by a transfer that this one comes after."""
        return any(number in self._jobs for number in job.transfer.after)

    def _submit(self, job: _Job, direction: int) -> None:
        pieces = job.transfer.pieces
        if self._watch is not None:
            self._watch.tier_leg(job.transfer.id, job.staging, job.nbytes)
        self._queue.submit(
            job.transfer.id,
            self._ports[pieces[0].tier],
            direction,
            [
                (piece.offset, self._address + staging, nbytes)
                for piece, (staging, _, nbytes) in zip(pieces, _layout(job), strict=True)
            ],
            (),
            int(job.urgent),
        )

    def _finish(self, job: _Job, error: BaseException | None, *, cancelled: bool = False) -> None:
        number = job.transfer.id
        del self._jobs[number]
        if job.staging >= 0:
            self._space.free(job.staging)
        self._done.append(Done(number, error, cancelled, job.start, time.monotonic()))
        self._lock.notify_all()
        if error is None:
            return
        for other in [other for other in self._jobs.values() if number in other.transfer.after]:
            if other.leg == _Leg.TIER:
                other.dropped = True
            else:
                self._finish(other, None, cancelled=True)


def _rank(job: _Job) -> tuple[bool, bool, int]:
    return not job.urgent, job.transfer.kind == Kind.WRITE_BACK, job.transfer.id


def _layout(job: _Job) -> list[tuple[int, int, int]]:
    """``(offset in the staging memory, offset in the arena, bytes)`` of each piece."""
    layout = []
    staging = job.staging
    for piece in job.transfer.pieces:
        layout.append((staging, piece.place, piece.nbytes))
        staging += -(-piece.nbytes // 64) * 64
    return layout
