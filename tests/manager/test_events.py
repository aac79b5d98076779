"""Events of the registry's changes, the steps that a manager keeps, and the calls that do not block its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.abc.registry import Changes, Delete, Entry, Put, Registry
from farpool.cluster.leases.records import ORDERS, LeaseRecord, LeaseRequest, OrderRecord, lease_key
from farpool.cluster.leases.records import encode as encode_lease
from farpool.cluster.manager.calls import BusyError, Calls
from farpool.cluster.manager.events import Event, RecentSteps, Step, step_of, steps_of
from farpool.cluster.manager.feed import Backlog, Feed, revision_of
from farpool.cluster.manager.records import LEADER, RUNNING, TOKENS, ManagerRecord
from farpool.cluster.manager.records import encode as encode_manager
from farpool.cluster.members.records import AliveRecord, MemberRecord, alive_key, encode, record_key
from farpool.cluster.names.records import NameRecord
from farpool.cluster.names.records import encode as encode_name
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

PATIENCE = 30.0
A = bytes(range(16))


def kind(key: str, value: bytes = b"", *, deleted: bool = False) -> str:
    [event] = step_of(1, [Entry(key, value, 1, deleted=deleted)]).events
    return event.kind


def test_each_change_is_an_event_of_its_own_kind() -> None:
    record, address = record_key(A), ("tcp://10.0.0.1:7471",)
    assert kind(record, encode(MemberRecord(addresses=address))) == "member.changed"
    assert kind(record, encode(MemberRecord(addresses=address, draining=True))) == "member.draining"
    assert kind(record, deleted=True) == "member.left"
    assert kind(alive_key(A), encode(AliveRecord())) == "member.joining"
    assert kind(alive_key(A), encode(AliveRecord(ready=True))) == "member.joined"
    assert kind(alive_key(A), encode(AliveRecord(returns=True))) == "member.returning"
    assert kind(alive_key(A), encode(AliveRecord(ready=True, returns=True))) == "member.active"
    assert kind(alive_key(A), deleted=True) == "member.suspect"
    name = NameRecord(3, "p", "m", 10, 2, False, 0.0, "w")
    assert kind("name/a%2Fb", encode_name(name)) == "name.published"
    assert kind("name/a", encode_name(msgspec.structs.replace(name, publication=""))) == "name.unpublished"
    assert kind("name/a", deleted=True) == "name.deleted"
    lease = LeaseRecord(terms=LeaseRequest(tenant=1, holder="a", bytes=4096), extents=(), epoch=1, expires=0.0)
    for change in ("granted", "resized", "moving", "released", "wanted-back", "taken"):
        changed = encode_lease(msgspec.structs.replace(lease, change=change))
        assert kind(lease_key("1f"), changed) == f"lease.{change}"
    renewed = encode_lease(msgspec.structs.replace(lease, change="renewed"))
    assert step_of(1, [Entry(lease_key("1f"), renewed, 1)]).events == ()
    assert kind(lease_key("1f"), deleted=True) == "lease.ended"
    fields = {"member": "1f", "lease": "2f", "extent": 3, "bytes": 4096, "tenant": 1, "medium": "dram", "epoch": 2}
    order = OrderRecord(**fields, reason="r", issued=0.0)
    assert kind(order.key, encode_lease(order)) == "extent.ended"
    assert kind(order.key, deleted=True) == "extent.freed"
    assert kind(ORDERS + "1f/2f-x", deleted=True) == kind(lease_key("1f"), b"{") == "damaged"
    manager = encode_manager(ManagerRecord(manager="1f"))
    assert kind(LEADER, manager) == "manager.leads"
    assert kind(LEADER, deleted=True) == "manager.no-leader"
    assert kind(RUNNING + "1f", manager) == "manager.started"
    assert kind(RUNNING + "1f", deleted=True) == "manager.stopped"
    assert kind(record, b"{") == kind("name/a", b"\xc1") == kind(LEADER, b"") == "damaged"


def test_a_name_in_an_event_is_as_its_writer_wrote_it() -> None:
    record = encode_name(NameRecord(3, "p", "m", 10, 2, False, 0.0, "w"))
    [event] = step_of(7, [Entry("name/a%2Fb", record, 7)]).events
    assert event.data == {"name": "a/b", "version": 3, "nbytes": 10, "objects": 2, "writer": "w"}


def test_other_changes_are_no_events_and_tokens_are_only_noticed() -> None:
    entries = [Entry("hold/a/b/c", b"", 5), Entry(TOKENS + "1f", b"secret", 6), Entry("sweeper", b"", 7)]
    assert list(steps_of(Changes(7, tuple(entries)))) == [Step(6, (), frozenset({TOKENS + "1f"}))]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4), st.data())
def test_readers_get_each_step_once_or_learn_that_it_is_gone(
    additions: list[int], steps_max: int, data: st.DataObject
) -> None:
    recent, revision, every = RecentSteps(steps_max), 10, []
    assert recent.after(0) is None
    recent.begin(revision)
    for count in additions:
        made = [Step(revision + i + 1, (Event("x", {}),)) for i in range(count)]
        revision += count + data.draw(st.integers(0, 2))
        recent.add(made, revision)
        every += made
        assert recent.revision == revision
        for position in range(9, revision + 1):
            kept = recent.after(position)
            assert kept is None if position < recent.since else kept == [s for s in every if s.revision > position]
    assert recent.since == 10 or len(recent.after(recent.since) or []) >= steps_max
    assert len(recent._steps) <= 2 * steps_max + 3


# Feed


def member(number: int) -> Put:
    return Put(record_key(bytes([number]) * 16), encode(MemberRecord(addresses=(f"tcp://10.0.0.{number}:7471",))))


def followed(registry: Registry, act: Callable[[Feed], object]) -> None:
    async def run() -> None:
        with Feed(registry, lambda error: None) as feed:
            feed.start()
            async with asyncio.timeout(PATIENCE):
                while feed.steps.revision < 0:
                    await feed.changed(1.0)
                result = act(feed)
                if asyncio.iscoroutine(result):
                    await result

    asyncio.run(run())


def test_the_feed_begins_at_the_present_and_follows(registry: Registry) -> None:
    before = registry.commit([], [member(1)]).revision

    async def act(feed: Feed) -> None:
        assert feed.steps.since == before
        assert feed.steps.after(before - 1) is None
        after = registry.commit([], [member(2), member(3)]).revision
        while not (steps := feed.steps.after(before)):
            await feed.changed(1.0)
        assert [(step.revision, len(step.events)) for step in steps] == [(after, 2)]
        other = registry.commit([], [Put("other", b"")]).revision
        while feed.steps.revision < other:  # known, although there is no event
            await asyncio.sleep(0.05)
        assert feed.steps.after(after) == []

    followed(registry, act)


def test_a_backlog_reads_up_to_the_present(registry: Registry) -> None:
    start = registry.commit([], [member(1)]).revision
    revisions = [registry.commit([], [member(number)]).revision for number in (2, 3, 4)]
    registry.commit([], [Delete(record_key(bytes([3]) * 16))])
    found: list[Step] = []
    with Backlog(registry, start) as backlog:
        while len(found) < 4:
            batch = backlog.next()
            assert batch is not None
            found += batch[0]
    assert [step.revision for step in found[:3]] == revisions
    assert [event.kind for step in found for event in step.events] == ["member.changed"] * 3 + ["member.left"]


def test_a_backlog_that_the_registry_has_deleted_cannot_be_had(registry: Registry) -> None:
    start = registry.commit([], [member(1)]).revision
    for number in (2, 3, 4):
        last = registry.commit([], [member(number)]).revision
    registry.compact(last)
    with Backlog(registry, start) as backlog:
        assert backlog.next() is None
    assert revision_of(registry) >= last


# Calls


def test_calls_beyond_the_room_are_refused_at_once() -> None:
    released = threading.Event()

    async def run() -> None:
        with Calls(1, 1, "test") as calls:
            running = [asyncio.create_task(calls.run(lambda: released.wait(PATIENCE))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await calls.run(lambda: None)
            # A caller that goes away does not make room: its call still has the thread.
            running[0].cancel()
            await asyncio.wait([running[0]])
            with pytest.raises(BusyError):
                await calls.run(lambda: None)
            released.set()
            assert await running[1]
            while calls.under_way:
                await asyncio.sleep(0.01)
            assert await calls.run(lambda: 7) == 7
            with pytest.raises(ZeroDivisionError):
                await calls.run(lambda: 1 // 0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
