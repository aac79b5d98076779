"""A program names the keys of another tenant: does the node look for them there, and does its answer's time tell?"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from tests.attacks.lab import KIB, MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Status

OWNER = Key("owner", tenant=1)
THIEF = Key("thief", tenant=2)
OBJECTS = 256
ASKED = 2000
"""Times of each kind and operation."""
ALPHA = 1e-6
"""Chance at which a test that compares two equal distributions may call them different."""
TRIES = 3
TOGETHER = 64
"""Keys of one lookup."""


@attack
def search_another_index(lab: Lab, harmless: bool) -> Outcome:
    """Name another tenant's keys in every operation, and its number in frames; the control asks for keys of its own."""
    node = lab.node(16 * MIB, [OWNER, THIEF], metrics=True)
    theirs = published(lab, node, OWNER)
    own = published(lab, node, THIEF)
    names = own if harmless else theirs
    owners, thieves = searches(node, OWNER), searches(node, THIEF)
    got = denied = 0
    with node.connect(THIEF) as thief:
        for name in names:
            got += sum((thief.get(name).done, thief.stat(name).done, thief.pin(name, 1).done, thief.touch(name).done))
            denied += not harmless and thief.get_as(OWNER.tenant, name).status == Status.DENIED
        present = thief.lookup(names)
        for name in names:
            got += thief.drop(name).done
    searched = searches(node, OWNER) - owners
    counted = searches(node, THIEF) - thieves
    with node.connect(OWNER) as owner:
        left = sum(owner.get(name).done for name in theirs)
    counts = searches(node, OWNER) - owners - searched  # the counter is one that counts
    held = searched == 0 and counts == left == OBJECTS and counted == 6 * OBJECTS
    if not harmless:
        held = held and got == 0 and not any(present.meta[8 : 8 + OBJECTS // 8]) and denied == OBJECTS
    return Outcome(
        held,
        f"{searched} searches of the other tenant's index, {counted} of its own; {got} requests done; "
        f"{left} of {OBJECTS} objects left",
        {"keys": OBJECTS, "requests": 6 * OBJECTS, "frames that name the other tenant": 0 if harmless else OBJECTS},
    )


@attack
def time_what_another_has(lab: Lab, harmless: bool) -> Outcome:
    """Time the answers for keys that another tenant has and for keys that nobody has; the control has them itself."""
    node = lab.node(32 * MIB, [OWNER, THIEF])
    there = published(lab, node, THIEF if harmless else OWNER)
    nowhere = names_of(lab)
    least: dict[str, float] = {}
    tries = 0
    with node.connect(THIEF) as thief:
        operations: dict[str, Callable[[Sequence[bytes]], object]] = {
            "get": lambda names: thief.get(names[0]),
            "stat": lambda names: thief.stat(names[0]),
            "lookup": lambda names: thief.lookup(names),
        }
        while tries < TRIES:
            tries += 1
            least = {name: compared(lab, ask, there, nowhere) for name, ask in operations.items()}
            if (min(least.values()) < ALPHA) == harmless:
                break
    tells = [name for name, chance in least.items() if chance < ALPHA]
    shown = ", ".join(f"{name} {chance:.2g}" for name, chance in least.items())
    times = {f"times of {name}": 2 * tries * ASKED for name in least}
    if harmless:
        return Outcome(
            bool(tells), f"own keys are told from others by {' and '.join(tells) or 'nothing'}: {shown}", times
        )
    return Outcome(
        not tells, f"least chance of such times if they are of one distribution, n = {ASKED} each: {shown}", times
    )


def names_of(lab: Lab) -> list[bytes]:
    """As many keys as there are objects, of the length of a KV block's."""
    return [lab.random.randbytes(64) for _ in range(OBJECTS)]


def published(lab: Lab, node: Node, key: Key) -> list[bytes]:
    names = names_of(lab)
    with node.connect(key) as connection:
        assert connection.put_many([(name, lab.random.randbytes(16 * KIB)) for name in names]) == OBJECTS
    return names


def searches(node: Node, key: Key) -> int:
    """How many keys the node has looked for in the index of the key's tenant."""
    return sum(  # nothing is told of a tenant before its first connection
        int(value)
        for name, value in node.metrics().items()
        if name.startswith("farpool_node_tenant_searches_total{") and f'tenant="{key.tenant}"' in name
    )


def compared(
    lab: Lab, ask: Callable[[Sequence[bytes]], object], there: Sequence[bytes], nowhere: Sequence[bytes]
) -> float:
    """Chance that the times for keys of the two kinds, asked for in a random order, are of one distribution."""
    kinds = [there, nowhere] * ASKED
    lab.random.shuffle(kinds)
    times: dict[int, list[int]] = {id(there): [], id(nowhere): []}
    for kind in kinds:
        names = lab.random.sample(kind, TOGETHER)
        began = time.perf_counter_ns()
        ask(names)
        times[id(kind)].append(time.perf_counter_ns() - began)
    one, other = times[id(there)], times[id(nowhere)]
    return min(chance_of_ranks(one, other), chance_of_distance(one, other))


def chance_of_ranks(one: Sequence[int], other: Sequence[int]) -> float:
    """Two-sided Mann-Whitney test by its normal limit, ties counted half."""
    ordered = sorted(other)
    below = sum(bisect_right(ordered, value - 1) + bisect_right(ordered, value) for value in one) / 2
    mean = len(one) * len(other) / 2
    spread = math.sqrt(len(one) * len(other) * (len(one) + len(other) + 1) / 12)
    return 2 * statistics.NormalDist().cdf(-abs(below - mean) / spread)


def chance_of_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Two-sample Kolmogorov-Smirnov test by the bound of its limit."""
    first, second = sorted(one), sorted(other)
    distance = max(
        abs(bisect_right(first, value) / len(first) - bisect_right(second, value) / len(second))
        for value in (*first, *second)
    )
    return min(1.0, 2 * math.exp(-2 * distance**2 * len(first) * len(second) / (len(first) + len(second))))


if __name__ == "__main__":
    main()
