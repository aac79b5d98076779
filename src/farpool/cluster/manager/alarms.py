"""Decides which alarms are raised, from what a manager sees of the pool: no clock, no thread and no I/O.

The raised alarms are entries of the registry, and each look begins with them. So a manager that takes over goes on with
the alarms of the one before. What it has not seen itself, it counts from the beginning: it raises no alarm for a sum of
which it knows only one value, and clears none before it knows better.

An alarm is raised when its verdict has been true for some time, and cleared when it has been false for some time. The
verdict is None while nothing is known, for example because a member does not answer; the alarm then stays as it is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from farpool.cluster.manager.records import AlarmRecord
from farpool.sizes import format_size

__all__ = ["LOOK_INTERVAL_S", "Alarms", "Answer", "Change", "Kind", "Limits", "Repair", "Seen", "tenant_subject"]

LOOK_INTERVAL_S = 5.0
"""Seconds between two looks at the pool. The defaults of `Limits` belong to it."""
_DAY_S = 86400.0
_MOVES = ("evictions", "demotions", "drops", "expired")
_CLOCKS = frozenset(("clock", "clock_monotonic"))
_TENANT = "tenant-"


class Kind(StrEnum):
    """Kinds of alarms (docs/alarms.md)."""

    NO_HITS = "no-hits"
    TOO_FEW_COPIES = "too-few-copies"
    EVICTION_STUCK = "eviction-stuck"
    REPAIR_STUCK = "repair-stuck"
    OLD_POLICY = "old-policy"
    CLOCK = "clock"
    FLAPPING = "flapping"
    NVME_WEAR = "nvme-wear"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits from which on something is worth an alarm. Times are in seconds.

    Attributes
    ----------
    hits_window : float
        Shortest time without hits.
    hits_min : int
        Fewest objects put, and fewest keys looked up, in that time.
    hits_quiet : float
        Time without lookups after which the alarm is cleared.
    copies_wait : float
        Time for which objects must have too few copies. A restart and its repair take less.
    copies_clear : float
        Time for which all copies must be there again.
    eviction_stuck : float
        Time for which puts must be refused while nothing is evicted.
    eviction_quiet : float
        Time without refusals after which the alarm is cleared; also the time for which objects may be on their way to
        the NVMe file without any progress.
    repair_stuck : float
        Time without any progress of repair while copies are missing.
    repair_clear : float
        Time with progress after which the alarm is cleared.
    policy_wait : float
        Time for which a node may apply another policy than the registry's.
    policy_silence : float
        Time for which a node may have no confirmation of its policy. It does not grow with the interval of looks,
        because nodes ask for it in an interval of their own.
    clock_offset : float
        Largest difference of a clock from the others, and largest jump. It does not grow with the interval of looks.
    clock_hold : float
        Time after a jump for which the alarm stays.
    flaps_window : float
        Time in which losses of a member are counted.
    flaps_min : int
        Losses in that time that raise the alarm. It is cleared when there are none.
    wear_window : float
        Time whose part of the daily budget may be written in addition to the budget.
    incompatible_hold : float
        Time after the last refusal for which the alarm stays.
    """

    hits_window: float = 30.0
    hits_min: int = 100
    hits_quiet: float = 900.0
    copies_wait: float = 60.0
    copies_clear: float = 10.0
    eviction_stuck: float = 15.0
    eviction_quiet: float = 60.0
    repair_stuck: float = 180.0
    repair_clear: float = 60.0
    policy_wait: float = 15.0
    policy_silence: float = 60.0
    clock_offset: float = 2.0
    clock_hold: float = 60.0
    flaps_window: float = 600.0
    flaps_min: int = 3
    wear_window: float = 3600.0
    incompatible_hold: float = 600.0

    def at(self, interval: float) -> Limits:
        """Return the limits with all times as many looks as before, if a look comes each `interval` seconds."""
        factor = interval / LOOK_INTERVAL_S
        fixed = ("hits_min", "flaps_min", "clock_offset", "policy_silence")
        times = {one.name: getattr(self, one.name) * factor for one in fields(self) if one.name not in fixed}
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class Answer:
    """Counters of a member.

    Attributes
    ----------
    at : float
        Time of the answer by the manager's clock, in seconds since 1970.
    counters : mapping of str to float
        The node's counters.
    tenants : mapping of int to mapping, or None
        Counters by tenant: ``puts``, ``asked``, ``found`` and ``readers``. None if the node does not show them to this
        manager.
    """

    at: float
    counters: Mapping[str, float]
    tenants: Mapping[int, Mapping[str, int]] | None = None


