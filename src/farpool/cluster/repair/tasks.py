"""Objects that wait for copies, the most endangered first, and the orders under way."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from farpool.cluster.repair.messages import CopyOrder, DropOrder, Held
from farpool.cluster.repair.roster import Roster, Standing

__all__ = ["MOVES", "Flights", "Task", "Waiting"]

MOVES = 1 << 16
"""Danger of an object that has all its copies, of which one is to be on another member."""


@dataclass(slots=True)
class Task:
    """One object that lacks copies, or that has copies where they do not belong.

    Attributes
    ----------
    held : Held
        The object.
    holders : dict of bytes to bool
        The members that have a copy; True for those that never evict it.
    moves : bool
        True if no copy is lacking, and copies are only to be elsewhere.
    refused : set of bytes
        Members that do not take a copy.
    unreadable : set of bytes
        Members that have a copy that they cannot return.
    reasons : list of str
        Why orders have failed.
    tries : int
        Number of times in a row that members did not answer.
    """

    held: Held
    holders: dict[bytes, bool]
    moves: bool = False
    refused: set[bytes] = field(default_factory=set)
    unreadable: set[bytes] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    tries: int = 0

    def counting(self, roster: Roster) -> list[bytes]:
        """Return the members whose copies count: of a kept object, only copies that are kept."""
        kept = self.held.is_kept
        return [member for member, keeps in self.holders.items() if roster.counts(member) and (keeps or not kept)]

    def lacking(self, roster: Roster) -> int:
        """Return the number of copies that the object lacks, if that many members can have one."""
        return min(self.held.copies, roster.takers()) - len(self.counting(roster))

    def danger(self, roster: Roster) -> int:
        """Return the number of copies that may still be lost without losing the object; less is more urgent."""
        return MOVES if self.moves else sum(roster.standing(one) is not Standing.LOST for one in self.holders) - 1

    def sources(self, roster: Roster) -> list[bytes]:
        """Return the members to copy from, the best first."""
        rank = {Standing.GOOD: 0, Standing.LEAVING: 1, Standing.DOUBTFUL: 2}
        usable = [one for one in self.holders if roster.standing(one) in rank and one not in self.unreadable]
        # A copy that is kept first, because its copies are then kept, too.
        return sorted(usable, key=lambda one: (self.held.is_kept and not self.holders[one], rank[roster.standing(one)]))

    def targets(self, roster: Roster) -> list[bytes]:
        """Return the members that may take a copy, the best first."""
        order = roster.order(self.held.key)
        if self.moves:
            order = roster.places(order, self.held.copies)
        kept = self.held.is_kept
        free = [
            member
            for member in order
            if roster.standing(member) is Standing.GOOD
            and member not in self.refused
            and (member not in self.holders or (kept and not self.holders[member]))
        ]
        # Members whose copy is not kept come first: if they keep it, no further copy is made.
        return sorted(free, key=lambda member: member not in self.holders)


class Waiting:
    """The tasks that wait, a bounded number of them, each key once.

    Parameters
    ----------
    capacity : int
        Most tasks at the same time.

    Attributes
    ----------
    overflowed : bool
        True if a task was left out.
    """

    def __init__(self, capacity: int) -> None:
        self.overflowed = False
        self._capacity = capacity
        self._by_danger: dict[int, dict[bytes, Task]] = {}
        self._danger: dict[bytes, int] = {}
        self._later: list[tuple[float, int, bytes]] = []
        self._delayed: dict[bytes, Task] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._danger) + len(self._delayed)

    @property
    def lacking(self) -> int:
        """Number of tasks whose objects lack copies. The others only move objects."""
        delayed = sum(not task.moves for task in self._delayed.values())
        return len(self._danger) - len(self._by_danger.get(MOVES, ())) + delayed

    def __contains__(self, key: bytes) -> bool:
        return key in self._danger or key in self._delayed

    def add(self, task: Task, danger: int) -> Task | None:
        """Add a task. If there is no room, the least urgent one is left out and returned."""
        key = task.held.key
        if key in self:
            return None
        self._by_danger.setdefault(danger, {})[key] = task
        self._danger[key] = danger
        if len(self) <= self._capacity:
            return None
        self.overflowed = True
        worst = max(self._by_danger)
        return self.remove(next(reversed(self._by_danger[worst])))

    def delay(self, task: Task, until: float) -> None:
        """Add a task that is not to be tried before a time."""
        self._delayed[task.held.key] = task
        heapq.heappush(self._later, (until, next(self._numbers), task.held.key))

    def wake(self, now: float) -> list[Task]:
        """Remove and return the delayed tasks whose time has come."""
        keys = []
        while self._later and self._later[0][0] <= now:
            keys.append(heapq.heappop(self._later)[2])
        return [self._delayed.pop(key) for key in keys]

    def next_wake(self) -> float | None:
        """Return the time at which the next delayed task may be tried; None if there is none."""
        return self._later[0][0] if self._later else None

    def urgent(self, most: int) -> Iterator[Task]:
        """Yield the `most` most urgent tasks; a caller may remove the task that it got last."""
        for danger in sorted(self._by_danger):
            for task in list(itertools.islice(self._by_danger.get(danger, {}).values(), most)):
                most -= 1
                yield task
            if most <= 0:
                return

    def remove(self, key: bytes) -> Task | None:
        """Remove and return a task; None if there is none, or if it is delayed."""
        danger = self._danger.pop(key, None)
        if danger is None:
            return None
        task = self._by_danger[danger].pop(key)
        if not self._by_danger[danger]:
            del self._by_danger[danger]
        return task


@dataclass(slots=True)
class _Flight:
    order: CopyOrder | DropOrder
    task: Task
    ends: float


class Flights:
    """The orders under way, with an end for each.

    Attributes
    ----------
    by_member : Counter of bytes
        Number of orders from or to each member.
    keys : set of bytes
        The objects that have an order.
    """

    def __init__(self) -> None:
        self.by_member: Counter[bytes] = Counter()
        self.keys: set[bytes] = set()
        self._flights: dict[int, _Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def lacking(self) -> int:
        """Number of orders that make copies which are lacking."""
        return sum(isinstance(one.order, CopyOrder) and not one.task.moves for one in self._flights.values())

    def start(self, order: CopyOrder | DropOrder, task: Task, ends: float) -> None:
        """Record an order that is given now."""
        self._flights[order.number] = _Flight(order, task, ends)
        self.keys.add(order.key)
        self.by_member.update(_members(order))

    def end(self, number: int) -> tuple[CopyOrder | DropOrder, Task] | None:
        """Forget an order; return None if it is not under way, for example because its time was over."""
        flight = self._flights.pop(number, None)
        if flight is None:
            return None
        self.keys.discard(flight.order.key)
        self.by_member.subtract(_members(flight.order))
        return flight.order, flight.task

    def overdue(self, now: float) -> list[int]:
        """Return the orders whose time is over."""
        return [number for number, flight in self._flights.items() if flight.ends <= now]

    def next_end(self) -> float | None:
        """Return the time at which the next order is overdue; None if none is under way."""
        return min((flight.ends for flight in self._flights.values()), default=None)


def _members(order: CopyOrder | DropOrder) -> tuple[bytes, ...]:
    return (order.source, order.target) if isinstance(order, CopyOrder) else (order.member,)
