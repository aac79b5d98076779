"""A lease at its holder: decides when to renew it, to show its ticket, and to move bytes. No clock, no I/O.

`LeaseHolder` carries the steps out, and tells the outcomes. All times are seconds of one clock that never jumps. The
clocks of managers and nodes play no part: a ticket says for how long it is valid, and that time begins when the holder
sends the request for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from farpool.cluster.leases.client import GrantedLease, LeasedExtent
from farpool.cluster.leases.tickets import read_ticket
from farpool.errors import TicketError

__all__ = ["Claim", "HeldLease", "Move", "Release", "Renew", "Replace", "Rest", "Step"]

_RENEWALS_PER_TERM = 3
"""Renewals in the time for which a ticket is valid, and in the time that a lender waits for its memory, because the
holder learns of this wish when it renews."""
_INTERVAL_MIN_S = 0.1
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_RETRY_S = 2.0
"""Seconds between two attempts to move bytes, or to show a ticket to a node."""

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing to do until a time."""

    until: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Show the present ticket to a member."""

    member: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Ask for another extent in the place of one that its lender wants back, or whose bytes are lost."""

    extent: LeasedExtent


@dataclass(frozen=True, slots=True)
class Move:
    """Show the ticket to the member of `new`, copy the bytes of `old` to `new`, and use `new` from then on.

    If they are the same, the bytes come from another extent with a copy of them.
    """

    old: LeasedExtent
    new: LeasedExtent


@dataclass(frozen=True, slots=True)
class Release:
    """Give extents back that are no longer used."""

    extents: tuple[LeasedExtent, ...]


Step = Rest | Renew | Claim | Replace | Move | Release


