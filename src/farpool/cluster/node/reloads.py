"""Outcome of reading a node's keys and certificate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LastReload"]


@dataclass(frozen=True, slots=True)
class LastReload:
    """Time and outcome of the last time that a node read its keys and its certificate.

    Attributes
    ----------
    time : float
        Seconds since 1970.
    succeeded : bool
        False if the node could not use them and kept the old ones.
    """

    time: float
    succeeded: bool
