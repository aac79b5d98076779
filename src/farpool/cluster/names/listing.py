"""Lists of names and of their versions, read from the registry alone."""

from __future__ import annotations

from farpool.abc.registry import Registry
from farpool.cluster.names.records import NameInfo, NameRecord, checked_name, decode, history_key, name_key, name_of

__all__ = ["list_names", "list_versions"]


def list_names(registry: Registry, prefix: str = "", *, timeout: float | None = None) -> list[NameInfo]:
    """List the current versions of the names that begin with a prefix, in the order of the names."""
    quoted = checked_name(prefix) if prefix else ""
    found = []
    for entry in registry.range(name_key(quoted), timeout=timeout).entries:
        record = decode(entry.value, NameRecord, entry.key)
        if record.publication:
            found.append(NameInfo.of(name_of(entry.key.partition("/")[2]), record))
    return sorted(found, key=lambda one: one.name)


def list_versions(registry: Registry, name: str, *, timeout: float | None = None) -> list[NameInfo]:
    """List the last versions of a name, at most a hundred, the oldest first."""
    prefix = history_key(checked_name(name), 0).rpartition("/")[0] + "/"
    entries = registry.range(prefix, timeout=timeout).entries
    return [NameInfo.of(name, decode(entry.value, NameRecord, entry.key)) for entry in entries]
