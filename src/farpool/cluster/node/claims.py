"""Claims and orders at the node: verifies what a manager has signed, and passes it on to the data loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from farpool._native import NodeServer
from farpool.checks import require_package
from farpool.cluster.leases.tickets import check_order, check_ticket, verify_order, verify_ticket
from farpool.cluster.node.logs import log
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import ConfigError, TicketError

__all__ = ["Claims"]


class Claims:
    """Verifies tickets and orders for one node. Thread-safe.

    Parameters
    ----------
    server : NodeServer
        The data loop.
    member : bytes
        The node's identity.
    keys : callable or None
        Returns the managers' public keys by id; None for a node without a registry.
    clock : callable
        Returns the seconds since 1970.
    """

    def __init__(
        self,
        server: NodeServer,
        member: bytes,
        keys: Callable[[], Mapping[bytes, bytes]] | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._member = member
        self._keys = keys
        self._clock = clock

    def claim(self, data: bytes, client: Accepted) -> dict[str, Any]:
        """Enter the claims of a ticket for the client's session, and make the extents that are missing.

        Raises
        ------
        TicketError
            The ticket is not valid for this client, node and time, or it is of an earlier epoch.
        QuotaExceededError, OSError
            The node has no room for an extent.
        """
        try:
            ticket = verify_ticket(data, self._known_keys())
            now = self._clock()
            left = check_ticket(ticket, member=self._member, tenant=client.tenant, holder=client.key, now=now)
            claimed = self._server.claim(
                client.session,
                client.tenant,
                lease=ticket.lease,
                epoch=ticket.epoch,
                rights=ticket.rights,
                seconds=left,
                extents=[(extent.number, extent.bytes) for extent in ticket.extents_of(self._member)],
                age=now - ticket.issued_ms / 1000,
            )
        except TicketError as error:
            log("ticket refused", key=client.key, tenant=client.tenant, reason=str(error))
            error.refused = True
            raise
        return {"extents": claimed, "rights": ticket.rights, "seconds": left, "epoch": ticket.epoch}

    def order(self, data: bytes, client: Accepted) -> dict[str, Any]:
        """Carry out an order.

        Raises
        ------
        TicketError
            The order is not valid for this node, or it is of an earlier epoch.
        """
        try:
            order = verify_order(data, self._known_keys())
            check_order(order, member=self._member)
            ended = self._server.order(order.lease, order.epoch, order.action, list(order.extents))
        except TicketError as error:
            log("order refused", key=client.key, reason=str(error))
            error.refused = True
            raise
        log(
            "order",
            lease=order.lease.hex(),
            action=order.action,
            epoch=order.epoch,
            ended=" ".join(map(str, ended)),
            reason=order.reason,
        )
        return {"ended": ended}

    def _known_keys(self) -> Mapping[bytes, bytes]:
        if self._keys is None:
            raise TicketError(
                "this node is no member of a pool, so it knows no manager's keys; start it with --registry URL"
            )
        try:
            require_package("cryptography", "tls", "a node that verifies tickets")
        except ConfigError as error:
            raise TicketError(str(error)) from error
        return self._keys()
