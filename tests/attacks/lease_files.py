"""The file of a lease, which its program may write: its header, its length, and what stays of it afterwards."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from farpool._native import crc32c
from tests.attacks.lab import MIB, Key, Lab, Node, eventually, fallocate_keeping_size
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

LENT = 16 * MIB
LEASE = 2 * MIB
SLACK = 2 * MIB
"""Of memory beside what the node lends: tables of tenants, and a page here and there."""
PIECE = 48 * 1024
OWNER = Key("owner", tenant=1)
VICTIM = Key("victim", tenant=2)

_CHECKED = 124
"""Bytes of a header that its checksum is of, which follows them."""
_CAPACITY, _SESSION, _TENANT, _KEY = (24, "<Q"), (48, "<Q"), (64, "<I"), (104, "<Q")


@attack
def forge_the_owner(lab: Lab, harmless: bool) -> Outcome:
    """Write another session and tenant into a lease's header, then kill the node; the control writes what was there."""
    node = lab.node(LENT, [OWNER, VICTIM])
    with node.connect(VICTIM) as victim:
        session = victim.session
    with attached(node, OWNER) as (_, _, file):
        if not harmless:
            forge(file, {_SESSION: session, _TENANT: VICTIM.tenant, _KEY: 0})
        else:
            forge(file, {})
        node.kill()
        node.start()
    try:
        with node.connect(VICTIM, session=session) as again:
            admitted = again.ping().done
    except Denied:
        admitted = False
    fitted = puts_that_fit(node, VICTIM)
    return Outcome(
        admitted and fitted >= LENT // MIB // 2,
        f"the program whose session was named is {'admitted' if admitted else 'shut out'} after the restart, and "
        f"{fitted} MiB of its tenant's objects can be kept",
        {"leases": 1, "headers written": 1},
    )


@attack
def forge_the_capacity(lab: Lab, harmless: bool) -> Outcome:
    """Make a lease's file and header 64 GiB long, then kill the node; the control writes the length that was lent."""
    node = lab.node(LENT, [OWNER, VICTIM])
    with attached(node, OWNER) as (_, _, file):
        nbytes = LEASE if harmless else 64 << 30
        os.ftruncate(file, 4096 + nbytes)
        forge(file, {_CAPACITY: nbytes})
        node.kill()
        node.start()
    lent = int(node.stats(VICTIM)["lent"])
    fitted = puts_that_fit(node, VICTIM)
    return Outcome(
        lent <= LENT and fitted >= LENT // MIB // 2,
        f"after the restart {lent // MIB} MiB count as lent of {LENT // MIB}, and {fitted} MiB of another tenant's "
        f"objects can be kept",
        {"leases": 1, "headers written": 1},
    )


