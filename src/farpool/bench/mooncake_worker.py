"""Worker processes of Mooncake Store: one lends a segment, another puts and gets objects.

``lend MASTER BYTES`` prints ``ready`` and lends until its standard input ends. ``use MASTER`` prints ``ready``, and
then, for each line ``put|get|find NBYTES COUNT BATCH SECONDS`` on its standard input, the seconds that an object took;
of ``find`` those that a call took which asks for all keys.
Objects go from and to memory that is registered, one in a call (batch 1) or several: its fast ways.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from farpool.bench.ring import Ring, seconds_each

__all__ = ["main"]

_BUFFER = 16 << 20


def _open(master: str, lent: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", lent, _BUFFER, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup failed with code {code}")
    return store


class _User:
    """A client of Mooncake that puts and gets the objects of a ring."""

    def __init__(self, store: Any, ring: Ring) -> None:
        self._store = store
        self._ring = ring
        # A registered range must not move or end while it is in use: sources are copied into memory of the ring's kind.
        self._source = Ring(ring.nbytes, len(ring))
        for buffer, payload in zip(self._source.buffers, self._source.payloads, strict=True):
            buffer[:] = payload
        for address in (*ring.addresses, *self._source.addresses):
            if store.register_buffer(address, ring.nbytes) != 0:
                raise SystemExit("register_buffer failed")
        self._pass = 0
        self._keys: list[str] = []

    def seconds_each(self, write: bool, batch: int, seconds: float) -> float:
        """Seconds per object, in passes over the ring of which the first does not count."""
        self._put(batch)
        self._read_back()
        taken, passes = 0.0, -1
        while taken < seconds or passes < 1:
            elapsed = self._put(batch) if write else self._get(batch)
            passes += 1
            taken = 0.0 if passes == 0 else taken + elapsed
        if write:
            self._read_back()
        else:
            self._ring.check("Mooncake")
        return taken / (passes * len(self._ring))

    def lookup_seconds(self, seconds: float) -> float:
        """Seconds for one call that asks for all keys."""
        self._put(1)
        found: list[int] = []

        def work() -> None:
            found[:] = self._store.batch_is_exist(self._keys)

        taken = seconds_each(work, 1, seconds)
        if found != [1] * len(self._keys):
            raise SystemExit(f"an object that was put is missing: codes {sorted(set(found))}, expected 1")
        return taken

    def close(self) -> None:
        """Remove all objects and unregister the buffers."""
        self._store.remove_all(True)
        for address in (*self._ring.addresses, *self._source.addresses):
            self._store.unregister_buffer(address)

    def _put(self, batch: int) -> float:
        """Seconds to put all objects under new keys (none can be put again); the old objects are removed before."""
        if self._keys:
            self._store.batch_remove(self._keys, True)
        self._pass += 1
        self._keys = [f"{key}/{self._pass}" for key in self._ring.keys]
        return self._timed(self._store.put_from, self._store.batch_put_from, self._source.addresses, batch, 0)

    def _get(self, batch: int) -> float:
        expected = self._ring.nbytes
        return self._timed(self._store.get_into, self._store.batch_get_into, self._ring.addresses, batch, expected)

    def _timed(
        self, one: Callable[..., int], many: Callable[..., list[int]], addresses: list[int], batch: int, expected: int
    ) -> float:
        nbytes, codes = self._ring.nbytes, []
        start = time.perf_counter()
        if batch == 1:
            codes = [one(key, address, nbytes) for key, address in zip(self._keys, addresses, strict=True)]
        else:
            for at in range(0, len(self._keys), batch):
                part = slice(at, at + batch)
                codes += many(self._keys[part], addresses[part], [nbytes] * len(addresses[part]))
        elapsed = time.perf_counter() - start
        if any(code != expected for code in codes):
            raise SystemExit(f"an object was not moved: codes {sorted(set(codes))}, expected {expected}")
        return elapsed

    def _read_back(self) -> None:
        self._ring.wipe()
        self._get(1)
        self._ring.check("Mooncake")


def main(arguments: list[str]) -> None:
    """Lend a segment, or put and get objects, until the standard input ends."""
    role, master, *rest = arguments
    store = _open(master, int(rest[0]) if role == "lend" else 0)
    print("ready", flush=True)
    user: _User | None = None
    shape = (0, 0)
    for line in sys.stdin:
        kind, *numbers, seconds = line.split()
        nbytes, count, batch = map(int, numbers)
        if user is None or shape != (nbytes, count):
            if user is not None:
                user.close()
            shape = (nbytes, count)
            user = _User(store, Ring(nbytes, count))
        if kind == "find":
            taken = user.lookup_seconds(float(seconds))
        else:
            taken = user.seconds_each(kind == "put", batch, float(seconds))
        print(f"seconds {taken!r}", flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
