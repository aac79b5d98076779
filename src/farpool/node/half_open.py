"""Connections that have not proved themselves yet: bounded, so that idle strangers keep nobody out."""

from __future__ import annotations

import ipaddress
from typing import Protocol

__all__ = ["HalfOpen", "Meeting", "origin_of"]


class Meeting(Protocol):
    """A handshake under way."""

    def cancel(self) -> object:
        """End it, with its connection."""
        ...


class HalfOpen:
    """Ends the oldest handshake where there are too many of one origin, or in all.

    Parameters
    ----------
    most : int
        How many there may be in all.
    most_of_one : int
        How many there may be of one origin.

    Attributes
    ----------
    dropped : int
        How many were ended so far.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.dropped = 0
        self._most = most
        self._most_of_one = most_of_one
        # Both in the order of arrival.
        self._origins: dict[Meeting, str] = {}
        self._of: dict[str, dict[Meeting, None]] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def enter(self, meeting: Meeting, origin: str) -> None:
        """A handshake has begun."""
        self._origins[meeting] = origin
        of_one = self._of.setdefault(origin, {})
        of_one[meeting] = None
        if len(of_one) > self._most_of_one:
            self._drop(next(iter(of_one)))
        elif len(self._origins) > self._most:
            self._drop(next(iter(self._origins)))

    def leave(self, meeting: Meeting) -> None:
        """A handshake is over. Nothing happens if it was dropped."""
        origin = self._origins.pop(meeting, None)
        if origin is None:
            return
        of_one = self._of[origin]
        del of_one[meeting]
        if not of_one:
            del self._of[origin]

    def _drop(self, meeting: Meeting) -> None:
        self.leave(meeting)
        self.dropped += 1
        meeting.cancel()


def origin_of(host: str) -> str:
    """What counts as one origin: an IPv4 address, or the network of 64 bits of an IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
