"""Programs of random operations on a store whose nodes fail, beside a perfect memory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farpool.cluster.store import PutOutcome, Store
from farpool.errors import FarpoolWarning, NodeError
from tests.store.local_nodes import LocalNode, store_over

PATIENCE = 20.0
IN_VAIN = 0.1
"""Timeout in seconds of a call that may fail because a node is down: hundreds of calls wait for all of it."""
KEYS = st.sampled_from([b"a", b"b", b"c", b"d" * 256, b"key"])
SIZES = st.sampled_from([0, 1, 100, 5000, 70_000, 300_000])


class StoreMachine(RuleBasedStateMachine):
    """Three nodes, one or two copies.

    A value that was confirmed is there until it is dropped or as many nodes as it has copies have lost their memory, or
    cannot be asked, since. Whatever is read was put under its key.
    """

    nodes: list[LocalNode]

    @initialize(replicas=st.integers(1, 2), mapped=st.booleans())
    def begin(self, replicas: int, mapped: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.nodes = [LocalNode(self.folder, number, mapped=mapped) for number in range(3)]
        self.replicas = replicas
        self.stores = [store_over(self.nodes, replicas, timeout=PATIENCE) for _ in range(2)]
        self.put_under: dict[bytes, set[bytes]] = {}
        self.confirmed: dict[bytes, int] = {}
        """Of each key that must be there the number of nodes that were lost since."""
        self.displaced: set[bytes] = set()
        """Keys that were put while a node was away, so that the copy may lie on another one than a later put asks."""
        self.half_dropped: set[bytes] = set()
        """Keys that were dropped while a node was away, of whose copy there the others take none for a while."""
        self.numbers = 0

    def store(self, number: int, *, may_fail: bool = False) -> Store:
        """A store, with little time for a call that may wait for a node that is down."""
        store = self.stores[number]
        store._open().timeout = IN_VAIN if may_fail else PATIENCE
        return store

    @property
    def reads_may_fail(self) -> bool:
        return self.down >= self.replicas

    @property
    def down(self) -> int:
        return sum(not node.is_up for node in self.nodes)

    def must_be_there(self, key: bytes) -> bool:
        lost = self.confirmed.get(key)
        return lost is not None and lost + self.down < self.replicas

    @rule(key=KEYS, nbytes=SIZES, who=st.integers(0, 1))
    def put(self, key: bytes, nbytes: int, who: int) -> None:
        self.numbers += 1
        value = f"{self.numbers} ".encode().ljust(nbytes, b"x")[:nbytes]
        self.put_under.setdefault(key, set()).add(value)
        try:
            outcome = self.store(who).put(key, value)
        except NodeError:
            assert self.down + self.replicas > len(self.nodes)
            return
        assert self.down + self.replicas <= len(self.nodes)
        if outcome is PutOutcome.STORED and self.replicas == 1:
            assert key in self.displaced or not self.must_be_there(key)
        if self.down:
            self.displaced.add(key)
        # A copy that was there counts as one of the copies, wherever the others are.
        self.confirmed[key] = 0

    @rule(key=KEYS, who=st.integers(0, 1))
    def get(self, key: bytes, who: int) -> None:
        try:
            value = self.store(who, may_fail=self.reads_may_fail).get(key)
        except NodeError:
            assert self.reads_may_fail
            return
        if value is None:
            assert not self.must_be_there(key), f"{key!r} is lost"
        else:
            assert value in self.put_under.get(key, set())

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8), who=st.integers(0, 1))
    def look_up(self, keys: list[bytes], who: int) -> None:
        try:
            found = self.store(who, may_fail=self.reads_may_fail).lookup(keys)
        except NodeError:
            assert self.reads_may_fail
            return
        for key, size in zip(keys, found.sizes, strict=True):
            if size is None:
                assert not self.must_be_there(key)
            else:
                assert size in {len(value) for value in self.put_under.get(key, set())}

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8), who=st.integers(0, 1))
    def get_many(self, keys: list[bytes], who: int) -> None:
        try:
            values = self.store(who, may_fail=self.reads_may_fail).get_many(keys)
        except NodeError:
            assert self.reads_may_fail
            return
        for key, value in zip(keys, values, strict=True):
            assert value in self.put_under.get(key, set()) if value is not None else not self.must_be_there(key)

    @rule(key=KEYS, who=st.integers(0, 1))
    def drop(self, key: bytes, who: int) -> None:
        whole = self.down == 0
        with contextlib.suppress(NodeError):
            there = self.store(who).drop(key)
            assert there or not self.must_be_there(key)
        self.confirmed.pop(key, None)
        self.half_dropped.add(key)
        if whole:
            self.half_dropped.discard(key)
            self.displaced.discard(key)
            assert self.store(who).get(key) is None
            self.put_under.pop(key, None)

    @rule(key=KEYS, who=st.integers(0, 1), keep=st.sampled_from([None, True, False]))
    def touch(self, key: bytes, who: int, keep: bool | None) -> None:
        with contextlib.suppress(NodeError):
            assert self.store(who).touch(key, None, keep=keep) or not self.must_be_there(key)

    @precondition(lambda self: self.down == 0)
    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        self.nodes[number].kill()

    @rule()
    def restart(self) -> None:
        for node in self.nodes:
            if not node.is_up:
                node.restart()
        self.settle()

    def settle(self) -> None:
        """Wait until the stores have noticed that all nodes are up."""
        deadline = time.monotonic() + 3 * PATIENCE
        for number in range(len(self.stores)):
            store = self.store(number)
            while any(status.stats is None for status in store.nodes()):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    @precondition(lambda self: self.down == 0)
    @rule(number=st.integers(0, 2))
    def replace(self, number: int) -> None:
        self.nodes[number].replace()
        self.settle()
        for key in self.confirmed:
            self.confirmed[key] += 1

    @precondition(lambda self: self.down == 0)
    @rule(who=st.integers(0, 1))
    def repair(self, who: int) -> None:
        repaired = self.store(who).repair()
        assert 0 <= repaired.endangered - repaired.mended <= len(self.half_dropped)
        for key, lost in self.confirmed.items():
            if lost < self.replicas:
                self.confirmed[key] = 0

    @invariant()
    def nothing_is_evicted(self) -> None:
        assert all(node.server is None or node.server.stats()["evictions"] == 0 for node in getattr(self, "nodes", []))

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            for node in self.nodes:
                node.kill()
            shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestStoreMachine = StoreMachine.TestCase


class LongStoreMachine(StoreMachine):
    """The same, longer."""


LongStoreMachine.TestCase.settings = settings(
    max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestLongStoreMachine(LongStoreMachine.TestCase):  # type: ignore[misc,name-defined]
    pass


warnings.filterwarnings("ignore", category=FarpoolWarning)
