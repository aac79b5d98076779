"""Managers, their clients and the nodes over one registry, in one thread, with a virtual clock and seeded faults.

Managers meet in the registry alone. So whatever may happen between two of their steps happens here inside a call of the
registry: another manager works, the reply is lost, the registry is away, or the manager ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from farpool.abc.registry import Changes, Commit, Condition, Delete, Operation, Put, Registry, Snapshot, Watch
from farpool.cluster.leases.engine import Clock, Engine
from farpool.cluster.leases.records import (
    BURST,
    GRAIN_BYTES,
    LEASE,
    MEMBER,
    ORDERS,
    TENANT,
    TURNS,
    Extent,
    LeaseRecord,
    LeaseRequest,
    MemberAccount,
    OrderRecord,
    TenantAccount,
    decode,
)
from farpool.cluster.leases.requests import (
    Confirm,
    End,
    Grant,
    Granted,
    Outcome,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
    TenantLimits,
)
from farpool.cluster.members.records import ALIVE, RECORD, AliveRecord, MemberRecord
from farpool.cluster.members.records import decode as decode_member
from farpool.cluster.members.records import encode as encode_member
from farpool.errors import RegistryAwayError
from tests.leases.memory import MemoryRegistry

G = GRAIN_BYTES
TENANTS = (1, 2, 3)
POLICIES = {
    1: TenantLimits(guaranteed={"dram": 8 * G}, most={"dram": 24 * G}),
    2: TenantLimits(guaranteed={"dram": 6 * G}),
    3: TenantLimits(most={"dram": 20 * G}),
}


class CrashError(Exception):
    """The manager's process ends here."""


class WaitError(Exception):
    """The manager waits; other code of the test goes on."""


