"""A node with an NVMe file is killed while objects are on their way there: is what it confirmed still there?"""

from __future__ import annotations

from tests.attacks.lab import KIB, MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import put_frame

KEY = Key("program")
DRAM, NVME = 8 * MIB, 64 * MIB
MOST = 36 * MIB
"""Bytes put in a trial: they fit into the file, so nothing has a reason to go."""
SIZES = (4 * KIB, 60 * KIB, 300 * KIB)
"""Small beside the memory: for a large object a node may drop others, to get room in one piece."""
UNDER_WAY = 8


@attack
def kill_at_random(lab: Lab, harmless: bool) -> Outcome:
    """Kill the node with SIGKILL after some confirmed puts and start it again; the control uses SIGTERM."""
    trials = lab.rounds(8)
    confirmed = lost = wrong = evicted = 0
    lost_in: list[int] = []
    for trial in range(trials):
        node = lab.node(DRAM, [KEY], nvme=NVME)
        values = drawn(lab)
        done = put_until(node, values, lab.random.randrange(len(values) // 3, len(values)))
        if harmless:
            evicted += node.stats(KEY)["evictions"]
            node.terminate()
        else:
            node.kill()
        node.start()
        gone = 0
        with node.connect(KEY) as connection:
            for name in done:
                answer = connection.get(name)
                gone += not answer.done
                wrong += answer.done and answer.payload != values[name]
        confirmed += len(done)
        lost += gone
        if gone:
            lost_in.append(trial)
        node.terminate()
    return Outcome(
        not lost and not wrong,
        f"{lost} of {confirmed} confirmed objects lost, {wrong} wrong, in {len(lost_in)} of {trials} trials",
        {"trials": trials, "confirmed puts": confirmed},
        {"trials with losses": lost_in} | ({"evictions before the end": evicted} if harmless else {}),
    )


def drawn(lab: Lab) -> dict[bytes, bytes]:
    """Objects of drawn sizes."""
    noise = lab.random.randbytes(max(SIZES) + KIB)
    values: dict[bytes, bytes] = {}
    left = MOST
    while left > 0:
        nbytes = lab.random.choice(SIZES) + lab.random.randrange(KIB)
        values[b"key %d" % len(values)] = noise[:nbytes]
        left -= nbytes
    return values


def put_until(node: Node, values: dict[bytes, bytes], until: int) -> list[bytes]:
    """Put objects, some at once, until so many have been confirmed; their names."""
    done: list[bytes] = []
    with node.connect(KEY) as connection:
        names = list(values)
        sent = 0
        while len(done) < until:
            while sent < len(names) and sent < len(done) + UNDER_WAY:
                connection.send(put_frame(names[sent], values[names[sent]]))
                sent += 1
            assert connection.receive().done
            done.append(names[len(done)])
        return done


if __name__ == "__main__":
    main()
