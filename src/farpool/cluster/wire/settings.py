"""Checks of two settings with which a store or a remote tier reaches nodes: the timeout and the transport."""

from __future__ import annotations

from farpool.checks import require_seconds
from farpool.cluster.wire.fabrics import load_fabric

__all__ = ["BUILT_IN", "TIMEOUT_MAX_S", "Transport", "checked_timeout", "checked_transport"]

Transport = str
"""Way in which bytes move between a program and a node. ``auto`` maps the node's memory if the node is on this host,
else uses a socket. ``mapped`` maps it or fails. ``tcp`` always uses a socket. The name of a fabric reads and writes
one-sided; only puts of objects then use a socket."""

BUILT_IN = ("auto", "mapped", "tcp")
"""Transports that need no fabric."""

TIMEOUT_MAX_S = 1e6
"""Longest timeout in seconds. The operating system limits a wait for a socket to about 24 days."""


def checked_timeout(timeout: object, what: str = "timeout") -> float:
    """Check a timeout, the seconds within which a node must answer, and return it.

    Parameters
    ----------
    timeout : float
        The value given.
    what : str
        Name of the setting, for the error.

    Raises
    ------
    ConfigError
        The value is not a number above 0, or is above `TIMEOUT_MAX_S`.
    """
    return require_seconds(timeout, what, None, TIMEOUT_MAX_S, setting="timeout", example=", for example 5.0,")


def checked_transport(transport: object, what: str = "transport") -> Transport:
    """Check a transport and return it; `what` names the setting in the error.

    Raises
    ------
    ConfigError
        The value is not one that `Transport` describes, or is a fabric that is not installed or cannot be used here.
    """
    if transport not in BUILT_IN:
        load_fabric(transport, what, f"{', '.join(BUILT_IN)} or ")
    return str(transport)