class HeldLease:
    """State of one lease at its holder. For one thread at a time.

    Parameters
    ----------
    granted : GrantedLease
        The lease as it was granted.
    sent : float
        Time at which the request was sent.
    reclaim : float
        Seconds in which the holder has promised to give memory back.
    chance : random.Random, optional
        Makes the times of renewals of many holders differ; a simulation gives one with a seed.

    Attributes
    ----------
    lease : str
        Number of the lease.
    epoch : int
        Its epoch.
    ticket : bytes
        The newest ticket.
    until : float
        Time at which nodes begin to refuse the ticket.
    has_ended : bool
        True once a manager has said that there is no such lease any more.
    """

    def __init__(
        self, granted: GrantedLease, *, sent: float, reclaim: float, chance: random.Random | None = None
    ) -> None:
        self.lease = granted.lease
        self.epoch = 0
        self.ticket = b""
        self.until = sent
        self.has_ended = False
        self._reclaim = reclaim
        self._chance = chance or random.SystemRandom()
        self._extents: dict[_Key, LeasedExtent] = {}
        self._used: dict[_Key, LeasedExtent] = {}
        self._spare: dict[_Key, LeasedExtent] = {}
        self._taken: dict[_Key, LeasedExtent] = {}
        """Extents that the user gets ready to use."""
        self._unused: dict[_Key, LeasedExtent] = {}
        """Extents to give back, because their bytes have moved, or because they could not be used."""
        self._replacements: dict[_Key, LeasedExtent] = {}
        """The extents to which bytes will move, by the extents in which the bytes are."""
        self._wanted: tuple[_Key, ...] = ()
        """Extents that their lenders want back, the most urgent one first."""
        self._failing: dict[_Key, str] = {}
        """Used extents whose bytes are lost, while another one has a copy of them, each with the reason."""
        self._gone: set[_Key] = set()
        """The failing extents that a manager has taken."""
        self._tried: set[_Key] = set()
        """The failing extents to which the bytes could not be copied."""
        self._shown: dict[str, bytes] = {}
        """The newest ticket that each member has seen."""
        self._renew_at = sent
        self._retry_at: dict[str | _Key, float] = {}
        self._pause = _FIRST_PAUSE_S
        self._away_since: float | None = None
        self._faults: dict[str | _Key, str] = {}
        self._end = ""
        self._lost: list[LeasedExtent] = []
        self.granted(granted, sent)

    # The present extents

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that are used or will be, without further copies."""
        present = (one for each in (self._used, self._taken, self._spare) for one in each.values())
        return sum({one.part: one.bytes for one in present}.values())

    @property
    def has_copies(self) -> bool:
        """True if several extents have the same bytes."""
        return len({one.part for one in self._used.values()}) < len(self._used)

    @property
    def used(self) -> tuple[LeasedExtent, ...]:
        """The extents that hold the bytes."""
        return tuple(one for key, one in self._used.items() if key not in self._gone)

    @property
    def shown(self) -> tuple[LeasedExtent, ...]:
        """The extents whose members need each new ticket: used ones, and those to which bytes are being copied.

        Members of lost copies see it before the bytes are copied back. Until then, they may not answer.
        """
        sound = (one for key, one in self._used.items() if key not in self._failing)
        copies = (one for one in self._replacements.values() if one.member in self._shown)
        return (*sound, *copies)

    def take(self) -> tuple[LeasedExtent, ...]:
        """Return the extents that are new, for the user to get them ready; then call `use` or `drop`."""
        taken, self._spare = self._spare, {}
        self._taken |= taken
        return tuple(taken.values())

    def use(self, extents: Iterable[LeasedExtent], ticket: bytes) -> None:
        """Use extents that were taken, and whose members have seen a ticket."""
        for one in extents:
            if self._taken.pop(one.key, None) is not None:
                self._used[one.key] = one
                self._shown[one.member] = ticket

    def drop(self, extents: Iterable[LeasedExtent]) -> None:
        """Give extents back that could not be used, also if their members have seen a ticket."""
        for one in extents:
            if self._taken.pop(one.key, None) or self._used.pop(one.key, None):
                self._unused[one.key] = one

    def failing(self, faults: Mapping[_Key, str]) -> None:
        """Take over which used extents have lost their bytes while another one has a copy, each with the reason."""
        gone = {key: why for key, why in self._failing.items() if key in self._gone}
        self._failing = {key: why for key, why in faults.items() if key in self._used} | gone
        self._tried &= self._failing.keys()

    # What to do

    def step(self, now: float) -> Step:
        """Return the next step. Carry it out, and tell the outcome before the next call."""
        if self.has_ended:
            return Rest(math.inf)
        if now >= self._renew_at:
            return Renew()
        return next(self._steps(now), None) or Rest(
            min((self._renew_at, *(time for time in self._retry_at.values() if time > now)))
        )

    def _steps(self, now: float) -> Iterator[Step]:
        """Yield the steps that are due besides a renewal, the most urgent one first."""

        def is_due(what: str | _Key) -> bool:
            return now >= self._retry_at.get(what, 0.0)

        # The user shows the ticket to these, and the node may need long for the memory of new extents.
        busy = {one.member for one in self._taken.values()}
        for member in dict.fromkeys(one.member for one in self.shown if one.member not in busy):
            if self._shown.get(member) != self.ticket and is_due(member):
                yield Claim(member)
        # Until these are released, a manager takes them for the replacements of other extents of their parts.
        old_parts = {_place(one) for one in self._unused.values()}
        for key in dict.fromkeys((*self._failing, *self._wanted)):
            if key in self._used and is_due(key):
                old, new = self._used[key], self._replacements.get(key)
                if new is not None:
                    yield Move(old, new)
                elif key in self._failing.keys() - self._tried - self._gone:
                    yield Move(old, old)  # the member may be back
                elif self._away_since is None and _place(old) not in old_parts:
                    yield Replace(old)
        if self._unused and self._away_since is None and is_due(""):
            yield Release(tuple(self._unused.values()))

    # Answers of managers

    def granted(self, lease: GrantedLease, sent: float, step: Step | None = None) -> tuple[LeasedExtent, ...]:
        """Take over a manager's answer.

        Parameters
        ----------
        lease : GrantedLease
            The answer.
        sent : float
            Time at which the request was sent.
        step : Step, optional
            The step that the request carried out; None if the user asked for it.

        Returns
        -------
        tuple of LeasedExtent
            Used extents that the manager has taken: their bytes are lost.
        """
        try:
            ticket = read_ticket(lease.ticket) if lease.ticket else None
        except TicketError as error:
            self.failed(sent, str(error))
            return ()
        if lease.epoch < self.epoch:  # a late answer
            return ()
        self.epoch, self._renew_at = lease.epoch, sent + _INTERVAL_MIN_S
        if ticket is not None and lease.ticket is not None:  # there is none if the lease had expired at that moment
            term = (ticket.expiry_ms - ticket.issued_ms) / 1000
            self.ticket, self.until = lease.ticket, sent + term
            interval = min(term, self._reclaim) / _RENEWALS_PER_TERM * self._chance.uniform(0.8, 1.0)
            self._renew_at = sent + max(interval, _INTERVAL_MIN_S)
        self._away_since, self._pause = None, _FIRST_PAUSE_S
        self._faults.pop("", None)
        self._extents = {one.key: one for one in lease.extents}
        wanted = sorted(lease.reclaims, key=lambda one: one.by)
        self._wanted = tuple((one.member, one.number) for one in wanted)
        lost = self._sort_out()
        if isinstance(step, Replace) and step.extent.key in self._used.keys() - self._replacements.keys():
            self._not_replaced(step, sent, "the manager has given no other extent for it")
        return lost

    def _sort_out(self) -> tuple[LeasedExtent, ...]:
        """Compare the extents of the lease with those that are used."""
        present = self._extents
        kept_parts = {one.part for key, one in self._used.items() if key in present and key not in self._failing}
        taken = {key: one for key, one in self._used.items() if key not in present}
        for key in [key for key, one in taken.items() if one.part in kept_parts]:
            del taken[key]  # another extent has a copy
            self._gone.add(key)
            self._failing[key] = "a manager has taken it"
        self._gone -= taken.keys()
        lost = tuple(taken.values())
        self._lost += lost
        # The entries may have new addresses of the members.
        self._used = {key: present.get(key, one) for key, one in self._used.items() if key not in taken}
        self._taken = {key: one for key, one in self._taken.items() if key in present}
        self._unused = {key: one for key, one in self._unused.items() if key in present}
        self._replacements = {
            old: present[new.key] for old, new in self._replacements.items() if old in self._used and new.key in present
        }
        known = {*self._used, *self._taken, *self._unused, *(one.key for one in self._replacements.values())}
        self._spare = {key: one for key, one in present.items() if key not in known}
        self._adopt()
        kept = {"", *self._used, *(one.member for one in self._used.values())}
        self._retry_at = {what: time for what, time in self._retry_at.items() if what in kept}
        self._faults = {
            what: text
            for what, text in self._faults.items()
            if what in kept and (isinstance(what, str) or what in self._wanted or what in self._failing)
        }
        return lost

    def _adopt(self) -> None:
        """Tell replacements of used extents from further memory, among the extents that are new."""
        owners = {_place(one): one for each in (self._taken, self._used) for one in each.values()}
        for key, one in list(self._spare.items()):
            old = owners.get(_place(one))
            if old is None:
                continue
            del self._spare[key]
            is_moving = old.key in self._wanted or old.key in self._failing
            if is_moving and old.key in self._used and old.key not in self._replacements:
                self._replacements[old.key] = one
                self._retry_at.pop(old.key, None)
            else:
                self._unused[key] = one  # its lender does not want the old one back any more

    def failed(self, now: float, why: str) -> None:
        """Record that no manager could be asked."""
        if self._away_since is None:
            self._away_since = now
        self._faults[""] = why
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        self._renew_at = now + pause * self._chance.uniform(0.5, 1.0)

    def refused(self, now: float, step: Step, why: str) -> None:
        """Record that a manager refused a step. The next renewal shows the lease as it is now."""
        if isinstance(step, Renew):
            self.failed(now, why)
            return
        self._renew_at = now + _INTERVAL_MIN_S
        if isinstance(step, Replace):
            self._not_replaced(step, now, why)
        elif isinstance(step, Release):
            self._retry_at[""] = now + _RETRY_S

    def ended(self, why: str) -> None:
        """Record that there is no such lease any more."""
        self.has_ended, self._end = True, why
        self._wanted, self._replacements = (), {}

    # Outcomes at nodes

    def claimed(self, member: str, ticket: bytes) -> None:
        """Record that a member has seen a ticket."""
        self._shown[member] = ticket
        self._retry_at.pop(member, None)
        self._faults.pop(member, None)

    def not_claimed(self, member: str, now: float, why: str) -> None:
        """Record that a ticket could not be shown to a member."""
        self._retry(member, now, why)

    def moved(self, step: Move) -> None:
        """Record that bytes have moved."""
        old = self._used.pop(step.old.key, None)
        if step.new.key != step.old.key:
            if old is not None and old.key not in self._gone:
                self._unused[old.key] = old
            self._used[step.new.key] = step.new
        elif old is not None:
            self._used[old.key] = old
        self._failing.pop(step.old.key, None)
        self._gone.discard(step.old.key)
        self._replacements.pop(step.old.key, None)
        self._retry_at.pop(step.old.key, None)
        self._faults.pop(step.old.key, None)

    def not_moved(self, step: Move, now: float, why: str) -> None:
        """Record that bytes could not be moved."""
        self._tried.add(step.old.key)
        self._retry(step.old.key, now, why)

    def _not_replaced(self, step: Replace, now: float, why: str) -> None:
        self._tried.discard(step.extent.key)
        self._retry(step.extent.key, now, why)

    def _retry(self, what: str | _Key, now: float, why: str) -> None:
        self._retry_at[what] = now + _RETRY_S
        self._faults[what] = why

    # For people

    def notes(self, now: float) -> dict[str, str]:
        """Return a sentence for each condition that a person should know, by a name of the condition."""
        if self.has_ended:
            return {"ended": f"the lease {self.lease} has ended, and its bytes are lost: {self._end}"}
        notes = {
            f"lost {one.member} {one.number}": f"{one.shown} were taken by a manager, and their bytes are lost"
            for one in self._lost
        }
        if self._away_since is not None:
            away, left = now - self._away_since, self.until - now
            state = (
                f"the memory can be used for {left:.0f} s more"
                if left > 0
                else f"its ticket expired {-left:.0f} s ago, so nodes refuse transfers until a manager answers"
            )
            why = self._faults.get("", "")
            notes["away" if left > 0 else "expired"] = (
                f"no manager has renewed the lease {self.lease} for {away:.0f} s: {why}; {state}"
            )
        for key, why in self._failing.items():
            if key not in self._used:
                continue
            again = f"; it could not be made again: {self._faults[key]}" if key in self._faults else ""
            notes[f"copy {key}"] = f"a copy of {self._used[key].shown} is out of use: {why}{again}"
        for what, why in self._faults.items():
            if what in self._failing:
                continue
            if isinstance(what, tuple) and what in self._used:
                notes[f"stays {what}"] = f"{self._used[what].shown} are wanted back and cannot be moved: {why}"
            elif isinstance(what, str) and what:
                notes[f"claim {what}"] = f"the lease's ticket cannot be shown to a node: {why}"
        return notes


def _place(extent: LeasedExtent) -> tuple[int, int]:
    """Return the part of the lease's bytes that an extent holds, and which copy of it."""
    return extent.part, extent.replica
