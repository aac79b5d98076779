"""Copies of the objects of names: nodes keep the wanted number of them through losses, reads and repairs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.names import Names
from farpool.cluster.names.sending import Sending
from farpool.cluster.names.sweep import _retire, _versions
from farpool.cluster.registry import Registry
from farpool.cluster.store import Store
from farpool.errors import NameLostError, QuotaExceededError
from tests.node.nodes import walked
from tests.nodes import eventually
from tests.store.local_nodes import MIB, LocalNode, store_over

VALUE = [os.urandom(1000), os.urandom(200_000)]  # the second uses mapped memory if there is any


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[LocalNode]]:
    made = [LocalNode(tmp_path, number) for number in range(3)]
    yield made
    for node in made:
        node.kill()


@pytest.fixture
def store(nodes: list[LocalNode], tmp_path: Path) -> Iterator[Store]:
    with store_over(nodes, 2, registry=tmp_path / "registry") as store:
        yield store


def kept(nodes: list[LocalNode]) -> list[str]:
    """Return the key of every kept copy."""
    found = []
    for node in nodes:
        if node.server is not None:
            found += [entry[0].decode() for entry in walked(node.server, 0, b"", b"", 1000) if entry[6]]
    return sorted(found)


def read(store: Store, name: str) -> bytes:
    with store.open(name) as opened:
        return opened.read()


def keys_of(store: Store, name: str) -> list[str]:
    with store.open(name) as opened:
        return [piece.key for piece in opened.manifest.pieces]


def retire_only(store: Store, registry: Registry, grace: float) -> int:
    """Do the part of a sweep before it asks nodes, as a program that is stopped then."""
    _retire(registry, _versions(registry).unheld)
    return 0


def answering(store: Store) -> Callable[[], bool]:
    return lambda: all(status.stats is not None for status in store.nodes())


def test_all_copies_of_a_name_are_kept_although_a_node_dies_during_the_publish(
    nodes: list[LocalNode], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_many({f"{number}": b"" for number in range(9)})  # so that the store has connected to all nodes
    announce = Sending._announce

    def dies(sending: Sending, keys: list[str]) -> None:
        nodes[0].kill()
        announce(sending, keys)

    monkeypatch.setattr(Sending, "_announce", dies)
    assert store.publish("n", VALUE).objects == 3
    assert set(map(kept(nodes).count, kept(nodes))) == {2}
    assert len(kept(nodes)) == 6
    assert read(store, "n") == b"".join(VALUE)


@pytest.mark.slow
def test_names_survive_the_replacement_of_every_node_with_repairs_in_between(
    nodes: list[LocalNode], store: Store
) -> None:
    store.publish("n", VALUE)
    before = kept(nodes)
    assert len(before) == 6
    for node in nodes:
        node.replace()
        eventually(answering(store))
        lost = len(before) - len(kept(nodes))
        repaired = store.repair()
        assert (repaired.endangered, repaired.mended) == (lost, lost)
        assert kept(nodes) == before
    listed = [entry for node in nodes if node.server is not None for entry in walked(node.server, 0, b"", b"", 1000)]
    assert {(entry[5], entry[6]) for entry in listed} == {(2, True)}  # two copies are wanted, and each is kept
    for number in range(30):  # more than the memory of the nodes
        store.put(f"filler {number}", os.urandom(MIB))
    assert kept(nodes) == before
    assert read(store, "n") == b"".join(VALUE)


def test_a_repair_makes_a_restarted_node_keep_its_copy(nodes: list[LocalNode], store: Store) -> None:
    store.put("k", b"value", ttl=1000)
    cluster = store._open()
    by_name = {node.name: node for node in nodes}
    order = cluster.view(cluster.deadline()).order(b"k")
    first, second, third = [by_name[member.name] for member in order]
    second.kill()
    assert store.touch("k", None, keep=True)
    second.restart()
    eventually(answering(store))
    assert kept(nodes) == ["k"]
    repaired = store.repair()
    assert (repaired.endangered, repaired.mended) == (1, 1)
    assert kept([first, second]) == ["k", "k"]
    assert kept([third]) == []
    assert store.repair().endangered == 0


def test_a_repair_has_a_copy_kept_although_each_request_takes_long(
    nodes: list[LocalNode], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish("n", b"value")
    before = kept(nodes)
    next(node for node in nodes if kept([node])).replace()
    eventually(answering(store))
    cluster = store._open()
    ask = cluster.ask

    def slow(asks: Any, deadline: float, *, fresh: bool = False) -> Any:
        answers = ask(asks, deadline, fresh=fresh)
        time.sleep(0.02)
        return answers

    monkeypatch.setattr(cluster, "ask", slow)
    monkeypatch.setattr("farpool.cluster.repair.copying._UNKEPT_MS", 1)
    repaired = store.repair()
    assert 0 < repaired.endangered == repaired.mended
    assert kept(nodes) == before


def test_nodes_release_the_objects_of_a_stopped_sweep_while_another_node_is_away(
    nodes: list[LocalNode], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Names(store, tmp_path / "registry", hold=0.0) as names:
        names.publish("n", VALUE)
        away = next(node for node in nodes if kept([node]))
        theirs = kept([away])
        away.kill()
        with monkeypatch.context() as patch:
            patch.setattr("farpool.cluster.names.names.sweep", retire_only)
            names.unpublish("n")
        names.sweep()
        assert kept(nodes) == []
        assert len(names._registry.range("released/").entries) == 1
        away.restart()
        eventually(answering(store))
        assert kept(nodes) == theirs
        names.sweep()
        assert kept(nodes) == []
        assert names._registry.range("released/").entries == ()


@pytest.mark.parametrize("who", ["repair is stopped", "sweep is stopped"])
@pytest.mark.slow
def test_a_repair_during_a_sweep_leaves_no_kept_copy_without_a_name(
    nodes: list[LocalNode], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """One of the two pauses at each of its calls of the nodes, and the other does all of its work then."""
    with store_over(nodes, 2) as other, Names(other, tmp_path / "registry", hold=0.0) as names:
        stopped, work, others_work = (
            (store._open(), store.repair, names.sweep)
            if who == "repair is stopped"
            else (other._open(), names.sweep, store.repair)
        )
        ask, steps, at = stopped.ask, 0, 0

        def stops(asks: Any, deadline: float, *, fresh: bool = False) -> Any:
            nonlocal steps
            steps += 1
            if steps == at:
                others_work()
            return ask(asks, deadline, fresh=fresh)

        while steps >= at:
            steps, at = 0, at + 1
            assert at < 30
            names.publish("n", b"%d" % at * 1000)
            next(node for node in nodes if kept([node])).replace()  # a repair copies its objects
            eventually(answering(store))
            eventually(answering(other))
            with monkeypatch.context() as patch:
                patch.setattr(names, "sweep", lambda: 0)
                names.unpublish("n")
            with monkeypatch.context() as patch:
                patch.setattr(stopped, "ask", stops)
                work()
            names.sweep()
            assert kept(nodes) == [], f"at call {at}"
            for key in list(store.keys()):  # so that the next repair does not find objects that are about to expire
                store.drop(key)
        assert at > 2


def test_a_read_restores_a_missing_copy_as_a_kept_one(nodes: list[LocalNode], store: Store) -> None:
    store.publish("n", VALUE)
    keys = set(kept(nodes))
    for node in nodes:
        node.replace()
        eventually(answering(store))
        assert read(store, "n") == b"".join(VALUE)
        eventually(lambda: all(kept(nodes).count(key) >= 2 for key in keys))


def test_opening_a_name_without_copies_raises_an_error(nodes: list[LocalNode], store: Store) -> None:
    store.publish("n", VALUE)
    lost = keys_of(store, "n")[1]
    assert store.drop(lost)
    with store.open("n") as opened, pytest.raises(NameLostError, match="publish the name again") as caught:
        opened.read()
    assert (caught.value.name, caught.value.version, caught.value.key) == ("n", 1, lost)
    assert store.publish("n", VALUE).version == 2
    assert read(store, "n") == b"".join(VALUE)


def test_a_value_that_one_node_may_not_keep_is_not_published(
    nodes: list[LocalNode], store: Store, tmp_path: Path
) -> None:
    with Names(store, tmp_path / "registry", hold=0.0) as names:
        names.publish("n", b"before")
        before = kept(nodes)
        with pytest.raises(QuotaExceededError, match="7/8"):
            names.publish("n", [os.urandom(MIB * 3 // 2) for _ in range(7)])  # 21 MiB of 24, on three nodes
        assert read(store, "n") == b"before"
        names.sweep()
        assert kept(nodes) == before


def test_a_touch_of_many_objects_counts_the_copies_that_it_reached(nodes: list[LocalNode], store: Store) -> None:
    store.put_many({f"{number}": b"value" for number in range(2000)}, ttl=100)
    touched = store.touch_many([*(f"{number}" for number in range(2000)), "missing"], 200.0)
    assert list(touched.copies) == [2] * 2000 + [0]
    assert touched.complete
    nodes[0].kill()
    touched = store.touch_many([f"{number}" for number in range(2000)], 200.0)
    assert set(touched.copies) == {1, 2}
    assert not touched.complete
    assert touched.away == {nodes[0].name}
