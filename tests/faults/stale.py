"""Iterations of the stale-state test: nodes that are stopped while others take a newer value, and then others die.

Run by hand: ``scripts/check-stale [ITERATIONS] [SEED]``.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from dataclasses import dataclass, field

from farpool.errors import FarpoolError
from farpool.store import Store
from tests.faults.forge import Forge, ForgedNode

__all__ = ["Account", "run_iterations"]

SHAPES = [(3, 2), (5, 3)]
_TIMEOUT = 0.3
_WRITES = ["overwrite", "delete", "overwrite, delete", "delete, overwrite", "overwrite twice"]


@dataclass
class Account:
    """What was seen, to know that the test has tested something."""

    iterations: int = 0
    confirmed: int = 0
    refused: int = 0
    values: int = 0
    misses: int = 0
    errors: int = 0
    whole: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, other: Account) -> None:
        with self.lock:
            for name in ("iterations", "confirmed", "refused", "values", "misses", "errors", "whole"):
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return (
            f"{self.iterations} iterations: {self.confirmed} writes confirmed, {self.refused} not; reads: "
            f"{self.values} values, {self.misses} misses, {self.errors} errors; {self.whole} times nothing was lost"
        )


class _Key:
    """A key and what a read of it may give."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.allowed: set[bytes | None] = {None}

    def write(self, store: Store, value: bytes | None, account: Account) -> None:
        try:
            if value is None:
                store.delete(self.name)
            else:
                store.put(self.name, value)
        except FarpoolError:
            self.allowed.add(value)
            account.refused += 1
        else:
            self.allowed = {value}
            account.confirmed += 1

    def confirm(self, store: Store, value: bytes | None, account: Account) -> None:
        """Write until it is confirmed, or for some time."""
        for _ in range(20):
            self.write(store, value, account)
            if self.allowed == {value}:
                return
            time.sleep(0.05)


class Iteration:
    """One of them; what it does follows from its seed."""

    def __init__(self, nodes: list[ForgedNode], replicas: int, seed: str) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.nodes = nodes
        self.replicas = replicas
        self.account = Account(iterations=1)
        self.keys = [_Key(f"{seed} {number}") for number in range(self.random.randint(1, 5))]
        self.numbers = itertools.count()
        self.lost = False
        self.did: list[str] = []

    def run(self) -> Account:
        """Do it."""
        with contextlib.ExitStack() as stack:
            old = stack.enter_context(self.open())
            for key in self.keys:
                key.confirm(old, self.value("first"), self.account)
            stale = self.random.sample(self.nodes, self.random.randint(1, self.replicas - 1))
            self.each(stale, "stop")
            writer = old if self.random.random() < 0.5 else stack.enter_context(self.open())
            for key in self.keys:
                self.change(writer, key)
            if self.random.random() < 0.5:
                self.read(old)
            others = [node for node in self.nodes if node not in stale]
            self.random.shuffle(others)
            steps = [("resume", stale), ("kill", others[: self.random.randint(1, len(others))])]
            self.random.shuffle(steps)
            for what, nodes in steps:
                self.each(nodes, what)
                if self.random.random() < 0.3:
                    self.read_everywhere(old)
            self.read_everywhere(old)
            self.heal()
            self.read_everywhere(old)
            self.check_whole()
            return self.account

    def open(self) -> Store:
        names = [node.address for node in self.nodes]
        transport = self.random.choice(["auto", "tcp"])
        return Store(*names, replicas=self.replicas, timeout=_TIMEOUT, transport=transport)  # type: ignore[arg-type]

    def value(self, what: str) -> bytes:
        return f"{self.seed} {next(self.numbers)} {what} ".encode().ljust(self.random.choice([60, 500, 40_000]), b".")

    def change(self, store: Store, key: _Key) -> None:
        what = self.random.choice(_WRITES)
        self.did.append(f"{what} of {key.name!r}")
        for step in what.replace("overwrite twice", "overwrite, overwrite").split(", "):
            key.confirm(store, None if step == "delete" else self.value("second"), self.account)

    def each(self, nodes: list[ForgedNode], what: str) -> None:
        for node in nodes:
            self.did.append(f"{what} {node.name}")
            if what == "stop":
                node.stop()
            elif what == "resume":
                node.cont()
            else:
                node.kill()
                if self.random.random() < 0.7:
                    self.revive(node)

    def revive(self, node: ForgedNode) -> None:
        forget = self.random.random() < 0.5
        self.did.append(f"restart {node.name}{' without its memory' if forget else ''}")
        self.lost |= forget
        node.start(forget=forget)

    def heal(self) -> None:
        for node in self.nodes:
            if not node.is_up:
                self.revive(node)

    def read_everywhere(self, old: Store) -> None:
        self.read(old)
        with self.open() as fresh:
            self.read(fresh)

    def read(self, store: Store) -> None:
        for key in self.keys:
            try:
                value = store.get(key.name)
            except FarpoolError:
                self.account.errors += 1
                continue
            self.account.values += value is not None
            self.account.misses += value is None
            assert value is None or value in key.allowed, self.told(key, value)

    def check_whole(self) -> None:
        """Where no node has lost its memory the newest is there."""
        if self.lost:
            return
        self.account.whole += 1
        with self.open() as store:
            for key in self.keys:
                deadline = time.monotonic() + 20
                while True:
                    try:
                        value = store.get(key.name)
                        break
                    except FarpoolError:
                        assert time.monotonic() < deadline, self.told(key, None)
                assert value in key.allowed, self.told(key, value)

    def told(self, key: _Key, value: bytes | None) -> str:
        allowed = [None if one is None else one[:60] for one in key.allowed]
        read = None if value is None else value[:60]
        return f"seed {self.seed!r}, key {key.name!r}: read {read!r}, allowed {allowed}; " + "; ".join(self.did)


def run_iterations(count: int, seed: int, *, at_once: int = 8) -> Account:
    """Run `count` iterations on `at_once` groups of nodes side by side, as an iteration mostly waits."""
    total = Account()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        nodes_count, replicas = SHAPES[number % len(SHAPES)]
        try:
            with Forge() as forge:
                nodes = [forge.node(grace=0.5) for _ in range(nodes_count)]
                for iteration in range(number, count, at_once):
                    if failures:
                        return
                    total.add(Iteration(nodes, replicas, f"{seed} {iteration}").run())
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return total


def main() -> None:
    """``check-stale [ITERATIONS] [SEED]``."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**9)
    print(f"check-stale: {count} iterations, seed {seed}", flush=True)
    began = time.monotonic()
    print(f"{run_iterations(count, seed)}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
