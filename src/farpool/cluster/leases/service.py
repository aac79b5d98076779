"""Leases in a registry, for a manager: requests of many threads, carried out in few transactions."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from farpool import forks
from farpool.abc.membership import MemberState
from farpool.abc.registry import Registry
from farpool.checks import require_seconds, require_whole
from farpool.closing import Closing
from farpool.cluster.leases.engine import Clock, Engine, Policies
from farpool.cluster.leases.records import LeaseRequest, OrderRecord, check_request, lease_key, order_key
from farpool.cluster.leases.requests import (
    Confirm,
    Done,
    End,
    Extents,
    Grant,
    Granted,
    Outcome,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
)
from farpool.cluster.leases.upkeep import REQUESTS_MAX, reclaim
from farpool.cluster.members.records import RECORD, MemberRecord
from farpool.errors import RegistryAwayError, RegistryDamagedError, RegistryError

__all__ = ["Counts", "LeaseService"]

_LOOK_INTERVAL_S = 0.1
"""Seconds between two looks for changes while there are no requests."""
_UPKEEP_INTERVAL_S = 1.0
_GROUP_MAX = 400
"""Most requests that are decided on together. Those that do not fit into the transaction are decided on again."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of leases as one manager knows them.

    Attributes
    ----------
    leases : int
        Leases.
    orders : int
        Extents whose end their nodes have not confirmed.
    lent : mapping of tuple of int and str to int
        Bytes, with copies, by tenant and medium.
    """

    leases: int
    orders: int
    lent: Mapping[tuple[int, str], int]


class _Pending:
    """A request with the thread that waits for it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answered = threading.Event()
        self.is_started = False
        self.is_dropped = False
        self.outcome: Outcome | Exception | None = None


