"""Drivers, which combine a pager, the executor of its transfers, and the pool's lock.

A pool asks its driver for the operands of an operation. The driver returns their places in the arena, after waiting for
the transfers that bring them in. `farpool._native.Driver` runs transfers between host memory and tiers without the
interpreter. `ExecutorDriver` works with any executor, for example for a GPU, for a simulated device, or in debug mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from farpool._native import Grant
from farpool.memory.pager import Access, Kind, Move, Pager, Transfer, TransferFailedError
from farpool.memory.pager.executor.base import Done, Executor
from farpool.memory.pager.use import Use, runs_of

__all__ = ["Driver", "Ended", "ExecutorDriver", "Grant", "Waited", "Watcher"]

Ended: TypeAlias = tuple[Transfer, float, float, int]
"""An ended transfer: the transfer, the times of its start and end, and the bytes of the arena in use at its end."""
_WAIT_SLICE_S = 0.1
"""Seconds after which a waiting thread checks again if another thread has reported the end of the awaited transfer."""


class Waited(Protocol):
    """Callback after each wait: operation `op` waited `seconds` for the transfer of `block` from or to `tier`.

    The wait began at time `start`. If the wait was given up, `seconds` is negative, and the callback raises the error.
    `block` and `tier` are -1 if `op` waited because other threads held its operands.
    """

    def __call__(self, op: str, start: float, seconds: float, block: int, tier: int) -> None: ...


class Watcher(Protocol):
    """Observer of accesses, used by debug mode; its methods are called under the driver's lock."""

    def granted(self, grant: Access, uses: Sequence[Use], op: str) -> None:
        """Check an access that was granted; if the check fails, release the access and raise."""
        ...

    def released(self, grant: Access) -> None:
        """Check an access that is about to be released; `raise_findings` raises the errors later."""
        ...

    def raise_findings(self) -> None:
        """Raise the errors that were found, if there are any."""
        ...


class Driver(Protocol):
    """Interface of drivers. A driver is also the pool's lock: ``with driver:`` holds it.

    Callers of all methods except `acquire` and `release` hold this lock.
    """

    attention: bool
    """If True, a call of `acquire` without `careful` returns None. Its caller then frees dropped storages, prepares to
    record or check the access if that is wanted, and calls `acquire` with `careful`."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def acquire(self, uses: Sequence[Use], op: str, rows: bool, careful: bool) -> Grant | None:
        """Bring operands into the arena and pin them. Called without the lock.

        Parameters
        ----------
        careful : bool
            True if the caller has done the work that `attention` asks for, and has packed the storages. If this is
            False and any of this is still to be done, the call does nothing and returns None. It also does so if the
            driver is closed.

        Raises
        ------
        TooLargeError
            The operands do not fit into the arena together.
        NoRoomError, TransferFailedError
            The operands cannot be brought in.
        """
        ...

    def release(self, grant: Grant) -> None:
        """Unpin the operands of an operation; called without the lock."""
        ...

    def wait(self, timeout: float) -> None:
        """Release the lock, wait at most `timeout` seconds until another thread changes something, and lock again."""
        ...

    def notify_all(self) -> None:
        """Wake the waiting threads, so that they check again if they can continue."""
        ...

    def start(self) -> None:
        """Start the moves and transfers that the pager has queued."""
        ...

    def note_ends(self) -> bool:
        """Report ended transfers to the pager; return False if no transfer has ended."""
        ...

    def close(self) -> None:
        """Close the driver: it grants no more accesses, and waiting threads give up."""
        ...

    def listen(self, wanted: bool) -> None:
        """Start or stop collecting the ended transfers that `take_ended` returns."""
        ...

    def take_ended(self) -> Sequence[Ended]:
        """Return the transfers that have succeeded since the last call."""
        ...

    def forget_parent(self) -> None:
        """Close the driver in the child of a fork, and replace the lock, which a thread of the parent may hold."""
        ...

    def links(self) -> Sequence[tuple[int, Kind, int, int, float]]:
        """Return, for each tier and direction, the tuple (tier, direction, number of transfers, bytes, seconds)."""
        ...

    @property
    def granted(self) -> int:
        """Number of accesses that have not been released."""
        ...

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were ever in use at the same time."""
        ...


