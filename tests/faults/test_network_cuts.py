"""Nodes on networks of their own, which are cut at any moment."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from farpool.cluster.store import Store
from farpool.errors import NodeError, NodeTimeoutError
from tests.faults.forge import Forge, ForgedNode
from tests.faults.network import Cable, why_not
from tests.faults.trial import SLACK, nothing_is_held, nothing_left_behind, persist, work_under

ROUNDS = 6
SECRET = "a secret of more than 16 bytes"
KEY = f"tester:{SECRET}"
pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)


@dataclass
class Site:
    forge: Forge
    nodes: list[ForgedNode]
    cables: list[Cable]

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'[keys.tester]\nsecret = "{SECRET}"\nrights = ["read", "write", "publish"]\n')
    with contextlib.ExitStack() as stack:
        cables = [stack.enter_context(Cable()) for _ in range(3)]
        forge = stack.enter_context(Forge())
        nodes = [
            forge.node(grace=0.5, listen=f"{cable.address}:7471", keys=keys, namespace=cable.namespace)
            for cable in cables
        ]
        yield Site(forge, nodes, cables)


class Cuts:
    """Cuts some cable, again and again; which follows from the seed."""

    def __init__(self, cables: list[Cable], seed: str) -> None:
        self.did: list[str] = []
        self.lost: list[tuple[str, float]] = []
        self.swept: list[tuple[float, float]] = []
        self.away: list[tuple[str, float, float]] = []
        self._cables = cables
        self._random = random.Random(f"{seed} cuts")

    def strike(self) -> None:
        for cable in self._random.sample(self._cables, 1 if self._random.random() < 0.8 else 2):
            near = self._random.random() < 0.5
            self.did.append(f"cut {cable.address}{' here' if near else ' there'}")
            cable.cut(near=near)
        time.sleep(self._random.choice([0.05, 0.3, 1.3]))
        self.heal()
        time.sleep(self._random.uniform(0.0, 0.5))

    def heal(self) -> None:
        for cable in self._cables:
            cable.mend()


@pytest.mark.parametrize(
    ("replicas", "seed", "rounds"),
    [(2, "1", ROUNDS), *(pytest.param(replicas, "2", 6 * ROUNDS, marks=pytest.mark.slow) for replicas in (1, 2))],
)
def test_whatever_is_cut_clients_get_what_is_right_or_a_typed_error_in_time(
    site: Site, replicas: int, seed: str, rounds: int
) -> None:
    with nothing_left_behind(site.forge.folder):
        cuts = Cuts(site.cables, seed)
        work_under(cuts, rounds, site.addresses, seed, replicas=replicas, transport="tcp", key=KEY)
    nothing_is_held(site.nodes, key=KEY)


@pytest.mark.parametrize("near", [True, False])
def test_a_node_that_cannot_be_reached_any_more_is_an_error_with_its_name_in_time(site: Site, near: bool) -> None:
    node, cable = site.nodes[0], site.cables[0]
    with Store(node.address, timeout=0.5, transport="tcp", key=KEY) as store:
        store.put("key", b"value")
        cable.cut(near=near)
        began = time.monotonic()
        with pytest.raises(NodeTimeoutError, match=node.address):
            store.get("key")
        with (
            Store(node.address, timeout=0.5, transport="tcp", key=KEY) as fresh,
            pytest.raises(NodeError, match=node.address),
        ):
            fresh.get("key")
        assert time.monotonic() - began < 1.0 + SLACK
        cable.mend()
        assert persist(lambda: store.get("key")) == b"value"
