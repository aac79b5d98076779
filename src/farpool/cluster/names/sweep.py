"""Release the objects of versions that no program holds any more.

A version is held if it is the current one of its name or has an entry under ``hold/``. Versions share objects with
equal bytes, so a sweep releases an object only if no held version has it.

No program waits for a sweep. Many programs may sweep at the same time, and each may be stopped at any point and
continue much later. Each sweep takes these steps:

1. Read the registry, and move each version that no program holds from ``publication/`` to ``released/``, on the
   condition that it is unchanged. From then on no reader can begin to hold it: a reader opens an older version
   on the condition that its entry under ``publication/`` exists.
2. Note the mark of each copy of the objects of these versions. A node gives a copy another mark whenever it keeps or
   releases the copy.
3. Read the registry again. The objects to release are those under ``released/`` that neither a version under
   ``publication/`` nor a held version has. This reading also shows the holds that readers recorded before step 1.
4. Tell each node to release its copy if the copy still has the mark of step 2.
5. When the nodes have released all copies of a version's objects, delete the version's entries under ``released/``, if
   these entries are unchanged, and if no program held the version before step 2.

A program that reads a name can read all its objects, because the writer records them under ``publication/`` before it
tells nodes to keep their copies. If a node kept a copy before step 2, then the record existed before step 3, so the
sweep leaves the object alone. If the node kept the copy after step 2, the copy has another mark, and the node refuses
the release of step 4, however late the request arrives; the sweep begins again with step 2. If the node keeps the copy
after step 4, the writer checks whether the object still exists.

A writer that is stopped for longer than its lease, and then continues, cannot make a node keep a copy that no sweep
would release. The writer noted the marks of its copies before it recorded them, and a node keeps a copy for it only if
the copy still has that mark or is kept already. If a sweep has deleted the record, it released each copy before that,
so the copy has another mark. A copy that was not there in step 2 is not released, and needs no release: a copy that is
sent later has another mark than the writer noted, because the writer's hold had ended before step 2. For a version that
another sweep has moved to ``released/`` since, this is not so; its entries stay for a later sweep.

A node that is away keeps its copies as they are, and a node of an earlier release has no marks. So versions stay under
``released/`` until all nodes have answered. The sweep tells the other nodes at once to release their copies, and notes
in the entry which nodes were away. A later sweep makes one request to see whether all these nodes are still away. If
they are, it leaves the entry alone, so a node that stays away for long costs each sweep only this request. A sweep that
was stopped leaves an entry without a note; the next sweep does all of its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from farpool.abc.objects import ObjectStore
from farpool.cluster.names.records import NameRecord, Publication, decode, encode
from farpool.cluster.registry import Condition, Delete, Entry, Put, Registry

__all__ = ["sweep"]

_BATCH_OBJECTS_MAX = 100
"""Maximum number of objects in one request to the nodes, and of operations in one transaction of the registry."""
_BATCH_BYTES_MAX = 1 << 19
"""Maximum bytes of the entries in one transaction; a larger entry has a transaction of its own."""
_ATTEMPTS_MAX = 3
"""Number of attempts to release objects that other programs keep or release at the same time."""
_MARKS_TTL_S = 1.0
"""Time to live in seconds that we give in a touch that only reads marks. An object with less time left gets this."""


def sweep(store: ObjectStore, registry: Registry, grace: float) -> int:
    """Release the objects that belong to no held version.

    Parameters
    ----------
    store : ObjectStore
        Store of the objects.
    registry : Registry
        Registry of the names.
    grace : float
        Seconds that an object lives after its release.

    Returns
    -------
    int
        Number of released objects.
    """
    # The order of these calls matters: the module's docstring explains it step by step.
    versions = _versions(registry)
    _retire(registry, versions.unheld)
    marks = _marks(store, _keys(versions.unheld))
    for away, entries in _by_away(versions.released):
        # These nodes were away when the others released the objects. Without a note, no sweep has finished that step.
        if away is None or not away <= marks.away:
            _add(marks, _marks(store, _keys(entries) - marks.seen.keys(), still_away=away))
    unheld = {_released(entry.key) for entry in versions.unheld} | {entry.key for entry in versions.released}
    released: set[str] = set()
    for _ in range(_ATTEMPTS_MAX):
        if not marks.seen:
            break
        versions = _versions(registry)
        unneeded = _keys(versions.released) - versions.needed
        refused = _release(store, marks, unneeded, grace)
        released |= unneeded & marks.seen.keys() - refused
        _delete_finished(registry, [entry for entry in versions.released if entry.key in unheld], marks, refused)
        unheld = {entry.key for entry in versions.released}
        # Another program has kept or released these since step 2, so we note their marks again.
        again = _marks(store, refused)
        again.away.update(marks.away)
        marks = again
    return len(released)


@dataclass(frozen=True, slots=True)
class _Versions:
    """Registry entries of the versions that no program holds, and the objects that other versions need.

    The entries in `unheld` are still under ``publication/``; the entries in `released` are under ``released/``. No
    object of a version under ``publication/`` is released.
    """

    unheld: list[Entry]
    released: list[Entry]
    needed: set[str]


@dataclass(frozen=True, slots=True)
class _Marks:
    """Marks of objects' copies, objects whose marks are incomplete, and nodes that did not answer.

    The marks of an object are incomplete if a node did not answer, or is of an earlier release without marks.
    """

    seen: dict[str, Mapping[bytes, int]]
    incomplete: set[str]
    away: set[str]


def _versions(registry: Registry) -> _Versions:
    held: set[str] = set()
    versions = _Versions([], [], set())
    for entry in registry.range("name/", "hold/", "publication/", "released/").entries:
        kind, name, *rest = entry.key.split("/")
        if kind == "name":
            held.add(f"{name}/{decode(entry.value, NameRecord, entry.key).publication}")
        elif kind == "hold":
            held.add(f"{name}/{rest[0]}")
        elif kind == "publication" or f"{name}/{rest[0]}" in held:
            versions.needed.update(_keys([entry]))
            if f"{name}/{rest[0]}" not in held:
                versions.unheld.append(entry)
        else:
            versions.released.append(entry)
    return versions


def _keys(entries: Iterable[Entry]) -> set[str]:
    return {key for entry in entries for key in decode(entry.value, Publication, entry.key).keys}


def _retire(registry: Registry, entries: list[Entry]) -> None:
    """Move entries of versions to ``released/``."""
    for batch in _batches(entries):
        _commit(registry, batch, [Put(_released(entry.key), entry.value) for entry in batch])


def _released(publication: str) -> str:
    """Return the key under ``released/`` of an entry under ``publication/``."""
    return f"released/{publication.partition('/')[2]}"


def _by_away(entries: list[Entry]) -> list[tuple[frozenset[str] | None, list[Entry]]]:
    """Group entries of released versions by the nodes noted as away; entries without such a note come first."""
    groups: dict[frozenset[str] | None, list[Entry]] = {None: []}
    for entry in entries:
        away = decode(entry.value, Publication, entry.key).away
        groups.setdefault(frozenset(away) if away else None, []).append(entry)
    return list(groups.items())


def _delete_finished(registry: Registry, entries: list[Entry], marks: _Marks, refused: set[str]) -> None:
    """Delete the entries of fully released versions; note in other entries which nodes were away.

    The versions must have been without a hold before the marks were read.
    A version is fully released if all nodes have released its objects, apart from objects that other versions need.
    """
    done = marks.seen.keys() - refused
    finished = [entry for entry in entries if _keys([entry]) <= done - marks.incomplete]
    for begin in range(0, len(finished), _BATCH_OBJECTS_MAX):
        _commit(registry, finished[begin : begin + _BATCH_OBJECTS_MAX], [])
    away = tuple(sorted(marks.away))
    for entry in entries:
        record = decode(entry.value, Publication, entry.key)
        if record.away != away and set(record.keys) <= done and not marks.incomplete.isdisjoint(record.keys):
            noted = Put(entry.key, encode(msgspec.structs.replace(record, away=away)))
            registry.commit([Condition(entry.key, entry.revision)], [noted])


def _commit(registry: Registry, entries: list[Entry], puts: list[Put]) -> None:
    """Delete entries and apply their puts, except for entries that another sweep has changed."""
    conditions = [Condition(entry.key, entry.revision) for entry in entries]
    done = registry.commit(conditions, [*(Delete(entry.key) for entry in entries), *puts])
    # One changed entry makes the whole batch fail, so we try each entry alone.
    if not done.succeeded and len(entries) > 1:
        for place, entry in enumerate(entries):
            _commit(registry, [entry], puts[place : place + 1])


def _batches(entries: list[Entry]) -> Iterable[list[Entry]]:
    """Cut entries into parts that fit into one transaction each."""
    batch: list[Entry] = []
    for entry in entries:
        full = sum(len(one.value) for one in batch) + len(entry.value) > _BATCH_BYTES_MAX
        # Half as many entries as operations, because each entry needs two operations: a deletion and a put.
        if batch and (full or len(batch) == _BATCH_OBJECTS_MAX // 2):
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _marks(store: ObjectStore, keys: set[str], *, still_away: frozenset[str] | None = None) -> _Marks:
    """Ask the nodes for the marks of objects' copies. Return the marks, and the nodes that are away.

    A mark is a number that a node changes whenever it keeps or releases the copy. `still_away` contains nodes that were
    away in an earlier sweep. If none of them has come back, return no marks.
    """
    found, ordered = _Marks({}, set(), set()), sorted(keys)
    for begin in range(0, len(ordered), _BATCH_OBJECTS_MAX):
        batch = ordered[begin : begin + _BATCH_OBJECTS_MAX]
        touched = store.touch_many(batch, _MARKS_TTL_S)
        found.away.update(touched.away)
        if still_away is not None and still_away <= found.away:
            return _Marks({}, set(), found.away)
        for key, marks in zip(batch, touched.marks, strict=True):
            found.seen[key] = {node: mark for node, mark in marks.items() if mark}
            # A mark of 0 comes from a node of an earlier release, which has no marks.
            if not touched.complete or not all(marks.values()):
                found.incomplete.add(key)
    return found


def _add(marks: _Marks, others: _Marks) -> None:
    marks.seen.update(others.seen)
    marks.incomplete.update(others.incomplete)
    marks.away.update(others.away)


def _release(store: ObjectStore, marks: _Marks, keys: set[str], grace: float) -> set[str]:
    """Tell nodes to release their copies of marked objects; return the objects whose mark has changed on a node."""
    ordered, refused = sorted(keys & marks.seen.keys()), set[str]()
    for begin in range(0, len(ordered), _BATCH_OBJECTS_MAX):
        batch = ordered[begin : begin + _BATCH_OBJECTS_MAX]
        touched = store.touch_many(batch, grace, keep=False, seen=[marks.seen[key] for key in batch])
        refused.update(batch[place] for place in touched.refused)
        marks.away.update(touched.away)
        if not touched.complete:
            marks.incomplete.update(batch)
    return refused
