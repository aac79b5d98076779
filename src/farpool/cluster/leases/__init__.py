"""Leases of memory on the members of a shared pool: managers grant them, and the registry keeps them."""

from __future__ import annotations
