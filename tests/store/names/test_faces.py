"""Names through a store, which opens the registry when a program first uses a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from farpool.cluster.registry import open_registry
from farpool.cluster.store import AsyncStore
from farpool.errors import ConfigError, NameMissingError, NameMovedError, StoreClosedError
from tests.forking import in_forked_child
from tests.nodes import eventually
from tests.store.local_nodes import LocalNode, store_over


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[LocalNode]]:
    made = [LocalNode(tmp_path, number) for number in range(2)]
    yield made
    for node in made:
        node.kill()


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "state" / "names.sqlite"


def test_a_store_publishes_opens_watches_lists_and_unpublishes(nodes: list[LocalNode], registry: Path) -> None:
    with store_over(nodes, 2, registry=registry) as ours, store_over(nodes, 2, registry=registry) as theirs:
        ours.put("k", b"v")
        assert not registry.exists()  # no program has used a name yet
        with theirs.watch("n") as watch:
            assert watch.next(0.0) is None
            first = ours.publish("n", b"one")
            assert watch.next(60.0) == first
        assert ours.publish("n", [b"t", b"w", b"o"], expect=1).version == 2
        with pytest.raises(NameMovedError, match="has version 2, expected 1"):
            theirs.publish("n", b"three", expect=1)
        with theirs.open("n") as opened, theirs.open("n", 1) as older:
            assert (opened.info.version, opened.read(), older.read()) == (2, b"two", b"one")
        ours.publish("o", {"a": numpy.arange(3)})
        assert [info.name for info in theirs.list_names()] == ["n", "o"]
        assert [info.version for info in theirs.history("n")] == [1, 2]
        assert not theirs.unpublish("n", expect=2).published
        with pytest.raises(NameMissingError):
            ours.open("n")
        kept = ours.open("o")
    with pytest.raises(StoreClosedError):
        kept.read_tensor_into(kept.tensors()[0], bytearray(24))
    for call in (ours.history, ours.open, ours.unpublish, ours.watch):
        with pytest.raises(StoreClosedError):
            call("n")
    ours.close()
    with open_registry(registry) as left:
        assert not [entry.key for entry in left.range("writer/", "sweeper").entries]


def test_the_environment_names_the_registry_or_the_caller_passes_one(
    nodes: list[LocalNode], registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_REGISTRY", str(tmp_path / "elsewhere"))
    with open_registry(registry) as ours:
        with store_over(nodes, registry=ours) as store, store_over(nodes) as other:  # type: ignore[arg-type]
            store.publish("n", b"")
            assert other.list_names() == []
            other.publish("m", b"")
        assert [entry.key for entry in ours.range("name/").entries] == ["name/n"]  # the store did not close it
    assert (tmp_path / "elsewhere").exists()
    with (
        store_over(nodes, registry="etcd://") as store,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="the registry's address 'etcd://' is wrong"),
    ):
        store.publish("n", b"")


def test_a_forked_child_cannot_use_a_store_with_names(nodes: list[LocalNode], registry: Path) -> None:
    with store_over(nodes, registry=registry) as store:
        store.publish("n", b"value")

        def child() -> None:
            with pytest.raises(StoreClosedError, match="fork"):
                store.open("n")
            store.close()

        in_forked_child(child)
        with store.open("n") as opened:
            assert opened.read() == b"value"


def over(nodes: list[LocalNode], registry: Path) -> AsyncStore:
    store = AsyncStore.__new__(AsyncStore)
    store._begin(store_over(nodes, registry=registry))  # type: ignore[misc]
    return store


def test_an_async_store_publishes_opens_watches_lists_and_unpublishes(nodes: list[LocalNode], registry: Path) -> None:
    async def program() -> None:
        async with over(nodes, registry) as store:
            seen: list[int] = []

            async def reader() -> None:
                async for info in store.watch("n"):
                    seen.append(info.version)
                    if not info.published:
                        return

            watching = asyncio.create_task(reader())
            endless = asyncio.create_task(anext(store.watch("never")))
            assert (await store.publish("n", b"one")).version == 1
            async with store.open("n") as opened:
                assert await opened.read() == b"one"
                target = bytearray(3)
                assert await opened.read_into(target) == 3
                assert target == b"one"
            array = numpy.arange(5.0)
            await store.publish("t", {"a": array, "b": array + 1})
            async with store.open("t") as opened:
                targets = [numpy.empty(5), numpy.empty(5)]
                await opened.read_tensors_into(zip(opened.tensors(), targets, strict=True))
                assert [target.tolist() for target in targets] == [array.tolist(), (array + 1).tolist()]
            assert [info.name for info in await store.list_names("")] == ["n", "t"]
            assert len(await store.history("n")) == 1
            await store.unpublish("n")
            await asyncio.wait_for(watching, 60)
            assert seen[-1] == 2
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            with pytest.raises(NameMissingError):
                async with store.open("n"):
                    pass

    asyncio.run(program())


def test_a_cancelled_open_holds_nothing(nodes: list[LocalNode], registry: Path) -> None:
    async def program() -> None:
        async with over(nodes, registry) as store:
            await store.publish("n", b"one")

            async def opens() -> None:
                async with store.open("n"):
                    await asyncio.sleep(3600)

            for _ in range(20):
                task = asyncio.create_task(opens())
                await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            names = store._store._open_names()
            eventually(lambda: not names._registry.range("hold/").entries)

    asyncio.run(program())
