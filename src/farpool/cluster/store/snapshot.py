"""The members of a store at one moment, and their order for a key.

For each key, the members have an order, which comes from rendezvous hashing of their identities and the key. The first
member in this order has the highest rank. An object is stored on the first members that accept it. All programs compute
the same order, whatever addresses they use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from farpool._native import Ranking
from farpool.abc.membership import MemberState

if TYPE_CHECKING:
    from farpool.cluster.store.member import Member

__all__ = ["Snapshot"]


class Snapshot:
    """The members of a store at one moment. Immutable: a store replaces it as a whole when members change.

    A call uses one snapshot for each attempt. A member is *met* when its node has reported its identity; until then it
    is a *stranger*, and has no place in the order for a key.

    Parameters
    ----------
    members : sequence of Member
        All members that are asked for objects.
    copies : int
        Number of members that have a copy of each object. Reads prefer prompt ones among the first so many members for
        a key; any other member would have to be asked in vain.

    Attributes
    ----------
    members : tuple of Member
        All members that are asked for objects, in the order of the parameter `members`.
    strangers : tuple of Member
        Members whose identities are not known yet.
    met : tuple of Member
        Members whose identities are known. Members that are draining come last.
    is_settled : bool
        True if there are members and all of them have been met.
    slow : tuple of Member
        The met members that answer slowly. Programs read last from them; they take new objects as before.
    by_identity : mapping of bytes to Member
        The members that have been met, by identity.
    first : callable
        Returns the member to read a key from first; raises ValueError if no member has been met.
    order : callable
        Returns all met members in the order in which to read a key from them; members that are draining come last.
    places : callable
        Returns the met members that are not draining, in the order of their ranks for a key, slow ones included: all
        programs must agree on the places of an object, and each measures other times.
    by_first : callable
        Groups a list of keys by the member to read from first: returns for each such member the indexes of its keys.
    """

    __slots__ = (
        "by_first",
        "by_identity",
        "first",
        "is_settled",
        "members",
        "met",
        "order",
        "places",
        "slow",
        "strangers",
    )

    by_first: Callable[[list[bytes]], dict[Member, Sequence[int]]]
    by_identity: Mapping[bytes, Member]
    first: Callable[[bytes], Member]
    is_settled: bool
    members: tuple[Member, ...]
    met: tuple[Member, ...]
    order: Callable[[bytes], list[Member]]
    places: Callable[[bytes], list[Member]]
    slow: tuple[Member, ...]
    strangers: tuple[Member, ...]

    def __init__(self, members: Sequence[Member], copies: int = 1) -> None:
        self.members = tuple(members)
        self.strangers = tuple([member for member in members if not member.identity])
        met = [member for member in members if member.identity]
        takers = [member for member in met if not is_draining(member)]
        # In this order, because `Ranking` takes the first `len(takers)` members as those that take new objects.
        self.met = (*takers, *[member for member in met if is_draining(member)])
        self.is_settled = bool(met) and not self.strangers
        self.by_identity = {member.identity: member for member in self.met}
        # Ranks follow from identities, so they stay when a node restarts or moves (docs/design/write-once-keys.md).
        seeds = [int.from_bytes(member.identity[:8], "little") for member in self.met]
        weights = [member.info.weight for member in self.met]
        slow = [number for number, member in enumerate(self.met) if member.pace.is_slow]
        self.slow = tuple([self.met[number] for number in slow])
        ranking = Ranking(self.met, seeds, weights, len(takers), copies, slow)
        # Bound methods of the native object: one call for each lookup, not two.
        self.first, self.order = ranking.first, ranking.order
        self.places, self.by_first = ranking.places, ranking.by_first


def is_draining(member: Member) -> bool:
    """Return True if a member takes no new objects, because it is about to leave."""
    return member.info.state is MemberState.DRAINING
