"""A program names the number of another program's session, which crosses the wire in clear."""

from __future__ import annotations

from tests.attacks.lab import KIB, MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

LEASES = 4
VICTIM = Key("victim", tenant=1)
SECRET = b"tenant 1's own bytes"


@attack
def by_another_tenant(lab: Lab, harmless: bool) -> Outcome:
    """List, read and release the leases of tenant 1 with a key of tenant 2; the control names a session of nobody."""
    return rob(lab, Key("thief", ("write",), tenant=2), harmless)


@attack
def by_another_key_of_the_tenant(lab: Lab, harmless: bool) -> Outcome:
    """List, read and release the leases of another key of the same tenant; the control names a session of nobody."""
    return rob(lab, Key("thief", ("write",), tenant=1), harmless)


@attack
def undo_pins_and_preparations(lab: Lab, harmless: bool) -> Outcome:
    """Undo what a session holds with other keys of its tenant; the control names a session of nobody."""
    reader = Key("reader", ("read",), tenant=1)
    thief = Key("thief", ("publish",), tenant=1)
    node = lab.node(16 * MIB, [VICTIM, thief, reader])
    names = [b"key %d" % number for number in range(LEASES)]
    undone = 0
    with node.connect(VICTIM) as victim:
        for name in names:
            assert victim.put(name, bytes(KIB)).done
        pinned = [victim.pin(name) for name in names]
        # Refused by now to programs that no fabric exposes the objects to.
        prepared = [victim.prepare(b"new %d" % number, KIB) for number in range(LEASES)]
        session = lab.random.getrandbits(62) if harmless else victim.session
        accepted = 0
        for key, asked in ((reader, pinned), (thief, prepared)):
            stolen = join(node, key, session, "data")
            if stolen is None:
                continue
            accepted += 1
            with stolen:
                for answer in asked:
                    undone += (stolen.unpin if key is reader else stolen.abort)(answer).done
    return Outcome(
        not undone,
        f"{undone} of {2 * LEASES} pins and preparations of another key undone, {accepted} of 2 connections let in",
        {"pins": LEASES, "preparations": LEASES, "connections that name the session": 2},
    )


def rob(lab: Lab, thief: Key, harmless: bool) -> Outcome:
    """Take what another session has leased."""
    node = lab.node(16 * MIB, [VICTIM, thief])
    listed = read = overwritten = released = accepted = 0
    with node.connect(VICTIM, purpose="control") as victim:
        leases = [int(victim.lend(64 * KIB).result["lease"]) for _ in range(LEASES)]
        with node.connect(VICTIM, session=victim.session) as own:
            for lease in leases:
                assert own.write(lease, 0, SECRET).done
            session = lab.random.getrandbits(62) if harmless else victim.session
            if (control := join(node, thief, session, "control")) is not None:
                accepted += 1
                with control:
                    listed = len(control.leases())
                    if (data := join(node, thief, session, "data")) is not None:
                        accepted += 1
                        with data:
                            for lease in leases:
                                read += data.read(lease, 0, len(SECRET)).payload == SECRET
                                overwritten += data.write(lease, 0, bytes(len(SECRET))).done
                    released = sum(control.release(lease).done for lease in leases)
    return Outcome(
        not (listed or read or overwritten or released),
        f"of {LEASES} leases {listed} listed, {read} read, {overwritten} overwritten, {released} released; "
        f"{accepted} of 2 connections let in",
        {"leases": LEASES, "connections that name the session": 2},
    )


def join(node: Node, key: Key, session: int, purpose: str) -> Connection | None:
    """A connection that names a session; None where the node does not let it in."""
    try:
        return node.connect(key, purpose=purpose, session=session)
    except Denied:
        return None


if __name__ == "__main__":
    main()
