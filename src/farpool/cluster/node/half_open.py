"""Limits on connections that are not authenticated yet, so that idle connections do not keep clients out."""

from __future__ import annotations

import ipaddress
from typing import Protocol

__all__ = ["HalfOpen", "Meeting", "origin_of"]


class Meeting(Protocol):
    """Interface to a task (for example an asyncio task) that serves a connection whose handshake is under way."""

    def cancel(self) -> object:
        """End the handshake and its connection."""
        ...


class HalfOpen:
    """Counts handshakes under way, and limits their number for each origin and in total.

    If one origin has too many, the origin's oldest handshake is ended. If there are too many in total, the oldest of
    all is ended.

    Parameters
    ----------
    most : int
        Maximum number of handshakes in total.
    most_of_one : int
        Maximum number of handshakes from one origin; see `origin_of`.

    Attributes
    ----------
    dropped : int
        Number of handshakes that this object has ended so far.
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
        """Add a handshake that has begun. If there are too many handshakes now, end the oldest."""
        self._origins[meeting] = origin
        of_one = self._of.setdefault(origin, {})
        of_one[meeting] = None
        # An origin with too many loses one of its own, so one host cannot end the handshakes of all others.
        if len(of_one) > self._most_of_one:
            self._evict(next(iter(of_one)))
        elif len(self._origins) > self._most:
            self._evict(next(iter(self._origins)))

    def leave(self, meeting: Meeting) -> None:
        """Remove a handshake that is over. Nothing happens if the handshake is not counted any more."""
        origin = self._origins.pop(meeting, None)
        if origin is None:
            return
        of_one = self._of[origin]
        del of_one[meeting]
        if not of_one:
            del self._of[origin]

    def _evict(self, meeting: Meeting) -> None:
        # The cancelled task ends a little later. It must not be counted, or chosen again, until then.
        self.leave(meeting)
        self.dropped += 1
        meeting.cancel()


def origin_of(host: str) -> str:
    """Return the origin of a host, for `HalfOpen`: its IPv4 address, or the /64 network of its IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    # A socket for both families shows IPv4 clients in this form.
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A host usually has a whole /64 network, and could use another address for each connection.
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
