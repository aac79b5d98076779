"""Names: mutable pointers to write-once objects, kept in a registry (docs/names.md)."""

from __future__ import annotations

from farpool.store.names.manifest import TensorEntry
from farpool.store.names.names import Names, NameWatch, Writer
from farpool.store.names.objects import ObjectStore
from farpool.store.names.opened import OpenedName
from farpool.store.names.records import NameInfo
from farpool.store.names.sources import TensorSource, use_tensors

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
