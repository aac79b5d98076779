"""Transfers for callers in Python: those of a native port, and those that are complete from the start."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from farpool._native import Queue, buffer_address
from farpool.errors import NodeError, NodeTimeoutError, TierError, TierTimeoutError
from farpool.tiers.base import Extent, Transfer
from farpool.tiers.buffers import require_buffer

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["FinishedTransfer", "PortTransfers"]

# How long the native queue is waited for at once. Only bounds how late a waiter sees its own deadline.
_SLICE = 0.5


class FinishedTransfer(Transfer):
    """A transfer that is complete already, well or with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        if self._error is not None:
            raise self._error


class _PortTransfer(Transfer):
    def __init__(self, owner: PortTransfers, what: str, view: memoryview) -> None:
        self._owner = owner
        self.what = what
        self.view = view
        self.complete = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self._owner.poll(self)

    def wait(self, timeout: float | None = None) -> None:
        self._owner.wait(self, timeout)
        if self.error is not None:
            raise self.error


class PortTransfers:
    """Runs reads and writes on ports and gives a `Transfer` for each.

    Completions come from one queue, whoever waits. Of several threads that wait, one is the leader: it waits for the
    queue and hands out what comes; the others wait for the leader, and one of them takes over when it leaves.

    Parameters
    ----------
    name : str
        Name of the tier, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = Queue()
        self._changed = threading.Condition()
        self._under_way: dict[int, _PortTransfer] = {}
        self._next_id = 0
        self._led = False
        self._process = os.getpid()

    def start_read(self, port: Port, extent: Extent, into: memoryview) -> Transfer:
        """Start to read `extent` from `port`."""
        return self._start(port, Queue.READ, extent, require_buffer(extent, into, writable=True))

    def start_write(self, port: Port, extent: Extent, data: memoryview) -> Transfer:
        """Start to write `extent` to `port`."""
        return self._start(port, Queue.WRITE, extent, require_buffer(extent, data, writable=False))

    def close(self) -> None:
        """Wait for what is under way, then end the threads."""
        if os.getpid() != self._process:
            return  # the threads are the parent's
        with self._changed:
            waiting = list(self._under_way.values())
        for transfer in waiting:
            self.wait(transfer, None)
        self._queue.close(_SLICE)

    def poll(self, transfer: _PortTransfer) -> bool:
        """Whether `transfer` is complete, without waiting."""
        with self._changed:
            # A leader would wait on for a completion that was taken from under it.
            if not transfer.complete and not self._led:
                self._hand_out()
            return transfer.complete

    def wait(self, transfer: _PortTransfer, timeout: float | None) -> None:
        """Wait until `transfer` is complete; TierTimeoutError if that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._advance(transfer, deadline):
            if deadline is not None and time.monotonic() >= deadline:
                raise TierTimeoutError(
                    f"{self._name}: the {transfer.what} did not complete within {timeout} s and is still under way",
                    tier=self._name,
                )

    def _start(self, port: Port, direction: int, extent: Extent, view: memoryview) -> Transfer:
        word = "read" if direction == Queue.READ else "write"
        transfer = _PortTransfer(self, f"{word} of {extent.nbytes} bytes at offset {extent.offset}", view)
        address = buffer_address(view)
        with self._changed:
            number = self._next_id
            self._queue.submit(number, port, direction, [(extent.offset, address, extent.nbytes)])
            self._next_id += 1
            # Held here too: native threads use the buffer even if the caller drops the transfer.
            self._under_way[number] = transfer
        return transfer

    def _advance(self, transfer: _PortTransfer, deadline: float | None) -> bool:
        with self._changed:
            if transfer.complete:
                return True
            remaining = _SLICE if deadline is None else min(_SLICE, max(0.0, deadline - time.monotonic()))
            if self._led:
                self._changed.wait(remaining)
                return transfer.complete
            self._led = True
        try:
            self._queue.wait(remaining)
        finally:
            with self._changed:
                self._led = False
                self._hand_out()
        return transfer.complete

    def _hand_out(self) -> None:
        for completion in self._queue.poll():
            transfer = self._under_way.pop(completion.id)
            transfer.error = self._failure(completion.error)
            if completion.cancelled:
                transfer.error = TierError(f"{self._name}: the {transfer.what} was dropped at close", tier=self._name)
            transfer.view.release()
            transfer.complete = True
        self._changed.notify_all()

    def _failure(self, error: BaseException | None) -> BaseException | None:
        """What a node did to the transfer is the tier's failure."""
        if not isinstance(error, NodeError):
            return error
        kind = TierTimeoutError if isinstance(error, NodeTimeoutError) else TierError
        failure = kind(f"{self._name}: {error}", tier=self._name)
        failure.__cause__ = error
        return failure
