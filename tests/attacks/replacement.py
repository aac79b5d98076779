"""Two of three nodes are replaced by empty ones, one after the other: is what had two copies still there?"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.errors import FarpoolError
from tests.attacks.lab import MIB, Key, Lab, Node, sweep
from tests.attacks.program import Outcome, attack, main

OBJECTS = 300
KEY = Key("program")


@attack
def with_a_sweep(lab: Lab, harmless: bool) -> Outcome:
    """Replace one node, sweep, replace another, sweep; the control restarts them with what they had."""
    nodes, values = published(lab)
    swept = []
    for node in nodes[:2]:
        exchange(node, harmless)
        swept.append(sweep(nodes, KEY))
    return judged(lab, nodes, values, harmless, OBJECTS, {"sweeps": swept})


@attack
def with_reads(lab: Lab, harmless: bool) -> Outcome:
    """Replace one node, read everything, replace another; the control restarts them with what they had."""
    nodes, values = published(lab)
    exchange(nodes[0], harmless)
    misses, wrong, errors = read_all(lab, nodes, values)
    exchange(nodes[1], harmless)
    return judged(lab, nodes, values, harmless, 2 * OBJECTS, {"misses, wrong, failed between": [misses, wrong, errors]})


def published(lab: Lab) -> tuple[list[Node], dict[str, bytes]]:
    """Three nodes, and what was confirmed by two of them each."""
    nodes = [lab.node(32 * MIB, [KEY]) for _ in range(3)]
    values = {f"key {number}": lab.random.randbytes(lab.random.randrange(1, 20_000)) for number in range(OBJECTS)}
    with lab.store(nodes, KEY, replicas=2) as store:
        for key, value in values.items():
            store.put(key, value)
    return nodes, values


def exchange(node: Node, harmless: bool) -> None:
    """Put an empty node in the place of one, or, where it is to be harmless, the same again."""
    if harmless:
        node.terminate()
        node.start()
    else:
        node.replace()


def judged(
    lab: Lab, nodes: Sequence[Node], values: dict[str, bytes], harmless: bool, reads: int, found: dict[str, object]
) -> Outcome:
    """What there is in the end."""
    misses, wrong, errors = read_all(lab, nodes, values)
    return Outcome(
        not misses and not wrong and not errors,
        f"{misses} of {OBJECTS} confirmed objects are misses, {wrong} wrong, {errors} failed",
        {"puts of two copies": OBJECTS, "nodes restarted" if harmless else "nodes replaced": 2, "reads": reads},
        found,
    )


def read_all(lab: Lab, nodes: Sequence[Node], values: dict[str, bytes]) -> tuple[int, int, int]:
    """How many are missing, wrong, and not to be had."""
    misses = wrong = errors = 0
    with lab.store(nodes, KEY, replicas=2) as store:
        for key, value in values.items():
            try:
                found = store.get(key)
            except FarpoolError:
                errors += 1
                continue
            misses += found is None
            wrong += found is not None and found != value
    return misses, wrong, errors


if __name__ == "__main__":
    main()
