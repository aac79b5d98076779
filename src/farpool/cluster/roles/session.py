"""Sessions and roles. A role, such as the writer of a name or the leading manager, has at most one holder at a time.

A program opens a `Session`, which has one lease in the registry and renews it. To take a role, the session writes an
entry under the role's key, on the condition that the key has no entry, and binds that entry to the session's lease. So
a role becomes free when its holder gives the role up, closes the session, or does not renew the lease in time. If the
registry is away when the holder gives the role up, the session deletes the entry once the registry answers again.

A program cannot be sure that it still holds a role: right after a check, the program may be stopped for longer than its
lease lasts. So each holder has a *fencing token*, which is the revision of the holder's entry. The token is higher than
the tokens of all earlier holders of that role. A holder makes its changes in one of two ways:

- It changes the registry only through `HeldRole.commit`, which adds the condition that the role's entry still has the
  holder's revision.
- It changes anything else, such as a node, only through requests that contain the token. The receiver remembers the
  highest token that it has seen, and refuses requests with a lower token.

No decision depends on a clock of this process. Only the registry decides when a lease has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from farpool import forks
from farpool.abc.registry import Commit, Condition, Delete, Operation, Put, Registry
from farpool.closing import Closing
from farpool.errors import RegistryAwayError, RegistryCompactedError, RegistryError, RegistryLeaseError

__all__ = ["HeldRole", "RoleHolder", "Session", "holder_of"]

_Result = TypeVar("_Result")

_RENEWALS_PER_TTL = 3
_PAUSE_S = 0.05
"""Pause in seconds before a session tries again to take a role, for example one that another thread is taking."""
_WATCH_SLICE_S = 1.0
"""Maximum seconds of one wait for a change of a held role. After each wait, the session checks if it is still open."""


@dataclass(frozen=True, slots=True)
class RoleHolder:
    """The present holder of a role.

    Attributes
    ----------
    value : bytes
        The value that the holder gave to `Session.take`.
    token : int
        The holder's fencing token.
    seconds : float
        Seconds after which the holder's lease ends unless the holder renews it.
    """

    value: bytes
    token: int
    seconds: float


def holder_of(registry: Registry, role: str, *, timeout: float | None = None) -> RoleHolder | None:
    """Return the present holder of a role; None if no program holds it."""
    entry = registry.get(role, timeout=timeout)
    if entry is not None:
        with suppress(RegistryLeaseError):  # the lease ended after the first call
            return RoleHolder(entry.value, entry.revision, registry.remaining(entry.lease, timeout=timeout))
    return None


class Session(Closing):
    """A lease in a registry, and the roles that a program holds under this lease. Thread-safe; a context manager.

    The session asks the registry for a lease at the first call that needs one, and a thread renews the lease. If the
    lease ends nevertheless, the session loses its roles, and the next call that needs a lease gets a new one. A forked
    child begins without a lease and without roles, because these stay with its parent.

    Parameters
    ----------
    registry : Registry
        Registry of the roles.
    ttl : float
        Seconds without a renewal after which the registry ends the lease.
    timeout : float
        Seconds that a call may wait for the registry, unless the call has a `timeout` of its own.
    on_renewal : callable, optional
        Function that is called after each renewal, in a thread of its own. It is not called while its previous call is
        still under way.
    """

    def __init__(
        self,
        registry: Registry,
        ttl: float = 30.0,
        *,
        timeout: float = 5.0,
        on_renewal: Callable[[], None] | None = None,
    ) -> None:
        self._registry = registry
        self._ttl, self._timeout = ttl, timeout
        self._on_renewal = on_renewal
        self._closed = False
        self._begin()
        forks.begin_again(self)

    def _begin(self) -> None:
        # Protects the lease, the roles and the thread. Held while a lease is granted, so that two threads share one.
        self._lock = threading.Lock()
        self._lease = 0
        self._roles: dict[str, HeldRole | None] = {}  # None while a thread is taking the role
        # Entries that this session could not delete, because the registry did not answer or refused to write.
        self._left: set[Condition] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def forked(self) -> None:
        """Begin without a lease, roles and a thread in a forked child, because these stay with the parent."""
        self._begin()

    @property
    def registry(self) -> Registry:
        """Registry of the roles."""
        return self._registry

    def lease(self, timeout: float | None = None) -> int:
        """Return the number of the session's lease. If the session has none, get a lease from the registry first."""
        with self._lock:
            if self._closed:
                raise RegistryError(
                    f"this session with the registry {self._registry.address} was closed; make a new one",
                    registry=self._registry.address,
                )
            if not self._lease:
                self._lease = self._registry.grant(self._ttl, timeout=self._seconds(timeout))
            if self._thread is None:
                keeper = threading.Thread(target=self._keep, args=(self._ended,), name="farpool-session", daemon=True)
                # This may raise if the process has too many threads. Then the next call tries again.
                keeper.start()
                self._thread = keeper
            return self._lease

    def under_lease(self, act: Callable[[int], _Result], timeout: float | None = None) -> _Result:
        """Call `act` with the number of the session's lease, and return its result.

        If the lease has ended, `act` is called again with a new lease.

        Parameters
        ----------
        act : callable
            Function that raises `RegistryLeaseError` if the lease has ended, as the methods of a `Registry` do.
        timeout : float, optional
            Maximum seconds to wait for a lease. After this time, `act` is not called again, and the error of its last
            call is raised.
        """
        deadline = time.monotonic() + self._seconds(timeout)
        while True:
            lease = self.lease(timeout)
            try:
                return act(lease)
            except RegistryLeaseError:
                self._lose(lease)
                if time.monotonic() >= deadline:
                    raise

    def take(
        self, role: str, value: bytes = b"", *, wait: float = 0.0, timeout: float | None = None
    ) -> HeldRole | None:
        """Take a role and return it; return None if another program, or other code of this program, holds it.

        Parameters
        ----------
        role : str
            Key of the role in the registry.
        value : bytes
            Information about the holder for other programs, such as its address; `holder_of` returns it.
        wait : float
            Maximum seconds to wait until the role becomes free or the registry answers again.
        timeout : float, optional
            Seconds that each call of the registry may take.

        Raises
        ------
        RegistryAwayError
            The registry did not answer. If the error's `uncertain` is True, this session may appear to hold the role
            until the session takes the role again or is closed.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                held = self._take(role, value, timeout)
                if held is not None or time.monotonic() >= deadline:
                    return held
                self._await_change(role, deadline, timeout)
            except RegistryAwayError:
                if time.monotonic() >= deadline:
                    raise
                # Not `time.sleep`: closing the session ends this wait.
                self._ended.wait(_PAUSE_S)

    def _take(self, role: str, value: bytes, timeout: float | None) -> HeldRole | None:
        while True:
            with self._lock:
                if role not in self._roles:
                    self._roles[role] = None
                    break
                ours = self._roles[role]
            if ours is None:
                return None
            with suppress(RegistryLeaseError):  # the role was lost, and this session had not noticed
                ours.confirm(timeout=timeout)
                return None
        held: HeldRole | None = None
        try:
            # Outside the lock, so a registry that is away does not keep other threads from using their roles.
            held = self.under_lease(lambda lease: self._write(role, value, lease, timeout), timeout)
        finally:
            with self._lock:
                # Since the entry was written, the lease may have ended, and with it the role.
                if held is not None and held.lease == self._lease:
                    self._roles[role] = held
                else:
                    self._roles.pop(role, None)
        return held

    def _write(self, role: str, value: bytes, lease: int, timeout: float | None) -> HeldRole | None:
        revision = 0
        while True:
            done = self._registry.commit(
                [Condition(role, revision)], [Put(role, value, lease)], timeout=self._seconds(timeout)
            )
            if done.succeeded:
                return HeldRole(self, role, done.revision, lease)
            entry = self._registry.get(role, timeout=self._seconds(timeout))
            if entry is not None and entry.lease != lease:
                return None
            # The role has become free. Or this session left its own entry there when the registry was away. Then we
            # write the entry again: the new holder needs a higher token than the part of this program that left it.
            revision = entry.revision if entry else 0

    def _await_change(self, role: str, deadline: float, timeout: float | None) -> None:
        """Wait until a held role may have become free, or until the deadline."""
        snapshot = self._registry.range(role, timeout=self._seconds(timeout))
        # The role is free again, or another thread of this program is taking it.
        if all(entry.key != role for entry in snapshot.entries):
            self._ended.wait(_PAUSE_S)
            return
        with self._registry.watch(role, snapshot.revision) as watch:
            while not self._closed and (left := deadline - time.monotonic()) > 0:
                try:
                    changes = watch.next(min(left, _WATCH_SLICE_S))
                except RegistryCompactedError:
                    return
                if any(entry.key == role and entry.deleted for entry in changes.entries):
                    return

    def renew(self) -> None:
        """Renew the lease, if the session has one. The session's thread calls this three times in `ttl` seconds.

        This also tries again to delete the entries that `delete` could not delete.

        Raises
        ------
        RegistryError
            The registry did not answer. The lease may have ended, and this session does not know it.
        """
        # Read once: the registry's answer is about this lease, even if the session has a new one by then.
        lease = self._lease
        if lease:
            # Calls that take longer together would delay the next renewal.
            deadline = time.monotonic() + self._ttl / _RENEWALS_PER_TTL
            try:
                self._registry.keep_alive(lease, timeout=self._ttl / _RENEWALS_PER_TTL)
            except RegistryLeaseError:
                self._lose(lease)
            self._delete_left(deadline)

    def delete(self, condition: Condition, lease: int, *, timeout: float | None = None) -> bool:
        """Delete an entry that was bound to a lease of this session, unless the entry was changed since.

        If this fails, for example because the registry does not answer, the session tries again after each renewal of
        the lease. Otherwise the entry would stay for as long as the session renews its lease.

        Parameters
        ----------
        condition : Condition
            Key and revision of the entry. An entry with another revision may belong to another program, and stays.
        lease : int
            Number of the lease. When it ends, the registry deletes the entry.
        timeout : float, optional
            Seconds that the call of the registry may take.

        Returns
        -------
        bool
            False if the registry has no entry with this revision.
        """
        try:
            done = self._registry.commit([condition], [Delete(condition.key)], timeout=self._seconds(timeout))
        except RegistryError:
            with self._lock:
                if lease == self._lease:
                    self._left.add(condition)
            return True
        return done.succeeded

    def _delete_left(self, deadline: float) -> None:
        with self._lock:
            left = list(self._left)
        for condition in left:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return
            with suppress(RegistryError):  # the next renewal tries again
                self._registry.commit([condition], [Delete(condition.key)], timeout=seconds)
                with self._lock:
                    self._left.discard(condition)

    def _keep(self, ended: threading.Event) -> None:
        calling: threading.Thread | None = None
        while not ended.wait(self._ttl / _RENEWALS_PER_TTL):
            # Perhaps the registry comes back before the lease ends, or the process may start threads again.
            with suppress(RegistryError, RuntimeError):
                self.renew()
                # In its own thread, because a call that takes long or fails must not keep this one from renewing.
                if self._on_renewal is not None and (calling is None or not calling.is_alive()):
                    caller = threading.Thread(target=self._on_renewal, name="farpool-session-renewed", daemon=True)
                    caller.start()
                    calling = caller

    def _lose(self, lease: int) -> None:
        """Remove an ended lease from this session, and also the roles that were bound to this lease."""
        with self._lock:
            # Another thread may have got a new lease in the meantime, which stays.
            if self._lease == lease:
                self._lease = 0
                self._left.clear()
            self._roles = {role: held for role, held in self._roles.items() if held is None or held.lease != lease}

    def _holds(self, held: HeldRole) -> bool:
        # Compared as an object: another part of this program may hold the role again, with a higher token.
        return self._roles.get(held.role) is held

    def _forget(self, held: HeldRole) -> bool:
        """Remove a role from the session's roles; return True if the session still held it."""
        with self._lock:
            holds = self._holds(held)
            if holds:
                del self._roles[held.role]
            return holds

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    def close(self, *, timeout: float | None = None) -> None:
        """End the lease now, and with it all entries that are bound to it. Idempotent."""
        with self._lock:
            self._closed = True
            self._ended.set()
            self._roles = {}
            self._left.clear()
            lease, self._lease = self._lease, 0
        # Outside the lock, because the registry may take long to answer.
        if lease:
            with suppress(RegistryError):  # the lease ends by itself; an error would hide the program's own
                self._registry.revoke(lease, timeout=self._seconds(timeout))


