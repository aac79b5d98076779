"""Members of real processes join, leave and move while programs put, read and pin."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from farpool import StaticMembers, Store
from farpool.cluster.node.process import RunningNode, running_node
from tests.nodes import PATIENCE, eventually, move

WRITERS, READERS = 2, 3
OPERATIONS = 60
"""Operations that each client ends between two changes of the members."""
GRACE = 30


class Client:
    """Puts values, or reads and pins what was confirmed, and notes each result that is wrong."""

    def __init__(self, store: Store, confirmed: list[str], number: int, seed: str) -> None:
        self.done = 0
        self.wrong: list[str] = []
        self._store, self._confirmed, self._number = store, confirmed, number
        self._random = random.Random(f"{seed} client {number}")

    def write(self) -> None:
        key = f"{self._number} {self.done}"
        outcome = self._store.put(key, value_of(key), check=True)
        if outcome not in ("stored", "present"):
            self.wrong.append(f"{key}: {outcome}")
        self._confirmed.append(key)

    def read(self) -> None:
        keys = self._random.choices(self._confirmed, k=self._random.choice([1, 1, 5, 30]))
        act = self._random.choice([self._get, self._get_many, self._look_up, self._pin])
        self.wrong += [f"{key}: {act.__name__}" for key, right in zip(keys, act(keys), strict=True) if not right]

    def _get(self, keys: Sequence[str]) -> list[bool]:
        return [self._store.get(key) == value_of(key) for key in keys]

    def _get_many(self, keys: Sequence[str]) -> list[bool]:
        return [got == value_of(key) for key, got in zip(keys, self._store.get_many(keys), strict=True)]

    def _look_up(self, keys: Sequence[str]) -> list[bool]:
        return [size == len(value_of(key)) for key, size in zip(keys, self._store.lookup(keys).sizes, strict=True)]

    def _pin(self, keys: Sequence[str]) -> list[bool]:
        with self._store.pin_many(keys) as pins:
            return [pin is not None and pin.view == value_of(key) for key, pin in zip(keys, pins, strict=True)]


def value_of(key: str) -> bytes:
    return (key.encode() + b" ") * (hash_of(key) % 1000)


def hash_of(key: str) -> int:
    return random.Random(key).randrange(1 << 30)


@contextlib.contextmanager
def at_work(clients: list[Client], acts: list[Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """Let each client do its act again and again; gives a function that waits until all have done some more."""
    stopping = threading.Event()
    failures: list[BaseException] = []

    def work(client: Client, act: Callable[[], None]) -> None:
        try:
            while not stopping.is_set():
                act()
                client.done += 1
                time.sleep(0.003)  # else the clients would do tens of thousands of operations while a node starts
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(clients, acts, strict=True)]

    def go_on() -> None:
        before = [client.done for client in clients]

        def enough() -> bool:
            return all(client.done >= then + OPERATIONS for client, then in zip(clients, before, strict=True))

        eventually(lambda: bool(failures) or enough())
        if failures:
            raise failures[0]

    for thread in threads:
        thread.start()
    try:
        yield go_on
    finally:
        stopping.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def listed(nodes: Sequence[RunningNode]) -> list[str]:
    return [node.address for node in nodes]


def all_answer(store: Store) -> bool:
    return all(status.stats is not None for status in store.nodes())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_members_join_leave_and_move_under_load_and_nothing_is_wrong_or_lost(transport: str) -> None:
    confirmed: list[str] = []
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node("256MiB", grace=GRACE)) for _ in range(3)]
        members = StaticMembers(*listed(nodes))
        stores = [
            stack.enter_context(Store(members, replicas=2, timeout=PATIENCE, transport=transport))  # type: ignore[arg-type]
            for _ in range(2)
        ]
        for number in range(20):
            key = f"before {number}"
            stores[0].put(key, value_of(key))
            confirmed.append(key)
        held = stack.enter_context(stores[0].pin_many(list(confirmed)))
        clients = [
            Client(stores[number % len(stores)], confirmed, number, transport) for number in range(WRITERS + READERS)
        ]
        acts = [client.write if number < WRITERS else client.read for number, client in enumerate(clients)]
        with at_work(clients, acts) as go_on:
            go_on()
            nodes.append(stack.enter_context(running_node("256MiB", grace=GRACE)))
            members.update(listed(nodes))
            go_on()

            members.update(listed(nodes), draining=[nodes[0].address])
            go_on()  # the calls that began before have ended
            repaired = stores[1].repair()
            assert repaired.left == ()
            members.update(listed(nodes[1:]))
            go_on()
            assert stores[0].repair().left == ()
            leaver = nodes.pop(0)
            held.verify()
            held.release()
            leaver.kill()
            go_on()

            move(nodes[0])
            members.update(listed(nodes))
            go_on()
            eventually(lambda: all(map(all_answer, stores)))
            go_on()
        assert all(status.stats["evictions"] == 0 for status in stores[0].nodes() if status.stats), "too small"
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert {status.node for store in stores for status in store.nodes()} == set(listed(nodes))
        with Store(*listed(nodes), replicas=2, timeout=PATIENCE) as fresh:
            fresh.repair()
            nodes[1].kill()  # so each object has to have another copy
            for begin in range(0, len(confirmed), 200):
                keys = confirmed[begin : begin + 200]
                assert fresh.get_many(keys) == [value_of(key) for key in keys]
        joined = stores[0].nodes()[-1].stats
        assert joined is not None
        assert joined["objects"] > 0