class ExecutorDriver:
    """A driver in Python that works with any executor.

    Parameters
    ----------
    timeout : float
        Seconds that an access waits for its operands.
    waited : Waited
    watch : Watcher, optional
        Debug mode's checker.
    """

    def __init__(self, pager: Pager, executor: Executor, timeout: float, waited: Waited, watch: Watcher | None) -> None:
        self.attention = watch is not None
        self.granted = 0
        self.peak = 0
        self._pager = pager
        self._executor = executor
        self._timeout = timeout
        self._waited = waited
        self._watch = watch
        self._lock = threading.Condition(threading.Lock())
        self._links: dict[tuple[int, Kind], tuple[int, int, float]] = {}
        self._ended: list[Ended] = []
        self._listening = False
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    # ---- accesses -----------------------------------------------------------------------------------------------

    def acquire(self, uses: Sequence[Use], op: str, rows: bool, careful: bool) -> Grant | None:
        if not careful and (self.attention or any(use.storage.loose for use in uses)):
            return None
        runs, places = runs_of(uses, rows=rows)
        if not runs:
            return Grant((0,) * len(uses), None)
        with self:
            if self._closed:  # another thread has closed it since the caller looked
                return None
            # The stream is registered before any command starts: fences that are made from now on must include it.
            self._executor.note_use()
            if self._pager.under_way:
                self.note_ends()
            access = self._pager.request(runs, time.monotonic())
            self.start()
            waited = 0.0 if access.granted else self._await(access, op)
            if self._watch is not None:
                self._watch.granted(access, uses, op)
            self.granted += 1
            self.peak = max(self.peak, self._pager.used)
        at = access.places
        return Grant(tuple([at[run] + offset if run >= 0 else 0 for run, offset in places]), access, waited)

    def _await(self, access: Access, op: str) -> float:
        start, timeout = time.monotonic(), self._timeout
        # We look before the wait: the account names the awaited transfer, and the pager forgets a transfer that ends.
        block, tier = self._awaited(access)
        try:
            # Also raise if the access was granted after the pool closed. The pool did not count it then, so the arena
            # may be gone.
            while self._closed or (not access.granted and access.error is None):
                if self._closed or time.monotonic() - start >= timeout:
                    self._waited(op, start, -1.0, *self._awaited(access))
                self.wait(start + timeout - time.monotonic())
        except BaseException:  # an interrupt, too, must not leave operands pinned or a place in the line taken
            if not self._closed:
                self._pager.abandon(access)
                self.start()
            raise
        if access.error is not None:
            raise access.error
        seconds = time.monotonic() - start
        self._waited(op, start, seconds, block, tier)
        return seconds

    def _awaited(self, access: Access) -> tuple[int, int]:
        transfers: list[Transfer] = self._pager.transfers()
        # Barriers have no pieces and name no tier, so they would not help a reader of the account.
        waiting = [transfer for transfer in transfers if transfer.pieces]
        own = [transfer for transfer in waiting if access.waits_for(transfer.block)]
        for transfer in own or waiting:
            return transfer.block, transfer.pieces[0].tier
        return -1, -1

    def release(self, grant: Grant) -> None:
        if grant.access is None:
            return
        with self:
            self.granted -= 1
            # After the close nothing is unpinned any more; `BlockPool.force_close` only waits until the count is 0.
            if self._closed:
                self.notify_all()
                return
            if self._watch is not None:
                # Debug mode compares the bytes before the pager learns of the release and lets another block into the
                # range.
                self._watch.released(grant.access)
            self._pager.release(grant.access)
            if self._pager.under_way:
                self.note_ends()
            self.start()
            self.notify_all()
            if self._watch is not None:
                # We raise last, when the access is released, because an error must not leave its operands pinned.
                self._watch.raise_findings()

    # ---- transfers ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        commands: list[Transfer | Move] = self._pager.take_commands()
        if commands:
            self._executor.start(commands)
        if raised := self._pager.take_raised():
            self._executor.expedite(raised)

    def note_ends(self) -> bool:
        finished = self._executor.poll()
        for done in finished:
            transfer: Transfer | None = self._pager.transfer(done.id)
            if transfer is None or done.cancelled:
                continue
            if done.error is not None:
                tier = transfer.pieces[0].tier if transfer.pieces else -1
                self._pager.failed(done.id, TransferFailedError(done.error, tier, transfer.block))
            else:
                self._pager.completed(done.id, done.start, done.end)
                self._account(transfer, done)
        if finished:
            # All ends are reported before waiting accesses proceed, so that the pager decides once, with all the room
            # there is.
            self._pager.proceed(time.monotonic())
            self.start()
            self.notify_all()
        return bool(finished)

    def _account(self, transfer: Transfer, done: Done) -> None:
        if not transfer.pieces:
            return
        link = transfer.pieces[0].tier, transfer.kind
        count, nbytes, seconds = self._links.get(link, (0, 0, 0.0))
        moved = sum(piece.nbytes for piece in transfer.pieces)
        self._links[link] = count + 1, nbytes + moved, seconds + done.end - done.start
        if self._listening:
            self._ended.append((transfer, done.start, done.end, self._pager.used))

    def wait(self, timeout: float) -> None:
        remaining = max(0.0, min(timeout, _WAIT_SLICE_S))
        if self._pager.under_way:
            # The executor reports ends on a condition of its own, so we wait there, and without the pool's lock.
            self._lock.release()
            try:
                self._executor.wait(remaining)
            finally:
                self._lock.acquire()
        else:
            self._lock.wait(remaining)
        if not self._closed:
            self.note_ends()

    def notify_all(self) -> None:
        self._lock.notify_all()

    def close(self) -> None:
        self._closed = self.attention = True
        self._lock.notify_all()

    def forget_parent(self) -> None:
        # A thread of the parent may hold the old lock, and that thread does not exist here.
        self._lock = threading.Condition(threading.Lock())
        self._closed = self.attention = True

    def links(self) -> list[tuple[int, Kind, int, int, float]]:
        return [(tier, kind, *total) for (tier, kind), total in sorted(self._links.items())]

    def listen(self, wanted: bool) -> None:
        self._listening = wanted

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended
