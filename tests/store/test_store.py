"""What a program gets from the store, on nodes that can fail in each way."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Callable

import pytest

from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    NodeError,
    NodeFullError,
    ObjectTooLargeError,
    ReplicationError,
    StoreClosedError,
)
from farpool.store import AsyncStore, Store
from farpool.transport.frames import Op
from tests.store.fake_nodes import FakeConnection, FakeNode, channel_of, core_of, store_over

LARGE = bytes(range(256)) * 257  # goes through mapped memory


def fakes(count: int, *, mapped: bool = False) -> list[FakeNode]:
    return [FakeNode(f"tcp://node{number}:7471", mapped=mapped) for number in range(count)]


def ranked(store: Store, nodes: list[FakeNode], key: bytes = b"k") -> list[FakeNode]:
    return [nodes[number] for number in core_of(store).group(key).nodes]


@pytest.fixture(
    params=[(1, 1), (3, 1), (2, 2), (5, 2), (5, 3)], ids=lambda shape: f"{shape[0]}-nodes-{shape[1]}-copies"
)
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
@pytest.mark.parametrize("value", [b"", b"value", LARGE], ids=["empty", "small", "large"])
def test_what_was_put_is_read_in_each_way(shape: tuple[int, int], mapped: bool, value: bytes) -> None:
    with store_over(*fakes(shape[0], mapped=mapped), replicas=shape[1]) as store:
        first = store.put("k", b"old")
        generation = store.put("k", bytearray(value))
        assert generation > first
        into = bytearray(len(value) + 3)
        for _ in range(2):  # through a socket, then mapped
            assert store.get(b"k") == value
            assert store.get_into("k", into) == len(value)
            assert bytes(into[: len(value)]) == value
        with store.pin("k") as pin:
            assert pin.view == value
            assert pin.generation == generation
            assert pin.is_mapped == mapped
            pin.verify()
        info = store.stat("k")
        assert info is not None
        assert (info.nbytes, info.generation, info.expires, info.pins) == (len(value), generation, None, 0)
        assert store.exists("k")
        assert list(store.keys()) == [b"k"]
        assert store.delete("k") is True
        assert store.delete("k") is False
        assert store.get("k") is None
        assert store.get_into("k", into) is None
        assert store.stat("k") is None
        assert not store.touch("k", 5)
        assert list(store.keys()) == []
        with pytest.raises(KeyError, match="k"):
            store.pin("k")


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_batches_do_as_single_calls_do(shape: tuple[int, int], mapped: bool) -> None:
    nodes = fakes(shape[0], mapped=mapped)
    with store_over(*nodes, replicas=shape[1]) as store:
        values = {f"key{number}": (b"%d" % number) * (number % 7) * 1000 for number in range(300)}
        generations = store.put_many(values)
        assert len(set(generations)) == 300
        assert store.get_many([*values, "none"]) == [*values.values(), None]
        buffers = [bytearray(len(value)) for value in values.values()]
        assert store.get_into_many(zip(values, buffers, strict=True)) == [len(value) for value in values.values()]
        assert [bytes(buffer) for buffer in buffers] == list(values.values())
        assert store.exists_many(["key1", "none", "key2"]) == [True, False, True]
        assert {key.decode() for key in store.keys("key1")} == {key for key in values if key.startswith("key1")}
        assert store.delete_many(["key1", "none"]) == [True, False]
        assert store.get_many(["key1", "key2"]) == [None, values["key2"]]
        assert store.get_many([]) == []


def test_a_copy_is_on_as_many_nodes_as_asked_for(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    with store_over(*nodes, replicas=shape[1]) as store:
        for number in range(50):
            key = b"%d" % number
            store.put(key, b"v")
            assert [key in node.memory.entries for node in ranked(store, nodes, key)[: shape[1]]] == [True] * shape[1]
            assert sum(key in node.memory.entries for node in nodes) == shape[1]
    if shape[0] > 1:
        assert all(node.memory.entries for node in nodes)


def test_a_deletion_that_all_nodes_have_confirmed_leaves_nothing(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    with store_over(*nodes, replicas=shape[1]) as store:
        store.put("k", b"v")
        store.delete("k")
    assert all(not node.memory.entries for node in nodes)


def test_a_publish_with_a_clock_behind_still_wins() -> None:
    nodes = fakes(3)
    ahead, behind = store_over(*nodes, replicas=2), store_over(*nodes, replicas=2)
    core_of(ahead).clock._microseconds = lambda: 10**12
    core_of(behind).clock._microseconds = lambda: 10**9
    ahead.put("k", b"first")
    behind.put("k", b"second")
    assert ahead.get("k") == b"second"
    assert behind.delete("k")
    assert ahead.get("k") is None


def test_a_deletion_that_takes_two_attempts_says_that_there_was_an_object() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        generation = store.put("k", b"v")
        ranked(store, nodes)[2].memory.base_floor = generation + (10**7 << 12)
        assert store.delete("k") is True
        assert store.delete("k") is False


def test_an_object_survives_the_loss_of_all_nodes_but_the_ones_that_are_needed() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        for lost in nodes:
            store.put("k", b"v")
            lost.up = False
            assert store.get("k") == b"v"
            store.put("k", b"w")
            assert store.get("k") == b"w"
            lost.restart(forget=True, now=0)
            assert store.get("k") == b"w"


def test_an_old_replica_that_comes_back_is_not_believed() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        store.put("k", b"old")
        first, second, third = ranked(store, nodes)
        first.stopped = True
        store.put("k", b"new")
        first.resume()
        second.up = False
        assert store.get("k") == b"new"
        second.up, third.up = True, False
        assert store.get("k") == b"new"
        second.up = False
        with pytest.raises(ReplicationError, match="1 of 3 nodes answered, 2 are needed"):
            store.get("k")


def test_a_deleted_key_does_not_come_back_with_an_old_replica() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        store.put("k", b"old")
        first = ranked(store, nodes)[0]
        first.stopped = True
        assert store.delete("k") is True
        first.restart(forget=False)
        assert first.memory.entries[b"k"].payload == b"old"
        assert store.get("k") is None
        assert list(store.keys()) == []
        assert core_of(store).settle()
        assert all(not node.memory.entries for node in nodes)


@pytest.mark.parametrize("deleted", [False, True], ids=["replaced", "deleted"])
def test_an_old_replica_is_not_believed_when_the_others_have_dropped_what_they_knew(deleted: bool) -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        store.put("k", b"old")
        first, second, third = ranked(store, nodes)
        first.up = False
        if deleted:
            store.delete("k")
        else:
            store.put("k", b"new")
        second.evict(b"k")
        third.evict(b"k")
        first.up = True
        assert store.get("k") is None
        assert store.stat("k") is None
        second.restart(forget=True, now=2**51)
        assert store.get("k") is None


def test_deletions_of_a_program_that_has_ended_are_finished_by_another() -> None:
    nodes = fakes(3)
    gone = store_over(*nodes, replicas=2)
    keys = [f"key{number}" for number in range(20)]
    gone.put_many((key, b"old") for key in keys)
    nodes[0].up = False
    gone.delete_many(keys)
    gone.close()
    nodes[0].up = True
    assert nodes[0].memory.entries
    with store_over(*nodes, replicas=2) as store:
        assert store.get_many(keys) == [None] * 20
        assert store.reconcile() == 20
        assert all(not node.memory.entries for node in nodes)
        assert store.reconcile() == 0


def test_a_reader_repairs_what_missed_a_deletion() -> None:
    nodes = fakes(2)
    writer, reader = store_over(*nodes, replicas=2), store_over(*nodes, replicas=2)
    writer.put("k", b"old")
    second = ranked(writer, nodes)[1]
    second.up = False
    with pytest.raises(ReplicationError, match="1 of 2 nodes confirmed the deletion"):
        writer.delete("k")
    second.up = True
    assert reader.stat("k") is None
    # One node's word is enough here, so that only a look at both meets the old copy.
    assert not reader.touch("k", 1)
    assert core_of(reader).settle()
    assert all(not node.memory.entries for node in nodes)


def test_a_dropped_object_is_found_in_another_rank() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        store.put("k", b"v")
        ranked(store, nodes)[0].evict(b"k")
        assert store.get("k") == b"v"
        ranked(store, nodes)[1].evict(b"k")
        assert store.get("k") is None


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_a_damaged_copy_is_passed_over_and_named_if_there_is_no_other(mapped: bool) -> None:
    nodes = fakes(3, mapped=mapped)
    with store_over(*nodes, replicas=2) as store:
        store.put("k", b"value")
        for _ in range(2):
            ranked(store, nodes)[0].memory.entries[b"k"].payload = b"valuE"
            assert store.get("k") == b"value"
            into = bytearray(5)
            assert store.get_into("k", into) == 5
            assert into == b"value"
        ranked(store, nodes)[1].memory.entries[b"k"].payload = b"vAlue"
        with pytest.raises(ChecksumError):
            store.get("k")
    with store_over(nodes[0]) as single:
        single.put("s", b"value")
        nodes[0].memory.entries[b"s"].payload = b"valuE"
        with pytest.raises(ChecksumError):
            single.get("s")


def test_a_buffer_that_is_too_small_is_refused(shape: tuple[int, int]) -> None:
    with store_over(*fakes(shape[0]), replicas=shape[1]) as store:
        store.put("k", b"value")
        with pytest.raises(ValueError, match="the buffer has 4 bytes, the object 5"):
            store.get_into("k", bytearray(4))
        with pytest.raises(ValueError, match="read-only"):
            store.get_into("k", b"12345")


def test_a_full_node_is_passed_over_and_named_if_there_is_no_other() -> None:
    nodes = fakes(3)
    with store_over(*nodes, replicas=2) as store:
        first, second, third = ranked(store, nodes)
        first.full = True
        store.put("k", b"v")
        assert [b"k" in node.memory.entries for node in (first, second, third)] == [False, True, True]
        assert store.get("k") == b"v"
        second.full = True
        with pytest.raises(ReplicationError, match=r"1 of 2 nodes confirmed the publish .*no room"):
            store.put("k", b"w")
        for node in nodes:
            node.full, node.largest = False, 3
        with pytest.raises(ObjectTooLargeError, match="larger than the node"):
            store.put("k", b"four")
    nodes[0].full = True
    with store_over(nodes[0]) as single, pytest.raises(NodeFullError, match="no room"):
        single.put("k", b"v")


READS = frozenset({Op.GET, Op.STAT, Op.PIN})
WRITES = frozenset(Op) - READS


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], indirect=True)
def test_a_right_that_the_key_lacks_is_named(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    with store_over(*nodes, replicas=shape[1]) as store:
        reads: list[Callable[[], object]] = [lambda: store.get("k"), lambda: store.stat("k"), lambda: store.pin("k")]
        writes: list[Callable[[], object]] = [
            lambda: store.put("k", b"v"),
            lambda: store.put_many({"k": b"v"}),
            lambda: store.touch("k", 5),
            lambda: store.delete("k"),
        ]
        for denied, right, calls in ((READS, "read", reads), (WRITES, "publish", writes)):
            for node in nodes:
                node.denied = denied
            for call in calls:
                with pytest.raises(AccessDeniedError, match=f"node.:7471: the access key lacks the right '{right}'"):
                    call()


def test_what_a_single_node_refuses_is_sent_once() -> None:
    node = fakes(1)[0]
    with store_over(node) as store:
        node.largest = 3
        with pytest.raises(ObjectTooLargeError, match=r"the object of 4 bytes \(4 B\) is larger than the node"):
            store.put("k", b"four")
        node.full = True
        with pytest.raises(NodeFullError, match="no room"):
            store.put("k", b"v")
        node.denied = WRITES
        with pytest.raises(AccessDeniedError):
            store.put("k", b"v")
    assert node.served == [Op.PUT] * 3


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 3)], indirect=True)
def test_a_key_that_may_only_publish_is_told_whether_it_has_deleted(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    with store_over(*nodes, replicas=shape[1]) as store:
        for node in nodes:
            node.denied = READS
        assert not store.delete("k")
        store.put("k", b"v")
        assert store.delete("k")
        assert not store.delete("k")
        store.put_many({"a": b"v"})
        assert store.delete_many(["a", "b"]) == [True, False]


def test_a_connection_that_broke_while_idle_is_made_anew(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    calls: list[Callable[[Store], object]] = [
        lambda store: store.put("k", b"v"),
        lambda store: store.put_many({"k": b"v"}),
        lambda store: store.get("k"),
        lambda store: store.get_many(["k"]),
        lambda store: store.delete("k"),
    ]
    with store_over(*nodes, replicas=shape[1]) as store:
        for call in calls:
            store.put("k", b"v")
            for node in nodes:
                node.restart(forget=False)
            call(store)
        for call in calls:
            for node in nodes:
                node.lose_replies = 1
            call(store)


def test_one_node_that_is_down_gives_its_own_error() -> None:
    node = fakes(1)[0]
    with store_over(node) as store:
        node.up = False
        for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.delete("k")):
            with pytest.raises(NodeError, match="tcp://node0:7471 refused the connection") as caught:
                call()
            assert caught.value.node == node.name
        with pytest.raises(NodeError, match="refused"):
            store.get_many(["a", "b"])
        with pytest.raises(NodeError, match="refused"):
            list(store.keys())
        assert [status.stats for status in store.nodes()] == [None]


def test_what_one_of_a_batch_cannot_do_leaves_the_others_done() -> None:
    nodes = fakes(2)
    with store_over(*nodes) as store:
        keys = [f"{number}" for number in range(20)]
        nodes[1].up = False
        with pytest.raises(NodeError) as caught:
            store.put_many((key, b"v") for key in keys)
        there = [key for key in keys if ranked(store, nodes, key.encode())[0] is nodes[0]]
        assert f"{20 - len(there)} of 20" in caught.value.__notes__[0]
        assert 0 < len(there) < 20
        assert store.get_many(there) == [b"v"] * len(there)


def test_an_object_in_use_stays_pinned() -> None:
    node = fakes(1, mapped=True)[0]
    with store_over(node) as store:
        store.put("k", LARGE)
        pin = store.pin("k")
        assert node.memory.entries[b"k"].pins == 1
        array = memoryview(pin.view)
        with pytest.raises(BufferError, match="in use"):
            pin.release()
        assert node.memory.entries[b"k"].pins == 1
        array.release()
        pin.release()
        pin.release()
        assert node.memory.entries[b"k"].pins == 0
        with pytest.raises(ValueError, match="was released"):
            _ = pin.view


def test_an_error_in_a_pins_block_is_not_hidden_by_what_it_still_holds() -> None:
    node = fakes(1, mapped=True)[0]
    with store_over(node) as store:
        store.put("k", LARGE)
        pin = store.pin("k")
        array = memoryview(pin.view)
        with pytest.raises(RuntimeError, match="the program's own") as caught, pin:
            raise RuntimeError("the program's own")
        assert "in use" in caught.value.__notes__[0]
        array.release()
        pin.release()
        assert node.memory.entries[b"k"].pins == 0


def test_a_coroutine_leaves_a_pins_block_as_a_call_does() -> None:
    node = fakes(1, mapped=True)[0]

    async def program() -> None:
        store = AsyncStore.__new__(AsyncStore)
        store._begin(store_over(node))
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


def test_large_values_are_written_into_mapped_memory_and_small_ones_sent() -> None:
    node = fakes(1, mapped=True)[0]
    with store_over(node) as store:
        store.put("contact", b"")
        node.served.clear()
        store.put("large", LARGE)
        store.put("small", LARGE[: 16 << 10])
        assert node.served == [Op.PREPARE, Op.COMMIT, Op.PUT]
        node.full = True
        with pytest.raises(NodeFullError):
            store.put("large", LARGE)
        assert not node.memory.prepared


def test_what_was_prepared_is_given_back_if_it_cannot_be_written() -> None:
    node = fakes(1, mapped=True)[0]
    with store_over(node) as store:
        store.put("contact", b"")
        reader = channel_of(store, node).reader
        assert reader is not None

        def refuse(offset: int, payload: memoryview) -> int:
            raise ValueError("read-only")

        reader.write = refuse  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="read-only"):
            store.put("large", LARGE)
        assert not node.memory.prepared
        assert store.get("large") is None


@pytest.mark.parametrize("at", ["write", "commit"])
def test_what_was_prepared_is_given_back_after_an_interrupt(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fakes(1, mapped=True)[0]
    with store_over(node) as store:
        store.put("contact", b"")
        reader = channel_of(store, node).reader
        assert reader is not None

        def interrupt(*_: object, **__: object) -> int:
            raise KeyboardInterrupt

        send = FakeConnection.send

        def interrupt_commit(self: FakeConnection, op: int, *args: object, **kwargs: object) -> None:
            if op == Op.COMMIT:
                raise KeyboardInterrupt
            send(self, op, *args, **kwargs)  # type: ignore[arg-type]

        if at == "write":
            monkeypatch.setattr(reader, "write", interrupt)
        else:
            monkeypatch.setattr(FakeConnection, "send", interrupt_commit)
        with pytest.raises(KeyboardInterrupt):
            store.put("large", LARGE)
        assert not node.memory.prepared
        monkeypatch.undo()
        store.put("large", LARGE)
        assert store.get("large") == LARGE


def test_touch_changes_the_expiry_of_all_copies(shape: tuple[int, int]) -> None:
    nodes = fakes(shape[0])
    with store_over(*nodes, replicas=shape[1]) as store:
        store.put("k", b"v", ttl=100)
        before = store.stat("k")
        assert store.touch("k", 1000)
        after = store.stat("k")
        assert before is not None
        assert after is not None
        assert before.expires is not None
        assert after.expires is not None
        assert 800 < after.expires - before.expires < 1000
        assert store.touch("k", None)
        assert {node.memory.entries[b"k"].expiry for node in nodes if b"k" in node.memory.entries} == {0}


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
def test_wrong_arguments_are_named(call: Callable[[Store], object], named: str) -> None:
    with store_over(*fakes(1)) as store, pytest.raises(ConfigError, match=named):
        call(store)


def test_values_of_wrong_types_are_named() -> None:
    with store_over(*fakes(1)) as store:
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


def test_one_node_under_two_names_is_refused_where_copies_would_be_lost_together() -> None:
    nodes = fakes(3)
    nodes[2].contact.id = nodes[0].contact.id
    calls: list[Callable[[Store], object]] = [
        lambda store: store.put_many({f"{number}": b"v" for number in range(20)}),
        lambda store: store.get_many([f"{number}" for number in range(20)]),
        lambda store: list(store.keys()),
        lambda store: store.nodes(),
    ]
    for call in calls:
        with (
            store_over(*nodes, replicas=2) as store,
            pytest.raises(ConfigError, match=r"tcp://node[02]:7471 and tcp://node[02]:7471 are the same node"),
        ):
            call(store)
    with store_over(*nodes) as store:
        store.put("k", b"v")
        assert store.get("k") == b"v"


def test_a_closed_store_says_so_and_cannot_be_pickled() -> None:
    store = store_over(*fakes(1))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="was closed"):
        store.get("k")


def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    with store_over(*fakes(1)) as store:
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


def test_threads_share_a_store() -> None:
    errors: list[BaseException] = []
    with store_over(*fakes(3), replicas=2) as store:

        def work(number: int) -> None:
            try:
                for turn in range(30):
                    key, value = f"{number}", b"%d" % turn
                    store.put(key, value)
                    assert store.get(key) == value
                    store.put("shared", value)
                assert store.delete(key)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert store.get("shared") == b"29"
    assert not errors
