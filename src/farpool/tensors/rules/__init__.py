"""Rules for operations that need special handling, one module for each family of operations.

Importing this package registers all rules.
"""

from __future__ import annotations

from farpool.tensors.rules import (
    bags,
    compact,
    copying,
    creating,
    elementwise,
    experts,
    identity,
    joining,
    lists,
    norms,
    rows,
    scattered,
    sparse,
    subclasses,
    table_gradients,
    table_writes,
    views,
    within_rows,
)

__all__ = [
    "bags",
    "compact",
    "copying",
    "creating",
    "elementwise",
    "experts",
    "identity",
    "joining",
    "lists",
    "norms",
    "rows",
    "scattered",
    "sparse",
    "subclasses",
    "table_gradients",
    "table_writes",
    "views",
    "within_rows",
]
