"""What a program gets from the store, on real data loops of nodes that can fail in each way."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from farpool.cluster.members import StaticMembers
from farpool.cluster.store import AsyncStore, Demotion, PutOutcome, Store, upkeep
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.wire.frames import Right, Status
from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    FarpoolWarning,
    KeyConflictError,
    NodeError,
    NodeFullError,
    NodeTimeoutError,
    ObjectTooLargeError,
    ReplicationError,
    StoreClosedError,
)
from tests.node.nodes import walked
from tests.nodes import PATIENCE, eventually
from tests.store.local_nodes import MIB, LocalNode, Nodes, StoppedChannel, store_over

LARGE = bytes(range(256)) * 257  # goes through mapped memory
STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


def cluster_of(store: Store) -> Cluster:
    assert store._cluster is not None
    return store._cluster


def ranked(store: Store, nodes: list[LocalNode], key: bytes = b"k") -> list[LocalNode]:
    cluster = cluster_of(store)
    by_name = {node.name: node for node in nodes}
    return [by_name[member.name] for member in cluster.view(cluster.deadline()).order(key)]


def held(node: LocalNode) -> set[bytes]:
    assert node.server is not None
    return {entry[0] for entry in walked(node.server, 0, b"", b"", 1000)}


def lose_at(node: LocalNode, key: bytes) -> None:
    """As if the node had evicted it: a drop would have it take no copies for a while."""
    with store_over([node]) as alone:
        assert alone.touch(key, 0.001, keep=False)
        eventually(lambda: not alone.exists(key))


@pytest.fixture(
    params=[(1, 1), (3, 1), (2, 2), (4, 2), (4, 3)], ids=lambda shape: f"{shape[0]}-nodes-{shape[1]}-copies"
)
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
@pytest.mark.parametrize("value", [b"", b"value", LARGE], ids=["empty", "small", "large"])
def test_what_was_put_is_read_in_each_way(local: Nodes, shape: tuple[int, int], mapped: bool, value: bytes) -> None:
    with store_over(local(shape[0], mapped=mapped), shape[1]) as store:
        assert store.put("k", bytearray(value)) is STORED
        assert store.put("k", b"another") is PRESENT
        assert store.put("k", value, check=True) is PRESENT
        into = bytearray(len(value) + 3)
        for _ in range(2):
            assert store.get(b"k") == value
            assert store.get_into("k", into) == len(value)
            assert bytes(into[: len(value)]) == value
        with store.pin("k") as pin:
            assert pin.view == value
            assert pin.is_mapped == mapped
            pin.verify()
        info = store.stat("k")
        assert info is not None
        assert (info.nbytes, info.ttl, info.copies, info.pins, info.kept) == (len(value), None, shape[1], 0, False)
        assert store.exists("k")
        assert list(store.keys()) == [b"k"]
        assert store.touch("k", None, keep=True)
        assert store.stat("k").kept  # type: ignore[union-attr]
        assert store.drop("k") is True
        assert store.drop("k") is False
        assert store.get("k") is None
        assert store.get_into("k", into) is None
        assert store.stat("k") is None
        assert not store.touch("k", 5)
        assert not store.exists("k")
        assert list(store.keys()) == []
        with pytest.raises(KeyError, match="k"):
            store.pin("k")
        assert store.put("k", b"new") is STORED
        assert store.get("k") == b"new"


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_batches_do_as_single_calls_do(local: Nodes, shape: tuple[int, int], mapped: bool) -> None:
    with store_over(local(shape[0], mapped=mapped), shape[1]) as store:
        values = {f"key{number}": (b"%d" % number) * (number % 7) * 300 for number in range(300)}
        assert store.put_many(values) == [STORED] * 300
        assert store.put_many({"key1": b"other", "new": b"n"}) == [PRESENT, STORED]
        assert store.get_many([*values, "none"]) == [*values.values(), None]
        buffers = [bytearray(len(value)) for value in values.values()]
        assert store.get_into_many(zip(values, buffers, strict=True)) == [len(value) for value in values.values()]
        assert [bytes(buffer) for buffer in buffers] == list(values.values())
        found = store.lookup([*values, "none", "key2"])
        assert found.sizes == [*(len(value) for value in values.values()), None, len(values["key2"])]
        assert (found.leading, found.found[-2:]) == (300, [False, True])
        assert store.lookup([]).leading == 0
        assert {key.decode() for key in store.keys("key1")} == {key for key in values if key.startswith("key1")}
        assert store.get_many([]) == []


def test_a_lookup_of_more_keys_than_one_request_holds_is_cut(local: Nodes) -> None:
    with store_over(local(2), 1) as store:
        keys = [f"{number}".ljust(256, "k") for number in range(2000)]
        store.put_many((key, b"v" * (number % 3)) for number, key in enumerate(keys) if number % 5)
        sizes = store.lookup(keys).sizes
        assert sizes == [number % 3 if number % 5 else None for number in range(2000)]


def test_content_is_stored_once_under_its_hash(local: Nodes) -> None:
    with store_over(local(2), 2) as store:
        key = store.put_content(LARGE)
        assert key.startswith("sha256-")
        assert store.put_content(bytearray(LARGE)) == key
        assert store.get(key) == LARGE
        assert list(store.keys()) == [key.encode()]


def test_a_value_that_differs_from_the_one_that_is_there_is_a_conflict_if_it_is_checked(local: Nodes) -> None:
    with store_over(local(3), 2) as store:
        store.put("k", b"value")
        for other in (b"valuE", b"longer value"):
            with pytest.raises(
                KeyConflictError, match=r"b'k' has a value of 5 bytes .*; this one has .* drop it first"
            ):
                store.put("k", other, check=True)
        with pytest.raises(KeyConflictError) as caught:
            store.put_many({"k": b"x", "other": b"v"}, check=True)
        assert caught.value.__notes__ == ["1 of 2 operations of this batch failed; the others were done. Failed: b'k'"]
        assert store.get("other") == b"v"
        assert store.get("k") == b"value"


def test_a_copy_is_on_as_many_nodes_as_asked_for(local: Nodes, shape: tuple[int, int]) -> None:
    nodes = local(shape[0])
    with store_over(nodes, shape[1]) as store:
        keys = [b"%d" % number for number in range(50)]
        store.put_many((key, b"v") for key in keys)
        for key in keys:
            assert [key in held(node) for node in ranked(store, nodes, key)] == [
                rank < shape[1] for rank in range(shape[0])
            ]
    assert all(held(node) for node in nodes)


def test_the_order_of_nodes_follows_from_who_they_are_and_not_from_how_they_are_named(local: Nodes) -> None:
    nodes = local(4)
    with store_over(nodes, 2) as one, store_over(nodes[::-1], 2) as other:
        for number in range(50):
            one.put(f"{number}", b"v")
            assert [node.identity for node in ranked(one, nodes, b"%d" % number)] == [
                node.identity for node in ranked(other, nodes[::-1], b"%d" % number)
            ]
        assert other.get_many([f"{number}" for number in range(50)]) == [b"v"] * 50


def test_an_object_survives_the_loss_of_all_but_one_of_its_copies(local: Nodes, shape: tuple[int, int]) -> None:
    count, copies = shape
    for lost in range(copies):
        nodes = local(count)
        with store_over(nodes, copies, timeout=20) as store:
            store.put("k", LARGE)
            for node in ranked(store, nodes)[:lost]:
                node.kill()
            assert store.get("k") == LARGE
            assert store.exists("k")
            assert store.get("none") is None
            assert list(store.keys()) == [b"k"]
            with store_over(nodes, copies, timeout=20) as fresh:  # which does not know who the lost ones are
                assert fresh.get("k") == LARGE


def test_a_put_goes_on_with_further_nodes_where_some_are_away_or_full(local: Nodes) -> None:
    nodes = local(4, capacity=1 << 20)
    with store_over(nodes, 2) as store:
        first, second, third, fourth = ranked(store, nodes)
        first.kill()
        assert store.put("k", b"v") is STORED
        assert [b"k" in held(node) for node in (second, third, fourth)] == [True, True, False]
        assert store.get("k") == b"v"
        order = ranked(store, nodes, b"large")
        with store_over([order[1] if order[0] is first else order[0]]) as alone:
            alone.put("pinned", bytes(880 << 10))
            alone.touch("pinned", None, keep=True)
            store.put("large", bytes(500 << 10))
        assert store.get("large") == bytes(500 << 10)
    with store_over(local(2, capacity=1 << 20), 2) as whole, pytest.raises(ObjectTooLargeError, match="larger than"):
        whole.put("huge", bytes(2 << 20))


def test_nodes_without_room_are_named(local: Nodes) -> None:
    nodes = local(2, capacity=1 << 20)
    for node in nodes:
        with store_over([node]) as alone:
            alone.put("kept", bytes(880 << 10))
            alone.touch("kept", None, keep=True)
    with (
        store_over(nodes, 2) as store,
        pytest.raises(ReplicationError, match=r"0 of 2 nodes confirmed the put \(.*node"),
    ):
        store.put("k", bytes(500 << 10))
    with store_over(nodes[:1]) as single, pytest.raises(NodeFullError, match=nodes[0].name):
        single.put("k", bytes(500 << 10))


def test_a_hit_on_one_copy_keeps_the_others_and_makes_missing_ones_again(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, 2) as store:
        store.put("k", LARGE, ttl=1000)
        first, second, third = ranked(store, nodes)
        lose_at(second, b"k")
        assert store.get("k") == LARGE
        eventually(lambda: b"k" in held(second))
        lose_at(first, b"k")
        assert store.get("k") == LARGE  # from the second, and the first gets it back
        eventually(lambda: b"k" in held(first))
        assert b"k" not in held(third)
        for node in (first, second):
            with store_over([node]) as alone:
                ttl = alone.stat("k").ttl  # type: ignore[union-attr]
                assert ttl is not None
                assert 0 < ttl <= 1000


def test_upkeep_waits_for_the_next_hit_if_no_thread_can_be_started(
    local: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "farpool-store-upkeep":
            raise RuntimeError("can't start new thread")
        start(thread)

    nodes = local(2)
    with store_over(nodes, 2) as store, store_over(nodes, 2) as other:
        store.put("k", LARGE)
        first, second = ranked(store, nodes)
        lose_at(second, b"k")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            assert store.get("k") == LARGE
            assert other.get("k") == LARGE
            other.close()
        assert b"k" not in held(second)
        assert store.get("k") == LARGE
        eventually(lambda: b"k" in held(second))
        assert b"k" in held(first)


def test_upkeep_begins_again_after_an_unexpected_error(local: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    nodes = local(2)
    with store_over(nodes, 2) as store:
        store.put("k", LARGE)
        _, second = ranked(store, nodes)
        lose_at(second, b"k")
        with monkeypatch.context() as patched:
            patched.setattr(upkeep, "probe", lambda *_, **__: 1 / 0)
            assert store.get("k") == LARGE
            eventually(lambda: bool(told))
        assert store.get("k") == LARGE
        eventually(lambda: b"k" in held(second))
    assert [one.exc_type for one in told] == [ZeroDivisionError]


def test_a_hot_object_stays_on_all_its_nodes_while_others_come_and_go(local: Nodes) -> None:
    nodes = local(2, capacity=1 << 20)
    hot = [f"hot{number}" for number in range(8)]
    with store_over(nodes, 2) as store:
        store.put_many((key, bytes(10_000)) for key in hot)
        for turn in range(40):
            assert all(size is not None for size in store.lookup(hot).sizes)
            assert store.get_many(hot) == [bytes(10_000)] * 8
            # The other copies are told of hits by a thread that ends then.
            eventually(lambda: not any(one.name == "farpool-store-upkeep" for one in threading.enumerate()))
            store.put_many((f"cold{turn}/{number}", bytes(20_000)) for number in range(10))
        assert nodes[0].server is not None
        assert nodes[0].server.stats()["evictions"] > 100
        for node in nodes:
            assert {key.encode() for key in hot} <= held(node)


@pytest.mark.slow
def test_a_sweep_makes_missing_copies_again_and_keeps_what_is_kept(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, 2) as store:
        keys = [f"{number}" for number in range(60)]
        store.put_many(((key, key.encode() * 100) for key in keys), ttl=1000)
        store.touch("7", None, keep=True)
        told: list[tuple[int, int]] = []
        for node in nodes:
            node.replace()
            eventually(lambda: all(status.stats is not None for status in store.nodes()))
            repaired = store.repair(progress=lambda done, whole: told.append((done, whole)))
            assert (repaired.objects, repaired.mended) == (60, repaired.endangered)
            assert store.repair().endangered == 0
        assert told[-1][0] == told[-1][1]
        assert store.get_many(keys) == [key.encode() * 100 for key in keys]
        info = store.stat("7")
        assert info is not None
        assert info.kept
        assert store.stat("8").ttl <= 1000  # type: ignore[union-attr, operator]


def test_a_sweep_by_a_coroutine_tells_how_far_it_is(local: Nodes) -> None:
    nodes = local(2)

    async def program() -> None:
        store = AsyncStore.__new__(AsyncStore)
        store._begin(store_over(nodes, 2))
        async with store:
            assert await store.put("parts", (b"a", b"b")) == "stored"
            target = bytearray(1), bytearray(1)
            assert await store.get_into("parts", target) == 2
            assert target == (b"a", b"b")
            assert await store.largest() == store._store.largest() > 0
            nodes[0].replace()
            eventually(lambda: all(status.stats is not None for status in store._store.nodes()))
            told: list[tuple[int, int]] = []
            repaired = await store.repair(progress=lambda done, whole: told.append((done, whole)))
            assert repaired.mended == repaired.endangered == 1
            assert told[-1] == (1, 1)

    asyncio.run(program())


def test_a_sweep_passes_over_nodes_that_are_away(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, 2) as store:
        keys = [f"{number}" for number in range(30)]
        store.put_many((key, key.encode()) for key in keys)
        nodes[0].kill()
        repaired = store.repair()
        assert repaired.endangered > 0
        assert repaired.mended == repaired.endangered
        assert held(nodes[1]) == held(nodes[2]) == {key.encode() for key in keys}


def test_a_node_that_is_met_late_counts_as_well(local: Nodes) -> None:
    nodes = local(2)
    nodes[1].kill()
    with store_over(nodes) as store:
        store.put("k", b"v")
        nodes[1].restart()
        cluster = cluster_of(store)
        eventually(lambda: len(cluster.reachable(cluster.deadline()).met) == 2)
        eventually(lambda: cluster.members[1].status() == (0.0, ""))  # the probe that met it has ended then


def test_what_a_program_has_read_before_it_ends_has_its_copies_again(local: Nodes) -> None:
    nodes = local(3)
    values = {f"{number}": b"%d" % number * 1000 for number in range(200)}
    with store_over(nodes, 2) as writer:
        writer.put_many(values)
    nodes[0].replace()
    with store_over(nodes, 2) as reader:
        assert reader.get_many(values) == list(values.values())
    nodes[1].replace()
    with store_over(nodes, 2) as later:
        assert later.get_many(values) == list(values.values())


def test_a_sweep_copies_from_another_node_what_is_damaged_on_the_first(local: Nodes) -> None:
    nodes = local(4)
    value = os.urandom(10_000)
    with store_over(nodes, 3) as store:
        store.put("k", value)
        lose_at(ranked(store, nodes)[2], b"k")
        holders = [node for node in nodes if b"k" in held(node)]
        assert len(holders) == 2
        holders[0].damage(value)
        assert store.repair().mended == 1
        assert sum(b"k" in held(node) for node in nodes) == 3


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_reader_with_another_number_of_copies_is_told_once(local: Nodes, mapped: bool, many: bool) -> None:
    nodes = local(2, mapped=mapped)
    with store_over(nodes, 2) as writer, store_over(nodes, 1) as reader:
        writer.put_many({"a": b"v", "b": b"v"})
        reader.put("own", b"v")
        assert reader.get("own") == b"v"
        with pytest.warns(FarpoolWarning, match="put with replicas=2, this store has replicas=1"):
            assert (reader.get_many(["a"]) if many else [reader.get("a")]) == [b"v"]
        for _ in range(3):  # at most one more from each node that is asked over the wire
            assert reader.get_many(["a", "b"]) == [b"v", b"v"]
        before = asked(nodes)
        assert reader.get_many(["a", "b"]) == [b"v", b"v"]
        assert asked(nodes) - before == (0 if mapped else 2)


def asked(nodes: list[LocalNode]) -> int:
    """How many objects were asked for over connections."""
    return sum(node.server.stats()["gets"] for node in nodes if node.server is not None)


@pytest.mark.slow
def test_who_depends_on_nodes_that_were_never_met_is_told_which_and_why(local: Nodes) -> None:
    nodes = local(3)
    for node in nodes[1:]:
        node.kill()

    def asks(store: Store) -> list[Callable[[], object]]:
        return [
            lambda: store.get("k"),
            lambda: store.stat("k"),
            lambda: store.exists("k"),
            lambda: list(store.objects()),
            lambda: store.put("other", b"v"),
        ]

    with store_over(nodes, 2, timeout=0.3) as store:
        for ask in asks(store):
            with pytest.raises(ReplicationError) as raised:
                ask()
            for node in nodes[1:]:
                assert f"{node.name}: connecting failed: Connection refused" in str(raised.value)
    with store_over(nodes, 1, timeout=0.3) as store:
        for ask in asks(store)[:3]:
            with pytest.raises(NodeError, match="connecting failed: Connection refused") as alone:
                ask()
            assert alone.value.node in [node.name for node in nodes[1:]]


def test_a_damaged_copy_is_passed_over_and_named_if_there_is_no_other(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, 2) as store:
        store.put("k", LARGE)
        first, second, _ = ranked(store, nodes)
        first.damage(LARGE)
        assert store.get("k") == LARGE
        into = bytearray(len(LARGE))
        assert store.get_into("k", into) == len(LARGE)
        assert into == LARGE
        second.damage(LARGE)
        with pytest.raises(ChecksumError):
            store.get("k")


def test_a_buffer_that_is_too_small_is_refused(local: Nodes, shape: tuple[int, int]) -> None:
    for mapped in (False, True):
        with store_over(local(shape[0], mapped=mapped), shape[1]) as store:
            store.put("k", b"value")
            with pytest.raises(ValueError, match=r"5.*4|4.*5"):
                store.get_into("k", bytearray(4))
            with pytest.raises(ValueError, match="read-only"):
                store.get_into("k", b"12345")


READS: list[Callable[[Store], object]] = [
    lambda store: store.get("k"),
    lambda store: store.stat("k"),
    lambda store: store.lookup(["k"]),
    lambda store: store.pin("k"),
]
WRITES: list[Callable[[Store], object]] = [
    lambda store: store.put("k", b"v"),
    lambda store: store.put_many({"k": b"v"}),
    lambda store: store.touch("k", 5),
    lambda store: store.drop("k"),
]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_right_that_the_key_lacks_is_named(local: Nodes, copies: int) -> None:
    nodes = local(copies)
    for rights, lacking, calls in ((Right.PUBLISH, "read", READS), (Right.READ, "publish", WRITES)):
        for node in nodes:
            node.rights = int(rights)
        with store_over(nodes, copies) as store:
            for call in calls:
                with pytest.raises(AccessDeniedError, match=f"node.:7471: the access key lacks the right '{lacking}'"):
                    call(store)


def test_a_connection_that_broke_while_idle_is_made_anew(local: Nodes, shape: tuple[int, int]) -> None:
    nodes = local(shape[0])
    with store_over(nodes, shape[1]) as store:
        for call in (*READS[:3], *WRITES):
            store.put("k", b"v")
            for node in nodes:
                node.kill()
                node.restart()
            call(store)


@pytest.mark.slow
def test_a_call_uses_its_time_up_before_it_fails_and_succeeds_if_the_node_comes_back(local: Nodes) -> None:
    (node,) = local()
    with store_over([node], timeout=0.3) as store:
        store.put("k", b"v")
        node.kill()
        for call in (*READS, *WRITES):
            began = time.monotonic()
            with pytest.raises(NodeError, match="refused"):
                call(store)
            assert time.monotonic() - began >= 0.29
        with pytest.raises(NodeError, match="refused"):
            list(store.keys())
        assert [status.stats for status in store.nodes()] == [None]
    for call in (*READS[:3], *WRITES):
        with store_over([node], timeout=60) as store:
            node.kill()
            timer = threading.Timer(0.1, node.restart)
            timer.start()
            call(store)
            timer.join()


def test_a_node_that_does_not_answer_is_passed_over_within_its_share_of_the_time(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, 2) as store:
        store.put("k", b"v")
        first = ranked(store, nodes)[0]
        cluster = cluster_of(store)
        number = nodes.index(first)
        stopped = StoppedChannel(first)
        stopped.welcome = cluster.members[number].channel.welcome
        cluster.members[number].channel = stopped  # type: ignore[assignment]
        cluster.members[number].pool = stopped.pool
        cluster.timeout = 1.0
        assert store.get("k") == b"v"
        assert store.put("other", b"w") is STORED
        assert store.get("other") == b"w"


def test_an_answer_that_is_late_for_a_short_call_leaves_its_node_in_use(
    local: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stands still for a second would let a probe of this healthy node fail.
    monkeypatch.setattr("farpool.cluster.store.member._PROBE_TIMEOUT_S", PATIENCE)
    nodes = local(1, capacity=64 * MIB)
    value = bytes(32 * MIB)
    with store_over(nodes) as store:
        store.put("large", value)
        store.put("small", b"v")
        member = cluster_of(store).members[0]
        calls = store.best_effort()
        into = memoryview(bytearray(len(value)))
        for _ in range(20):
            (late,) = calls.get_into_many([b"large"], [into], 0.001)
            assert isinstance(late, NodeTimeoutError)
            assert "is not asked" not in str(late)
            assert not member.is_failing
            assert calls.lookup([b"small"], PATIENCE) == [1]
        assert store.nodes()[0].failing == 0


def test_a_node_that_stays_silent_is_left_alone_after_short_calls_too(local: Nodes) -> None:
    nodes = local(1)
    with store_over(nodes) as store:
        store.put("key", b"v")
        member = cluster_of(store).members[0]
        stopped = StoppedChannel(nodes[0])
        stopped.welcome = member.channel.welcome
        member.channel, member.pool = stopped, stopped.pool  # type: ignore[assignment]
        calls = store.best_effort()
        (late,) = calls.get_into_many([b"key"], [memoryview(bytearray(8))], 0.002)
        assert isinstance(late, NodeTimeoutError)
        eventually(lambda: member.is_failing)
        (refused,) = calls.lookup([b"key"], PATIENCE)
        assert "is not asked" in str(refused)


def test_what_one_of_a_batch_cannot_do_leaves_the_others_done(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, timeout=1.0) as store:
        keys = [f"{number}" for number in range(20)]
        store.put("contact", b"")
        order = {key: ranked(store, nodes, key.encode()) for key in keys}
        store.put_many((key, b"v") for key in keys)
        nodes[1].kill()
        there = [key for key in keys if order[key][0] is nodes[0]]
        assert 0 < len(there) < 20
        assert store.get_many(there) == [b"v"] * len(there)
        with pytest.raises(NodeError) as caught:
            store.get_many(keys)
        assert f"{20 - len(there)} of 20" in caught.value.__notes__[0]
        failed = [repr(key.encode()) for key in keys if key not in there]
        assert caught.value.__notes__[0].endswith("Failed: " + ", ".join(failed))


def pins_of(store: Store) -> int:
    info = store.stat("k")
    assert info is not None
    return info.pins


def test_an_object_in_use_stays_pinned(local: Nodes) -> None:
    node = local(mapped=True)[0]
    with store_over([node]) as store:
        store.put("k", LARGE)
        pin = store.pin("k")
        assert pins_of(store) == 1
        array = memoryview(pin.view)
        with pytest.raises(BufferError, match="in use"):
            pin.release()
        assert pins_of(store) == 1
        array.release()
        pin.release()
        pin.release()
        assert pins_of(store) == 0
        with pytest.raises(ValueError, match="was released"):
            _ = pin.view


def test_an_error_in_a_pins_block_is_not_hidden_by_what_it_still_holds(local: Nodes) -> None:
    node = local(mapped=True)[0]
    with store_over([node]) as store:
        store.put("k", LARGE)
        pin = store.pin("k")
        array = memoryview(pin.view)
        with pytest.raises(RuntimeError, match="the program's own") as caught, pin:
            raise RuntimeError("the program's own")
        assert "in use" in caught.value.__notes__[0]
        array.release()
        pin.release()
        assert pins_of(store) == 0


def test_a_coroutine_leaves_a_pins_block_as_a_call_does(local: Nodes) -> None:
    node = local(mapped=True)[0]

    async def program() -> None:
        store = AsyncStore.__new__(AsyncStore)
        store._begin(store_over([node]))
        await store.put("k", LARGE)
        arrays: list[memoryview] = []

        async def fails() -> None:
            async with store.pin("k") as pin:
                arrays.append(memoryview(pin.view))
                raise RuntimeError("the program's own")

        with pytest.raises(RuntimeError, match="the program's own") as caught:
            await fails()
        assert "in use" in caught.value.__notes__[0]
        arrays.clear()
        async with store.pin("k") as pin:
            await store.close()
            assert pin.view == LARGE
        with pytest.raises(ValueError, match="was released"):
            _ = pin.view

    asyncio.run(program())


def test_large_values_go_through_a_publish_area_and_small_ones_are_sent(local: Nodes) -> None:
    (node,) = local(mapped=True)
    with store_over([node]) as store:
        store.put("first", LARGE)  # is sent together with the question for an area
        assert node.server is not None
        before = node.server.stats()["bytes_in"]
        store.put("large", LARGE)
        assert node.server.stats()["bytes_in"] - before < 1000
        store.put("small", LARGE[: 16 << 10])
        assert node.server.stats()["bytes_in"] - before > 16 << 10


def test_the_longer_time_to_live_wins_until_the_object_is_let_go(local: Nodes, shape: tuple[int, int]) -> None:
    nodes = local(shape[0])
    with store_over(nodes, shape[1]) as store:

        def ttl() -> float | None:
            info = store.stat("k")
            assert info is not None
            return info.ttl

        store.put("k", b"v", ttl=100)
        assert 0 < (ttl() or 0) <= 100
        store.put("k", b"v", ttl=1000)
        assert 900 < (ttl() or 0) <= 1000
        assert store.touch("k", 50)
        assert 900 < (ttl() or 0) <= 1000
        assert store.touch("k", None)
        assert ttl() is None
        assert store.touch("k", 60, keep=False)
        assert 0 < (ttl() or 0) <= 60
        store.put("brief", b"v", ttl=0.05)
        eventually(lambda: store.get("brief") is None)
        assert not store.exists("brief")


def test_a_put_of_two_copies_makes_at_most_ten_calls_of_python(local: Nodes) -> None:
    with store_over(local(2), 2) as store:
        store.put("warm", LARGE)
        called: list[str] = []

        def note(frame: object, event: str, _: object) -> None:
            if event == "call":
                called.append(frame.f_code.co_qualname)  # type: ignore[attr-defined]

        sys.setprofile(note)
        try:
            store.put("k", LARGE)
        finally:
            sys.setprofile(None)
        assert len(called) <= 10, called


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda store: store.get(""), "0 bytes, expected 1 to 256"),
        (lambda store: store.get("é" * 129), "258 bytes, expected 1 to 256"),
        (lambda store: store.get("a\udcff"), r"the key 'a\\udcff' has a character that UTF-8 does not have, '\\udcff'"),
        (lambda store: store.objects("x" * 257), "the prefix 'x+' has 257 bytes, expected 0 to 256"),
        (lambda store: store.keys("\udcff"), "the prefix .* UTF-8"),
        (lambda store: store.put("k", b"", ttl=0), "ttl is 0, expected seconds above 0"),
        (lambda store: store.touch("k", float("nan")), "ttl is nan"),
        (lambda store: store.touch("k", 1e18), r"ttl is 1e\+18, expected seconds above 0 and at most 1e\+16"),
        (lambda store: store.put("k", b"", ttl=10**5000), "ttl is too large a number"),
    ],
)
def test_wrong_arguments_are_named(local: Nodes, call: Callable[[Store], object], named: str) -> None:
    with store_over(local()) as store, pytest.raises(ConfigError, match=named):
        call(store)


def test_values_of_wrong_types_are_named(local: Nodes) -> None:
    with store_over(local()) as store:
        with pytest.raises(TypeError, match="a key is a str or bytes, this one is a int"):
            store.get(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a prefix is a str or bytes, this one is a int"):
            store.objects(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            store.put("k", "text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not contiguous"):
            store.put("k", memoryview(b"abcd")[::2])


@pytest.mark.parametrize(
    ("nodes", "settings", "named"),
    [
        ((), {}, "missing"),
        (("tcp://a:1", "a:1"), {}, "given twice"),
        (("nonsense",), {}, "node is 'nonsense'"),
        (("a:1",), {"replicas": 2}, "replicas is 2, expected 1 to 1"),
        (("a:1",), {"timeout": 0}, "timeout is 0, expected seconds above 0"),
        (("a:1",), {"timeout": 1e10}, "timeout is 10000000000.0, expected seconds above 0, .* at most 1,000,000"),
        (("a:1",), {"timeout": 10**5000}, "timeout is too large a number"),
        (("a:1",), {"transport": "pigeon"}, "transport is 'pigeon'"),
    ],
)
def test_wrong_settings_are_named(nodes: tuple[str, ...], settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Store(*nodes, **settings)  # type: ignore[arg-type]


def test_one_node_under_two_names_is_refused(local: Nodes) -> None:
    nodes = local(3)
    nodes[2].identity = nodes[0].identity
    nodes[2].kill()
    nodes[2].restart()
    for call in (*READS, *WRITES, lambda store: store.nodes()):
        with (
            store_over(nodes, 2) as store,
            pytest.raises(ConfigError, match=r"tcp://node[02]:7471 and tcp://node[02]:7471 are the same node"),
        ):
            call(store)


def test_a_closed_store_says_so_and_cannot_be_pickled(local: Nodes) -> None:
    store = store_over(local())
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="was closed"):
        store.get("k")


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(local: Nodes) -> None:
    with store_over(local()) as store:
        store.put("k", b"v")
        child = os.fork()
        if child == 0:
            try:
                store.get("k")
            except StoreClosedError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.get("k") == b"v"


def test_threads_share_a_store(local: Nodes) -> None:
    errors: list[BaseException] = []
    with store_over(local(3), 2) as store:

        def work(number: int) -> None:
            try:
                for turn in range(30):
                    key, value = f"{number}/{turn}", b"%d" % turn
                    assert store.put(key, value) is STORED
                    assert store.get(key) == value
                    store.put("shared", b"%d" % number)
                    assert store.drop(key)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert store.get("shared") in {b"0", b"1", b"2", b"3"}
    assert not errors


def test_a_touch_of_nothing_asks_no_node(local: Nodes) -> None:
    (node,) = local()
    node.kill()
    with store_over([node], timeout=0.3) as store:
        assert store.touch_many([], None).copies == []


def test_a_drop_for_a_cache_names_the_node_that_could_not_be_asked_before_one_that_refused(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes) as store:
        store.put("key", b"value")
        cluster = cluster_of(store)
        first = cluster.snapshot.met[0]
        denied, away = SimpleNamespace(status=Status.DENIED, meta=b""), NodeError("away")
        cluster.ask = lambda asks, deadline: [denied if one.member is first else away for one in asks]  # type: ignore[method-assign,assignment,misc]
        assert store.best_effort().drop_many([b"key", b"other"], 1) == [away, away]
        assert store.best_effort().drop_many([], 1) == []


def test_values_are_demoted_also_if_their_nodes_leave_during_the_call(local: Nodes) -> None:
    nodes = local(2)
    members = StaticMembers(nodes[0].name)
    with store_over(nodes, members=members) as store:
        store.put("key", b"value")
        cluster = cluster_of(store)
        answers = iter([Status.FULL, Status.DONE])

        def ask(asks: Sequence[Any], deadline: float) -> list[Any]:
            cluster._replace(())
            return [SimpleNamespace(status=next(answers), meta=b"")]

        cluster.ask = ask  # type: ignore[method-assign,assignment]
        assert store.best_effort().demote_many([b"key"], 0.5) == [Demotion.LOWER]
