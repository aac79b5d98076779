"""Packing of small storages at their first use, so that storages used one after the other share blocks.

A program may fill storages long before it uses them, and in another order. Then storages that share a block were filled
together, but are used at different times. We call a storage *loose* until it is packed: at its first use, it is copied
into a block that it shares with the storages that were first used just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from farpool._native import Grant
from farpool.errors import BudgetError, PoolFullError, TierError
from farpool.memory.pager import Mode, Move
from farpool.memory.pager.driver import Driver
from farpool.memory.pager.executor.base import Executor
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.allocation import USED, Allocation

__all__ = ["Packing"]

_WAIT_SLICE_S = 0.1
"""Seconds after which a thread checks again if another thread has packed the storage that both use."""


class Packing:
    """Packer of loose storages. Callers do not hold the pool's lock, because `pack` takes it.

    Parameters
    ----------
    driver : Driver
        The pool's driver.
    acquire : callable
        Pins operands as the pool does, but does not pack loose storages first. Called without the lock.
    check_open : callable
        Raises if the pool has been closed.
    created : callable
        Notes the event of a storage that was made.
    births : iterator of int
        Gives a storage the next number when it is made or first used.
    """

    def __init__(
        self,
        allocation: Allocation,
        executor: Executor,
        driver: Driver,
        acquire: Callable[[Sequence[Use], str], Grant],
        check_open: Callable[[], None],
        created: Callable[[Storage], None],
        births: Iterator[int],
    ) -> None:
        self._allocation = allocation
        self._executor = executor
        self._driver = driver
        self._acquire = acquire
        self._check_open = check_open
        self._created = created
        self._births = births
        self._under_way: set[int] = set()
        """Identities of the storages that some thread is packing; other threads that use them wait for that thread."""

    def pack(self, storage: Storage, op: str) -> None:
        """Pack a loose storage, if it is small, or wait for the thread that packs it.

        If packing fails, the storage stays in its place.
        """
        self._check_open()  # before the lock: in the child of a fork, its holder may be gone
        with self._driver:
            while storage.loose and id(storage) in self._under_way:
                self._driver.wait(_WAIT_SLICE_S)  # the thread that packs it gives up after the timeout
                self._check_open()
            if not storage.loose:
                return
            self._check_open()
            storage.first_used = next(self._births)
            if not storage.shared:
                storage.loose = False
                return
            # The lock is given up below, and this keeps other threads from packing the storage a second time.
            self._under_way.add(id(storage))
        try:
            with self._driver:
                blocks = self._allocation.allocate(storage.nbytes, storage.cls, 0, USED, name=storage.name)
            packed = Storage(storage.pool, storage.nbytes, storage.cls, storage.name, storage.row_bytes, blocks)
            self._created(packed)  # once it is dropped, its end is an event, too
            grant = self._acquire(
                [Use(storage, 0, storage.nbytes, Mode.READ), Use(packed, 0, storage.nbytes, Mode.WRITE)], op
            )
            try:
                with self._driver:
                    # The move and the swap are one step under the lock: no access may find the new place before the
                    # bytes are there.
                    source, target = grant.offsets
                    self._executor.start([Move(source, target, storage.nbytes)])
                    storage.layout.swap(packed.layout)
            finally:
                self._driver.release(grant)
        except (BudgetError, PoolFullError, TierError):
            pass  # it stays in its place; the op may need less room than packing
        finally:
            with self._driver:
                storage.loose = False
                self._under_way.discard(id(storage))
                self._driver.notify_all()
