"""Services of several managers over real registries, used by many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farpool.abc.registry import Registry
from farpool.cluster.leases.engine import Clock
from farpool.cluster.leases.records import GRAIN_BYTES, LEASES, LeaseRequest
from farpool.cluster.leases.requests import Granted, Refused
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import ConfigError, RegistryAwayError, RegistryError
from tests.forking import in_forked_child
from tests.members.registered import drain, identity_at, joined, write

G = GRAIN_BYTES
WAIT = 60.0
A, B = "tcp://10.0.0.1:7471", "tcp://10.0.0.2:7471"


@pytest.fixture
def serve() -> Iterator[Callable[..., LeaseService]]:
    """Makes services, which are closed at the end."""
    made: list[LeaseService] = []

    def one(registry: Registry, **settings: object) -> LeaseService:
        made.append(LeaseService(registry, **{"timeout": WAIT} | settings))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for service in made:
        service.close()


def check(condition: bool) -> None:
    assert condition


def terms(size: int, **fields: object) -> LeaseRequest:
    return LeaseRequest(**{"tenant": 1, "holder": "trainer", "bytes": size} | fields)  # type: ignore[arg-type]


def granted(outcome: object) -> Granted:
    assert isinstance(outcome, Granted), outcome
    return outcome


def test_managers_grant_the_same_memory_at_once_and_never_twice(
    fresh: Callable[[], Registry], serve: Callable[..., LeaseService]
) -> None:
    registry = fresh()
    write(registry, *joined(A, media={"dram": 40 * G}), *joined(B, media={"dram": 20 * G}))
    services = [serve(fresh()) for _ in range(3)]
    got: list[Granted | Refused] = []

    def work(number: int) -> None:
        for index in range(5):
            got.append(services[number % 3].grant(terms(G, request=f"{number}-{index}")))

    with ThreadPoolExecutor(15) as threads:
        list(threads.map(work, range(15)))
    leases = [one for one in got if isinstance(one, Granted)]
    assert len(leases) == 60
    assert len(got) == 75
    extents = {(one.member, one.number) for lease in leases for one in lease.record.extents}
    assert len(extents) == 60
    # All of them end, the nodes confirm, and the memory is there again.
    for lease in leases:
        for order in services[0].end(lease.lease).orders:  # type: ignore[union-attr]
            services[1].confirm(order)
    whole = granted(services[2].grant(terms(60 * G)))
    assert {one.member for one in whole.record.extents} == {identity_at(A).hex(), identity_at(B).hex()}


def test_a_lease_is_renewed_resized_and_ended(registry: Registry, serve: Callable[..., LeaseService]) -> None:
    write(registry, *joined(A, media={"dram": 8 * G}), *joined(B, media={"dram": 8 * G}))
    service = serve(registry)
    lease = granted(service.grant(terms(2 * G)))
    assert service.lease(lease.lease) == lease
    assert granted(service.renew(lease.lease, tenant=1)).record.expires >= lease.record.expires
    grown = granted(service.resize(lease.lease, 6 * G, epoch=lease.record.epoch))
    first = lease.record.extents[0]
    moved = granted(service.replace(lease.lease, ((first.member, first.number),), epoch=lease.record.epoch))
    assert len(moved.record.extents) == len(grown.record.extents) + 1
    after = granted(service.release(lease.lease, ((first.member, first.number),), epoch=moved.record.epoch))
    assert after.record.epoch > lease.record.epoch
    assert [order.extent for order in service.orders(first.member)] == [first.number]
    service.end(lease.lease, tenant=1)
    assert service.lease(lease.lease) is None
    assert service.leases() == []
    with pytest.raises(ConfigError):
        service.resize(lease.lease, 0, epoch=0)
    with pytest.raises(ConfigError):
        service.grant(terms(0))


def test_leases_are_listed_page_by_page(file: SqliteRegistry, serve: Callable[..., LeaseService]) -> None:
    write(file, *joined(A, media={"dram": 80 * G}))
    service = serve(file)
    made = sorted(granted(service.grant(terms(G, tenant=number % 2))).lease for number in range(10))
    assert [one.lease for one in service.leases()] == made
    first = service.leases(limit=4)
    assert [one.lease for one in first + service.leases(after=first[-1].lease)] == made
    assert {one.record.terms.tenant for one in service.leases(tenant=1)} == {1}


def test_a_manager_sees_the_leases_of_another_one(
    fresh: Callable[[], Registry], serve: Callable[..., LeaseService]
) -> None:
    registry = fresh()
    write(registry, *joined(A, media={"dram": 8 * G}))
    first, second = serve(registry), serve(fresh())
    lease = granted(first.grant(terms(G)))
    until = threading.Event()
    for _ in range(6000):
        if second.lease(lease.lease) is not None:
            break
        until.wait(0.01)
    assert second.lease(lease.lease) == lease


def test_requests_that_wait_together_go_into_one_transaction(
    file: SqliteRegistry, serve: Callable[..., LeaseService]
) -> None:
    write(file, *joined(A, media={"dram": 80 * G}))
    service = serve(file)
    began, go_on = threading.Event(), threading.Event()
    commit, sizes = file.commit, []

    def slow_commit(*args: object, **settings: object) -> object:
        sizes.append(len(args[1]))  # type: ignore[arg-type]
        began.set()
        assert go_on.wait(WAIT)
        return commit(*args, **settings)  # type: ignore[arg-type]

    file.commit = slow_commit  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(21) as threads:
        first = threads.submit(service.grant, terms(G))
        assert began.wait(WAIT)
        others = [threads.submit(service.grant, terms(G)) for _ in range(20)]
        while len(service._queue) < 20:
            threading.Event().wait(0.01)
        go_on.set()
        assert all(isinstance(one.result(WAIT), Granted) for one in [first, *others])
    assert sizes == [3, 22]  # the leases, one account of the member, and one of the tenant


def test_a_service_reads_the_leases_that_were_there_before(
    fresh: Callable[[], Registry], serve: Callable[..., LeaseService]
) -> None:
    registry = fresh()
    write(registry, *joined(A, media={"dram": 8 * G}))
    with LeaseService(registry) as service:
        lease = granted(service.grant(terms(6 * G)))
    later = serve(fresh())
    assert later.lease(lease.lease) == lease
    refused = later.grant(terms(3 * G))
    assert isinstance(refused, Refused)
    assert granted(later.grant(refused.offers[0])).record.terms.bytes == 2 * G


def test_a_node_that_drains_asks_for_its_memory(file: SqliteRegistry, serve: Callable[..., LeaseService]) -> None:
    write(file, *joined(A, media={"dram": 8 * G}), *joined(B, media={"dram": 8 * G}))
    service = serve(file)
    lease = granted(service.grant(terms(G)))
    member = bytes.fromhex(lease.record.extents[0].member)
    assert service.reclaim(member.hex(), 0) == 0
    drain(file, member)
    wanted: tuple[object, ...] = ()
    for _ in range(600):
        wanted = granted(service.renew(lease.lease)).wanted_back
        if wanted:
            break
        threading.Event().wait(0.1)
    assert len(wanted) == 1
    assert service.reclaim(member.hex(), 8 * G) == 0  # it was asked for already


def test_leases_expire_while_requests_come_all_the_time(
    file: SqliteRegistry, serve: Callable[..., LeaseService]
) -> None:
    write(file, *joined(A, media={"dram": 8 * G}))
    ahead = [0.0]
    clock = Clock(now=lambda: time.time() + ahead[0], tick=lambda: time.monotonic() + ahead[0])
    service = serve(file, clock=clock, timeout=1e6)
    left, used = granted(service.grant(terms(G, ttl=1.0))), granted(service.grant(terms(G)))
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.is_set():
            service.renew(used.lease)

    with ThreadPoolExecutor(2) as threads:
        renewals = [threads.submit(renew) for _ in range(2)]
        try:
            deadline = time.monotonic() + WAIT
            while service.lease(left.lease) is not None:
                assert time.monotonic() < deadline
                ahead[0] += 1.0
                service.renew(used.lease)
        finally:
            has_ended.set()
    assert [one.result() for one in renewals] == [None, None]
    assert service.lease(used.lease) is not None


def test_a_registry_that_is_away_is_a_typed_error_and_the_request_can_be_repeated(
    tmp_path: Path, serve: Callable[..., LeaseService]
) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite", timeout=WAIT)
    write(registry, *joined(A, media={"dram": 8 * G}))
    service = serve(registry)
    commit, replies = registry.commit, [0]

    def lossy_commit(*args: object, **settings: object) -> object:
        done = commit(*args, **settings)  # type: ignore[arg-type]
        if replies[0] == 0:
            replies[0] += 1
            raise RegistryAwayError("the reply was lost", uncertain=True)
        return done

    registry.commit = lossy_commit  # type: ignore[method-assign, assignment]
    with pytest.raises(RegistryAwayError) as caught:
        service.grant(terms(G, request="once"))
    assert caught.value.uncertain
    lease = granted(service.grant(terms(G, request="once")))
    assert lease.record.extents[0].number == 1
    assert len(service.leases()) == 1


def test_a_closed_service_refuses_requests(file: SqliteRegistry) -> None:
    service = LeaseService(file)
    service.close()
    service.close()
    with pytest.raises(RegistryError, match="closed"):
        service.grant(terms(G))
    assert not [one for one in file.range(LEASES).entries]


def test_a_forked_child_begins_again(file: SqliteRegistry, serve: Callable[..., LeaseService]) -> None:
    write(file, *joined(A, media={"dram": 8 * G}))
    service = serve(file)
    lease = granted(service.grant(terms(G)))
    in_forked_child(lambda: check(granted(service.renew(lease.lease)).lease == lease.lease), WAIT)
    granted(service.renew(lease.lease))
