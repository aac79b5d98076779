"""The engine: finds objects that lack copies and decides which copies to make, in which order and how fast. No I/O.

The caller asks `RepairEngine.actions` what to do, does it, and passes the outcomes on. It also passes on changes of the
members, and the time. One engine serves one tenant. The same rules serve these purposes:

- A member is lost: objects that had copies there lack them. Objects with the fewest copies come first.
- A member drains: its copies do not count, but objects are copied from it.
- A member restarts: its copies count until it has been silent for longer than the grace.
- Members join, or their weights change: a copy is made on each member where one belongs now. Only after all of these
  members have confirmed their copies is a surplus one dropped.

An engine forgets nothing that matters if it is dropped: a new one finds the same objects by its first scan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from farpool.abc.membership import MemberInfo
from farpool.abc.redundancy import Redundancy
from farpool.cluster.repair.exposure import Exposure
from farpool.cluster.repair.messages import Action, Check, CopyOrder, DropOrder, Held, Outcome, Settings, Unmended
from farpool.cluster.repair.rate import Bucket
from farpool.cluster.repair.roster import Roster, Standing
from farpool.cluster.repair.scan import Found, Scan
from farpool.cluster.repair.tasks import Flights, Task, Waiting

__all__ = ["Counts", "RepairEngine"]

_LOOK_AHEAD = 128
"""Tasks that are looked at for one whose members are free."""
_RECHECKS_MAX = 128
"""Objects in one check of objects that have changed."""
_FRESH_MAX = 100_000
"""Objects copied during a scan that are remembered, so that the scan does not count them twice."""
_CHANGED_MAX = 4096
"""Changed objects that are remembered. Others are found by the next scan."""


@dataclass(slots=True)
class Counts:
    """Counts of the work of an engine.

    Attributes
    ----------
    scans : int
        Scans that have ended.
    objects : int
        Objects that the last scan found, or that the present one has found so far in the first scan.
    endangered : int
        Objects that had too few copies.
    mended : int
        Of these, the ones that have all their copies now.
    copied, nbytes : int
        Copies made, and their bytes.
    gone : int
        Endangered objects that were dropped, released, evicted or expired.
    moved, dropped : int
        Copies made where they belong, and surplus copies dropped.
    held_back : int
        Copies that were not made because members have to evict objects.
    failed : int
        Objects that were given up until the next scan.
    left : dict of bytes to Unmended
        The last of these.
    """

    scans: int = 0
    objects: int = 0
    endangered: int = 0
    mended: int = 0
    copied: int = 0
    nbytes: int = 0
    gone: int = 0
    moved: int = 0
    dropped: int = 0
    held_back: int = 0
    failed: int = 0
    left: dict[bytes, Unmended] = field(default_factory=dict)


class RepairEngine:
    """Decides which copies are made, moved and dropped. Not thread-safe.

    Parameters
    ----------
    redundancy : Redundancy
        Chooses the members that get the copies of an object.
    settings : Settings
        Settings.
    nbytes_rate, objects_rate : Bucket
        How many bytes and objects may be copied per second. Several engines may share them.

    Attributes
    ----------
    roster : Roster
        The members.
    counts : Counts
        The work so far.
    """

    def __init__(self, redundancy: Redundancy, settings: Settings, nbytes_rate: Bucket, objects_rate: Bucket) -> None:
        self.roster = Roster(redundancy, settings.grace, settings.pressure)
        self.counts = Counts()
        self._settings = settings
        self._rates = nbytes_rate, objects_rate
        self._scan = Scan(self.roster, settings.pages_max, self._found)
        self._waiting = Waiting(settings.queue_max)
        self._flights = Flights()
        self._numbers = itertools.count(1)
        self._changed: dict[bytes, None] = {}
        self._surplus: dict[bytes, Task] = {}
        self._confirming: dict[int, tuple[Task, bytes, list[bytes], set[int]]] = {}
        self._droppable: list[tuple[Task, list[bytes], float]] = []
        self._scans_now = False
        self._exposure = Exposure()
        self._last_exposure: Exposure | None = None
        # Objects that want more copies than members take: so far in the present scan, and in the last one.
        self._beyond = self._last_beyond = 0
        self._held_back_before = 0
        self._wants_scan = False
        # A member could not be listed, so its objects have to be looked at once it answers.
        self._is_incomplete = False
        self._now = 0.0

    # Events.

    def set_members(self, members: Sequence[MemberInfo], now: float) -> None:
        """Take a new list of members. If it matters, all members are scanned again."""
        matters = self.roster.update(members, now)
        self._wants_scan |= matters and self._settings.follows

    def heard(self, member: bytes, now: float) -> None:
        """Record an answer of a member to anything."""
        self._hear(member, now, answered=True)

    def unheard(self, member: bytes, now: float) -> None:
        """Record that a member did not answer."""
        self._hear(member, now, answered=False)

    def scan(self) -> None:
        """Begin a scan, or another one after the present one."""
        self._wants_scan = True

    def listed(self, member: bytes, objects: Sequence[Held] | None, now: float, *, is_last: bool = False) -> None:
        """Take the answer to a `ListPage`; None if the member did not answer."""
        self._hear(member, now, answered=objects is not None)
        self._is_incomplete |= objects is None
        self._scan.listed(member, objects, is_last=is_last)

    def checked(self, check: Check, answers: Sequence[Held | None] | None, now: float) -> None:
        """Take the answer to a `Check`, in the order of its keys; None if the member did not answer."""
        self._hear(check.member, now, answered=answers is not None)
        if check.number in self._confirming:
            self._confirmed(check, answers, now)
        else:
            self._scan.checked(check.number, answers)

    def copied(self, number: int, outcome: Outcome, now: float, reason: str = "") -> None:
        """Take the outcome of a `CopyOrder`. An outcome that comes after the order's time changes nothing."""
        self._now = now
        ended = self._flights.end(number)
        if ended is not None and isinstance(ended[0], CopyOrder):
            self._end_copy(ended[0], ended[1], outcome, reason)

    def dropped(self, number: int, now: float, *, done: bool) -> None:
        """Take the outcome of a `DropOrder`; `done` is False if the member did not confirm it."""
        self._now = now
        ended = self._flights.end(number)
        if ended is not None and isinstance(ended[0], DropOrder):
            self.counts.dropped += done
            self._end_drop(ended[0], ended[1])

    def lost_copy(self, key: bytes, member: bytes, now: float, *, evicted: bool) -> None:
        """Record that a member has lost a copy: it has evicted it, or could not read it."""
        self._now = now
        if evicted:
            self.roster.evicted(member, now)
        if len(self._changed) < _CHANGED_MAX:
            self._changed[key] = None

    # The caller's work.

    def actions(self, now: float) -> Iterator[Action]:
        """Yield the actions that are due. Answer each with the method that it names."""
        self._now = now
        for number in self._flights.overdue(now):
            ended = self._flights.end(number)
            if ended is not None and isinstance(ended[0], CopyOrder):
                timeout = f"no answer within {ended[0].timeout:.3g} s"
                self._end_copy(ended[0], ended[1], Outcome.AWAY, timeout)
            elif ended is not None and isinstance(ended[0], DropOrder):
                self._end_drop(ended[0], ended[1])
        for task in self._waiting.wake(now):
            self._add(task)
        self._wants_scan |= self.roster.lapse(now) and self._settings.follows
        self._keep_scanning()
        yield from self._scan.actions()
        yield from self._copies(now)
        yield from self._drops(now)

    def next_time(self, now: float) -> float:
        """Return the time at which `actions` may have something although nothing was told: infinity for never."""
        times = [self.roster.next_lapse()]
        times += [one for one in (self._waiting.next_wake(), self._flights.next_end()) if one is not None]
        if len(self._waiting):
            delay = max(rate.delay(now) for rate in self._rates)
            times += [now + delay] if delay else []
        if self._surplus and now < (settled := self.roster.changed_at + self._settings.settle):
            times.append(settled)
        return min(times)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do until something changes."""
        scans = self._scans_now or self._wants_scan or not self._scan.is_done
        drops = self._surplus or self._confirming or self._droppable
        return not (scans or drops or self._changed or len(self._waiting) or len(self._flights))

    @property
    def waiting(self) -> int:
        """Objects that wait for copies or have orders under way."""
        return len(self._waiting) + len(self._flights)

    @property
    def lacking(self) -> int:
        """Objects that have too few copies, as far as it is known."""
        held_back = self.counts.held_back - self._held_back_before
        waiting = self._waiting.lacking + self._flights.lacking
        return waiting + len(self.counts.left) + held_back + self._last_beyond

    def exposure(self) -> Exposure | None:
        """Return what each loss would cost, by the last scan that has ended; None before."""
        return self._last_exposure

    # The scan and what it finds.

    def _keep_scanning(self) -> None:
        if self._scans_now and self._scan.is_done:
            self._scans_now = False
            self._last_exposure, self._exposure = self._exposure, Exposure()
            self.counts.scans += 1
            self.counts.objects = self._last_exposure.objects
            self._last_beyond, self._beyond = self._beyond, 0
        if self._waiting.overflowed and not (self._scans_now or len(self._waiting) or self._surplus):
            self._waiting.overflowed, self._wants_scan = False, True
        if self._wants_scan and not self._scans_now:
            self._wants_scan, self._scans_now = False, True
            self._held_back_before = self.counts.held_back
            if self._settings.left_max is not None:
                self.counts.left.clear()
            self._scan.begin()
        if self._changed and not self._scans_now and len(self._waiting) < self._settings.queue_max // 2:
            keys = list(itertools.islice(self._changed, _RECHECKS_MAX))
            for key in keys:
                del self._changed[key]
            self._scan.check(keys)

    def _found(self, found: Found) -> None:
        held, roster = found.held, self.roster
        counting = found.counting(roster)
        wanted = min(held.copies, roster.takers())
        if found.owned:
            holders = {member: roster.labels(member) for member in found.holders}
            self._exposure.add(held.nbytes, held.copies, holders, counting)
            self._beyond += len(counting) < held.copies and wanted < held.copies
        if held.key in self._flights.keys or held.key in self.counts.left:
            return
        if not found.concerned:
            places = roster.places(found.order, held.copies)
            if self._settings.rebalances and all(member in found.holders for member in places):
                self._note_surplus(Task(held, dict(found.holders)))
            return
        # An earlier finding may be out of date.
        waited = self._waiting.remove(held.key)
        if held.key in self._waiting:
            return
        lacked = waited is not None and not waited.moves
        task = Task(held, dict(found.holders))
        if len(counting) < wanted:
            self.counts.endangered += not lacked
            self._add(task)
            return
        self.counts.mended += lacked
        if self._settings.rebalances:
            places = roster.places(found.order, held.copies)
            have = [member for member in places if found.holders.get(member) or (member in counting)]
            if len(have) < len(places):
                task.moves = True
                self._add(task)
            else:
                self._note_surplus(task)

    def _only_moves(self, task: Task) -> bool:
        """Return True if a task moves a copy, and False if copies are lacking, perhaps since an order for it was given.

        While an order is under way, `_found` passes its object over.
        """
        if task.moves and task.lacking(self.roster) > 0:
            task.moves = False
            self.counts.endangered += 1
        return task.moves

    def _add(self, task: Task) -> None:
        self._only_moves(task)
        left_out = self._waiting.add(task, task.danger(self.roster))
        if left_out is not None and not left_out.moves:
            self.counts.endangered -= 1  # the next scan counts it again

    def _note_surplus(self, task: Task) -> None:
        places = self.roster.places(self.roster.order(task.held.key), task.held.copies)
        extra = [one for one in task.holders if one not in places and self.roster.standing(one) is Standing.GOOD]
        if not extra or len(places) < task.held.copies:
            return
        if len(self._surplus) >= self._settings.queue_max and task.held.key not in self._surplus:
            self._waiting.overflowed = True
            return
        self._surplus.setdefault(task.held.key, task).holders.update(dict.fromkeys(extra, False))

    # Copies.

    def _copies(self, now: float) -> Iterator[CopyOrder]:
        busy, most = self._flights.by_member, self._settings.in_flight_max
        for task in self._waiting.urgent(_LOOK_AHEAD):
            # Asked first, because this is cheap, and often so while many tasks wait.
            has_free = sum(busy[member] < most for member in self.roster) >= 2 or len(self._flights) == 0
            if not has_free or max(rate.delay(now) for rate in self._rates) > 0:
                return
            # While a scan finds objects in more danger, only those start that would be lost with one member.
            is_urgent = task.danger(self.roster) <= 0 and self._settings.follows
            if self._scans_now and not is_urgent and len(self._waiting) < self._settings.queue_max // 2:
                return
            order = self._order(task)
            if order is not None:
                self._waiting.remove(order.key)
                for rate, amount in zip(self._rates, (order.nbytes, 1), strict=True):
                    rate.take(amount)
                self._flights.start(order, task, now + order.timeout)
                yield order

    def _order(self, task: Task) -> CopyOrder | None:
        """Return an order for a task that waits; None if its members are busy, or if the task has ended."""
        key, roster = task.held.key, self.roster
        sources, targets = task.sources(roster), task.targets(roster)
        if (not task.moves and task.lacking(roster) <= 0) or (task.moves and not (sources and targets)):
            self._waiting.remove(key)
            self._ended(task)
            return None
        if not task.held.is_kept and targets:
            fit = [one for one in targets if not roster.is_pressed(one, self._now)]
            if not fit:
                self._waiting.remove(key)
                self.counts.held_back += 1
                return None
            targets = fit
        if not sources or not targets:
            self._waiting.remove(key)
            self._give_up(task)
            return None
        busy, most = self._flights.by_member, self._settings.in_flight_max
        source = next((one for one in sources if busy[one] < most), None)
        if source is None or busy[targets[0]] >= most:
            return None
        timeout = self._settings.order_timeout + task.held.nbytes / self._settings.slowest
        return CopyOrder(next(self._numbers), key, source, targets[0], task.held.nbytes, timeout)

    def _end_copy(self, order: CopyOrder, task: Task, outcome: Outcome, reason: str) -> None:
        if outcome is Outcome.DONE:
            task.holders[order.target] = task.held.is_kept
            task.tries = 0
            self.counts.copied += 1
            self.counts.nbytes += order.nbytes
            self.counts.moved += task.moves
            if self._scans_now and len(self._scan.fresh) < _FRESH_MAX:
                self._scan.fresh.setdefault(order.key, set()).add(order.target)
        elif outcome is Outcome.GONE:
            task.holders.clear()
        elif outcome is Outcome.LOST:
            task.holders.pop(order.source, None)
        elif outcome is Outcome.UNREADABLE:
            task.unreadable.add(order.source)
        elif outcome is Outcome.REFUSED:
            task.refused.add(order.target)
        if reason:
            task.reasons.append(reason)
        if not task.holders:
            self.counts.gone += not task.moves
            return
        if outcome is not Outcome.AWAY:
            self._add(task)
            return
        task.tries += 1
        if task.tries >= self._settings.tries_max:
            self._give_up(task)
            return
        pause = min(self._settings.pause_max, self._settings.first_pause * 2 ** (task.tries - 1))
        self._waiting.delay(task, self._now + pause)

    def _ended(self, task: Task) -> None:
        if not task.moves:
            self.counts.mended += 1
        if self._settings.rebalances:
            places = self.roster.places(self.roster.order(task.held.key), task.held.copies)
            if all(member in task.holders for member in places):
                self._note_surplus(task)

    def _give_up(self, task: Task) -> None:
        if self._only_moves(task):
            return
        self.counts.failed += 1
        left, most = self.counts.left, self._settings.left_max
        left[task.held.key] = Unmended(task.held.key, task.lacking(self.roster), tuple(dict.fromkeys(task.reasons)))
        if most is not None and len(left) > most:
            del left[next(iter(left))]

    # Surplus copies.

    def _end_drop(self, order: DropOrder, task: Task) -> None:
        task.holders.pop(order.member, None)
        if task.lacking(self.roster) > 0:  # a member was lost meanwhile
            self._changed[order.key] = None

    def _drops(self, now: float) -> Iterator[Action]:
        """Check that all members where copies belong have one, a moment before a surplus copy is dropped."""
        if now < self.roster.changed_at + self._settings.settle:
            return
        while self._surplus and len(self._confirming) + len(self._flights) < _LOOK_AHEAD:
            key, task = next(iter(self._surplus.items()))
            del self._surplus[key]
            if key in self._flights.keys or key in self._waiting:
                continue
            places = self.roster.places(self.roster.order(key), task.held.copies)
            extra = [one for one in task.holders if one not in places and self.roster.standing(one) is Standing.GOOD]
            good = len(places) == task.held.copies and all(self.roster.standing(one) is Standing.GOOD for one in places)
            if not good or not extra:
                continue
            checks = [Check(-next(self._numbers), member, (key,), is_exact=True) for member in places]
            left = {check.number for check in checks}
            for check in checks:
                self._confirming[check.number] = task, key, extra, left
            yield from checks
        yield from self._confirmed_drops(now)

    def _confirmed(self, check: Check, answers: Sequence[Held | None] | None, now: float) -> None:
        task, _, extra, left = self._confirming.pop(check.number)
        left.discard(check.number)
        held = None if answers is None else answers[0]
        if held is None or (task.held.is_kept and not held.is_kept) or held.copies > task.held.copies:
            extra.clear()  # nothing is dropped
        if not left and extra:
            self._droppable.append((task, list(extra), now))

    def _confirmed_drops(self, now: float) -> Iterator[DropOrder]:
        while self._droppable:
            task, extra, at = self._droppable.pop()
            if at < self.roster.changed_at:
                continue
            for member in extra:
                order = DropOrder(next(self._numbers), task.held.key, member)
                self._flights.start(order, task, now + self._settings.order_timeout)
                yield order

    def _hear(self, member: bytes, now: float, *, answered: bool) -> None:
        self._now = now
        if answered:
            self.roster.heard(member, now)
        else:
            self.roster.unheard(member, now)
        matters = self.roster.lapse(now)
        if self._is_incomplete and math.isinf(self.roster.next_lapse()):
            self._is_incomplete, matters = False, True
        self._wants_scan |= matters and self._settings.follows
