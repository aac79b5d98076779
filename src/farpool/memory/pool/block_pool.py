"""The core of a pool: storages whose bytes are brought into the arena and pinned while an operation uses them.

A storage is stored in blocks, a pager decides where the blocks are, and a driver has the blocks moved. `BlockPool` owns
all of these and does the rest of an access: it packs storages, frees dropped storages, and serves recordings and
events. It does not use tensors; a program uses it through `farpool.Pool`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from farpool import forks
from farpool._native import Driver, Grant
from farpool.errors import (
    BudgetError,
    ConfigError,
    FarpoolError,
    FarpoolWarning,
    PoolClosedError,
    TierError,
    TierTimeoutError,
)
from farpool.ledger import Ledger
from farpool.memory.pager import NoRoomError, Pager, TooLargeError, TransferFailedError
from farpool.memory.pager.storage import CLASSES, Dropped, Storage, cut
from farpool.memory.pager.use import Use
from farpool.memory.pool import census
from farpool.memory.pool.account import Account
from farpool.memory.pool.allocation import Allocation
from farpool.memory.pool.budget import Budget
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.device import open_device
from farpool.memory.pool.entry import Entry
from farpool.memory.pool.events import Event
from farpool.memory.pool.faults import does_not_fit, no_room, operands_too_large, with_tier_and_block
from farpool.memory.pool.guests import Guests
from farpool.memory.pool.lower_tiers import LowerTiers
from farpool.memory.pool.packing import Packing
from farpool.memory.pool.recording import Note, Recorder, Recording, metadata
from farpool.memory.pool.space import TierSpace
from farpool.memory.pool.stats import Stats
from farpool.memory.tape import TapeWriter
from farpool.memory.tiers import Extent
from farpool.memory.tiers.safetensors import SafetensorsFile
from farpool.sizes import format_size, is_share, parse_size

if TYPE_CHECKING:
    from farpool.memory.debug import Watch

__all__ = ["BlockPool", "open_pools"]

_CLOSE_TIMEOUT_S = 5.0
"""Seconds that transfers get to end when we close a pool that the program has not closed: at the interpreter's exit,
and for a dropped pool when the next one is opened."""


@dataclass(slots=True)
class _Heard:
    """An access in progress that is recorded or reported to subscribers."""

    op: str
    since: float
    """Time at which the access was granted, on the monotonic clock."""
    recorded: Note | None


class BlockPool:
    """A pool of storages whose fast tier has a budget in bytes. Thread-safe.

    Parameters
    ----------
    config : PoolConfig
        The pool's settings and tiers. The pool opens the tiers, and closes them when it is closed itself.

    Raises
    ------
    ConfigError, PoolFileError
        A tier cannot be opened; the tiers opened before it are closed again.
    """

    def __init__(self, config: PoolConfig) -> None:
        _close_dropped()  # the new pool may need their memory
        ledger = Ledger()
        lower = LowerTiers(config.make_tiers())
        try:
            device = open_device(config, lower.tiers, ledger)
        except BaseException:
            # A failed open leaves nothing behind, because the caller gets no pool that it could close.
            lower.close()
            raise
        fast = device.arena.nbytes
        ledger.add("fast", "arena", requested=fast, reserved=fast, touched=fast)
        ledger.add("host", "staging", **device.staging)
        self.config, self.ledger = config, ledger
        self._dropped: deque[Dropped] = deque()
        """Storages that the program has dropped and whose blocks are still to be freed."""
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        """The storages in use."""
        self._births = itertools.count()
        """Counter. A storage gets a number when it is made, and a loose storage gets another at its first use."""
        self._lower, self._device = lower, device
        self._book_bounce()
        self.arena, self._queue = device.arena, device.queue
        self.spaces = [TierSpace(tier, ledger) for tier in lower.tiers]
        sizes = cut(fast, packed=self.arena.alignment)
        self.pager = Pager(
            fast,
            self.spaces,
            CLASSES,
            alignment=sizes.alignment,
            prefetch=config.prefetch,
            late=device.stream is not None,
        )
        self.recorder = Recorder()
        self.allocation = Allocation(self.pager, sizes, self.recorder)
        self.account = Account(lower.names)
        self._watch: Watch | None = device.watch(self.pager) if config.debug else None  # debug mode's checker
        self.driver = Driver(
            self.pager,
            self._queue,
            self.arena.address,
            lower.ports,
            config.timeout,
            self._waited,
            self._watch,
            device.stream,
        )
        self._packing = Packing(
            self.allocation,
            self.driver,
            self._acquire,
            self._check_open,
            self._note_created,
            self._births,
        )
        self._entry = Entry(
            self.allocation, self.driver, self.spaces, lower, self._queue, self._check_open, config.timeout
        )
        self._budget = Budget(
            self.pager, self.arena, self.allocation, self.driver, self._check_open, ledger, lower.tiers, config.timeout
        )
        self._guests = Guests(self.driver, self.spaces, ledger, self._add_budget, lower.tiers, self._check_open)
        self._resizing = threading.Lock()
        """Held during a change of the budget, which gives up the lock of `driver` while it waits."""
        self.closed = False
        # We register last, so that neither the exit handler nor a forked child finds a pool that is half made.
        _POOLS.add(self)
        forks.begin_again(self)

    def forked(self) -> None:
        """Mark the pool as closed in a forked child. No native threads run there, and a lock may never be released."""
        self._resizing = threading.Lock()
        self.closed = True
        self.driver.forget_parent()

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "the pool is closed; tensors that are still needed must be taken out before, with "
                "farpool.restore(model), pool.materialize(tensor) or pool.close(materialize=True)"
            )

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Device of the fast tier: ``cpu`` or ``cuda``."""
        return self.config.device

    @property
    def debug(self) -> bool:
        """True if the pool is in debug mode, which checks that operations use only memory that they have pinned."""
        return self.config.debug

    @property
    def fast(self) -> int:
        """The budget of the fast tier, in bytes, without the parts of guests."""
        return self.pager.capacity

    @property
    def guests(self) -> Guests:
        """The objects, such as regions, that use a part of the fast tier and of the lower tiers without blocks."""
        return self._guests

    @property
    def small(self) -> int:
        """Largest size in bytes of storages that share a block."""
        return self.allocation.sizes.small

    def __repr__(self) -> str:
        return f"<BlockPool {self.describe()}>"

    def describe(self) -> str:
        """Describe the tiers and how full they are, in one line.

        This method takes no lock and calls no tier, because a debugger may call the method at any moment.
        """
        sizes = [("fast", self.pager.used, self.fast)]
        sizes += [(space.name, space.reserved, space.capacity) for space in self.spaces]
        if self.closed:
            return f"(closed): {', '.join(f'{name} {format_size(size)}' for name, _, size in sizes)}"
        tiers = ", ".join(f"{name} {format_size(used)} of {format_size(size)}" for name, used, size in sizes)
        return f"on {self.device}: {tiers} in use by {self.allocation.storages} storages"

    @property
    def live(self) -> int:
        """Number of storages in use."""
        with self.driver:
            self._collect_dropped()
            return self.allocation.storages

    def close(self) -> None:
        """Close the pool: wait for transfers under way, remove files and give memory back.

        Raises
        ------
        PoolClosedError
            Storages or regions are still in use; nothing was changed.

        Warns
        -----
        FarpoolWarning
            Transfers did not end within the pool's timeout. They may still use the arena, the memory of the tiers and
            the files, so the pool keeps all of these until the process ends.
        """
        self.check_unused()
        self.force_close()

    def check_unused(self) -> None:
        """Raise `PoolClosedError` if an open pool holds storages or regions that are in use."""
        if not self.closed and (guests := self._guests.names()):
            raise PoolClosedError(f"the pool is still used by {', '.join(guests)}: call close() of each of them first")
        if not self.closed and self.live:
            used = self.allocation
            raise PoolClosedError(
                f"the pool still holds {used.storages} live storages ({format_size(sum(used.live.values()))}): "
                "call farpool.restore(model) and drop the paged tensors first, or close(materialize=True)"
            )

    def force_close(self, timeout: float | None = None) -> None:
        """Close the pool as `close` does, even if storages are still in use.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for transfers instead of the pool's timeout.
        """
        timeout = self.config.timeout if timeout is None else timeout
        # Before the lock: what a guest waits for may need it.
        left = [] if self.closed else self._guests.end_all()
        with self.driver:
            if self.closed:
                return
            self.closed = True
            self.driver.close()
            # Operations of other threads may still compute in the arena, and `release` wakes us when one ends.
            deadline = time.monotonic() + timeout
            while self.driver.granted and time.monotonic() < deadline:
                self.driver.wait(deadline - time.monotonic())
            unused = not self.driver.granted
        # We wait for transfers without the lock: a thread that ends its access now needs the lock.
        ended = all([self._queue.close(timeout), self._entry.close(timeout)]) and not left
        watch, self._watch = self._watch, None
        # We compare the memory only if no transfer or operation can still write to it.
        if watch is not None and ended and unused:
            watch.look()
        self._book_bounce()
        if ended:
            self._lower.close()
        else:
            _LEFT_OPEN.append(self)
        if ended and unused:  # else a transfer that hangs, or an op of another thread, still uses the arena
            self._device.release()
        self.account.deliver()
        self.recorder.end()
        if left:
            warnings.warn(
                f"the pool is closed, but the program still uses memory of {', '.join(left)}: this memory, and the "
                "memory and files of the lower tiers, stay as they are until the process ends",
                FarpoolWarning,
                stacklevel=3,
            )
        elif not ended:
            trouble = self._queue.trouble
            warnings.warn(
                f"the pool is closed, but transfers have not ended within {timeout:g} s"
                + (f" ({trouble})" if trouble is not None else "")
                + f". They may still use the memory and files of {', '.join(['the fast tier', *self._lower.names])}, "
                "so these stay as they are until the process ends",
                FarpoolWarning,
                stacklevel=3,
            )
        if watch is not None:
            watch.raise_findings()

    def _book_bounce(self) -> None:
        if self._device.bounce is not None:
            self.ledger.set_bytes("hbm", "bounce", self._device.bounce())

    def __del__(self) -> None:
        # A pool without transfers on the host may go. Else a transfer, or work that the program has queued on the
        # device, may still use memory that the collector is about to free.
        if getattr(self, "closed", True) or not (self.pager.late or self._queue.pending or self._entry.busy):
            return
        # Nothing is closed here: the collector may run in a thread that holds a lock which that needs.
        _DROPPED.append((os.getpid(), self))
        warnings.warn(
            f"{self!r} was dropped without close(); it keeps its memory until the next pool is opened or the program "
            "ends: use a with block, or call close()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool, even if storages are still in use. The bytes of these storages are lost."""
        self.force_close()

    # ---- storages -----------------------------------------------------------------------------------------------

    def allocate(
        self, nbytes: int, *, cls: str = "bytes", row_bytes: int = 0, name: str = "", exchange: bool = False
    ) -> Storage:
        """Make a new storage of `nbytes` bytes, whose content is unspecified until it is written.

        Parameters
        ----------
        exchange : bool
            True to leave room for one more block if the fast tier alone cannot hold everything. In a pool that is full
            to the last block, no block may be evicted to fetch another, so what was written might not be readable.

        Raises
        ------
        PoolFullError
            With the new storage, the pool would hold more bytes than all its tiers together can hold.
        """
        with self.driver:
            self._check_open()
            self._collect_dropped()
            self._check_room(nbytes, cls, name, self.allocation.sizes.largest if exchange else 0)
            blocks = self.allocation.allocate(nbytes, cls, row_bytes, name=name)
            storage = Storage(self, nbytes, cls, name, row_bytes, blocks, next(self._births))
            self._storages.add(storage)
        self._note_created(storage)
        return storage

    def enter(
        self, address: int, nbytes: int, owner: object, *, cls: str = "bytes", row_bytes: int = 0, name: str = ""
    ) -> Storage | None:
        """Make a storage with bytes from host memory, which go to lower tiers past the fast tier.

        Return None, and do nothing, if the lower tiers lack room for the bytes, or if they fit into a fast tier in host
        memory without an eviction, or if the lower tiers have failed and the fast tier has room for all that the pool
        holds. Then use `allocate` and write them.

        Parameters
        ----------
        address : int
            Address of the first byte. Nobody may change the bytes during the call.
        owner : object
            Object that keeps the memory alive.

        Raises
        ------
        TierError
            The tiers with room have failed, and the fast tier has too little. Or a tier did not take the bytes in time
            (`TierTimeoutError`).
        """
        if nbytes == 0 or (self._device.stream is None and self.pager.used + nbytes <= self.fast):
            return None
        with self.driver:
            self._check_open()
            self._collect_dropped()
        try:
            blocks = self._entry.enter(address, nbytes, owner, cls, row_bytes, name)
        except TierTimeoutError:
            raise  # each storage of a module would wait as long again
        except TierError:
            if self.allocation.written + nbytes > self.fast:
                raise
            return None
        if blocks is None:
            return None
        storage = Storage(self, nbytes, cls, name, row_bytes, blocks, next(self._births))
        with self.driver:
            self._storages.add(storage)
        self._note_created(storage)
        return storage

    def adopt(
        self, source: SafetensorsFile, extent: Extent, *, cls: str = "weights", row_bytes: int = 0, name: str = ""
    ) -> Storage:
        """Make a storage whose clean copy is part of a file.

        Until the program writes to the storage, it takes no room in lower tiers.
        """
        with self.driver:
            self._check_open()
            self._collect_dropped()
            index = self._lower.number_of(source, self.pager)
            blocks = self.allocation.adopt(extent.nbytes, cls, row_bytes, index, extent.offset, name=name)
            storage = Storage(self, extent.nbytes, cls, name, row_bytes, blocks, next(self._births))
            self._storages.add(storage)
        self._note_created(storage)
        return storage

    def _note_created(self, storage: Storage) -> None:
        if self.account.listening:
            now = time.monotonic()
            self.account.note(Event("create", now, nbytes=storage.nbytes, block=storage.first, cause=storage.cls))

    def pack_at_first_use(self, storage: Storage) -> None:
        """Mark a storage so that it is packed at its first use, if it is small (see `farpool.memory.pool.packing`).

        This is for storages that are filled long before their first use and in another order.
        """
        storage.loose = not storage.adopted

    def _check_room(self, nbytes: int, cls: str, name: str, spare: int) -> None:
        written = self.allocation.written
        if written + nbytes <= self.fast:
            return
        nbytes += spare
        if nbytes > self.fast + self._lower.capacity - written:
            raise does_not_fit(
                name or cls, nbytes, written, self.fast, self._lower.tiers, self.allocation.sizes.largest
            )

    # ---- acquiring ----------------------------------------------------------------------------------------------

    def acquire(self, uses: Sequence[Use], op: str = "", *, rows: bool = False) -> Grant:
        """Bring byte ranges into the arena and pin them there until `release`.

        Each range is contiguous in the arena. Either all ranges are pinned or none. A thread must release one access
        before it acquires the next; otherwise it might wait for itself.

        Parameters
        ----------
        uses : sequence of Use
            Ranges of this pool's storages. Overlapping ranges share their bytes in the arena, too.
        op : str
            Name of the operation, for errors and accounts.
        rows : bool
            True if the ranges are rows of tables picked by data. The tape then records only the tables.

        Raises
        ------
        BudgetError
            The ranges do not fit into the arena together. The message names the operation, its operands and the
            smallest budget that works.
        PoolFullError
            No lower tier has room for the blocks that would have to be evicted for the ranges.
        TierError
            A transfer failed, or did not end in time (`TierTimeoutError`). Nothing stays pinned.
        """
        # Without `attention`, an access is this one call, and it needs no other work in Python.
        grant = self._ask(uses, op, rows, careful=False)
        return self._acquire_carefully(uses, op, rows) if grant is None else grant

    def _ask(self, uses: Sequence[Use], op: str, rows: bool, *, careful: bool) -> Grant | None:
        try:
            return self.driver.acquire(uses, op, rows, careful)
        except (TooLargeError, NoRoomError, TransferFailedError) as error:
            refusal = self.refusal(error, uses, op)
        # Not in the clause above: there the caught error would become this one's context and keep all frames alive.
        try:
            raise refusal
        finally:
            del refusal  # or frame and error would keep each other alive, and all objects of the frames between

    def refusal(
        self, error: TooLargeError | NoRoomError | TransferFailedError, uses: Sequence[Use], op: str
    ) -> FarpoolError:
        """Convert an error of the pager, which refused an operation's operands, to the error that the user sees."""
        if isinstance(error, TooLargeError):
            return operands_too_large(error, uses, op, self.pager.capacity, self._storages, self.arena.alignment)
        if isinstance(error, NoRoomError):
            return no_room(error, op, self._lower.tiers)
        failure, tier, block = error.args
        return with_tier_and_block(failure, self._lower.names[tier] if tier >= 0 else "", block)

    def _acquire(self, uses: Sequence[Use], op: str) -> Grant:
        return self._granted(self._ask(uses, op, False, careful=True))

    def _granted(self, grant: Grant | None) -> Grant:
        if grant is None:
            self._check_open()  # the pool was closed during the call
            raise AssertionError("a driver that is open grants or raises")
        return grant

    def _acquire_carefully(self, uses: Sequence[Use], op: str, rows: bool) -> Grant:
        """Acquire after doing what `attention` asks for: packing, freeing dropped storages, recording, events."""
        self._check_open()  # before the lock: in the child of a fork, its holder may be gone
        for use in uses:
            if use.storage.loose:
                # Packing comes before the lock, because it waits for transfers and acquires operands of its own.
                self._packing.pack(use.storage, op)
        with self.driver:
            self._check_open()
            # Reset this before looking, so that a storage dropped from now on asks for attention again. It stays True
            # in debug mode, and during recordings and subscriptions, which would otherwise miss accesses.
            self.driver.attention = bool(self._watch or self.account.listening or self.recorder.recordings)
            self._collect_dropped()
            # Transfers or accesses still use these retired blocks, so a later access has to free the blocks.
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
        """Count a wait that has ended. If `seconds` is negative, the wait was given up, and this raises an error."""
        name = self._lower.names[tier] if tier >= 0 else ""
        if seconds >= 0:
            self.account.stalled(op, start, seconds, block, name, self.pager.used)
            return
        self._check_open()
        trouble = self._queue.trouble
        raise TierTimeoutError(
            f"{op or 'access'}: waited {self.config.timeout:g} s for "
            + (f"block {block} and tier {name!r}" if name else "operands that other threads hold")
            + (
                f"; the device does not report whether its copies have ended ({trouble}), so their memory stays "
                "taken: save the data in other tiers and files, and restart the process"
                if trouble is not None
                else "; the transfer is still under way (Pool(timeout=...) sets the limit)"
            ),
            tier=name,
            block=block if block >= 0 else None,
        ) from trouble

    def drop(self, dropped: Dropped) -> None:
        """Record that a storage was garbage-collected. May be called at any time, even during another method."""
        # No lock here: the collector may run this in a thread that holds the pool's lock. Appending to a deque is
        # atomic, and `attention` is set after the append, so the next careful access sees the entry.
        self._dropped.append(dropped)
        self.driver.attention = True

    def _collect_dropped(self) -> None:
        while self._dropped:
            dropped = self._dropped.popleft()
            self.allocation.release(dropped)
            if self.account.listening:
                self.account.note(Event("free", time.monotonic(), nbytes=dropped.nbytes, cause=dropped.cls))
        self.allocation.collect()
        if self._watch is not None:
            self._watch.collected()

    # ---- releasing ----------------------------------------------------------------------------------------------

    def release(self, grant: Grant) -> None:
        """Unpin the operands of an access."""
        heard = grant.note
        if not isinstance(heard, _Heard):
            self.driver.release(grant)
            return
        if heard.recorded is not None:
            heard.recorded.released = time.perf_counter_ns()
        if self.account.listening and grant.access is not None and not self.closed:
            seconds = time.monotonic() - heard.since
            nbytes = sum(self.pager.run_bytes(run) for run in grant.access.runs)
            if self.pager.late:  # the operation may not have begun yet
                with self.driver:
                    self.account.queued(grant.access.ordinal, heard.op, nbytes)
            else:
                event = Event("compute", heard.since, seconds, nbytes, op=heard.op, resident=self.pager.used)
                self.account.note(event)
        self.driver.release(grant)
        self._deliver()
        if heard.recorded is not None:
            self.recorder.deliver()

    def _deliver(self) -> None:
        """Pass events to subscribers; called without the lock."""
        if self.account.listening:
            with self.driver:
                ended = self.driver.take_ended()
                # After the close, or in a forked child, no thread of the queue looks at the device any more.
                ran = self.driver.take_ran() if self.pager.late and not self.closed else []
                used = self.pager.used
            self.account.transferred(ended)
            self.account.computed(ran, used)
        self.account.deliver()

    # ---- budget, accounts ---------------------------------------------------------------------------------------

    def resize(self, fast: int | str) -> None:
        """Change the budget of the fast tier, which may be in use. Raises the same errors as `farpool.Pool.resize`."""
        if is_share(fast):
            raise ConfigError(
                f"fast is {fast!r}, but a share of the free memory can be given only when a pool is opened; expected a "
                "size like '64MiB'",
                setting="fast",
            )
        budget = parse_size(fast, "fast")
        with self._resizing, self.driver:
            self._check_open()
            self._change_budget(budget)

    def _add_budget(self, nbytes: int, guest: str) -> None:
        """Change the budget by a number of bytes that a guest gives back, or takes (less than 0)."""
        with self._resizing, self.driver:
            self._check_open()
            if -nbytes >= self.fast:
                raise BudgetError(
                    f"{guest} needs {format_size(-nbytes)} of the fast tier, which has {format_size(self.fast)}: give "
                    "the pool a larger fast tier, or the region a smaller part of it",
                    op=guest,
                    needed=-nbytes,
                    budget=self.fast,
                )
            self._change_budget(self.fast + nbytes)

    def _change_budget(self, budget: int) -> None:
        self._collect_dropped()
        self.driver.note_ends()
        self._budget.change(budget, self._watch)

    def demote(self, storage: Storage) -> bool:
        """Move a storage out of the fast tier before the pager would evict it; return False if some blocks stay.

        A block stays if it is pinned or no lower tier has room for it. The next access fetches the storage again.
        """
        with self.driver:
            self._check_open()
            self.driver.note_ends()
            left = self.pager.demote(storage.first, storage.count)
            self.driver.start()
        return left

    def has_lower_tiers(self) -> bool:
        """Return True if there are tiers below the fast one."""
        return bool(self._lower.tiers)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on; return a function that ends the subscription."""
        with self.driver:
            end = self.account.subscribe(callback)
            self.driver.listen(True)
            self.driver.attention = True

        def unsubscribe() -> None:
            if not self.closed:
                self._deliver()  # what tiers and device have done since the last operation
            with self.driver:
                end()
                self.driver.listen(self.account.listening)

        return unsubscribe

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Write accesses and the time between them to a tape file, as `farpool.Pool.record` describes."""
        self._check_open()
        # The file is opened before we take the lock, because other threads must not wait for a disk.
        writer = TapeWriter(path, metadata(self.device, self.fast, self.allocation.sizes, self._lower.tiers, CLASSES))
        with self.driver:
            self._collect_dropped()
            self.driver.attention = True
            return self.recorder.start(writer, self.pager, self.allocation.made.values())

    def stats(self) -> Stats:
        """Return the pool's statistics since it was made."""
        with self.driver:
            self._check_open()
            self._collect_dropped()
            self.driver.note_ends()
            # The native core allocates this memory and has no access to the ledger.
            self.ledger.set_bytes("host", "tape", self.pager.tape_bytes)
            self.ledger.set_bytes("host", "block tables", self.pager.table_bytes)
            if self._device.beside is not None:
                allocated, reserved = self._device.beside()
                self.ledger.set_bytes("hbm", "torch", reserved, requested=allocated)
            return census.take(
                self.pager,
                self.arena.kind,
                self.spaces,
                self.ledger,
                self.driver,
                self.allocation.live,
                self._storages,
                self.account,
            )

    def explain(self) -> str:
        """Return the statistics as text: bytes by tier and owner, residency by class, the last stalls, and more."""
        return census.explain(self.stats(), self.ledger)


_POOLS: weakref.WeakSet[BlockPool] = weakref.WeakSet()
"""Every pool object of the process, open or closed, until it is garbage-collected."""
_LEFT_OPEN: list[BlockPool] = []
"""Pools that were closed although transfers had not ended. This list keeps them alive, because garbage collection of
such a pool would unmap memory that a device may still write to."""


_DROPPED: deque[tuple[int, BlockPool]] = deque()
"""Pools that were garbage-collected while they were open and their memory was in use, with the process's number."""


def _close_dropped() -> None:
    """Close the pools that the program has dropped without closing them."""
    while _DROPPED:
        try:
            owner, pool = _DROPPED.popleft()
        except IndexError:  # another thread took it
            return
        if owner != os.getpid():
            _LEFT_OPEN.append(pool)  # it belongs to the parent of a fork
            continue
        try:
            pool.force_close(_CLOSE_TIMEOUT_S)
        except FarpoolError as error:  # who opens another pool cannot do anything about it
            warnings.warn(f"{pool!r}, which was dropped without close(): {error}", FarpoolWarning, stacklevel=2)


def open_pools() -> list[BlockPool]:
    """Return the pools of this process that have not been closed."""
    return [pool for pool in _POOLS if not pool.closed]


def _close_all() -> None:
    """Close all pools when the interpreter exits, because no thread may call into the interpreter after that."""
    for pool in open_pools():
        pool.force_close(_CLOSE_TIMEOUT_S)
    _close_dropped()


atexit.register(_close_all)
