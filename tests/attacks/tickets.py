"""Tickets of a pool's manager: forged, replayed, of an earlier epoch, and shown after a kill of the node."""

from __future__ import annotations

import os
import struct
import time
from contextlib import ExitStack
from typing import Any

from farpool.cluster.leases.keyset import KeySet
from farpool.cluster.leases.tickets import Order, SigningKey, Ticket, TicketExtent, sign
from farpool.cluster.node.ticket_keys import FILE
from farpool.cluster.registry import open_registry
from tests.attacks.lab import MIB, Key, Lab, Node, eventually
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import PATIENCE, Answer, Connection, frame

LENT = 16 * MIB
NBYTES = 65536
LEASE = bytes(range(16))
HOLDER = Key("holder", tenant=1)
NEIGHBOUR = Key("neighbour", tenant=1)
STRANGER = Key("stranger", tenant=2)
_WRITE = 33


class Pool:
    """A manager's keys in a registry, and a node that is a member."""

    def __init__(self, lab: Lab) -> None:
        place = f"sqlite://{lab.folder()}/registry.sqlite"
        self.manager = KeySet(lab.enter(open_registry(place)))
        self.manager.turn()
        self.node: Node = lab.node(LENT, [HOLDER, NEIGHBOUR, STRANGER], registry=place)
        if not eventually((self.node.folder / FILE).exists, PATIENCE):
            raise RuntimeError("the node did not learn the manager's keys")

    def unsigned(self, seconds: float = 3600.0, **changes: Any) -> Ticket:
        now = int(time.time() * 1000)
        fields: dict[str, Any] = {
            "lease": LEASE,
            "tenant": HOLDER.tenant,
            "holder": HOLDER.name,
            "epoch": 1,
            "rights": 3,
            "issued_ms": now,
            "expiry_ms": now + int(seconds * 1000),
            "extents": (TicketExtent((self.node.folder / "identity").read_bytes(), 1, NBYTES),),
        }
        return Ticket(**(fields | changes))

    def ticket(self, **changes: Any) -> bytes:
        return self.manager.sign(self.unsigned(**changes))

    def order(self, epoch: int, action: Any) -> Answer:
        member = (self.node.folder / "identity").read_bytes()
        order = Order(lease=LEASE, member=member, epoch=epoch, action=action)
        with self.node.connect(HOLDER, purpose="control") as control:
            return control.call("order", order=self.manager.sign(order))

    def bytes_as_seen_by_the_holder(self, epoch: int, nbytes: int) -> bytes:
        with (
            self.node.connect(HOLDER, purpose="control") as control,
            self.node.connect(HOLDER, session=control.session) as data,
        ):
            return data.read(claim(control, self.ticket(epoch=epoch)), 0, nbytes).payload


def claim(control: Connection, ticket: bytes) -> int:
    """The number of the claimed extent at the node; 0 if the node refuses the ticket."""
    answer = control.call("claim", ticket=ticket)
    return int(answer.result["extents"][0][1]) if answer.done else 0


@attack
def forge(lab: Lab, harmless: bool) -> Outcome:
    """Show tickets of another key, with changed bytes and cut off; the control shows the manager's own."""
    pool = Pool(lab)
    good = pool.ticket()
    if harmless:
        tickets = [good] * 3
    else:
        tickets = [sign(pool.unsigned(), SigningKey(os.urandom(32)))]
        tickets += [
            good[:at] + bytes([good[at] ^ 1 << lab.random.randrange(8)]) + good[at + 1 :] for at in range(len(good))
        ]
        tickets += [good[:length] for length in range(len(good))]
    with pool.node.connect(HOLDER, purpose="control") as control:
        accepted = sum(claim(control, ticket) > 0 for ticket in tickets)
        lent = control.stats()["lent"]
    held = accepted == len(tickets) and lent == NBYTES if harmless else not accepted and not lent
    return Outcome(held, f"{accepted} of {len(tickets)} tickets accepted; {lent} bytes lent", {"tickets": len(tickets)})


@attack
def replay(lab: Lab, harmless: bool) -> Outcome:
    """Show another client's ticket, and use its number in other sessions; the control is the holder itself."""
    pool = Pool(lab)
    ticket = pool.ticket()
    used = tried = 0
    with ExitStack() as stack:
        control = stack.enter_context(pool.node.connect(HOLDER, purpose="control"))
        lease = claim(control, ticket)
        for key in [HOLDER] * 3 if harmless else [HOLDER, NEIGHBOUR, STRANGER]:
            session = control.session if harmless else 0
            data = stack.enter_context(pool.node.connect(key, session=session))
            if key is not HOLDER:
                thief = stack.enter_context(pool.node.connect(key, purpose="control", session=data.session))
                used += claim(thief, ticket) > 0
                tried += 1
            used += data.write(lease, 0, b"used").done
            used += data.read(lease, 0, 4).done
            tried += 2
    return Outcome(
        used == tried if harmless else not used, f"{used} of {tried} uses of another's ticket", {"uses": tried}
    )


@attack
def write_across_an_order(lab: Lab, harmless: bool) -> Outcome:
    """Begin a write, and send the rest after an order has raised the epoch; the control has no order."""
    pool = Pool(lab)
    with (
        pool.node.connect(HOLDER, purpose="control") as control,
        pool.node.connect(HOLDER, session=control.session) as data,
    ):
        lease = claim(control, pool.ticket())
        data.send(frame(_WRITE, struct.pack("<Q", 0), payload_nbytes=NBYTES, payload_crc=0, lease=lease))
        data.send(b"x" * (NBYTES // 2))
        if not harmless and not pool.order(2, "raise").done:
            raise RuntimeError("the order was refused")
        data.send(b"x" * (NBYTES // 2))
        data.receive()
        late = data.write(lease, 0, b"late").done
    rest = pool.bytes_as_seen_by_the_holder(1 if harmless else 2, NBYTES)[NBYTES // 2 :]
    arrived = rest.count(b"x")
    return Outcome(
        (arrived == NBYTES // 2 and late) if harmless else (not arrived and not late),
        f"{arrived} bytes sent after the order arrived; a later write was {'done' if late else 'refused'}",
        {"bytes sent after the order": NBYTES // 2, "writes": 2},
    )


@attack
def kill_before_use(lab: Lab, harmless: bool) -> Outcome:
    """Kill the node after an order, then show the former ticket; the control gives no order."""
    pool = Pool(lab)
    ticket = pool.ticket()
    with (
        pool.node.connect(HOLDER, purpose="control") as control,
        pool.node.connect(HOLDER, session=control.session) as data,
    ):
        data.write(claim(control, ticket), 0, b"kept")
    if not harmless and not pool.order(2, "end").done:
        raise RuntimeError("the order was refused")
    pool.node.kill()
    pool.node.start()
    with (
        pool.node.connect(HOLDER, purpose="control") as control,
        pool.node.connect(HOLDER, session=control.session) as data,
    ):
        lease = claim(control, ticket)
        found = data.read(lease, 0, 4).payload if lease else b""
    return Outcome(
        found == b"kept" if harmless else not lease,
        f"after the kill the ticket is {'accepted' if lease else 'refused'}, and the extent has {found!r}",
        {"kills": 1},
    )


if __name__ == "__main__":
    main()
