"""Damaged, replaced and unwritable registries: an entry is read as it was written, or an error names the reason."""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool.cluster.names import Names
from farpool.cluster.registry import Condition, Delete, Put, Registry
from farpool.cluster.registry.etcd import EtcdRegistry
from farpool.cluster.registry.messages import Header
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import (
    NameMissingError,
    RegistryAwayError,
    RegistryDamagedError,
    RegistryError,
    RegistryReplacedError,
    RegistryUnwritableError,
)
from tests.registry.cluster import needs_etcd, running_cluster
from tests.store.names.memory_store import MemoryStore

EARLIER = """
CREATE TABLE state (revision INTEGER NOT NULL, compacted INTEGER NOT NULL, boot TEXT NOT NULL);
CREATE TABLE entry (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entry_lease ON entry (lease) WHERE lease != 0;
CREATE TABLE change (
    revision INTEGER NOT NULL, key BLOB NOT NULL, value BLOB, lease INTEGER NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
CREATE TABLE lease (number INTEGER PRIMARY KEY, milliseconds INTEGER NOT NULL, ends INTEGER NOT NULL);
CREATE INDEX lease_ends ON lease (ends);
INSERT INTO state VALUES (3, 0, 'a boot');
INSERT INTO entry VALUES (CAST('a' AS BLOB), x'01', 2, 0);
INSERT INTO change VALUES (2, CAST('a' AS BLOB), x'01', 0);
INSERT INTO entry VALUES (CAST('b' AS BLOB), x'02', 3, 0);
INSERT INTO change VALUES (3, CAST('b' AS BLOB), x'02', 0);
PRAGMA application_id = 0x46505247;
PRAGMA user_version = 1;
"""
"""A file of the release before checksums."""


def values(registry: Registry) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in registry.range("").entries}


def test_a_file_of_an_earlier_release_is_read_and_each_write_adds_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "registry"
    raw = sqlite3.connect(path, isolation_level=None)
    raw.executescript(EARLIER)
    with SqliteRegistry(path, timeout=60.0) as registry:
        assert values(registry) == {"a": b"\1", "b": b"\2"}
        with registry.watch("", 1) as watch:
            assert [entry.value for entry in watch.next(0.0).entries] == [b"\1", b"\2"]
        assert registry.commit([Condition("a", 2)], [Put("a", b"new")]).succeeded
        assert values(registry) == {"a": b"new", "b": b"\2"}
        # The earlier release writes and deletes entries and does not know of checksums.
        raw.execute("INSERT OR REPLACE INTO entry VALUES (CAST('a' AS BLOB), x'05', 9, 0)")
        assert values(registry) == {"a": b"\5", "b": b"\2"}
        registry.commit([], [Put("c", b"c")])
        raw.execute("DELETE FROM entry WHERE key = CAST('c' AS BLOB)")
        assert registry.get("c") is None
        raw.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "UPDATE entry SET value = x'00' WHERE key = CAST('n/a' AS BLOB)",
            "its entry 'n/a' does not match its checksum",
        ),
        (
            "UPDATE entry SET revision = 1 WHERE key = CAST('n/a' AS BLOB)",
            "its entry 'n/a' does not match its checksum",
        ),
        (
            "UPDATE entry SET key = CAST('n/q' AS BLOB) WHERE revision = 2",
            "its entry 'n/a' was written and is missing",
        ),
        ("UPDATE entry SET key = x'ff' WHERE revision = 2", "its entry 'n/a' was written and is missing"),
        ("UPDATE entry SET value = 'text' WHERE key = CAST('n/a' AS BLOB)", "is not an entry"),
        ("UPDATE state SET revision = 1", "its state is"),
        ("UPDATE state SET boot = x'ff'", "its state is"),
        ("DELETE FROM state", "its state is"),
    ],
)
def test_reading_a_damaged_entry_raises_an_error_that_names_it(tmp_path: Path, statement: str, said: str) -> None:
    path = tmp_path / "registry"
    with SqliteRegistry(path, timeout=60.0) as registry:
        registry.commit([], [Put("n/a", b"value")])
        registry.commit([], [Put("n/b", b"value")])
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
            raw.execute(statement)
        for call in (
            lambda: registry.range("n/"),
            lambda: registry.commit([Condition("n/a", 0)], [Put("n/a", b"")]),
        ):
            with pytest.raises(RegistryDamagedError, match=said):
                call()
        if "state" not in statement:
            with pytest.raises(RegistryDamagedError, match=said) as error:
                registry.get("n/a")
            assert error.value.key in ("n/a", "")
            entry = registry.get("n/b")
            assert entry is not None
            assert entry.value == b"value"


