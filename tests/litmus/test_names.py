"""What a reader may see of names (docs/memory-model.md, rules N1 to N6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.names import Names, names
from farpool.cluster.names.records import NameInfo
from farpool.cluster.node.process import RunningNode
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import NameHeldError, NameMovedError, RegistryAwayError
from tests.litmus.conftest import Programs
from tests.litmus.threads import PATIENCE_S, need_all_memory, together

in_one_way = pytest.mark.parametrize("transport", ["mapped"], indirect=True, scope="session")
"""The way to the objects changes nothing about names."""


@in_one_way
@pytest.mark.slow
def test_n1_an_open_that_begins_after_a_publish_sees_that_version_or_a_later_one(programs: Programs) -> None:
    writer, first, second = programs(3)
    versions = 12
    published = 0

    def write() -> None:
        nonlocal published
        for version in range(1, versions + 1):
            assert writer.publish("n1", b"%02d" % version * 1000).version == version
            published = version

    def read(store: Store) -> list[int]:
        seen = [0]
        while seen[-1] < versions:
            before = published
            if not before:
                continue
            with store.open("n1") as opened:
                version = opened.info.version
                # The value is the one of the version: whole, and no mixture.
                assert opened.read() == b"%02d" % version * 1000
                assert opened.held
            assert version >= max(before, seen[-1])
            seen.append(version)
        return seen

    together(write, lambda: read(first), lambda: read(second))


@in_one_way
def test_n2_no_update_is_lost_if_each_writer_names_the_version_that_it_has_read(programs: Programs) -> None:
    stores = programs(2)
    stores[0].publish("n2", b"0")
    each = 6

    def add(store: Store) -> int:
        tries = done = 0
        while done < each:
            tries += 1
            with store.open("n2") as opened:
                version, number = opened.info.version, int(opened.read())
            try:
                store.publish("n2", b"%d" % (number + 1), expect=version)
                done += 1
            except (NameMovedError, NameHeldError):
                pass
        return tries

    together(*(lambda store=store: add(store) for store in stores))
    with stores[0].open("n2") as opened:
        assert (opened.info.version, opened.read()) == (1 + 2 * each, b"%d" % (2 * each))


def test_n3_a_version_stays_as_it_is_while_it_is_open_and_goes_after_that(node: RunningNode, tmp_path: Path) -> None:
    place = str(tmp_path / "registry")
    with (
        Store(node.address, timeout=30) as store,
        Names(store, place, hold=0.0) as writer,
        Names(store, place, hold=0.0) as reader,
    ):
        writer.publish("n3", b"first")
        with reader.open("n3") as opened:
            keys = [piece.key for piece in opened.manifest.pieces]
            for value in (b"second", b"third"):
                writer.publish("n3", value)
                writer.sweep()
                need_all_memory(store)
                assert (opened.info.version, opened.read()) == (1, b"first")
            with writer.open("n3") as current:
                assert current.read() == b"third"
        writer.sweep()
        assert not any((found := store.stat(key)) is not None and found.kept for key in keys)


class Leaving(SqliteRegistry):
    """A registry that does not answer while `away` is True."""

    away = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("get", "range", "commit", "grant", "keep_alive") and super().__getattribute__("away"):

            def fail(*_: object, **__: object) -> None:
                raise RegistryAwayError("the registry does not answer")

            return fail
        return found


@pytest.fixture
def readers(node: RunningNode, tmp_path: Path) -> Iterator[Callable[[type[SqliteRegistry]], Names]]:
    """Makes programs' names over registries of a kind, all at one place."""
    with ExitStack() as stack:

        def make(kind: type[SqliteRegistry]) -> Names:
            store = stack.enter_context(Store(node.address, timeout=30))
            registry = stack.enter_context(kind(tmp_path / "registry"))
            return stack.enter_context(Names(store, registry))

        yield make


def test_n4_without_the_registry_a_program_sees_the_last_version_that_it_knew_and_says_so(
    readers: Callable[[type[SqliteRegistry]], Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_AWAY_REST_S", 0.0)
    writer, reader = readers(SqliteRegistry), readers(Leaving)
    registry: Any = reader._registry
    writer.publish("n4", b"1")
    writer.publish("other", b"1")
    with reader.open("n4") as opened:
        assert (opened.read(), opened.held) == (b"1", True)
    registry.away = True
    writer.publish("n4", b"2")
    for _ in range(3):
        # An old version, but never one from before the last one that this program saw.
        with reader.open("n4") as opened:
            assert (opened.info.version, opened.read(), opened.held) == (1, b"1", False)
    with pytest.raises(RegistryAwayError):
        reader.open("other")
    registry.away = False
    with reader.open("n4") as opened:
        assert (opened.info.version, opened.read(), opened.held) == (2, b"2", True)


@in_one_way
def test_n5_a_watch_reports_rising_versions_and_always_the_last_one(programs: Programs) -> None:
    writer, reader = programs(2)
    versions = 10

    def write() -> None:
        for version in range(1, versions + 1):
            writer.publish("n5", b"%d" % version)

    def watch() -> list[NameInfo]:
        seen: list[NameInfo] = []
        with reader.watch("n5") as changes:
            while not seen or seen[-1].version < versions:
                info = changes.next(timeout=PATIENCE_S)
                assert info is not None
                seen.append(info)
                with reader.open("n5") as opened:
                    assert opened.info.version >= info.version
        return seen

    _, seen = together(write, watch)
    numbers = [info.version for info in seen]
    assert numbers == sorted(set(numbers))


@in_one_way
def test_n6_what_a_program_did_before_it_published_is_seen_by_each_reader_of_the_version(programs: Programs) -> None:
    writer, reader = programs(2)
    versions = 12

    def write() -> None:
        for version in range(1, versions + 1):
            writer.put(f"n6/{version}", b"%d" % version * 1000)
            writer.publish("n6", b"%d" % version)

    def read() -> None:
        last = 0
        with reader.watch("n6") as changes:
            while last < versions:
                info = changes.next(timeout=PATIENCE_S)
                assert info is not None
                for version in range(last + 1, info.version + 1):
                    assert reader.get(f"n6/{version}") == b"%d" % version * 1000
                last = info.version

    together(write, read)
