"""Repair without a person, with real nodes in the pool of a registry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.manager.repairs import RepairPolicy, RepairService
from farpool.cluster.members import RegistryMembers
from farpool.cluster.members.administration import drain
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import open_registry
from farpool.cluster.repair.messages import Settings
from farpool.cluster.wire.frames import Op, Status
from tests.nodes import eventually
from tests.repair.test_copying import ask, channel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEYS = [b"key %d" % number for number in range(40)]
POLICY = RepairPolicy(nbytes_rate=None, settings=Settings(grace=1.0, settle=1.0, first_pause=0.1))


class Fleet:
    """Nodes of a pool, with the service that repairs it."""

    def __init__(self, place: str, stack: contextlib.ExitStack) -> None:
        self.place = place
        self.nodes: list[RunningNode] = []
        self._stack = stack
        for number in range(3):
            self.join(rack=f"r{number}")
        self.acts = True
        members = stack.enter_context(RegistryMembers(place))
        self.service = stack.enter_context(RepairService(members, POLICY, lambda: self.acts))

    def join(self, rack: str = "new") -> RunningNode:
        node = running_node(registry=self.place, slow_start=0, member_ttl=1, label=[f"rack={rack}"])
        self.nodes.append(self._stack.enter_context(node))
        return self.nodes[-1]

    def holders(self, key: bytes) -> list[RunningNode]:
        return [node for node in self.nodes if has(node, key)]

    def copies(self) -> set[int]:
        return {len(self.holders(key)) for key in KEYS}

    def status(self) -> dict[str, Any]:
        tenants: dict[int, dict[str, Any]] = self.service.status()["tenants"]
        return tenants.get(0, {})


def has(node: RunningNode, key: bytes) -> bool:
    with channel(node) as made:
        return bool(ask(made, Op.STAT, key).status == Status.DONE)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        fleet = Fleet(f"sqlite://{tmp_path}/registry", stack)
        with Store(fleet.place, replicas=2) as store:
            store.put_many((key, key * 10) for key in KEYS)
        fleet.service.start()
        yield fleet


def test_copies_of_a_killed_node_are_made_again_and_a_node_that_is_back_loses_its_surplus(fleet: Fleet) -> None:
    eventually(lambda: fleet.status().get("scans", 0) > 0)
    assert fleet.status()["copied"] == 0
    exposure = fleet.status()["exposure"]
    assert (exposure["objects"], exposure["below"]) == (len(KEYS), 0)
    assert sum(loss["below"] for loss in exposure["members"].values()) == 2 * len(KEYS)
    assert set(exposure["labels"]) == {"rack=r0", "rack=r1", "rack=r2"}
    victim = fleet.nodes.pop(0)
    victim.kill()
    eventually(lambda: fleet.copies() == {2})
    victim.start()
    fleet.nodes.append(victim)
    eventually(lambda: fleet.copies() == {2})
    eventually(lambda: fleet.status()["waiting"] == 0)
    with Store(fleet.place, replicas=2) as store:
        assert store.get_many(KEYS) == [key * 10 for key in KEYS]


def test_a_drained_node_can_be_stopped_when_its_objects_are_elsewhere(fleet: Fleet) -> None:
    leaving = fleet.nodes.pop(1)
    with open_registry(fleet.place) as registry:
        drain(registry, leaving.ready["identity"])
    eventually(lambda: fleet.copies() == {2})
    leaving.kill()
    with Store(fleet.place, replicas=2) as store:
        assert store.get_many(KEYS) == [key * 10 for key in KEYS]


def test_a_service_that_may_not_act_does_nothing(fleet: Fleet) -> None:
    fleet.acts = False
    fleet.nodes.pop(0).kill()
    eventually(lambda: not fleet.service.status()["tenants"])
    assert 1 in fleet.copies()
    fleet.acts = True
    eventually(lambda: fleet.copies() == {2})
