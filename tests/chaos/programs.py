"""Programs of tenants. Each is a process that works until SIGTERM.

``python -m tests.chaos.programs KIND JOURNAL LIFE`` starts one. The environment names the registry
(``CHAOS_REGISTRY``), the managers with the terms of a lease (``CHAOS_POOL``), and the certificate (``FARPOOL_TLS``).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from farpool import Pool, Store
from farpool.tiers import Leased
from tests.chaos.journal import Journal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CALL_S", "COPIES", "NEEDED", "value_of"]

CALL_S = 2.0
"""Time limit of each call of a store, in seconds."""
COPIES = 2
NEEDED = {
    "objects": ("put", "get"),
    "names": ("publish", "open"),
    "memory": ("change", "compare"),
    "loans": ("write", "read"),
}
"""Calls with which each kind of program shows that it works."""
_LIVE = 150
"""Objects that a program keeps; it drops older ones."""
_LARGEST = 24_000
_POOL_S = 10.0
_FINISH_S = 60.0
_FAST = "1MiB"
_TENSORS, _NUMBERS = 10, 40_001
ResultT = TypeVar("ResultT")


def value_of(key: str) -> bytes:
    """Return the value of a key."""
    chance = random.Random(key)
    return chance.randbytes(chance.randrange(1, _LARGEST))


def digest_of(value: bytes | None) -> str:
    """Return a short digest of a value; empty for none."""
    return "" if value is None else hashlib.sha256(value).hexdigest()[:16]


class Program:
    """What all kinds have in common.

    Parameters
    ----------
    journal : Journal
        The program's journal.
    name : str
        Name of this process, different for each life.
    """

    def __init__(self, journal: Journal, name: str) -> None:
        self.journal = journal
        self.name = name
        self.chance = random.Random(name)
        self.is_ending = threading.Event()

    def run(self) -> None:
        """Work until `is_ending` is set."""
        raise NotImplementedError

    def open_store(self) -> Store | None:
        """Return a store, when the registry has answered; None if the program ends before that."""
        while not self.is_ending.is_set():
            with self.journal.call("start", CALL_S):
                return Store(os.environ["CHAOS_REGISTRY"], replicas=COPIES, timeout=CALL_S, transport="tcp")
            self.pause(0.2)
        return None

    def pause(self, seconds: float) -> None:
        """Wait, or less long if the program ends."""
        self.is_ending.wait(seconds)


class ObjectsProgram(Program):
    """Puts objects, keeps them, reads them, and drops the oldest."""

    def run(self) -> None:
        store = self.open_store()
        if store is None:
            return
        live: list[str] = []
        with store:
            for number in range(1 << 30):
                if self.is_ending.is_set():
                    return
                self._put(store, f"{self.name}/{number}", live)
                for _ in range(2):
                    self._read(store, live)
                if len(live) > _LIVE:
                    key = live.pop(0)
                    with self.journal.call("drop", CALL_S, key):
                        store.drop(key)
                self.pause(0.02)

    def _put(self, store: Store, key: str, live: list[str]) -> None:
        with self.journal.call("put", CALL_S, key) as call:
            store.put(key, value_of(key))
        # Until it is kept, a node that is full may evict it.
        for _ in range(200):
            if call.error or self.is_ending.is_set():
                return
            with self.journal.call("keep", CALL_S, key) as kept:
                kept.value = str(store.touch(key, None, keep=True))
            if kept.is_done:
                if kept.value == "True":  # a full node may have evicted it before
                    live.append(key)
                return
            self.pause(0.1)

    def _read(self, store: Store, live: Sequence[str]) -> None:
        if not live:
            return
        if self.chance.random() < 0.1:
            keys = self.chance.sample(live, min(20, len(live)))
            with self.journal.call("lookup", CALL_S, " ".join(keys)) as call:
                call.value = " ".join(str(int(size is not None)) for size in store.lookup(keys).sizes)
        else:
            key = self.chance.choice(live)
            with self.journal.call("get", CALL_S, key) as call:
                call.value = digest_of(store.get(key))


class NamesProgram(Program):
    """Publishes versions of a name, and opens it."""

    def run(self) -> None:
        store = self.open_store()
        if store is None:
            return
        name = f"models/{self.name.partition('.')[0]}"
        with store:
            for number in range(1 << 30):
                if self.is_ending.is_set():
                    return
                key = f"{self.name}/{number}"
                with self.journal.call("publish", 3 * CALL_S, name) as call:
                    call.value = f"{store.publish(name, value_of(key)).version} {digest_of(value_of(key))}"
                with self.journal.call("open", 3 * CALL_S, name) as call, store.open(name) as opened:
                    call.value = f"{opened.info.version} {digest_of(opened.read())}"
                self.pause(0.1)


class _LeaseLostError(Exception):
    """The memory of a lease is gone."""


class LeasingProgram(Program):
    """What programs with leased memory have in common."""

    def run(self) -> None:
        import torch  # noqa: F401 - its import takes longer than the calls below may take

        while not self.is_ending.is_set():
            tier = Leased(os.environ["CHAOS_POOL"], size=self.size(), transport="tcp", timeout=CALL_S)
            with contextlib.suppress(_LeaseLostError):
                self.use(tier)
            self.pause(0.2)

    def size(self) -> int:
        """Return the bytes of the next lease."""
        raise NotImplementedError

    def use(self, tier: Leased) -> None:
        """Open the tier, work in its memory, and close it."""
        raise NotImplementedError

    def until_done(self, do: str, tier: Leased, act: Callable[[], ResultT]) -> ResultT:
        """Return the result of an operation, which is tried until it works: an operation that failed changed nothing.

        Raises
        ------
        _LeaseLostError
            The bytes are lost.
        """
        deadline = math.inf
        while True:
            with self.journal.call(do, 3 * _POOL_S, tier.lease) as call:
                return act()
            lost = [note for note in tier.notes if "lost" in note]
            if lost:
                with self.journal.call("lost", 0.0, tier.lease, "; ".join(lost)):
                    pass
                raise _LeaseLostError
            # A program that is to end waits until its operation works, but not for ever.
            if self.is_ending.is_set():
                deadline = min(deadline, time.monotonic() + _FINISH_S)
            if time.monotonic() > deadline:
                raise AssertionError(f"{do} still fails: {call.error}")
            self.pause(0.1)

    def require(self, is_equal: bool, tier: Leased, what: str) -> None:
        """Record a comparison that found other bits."""
        if not is_equal:
            with self.journal.call("wrong", 0.0, tier.lease, what):
                pass


class MemoryProgram(LeasingProgram):
    """Computes on tensors of a pool in leased memory and on plain copies of them, and compares all bits."""

    def size(self) -> int:
        return 12 << 20

    def use(self, tier: Leased) -> None:
        with self.journal.call("lease", 2 * _POOL_S) as call:
            pool = Pool(_FAST, [tier], timeout=_POOL_S)
            call.key = tier.lease
        if call.error:
            return
        try:
            self._compute(tier, pool)
        finally:
            with self.journal.call("close", 2 * _POOL_S, tier.lease):
                pool.close()

    def _compute(self, tier: Leased, pool: Pool) -> None:
        """Work for a while, or until the program ends."""
        import torch

        plain = [torch.full((_NUMBERS,), float(one)) for one in range(_TENSORS)]
        paged = [self.until_done("fill", tier, partial(pool.full, (_NUMBERS,), float(one))) for one in range(_TENSORS)]
        for _ in range(self.chance.choice((50, 200, 1000))):
            if self.is_ending.is_set():
                break
            one, other = self.chance.sample(range(_TENSORS), 2)
            if self.chance.random() < 0.5:
                self.until_done("change", tier, partial(paged[one].add_, paged[other], alpha=0.25))
                plain[one].add_(plain[other], alpha=0.25)
            else:
                self._compare(tier, paged, plain, one)
            self.pause(0.03)
        for one in range(_TENSORS):
            self._compare(tier, paged, plain, one)
        paged.clear()

    def _compare(self, tier: Leased, paged: list[Tensor], plain: list[Tensor], one: int) -> None:
        import torch

        is_equal = self.until_done("compare", tier, partial(torch.equal, paged[one], plain[one]))
        self.require(is_equal, tier, f"tensor {one}")


class LoansProgram(LeasingProgram):
    """Takes leases of different sizes for a moment, writes all their bytes, reads them again, and ends them."""

    def size(self) -> int:
        return self.chance.randrange(1, 9) << 20

    def use(self, tier: Leased) -> None:
        with self.journal.call("lease", 2 * _POOL_S) as call:
            tier.open()
            call.key = tier.lease
        if call.error:
            return
        try:
            nbytes = tier.leased
            extent, data = tier.reserve(nbytes), self.chance.randbytes(nbytes)
            self.until_done("write", tier, partial(tier.write_from, extent, memoryview(data)))
            self.pause(self.chance.uniform(0.0, 2.0))
            found = bytearray(nbytes)
            self.until_done("read", tier, partial(tier.read_into, extent, memoryview(found)))
            self.require(found == data, tier, f"{nbytes} bytes")
        finally:
            with self.journal.call("close", 2 * _POOL_S, tier.lease):
                tier.close()


KINDS = {"objects": ObjectsProgram, "names": NamesProgram, "memory": MemoryProgram, "loans": LoansProgram}


def main(kind: str, path: str, life: str) -> None:
    """Work until SIGTERM. In the end the journal has the call ``end``."""
    journal = Journal(Path(path), int(life))
    program = KINDS[kind](journal, f"{Path(path).stem}.{life}")
    signal.signal(signal.SIGTERM, lambda *_: program.is_ending.set())
    program.run()
    with journal.call("end", 0.0):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
