"""The faults of a run, as a list that follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["COUNTS", "KINDS", "LONGEST_S", "Kind", "Role", "Strike", "make_schedule"]

Role = Literal["etcd", "node", "manager", "program"]
Kind = Literal["kill", "stop", "cut-near", "cut-far", "fill", "drain", "lose"]

COUNTS: dict[Role, int] = {"etcd": 3, "node": 5, "manager": 3, "program": 5}
"""Processes of each role."""
KINDS: dict[Role, tuple[Kind, ...]] = {
    "etcd": ("kill", "stop", "cut-near", "cut-far", "fill"),
    "node": ("kill", "stop", "cut-near", "cut-far", "fill", "drain"),
    "manager": ("kill", "stop", "cut-near", "cut-far", "fill"),
    "program": ("kill", "stop", "cut-near", "cut-far"),
}
"""Faults that the schedule deals out to each role. A node is also lost together with its memory, now and then."""
LONGEST_S = 6.0
LOSS_INTERVAL_S = 60.0
"""A node is lost about once in this time, because the pool needs time to make the lost copies again."""
_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Attributes
    ----------
    begin : float
        Second of the run at which it begins.
    seconds : float
        Seconds after which it is mended.
    role : str
        Role of the process that it meets.
    index : int
        Which process of the role.
    kind : str
        ``kill`` is SIGKILL, and a new start in the end; ``stop`` is SIGSTOP, and SIGCONT in the end; ``cut-near`` and
        ``cut-far`` cut the link of the machine at its own end or at the switch; ``fill`` fills the disk; ``drain``
        drains a node; ``lose`` kills a node and removes its folder, as if its host had been replaced.
    """

    begin: float
    seconds: float
    role: Role
    index: int
    kind: Kind

    @property
    def end(self) -> float:
        """Second of the run at which the fault is mended."""
        return self.begin + self.seconds

    def __str__(self) -> str:
        return f"{self.begin:.1f} s: {self.kind} {self.role} {self.index} for {self.seconds:.1f} s"


def make_schedule(seed: int, seconds: float) -> list[Strike]:
    """Return the faults of a run in the order in which they begin.

    All faults of all roles come before one of them comes again, at most three at the same time, and no two at the same
    process. The same seed and length give the same schedule.

    Parameters
    ----------
    seed : int
        Seed.
    seconds : float
        Length of the run.
    """
    chance = random.Random(seed)
    strikes: list[Strike] = []
    deck: list[tuple[Role, Kind]] = []
    now, loss = 1.0, min(LOSS_INTERVAL_S, seconds) * chance.uniform(0.4, 0.6)
    # Short runs are denser, so that each fault comes at least once.
    pause = min(3.0, seconds / 30)
    while now < seconds:
        role: Role
        kind: Kind
        if now >= loss:
            role, kind = "node", "lose"
            loss += LOSS_INTERVAL_S
        else:
            deck = deck or chance.sample(_all_faults(), len(_all_faults()))
            role, kind = deck.pop()
        open_ones = [one for one in strikes if one.end > now]
        if len(open_ones) >= _AT_ONCE:
            now = min(one.end for one in open_ones)
            open_ones = [one for one in open_ones if one.end > now]
        busy = {(one.role, one.index) for one in open_ones}
        free = [index for index in range(COUNTS[role]) if (role, index) not in busy]
        length = chance.choice((chance.uniform(0.2, 1.5), chance.uniform(1.5, LONGEST_S)))
        strikes.append(Strike(now, length, role, chance.choice(free), kind))
        now += chance.uniform(0.2, 2 * pause - 0.2)
    return strikes


def _all_faults() -> list[tuple[Role, Kind]]:
    return [(role, kind) for role, kinds in KINDS.items() for kind in kinds]
