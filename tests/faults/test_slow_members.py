"""A node whose answers are delayed on their way, in front of a store with two copies of each object."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from tests.faults.proxy import Proxy
from tests.nodes import eventually, stats

DELAY_S = 0.02
KEYS = [f"key {number}" for number in range(60)]
LATER = [f"later {number}" for number in range(20)]


@dataclass
class Site:
    nodes: list[RunningNode]
    proxies: list[Proxy]

    def gets(self) -> list[int]:
        return [int(stats(node.address)["gets"]) for node in self.nodes]


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node()) for _ in range(3)]
        yield Site(nodes, [stack.enter_context(Proxy(node.address)) for node in nodes])


def slow(store: Store) -> list[str]:
    return [status.node for status in store.nodes() if status.slow > 0]


def firsts(store: Store, address: str) -> int:
    """Return how many of the keys have this node as their first."""
    view = store._open().snapshot
    return sum(view.places(key.encode())[0].name == address for key in KEYS)


@pytest.mark.slow
def test_reads_leave_a_slow_node_out_until_it_answers_promptly_again(site: Site) -> None:
    with Store(*[proxy.address for proxy in site.proxies], replicas=2, transport="tcp", timeout=20) as store:
        store.put_many((key, key.encode()) for key in KEYS)
        before = site.gets()
        for key in KEYS:
            assert store.get(key) == key.encode()
        own = [firsts(store, proxy.address) for proxy in site.proxies]
        assert own[0] > 5
        assert [now - then for now, then in zip(site.gets(), before, strict=True)] == own

        site.proxies[0].delay = DELAY_S

        def is_found() -> bool:
            assert [store.get(key) for key in KEYS] == [key.encode() for key in KEYS]
            return slow(store) == [site.proxies[0].address]

        eventually(is_found)
        assert store.nodes()[0].slow > DELAY_S / 4
        before = site.gets()
        for key in KEYS:
            assert store.get(key) == key.encode()
        assert store.get_many(KEYS) == [key.encode() for key in KEYS]
        assert store.lookup(KEYS).leading == len(KEYS)
        delayed, *others = [now - then for now, then in zip(site.gets(), before, strict=True)]
        assert (delayed, sum(others)) == (0, 2 * len(KEYS))
        assert site.proxies[0].address in {
            member.name for key in LATER for member in store._open().snapshot.places(key.encode())[:2]
        }
        objects = [int(stats(node.address)["objects"]) for node in site.nodes]
        store.put_many((key, key.encode()) for key in LATER)
        added = [int(stats(node.address)["objects"]) - then for node, then in zip(site.nodes, objects, strict=True)]
        assert added[0] > 0
        assert sum(added) == 2 * len(LATER)

        site.proxies[0].delay = 0.0
        eventually(lambda: slow(store) == [])
        before = site.gets()
        for key in KEYS:
            assert store.get(key) == key.encode()
        assert [now - then for now, then in zip(site.gets(), before, strict=True)] == own
        assert [status.times_slow for status in store.nodes()] == [1, 0, 0]


@pytest.mark.slow
def test_a_slow_node_is_read_if_the_other_copy_is_lost(site: Site) -> None:
    with Store(*[proxy.address for proxy in site.proxies], replicas=2, transport="tcp", timeout=20) as store:
        store.put_many((key, key.encode()) for key in KEYS)
        site.proxies[0].delay = DELAY_S

        def is_found() -> bool:
            assert [store.get(key) for key in KEYS] == [key.encode() for key in KEYS]
            return slow(store) == [site.proxies[0].address]

        eventually(is_found)
        site.nodes[1].kill()
        for key in KEYS:
            assert store.get(key) == key.encode()
        assert store.lookup(KEYS).leading == len(KEYS)
        assert store.get("no such key") is None
        assert site.proxies[0].address in slow(store)


@pytest.mark.slow
def test_nodes_that_are_all_slow_are_read_as_before(site: Site) -> None:
    with Store(*[proxy.address for proxy in site.proxies], replicas=2, transport="tcp", timeout=20) as store:
        store.put_many((key, key.encode()) for key in KEYS)
        for proxy in site.proxies:
            proxy.delay = DELAY_S
        for _ in range(3):
            assert [store.get(key) for key in KEYS] == [key.encode() for key in KEYS]
        pacing = store._pacing
        assert pacing is not None
        eventually(lambda: pacing._thread is None)
        assert slow(store) == []
        assert [status.times_slow for status in store.nodes()] == [0, 0, 0]
