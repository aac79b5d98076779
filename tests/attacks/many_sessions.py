"""One key of a tenant in many sessions: what may the tenant's other keys still hold?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tests.attacks.lab import MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Answer, Connection

LENT = 64 * MIB
SESSIONS = 8
OF_EACH = 12
"""Times 1 MiB that each session asks for: all of them ask for more than there is."""
TRIES = 10
GREEDY = Key("greedy", tenant=1)
OTHER = Key("other", tenant=1)


@attack
def lease_everything(lab: Lab, harmless: bool) -> Outcome:
    """Lease all memory with one key in 8 sessions, then with another; the control leases 8 MiB."""
    return held_by_one_key(lab, harmless, "control", lambda session, _: session.lend(MIB))


@attack
def prepare_everything(lab: Lab, harmless: bool) -> Outcome:
    """Prepare publishes that never come with one key in 8 sessions; the control prepares 8."""
    return held_by_one_key(lab, harmless, "data", lambda session, name: session.prepare(name, MIB - 1024))


@attack
def pin_everything(lab: Lab, harmless: bool) -> Outcome:
    """Pin all objects of a tenant with one key in 8 sessions, then pin with another; the control lets go of them."""
    node = lab.node(LENT, [GREEDY, OTHER])
    names = [b"object %d" % number for number in range(LENT // MIB - 2)]
    with node.connect(OTHER) as connection:
        for name in names:
            assert connection.put(name, bytes(MIB - 1024)).done
    with ExitStack() as until_the_end:
        sessions = [until_the_end.enter_context(node.connect(GREEDY)) for _ in range(SESSIONS)]
        pinned = 0
        for number, name in enumerate(names):
            session = sessions[number % SESSIONS]
            answer = session.pin(name)
            pinned += answer.done
            if harmless and answer.done:
                assert session.unpin(answer).done
        with node.connect(OTHER) as other:
            done = sum(other.pin(name).done for name in names[-TRIES:])
    return Outcome(
        done == TRIES,
        f"{TRIES - done} of {TRIES} pins of 1 MiB refused to another key of the tenant, beside {pinned} of one key",
        {"sessions": SESSIONS, "pins of 1 MiB asked for": len(names), "pins of the other key": TRIES},
    )


def held_by_one_key(lab: Lab, harmless: bool, purpose: str, take: Callable[[Connection, bytes], Answer]) -> Outcome:
    """Take 1 MiB at a time with one key until no session gets more, then lease with another key of the tenant."""
    node = lab.node(LENT, [GREEDY, OTHER])
    with ExitStack() as until_the_end:
        sessions = [until_the_end.enter_context(node.connect(GREEDY, purpose=purpose)) for _ in range(SESSIONS)]
        asked = 1 if harmless else OF_EACH
        taken = sum(
            take(session, b"%d of %d" % (number, which)).done
            for which, session in enumerate(sessions)
            for number in range(asked)
        )
        done = leases_of_another(node)
    return Outcome(
        done == TRIES,
        f"{TRIES - done} of {TRIES} leases refused to another key, beside {taken} MiB of one key of the tenant",
        {"sessions": SESSIONS, "asked for in each, of 1 MiB": asked, "leases of the other key": TRIES},
    )


def leases_of_another(node: Node) -> int:
    """How many leases of 1 MiB the tenant's other key gets."""
    with node.connect(OTHER, purpose="control") as control:
        return sum(control.lend(MIB).done for _ in range(TRIES))


if __name__ == "__main__":
    main()
