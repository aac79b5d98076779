"""Sockets that are opened and say nothing: who else is still served?"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator

from tests.attacks.lab import MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

IDLE = 1500
CLIENTS = 5
SCRAPES = 500
PATIENCE = 15.0
"""Seconds that a client waits for its welcome: three times what farpool's own gives a call."""
KEY = Key("program")


@attack
def before_the_handshake(lab: Lab, harmless: bool) -> Outcome:
    """Open 1,500 TCP connections that say nothing, then connect as 5 clients; the control closes them first."""
    node = lab.node(16 * MIB, [KEY])
    served = [False] * CLIENTS
    with silent(node.where, IDLE) as sockets:
        if harmless:
            for one in sockets:
                one.close()

        def connect(number: int) -> None:
            with contextlib.suppress(OSError, Denied), Connection(node.where, KEY.pair, timeout=PATIENCE) as connection:
                served[number] = connection.ping().done

        clients = [threading.Thread(target=connect, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    with node.connect(KEY) as connection:
        afterwards = connection.ping().done
    return Outcome(
        all(served),
        f"{CLIENTS - sum(served)} of {CLIENTS} new clients locked out for {PATIENCE:g} s",
        {"silent connections": IDLE, "clients": CLIENTS},
        {"a client is served when they are closed": afterwards},
    )


@attack
def at_the_metrics(lab: Lab, harmless: bool) -> Outcome:
    """Open 500 connections to the metrics that ask for nothing, and count threads; the control closes them first."""
    node = lab.node(16 * MIB, [KEY], metrics=True)
    assert node.metrics()
    before = node.threads()
    with silent(node.metrics_where, SCRAPES, 0.002) as sockets:
        if harmless:
            for one in sockets:
                one.close()
        served = False
        with contextlib.suppress(OSError):
            served = bool(node.metrics())
        # Threads of connections that have ended go by themselves; others stay, however long it takes to look.
        deadline = time.monotonic() + 5
        while (after := node.threads()) > before + 16 and time.monotonic() < deadline:
            time.sleep(0.1)
    return Outcome(
        served and after <= before + 16,
        f"{after - before} threads more for {SCRAPES} silent connections, and metrics "
        f"{'are' if served else 'are not'} served beside them",
        {"silent connections": SCRAPES},
        {"threads before": before, "threads after": after},
    )


@contextlib.contextmanager
def silent(where: tuple[str, int], count: int, pause: float = 0.0) -> Iterator[list[socket.socket]]:
    """Connections that are open, or on their way to that, and say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count)), hard))
    sockets = []
    patience = 2.0
    try:
        for _ in range(count):
            one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(one)
            # Not faster than they are let in, as long as they are; what is left stands in line by itself.
            one.settimeout(patience)
            try:
                one.connect(where)
            except (TimeoutError, BlockingIOError):
                patience = 0.0
            time.sleep(pause)  # where few may wait to be let in, and the others come back a second later
        yield sockets
    finally:
        for one in sockets:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main()
