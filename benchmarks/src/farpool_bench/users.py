"""Objects that benchmarks move, and users of a store, which are timed in the same way for farpool and its peers."""

from __future__ import annotations

import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from farpool._native import Memory
from farpool.closing import Closing
from farpool.errors import FarpoolError
from farpool.sizes import format_size
from farpool_bench.measure import median_call, warm

_ALIGNMENT = 4096


class Ring:
    """A set of objects of one size with random payloads by seed, and buffers to read them into.

    `payloads` are their contents; `buffers` is page-aligned memory to read them into, at `addresses`.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        source = random.Random(nbytes)
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = nbytes
        self.keys = [f"bench/{nbytes}/{index}" for index in range(count)]
        self.payloads = [source.randbytes(nbytes) for _ in range(count)]
        self._memory = Memory(stride * count)
        self._memory.touch()
        whole = memoryview(self._memory)
        self.buffers = [whole[index * stride :][:nbytes] for index in range(count)]
        self.addresses = [self._memory.address + index * stride for index in range(count)]

    def __len__(self) -> int:
        return len(self.keys)

    def wipe(self) -> None:
        """Clear a byte of each page of the buffers, so that an earlier read's bytes cannot pass for this one's."""
        warm(memoryview(self._memory))

    def check(self, who: str, read: Sequence[bytes | None] | None = None) -> None:
        """Raise FarpoolError, with the name `who`, unless the buffers, or `read`, have the bytes written."""
        found = [bytes(buffer) for buffer in self.buffers] if read is None else read
        for key, payload, got in zip(self.keys, self.payloads, found, strict=True):
            if got != payload:
                raise FarpoolError(f"{who}: object {key!r} of {format_size(self.nbytes)} was read with other bytes")


class User(Closing, ABC):
    """A user of a store that moves the objects of a ring, in calls with one or several.

    `name`: name of the store, for messages. `ring`: the objects, which are read into the ring's own buffers.
    """

    gets_what_is_there: ClassVar[bool] = False
    """True if a call that gets many objects reports which are missing, so that it needs no lookup before it."""
    values: list[Any] | None = None
    """The objects of the ring that were got last, by a user that does not read them into the ring's buffers."""

    def __init__(self, name: str, ring: Ring) -> None:
        self.name = name
        self.ring = ring

    @abstractmethod
    def remove(self) -> None:
        """Remove all objects, or go over to new keys, off the clock."""

    @abstractmethod
    def put(self, part: slice) -> None:
        """Put these objects of the ring; FarpoolError if one was not stored."""

    @abstractmethod
    def get(self, part: slice) -> None:
        """Get these objects of the ring into their buffers; FarpoolError if one was not read."""

    @abstractmethod
    def find(self) -> int:
        """Look up all keys in one call; return how many are there."""

    def close(self) -> None:
        """Let go of everything."""
        self.remove()

    def keep(self, part: slice, found: list[Any]) -> None:
        """Keep these objects of the ring in `values`."""
        self.values = self.values or [None] * len(self.ring)
        self.values[part] = found

    def seconds_each(self, write: bool, batch: int, seconds: float) -> float:
        """Seconds per object, `batch` of them in a call, in passes over the ring of which the first does not count."""
        self._put(batch)
        self._read_back(batch)
        taken, passes = 0.0, -1
        while taken < seconds or passes < 1:
            elapsed = self._put(batch) if write else self._timed(self.get, batch)
            passes += 1
            taken = 0.0 if passes == 0 else taken + elapsed
        if write:
            self._read_back(batch)
        else:
            self.ring.check(self.name, self.values)
        return taken / (passes * len(self.ring))

    def lookup_seconds(self, seconds: float) -> float:
        """Seconds of a call that looks up all keys, in the median."""
        self._put(len(self.ring))
        found: list[int] = []
        taken = median_call(lambda: found.append(self.find()), seconds)
        self._check_found(found[-1])
        return taken

    def fetch_seconds(self) -> float:
        """Seconds of one call that gets all objects, and of the lookup before it if this user needs one.

        No call before it is left uncounted: a program pays all of this time after it has computed something else.
        """
        self.ring.wipe()
        start = time.perf_counter()
        found = len(self.ring) if self.gets_what_is_there else self.find()
        self.get(slice(None))
        taken = time.perf_counter() - start
        self._check_found(found)
        self.ring.check(self.name, self.values)
        return taken

    def _check_found(self, found: int) -> None:
        if found != len(self.ring):
            raise FarpoolError(f"{self.name}: {found} of {len(self.ring)} objects that were put are there")

    def _put(self, batch: int) -> float:
        self.remove()
        return self._timed(self.put, batch)

    def _read_back(self, batch: int) -> None:
        self.ring.wipe()
        self._timed(self.get, batch)
        self.ring.check(self.name, self.values)

    def _timed(self, work: Callable[[slice], None], batch: int) -> float:
        parts = [slice(at, at + batch) for at in range(0, len(self.ring), batch)]
        start = time.perf_counter()
        for part in parts:
            work(part)
        return time.perf_counter() - start


def serve(make: Callable[[Ring], User]) -> None:
    """Answer lines ``put|get|find|fetch NBYTES COUNT BATCH SECONDS`` with seconds, until the standard input ends."""
    print("ready", flush=True)
    user: User | None = None
    for line in sys.stdin:
        kind, *numbers, seconds = line.split()
        nbytes, count, batch = map(int, numbers)
        if user is None or (user.ring.nbytes, len(user.ring)) != (nbytes, count):
            if user is not None:
                user.close()
            user = make(Ring(nbytes, count))
        try:
            if kind in ("put", "get"):
                taken = user.seconds_each(kind == "put", batch, float(seconds))
            else:
                taken = user.lookup_seconds(float(seconds)) if kind == "find" else user.fetch_seconds()
        except FarpoolError as error:
            raise SystemExit(str(error)) from error
        print(f"seconds {taken!r}", flush=True)
