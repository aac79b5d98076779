"""Worker processes of Mooncake Store: one lends a segment, another puts and gets objects.

``lend MASTER BYTES`` prints ``ready`` and lends until its standard input ends. ``use MASTER`` prints ``ready``, and
then, for each line ``put|get|find NBYTES COUNT BATCH SECONDS`` on its standard input, the seconds that an object took;
of ``find`` those that a call took which asks for all keys.
Objects go from and to memory that is registered, one in a call (batch 1) or several: its fast ways.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from farpool.errors import FarpoolError
from farpool_bench.users import Ring, User, serve

_BUFFER = 16 << 20


class _MooncakeUser(User):
    """A client of Mooncake. No key can be put again, so that each pass has keys of its own."""

    gets_what_is_there = True

    def __init__(self, store: Any, ring: Ring) -> None:
        super().__init__("Mooncake", ring)
        self._store = store
        # A registered range must not move or end while it is in use: sources are copied into memory of the ring's kind.
        self._source = Ring(ring.nbytes, len(ring))
        for buffer, payload in zip(self._source.buffers, self._source.payloads, strict=True):
            buffer[:] = payload
        for address in (*ring.addresses, *self._source.addresses):
            if store.register_buffer(address, ring.nbytes) != 0:
                raise SystemExit("register_buffer failed")
        self._pass = 0
        self._keys: list[str] = []

    def remove(self) -> None:
        if self._keys:
            self._store.batch_remove(self._keys, True)
        self._pass += 1
        self._keys = [f"{key}/{self._pass}" for key in self.ring.keys]

    def put(self, part: slice) -> None:
        self._move(self._store.put_from, self._store.batch_put_from, self._source.addresses, part, 0)

    def get(self, part: slice) -> None:
        self._move(self._store.get_into, self._store.batch_get_into, self.ring.addresses, part, self.ring.nbytes)

    def find(self) -> int:
        return sum(code == 1 for code in self._store.batch_is_exist(self._keys))

    def close(self) -> None:
        self._store.remove_all(True)
        for address in (*self.ring.addresses, *self._source.addresses):
            self._store.unregister_buffer(address)

    def _move(self, one: Any, many: Any, addresses: list[int], part: slice, expected: int) -> None:
        keys, places, nbytes = self._keys[part], addresses[part], self.ring.nbytes
        codes = [one(keys[0], places[0], nbytes)] if len(keys) == 1 else many(keys, places, [nbytes] * len(keys))
        if any(code != expected for code in codes):
            raise FarpoolError(f"an object was not moved: codes {sorted(set(codes))}, expected {expected}")


def main(role: str, master: str, lent: str = "0") -> None:
    """Lend a segment, or put and get objects, until the standard input ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(lent), _BUFFER, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup failed with code {code}")
    if role == "lend":
        print("ready", flush=True)
        sys.stdin.read()
    else:
        serve(partial(_MooncakeUser, store))
    store.close()
