"""What attacks have in common: a verdict, a control, and a command line for each finding."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.attacks.lab import Lab

__all__ = ["ATTACKS", "MODULES", "Attack", "Outcome", "Result", "attack", "load_all", "main", "run", "told"]

MODULES = (
    "one_failure",
    "hot_copies",
    "replacement",
    "dram_bound",
    "foreign_session",
    "foreign_keys",
    "idle_sockets",
    "quotas",
    "many_lists",
    "many_sessions",
    "idle_clients",
    "one_host",
    "overwritten",
    "kill_with_nvme",
    "access",
    "deadlines",
    "two_copies",
    "lease_files",
    "eavesdrop",
    "preparing",
    "starving",
    "tickets",
)
"""The programs of this folder."""


@dataclass(frozen=True)
class Outcome:
    """What an attack came to.

    Attributes
    ----------
    held : bool or None
        The node withstood it; None where it could not be tried here.
    verdict : str
        One line with its figures.
    tried : dict of str to int
        What was tried, counted.
    found : dict
        Figures besides those of the verdict.
    """

    held: bool | None
    verdict: str
    tried: dict[str, int] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        return "not tried" if self.held is None else "held" if self.held else "broken"


@dataclass(frozen=True)
class Attack:
    """An attack and its control, which is the same without what makes it one."""

    name: str
    act: Callable[[Lab, bool], Outcome]

    @property
    def text(self) -> str:
        return (self.act.__doc__ or "").strip().splitlines()[0]


class Result(msgspec.Struct):
    """An attack and its control after they were run."""

    name: str
    text: str
    seed: int
    rounds: int | None
    control: Outcome
    outcome: Outcome
    seconds: float


ATTACKS: dict[str, Attack] = {}
"""All attacks of the modules that have been imported, by ``MODULE.NAME``."""


def attack(act: Callable[[Lab, bool], Outcome]) -> Callable[[Lab, bool], Outcome]:
    """Make a function an attack: it gets a lab, and whether it is to be harmless, which is its own control."""
    # A module that runs as a program has another name.
    spec = sys.modules[act.__module__].__spec__
    module = (spec.name if spec is not None else act.__module__).rpartition(".")[2]
    name = f"{module}.{act.__name__}"
    ATTACKS[name] = Attack(name, act)
    return act


def load_all() -> dict[str, Attack]:
    """All attacks of all modules, by name."""
    for module in MODULES:
        importlib.import_module(f"tests.attacks.{module}")
    return ATTACKS


def run(tried: Attack, *, seed: int = 0, rounds: int | None = None) -> Result:
    """Run an attack's control, then the attack."""
    began = time.monotonic()
    with Lab(seed, rounds) as lab:
        control = tried.act(lab, True)
    with Lab(seed, rounds) as lab:
        outcome = tried.act(lab, False)
    return Result(tried.name, tried.text, seed, rounds, control, outcome, round(time.monotonic() - began, 1))


def told(result: Result) -> str:
    """A result as text."""
    lines = [result.name, f"  {result.text}"]
    for title, outcome in (("control", result.control), ("attack", result.outcome)):
        tried = ", ".join(f"{number} {what}" for what, number in outcome.tried.items())
        lines.append(f"  {title} tried: {tried}")
        lines += [f"    {what}: {found}" for what, found in outcome.found.items()]
        lines.append(f"  {title}: {outcome.word}: {outcome.verdict}")
    return "\n".join([*lines, f"  ({result.seconds} s)"])


def main() -> None:
    """Run the attacks of the module that is the program; exit code 1 if one of them broke something."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", metavar="NAME", help="one attack of this module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=None, help="how often to repeat, where it repeats")
    given = parser.parse_args()
    broken = False
    for tried in list(ATTACKS.values()):
        if given.only is not None and tried.name.rpartition(".")[2] != given.only:
            continue
        result = run(tried, seed=given.seed, rounds=given.rounds)
        print(msgspec.json.encode(result).decode() if given.json else told(result), flush=True)
        broken |= result.outcome.held is False
    sys.exit(1 if broken else 0)
