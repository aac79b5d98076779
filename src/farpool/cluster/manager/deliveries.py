"""Decides which members are visited when, to carry out orders and to look for strays: no clock, no thread and no I/O.

An *order* in the registry says that a node must free an extent. The leading manager takes it to the node, and confirms
it in the registry. Orders stay in the registry until then, so a new leader goes on with the same ones. An order that
comes twice does nothing. Orders of a member that is not in the pool wait for it to come back (see `leases.upkeep`).

A *stray* is an extent that a node has although no lease names it and no order for it waits. A node has one if its
folder, or the registry, was restored from a copy. A stray ends once it has been one for some time and has no valid
ticket; until then, the registry's entries may come back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from farpool.abc.membership import MemberState
from farpool.cluster.leases.records import OrderRecord

__all__ = ["STRAY_AGE_S", "Deliveries", "Held", "Reach", "Report", "Visit"]

STRAY_AGE_S = 3600.0
"""Seconds for which a stray must have been one before it ends."""
_LOOK_INTERVAL_S = 300.0
_PAUSE_MIN_S, _PAUSE_MAX_S = 1.0, 60.0
"""Pauses after a failure. Each is twice as long as the one before."""
_REFUSAL_KEPT_S = 600.0
_LOOKED_AT = (MemberState.ACTIVE, MemberState.DRAINING)


@dataclass(frozen=True, slots=True)
class Reach:
    """Addresses and state of a member."""

    addresses: tuple[str, ...]
    state: MemberState


@dataclass(frozen=True, slots=True)
class Held:
    """An extent that a node has.

    Attributes
    ----------
    lease : str
        Number of the lease, in hexadecimal digits.
    extent : int
        Number of the extent.
    epoch : int
        The highest epoch of a ticket that names it.
    seconds : float
        Time until the last of its claims expires; 0.0 or less if none is valid.
    """

    lease: str
    extent: int
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Visit:
    """Tasks at a member.

    Attributes
    ----------
    member : str
        Its identity, in hexadecimal digits.
    addresses : tuple of str
        Its addresses, the best first.
    orders : tuple of OrderRecord
        Orders to give.
    strays : tuple of Held
        Extents to end, unless the registry has a lease or an order for them after all.
    looks : bool
        True to ask, at the end, which extents the node has.
    """

    member: str
    addresses: tuple[str, ...] = ()
    orders: tuple[OrderRecord, ...] = ()
    strays: tuple[Held, ...] = ()
    looks: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a visit.

    Attributes
    ----------
    member : str
        The member's identity.
    delivered : int
        Number of orders that were carried out and confirmed.
    refused : mapping of str to str
        Why the node refused an order, by the order's key.
    strays : int
        Number of strays that ended.
    held : tuple of Held, or None
        The extents that the node has; None if it was not asked, or did not answer.
    error : str
        Why the visit ended early; empty if it did not.
    """

    member: str
    delivered: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    strays: int = 0
    held: tuple[Held, ...] | None = None
    error: str = ""


@dataclass(slots=True)
class _Member:
    look_at: float
    reach: Reach | None = None
    visited_at: float = -1.0
    failures: int = 0
    retry_at: float = 0.0
    # Since when each stray has been one, and what the node said of it last.
    strays: dict[tuple[str, int], tuple[float, Held]] = field(default_factory=dict)


@dataclass(slots=True)
class _Refusal:
    times: int = 0
    until: float = 0.0


