"""Members of a remote tier join, leave and move while a pool computes on tensors that are stored there."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from farpool import Pool, StaticMembers
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import TierError
from farpool.memory.tiers import Remote
from tests.nodes import PATIENCE, eventually, move, stats

WORKERS = 2
TENSORS = 14
NUMBERS = 50_001  # so that blocks do not begin at stripes, and some are on two nodes
OPERATIONS = 80
"""Operations that each worker ends between two changes of the members."""
MIB = 1 << 20


class Worker:
    """Changes tensors of a pool and plain copies of them alike, and compares all bits of both."""

    def __init__(self, pool: Pool, number: int, seed: str, is_moving: threading.Event) -> None:
        self.done = 0
        self.failed = 0
        self.wrong: list[str] = []
        self._number = number
        self._is_moving = is_moving
        self._random = random.Random(f"{seed} worker {number}")
        self._plain = [torch.full((NUMBERS,), float(one)) for one in range(TENSORS)]
        self._paged = [pool.full((NUMBERS,), float(one)) for one in range(TENSORS)]

    def work(self) -> None:
        one, other = self._random.sample(range(TENSORS), 2)
        act = self._random.choice(["add", "scale", "compare"])
        factor = self._random.uniform(0.5, 1.5)
        for tensors in (self._paged, self._plain):
            while True:
                try:
                    if act == "add":
                        tensors[one].add_(tensors[other], alpha=0.25)
                    elif act == "scale":
                        tensors[one].mul_(factor)
                    else:
                        self.compare(one)
                    break
                except TierError:  # a node that moves is away for a moment; a failed operation has changed nothing
                    if not self._is_moving.is_set():
                        raise
                    self.failed += 1
        self.done += 1

    def compare(self, one: int) -> None:
        if not torch.equal(self._paged[one], self._plain[one]):
            self.wrong.append(f"worker {self._number}, tensor {one} after {self.done} operations")

    def compare_all(self) -> None:
        for one in range(TENSORS):
            self.compare(one)

    def end(self) -> None:
        self._paged.clear()


class Load:
    """Workers in threads of their own."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(worker,)) for worker in workers]

    def _work(self, worker: Worker) -> None:
        try:
            while not self._stopping.is_set():
                worker.work()
        except BaseException as failure:
            self._failures.append(failure)

    def go_on(self) -> None:
        """Wait until each worker has ended more operations."""
        before = [worker.done for worker in self._workers]

        def enough() -> bool:
            return all(worker.done >= then + OPERATIONS for worker, then in zip(self._workers, before, strict=True))

        eventually(lambda: bool(self._failures) or enough())
        self.check()

    def check(self) -> None:
        if self._failures:
            raise self._failures[0]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads)
        self.check()


def listed(nodes: Sequence[RunningNode]) -> list[str]:
    return [node.address for node in nodes]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_members_join_leave_and_move_while_a_pool_works_and_all_bits_are_right(transport: str) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node(grace=30)) for _ in range(2)]
        members = StaticMembers(*listed(nodes))
        tier = Remote(members, size="16MiB", transport=transport, timeout=PATIENCE)
        pool = stack.enter_context(Pool("2MiB", [tier], timeout=2 * PATIENCE))
        is_moving = threading.Event()
        workers = [Worker(pool, number, transport, is_moving) for number in range(WORKERS)]
        load = Load(workers)
        with load.at_work():
            load.go_on()
            for drains in (True, False):
                joined = stack.enter_context(running_node(grace=30))
                members.update([*listed(nodes), joined.address])
                load.go_on()
                assert set(tier.nodes) == set(listed(nodes))
                leaver = nodes.pop(0)
                nodes.append(joined)
                if drains:
                    members.update([leaver.address, *listed(nodes)], draining=[leaver.address])
                else:
                    members.update(listed(nodes))
                eventually(lambda: set(tier.nodes) == set(listed(nodes)))
                load.go_on()
                leaver.kill()
                load.go_on()
                members.update(listed(nodes))

            is_moving.set()
            move(nodes[0])
            members.update(listed(nodes))
            eventually(lambda: set(tier.nodes) == set(listed(nodes)))
            load.go_on()  # the operations that met the node while it was away have ended
            is_moving.clear()
            load.go_on()

            members.update(listed(nodes), draining=[nodes[0].address])  # and its part moves to the other node
            eventually(lambda: tier.nodes == (nodes[1].address,) * 2)
            nodes[0].kill()
            load.go_on()
        for worker in workers:
            worker.compare_all()
        assert [wrong for worker in workers for wrong in worker.wrong] == []
        assert tier.notes == ()
        assert stats(nodes[1].address)["lent"] == 16 * MIB
        assert pool.stats().evictions > OPERATIONS, "too few transfers"
        for worker in workers:
            worker.end()
