"""Retained objects: nodes evict them after others, and a tenant that is full of them still takes objects."""

from __future__ import annotations

import asyncio

import pytest

from farpool.cluster.repair.copying import Copied, copying
from farpool.cluster.repair.messages import Outcome
from farpool.cluster.store import AsyncStore, PutOutcome, Store
from farpool.cluster.store.retention import session_number
from farpool.cluster.wire.features import FEATURES
from farpool.cluster.wire.frames import ENDED, RETAIN, Op, Status
from farpool.errors import AccessDeniedError, ConfigError, NodeError
from tests.node.nodes import Peer
from tests.nodes import eventually
from tests.store.local_nodes import MIB, LocalNode, Nodes, store_over

VALUE = bytes(100_000)
FILL = 300
"""Number of values that is more than three times what a node has room for."""


def fill(store: Store, **how: object) -> None:
    for number in range(FILL):
        assert store.put(f"fill {number}", VALUE, **how) is PutOutcome.STORED  # type: ignore[arg-type]


def stats(node: LocalNode) -> dict[str, int]:
    assert node.server is not None
    return node.server.stats()


def peer_of(node: LocalNode) -> Peer:
    assert node.server is not None
    return Peer(node.server)


def copied(key: bytes, source: Peer, target: Peer) -> Copied:
    """Copy an object as repair does."""
    steps, peers = copying(key, lambda: 10_000), {"source": source, "target": target}
    request = next(steps)
    while True:
        payload = {} if request.payload is None else {"payload": request.payload}
        answer = peers[request.to].ask(request.op, request.meta, serial=request.serial, **payload)
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def priority(store: Store, key: str) -> int | None:
    info = store.stat(key)
    return None if info is None else info.priority


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_values_of_a_higher_priority_stay_while_others_are_evicted(local: Nodes, mapped: bool) -> None:
    (node,) = local(mapped=mapped)
    with store_over([node]) as store:
        store.put("plain", VALUE)
        store.put("high", VALUE, priority=2)
        store.put_many({"higher": VALUE}, priority=7)
        store.put_parts("in parts", [VALUE, b"more"], priority=1, session="conversation")
        content = store.put_content(VALUE, priority=3, session="conversation")
        fill(store)
        assert not store.exists("plain")
        assert [priority(store, key) for key in ("high", "higher", "in parts", content)] == [2, 7, 1, 3]
        assert store.get("in parts") == VALUE + b"more"
        assert (stats(node)["retained_objects"], stats(node)["retained_evictions"]) == (4, 0)
        assert stats(node)["retained_bytes"] == 4 * len(VALUE) + 4


def test_a_node_full_of_retained_values_takes_others_of_each_priority(local: Nodes) -> None:
    (node,) = local()
    with store_over([node]) as store:
        fill(store, priority=7, session="one")
        assert stats(node)["retained_evictions"] > FILL / 2
        for number in range(20):
            assert store.put(f"plain {number}", VALUE) is PutOutcome.STORED
            assert store.get(f"plain {number}") == VALUE
        assert store.put("large", bytes(6 * MIB)) is PutOutcome.STORED
        assert store.exists("large")
        assert store.put("kept", VALUE) is PutOutcome.STORED
        assert store.touch("kept", None, keep=True)
        fill(store, priority=7)
        assert store.get("kept") == VALUE


def test_the_end_of_a_session_releases_its_values_and_no_others(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, 2) as store, store_over(nodes, 2) as other:
        for number in range(10):
            store.put(f"ended {number}", VALUE, priority=5, session="ended")
            store.put(f"stays {number}", VALUE, priority=5, session=b"stays")
        assert other.end_session("ended") == 20  # copies
        assert store.end_session("ended") == 0
        assert [priority(store, f"ended {number}") for number in range(10)] == [0] * 10
        fill(store)
        assert not any(store.lookup([f"ended {number}" for number in range(10)]).found)
        assert all(store.lookup([f"stays {number}" for number in range(10)]).found)


