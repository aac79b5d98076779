"""Checks of the timeout and the transport with which a store or a remote tier reaches nodes."""

from __future__ import annotations

from farpool.cluster.wire.fabrics import load_fabric
from farpool.errors import ConfigError

__all__ = ["BUILT_IN", "LONGEST_TIMEOUT", "Transport", "checked_timeout", "checked_transport"]

Transport = str
"""Way to move bytes of a node: ``auto`` maps them if the node is on this host, ``mapped`` maps them or fails, ``tcp``
always sends them over a socket, and the name of a fabric reads and writes one-sided (objects that are put go over a
socket then)."""

BUILT_IN = ("auto", "mapped", "tcp")
"""Transports that need no fabric."""

LONGEST_TIMEOUT = 1e6
"""Longest timeout in seconds; a socket takes no more than 24 days."""


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
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_TIMEOUT:
        # Whole numbers may have more digits than Python prints.
        given = "too large a number" if isinstance(timeout, int) and abs(timeout) > 1 << 64 else repr(timeout)
        raise ConfigError(
            f"{what} is {given}, expected seconds above 0, for example 5.0, and at most {LONGEST_TIMEOUT:,.0f}",
            setting="timeout",
        )
    return float(timeout)


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
