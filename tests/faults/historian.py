"""A program that does many operations on shared keys and prints what it did (history.Event)."""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from typing import Any

from farpool.errors import FarpoolError
from farpool.store import Store

_NAME_BYTES = 64


class Historian:
    """One program; `settings` come from the test."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._random = random.Random(settings["seed"])
        self._noise = self._random.randbytes(settings["largest"])
        self._events: list[tuple[Any, ...]] = []
        self._number = 0
        self._store = Store(
            *settings["nodes"], replicas=settings["replicas"], timeout=60.0, transport=settings["transport"]
        )
        self._buffer = bytearray(settings["largest"] + _NAME_BYTES)

    def run(self) -> list[tuple[Any, ...]]:
        """Publish, read and delete; so many operations as the settings say."""
        chances = {self.put: 35, self.delete: self._settings["deletes"], self.get: 30, self.get_into: 12, self.pin: 8}
        chances |= {self.get_many: 5, self.put_many: 3}
        acts, weights = list(chances), list(chances.values())
        for _ in range(self._settings["operations"]):
            self._random.choices(acts, weights)[0]()
        self._store.close()
        return self._events

    def put(self) -> None:
        key, value, name = self._key(), *self._value()
        began, generation, confirmed = time.monotonic(), 0, False
        try:
            generation, confirmed = self._store.put(key, value), True
        except FarpoolError as error:
            self._failed(key, began, error)
        self._note("put", key, began, name, generation, confirmed)

    def put_many(self) -> None:
        keys = self._random.sample(self._settings["keys"], 3)
        values = [self._value() for _ in keys]
        began = time.monotonic()
        try:
            generations = self._store.put_many({key: value for key, (value, _) in zip(keys, values, strict=True)})
        except FarpoolError as error:
            self._failed(keys[0], began, error)
            generations = []
        for number, (key, (_, name)) in enumerate(zip(keys, values, strict=True)):
            self._note("put", key, began, name, generations[number] if generations else 0, bool(generations))

    def delete(self) -> None:
        key, began, confirmed = self._key(), time.monotonic(), False
        try:
            self._store.delete(key)
            confirmed = True
        except FarpoolError as error:
            self._failed(key, began, error)
        self._note("delete", key, began, None, 0, confirmed)

    def get(self) -> None:
        key, began = self._key(), time.monotonic()
        try:
            value = self._store.get(key)
        except FarpoolError as error:
            return self._failed(key, began, error)
        self._note("read", key, began, None if value is None else _named(value))

    def get_many(self) -> None:
        keys = self._random.sample(self._settings["keys"], 4)
        began = time.monotonic()
        try:
            values = self._store.get_many(keys)
        except FarpoolError as error:
            return self._failed(keys[0], began, error)
        for key, value in zip(keys, values, strict=True):
            self._note("read", key, began, None if value is None else _named(value))

    def get_into(self) -> None:
        key, began = self._key(), time.monotonic()
        try:
            nbytes = self._store.get_into(key, self._buffer)
        except FarpoolError as error:
            return self._failed(key, began, error)
        self._note("read", key, began, None if nbytes is None else _named(bytes(self._buffer[:nbytes])))

    def pin(self) -> None:
        key, began = self._key(), time.monotonic()
        try:
            with self._store.pin(key) as pin:
                ended = time.monotonic()
                pin.verify()
                name = _named(bytes(pin.view))
                # It stays what it is for as long as it is held.
                time.sleep(self._random.choice([0, 0.002]))
                pin.verify()
                assert _named(bytes(pin.view)) == name, "a pinned object has changed"
                self._events.append(("read", key, began, ended, name, pin.generation, True))
        except KeyError:
            self._note("read", key, began, None)
        except FarpoolError as error:
            return self._failed(key, began, error)

    def _failed(self, key: str, began: float, error: FarpoolError) -> None:
        self._note("error", key, began, f"{type(error).__name__}: {error}")

    def _key(self) -> str:
        key: str = self._random.choice(self._settings["keys"])
        return key

    def _value(self) -> tuple[bytes, str]:
        self._number += 1
        nbytes = self._random.choice([0, 100, 5000, self._settings["largest"]])
        at = self._random.randrange(len(self._noise) - nbytes + 1)
        value = f"{self._settings['seed']} {self._number} ".encode().ljust(_NAME_BYTES) + self._noise[at : at + nbytes]
        return value, _named(value)

    def _note(
        self, kind: str, key: str, began: float, value: str | None, generation: int = 0, confirmed: bool = True
    ) -> None:
        self._events.append((kind, key, began, time.monotonic(), value, generation, confirmed))


def _named(value: bytes) -> str:
    """A value's name and checksum."""
    return f"{value[:_NAME_BYTES].decode(errors='replace').strip()} {len(value)} {zlib.crc32(value):08x}"


if __name__ == "__main__":
    json.dump(Historian(json.loads(sys.argv[1])).run(), sys.stdout)
