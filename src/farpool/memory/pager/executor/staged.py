"""Executor of transfers between tiers and a device that has its own memory.

If the tier's memory is page-locked, the device copies directly between that memory and the arena. Otherwise a transfer
has two steps, which we call *legs*. In the tier's leg, a native thread copies the bytes between the tier and the
page-locked staging memory. In the device's leg, the device copies the bytes between staging memory and arena. Legs of
different transfers run at the same time.

The target range of a fetch may still hold bytes that other transfers write to their tiers; `Transfer.after` names these
transfers. Only the device's leg of the fetch waits for these transfers; the tier's leg of the fetch may run before the
range is free. The device's leg waits until the writes have ended on their tiers, because the bytes must still be in the
arena if a tier refuses a write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from farpool._native import ExtentAllocator, Port, Queue
from farpool.memory.pager import ALIGNMENT, Kind, Move, Transfer
from farpool.memory.pager.executor.base import Done, Executor
from farpool.memory.pager.executor.copies import Copy, Device, WatchesStaging
from farpool.memory.pager.executor.page_locks import PageLocks

__all__ = ["StagedExecutor"]

_IDLE_INTERVAL_S = 0.05
"""Seconds after which the idle thread checks for work even if no other thread woke it."""
_TIER_INTERVAL_S = 0.2e-3
"""Seconds between two checks while only tiers work. The end of a leg wakes the thread; a new command does not."""
_COPY_INTERVAL_S = 50e-6
"""Seconds between two polls of copies under way, because a device gives no signal when a copy has ended."""
_COPY_BYTES_MAX = 32 << 20
"""While copies of this many bytes are under way in one direction, only copies that an access waits for are started. The
limit is large enough to keep the link busy from one poll to the next, and small enough that these urgent copies wait
only briefly."""
_TROUBLE_INTERVAL_S = 10e-3
"""Seconds between two polls of copies while the device raises errors when it is polled."""


class _Leg(IntEnum):
    WAITING = 0
    TIER = 1
    READY = 2
    DEVICE = 3
    COPIED = 4


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    fence: object
    urgent: bool
    nbytes: int
    leg: _Leg = _Leg.WAITING
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """``(address in the host's memory, offset in the arena, bytes)`` of each copy of the device's leg; empty until the
    copies are planned."""
    staging: int = -1
    """Offset in the staging memory, -1 if the transfer does not use it."""
    start: float = 0.0
    copies: list[Copy] = field(default_factory=list)
    """Started copies that have not ended."""
    trouble: Exception | None = None
    """The error that the device raised at the last poll of a copy. We do not know if that copy has ended."""
    error: Exception | None = None
    """The error because of which a copy could not start. The job ends only after its started copies, because they use
    the host's memory."""
    dropped: bool = False
    """True if the job was cancelled while its tier's leg was under way; the job ends when that leg ends."""

    @property
    def fetch(self) -> bool:
        return self.transfer.kind == Kind.FETCH


class StagedExecutor(Executor):
    """Executor that starts all legs from one thread of its own; the bytes are copied without the interpreter lock.

    Parameters
    ----------
    device : Device
        The device whose memory has the arena.
    address, nbytes : int
        Staging memory: page-locked host memory, at least as large as the largest block.
    ports : list of Port
        The tiers' native ports, in the order of the pager's tier numbers. The pool appends a port for each source file.
    locks : PageLocks, optional
        Page-locks the tiers' memory, and unlocks it at close. With None, all transfers use staging memory.
    """

    def __init__(
        self, device: Device, address: int, nbytes: int, ports: list[Port], locks: PageLocks | None = None
    ) -> None:
        self._device = device
        self._watch = device if isinstance(device, WatchesStaging) else None
        self._address = address
        self._ports = ports
        self._locks = locks
        self._space = ExtentAllocator(nbytes, ALIGNMENT)
        self._queue = Queue()
        self._jobs: dict[int, _Job] = {}
        self._copying: dict[Kind, deque[_Job]] = {kind: deque() for kind in Kind}
        """Jobs whose copies are under way, by direction, in the order in which the copies started and will end."""
        self._copying_bytes = dict.fromkeys(Kind, 0)
        self._changed = False
        """True if all jobs have to be checked again, because an event that a job may have waited for has occurred."""
        self._done: list[Done] = []
        self._lock = threading.Condition()
        self._closing = False
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="farpool-staging", daemon=True)
        self._thread.start()

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        fence: object | None = None
        for command in commands:
            if isinstance(command, Move):
                self._device.move(command.source, command.target, command.nbytes)
                fence = None
                continue
            # Transfers of one call share a fence. After a move they need a new one, because copies must wait for the
            # move.
            fence = fence if fence is not None else self._device.fence()
            nbytes = sum(_rounded(piece.nbytes) for piece in command.pieces)
            with self._lock:
                # The predecessor may have failed already without the pager knowing it: its end is reported at the next
                # poll.
                if any(done.id in command.after and (done.error or done.cancelled) for done in self._done):
                    now = time.monotonic()
                    self._done.append(Done(command.id, None, True, now, now))
                else:
                    self._jobs[command.id] = _Job(command, fence, command.demand, nbytes)
                    self._changed = True
                self._lock.notify_all()

    def expedite(self, transfers: Sequence[int]) -> None:
        with self._lock:
            todo = list(transfers)
            while todo:
                job = self._jobs.get(todo.pop())
                if job is not None and not job.urgent:
                    job.urgent = self._changed = True
                    # A transfer cannot go on before its predecessors, so they become urgent with it.
                    todo.extend(job.transfer.after)
            self._lock.notify_all()

    @property
    def trouble(self) -> Exception | None:
        return self._trouble

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
        if not self._queue.close(timeout) or self._thread.is_alive():
            return False
        return self._locks is None or self._locks.close(timeout)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._device.begin_thread()
        while True:
            with self._lock:
                if not self._jobs and not self._closing:
                    self._lock.wait(_IDLE_INTERVAL_S)
                    continue
                progressed = self._note_ends()
                if not self._closing and (progressed or self._changed):
                    # One job that advances may unblock others, so `_changed` stays True until a round advances none.
                    progressed = self._changed = self._advance_all()
                copying = any(self._copying.values())
                # Copies under way use host memory, so the thread stays until they end. `close` itself waits for the
                # tiers' legs.
                if self._closing and not copying:
                    return
                if not self._jobs:
                    continue
            # We wait without the lock, which the program's threads need for new commands.
            if not progressed:
                poll = _COPY_INTERVAL_S if self._trouble is None else _TROUBLE_INTERVAL_S
                self._queue.wait(poll if copying else _TIER_INTERVAL_S)

    def _note_ends(self) -> bool:
        """Record which legs have ended; return True if any has."""
        progressed = False
        for completion in self._queue.poll():
            job = self._jobs[completion.id]
            progressed = True
            if self._watch is not None:
                self._watch.tier_leg_ended(completion.id)
            if job.dropped:
                self._finish(job, None, cancelled=True)
            elif completion.error is not None or not job.fetch:
                self._finish(job, completion.error)
            else:
                job.leg = _Leg.READY
        for kind, line in self._copying.items():
            # Copies of one direction end in order, so only the first of each line is polled.
            while line and self._copied(line[0]):
                progressed = True
                job = line.popleft()
                self._copying_bytes[kind] -= job.nbytes
                # A write-back through staging memory still has its tier's leg to do; all other jobs are complete.
                if job.fetch or job.error is not None or job.staging < 0:
                    self._finish(job, job.error)
                else:
                    job.leg = _Leg.COPIED
        self._trouble = next((line[0].trouble for line in self._copying.values() if line and line[0].trouble), None)
        return progressed

    def _advance_all(self) -> bool:
        """Advance each job as far as possible; return True if any job advanced."""
        progressed = False
        for job in sorted(self._jobs.values(), key=_rank):
            if job.transfer.id in self._jobs:
                try:
                    progressed |= self._advance(job)
                except Exception as error:  # the thread must go on for the others
                    self._finish(job, error)
                    progressed = True
        return progressed

    def _advance(self, job: _Job) -> bool:
        if job.leg == _Leg.WAITING:
            return self._begin(job)
        if job.leg == _Leg.READY and not self._blocked(job):
            self._start_copies(job)
            return True
        if job.leg == _Leg.COPIED:
            self._submit(job, Queue.WRITE)
            return True
        return False

    def _begin(self, job: _Job) -> bool:
        if not job.nbytes:
            if self._blocked(job):
                return False
            self._finish(job, None)
            return True
        job.parts = job.parts or self._direct(job)
        if job.parts:
            if self._blocked(job) or not (job.urgent or self._copying_bytes[job.transfer.kind] < _COPY_BYTES_MAX):
                return False
            job.start = time.monotonic()
            self._start_copies(job)
            return True
        if any(self._jobs[n].leg == _Leg.WAITING for n in job.transfer.after if n in self._jobs):
            return False  # its predecessors must get staging memory first: if it took the memory, none could go on
        job.staging = self._space.alloc(job.nbytes)
        if job.staging < 0:
            return False
        job.start = time.monotonic()
        job.parts = self._layout(job)
        if job.fetch:
            self._submit(job, Queue.READ)
            return True
        job.leg = _Leg.READY
        self._advance(job)
        return True

    def _direct(self, job: _Job) -> list[tuple[int, int, int]]:
        """Return the copies between the arena and the tier's own memory: host address, place in the arena, bytes.

        The list is empty if the tier's memory is not page-locked.
        """
        copies: list[tuple[int, int, int]] = []
        for piece in job.transfer.pieces:
            parts = self._locks.parts(piece.tier, piece.offset, piece.nbytes) if self._locks is not None else None
            if parts is None:
                return []
            place = piece.place
            for address, nbytes in parts:
                copies.append((address, place, nbytes))
                place += nbytes
        return copies

    def _layout(self, job: _Job) -> list[tuple[int, int, int]]:
        """Return a copy between arena and staging memory for each piece: host address, place in the arena, bytes."""
        copies = []
        address = self._address + job.staging
        for piece in job.transfer.pieces:
            copies.append((address, piece.place, piece.nbytes))
            address += _rounded(piece.nbytes)
        return copies

    def _start_copies(self, job: _Job) -> None:
        # The job joins its line before the first copy is started: if a later copy cannot start, the earlier ones still
        # use the host's memory, and only the line waits for them.
        job.leg = _Leg.DEVICE
        self._copying[job.transfer.kind].append(job)
        self._copying_bytes[job.transfer.kind] += job.nbytes
        copy = self._device.to_device if job.fetch else self._device.to_host
        try:
            for address, place, nbytes in job.parts:
                ends = (address, place) if job.fetch else (place, address)
                job.copies.append(copy(*ends, nbytes, job.fence))
        except Exception as error:
            job.error = error

    def _copied(self, job: _Job) -> bool:
        """Return True if all copies of a job have certainly ended.

        If the device cannot tell, for example because it is lost, the copies count as under way: their memory must not
        be reused by other transfers, because the device might still write to it. An access that waits for the job then
        raises a timeout error that names the device's error.
        """
        under_way = []
        job.trouble = None
        for copy in job.copies:
            try:
                if copy.done():
                    continue
            except Exception as error:
                job.trouble = error
            under_way.append(copy)
        job.copies = under_way
        return not under_way

    def _blocked(self, job: _Job) -> bool:
        """Return True if a transfer in the job's `Transfer.after` has not ended, so the arena range is not free yet."""
        return any(number in self._jobs for number in job.transfer.after)

    def _submit(self, job: _Job, direction: int) -> None:
        pieces = job.transfer.pieces
        job.leg = _Leg.TIER
        if self._watch is not None:
            self._watch.tier_leg(job.transfer.id, self._address + job.staging, job.nbytes)
        self._queue.submit(
            job.transfer.id,
            self._ports[pieces[0].tier],
            direction,
            [(piece.offset, address, nbytes) for piece, (address, _, nbytes) in zip(pieces, job.parts, strict=True)],
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
        if error is None and not cancelled:
            return
        # The pager keeps the bytes in the arena if their write-back fails, so transfers into that range must not start.
        for other in [other for other in self._jobs.values() if number in other.transfer.after]:
            # A native thread uses its staging memory now, so the job ends only when the queue reports it.
            if other.leg == _Leg.TIER:
                other.dropped = True
            else:
                self._finish(other, None, cancelled=True)


def _rounded(nbytes: int) -> int:
    """Return the bytes of a piece, rounded up so that the next piece in staging memory is aligned."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _rank(job: _Job) -> tuple[bool, bool, int]:
    return not job.urgent, not job.fetch, job.transfer.id