class HeldRole(Closing):
    """A role that a session holds; `Session.take` returns it. The end of a ``with`` block gives the role up.

    Attributes
    ----------
    role : str
        Key of the role in the registry.
    token : int
        Fencing token: higher than the tokens of all earlier holders of this role in the same registry. In a registry
        that was restored from a backup, tokens begin again with low numbers.
    lease : int
        Number of the lease to which the role is bound.
    condition : Condition
        Condition for a transaction; it holds while this holder still has the role.
    """

    def __init__(self, session: Session, role: str, token: int, lease: int) -> None:
        self._session = session
        self.role, self.token, self.lease = role, token, lease
        self.condition = Condition(role, token)

    @property
    def lost(self) -> bool:
        """True if this process knows that it no longer holds the role.

        False proves nothing: only `commit` and `confirm` ask the registry.
        """
        return not self._session._holds(self)

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        """Do all operations if this holder still has the role and all conditions hold; otherwise change nothing.

        Parameters
        ----------
        conditions : sequence of Condition
            At most 99 conditions, because the role's own condition is added to them.
        operations : sequence of Put or Delete
            At most 100 operations, each on a different key.
        timeout : float, optional
            Seconds that each call of the registry may take.

        Returns
        -------
        Commit
            Outcome. `succeeded` is False if this holder still had the role, but one of `conditions` did not hold.

        Raises
        ------
        RegistryLeaseError
            This holder has lost the role, or an operation names a lease that has ended. Nothing was changed.
        RegistryAwayError
            As raised by `Registry.commit`.
        """
        if self.lost:
            raise self._lost()
        seconds = self._session._seconds(timeout)
        try:
            done = self._session.registry.commit([self.condition, *conditions], operations, timeout=seconds)
        except RegistryLeaseError:
            # Raises if the role is lost. If not, the error is about another lease.
            self.confirm(timeout=timeout)
            raise
        if not done.succeeded:
            # The condition that failed may be the role's own; then this raises.
            self.confirm(timeout=timeout)
        return done

    def replace(self, value: bytes, *, timeout: float | None = None) -> None:
        """Write another value of the role, which `holder_of` returns from then on. The holder gets a higher token.

        No other thread may use this object during the call, because the old token ends with the old value.

        Parameters
        ----------
        value : bytes
            Information about the holder, as for `Session.take`.
        timeout : float, optional
            Seconds that each call of the registry may take.

        Raises
        ------
        RegistryLeaseError
            This holder has lost the role.
        RegistryAwayError
            The registry did not answer. If `uncertain` is True, this holder may have lost the role, and
            `Session.take` takes it again.
        """
        done = self.commit([], [Put(self.role, value, self.lease)], timeout=timeout)
        if not done.succeeded:  # the role was lost during the call
            raise self._lost()
        self.token = done.revision
        self.condition = Condition(self.role, done.revision)

    def confirm(self, *, timeout: float | None = None) -> None:
        """Ask the registry, and raise an error unless this holder still has the role.

        Raises
        ------
        RegistryLeaseError
            This holder has lost the role.
        """
        if self.lost:
            raise self._lost()
        entry = self._session.registry.get(self.role, timeout=self._session._seconds(timeout))
        if entry is None or entry.revision != self.token:
            self._session._forget(self)
            raise self._lost()

    def _lost(self) -> RegistryLeaseError:
        address = self._session.registry.address
        return RegistryLeaseError(
            f"this program no longer holds the role {self.role!r} in the registry {address}: it gave the role up, its "
            f"lease {self.lease} ended, or it was forked from the holder; take the role again",
            registry=address,
            lease=self.lease,
        )

    def close(self, *, timeout: float | None = None) -> None:
        """Give the role up, so that other programs may take it. Idempotent.

        If the registry does not answer, the role becomes free when the session can renew its lease again, or when the
        lease ends.
        """
        if self._session._forget(self):
            self.delete(self.condition, timeout=timeout)

    def delete(self, condition: Condition, *, timeout: float | None = None) -> bool:
        """Delete an entry that is bound to the role's lease; see `Session.delete`."""
        return self._session.delete(condition, self.lease, timeout=timeout)
