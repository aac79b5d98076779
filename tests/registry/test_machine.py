"""Random calls of both registries, compared with a model in memory."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from farpool.cluster.registry import Condition, Delete, Entry, Operation, Put, Registry, Watch
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import RegistryLeaseError
from tests.registry.cluster import Cluster

KEYS = ("a", "a/1", "a/2", "b", "b/\U0010ffff")
WAIT = 60.0
_numbers = itertools.count()


class Machine(RuleBasedStateMachine):
    """Knows the entries of a registry, and the changes that a watch of ``a`` has not reported yet."""

    cluster: ClassVar[Cluster | None] = None

    @initialize()
    def begin(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.leases: list[int] = []
        self.ended: set[int] = set()
        self.untold: list[Entry] = []
        self.folder = tempfile.TemporaryDirectory()
        self.registry: Registry
        if self.cluster is None:
            self.registry = SqliteRegistry(Path(self.folder.name) / "r.sqlite", timeout=WAIT)
        else:
            self.registry = self.cluster.registry(f"machine-{next(_numbers)}/", WAIT)
        self.revision = self.registry.range("").revision
        self.watch: Watch = self.registry.watch("a", self.revision)

    @rule(
        conditions=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["now", "absent", "older"])), max_size=2),
        operations=st.dictionaries(
            st.sampled_from(KEYS), st.one_of(st.none(), st.tuples(st.binary(max_size=3), st.integers(0, 2))), max_size=3
        ),
    )
    def commit(self, conditions: list[tuple[str, str]], operations: dict[str, tuple[bytes, int] | None]) -> None:
        asked, holds = [], True
        for key, which in conditions:
            there = self.entries[key].revision if key in self.entries else 0
            wanted = {"now": there, "absent": 0, "older": max(1, there - 1)}[which]
            asked.append(Condition(key, wanted))
            holds &= wanted == there
        changes: list[Operation] = []
        unknown = 0
        for key, value in operations.items():
            if value is None:
                changes.append(Delete(key))
                continue
            lease = self.leases[value[1] - 1] if 0 < value[1] <= len(self.leases) else 0
            unknown = unknown or (lease if lease in self.ended else 0)
            changes.append(Put(key, value[0], lease))
        if holds and unknown:
            with pytest.raises(RegistryLeaseError):
                self.registry.commit(asked, changes)
            return
        done = self.registry.commit(asked, changes)
        assert done.succeeded == holds
        if holds:
            self.apply(done.revision, changes)

    def apply(self, revision: int, changes: list[Operation]) -> None:
        told = []
        for change in changes:
            if isinstance(change, Put):
                told.append(Entry(change.key, change.value, revision, change.lease))
                self.entries[change.key] = told[-1]
            elif self.entries.pop(change.key, None) is not None:
                told.append(Entry(change.key, b"", revision, 0, True))
        assert revision > self.revision if told else revision >= self.revision
        self.revision = revision
        self.untold += [entry for entry in told if entry.key.startswith("a")]

    @rule()
    def grant(self) -> None:
        self.leases.append(self.registry.grant(10_000))

    @rule(number=st.integers(0, 2))
    def revoke(self, number: int) -> None:
        if number < len(self.leases):
            lease = self.leases[number]
            self.registry.revoke(lease)
            self.ended.add(lease)
            bound = [key for key, entry in self.entries.items() if entry.lease == lease]
            if bound:
                self.apply(self.registry.range("").revision, [Delete(key) for key in bound])

    @rule()
    def reopen(self) -> None:
        """Open the registry again, as another process would."""
        if self.cluster is None:
            self.watch.close()
            self.registry.close()
            self.registry = SqliteRegistry(Path(self.folder.name) / "r.sqlite", timeout=WAIT)
            after = self.untold[0].revision - 1 if self.untold else self.revision
            self.watch = self.registry.watch("a", after)

    @rule()
    def told(self) -> None:
        got: list[Entry] = []
        while len(got) < len(self.untold):
            changes = self.watch.next(WAIT)
            assert changes.entries
            got += changes.entries
        # The contract promises no order for the changes of one transaction.
        order = {"key": lambda entry: (entry.revision, entry.key)}
        assert sorted(got, **order) == sorted(self.untold, **order)
        assert [entry.revision for entry in got] == sorted(entry.revision for entry in got)
        self.untold = []
        assert self.watch.next(0.0).entries == ()

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "entries"):
            snapshot = self.registry.range("a", "b")
            assert {entry.key: entry for entry in snapshot.entries} == self.entries
            assert self.registry.get("a") == self.entries.get("a")

    def teardown(self) -> None:
        if hasattr(self, "watch"):
            self.told()
            self.watch.close()
            self.registry.close()
            self.folder.cleanup()


@pytest.mark.slow
def test_a_file_behaves_as_the_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=25))


@pytest.mark.slow
def test_etcd_behaves_as_the_model(single: Cluster) -> None:
    class OnEtcd(Machine):
        cluster = single

    run_state_machine_as_test(OnEtcd, settings=settings(max_examples=15, stateful_step_count=25))