class Deliveries:
    """Visits by the leading manager. Not thread-safe.

    Parameters
    ----------
    chance : random.Random
        Makes pauses differ, so that not all members are visited at the same time.
    visits_max : int
        Most visits at the same time.
    orders_max : int
        Most orders of one visit.
    look_interval : float
        Seconds between two looks at a member.
    stray_age : float
        Seconds for which a stray must have been one before it ends.

    Attributes
    ----------
    delivered, refused, failed, strays : int
        Orders that were carried out; refusals of orders; visits that failed; strays that ended.
    """

    def __init__(
        self,
        chance: random.Random,
        *,
        visits_max: int = 16,
        orders_max: int = 64,
        look_interval: float = _LOOK_INTERVAL_S,
        stray_age: float = STRAY_AGE_S,
    ) -> None:
        self.delivered = self.refused = self.failed = self.strays = 0
        self.orders_max = orders_max
        self._chance = chance
        self._visits_max = visits_max
        self._look_interval = look_interval
        self._stray_age = stray_age
        self._members: dict[str, _Member] = {}
        self._visited: set[str] = set()
        self._refusals: dict[str, _Refusal] = {}

    def rest(self) -> None:
        """Forget all but the visits that are under way, because this manager does not lead."""
        self._members.clear()
        self._refusals.clear()

    def held_back(self, now: float) -> set[str]:
        """Return the keys of orders that a node has refused a moment ago."""
        for key in [key for key, one in self._refusals.items() if now > one.until + _REFUSAL_KEPT_S]:
            del self._refusals[key]
        return {key for key, one in self._refusals.items() if now < one.until}

    def failures(self, member: str) -> int:
        """Return the number of visits of a member that have failed one after another."""
        known = self._members.get(member)
        return known.failures if known else 0

    def due(
        self, waiting: Mapping[str, Sequence[OrderRecord]], members: Mapping[str, Reach | None], now: float
    ) -> list[Visit]:
        """Return the visits to begin now; `ended` must be called for each of them.

        Parameters
        ----------
        waiting : mapping of str to sequence of OrderRecord
            Orders that wait, by member, without those that are held back.
        members : mapping of str to Reach or None
            All members of the pool; None for a member whose record cannot be read.
        now : float
            Time by the monotonic clock.
        """
        for member in self._members.keys() - members.keys() - waiting.keys():
            del self._members[member]
        for member in sorted(members.keys() | waiting.keys()):
            if member not in self._members:
                self._members[member] = _Member(now + self._chance.uniform(0.0, self._look_interval))
        visits: list[Visit] = []
        # Those that have waited longest come first, so that members with many orders do not keep others waiting.
        for member, known in sorted(self._members.items(), key=lambda each: (each[1].visited_at, each[0])):
            if len(self._visited) >= self._visits_max:
                break
            if member in self._visited:
                continue
            orders = tuple(waiting.get(member, ()))[: self.orders_max]
            visit = self._visit(member, known, orders, members.get(member), now)
            if visit is not None:
                self._visited.add(member)
                visits.append(visit)
        return visits

    def _visit(
        self, member: str, known: _Member, orders: tuple[OrderRecord, ...], reach: Reach | None, now: float
    ) -> Visit | None:
        if reach is None:
            return None
        before, known.reach = known.reach, reach
        if before is not None and reach != before and reach.state is not MemberState.SUSPECT:
            known.failures, known.retry_at = 0, now  # it has started again, or has moved
        if now < known.retry_at:
            return None
        looks = reach.state in _LOOKED_AT and now >= known.look_at
        overdue = [
            held for since, held in known.strays.values() if now >= since + self._stray_age and held.seconds <= 0
        ]
        # The look comes after them in the same visit, and shows which ones are left.
        strays = tuple(overdue[: self.orders_max]) if looks else ()
        return Visit(member, reach.addresses, orders, strays, looks) if orders or looks else None

    def ended(self, report: Report, names: Callable[[str, str, int], bool], now: float) -> None:
        """Record the outcome of a visit.

        Parameters
        ----------
        report : Report
            The outcome.
        names : callable
            Returns True if a lease (its number) has, on a member (its identity), an extent (its number), or if an order
            to end it waits.
        now : float
            Time by the monotonic clock.
        """
        self._visited.discard(report.member)
        self.delivered += report.delivered
        self.refused += len(report.refused)
        self.strays += report.strays
        self.failed += bool(report.error)
        known = self._members.get(report.member)
        if known is None:  # another manager leads by now
            return
        known.visited_at = now
        known.failures = known.failures + 1 if report.error else 0
        known.retry_at = now + self._pause(known.failures)
        for key in report.refused:
            refusal = self._refusals.setdefault(key, _Refusal())
            refusal.times += 1
            refusal.until = now + self._pause(refusal.times)
        if report.held is not None:
            known.look_at = now + self._chance.uniform(0.9, 1.1) * self._look_interval
            known.strays = {
                (one.lease, one.extent): (known.strays.get((one.lease, one.extent), (now, one))[0], one)
                for one in report.held
                if not names(one.lease, report.member, one.extent)
            }

    def _pause(self, failures: int) -> float:
        if not failures:
            return 0.0
        return min(_PAUSE_MAX_S, _PAUSE_MIN_S * 2.0 ** min(failures - 1, 10)) * self._chance.uniform(0.75, 1.0)