@dataclass(frozen=True, slots=True)
class Repair:
    """Repair of a tenant's objects, after its first scan.

    Attributes
    ----------
    lacking : int
        Objects that have too few copies.
    failed : int
        Objects whose copies could not be made.
    reason : str
        Why one of these could not be copied; empty if there are none.
    progress : int
        A number that grows with each copy and each scan.
    copied, asked, found : int
        Copies that repair has made, keys that it has looked up, and keys of these that were found. The nodes count them
        for the tenant, too.
    """

    lacking: int = 0
    failed: int = 0
    reason: str = ""
    progress: int = 0
    copied: int = 0
    asked: int = 0
    found: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The pool as the leading manager sees it.

    Attributes
    ----------
    now : float
        Time by the monotonic clock.
    wall : float
        Time in seconds since 1970.
    manager : str
        Number of the manager.
    members : mapping of str to str
        Names of all members of the registry, by identity.
    answers : mapping of str to Answer
        Answers of the members that have answered.
    repairs : mapping of int to Repair
        Repair by tenant, as far as it is known.
    policy : int or None
        Revision of the registry's policy of tenants; 0 if there is none, None if it cannot be read.
    """

    now: float
    wall: float
    manager: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    repairs: Mapping[int, Repair] = field(default_factory=dict)
    policy: int | None = 0

    @property
    def knows_tenants(self) -> bool:
        """True if all members have said which tenants have something there."""
        return self.answers.keys() >= self.members.keys() and None not in (one.tenants for one in self.answers.values())


Key = tuple[str, str]
"""Kind and subject of an alarm."""


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm to raise, or to clear if there is no record."""

    key: Key
    record: AlarmRecord | None


@dataclass(slots=True)
class _Member:
    answer: Answer | None = None
    known_since: float = math.inf
    jumped_at: float = -math.inf
    jump: float = 0.0
    refused: float = 0.0  # puts for want of room, since something was last evicted
    refused_since: float = math.inf
    refused_at: float = -math.inf
    leaving_since: float = math.inf
    written: float = 0.0  # bytes beyond the budget
    looked_at: float | None = None
    incompatible: float = 0.0
    incompatible_at: float | None = None

    def grown(self, answer: Answer, *names: str) -> float | None:
        """Return by how much counters have grown since the last look; None if that is not known."""
        if self.answer is None:
            return None
        before, after = self.answer.counters, answer.counters
        if any(name not in before or name not in after or after[name] < before[name] for name in names):
            return None  # the node has started again, or does not count this
        return sum(after[name] - before[name] for name in names)


@dataclass(slots=True)
class _Tenant:
    before: dict[str, Mapping[str, int]] = field(default_factory=dict)  # counters by member
    repair: Repair | None = None
    progressed_at: float | None = None  # None before any progress was seen
    repaired_since: float = math.inf
    puts: int = 0
    asked: int = 0
    found: int = 0
    since: float = -math.inf
    asked_at: float = -math.inf

    def begin(self, now: float) -> None:
        """Count the hits from now on."""
        self.puts = self.asked = self.found = 0
        self.since = now


def tenant_subject(tenant: int) -> str:
    """Return the subject of a tenant's alarms."""
    return f"{_TENANT}{tenant}"


