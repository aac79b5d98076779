"""A program that uses nodes, run by the Python of either release: it reads calls from stdin and answers on stdout.

Each line is a JSON list of the name of a method of `Client` and its arguments, and each answer is the JSON of the
result. Only what both releases have is used here.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import farpool
import farpool._native

PATIENCE = 60.0
KV_TOKENS = 64


def value_of(key: str) -> bytes:
    """The value that belongs to a key; the keys' values have many sizes."""
    return (key.encode() + b" ") * (1 + random.Random(key).randrange(3000))


class Client:
    """The calls. The values of keys follow from the keys, so that clients of both releases know them."""

    def __init__(self) -> None:
        self._stores: list[farpool.Store] = []
        self._tier: Any = None
        self._extents: dict[str, Any] = {}
        self._confirmed: list[str] = []
        self._wrong: list[str] = []
        self._done = 0
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def _store(self) -> farpool.Store:
        return self._stores[-1]

    def where(self) -> list[str]:
        """Return the files of the package and of the native core that this program runs."""
        return [farpool.__file__, farpool._native.__file__]

    def open(self, nodes: Sequence[str], replicas: int, options: dict[str, Any]) -> None:
        """Open a store; the calls below use the one that was opened last."""
        self._stores.append(farpool.Store(*nodes, replicas=replicas, **{"timeout": PATIENCE, **options}))

    def put(self, keys: Sequence[str]) -> list[str]:
        """Put the keys' values; return an outcome for each."""
        return [str(self._store.put(key, value_of(key), check=True)) for key in keys]

    def found(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Return, by way of looking, the keys whose values are not found or not right."""
        sizes = self._store.lookup(keys).sizes
        with self._store.pin_many(keys) as pins:
            pinned = [pin is not None and bytes(pin.view) == value_of(key) for key, pin in zip(keys, pins, strict=True)]
        ways = {
            "get": [self._store.get(key) == value_of(key) for key in keys],
            "get_many": [got == value_of(key) for key, got in zip(keys, self._store.get_many(keys), strict=True)],
            "lookup": [size == len(value_of(key)) for key, size in zip(keys, sizes, strict=True)],
            "pin": pinned,
        }
        return {
            way: [key for key, right in zip(keys, rights, strict=True) if not right] for way, rights in ways.items()
        }

    def drop(self, keys: Sequence[str]) -> None:
        """Drop keys."""
        for key in keys:
            self._store.drop(key)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Look keys up."""
        return list(self._store.lookup(keys).sizes)

    def attempt(self, ways: Sequence[str], key: str) -> list[str]:
        """Make the calls with these names; return the kind and text of each call's error, or its result."""
        calls = {
            "put": lambda: self._store.put(key, value_of(key)),
            "get": lambda: self._store.get(key),
            "lookup": lambda: self._store.lookup([key]).sizes,
        }
        said = []
        for way in ways:
            try:
                said.append(f"result {calls[way]()!r}")
            except farpool.FarpoolError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    def lend(self, node: str, nbytes: int) -> None:
        """Take a lease."""
        self._tier = farpool.Remote(node, size=nbytes, transport="tcp", timeout=PATIENCE)
        self._tier.__enter__()

    def write(self, key: str) -> None:
        """Write a key's value into a new extent of the lease."""
        extent = self._extents[key] = self._tier.reserve(len(value_of(key)))
        self._tier.write_from(extent, memoryview(value_of(key)))

    def read(self) -> list[str]:
        """Return the extents of the lease that do not hold what was written."""
        wrong = []
        for key, extent in self._extents.items():
            buffer = bytearray(extent.nbytes)
            self._tier.read_into(extent, memoryview(buffer))
            if bytes(buffer) != value_of(key):
                wrong.append(key)
        return wrong

    def publish(self, name: str, key: str, expect: int | None) -> int:
        """Publish a key's value under a name; return the version."""
        return int(self._store.publish(name, value_of(key), expect=expect).version)

    def names(self) -> list[list[Any]]:
        """Return all names, with their versions."""
        return [[info.name, info.version] for info in self._store.list_names()]

    def history(self, name: str) -> list[int]:
        """Return the versions of a name."""
        return [info.version for info in self._store.history(name)]

    def published(self, name: str, key: str, version: int | None) -> bool:
        """Tell if a name has a key's value."""
        with self._store.open(name, version=version) as opened:
            return bool(opened.read() == value_of(key))

    def kv(self, nodes: Sequence[str], first: int, save: bool) -> list[Any]:
        """Save the KV of a prompt, or look it up and load it.

        Return the number of tokens found, whether the bytes are right, and the reason.
        """
        import torch

        from farpool.kv import Layer, PrefixCache, TensorMemory

        prompt = [first, *range(1, KV_TOKENS)]
        torch.manual_seed(first)
        made = [(torch.randn(1, 2, KV_TOKENS, 8), torch.randn(1, 2, KV_TOKENS, 8)) for _ in range(2)]
        with PrefixCache(
            list(nodes),
            [Layer(nbytes=2 * 2 * 8 * 4)] * 2,
            model="mine",
            weights_id="1",
            dtype="float32",
            timeout=PATIENCE,
            hold_out=False,
        ) as cache:
            if save:
                cache.save(prompt, TensorMemory(made))
            match = cache.lookup([*prompt, 0])
            loaded = [(torch.zeros(1, 2, KV_TOKENS, 8), torch.zeros(1, 2, KV_TOKENS, 8)) for _ in range(2)]
            tokens = cache.load(match, TensorMemory(loaded))
            right = all(
                torch.equal(a[:, :, :tokens], b[:, :, :tokens])
                for old, new in zip(made, loaded, strict=True)
                for a, b in zip(old, new, strict=True)
            )
        return [tokens, right, str(match.reason)]

    def work(self, name: str) -> None:
        """Put keys and read confirmed ones from now on, until `end`."""

        def turn(draw: random.Random) -> None:
            key = f"{name} {len(self._confirmed)}"
            outcome = str(self._store.put(key, value_of(key), check=True))
            if outcome not in ("stored", "present"):
                self._wrong.append(f"{key}: {outcome}")
            self._confirmed.append(key)
            for way, keys in self.found(draw.choices(self._confirmed, k=draw.choice([1, 5]))).items():
                self._wrong += [f"{way}: {one}" for one in keys]

        def run() -> None:
            draw = random.Random(name)
            while not self._ending.is_set():
                try:
                    turn(draw)
                except Exception as error:
                    self._wrong.append(f"{type(error).__name__}: {error}")
                    self._ending.set()
                self._done += 1
                time.sleep(0.002)

        self._threads = [threading.Thread(target=run)]
        self._threads[0].start()

    def progress(self) -> list[Any]:
        """Return the number of turns so far, and what was wrong in them."""
        return [self._done, self._wrong]

    def end(self) -> list[list[str]]:
        """Stop the work; return the confirmed keys, and what was wrong."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        return [self._confirmed, self._wrong]

    def close(self) -> None:
        """Close everything."""
        self.end()
        if self._tier is not None:
            self._tier.__exit__(None, None, None)
        for store in self._stores:
            store.close()


def main() -> None:
    """Answer calls until stdin ends."""
    client = Client()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(client, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