class Truth:
    """Checks every transaction that the registry carries out."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry(self.check)
        self.leases: dict[str, LeaseRecord] = {}
        self.orders: dict[str, OrderRecord] = {}
        self.accounts: dict[str, MemberAccount] = {}
        self.tenants: dict[int, TenantAccount] = {}
        self.records: dict[str, MemberRecord] = {}
        self.highest: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        # For each extent, the highest epoch of an answer that names it, and the epoch of the order that ended it. A
        # node carries the order out only if it is later than every ticket.
        self.named: dict[tuple[str, int], int] = {}
        self.ended: dict[tuple[str, int], int] = {}
        self.grants = 0
        self.has_changed_members = False

    def check(self, revision: int, operations: Sequence[Operation]) -> None:
        extents_before = set(self.extents())
        reserved_before, free_before = self.reserved(), self.free()
        grown = False
        for one in operations:
            value = None if isinstance(one, Delete) else bytes(one.value)
            if one.key.startswith(LEASE):
                record = None if value is None else decode(one.key, value, LeaseRecord)
                self.check_lease(one.key.removeprefix(LEASE), record)
            elif one.key.startswith(ORDERS):
                if value is None:
                    del self.orders[one.key]
                else:
                    order = self.orders[one.key] = decode(one.key, value, OrderRecord)
                    assert order.epoch >= self.epochs[order.lease]
                    assert order.epoch > self.named.get((order.member, order.extent), 0)
                    self.ended[order.member, order.extent] = order.epoch
                    self.epochs[order.lease] = max(order.epoch, self.epochs[order.lease])
            elif one.key.startswith(MEMBER):
                member = one.key.removeprefix(MEMBER)
                assert value is not None
                account = decode(one.key, value, MemberAccount)
                before = self.accounts.get(member, MemberAccount())
                assert account.next >= before.next
                if sum(account.lent.get("dram", {}).values()) > sum(before.lent.get("dram", {}).values()):
                    grown = True
                    lender = self.records[member]
                    assert sum(account.lent["dram"].values()) <= lender.media["dram"]
                    assert not lender.draining
                self.accounts[member] = account
            elif one.key.startswith(TENANT):
                assert value is not None
                self.tenants[int(one.key.removeprefix(TENANT))] = decode(one.key, value, TenantAccount)
            elif one.key.startswith(RECORD):
                assert value is not None
                entry = self.registry.entries[one.key]
                self.records[one.key.removeprefix(RECORD)] = decode_member(entry, MemberRecord)
            else:
                assert one.key in (BURST, TURNS) or one.key.startswith(ALIVE)
        self.check_sums()
        for member, number in set(self.extents()) - extents_before:
            assert number > self.highest.get(member, 0), "an extent was lent twice"
        for member, number in self.extents():
            self.highest[member] = max(number, self.highest.get(member, 0))
        if grown:
            for tenant, limits in POLICIES.items():
                assert self.used(tenant) <= limits.most.get("dram", 1 << 60), "a tenant has more than its burst"
            # A manager that has not yet seen that a member drains may grant as if it had granted before.
            if free_before >= reserved_before and not self.has_changed_members:
                assert self.free() >= self.reserved(), "memory that is guaranteed to a tenant was lent to another one"

    def check_lease(self, lease: str, record: LeaseRecord | None) -> None:
        before = self.leases.pop(lease, None)
        if record is None:
            return
        self.leases[lease] = record
        assert record.epoch >= self.epochs.get(lease, 0)
        if before is None:
            assert record.epoch >= self.epochs.get(lease, 0)
            self.grants += 1
        else:
            assert record.expires >= before.expires, "an expiry moved back"
            kept = {(one.member, one.number) for one in record.extents}
            if any((one.member, one.number) not in kept for one in before.extents):
                assert record.epoch > before.epoch, "memory was taken away within an epoch"
        self.epochs[lease] = record.epoch
        parts = {one.part: one.bytes for one in record.extents}
        assert sum(parts.values()) == record.terms.bytes
        for part, size in parts.items():
            copies: dict[int, list[Extent]] = {}
            for one in record.extents:
                if one.part == part:
                    assert one.bytes == size
                    copies.setdefault(one.copy, []).append(one)
            assert set(copies) <= set(range(record.terms.copies))
            apart = [[self.records[one.member] for one in copies[copy]] for copy in sorted(copies)]
            for index, some in enumerate(apart):
                for others in apart[index + 1 :]:
                    for label in record.terms.spread:
                        assert not {one.labels[label] for one in some} & {one.labels[label] for one in others}

    def extents(self) -> list[tuple[str, int]]:
        found = [(one.member, one.number) for record in self.leases.values() for one in record.extents]
        found += [(order.member, order.extent) for order in self.orders.values()]
        assert len(found) == len(set(found)), "an extent was lent twice"
        return found

    def check_sums(self) -> None:
        members: dict[str, dict[int, int]] = {}
        for record in self.leases.values():
            for one in record.extents:
                lent = members.setdefault(one.member, {})
                lent[record.terms.tenant] = lent.get(record.terms.tenant, 0) + one.bytes
        for order in self.orders.values():
            lent = members.setdefault(order.member, {})
            lent[order.tenant] = lent.get(order.tenant, 0) + order.bytes
        accounts = {member: account.lent.get("dram", {}) for member, account in self.accounts.items()}
        assert {member: lent for member, lent in accounts.items() if lent} == members
        for tenant in TENANTS:
            assert self.used(tenant) == sum(lent.get(tenant, 0) for lent in members.values())

    def used(self, tenant: int) -> int:
        account = self.tenants.get(tenant)
        return account.lent.get("dram", 0) if account else 0

    def free(self) -> int:
        return sum(
            max(0, record.media["dram"] - sum(self.accounts[member].lent.get("dram", {}).values()))
            if member in self.accounts
            else record.media["dram"]
            for member, record in self.records.items()
            if not record.draining
        )

    def reserved(self) -> int:
        return sum(max(0, one.guaranteed.get("dram", 0) - self.used(tenant)) for tenant, one in POLICIES.items())


class FaultyRegistry(Registry):
    """The registry as one manager reaches it."""

    def __init__(self, world: World, raw: MemoryRegistry) -> None:
        self.world, self.raw, self.address = world, raw, raw.address

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        self.world.between(self)
        self.world.fail()
        return self.raw.range(*prefixes)

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        world = self.world
        world.between(self)
        world.fail(uncertain=True)
        done = self.raw.commit(conditions, operations)
        world.fail(uncertain=True)
        world.between(self)
        return done

    def watch(self, prefix: str, after: int) -> Watch:
        return FaultyWatch(self, self.raw.watch(prefix, after))

    def get(self, key: str, *, timeout: float | None = None) -> None:
        raise NotImplementedError

    check = compact = grant = keep_alive = remaining = revoke = get  # type: ignore[assignment]

    def close(self) -> None:
        pass


class FaultyWatch(Watch):
    """A watch that lags behind."""

    def __init__(self, registry: FaultyRegistry, watch: Watch) -> None:
        self.registry, self.watch = registry, watch

    def next(self, timeout: float) -> Changes:
        world = self.registry.world
        if world.is_faulty and world.random.random() < 0.5:
            return Changes(0, ())
        world.fail()
        return self.watch.next(0)

    def close(self) -> None:
        pass


class Manager:
    """A manager's process, with a wall clock of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ahead = 0.0
        self.is_busy = False
        self.begin()

    def begin(self) -> None:
        """Start the process, without anything that it knew before."""
        clock = Clock(lambda: self.world.time + self.ahead, lambda: self.world.time, self.sleep)
        self.engine = Engine(
            FaultyRegistry(self.world, self.world.truth.registry), clock, lambda: POLICIES, 1000.0, self.world.random
        )

    def sleep(self, seconds: float) -> None:
        self.world.time += 0.001
        if self.engine.book._waiting() and not self.engine.book.is_first:
            raise WaitError

    def ask(self, requests: Sequence[Request]) -> list[Outcome | Exception | None]:
        """Outcomes of the requests; None for those whose outcome this manager's client never learns."""
        self.is_busy = True
        try:
            if self.world.random.random() < 0.5 or not self.engine.is_current:
                self.engine.follow()
                self.engine._followed = -1e9
            outcomes: list[Outcome | Exception | None] = []
            while len(outcomes) < len(requests):
                outcomes += self.engine.settle(requests[len(outcomes) :])
            return outcomes
        except RegistryAwayError:
            return [None] * len(requests)
        except CrashError:
            self.begin()
            return [None] * len(requests)
        finally:
            self.is_busy = False

    def is_current(self) -> bool:
        """True if the manager knows all entries as they are."""
        entries = self.world.truth.registry.entries
        return self.engine.book.view.revisions() == {key: one.revision for key, one in entries.items()}