class Alarms:
    """Alarms of a pool. Not thread-safe.

    Parameters
    ----------
    limits : Limits
        From when on something is worth an alarm.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._members: dict[str, _Member] = {}
        self._tenants: dict[int, _Tenant] = {}
        self._losses: dict[str, deque[float]] = {}
        self._since: dict[Key, float] = {}
        self._drift: float | None = None
        self._own = _Member()

    def lost(self, member: str, now: float) -> None:
        """Record that a member's process has ended or was cut off from the registry. Also for managers that rest."""
        times = self._losses.setdefault(member, deque(maxlen=max(8, self._limits.flaps_min)))
        times.append(now)

    def rest(self) -> None:
        """Forget all but the losses of members, because this manager does not lead."""
        self._members.clear()
        self._tenants.clear()
        self._since.clear()
        self._drift, self._own = None, _Member()

    def look(self, seen: Seen, raised: Mapping[Key, AlarmRecord]) -> list[Change]:
        """Return the alarms to raise and to clear.

        Parameters
        ----------
        seen : Seen
            The pool.
        raised : mapping of tuple to AlarmRecord
            The alarms that are raised, by kind and subject.
        """
        look = _Look(self._limits, self._since, seen, raised)
        for member in self._members.keys() - seen.members.keys():
            del self._members[member]
        for member in self._losses.keys() - seen.members.keys():
            del self._losses[member]
        self._clocks(look)
        for member in seen.members:
            self._flapping(look, member)
            answer = seen.answers.get(member)
            known = self._members.setdefault(member, _Member())
            if answer is not None:
                self._eviction(look, member, known, answer)
                self._policy(look, member, answer)
                self._wear(look, member, known, answer)
                self._incompatible(look, member, known, answer)
                known.answer, known.looked_at = answer, seen.now
        self._all_tenants(look)
        look.clear_the_rest(self._tenants)
        return look.changes

    # Members.

    def _clocks(self, look: _Look) -> None:
        seen, limits = look.seen, self._limits
        drift = seen.wall - seen.now
        if self._drift is not None and abs(drift - self._drift) > limits.clock_offset:
            self._own.jumped_at, self._own.jump = seen.now, drift - self._drift
        self._drift = drift
        offsets = {
            member: answer.counters["clock"] - answer.at
            for member, answer in seen.answers.items()
            if answer.counters.keys() >= _CLOCKS
        }
        clocks = [0.0, *offsets.values()]
        # The time of most clocks; the manager's if the choice is free.
        usual = min(statistics.median_low(clocks), statistics.median_high(clocks), key=abs)
        for member, offset in offsets.items():
            known = self._members.setdefault(member, _Member())
            self._note_jump(known, seen.answers[member], seen.now)
            self._clock(look, member, known, offset - usual)
        if offsets:
            self._clock(look, seen.manager, self._own, -usual)

    def _note_jump(self, known: _Member, answer: Answer, now: float) -> None:
        if known.answer is None or not known.answer.counters.keys() >= _CLOCKS:
            return
        before, after = known.answer.counters, answer.counters
        monotonic = after["clock_monotonic"] - before["clock_monotonic"]
        jump = after["clock"] - before["clock"] - monotonic
        # Its host has started again if the monotonic clock went back.
        if monotonic >= 0 and abs(jump) > self._limits.clock_offset:
            known.jumped_at, known.jump = now, jump

    def _clock(self, look: _Look, subject: str, known: _Member, offset: float) -> None:
        limits = self._limits
        if abs(offset) > limits.clock_offset:
            where = "ahead of" if offset > 0 else "behind"
            verdict, text = True, f"its clock is {abs(offset):.1f} s {where} the clocks of most others"
        else:
            is_recent = look.seen.now - known.jumped_at < limits.clock_hold
            verdict = is_recent or look.is_recent(Kind.CLOCK, subject, limits.clock_hold)
            text = f"its clock jumped {'forward' if known.jump > 0 else 'back'} by {abs(known.jump):.1f} s"
        look.judge(Kind.CLOCK, subject, verdict, text)

    def _flapping(self, look: _Look, member: str) -> None:
        times, limits = self._losses.get(member, deque()), self._limits
        while times and look.seen.now - times[0] > limits.flaps_window:
            times.popleft()
        verdict = len(times) > 0 if look.is_raised(Kind.FLAPPING, member) else len(times) >= limits.flaps_min
        verdict = verdict or look.is_recent(Kind.FLAPPING, member, limits.flaps_window)
        text = f"its process ended or was cut off from the registry {len(times)} times in {limits.flaps_window:.0f} s"
        look.judge(Kind.FLAPPING, member, verdict, text)

    def _eviction(self, look: _Look, member: str, known: _Member, answer: Answer) -> None:
        now, limits = look.seen.now, self._limits
        known.known_since = min(known.known_since, now)
        refused, moved = known.grown(answer, "full"), known.grown(answer, *_MOVES)
        if refused is None or moved is None or answer.counters.get("state"):
            return  # a node that drains refuses puts for another reason
        if moved:
            known.refused, known.refused_since, known.refused_at = 0.0, math.inf, -math.inf
        elif refused:
            if now - known.refused_at > limits.eviction_quiet:
                known.refused, known.refused_since = 0.0, now
            known.refused += refused
            known.refused_since = min(known.refused_since, now)
            known.refused_at = now
        written = known.grown(answer, "nvme_written")
        is_leaving = bool(answer.counters.get("nvme_leaving")) and not moved and written == 0
        known.leaving_since = min(known.leaving_since, now) if is_leaving else math.inf
        if now - known.leaving_since >= limits.eviction_quiet:
            size = format_size(int(answer.counters["nvme_leaving"]))
            verdict, text = True, f"objects of {size} are on their way to the NVMe file, which takes none of them"
        else:
            verdict = known.refused_at - known.refused_since >= limits.eviction_stuck
            if not verdict and not moved and look.is_raised(Kind.EVICTION_STUCK, member):
                # An earlier leader has seen it. Perhaps no program has asked for room since then.
                verdict = now - known.known_since < limits.eviction_quiet
            elif verdict and now - known.refused_at >= limits.eviction_quiet:
                known.refused, known.refused_since, known.refused_at = 0.0, math.inf, -math.inf
                verdict = False
            waited = now - min(known.refused_since, now)
            count = f"{known.refused:.0f} requests"
            text = f"it has refused {count} for want of room in {waited:.0f} s, and has evicted nothing"
        look.judge(Kind.EVICTION_STUCK, member, verdict, text)

    def _policy(self, look: _Look, member: str, answer: Answer) -> None:
        if "policy_revision" not in answer.counters:
            return
        applied, silence = int(answer.counters["policy_revision"]), answer.counters.get("policy_silence", 0.0)
        wanted = look.seen.policy
        if wanted is None:
            return
        if wanted and applied != wanted:
            verdict, text = True, f"it applies revision {applied} of the policy of tenants; the registry has {wanted}"
        else:
            verdict = wanted > 0 and silence > self._limits.policy_silence
            text = f"it has heard nothing from the registry about the policy of tenants for {silence:.0f} s"
        look.judge(Kind.OLD_POLICY, member, verdict, text)

    def _wear(self, look: _Look, member: str, known: _Member, answer: Answer) -> None:
        budget = answer.counters.get("nvme_budget", 0.0)
        if budget <= 0:
            return look.judge(Kind.NVME_WEAR, member, False, "")
        most = budget / _DAY_S * self._limits.wear_window
        is_raised = look.is_raised(Kind.NVME_WEAR, member)
        written = known.grown(answer, "nvme_written")
        if known.looked_at is None:
            known.written = most if is_raised else 0.0
        elif written is not None:
            allowed = budget / _DAY_S * (look.seen.now - known.looked_at)
            # Bounded, so that the alarm ends in twice the window after the last write.
            known.written = min(2 * most, max(0.0, known.written + written - allowed))
        verdict = known.written > 0 if is_raised else known.written > most
        beyond = format_size(int(known.written))
        text = f"more is written to its NVMe file than {format_size(int(budget))} a day, by {beyond} so far"
        look.judge(Kind.NVME_WEAR, member, verdict, text)

    def _incompatible(self, look: _Look, member: str, known: _Member, answer: Answer) -> None:
        if known.incompatible_at is None:
            is_raised = look.is_raised(Kind.INCOMPATIBLE, member)
            known.incompatible_at = look.seen.now if is_raised else -math.inf
        if more := known.grown(answer, "incompatible"):
            known.incompatible += more
            known.incompatible_at = look.seen.now
        verdict = look.seen.now - known.incompatible_at < self._limits.incompatible_hold
        if not verdict:
            known.incompatible = 0.0
        text = f"it has refused {known.incompatible:.0f} connections because the program or the node has to be upgraded"
        look.judge(Kind.INCOMPATIBLE, member, verdict, text)

    # Tenants.

    def _all_tenants(self, look: _Look) -> None:
        answers = look.seen.answers
        found = {tenant for answer in answers.values() for tenant in answer.tenants or ()} | look.seen.repairs.keys()
        if look.seen.knows_tenants:
            for tenant in self._tenants.keys() - found:
                del self._tenants[tenant]
        for tenant in found:
            known = self._tenants.setdefault(tenant, _Tenant(since=look.seen.now, asked_at=look.seen.now))
            repair = look.seen.repairs.get(tenant)
            self._hits(look, tenant, known, repair)
            if repair is not None:
                self._copies(look, tenant, known, repair)
            known.repair = repair

    def _hits(self, look: _Look, tenant: int, known: _Tenant, repair: Repair | None) -> None:
        puts, asked, found = known.puts, known.asked, known.found
        for member, answer in look.seen.answers.items():
            after, before = (answer.tenants or {}).get(tenant, {}), known.before.get(member)
            known.before[member] = after
            # Programs that map a node's objects ask it only for the ones that they have not found.
            if before and after and not (after.get("readers", 1) or before.get("readers", 1)):
                grown = [after.get(name, 0) - before.get(name, 0) for name in ("puts", "asked", "found")]
                if min(grown) >= 0:
                    puts, asked, found = puts + grown[0], asked + grown[1], found + grown[2]
        if repair is not None and known.repair is not None:
            puts -= max(0, repair.copied - known.repair.copied)
            asked -= max(0, repair.asked - known.repair.asked)
            found -= max(0, repair.found - known.repair.found)
        if asked > known.asked:
            known.asked_at = look.seen.now
        known.puts, known.asked, known.found = max(0, puts), max(0, asked), max(0, found)
        look.judge(Kind.NO_HITS, tenant_subject(tenant), *self._no_hits(look, tenant, known))

    def _no_hits(self, look: _Look, tenant: int, known: _Tenant) -> tuple[bool | None, str]:
        now, limits = look.seen.now, self._limits
        verdict: bool | None = None
        text = (
            f"programs put {known.puts} objects and looked up {known.asked} keys in {now - known.since:.0f} s, and not"
            " one key was found"
        )
        if now - known.asked_at >= limits.hits_quiet:
            verdict = False
            known.begin(now)
        elif known.asked >= limits.hits_min:
            if not known.found:
                if known.puts >= limits.hits_min and now - known.since >= limits.hits_window:
                    verdict = True
                    known.begin(now)
            else:
                # One hit among many does not show that the fault is over.
                is_over = 100 * known.found >= known.asked
                verdict = False if is_over or not look.is_raised(Kind.NO_HITS, tenant_subject(tenant)) else None
                known.begin(now)
        return verdict, text

    def _copies(self, look: _Look, tenant: int, known: _Tenant, repair: Repair) -> None:
        now, subject = look.seen.now, tenant_subject(tenant)
        text = f"{repair.lacking} objects have fewer copies than their publishers asked for"
        look.judge(Kind.TOO_FEW_COPIES, subject, repair.lacking > 0, text)
        known.repaired_since = min(known.repaired_since, now)
        if not repair.lacking or (known.repair is not None and repair.progress != known.repair.progress):
            known.progressed_at = now
        waited = now - (known.repaired_since if known.progressed_at is None else known.progressed_at)
        verdict: bool | None = waited >= self._limits.repair_stuck
        text = f"{repair.lacking} objects wait for copies, and none was made in {waited:.0f} s"
        if repair.failed:
            verdict, text = True, f"the copies of {repair.failed} objects could not be made: {repair.reason}"
        elif known.progressed_at is None and look.is_raised(Kind.REPAIR_STUCK, subject):
            verdict = verdict or None  # an earlier leader has seen it
        look.judge(Kind.REPAIR_STUCK, subject, verdict, text)


