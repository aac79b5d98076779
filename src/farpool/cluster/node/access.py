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
    """Begins handshakes with the current keys and certificate. Use it from one thread.

    Parameters
    ----------
    identity : Identity
        The node's identity.
    keys : mapping of str to Grant, or None
        Access keys by name; None if the node's own user has all rights, and other users have none.
    tls : TlsContext or None
        The node's certificate; None if the node serves without TLS.

    Attributes
    ----------
    tls : TlsContext or None
        TLS context for new connections from the network.
    """

    def __init__(self, identity: Identity, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> None:
        self.tls = tls
        self._identity = identity
        self._keys = keys

    def handshake(self, certificate: str | None) -> NodeHandshake:
        """Begin the handshake of a new connection. `certificate` is the name in the client's certificate, if any."""
        return NodeHandshake(self._identity, self._keys, certificate)

    def refusal(self, connection: socket.socket) -> AccessDeniedError | None:
        """Return an error if the user who opened a connection may not use this node; else None.

        Only a node without access keys refuses users.
        """
        # A client without a key has nothing to prove itself with, so we ask the kernel who opened the connection.
        if self._keys is not None or (user := user_of(connection)) == os.geteuid():
            return None
        who = "the system does not tell whose this connection is" if user is None else f"this is user {user}"
        return AccessDeniedError(
            f"the node has no access keys, so that only its own user {os.geteuid()} may use it, and {who}; give the "
            "node --keys FILE"
        )

    def still_grants(self, handshake: NodeHandshake) -> bool:
        """Return True if a completed handshake would have the same outcome with the present keys."""
        if self._keys is None or handshake.accepted is None:
            return self._keys is None
        # The keys may have been replaced between the client's hello and its proof.
        return self._keys.get(handshake.accepted.key) == handshake.grant

    def replace(self, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> list[str]:
        """Replace the keys and the certificate; return the names of the keys that were removed or changed."""
        before = self._keys or {}
        self._keys, self.tls = keys, tls
        return [name for name, grant in before.items() if (keys or {}).get(name) != grant]
