"""Redundancy whose copies are on few distinct groups of members (docs/repair.md).

With `Copies`, nearly every group of members has all copies of some object, so the loss of any group loses objects. Here
few groups have any (Cidon et al., "Copysets: Reducing the Frequency of Data Loss in Cloud Storage", USENIX ATC 2013).
That paper cuts random orders of the members into groups. A member that joins would then change nearly all groups, and
nearly all objects would move. So we put each order on a ring, and a group is a member with the members that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from farpool._native import crc32c
from farpool.abc.redundancy import MemberT
from farpool.checks import require_whole
from farpool.cluster.redundancy.copies import Copies
from farpool.errors import ConfigError

__all__ = ["Copysets"]

_RINGS_MAX = 64
_KNOWN_MAX = 8
"""Lists of members whose rings are remembered at the same time. All calls of a program have nearly always the same."""


class Copysets(Copies):
    """Stores equal copies of an object on one of few groups of members.

    The members are on several rings, on each in an order of its own. The key ranks the members as always, and also
    chooses a ring: the copies are on the member of highest rank, and on the members that follow it on this ring. So at
    most ``rings * members`` groups have objects, and a member shares objects with at most ``2 * rings * (parts - 1)``
    others. All programs of a pool, and its managers (``farpool manager --copysets``), must have the same settings.

    Parameters
    ----------
    parts : int
        Number of copies, 2 to 255.
    rings : int
        Number of rings, 1 to 64. With few, fewer groups of lost members lose objects. With many, more members help to
        make the copies of a lost member again.
    spread : str
        Name of a label, such as ``rack``: a group has members with different values of it, as far as there are enough
        values. A member may then share objects with more others. Empty for no such label.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    def __init__(self, parts: int, rings: int = 1, *, spread: str = "") -> None:
        super().__init__(parts)
        if parts < 2:
            raise ConfigError(f"replicas is {parts}, expected at least 2 with groups of members", setting="replicas")
        self.rings = require_whole(rings, "rings", 1, _RINGS_MAX)
        self.spread = spread
        # Replaced as a whole, so other threads need no lock.
        self._known: dict[frozenset[tuple[bytes, str]], _Rings] = {}

    def __repr__(self) -> str:
        return f"Copysets({self.parts}, {self.rings}, spread={self.spread!r})"

    def place(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        return self._first(key, members, self.parts)

    def order(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        return self._first(key, members, len(members))

    def _first(self, key: bytes, members: Sequence[MemberT], count: int) -> Sequence[MemberT]:
        """Return the first `count` members that get copies, if all members before them in this order refuse theirs."""
        if len(members) < 2:
            return members
        by_identity = {one.identity: one for one in members}
        rings = self._rings_of(
            {identity: one.info.labels.get(self.spread, "") for identity, one in by_identity.items()}
        )
        group = rings.group(crc32c(key) % self.rings, members[0].identity, count)
        return [by_identity[identity] for identity in group]

    def _rings_of(self, labels: dict[bytes, str]) -> _Rings:
        members = frozenset(labels.items())
        known = self._known
        if (rings := known.get(members)) is None:
            rings = _Rings(labels, self.rings)
            self._known = {**dict(list(known.items())[1 - _KNOWN_MAX :]), members: rings}
        return rings


class _Rings:
    """The rings of one list of members, and the groups on them that were asked for."""

    def __init__(self, labels: dict[bytes, str], rings: int) -> None:
        self._labels = labels
        self._rings = [sorted(labels, key=lambda identity: _place(number, identity)) for number in range(rings)]
        self._places = [{identity: place for place, identity in enumerate(ring)} for ring in self._rings]
        self._groups: dict[tuple[int, bytes, int], Sequence[bytes]] = {}

    def group(self, ring: int, first: bytes, count: int) -> Sequence[bytes]:
        """Return a member and the ones that follow it on a ring, `count` in all."""
        if count > _REMEMBERED_MAX:
            return self._make(ring, first, count)
        made = self._groups.get((ring, first, count))
        if made is None:
            self._groups[ring, first, count] = made = self._make(ring, first, count)
        return made

    def _make(self, ring: int, first: bytes, count: int) -> Sequence[bytes]:
        found, passed, values = [first], list[bytes](), {self._labels[first]}
        spreads = len(set(self._labels.values())) > 1
        for identity in self._after(ring, first):
            if len(found) == count:
                break
            if spreads and self._labels[identity] in values:
                passed.append(identity)
                continue
            values.add(self._labels[identity])
            found.append(identity)
        return [*found, *passed][:count]

    def _after(self, ring: int, first: bytes) -> Iterator[bytes]:
        order, place = self._rings[ring], self._places[ring][first]
        yield from order[place + 1 :]
        yield from order[:place]


_REMEMBERED_MAX = 8
"""Largest group that is remembered; longer ones are orders of all members, for a put that some members refuse."""


def _place(ring: int, identity: bytes) -> bytes:
    """Return a member's place on a ring. Other members do not change it."""
    return blake2b(identity, digest_size=16, salt=ring.to_bytes(8, "little")).digest()
