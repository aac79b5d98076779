"""Contract of redundancy: how the bytes of an object survive the loss of members.

A redundancy makes *parts* of a value, and each part goes to another member: equal copies, or the pieces of an erasure
code. A store asks it where parts go, when a write is confirmed, and which parts an object lacks.

Rules for every implementation:

- It is immutable, and its answers depend on the arguments alone. So all programs that use the same objects place them
  in the same way. It does no I/O and is safe to call from several threads.
- `Redundancy.place` returns different members. The first of the given members is the first of these, because readers
  ask it first.
- `Redundancy.encode` neither changes the value nor keeps it. `Redundancy.decode` returns the same bytes for each choice
  of at least `needed` parts.
- If `needed` is 1, each part is the value itself, so a reader takes any part and does not decode it.
- `Redundancy.enough` is True for `parts` members, and False for fewer than `needed`. More members are never worse.
  An object is known to be missing if the members that cannot be asked are not enough by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from farpool.abc.membership import MemberInfo
from farpool.abc.objects import Payload

__all__ = ["Described", "Redundancy"]


class Described(Protocol):
    """A member that can be placed on.

    Attributes
    ----------
    info : MemberInfo
        What the list of members says about it, such as its labels.
    """

    info: MemberInfo


MemberT = TypeVar("MemberT", bound=Described)


class Redundancy(ABC):
    """Where the parts of an object go, and how many of them a write or a read needs; the module has the rules.

    Attributes
    ----------
    parts : int
        Number of parts that each object has, at least 1.
    needed : int
        Number of parts that a reader needs, 1 to `parts`.
    """

    parts: int
    needed: int

    @abstractmethod
    def place(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        """Choose the members that get the parts of an object.

        Parameters
        ----------
        key : bytes
            The object's key.
        members : sequence
            Members that take new objects, in the order of their ranks for the key; there may be none.

        Returns
        -------
        sequence
            The member for part 0, for part 1, and so on; shorter than `parts` only if there are too few members. If a
            member refuses its part, the store offers it to the other members in the order of their ranks.
        """

    @abstractmethod
    def enough(self, acknowledged: int) -> bool:
        """Return True if a write is confirmed once so many members have acknowledged their part."""

    @abstractmethod
    def encode(self, value: Payload) -> Sequence[Payload]:
        """Make the parts of a value, in the order of their numbers."""

    @abstractmethod
    def decode(self, parts: Mapping[int, Payload]) -> Payload:
        """Return the value, given at least `needed` of its parts by their numbers."""

    @abstractmethod
    def missing(self, held: Collection[int]) -> Sequence[int]:
        """Return the numbers of the parts that an object lacks, given the numbers of the parts that members have."""
