"""Objects that are read all the time, among others that come and go: are they still there when all nodes are up?"""

from __future__ import annotations

from farpool.errors import FarpoolError
from tests.attacks.lab import KIB, MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main

HOT = 60
COLD_A_ROUND = 48
KEY = Key("program")


@attack
def churn(lab: Lab, harmless: bool) -> Outcome:
    """Read 60 keys in each round while values that nobody reads fill the cache; the control keeps one copy."""
    rounds, replicas = lab.rounds(40), 1 if harmless else 2
    nodes = [lab.node(6 * MIB, [KEY]) for _ in range(3)]
    # The same share of the cache for either number of copies.
    hot_nbytes, cold_nbytes = 64 * KIB // replicas, 128 * KIB // replicas
    hot = {f"hot {number}": lab.random.randbytes(hot_nbytes) for number in range(HOT)}
    cold = bytes(cold_nbytes)
    lost: dict[str, int] = {}
    reads = wrong = errors = 0
    with lab.store(nodes, KEY, replicas=replicas) as store:
        for key, value in hot.items():
            store.put(key, value)
        for number in range(rounds):
            for key, value in hot.items():
                try:
                    found = store.get(key)
                except FarpoolError:
                    errors += 1
                    continue
                reads += 1
                if found is None:
                    lost.setdefault(key, number)
                else:
                    wrong += found != value
            store.put_many([(f"cold {number} {one}", cold) for one in range(COLD_A_ROUND)])
    evictions = [int(node.stats(KEY)["evictions"]) for node in nodes]
    assert all(evictions), "the cache did not overflow, so nothing was tried"
    return Outcome(
        not lost and not wrong and not errors,
        f"{len(lost)} of {HOT} keys that were read in every round became misses, {wrong} reads wrong, {errors} failed",
        {"rounds": rounds, "reads of hot keys": reads, "puts of cold keys": rounds * COLD_A_ROUND, "copies": replicas},
        {
            "hot bytes of bytes lent": f"{HOT * hot_nbytes * replicas} of {3 * 6 * MIB}",
            "evictions at each node": evictions,
            "first misses by round": sorted(lost.values()),
        },
    )


if __name__ == "__main__":
    main()
