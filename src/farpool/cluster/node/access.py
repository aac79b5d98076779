"""Access control of a node: its current access keys and certificate."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from farpool._native import TlsContext
from farpool.cluster.node.users import user_of
from farpool.cluster.wire.access import Grant
from farpool.cluster.wire.handshake import Identity, NodeHandshake
from farpool.errors import AccessDeniedError

__all__ = ["NodeAccess"]


class NodeAccess:
    """Begins handshakes with the current keys and certificate. For one thread.

    Parameters
    ----------
    identity : Identity
        The node's identity.
    keys : mapping of str to Grant, or None
        Access keys by name; None if the node's own user may do everything, and other users nothing.
    tls : TlsContext or None
        The node's certificate; None if it serves without TLS.

    Attributes
    ----------
    tls : TlsContext or None
        TLS context with which a new connection from the network begins.
    """

    def __init__(self, identity: Identity, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> None:
        self.tls = tls
        self._identity = identity
        self._keys = keys

    def handshake(self, certificate: str | None) -> NodeHandshake:
        """Begin the handshake of a new connection; `certificate` is the name in the client's certificate, or None."""
        return NodeHandshake(self._identity, self._keys, certificate)

    def refusal(self, connection: socket.socket) -> AccessDeniedError | None:
        """Return the error if a new connection has to be refused, whatever comes over it; else None."""
        # A client without a key has nothing to prove itself with, so we ask the kernel who opened the connection.
        if self._keys is not None or (user := user_of(connection)) == os.geteuid():
            return None
        who = "the system does not tell whose this connection is" if user is None else f"this is user {user}"
        return AccessDeniedError(
            f"the node has no access keys, so that only its own user {os.geteuid()} may use it, and {who}; give the "
            "node --keys FILE"
        )

    def still_grants(self, handshake: NodeHandshake) -> bool:
        """Return True if a handshake that is over would end in the same way now."""
        if self._keys is None or handshake.accepted is None:
            return self._keys is None
        # The keys may have been replaced between the client's hello and its proof.
        return self._keys.get(handshake.accepted.key) == handshake.grant

    def replace(self, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> list[str]:
        """Replace the keys and the certificate; return the names of the keys that are gone or were changed."""
        before = self._keys or {}
        self._keys, self.tls = keys, tls
        return [name for name, grant in before.items() if (keys or {}).get(name) != grant]
