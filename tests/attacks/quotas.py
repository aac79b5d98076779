"""What one access key can take from the others of a node: memory, pins, files, the time of the data loop."""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.attacks.lab import KIB, MIB, Key, Lab, Node, eventually, work_for_a_get
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

LENT = 64 * MIB
OWNER = Key("owner", tenant=1)
OBJECTS = 24
"""Of 1 MiB: less than half of what the node lends, so below a fair share of two tenants."""


@attack
def evict_by_leasing(lab: Lab, harmless: bool) -> Outcome:
    """Lease memory with a key that may only write, of another tenant; the control leases what is free."""
    thief = Key("thief", ("write",), tenant=2)
    node = lab.node(LENT, [OWNER, thief])
    names = publish(lab, node, OBJECTS)
    asked = 8 if harmless else LENT // MIB
    with node.connect(thief, purpose="control") as control:
        granted = sum(control.lend(MIB).done for _ in range(asked))
    left = still_there(node, names)
    return Outcome(
        left == OBJECTS,
        f"{OBJECTS - left} of {OBJECTS} objects of another tenant evicted by {granted} leases of 1 MiB",
        {"objects of 1 MiB": OBJECTS, "leases of 1 MiB asked for": asked},
    )


@attack
def evict_by_announcing(lab: Lab, harmless: bool) -> Outcome:
    """Send headers that announce 60 MiB each and no byte of payload; the control announces 1 MiB."""
    writer = Key("writer", ("publish",), tenant=1)
    node = lab.node(LENT, [OWNER, writer])
    names = publish(lab, node, OBJECTS)
    with node.connect(writer) as liar, node.connect(OWNER) as other:
        liar.announce_put(b"announced", MIB if harmless else 60 * MIB)
        for _ in range(50):  # the data loop has read the header when it has answered others many times
            assert other.ping().done
        left = still_there(node, names)
    return Outcome(
        left == OBJECTS,
        f"{OBJECTS - left} of {OBJECTS} objects evicted before a byte of payload was sent",
        {"objects of 1 MiB": OBJECTS, "headers": 1},
    )


TRIES = 10


