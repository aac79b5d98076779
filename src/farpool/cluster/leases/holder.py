"""A thread that holds a lease for a program: it renews it, shows its ticket to nodes, and gives memory back."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from farpool import forks
from farpool.closing import Closing
from farpool.cluster.leases.client import GrantedLease, LeasedExtent, ManagerClient
from farpool.cluster.leases.held import Claim, HeldLease, Move, Release, Renew, Replace, Rest, Step
from farpool.errors import FarpoolError, FarpoolWarning, LeaseRefusedError, NodeError

__all__ = ["ExtentUser", "LeaseHolder"]

_LONGEST_REST_S = 600.0
_LOOK_INTERVAL_S = 1.0
"""Seconds between two looks if all copies are in use."""
_CALL_TIMEOUT_S = 2.0
"""Maximum seconds that the thread waits for a manager. `LeaseHolder.close` waits for the thread."""


class ExtentUser(Protocol):
    """The part of a program that uses the extents of a lease. The holder's thread calls it."""

    def claim(self, member: str, ticket: bytes, extents: tuple[LeasedExtent, ...]) -> None:
        """Show a ticket to a member, and get ready to use the extents among `extents` that the member lends.

        Raises
        ------
        FarpoolError
            The member does not answer or refuses the ticket.
        """
        ...

    def move(self, old: LeasedExtent, new: LeasedExtent, go_on: Callable[[], bool]) -> bool:
        """Copy the bytes of `old` to `new`, which was claimed, and use `new` from then on.

        If the bytes of `old` are lost, `new` may be `old`, and the bytes come from another extent with a copy of them.
        `go_on` is called now and then. If it returns False, the bytes stay, and the result is False.

        Raises
        ------
        FarpoolError
            A member failed. The bytes stay.
        """
        ...

    def faults(self) -> Mapping[tuple[str, int], str]:
        """Return the extents whose bytes are lost while another extent has a copy of them, each with the reason."""
        ...

    def close(self) -> None:
        """End the use of all extents."""
        ...


