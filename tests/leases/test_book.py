"""Decisions of one manager, and managers that get in each other's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from farpool.abc.registry import Commit, Condition, Delete, Operation, Put
from farpool.cluster.leases import changes, offers
from farpool.cluster.leases.book import CONFLICTS_MAX, TURN_S, Book
from farpool.cluster.leases.changes import CLOCK_TOLERANCE_S
from farpool.cluster.leases.draft import Moment
from farpool.cluster.leases.engine import Clock, Engine
from farpool.cluster.leases.offers import Lender, in_order, place
from farpool.cluster.leases.records import (
    BURST,
    EXTENTS_MAX,
    GRAIN_BYTES,
    TENANT,
    TURNS,
    Extent,
    LeaseRequest,
    MemberAccount,
    TenantAccount,
    account_key,
    check_request,
    encode,
    lease_id,
    lease_key,
)
from farpool.cluster.leases.requests import (
    Confirm,
    Done,
    End,
    Grant,
    Granted,
    Outcome,
    Reason,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
    TenantLimits,
)
from farpool.cluster.leases.upkeep import FORGOTTEN_S, GONE_S
from farpool.cluster.leases.view import PREFIXES
from farpool.cluster.members.records import ALIVE, RECORD, AliveRecord, MemberRecord
from farpool.cluster.members.records import encode as encode_member
from farpool.errors import ConfigError, RegistryAwayError, RegistryDamagedError
from tests.leases.memory import MemoryRegistry

G = GRAIN_BYTES
A, B, C = (f"{number:032x}" for number in (10, 11, 12))


class Pool:
    """A registry with members, and a clock that the test sets."""

    def __init__(self, **members: int) -> None:
        self.registry = MemoryRegistry()
        self.now = 1_000_000.0
        self.tick = 0.0
        self.policies: dict[int, TenantLimits] | None = None
        for member, free in members.items():
            self.lend(member.removeprefix("m"), free)

    def lend(self, member: str, size: int, *, draining: bool = False, rack: str = "") -> None:
        record = MemberRecord(
            addresses=(f"tcp://{int(member, 16)}.example:7471",),
            labels={"rack": rack or member},
            media={"dram": size},
            draining=draining,
        )
        alive = Put(ALIVE + member, encode_member(AliveRecord(ready=True)))
        assert self.registry.commit([], [Put(RECORD + member, encode_member(record)), alive]).succeeded

    def manager(self, registry: MemoryRegistry | None = None, **settings: float) -> Engine:
        clock = Clock(lambda: self.now, lambda: self.tick, self.sleep)
        engine = Engine(registry or self.registry, clock, lambda: self.policies, settings.get("timeout", 100.0))
        engine.follow()
        return engine

    def sleep(self, seconds: float) -> None:
        self.tick += seconds
        self.now += seconds

    def ask(self, engine: Engine, *requests: Request) -> list[Outcome]:
        engine.follow()
        outcomes: list[Outcome | Exception] = []
        while len(outcomes) < len(requests):
            outcomes += engine.settle(requests[len(outcomes) :])
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes  # type: ignore[return-value]

    def upkeep(self, engine: Engine) -> int:
        engine.follow()
        return engine.upkeep()


def terms(size: int, **fields: object) -> LeaseRequest:
    given = {"tenant": 1, "holder": "trainer", "bytes": size, "request": f"r{size}"} | fields
    return LeaseRequest(**given)  # type: ignore[arg-type]


def granted(outcome: Outcome) -> Granted:
    assert isinstance(outcome, Granted), outcome
    return outcome


def refused(outcome: Outcome, reason: Reason) -> Refused:
    assert isinstance(outcome, Refused), outcome
    assert outcome.reason is reason
    return outcome


def pool_of(*sizes: int) -> tuple[Pool, Engine]:
    pool = Pool()
    for member, size in zip((A, B, C), sizes, strict=False):
        pool.lend(member, size)
    return pool, pool.manager()


def test_a_lease_has_whole_pages_and_its_number_follows_from_its_request() -> None:
    pool, manager = pool_of(10 * G)
    (first,) = pool.ask(manager, Grant(terms(G + 1)))
    assert granted(first).record.terms.bytes == 2 * G
    assert granted(first).record.extents == (Extent(A, 1, 2 * G),)
    again = pool.ask(pool.manager(), Grant(terms(G + 1)))
    assert again == [first]
    refused(pool.ask(manager, Grant(terms(G + 1, medium="nvme")))[0], Reason.REQUEST)
    other = granted(pool.ask(manager, Grant(terms(G + 1, tenant=2)))[0])
    assert other.lease != granted(first).lease


def test_a_refusal_names_the_largest_lease_and_weaker_terms() -> None:
    pool, manager = pool_of(4 * G, 4 * G)
    pool.lend(C, 9 * G, rack=A)
    outcome = refused(pool.ask(manager, Grant(terms(8 * G, redundancy="copies:2", spread=("rack",))))[0], Reason.MEMORY)
    assert [(one.bytes, one.redundancy, one.spread) for one in outcome.offers] == [
        (4 * G, "copies:2", ("rack",)),
        (8 * G, "copies:2", ()),
    ]
    assert "8" in outcome.text
    everything = refused(pool.ask(manager, Grant(terms(18 * G)))[0], Reason.MEMORY)
    assert [one.bytes for one in everything.offers] == [17 * G]
    assert refused(pool.ask(manager, Grant(terms(G, medium="nvme")))[0], Reason.MEMORY).offers == ()


def test_a_tenant_has_its_guarantee_and_never_more_than_its_burst() -> None:
    pool, manager = pool_of(10 * G)
    pool.policies = {
        1: TenantLimits(guaranteed={"dram": 4 * G}),
        2: TenantLimits(most={"dram": 8 * G}),
        3: TenantLimits(most={"dram": 2 * G}),
    }
    refused(pool.ask(manager, Grant(terms(G, tenant=9)))[0], Reason.TENANT)
    assert refused(pool.ask(manager, Grant(terms(3 * G, tenant=3)))[0], Reason.QUOTA).offers[0].bytes == 2 * G
    # Four of ten pages are guaranteed to tenant 1.
    assert refused(pool.ask(manager, Grant(terms(7 * G, tenant=2)))[0], Reason.QUOTA).offers[0].bytes == 6 * G
    granted(pool.ask(manager, Grant(terms(6 * G, tenant=2)))[0])
    granted(pool.ask(manager, Grant(terms(4 * G)))[0])


def test_a_tenant_does_not_use_up_the_leases_of_all_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LEASES_MAX", 20)
    pool, manager = pool_of(100 * G)
    pool.policies = {1: TenantLimits(), 2: TenantLimits()}

    def grants(tenant: int) -> int:
        return sum(
            isinstance(pool.ask(manager, Grant(terms(G, request=f"r{number}", tenant=tenant)))[0], Granted)
            for number in range(20)
        )

    assert grants(1) == 10
    assert grants(2) == 5
    for lease in list(manager.book.view.leases)[:6]:
        pool.ask(manager, End(lease))
    assert refused(pool.ask(manager, Grant(terms(G, tenant=9)))[0], Reason.TENANT)
    granted(pool.ask(manager, Grant(terms(2 * G, tenant=1)))[0])


def test_bytes_count_as_lent_until_the_node_confirms_their_end() -> None:
    pool, manager = pool_of(4 * G)
    lease = granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    (ended,) = pool.ask(manager, End(lease.lease, 1))
    assert isinstance(ended, Done)
    (order,) = ended.orders
    assert order.epoch > lease.record.epoch
    assert pool.ask(manager, End(lease.lease)) == [Done()]
    refused(pool.ask(manager, Grant(terms(G)))[0], Reason.MEMORY)
    pool.ask(manager, Confirm(order.member, order.lease, order.extent))
    assert pool.ask(manager, Confirm(order.member, order.lease, order.extent)) == [Done()]
    later = granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    assert later.record.extents[0].number == 2
    assert later.record.epoch >= order.epoch


def test_a_request_gets_its_new_lease_only_after_the_end_of_the_old_one_is_written() -> None:
    pool, manager = pool_of(9 * G)
    lease = granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    ended, again = pool.ask(manager, End(lease.lease), Grant(terms(4 * G)))
    assert isinstance(ended, Done)
    assert granted(again).record.epoch >= ended.orders[0].epoch


def test_a_lease_that_is_made_and_ended_in_one_transaction_begins_again_above_its_orders() -> None:
    pool, manager = pool_of(9 * G)
    number = lease_id(1, f"r{4 * G}")
    _, ended, again = pool.ask(manager, Grant(terms(4 * G)), End(number), Grant(terms(4 * G)))
    assert isinstance(ended, Done)
    assert granted(again).record.epoch >= ended.orders[0].epoch


def test_an_order_is_above_each_epoch_that_a_holder_was_told_with_its_extent() -> None:
    pool, manager = pool_of(9 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G)))[0])
    pool.ask(manager, Resize(lease.lease, 1, lease.record.epoch, 6 * G))
    # A program releases a part, renews the lease and ends it at once. A node refuses an order if a ticket of its epoch
    # names the extent.
    released, renewed, ended = pool.ask(
        manager, Release(lease.lease, 1, lease.record.epoch, ((A, 1),)), Renew(lease.lease, 1), End(lease.lease, 1)
    )
    assert isinstance(ended, Done)
    for told in (granted(released), granted(renewed)):
        assert [one.number for one in told.record.extents] == [order.extent for order in ended.orders]
        assert all(order.epoch > told.record.epoch for order in ended.orders)


def test_epochs_in_a_registry_that_was_restored_or_wiped_are_above_those_that_nodes_know() -> None:
    pool, manager = pool_of(20 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G)))[0])
    grown = granted(pool.ask(manager, Resize(lease.lease, 1, lease.record.epoch, 6 * G))[0])
    backup = list(pool.registry.entries.values())
    for _ in range(50):
        pool.sleep(0.001)
        pool.ask(manager, Renew(lease.lease))
    shrunk = granted(pool.ask(manager, Resize(lease.lease, 1, grown.record.epoch, 2 * G))[0])
    assert shrunk.record.epoch > grown.record.epoch
    pool.sleep(1.0)
    for entries in (backup, [one for one in backup if one.key.startswith("members/")]):
        pool.registry = MemoryRegistry()
        pool.registry.commit([], [Put(one.key, one.value) for one in entries])
        manager = pool.manager()
        # The nodes still have the extents, and know the later epoch.
        again = granted(pool.ask(manager, Grant(terms(2 * G)))[0])
        (ended,) = pool.ask(manager, End(again.lease))
        assert isinstance(ended, Done)
        assert all(order.epoch > shrunk.record.epoch for order in ended.orders)
        for order in ended.orders:
            pool.ask(manager, Confirm(order.member, order.lease, order.extent))
        # Another manager, which has just begun and whose clock is behind, has not seen the order.
        pool.now -= 3600.0
        begun = granted(pool.ask(pool.manager(), Grant(terms(2 * G)))[0])
        assert begun.record.epoch >= max(order.epoch for order in ended.orders)
        pool.now += 3600.0


def test_a_renewal_moves_the_expiry_and_never_back() -> None:
    pool, manager = pool_of(4 * G)
    lease = granted(pool.ask(manager, Grant(terms(G, ttl=100.0)))[0])
    assert lease.record.expires == pool.now + 100.0
    pool.now += 50.0
    assert granted(pool.ask(manager, Renew(lease.lease, 1))[0]).record.expires == pool.now + 100.0
    pool.now -= 3600.0
    assert granted(pool.ask(manager, Renew(lease.lease, 1))[0]).record.expires == pool.now + 3700.0
    refused(pool.ask(manager, Renew(lease.lease, 2))[0], Reason.UNKNOWN)
    refused(pool.ask(manager, Renew("0" * 32, 1))[0], Reason.UNKNOWN)


def test_an_expired_lease_lives_until_a_manager_has_seen_it_expire_by_both_clocks() -> None:
    pool, manager = pool_of(4 * G)
    lease = granted(pool.ask(manager, Grant(terms(G, ttl=100.0)))[0])
    pool.now += 3600.0  # only the wall clock jumped
    assert pool.upkeep(manager) == 0
    pool.tick += 100.0 + CLOCK_TOLERANCE_S + 1
    assert pool.upkeep(pool.manager()) == 0  # it has just begun, so it has not seen the lease for long enough
    granted(pool.ask(manager, Renew(lease.lease))[0])
    assert pool.upkeep(manager) == 0
    pool.sleep(100.0 + CLOCK_TOLERANCE_S + 1)
    assert pool.upkeep(manager) == 1
    refused(pool.ask(manager, Renew(lease.lease))[0], Reason.UNKNOWN)
    (order,) = manager.book.view.orders(A)
    assert "expired" in order.reason


def test_a_manager_whose_clock_was_far_ahead_keeps_no_memory_for_ever() -> None:
    pool, manager = pool_of(G)
    pool.now += 1e9
    lease = granted(pool.ask(pool.manager(), Grant(terms(G, ttl=100.0)))[0])
    pool.lend(B, 4 * G)
    other = granted(pool.ask(pool.manager(), Grant(terms(2 * G, ttl=1000.0, reclaim_ms=1000)))[0])
    pool.lend(B, 4 * G, draining=True)
    pool.upkeep(pool.manager())
    pool.now -= 1e9
    for _ in range(10):
        manager.follow()
        pool.sleep(CLOCK_TOLERANCE_S)
        granted(pool.ask(manager, Renew(lease.lease))[0])
    pool.upkeep(manager)
    # Its holder did not release the extent in time.
    refused(pool.ask(manager, Renew(other.lease))[0], Reason.UNKNOWN)
    granted(pool.ask(manager, Renew(lease.lease))[0])
    pool.sleep(100.0)
    assert pool.upkeep(manager) == 0
    pool.sleep(CLOCK_TOLERANCE_S + 1)
    assert pool.upkeep(manager) == 1
    refused(pool.ask(manager, Renew(lease.lease))[0], Reason.UNKNOWN)


def test_a_lease_grows_and_shrinks_while_it_is_in_use() -> None:
    pool, manager = pool_of(4 * G, 4 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G)))[0])
    first = lease.record.epoch
    grown = granted(pool.ask(manager, Resize(lease.lease, 1, first, 5 * G))[0])
    assert grown.record.epoch == first  # nothing was taken away
    assert sum(one.bytes for one in grown.record.extents) == 5 * G == grown.record.terms.bytes
    more = refused(pool.ask(manager, Resize(lease.lease, 1, first, 9 * G))[0], Reason.MEMORY)
    assert [one.bytes for one in more.offers] == [8 * G]
    shrunk = granted(pool.ask(manager, Resize(lease.lease, 1, first, 2 * G))[0])
    assert shrunk.record.epoch > first
    assert shrunk.record.extents == lease.record.extents
    stale = refused(pool.ask(manager, Resize(lease.lease, 1, first, 4 * G))[0], Reason.EPOCH)
    assert stale.granted == shrunk
    # The same request again, after its reply was lost.
    assert pool.ask(manager, Resize(lease.lease, 1, first, 2 * G)) == [shrunk]


def test_an_order_is_later_than_each_answer_that_names_its_extent() -> None:
    pool, manager = pool_of(2 * G, 2 * G)
    lease = granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    first = lease.record.extents[0]
    release = Release(lease.lease, 1, lease.record.epoch, ((first.member, first.number),))
    # Both wait at the same time, and so could be in one transaction.
    released, ended = pool.ask(manager, release, End(lease.lease, 1))
    assert isinstance(ended, Done)
    [order] = ended.orders
    assert [one.number for one in granted(released).record.extents] == [order.extent]
    assert order.epoch > granted(released).record.epoch


def test_copies_are_replaced_before_they_are_released() -> None:
    pool, manager = pool_of(4 * G, 4 * G, 4 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G, redundancy="copies:2")))[0])
    old = lease.record.extents[0]
    leaving = ((old.member, old.number),)
    epoch = lease.record.epoch
    kept = refused(pool.ask(manager, Release(lease.lease, 1, epoch, leaving))[0], Reason.REDUNDANCY)
    assert kept.granted == lease
    both = granted(pool.ask(manager, Replace(lease.lease, 1, epoch, leaving))[0])
    assert len({one.member for one in both.record.extents}) == 3
    assert pool.ask(manager, Replace(lease.lease, 1, epoch, leaving)) == [both]
    after = granted(pool.ask(manager, Release(lease.lease, 1, epoch, leaving))[0])
    assert len(after.record.extents) == 2
    assert after.record.terms.bytes == 2 * G
    assert after.record.epoch > epoch
    assert {one.copy for one in after.record.extents} == {0, 1}


def test_a_member_that_drains_gets_its_memory_back_in_time() -> None:
    pool, manager = pool_of(4 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G, ttl=1e5, reclaim_ms=20_000)))[0])
    pool.lend(A, 4 * G, draining=True)
    pool.lend(B, 4 * G)
    assert pool.upkeep(manager) == 1
    told = granted(pool.ask(manager, Renew(lease.lease))[0])
    assert [one.reclaim_by for one in told.wanted_back] == [pool.now + 20.0]
    assert told.record.epoch == lease.record.epoch
    assert pool.upkeep(manager) == 0
    pool.sleep(20.0 + CLOCK_TOLERANCE_S + 1)
    granted(pool.ask(manager, Renew(lease.lease))[0])
    assert pool.upkeep(manager) == 1  # the holder did not release it
    refused(pool.ask(manager, Renew(lease.lease))[0], Reason.UNKNOWN)
    assert [order.bytes for order in manager.book.view.orders(A)] == [2 * G]


def test_orders_to_a_member_that_was_removed_do_not_count_for_ever() -> None:
    pool, manager = pool_of(4 * G)
    pool.policies = {1: TenantLimits(most={"dram": 4 * G})}
    lease = granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    pool.registry.commit([], [Delete(RECORD + A), Delete(ALIVE + A)])
    pool.ask(manager, End(lease.lease))
    pool.lend(B, 4 * G)
    assert pool.upkeep(manager) == 0
    refused(pool.ask(manager, Grant(terms(4 * G)))[0], Reason.QUOTA)
    pool.sleep(GONE_S)
    # It is there again for a moment.
    pool.lend(A, 4 * G)
    assert pool.upkeep(manager) == 0
    assert pool.ask(manager, Confirm(A, lease.lease, 1, for_gone=True)) == [Done()]
    assert list(manager.book.view.orders(A))
    pool.registry.commit([], [Delete(RECORD + A), Delete(ALIVE + A)])
    assert pool.upkeep(manager) == 0
    pool.sleep(GONE_S + 1)
    assert pool.upkeep(manager) == 1
    assert pool.upkeep(manager) == 0
    granted(pool.ask(manager, Grant(terms(4 * G)))[0])
    # The order is still there for a node that comes back late, but not for ever.
    (order,) = manager.book.view.orders(A)
    assert (order.extent, order.bytes) == (1, 0)
    pool.now += FORGOTTEN_S
    assert pool.upkeep(manager) == 1
    assert not list(manager.book.view.orders(A))
    assert pool.registry.entries[account_key(A)].value == encode(
        MemberAccount(lent={"dram": {}}, next=2, epoch=order.epoch)
    )


def test_a_member_that_lends_less_asks_for_no_more_than_it_needs() -> None:
    pool, manager = pool_of(8 * G)
    leases = [
        granted(pool.ask(manager, Grant(terms(2 * G, request=f"r{number}", reclaim_ms=1000 * (4 - number))))[0])
        for number in range(4)
    ]
    pool.lend(A, 5 * G)
    assert pool.upkeep(manager) == 2
    wanted = [granted(pool.ask(manager, Renew(one.lease))[0]).wanted_back for one in leases]
    assert [len(one) for one in wanted] == [0, 0, 1, 1]  # those that return memory quickly
    pool.ask(manager, End(leases[3].lease))
    assert pool.upkeep(manager) == 0


def test_requests_that_do_not_fit_into_one_transaction_go_into_the_next_ones() -> None:
    pool, manager = pool_of(1000 * G)
    commits: list[int] = []
    pool.registry.observe = lambda revision, operations: commits.append(len(operations))
    outcomes = pool.ask(manager, *[Grant(terms(G, request=f"r{number}")) for number in range(250)])
    assert all(isinstance(one, Granted) for one in outcomes)
    assert len(commits) == 3
    assert max(commits) <= 100
    numbers = [granted(one).record.extents[0].number for one in outcomes]
    assert numbers == list(range(1, 251))


def test_a_lease_of_the_most_extents_fits_into_one_transaction() -> None:
    pool = Pool()
    for number in range(EXTENTS_MAX + 1):
        pool.lend(f"{number + 1:032x}", G)
    pool.policies = {1: TenantLimits(), 2: TenantLimits(guaranteed={"dram": G})}
    manager = pool.manager()
    lease = granted(pool.ask(manager, Grant(terms(EXTENTS_MAX * G)))[0])
    assert len(lease.record.extents) == EXTENTS_MAX
    assert isinstance(pool.ask(manager, End(lease.lease))[0], Done)


def test_a_damaged_entry_fails_only_the_requests_that_need_it() -> None:
    pool, manager = pool_of(4 * G, 4 * G)
    lease = granted(pool.ask(manager, Grant(terms(2 * G)))[0])
    other = granted(pool.ask(manager, Grant(terms(G)))[0])
    pool.registry.commit([], [Put(lease_key(lease.lease), b'{"terms":7}')])
    manager.follow()
    with pytest.raises(RegistryDamagedError, match=lease.lease):
        pool.ask(manager, Renew(lease.lease))
    granted(pool.ask(manager, Renew(other.lease))[0])
    # A member whose account cannot be read lends nothing more.
    pool.registry.commit([], [Put(account_key(A), b"?"), Put(account_key(B), b'{"lent":{},"next":1,"format":2}')])
    refused(pool.ask(manager, Grant(terms(G, request="more")))[0], Reason.MEMORY)


def test_requests_that_cannot_be_kept_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    for number in range(100):
        pool.lend(f"{number + 1:032x}", (100 + number) * G)
    manager = pool.manager()
    tries = 0

    def counted(*arguments: object) -> object:
        nonlocal tries
        tries += 1
        return place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(offers, "place", counted)
    monkeypatch.setattr(changes, "place", counted)
    requests = [Grant(terms(1 << 50, request=f"r{number}", redundancy="copies:3")) for number in range(40)]
    outcomes = [refused(one, Reason.MEMORY) for one in pool.ask(manager, *requests, Grant(terms(G)))[:-1]]
    assert tries < 200
    (most, *_) = outcomes[0].offers
    granted(pool.ask(manager, Grant(most))[0])


def test_entries_of_later_releases_and_of_strangers_are_left_alone() -> None:
    pool, manager = pool_of(9 * G)
    pool.policies = {1: TenantLimits(guaranteed={"dram": G}), 2: TenantLimits(guaranteed={"dram": G})}
    lease = granted(pool.ask(manager, Grant(terms(G)))[0])
    later = msgspec.structs.replace(lease.record, features=1)
    pool.registry.commit([], [Put(lease_key(lease.lease), encode(later)), Put(TENANT + "x", encode(TenantAccount()))])
    with pytest.raises(RegistryDamagedError, match="features 0x1"):
        pool.ask(manager, Renew(lease.lease))
    granted(pool.ask(manager, Grant(terms(2 * G)))[0])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bytes": 0}, "bytes is 0"),
        ({"tenant": -1}, "tenant is -1"),
        ({"holder": "x" * 65}, "holder"),
        ({"redundancy": "copies:0"}, "copies:0"),
        ({"redundancy": "copies:x"}, "copies:x"),
        ({"redundancy": "3"}, "redundancy is '3'"),
        ({"tenant": 1 << 32}, "tenant is"),
        ({"holder": "x" * 65}, "holder has 65"),
        ({"spread": ("\ud800",)}, "UTF-8"),
        ({"request": "\udfff"}, "UTF-8"),
        ({"spread": ("",)}, "spread"),
        ({"ttl": float("nan")}, "ttl is nan"),
        ({"ttl": 0.1}, "ttl is 0.1"),
        ({"reclaim_ms": 0}, "reclaim_ms"),
        ({"bandwidth_share": 0.0}, "bandwidth_share"),
        ({"rights": "x"}, "rights"),
    ],
)
def test_terms_that_no_pool_could_keep_are_an_error(fields: dict[str, object], text: str) -> None:
    good = terms(G)
    check_request(good)
    with pytest.raises(ConfigError, match=text):
        check_request(msgspec.structs.replace(good, **fields))


def test_a_request_that_no_registry_takes_fails_alone() -> None:
    pool, manager = pool_of(20 * G)
    first, second, third = (granted(pool.ask(manager, Grant(terms(size * G)))[0]) for size in (1, 2, 3))
    requests: list[Request] = [
        Grant(terms(G, request="\ud800")),
        Renew("\ud800"),
        Renew("x\0y"),
        End(first.lease, reason="\ud800"),
        Renew(second.lease),
        End(third.lease, reason="x" * (1 << 20)),
    ]
    outcomes: list[Outcome | Exception] = []
    while len(outcomes) < len(requests):
        outcomes += manager.settle(requests[len(outcomes) :])
    assert [type(one) for one in outcomes] == [UnicodeEncodeError, Refused, Refused, UnicodeEncodeError, Granted, Done]
    (order,) = manager.book.view.orders(A)
    assert len(order.reason) == 256  # as much as a signed order may have
    commit = pool.registry.commit

    def picky_commit(conditions: Sequence[Condition], operations: Sequence[Operation], **settings: float) -> Commit:
        if any(one.key == lease_key(first.lease) for one in operations):
            raise ConfigError("the value is too long")
        return commit(conditions, operations)

    pool.registry.commit = picky_commit  # type: ignore[method-assign, assignment]
    outcomes = []
    while len(outcomes) < 3:
        outcomes += manager.settle([Renew(second.lease), Renew(first.lease), Renew(second.lease)][len(outcomes) :])
    assert [type(one) for one in outcomes] == [Granted, ConfigError, Granted]


# Several managers


class Rival(MemoryRegistry):
    """The registry as a manager reaches it while something else happens before each of its transactions."""

    def __init__(self, raw: MemoryRegistry, before: Callable[[], None]) -> None:
        self.raw, self.before, self.address, self.commits = raw, before, "memory", 0

    def range(self, *prefixes: str, timeout: float | None = None):  # type: ignore[no-untyped-def]
        return self.raw.range(*prefixes)

    def watch(self, prefix: str, after: int):  # type: ignore[no-untyped-def]
        return self.raw.watch(prefix, after)

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        self.commits += 1
        self.before()
        return self.raw.commit(conditions, operations)


class WaitError(Exception):
    """The other manager waits for its turn."""


def test_a_manager_that_others_always_overtake_gets_its_turn() -> None:
    pool, fast = pool_of(1000 * G)
    count = 0

    def overtake() -> None:
        nonlocal count
        count += 1
        fast.follow()
        decision = fast._decide([Grant(terms(G, request=f"fast{count}"))])
        if not decision.wait:
            fast._commit(decision, 1.0)

    slow_side = Rival(pool.registry, overtake)
    slow = pool.manager(slow_side)
    granted(pool.ask(slow, Grant(terms(G, request="slow")))[0])
    # Its first transactions fail, then it puts its name down, the fast manager once more after it, and it has its turn.
    assert CONFLICTS_MAX < slow_side.commits <= CONFLICTS_MAX + 4
    fast.follow()
    granted(pool.ask(fast, Grant(terms(G, request="after")))[0])


def test_a_manager_that_ended_during_its_turn_is_passed_over() -> None:
    pool, manager = pool_of(8 * G)
    ended = pool.manager()
    ended.book.conflicts = CONFLICTS_MAX
    assert ended._commit(ended._decide([Grant(terms(G))]), 1.0)
    assert TURNS in pool.registry.entries
    before = pool.tick
    granted(pool.ask(manager, Grant(terms(G, request="other")))[0])
    assert TURN_S <= pool.tick - before <= TURN_S + 1
    assert TURNS not in pool.registry.entries


def test_a_manager_without_requests_gives_up_its_turn() -> None:
    pool, manager = pool_of(8 * G)
    manager.book.conflicts = CONFLICTS_MAX
    assert manager._commit(manager._decide([Grant(terms(G))]), 1.0)
    assert manager.book.is_first
    manager.yield_turn()
    assert TURNS not in pool.registry.entries


def test_a_manager_that_never_succeeds_ends_with_an_error() -> None:
    pool, _ = pool_of(8 * G)

    def change() -> None:
        pool.lend(A, 8 * G)
        pool.sleep(0.1)

    slow = pool.manager(Rival(pool.registry, change), timeout=5.0)
    with pytest.raises(RegistryAwayError, match="other") as caught:
        pool.ask(slow, Grant(terms(G)))
    assert not caught.value.uncertain


def test_a_grant_whose_reply_was_lost_is_found_again_by_another_manager() -> None:
    pool, other = pool_of(8 * G)

    class Lossy(Rival):
        def commit(self, conditions, operations, *, timeout=None):  # type: ignore[no-untyped-def]
            done = super().commit(conditions, operations)
            if self.commits == 1:
                raise RegistryAwayError("the reply was lost", uncertain=True)
            return done

    manager = pool.manager(Lossy(pool.registry, lambda: None))
    with pytest.raises(RegistryAwayError) as caught:
        pool.ask(manager, Grant(terms(G)))
    assert caught.value.uncertain
    found = granted(pool.ask(other, Grant(terms(G)))[0])
    assert found.record.extents == (Extent(A, 1, G),)
    # The manager itself did not know, either.
    assert granted(pool.ask(manager, Grant(terms(G)))[0]) == found


def test_no_answer_comes_from_entries_that_are_out_of_date() -> None:
    pool, first = pool_of(4 * G)

    class Deaf(Rival):
        """Its watch reports nothing."""

        def watch(self, prefix, after):  # type: ignore[no-untyped-def]
            return MemoryRegistry().watch(prefix, 0)

    second = pool.manager(Deaf(pool.registry, lambda: None))
    lease = granted(pool.ask(first, Grant(terms(4 * G)))[0])
    granted(pool.ask(second, Renew(lease.lease))[0])
    (ended,) = pool.ask(first, End(lease.lease))
    assert isinstance(ended, Done)
    refused(pool.ask(second, Grant(terms(G)))[0], Reason.MEMORY)
    pool.ask(second, *[Confirm(one.member, one.lease, one.extent) for one in ended.orders])
    granted(pool.ask(first, Grant(terms(G)))[0])


def beginning_with(member: str, lenders: Sequence[Lender]) -> bytes:
    """Return a seed with which a member is asked first."""
    seeds = (number.to_bytes(2, "big") for number in range(1000))
    return next(seed for seed in seeds if in_order(lenders, seed)[0].member == member)


@pytest.mark.parametrize("grows", [False, True])
def test_two_managers_do_not_both_lend_the_memory_that_a_third_tenant_is_guaranteed(grows: bool) -> None:
    pool, manager = pool_of(4 * G, 4 * G)
    pool.policies = {1: TenantLimits(guaranteed={"dram": 4 * G}), 2: TenantLimits(), 3: TenantLimits()}
    second: Request = Grant(terms(3 * G, tenant=3))
    if grows:
        manager._seed = beginning_with(B, list(manager.book.view.lenders("dram")))
        lease = granted(pool.ask(manager, Grant(terms(G, tenant=3)))[0])
        second = Resize(lease.lease, 3, lease.record.epoch, 4 * G)
    decisions = []
    books = Book("first"), Book("second")
    for book, member, request in zip(books, (A, B), (Grant(terms(3 * G, tenant=2)), second), strict=True):
        book.read(pool.registry.range(*PREFIXES), pool.tick)
        seed = beginning_with(member, list(book.view.lenders("dram")))
        decision = book.decide([request], Moment(pool.now, pool.tick, pool.policies, seed))
        assert decision.outcomes
        granted(decision.outcomes[0])  # type: ignore[arg-type]
        decisions.append(decision)
    # They write for different tenants and on different members, and meet in nothing but the burst entry.
    assert decisions[0].changes.keys() & decisions[1].changes.keys() == {BURST}
    first, late = (pool.registry.commit(one.conditions, one.operations) for one in decisions)
    assert first.succeeded
    assert not late.succeeded
    refused(pool.ask(pool.manager(), second)[0], Reason.QUOTA)


def test_a_damaged_account_of_a_tenant_keeps_no_manager_from_its_upkeep() -> None:
    pool, manager = pool_of(4 * G)
    pool.policies = {1: TenantLimits(), 2: TenantLimits(), 3: TenantLimits()}
    granted(pool.ask(manager, Grant(terms(G, tenant=1)))[0])
    lease = granted(pool.ask(manager, Grant(terms(2 * G, tenant=2)))[0])
    pool.registry.commit([], [Put(TENANT + "1", b"?")])
    pool.policies[3] = TenantLimits(guaranteed={"dram": 100 * G})
    assert pool.upkeep(manager) == 1
    (extent,) = granted(pool.ask(manager, Renew(lease.lease))[0]).wanted_back
    assert extent.bytes == 2 * G
    assert pool.upkeep(manager) == 0


def test_memory_that_a_new_guarantee_needs_is_asked_back_from_tenants_beyond_theirs() -> None:
    pool, manager = pool_of(10 * G)
    pool.policies = {2: TenantLimits(guaranteed={"dram": 2 * G}), 3: TenantLimits(priority=5)}
    leases = [
        granted(pool.ask(manager, Grant(terms(2 * G, tenant=tenant, request=f"{number}")))[0])
        for number, tenant in enumerate((2, 2, 2, 3, 3))
    ]
    assert pool.upkeep(manager) == 0
    pool.policies[1] = TenantLimits(guaranteed={"dram": 5 * G})
    assert pool.upkeep(manager) == 3
    wanted = [len(granted(pool.ask(manager, Renew(one.lease))[0]).wanted_back) for one in leases]
    # Tenant 2 has the lower priority, and keeps the two pages of its own guarantee.
    assert (sum(wanted[:3]), sum(wanted[3:])) == (2, 1)
    assert pool.upkeep(manager) == 0
