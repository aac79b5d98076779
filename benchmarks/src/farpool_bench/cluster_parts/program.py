"""Program that puts objects into a pool and reads them all the time; the parts `join` and `repair` run it.

With the arguments ``REGISTRY OBJECTS NBYTES`` it puts this many objects with two copies each, prints ``ready``, and
goes on until its standard input ends. One request in ten puts a new object, unless a fourth argument is ``read``. For
each line on its standard input it prints ``window`` and one JSON object about the requests since the last line: the
number of gets and puts, their times, and how many gets have failed.
"""

from __future__ import annotations

import random
import select
import sys
import time
from collections import deque

import msgspec

from farpool.cluster.store import Store
from farpool.errors import FarpoolError
from farpool_bench.measure import quantile

_KEPT = 50
"""New objects that are read, too, before they are dropped."""
_PUT_EVERY = 10
_TIMEOUT_S = 30.0


class _Program:
    """The objects and the requests of the program."""

    def __init__(self, registry: str, objects: int, nbytes: int) -> None:
        self._store = Store(registry, replicas=2, timeout=_TIMEOUT_S, transport="tcp")
        self._random = random.Random(0)
        self._value = self._random.randbytes(nbytes)
        self._keys = [b"kept %d" % number for number in range(objects)]
        self._new: deque[bytes] = deque()
        self._number = 0
        for key in self._keys:
            self._store.put(key, self._value)
        self.forget()

    def forget(self) -> None:
        """Begin with a new window."""
        self._gets: list[float] = []
        self._puts: list[float] = []
        self._failed = 0
        self._since = time.perf_counter()

    def window(self) -> dict[str, float]:
        """Describe the requests since `forget`."""
        seconds = time.perf_counter() - self._since
        return {
            "seconds": seconds,
            "gets": len(self._gets),
            "puts": len(self._puts),
            "failed": self._failed,
            "get_p99": quantile(self._gets, 0.99) if self._gets else seconds,
            "put_p99": quantile(self._puts, 0.99) if self._puts else seconds,
        }

    def get(self) -> None:
        """Get one object and check its bytes."""
        key = self._random.choice(self._random.choice((self._keys, self._new or self._keys)))
        start = time.perf_counter()
        try:
            found = self._store.get(key)
        except FarpoolError:
            found = None
        self._gets.append(time.perf_counter() - start)
        self._failed += found != self._value

    def put(self) -> None:
        """Put a new object, and drop the oldest one."""
        key = b"new %d" % self._number
        self._number += 1
        start = time.perf_counter()
        self._store.put(key, self._value)
        self._puts.append(time.perf_counter() - start)
        self._new.append(key)
        if len(self._new) > _KEPT:
            self._store.drop(self._new.popleft())


def main(registry: str, objects: str, nbytes: str, only: str = "") -> None:
    """Put objects and read them."""
    program = _Program(registry, int(objects), int(nbytes))
    print("ready", flush=True)
    requests = 0
    while True:
        if select.select([0], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print(f"window {msgspec.json.encode(program.window()).decode()}", flush=True)
            program.forget()
        requests += 1
        if only != "read" and requests % _PUT_EVERY == 0:
            program.put()
        else:
            program.get()
