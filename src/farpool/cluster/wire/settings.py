"""Checks of the timeout and the transport with which a store or a remote tier reaches nodes."""

from __future__ import annotations

from farpool.checks import require_seconds
from farpool.cluster.wire.fabrics import load_fabric

__all__ = ["BUILT_IN", "TIMEOUT_MAX_S", "Transport", "checked_timeout", "checked_transport"]

Transport = str
"""Way to move bytes of a node: ``auto`` maps them if the node is on this host, ``mapped`` maps them or fails, ``tcp``
always sends them over a socket, and the name of a fabric reads and writes one-sided (objects that are put go over a
socket then)."""

BUILT_IN = ("auto", "mapped", "tcp")
"""Transports that need no fabric."""

TIMEOUT_MAX_S = 1e6
"""Longest timeout; a socket takes no more than 24 days."""


def checked_timeout(timeout: object, what: str = "timeout") -> float:
    """Check the seconds within which a node has to answer, and return them.

    Parameters
    ----------
    timeout : float
        The value given.
    what : str
        Name of the setting, for the error.

    Raises
    ------
    ConfigError
        It is not a number of seconds above 0, or is longer than a socket can wait.
    """
    return require_seconds(timeout, what, None, TIMEOUT_MAX_S, setting="timeout", example=", for example 5.0,")


def checked_transport(transport: object, what: str = "transport") -> Transport:
    """Check a transport and return it; `what` names the setting in the error.

    Raises
    ------
    ConfigError
        It is none of `Transport`, or a fabric that is not installed or cannot be used here.
    """
    if transport not in BUILT_IN:
        load_fabric(transport, what, f"{', '.join(BUILT_IN)} or ")
    return str(transport)