class _Look:
    """One look: compares verdicts with the raised alarms.

    Attributes
    ----------
    changes : list of Change
        The alarms to raise and to clear.
    """

    def __init__(self, limits: Limits, since: dict[Key, float], seen: Seen, raised: Mapping[Key, AlarmRecord]) -> None:
        self.seen = seen
        self.changes: list[Change] = []
        self._since, self._raised = since, raised
        self._waits: dict[Kind, tuple[float, float]] = {
            Kind.TOO_FEW_COPIES: (limits.copies_wait, limits.copies_clear),
            Kind.REPAIR_STUCK: (0.0, limits.repair_clear),
            Kind.OLD_POLICY: (limits.policy_wait, 0.0),
        }

    def is_raised(self, kind: Kind, subject: str) -> bool:
        """Return True if an alarm is raised."""
        return (str(kind), subject) in self._raised

    def is_recent(self, kind: Kind, subject: str, seconds: float) -> bool:
        """Return True if an alarm was raised in the last `seconds`, perhaps by an earlier leader."""
        record = self._raised.get((str(kind), subject))
        return record is not None and 0 <= self.seen.wall - record.since < seconds

    def judge(self, kind: Kind, subject: str, verdict: bool | None, text: str) -> None:
        """Raise or clear an alarm if the verdict has been different for long enough."""
        key = (str(kind), subject)
        if verdict is None or verdict == (key in self._raised):
            self._since.pop(key, None)
            return
        since = self._since.setdefault(key, self.seen.now)
        to_raise, to_clear = self._waits.get(kind, (0.0, 0.0))
        if self.seen.now - since < (to_raise if verdict else to_clear):
            return
        record = None
        if verdict:
            record = AlarmRecord(
                kind=str(kind), subject=subject, about=self._about(subject), text=text, since=self.seen.wall
            )
        self.changes.append(Change(key, record))

    def clear_the_rest(self, tenants: Mapping[int, Any]) -> None:
        """Clear the alarms of members that were removed, of other managers, and of tenants that have nothing."""
        is_whole = self.seen.knows_tenants
        subjects = {*self.seen.members, self.seen.manager, *map(tenant_subject, tenants)}
        for key in self._raised:
            if key[1] not in subjects and (is_whole or not key[1].startswith(_TENANT)):
                self._since.pop(key, None)
                self.changes.append(Change(key, None))

    def _about(self, subject: str) -> str:
        if subject.startswith(_TENANT):
            return f"tenant {subject.removeprefix(_TENANT)}"
        if subject == self.seen.manager:
            return f"manager {subject}"
        return f"member {self.seen.members.get(subject) or subject[:8]}"
