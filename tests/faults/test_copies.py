"""Two copies of each object: what their promises are worth when nodes are lost, replaced or short of room."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from farpool.cluster.store import Store, upkeep
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.snapshot import Snapshot
from farpool.cluster.wire.frames import Op
from tests.faults.forge import PATIENCE, Forge, ForgedNode, eventually
from tests.nodes import stats

KEYS = [f"key {number}" for number in range(200)]
VALUES = [key.encode() * 40 for key in KEYS]


@pytest.fixture
def nodes() -> Iterator[list[ForgedNode]]:
    with Forge() as forge:
        yield [forge.node() for _ in range(3)]


def opened(nodes: list[ForgedNode], transport: Any = "auto", *, replicas: int = 2, timeout: float = PATIENCE) -> Store:
    return Store(*[node.address for node in nodes], replicas=replicas, timeout=timeout, transport=transport)


def has_all(nodes: list[ForgedNode], transport: str = "auto") -> bool:
    """Whether a program that begins now finds each value."""
    with opened(nodes, transport) as store:
        return store.lookup(KEYS).leading == len(KEYS) and store.get_many(KEYS) == VALUES


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_two_nodes_have_confirmed_is_read_at_once_when_any_one_is_lost(
    nodes: list[ForgedNode], transport: str, how: str
) -> None:
    with opened(nodes, transport, timeout=3.0) as store:
        for node in nodes:
            with opened(nodes, transport) as another:
                another.put_many(list(zip(KEYS, VALUES, strict=True)))
            node.kill() if how == "kill" else node.stop()
            assert store.get_many(KEYS) == VALUES
            with opened(nodes, transport, timeout=3.0) as fresh:
                assert fresh.get_many(KEYS) == VALUES
                assert fresh.lookup(KEYS).leading == len(KEYS)
            node.start() if how == "kill" else node.cont()


@pytest.mark.parametrize("lookup", [True, False])
def test_a_node_that_is_met_while_a_key_is_looked_for_is_asked_for_it(
    nodes: list[ForgedNode], monkeypatch: pytest.MonkeyPatch, lookup: bool
) -> None:
    with opened(nodes, "tcp") as store:
        store.put("key", b"value")
        cluster = store._open()
        whole = cluster.view(cluster.deadline())
        *others, last = whole.order(b"key")
        first_met = Snapshot([last])
        first_met.members, first_met.strangers, first_met.is_settled = whole.members, tuple(others), False
        calls = itertools.count(1)

        def view_of_the_first_met(*_: Any) -> Snapshot:
            return first_met if next(calls) <= (1 if lookup else 2) else whole

        cluster.snapshot = first_met
        monkeypatch.setattr(Cluster, "view", view_of_the_first_met)
        assert store.lookup(["key"]).found == [True] if lookup else store.get("key") == b"value"
        assert next(calls) > (2 if lookup else 3)


@pytest.mark.slow
def test_nothing_is_lost_when_each_node_is_replaced_with_sweeps_between(nodes: list[ForgedNode]) -> None:
    """Nobody reads meanwhile, so only the sweeps make copies."""
    with opened(nodes) as store:
        store.put_many(list(zip(KEYS, VALUES, strict=True)))
    for node in [*nodes, nodes[0], *nodes]:
        node.restart(anew=True)
        with opened(nodes) as store:
            swept = store.repair()
            assert swept.objects == len(KEYS)
            assert swept.mended == swept.endangered > 0
            assert store.repair().endangered == 0
    assert has_all(nodes)


def test_replacements_without_a_sweep_lose_what_had_its_copies_there(nodes: list[ForgedNode]) -> None:
    """The tests above would notice: the values are nowhere else."""
    with opened(nodes) as store:
        store.put_many(list(zip(KEYS, VALUES, strict=True)))
    for node in nodes[:2]:
        node.restart(anew=True)
    with opened(nodes) as store:
        left = store.lookup(KEYS).found
    assert 0 < sum(left) < len(KEYS)


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_both_copies_of_what_is_read_all_the_time_outlast_what_is_put_beside(transport: str) -> None:
    hot, cold = KEYS[:60], 0
    with Forge() as forge:
        nodes = [forge.node(1 << 20) for _ in range(3)]
        with opened(nodes, transport) as store:
            store.put_many([(key, key.encode() * 500) for key in hot])
            for _ in range(40):
                store.put_many([(f"cold {number}", bytes(4000)) for number in range(cold, cold + 100)])
                cold += 100
                assert store.get_many(hot) == [key.encode() * 500 for key in hot]
                eventually(lambda: not any(one.name == "farpool-store-upkeep" for one in threading.enumerate()))
            assert sum(stats(node.address)["evictions"] for node in nodes) > 1000
            assert sum(store.lookup([f"cold {number}" for number in range(cold)]).found) < cold / 4
            for node in nodes:  # no copy had to be made again: each node has its own
                node.kill()
                # Not mapped: marks of visits would take room from nodes that know of no visit after their restart.
                with opened(nodes, "tcp") as fresh:
                    assert fresh.lookup(hot).leading == len(hot)
                node.start()


def test_what_was_dropped_while_all_nodes_were_there_is_gone_for_good(nodes: list[ForgedNode]) -> None:
    with opened(nodes) as store:
        store.put_many(list(zip(KEYS, VALUES, strict=True)))
        assert all(store.drop(key) for key in KEYS)
        assert not any(store.drop(key) for key in KEYS)
        for node in nodes:
            node.restart()
            with opened(nodes) as fresh:
                assert fresh.get_many(KEYS) == [None] * len(KEYS)
        assert store.repair().objects == 0
        store.put_many([(key, b"another") for key in KEYS])
        assert store.get_many(KEYS) == [b"another"] * len(KEYS)


@pytest.mark.parametrize("when", [Op.GET, Op.PUT])
def test_a_copy_that_is_made_while_its_key_is_dropped_does_not_come_back(
    nodes: list[ForgedNode], monkeypatch: pytest.MonkeyPatch, when: Op
) -> None:
    """The drop comes after the copy was read, or after it was written."""
    with opened(nodes, "tcp") as store, opened(nodes, "tcp", replicas=1) as single:
        single.put("key", b"value")
        cluster = store._open()
        first, second, _ = cluster.view(cluster.deadline()).order(b"key")
        ask = Cluster.ask

        def ask_and_drop(asked: Cluster, asks: Sequence[Ask], *arguments: Any, **how: Any) -> Any:
            answers = ask(asked, asks, *arguments, **how)
            if asks[0].op == when:
                monkeypatch.setattr(Cluster, "ask", ask)
                assert single.drop("key")
            return answers

        monkeypatch.setattr(Cluster, "ask", ask_and_drop)
        outcome = upkeep.mend(cluster, b"key", [first], [second], cluster.deadline())
        assert outcome.gone == (when == Op.GET)
        assert store.get("key") is None


def test_a_sweep_next_to_drops_counts_what_is_gone_and_names_what_it_could_not_mend(
    nodes: list[ForgedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, victim = nodes[:2]
    with opened([kept, victim], "tcp") as store, opened([kept, victim], "tcp", replicas=1) as single:
        store.put_many(list(zip(KEYS, VALUES, strict=True)))
        with opened([victim], "tcp", replicas=1) as alone:
            assert all(alone.drop(key) for key in KEYS)  # there only, so that this node takes no copy for a minute
        dropped = KEYS[::2]
        ask = Cluster.ask

        def ask_and_drop(asked: Cluster, asks: Sequence[Ask], *arguments: Any, **how: Any) -> Any:
            if asks[0].op == Op.GET and (key := asks[0].meta.decode()) in dropped:
                assert single.drop(key)
            return ask(asked, asks, *arguments, **how)

        monkeypatch.setattr(Cluster, "ask", ask_and_drop)
        repaired = store.repair()
        counts = repaired.objects, repaired.endangered, repaired.mended, repaired.gone, len(repaired.left)
        assert counts == (200, 200, 0, 100, 100)
        assert {one.key.decode() for one in repaired.left} == set(KEYS[1::2])
        for one in repaired.left:
            assert one.lacking == 1
            assert f"{victim.address}: it takes no copy" in one.reasons[0]


def test_a_copy_that_comes_to_a_node_between_its_drop_and_that_of_another_is_dropped_as_well(
    nodes: list[ForgedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(nodes, "tcp") as store, opened(nodes, "tcp", replicas=1) as single:
        single.put("key", b"value")
        cluster = single._open()
        first, second, _ = cluster.view(cluster.deadline()).order(b"key")
        ask = Cluster.ask

        def ask_one_after_the_other(asked: Cluster, asks: Sequence[Ask], *arguments: Any, **how: Any) -> Any:
            monkeypatch.setattr(Cluster, "ask", ask)
            later = [one for one in asks if one.member is first]
            earlier = [one for one in asks if one.member is not first]
            assert earlier[0].op == Op.DROP
            answers = ask(asked, earlier, *arguments, **how)
            outcome = upkeep.mend(cluster, b"key", [first], [second], cluster.deadline())
            assert (outcome.copies, outcome.gone) == (0, False)
            assert "the key was dropped there lately" in outcome.reasons[0]
            return [*answers, *ask(asked, later, *arguments, **how)]

        monkeypatch.setattr(Cluster, "ask", ask_one_after_the_other)
        assert single.drop("key")
        assert store.get("key") is None
