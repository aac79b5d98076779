"""Operations of farpool for the remote memory benchmark; most take a sample, in seconds for one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from farpool.cluster.store import Lookup, PutOutcome, Store
from farpool.errors import FarpoolError
from farpool_bench.ring import Ring, median_call, seconds_each

__all__ = ["counters", "get", "get_into", "look", "lookup", "memcpy", "publish", "put", "view"]


def counters(store: Store) -> dict[str, Any]:
    """Counters of the store's only node."""
    (node,) = store.nodes()
    if node.stats is None:
        raise FarpoolError(f"the node {node.node} does not say what it has counted: {node.error}")
    return node.stats


def publish(store: Store, ring: Ring) -> None:
    """Put the ring's objects into the store."""
    store.put_many(list(zip(ring.keys, ring.payloads, strict=True)))


def get(store: Store, ring: Ring, seconds: float) -> float:
    """Get the ring's objects one by one, as bytes."""
    found: list[bytes | None] = []

    def work() -> None:
        found[:] = [store.get(key) for key in ring.keys]

    taken = seconds_each(work, len(ring), seconds)
    ring.check("farpool", found)
    return taken


def get_into(store: Store, ring: Ring, batch: int, seconds: float) -> float:
    """Get objects into the ring's buffers, one by one (batch 1) or in calls with `batch` objects."""
    ring.wipe()
    taken = seconds_each(_reading(store, ring, batch), len(ring), seconds)
    ring.check("farpool")
    return taken


def put(store: Store, ring: Ring, batch: int, seconds: float) -> float:
    """Put the ring's objects, which are dropped before each turn, off the clock, and read back at the end."""
    pairs = list(zip(ring.keys, ring.payloads, strict=True))
    taken, turns = 0.0, -1  # the first turn is not counted
    while taken < seconds or turns < 1:
        for key in ring.keys:
            store.drop(key)
        start = time.perf_counter()
        if batch == 1:
            outcomes = [store.put(key, payload) for key, payload in pairs]
        else:
            outcomes = []
            for at in range(0, len(pairs), batch):
                outcomes += store.put_many(pairs[at : at + batch])
        turns += 1
        taken = 0.0 if turns == 0 else taken + time.perf_counter() - start
        if any(outcome is not PutOutcome.STORED for outcome in outcomes):
            raise FarpoolError("farpool: an object that was dropped before is still there")
    ring.wipe()
    store.get_into_many(zip(ring.keys, ring.buffers, strict=True))
    ring.check("farpool")
    return taken / (turns * len(ring))


def lookup(store: Store, ring: Ring, seconds: float) -> float:
    """Look up all of the ring's keys in one call; seconds of a call in the median."""
    found: list[Lookup] = []

    def work() -> None:
        found[:] = [store.lookup(ring.keys)]

    taken = median_call(work, seconds)
    if found[0].leading != len(ring) or set(found[0].sizes) != {ring.nbytes}:
        raise FarpoolError("farpool: an object that was put is missing, or has another size")
    return taken


def view(store: Store, ring: Ring, seconds: float) -> float:
    """Pin each object, look at it without a copy, and let go of it."""
    return seconds_each(partial(look, store, ring), len(ring), seconds)


def look(store: Store, ring: Ring) -> None:
    """Pin each object once and check its last byte."""
    for key, payload in zip(ring.keys, ring.payloads, strict=True):
        with store.pin(key) as pinned:
            if pinned.view[-1] != payload[-1] or not pinned.is_mapped:
                raise FarpoolError(f"farpool: the pinned object {key!r} is not the one that was put, or not mapped")


def memcpy(source: memoryview, ring: Ring, seconds: float) -> float:
    """Copy the ring's payloads, which are put into `source` one after another, to its buffers."""
    parts = [source[at : at + ring.nbytes] for at in range(0, len(ring) * ring.nbytes, ring.nbytes)]
    for part, payload in zip(parts, ring.payloads, strict=True):
        part[:] = payload
    pairs = list(zip(ring.buffers, parts, strict=True))

    def work() -> None:
        for buffer, part in pairs:
            buffer[:] = part

    ring.wipe()
    taken = seconds_each(work, len(ring), seconds)
    ring.check("memcpy")
    return taken


def _reading(store: Store, ring: Ring, batch: int) -> Callable[[], object]:
    pairs = list(zip(ring.keys, ring.buffers, strict=True))
    parts = [pairs[at : at + batch] for at in range(0, len(pairs), batch)]

    def one_by_one() -> None:
        for key, buffer in pairs:
            store.get_into(key, buffer)

    def together() -> None:
        for part in parts:
            store.get_into_many(part)

    return one_by_one if batch == 1 else together
