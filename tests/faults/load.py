"""Clients that put, get and delete without a pause, and notice what they must not see."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from farpool.errors import FarpoolError
from farpool.store import Store

__all__ = ["Client", "Ledger", "OwnKey"]

_SIZES = [100, 3000, 60_000]


@dataclass
class OwnKey:
    """A key that one client writes.

    Attributes
    ----------
    allowed : set
        What a read may give: what was confirmed last, and what was tried since. None is no value.
    began : float
        When the oldest of these was put.
    """

    name: str
    allowed: set[bytes | None] = field(default_factory=lambda: {None})
    began: float = 0.0


class Ledger:
    """What all clients share: everything that was ever published, and what went wrong."""

    def __init__(self) -> None:
        self.published: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        self.wrong: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def publishing(self, key: str, value: bytes) -> None:
        self.published[key].add((len(value), zlib.crc32(value)))

    def was_published(self, key: str, value: bytes) -> bool:
        return (len(value), zlib.crc32(value)) in self.published[key]

    def note(self, act: str, outcome: str, seconds: float) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            self.slowest[act] = max(self.slowest[act], seconds)


class Client:
    """Works in a thread of its own until told to stop."""

    def __init__(self, number: int, store: Store, seed: str, others: list[str], ledger: Ledger) -> None:
        self.thread = threading.Thread(target=self._work, name=f"client-{number}")
        self.keys = [OwnKey(f"client {number} key {one}") for one in range(6)]
        self.stopping = threading.Event()
        self._random = random.Random(f"{seed} client {number}")
        self._noise = self._random.randbytes(max(_SIZES))
        self._store = store
        self._others = others
        self._ledger = ledger

    def _work(self) -> None:
        acts = [self._put, self._get, self._get_other, self._delete, self._pin, self._put_many, self._get_many]
        while not self.stopping.is_set():
            act = self._random.choices(acts, [30, 25, 20, 8, 5, 5, 7])[0]
            began = time.monotonic()
            try:
                act()
            except FarpoolError as error:
                outcome = type(error).__name__
            except BaseException as error:
                outcome = f"not a farpool error: {error!r}"
                self._ledger.wrong.append(f"{act.__name__}: {outcome}")
            else:
                outcome = act.__name__.strip("_")
            self._ledger.note(act.__name__.strip("_"), outcome, time.monotonic() - began)

    def _value(self, key: OwnKey) -> bytes:
        nbytes = self._random.choice(_SIZES)
        at = self._random.randrange(len(self._noise) - nbytes + 1)
        value = key.name.encode() + self._noise[at : at + nbytes] + self._random.randbytes(16)
        self._ledger.publishing(key.name, value)
        return value

    def _put(self) -> None:
        key = self._random.choice(self.keys)
        value, began = self._value(key), time.monotonic()
        key.allowed.add(value)
        self._store.put(key.name, value)
        key.allowed, key.began = {value}, began

    def _put_many(self) -> None:
        keys = self._random.sample(self.keys, 3)
        values, began = [self._value(key) for key in keys], time.monotonic()
        for key, value in zip(keys, values, strict=True):
            key.allowed.add(value)
        self._store.put_many([(key.name, value) for key, value in zip(keys, values, strict=True)])
        for key, value in zip(keys, values, strict=True):
            key.allowed, key.began = {value}, began

    def _delete(self) -> None:
        key = self._random.choice(self.keys)
        key.allowed.add(None)
        self._store.delete(key.name)
        key.allowed = {None}

    def _get(self) -> None:
        key = self._random.choice(self.keys)
        self.check(key, self._store.get(key.name))

    def _get_many(self) -> None:
        for key, value in zip(self.keys, self._store.get_many([key.name for key in self.keys]), strict=True):
            self.check(key, value)

    def _pin(self) -> None:
        key = self._random.choice(self.keys)
        try:
            with self._store.pin(key.name) as pin:
                self.check(key, bytes(pin.view))
        except KeyError:
            pass

    def _get_other(self) -> None:
        key = self._random.choice(self._others)
        value = self._store.get(key)
        if value is not None and not self._ledger.was_published(key, value):
            self._ledger.wrong.append(f"{key!r}: {len(value)} bytes that nobody published")

    def check(self, key: OwnKey, value: bytes | None) -> None:
        """A value that was read of a key of this client's own."""
        if value is not None and value not in key.allowed:
            kind = "replaced or deleted" if self._ledger.was_published(key.name, value) else "never published"
            self._ledger.wrong.append(f"{key.name!r}: {len(value)} bytes that were {kind}")
