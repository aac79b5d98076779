"""Names: mutable pointers to write-once objects, kept in a registry (docs/names.md)."""

from __future__ import annotations

from farpool.abc.objects import ObjectStore
from farpool.cluster.names.manifest import TensorEntry
from farpool.cluster.names.names import Names
from farpool.cluster.names.opened import OpenedName
from farpool.cluster.names.records import NameInfo
from farpool.cluster.names.sources import TensorSource, use_tensors
from farpool.cluster.names.watch import NameWatch
from farpool.cluster.names.writer import Writer

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
