"""The pool without tensors: opened, filled with storages, measured, closed.

`BlockPool` is safe to use from several threads. How its bytes are used is in `farpool.accesses`. The public
`farpool.Pool` adds the methods that make tensors.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from farpool import census
from farpool.accesses import Accesses
from farpool.budget import Budget
from farpool.config import PoolConfig
from farpool.device import open_device
from farpool.errors import FarpoolWarning, PoolClosedError
from farpool.events import Event
from farpool.faults import does_not_fit
from farpool.ledger import Ledger
from farpool.lower_tiers import LowerTiers
from farpool.recording import Recording, metadata
from farpool.sizes import format_size, parse_size
from farpool.stats import Stats
from farpool.storage import CLASSES, Storage
from farpool.tape_file import TapeWriter
from farpool.tiers import Extent
from farpool.tiers.safetensors import SafetensorsFile

__all__ = ["BlockPool"]

_LAST_CHANCE = 5.0
"""Seconds for transfers to end when the interpreter does."""


class BlockPool(Accesses):
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
        ledger = Ledger()
        lower = LowerTiers(config.make_tiers())
        try:
            device = open_device(config, lower.ports, lower.tiers, ledger)
        except BaseException:
            lower.close()
            raise
        ledger.add("fast", "arena", requested=config.fast, reserved=config.fast, touched=config.fast)
        ledger.add("host", "staging", **device.staging)
        super().__init__(config, lower, device, ledger)
        self._budget = Budget(
            self.pager,
            self.arena,
            self.allocation,
            self.driver,
            self._check_open,
            ledger,
            lower.tiers,
            config.timeout,
        )
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
        return self.pager.capacity

    def __repr__(self) -> str:
        # Without locks and without asking tiers: a debugger may look in the middle of anything.
        kind = type(self).__name__
        try:
            sizes = [("fast", self.pager.used, self.fast)]
            sizes += [(space.name, space.reserved, space.capacity) for space in self.spaces]
            held, closed = self.allocation.storages, self.closed
        except AttributeError:
            return f"<{kind} that is not open>"
        if closed:
            return f"<{kind} (closed): {', '.join(f'{name} {format_size(size)}' for name, _, size in sizes)}>"
        tiers = ", ".join(f"{name} {format_size(used)} of {format_size(size)}" for name, used, size in sizes)
        return f"<{kind} on {self.device}: {tiers} in use by {held} storages>"

    @property
    def live(self) -> int:
        """Number of storages in use."""
        with self.driver:
            self._collect_dropped()
            return self.allocation.storages

    def close(self) -> None:
        """End the pool: transfers under way end, files are removed, memory is given back.

        Raises
        ------
        PoolClosedError
            Storages are still in use; nothing was changed.

        Warns
        -----
        FarpoolWarning
            Transfers did not end within the pool's timeout. They may still read and write the memory of tiers and arena
            and the files, so these stay as they are until the process ends.
        """
        if not self.closed and self.live:
            held = self.allocation
            raise PoolClosedError(
                f"the pool still holds {held.storages} live storages ({format_size(sum(held.live.values()))}): "
                "call farpool.restore(model) and drop the paged tensors first, or close(materialize=True)"
            )
        self._shut()

    def _shut(self, patience: float | None = None) -> None:
        patience = self.config.timeout if patience is None else patience
        with self.driver:
            if self.closed:
                return
            self.closed = True
            self.driver.close()
            deadline = time.monotonic() + patience
            while self.driver.granted and time.monotonic() < deadline:
                self.driver.wait(deadline - time.monotonic())
            unused = not self.driver.granted
        ended = self._executor.close(patience)
        watch, self._watch = self._watch, None
        if watch is not None and ended and unused:
            watch.look()
        if ended:
            self._lower.close()
        else:
            _LEFT_OPEN.append(self)
        if ended and unused:  # else a transfer that hangs, or an op of another thread, still uses the arena
            self._device.release()
        self.account.deliver()
        self.recorder.end()
        if not ended:
            trouble = self._executor.trouble
            warnings.warn(
                f"the pool is closed, but transfers have not ended within {patience:g} s"
                + (f" ({trouble})" if trouble is not None else "")
                + f". They may still use the memory and files of {', '.join(['the fast tier', *self._lower.names])}, "
                "so these stay as they are until the process ends",
                FarpoolWarning,
                stacklevel=3,
            )
        if watch is not None:
            watch.raise_findings()

    def _end(self) -> None:
        """At the end of the interpreter."""
        self._shut(_LAST_CHANCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool, with the storages that are still in use: bytes alone have no other form than the pool's."""
        self._shut()

    # ---- storages -----------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, cls: str = "bytes", row_bytes: int = 0, name: str = "") -> Storage:
        """A new storage of `nbytes` bytes, whose content is unspecified until it is written.

        Raises
        ------
        PoolFullError
            All tiers together are smaller than what the pool would then hold.
        """
        with self.driver:
            self._check_open()
            self._collect_dropped()
            self._check_room(nbytes, cls, name)
            blocks = self.allocation.allocate(nbytes, cls, row_bytes, name=name)
            storage = Storage(self, nbytes, cls, name, row_bytes, blocks, next(self._births))
            self._storages.add(storage)
        if self.account.listening:
            self.account.note(Event("create", time.monotonic(), nbytes=nbytes, block=blocks.first, cause=cls))
        return storage

    def adopt(
        self, source: SafetensorsFile, extent: Extent, *, cls: str = "weights", row_bytes: int = 0, name: str = ""
    ) -> Storage:
        """A new storage whose clean copy is this part of a file; it takes no room below until it is written."""
        with self.driver:
            self._check_open()
            self._collect_dropped()
            index = self._lower.number_of(source, self.pager)
            blocks = self.allocation.adopt(extent.nbytes, cls, row_bytes, index, extent.offset, name=name)
            storage = Storage(self, extent.nbytes, cls, name, row_bytes, blocks, next(self._births))
            self._storages.add(storage)
        return storage

    def pack_at_first_use(self, storage: Storage) -> None:
        """Pack a storage, if it is small, beside what is used next to it, which is known when it is first used.

        For storages that are filled long before, in another order.
        """
        storage.loose = not storage.adopted

    def _check_room(self, nbytes: int, cls: str, name: str) -> None:
        held = self.allocation.written
        if nbytes > self.fast + self._lower.capacity - held:
            raise does_not_fit(name or cls, nbytes, held, self.fast, self._lower.tiers, self.allocation.sizes.largest)

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
        with self.driver:
            self._check_open()
            self._collect_dropped()
            self.driver.note_ends()
            self._budget.change(budget, self._watch)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on, from the thread in which it is noted.

        Returns
        -------
        callable
            Call it to end the subscription.
        """
        with self.driver:
            end = self.account.subscribe(callback)
            self.driver.listen(True)
            self.driver.attention = True

        def unsubscribe() -> None:
            end()
            self.driver.listen(self.account.listening)

        return unsubscribe

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
        writer = TapeWriter(path, metadata(self.device, self.fast, self.allocation.sizes, self._lower.tiers, CLASSES))
        with self.driver:
            self._collect_dropped()
            self.driver.attention = True
            return self.recorder.start(writer, self.pager, self.allocation.made.values())

    def stats(self) -> Stats:
        """The account since the pool was made."""
        with self.driver:
            self._check_open()
            self._collect_dropped()
            self.driver.note_ends()
            return census.take(self)

    def explain(self) -> str:
        """The account as text: bytes per tier and owner, residency per class, what the last stalls waited for."""
        return census.explain(self.stats(), self.ledger)


_POOLS: weakref.WeakSet[BlockPool] = weakref.WeakSet()
_LEFT_OPEN: list[BlockPool] = []
"""Pools that were closed while transfers hung. Collecting one would unmap memory that a device may still write to."""


def _forked() -> None:
    """In the child of a fork the native threads are gone and locks may be held for ever: its pools are closed."""
    for pool in _POOLS:
        pool.closed = True
        pool.driver.forget_parent()


def _close_all() -> None:
    """At the end of the interpreter: no thread may come back into it."""
    for pool in tuple(_POOLS):
        pool._end()


os.register_at_fork(after_in_child=_forked)
atexit.register(_close_all)