@attack
def pin_everything(lab: Lab, harmless: bool) -> Outcome:
    """Pin all objects of a tenant with its read-only key, then publish with another; the control lets go of them."""
    reader = Key("reader", ("read",), tenant=1)
    node = lab.node(LENT, [OWNER, reader])
    names = publish(lab, node, LENT // MIB)
    with node.connect(reader) as greedy:
        pinned = [answer for answer in map(greedy.pin, names) if answer.done]
        if harmless:
            for answer in pinned:
                assert greedy.unpin(answer).done
        refused = refused_puts(lab, node, OWNER)
    return Outcome(
        not refused,
        f"{refused} of {TRIES} puts of the tenant refused",
        {"pins of 1 MiB": len(pinned), "puts of 1 MiB": TRIES},
    )


@attack
def fill_everything(lab: Lab, harmless: bool) -> Outcome:
    """Fill the memory with one tenant, then publish with another; the control leaves half of it."""
    other = Key("other", tenant=2)
    node = lab.node(LENT, [OWNER, other])
    count = LENT // MIB // 2 if harmless else LENT // MIB
    publish(lab, node, count)
    refused = refused_puts(lab, node, other)
    return Outcome(
        not refused,
        f"{refused} of {TRIES} puts of the other tenant refused",
        {"objects of 1 MiB": count, "puts of 1 MiB": TRIES},
    )


def refused_puts(lab: Lab, node: Node, key: Key) -> int:
    """How many of a few puts of 1 MiB a node refuses."""
    value = lab.random.randbytes(MIB)
    with node.connect(key) as connection:
        return sum(not connection.put(b"new %d" % number, value).done for number in range(TRIES))


@attack
def lease_single_bytes(lab: Lab, harmless: bool) -> Outcome:
    """Lease one byte as often as the node may open files, then connect; the control leases as much at once."""
    files, thief, clients = 2048, Key("thief", ("write",), tenant=2), 3
    node = lab.node(LENT, [OWNER, thief], files=files)
    before = node.shared_memory()
    asked = 1 if harmless else files
    granted = 0
    served = 0
    with node.connect(thief, purpose="control") as control:
        for _ in range(asked):
            if not control.lend(files if harmless else 1).done:
                break
            granted += 1
        taken = node.shared_memory() - before
        for number in range(clients):
            with suppress(OSError, Denied), Connection(node.where, OWNER.pair, timeout=5.0) as connection:
                served += connection.put(b"key %d" % number, b"value").done
    return Outcome(
        served == clients,
        f"{clients - served} of {clients} new clients locked out by {granted} leases of one byte, which take "
        f"{taken // KIB} KiB",
        {"leases asked for": asked, "files that the node may open": files, "clients": clients},
        {"bytes of shared memory taken": taken, "bytes leased": files if harmless else granted},
    )


LISTED = 100_000
LISTERS = 8
ASKED = 200
MOST_WORK = 40.0
"""Times the work that an answer takes when nobody lists."""


@attack
def list_what_nobody_has(lab: Lab, harmless: bool) -> Outcome:
    """List 100,000 objects with a prefix that none has, and see what the node does before it answers others."""
    lister = Key("lister", ("read",), tenant=2)
    filler = Key("filler", ("publish",), tenant=2)
    node = lab.node(LENT, [OWNER, lister, filler], spin=0.0)  # which would be counted as work
    objects = 1000 if harmless else LISTED
    with node.connect(filler) as connection:
        for first in range(0, objects, 1000):
            connection.put_many([(b"%0200d" % number, b"x") for number in range(first, first + 1000)])
    with node.connect(OWNER) as client:
        assert client.put(b"key", b"value").done
        alone = statistics.median(work_for_a_get(node, client) for _ in range(ASKED))
        with listing(node, lister, LISTERS) as lists:
            assert eventually(lambda: lists() > 0)
            before = lists()
            work = sorted(work_for_a_get(node, client) for _ in range(ASKED))
            done = lists() - before
    times = statistics.median(work) / alone
    return Outcome(
        times <= MOST_WORK,
        f"{times:.1f} times the work in the median before a get is answered, while another tenant lists",
        {"objects of the tenant that lists": objects, "connections that list": LISTERS, "gets of the other": 2 * ASKED},
        {
            "processor time of the node for a get, us, alone": round(alone * 1e6),
            "the same beside lists: median, 0.9": [round(work[at] * 1e6) for at in (ASKED // 2, ASKED * 9 // 10)],
            "lists done meanwhile": done,
        },
    )


@contextmanager
def listing(node: Node, key: Key, count: int) -> Iterator[Callable[[], int]]:
    """Processes that list without a pause; gives how many lists were done so far."""
    counters = mmap.mmap(-1, 8 * count)
    children = []
    try:
        for number in range(count):
            child = os.fork()
            if child == 0:
                with suppress(BaseException), node.connect(key, purpose="control") as control:
                    done = 0
                    while control.list_objects(b"nobody has this").done:
                        done += 1
                        counters[8 * number : 8 * number + 8] = struct.pack("<Q", done)
                os._exit(0)
            children.append(child)
        yield lambda: sum(struct.unpack(f"<{count}Q", counters[:]))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        counters.close()


def publish(lab: Lab, node: Node, count: int) -> list[bytes]:
    """Objects of 1 MiB of the owner."""
    value = lab.random.randbytes(MIB)
    names = [b"object %d" % number for number in range(count)]
    with node.connect(OWNER) as connection:
        assert all(connection.put(name, value).done for name in names)
    return names


def still_there(node: Node, names: list[bytes]) -> int:
    """How many of the owner's objects there are."""
    with node.connect(OWNER) as connection:
        return sum(connection.stat(name).done for name in names)


if __name__ == "__main__":
    main()
