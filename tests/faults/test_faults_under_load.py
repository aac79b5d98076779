"""Nodes are killed, stopped and restarted at any moment while clients work.

Each operation ends within its deadline, in what is right, a miss or a typed error; what was confirmed with two copies
survives the loss of a node; nothing leaks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.forge import PATIENCE, Forge, ForgedNode
from tests.faults.load import Ledger
from tests.faults.trial import check_afterwards, nothing_is_held, nothing_left_behind, work_under

ROUNDS = 5
GRACE = 0.5


class Chaos:
    """Does something to some node, again and again; what follows from the seed."""

    def __init__(self, nodes: list[ForgedNode], seed: str) -> None:
        self._nodes = nodes
        self._random = random.Random(f"{seed} chaos")
        self.did: list[str] = []
        self.losses: list[tuple[ForgedNode, float]] = []

    def strike(self) -> None:
        count = 1 if self._random.random() < 0.8 else 2
        for node in self._random.sample(self._nodes, count):
            self._random.choice([self._kill, self._stop, self._stop])(node)
        time.sleep(self._random.choice([0.0, 0.05, 0.3, 1.2]))
        self.heal()
        time.sleep(self._random.uniform(0.0, 0.3))

    def heal(self) -> None:
        for node in self._nodes:
            if node.is_stopped:
                node.cont()
            if not node.is_up:
                forget = self._random.random() < 0.4
                self.did.append(f"restart {node.name}{' without its memory' if forget else ''}")
                node.start(forget=forget)
                if forget:
                    self.losses.append((node, time.monotonic()))

    def _kill(self, node: ForgedNode) -> None:
        self.did.append(f"kill {node.name}")
        node.kill()

    def _stop(self, node: ForgedNode) -> None:
        self.did.append(f"stop {node.name}")
        node.stop()

    def lost_since(self, when: float) -> int:
        """How many nodes have lost their memory since then."""
        return len({node.name for node, at in self.losses if at >= when})


def another_program(addresses: list[str], replicas: int) -> subprocess.Popen[bytes]:
    """Puts, reads and pins until it is killed."""
    settings = {"nodes": addresses, "replicas": replicas, "transport": "auto", "seed": "killed", "operations": 10**9}
    settings |= {"keys": [f"key {number}" for number in range(5)], "largest": 60_000, "deletes": 5}
    program = Path(__file__).with_name("historian.py")
    return subprocess.Popen([sys.executable, str(program), json.dumps(settings)], stdout=subprocess.DEVNULL)


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
        nodes = [forge.node(grace=GRACE) for _ in range(3)]
        addresses = [node.address for node in nodes]
        with nothing_left_behind(forge.folder):
            ledger, chaos = Ledger(), Chaos(nodes, seed)
            program = another_program(addresses, replicas)
            try:
                clients = work_under(chaos, rounds, addresses, seed, ledger, replicas=replicas, transport=transport)
            finally:
                program.kill()
                program.wait(PATIENCE)
            check_afterwards(chaos, addresses, clients, seed, ledger, replicas=replicas)
        nothing_is_held(nodes)
