"""Redundancies: copies, and one from outside farpool that spreads copies over racks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from farpool.abc.membership import MemberInfo
from farpool.abc.redundancy import MemberT, Redundancy
from farpool.cluster.redundancy import Copies
from farpool.cluster.store import Store
from farpool.errors import ConfigError
from farpool.testing import RedundancyConformance
from tests.nodes import eventually
from tests.store.local_nodes import LocalNode, Nodes, store_over
from tests.store.test_members import Listed, held

KEYS = [f"key {number}" for number in range(60)]


class RackCopies(Copies):
    """Copies on members of different racks, as far as there are enough racks."""

    def place(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        racks: set[str] = set()
        first = [one for one in members if (rack := one.info.labels["rack"]) not in racks and not racks.add(rack)]  # type: ignore[func-returns-value]
        return [*first, *[one for one in members if one not in first]][: self.parts]


class TestCopies(RedundancyConformance):
    def make(self) -> Redundancy:
        return Copies(3)


class TestOneCopy(RedundancyConformance):
    def make(self) -> Redundancy:
        return Copies(1)


class TestRackCopies(RedundancyConformance):
    def make(self) -> Redundancy:
        return RackCopies(3)


def racks(nodes: Sequence[LocalNode]) -> Listed:
    """List nodes with identities; the first half is in one rack, the others in another."""
    half = len(nodes) // 2
    return Listed(
        *[
            MemberInfo((node.name,), node.identity, labels={"rack": "one" if number < half else "other"})
            for number, node in enumerate(nodes)
        ]
    )


@pytest.mark.slow
def test_a_redundancy_from_outside_places_writes_and_repairs(local: Nodes) -> None:
    nodes = local(6)
    with store_over(nodes, redundancy=RackCopies(2), members=racks(nodes)) as store:
        store.put_many((key, key.encode()) for key in KEYS)
        holders = {key: [number for number, node in enumerate(nodes) if key.encode() in held(node)] for key in KEYS}
        assert all(len(own) == 2 and own[0] < 3 <= own[1] for own in holders.values())
        nodes[0].replace()  # its copies are lost
        store._cluster._membership.set(*racks(nodes).members())  # type: ignore[union-attr,attr-defined]
        eventually(lambda: all(store._cluster.snapshot.members) and store._cluster.snapshot.is_settled)  # type: ignore[union-attr]
        repaired = store.repair()
        assert repaired.mended == sum(0 in own for own in holders.values()) > 0
        for key in KEYS:
            own = [number for number, node in enumerate(nodes) if key.encode() in held(node)]
            assert len(own) == 2
            assert own[0] < 3 <= own[1]
        for node in nodes[3:]:
            node.kill()
        assert store.get_many(KEYS) == [key.encode() for key in KEYS]


def test_a_copy_that_a_read_restores_goes_where_the_redundancy_places_it(local: Nodes) -> None:
    nodes = local(6)
    with store_over(nodes, redundancy=RackCopies(2), members=racks(nodes)) as store:
        store.put_many((key, key.encode()) for key in KEYS)
        for node in nodes[3:]:
            node.replace()  # with nothing
        store._cluster._membership.set(*racks(nodes).members())  # type: ignore[union-attr,attr-defined]

        def is_restored() -> bool:
            assert store.get_many(KEYS) == [key.encode() for key in KEYS]
            return set().union(*[held(node) for node in nodes[3:]]) == {key.encode() for key in KEYS}

        eventually(is_restored)


def test_with_plain_copies_some_objects_have_both_in_one_rack(local: Nodes) -> None:
    nodes = local(6)
    with store_over(nodes, redundancy=Copies(2), members=racks(nodes)) as store:
        store.put_many((key, b"value") for key in KEYS)
        pairs = [[number for number, node in enumerate(nodes) if key.encode() in held(node)] for key in KEYS]
        assert any(own[1] < 3 or own[0] >= 3 for own in pairs)


class TwoOfThree(Copies):
    """Three copies, of which two confirm a write."""

    def enough(self, acknowledged: int) -> bool:
        return acknowledged >= 2


def test_a_name_is_published_with_as_many_copies_as_confirm_a_write(local: Nodes, tmp_path: Path) -> None:
    nodes = local(3)
    with store_over(nodes, redundancy=TwoOfThree(3), timeout=2, registry=tmp_path / "registry.db") as store:
        store.put("met", b"value")
        nodes[0].kill()
        assert store.publish("name", b"value" * 100).version == 1


def test_a_redundancy_decides_when_a_write_is_confirmed_and_when_an_object_is_missing(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, redundancy=TwoOfThree(3), timeout=0.5) as store:
        store.put("all", b"value")
        assert store.get("missing") is None
        nodes[0].kill()
        store.put("two", b"value")
        assert store.get("missing") is None
        nodes[1].kill()
        with pytest.raises(Exception, match="they may be all that have a copy"):
            store.get("missing")
        with pytest.raises(Exception, match="1 of 3 nodes confirmed the put"):
            store.put("one", b"value")


class Pieces(Copies):
    """A redundancy whose parts are no whole values."""

    needed = 2


class Many(Copies):
    """More copies than an object's head can express."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.parts = 300


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"redundancy": Pieces(3)}, "redundancy is Copies.3., expected one whose parts are whole values"),
        ({"redundancy": 2}, "redundancy is 2, expected"),
        ({"redundancy": Many(2)}, "redundancy is Copies.300. with 300 parts, expected 1 to 255"),
        ({"redundancy": Copies(2), "replicas": 2}, "replicas is 2 and redundancy is Copies.2., expected one of them"),
        ({"redundancy": Copies(4)}, "replicas is 4, expected 1 to 3, the number of nodes"),
        ({"replicas": 0}, "replicas is 0, expected a whole number from 1 to 255"),
        ({"replicas": True}, "replicas is True, expected a whole number from 1 to 255"),
        ({"replicas": 256}, "replicas is 256, expected a whole number from 1 to 255"),
    ],
)
def test_wrong_redundancies_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Store("a:1", "b:1", "c:1", **settings)  # type: ignore[arg-type]


def test_replicas_is_the_short_form_of_copies() -> None:
    with Store("a:1", "b:1", replicas=2) as short, Store("a:1", "b:1", redundancy=Copies(2)) as long:
        assert short._cluster is not None
        assert long._cluster is not None
        assert repr(short._cluster.redundancy) == repr(long._cluster.redundancy) == "Copies(2)"
        assert short.replicas == long.replicas == 2