def test_retaining_replaces_priority_and_session_and_a_put_only_raises_them(local: Nodes) -> None:
    with store_over(local(2), 2) as store:
        store.put("k", VALUE)
        assert store.retain(["k", "no such key"], 4, session="a") == [2, 0]
        assert store.put("k", VALUE, priority=2) is PutOutcome.PRESENT
        assert store.put("k", VALUE, priority=3, session="b") is PutOutcome.PRESENT
        assert priority(store, "k") == 4
        assert store.end_session("b") == 0
        assert store.put("k", VALUE, priority=4, session="b") is PutOutcome.PRESENT
        assert store.end_session("a") == 0
        assert store.retain(["k"], 1, session="b") == [2]
        assert priority(store, "k") == 1
        assert store.end_session("b") == 2
        assert priority(store, "k") == 0
        assert store.put("k", VALUE, priority=6) is PutOutcome.PRESENT
        assert store.retain(["k"], 0) == [2]
        assert priority(store, "k") == 0
        assert store.retain([], 3) == []


def test_a_priority_may_end_before_its_value(local: Nodes) -> None:
    (node,) = local()
    with store_over([node]) as store:
        store.put_many({"short": VALUE, "long": VALUE})
        assert store.retain(["short"], 5, session="s", ttl=0.001) == [1]
        assert store.retain(["long"], 5, session="s", ttl=3600) == [1]
        eventually(lambda: stats(node)["retained_objects"] == 1)
        assert [priority(store, key) for key in ("short", "long")] == [0, 5]
        fill(store)
        assert store.lookup(["short", "long"]).found == [False, True]
        assert store.end_session("s") == 1


def test_a_time_to_live_ends_a_retained_value(local: Nodes) -> None:
    (node,) = local()
    with store_over([node]) as store:
        store.put("k", VALUE, ttl=0.001, priority=7, session="s")
        for _ in range(FILL):  # a put takes longer than the value lives
            store.put("other", VALUE)
        assert not store.exists("k")
        assert store.end_session("s") == 0
        assert stats(node)["retained_objects"] == 0


def test_the_best_effort_calls_retain_and_end_as_well(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, 2) as store:
        calls = store.best_effort()
        store.put("k", VALUE)
        assert list(calls.retain_many([b"k", b"none"], 3, "s", 0, 10.0)) == [2, 0]
        assert calls.end_session("s", 10.0) == 2
        nodes[0].rights = nodes[1].rights = 1
        for node in nodes:
            node.kill()
            node.restart()
        with store_over(nodes, 2) as reader:
            (denied,) = reader.best_effort().retain_many([b"k"], 3, "s", 0, 10.0)
            assert isinstance(denied, AccessDeniedError)
            with pytest.raises(AccessDeniedError):
                reader.retain(["k"], 3)
            with pytest.raises(AccessDeniedError):
                reader.end_session("s")


def test_the_asynchronous_store_has_the_same_calls(local: Nodes) -> None:
    async def use(store: AsyncStore) -> None:
        await store.put("k", VALUE, priority=2, session="s")
        await store.put_many({"l": VALUE}, priority=1)
        assert await store.retain(["l"], 3, session="s") == [1]
        assert await store.end_session("s") == 2

    made = AsyncStore.__new__(AsyncStore)
    made._begin(store_over(local()))
    asyncio.run(use(made))
    asyncio.run(made.close())


def test_nodes_of_an_earlier_release_store_the_values_and_are_not_asked_to_retain_them(local: Nodes) -> None:
    older, newer = local(2)
    older.features = 0
    older.contact.features = 0
    assert FEATURES.bits & 1
    with store_over([older, newer], 2) as store:
        assert store.put("k", VALUE, priority=3, session="s") is PutOutcome.STORED
        assert store.retain(["k"], 5, session="s") == [1]
        assert (stats(older)["retained_objects"], stats(newer)["retained_objects"]) == (0, 1)
        assert store.end_session("s") == 1
    with store_over([older]) as store:
        assert store.put("l", VALUE, priority=3, session="s") is PutOutcome.STORED
        assert store.retain(["l"], 5) == [0]
        assert store.end_session("s") == 0


