"""Names while their registry or members of it are away: known names can be read, and publishing raises an error."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import pytest

from farpool.abc.objects import Touched
from farpool.cluster.names import Names
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import NameHeldError, NameMissingError, RegistryAwayError, RegistryUnwritableError
from tests.registry.cluster import Cluster, needs_etcd, running_cluster
from tests.store.names.memory_store import MemoryStore

LONG = 120.0


def published(names: Names, value: bytes) -> None:
    names.publish("n", value)
    with names.open("n") as opened:
        assert opened.held
        assert opened.read() == value


@needs_etcd
@pytest.mark.slow
def test_publishing_goes_on_while_members_are_killed_and_stopped_in_turn() -> None:
    with running_cluster(3) as cluster, _names(cluster, LONG) as names:
        for turn, member in enumerate(cluster.members * 2):
            published(names, b"before %d" % turn)
            if turn % 2:
                member.kill()
            else:
                member.stop()
            try:
                published(names, b"while %d" % turn)
            finally:
                if turn % 2:
                    cluster.start(member)
                else:
                    member.go_on()
            cluster.wait()
        assert [info.version for info in names.history("n")] == list(range(1, 13))


@needs_etcd
@pytest.mark.slow
def test_without_a_majority_known_names_are_read_and_nothing_is_published() -> None:
    with running_cluster(3) as cluster, _names(cluster, 3.0) as names, _names(cluster, 3.0) as stranger:
        while names.info("n") is None:
            names.publish("n", b"value")
        before = names.history("n")
        for member in cluster.members[:2]:
            member.stop()
        try:
            for _ in range(3):
                with names.open("n") as opened:
                    assert opened.read() == b"value"
                    assert not opened.held
            assert names.info("n") == before[-1]
            for call in (
                lambda: names.publish("n", b"other"),
                lambda: names.unpublish("n"),
                lambda: names.list_names(),
                lambda: names.open("unknown"),
                lambda: stranger.open("n"),
            ):
                with pytest.raises(RegistryAwayError, match=r"has failed since \d\d:\d\d:\d\d UTC"):
                    call()
        finally:
            for member in cluster.members[:2]:
                member.go_on()
        cluster.wait()
        with _names(cluster, LONG) as later:
            assert later.history("n") == before


def test_a_locked_file_does_not_stop_readers(tmp_path: Path) -> None:
    path, store = tmp_path / "registry", MemoryStore()
    with SqliteRegistry(path, timeout=LONG) as registry, Names(store, registry, timeout=0.5) as names:
        names.publish("n", b"value")
        locker = sqlite3.connect(path, isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")
        with names.open("n") as opened:
            assert opened.read() == b"value"
            assert not opened.held
        with pytest.raises(RegistryAwayError, match="another process has had it locked"):
            names.publish("n", b"other")
        locker.execute("COMMIT")
        locker.close()
        # The publish shows that the registry answers again, so names ask it at once.
        published(names, b"third")
        assert [info.version for info in names.history("n")] == [1, 2]
        with pytest.raises(NameMissingError):
            names.open("unknown")


def test_a_program_never_opens_an_older_version_than_it_has_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteRegistry(tmp_path / "registry") as registry, Names(MemoryStore(), registry, timeout=0.5) as names:
        published(names, b"first")
        names.publish("n", b"second")

        def away(*_: object, **__: object) -> NoReturn:
            raise RegistryAwayError("the registry is away")

        monkeypatch.setattr(registry, "get", away)
        with names.open("n") as opened:
            assert (opened.info.version, opened.read(), opened.held) == (2, b"second", False)


def test_a_program_deletes_its_entries_once_the_registry_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other_store = MemoryStore(), MemoryStore()
    path = tmp_path / "registry"
    with (
        SqliteRegistry(path) as registry,
        SqliteRegistry(path) as other_registry,
        Names(store, registry, lease=3600.0, hold=0.0) as names,
        Names(other_store, other_registry, lease=3600.0, hold=0.0) as other,
    ):
        names.publish("n", b"value")

        def refuse(*_: object, **__: object) -> NoReturn:
            raise RegistryUnwritableError("the disk is full")

        def fail(*arguments: Any, keep: bool | None = None, **more: Any) -> Touched:
            if keep:
                patch.setattr(registry, "commit", refuse)
                raise TimeoutError("no answer")
            return touch_many(*arguments, keep=keep, **more)

        touch_many = store.touch_many
        with monkeypatch.context() as patch:
            patch.setattr(store, "touch_many", fail)
            with names.open("n"), pytest.raises(TimeoutError):
                names.publish("n", b"other")
        left = [entry.key.rsplit("/", 1)[1].partition("-")[0] for entry in registry.range("hold/", "writer/").entries]
        assert sorted(left) == ["n", "reader", "writer"]
        with pytest.raises(NameHeldError):
            other.publish("n", b"theirs")
        names._session.renew()
        assert not registry.range("hold/", "writer/").entries
        assert other.publish("n", b"theirs").version == 2


def _names(cluster: Cluster, timeout: float) -> Names:
    return Names(_STORE, f"etcd://{cluster.hosts}", timeout=timeout)


_STORE = MemoryStore()
