"""The small consistent store of the control plane: a SQLite file for one host, etcd for many (docs/registry.md)."""

from __future__ import annotations

from farpool.abc.registry import Changes, Commit, Condition, Delete, Entry, Operation, Put, Registry, Snapshot, Watch
from farpool.cluster.registry.location import default_registry, open_registry

__all__ = [
    "Changes",
    "Commit",
    "Condition",
    "Delete",
    "Entry",
    "Operation",
    "Put",
    "Registry",
    "Snapshot",
    "Watch",
    "default_registry",
    "open_registry",
]
