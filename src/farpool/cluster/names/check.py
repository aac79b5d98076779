"""Check the names in a registry.

Each entry must be readable, and the registry must contain the list of objects of each current version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from farpool.cluster.names.records import Holder, NameRecord, Publication, decode, name_of
from farpool.cluster.registry import Entry, Registry
from farpool.errors import ConfigError

__all__ = ["Checked", "check"]

_RECORDS: dict[str, type[msgspec.Struct]] = {
    **{"name": NameRecord, "history": NameRecord, "publication": Publication, "released": Publication},
    **{"hold": Holder, "writer": Holder, "sweeper": Holder},
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of a check.

    Attributes
    ----------
    entries : dict of str to (int, int)
        For each kind of entry, the number of entries and their total bytes.
    damage : sequence of str
        One sentence for each damage; empty if there is none.
    """

    entries: dict[str, tuple[int, int]]
    damage: Sequence[str]


def check(registry: Registry) -> Checked:
    """Read all entries of a registry; report damaged entries, and current versions with missing entries."""
    entries, damage = registry.check()
    found = list(damage)
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    names: list[tuple[Entry, NameRecord]] = []
    objects: dict[str, set[str]] = {}
    for entry in entries:
        kind, _, rest = entry.key.partition("/")
        count[kind] += 1
        nbytes[kind] += len(entry.value)
        try:
            record = decode(entry.value, _RECORDS.get(kind, Holder), entry.key)
            keys = record.keys if isinstance(record, Publication) else []
        except ConfigError as error:
            found.append(str(error))
            continue
        if isinstance(record, NameRecord) and kind == "name" and record.publication:
            names.append((entry, record))
        elif kind == "publication":
            objects.setdefault(rest.rpartition("/")[0], set()).update(keys)
    # Only now, because the registry returns the entries of names before the entries of publications.
    for entry, record in names:
        recorded = objects.get(f"{entry.key.partition('/')[2]}/{record.publication}", set())
        if len(recorded) != record.objects or record.manifest not in recorded:
            found.append(
                f"the name {name_of(entry.key.partition('/')[2])!r} has {record.objects} objects in version "
                f"{record.version}, and {len(recorded)} of them are recorded; publish it again"
            )
    return Checked({kind: (count[kind], nbytes[kind]) for kind in sorted(count)}, found)