@attack
def make_longer(lab: Lab, harmless: bool) -> Outcome:
    """Make a lease's file longer than it was lent, and fill it; the control fills it as long as it is."""
    node = lab.node(LENT, [OWNER])
    with attached(node, OWNER) as (_, _, file):
        nbytes = 4096 + (LEASE if harmless else 4 * LENT)
        os.posix_fallocate(file, 4096, nbytes - 4096)  # the length follows
        return bounded(node, [file], {"leases": 1, "MiB taken through the file": nbytes // MIB})


@attack
def take_memory_behind_the_end(lab: Lab, harmless: bool) -> Outcome:
    """Have the system give memory behind the end of a lease's file; the control asks for what lies before it."""
    node = lab.node(LENT, [OWNER])
    with attached(node, OWNER) as (_, _, file):
        begin, nbytes = (4096, LEASE) if harmless else (4096 + LEASE, 4 * LENT)
        fallocate_keeping_size(file, begin, nbytes)
        return bounded(node, [file], {"leases": 1, "MiB taken through the file": nbytes // MIB})


@attack
def keep_what_was_given_back(lab: Lab, harmless: bool) -> Outcome:
    """Keep the files of leases that were given back, which the node lends anew; the control closes them."""
    node = lab.node(LENT, [OWNER])
    rounds = lab.rounds(8)
    kept: list[int] = []
    try:
        with Connection(node.socket, OWNER.pair, purpose="control") as control:
            for _ in range(rounds):
                lease = int(control.lend(LENT // 2).result["lease"])
                kept += control.attach_lease(lease).files
                assert control.release(lease).done
                if harmless:
                    os.close(kept.pop())
        return bounded(node, kept, {"leases": rounds})
    finally:
        for file in kept:
            os.close(file)


@attack
def cut_off(lab: Lab, harmless: bool) -> Outcome:
    """Cut leases off, have the node write there, and make them as long as before; the control does not cut."""
    node = lab.node(LENT, [OWNER])  # of several keys one could not lease so much
    before = node.own_memory()
    done = 0
    with ExitStack() as stack:
        leases = [stack.enter_context(attached(node, OWNER, 3 * MIB)) for _ in range(4)]
        for (control, lease, file), nbytes in zip(leases, (0, 4096, 65536, 1), strict=True):
            if not harmless:
                os.ftruncate(file, nbytes)
            # In pieces that the node reads together with their headers, and copies.
            for offset in range(0, 3 * MIB, PIECE):
                with suppress(OSError), node.connect(OWNER, session=control.session) as data:
                    done += data.write(lease, offset, b"\xaa" * PIECE).done
            os.posix_fallocate(file, 0, 4096 + 3 * MIB)
        with node.connect(OWNER) as neighbour:
            served = neighbour.put(b"key", b"value").done and neighbour.get(b"key").payload == b"value"

        def taken() -> int:
            return node.own_memory() - before + taken_with(node, [file for _, _, file in leases])

        first = taken()
        held = eventually(lambda: taken() <= LENT + SLACK, 10.0)
        return Outcome(
            node.lives() and served and held,
            f"the node {'lives' if node.lives() else 'has ended'} and {'serves' if served else 'does not serve'} "
            f"another program; {taken() // MIB} MiB taken of {LENT // MIB} MiB lent",
            {"leases of 3 MiB": 4, "writes by the node": done},
            {"MiB taken before the node could look": first // MIB},
        )


@contextmanager
def attached(node: Node, key: Key, nbytes: int = LEASE) -> Iterator[tuple[Connection, int, int]]:
    """A control connection over the UNIX socket, a lease of it, and the descriptor that the node passes for that."""
    with Connection(node.socket, key.pair, purpose="control") as control:
        lease = int(control.lend(nbytes).result["lease"])
        (file,) = control.attach_lease(lease).files
        try:
            yield control, lease, file
        finally:
            os.close(file)


def forge(file: int, fields: dict[tuple[int, str], int]) -> None:
    """Write fields into a segment's header, with the checksum that they need."""
    header = bytearray(os.pread(file, _CHECKED, 0))
    for (offset, form), value in fields.items():
        struct.pack_into(form, header, offset, value)
    os.pwrite(file, bytes(header) + struct.pack("<I", crc32c(bytes(header))), 0)


def puts_that_fit(node: Node, key: Key) -> int:
    """How many objects of 1 MiB are there after as many puts as the node lends."""
    names = [b"object %d" % number for number in range(LENT // MIB)]
    with node.connect(key) as connection:
        for name in names:
            connection.put(name, bytes(MIB))
        return sum(connection.stat(name).done for name in names)


def bounded(node: Node, files: list[int], tried: dict[str, int]) -> Outcome:
    """Whether what the node has given, to these files as well, comes to lie within what it lends."""

    first = taken_with(node, files)
    held = eventually(lambda: taken_with(node, files) <= LENT + SLACK, 10.0)
    return Outcome(
        held and node.lives(),
        f"{taken_with(node, files) // MIB} MiB taken of {LENT // MIB} MiB lent",
        tried,
        {"MiB taken before the node could look": first // MIB},
    )


def taken_with(node: Node, files: list[int]) -> int:
    """Shared memory of the node, and of files without a name that it has given to programs."""
    states = {(state.st_dev, state.st_ino): state for state in map(os.fstat, files)}
    unlinked = sum(state.st_blocks * 512 for state in states.values() if state.st_nlink == 0)
    return node.shared_memory() + unlinked


if __name__ == "__main__":
    main()
