"""Several tenants in turn fill a node's memory and delete what they put: how much does the node take in all?"""

from __future__ import annotations

from tests.attacks.lab import MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main

LENT = 64 * MIB
TENANTS = 8
OBJECTS = 56
SLACK = 8 * MIB
"""For what a process's allocator keeps; a tenant's share of the attack is 56 MiB."""


@attack
def tenants_in_turn(lab: Lab, harmless: bool) -> Outcome:
    """Have 8 tenants put 56 MiB each into 64 MiB, and delete it before the next begins; the control is one tenant."""
    keys = [Key(f"tenant{number}", tenant=0 if harmless else number) for number in range(TENANTS)]
    node = lab.node(LENT, keys, metrics=True)
    before = node.shared_memory() + node.own_memory()
    value = lab.random.randbytes(MIB)
    puts = drops = 0
    for key in keys:
        with node.connect(key) as connection:
            names = [b"%d %d" % (key.tenant, number) for number in range(OBJECTS)]
            puts += sum(connection.put(name, value).done for name in names)
            drops += sum(connection.drop(name).done for name in names)
    shared = node.shared_memory()
    taken = shared + node.own_memory() - before
    told = {
        name: int(value)
        for name, value in node.metrics().items()
        if "_bytes{" in name and "capacity" not in name and "_total" not in name
    }
    return Outcome(
        taken <= LENT + SLACK,
        f"{taken // MIB} MiB taken of {LENT // MIB} MiB lent",
        {"tenants": 1 if harmless else TENANTS, "puts of 1 MiB": puts, "deletions": drops},
        {
            "bytes of shared memory (blocks)": shared,
            "bytes of the process (RssAnon)": node.own_memory(),
            "all of it before": before,
            "most bytes that a metric tells": max(told.values()),
        },
    )


@attack
def told_by_a_metric(lab: Lab, harmless: bool) -> Outcome:
    """Look for a metric that tells what the system has given the node, after tenants have put and deleted."""
    keys = [Key(f"tenant{number}", tenant=number) for number in range(TENANTS)]
    node = lab.node(LENT, keys, metrics=True)
    value = lab.random.randbytes(MIB)
    puts = 0
    for key in keys[:1] if harmless else keys:
        with node.connect(key) as connection:
            names = [b"%d %d" % (key.tenant, number) for number in range(OBJECTS)]
            puts += sum(connection.put(name, value).done for name in names)
            if not harmless:  # what is there is what is taken
                for name in names:
                    connection.drop(name)
    shared, own = node.shared_memory(), node.own_memory()
    metrics = {
        name: int(value)
        for name, value in node.metrics().items()
        if "_bytes{" in name and "capacity" not in name and "_total" not in name
    }
    # A metric may count the process or not, and the tables beside the objects or not.
    closest = min(metrics, key=lambda name: abs(metrics[name] - shared))
    held = any(0.9 * shared <= told <= 1.1 * (shared + own) for told in metrics.values())
    return Outcome(
        held,
        f"the system has given {shared} bytes of shared memory, the closest metric tells {metrics[closest]}",
        {"tenants": 1 if harmless else TENANTS, "puts of 1 MiB": puts},
        {"metrics": metrics},
    )


if __name__ == "__main__":
    main()
