"""Both registries keep the contract of `farpool.abc.registry`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool.abc.registry import VALUE_BYTES_MAX
from farpool.cluster.registry import Condition, Delete, Entry, Operation, Put, Registry, sqlite
from farpool.cluster.registry.etcd import EtcdRegistry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import ConfigError, RegistryCompactedError, RegistryError, RegistryLeaseError
from tests.forking import in_forked_child

Fresh = Callable[[], Registry]
LONG = 60.0


def put(registry: Registry, key: str, value: bytes, lease: int = 0) -> int:
    """Put a value once, even if the transaction is sent twice."""
    entry = registry.get(key)
    done = registry.commit([Condition(key, entry.revision if entry else 0)], [Put(key, value, lease)])
    assert done.succeeded
    return done.revision


def values(registry: Registry, *prefixes: str) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in registry.range(*prefixes).entries}


def test_an_entry_is_read_as_it_was_put_until_it_is_deleted(registry: Registry) -> None:
    assert registry.get("a") is None
    first = put(registry, "a", b"one")
    assert registry.get("a") == Entry("a", b"one", first)
    second = put(registry, "a", b"\0\xff")
    assert second > first
    assert registry.get("a") == Entry("a", b"\0\xff", second)
    assert registry.commit([], [Delete("a")]).revision > second
    assert registry.get("a") is None


def test_a_range_has_the_keys_of_its_prefixes_in_order(registry: Registry) -> None:
    for key in ("b/2", "b/1", "b", "b0", "c/é", "c/\U0010ffff", "c"):
        put(registry, key, key.encode())
    snapshot = registry.range("b/", "c")
    assert [entry.key for entry in snapshot.entries] == ["b/1", "b/2", "c", "c/é", "c/\U0010ffff"]
    assert snapshot.revision >= max(entry.revision for entry in snapshot.entries)
    assert len(registry.range("").entries) == 7
    assert registry.range("nothing/").entries == ()


def test_a_transaction_changes_all_or_nothing(registry: Registry) -> None:
    first = put(registry, "a", b"1")
    done = registry.commit([Condition("a", first), Condition("b", 0)], [Put("a", b"2"), Put("b", b"2")])
    assert done.succeeded
    assert [registry.get(key) for key in "ab"] == [Entry(key, b"2", done.revision) for key in "ab"]
    for conditions in ([Condition("a", first)], [Condition("a", 0)], [Condition("c", done.revision)]):
        refused = registry.commit([*conditions, Condition("b", done.revision)], [Put("a", b"3"), Delete("b")])
        assert not refused.succeeded
    assert values(registry, "") == {"a": b"2", "b": b"2"}
    swapped = registry.commit([Condition("a", done.revision)], [Delete("a"), Put("c", b"3"), Delete("nothing")])
    assert swapped.succeeded
    assert values(registry, "") == {"b": b"2", "c": b"3"}


def test_a_hundred_operations_are_one_transaction(registry: Registry) -> None:
    operations: list[Operation] = [Put(f"k/{i:03}", bytes([i])) for i in range(100)]
    done = registry.commit([Condition(one.key, 0) for one in operations], operations)
    entries = registry.range("k/").entries
    assert {entry.revision for entry in entries} == {done.revision}
    assert len(entries) == 100


def test_ending_a_lease_deletes_its_entries(registry: Registry) -> None:
    lease = registry.grant(1000)
    put(registry, "with", b"1", lease)
    put(registry, "moved", b"1", lease)
    put(registry, "moved", b"2")  # no longer bound to the lease
    entry = registry.get("with")
    assert entry is not None
    assert entry.lease == lease
    assert 0 < registry.remaining(lease) <= registry.keep_alive(lease) == 1000
    registry.revoke(lease)
    assert values(registry, "") == {"moved": b"2"}
    registry.revoke(lease)
    for call in (registry.keep_alive, registry.remaining, lambda one: put(registry, "x", b"", one)):
        with pytest.raises(RegistryLeaseError, match=f"has no lease {lease}") as error:
            call(lease)
        assert error.value.lease == lease
    assert registry.get("x") is None


def test_a_lease_without_renewal_ends_and_others_see_it(fresh: Fresh) -> None:
    holder, other = fresh(), fresh()
    lease = holder.grant(1.0)
    written = put(holder, "held", b"1", lease)
    with other.watch("held", written) as watch:
        until = time.monotonic() + LONG
        told = watch.next(LONG).entries
        assert time.monotonic() < until
    assert [(entry.key, entry.deleted) for entry in told] == [("held", True)]
    assert other.get("held") is None
    with pytest.raises(RegistryLeaseError):
        holder.keep_alive(lease)


@pytest.mark.slow
def test_a_renewed_lease_does_not_end(registry: Registry) -> None:
    for _ in range(20):
        lease = registry.grant(2.0)
        put(registry, "held", b"1", lease)
        began = last = time.monotonic()
        gaps = []
        while last - began < 3:
            with contextlib.suppress(RegistryLeaseError):
                registry.keep_alive(lease)
            gaps.append(time.monotonic() - last)
            last += gaps[-1]
            time.sleep(0.05)
        if max(gaps) < 1:  # otherwise this process did not get enough CPU time to renew it
            break
    assert registry.get("held") is not None


def test_a_watch_reports_each_change_once_and_in_order(fresh: Fresh) -> None:
    registry, other = fresh(), fresh()
    start = put(registry, "w/0", b"before")
    with registry.watch("w/", start) as watch:
        assert watch.next(0.0).entries == ()
        revisions = [put(other, f"w/{i % 3}", str(i).encode()) for i in range(20)]
        put(other, "elsewhere", b"")
        deleted = other.commit([Condition("w/1", revisions[19])], [Delete("w/0"), Put("w/1", b"last")]).revision
        told: list[Entry] = []
        while not told or told[-1].revision < deleted:
            told += watch.next(LONG).entries
    assert [entry.revision for entry in told] == [*revisions, deleted, deleted]
    assert [entry.value for entry in told[:20]] == [str(i).encode() for i in range(20)]
    assert [(entry.key, entry.value, entry.deleted) for entry in told[20:]] == [
        ("w/0", b"", True),
        ("w/1", b"last", False),
    ]
    with other.watch("w/", revisions[9]) as later:  # a watch of another program, from the same place
        resumed: list[Entry] = []
        while len(resumed) < 12:
            resumed += later.next(LONG).entries
    assert resumed == told[10:]


def test_calls_that_do_not_wait_report_changes_that_are_there(fresh: Fresh) -> None:
    registry, other = fresh(), fresh()
    with registry.watch("w/", registry.range("w/").revision) as watch:
        for number in range(3):
            put(other, "w/x", str(number).encode())
            until, told = time.monotonic() + LONG, list[Entry]()
            while not told:
                assert time.monotonic() < until
                time.sleep(0.01)
                told += watch.next(0.0).entries
            assert [entry.value for entry in told] == [str(number).encode()]


def test_a_change_wakes_a_waiting_watch(fresh: Fresh) -> None:
    registry, other = fresh(), fresh()
    start = registry.range("w/").revision
    told: list[Entry] = []
    with registry.watch("w/", start) as watch:
        waiter = threading.Thread(target=lambda: told.extend(watch.next(LONG).entries), daemon=True)
        waiter.start()
        time.sleep(0.3)
        assert not told
        put(other, "w/x", b"1")
        waiter.join(LONG)
    assert [entry.value for entry in told] == [b"1"]


def test_a_watch_after_compacted_changes_raises_an_error(registry: Registry) -> None:
    start = put(registry, "w/0", b"0")
    last = [put(registry, "w/0", b"1") for _ in range(5)][-1]
    registry.compact(last)
    registry.compact(last)
    with registry.watch("w/", start) as watch, pytest.raises(RegistryCompactedError, match="read the entries") as error:
        watch.next(LONG)
    assert start < error.value.oldest <= last
    entry = registry.get("w/0")
    assert entry is not None
    with registry.watch("w/", registry.range("w/").revision) as watch:
        after = put(registry, "w/0", b"2")
        assert [one.revision for one in watch.next(LONG).entries] == [after]


def test_errors_for_bad_input_name_the_expected_input_and_nothing_changes(registry: Registry) -> None:
    for call, said in (
        (lambda: registry.get(""), "expected 1 to 1024"),
        (lambda: registry.get("x" * 1025), "has 1025 bytes"),
        (lambda: registry.get("a\0b"), "none of them zero"),
        (lambda: registry.get("\ud800"), "UTF-8"),
        (lambda: registry.commit([], [Put("a", b""), Delete("a")]), "changes 'a' twice"),
        (
            lambda: registry.commit([], [Put("a", b""), Put("b", bytes(VALUE_BYTES_MAX + 1))]),
            "expected at most 1048576",
        ),
        (lambda: registry.commit([], [Put(f"{i}", b"") for i in range(101)]), "has 101 operations"),
        (lambda: registry.commit([Condition("a", -1)], []), "is -1, expected at least 0"),
        (lambda: registry.grant(0), "ttl is 0"),
        (lambda: registry.get("a", timeout=-1), "timeout is -1"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    with pytest.raises(TypeError, match="is a bytes"):
        registry.get(b"a")  # type: ignore[arg-type]
    assert registry.range("").entries == ()


def test_several_values_of_the_largest_size_are_read_as_they_were_put(registry: Registry) -> None:
    for i in range(6):
        put(registry, f"large/{i}", bytes([i]) * VALUE_BYTES_MAX)
    assert [len(entry.value) for entry in registry.range("large/").entries] == [VALUE_BYTES_MAX] * 6


def test_a_range_over_several_replies_is_one_snapshot(registry: Registry) -> None:
    for begin in range(0, 2100, 100):
        registry.commit([], [Put(f"many/{i:04}", b"") for i in range(begin, begin + 100)])
    assert [entry.key for entry in registry.range("many/").entries] == [f"many/{i:04}" for i in range(2100)]


def test_threads_share_a_registry(registry: Registry) -> None:
    put(registry, "count", b"0")

    def add() -> None:
        for _ in range(10):
            while True:
                entry = registry.get("count")
                assert entry is not None
                more = str(int(entry.value) + 1).encode()
                if registry.commit([Condition("count", entry.revision)], [Put("count", more)]).succeeded:
                    break

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert values(registry, "count") == {"count": b"40"}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_watches_without_taking_changes_from_its_parent(registry: Registry) -> None:
    start = put(registry, "w/0", b"0")
    with registry.watch("w/", start) as watch:
        assert watch.next(0.0).entries == ()
        put(registry, "w/1", b"1")

        def child() -> None:
            assert [entry.key for entry in watch.next(LONG).entries] == ["w/1"]
            put(registry, "w/2", b"2")
            assert [entry.key for entry in watch.next(LONG).entries] == ["w/2"]

        in_forked_child(child, LONG)
        keys: list[str] = []
        while len(keys) < 2:
            entries = watch.next(LONG).entries
            assert entries, "the child read a change that its parent waits for"
            keys += [entry.key for entry in entries]
    assert keys == ["w/1", "w/2"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_lock_of_a_thread_of_its_parent(registry: Registry) -> None:
    put(registry, "k", b"1")
    lock = (registry._gateway if isinstance(registry, EtcdRegistry) else registry)._lock  # type: ignore[attr-defined]
    with lock:
        in_forked_child(lambda: registry.get("k"), LONG)  # type: ignore[arg-type, return-value]
    assert registry.get("k") is not None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_opens_a_file_while_its_parent_makes_one(tmp_path: Path) -> None:
    with sqlite._making.lock:
        in_forked_child(lambda: SqliteRegistry(tmp_path / "registry").close(), LONG)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_uses_the_same_registry(registry: Registry) -> None:
    put(registry, "parent", b"1")
    with registry.watch("", registry.range("").revision) as watch:
        assert watch.next(0.0).entries == ()
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(registry,))
        child.start()
        child.join(LONG)
        assert child.exitcode == 0
        assert [entry.key for entry in watch.next(LONG).entries] == ["child"]
    assert values(registry, "") == {"parent": b"1", "child": b"1"}


def _in_child(registry: Registry) -> None:
    put(registry, "child", b"1")
    assert registry.get("parent") is not None
    registry.close()
    os._exit(0)


def test_a_closed_registry_raises_an_error(registry: Registry) -> None:
    watch = registry.watch("", 0)
    registry.close()
    registry.close()
    with pytest.raises(RegistryError, match="was closed; open it again"):
        registry.get("a")
    watch.close()
    with pytest.raises(RegistryError, match="was closed"):
        watch.next(0.0)
