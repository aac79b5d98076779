"""Contract of redundancy: how the bytes of an object survive the loss of members.

A redundancy turns a value into *parts*: equal copies, or the pieces of an erasure code. Each part is stored on a
different member. A store asks the redundancy which member gets each part, whether enough members have stored their part
to confirm a write, and which parts an object lacks.

Rules for every implementation:

- A redundancy is immutable, and its answers depend only on the arguments. So all programs that use the same objects
  place them in the same way. A redundancy does no I/O, and is safe to call from several threads.
- `Redundancy.place` returns no member twice. The first of the members that it receives is also the first member of its
  result, because readers ask that member first.
- `Redundancy.encode` neither changes the value nor keeps it. `Redundancy.decode` returns the same bytes for each choice
  of at least `needed` parts.
- If `needed` is 1, each part is the value itself, so a reader may use any part without decoding it.
- `Redundancy.enough` returns True for `parts` members, and False for fewer than `needed`. If it returns True for a
  number, it also returns True for each larger number. An object does not exist if no member that answered has it and
  `enough` returns False for the number of members that cannot be asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from farpool.abc.membership import MemberInfo
from farpool.abc.objects import Payload

__all__ = ["Described", "Redundancy"]


class Described(Protocol):
    """A member that can get parts of objects.

    Attributes
    ----------
    info : MemberInfo
        The member's entry in the list of members, with its labels.
    identity : bytes
        The identity of the member's node, also if its entry does not give it.
    """

    info: MemberInfo

    @property
    def identity(self) -> bytes:
        """Return the identity of the member's node."""


MemberT = TypeVar("MemberT", bound=Described)


class Redundancy(ABC):
    """Decides which members get the parts of an object, and how many parts a write or a read needs.

    The module's docstring has the rules for implementations.

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
            Members that accept new objects, in the order in which this key prefers them; may be empty.

        Returns
        -------
        sequence
            The member for part 0, for part 1, and so on; shorter than `parts` only if there are too few members. If a
            member refuses its part, the store offers that part to the next members of `order`.
        """

    def order(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        """Return all members in the order in which they are offered parts of an object.

        Parameters
        ----------
        key, members
            As in `place`.

        Returns
        -------
        sequence
            The members of `place`, and then the others; by default in the order of `members`.
        """
        chosen = self.place(key, members)
        return [*chosen, *[member for member in members if member not in chosen]]

    @abstractmethod
    def enough(self, acknowledged: int) -> bool:
        """Return True if a write is confirmed when `acknowledged` members have stored their part."""

    @abstractmethod
    def encode(self, value: Payload) -> Sequence[Payload]:
        """Return the parts of a value, in the order of their numbers."""

    @abstractmethod
    def decode(self, parts: Mapping[int, Payload]) -> Payload:
        """Return the value that has these parts. `parts` has at least `needed` parts, by their numbers."""

    @abstractmethod
    def missing(self, held: Collection[int]) -> Sequence[int]:
        """Return the numbers of the parts that an object lacks; `held` has the numbers of the parts on members."""
