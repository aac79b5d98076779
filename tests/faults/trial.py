"""Clients at work while something is done to the nodes, and what has to hold meanwhile and afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from farpool.errors import FarpoolError
from farpool.store import Store
from farpool.transport.access import client_key
from farpool.transport.address import parse_address
from farpool.transport.channel import Channel
from tests.faults.forge import PATIENCE, ForgedNode, eventually
from tests.faults.load import Client, Ledger, OwnKey

__all__ = ["SLACK", "Trouble", "check_afterwards", "nothing_is_held", "nothing_left_behind", "work_under"]

TIMEOUT = 1.0
SLACK = 60.0
"""An operation that lasts so much longer than its deadline hangs; the machine may be as slow as it likes."""
PUTS = 30
"""Trouble goes on until so many publishes have been confirmed in it."""
MOST_ROUNDS = 150


class Trouble(Protocol):
    """What is done to the nodes."""

    did: list[str]

    def strike(self) -> None:
        """Do something to some node, wait a little, and mend it."""

    def heal(self) -> None: ...
    def lost_since(self, when: float) -> int:
        """How many nodes have lost their memory since then."""


@contextlib.contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Descriptors, threads and mappings of this process are as before."""
    gc.collect()
    before = held()
    yield
    gc.collect()
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), 20)
    assert str(folder) not in Path("/proc/self/maps").read_text()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def persist(act: Callable[[], Any]) -> Any:
    """Its result once it works: breakers let nodes that have come back be asked after a while."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return act()
        except FarpoolError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def work_under(
    trouble: Trouble, rounds: int, addresses: list[str], seed: str, ledger: Ledger, **settings: Any
) -> list[Client]:
    """Let clients work during so many rounds of trouble, or more, until they have done something.

    `settings` are those of the stores.
    """
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(*addresses, timeout=TIMEOUT, **settings)) for _ in range(2)]
        others = [f"client {client} key {key}" for client in range(5) for key in range(6)]
        clients = [Client(number, stores[number % 2], seed, others, ledger) for number in range(5)]
        for client in clients:
            client.thread.start()
        try:
            for number in range(MOST_ROUNDS):
                if number >= rounds and ledger.outcomes["put"] > PUTS:
                    break
                trouble.strike()
        finally:
            for client in clients:
                client.stopping.set()
            for client in clients:
                client.thread.join(PATIENCE)
        assert not any(client.thread.is_alive() for client in clients), f"a client hangs: {trouble.did}"
    return clients


def check_afterwards(
    trouble: Trouble, addresses: list[str], clients: list[Client], seed: str, ledger: Ledger, **settings: Any
) -> None:
    """Nothing was wrong, all was in time, and what was confirmed is there; removes everything."""
    trouble.heal()
    slowest = ", ".join(f"{act} {seconds:.2f} s" for act, seconds in ledger.slowest.items())
    told = f"seed {seed}: {dict(ledger.outcomes)}; slowest {slowest}; {', '.join(trouble.did)}"
    print(told)
    assert ledger.wrong == [], told
    assert max(ledger.slowest.values()) < TIMEOUT + SLACK, told
    assert ledger.outcomes["put"] > PUTS, told
    assert trouble.did, told
    with Store(*addresses, timeout=5.0, **settings) as store:
        for client in clients:
            for key in client.keys:
                _check_survival(store, key, trouble, settings["replicas"], told)
        _remove_everything(store, clients)


def _check_survival(store: Store, key: OwnKey, trouble: Trouble, replicas: int, told: str) -> None:
    value = persist(lambda: store.get(key.name))
    if value is not None:
        assert value in key.allowed, f"{key.name!r}: a value that was replaced or deleted; {told}"
    elif trouble.lost_since(key.began) < replicas:
        assert None in key.allowed, f"{key.name!r} is lost; {told}"


def _remove_everything(store: Store, clients: list[Client]) -> None:
    names = [key.name for client in clients for key in client.keys] + [f"key {number}" for number in range(5)]
    for name in names:
        persist(lambda name=name: store.delete(name))

    def is_settled() -> bool:
        store.reconcile()  # leaves out a node that does not answer in time
        return all(status.stats is not None and not status.stats["tombstones"] for status in store.nodes())

    eventually(is_settled, 20)


def nothing_is_held(nodes: list[ForgedNode], key: str | None = None) -> None:
    """Everything was deleted, so what a node still holds is a pin, a publish that was not finished, or a tombstone."""
    for node in nodes:
        way = Channel(parse_address(node.address), key=client_key(key), transport="tcp")
        with contextlib.closing(way) as channel:

            def stats(channel: Channel = channel) -> dict[str, Any]:
                return channel.call("stats", time.monotonic() + PATIENCE)

            eventually(lambda: stats()["sessions"] == 1, 20)
            said = stats()
        assert (said["objects"], said["tombstones"], said["used"]) == (0, 0, 0), said
        assert said["bad_frames"] == said["checksum_errors"] == 0
        assert len(os.listdir(f"/proc/{node.pid}/fd")) < 40
        node.kill()
        kinds = {path.suffix for path in node.folder.iterdir()}
        assert kinds == {".data", ".index", ".lock", ""}
