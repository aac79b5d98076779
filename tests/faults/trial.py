"""Clients at work while something is done to the nodes, and what has to hold meanwhile and afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from farpool.cluster.store import Store
from farpool.cluster.wire.access import client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolError
from tests.faults.forge import PATIENCE, ForgedNode, eventually
from tests.faults.historian import Historian
from tests.faults.history import Losses, violations

__all__ = ["KEYS", "SLACK", "Trouble", "nothing_is_held", "nothing_left_behind", "persist", "work_under"]

TIMEOUT = 1.0
SLACK = 60.0
"""An operation that lasts so much longer than its deadline hangs; the machine may be as slow as it likes."""
ENOUGH = 30
"""Trouble goes on until so many puts have been confirmed in it, and so many reads have found something."""
MOST_ROUNDS = 150
KEYS = [f"key {number}" for number in range(60)]
ResultT = TypeVar("ResultT")


class Trouble(Protocol):
    """What is done to the nodes; notes what it did, which nodes have lost their memory or were away, sweeps."""

    did: list[str]
    lost: list[tuple[str, float]]
    swept: list[tuple[float, float]]
    away: list[tuple[str, float, float]]

    def strike(self) -> None:
        """Do something to some node, wait a little, and mend it."""

    def heal(self) -> None: ...


@contextlib.contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Check that this process has no more descriptors, threads and mappings than before."""
    gc.collect()
    before = held()
    yield

    def nothing_more() -> bool:
        gc.collect()  # each time: a thread that ended after the last time may have left a circle of references
        return all(len(now) <= len(then) for now, then in zip(held(), before, strict=True))

    try:
        eventually(nothing_more, 20)
    except AssertionError:
        left = [sorted(set(now) - set(then)) for now, then in zip(held(), before, strict=True)]
        raise AssertionError(f"left behind: descriptors {left[0]}, threads {left[1]}\n{stacks()}") from None
    assert str(folder) not in Path("/proc/self/maps").read_text()


def held() -> tuple[list[str], list[str]]:
    """Return this process's descriptors with their targets, and the names of its threads."""
    descriptors = []
    for entry in os.scandir("/proc/self/fd"):
        # The descriptor of this scan is closed again before anyone looks at it.
        with contextlib.suppress(FileNotFoundError):
            descriptors.append(f"{entry.name} -> {os.readlink(entry.path)}")
    return descriptors, [f"{thread.name} {thread.ident}" for thread in threading.enumerate()]


def stacks() -> str:
    """Return the stacks of this process's Python threads."""
    return "\n".join(
        f"thread {ident}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in sys._current_frames().items()
    )


def persist(act: Callable[[], ResultT]) -> ResultT:
    """Its result once it works: nodes that have come back are asked again after a while."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return act()
        except FarpoolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def work_under(
    trouble: Trouble, rounds: int, addresses: list[str], seed: str, *, drops: int = 8, replicas: int, **settings: Any
) -> None:
    """Let clients work during so many rounds of trouble, or more, until they have done something.

    Then nothing was wrong, all was in time, and what was confirmed is there; everything is removed. `settings` are
    those of the stores.
    """
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(Store(*addresses, timeout=TIMEOUT, replicas=replicas, **settings)) for _ in range(2)
        ]
        clients = [
            Historian(stores[number % 2], KEYS, f"{seed} client {number}", largest=60_000, drops=drops, calm=False)
            for number in range(5)
        ]
        hung = _at_work(clients, lambda: _strike(trouble, rounds, clients))
    assert not hung, f"a client hangs: {trouble.did}"
    trouble.heal()
    with Store(*addresses, timeout=PATIENCE, replicas=replicas, **settings) as store:
        afterwards = Historian(store, KEYS, "afterwards", largest=1, drops=0)
        afterwards.read_all()
        for key in KEYS:
            store.drop(key)
    events = [event for client in (*clients, afterwards) for event in client.events]
    slowest = max(event.ended - event.began for event in events)
    outcomes = Counter(str(event.value).partition(":")[0] if event.kind == "error" else event.kind for event in events)
    told = f"seed {seed}: {dict(outcomes)}; slowest {slowest:.2f} s; {', '.join(trouble.did)}"
    print(told)
    wrong = violations(events, evicts=False, losses=Losses(replicas, trouble.lost, trouble.swept, trouble.away))
    assert wrong == [], f"{wrong}; {told}"
    assert slowest < TIMEOUT + SLACK, told
    assert not [event for event in afterwards.events if event.kind == "error"], told
    assert trouble.did, told


def _at_work(clients: list[Historian], act: Callable[[], None]) -> bool:
    """Do something while clients work in threads of their own; tell if one of them does not end."""
    failures: list[BaseException] = []

    def work(client: Historian) -> None:
        try:
            client.run()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        act()
    finally:
        for client in clients:
            client.stopping.set()
        for thread in threads:
            thread.join(PATIENCE)
    if failures:
        raise failures[0]
    return any(thread.is_alive() for thread in threads)


def _strike(trouble: Trouble, rounds: int, clients: list[Historian]) -> None:
    for number in range(MOST_ROUNDS):
        done = Counter(event.kind for client in clients for event in list(client.events) if event.value is not None)
        if number >= rounds and min(done["put"], done["read"]) > ENOUGH:
            return
        trouble.strike()
    raise AssertionError(f"the clients did not get anything done: {trouble.did}")


def nothing_is_held(nodes: list[ForgedNode], key: str | None = None) -> None:
    """Everything was dropped, so what a node still holds is a pin, or a put that was not finished."""
    for node in nodes:
        way = Channel(parse_address(node.address), key=client_key(key), transport="tcp")
        with contextlib.closing(way) as channel:

            def stats(channel: Channel = channel) -> dict[str, Any]:
                return channel.call("stats", time.monotonic() + PATIENCE)

            eventually(lambda: stats()["sessions"] == 1, 20)
            said = stats()
        assert (said["objects"], said["used"]) == (0, 0), said
        assert said["bad_frames"] == said["checksum_errors"] == 0
        assert len(os.listdir(f"/proc/{node.pid}/fd")) < 40
        node.kill()
        kinds = {path.suffix for path in node.folder.iterdir()}
        assert kinds == {".data", ".index", ".lock", ""}
