"""Carries the pager's commands to the executor and completions back, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from farpool.account import Account
from farpool.errors import TierTimeoutError
from farpool.executor.base import Executor
from farpool.faults import with_tier_and_block
from farpool.pager import Access as Grant
from farpool.pager import Pager

__all__ = ["Traffic"]

_SLICE = 0.1
"""Seconds after which a waiting thread looks again whether another thread has already noted what it waits for."""


class Traffic:
    """Carries commands and completions. Its methods are called with the pool's lock held.

    Parameters
    ----------
    names : list of str
        Names of the tiers as the pager numbers them; the pool appends to it.
    lock : threading.Condition
        The pool's lock. It is given up while a thread waits.
    timeout : float
        Seconds to wait at most.
    check_open : callable
        Raises if the pool has been closed meanwhile.
    """

    def __init__(
        self,
        pager: Pager,
        executor: Executor,
        account: Account,
        names: list[str],
        lock: threading.Condition,
        timeout: float,
        check_open: Callable[[], None],
    ) -> None:
        self._pager = pager
        self._executor = executor
        self._account = account
        self._names = names
        self._lock = lock
        self._timeout = timeout
        self._check_open = check_open

    def start(self) -> None:
        """Give the executor what the pager wants done."""
        if commands := self._pager.take_commands():
            self._executor.start(commands)
        if raised := self._pager.take_raised():
            self._executor.expedite(raised)

    def note_completions(self) -> None:
        """Tell the pager what has ended."""
        finished = self._executor.poll()
        for done in finished:
            transfer = self._pager.transfer(done.id)
            if transfer is None:
                continue
            if done.error is not None:
                tier = self._names[transfer.pieces[0].tier] if transfer.pieces else ""
                self._pager.failed(done.id, with_tier_and_block(done.error, tier, transfer.block))
            elif not done.cancelled:
                self._pager.completed(done.id, done.start, done.end)
                self._account.transferred(transfer, done, self._pager.used)
        if finished:
            self._pager.proceed(time.monotonic())
            self.start()
            self._lock.notify_all()

    def wait_for(self, grant: Grant, op: str) -> None:
        """Wait until an access is granted or refused.

        Raises
        ------
        TierTimeoutError
            Neither happened in time. Names what was waited for.
        PoolClosedError
            The pool was closed meanwhile.
        """
        start = time.monotonic()
        deadline = start + self._timeout
        block, tier = self._awaited(grant)
        while not grant.granted and grant.error is None:
            if time.monotonic() >= deadline:
                block, tier = self._awaited(grant)
                trouble = self._executor.trouble
                raise TierTimeoutError(
                    f"{op or 'access'}: waited {self._timeout:g} s for "
                    + (f"block {block} and tier {tier!r}" if tier else "operands that other threads hold")
                    + (
                        f"; the device does not tell whether its copies have ended ({trouble}), so their memory stays "
                        "taken: save what other tiers and files have, and start the process anew"
                        if trouble is not None
                        else "; the transfer is still under way (Pool(timeout=...) sets the limit)"
                    ),
                    tier=tier,
                    block=block if block >= 0 else None,
                ) from trouble
            self.wait_a_little(deadline)
        self._account.stalled(op, start, time.monotonic() - start, block, tier, self._pager.used)

    def wait_a_little(self, deadline: float) -> None:
        """Let transfers end, or other threads release what they hold; then tell the pager."""
        remaining = max(0.0, min(deadline - time.monotonic(), _SLICE))
        if self._pager.under_way:
            self._lock.release()
            try:
                self._executor.wait(remaining)
            finally:
                self._lock.acquire()
        else:
            self._lock.wait(remaining)
        self._check_open()
        self.note_completions()

    def _awaited(self, grant: Grant) -> tuple[int, str]:
        """The first block that the access waits for, and the tier at the other end."""
        waiting = [t for t in self._pager.transfers() if t.pieces]
        own = [transfer for transfer in waiting if grant.waits_for(transfer.block)]
        for transfer in own or waiting:
            return transfer.block, self._names[transfer.pieces[0].tier]
        return -1, ""
