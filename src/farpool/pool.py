"""The pool without tensors: storages in blocks, an engine that places them, an executor that moves them.

`BlockPool` is safe to use from several threads: one lock guards engine and bookkeeping; transfers run outside it.
The public `farpool.Pool` adds the methods that make tensors.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from farpool import _native, census
from farpool.account import Account
from farpool.allocation import USED, Allocation
from farpool.calm import Calm
from farpool.config import PoolConfig
from farpool.device import open_device
from farpool.engine import Access as Grant
from farpool.engine import Engine, Mode, Move, NoRoomError, TooLargeError
from farpool.errors import BudgetError, PoolClosedError, PoolFullError, TierError, TierTimeoutError
from farpool.events import Event
from farpool.faults import no_room, operands_too_large
from farpool.ledger import Ledger
from farpool.recording import Note, Recorder, Recording, metadata
from farpool.sizes import format_size, parse_size
from farpool.space import TierSpace
from farpool.stats import Stats
from farpool.storage import Dropped, Storage, cut
from farpool.tape_file import TapeWriter
from farpool.tiers import Extent, HasPort, Tier, Verified, Verifies
from farpool.tiers.safetensors import SafetensorsFile
from farpool.traffic import Traffic
from farpool.use import Use, runs_of

if TYPE_CHECKING:
    from farpool.debug import Watch

__all__ = ["CLASSES", "Access", "BlockPool"]

CLASSES = ("weights", "gradient", "optimizer", "activation", "embedding", "kv", "expert", "bytes")
"""Classes that blocks may have."""


_SLICE = 0.1
"""Seconds after which a thread that waits for another looks again."""
_LAST_CHANCE = 5.0
"""Seconds for transfers to end when the interpreter does."""


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


class BlockPool:
    """Memory behind a byte budget.

    Parameters
    ----------
    config : PoolConfig
        What it is made of. The pool opens the tiers and, when it is closed, closes them.

    Raises
    ------
    ConfigError, PoolFileError
        A tier cannot be opened; those opened before it are closed again.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.closed = True
        self.config = config
        self.dropped: deque[Dropped] = deque()
        """Storages that died since the pool last looked."""
        self.ledger = Ledger()
        self._tiers = [_guarded(tier) for tier in config.make_tiers()]
        self._ports: list[_native.Port] = []
        opened: list[Tier] = []
        try:
            for tier in self._tiers:
                tier.open()
                opened.append(tier)
                self._ports.append(tier.port if isinstance(tier, HasPort) else _native.PythonPort(tier))
            self._device = open_device(config, self._ports, self._tiers, self.ledger)
        except BaseException:
            for tier in reversed(opened):
                tier.close()
            raise
        self.arena, self._executor = self._device.arena, self._device.executor
        self.spaces = [TierSpace(tier, self.ledger) for tier in self._tiers]
        self.ledger.add("fast", "arena", requested=config.fast, reserved=config.fast, touched=config.fast)
        self.ledger.add("host", "staging", **self._device.staging)
        sizes = cut(config.fast, packed=self.arena.alignment)
        self.engine = Engine(config.fast, self.spaces, CLASSES, alignment=sizes.alignment, prefetch=config.prefetch)
        self.recorder = Recorder()
        self.allocation = Allocation(self.engine, sizes, self.recorder)
        self._names = [tier.info.name for tier in self._tiers]
        self._sources: dict[int, int] = {}
        self._held: list[SafetensorsFile] = []
        self.account = Account(self._names)
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        self._watch: Watch | None = None
        """Debug mode."""
        if config.debug:
            self._watch = self._device.watch(self.engine)
            self._executor = self._watch.executor
        self._traffic = Traffic(
            self.engine, self._executor, self.account, self._names, self._lock, config.timeout, self._check_open
        )
        self._calm = Calm(self.engine)
        self._live = 0
        self._granted = 0
        """Accesses that have not been released yet."""
        self._packing: set[int] = set()
        """Storages that a thread is packing at their first use; others wait for it."""
        self.peak = 0
        self.closed = False
        _POOLS.add(self)

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``: where the fast tier is."""
        return self.config.device

    @property
    def debug(self) -> bool:
        """Whether it looks for memory that is used outside its access."""
        return self.config.debug

    @property
    def fast(self) -> int:
        """The budget of the fast tier, in bytes."""
        return self.engine.arena.capacity

    @property
    def live(self) -> int:
        """Number of storages in use."""
        with self._lock:
            self._collect_dropped()
            return self._live

    def close(self) -> None:
        """End the pool: transfers under way end, files are removed, memory is given back.

        Raises
        ------
        PoolClosedError
            Storages are still in use; nothing was changed. Leaving a ``with`` block closes the pool all the same.
        """
        if not self.closed and self.live:
            raise PoolClosedError(
                f"the pool still holds {self._live} live storages ({format_size(sum(self.allocation.live.values()))}): "
                "call farpool.restore(model) and drop the paged tensors first, or close(materialize=True)"
            )
        self._shut()

    def _shut(self, patience: float | None = None) -> None:
        patience = self.config.timeout if patience is None else patience
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._calm.end()
            self._lock.notify_all()
            unused = self._lock.wait_for(lambda: not self._granted and not self._calm.inside, patience)
        ended = self._executor.close(patience)
        watch, self._watch = self._watch, None
        if watch is not None and ended and unused:
            watch.look()
        for tier in reversed(self._tiers):
            tier.close()
        for source in self._held:
            source.close()
        if ended and unused:  # else a transfer that hangs, or an op of another thread, still uses the arena
            self._device.release()
        self.account.deliver()
        self.recorder.end()
        if watch is not None:
            watch.raise_findings()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut()

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "the pool is closed; tensors that are still needed must be taken out before, with "
                "farpool.restore(model), pool.materialize(tensor) or pool.close(materialize=True)"
            )

    # ---- storages -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, cls: str = "bytes", row_bytes: int = 0, name: str = "") -> Storage:
        """A new storage of `nbytes` bytes, whose content is unspecified until it is written.

        Raises
        ------
        PoolFullError
            All tiers together are smaller than what the pool would then hold.
        """
        with self._lock:
            self._check_open()
            self._collect_dropped()
            self._check_room(nbytes, cls, name)
            blocks = self.allocation.allocate(nbytes, cls, row_bytes, name=name)
            self._live += 1
        storage = Storage(self, nbytes, cls, name, row_bytes, blocks)
        if self.account.listening:
            self.account.note(Event("create", time.monotonic(), nbytes=nbytes, block=blocks.first, cause=cls))
        return storage

    def adopt(
        self, source: SafetensorsFile, extent: Extent, *, cls: str = "weights", row_bytes: int = 0, name: str = ""
    ) -> Storage:
        """A new storage whose clean copy is this part of a file; it takes no room below until it is written."""
        with self._lock:
            self._check_open()
            self._collect_dropped()
            index = self._sources.get(id(source))
            if index is None:
                source.open()
                index = self._sources[id(source)] = self.engine.add_source()
                self._held.append(source)
                self._ports.append(source.port)
                self._names.append(source.info.name)
            blocks = self.allocation.adopt(extent.nbytes, cls, row_bytes, index, extent.offset, name=name)
            self._live += 1
        return Storage(self, extent.nbytes, cls, name, row_bytes, blocks)

    def pack_at_first_use(self, storage: Storage) -> None:
        """Pack a small storage with what is used next to it, as soon as that is known: when it is first used.

        For storages that are filled long before, in another order.
        """
        storage.loose = storage.shared and not storage.adopted

    def _pack(self, storage: Storage, op: str) -> None:
        with self._lock:
            while storage.loose and id(storage) in self._packing:
                self._lock.wait(_SLICE)  # whoever packs it gives up after the timeout
                self._check_open()
            if not storage.loose:
                return
            self._check_open()
            self._packing.add(id(storage))
        try:
            with self._lock:
                blocks = self.allocation.allocate(storage.nbytes, storage.cls, 0, USED, name=storage.name)
                self._live += 1
            packed = Storage(self, storage.nbytes, storage.cls, storage.name, storage.row_bytes, blocks)
            access = self._acquire(
                [Use(storage, 0, storage.nbytes, Mode.READ), Use(packed, 0, storage.nbytes, Mode.WRITE)], op, rows=False
            )
            with self._lock:
                source, target = access.offsets
                self._executor.start([Move(source, target, storage.nbytes)])
                storage.first, packed.first = packed.first, storage.first
                storage.offset, packed.offset = packed.offset, storage.offset
            self.release(access)
        except (BudgetError, PoolFullError, TierError):
            pass  # it stays where it is; the op itself may do without what packing needed
        finally:
            with self._lock:
                storage.loose = False
                self._packing.discard(id(storage))
                self._lock.notify_all()

    def _check_room(self, nbytes: int, cls: str, name: str) -> None:
        lower = sum(tier.info.capacity for tier in self._tiers)
        if nbytes > self.fast + lower - self.allocation.written:
            raise PoolFullError(
                f"{name or cls}: {format_size(nbytes)} do not fit: the pool holds "
                f"{format_size(self.allocation.written)} of {format_size(self.fast + lower)} in all tiers; "
                "give it a larger lower tier, or drop tensors"
            )

    def _collect_dropped(self) -> None:
        while self.dropped:
            dropped = self.dropped.popleft()
            self.allocation.drop(dropped)
            self._live -= 1
            if self.account.listening:
                self.account.note(Event("free", time.monotonic(), nbytes=dropped.nbytes, cause=dropped.cls))
        self.allocation.collect()
        if self._watch is not None:
            self._watch.collected()

    # ---- accesses -----------------------------------------------------------------------------------------------

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
                self._pack(use.storage, op)
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

    def _acquire(self, uses: Sequence[Use], op: str, *, rows: bool) -> Access:
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
            if self.engine.transfers:
                self._traffic.note_completions()
            try:
                grant = self.engine.request(runs, time.monotonic())
            except TooLargeError as error:
                raise operands_too_large(error, uses, op, self.fast) from None
            asked = 0 if grant.granted else time.perf_counter_ns()
            self._traffic.start()
            if not grant.granted:
                try:
                    self._traffic.wait_for(grant, op)
                except BaseException:  # an interrupt, too, must not leave operands pinned or a place in the line taken
                    if not self.closed:
                        self.engine.abandon(grant)
                        self._traffic.start()
                    raise
                self._raise_refusal(grant, uses, op)
            if self._watch is not None:
                self._watch.granted(grant, uses, op)
            self._granted += 1
            self._calm.observe()
            if self.engine.arena.used > self.peak:
                self.peak = self.engine.arena.used
            note = self.recorder.granted(runs, op, asked) if self.recorder.recordings else None
        self.account.deliver()
        places = grant.places
        offsets = tuple([places[run] + offset if run >= 0 else 0 for run, offset in origins])
        return Access(grant, offsets, op, time.monotonic() if self.account.listening else 0.0, note)

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
                nbytes = sum(self.engine.run_bytes(run) for run in access.grant.runs)
                self.account.note(
                    Event(
                        "compute",
                        access.since,
                        time.monotonic() - access.since,
                        nbytes,
                        op=access.op,
                        resident=self.engine.arena.used,
                    )
                )
            if self._watch is not None:
                self._watch.released(access.grant)
            self.engine.release(access.grant, go_on=alone)
            if self.engine.transfers:
                self._traffic.note_completions()
            self._traffic.start()
            self._lock.notify_all()
            if self._watch is not None:
                self._watch.raise_findings()
        self.account.deliver()
        if access.note is not None:
            self.recorder.deliver()

    def _raise_refusal(self, grant: Grant, uses: Sequence[Use], op: str) -> None:
        error = grant.error
        if isinstance(error, TooLargeError):
            raise operands_too_large(error, uses, op, self.fast)
        if isinstance(error, NoRoomError):
            raise no_room(error, op, self._tiers)
        if error is not None:
            raise error

    # ---- budget, accounts ---------------------------------------------------------------------------------------

    def resize(self, fast: int | str) -> None:
        """Change the budget of the fast tier while it is in use.

        Raises
        ------
        ConfigError
            The size does not parse or is more than the machine's memory.
        BudgetError
            A block that there is already is larger.
        PoolFullError, TierTimeoutError
            What has to leave cannot; the budget is as it was.
        """
        budget = parse_size(fast, "fast")
        with self._lock:
            self._check_open()
            self._calm.end()
            self._require_alone("resize")
            self._collect_dropped()
            self._traffic.note_completions()
            before = self.fast
            if budget < before:
                self._check_blocks_fit(budget)
                self._shrink(budget)
                if self._watch is not None:
                    self._watch.follow(())  # while the memory beyond is still there
            self.arena.resize(budget)
            if budget > before:
                self.engine.resize(budget)
            change = {"requested": abs(budget - before)}
            change["reserved"] = change["touched"] = change["requested"]
            book = self.ledger.add if budget > before else self.ledger.subtract
            book("fast", "arena", **change)
            self.allocation.sizes = cut(budget, self.allocation.sizes.alignment, self.arena.alignment)

    def _shrink(self, budget: int) -> None:
        """Have everything leave the part of the arena that is to go."""
        before = self.fast
        deadline = time.monotonic() + self.config.timeout
        try:
            while not self.engine.resize(budget):
                self._traffic.start()
                if time.monotonic() >= deadline:
                    raise TierTimeoutError(f"resize: memory beyond {format_size(budget)} did not come free in time")
                self._traffic.wait_a_little(deadline)
        except BaseException as error:
            self.engine.resize(before)
            self._traffic.start()
            if isinstance(error, NoRoomError):
                raise no_room(error, "resize", self._tiers) from None
            raise

    def _check_blocks_fit(self, budget: int) -> None:
        """Blocks keep the size with which they were cut."""
        blocks = self.engine.blocks
        largest = max((blocks.size[block] for block in blocks.used()), default=0)
        if largest > budget:
            raise BudgetError(
                f"resize: there is a block of {format_size(largest)}, cut for the budget that the pool was made with; "
                f"{format_size(budget)} are too small for it",
                op="resize",
                needed=largest,
                budget=self.fast,
            )

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on, from the thread in which it is noted.

        Returns
        -------
        callable
            Call it to end the subscription.
        """
        return self.account.subscribe(callback)

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Write accesses and the time between them to a tape file, from now until the recording is closed.

        Several recordings may be under way. Ends with the pool, too.

        Parameters
        ----------
        path : path
            The file; overwritten if it is a tape file. Described in docs/tape-file.md, shown by ``farpool tape show``.

        Returns
        -------
        Recording
            A context manager.

        Raises
        ------
        TapeFileError
            The file cannot be written, is another recording's, or is something else than a tape file.
        """
        self._check_open()
        writer = TapeWriter(path, metadata(self.device, self.fast, self.allocation.sizes, self._tiers, CLASSES))
        with self._lock:
            self._collect_dropped()
            return self.recorder.start(writer, self.engine.blocks, self.allocation.made.values())

    def stats(self) -> Stats:
        """The account since the pool was made."""
        with self._lock:
            self._check_open()
            self._collect_dropped()
            self._traffic.note_completions()
            return census.take(self)

    def explain(self) -> str:
        """The account as text: bytes per tier and owner, residency per class, what the last stalls waited for."""
        return census.explain(self.stats(), self.ledger)


def _guarded(tier: Tier) -> Tier:
    """Bytes that leave the process are checksummed."""
    if tier.info.kind in ("nvme", "remote") and not isinstance(tier, Verifies):
        return Verified(tier)
    return tier


_POOLS: weakref.WeakSet[BlockPool] = weakref.WeakSet()


def _forked() -> None:
    """In the child of a fork the native threads are gone and locks may be held for ever: its pools are closed."""
    for pool in _POOLS:
        pool.closed = True
        pool._calm.end()
        pool._mutex = threading.Lock()
        pool._lock = threading.Condition(pool._mutex)


def _close_all() -> None:
    """At the end of the interpreter: no thread may come back into it."""
    for pool in tuple(_POOLS):
        pool._shut(_LAST_CHANCE)


os.register_at_fork(after_in_child=_forked)
atexit.register(_close_all)
