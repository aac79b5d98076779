"""The schedule of a run: the steps of programs, and the faults. It follows from a seed, and parts can be left out."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["CLOCK_ERROR_MAX_S", "FAULTS_END_S", "Fault", "Plan", "Step", "make_plan"]

FAULTS_END_S = 25.0
"""Faults happen only before this time of a run. Then everything works again, and all requests must be answered."""
CLOCK_ERROR_MAX_S = 3600.0
"""Clocks are wrong by so much at most."""
_FAULTS_MAX = 14
_CRASH_STEPS_MAX = {"manager": 250, "node": 150, "client": 80}
"""Processes crash within so many of their steps, about as many as they have while there are faults."""
_OPERATIONS = (
    ("take", 5),
    ("use", 8),
    ("renew", 2),
    ("resize", 4),
    ("move", 2),
    ("end", 2),
    ("stale", 2),
    ("rest", 3),
)


@dataclass(frozen=True, slots=True)
class Step:
    """Something that a program does.

    Attributes
    ----------
    client : str
        The program.
    number : int
        Its place among the program's steps, which also decides the details.
    operation : str
        ``take``, ``use``, ``renew``, ``resize``, ``move``, ``end``, ``stale`` or ``rest``.
    """

    client: str
    number: int
    operation: str

    def __str__(self) -> str:
        return f"{self.client} {self.operation} ({self.number})"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes
    ----------
    kind : str
        ``crash`` (of `target`, at its step `number`), ``cut`` (between `target` and `other`), ``loss``, ``slow``,
        ``clock``, ``compact``, ``drain`` or ``lend``.
    target, other : str
        Processes.
    at : float
        Time from the beginning of the run; for a crash, the step decides.
    seconds : float
        How long it lasts; for ``clock``, how far the clock is ahead.
    number : int
        The step of a crash; the pages that a member lends.
    """

    kind: str
    target: str = ""
    other: str = ""
    at: float = 0.0
    seconds: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        when = f"at its step {self.number}" if self.kind == "crash" else f"at {self.at:.3f} s"
        more = f", {self.number} pages" if self.kind == "lend" else ""
        names = " - ".join(name for name in (self.target, self.other) if name)
        return f"{self.kind} {names} {when}, {self.seconds:.3f} s{more}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Attributes
    ----------
    seed : int
        Decides on all details.
    managers, members, clients : int
        Numbers of processes.
    steps : tuple of Step
        Steps of programs.
    faults : tuple of Fault
        Faults.
    """

    seed: int
    managers: int
    members: int
    clients: int
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]


def make_plan(seed: int, steps: int) -> Plan:
    """Make the plan of a seed, with so many steps of programs."""
    chance = random.Random(f"plan {seed}")
    managers, members, clients = chance.choice([1, 2, 3, 3]), chance.randint(3, 5), 6
    names = {
        "manager": [f"manager{number}" for number in range(1, managers + 1)],
        "member": [f"node{number}" for number in range(1, members + 1)],
        "client": [f"client{number}" for number in range(1, clients + 1)],
    }
    kinds, weights = zip(*_OPERATIONS, strict=True)
    planned = [
        Step(chance.choice(names["client"]), number, chance.choices(kinds, weights)[0]) for number in range(steps)
    ]
    faults = [_fault(chance, names) for _ in range(chance.randint(0, _FAULTS_MAX))]
    return Plan(seed, managers, members, clients, tuple(planned), tuple(faults))


def _fault(chance: random.Random, names: dict[str, list[str]]) -> Fault:
    everyone = [name for many in names.values() for name in many]
    at, seconds = chance.uniform(0.0, FAULTS_END_S), chance.choice([0.1, 1.0, 4.0, 8.0]) * chance.uniform(0.5, 1.5)
    kind = chance.choices(
        ["crash", "cut", "loss", "slow", "clock", "compact", "drain", "lend"], [12, 6, 3, 2, 3, 2, 2, 2]
    )[0]
    match kind:
        case "crash":
            target = chance.choice(names[chance.choice(["manager", "manager", "member", "client"])])
            number = chance.randint(1, _CRASH_STEPS_MAX[target.rstrip("0123456789")])
            return Fault(kind, target, seconds=seconds, number=number)
        case "cut":
            one, other = chance.sample([*everyone, "registry"], 2)
            return Fault(kind, one, chance.choice([other, "registry", ""]), at, seconds)
        case "loss" | "slow":
            return Fault(kind, chance.choice([*everyone, "registry"]), "", at, seconds)
        case "clock":
            target = chance.choice([*names["manager"], *names["member"]])
            return Fault(kind, target, "", at, chance.choice([0.0, 3.0, -3.0, CLOCK_ERROR_MAX_S, -CLOCK_ERROR_MAX_S]))
        case "lend":
            return Fault(kind, chance.choice(names["member"]), "", at, number=chance.randint(4, 20))
        case "drain":
            return Fault(kind, chance.choice(names["member"]), "", at, seconds)
    return Fault(kind, at=at)
