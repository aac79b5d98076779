"""Registries of each kind."""

from __future__ import annotations

from tests.registry.conftest import file, fresh, place, registry, single

__all__ = ["file", "fresh", "place", "registry", "single"]
