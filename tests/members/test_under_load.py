"""Nodes that join, leave and move in a registry, and a registry that is killed, while programs work without a pause."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from farpool import Pool, Store
from farpool.abc.membership import MemberState
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import Registry, open_registry
from farpool.memory.tiers import Remote
from tests.faults.test_members_under_load import READERS, WRITERS, Client, all_answer, at_work, listed, value_of
from tests.faults.test_remote_members_under_load import MIB, WORKERS, Load, Worker
from tests.members.registered import drain, identity_of, joined, removed, write
from tests.nodes import PATIENCE, eventually, move, stats
from tests.registry.cluster import Cluster, needs_etcd, running_cluster

pytestmark = [needs_etcd, pytest.mark.timeout(600)]
GRACE = 30


class Fleet:
    """Nodes of a pool, and its etcd."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        self.cluster = cluster
        self.where = f"etcd://{cluster.hosts}/pool"
        self.registry: Registry = stack.enter_context(open_registry(self.where, timeout=60.0))
        self.nodes: list[RunningNode] = []
        self._stack = stack

    def join(self) -> RunningNode:
        self.nodes.append(self._stack.enter_context(running_node("256MiB", grace=GRACE)))
        self.register(self.nodes[-1])
        return self.nodes[-1]

    def register(self, node: RunningNode) -> None:
        write(self.registry, *joined(node.address, identity=identity_of(node)))

    def drain(self, node: RunningNode) -> None:
        drain(self.registry, identity_of(node))

    def remove(self, node: RunningNode) -> None:
        write(self.registry, *removed(identity_of(node)))
        self.nodes.remove(node)

    def kill_registry(self) -> None:
        self.cluster.members[0].kill()

    def restart_registry(self) -> None:
        self.cluster.start(self.cluster.members[0])
        self.registry.get("any")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with running_cluster(1) as cluster, contextlib.ExitStack() as stack:
        yield Fleet(cluster, stack)


def nodes_of(store: Store) -> set[str]:
    return {member.name for member in store._open().snapshot.met}


@pytest.mark.slow
def test_a_store_works_while_its_registry_is_away_and_then_follows_it_again(fleet: Fleet) -> None:
    fleet.join()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(fleet.where, timeout=PATIENCE))
        store.put("before", b"v")
        tier = stack.enter_context(Remote(fleet.where, size="2MiB"))
        fleet.kill_registry()
        eventually(lambda: any("did not answer" in note for note in tier.notes))
        for number in range(20):
            store.put(f"while {number}", b"v")
        assert store.get_many([f"while {number}" for number in range(20)]) == [b"v"] * 20
        fleet.restart_registry()
        other = fleet.join()
        eventually(lambda: other.address in nodes_of(store))
        fleet.drain(fleet.nodes[0])
        eventually(lambda: MemberState.DRAINING in {node.state for node in store.nodes()})
        assert store.get("before") == b"v"
        eventually(lambda: tier.nodes == (other.address,) and tier.notes == ())


@pytest.mark.slow
def test_stores_follow_the_registry_and_nothing_is_wrong_or_lost(fleet: Fleet) -> None:
    confirmed: list[str] = []
    for _ in range(3):
        fleet.join()
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(fleet.where, replicas=2, timeout=PATIENCE)) for _ in range(2)]
        for number in range(20):
            key = f"before {number}"
            stores[0].put(key, value_of(key))
            confirmed.append(key)
        clients = [
            Client(stores[number % len(stores)], confirmed, number, "etcd") for number in range(WRITERS + READERS)
        ]
        acts = [client.write if number < WRITERS else client.read for number, client in enumerate(clients)]
        with at_work(clients, acts) as go_on:

            def followed() -> None:
                eventually(lambda: all(nodes_of(store) == set(listed(fleet.nodes)) for store in stores))
                go_on()

            go_on()
            fleet.join()
            followed()

            leaver = fleet.nodes[0]
            fleet.drain(leaver)
            eventually(lambda: all(MemberState.DRAINING in {node.state for node in one.nodes()} for one in stores))
            go_on()  # the calls that began before have ended
            assert stores[1].repair().left == ()
            fleet.remove(leaver)
            followed()
            assert stores[0].repair().left == ()
            leaver.kill()
            go_on()

            fleet.kill_registry()
            go_on()
            go_on()
            assert all(nodes_of(store) == set(listed(fleet.nodes)) for store in stores)
            fleet.restart_registry()
            go_on()

            move(fleet.nodes[0])
            fleet.register(fleet.nodes[0])
            followed()
            eventually(lambda: all(map(all_answer, stores)))
            fleet.join()
            followed()
        assert [wrong for client in clients for wrong in client.wrong] == []
        with Store(fleet.where, replicas=2, timeout=PATIENCE) as fresh:
            fresh.repair()
            fleet.nodes[1].kill()  # so each object has to have another copy
            for begin in range(0, len(confirmed), 200):
                keys = confirmed[begin : begin + 200]
                assert fresh.get_many(keys) == [value_of(key) for key in keys]
        last = next(node for node in stores[0].nodes() if node.node == fleet.nodes[-1].address)
        assert last.stats is not None
        assert last.stats["objects"] > 0, "the node that joined after the restart has received nothing"


@pytest.mark.slow
def test_a_remote_tier_follows_the_registry_and_all_bits_are_right(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.join()
    tier = Remote(fleet.where, size="16MiB", transport="tcp", timeout=PATIENCE)
    with Pool("2MiB", [tier], timeout=2 * PATIENCE) as pool:
        is_moving = threading.Event()
        workers = [Worker(pool, number, "etcd", is_moving) for number in range(WORKERS)]
        load = Load(workers)

        def has_moved() -> bool:
            return set(tier.nodes) == set(listed(fleet.nodes))

        with load.at_work():
            load.go_on()
            for drains in (True, False):
                leaver = fleet.nodes[0]
                fleet.join()
                load.go_on()
                assert leaver.address in tier.nodes
                if drains:
                    fleet.drain(leaver)
                    eventually(lambda leaver=leaver: leaver.address not in tier.nodes)  # type: ignore[misc]
                fleet.remove(leaver)
                eventually(has_moved)
                load.go_on()
                leaver.kill()
                load.go_on()

            fleet.kill_registry()
            load.go_on()
            assert has_moved()
            fleet.restart_registry()

            is_moving.set()
            move(fleet.nodes[0])
            fleet.register(fleet.nodes[0])
            eventually(has_moved)
            load.go_on()  # the operations that met the node while it was away have ended
            is_moving.clear()
            load.go_on()

            fleet.drain(fleet.nodes[0])
            eventually(lambda: tier.nodes == (fleet.nodes[1].address,) * 2)
            fleet.nodes[0].kill()
            load.go_on()
        for worker in workers:
            worker.compare_all()
        assert [wrong for worker in workers for wrong in worker.wrong] == []
        assert tier.notes == ()
        assert stats(fleet.nodes[1].address)["lent"] == 16 * MIB
        for worker in workers:
            worker.end()