class LeaseService(Closing):
    """Grants, renews, resizes and ends the leases in a registry. Thread-safe; several managers may have one each.

    A thread carries the requests out. The requests that arrive while a transaction is under way make up the next one.
    Leases that have expired end by themselves, and members that drain, or that lend less than before, get their memory
    back.

    Parameters
    ----------
    registry : Registry
        The registry. The program that opened it closes it after the service.
    clock : Clock, optional
        The time.
    policies : callable, optional
        Returns the limits of each tenant by its number; None for no limits. It is called for each transaction, so it
        must return at once.
    timeout : float
        Seconds that a call may take.

    Attributes
    ----------
    upkeep_error : Exception or None
        Error of the last attempt to end expired leases and to get memory back; None if it worked. While it does not
        work, memory of programs that have ended stays lent.

    Raises
    ------
    RegistryError
        The entries cannot be read.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        clock: Clock | None = None,
        policies: Policies = lambda: None,
        timeout: float = 10.0,
    ) -> None:
        self._timeout = require_seconds(timeout, "timeout")
        self._registry, self._clock, self._policies = registry, clock or Clock(), policies
        self._has_ended = False
        self.upkeep_error: Exception | None = None
        self.forked()
        self._engine.follow(timeout=timeout)
        self._start()
        forks.begin_again(self)

    def forked(self) -> None:
        """Begin without a thread and without requests in a forked child."""
        # Protects the queue and the states of its requests.
        self._arrived = threading.Condition()
        self._queue: deque[_Pending] = deque()
        self._engine = Engine(self._registry, self._clock, self._policies, self._timeout)
        self._thread: threading.Thread | None = None

    # Requests

    def grant(self, request: LeaseRequest, *, timeout: float | None = None) -> Granted | Refused:
        """Grant a lease, or refuse it with the reason and with terms that would be granted.

        Parameters
        ----------
        request : LeaseRequest
            The terms. If the same request comes again, it gets the same lease. An empty `request` gets a text of its
            own.
        timeout : float, optional
            Seconds that the call may take; None for the service's.

        Raises
        ------
        ConfigError
            No pool could keep such terms.
        RegistryAwayError
            The registry did not answer. If `uncertain` is True, the lease may have been granted; repeat the request.
        RegistryError
            The registry refused, or an entry is damaged. Nothing was changed.
        """
        if not request.request:
            request = msgspec.structs.replace(request, request=secrets.token_hex(16))
        check_request(request)
        outcome = self._ask(Grant(request), timeout)
        assert not isinstance(outcome, Done)
        return outcome

    def renew(self, lease: str, *, tenant: int | None = None, timeout: float | None = None) -> Granted | Refused:
        """Move the expiry of a lease to its time to live from now; never back.

        An expired lease is renewed, too, as long as it has not ended. `Granted.wanted_back` has the extents that their
        lenders want back.

        Parameters
        ----------
        lease : str
            Number of the lease.
        tenant : int, optional
            The tenant that asks; None for an administrator.
        timeout : float, optional
            Seconds that the call may take.
        """
        outcome = self._ask(Renew(lease, tenant), timeout)
        assert not isinstance(outcome, Done)
        return outcome

    def resize(
        self, lease: str, size: int, *, epoch: int, tenant: int | None = None, timeout: float | None = None
    ) -> Granted | Done | Refused:
        """Grow or shrink a lease while it is in use.

        A lease grows by new parts. It shrinks by whole parts, so it may keep more than `size` bytes; parts that a
        lender wants back end first, then the last ones. `epoch` is the lease's epoch as the holder knows it.
        """
        require_whole(size, "size", 1, hint="end the lease to return all of it")
        return self._ask(Resize(lease, tenant, epoch, size), timeout)

    def replace(
        self,
        lease: str,
        extents: Extents = (),
        *,
        epoch: int,
        tenant: int | None = None,
        timeout: float | None = None,
    ) -> Granted | Refused:
        """Add an extent on another member for each of `extents` (member and number), and for each missing copy.

        The holder copies the bytes, and releases the old extents then.
        """
        outcome = self._ask(Replace(lease, tenant, epoch, extents), timeout)
        assert not isinstance(outcome, Done)
        return outcome

    def release(
        self, lease: str, extents: Extents, *, epoch: int, tenant: int | None = None, timeout: float | None = None
    ) -> Granted | Done | Refused:
        """End extents that the holder no longer uses. A lease without any extent left ends."""
        return self._ask(Release(lease, tenant, epoch, extents), timeout)

    def end(
        self,
        lease: str,
        *,
        tenant: int | None = None,
        reason: str = "its holder returned it",
        timeout: float | None = None,
    ) -> Done | Refused:
        """End a lease. It is no error if it has ended."""
        outcome = self._ask(End(lease, tenant, reason), timeout)
        assert not isinstance(outcome, Granted)
        return outcome

    def confirm(self, order: OrderRecord, *, timeout: float | None = None) -> Done:
        """Record that a node has freed the extent of an order; its bytes can be lent again from then on."""
        outcome = self._ask(Confirm(order.member, order.lease, order.extent), timeout)
        assert isinstance(outcome, Done)
        return outcome

    def confirm_all(self, orders: Iterable[OrderRecord], *, timeout: float | None = None) -> None:
        """Record that nodes have freed the extents of some orders, in as few transactions as possible."""
        for pending in [self._enqueue(Confirm(one.member, one.lease, one.extent)) for one in orders]:
            self._await(pending, timeout)

    def reclaim(self, member: str, size: int, *, medium: str = "dram", timeout: float | None = None) -> int:
        """Ask holders for bytes of a member back, each within the time that its lease states.

        Returns
        -------
        int
            Number of leases whose holders were asked; they learn of it when they renew. Extents that end already, or
            that were asked for before, count.
        """
        with self._engine.lock:
            requests = reclaim(self._engine.book.view, member, medium, size)
        for pending in [self._enqueue(request) for request in requests]:
            self._await(pending, timeout)
        return len(requests)

    # Questions

    def lease(self, lease: str) -> Granted | None:
        """Return a lease as this manager knows it; None if there is none."""
        with self._engine.lock:
            stored = self._engine.book.view.leases.get(lease)
        return Granted(lease, stored[1]) if stored else None

    def leases(self, *, tenant: int | None = None, after: str = "", limit: int = 1000) -> list[Granted]:
        """Return leases in the order of their numbers, at most `limit`, with numbers above `after`."""
        with self._engine.lock:
            stored = list(self._engine.book.view.leases.items())
        found = sorted(
            lease
            for lease, (_, record) in stored
            if lease > after and (tenant is None or record.terms.tenant == tenant)
        )
        records = dict(stored)
        return [Granted(lease, records[lease][1]) for lease in found[:limit]]

    def orders(self, member: str) -> list[OrderRecord]:
        """Return the orders that a member's node has not confirmed."""
        with self._engine.lock:
            return list(self._engine.book.view.orders(member))

    def waiting_orders(self, limit: int, without: Container[str] = ()) -> dict[str, list[OrderRecord]]:
        """Return orders by the members that have not confirmed them, as `View.waiting_orders` does."""
        with self._engine.lock:
            return self._engine.book.view.waiting_orders(limit, without)

    def names(self, lease: str, member: str, extent: int) -> bool:
        """Return True if a lease may have an extent, or if an order to end it waits, as this manager knows it."""
        with self._engine.lock:
            view = self._engine.book.view
            if view.is_damaged(lease_key(lease)) or view.revision_of(order_key(member, lease, extent)):
                return True
            stored = view.leases.get(lease)
        return stored is not None and (member, extent) in {(one.member, one.number) for one in stored[1].extents}

    def members(self) -> dict[str, tuple[MemberRecord | None, MemberState | None]]:
        """Return the record and the state of each member by its identity; None for both if the record is damaged."""
        with self._engine.lock:
            view = self._engine.book.view
            found: dict[str, tuple[MemberRecord | None, MemberState | None]]
            found = dict.fromkeys(view.known_members(), (None, None))
            found |= {member: (record, state) for member, record, state in view.members()}
        return found

    def member(self, member: str) -> MemberRecord | None:
        """Return the record of a member; None if there is none, or if it cannot be read."""
        with self._engine.lock, suppress(RegistryDamagedError):
            return self._engine.book.view.get(RECORD + member, MemberRecord)
        return None

    def counts(self) -> Counts:
        """Return numbers for metrics."""
        with self._engine.lock:
            view = self._engine.book.view
            lent = {
                (tenant, medium): size
                for tenant, account in view.tenants().items()
                for medium, size in account.lent.items()
            }
            return Counts(len(view.leases), view.orders_count(), lent)

    # The thread

    def _ask(self, request: Request, timeout: float | None) -> Outcome:
        return self._await(self._enqueue(request), timeout)

    def _enqueue(self, request: Request) -> _Pending:
        pending = _Pending(request)
        with self._arrived:
            if self._has_ended:
                raise RegistryError("this lease service was closed; open a new one", registry=self._registry.address)
            self._queue.append(pending)
            self._start()
            self._arrived.notify()
        return pending

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="farpool-leases", daemon=True)
            thread.start()
            self._thread = thread

    def _await(self, pending: _Pending, timeout: float | None) -> Outcome:
        seconds = self._timeout if timeout is None else timeout
        if not pending.answered.wait(seconds):
            with self._arrived:
                pending.is_dropped = True
            if not pending.answered.is_set():
                raise RegistryAwayError(
                    f"the registry {self._registry.address} did not carry out a change of leases in {seconds} s; "
                    "repeat the request",
                    registry=self._registry.address,
                    uncertain=pending.is_started,
                )
        if isinstance(pending.outcome, Exception):
            raise pending.outcome
        assert pending.outcome is not None
        return pending.outcome

    def _run(self) -> None:
        upkeep_at = self._clock.tick()
        while True:
            group = self._next_group()
            if group is None:
                break
            outcomes: tuple[Outcome | Exception, ...] = ()
            try:
                if group:
                    outcomes = self._engine.settle([one.request for one in group])
                else:
                    self._engine.follow()
                    self._engine.yield_turn()
            except Exception as error:  # a thread that ends would let all later requests wait
                outcomes = (error,) * len(group)
                if not group:
                    time.sleep(_LOOK_INTERVAL_S)
            self._answer(group, outcomes)
            # Also between requests that come all the time: otherwise no lease would expire on a busy manager.
            if self._clock.tick() >= upkeep_at:
                done = 0
                try:
                    done = self._engine.upkeep()
                    self.upkeep_error = None
                except Exception as error:
                    self.upkeep_error = error
                wait = _UPKEEP_INTERVAL_S if done < REQUESTS_MAX else _LOOK_INTERVAL_S
                upkeep_at = self._clock.tick() + wait
        with suppress(RegistryError):
            self._engine.yield_turn()
        self._engine.end()
        self._answer(list(self._queue), (RegistryError("this lease service was closed"),) * len(self._queue))

    def _next_group(self) -> list[_Pending] | None:
        """Wait for requests; return None at the end, and an empty list if none came for a while."""
        with self._arrived:
            if not self._queue and not self._has_ended:
                self._arrived.wait(_LOOK_INTERVAL_S)
            if self._has_ended:
                return None
            group: list[_Pending] = []
            while self._queue and len(group) < _GROUP_MAX:
                pending = self._queue.popleft()
                if not pending.is_dropped:
                    pending.is_started = True
                    group.append(pending)
            return group

    def _answer(self, group: list[_Pending], outcomes: tuple[Outcome | Exception, ...]) -> None:
        """Give requests their outcomes, and put those without one back, as the first ones."""
        for pending, outcome in zip(group, outcomes, strict=False):
            pending.outcome = outcome
            pending.answered.set()
        rest = group[len(outcomes) :]
        if rest:
            with self._arrived:
                for pending in rest:
                    pending.is_started = False
                self._queue.extendleft(reversed(rest))

    def close(self) -> None:
        """Stop. Requests that wait raise RegistryError. Idempotent."""
        with self._arrived:
            self._has_ended = True
            thread, self._thread = self._thread, None
            self._arrived.notify_all()
        if thread is not None:
            thread.join()
        else:
            self._engine.end()