def test_a_node_that_is_away_is_named_when_a_session_ends(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, 2, timeout=0.5) as store:
        store.put("k", VALUE, priority=3, session="s")
        nodes[1].kill()
        with pytest.raises(NodeError, match=nodes[1].name):
            store.end_session("s")
        assert stats(nodes[0])["retained_objects"] == 0


def test_a_copy_whose_priority_would_not_end_is_not_retained_and_others_keep_their_priority(local: Nodes) -> None:
    first, second = local(2)
    with store_over([first]) as source, store_over([second]) as target:
        source.put("of a session", VALUE, priority=3, session="s")
        source.put("of none", VALUE, priority=3)
        source.put("for an hour", VALUE)
        assert source.retain(["for an hour"], 3, ttl=3600) == [1]
        for key in ("of a session", "of none", "for an hour"):
            assert copied(key.encode(), peer_of(first), peer_of(second)).outcome is Outcome.DONE
        assert priority(target, "of a session") == 0
        assert priority(target, "for an hour") == 0
        assert priority(target, "of none") == 3


def test_a_node_that_restarts_keeps_the_objects_and_forgets_their_priorities(local: Nodes) -> None:
    (node,) = local()
    with store_over([node]) as store:
        store.put("k", VALUE, priority=3, session="s")
        node.kill()
        node.restart()
        assert store.get("k") == VALUE
        assert priority(store, "k") == 0
        assert (stats(node)["retained_objects"], store.end_session("s")) == (0, 0)
        assert store.retain(["k"], 3, session="s") == [1]
        assert priority(store, "k") == 3


@pytest.mark.parametrize("wrong", [-1, 8, 1.5, True])
def test_a_wrong_priority_is_refused_before_anything_is_sent(local: Nodes, wrong: int) -> None:
    with store_over(local()) as store:
        for call in (
            lambda: store.put("k", b"", priority=wrong),
            lambda: store.put_many({"k": b""}, priority=wrong),
            lambda: store.retain(["k"], wrong),
            lambda: store.put("k", b"", priority=1, session=""),
            lambda: store.put("k", b"", session="s"),
            lambda: store.retain(["k"], 1, session="s" * 257),
            lambda: store.end_session(""),
            lambda: store.retain(["k"], 1, ttl=-1.0),
        ):
            with pytest.raises(ConfigError):
                call()
        assert not store.exists("k")


def test_a_malformed_request_is_refused_with_what_was_expected(local: Nodes) -> None:
    (node,) = local()
    peer = peer_of(node)
    for op, meta in (
        (Op.RETAIN, RETAIN.pack(0, 8, 0) + b"k"),
        (Op.RETAIN, RETAIN.pack(0, 512, 0) + b"k"),
        (Op.RETAIN, RETAIN.pack(0, 1, 0)),
        (Op.END_SESSION, b"short"),
    ):
        reply = peer.ask(op, meta)
        assert reply.status == Status.BAD_REQUEST
        assert reply.meta.startswith(b"expected")


def test_a_session_is_a_session_of_one_tenant(local: Nodes) -> None:
    (node,) = local()
    assert node.server is not None
    first, second = Peer(node.server, tenant=0), Peer(node.server, tenant=2, session=9)
    for peer in (first, second):
        peer.published(b"key", b"payload")
        assert peer.ask(Op.RETAIN, RETAIN.pack(77, 3, 0) + b"key").status == Status.DONE
    assert second.ask(Op.RETAIN, RETAIN.pack(77, 3, 0) + b"no key").status == Status.MISSING
    assert ENDED.unpack(second.ask(Op.END_SESSION, ENDED.pack(77)).meta) == (1,)
    assert stats(node)["retained_objects"] == 1
    assert ENDED.unpack(first.ask(Op.END_SESSION, ENDED.pack(77)).meta) == (1,)


def test_all_programs_know_a_session_by_the_same_number() -> None:
    assert session_number("conversation 1") == session_number(b"conversation 1") == 12374978101360565684
    assert session_number(None) == 0
