"""The members as repair sees them: whose copies count, who can be asked, and where the copies of a key belong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from farpool._native import Ranking
from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.redundancy import Redundancy

__all__ = ["Roster", "Standing"]

_NOT_ASKED = frozenset({MemberState.JOINING, MemberState.GONE})


class Standing(Enum):
    """Standing of a member: how far repair relies on it."""

    GOOD = "good"
    """Its copies count, and it gives and takes copies."""
    LEAVING = "leaving"
    """It drains: it gives copies, and its own do not count."""
    DOUBTFUL = "doubtful"
    """It is silent, but not for long: its copies count, and it takes none."""
    LOST = "lost"
    """It has been silent for longer than the grace, or drains and is silent: its copies do not count."""


@dataclass(eq=False, slots=True)
class _Listed:
    """One entry of the roster. It is `farpool.abc.redundancy.Described`."""

    info: MemberInfo
    silent_since: float = math.inf
    evicted_at: float = -math.inf
    standing: Standing = Standing.GOOD

    @property
    def identity(self) -> bytes:
        return self.info.identity


class Roster:
    """The members, their standing and their ranks.

    Parameters
    ----------
    redundancy : Redundancy
        Chooses the members that get the copies of an object.
    grace : float
        Seconds for which a member may be silent before its copies count as lost.
    pressure : float
        Seconds after an eviction for which a member is `is_pressed`.

    Attributes
    ----------
    changed_at : float
        Time of the last change of the members, or of the standing of one.
    """

    def __init__(self, redundancy: Redundancy, grace: float, pressure: float) -> None:
        self.changed_at = -math.inf
        self._redundancy = redundancy
        self._grace = grace
        self._pressure = pressure
        self._listed: dict[bytes, _Listed] = {}
        self._ranking = Ranking((), (), (), 0)
        self._counting: frozenset[bytes] = frozenset()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._listed)

    def __contains__(self, member: bytes) -> bool:
        return member in self._listed

    def update(self, members: Sequence[MemberInfo], now: float) -> bool:
        """Take a new list of members; return True if copies may count otherwise now, or belong elsewhere."""
        before, was = self._listed, _places(self._listed)
        self._listed = {
            one.identity: _merged(before.get(one.identity), one, now)
            for one in members
            if one.identity and one.state not in _NOT_ASKED
        }
        drains = {member: one.info.state is MemberState.DRAINING for member, one in self._listed.items()}
        ranked = sorted(self._listed, key=lambda member: (drains[member], member))
        entries = [self._listed[member] for member in ranked]
        seeds = [int.from_bytes(member[:8], "little") for member in ranked]
        weights = [one.info.weight for one in entries]
        self._ranking = Ranking(tuple(entries), seeds, weights, sum(not one for one in drains.values()))
        moved = was != _places(self._listed)
        if moved:
            self.changed_at = now
        return self.lapse(now) or moved

    def lapse(self, now: float) -> bool:
        """Take the time into account; return True if a member is lost now, or is not lost any more."""
        counted = False
        for one in self._listed.values():
            standing = self._standing_of(one, now)
            if standing is not one.standing:
                counted |= (standing is Standing.LOST) != (one.standing is Standing.LOST)
                one.standing = standing
                self.changed_at = now
        counting = (Standing.GOOD, Standing.DOUBTFUL)
        self._counting = frozenset(member for member, one in self._listed.items() if one.standing in counting)
        return counted

    def next_lapse(self) -> float:
        """Return the time at which the standing of a member changes unless something is heard of it."""
        doubtful = [one.silent_since for one in self._listed.values() if one.standing is Standing.DOUBTFUL]
        return min(doubtful, default=math.inf) + self._grace

    def heard(self, member: bytes, now: float) -> None:
        """Record an answer of a member."""
        if (one := self._listed.get(member)) is not None:
            one.silent_since = now if one.info.state is MemberState.SUSPECT else math.inf

    def unheard(self, member: bytes, now: float) -> None:
        """Record that a member did not answer."""
        if (one := self._listed.get(member)) is not None:
            one.silent_since = min(one.silent_since, now)

    def evicted(self, member: bytes, now: float) -> None:
        """Record that a member has evicted an object."""
        if (one := self._listed.get(member)) is not None:
            one.evicted_at = now

    def is_pressed(self, member: bytes, now: float) -> bool:
        """Return True if a member had to evict objects a short time ago."""
        one = self._listed.get(member)
        return one is not None and now - one.evicted_at < self._pressure

    def standing(self, member: bytes) -> Standing:
        """Return how far to rely on a member; `LOST` if it is not in the list."""
        one = self._listed.get(member)
        return Standing.LOST if one is None else one.standing

    def counts(self, member: bytes) -> bool:
        """Return True if a copy on this member counts."""
        return member in self._counting

    def labels(self, member: bytes) -> Mapping[str, str]:
        """Return the labels of a member."""
        one = self._listed.get(member)
        return {} if one is None else one.info.labels

    def takers(self) -> int:
        """Return the number of members whose copies count."""
        return len(self._counting)

    def order(self, key: bytes) -> list[bytes]:
        """Return all members in the order in which a put would offer them copies; members that drain come last."""
        first = self._redundancy.order(key, self._ranking.places(key))
        leaving = [one for one in self._ranking.order(key) if one not in first]
        return [one.info.identity for one in (*first, *leaving)]

    def places(self, order: Sequence[bytes], copies: int) -> list[bytes]:
        """Return the members on which `copies` copies belong, of an `order`; lost and leaving ones are passed over."""
        return [member for member in order if member in self._counting][:copies]

    def _standing_of(self, one: _Listed, now: float) -> Standing:
        if one.info.state is MemberState.DRAINING:
            return Standing.LEAVING if math.isinf(one.silent_since) else Standing.LOST
        if math.isinf(one.silent_since):
            return Standing.GOOD
        return Standing.DOUBTFUL if now - one.silent_since < self._grace else Standing.LOST


def _merged(before: _Listed | None, info: MemberInfo, now: float) -> _Listed:
    if before is None:
        before = _Listed(info)
    if info.state is MemberState.SUSPECT:
        before.silent_since = min(before.silent_since, now)
    elif before.info.state is MemberState.SUSPECT:
        before.silent_since = math.inf  # it is back, until it does not answer
    before.info = info
    return before


def _places(listed: Mapping[bytes, _Listed]) -> dict[bytes, tuple[bool, float]]:
    """Return what decides where copies belong."""
    return {member: (one.info.state is MemberState.DRAINING, one.info.weight) for member, one in listed.items()}
