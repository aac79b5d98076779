"""Members in memory under a virtual clock, and a driver that loses, delays and repeats what the engine orders."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from farpool.abc.membership import MemberInfo, MemberState
from farpool.cluster.redundancy import Copies
from farpool.cluster.repair.engine import RepairEngine
from farpool.cluster.repair.messages import Action, Check, CopyOrder, DropOrder, Held, ListPage, Outcome, Settings
from farpool.cluster.repair.rate import Bucket
from farpool.cluster.repair.roster import Roster

__all__ = ["Member", "World"]

_PAGE = 7


def identity_of(number: int) -> bytes:
    return hashlib.sha256(b"member %d" % number).digest()[:16]


@dataclass
class Member:
    """A node: what it has, and if it answers."""

    info: MemberInfo
    objects: dict[bytes, Held] = field(default_factory=dict)
    is_up: bool = True

    @property
    def identity(self) -> bytes:
        return self.info.identity

    def listing(self) -> list[bytes]:
        """The keys in an order of its own, as of a node."""
        return sorted(self.objects, key=lambda key: hashlib.sha256(self.identity + key).digest())


class World:
    """The members, the engine, the clock and the checks of what the engine does."""

    def __init__(self, seed: int, members: int, *, rate: float | None = None, losses: float = 0.0, **settings: object):
        self.chance = random.Random(seed)
        self.now = 0.0
        self.members: dict[bytes, Member] = {}
        self.losses = losses
        self.rate = rate
        self.settings = Settings(**{"grace": 5.0, "settle": 3.0, "order_timeout": 2.0, **settings})  # type: ignore[arg-type]
        self.engine = RepairEngine(Copies(1), self.settings, Bucket(rate), Bucket(None))
        self.started: list[tuple[float, CopyOrder]] = []
        self.dropped: list[DropOrder] = []
        self.in_flight: Counter[bytes] = Counter()
        self.flights: dict[int, tuple[float, CopyOrder]] = {}
        self.harmed: dict[bytes, float] = {}
        self.checked: dict[bytes, float] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._lists: dict[bytes, list[bytes]] = {}
        self._placing = Roster(Copies(1), 1e9, 0.0)
        for number in range(members):
            self.join(number)

    # What happens to members and objects.

    def join(self, number: int, **fields: object) -> Member:
        info = MemberInfo((f"tcp://n{number}:1",), identity_of(number), labels={"rack": f"r{number % 3}"}, **fields)  # type: ignore[arg-type]
        self.members[info.identity] = member = Member(info)
        self.tell()
        return member

    def set_state(self, member: Member, state: MemberState) -> None:
        member.info = replace(member.info, state=state)
        self.tell()

    def kill(self, member: Member, *, for_good: bool) -> None:
        """The member goes: for good with all that it has."""
        member.is_up = False
        if for_good:
            for key in list(member.objects):
                self.lose(member, key)
        self.set_state(member, MemberState.SUSPECT)

    def come_back(self, member: Member) -> None:
        member.is_up = True
        self.set_state(member, MemberState.ACTIVE)

    def remove(self, member: Member) -> None:
        del self.members[member.identity]
        self.tell()

    def tell(self) -> None:
        infos = [member.info for member in self.members.values()]
        self.told_at = self.now
        self._placing.update(infos, self.now)
        self.engine.set_members(infos, self.now)

    def put(self, key: bytes, nbytes: int, copies: int, *, is_kept: bool = False) -> None:
        """A program puts an object on the first members that answer and take it."""
        takers = [
            self.members[one]
            for one in self._placing.order(key)
            if self.members[one].is_up and self.members[one].info.state is not MemberState.DRAINING
        ]
        if len(takers) < copies:
            return
        for member in takers[:copies]:
            member.objects[key] = Held(key, nbytes, copies, is_kept)

    def lose(self, member: Member, key: bytes, *, evicted: bool = False) -> None:
        """A member loses a copy by itself."""
        if member.objects.pop(key, None) is None:
            return
        self.harmed[key] = self.now
        if evicted:
            self.engine.lost_copy(key, member.identity, self.now, evicted=False)

    def holders(self, key: bytes) -> list[Member]:
        return [one for one in self.members.values() if key in one.objects]

    def all_keys(self) -> set[bytes]:
        return {key for one in self.members.values() for key in one.objects}

    def counting(self, key: bytes) -> list[Member]:
        """The copies that would serve readers after the draining members have left."""
        holders = [one for one in self.holders(key) if one.is_up and one.info.state is not MemberState.DRAINING]
        is_kept = any(one.objects[key].is_kept for one in holders)
        return [one for one in holders if one.objects[key].is_kept or not is_kept]

    def takers(self) -> int:
        return sum(one.is_up and one.info.state is not MemberState.DRAINING for one in self.members.values())

    # The clock and the driver.

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act))

    def run(self, until: float) -> None:
        """Let time pass, and do what the engine asks."""
        while True:
            for action in self.engine.actions(self.now):
                self._take(action)
            at = min(self.engine.next_time(self.now), self._events[0][0] if self._events else until)
            if at >= until:
                self.now = until
                return
            self.now = (
                max(at, self.now) if at > self.now or (self._events and self._events[0][0] <= at) else self.now + 1e-3
            )
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()

    def settle(self, most: float = 3000.0) -> None:
        """Let time pass until the engine has nothing to do."""
        end = self.now + most
        while not self.engine.is_idle or self._events or self.engine.next_time(self.now) < math.inf:
            assert self.now < end, "the engine never ends"
            self.run(self.now + 1.0)

    def _take(self, action: Action) -> None:
        delay = self.chance.uniform(0.001, 0.05)
        if isinstance(action, ListPage):
            self.later(delay, lambda: self._list(action))
        elif isinstance(action, Check):
            if len(action.keys) == 1 and action.is_exact:
                self.checked[action.keys[0]] = self.now
            self.later(delay, lambda: self._check(action))
        elif isinstance(action, CopyOrder):
            self._start(action)
        else:
            self._drop(action, delay)

    def _list(self, action: ListPage) -> None:
        member = self.members.get(action.member)
        if member is None or not member.is_up:
            self.engine.listed(action.member, None, self.now)
            return
        listing = member.listing()
        if action.is_first:
            self._lists[action.member] = []
        done = self._lists[action.member]
        left = [key for key in listing if not done or _rank(member, key) > _rank(member, done[-1])]
        page = left[:_PAGE]
        done += page
        self.engine.listed(action.member, [member.objects[key] for key in page], self.now, is_last=len(left) <= _PAGE)

    def _check(self, check: Check) -> None:
        member = self.members.get(check.member)
        if member is None or not member.is_up:
            self.engine.checked(check, None, self.now)
            return
        found = [member.objects.get(key) for key in check.keys]
        answers = [one and (one if check.is_exact else Held(one.key, one.nbytes)) for one in found]
        self.engine.checked(check, answers, self.now)

    def _start(self, order: CopyOrder) -> None:
        self.started.append((self.now, order))
        self.flights[order.number] = (self.now + order.timeout, order)
        busy: Counter[bytes] = Counter()
        for number, (end, one) in list(self.flights.items()):
            if end <= self.now and number != order.number:
                del self.flights[number]  # the engine does not wait for it any more
            else:
                busy.update((one.source, one.target))
        assert max(busy.values()) <= self.settings.in_flight_max
        fate = self.chance.random()
        if fate < self.losses / 2:
            return  # neither done nor answered
        delay = self.chance.uniform(0.01, 0.3) if fate > self.losses else order.timeout * 1.5
        self.later(delay, lambda: self._copy(order))

    def _copy(self, order: CopyOrder) -> None:
        self.flights.pop(order.number, None)
        source, target = self.members.get(order.source), self.members.get(order.target)
        if source is None or target is None or not source.is_up or not target.is_up:
            outcome = Outcome.AWAY
        elif (held := source.objects.get(order.key)) is None:
            outcome = Outcome.LOST
        elif target.info.state is MemberState.DRAINING:
            outcome = Outcome.REFUSED
        else:
            target.objects[order.key] = held
            outcome = Outcome.DONE
        self.engine.copied(order.number, outcome, self.now)

    def _drop(self, order: DropOrder, delay: float) -> None:
        self.dropped.append(order)

        def act() -> None:
            member = self.members.get(order.member)
            done = member is not None and member.is_up and member.objects.pop(order.key, None) is not None
            if done:
                # What happens to members after they were asked cannot be known.
                since = max(self.harmed.get(order.key, -1.0), self.told_at)
                copies = max((one.objects[order.key].copies for one in self.holders(order.key)), default=1)
                assert since >= self.checked[order.key] or len(self.counting(order.key)) >= copies, order
            self.engine.dropped(order.number, self.now, done=done)

        self.later(delay, act)

    def check_rate(self) -> None:
        """No window of time has more bytes than the rate allows."""
        assert self.rate is not None
        largest = max(order.nbytes for _, order in self.started)
        for first, (begin, _) in enumerate(self.started):
            total = 0
            for at, order in self.started[first:]:
                total += order.nbytes
                assert total <= self.rate * (at - begin + 0.25) + largest + 1


def _rank(member: Member, key: bytes) -> bytes:
    return hashlib.sha256(member.identity + key).digest()


def lacking(world: World) -> Iterator[bytes]:
    """Yield the objects that have fewer copies than they want and the members allow."""
    for key in world.all_keys():
        copies = max(one.objects[key].copies for one in world.holders(key))
        if len(world.counting(key)) < min(copies, world.takers()):
            yield key
