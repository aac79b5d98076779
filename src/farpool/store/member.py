"""One node as a store sees it: the way to it, its breaker, and one request at a time."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

from farpool.errors import AccessDeniedError, ChecksumError, ConfigError, NodeError, NodeTimeoutError, ProtocolError
from farpool.store.messages import Reply
from farpool.transport.breaker import Breaker, State
from farpool.transport.frames import Op

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from farpool._native import ObjectReader
    from farpool.transport.channel import Channel, Loan

__all__ = ["ONCE", "Member", "may_be_stale"]

ONCE = frozenset({Op.COMMIT, Op.ABORT, Op.UNPIN})
"""What must not be sent a second time when it is not known whether it was done."""


def may_be_stale(error: Exception) -> bool:
    """Whether a new connection may do where one that was open before has failed: the node may have been restarted."""
    return isinstance(error, NodeError) and not isinstance(error, NodeTimeoutError | ProtocolError | AccessDeniedError)


class Member:
    """A node of a store. Thread-safe.

    Parameters
    ----------
    channel : Channel
        The way to it.
    returned : callable
        Is called when the node has come back after a failure.
    met : callable or None
        Is called with this object at each new contact; may refuse the node with `ConfigError`.

    Attributes
    ----------
    name : str
        Its address.
    seed : int
        Ranks it for a key (rendezvous hashing); the same in every program.
    """

    def __init__(
        self, channel: Channel, returned: Callable[[], None], met: Callable[[Member], None] | None = None
    ) -> None:
        self.channel = channel
        self.name = channel.name
        self.seed = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")
        self.breaker = Breaker(self.seed)
        self._returned = returned
        self._met = met
        self._error: Exception | None = None
        self._mapped_at: object = None
        self._changed = threading.Condition()

    def exchange(
        self,
        op: Op,
        meta: bytes,
        deadline: float,
        generation: int = 0,
        payload: Buffer | None = None,
        into: Buffer | None = None,
    ) -> Reply:
        """Ask for one thing and wait for the reply; `NodeError` at once while the breaker is open."""
        if not self.breaker.untroubled:
            self.admit()
        try:
            if self.channel.welcome is not self._mapped_at or self._mapped_at is None:
                self._map(deadline)
            try:
                with self.channel.connection(deadline) as connection:
                    reply = connection.exchange(op, meta, deadline, generation=generation, payload=payload, into=into)
            except NodeError as error:
                if not may_be_stale(error) or op in ONCE:
                    raise
                with self.channel.connection(deadline) as connection:
                    reply = connection.exchange(op, meta, deadline, generation=generation, payload=payload, into=into)
        except NodeError as error:
            self.failed(error)
            raise
        except (ChecksumError, ValueError):  # of the payload
            self.succeeded()
            raise
        if not self.breaker.untroubled:
            self.succeeded()
        return reply

    def open(self, deadline: float) -> Loan:
        """A connection for several requests, for a ``with`` block. The caller tells of `succeeded` or `failed`."""
        self.admit()
        try:
            if self.channel.welcome is not self._mapped_at or self._mapped_at is None:
                self._map(deadline)
        except NodeError as error:
            self.failed(error)
            raise
        return self.channel.connection(deadline)

    def get_one_sided(self, key: bytes, deadline: float, into: Buffer | None) -> tuple[bytes | None, int, int] | None:
        """As of `NodeMemory.get`; None also where another transport is used, or a new connection has to be tried."""
        one_sided = self.channel.one_sided
        if one_sided is None:
            return None
        if not self.breaker.untroubled:
            self.admit()
        try:
            found = one_sided.get(key, deadline, into)
        except NodeError as error:
            if may_be_stale(error):
                return None
            self.failed(error)
            raise
        if not self.breaker.untroubled:
            self.succeeded()
        return found

    def attach(self, deadline: float) -> ObjectReader | None:
        """The node's objects in mapped memory; None where they cannot be mapped."""
        if self._mapped_at is None or self.channel.welcome is not self._mapped_at:
            self.open(deadline)
            self.succeeded()
        return self.channel.reader

    def _map(self, deadline: float) -> None:
        """Map the node's objects where that is possible; at each new contact, as the files may be others."""
        self.channel.attach(deadline)
        if self._met is not None:
            try:
                self._met(self)
            except ConfigError:
                self.succeeded()  # the node itself is well
                raise
        self._mapped_at = self.channel.welcome

    def call(self, name: str, deadline: float, **arguments: object) -> dict[str, object]:
        """A control call."""
        self.open(deadline)  # a refusal from here on is not one of the connection
        try:
            result = self.channel.call(name, deadline, **arguments)
        except NodeError as error:
            if error.refused:
                self.succeeded()
            else:
                self.failed(error)
            raise
        self.succeeded()
        return result

    def admit(self) -> None:
        """Raise unless the node may be asked now. Followed by `succeeded` or `failed`."""
        with self._changed:
            if self.breaker.untroubled or self.breaker.admit(time.monotonic()):
                return
            now, since = time.monotonic(), self.breaker.since
            probe = "being probed"
            if self.breaker.state is State.OPEN:
                probe = f"probed again in {max(0.0, self.breaker.retry_at - now):.1f} s"
            reason = f": {self._error}" if self._error else ""
            kind = NodeTimeoutError if isinstance(self._error, NodeTimeoutError) else NodeError
        raise kind(
            f"{self.name} is not asked: it has been failing for {now - since:.1f} s and is {probe}{reason}",
            node=self.name,
        )

    def succeeded(self) -> None:
        """An answer has come."""
        with self._changed:
            back = self.breaker.succeeded()
            if back:
                self._error = None
            self._changed.notify_all()
        if back:
            self._returned()

    def failed(self, error: Exception) -> None:
        """The way to the node has failed."""
        with self._changed:
            # That a node refuses this program says nothing about its health.
            if not isinstance(error, AccessDeniedError) or self.breaker.state is State.HALF_OPEN:
                if self.breaker.state is not State.OPEN:
                    self._error = error
                self.breaker.failed(time.monotonic())
            self._changed.notify_all()

    def begin_write(self) -> bool:
        """Take a slot for a write, if there is one."""
        with self._changed:
            return self.breaker.begin_write()

    def wait_for_slot(self, deadline: float) -> None:
        """Take a slot for a write; NodeTimeoutError if none comes free in time."""
        with self._changed:
            if not self._changed.wait_for(self.breaker.begin_write, max(0.0, deadline - time.monotonic())):
                raise NodeTimeoutError(
                    f"{self.name} has just come back and did not take one more write within the deadline",
                    node=self.name,
                )

    def end_write(self, succeeded: bool) -> None:
        """Give a slot back."""
        with self._changed:
            self.breaker.end_write(succeeded)
            self._changed.notify_all()

    def status(self) -> tuple[str, float, str]:
        """The breaker's state, for how many seconds the node has been failing, and the first error."""
        with self._changed:
            state, since = self.breaker.state, self.breaker.since
            failing = 0.0 if state is State.CLOSED else time.monotonic() - since
            return state.value, failing, str(self._error or "")
