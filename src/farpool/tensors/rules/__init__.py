"""What is special about some operations, one file a family. Importing this package registers all rules."""

from __future__ import annotations

from farpool.tensors.rules import (
    copying,
    creating,
    elementwise,
    experts,
    identity,
    joining,
    lists,
    refused,
    rows,
    sparse,
    values,
    views,
)

__all__ = [
    "copying",
    "creating",
    "elementwise",
    "experts",
    "identity",
    "joining",
    "lists",
    "refused",
    "rows",
    "sparse",
    "values",
    "views",
]
