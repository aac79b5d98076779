"""Accesses: byte ranges brought into the arena, pinned while an op works on them, and let go.

Storages lie in blocks, a pager places these, an executor moves them. One lock guards pager and bookkeeping;
transfers run outside it.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farpool.account import Account
from farpool.allocation import Allocation
from farpool.calm import Calm
from farpool.config import PoolConfig
from farpool.device import FastTier
from farpool.errors import PoolClosedError, TierTimeoutError
from farpool.events import Event
from farpool.faults import no_room, operands_too_large
from farpool.ledger import Ledger
from farpool.lower_tiers import LowerTiers
from farpool.packing import Packing
from farpool.pager import Access as Grant
from farpool.pager import NoRoomError, Pager, TooLargeError
from farpool.recording import Note, Recorder
from farpool.space import TierSpace
from farpool.storage import CLASSES, Dropped, Storage, cut
from farpool.traffic import Traffic
from farpool.use import Use, runs_of

if TYPE_CHECKING:
    from farpool.debug import Watch

__all__ = ["Access", "Accesses"]


class Access:
    """Operands in the arena, pinned until released.

    Attributes
    ----------
    offsets : tuple of int
        For each use, where its first byte lies, in bytes from the arena's start.
    """

    __slots__ = ("grant", "note", "offsets", "op", "passed", "since")

    def __init__(
        self,
        grant: Grant | None,
        offsets: tuple[int, ...],
        op: str,
        since: float = 0.0,
        note: Note | None = None,
        *,
        passed: bool = False,
    ) -> None:
        self.grant = grant
        self.offsets = offsets
        self.op = op
        self.since = since
        self.note = note
        self.passed = passed


class Accesses:
    """What accesses need, and how they are granted and ended. Safe to use from several threads.

    `BlockPool` derives from it, so that an access costs no call on the way.

    Parameters
    ----------
    config : PoolConfig
    lower : LowerTiers
        The lower tiers, open.
    device : FastTier
        The arena, and what runs its transfers.
    ledger : Ledger
        Where the bytes of blocks in lower tiers are booked.
    """

    def __init__(self, config: PoolConfig, lower: LowerTiers, device: FastTier, ledger: Ledger) -> None:
        self.config = config
        self.dropped: deque[Dropped] = deque()
        """Storages that died since the pool last looked."""
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        """All that live."""
        self._births = itertools.count()
        """Numbers storages in the order in which they were made, or first used."""
        self.ledger = ledger
        self._lower = lower
        self._device = device
        self.arena, self._executor = device.arena, device.executor
        self.spaces = [TierSpace(tier, ledger) for tier in lower.tiers]
        sizes = cut(config.fast, packed=self.arena.alignment)
        self.pager = Pager(config.fast, self.spaces, CLASSES, alignment=sizes.alignment, prefetch=config.prefetch)
        self.recorder = Recorder()
        self.allocation = Allocation(self.pager, sizes, self.recorder)
        self.account = Account(lower.names)
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        self._watch: Watch | None = None
        """Debug mode."""
        if config.debug:
            self._watch = device.watch(self.pager)
            self._executor = self._watch.executor
        self._traffic = Traffic(
            self.pager, self._executor, self.account, lower.names, self._lock, config.timeout, self._check_open
        )
        self._calm = Calm(self.pager)
        self._packing = Packing(
            self.allocation, self._executor, self._lock, self._acquire, self.release, self._check_open, self._births
        )
        self._granted = 0
        """Accesses that have not been released yet."""
        self.peak = 0
        self.closed = False

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "the pool is closed; tensors that are still needed must be taken out before, with "
                "farpool.restore(model), pool.materialize(tensor) or pool.close(materialize=True)"
            )

    # ---- acquiring ----------------------------------------------------------------------------------------------

    def acquire(self, uses: Sequence[Use], op: str = "", *, rows: bool = False) -> Access:
        """Bring byte ranges into the arena, each contiguous, and pin them until `release`.

        All or nothing. A thread must not acquire while it holds an access: it might wait for itself.

        Parameters
        ----------
        uses : sequence of Use
            Ranges whose storages are this pool's. Ranges that overlap are laid out consistently.
        op : str
            What for, in errors and accounts.
        rows : bool
            The ranges are rows of tables picked by data; the tape then notes only the tables.

        Raises
        ------
        BudgetError
            They do not fit together. Names op, operands and the smallest budget that works.
        PoolFullError
            No lower tier takes what would have to leave for them.
        TierError
            A transfer failed, or did not end in time (`TierTimeoutError`). Nothing stays pinned.
        """
        if self._calm.open and not rows and (access := self._pass(uses, op)) is not None:
            return access
        for use in uses:
            if use.storage.loose:
                self._packing.pack(use.storage, op)
        return self._acquire(uses, op, rows=rows)

    def _pass(self, uses: Sequence[Use], op: str) -> Access | None:
        if self.account.listening or self.recorder.recordings or self._watch is not None:
            self._calm.end()
            return None
        with self._mutex:
            self._executor.note_use()
            if self._calm.open and (offsets := self._calm.enter(uses)) is not None:
                return Access(None, offsets, op, passed=True)
        return None

    def _acquire(self, uses: Sequence[Use], op: str, *, rows: bool = False) -> Access:
        with self._lock:
            self._check_open()
            runs, origins = runs_of(uses, rows=rows)
            if not runs:
                return Access(None, (0,) * len(uses), op)
            if self._calm.inside:
                self._require_alone(op)
            self._executor.note_use()
            if self.dropped or self.allocation.retired:
                self._collect_dropped()
            if self.pager.under_way:
                self._traffic.note_completions()
            try:
                grant = self.pager.request(runs, time.monotonic())
            except TooLargeError as error:
                raise operands_too_large(error, uses, op, self.pager.capacity, self._storages) from None
            asked = 0 if grant.granted else time.perf_counter_ns()
            self._traffic.start()
            if not grant.granted:
                try:
                    self._traffic.wait_for(grant, op)
                except BaseException:  # an interrupt, too, must not leave operands pinned or a place in the line taken
                    if not self.closed:
                        self.pager.abandon(grant)
                        self._traffic.start()
                    raise
                self._raise_refusal(grant, uses, op)
            if self._watch is not None:
                self._watch.granted(grant, uses, op)
            self._granted += 1
            self._calm.observe()
            if self.pager.used > self.peak:
                self.peak = self.pager.used
            note = self.recorder.granted(runs, op, asked) if self.recorder.recordings else None
        self.account.deliver()
        places = grant.places
        offsets = tuple([places[run] + offset if run >= 0 else 0 for run, offset in origins])
        return Access(grant, offsets, op, time.monotonic() if self.account.listening else 0.0, note)

    def _raise_refusal(self, grant: Grant, uses: Sequence[Use], op: str) -> None:
        error = grant.error
        if isinstance(error, TooLargeError):
            raise operands_too_large(error, uses, op, self.pager.capacity, self._storages)
        if isinstance(error, NoRoomError):
            raise no_room(error, op, self._lower.tiers)
        if error is not None:
            raise error

    def _collect_dropped(self) -> None:
        while self.dropped:
            dropped = self.dropped.popleft()
            self.allocation.drop(dropped)
            if self.account.listening:
                self.account.note(Event("free", time.monotonic(), nbytes=dropped.nbytes, cause=dropped.cls))
        self.allocation.collect()
        if self._watch is not None:
            self._watch.collected()

    # ---- releasing ----------------------------------------------------------------------------------------------

    def release(self, access: Access) -> None:
        """The op is done with its operands."""
        if access.grant is None:
            if access.passed:
                with self._mutex:
                    self._calm.inside -= 1
                    self._executor.note_use()
                    if not self._calm.open:
                        self._lock.notify_all()
            return
        if access.note is not None:
            access.note.released = time.perf_counter_ns()
        with self._lock:
            alone = self._alone()
            self._granted -= 1
            if self.closed:
                self._lock.notify_all()
                return
            if access.since and self.account.listening:
                nbytes = sum(self.pager.run_bytes(run) for run in access.grant.runs)
                self.account.note(
                    Event(
                        "compute",
                        access.since,
                        time.monotonic() - access.since,
                        nbytes,
                        op=access.op,
                        resident=self.pager.used,
                    )
                )
            if self._watch is not None:
                self._watch.released(access.grant)
            self.pager.release(access.grant, go_on=alone)
            if self.pager.under_way:
                self._traffic.note_completions()
            self._traffic.start()
            self._lock.notify_all()
            if self._watch is not None:
                self._watch.raise_findings()
        self.account.deliver()
        if access.note is not None:
            self.recorder.deliver()

    # ---- those that have passed ---------------------------------------------------------------------------------

    def _alone(self) -> bool:
        """Wait, before the arena changes, for accesses that have passed and rely on it; False if they do not end."""
        if not self._calm.inside:
            return True
        self._calm.end()
        return self._lock.wait_for(lambda: not self._calm.inside or self.closed, self.config.timeout)

    def _require_alone(self, op: str) -> None:
        if not self._alone():
            raise TierTimeoutError(
                f"{op or 'access'}: waited {self.config.timeout:g} s for {self._calm.inside} operations of other "
                "threads, which still use the fast tier (Pool(timeout=...) sets the limit)"
            )
        self._check_open()
