"""The scan: lists members page by page, and checks on the other members which copies each object has.

Nodes list their objects in different orders, so lists cannot be merged. So each page is checked against the other
members: first against those on which the copies belong, and only for objects that lack some there against all others.
Memory holds a few pages, and never a list. An object that is on several pages is looked at once: on the page of its
*owner*, the first member in the order of its key that has a copy.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from farpool.cluster.repair.messages import Action, Check, Held, ListPage
from farpool.cluster.repair.roster import Roster, Standing

__all__ = ["Found", "Scan"]


@dataclass(slots=True)
class Found:
    """One object, and the members that have it.

    Attributes
    ----------
    held : Held
        The object as the listing member has it.
    holders : dict of bytes to bool
        The members that have a copy; True for those that never evict it.
    order : list of bytes
        All members, in the order of the key.
    owned : bool
        True on the page of the first member that has a copy.
    concerned : bool
        True on the one page on which missing copies are to be ordered.
    lister : bytes
        Member whose page this is; empty for an object that was checked by itself.
    """

    held: Held
    holders: dict[bytes, bool]
    order: list[bytes]
    owned: bool = False
    concerned: bool = False
    lister: bytes = b""

    def counting(self, roster: Roster) -> list[bytes]:
        """Return the members whose copies count: of a kept object, only copies that are kept."""
        return [
            member for member, kept in self.holders.items() if roster.counts(member) and (kept or not self.held.is_kept)
        ]


@dataclass(slots=True)
class _Page:
    lister: bytes
    objects: dict[bytes, Found]
    asked: dict[bytes, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    waiting: int = 0
    is_last_round: bool = False


class Scan:
    """The state of a scan.

    Parameters
    ----------
    roster : Roster
        The members.
    pages_max : int
        Pages in memory at the same time.
    found : callable
        Receives each object of a page whose checks have ended.

    Attributes
    ----------
    fresh : dict of bytes to set of bytes
        Members that have got a copy of an object since the scan has begun. They do not become its owners, so that it is
        counted once.
    """

    def __init__(self, roster: Roster, pages_max: int, found: Callable[[Found], None]) -> None:
        self.fresh: dict[bytes, set[bytes]] = {}
        self._roster = roster
        self._pages_max = pages_max
        self._found = found
        self._numbers = itertools.count(1)
        self._to_list: deque[tuple[bytes, bool]] = deque()
        self._listing: set[bytes] = set()
        self._again: set[bytes] = set()
        self._checks: dict[int, tuple[_Page, Check]] = {}
        self._to_send: deque[Check] = deque()
        self._pages = 0

    @property
    def is_done(self) -> bool:
        """True if all members were listed, and all checks have ended."""
        return not (self._to_list or self._listing or self._pages)

    def begin(self) -> None:
        """Begin again with the first page of each member. Checks that are under way are finished."""
        self.fresh.clear()
        asked = [member for member in self._roster if self._roster.standing(member) is not Standing.LOST]
        self._to_list = deque((member, True) for member in asked if member not in self._listing)
        self._again = {member for member in asked if member in self._listing}

    def actions(self) -> Iterable[Action]:
        """Yield the lists and checks that are to be made now."""
        while self._to_send:
            yield self._to_send.popleft()
        while self._to_list and self._pages + len(self._listing) < self._pages_max:
            member, is_first = self._to_list.popleft()
            self._listing.add(member)
            yield ListPage(member, is_first)

    def listed(self, member: bytes, objects: Sequence[Held] | None, *, is_last: bool) -> None:
        """Take a page of a member; None if the member did not answer."""
        self._listing.discard(member)
        if member in self._again:  # another scan has begun since
            self._again.discard(member)
            self._to_list.append((member, True))
            return
        if objects is None:
            return
        if not is_last:
            # In turn with the other members, so that one long list does not hold up the others.
            self._to_list.append((member, False))
        page = _Page(member, {})
        for held in objects:
            order = self._roster.order(held.key)
            page.objects[held.key] = Found(held, {member: held.is_kept}, order, lister=member)
            page.asked[held.key].add(member)
        self._pages += 1
        self._ask(page, {key: self._places(found) for key, found in page.objects.items()})

    def check(self, keys: Iterable[bytes]) -> None:
        """Check objects by themselves, on all members."""
        page = _Page(b"", {key: Found(Held(key, 0), {}, self._roster.order(key)) for key in keys}, is_last_round=True)
        self._pages += 1
        self._ask(page, {key: found.order for key, found in page.objects.items()})

    def checked(self, number: int, answers: Sequence[Held | None] | None) -> None:
        """Take the answer to a check, in the order of its keys; None if the member did not answer."""
        entry = self._checks.pop(number, None)
        if entry is None:
            return
        page, check = entry
        page.waiting -= 1
        for place, key in enumerate(check.keys):
            found = page.objects[key]
            if answers is None:
                # For as long as it may come back, we believe that its copies are there.
                if self._roster.counts(check.member) and check.member in self._places(found):
                    found.holders[check.member] = found.held.is_kept
            elif (held := answers[place]) is not None:
                found.holders[check.member] = held.is_kept
                if check.is_exact:
                    found.held = _joined(found.held, held)
        if not page.waiting:
            self._next_round(page)

    def _places(self, found: Found) -> list[bytes]:
        return self._roster.places(found.order, found.held.copies)

    def _ask(self, page: _Page, members: dict[bytes, list[bytes]]) -> None:
        """Check keys of a page on the members given for each, unless they were asked."""
        wanted: dict[tuple[bytes, bool], list[bytes]] = defaultdict(list)
        for key, some in members.items():
            asked, exact = page.asked[key], not page.lister or page.objects[key].held.is_kept
            for member in some:
                if member not in asked and self._roster.standing(member) is not Standing.LOST:
                    asked.add(member)
                    wanted[member, exact].append(key)
        for (member, exact), keys in wanted.items():
            check = Check(next(self._numbers), member, tuple(keys), exact)
            self._checks[check.number] = page, check
            self._to_send.append(check)
            page.waiting += 1
        if not page.waiting:
            self._next_round(page)

    def _next_round(self, page: _Page) -> None:
        if not page.is_last_round:
            page.is_last_round = True
            self._ask(page, {key: found.order for key, found in page.objects.items() if self._is_open(found)})
            return
        self._pages -= 1
        for found in page.objects.values():
            if found.holders:
                self._found(_owned(found, self.fresh.get(found.held.key, ())))

    def _is_open(self, found: Found) -> bool:
        """Return True if other members may have copies that matter."""
        counting = found.counting(self._roster)
        if len(counting) < min(found.held.copies, self._roster.takers()):
            return True
        places = self._places(found)
        return found.lister not in places and not any(member in places for member in counting)


def _joined(one: Held, other: Held) -> Held:
    return Held(
        one.key, max(one.nbytes, other.nbytes), max(one.copies, other.copies), is_kept=one.is_kept or other.is_kept
    )


def _owned(found: Found, fresh: Collection[bytes]) -> Found:
    """Say if the object is to be counted, and if missing copies are to be ordered, on this page."""
    if not found.lister:
        found.concerned = True
        return found
    holders = [member for member in found.order if member in found.holders and member not in fresh]
    found.owned = bool(holders) and holders[0] == found.lister
    found.concerned = found.owned
    if found.held.is_kept:
        found.concerned = next((member for member in holders if found.holders[member]), b"") == found.lister
    return found
