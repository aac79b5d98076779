"""Names over each kind of registry: publish, read, watch, hold and release."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from farpool.cluster.names import Names, Writer
from farpool.cluster.names import sending as module
from farpool.cluster.names.sending import Sending
from farpool.cluster.registry import Commit
from farpool.errors import (
    ConfigError,
    NameHeldError,
    NameLostError,
    NameMissingError,
    NameMovedError,
    RegistryAwayError,
)
from tests.forking import in_forked_child
from tests.store.names.conftest import MakeNames
from tests.store.names.memory_store import MemoryStore

LONG = 60.0
WAITS = pytest.mark.parametrize("place", ["sqlite", pytest.param("etcd", marks=pytest.mark.slow)], indirect=True)
"""Marks tests that wait until a lease has ended or a time has passed."""


def read(names: Names, name: str, version: int | None = None) -> bytes:
    with names.open(name, version) as opened:
        return opened.read()


def eventually(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def test_a_published_value_is_read_listed_and_unpublished(make: MakeNames) -> None:
    ours, theirs = make(writer="me"), make()
    assert theirs.info("a/b") is None
    first = ours.publish("a/b", b"one")
    second = ours.publish("a/b", bytearray(b"two"))
    ours.publish("a/ä %", b"")
    ours.publish("b", [b"three ", b"parts ", b""])
    assert (first.version, second.version, second.nbytes, second.writer) == (1, 2, 3, "me")
    assert read(theirs, "a/b") == b"two"
    assert read(theirs, "a/b", 1) == b"one"
    assert read(theirs, "a/ä %") == b""
    assert read(theirs, "b") == b"three parts "
    assert theirs.info("a/b") == second
    assert [info.name for info in theirs.list_names("a/")] == ["a/b", "a/ä %"]
    assert [info.name for info in theirs.list_names()] == ["a/b", "a/ä %", "b"]
    gone = theirs.unpublish("a/b")
    assert (gone.version, gone.published) == (3, False)
    assert [info.name for info in ours.list_names("a/")] == ["a/ä %"]
    assert ours.info("a/b") is None
    for call in (ours.open, ours.unpublish):
        with pytest.raises(NameMissingError, match="nothing is published under the name 'a/b'"):
            call("a/b")
    again = ours.publish("a/b", b"four")
    assert ours.history("a/b") == [first, second, gone, again]
    assert again.version == 4
    with pytest.raises(NameMissingError, match="is not held in version 3 any more"):
        ours.open("a/b", 3)
    with pytest.raises(NameMissingError, match="is not held in version 9 any more"):
        ours.open("a/b", 9)


def test_a_publish_that_expects_another_version_changes_nothing(names: Names, store: MemoryStore) -> None:
    assert names.publish("n", b"1", expect=0).version == 1
    for wrong in (0, 2):
        with pytest.raises(NameMovedError, match=f"has version 1, expected {wrong}; nothing was published") as error:
            names.publish("n", b"2", expect=wrong)
        assert (error.value.name, error.value.version) == ("n", 1)
        with pytest.raises(NameMovedError):
            names.unpublish("n", expect=wrong)
    sent = store.sent
    assert names.publish("n", b"2", expect=1).version == 2
    assert store.sent == sent + 2  # and no object of the refused publishes
    assert read(names, "n") == b"2"


def test_the_error_for_a_second_writer_names_the_first_one_and_its_end(make: MakeNames) -> None:
    first, second = make(writer="first@host"), make(writer="second@host")
    with first.writer("n") as writer:
        for call in (
            lambda: second.publish("n", b"2"),
            lambda: first.publish("n", b"2"),
            lambda: second.unpublish("n"),
        ):
            with pytest.raises(NameHeldError, match=r"held by the writer first@host until .* UTC") as error:
                call()
            assert error.value.holder == "first@host"
            assert time.time() < error.value.until < time.time() + 60
        assert second.publish("other", b"").version == 1
        assert [writer.publish(b"%d" % i).version for i in range(3)] == [1, 2, 3]
    assert second.publish("n", b"2").version == 4


def test_threads_of_one_program_write_a_name_one_at_a_time(names: Names) -> None:
    at_work: list[int] = []
    times: list[int] = []

    def write() -> None:
        for _ in range(30):
            with contextlib.suppress(NameHeldError), names.writer("n"):
                at_work.append(1)
                times.append(len(at_work))
                time.sleep(0.001)
                at_work.pop()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert times
    assert set(times) == {1}


@WAITS
@pytest.mark.slow
def test_another_writer_follows_a_dead_one_and_its_objects_are_released(
    make: MakeNames, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, living = make(lease=2.0, hold=0.0), make(hold=0.0)
    living.publish("n", b"before")

    def dies(*_: object) -> None:
        dead._session._ended.set()  # it no longer renews its lease
        raise KeyboardInterrupt

    for of, died_at in ((Sending, "_announce"), (Sending, "_send"), (Writer, "_move")):
        dead = make(lease=2.0, hold=0.0)
        monkeypatch.setattr(of, died_at, dies)
        monkeypatch.setattr(dead._registry, "commit", _until_dead(dead))
        with pytest.raises(KeyboardInterrupt):
            dead.publish("n", f"never {died_at}".encode() * 10)
        monkeypatch.undo()
        with pytest.raises(NameHeldError):
            living.publish("n", b"too early")
        eventually(lambda: _publishes(living, "n", b"after"), "the dead writer still holds the name")
        assert read(living, "n") == b"after"
    living.sweep()
    store.pass_time(4000)
    assert {data for data, _ in store.objects.values() if not data.startswith(b"FPNAME")} == {b"after"}
    assert len(store.objects) == 2


def _until_dead(names: Names) -> Callable[..., object]:
    commit = names._registry.commit

    def committed(*arguments: object, **settings: object) -> object:
        if names._session._ended.is_set():
            raise RegistryAwayError("dead")
        return commit(*arguments, **settings)  # type: ignore[arg-type]

    return committed


def _publishes(names: Names, name: str, value: bytes) -> bool:
    try:
        names.publish(name, value)
    except NameHeldError:
        return False
    return True


def test_names_hold_their_objects_and_no_others(make: MakeNames, store: MemoryStore) -> None:
    names = make(hold=0.0)
    store.put_content(b"of nobody")
    names.publish("n", b"one")
    names.publish("m", b"one")  # the same object
    store.evict()
    assert read(names, "n") == b"one"
    names.publish("n", b"two")
    store.pass_time(10)
    assert read(names, "m") == b"one"  # released by one name, held by the other
    names.publish("m", b"two")
    store.pass_time(10)
    assert {data for data, _ in store.objects.values() if not data.startswith(b"FPNAME")} == {b"two"}
    names.unpublish("n")
    names.unpublish("m")
    assert store.kept == set()
    store.pass_time(10)
    assert store.objects == {}
    assert names.sweep() == 0


@WAITS
@pytest.mark.slow
def test_the_previous_version_stays_for_its_hold_time(make: MakeNames, store: MemoryStore) -> None:
    names = make(hold=3.0)
    names.publish("n", b"one")
    names.publish("n", b"two")
    began = time.monotonic()
    assert read(names, "n", 1) == b"one"
    store.evict()
    if time.monotonic() - began < 2:
        assert read(names, "n", 1) == b"one"
    eventually(lambda: bool(names.sweep()), "the previous version is still held")
    assert time.monotonic() - began >= 2.5
    with pytest.raises(NameMissingError, match="not held in version 1 any more"):
        names.open("n", 1)
    assert read(names, "n") == b"two"


def test_a_version_stays_while_a_program_reads_it(make: MakeNames, store: MemoryStore) -> None:
    writer, reader = make(hold=0.0), make()
    writer.publish("n", [b"one", b"two"])
    opened, again = reader.open("n"), reader.open("n")
    for value in (b"three", b"four"):
        writer.publish("n", value)
    store.evict()
    opened.close()
    opened.close()
    writer.sweep()
    store.evict()
    assert again.read() == b"onetwo"
    assert list(again.parts()) == [b"one", b"two"]
    with reader.open("n", 1) as older:
        assert older.read() == b"onetwo"
    again.close()
    assert writer.sweep() == 3
    store.pass_time(10)
    with pytest.raises(NameLostError, match="the name 'n' in version 1 has lost its object"):
        again.read()


def test_a_release_that_arrives_twice_does_not_end_the_hold_of_the_next_reader(
    make: MakeNames, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make(hold=0.0), make()
    writer.publish("n", b"one")
    registry, sent = reader._registry, []
    commit = registry.commit

    def recorded(*transaction: Any, timeout: float | None = None) -> Commit:
        sent.append(transaction)
        return commit(*transaction, timeout=timeout)

    first = reader.open("n")
    monkeypatch.setattr(registry, "commit", recorded)
    first.close()
    (release,) = sent
    with reader.open("n") as opened:
        commit(*release)
        writer.publish("n", b"two")
        writer.sweep()
        store.evict()
        assert opened.read() == b"one"


def test_a_hold_that_arrives_twice_is_released(
    make: MakeNames, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make(hold=0.0), make()
    writer.publish("n", b"one")
    registry = reader._registry
    commit = registry.commit

    def twice(*transaction: Any, timeout: float | None = None) -> Commit:
        done = commit(*transaction, timeout=timeout)
        commit(*transaction, timeout=timeout)
        return done

    monkeypatch.setattr(registry, "commit", twice)
    opened = reader.open("n")
    monkeypatch.undo()
    opened.close()
    writer.publish("n", b"two")
    writer.sweep()
    with pytest.raises(NameMissingError, match="not held in version 1 any more"):
        writer.open("n", 1)


@WAITS
@pytest.mark.slow
def test_a_dead_reader_holds_nothing(make: MakeNames) -> None:
    writer, reader = make(hold=0.0), make(lease=2.0)
    writer.publish("n", b"one")
    reader.open("n")
    reader._session._ended.set()
    writer.publish("n", b"two")
    eventually(lambda: bool(writer.sweep()), "the dead reader holds the version")


def test_a_forked_child_that_closes_an_opened_name_ends_no_hold_of_its_parent(
    make: MakeNames, store: MemoryStore
) -> None:
    writer, reader = make(hold=0.0), make()
    writer.publish("n", b"one")
    opened = reader.open("n")

    def child() -> None:
        opened.close()
        with reader.open("n") as again:
            assert again.held
        reader.close()

    in_forked_child(child, LONG)
    writer.publish("n", b"two")
    store.evict()
    assert opened.read() == b"one"
    opened.close()
    assert writer.sweep() == 2


def test_a_deferred_call_is_made_by_another_thread_or_the_next_open(make: MakeNames) -> None:
    names = make(lease=1.0)
    names.publish("n", b"value")
    did: list[int] = []

    def fails() -> None:
        raise BufferError

    with names.open("n") as opened:
        for call in (fails, lambda: did.append(threading.get_ident())):
            opened.defer(call)
        eventually(lambda: len(did) == 1, "no thread called it")
    assert did != [threading.get_ident()]
    slow = make(lease=3600.0)
    held = slow.open("n")
    held.defer(held.close)
    assert slow._registry.range("hold/").entries
    slow.open("n").close()
    assert not slow._registry.range("hold/").entries


def test_reading_a_name_whose_objects_are_gone_raises_an_error(names: Names, store: MemoryStore) -> None:
    names.publish("n", b"value")
    with names.open("n") as opened:
        piece = opened.manifest.pieces[0]
        del store.objects[piece.key]
        for call in (opened.read, lambda: opened.read_into(bytearray(9)), lambda: list(opened.parts())):
            with pytest.raises(NameLostError, match="publish the name again") as error:
                call()
            assert (error.value.name, error.value.version, error.value.key) == ("n", 1, piece.key)
    store.objects.clear()
    with pytest.raises(NameLostError):
        names.open("n")
    names.publish("n", b"value")
    assert read(names, "n") == b"value"


def test_objects_that_nodes_evict_during_a_publish_are_sent_again(
    names: Names, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = Sending._announce

    def evicted(sending: Sending, keys: list[str]) -> None:
        store.evict()
        announce(sending, keys)

    monkeypatch.setattr(Sending, "_announce", evicted)
    monkeypatch.setattr(module, "PIECE_BYTES", 10)
    names.publish("n", b"value")
    names.publish("t", {"x": numpy.arange(5.0)})
    names.publish("s", (b"part %d" % i for i in range(10)))
    store.evict()
    assert read(names, "n") == b"value"
    assert read(names, "s") == b"".join(b"part %d" % i for i in range(10))
    before = set(store.kept)
    monkeypatch.setattr(store, "touch", lambda key, ttl, keep, seen: None)
    with pytest.raises(NameLostError, match="disappear again and again before nodes can keep them; nothing was pub"):
        names.publish("n", b"other")
    monkeypatch.undo()
    assert read(names, "n") == b"value"
    names.sweep()
    assert store.kept == before


def test_small_tensors_are_sent_together(names: Names, store: MemoryStore) -> None:
    tensors = {f"{i}": numpy.full(3, i) for i in range(1000)}
    for _ in range(2):
        before = store.requests
        names.publish("t", tensors)
        # Touch and put of all objects, the touch that keeps them, and one release of the sweep.
        assert store.requests - before <= 4
    assert len(store.kept) == 1001


def test_a_node_that_was_away_releases_its_copies_at_a_later_sweep(make: MakeNames, store: MemoryStore) -> None:
    names = make(hold=0.0)
    names.publish("n", [b"one", b"uno"])
    copies = {key: store.objects[key] for key in store.kept}
    store.away = "node"
    names.publish("n", b"two")
    assert not copies.keys() & store.kept
    names.publish("m", b"one")
    store.objects.update(copies)  # the node comes back with its copies
    store.kept.update(copies)
    store.away = ""
    assert names.sweep() == 2  # the other part and the manifest; another name holds the part by now
    assert {store.objects[key][0] for key in copies.keys() & store.kept} == {b"one"}
    assert names.sweep() == 0
    store.away = "node"
    names.publish("n", b"three")
    names.unpublish("n")
    before = store.requests
    for _ in range(3):
        assert names.sweep() == 0
    assert store.requests - before == 3  # each looks only if the node is back
    store.away = ""
    assert names.sweep() == 4
    assert names._registry.range("released/").entries == ()


def test_the_next_sweep_finishes_a_stopped_one_although_a_node_is_away(
    make: MakeNames, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reachable nodes release objects at the next sweep, and again only if other nodes are away, or none is."""
    names = make(hold=0.0)
    names.publish("n", [b"one", b"uno"])
    store.away = "first"
    touch_many = store.touch_many

    def stopped(keys: Any, ttl: float | None, **settings: Any) -> Any:
        if settings.get("keep") is False:
            raise TimeoutError("the program was stopped after it had moved the version")
        return touch_many(keys, ttl, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(store, "touch_many", stopped)
        names.unpublish("n")
    assert len(names._registry.range("released/").entries) == 1
    assert len(store.kept) == 3
    assert names.sweep() == 3
    assert not store.kept
    for away, requests in (("first", 1), ("first", 1), ("second", 2), ("second", 1), ("second", 1)):
        store.away, before = away, store.requests
        swept = names.sweep()
        assert (swept > 0, store.requests - before) == (requests > 1, requests)
        assert len(names._registry.range("released/").entries) == 1
    store.away = ""
    assert names.sweep() == 3
    assert names._registry.range("released/").entries == ()
    before = store.requests
    assert names.sweep() == 0
    assert store.requests == before


def test_each_tensor_is_an_object_that_is_shared_by_content_and_copied_late(
    names: Names, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 36_000)

    class Source:
        dtype, alive = "float32", 0

        def __init__(self, seed: int) -> None:
            self.shape, self.seed = (3, 1000), seed

        def data(self) -> numpy.ndarray:
            values = numpy.random.default_rng(self.seed).random(self.shape, dtype=numpy.float32)
            Source.alive += 1
            assert Source.alive <= 4, "all copies are in memory at the same time"
            weakref.finalize(values, Source.gone)
            return values

        @staticmethod
        def gone() -> None:
            Source.alive -= 1

    gc.collect()
    info = names.publish("t", {f"layer.{i}": Source(i % 7) for i in range(20)})
    assert (info.tensors, info.nbytes, info.objects) == (True, 20 * 12_000, 8)
    assert store.largest == 12_000
    sent = store.sent
    arrays = {
        "layer.1": Source(1).data(),
        "empty": numpy.zeros((0, 3)),
        "scalar": numpy.int64(7),
        "t": numpy.eye(3).T[1:],
    }
    names.publish("t", arrays)
    assert store.sent == sent + 3  # the scalar, the last one and the manifest
    with names.open("t") as opened:
        entries = {entry.name: entry for entry in opened.tensors()}
        assert [(one.dtype, one.shape) for one in entries.values()] == [
            *(("float32", (3, 1000)), ("float64", (0, 3)), ("int64", ()), ("float64", (2, 3))),
        ]
        for name, array in arrays.items():
            got = numpy.empty(entries[name].shape, entries[name].dtype)
            opened.read_tensor_into(entries[name], got)
            assert numpy.array_equal(got, array)
        with pytest.raises(ConfigError, match="holds tensors and no value"):
            opened.read()
        with pytest.raises(ValueError, match="the buffer has 4 bytes, the tensor 'scalar' has 8"):
            opened.read_tensor_into(entries["scalar"], bytearray(4))
    names.publish("v", b"value")
    with names.open("v") as opened, pytest.raises(ConfigError, match="holds a value and no tensors"):
        opened.tensors()


def test_large_values_are_cut_into_pieces(names: Names, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "PART_OBJECTS_MAX", 7)
    value = random.Random(1).randbytes(20_500)
    info = names.publish("n", value)
    assert (info.nbytes, info.objects) == (20_500, 22)
    assert read(names, "n") == value
    with names.open("n") as opened:
        target = bytearray(20_501)
        assert opened.read_into(target) == 20_500
        assert target[:-1] == value
        with pytest.raises(ValueError, match="the buffer has 5 bytes"):
            opened.read_into(bytearray(5))
    store.evict()
    assert read(names, "n") == value
    names.publish("n", b"")
    names.unpublish("n")


def test_a_watch_reports_newer_versions(make: MakeNames) -> None:
    writer, reader = make(), make()
    writer.publish("nn", b"another name")
    with reader.watch("n") as watch:
        assert watch.next(0.0) is None
        first = writer.publish("n", b"1")
        writer.publish("nn", b"another name, too")
        assert watch.next(LONG) == first
        assert watch.next(0.0) is None
        told = []
        waiter = threading.Thread(target=lambda: told.append(watch.next(LONG)), daemon=True)
        waiter.start()
        second = writer.publish("n", b"2")
        waiter.join(LONG)
        assert told == [second]
        gone = writer.unpublish("n")
        assert watch.next(LONG) == gone
        for i in range(3):
            last = writer.publish("n", b"%d" % i)
        reader._registry.compact(reader._registry.range("").revision)
        info = watch.next(LONG)
        while info != last:
            assert info is not None
            info = watch.next(LONG)
    with reader.watch("n", after=last.version) as watch:
        assert watch.next(0.0) is None


def test_the_history_has_the_last_hundred_versions(names: Names) -> None:
    with names.writer("n") as writer:
        for i in range(103):
            writer.publish(b"%d" % (i % 2))
    assert [info.version for info in names.history("n")] == list(range(4, 104))


def test_errors_for_bad_input_name_the_expected_input(names: Names) -> None:
    for call, kind, said in (
        (lambda: names.publish("", b""), ConfigError, "expected 1 to 200 bytes"),
        (lambda: names.open("x" * 201), ConfigError, "expected 1 to 200 bytes"),
        (lambda: names.watch("a\nb"), ConfigError, "printable"),
        (lambda: names.info("\ud800"), ConfigError, "printable"),
        (lambda: names.history(b"n"), TypeError, "a name is a str, this one is a bytes"),
        (lambda: names.publish("n", "text"), TypeError, "the value of 'n' is a str, expected bytes"),
        (lambda: names.publish("n", 5), TypeError, "the value of 'n' is a int"),
        (lambda: names.publish("n", {}), ConfigError, "there are no tensors"),
        (lambda: names.publish("n", {1: b""}), TypeError, "1 is a int"),
        (lambda: names.publish("n", {"x": "text"}), TypeError, "'x' is a str, expected a tensor"),
        (lambda: names.publish("n", memoryview(b"abcd")[::2]), ValueError, "is not contiguous"),
    ):
        with pytest.raises(kind, match=said):
            call()
    assert names.list_names() == []
    for setting in ({"hold": -1}, {"lease": 0}, {"orphan_ttl": "x"}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            Names(MemoryStore(), names._registry, **setting)  # type: ignore[arg-type]


@pytest.mark.slow
def test_readers_keep_their_objects_while_writers_publish_and_sweep(make: MakeNames, store: MemoryStore) -> None:
    values = [bytes([i]) * 50 for i in range(4)]  # few, so that versions and names share objects all the time
    failures: list[BaseException] = []
    ended = threading.Event()
    store.pause = 0.003

    def work(seed: int, turn: Callable[[Names, random.Random], None], turns: Iterator[int]) -> None:
        names, chance = make(hold=0.0), random.Random(seed)
        try:
            for _ in turns:
                turn(names, chance)
        except BaseException as error:
            failures.append(error)
            ended.set()

    def publish(names: Names, chance: random.Random) -> None:
        with contextlib.suppress(NameHeldError, NameMovedError):
            names.publish(chance.choice("ab"), [chance.choice(values) for _ in range(3)])

    def look(names: Names, chance: random.Random) -> None:
        try:
            with names.open(chance.choice("ab")) as opened:
                store.pass_time(2)  # released objects expire at once
                assert len(opened.read()) == 150
        except NameMissingError:
            pass

    def until_ended() -> Iterator[int]:
        while not ended.is_set():
            yield 0

    writers = [threading.Thread(target=work, args=(i, publish, iter(range(15)))) for i in range(3)]
    readers = [threading.Thread(target=work, args=(10 + i, look, until_ended())) for i in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join(240)
    ended.set()
    for thread in readers:
        thread.join(60)
    assert not failures, failures
    names = make(hold=0.0)
    eventually(lambda: names.sweep() == 0, "each sweep releases something again")
    live = set()
    for info in names.list_names():
        with names.open(info.name) as opened:
            live |= {piece.key for piece in opened.manifest.pieces}
    assert {key for key in store.kept if not store.objects[key][0].startswith(b"FPNAME")} == live
