"""Names: mutable pointers to write-once objects, kept in a registry (docs/names.md)."""

from __future__ import annotations

from farpool.abc.objects import ObjectStore
from farpool.cluster.store.names.manifest import TensorEntry
from farpool.cluster.store.names.names import Names, NameWatch, Writer
from farpool.cluster.store.names.opened import OpenedName
from farpool.cluster.store.names.records import NameInfo
from farpool.cluster.store.names.sources import TensorSource, use_tensors

__all__ = [
    "NameInfo",
    "NameWatch",
    "Names",
    "ObjectStore",
    "OpenedName",
    "TensorEntry",
    "TensorSource",
    "Writer",
    "use_tensors",
]