def test_a_watch_does_not_report_a_damaged_change(tmp_path: Path) -> None:
    path = tmp_path / "registry"
    with SqliteRegistry(path, timeout=60.0) as registry:
        done = registry.commit([], [Put("a", b"value")])
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as raw:
            raw.execute("UPDATE change SET value = x'00'")
        with (
            registry.watch("", done.revision - 1) as watch,
            pytest.raises(RegistryDamagedError, match="does not match its checksum"),
        ):
            watch.next(0.0)


@pytest.mark.parametrize("flips", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_detected_or_changes_no_read_entry(tmp_path: Path, flips: int) -> None:
    path, chance = tmp_path / "registry", random.Random(3)
    want = {f"name/{i:02}": chance.randbytes(chance.choice([20, 200, 3000])) for i in range(30)}
    with SqliteRegistry(path, timeout=60.0) as registry:
        for key, value in want.items():
            registry.commit([], [Put(key, value)])
    whole, found = path.read_bytes(), 0
    for flip in range(flips):
        damaged, file = bytearray(whole), tmp_path / f"{flip}"
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            with SqliteRegistry(file, timeout=60.0) as registry:
                for key, value in want.items():
                    entry = registry.get(key)
                    assert entry is not None, f"flip {flip}: {key} is told to be missing"
                    assert entry.value == value, f"flip {flip}: {key} has another value"
                assert values(registry) == want
                assert not registry.commit([Condition("name/00", 0)], [Put("name/00", b"")]).succeeded
        except RegistryError:
            found += 1
    assert 0 < found < flips


@pytest.mark.parametrize("place", ["etcd"], indirect=True)
def test_an_entry_of_etcd_has_a_checksum_unless_an_earlier_release_wrote_it(registry: EtcdRegistry) -> None:
    prefix, call = registry._prefix.decode(), registry._gateway
    key, deadline = "a", 1e18
    registry.commit([], [Put(key, b"value")])
    from farpool.cluster.registry.messages import Empty, PutRequest, RangeReply, RangeRequest

    stored = call.call("/v3/kv/range", RangeRequest(f"{prefix}a".encode()), RangeReply, deadline)[0].kvs[0].value
    assert stored[16:] == b"value"
    for changed in (stored[:-1] + b"f", stored[:-5] + bytes(1) + stored[-4:], stored + b"x"):
        call.call("/v3/kv/put", PutRequest(f"{prefix}a".encode(), changed), Empty, deadline)
        for read in (lambda: registry.get("a"), lambda: registry.range("")):
            with pytest.raises(RegistryDamagedError, match="its entry 'a' does not match its checksum"):
                read()
    call.call("/v3/kv/put", PutRequest(f"{prefix}a".encode(), secrets.token_bytes(16) + b"old"), Empty, deadline)
    assert values(registry) == {"a": b"old"}


def removed(path: Path) -> None:
    for one in path.parent.glob("registry*"):
        one.unlink()


def replaced(path: Path) -> None:
    shutil.copy(path, path.parent / "copy")
    removed(path)
    (path.parent / "copy").rename(path)


@pytest.mark.parametrize("change", [removed, replaced])
def test_a_removed_or_replaced_file_confirms_no_change(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "registry"
    with SqliteRegistry(path, timeout=60.0) as registry, registry.watch("", 1) as watch:
        registry.commit([], [Put("a", b"1")])
        assert watch.next(60.0).entries
        lease = registry.grant(60.0)
        change(path)
        for call in (
            lambda: registry.commit([], [Put("a", b"2")]),
            lambda: registry.get("a"),
            lambda: registry.range(""),
            lambda: registry.grant(1.0),
            lambda: registry.keep_alive(lease),
            lambda: registry.remaining(lease),
            lambda: registry.revoke(lease),
            lambda: watch.next(0.0),
        ):
            with pytest.raises(RegistryReplacedError, match=f"was {change.__name__} while this program had it open"):
                call()


def test_a_file_that_is_removed_during_a_change_does_not_confirm_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registry"
    with SqliteRegistry(path, timeout=60.0) as registry:
        check, checks = registry._check_place, []

        def between() -> None:
            checks.append(1)
            check()
            if len(checks) == 1:
                removed(path)

        monkeypatch.setattr(registry, "_check_place", between)
        with pytest.raises(RegistryReplacedError):
            registry.commit([], [Put("a", b"1")])
        assert len(checks) == 2


@needs_etcd
def test_a_recreated_etcd_raises_an_error() -> None:
    with running_cluster(1) as cluster, cluster.registry() as registry:
        for _ in range(3):
            registry.commit([], [Put("a", b"1")])
        (member,) = cluster.members
        member.kill()
        shutil.rmtree(member.folder)
        cluster.start(member)
        cluster.wait()
        for call in (lambda: registry.get("a"), lambda: registry.commit([Condition("b", 0)], [Put("b", b"")])):
            with pytest.raises(RegistryReplacedError, match="was replaced while this program had it open"):
                call()
        with cluster.registry() as later:
            assert later.get("a") is None
            cluster_id = later._cluster  # type: ignore[attr-defined]
            later.check_header(Header(10, cluster_id), 10)  # type: ignore[attr-defined]
            for other in (Header(10, cluster_id + 1), Header(9, cluster_id)):
                with pytest.raises(RegistryReplacedError):
                    later.check_header(other, 10)  # type: ignore[attr-defined]


@needs_etcd
@pytest.mark.slow
def test_an_etcd_without_space_can_be_read() -> None:
    with running_cluster(1, options=["--quota-backend-bytes", str(1 << 20)]) as cluster:
        cluster.wait()
        _stays_readable(cluster.registry, lambda names: names._registry.commit([], [Put("hog", bytes(1 << 19))]))


def test_a_file_that_cannot_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(names: Names) -> None:
        registry = names._registry
        assert isinstance(registry, SqliteRegistry)
        borrow = registry._borrow

        def full(deadline: float) -> sqlite3.Connection:
            connection = borrow(deadline)
            connection.execute("PRAGMA max_page_count = 1")
            return connection

        monkeypatch.setattr(registry, "_borrow", full)
        registry.commit([], [Put("hog", bytes(1 << 16))])

    _stays_readable(lambda: SqliteRegistry(tmp_path / "registry", timeout=60.0), fill)


def test_a_read_only_file_system_raises_the_error_of_an_unwritable_registry(tmp_path: Path) -> None:
    with SqliteRegistry(tmp_path / "registry", timeout=60.0) as registry:
        registry.commit([], [Put("a", b"1")])
        registry._idle[0].execute("PRAGMA query_only = ON")
        with pytest.raises(
            RegistryUnwritableError, match="cannot be written now: attempt to write a readonly database"
        ):
            registry.commit([], [Delete("a")])
        assert values(registry) == {"a": b"1"}


def _stays_readable(make: Callable[[], Registry], fill: Callable[[Names], object]) -> None:
    store = MemoryStore()
    with make() as registry, contextlib.suppress(KeyError), Names(store, registry, timeout=60.0) as names:
        names.publish("n", b"one")
        error = None
        for _ in range(20):
            try:
                fill(names)
            except RegistryUnwritableError as full:
                error = full
                break
        assert error is not None, "the file system has space for all entries"
        store.evict()
        for _ in range(3):
            with names.open("n") as opened:
                assert opened.read() == b"one"
        assert [info.name for info in names.list_names()] == ["n"]
        with pytest.raises(NameMissingError):
            names.open("unknown")
        with pytest.raises(RegistryAwayError, match="cannot be written now"):
            names.publish("other", [b"%d" % part for part in range(2000)])
        raise KeyError("the program's own error, which close() must not hide")
