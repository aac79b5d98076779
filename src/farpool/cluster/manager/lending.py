"""The manager's leases: the service that grants them, the keys that sign their tickets, and the tenants' limits."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

from farpool.abc.registry import Registry
from farpool.closing import Closing
from farpool.cluster.leases.keyset import KeySet
from farpool.cluster.leases.requests import Granted
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.leases.tickets import TICKET_LIFETIME_MAX_S, Order, Ticket, TicketExtent
from farpool.cluster.manager.limits import LimitsFollower
from farpool.cluster.node.logs import log
from farpool.errors import RegistryAwayError

__all__ = ["Lending", "SignedTicket", "ticket_for"]

_INTERVAL_S = 0.2
_PAUSE_S = 1.0
_TURN_INTERVAL_S = 60.0
_TIMEOUT_S = 5.0
_OPENING_S = 2.0
_READ: Final = 1
_READ_AND_WRITE: Final = 3


@dataclass(frozen=True, slots=True)
class SignedTicket:
    """A ticket for a lease.

    Attributes
    ----------
    data : bytes
        The signed ticket.
    expires : float
        Time from which on nodes refuse it, in seconds since 1970.
    """

    data: bytes
    expires: float


def ticket_for(granted: Granted, now: float, *, reads_only: bool = False) -> Ticket | None:
    """Return the ticket for a lease; None if the lease has expired.

    The ticket expires with the lease, or after the longest life of a ticket if the lease lives longer.

    Parameters
    ----------
    granted : Granted
        The lease, as the registry has it.
    now : float
        The time in seconds since 1970.
    reads_only : bool
        True for a ticket without the right to write, whatever the lease's terms say.
    """
    record = granted.record
    issued = int(now * 1000)
    expiry = min(int(record.expires * 1000), issued + int(TICKET_LIFETIME_MAX_S * 1000))
    if expiry <= issued:
        return None
    return Ticket(
        lease=bytes.fromhex(granted.lease),
        tenant=record.terms.tenant,
        holder=record.terms.holder,
        epoch=record.epoch,
        rights=_READ if reads_only or record.terms.rights == "r" else _READ_AND_WRITE,
        issued_ms=issued,
        expiry_ms=expiry,
        extents=tuple(TicketExtent(bytes.fromhex(one.member), one.number, one.bytes) for one in record.extents),
    )


class Lending(Closing):
    """Leases, keys and limits of one manager. Thread-safe.

    A thread makes them available once the registry answers, turns the keys, and follows the tenants' policy.

    Parameters
    ----------
    registry : Registry
        The registry.

    Attributes
    ----------
    limits : LimitsFollower
        The tenants' limits.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.limits = LimitsFollower(registry)
        self._keys = KeySet(registry)
        self._service: LeaseService | None = None
        self._turn_at = 0.0
        self._trouble = "it has not been read yet"
        self._notes: tuple[str, ...] = ()
        self._opened, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="farpool-manager-lending", daemon=True)

    @property
    def service(self) -> LeaseService:
        """The service that grants leases. Waits for it for a short time, if the manager has just started.

        Raises
        ------
        RegistryAwayError
            The registry could not be read since the manager started.
        """
        self._opened.wait(_OPENING_S)
        service = self._service
        if service is None:
            address = self.registry.address
            raise RegistryAwayError(
                f"the leases in the registry {address} are not known yet: {self._trouble}; try again", registry=address
            )
        return service

    @property
    def present(self) -> LeaseService | None:
        """The service; None if the registry could not be read since the manager started."""
        return self._service

    def sign(self, message: Ticket | Order) -> bytes:
        """Sign a ticket or an order, as `KeySet.sign` does."""
        return self._keys.sign(message)

    def ticket(self, granted: Granted, *, reads_only: bool = False) -> SignedTicket | None:
        """Return a signed ticket for a lease; None if the lease has expired.

        Raises
        ------
        RegistryError
            There is no key that signs now.
        """
        ticket = ticket_for(granted, time.time(), reads_only=reads_only)
        return None if ticket is None else SignedTicket(self.sign(ticket), ticket.expiry_ms / 1000)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and the service. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        service = self._service
        if service is not None:
            service.close()

    def _keep(self) -> None:
        wait = 0.0
        while not self._ended.wait(wait):
            try:
                self._step()
                self._told("")
                wait = _INTERVAL_S
            except Exception as error:  # without this thread, the manager would soon sign no more tickets
                self._told(str(error))
                wait = _PAUSE_S
        self.limits.close()

    def _step(self) -> None:
        # The service comes last. Without limits it would grant what a tenant may not have, and without keys leases that
        # no node accepts.
        self.limits.follow()
        if self.limits.notes != self._notes:
            self._notes = self.limits.notes
            for note in self._notes:
                log("limits of tenants", level=logging.WARNING, reason=note)
        if time.monotonic() >= self._turn_at:
            self._keys.turn()
            self._turn_at = time.monotonic() + _TURN_INTERVAL_S
        if self._service is None:
            self._service = LeaseService(self.registry, policies=lambda: self.limits.limits, timeout=_TIMEOUT_S)
            self._opened.set()

    def _told(self, trouble: str) -> None:
        """Log each trouble once."""
        if trouble and trouble != self._trouble:
            log("leases, keys and limits stay as they were", level=logging.WARNING, reason=trouble)
        self._trouble = trouble
