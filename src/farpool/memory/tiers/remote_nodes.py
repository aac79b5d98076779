"""Handling of the nodes behind a remote tier: borrowing from all of them or none, and keeping sessions alive."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from farpool._native import PythonPort, RemotePort
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.lease import Lease
from farpool.errors import ConfigError, NodeError
from farpool.memory.tiers.remote_one_sided import OneSidedLease

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["BACKED_PER_SECOND", "PERIOD_S", "Contact", "Part", "borrow", "free_bytes", "give_back", "port_to"]

PERIOD_S = 1.0
"""Seconds between two checks that the nodes can be reached; far less than a node's grace period."""
BACKED_PER_SECOND = 512 << 20
"""Bytes that any node can back with zeroed pages within a second. A node does this before it answers."""
_Result = TypeVar("_Result")


def free_bytes(channels: Sequence[Channel], tier: str, deadline: float) -> int:
    """Return the free bytes of the node that has the least free memory.

    Raises
    ------
    ConfigError
        A node does not answer. The message names the node and a remedy.
    """
    least = None
    for channel in channels:
        stats = _asked(channel, tier, partial(channel.call, "stats", deadline))
        free = int(stats["capacity"]) - int(stats["used"])
        least = free if least is None else min(least, free)
    return least or 0


def borrow(channels: Sequence[Channel], nbytes: int, tier: str, timeout: float) -> list[Lease]:
    """Borrow `nbytes` bytes from each node; if a node cannot lend them, no lease is kept.

    This takes at most `timeout` seconds, and one more for each 512 MiB that is borrowed, because a node backs the bytes
    with memory before it answers.

    Raises
    ------
    ConfigError
        A node cannot be reached, refuses the key or has no room. The message names the node and a remedy.
    """
    deadline = time.monotonic() + timeout
    leases: list[Lease] = []
    try:
        for channel in channels:
            # Connect first, so that an unreachable node is noticed within the timeout, however much it is to lend.
            _asked(channel, tier, partial(channel.connect, deadline))
            deadline += nbytes / BACKED_PER_SECOND
            leases.append(_asked(channel, tier, partial(channel.lend, nbytes, deadline)))
    except BaseException:
        give_back(leases, time.monotonic() + timeout)  # even if the deadline has passed
        raise
    return leases


def give_back(leases: Sequence[Lease], deadline: float) -> None:
    """End leases; a node that does not receive the request frees its lease after the grace period."""
    for lease in leases:
        with contextlib.suppress(NodeError):
            lease.release(deadline)


class Part:
    """One node's part of a tier.

    Parameters
    ----------
    channel : Channel
        Channel to the node.
    lease : Lease
        The memory that the node lends.
    port : Port
        Reads and writes this memory.
    """

    def __init__(self, channel: Channel, lease: Lease, port: Port) -> None:
        self.channel = channel
        self.lease = lease
        self.port = port


def port_to(channel: Channel, lease: Lease, tier: str, timeout: float) -> Port:
    """Make the port through which a tier moves the bytes of a lease. Each piece may take `timeout` seconds."""
    if channel.one_sided is not None:
        return PythonPort(OneSidedLease(channel.one_sided, lease.id, timeout))
    return RemotePort(tier, lease.end(timeout), timeout=timeout)


class Contact:
    """A thread that keeps the program's sessions at its nodes alive: it reconnects soon after a connection breaks.

    After a restart, a node returns the lent memory to each session that reconnects within the grace period. Without
    this thread, a program that computes for longer than the grace period between two transfers would reconnect too
    late.

    Parameters
    ----------
    owner : object
        Object that needs the sessions. If it is garbage-collected without a call of `end`, the sessions end.
    parts : sequence of Part
        The parts whose nodes the thread connects to.
    timeout : float
        Maximum time for an attempt to reach a node, in seconds.
    """

    def __init__(self, owner: object, parts: Sequence[Part], timeout: float) -> None:
        self._parts = tuple(parts)
        self._timeout = timeout
        self._woken = threading.Event()
        self._ended = False
        self._dropped = False
        # The finalizer holds this object, not the owner. At exit it need not run: the connections end with the process.
        weakref.finalize(owner, self._drop).atexit = False
        self._thread = threading.Thread(target=self._run, name="farpool-contact", daemon=True)
        self._thread.start()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about conditions that the user should change; empty if there are none."""
        return ()

    def end(self) -> None:
        """End the thread, and wait until it has finished its present attempt to connect."""
        self._ended = True
        self._woken.set()
        self._thread.join()

    def _drop(self) -> None:
        # Called by the garbage collector, so it may not close anything itself.
        self._dropped = True
        self._ended = True
        self._woken.set()

    def _run(self) -> None:
        while not self._ended:
            self._woken.wait(PERIOD_S)
            self._woken.clear()
            self._keep()
        if self._dropped:
            for part in self._parts:
                part.channel.close()

    def _keep(self) -> None:
        """Try once to connect to each node that is not connected."""
        for part in self._parts:
            if self._ended:
                break
            with contextlib.suppress(NodeError):
                part.channel.connect(time.monotonic() + min(self._timeout, PERIOD_S))


def _asked(channel: Channel, tier: str, ask: Callable[[], _Result]) -> _Result:
    try:
        return ask()
    except NodeError as error:
        raise ConfigError(
            f"nodes of {tier}: {error}; see that `farpool node` runs at {channel.name}, has enough memory and knows "
            "the access key, or leave the node out",
            setting="nodes",
        ) from error