class World:
    """Everything, from one seed."""

    def __init__(self, seed: int, *, managers: int = 3, members: int = 5, members_change: bool = True) -> None:
        self.random = random.Random(seed)
        self.members_change = members_change
        self.time = 1000.0
        self.is_faulty = True
        self.depth = 0
        self.truth = Truth()
        self.members = [f"{number:032x}" for number in range(1, members + 1)]
        for number, member in enumerate(self.members):
            record = MemberRecord(
                addresses=(f"tcp://10.0.0.{number}:7471",),
                labels={"rack": f"r{number // 2}", "row": f"w{number // 4}"},
                media={"dram": self.random.randint(4, 20) * G},
            )
            self.write(
                Put(RECORD + member, encode_member(record)), Put(ALIVE + member, encode_member(AliveRecord(ready=True)))
            )
        self.managers = [Manager(self) for _ in range(managers)]
        self.asked: dict[tuple[int, str], LeaseRequest] = {}
        self.unanswered: list[LeaseRequest] = []
        self.known: dict[str, LeaseRecord] = {}
        self.offers_checked = 0

    def write(self, *operations: Operation) -> None:
        assert self.truth.registry.commit([], operations).succeeded

    # Faults

    def between(self, registry: FaultyRegistry) -> None:
        """Let another manager work, or let time pass."""
        if not self.is_faulty or self.depth >= 2 or self.random.random() > 0.25:
            return
        idle = [one for one in self.managers if not one.is_busy]
        self.depth += 1
        try:
            if idle:
                self.act(self.random.choice(idle))
        finally:
            self.depth -= 1

    def fail(self, *, uncertain: bool = False) -> None:
        """Raise an error now and then."""
        if not self.is_faulty:
            return
        chance = self.random.random()
        if chance < 0.02:
            raise RegistryAwayError("the registry is away", uncertain=uncertain)
        if chance < 0.03:
            raise CrashError

    # Steps

    def step(self) -> None:
        """Let a manager, a node, a person or a clock do something."""
        chance = self.random.random()
        if chance < 0.75:
            self.act(self.random.choice([one for one in self.managers if not one.is_busy]))
        elif chance < 0.85:
            self.time += self.random.choice([0.5, 2.0, 20.0])
        elif chance < 0.88:
            manager = self.random.choice(self.managers)
            manager.ahead = self.random.choice([0.0, 0.0, 3600.0, -3600.0, 3.0])
        elif chance < 0.95:
            self.upkeep(self.random.choice(self.managers))
        elif self.members_change:
            self.change_member()

    def upkeep(self, manager: Manager) -> None:
        manager.is_busy = True
        try:
            manager.engine.follow()
            manager.engine.yield_turn()
            manager.engine.upkeep()
        except (RegistryAwayError, WaitError):
            pass
        except CrashError:
            manager.begin()
        finally:
            manager.is_busy = False

    def change_member(self) -> None:
        """Drain a member or not, or let it lend more or less."""
        self.truth.has_changed_members = True
        member = self.random.choice(self.members)
        record = self.truth.records[member]
        draining = self.random.random() < 0.3
        changed = MemberRecord(
            addresses=record.addresses,
            labels=record.labels,
            media={"dram": self.random.randint(4, 20) * G},
            draining=draining,
        )
        self.write(Put(RECORD + member, encode_member(changed)))

    def act(self, manager: Manager) -> None:
        """Let clients and nodes ask a manager, several in one transaction."""
        requests = [self.request() for _ in range(self.random.choice([1, 1, 2, 5]))]
        try:
            outcomes = manager.ask(requests)
        except WaitError:
            outcomes = [None] * len(requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            self.learn(request, outcome)
        last = outcomes[-1]
        if isinstance(last, Refused) and last.offers and self.depth == 0:
            self.check_offers(manager, requests[-1], last)

    def learn(self, request: Request, outcome: Outcome | None) -> None:
        if isinstance(request, Grant):
            if outcome is None:
                self.unanswered.append(request.request)
            elif request.request in self.unanswered:
                self.unanswered.remove(request.request)
        if isinstance(outcome, Granted):
            self.known[outcome.lease] = outcome.record
            for one in outcome.record.extents:
                extent, epoch = (one.member, one.number), outcome.record.epoch
                assert epoch < self.truth.ended.get(extent, 1 << 62), "the order is not later than the ticket"
                self.truth.named[extent] = max(epoch, self.truth.named.get(extent, 0))

    def check_offers(self, manager: Manager, request: Request, refused: Refused) -> None:
        """Ask for each offer at once, if the manager was not out of date."""
        if not manager.is_current() or manager.is_busy:
            return
        self.is_faulty = False
        for offer in refused.offers:
            if isinstance(request, Grant):
                assert offer.bytes < request.request.bytes + G or offer.copies <= request.request.copies
                again: Request = Grant(offer)
            else:
                assert isinstance(request, Resize)
                again = Resize(request.lease, request.tenant, request.epoch, offer.bytes)
            try:
                (outcome,) = manager.ask([again])
            except WaitError:
                break
            assert isinstance(outcome, Granted), (refused, outcome)
            assert outcome.record.terms.bytes == offer.bytes
            self.offers_checked += 1
            if isinstance(request, Resize):
                self.known[outcome.lease] = outcome.record
                break
            manager.ask([End(outcome.lease)])
            for order in list(self.truth.orders.values()):
                if order.lease == outcome.lease:
                    manager.ask([Confirm(order.member, order.lease, order.extent)])
        self.is_faulty = True

    def request(self) -> Request:
        """Choose what a client or a node asks."""
        pick, chance = self.random.choice, self.random.random()
        if chance < 0.3 or not self.known:
            if self.unanswered and self.random.random() < 0.7:
                return Grant(pick(self.unanswered))
            terms = LeaseRequest(
                tenant=pick(TENANTS),
                holder="trainer",
                bytes=self.random.randint(1, 12 * G),
                request=f"{self.random.randrange(1 << 40):x}",
                redundancy=pick(["none", "none", "copies:2", "copies:3"]),
                spread=pick([(), (), ("rack",), ("row", "rack")]),
                reclaim_ms=pick([100, 1000, 60_000]),
                ttl=pick([1.0, 10.0, 1000.0]),
            )
            return Grant(terms)
        lease = pick(sorted(self.known))
        record = self.known[lease]
        tenant = pick([None, record.terms.tenant])
        extents = tuple(
            (one.member, one.number) for one in record.extents if self.random.random() < 0.4 or one.reclaim_by
        )
        if chance < 0.5:
            return Renew(lease, tenant)
        if chance < 0.6:
            return Resize(lease, tenant, record.epoch, self.random.randint(1, 16 * G))
        if chance < 0.67:
            return Replace(lease, tenant, record.epoch, extents)
        if chance < 0.74:
            return Release(lease, tenant, record.epoch, extents)
        if chance < 0.8 or not self.truth.orders:
            return End(lease, tenant)
        order = self.truth.orders[pick(sorted(self.truth.orders))]
        return Confirm(order.member, order.lease, order.extent)

    # The end

    def finish(self, manager: Manager, requests: Sequence[Request]) -> list[Outcome | Exception | None]:
        """Ask until it is the manager's turn."""
        for _ in range(20):
            try:
                return manager.ask(requests)
            except WaitError:
                self.time += 0.1
                for one in self.managers:
                    if one is not manager:
                        one.engine.follow()
                        one.engine.yield_turn()
        raise AssertionError("the manager never had its turn")

    def end(self) -> None:
        """Let everything work again, and check that all requests are answered and all memory comes back."""
        self.is_faulty = False
        for manager in self.managers:
            manager.ahead = 0.0
        for _ in range(10):
            self.time += 20.0  # a manager that ended has lost its turn by then
            for manager in self.managers:
                self.upkeep(manager)
        for terms in list(self.unanswered):
            (outcome,) = self.finish(self.random.choice(self.managers), [Grant(terms)])
            assert outcome is not None
            assert not isinstance(outcome, Exception)
            self.learn(Grant(terms), outcome)
        assert not self.unanswered
        self.time += 10_000.0
        for _ in range(200):
            self.time += 2000.0
            manager = self.random.choice(self.managers)
            self.upkeep(manager)
            orders = list(self.truth.orders.values())[:30]
            self.finish(manager, [Confirm(order.member, order.lease, order.extent) for order in orders])
            if not self.truth.leases and not self.truth.orders:
                break
        assert not self.truth.leases
        assert not self.truth.orders
        assert all(account.lent.get("dram", {}) == {} for account in self.truth.accounts.values())
        assert all(self.truth.used(tenant) == 0 for tenant in TENANTS)
