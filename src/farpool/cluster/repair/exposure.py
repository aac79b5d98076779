"""Exposure: which objects would be lost, or have too few copies, without one member or one label value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__all__ = ["GROUPS_MAX", "Exposure", "Loss"]

GROUPS_MAX = 10_000
"""Groups of members that an exposure tells apart; it counts no more."""


@dataclass(slots=True)
class Loss:
    """Objects that a loss would concern.

    Attributes
    ----------
    objects, nbytes : int
        Objects that would be lost: no other member has a copy.
    below, below_nbytes : int
        Objects that would have fewer copies than their publishers asked for, and have enough now.
    """

    objects: int = 0
    nbytes: int = 0
    below: int = 0
    below_nbytes: int = 0


@dataclass(slots=True)
class Exposure:
    """Cost of losing each member or label value, as of one scan.

    Its size depends on the members and labels, and not on the objects.

    Attributes
    ----------
    objects, nbytes : int
        All objects, each counted once.
    below, below_nbytes : int
        Objects that have too few copies already.
    groups : int
        Distinct groups of members whose counted copies are all copies of an object; at most `GROUPS_MAX`. The loss of
        such a group loses objects, so `farpool.Copysets` keeps the number small.
    members : mapping of bytes to Loss
        The loss of each member, by identity.
    labels : mapping of tuple of str to Loss
        The loss of all members with a label value, by name and value.
    """

    objects: int = 0
    nbytes: int = 0
    below: int = 0
    below_nbytes: int = 0
    members: dict[bytes, Loss] = field(default_factory=lambda: defaultdict(Loss))
    labels: dict[tuple[str, str], Loss] = field(default_factory=lambda: defaultdict(Loss))
    _groups: set[frozenset[bytes]] = field(default_factory=set)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def add(
        self, nbytes: int, wanted: int, holders: Mapping[bytes, Mapping[str, str]], counted: Collection[bytes]
    ) -> None:
        """Count an object.

        Parameters
        ----------
        nbytes : int
            Its size.
        wanted : int
            Copies that it is to have.
        holders : mapping of bytes to mapping
            The labels of each member that has a copy.
        counted : collection of bytes
            The holders whose copies count: the others are about to leave.
        """
        self.objects += 1
        self.nbytes += nbytes
        if counted and len(self._groups) < GROUPS_MAX:
            self._groups.add(frozenset(counted))
        enough = len(counted) >= wanted
        if not enough:
            self.below += 1
            self.below_nbytes += nbytes
        for member in holders:
            _count(self.members[member], nbytes, wanted, holders.keys() - {member}, counted, enough=enough)
        for label in {label for labels in holders.values() for label in labels.items()}:
            left = {member for member, labels in holders.items() if labels.get(label[0]) != label[1]}
            _count(self.labels[label], nbytes, wanted, left, counted, enough=enough)


def _count(
    loss: Loss, nbytes: int, wanted: int, left: Collection[bytes], counted: Collection[bytes], *, enough: bool
) -> None:
    if not left:
        loss.objects += 1
        loss.nbytes += nbytes
    if enough and sum(member in counted for member in left) < wanted:
        loss.below += 1
        loss.below_nbytes += nbytes
