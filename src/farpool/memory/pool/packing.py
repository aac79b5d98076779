"""Packing of small storages at their first use, so that storages used one after the other share blocks.

A program may fill storages long before it uses them, and in another order. Then the storages of a shared block were
filled one after the other, but are used at different times. So a new storage is *loose*. When it is first used, it is
*packed*: copied into a block that it shares with the storages that were first used just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from farpool._native import Driver, Grant
from farpool.errors import BudgetError, PoolFullError, TierError
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.allocation import USED, Allocation

__all__ = ["Packing"]

_WAIT_SLICE_S = 0.1
"""Seconds between two checks by a thread that waits until another thread has packed a storage."""


class Packing:
    """Packs loose storages: new storages that have not been used yet (see the top of this module).

    Callers must not hold the pool's lock, because `pack` takes it.

    Parameters
    ----------
    driver : Driver
        The pool's driver.
    acquire : callable
        Pins operands as the pool does, but does not pack loose storages first. Called without the lock.
    check_open : callable
        Raises if the pool has been closed.
    created : callable
        Called with each storage that was made; reports an event for it.
    births : iterator of int
        Supplies a number for each storage when it is made, and another one when it is first used.
    """

    def __init__(
        self,
        allocation: Allocation,
        driver: Driver,
        acquire: Callable[[Sequence[Use], str], Grant],
        check_open: Callable[[], None],
        created: Callable[[Storage], None],
        births: Iterator[int],
    ) -> None:
        self._allocation = allocation
        self._driver = driver
        self._acquire = acquire
        self._check_open = check_open
        self._created = created
        self._births = births
        self._under_way: set[int] = set()
        """Identities of the storages that a thread is packing. Another thread that uses such a storage waits."""

    def pack(self, storage: Storage, op: str) -> None:
        """Pack a loose storage, if it is small. If another thread is packing it, wait for that thread.

        If packing fails, the storage stays in its place.
        """
        self._check_open()  # before the lock, whose holder may be gone in the child of a fork
        with self._driver:
            while storage.loose and id(storage) in self._under_way:
                self._driver.wait(_WAIT_SLICE_S)  # the thread that packs the storage gives up after its timeout
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
            self._created(packed)  # an event, because dropping this storage will be an event, too
            grant = self._acquire(
                [Use(storage, 0, storage.nbytes, Mode.READ), Use(packed, 0, storage.nbytes, Mode.WRITE)], op
            )
            try:
                with self._driver:
                    # The move and the swap are one step under the lock: no access may find the new place before the
                    # bytes are there.
                    source, target = grant.offsets
                    self._driver.move(source, target, storage.nbytes)
                    storage.layout.swap(packed.layout)
            finally:
                self._driver.release(grant)
        except (BudgetError, PoolFullError, TierError):
            pass  # the storage stays in its place; the op may need less room than packing
        finally:
            with self._driver:
                storage.loose = False
                self._under_way.discard(id(storage))
                self._driver.notify_all()
