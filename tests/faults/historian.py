"""A client that does many operations on shared keys and notes what it did (history.Event): a thread, or a program."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from farpool.cluster.store import Store
from farpool.errors import FarpoolError
from tests.faults.history import Event

__all__ = ["Historian"]

_NAME_BYTES = 64


class Historian:
    """One client.

    Parameters
    ----------
    store : Store
        What it works with.
    keys : sequence of str
        What it puts and reads. Every second one is dropped at times, the others never are.
    seed : str
        Of all choices; no two clients have the same.
    largest : int
        Bytes of the largest values, about.
    drops : int
        How often it drops, of about 100 operations.
    calm : bool
        No node is ever away, so that a drop that returns has reached all.

    Attributes
    ----------
    events : list of Event
        What it did.
    stopping : threading.Event
        Once set, `run` returns.
    """

    def __init__(
        self, store: Store, keys: Sequence[str], seed: str, *, largest: int, drops: int, calm: bool = True
    ) -> None:
        self.events: list[Event] = []
        self.stopping = threading.Event()
        self._store = store
        self._keys = keys
        self._seed = seed
        self._random = random.Random(seed)
        self._noise = self._random.randbytes(largest)
        self._sizes = [0, 100, 5000, largest]
        self._number = 0
        self._buffer = bytearray(largest + _NAME_BYTES)
        self._calm = calm
        self._acts: dict[Callable[[], None], int] = {
            self.put: 35, self.drop: drops, self.get: 30, self.get_into: 12, self.pin: 8, self.get_many: 5,
            self.put_many: 3, self.lookup: 4,
        }  # fmt: skip

    def run(self, operations: float = float("inf")) -> None:
        """Do so many operations, or go on until told to stop."""
        acts, weights = list(self._acts), list(self._acts.values())
        done = 0
        while done < operations and not self.stopping.is_set():
            self._random.choices(acts, weights)[0]()
            done += 1

    def put(self) -> None:
        key, (value, name) = self._random.choice(self._keys), self._value()
        with self._noting("put", [key], [name]):
            self._store.put(key, value)

    def put_many(self) -> None:
        keys = self._random.sample(self._keys, 3)
        values = [self._value() for _ in keys]
        with self._noting("put", keys, [name for _, name in values]):
            self._store.put_many([(key, value) for key, (value, _) in zip(keys, values, strict=True)])

    def drop(self) -> None:
        key = self._random.choice(self._keys[::2])
        with self._noting("drop", [key], [None]):
            self._store.drop(key)

    def get(self) -> None:
        key = self._random.choice(self._keys)
        with self._noting("read", [key]) as names:
            names.append(_named(self._store.get(key)))

    def get_many(self) -> None:
        keys = self._random.sample(self._keys, 4)
        with self._noting("read", keys) as names:
            names += map(_named, self._store.get_many(keys))

    def get_into(self) -> None:
        key = self._random.choice(self._keys)
        with self._noting("read", [key]) as names:
            nbytes = self._store.get_into(key, self._buffer)
            names.append(None if nbytes is None else _named(memoryview(self._buffer)[:nbytes]))

    def lookup(self) -> None:
        """Only what is missing says something."""
        keys = self._random.sample(self._keys, 4)
        with self._noting("read", keys) as names:
            found = self._store.lookup(keys).found
            keys[:] = [key for key, there in zip(keys, found, strict=True) if not there]
            names += [None] * len(keys)

    def pin(self) -> None:
        key, pin = self._random.choice(self._keys), None
        with self._noting("read", [key]) as names:
            try:
                pin = self._store.pin(key)
            except KeyError:
                names.append(None)
        if pin is None:
            return
        began, ended = self._began, self._ended
        with pin:
            pin.verify()
            name = _named(pin.view)
            # It stays what it is for as long as it is held.
            time.sleep(self._random.choice([0, 0.002]))
            pin.verify()
            assert _named(pin.view) == name, "a pinned object has changed"
        self.events.append(Event("read", key, began, ended, name))

    def read_all(self) -> None:
        """Read each key once."""
        for key in self._keys:
            with self._noting("read", [key]) as names:
                names.append(_named(self._store.get(key)))

    @contextmanager
    def _noting(self, kind: str, keys: list[str], values: Sequence[str | None] = ()) -> Iterator[list[str | None]]:
        """Note what the block does to keys; of a read the names that it appends."""
        names = list(values)
        self._began = time.monotonic()
        confirmed = kind != "drop" or self._calm
        failure = None
        try:
            yield names
        except FarpoolError as error:
            failure, confirmed = f"{type(error).__name__}: {error}", False
        self._ended = time.monotonic()
        if failure is not None:
            self.events.append(Event("error", keys[0], self._began, self._ended, failure))
        if kind != "read" or failure is None:
            for key, name in zip(keys, names, strict=False):
                self.events.append(Event(kind, key, self._began, self._ended, name, confirmed))

    def _value(self) -> tuple[bytes, str]:
        self._number += 1
        nbytes = self._random.choice(self._sizes)
        at = self._random.randrange(len(self._noise) - nbytes + 1)
        value = f"{self._seed} {self._number} ".encode().ljust(_NAME_BYTES) + self._noise[at : at + nbytes]
        return value, str(_named(value))


def _named(value: bytes | memoryview | None) -> str | None:
    """A value's name and checksum."""
    if value is None:
        return None
    name = bytes(value[:_NAME_BYTES]).decode(errors="replace").strip()
    return f"{name} {len(value)} {zlib.crc32(value):08x}"


def main(settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Work as the settings say; what was done."""
    operations, of_store = settings.pop("operations"), settings.pop("store")
    nodes = of_store.pop("nodes")
    with Store(*nodes, timeout=60.0, **of_store) as store:
        client = Historian(store, **settings)
        client.run(operations)
    return [(e.kind, e.key, e.began, e.ended, e.value, e.confirmed) for e in client.events]


if __name__ == "__main__":
    json.dump(main(json.loads(sys.argv[1])), sys.stdout)
