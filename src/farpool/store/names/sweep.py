"""Sweep: release the objects of versions that nobody holds any more.

A version is held while it is the current one of its name or has an entry under ``hold/``. Objects are shared by
content, so an object goes only if no version that is held has it. One sweep at a time runs in a registry, and no
version is added to ``publication/`` meanwhile. So each version is either among those that the sweep has seen, or its
writer makes sure of its objects after the sweep has ended.

A node that is away keeps its copies as they are. So versions are noted under ``released/`` until all nodes could be
asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from farpool.errors import RegistryAwayError
from farpool.registry import Condition, Delete, Entry, Operation, Put, Registry
from farpool.store.names.objects import ObjectStore
from farpool.store.names.records import SWEEPER, Holder, NameRecord, Publication, decode, encode

__all__ = ["sweep"]

_LEASE = 60.0
_TOUCHES = 100  # objects between two looks at the lease, and entries of the registry in one transaction


def sweep(store: ObjectStore, registry: Registry, who: str, grace: float) -> int | None:
    """Release the objects that belong to no held version.

    Parameters
    ----------
    store : ObjectStore
        Store of the objects.
    registry : Registry
        Registry of the names.
    who : str
        Shown to others who want to sweep meanwhile.
    grace : float
        Seconds that an object lives after it was let go.

    Returns
    -------
    int or None
        Number of objects that were let go; None if another sweep is at work.
    """
    with _sweeper(registry, who) as (lease, mine):
        if mine is None:
            return None
        garbage = _garbage(registry)
        complete = _let_go(store, registry, lease, garbage.fresh, grace)
        _forget(registry, mine, garbage.publications, released=not complete)
        if not garbage.late or not _let_go(store, registry, lease, garbage.late, grace, patient=False):
            return len(garbage.fresh)
        _forget(registry, mine, garbage.released)
    return len(garbage.fresh | garbage.late)


@dataclass(frozen=True, slots=True)
class _Garbage:
    """Objects that belong only to versions that nobody holds, and the registry's entries of these versions.

    The late ones were released before, when a node was away that may have had copies of them.
    """

    fresh: set[str]
    publications: list[Entry]
    late: set[str]
    released: list[Entry]


def _garbage(registry: Registry) -> _Garbage:
    snapshot = registry.range("name/", "hold/", "publication/", "released/")
    held: set[str] = set()
    kept: set[str] = set()
    garbage = _Garbage(set(), [], set(), [])
    for entry in snapshot.entries:
        kind, name, *rest = entry.key.split("/")
        if kind == "name":
            held.add(f"{name}/{decode(entry.value, NameRecord, entry.key).publication}")
        elif kind == "hold":
            held.add(f"{name}/{rest[0]}")
        else:
            keys = decode(entry.value, Publication, entry.key).keys
            if kind == "released":
                garbage.late.update(keys)
                garbage.released.append(entry)
            elif f"{name}/{rest[0]}" in held:
                kept.update(keys)
            else:
                garbage.fresh.update(keys)
                garbage.publications.append(entry)
    garbage.fresh.difference_update(kept)
    garbage.late.difference_update(kept)
    return garbage


def _let_go(
    store: ObjectStore, registry: Registry, lease: int, keys: set[str], grace: float, *, patient: bool = True
) -> bool:
    """Release objects; return False if a node could not be asked. Without `patient`, stop there."""
    ordered, complete = sorted(keys), True
    for begin in range(0, len(ordered), _TOUCHES):
        registry.keep_alive(lease)
        touched = store.touch_many(ordered[begin : begin + _TOUCHES], grace, keep=False)
        complete = complete and touched.complete
        if not complete and not patient:
            break
    return complete


def _forget(registry: Registry, mine: Condition, entries: list[Entry], *, released: bool = False) -> None:
    """Delete entries of versions; with `released`, note their objects to be released once more."""
    step = 1 if released else _TOUCHES  # the entry of a version may be as large as a transaction
    for begin in range(0, len(entries), step):
        batch = entries[begin : begin + step]
        operations: list[Operation] = [Delete(entry.key) for entry in batch]
        if released:
            operations += [Put(f"released/{entry.key.partition('/')[2]}", entry.value) for entry in batch]
        if not registry.commit([mine], operations).succeeded:
            break  # the lease has ended; another one goes on


@contextmanager
def _sweeper(registry: Registry, who: str) -> Iterator[tuple[int, Condition | None]]:
    """Take the sweeper's role: its lease, and the condition that it is still held; None if another program has it."""
    if registry.get(SWEEPER) is not None:
        yield 0, None
        return
    lease = registry.grant(_LEASE)
    try:
        done = registry.commit([Condition(SWEEPER, 0)], [Put(SWEEPER, encode(Holder(who)), lease)])
        yield lease, Condition(SWEEPER, done.revision) if done.succeeded else None
    finally:
        with suppress(RegistryAwayError):
            registry.revoke(lease)
