"""Outcome of reading a node's keys and certificate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LastReload"]


@dataclass(frozen=True, slots=True)
class LastReload:
    """Time and outcome of a node's last attempt to read its keys and its certificate.

    Attributes
    ----------
    time : float
        Time of the attempt, in seconds since 1970.
    succeeded : bool
        False if the node could not use the new keys or the new certificate, and kept the old ones.
    """

    time: float
    succeeded: bool