class LeaseHolder(Closing):
    """Holds one lease until `close`. Thread-safe.

    A forked child has no thread: the lease stays with its parent.

    Parameters
    ----------
    client : ManagerClient
        The managers.
    held : HeldLease
        The lease.
    user : ExtentUser
        The user of the extents. It has no reference to `owner`.
    owner : object
        Object that needs the lease. If it is garbage-collected without a call of `close`, the lease ends.
    name : str
        Name of the user, for warnings.
    timeout : float
        Seconds that a call for another thread may take.
    """

    _thread: threading.Thread | None

    def __init__(
        self, client: ManagerClient, held: HeldLease, user: ExtentUser, *, owner: object, name: str, timeout: float
    ) -> None:
        self._client, self._held, self._user = client, held, user
        self._name, self._timeout = name, timeout
        self._owner = os.getpid()
        self._is_dropped = False
        self._warned: set[str] = set()
        self.forked()
        forks.begin_again(self)
        # The finalizer holds this object, not the owner. At exit it need not run: the lease expires.
        weakref.finalize(owner, self._drop).atexit = False
        thread = threading.Thread(target=self._run, name="farpool-lease", daemon=True)
        thread.start()
        self._thread = thread

    def forked(self) -> None:
        """Begin without a thread in a forked child, because the lease stays with the parent."""
        self._thread = None
        self._has_ended = False
        self._woken = threading.Event()
        # Protects the state. Never held during a call of a manager or a node.
        self._lock = threading.Lock()
        # Held during a call that changes the lease, so that answers arrive in the order of the requests.
        self._calls = threading.Lock()
        # By member, held while a ticket is shown to it, because a node forgets the claims of the ticket before.
        self._shows: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @property
    def lease(self) -> str:
        """Number of the lease."""
        return self._held.lease

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each condition that a person should know."""
        with self._lock:
            return tuple(self._held.notes(time.monotonic()).values())

    def grow(self, size: int) -> tuple[LeasedExtent, ...]:
        """Lease further bytes, and return the new extents. Then call `show` or `drop`.

        Raises
        ------
        LeaseRefusedError, ManagerError
            As raised by `ManagerClient.resize`.
        """
        with self._calls:
            with self._lock:
                taken = self._held.take()
                epoch, wanted = self._held.epoch, self._held.nbytes + size
            if taken:  # of an earlier call, whose answer was lost
                return taken
            sent = time.monotonic()
            granted = self._client.resize(self.lease, wanted, epoch=epoch, timeout=self._timeout)
            with self._lock:
                self._held.granted(granted, sent)
                return self._held.take()

    def show(self, member: str, extents: tuple[LeasedExtent, ...]) -> None:
        """Show the ticket to the member of new extents, and look after the extents from then on.

        Raises
        ------
        FarpoolError
            As raised by `ExtentUser.claim`.
        """
        with self._shows[member]:
            ticket = self._held.ticket
            self._user.claim(member, ticket, extents)
            with self._lock:
                self._held.use(extents, ticket)
        self._woken.set()  # copies are looked at often

    def drop(self, extents: tuple[LeasedExtent, ...]) -> None:
        """Give back extents that could not be used."""
        with self._lock:
            self._held.drop(extents)
        self._woken.set()

    def close(self) -> None:
        """End the thread, the use of the extents, and the lease. Idempotent.

        If no manager answers, the lease expires by itself.
        """
        if self._owner != os.getpid():
            return
        self._end()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self._finish()

    def _drop(self) -> None:
        # Called by the garbage collector, so it may not close anything itself.
        self._is_dropped = True
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._woken.set()

    # The thread

    def _run(self) -> None:
        while not self._has_ended:
            try:
                rest = self._act()
            except Exception as error:  # a thread that ends would let the lease expire
                rest = 1.0
                self._warn("fault", f"the lease is not looked after: {type(error).__name__}: {error}")
            self._report()
            if rest > 0:
                self._woken.wait(min(rest, _LONGEST_REST_S))
                self._woken.clear()
        if self._is_dropped:
            self._finish()

    def _finish(self) -> None:
        self._user.close()
        if not self._held.has_ended:
            with suppress(FarpoolError):  # it expires by itself
                self._client.end(self.lease, timeout=min(self._timeout, _CALL_TIMEOUT_S))

    def _act(self) -> float:
        """Carry the next step out; return the seconds until the next one."""
        faults = self._user.faults()
        now = time.monotonic()
        with self._lock:
            self._held.failing(faults)
            step = self._held.step(now)
        if isinstance(step, Rest):
            return min(step.until - now, _LOOK_INTERVAL_S if self._held.has_copies else math.inf)
        if isinstance(step, Claim):
            self._claim(step)
        elif isinstance(step, Move):
            self._move(step)
        else:
            self._ask(step)
        return 0.0

    def _ask(self, step: Step) -> None:
        """Carry out a step at a manager."""
        with self._calls:
            sent = time.monotonic()
            try:
                granted = self._send(step)
            except LeaseRefusedError as error:
                with self._lock:
                    # Only a renewal says for certain that the lease is gone.
                    if isinstance(step, Renew) and error.reason == "unknown":
                        self._held.ended(str(error))
                    else:
                        self._held.refused(time.monotonic(), step, str(error))
            except FarpoolError as error:
                with self._lock:
                    self._held.failed(time.monotonic(), str(error))
            else:
                with self._lock:
                    self._held.granted(granted, sent, step)

    def _send(self, step: Step) -> GrantedLease:
        client, held = self._client, self._held
        timeout = min(self._timeout, _CALL_TIMEOUT_S)
        if isinstance(step, Replace):
            return client.replace(held.lease, [step.extent], epoch=held.epoch, timeout=timeout)
        if isinstance(step, Release):
            return client.release(held.lease, step.extents, epoch=held.epoch, timeout=timeout)
        return client.renew(held.lease, timeout=timeout)

    def _claim(self, step: Claim) -> None:
        with self._lock:
            extents = self._held.shown
        try:
            self._show_again(step.member, extents)
        except FarpoolError as error:
            with self._lock:
                self._held.not_claimed(step.member, time.monotonic(), str(error))

    def _show_again(self, member: str, extents: tuple[LeasedExtent, ...]) -> None:
        shows = self._shows[member]
        # The thread may not wait, because it renews the lease.
        if not shows.acquire(blocking=False):
            raise NodeError("another thread shows a ticket to this node, which makes memory for it", node=member)
        try:
            ticket = self._held.ticket
            self._user.claim(member, ticket, extents)
            with self._lock:
                self._held.claimed(member, ticket)
        finally:
            shows.release()

    def _move(self, step: Move) -> None:
        with self._lock:
            extents = (*self._held.shown, step.new)
        try:
            self._show_again(step.new.member, extents)
            is_done = self._user.move(step.old, step.new, self._go_on)
        except (FarpoolError, OSError, MemoryError) as error:
            with self._lock:
                self._held.not_moved(step, time.monotonic(), str(error))
            return
        if is_done:
            with self._lock:
                self._held.moved(step)

    def _go_on(self) -> bool:
        """Renew the lease and show its tickets during a long copy; return False when the lease is given back."""
        now = time.monotonic()
        with self._lock:
            step = self._held.step(now)
        if isinstance(step, Claim):
            self._claim(step)
        elif isinstance(step, Renew):
            self._ask(step)
        return not self._has_ended and not self._held.has_ended

    def _report(self) -> None:
        """Warn once of each condition that does not end by itself."""
        with self._lock:
            notes = self._held.notes(time.monotonic())
        notes.pop("away", None)
        for name in notes.keys() - self._warned:
            self._warn(name, f"{notes[name]} (Pool.explain reports it as long as it is so)")
        self._warned = set(notes)

    def _warn(self, name: str, text: str) -> None:
        if name in self._warned or self._has_ended:
            return
        self._warned.add(name)
        with suppress(FarpoolWarning):  # if warnings are errors, no caller can catch it
            warnings.warn(f"{self._name}: {text}", FarpoolWarning, stacklevel=1)
