"""Public import name of the registry; the code is in `farpool.cluster.registry` (docs/registry.md)."""

from __future__ import annotations

from farpool.cluster.registry import (
    Changes,
    Commit,
    Condition,
    Delete,
    Entry,
    Operation,
    Put,
    Registry,
    Snapshot,
    Watch,
    default_registry,
    open_registry,
)

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

__path__: list[str] = []  # a package for imports: `farpool._renamed` finds the modules inside
