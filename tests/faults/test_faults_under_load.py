"""Nodes are killed, stopped, restarted and replaced at any moment while clients work.

Each operation ends within its deadline, in what is right, a miss or a typed error; what was confirmed with two copies
survives the loss of a node, and of any number one after the other with sweeps between; nothing leaks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farpool.cluster.store import Repaired, Store
from farpool.errors import NodeError
from tests.faults.forge import PATIENCE, Forge, ForgedNode
from tests.faults.trial import nothing_is_held, nothing_left_behind, persist, work_under

ROUNDS = 5
GRACE = 0.5
LEFT_ALONE = 2.5
"""Seconds after which all programs have noticed that a node is back."""


class Chaos:
    """Does something to some node, again and again; what follows from the seed."""

    def __init__(self, nodes: list[ForgedNode], seed: str) -> None:
        self._nodes = nodes
        self._random = random.Random(f"{seed} chaos")
        self.did: list[str] = []
        self.lost: list[tuple[str, float]] = []
        self.swept: list[tuple[float, float]] = []
        self.away: list[tuple[str, float, float]] = []

    def strike(self) -> None:
        began = time.monotonic()
        count = 1 if self._random.random() < 0.8 else 2
        struck = self._random.sample(self._nodes, count)
        for node in struck:
            self._random.choice([self._kill, self._stop, self._stop])(node)
        time.sleep(self._random.choice([0.0, 0.05, 0.3, 1.2]))
        self.heal()
        # A program that has found it failing leaves it alone for a while after it has come back.
        self.away += [(node.name, began, time.monotonic() + LEFT_ALONE) for node in struck]
        time.sleep(self._random.uniform(0.0, 0.3))

    def heal(self) -> None:
        for node in self._nodes:
            if node.is_stopped:
                node.cont()
            if not node.is_up:
                anew = self._random.random() < 0.4
                self.did.append(f"{'replace' if anew else 'restart'} {node.name}")
                if anew:
                    self.lost.append((node.name, time.monotonic()))
                node.start(anew=anew)

    def _kill(self, node: ForgedNode) -> None:
        self.did.append(f"kill {node.name}")
        node.kill()

    def _stop(self, node: ForgedNode) -> None:
        self.did.append(f"stop {node.name}")
        node.stop()


class Replacements:
    """Replaces one node after the other by an empty one, with a sweep in between; which follows from the seed."""

    def __init__(self, nodes: list[ForgedNode], seed: str) -> None:
        self._nodes = nodes
        self._random = random.Random(f"{seed} replacements")
        self.did: list[str] = []
        self.lost: list[tuple[str, float]] = []
        self.swept: list[tuple[float, float]] = []
        self.away: list[tuple[str, float, float]] = []

    def strike(self) -> None:
        node = self._random.choice(self._nodes)
        node.kill()
        self.lost.append((node.name, time.monotonic()))
        node.start(anew=True)
        with Store(*[node.address for node in self._nodes], replicas=2, timeout=PATIENCE) as store:
            began = time.monotonic()
            swept = persist(lambda: sweep(store))
            self.swept.append((began, time.monotonic()))
        self.did.append(f"replace {node.name}, {swept.mended} mended")
        time.sleep(LEFT_ALONE)  # else it would be away for some while the next one is lost

    def heal(self) -> None:
        """All are up."""


def sweep(store: Store) -> Repaired:
    """Repair; what others put and mend at the same time may make it necessary to look again."""
    swept = store.repair()
    if swept.mended < swept.endangered:
        raise NodeError(f"{swept}")
    return swept


def another_program(addresses: list[str], replicas: int) -> subprocess.Popen[bytes]:
    """Puts, reads and pins until it is killed, under keys of its own."""
    settings = {"store": {"nodes": addresses, "replicas": replicas}, "seed": "killed", "operations": 10**9}
    settings |= {"keys": [f"killed {number}" for number in range(5)], "largest": 60_000, "drops": 5}
    arguments = [sys.executable, "-m", "tests.faults.historian", json.dumps(settings)]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2])


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("replicas", "transport", "seed", "rounds"),
    [
        (2, "auto", "1", ROUNDS),
        pytest.param(1, "tcp", "4", ROUNDS, marks=pytest.mark.slow),
        pytest.param(2, "tcp", "2", 8 * ROUNDS, marks=pytest.mark.slow),
        pytest.param(1, "auto", "3", 8 * ROUNDS, marks=pytest.mark.slow),
        pytest.param(2, "auto", "5", 8 * ROUNDS, marks=pytest.mark.slow),
    ],
)
def test_whatever_happens_to_nodes_clients_get_what_is_right_or_a_typed_error_in_time(
    replicas: int, transport: str, seed: str, rounds: int
) -> None:
    with Forge() as forge:
        nodes = [forge.node(32 << 20, grace=GRACE) for _ in range(3)]
        addresses = [node.address for node in nodes]
        with nothing_left_behind(forge.folder):
            program = another_program(addresses, replicas)
            try:
                work_under(Chaos(nodes, seed), rounds, addresses, seed, replicas=replicas, transport=transport)
            finally:
                program.kill()
                program.wait(PATIENCE)
            with Store(*addresses, timeout=PATIENCE) as store:
                for number in range(5):
                    store.drop(f"killed {number}")
        nothing_is_held(nodes)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("transport", "seed", "rounds"),
    [
        ("auto", "1", ROUNDS),
        ("tcp", "2", 10 * ROUNDS),
        ("auto", "3", 10 * ROUNDS),
    ],
)
@pytest.mark.slow
def test_nothing_is_lost_when_all_nodes_are_replaced_again_and_again_with_sweeps_between(
    transport: str, seed: str, rounds: int
) -> None:
    with Forge() as forge:
        nodes = [forge.node(32 << 20, grace=GRACE) for _ in range(3)]
        addresses = [node.address for node in nodes]
        replacements = Replacements(nodes, seed)
        work_under(replacements, rounds, addresses, seed, replicas=2, drops=0, transport=transport)
        assert {name for name, _ in replacements.lost} == {node.name for node in nodes}
        nothing_is_held(nodes)
