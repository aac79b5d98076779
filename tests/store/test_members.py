"""Members that join, leave and move while a store is open, on data loops in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farpool import AsyncStore, StaticMembers, Store
from farpool._native import Connection, ObjectReader
from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.member import Member
from farpool.errors import ConfigError, NodeError, ReplicationError
from farpool.testing import MembershipConformance
from tests.node.nodes import walked
from tests.nodes import PATIENCE, eventually
from tests.store.local_nodes import LocalChannel, LocalNode, Nodes, store_over

LARGE = bytes(range(256)) * 257
KEYS = [b"key %d" % number for number in range(60)]


class Listed(Membership):
    """A list of members with identities, as a registry would give it."""

    def __init__(self, *members: MemberInfo) -> None:
        self._members = members
        self._subscribers: list[Callable[[], None]] = []

    def members(self) -> Sequence[MemberInfo]:
        return self._members

    def set(self, *members: MemberInfo) -> None:
        self._members = members
        for changed in self._subscribers:
            changed()

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(changed)
        return lambda: None


class TestStaticMembers(MembershipConformance):
    def make(self) -> Membership:
        return StaticMembers("tcp://first:1")

    def change(self, members: Membership, addresses: list[str]) -> None:
        assert isinstance(members, StaticMembers)
        members.update(addresses)


def names(nodes: Sequence[LocalNode]) -> list[str]:
    return [node.name for node in nodes]


def cluster_of(store: Store) -> Cluster:
    assert store._cluster is not None
    return store._cluster


def member_of(store: Store, node: LocalNode) -> Member:
    (member,) = [one for one in cluster_of(store).members if one.name == node.name]
    return member


def has_met(store: Store, *nodes: LocalNode) -> bool:
    return {node.name for node in nodes} <= {member.name for member in cluster_of(store).snapshot.met}


def held(node: LocalNode) -> set[bytes]:
    assert node.server is not None
    return {entry[0] for entry in walked(node.server, 0, b"", b"", 1000)}


def test_a_list_of_members_checks_its_addresses() -> None:
    with pytest.raises(ConfigError, match="missing"):
        StaticMembers()
    with pytest.raises(ConfigError, match="given twice"):
        StaticMembers("a:1", "tcp://a:1")
    members = StaticMembers("a:1", "b:1")
    for wrong in (lambda: members.update([]), lambda: members.update(["a:1", "nonsense"])):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="tcp://c:1 is not in the list"):
        members.update(["a:1"], draining=["c:1"])
    assert [info.addresses for info in members.members()] == [("tcp://a:1",), ("tcp://b:1",)]
    members.update(["b:1", "c:1"], draining=["tcp://b:1"])
    assert [str(info.state) for info in members.members()] == ["draining", "active"]


def test_a_store_takes_addresses_or_one_list() -> None:
    members = StaticMembers("a:1", "b:1")
    with pytest.raises(ConfigError, match="expected addresses or one Membership"):
        Store(members, "c:1")
    with pytest.raises(ConfigError, match="replicas is 3, expected 1 to 2, the number of nodes"):
        Store(members, replicas=3)
    with pytest.raises(ConfigError, match="replicas is 0, expected a whole number from 1 to 255"):
        Store(Listed(), replicas=0)
    with Store(members, replicas=2) as store:
        assert [member.name for member in cluster_of(store).members] == ["tcp://a:1", "tcp://b:1"]
    assert members._subscribers == {}


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_a_member_that_joins_gets_objects_and_what_was_there_is_found(local: Nodes, mapped: bool) -> None:
    nodes = local(3, mapped=mapped)
    members = StaticMembers(*names(nodes[:2]))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, b"before") for key in KEYS)
        members.update(names(nodes))
        eventually(lambda: has_met(store, nodes[2]))
        assert store.get_many(KEYS) == [b"before"] * len(KEYS)
        assert store.lookup(KEYS).leading == len(KEYS)
        assert [store.get(key) for key in KEYS] == [b"before"] * len(KEYS)
        store.put_many((b"new" + key, b"after") for key in KEYS)
        first = [key for key in KEYS if cluster_of(store).snapshot.first(b"new" + key).name == nodes[2].name]
        assert first
        assert {b"new" + key for key in first} == held(nodes[2])
        assert all(store.drop(key) for key in KEYS)


def test_a_program_that_knows_the_new_list_from_the_start_has_the_same_order(local: Nodes) -> None:
    nodes = local(4)
    members = StaticMembers(*names(nodes[:2]))
    with store_over(nodes, 2, members=members) as one, store_over(nodes[::-1], 2) as other:
        one.put("k", b"v")
        members.update(names(nodes))
        eventually(lambda: has_met(one, *nodes))
        views = [store._open().view(time.monotonic() + PATIENCE) for store in (one, other)]
        for key in KEYS:
            mine, theirs = [[member.identity for member in view.order(key)] for view in views]
            assert mine == theirs


def test_calls_do_not_wait_for_a_member_that_joins_and_cannot_be_reached(local: Nodes) -> None:
    nodes = local(2)
    reached, go_on = threading.Event(), threading.Event()

    class Slow(LocalChannel):
        def take(self, deadline: float, *, fresh: bool = False) -> Connection:
            if self.name == nodes[1].name:
                reached.set()
                assert go_on.wait(PATIENCE)
                raise NodeError(f"{self.name}: no route", node=self.name)
            return super().take(deadline, fresh=fresh)

    members = StaticMembers(nodes[0].name)
    with store_over(nodes, 1, channel=Slow, members=members) as store:
        store.put("k", b"v")
        members.update(names(nodes))
        assert reached.wait(PATIENCE)
        for key in KEYS:  # none of these ends before `go_on` if it waits for the other member
            assert store.put(key, b"v") == "stored"
            assert store.get(key) == b"v"
            assert store.best_effort().lookup([key], PATIENCE) == [1]
        go_on.set()
        eventually(lambda: member_of(store, nodes[1]).is_failing)
        assert store.nodes()[1].error.endswith("no route")
        # Its objects may be there alone, so a missing key is no miss.
        cluster_of(store).timeout = 0.1
        with pytest.raises(NodeError, match="no route"):
            store.get("none")
        members.update([nodes[0].name])
        assert store.get("none") is None


def test_objects_of_a_member_that_leaves_are_found_on_the_others(local: Nodes) -> None:
    nodes = local(3)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 2, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        nodes[0].kill()
        members.update(names(nodes[1:]))
        assert store.get_many(KEYS) == [b"v"] * len(KEYS)
        repaired = store.repair()
        assert repaired.endangered == repaired.mended > 0
        assert held(nodes[1]) == held(nodes[2]) == set(KEYS)
        assert store.lookup(["none"]).sizes == [None]


def test_a_member_that_is_drained_loses_nothing_and_gets_nothing(local: Nodes) -> None:
    nodes = local(3)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        store.touch(KEYS[0], None, keep=True)
        there = held(nodes[0])
        assert there
        members.update(names(nodes), draining=[nodes[0].name])
        assert [status.state for status in store.nodes()] == ["draining", "active", "active"]
        assert store.get_many(KEYS) == [b"v"] * len(KEYS)
        store.put_many((b"new" + key, b"v") for key in KEYS)
        assert held(nodes[0]) == there
        repaired = store.repair()
        assert (repaired.endangered, repaired.mended, repaired.left) == (len(there), len(there), ())
        assert store.repair().endangered == 0
        members.update(names(nodes[1:]))
        nodes[0].kill()
        assert store.get_many([*KEYS, *[b"new" + key for key in KEYS]]) == [b"v"] * 2 * len(KEYS)
        assert store.stat(KEYS[0]).kept  # type: ignore[union-attr]


def test_too_few_members_that_take_objects_are_named(local: Nodes) -> None:
    nodes = local(2)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 2, members=members) as store:
        store.put("k", b"v")
        members.update(names(nodes), draining=[nodes[1].name])
        with pytest.raises(ReplicationError, match=r"1 of 2 nodes .*\(1 of the store.s members take objects, exp"):
            store.put("other", b"v")
        members.update(names(nodes), draining=names(nodes))
        with pytest.raises(ReplicationError, match=r"0 of 2 .*\(0 of the store's members take objects"):
            store.put("another", b"v")
        assert store.get("k") == b"v"
        assert list(store.get_many(["k", "none"])) == [b"v", None]
        assert store.lookup(["k", "none"]).sizes == [1, None]


def test_a_call_that_is_under_way_finishes_with_the_member_that_leaves(local: Nodes) -> None:
    nodes = local(2)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(LocalChannel):
        def call(self, name: str, deadline: float, **arguments: object) -> dict[str, object]:
            inside.set()
            assert go_on.wait(PATIENCE)
            return super().call(name, deadline, **arguments)

    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, channel=Slow, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        found: list[bytes] = []
        lister = threading.Thread(target=lambda: found.extend(store.keys()))
        lister.start()
        assert inside.wait(PATIENCE)
        left = [weakref.ref(member_of(store, node)) for node in nodes]
        channel = left[1]().channel  # type: ignore[union-attr]
        members.update([nodes[0].name])
        gc.collect()
        assert left[1]() is not None, "a call is under way"
        assert not channel._closed
        go_on.set()
        lister.join(PATIENCE)
        assert sorted(found) == sorted(KEYS)
        del lister
        eventually(lambda: gc.collect() >= 0 and left[1]() is None)
        assert channel._closed
        assert left[0]() is not None
        assert set(store.keys()) == held(nodes[0])


def test_a_pin_outlives_the_membership_of_its_node(local: Nodes) -> None:
    nodes = local(2, mapped=True)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, LARGE) for key in KEYS[:20])
        pins = store.pin_many(KEYS[:20])
        there = held(nodes[1])
        assert there

        def pinned() -> int:
            assert nodes[1].server is not None
            return sum(entry[4] for entry in walked(nodes[1].server, 0, b"", b"", 1000))

        assert pinned() == len(there)
        channel = member_of(store, nodes[1]).channel
        members.update([nodes[0].name])
        gc.collect()
        pins.verify()
        assert [bytes(pin.view) for pin in pins if pin is not None] == [LARGE] * 20
        assert pinned() == len(there)
        assert not channel._closed
        pins.release()
        assert pinned() == 0
        del pins
        gc.collect()
        assert channel._closed


def test_a_store_that_is_closed_closes_members_that_left_too(local: Nodes) -> None:
    nodes = local(2, mapped=True)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, LARGE) for key in KEYS[:20])
        pins = store.pin_many(KEYS[:20])
        channel = member_of(store, nodes[1]).channel
        members.update([nodes[0].name])
    assert channel._closed
    pins.release()


@pytest.mark.parametrize("mapped", [False, True], ids=["tcp", "mapped"])
def test_a_node_that_moved_is_recognized_and_its_objects_are_found_without_a_repair(local: Nodes, mapped: bool) -> None:
    nodes = local(3, mapped=mapped)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        marks = store.touch_many(KEYS, 1000.0).marks
        there = held(nodes[1])
        nodes[1].move(9)
        members.update(names(nodes))
        assert store.get_many(KEYS) == [b"v"] * len(KEYS)
        assert held(nodes[1]) == there
        assert store.put(next(iter(there)), b"another") == "present"
        touched = store.touch_many(KEYS, 2000.0, keep=True, seen=marks)
        assert list(touched.copies) == [1] * len(KEYS)
        assert touched.complete
        assert store.repair().endangered == 0
        assert [status.node for status in store.nodes()] == names(nodes)


@pytest.mark.parametrize("listed_twice", [False, True])
def test_a_pin_lives_on_when_its_node_moves(local: Nodes, listed_twice: bool) -> None:
    nodes = local(2, mapped=True)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, LARGE) for key in KEYS[:20])
        pins = store.pin_many(KEYS[:20])
        there = held(nodes[1])
        member, old = member_of(store, nodes[1]), nodes[1].name
        nodes[1].move(9)
        if listed_twice:  # the owner lists the new address first, and removes the old one later
            with pytest.raises(NodeError):
                member.take(time.monotonic())
            assert member.is_failing
            members.update([nodes[0].name, old, nodes[1].name])
        else:
            members.update(names(nodes))
        eventually(lambda: has_met(store, *nodes))
        assert cluster_of(store).snapshot.met == (member_of(store, nodes[0]), member)
        assert not member.is_failing
        pins.verify()
        pins.release()
        assert nodes[1].server is not None
        assert sum(entry[4] for entry in walked(nodes[1].server, 0, b"", b"", 1000)) == 0
        assert held(nodes[1]) == there
        assert store.get_many(KEYS[:20]) == [LARGE] * 20


def test_a_node_that_joins_at_a_second_address_counts_once(local: Nodes) -> None:
    nodes = local(3)
    nodes[2].identity = nodes[0].identity
    nodes[2].kill()
    nodes[2].restart()
    members = StaticMembers(*names(nodes[:2]))
    with store_over(nodes, 2, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        members.update(names(nodes))
        second = member_of(store, nodes[2])
        eventually(lambda: second.is_failing)
        assert f"{nodes[0].name} and {nodes[2].name} are the same node, with the identity" in second.status()[1]
        assert store.get_many(KEYS) == [b"v"] * len(KEYS)
        assert store.put("new", b"v") == "stored"
        assert held(nodes[0]) == held(nodes[1])
        assert not held(nodes[2])
        first = member_of(store, nodes[0])
        nodes[0].kill()
        with pytest.raises(NodeError):
            first.call("stats", time.monotonic())
        eventually(lambda: first.name == nodes[2].name)
        assert set(cluster_of(store).snapshot.met) == {first, member_of(store, nodes[1])}


def test_a_member_whose_address_leads_to_another_member_confirms_nothing(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, 2) as store:
        store.put("before", b"v")
        nodes[0].kill()
        nodes[0].identity = nodes[1].identity
        nodes[0].restart()
        for number in range(3):
            with pytest.raises(ConfigError, match="are the same node"):
                store.put(f"key {number}", b"v")


def test_no_connection_to_a_refused_node_stays_open(local: Nodes) -> None:
    nodes = local(2)
    nodes[1].identity = nodes[0].identity
    nodes[1].kill()
    nodes[1].restart()
    members = StaticMembers(nodes[0].name)
    with store_over(nodes, 1, members=members) as store:
        store.put("k", b"v")
        members.update(names(nodes))
        channel = member_of(store, nodes[1]).channel
        assert isinstance(channel, LocalChannel)
        eventually(lambda: channel.dialled >= 3)
        assert channel.pool.take() is None


def test_two_addresses_of_a_node_count_once_if_the_list_changes_at_first_contact(local: Nodes) -> None:
    nodes = local(2)
    nodes[1].identity = nodes[0].identity
    nodes[1].kill()
    nodes[1].restart()
    members = StaticMembers(nodes[0].name)
    attached = threading.Event()

    class Noted(LocalChannel):
        def attach(self, deadline: float) -> ObjectReader | None:
            if self.name == nodes[1].name:
                attached.set()
            return super().attach(deadline)

    with store_over(nodes, 1, channel=Noted, members=members) as store:
        store.put("k", b"v")
        with cluster_of(store)._lock:  # as if another member were met at the same time
            members.update(names(nodes))
            second = member_of(store, nodes[1])
            assert attached.wait(PATIENCE)
            time.sleep(0.1)  # until the thread waits for the lock
            members.update(names(nodes))
        eventually(lambda: second.is_failing)
        assert not has_met(store, nodes[1])


def test_a_node_that_takes_over_a_listed_address_of_one_that_moved_is_used(local: Nodes) -> None:
    nodes = local(2)
    members = StaticMembers(nodes[0].name)
    with store_over(nodes, 1, members=members) as store:
        store.put("k", b"v")
        member, old = member_of(store, nodes[0]), nodes[0].name
        nodes[0].move(9)
        with pytest.raises(NodeError):
            member.take(time.monotonic())
        members.update([old, nodes[0].name])
        eventually(lambda: member.name == nodes[0].name)
        nodes[1].kill()
        nodes[1].name = old
        nodes[1].restart()
        eventually(lambda: has_met(store, *nodes))
        with store_over(nodes, 1) as other:
            other.put_many((key, b"v") for key in KEYS)
        assert held(nodes[1])
        assert store.get_many(["k", *KEYS]) == [b"v"] * (1 + len(KEYS))


def test_a_list_forgets_stores_that_were_not_closed(local: Nodes) -> None:
    nodes = local(1)
    members = StaticMembers(*names(nodes))
    for _ in range(3):
        store_over(nodes, 1, members=members)
    gc.collect()
    members.update(names(nodes))
    assert members._subscribers == {}


def test_a_member_that_failed_and_left_is_asked_again_when_it_is_back(local: Nodes) -> None:
    nodes = local(2, mapped=True)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, LARGE) for key in KEYS[:20])
        pins = store.pin_many(KEYS[:20])
        member = member_of(store, nodes[1])
        member.failed(NodeError("the connection broke"))
        members.update([nodes[0].name])
        assert member.is_failing
        members.update(names(nodes))
        eventually(lambda: has_met(store, *nodes))
        assert member_of(store, nodes[1]) is member, "its pins are still held"
        assert not member.is_failing
        assert store.get_many(KEYS[:20]) == [LARGE] * 20
        pins.release()


@pytest.mark.parametrize("known", [False, True])
def test_a_copy_on_a_node_that_moves_during_a_put_counts_once(local: Nodes, known: bool) -> None:
    nodes = local(2)
    listed = (lambda: Listed(*map(identified, nodes))) if known else (lambda: StaticMembers(*names(nodes)))
    members = listed()
    with store_over(nodes, 2, timeout=0.5, members=members) as store:
        cluster_of(store).view(time.monotonic() + PATIENCE)
        nodes[1].kill()
        wait = cluster_of(store).wait

        def move_while_the_call_waits(*time: float) -> bool:
            if nodes[0].name == "tcp://node0:7471":
                nodes[0].move(9)
                if isinstance(members, Listed):
                    members.set(*map(identified, nodes))
                else:
                    members.update(names(nodes))
            return wait(*time)

        cluster_of(store).wait = move_while_the_call_waits  # type: ignore[method-assign]
        with pytest.raises(ReplicationError, match="1 of 2 nodes confirmed"):
            store.put("k", b"v")
        assert held(nodes[0]) == {b"k"}


def identified(node: LocalNode, *addresses: str, **settings: object) -> MemberInfo:
    return MemberInfo(addresses or (node.name,), node.identity, **settings)  # type: ignore[arg-type]


def test_a_list_that_knows_identities_moves_a_member_at_once(local: Nodes) -> None:
    nodes = local(2, mapped=True)
    members = Listed(*map(identified, nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, LARGE) for key in KEYS[:20])
        pins = store.pin_many(KEYS[:20])
        before = cluster_of(store).members
        nodes[1].move(9)
        members.set(*map(identified, nodes))
        assert cluster_of(store).members == before
        assert store.get_many(KEYS[:20]) == [LARGE] * 20
        pins.release()
        assert nodes[1].server is not None
        assert sum(entry[4] for entry in walked(nodes[1].server, 0, b"", b"", 1000)) == 0


@pytest.mark.slow
def test_another_node_at_the_address_of_a_member_is_not_used(local: Nodes) -> None:
    nodes = local(2)
    members = Listed(*map(identified, nodes))
    with store_over(nodes, 1, timeout=PATIENCE, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        there, identity = held(nodes[1]), nodes[1].identity
        nodes[1].replace()
        cluster_of(store).timeout = 2.0  # the call asks again until then
        with pytest.raises(NodeError, match=f"has the identity {nodes[1].identity.hex()}, expected {identity.hex()}"):
            store.get(next(iter(there)))
        assert held(nodes[1]) == set()
        members.set(*map(identified, nodes))
        cluster_of(store).timeout = PATIENCE
        eventually(lambda: has_met(store, *nodes))
        assert store.get(next(iter(there))) is None


def test_the_next_address_of_a_member_is_tried_if_one_does_not_work(local: Nodes) -> None:
    nodes = local(2)
    gone = local(1)[0]
    gone.kill()
    every = [*nodes, gone]
    members = Listed(identified(nodes[0]), identified(nodes[1], gone.name, nodes[1].name))
    with store_over(every, 2, timeout=PATIENCE, members=members) as store:
        assert store.put("k", b"v") == "stored"
        assert held(nodes[0]) == held(nodes[1]) == {b"k"}


def test_members_that_are_joining_or_gone_are_not_asked(local: Nodes) -> None:
    nodes = local(3)
    states = [MemberState.ACTIVE, MemberState.JOINING, MemberState.GONE]
    members = Listed(*[identified(node, state=state) for node, state in zip(nodes, states, strict=True)])
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        assert held(nodes[0]) == set(KEYS)
        members.set(identified(nodes[0]), identified(nodes[1], state=MemberState.SUSPECT), identified(nodes[2]))
        eventually(lambda: has_met(store, *nodes))
        store.put_many((b"new" + key, b"v") for key in KEYS)
        assert all(held(node) - set(KEYS) for node in nodes)
        assert store.get_many(KEYS) == [b"v"] * len(KEYS)


def test_a_member_gets_objects_by_its_weight(local: Nodes) -> None:
    nodes = local(3)
    members = Listed(*[identified(node, weight=weight) for node, weight in zip(nodes, (0.0, 1.0, 3.0), strict=True)])
    with store_over(nodes, 1, members=members) as store:
        keys = [b"%d" % number for number in range(400)]
        store.put_many((key, b"v") for key in keys)
        counts = [len(held(node)) for node in nodes]
        assert counts[0] == 0
        assert 60 <= counts[1] <= 140, counts
        assert store.get_many(keys) == [b"v"] * 400


def test_a_store_whose_list_is_empty_waits_for_a_member(local: Nodes) -> None:
    nodes = local(1)
    members = Listed()
    with store_over(nodes, 1, timeout=0.1, members=members) as store:
        for call in (lambda: store.get("k"), lambda: store.put("k", b"v"), lambda: list(store.keys())):
            with pytest.raises(NodeError, match="the store has no members"):
                call()
        assert isinstance(store.best_effort().lookup([b"k"], 0.05)[0], NodeError)
        cluster_of(store).timeout = PATIENCE
        joins = threading.Timer(0.1, lambda: members.set(identified(nodes[0])))
        joins.start()
        assert store.put("k", b"v") == "stored"
        joins.join(PATIENCE)


def test_a_call_that_waits_for_a_node_goes_on_with_the_member_that_joins(local: Nodes) -> None:
    nodes = local(3)
    members = StaticMembers(*names(nodes[:2]))
    nodes[1].kill()
    with store_over(nodes, 2, timeout=PATIENCE, members=members) as store:
        done: list[object] = []
        writer = threading.Thread(target=lambda: done.append(store.put("k", b"v")))
        writer.start()
        eventually(lambda: held(nodes[0]) == {b"k"})
        assert not done
        members.update(names(nodes))
        writer.join(PATIENCE)
        assert done == ["stored"]
        assert held(nodes[2]) == {b"k"}


def test_a_hold_of_a_member_that_left_ends_after_its_time_and_of_one_that_moved_at_once(local: Nodes) -> None:
    nodes = local(2, mapped=True)
    members = Listed(*map(identified, nodes))
    with store_over(nodes, 1, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        calls = store.best_effort()
        holds = [hold for hold in calls.hold_many(KEYS, 10**7, PATIENCE) if isinstance(hold, tuple)]
        assert {identity for identity, *_ in holds} == {node.identity for node in nodes}
        nodes[1].move(9)
        members.set(identified(nodes[1]))
        assert store.get_many(sorted(held(nodes[1]))) == [b"v"] * len(held(nodes[1]))
        calls.release_many(holds, PATIENCE)
        for node, pinned in zip(nodes, [True, False], strict=True):
            assert node.server is not None
            assert all(bool(entry[4]) == pinned for entry in walked(node.server, 0, b"", b"", 1000))


def test_a_rotation_reaches_members_that_joined(local: Nodes) -> None:
    nodes = local(3)
    members = StaticMembers(*names(nodes[:1]))
    with store_over(nodes, 1, members=members) as store:
        store.put("k", b"v")
        members.update(names(nodes))
        rotation = store.rotate_tenant()
        assert rotation.complete
        assert [one.node for one in rotation.nodes] == names(nodes)
        assert store.get("k") is None


def test_coroutines_follow_the_list_as_calls_do(local: Nodes) -> None:
    nodes = local(2)
    members = StaticMembers(nodes[0].name)

    async def main() -> None:
        store = AsyncStore.__new__(AsyncStore)
        store._begin(store_over(nodes, 1, members=members))
        async with store:
            await store.put("k", b"v")
            members.update(names(nodes), draining=[nodes[0].name])
            await asyncio.to_thread(lambda: eventually(lambda: has_met(store._store, *nodes)))
            assert (await store.repair()).mended == 1
            members.update([nodes[1].name])
            assert await store.get("k") == b"v"

    asyncio.run(main())


def test_a_forked_child_does_not_follow_and_the_parent_does(local: Nodes) -> None:
    nodes = local(2)
    members = StaticMembers(nodes[0].name)
    with store_over(nodes, 1, members=members) as store:
        store.put("k", b"v")
        cluster = cluster_of(store)
        child = os.fork()
        if child == 0:
            members.update(names(nodes))
            os._exit(len(cluster.members))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        members.update(names(nodes))
        eventually(lambda: has_met(store, *nodes))
        assert store.get("k") == b"v"


def test_a_store_that_was_forgotten_is_not_kept_by_the_list(local: Nodes) -> None:
    nodes = local(1)
    members = StaticMembers(nodes[0].name)
    store = store_over(nodes, 1, members=members)
    store.put("k", b"v")
    channel, known = member_of(store, nodes[0]).channel, weakref.ref(cluster_of(store))
    del store
    gc.collect()
    assert known() is None
    assert channel._closed
    members.update(names(nodes))


def test_lists_that_change_all_the_time_lose_and_leak_nothing(local: Nodes) -> None:
    nodes = local(4)
    members = StaticMembers(*names(nodes))
    with store_over(nodes, 2, timeout=PATIENCE, members=members) as store:
        store.put_many((key, b"v") for key in KEYS)
        wrong: list[object] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                if (values := store.get_many(KEYS)) != [b"v"] * len(KEYS):
                    wrong.append(values)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        left: list[weakref.ref[Member]] = []
        try:
            for number in range(40):
                away = nodes[number % 4]
                left.append(weakref.ref(member_of(store, away)))
                members.update(names([node for node in nodes if node is not away]))
                members.update(names(nodes))
                eventually(lambda: has_met(store, *nodes))
        finally:
            stop.set()
            for reader in readers:
                reader.join(PATIENCE)
        assert wrong == []
        gc.collect()
        eventually(lambda: len({id(one) for member in left if (one := member()) is not None}) <= len(nodes))


@pytest.mark.parametrize("call", ["get", "pin"])
def test_a_read_finds_an_object_on_a_member_that_joins_while_the_first_is_asked(local: Nodes, call: str) -> None:
    nodes = local(2, mapped=True)
    with store_over(nodes[1:]) as other:
        other.put("key", b"value")
    members = StaticMembers(nodes[0].name)
    with store_over(nodes, members=members) as store:
        store.put("met", b"value")
        cluster = cluster_of(store)
        ask = cluster.ask

        def join(*asked: Any, **settings: Any) -> Any:
            cluster.ask = ask  # type: ignore[method-assign]
            members.update(names(nodes))
            eventually(lambda: has_met(store, *nodes))
            return ask(*asked, **settings)

        cluster.ask = join  # type: ignore[method-assign]
        if call == "get":
            assert store.get("key") == b"value"
        else:
            with store.pin("key") as pin:
                assert bytes(pin.view) == b"value"
