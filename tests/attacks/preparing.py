"""What a program takes from others by having places prepared that it could not even write."""

from __future__ import annotations

from tests.attacks.lab import MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main

LENT = 64 * MIB
OBJECTS = 48
ANNOUNCED = 30 * MIB
OWNER = Key("owner", tenant=1)


@attack
def evict_by_preparing(lab: Lab, harmless: bool) -> Outcome:
    """Have a place of 30 MiB prepared over plain TCP, and write nothing; the control prepares 1 MiB."""
    writer = Key("writer", ("publish",), tenant=1)
    node = lab.node(LENT, [OWNER, writer])
    value = lab.random.randbytes(MIB)
    names = [b"object %d" % number for number in range(OBJECTS)]
    asked = MIB if harmless else ANNOUNCED
    with node.connect(OWNER) as owner, node.connect(writer) as greedy:
        for name in names:
            assert owner.put(name, value).done
        prepared = greedy.prepare(b"announced", asked).done
        left = sum(owner.get(name).done for name in names)
    return Outcome(
        left == OBJECTS,
        f"{OBJECTS - left} of {OBJECTS} objects evicted by {int(prepared)} places of {asked // MIB} MiB of which no "
        "byte was written",
        {"objects of 1 MiB": OBJECTS, "places asked for": 1},
    )


if __name__ == "__main__":
    main()
