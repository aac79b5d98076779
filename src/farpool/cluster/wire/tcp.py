"""Options of TCP connections between programs and nodes, the same at both ends."""

from __future__ import annotations

import socket

__all__ = ["set_options"]

# A connection to a host that went away without a word is found dead after half a minute.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def set_options(connection: socket.socket) -> None:
    """Make a connection send data at once (no Nagle's algorithm), and end if the other host is gone (keep-alive)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
