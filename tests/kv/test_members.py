"""A cache of prefixes whose nodes join, leave and move while it loads and saves."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from farpool import StaticMembers, Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.cache import PrefixCache
from farpool.kv.memory import Layer
from tests.kv.test_prefix import BLOCK, Made, check, target
from tests.nodes import PATIENCE, eventually, move

LAYERS = [Layer(512)] * 2
LENGTH = 6 * BLOCK
SEQUENCES = 4
"""Sequences that each client saves and loads between two changes of the members."""


def tokens_of(client: int, number: int) -> list[int]:
    return [1000 * client + number, *range(1, LENGTH)]


class Client:
    """Saves sequences of its own, and loads the earlier ones; each that is found has the right bytes."""

    def __init__(self, cache: PrefixCache, number: int) -> None:
        self.saved = 0
        self._cache, self._number = cache, number

    def work(self) -> None:
        tokens = tokens_of(self._number, self.saved)
        self._cache.save(tokens, Made(LAYERS, tokens, LENGTH).computed())
        self.saved += 1
        for number in {self.saved - 1, self.saved // 2}:
            self.load(number)

    def load(self, number: int) -> int:
        tokens = [*tokens_of(self._number, number), 0]  # the last token is always computed
        into = target(LAYERS, tokens)
        usable = self._cache.load(self._cache.lookup(tokens), into)
        check(LAYERS, tokens, into, usable)
        return usable


def addresses(nodes: list[RunningNode]) -> list[str]:
    return [node.address for node in nodes]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_members_join_leave_and_move_while_a_cache_works_and_no_block_is_lost() -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node("256MiB")) for _ in range(3)]
        members = StaticMembers(*addresses(nodes))
        store = stack.enter_context(Store(members, replicas=2, timeout=PATIENCE))
        cache = stack.enter_context(
            PrefixCache(
                store,
                LAYERS,
                model="m",
                weights_id="1",
                dtype="float16",
                block=BLOCK,
                timeout=PATIENCE,
                hold_out=False,
                near_bytes=0,
            )
        )
        clients = [Client(cache, number) for number in range(2)]
        stopping, failures = threading.Event(), list[BaseException]()

        def work(client: Client) -> None:
            try:
                while not stopping.is_set():
                    client.work()
                    time.sleep(0.003)
            except BaseException as failure:
                failures.append(failure)

        def go_on() -> None:
            before = [client.saved for client in clients]
            eventually(
                lambda: (
                    bool(failures)
                    or all(client.saved >= then + SEQUENCES for client, then in zip(clients, before, strict=True))
                )
            )
            assert not failures, failures

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            go_on()
            assert cache.pin(tokens_of(0, 0), 600) == LENGTH // BLOCK
            nodes.append(stack.enter_context(running_node("256MiB")))
            members.update(addresses(nodes))
            go_on()
            members.update(addresses(nodes), draining=[nodes[0].address])
            go_on()
            assert store.repair().left == ()
            members.update(addresses(nodes[1:]))
            go_on()
            assert store.repair().left == ()
            nodes.pop(0).kill()
            go_on()
            move(nodes[0])
            members.update(addresses(nodes))
            go_on()
            eventually(lambda: all(status.stats is not None for status in store.nodes()))
            cache.unpin(tokens_of(0, 0))
        finally:
            stopping.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert not failures, failures
        # A save makes one attempt: while a node moved, some blocks may have got no second copy, or none.
        first = [client.load(number) for client in clients for number in range(2 * SEQUENCES)]
        assert first == [LENGTH] * len(first)
        assert {status.node for status in store.nodes()} == set(addresses(nodes))
