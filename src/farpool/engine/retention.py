"""Retention: which blocks of a loop that does not fit stay, and which make room for those that are fetched.

Belady's rule says how many bytes a loop has to fetch in each turn, but evicting the farthest next use keeps one stretch
of the loop: the link idles while the program runs through it, and the program waits in the rest. Any other choice of as
many blocks among equally distant ones needs as few bytes. So of the accesses whose next use lies too far away for all
of them to be kept, every n-th is: what is fetched is then spread evenly over the loop, and so is the work of the link.

Distances are measured in bytes accessed. If a share s(d) of the accesses with distance d is kept, the kept blocks cover
on average the mean over all bytes accessed of s(d) d. For distances shorter than the room there is, s is 1. For
the long ones s(d) d falls with a power of the distance, as Belady prefers the nearer ones, and is scaled such that
the room is filled.
"""

from __future__ import annotations

__all__ = ["Retention"]

_SHARPNESS = 4


class _Mean:
    """A mean that forgets what lies more than one turn of the loop back."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def note(self, value: float, weight: float) -> None:
        self.value += weight * (value - self.value)


class Retention:
    """Decides for each access whether its blocks are kept until their next use.

    Parameters
    ----------
    room : int
        Bytes that blocks may be kept in.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._covered = _Mean(0.0)
        """Bytes of the room that the short distances cover."""
        self._long = _Mean(1.0)
        """Share of the bytes accessed whose distance is long."""
        self._distance = _Mean(float(room))
        """Of the long ones."""
        self._scale = _Mean(1.0)
        self._owed = 0.0
        """Bytes that should have been kept by now and have not."""

    def keeps(self, nbytes: int, distance: int, turn: int) -> bool:
        """Whether blocks are to stay.

        Parameters
        ----------
        nbytes : int
            Bytes of the access.
        distance : int
            Bytes that will be accessed until the next use.
        turn : int
            Bytes of one turn of the loop.
        """
        weight = min(1.0, nbytes / turn) if turn else 1.0
        short = distance <= self.room
        self._covered.note(distance if short else 0.0, weight)
        self._long.note(0.0 if short else 1.0, weight)
        if short:
            return True
        among_long = min(1.0, weight / self._long.value)
        self._distance.note(distance, among_long)
        nearness = (self._distance.value / distance) ** _SHARPNESS
        self._scale.note(nearness, among_long)
        room = max(0.0, self.room - self._covered.value) / self._long.value
        share = min(1.0, room * nearness / (self._scale.value * distance))
        self._owed = min(self._owed + share * nbytes, nbytes)
        if self._owed < nbytes / 2:
            return False
        self._owed -= nbytes
        return True
