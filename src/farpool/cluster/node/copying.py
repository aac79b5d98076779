"""Copies objects from other members to this node, as repair orders it."""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from farpool._native import Connection, NodeServer
from farpool.cluster.node.logs import log
from farpool.cluster.repair.copying import Request, copying
from farpool.cluster.repair.messages import Outcome
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.frames import Credential, Right
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import ConfigError, FarpoolError, NodeError

if TYPE_CHECKING:
    from farpool._native import Reply

__all__ = ["COPIES_MAX", "PeerCopies"]

COPIES_MAX = 4
"""Objects that are copied to this node at the same time. Each is in memory as a whole while it is copied."""
_CHANNELS_MAX = 64
"""Open channels to other members, by member and tenant."""


class PeerCopies:
    """Copies objects from other members. Thread-safe.

    Parameters
    ----------
    server : NodeServer
        The data loop.
    key : AccessKey or None
        The access key that this node shows to other members, over TLS its certificate; None if they need none.
    """

    def __init__(self, server: NodeServer, key: AccessKey | None) -> None:
        self._server = server
        self._key = key
        self._lock = threading.Lock()
        self._channels: OrderedDict[tuple[bytes, int, str], Channel] = OrderedDict()

    def copy(
        self, key: bytes, source: bytes, addresses: tuple[str, ...], seconds: float, client: Accepted
    ) -> dict[str, Any]:
        """Copy an object of the client's tenant from another member to this node.

        Parameters
        ----------
        key : bytes
            The object's key.
        source : bytes
            Identity of the member that has the object.
        addresses : tuple of str
            Its addresses.
        seconds : float
            Time after which to give up.
        client : Accepted
            The client that orders the copy.

        Returns
        -------
        dict of str to object
            ``outcome``, one of `Outcome`; ``reason``, empty if the copy is there; ``nbytes``, the size of the value.
        """
        deadline = time.monotonic() + seconds
        reason = "the order has no address"
        for address in addresses:
            try:
                channel = self._channel(source, client.tenant, address)
                connection = channel.take(deadline)
            except (NodeError, ConfigError, ValueError) as error:
                reason = f"{address}: {error}"
                continue
            try:
                return self._copied(key, channel, connection, deadline, client)
            finally:
                channel.pool.give(connection)
        return {"outcome": Outcome.AWAY, "reason": reason, "nbytes": 0}

    def close(self) -> None:
        """Close the channels to other members. Idempotent."""
        with self._lock:
            while self._channels:
                self._channels.popitem()[1].close()

    def _channel(self, source: bytes, tenant: int, address: str) -> Channel:
        with self._lock:
            which = source, tenant, address
            if (channel := self._channels.pop(which, None)) is None:
                # Not mapped: a mapped tenant takes memory of it for marks of visits.
                channel = Channel(parse_address(address), key=self._key, transport="tcp", tenant=tenant)
                channel.expected = source
            self._channels[which] = channel
            if len(self._channels) > _CHANNELS_MAX:
                self._channels.popitem(last=False)[1].close()
            return channel

    def _copied(
        self, key: bytes, channel: Channel, connection: Connection, deadline: float, client: Accepted
    ) -> dict[str, Any]:
        own = self._own_connection(channel, client)
        try:
            steps = copying(key, lambda: max(0, round((deadline - time.monotonic()) * 1000)))
            request = next(steps)
            while True:
                answer = _answer(connection if request.to == "source" else own, request, deadline)
                try:
                    request = steps.send(answer)
                except StopIteration as end:
                    copied = end.value
                    break
        finally:
            own.close()
        reason = copied.reason(channel.name, "this node")
        if copied.outcome is not Outcome.DONE:
            log("copy failed", key=client.key, tenant=client.tenant, source=channel.name, reason=reason)
        return {"outcome": copied.outcome, "reason": reason, "nbytes": copied.nbytes}

    def _own_connection(self, channel: Channel, client: Accepted) -> Connection:
        """Connect to this node's own data loop, in the client's session, without a handshake."""
        ours, theirs = socket.socketpair()
        try:
            rights = int(Right.READ | Right.PUBLISH)
            self._server.adopt(theirs.detach(), client.session, client.tenant, rights, client.key)
        except BaseException:
            ours.close()
            raise
        return Connection(
            ours.detach(),
            "this node",
            tenant=client.tenant,
            credential=Credential.NONE,
            spin=0.0,
            # The source's epoch reaches this node in this way, and this node's own reaches the source.
            epoch=channel.epoch,
        )


def _answer(connection: Connection, request: Request, deadline: float) -> Reply | Exception:
    try:
        return connection.exchange(request.op, request.meta, deadline, serial=request.serial, payload=request.payload)
    except FarpoolError as error:
        return error
