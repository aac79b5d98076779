"""Registries of each kind for tests of tenants."""

from __future__ import annotations

from tests.registry.conftest import file, fresh, place, registry, single

__all__ = ["file", "fresh", "place", "registry", "single"]
