"""Random calls of several sessions, compared with a model that knows who holds each role."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from farpool.cluster.registry import Put, Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.cluster.roles import HeldRole, Session, holder_of
from farpool.errors import RegistryError, RegistryLeaseError
from tests.registry.cluster import Cluster

ROLES = ("r", "r/1")
SESSIONS = 3
WAIT_S = 60.0
_numbers = itertools.count()
role_names = st.sampled_from(ROLES)
session_numbers = st.integers(0, SESSIONS - 1)


class Machine(RuleBasedStateMachine):
    """Knows for each role the present holder, which a session may have lost without noticing."""

    cluster: ClassVar[Cluster | None] = None

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.prefix = f"roles-{next(_numbers)}/"
        self.registry = self.open()
        self.opened: list[Registry] = []
        self.sessions = [self.make() for _ in range(SESSIONS)]
        self.holders: dict[str, HeldRole] = {}
        self.all: list[HeldRole] = []
        self.tokens = dict.fromkeys(ROLES, 0)
        self.written: bytes | None = None

    def open(self) -> Registry:
        if self.cluster is None:
            return SqliteRegistry(Path(self.folder.name) / "r.sqlite", timeout=WAIT_S)
        return self.cluster.registry(self.prefix, WAIT_S)

    def make(self) -> Session:
        self.opened.append(self.open())
        return Session(self.opened[-1], 3600.0, timeout=WAIT_S)

    def free(self, lease: int) -> None:
        self.holders = {role: held for role, held in self.holders.items() if held.lease != lease}

    @rule(number=session_numbers, role=role_names)
    def take(self, number: int, role: str) -> None:
        held = self.sessions[number].take(role, bytes([number]))
        assert (held is None) == (role in self.holders)
        if held is not None:
            assert held.token > self.tokens[role]
            assert not held.lost
            self.tokens[role] = held.token
            self.holders[role] = held
            self.all.append(held)

    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        """Present and former holders try to write."""
        if not self.all:
            return
        held = self.all[which % len(self.all)]
        value = f"{held.role} {held.token} {next(_numbers)}".encode()
        if self.holders.get(held.role) is held:
            assert held.commit([], [Put("written", value)]).succeeded
            self.written = value
        else:
            with pytest.raises(RegistryLeaseError):
                held.commit([], [Put("written", value)])
            assert held.lost

    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        if self.all:
            held = self.all[which % len(self.all)]
            held.close()
            if self.holders.get(held.role) is held:
                del self.holders[held.role]

    @rule(number=session_numbers)
    def end_lease(self, number: int) -> None:
        """The session was stopped for longer than its lease, and does not know."""
        lease = self.sessions[number].lease()
        self.registry.revoke(lease)
        self.free(lease)

    @rule(number=session_numbers)
    def renew(self, number: int) -> None:
        self.sessions[number].renew()

    @rule(number=session_numbers)
    def replace(self, number: int) -> None:
        closed = self.sessions[number]
        lease = closed.lease()
        closed.close()
        self.free(lease)
        with pytest.raises(RegistryError, match="was closed"):
            closed.take("r")
        self.sessions[number] = self.make()

    @invariant()
    def the_registry_agrees(self) -> None:
        if hasattr(self, "written"):
            for role in ROLES:
                holder, held = holder_of(self.registry, role), self.holders.get(role)
                assert (holder.token if holder else 0) == (held.token if held else 0)
            entry = self.registry.get("written")
            assert (entry.value if entry else None) == self.written

    def teardown(self) -> None:
        if hasattr(self, "written"):
            for session in self.sessions:
                session.close()
            assert not self.registry.range(*ROLES).entries
            for registry in (*self.opened, self.registry):
                registry.close()
            self.folder.cleanup()


@pytest.mark.slow
def test_sessions_over_a_file_behave_as_the_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None))


@pytest.mark.slow
def test_sessions_over_etcd_behave_as_the_model(single: Cluster) -> None:
    class OnEtcd(Machine):
        cluster = single

    run_state_machine_as_test(OnEtcd, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
