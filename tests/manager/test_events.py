"""Events of the registry's changes, the steps that a manager keeps, and the calls that do not block its loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.abc.registry import Changes, Delete, Entry, Put, Registry, Watch
from farpool.cluster.leases.records import ORDERS, LeaseRecord, LeaseRequest, OrderRecord, lease_key
from farpool.cluster.leases.records import encode as encode_lease
from farpool.cluster.manager import member_stats, presence
from farpool.cluster.manager.access import Principal
from farpool.cluster.manager.calls import BusyError, Calls
from farpool.cluster.manager.events import EVENTS, Event, RecentSteps, Step, step_of, steps_of
from farpool.cluster.manager.feed import Backlog, Feed, revision_of
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.member_stats import MemberAnswers, MemberStats
from farpool.cluster.manager.presence import Presence
from farpool.cluster.manager.records import LEADER, RUNNING, TOKENS, AlarmRecord, ManagerRecord, Role, alarm_key
from farpool.cluster.manager.records import encode as encode_manager
from farpool.cluster.manager.routers import events as routers_events
from farpool.cluster.manager.routers.events import _stream
from farpool.cluster.members.administration import RegisteredMember
from farpool.cluster.members.records import AliveRecord, MemberRecord, alive_key, encode, record_key
from farpool.cluster.names.records import NameRecord
from farpool.cluster.names.records import encode as encode_name
from tests.nodes import eventually
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

PATIENCE = 30.0
READER = Principal("user:me", Role.ADMIN)
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
    assert kind(alarm_key("clock", "1f"), encode_manager(AlarmRecord(kind="clock", subject="1f"))) == "alarm.raised"
    assert kind(alarm_key("clock", "1f"), deleted=True) == "alarm.cleared"
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


def test_the_feed_goes_on_after_an_error_of_any_kind(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, calls = registry.watch, [0]

    def failing(prefix: str, after: int) -> Watch:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("can't start new thread")
        return watch(prefix, after)

    monkeypatch.setattr(registry, "watch", failing)

    async def act(feed: Feed) -> None:
        while calls[0] < 2:
            await asyncio.sleep(0.01)
        after = registry.commit([], [member(2)]).revision
        while feed.steps.revision < after:
            await asyncio.sleep(0.01)
        assert feed.steps.after(after) == []

    followed(registry, act)


def test_an_entry_of_which_no_event_can_be_made_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVENTS, LEADER, lambda entry: {}[entry.key])
    assert kind(LEADER, b"") == "damaged"


def test_a_manager_leads_again_after_an_error_of_any_kind(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_INTERVAL_S", 0.02)
    get, failures = registry.get, [0]

    def failing(key: str, *, timeout: float | None = None) -> Entry | None:
        failures[0] += 1
        if failures[0] < 5:
            raise RuntimeError("can't start new thread")
        return get(key, timeout=timeout)

    with Presence(registry, ManagerRecord(manager="1f"), 60.0) as manager:
        manager.start()
        eventually(lambda: manager.leads)
        monkeypatch.setattr(registry, "get", failing)
        eventually(lambda: failures[0] > 10)
        assert manager.leads


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


# Streams


class Streamed:
    """A stream of events of a manager whose feed has the steps that a test gives it."""

    def __init__(self, registry: Registry | None = None, who: Principal = READER) -> None:
        self.feed = Feed(cast(Registry, registry), lambda error: None)
        calls = Calls(2, 10, "test")
        manager = SimpleNamespace(feed=self.feed, calls=calls, ask=lambda act: calls.run(lambda: act(registry)))
        self.manager, self.who = cast(Manager, manager), who

    def blocks(self, position: int | None) -> AsyncIterator[bytes]:
        return _stream(self.manager, self.who, position)

    def took(self, revision: int, *credentials: str) -> None:
        step = Step(revision, (Event("x", {"n": revision}),), frozenset(credentials))
        self.feed._took([step], revision)


def event(revision: int) -> bytes:
    return b'id: %d\nevent: x\ndata: {"n":%d}\n\n' % (revision, revision)


def test_events_that_come_while_a_slow_client_takes_others_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers_events, "_SILENCE_S", 0.01)

    async def run() -> None:
        streamed = Streamed()
        streamed.feed._began(10)
        blocks = streamed.blocks(10)
        assert await anext(blocks) == b"retry: 1000\n\n"
        for revision in (11, 12, 13):
            # The stream waits in the sending of the block before, as it does while a client does not read.
            streamed.took(revision)
        assert await anext(blocks) == event(11)
        streamed.took(14)
        assert [await anext(blocks) for _ in range(3)] == [event(12), event(13), event(14)]
        streamed.took(15)
        assert await anext(blocks) == event(15)
        assert await anext(blocks) == b"id: 15\n\n"
        streamed.took(16)
        assert await anext(blocks) == event(16)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_stream_ends_with_the_rights_of_its_client_also_while_it_reads_what_it_missed(registry: Registry) -> None:
    key = TOKENS + "1f"
    start = registry.commit([], [member(1)]).revision
    registry.commit([], [Put(key, b"{}")])
    last = registry.commit([], [member(2)]).revision

    async def run(revision: int) -> list[bytes]:
        streamed = Streamed(registry, Principal("token:1f", Role.OPERATOR, None, key, revision))
        streamed.feed._began(last)
        return [block async for block in closing(streamed, streamed.blocks(start), b'"addresses"')]

    assert not any(b'"addresses"' in block for block in asyncio.run(asyncio.wait_for(run(start), PATIENCE)))
    assert any(b'"addresses"' in block for block in asyncio.run(asyncio.wait_for(run(last), PATIENCE)))


def test_a_stream_ends_after_a_reset_because_its_client_may_have_lost_its_rights(registry: Registry) -> None:
    start = registry.commit([], [member(1)]).revision
    for number in (2, 3):
        last = registry.commit([], [member(number)]).revision
    registry.compact(last)

    async def run() -> list[bytes]:
        streamed = Streamed(registry)
        streamed.feed._began(last)
        return [block async for block in streamed.blocks(start)]

    blocks = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert [b"event: reset" in block for block in blocks] == [False, True]


async def closing(streamed: Streamed, blocks: AsyncIterator[bytes], last: bytes) -> AsyncIterator[bytes]:
    async for block in blocks:
        if last in block:
            streamed.feed.end_streams()
        yield block


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


def test_a_member_is_asked_once_for_all_callers_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answered = asyncio.Event()

    async def answer(calls: Calls, member: RegisteredMember) -> MemberStats:
        asked.append(member.identity)
        await answered.wait()
        return MemberStats(member.identity, str(len(asked)))

    monkeypatch.setattr(member_stats, "ask_member", answer)
    one, other = (cast(RegisteredMember, SimpleNamespace(identity=name)) for name in ("1", "2"))

    async def run() -> None:
        answers = MemberAnswers(cast(Calls, None))
        asking = [asyncio.create_task(answers.ask(member)) for member in (one, one, one, other)]
        await asyncio.sleep(0)
        asking.pop(0).cancel()
        await asyncio.sleep(0)
        answered.set()
        assert [found.identity for found in await asyncio.gather(*asking)] == ["1", "1", "2"]
        assert asked == ["1", "2"]
        assert (await answers.ask(one, age_max=3600.0)).name == "2"
        assert asked == ["1", "2"]
        assert (await answers.ask(one)).name == "3"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
