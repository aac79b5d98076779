"""Random programs on nodes that fail, against what was confirmed to them.

Several clients, each with a clock of its own; one call at a time. Nodes are killed and come back with or without their
memory, are stopped and go on with what was sent to them meanwhile, evict, are full, lose replies; clients are cut off
from nodes. Whatever happens: a read gives the value whose publish was confirmed last, or one whose publish was not
confirmed, or none; never one that a later confirmed publish or deletion has replaced.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farpool.errors import FarpoolError
from farpool.store import Store
from tests.store.fake_nodes import FakeNode, channel_of, core_of, store_over

KEYS = [b"a", b"b"]
LARGE = b"x" * (80 << 10)

any_key = st.sampled_from(KEYS)
any_number = st.integers(0, 4)


class StaleState(RuleBasedStateMachine):
    """Each value is the number of its publish, so that a read tells which one it met."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[FakeNode] = []
        self.stores: list[Store] = []
        self.numbers = itertools.count(1)
        self.time = 10**15
        self.confirmed: dict[bytes, int] = dict.fromkeys(KEYS, 0)  # number of the last confirmed put or delete
        self.puts: dict[bytes, dict[int, bool]] = {key: {} for key in KEYS}  # number -> whether it was confirmed
        self.certain: set[bytes] = set()  # keys for which nothing has gone wrong since the last confirmed call

    @initialize(
        shape=st.sampled_from([(3, 2), (2, 2), (5, 3), (4, 2), (1, 1), (2, 1)]),
        skews=st.lists(st.sampled_from([0, -3000, 5000]), min_size=3, max_size=3),
        mapped=st.booleans(),
    )
    def start(self, shape: tuple[int, int], skews: list[int], mapped: bool) -> None:
        count, self.replicas = shape
        self.skewed = any(skews)
        self.nodes = [FakeNode(f"tcp://node{number}:1", mapped=mapped and number % 2 == 0) for number in range(count)]
        for skew in skews:
            store = store_over(*self.nodes, replicas=self.replicas)
            core_of(store).clock._microseconds = lambda skew=skew: self.tick() + skew
            self.stores.append(store)

    def tick(self) -> int:
        self.time += 10
        return self.time

    def node(self, number: int) -> FakeNode:
        return self.nodes[number % len(self.nodes)]

    def wrong(self) -> None:
        self.certain.clear()

    @rule(client=st.integers(0, 2), key=any_key, large=st.booleans(), batch=st.booleans())
    def put(self, client: int, key: bytes, large: bool, batch: bool) -> None:
        number = next(self.numbers)
        value = b"%d " % number + (LARGE if large else b"")
        self.puts[key][number] = False
        try:
            if batch:
                self.stores[client].put_many({key: value})
            else:
                self.stores[client].put(key, value)
        except FarpoolError:
            self.certain.discard(key)
        else:
            self.puts[key][number] = True
            self.confirmed[key] = number
            self.certain.add(key)

    @rule(client=st.integers(0, 2), key=any_key)
    def delete(self, client: int, key: bytes) -> None:
        number = next(self.numbers)
        try:
            was_there = self.stores[client].delete(key)
        except FarpoolError:
            self.certain.discard(key)
            return
        if key in self.certain:
            assert was_there == (self.confirmed[key] in self.puts[key])
        self.confirmed[key] = number
        self.certain.add(key)

    @rule(client=st.integers(0, 2), key=any_key, way=st.sampled_from(["get", "get_many", "get_into", "pin"]))
    def get(self, client: int, key: bytes, way: str) -> None:
        store = self.stores[client]
        value: bytes | None
        try:
            if way == "get":
                value = store.get(key)
            elif way == "get_many":
                (value,) = store.get_many([key])
            elif way == "get_into":
                buffer = bytearray(len(LARGE) + 10)
                nbytes = store.get_into(key, buffer)
                value = None if nbytes is None else bytes(buffer[:nbytes])
            else:
                try:
                    with store.pin(key) as pin:
                        value = bytes(pin.view)
                except KeyError:
                    value = None
        except FarpoolError:
            assert key not in self.certain
            return
        self.check(key, value)

    def check(self, key: bytes, value: bytes | None) -> None:
        number = None if value is None else int(value.split(b" ")[0])
        if key in self.certain:
            expected = self.confirmed[key]
            assert number == (expected if expected in self.puts[key] else None)
        if number is None:
            return
        assert number in self.puts[key], "a value that was never published"
        if self.puts[key][number]:
            assert number == self.confirmed[key], "a later publish or deletion was confirmed"
        elif not self.skewed:
            assert number > self.confirmed[key], "a later publish or deletion was confirmed"

    @rule(number=any_number, client=st.integers(0, 2), key=any_key, deleted=st.booleans(), dropped=st.booleans())
    def miss(self, number: int, client: int, key: bytes, deleted: bool, dropped: bool) -> None:
        """A node is cut off while the others confirm something, which they may drop again, and then it is read from."""
        self.heal()
        self.put(client, key, False, False)
        self.wrong()
        channel = channel_of(self.stores[client], self.node(number))
        channel.cut = True
        if deleted:
            self.delete(client, key)
        else:
            self.put(client, key, False, False)
        channel.cut = False
        if dropped:
            self.lose(number, key)
        self.get((client + 1) % 3, key, "get")

    @rule(number=any_number, key=any_key)
    def lose(self, number: int, key: bytes) -> None:
        """All nodes but one drop what they have of a key."""
        self.heal()
        for node in self.nodes:
            if node is not self.node(number):
                node.evict(key)
        self.certain.discard(key)
        self.get(0, key, "get")

    @rule(client=st.integers(0, 2), key=any_key)
    def touch(self, client: int, key: bytes) -> None:
        try:
            there = self.stores[client].touch(key, None)
        except FarpoolError:
            assert key not in self.certain
            return
        if key in self.certain:
            assert there == (self.confirmed[key] in self.puts[key])

    @rule(client=st.integers(0, 2))
    def list_keys(self, client: int) -> None:
        try:
            keys = set(self.stores[client].keys())
        except FarpoolError:
            assert len(self.certain) < len(KEYS)
            return
        for key in self.certain:
            assert (key in keys) == (self.confirmed[key] in self.puts[key])

    @rule(client=st.integers(0, 2))
    def settle(self, client: int) -> None:
        core_of(self.stores[client]).settle()

    @rule(client=st.integers(0, 2))
    def reconcile(self, client: int) -> None:
        self.stores[client].reconcile()

    @rule(number=any_number)
    def kill(self, number: int) -> None:
        self.node(number).up = False
        self.wrong()

    @rule(number=any_number, forget=st.booleans())
    def restart(self, number: int, forget: bool) -> None:
        # A node that has forgotten believes nothing that is older than its start, so its clock counts.
        self.node(number).restart(forget=forget, now=self.tick() + 6000)
        if forget:
            self.wrong()
            self.time += 12000

    @rule(number=any_number)
    def stop(self, number: int) -> None:
        self.node(number).stopped = True
        self.wrong()

    @rule(number=any_number)
    def resume(self, number: int) -> None:
        self.node(number).resume()

    @rule(number=any_number, key=any_key)
    def evict(self, number: int, key: bytes) -> None:
        self.node(number).evict(key)
        self.certain.discard(key)

    @rule(number=any_number)
    def lose_replies(self, number: int) -> None:
        self.node(number).lose_replies += 2
        self.wrong()

    @rule(number=any_number)
    def fill(self, number: int) -> None:
        self.node(number).full = not self.node(number).full

    @rule(number=any_number, client=st.integers(0, 2), cut=st.booleans())
    def partition(self, number: int, client: int, cut: bool) -> None:
        channel_of(self.stores[client], self.node(number)).cut = cut
        self.wrong()

    @precondition(lambda self: self.nodes)
    @rule()
    def heal(self) -> None:
        for node in self.nodes:
            node.resume()
            node.up, node.full, node.lose_replies = True, False, 0
            for store in self.stores:
                channel_of(store, node).cut = False

    @invariant()
    def tombstones_are_not_many(self) -> None:
        assert all(len(node.memory.entries) <= len(KEYS) for node in self.nodes)


TestStaleState = StaleState.TestCase
TestStaleState.settings = settings(max_examples=40, stateful_step_count=40)


class LongStaleState(StaleState):
    """The same with more programs."""


TestLongStaleState = pytest.mark.slow(LongStaleState.TestCase)
TestLongStaleState.settings = settings(max_examples=300, stateful_step_count=40)
