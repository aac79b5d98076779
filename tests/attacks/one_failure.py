"""One of three nodes is killed after a put of two copies was confirmed: is the object still there for its readers?"""

from __future__ import annotations

from farpool.errors import FarpoolError
from tests.attacks.lab import MIB, Key, Lab, eventually
from tests.attacks.program import Outcome, attack, main

READS = 3


@attack
def one_holder_killed(lab: Lab, harmless: bool) -> Outcome:
    """In a calm cluster, kill one of the two nodes that confirmed, and read with two copies asked for."""
    rounds = lab.rounds(8)
    admin = Key("admin", tenant=rounds)
    # A tenant for each round: a node knows nothing of a tenant before its first contact.
    keys = [Key(f"tenant{tenant}", tenant=tenant) for tenant in range(rounds)]
    nodes = [lab.node(16 * MIB, [admin, *keys]) for _ in range(3)]
    misses = errors = held_elsewhere = 0
    for number, key in enumerate(keys):
        value = lab.random.randbytes(50_000)
        before = [node.stats(admin)["objects"] for node in nodes]
        with lab.store(nodes, key, replicas=2) as store:
            store.put("key", value)
        holders = [node for node, had in zip(nodes, before, strict=True) if node.stats(admin)["objects"] > had]
        assert len(holders) == 2, f"{len(holders)} nodes confirmed"
        lab.random.shuffle(holders)
        victim, other = holders
        if not harmless:
            victim.kill()
        for _ in range(READS):
            try:
                with lab.store(nodes, key, replicas=2) as store:
                    misses += store.get("key") != value
            except FarpoolError:
                errors += 1
        with other.connect(key) as connection:
            held_elsewhere += connection.get(b"key").payload == value
        if not harmless:
            victim.start()
            assert eventually(victim.lives), number
    reads = rounds * READS
    return Outcome(
        not misses and not errors,
        f"{misses} of {reads} reads were misses and {errors} failed, while a node that lived had the bytes in "
        f"{held_elsewhere} of {rounds} rounds",
        {"puts of two copies": rounds, "nodes killed": 0 if harmless else rounds, "reads": reads},
        {"misses": misses, "errors": errors, "rounds in which another node had the bytes": held_elsewhere},
    )


if __name__ == "__main__":
    main()
