"""Accesses: byte ranges brought into the arena, pinned while an op works on them, and let go.

Storages lie in blocks, a pager places these, a driver has them moved. What an access needs beside that (storages that
are still to be packed, dropped ones to be freed, recordings, events) is looked after here, where there is any of it.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool import _native
from farpool._native import Grant
from farpool.account import Account
from farpool.allocation import Allocation
from farpool.config import PoolConfig
from farpool.device import FastTier
from farpool.driver import Driver, ExecutorDriver
from farpool.errors import FarpoolError, PoolClosedError, TierTimeoutError
from farpool.events import Event
from farpool.executor.threads import ThreadExecutor
from farpool.faults import no_room, operands_too_large, with_tier_and_block
from farpool.ledger import Ledger
from farpool.lower_tiers import LowerTiers
from farpool.packing import Packing
from farpool.pager import NoRoomError, Pager, TooLargeError, TransferFailedError
from farpool.recording import Note, Recorder
from farpool.space import TierSpace
from farpool.storage import CLASSES, Dropped, Storage, cut
from farpool.use import Use

if TYPE_CHECKING:
    from farpool.debug import Watch

__all__ = ["Accesses"]


@dataclass(slots=True)
class _Heard:
    """An access that somebody listens to or records."""

    op: str
    since: float
    """When it was granted, on the monotonic clock."""
    recorded: Note | None


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
        self._watch: Watch | None = None
        """Debug mode."""
        if config.debug:
            self._watch = device.watch(self.pager)
            self._executor = self._watch.executor
        self.driver: Driver = self._make_driver()
        self._packing = Packing(
            self.allocation, self._executor, self.driver, self._acquire, self._check_open, self._births
        )
        self.closed = False

    def _make_driver(self) -> Driver:
        executor, timeout = self._executor, self.config.timeout
        if isinstance(executor, ThreadExecutor):
            return _native.Driver(self.pager, executor.queue, executor.address, executor.ports, timeout, self._waited)
        return ExecutorDriver(self.pager, executor, timeout, self._waited, self._watch)

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "the pool is closed; tensors that are still needed must be taken out before, with "
                "farpool.restore(model), pool.materialize(tensor) or pool.close(materialize=True)"
            )

    # ---- acquiring ----------------------------------------------------------------------------------------------

    def acquire(self, uses: Sequence[Use], op: str = "", *, rows: bool = False) -> Grant:
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
        grant = self._ask(uses, op, rows, careful=False)
        return self._acquire_carefully(uses, op, rows) if grant is None else grant

    def _ask(self, uses: Sequence[Use], op: str, rows: bool, *, careful: bool) -> Grant | None:
        try:
            return self.driver.acquire(uses, op, rows, careful)
        except (TooLargeError, NoRoomError, TransferFailedError) as error:
            refusal = self.refusal(error, uses, op)
        # Not in the clause above: as the context of this error, the one caught there would keep all frames on the way.
        try:
            raise refusal
        finally:
            del refusal  # or this frame and the error would hold each other, and all that the frames on the way hold

    def refusal(
        self, error: TooLargeError | NoRoomError | TransferFailedError, uses: Sequence[Use], op: str
    ) -> FarpoolError:
        """The error to raise where the pager refuses the operands of an operation."""
        if isinstance(error, TooLargeError):
            return operands_too_large(error, uses, op, self.pager.capacity, self._storages)
        if isinstance(error, NoRoomError):
            return no_room(error, op, self._lower.tiers)
        failure, tier, block = error.args
        return with_tier_and_block(failure, self._lower.names[tier] if tier >= 0 else "", block)

    def _acquire(self, uses: Sequence[Use], op: str) -> Grant:
        return self._granted(self._ask(uses, op, False, careful=True))

    def _granted(self, grant: Grant | None) -> Grant:
        if grant is None:
            self._check_open()  # closed while it was asked for
            raise AssertionError("a driver that is open grants or raises")
        return grant

    def _acquire_carefully(self, uses: Sequence[Use], op: str, rows: bool) -> Grant:
        """Look after what asked for attention; then acquire."""
        self._check_open()  # before the lock: in the child of a fork, its holder may be gone
        for use in uses:
            if use.storage.loose:
                self._packing.pack(use.storage, op)
        with self.driver:
            self._check_open()
            # Before looking: what is dropped from now on asks for attention again. And never without it while somebody
            # listens: another thread's access would go by unheard.
            self.driver.attention = bool(self._watch or self.account.listening or self.recorder.recordings)
            self._collect_dropped()
            if self.allocation.retired:
                self.driver.attention = True
        grant = self._granted(self._ask(uses, op, rows, careful=True))
        if grant.access is None or not (self.account.listening or self.recorder.recordings):
            return grant
        runs = grant.access.runs
        recorded = self.recorder.granted(runs, op, grant.waited) if self.recorder.recordings else None
        grant.note = _Heard(op, time.monotonic(), recorded)
        self._deliver()
        return grant

    def _waited(self, op: str, start: float, seconds: float, block: int, tier: int) -> None:
        """An operation has waited for its operands, or waits no longer."""
        name = self._lower.names[tier] if tier >= 0 else ""
        if seconds >= 0:
            self.account.stalled(op, start, seconds, block, name, self.pager.used)
            return
        self._check_open()
        trouble = self._executor.trouble
        raise TierTimeoutError(
            f"{op or 'access'}: waited {self.config.timeout:g} s for "
            + (f"block {block} and tier {name!r}" if name else "operands that other threads hold")
            + (
                f"; the device does not tell whether its copies have ended ({trouble}), so their memory stays "
                "taken: save what other tiers and files have, and start the process anew"
                if trouble is not None
                else "; the transfer is still under way (Pool(timeout=...) sets the limit)"
            ),
            tier=name,
            block=block if block >= 0 else None,
        ) from trouble

    def drop(self, dropped: Dropped) -> None:
        """A storage has died; anywhere, perhaps in the middle of a pool's method."""
        self.dropped.append(dropped)
        self.driver.attention = True

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

    def release(self, grant: Grant) -> None:
        """The op is done with its operands."""
        heard = grant.note
        if not isinstance(heard, _Heard):
            self.driver.release(grant)
            return
        if heard.recorded is not None:
            heard.recorded.released = time.perf_counter_ns()
        if self.account.listening and grant.access is not None and not self.closed:
            seconds = time.monotonic() - heard.since
            nbytes = sum(self.pager.run_bytes(run) for run in grant.access.runs)
            event = Event("compute", heard.since, seconds, nbytes, op=heard.op, resident=self.pager.used)
            self.account.note(event)
        self.driver.release(grant)
        self._deliver()
        if heard.recorded is not None:
            self.recorder.deliver()

    def _deliver(self) -> None:
        """Hand events to those who listen. Without the lock."""
        if self.account.listening:
            with self.driver:
                ended = self.driver.take_ended()
            self.account.transferred(ended)
        self.account.deliver()
