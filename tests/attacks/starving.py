"""Requests of one tenant that take the data loop's time from another, with many connections or with one."""

from __future__ import annotations

import os
import select
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.attacks.lab import KIB, MIB, Connection, Key, Lab, Node, work_for_a_get
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import lookup_frame, put_frame

LENT = 128 * MIB
GREEDY = Key("greedy", tenant=1)
OTHER = Key("other", tenant=2)
CONNECTIONS = 64
KEYS = 7900
"""Of one lookup: about as many as its answer has room for."""
ASKED = 100
MOST_WORK = 100.0
"""Times the work that an answer takes when no other program asks. Without turns it was 1,000 times as much."""


@attack
def with_lookups(lab: Lab, harmless: bool) -> Outcome:
    """Look up 7,900 keys on each of 64 connections all the time; the control looks up one key after the other."""
    keys = [b"%05d" % number for number in range(1 if harmless else KEYS)]
    request = lookup_frame(keys)
    return beside(lab, lambda: request, f"lookups of {len(keys)} keys", harmless)


@attack
def with_puts(lab: Lab, harmless: bool) -> Outcome:
    """Put 16 objects of 4 KiB at once on each of 64 connections all the time; the control puts one after the other."""
    payload, numbers = lab.random.randbytes(4 * KIB), iter(range(1 << 60))

    def requests() -> bytes:
        return b"".join(put_frame(b"new %d" % next(numbers), payload) for _ in range(1 if harmless else 16))

    return beside(lab, requests, "puts of 4 KiB", harmless)


def beside(lab: Lab, requests: Callable[[], bytes], what: str, harmless: bool) -> Outcome:
    """What the node does before it answers a get, while another tenant asks all the time."""
    connections = 1 if harmless else CONNECTIONS
    node = lab.node(LENT, [GREEDY, OTHER], spin=0.0)  # which would be counted as work
    with node.connect(GREEDY) as filler:
        for first in range(0, KEYS, 1000):
            filler.put_many([(b"%05d" % number, b"x") for number in range(first, first + 1000)])
    with node.connect(OTHER) as client:
        assert client.put(b"key", bytes(4 * KIB)).done
        alone = usual_work(node, client)
        with asking(node, connections, requests, waits=harmless):
            work = usual_work(node, client)
    return Outcome(
        work <= MOST_WORK * alone,
        f"{work / alone:.1f} times the work before a get is answered, while another tenant sends {what}",
        {"connections of the other tenant": connections, "gets": 2 * ASKED},
        {"processor time of the node for a get, us, alone": round(alone * 1e6), "beside it": round(work * 1e6)},
    )


def usual_work(node: Node, client: Connection) -> float:
    """Return the first quartile of the work for a get.

    On a busy machine the client notices many answers late, and the node has worked for the other tenant until then.
    """
    return statistics.quantiles((work_for_a_get(node, client) for _ in range(ASKED)), n=4)[0]


@contextmanager
def asking(node: Node, connections: int, requests: Callable[[], bytes], *, waits: bool) -> Iterator[None]:
    """A process that sends requests on all connections as fast as the node takes them, or once it answers, and drops
    the answers."""
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), ExitStack() as until_the_end:
            opened = [until_the_end.enter_context(node.connect(GREEDY)) for _ in range(connections)]
            streams = {connection.fileno(): connection.stream for connection in opened}
            waiting = dict.fromkeys(streams, b"")
            poll = select.poll()
            for descriptor, stream in streams.items():
                stream.setblocking(False)
                poll.register(descriptor, select.POLLIN if waits else select.POLLIN | select.POLLOUT)
                waiting[descriptor] = requests() if waits else b""
                waiting[descriptor] = waiting[descriptor][stream.send(waiting[descriptor]) :]
            os.write(begun, b".")
            while True:
                for descriptor, events in poll.poll():
                    if events & select.POLLIN:
                        streams[descriptor].recv(MIB)
                    if waits or events & select.POLLOUT:
                        waiting[descriptor] = waiting[descriptor] or requests()
                        waiting[descriptor] = waiting[descriptor][streams[descriptor].send(waiting[descriptor]) :]
        os._exit(1)
    os.close(begun)
    try:
        assert os.read(ready, 1) == b"."
        yield
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process that asks has ended"
    finally:
        os.close(ready)
        with suppress(ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
