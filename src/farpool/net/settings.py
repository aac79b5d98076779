"""What a program says about its way to nodes, checked: for a store and for a remote tier alike."""

from __future__ import annotations

from farpool.errors import ConfigError
from farpool.net.fabric import load_fabric

__all__ = ["BUILT_IN", "LONGEST_TIMEOUT", "Transport", "checked_timeout", "checked_transport"]

Transport = str
"""How bytes of a node are moved: ``auto`` maps them where it is on this host, ``mapped`` maps them or fails, ``tcp``
always sends them over a socket, and the name of a fabric reads and writes one-sided (what is put goes over a
socket then)."""

BUILT_IN = ("auto", "mapped", "tcp")
"""Transports that are no fabric."""

LONGEST_TIMEOUT = 1e6
"""Seconds; a socket takes no more than 24 days."""


def checked_timeout(timeout: object, what: str = "timeout") -> float:
    """Seconds within which a node has to answer.

    Parameters
    ----------
    timeout : float
        What was given.
    what : str
        What it is called; named in the error.

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
    """How bytes of a node are moved; `what` is named in the error.

    Raises
    ------
    ConfigError
        It is none of `Transport`, or a fabric that is not installed or cannot be used here.
    """
    if transport not in BUILT_IN:
        load_fabric(transport, what, f"{', '.join(BUILT_IN)} or ")
    return str(transport)
