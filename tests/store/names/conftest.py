"""Names over each kind of registry, and objects in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farpool.cluster.names import Names
from farpool.cluster.registry import open_registry
from tests.registry.conftest import place, single
from tests.store.names.memory_store import MemoryStore

__all__ = ["place", "single"]

MakeNames = Callable[..., Names]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(place: str, store: MemoryStore) -> Iterator[MakeNames]:
    """Makes names like those of another program, with a registry and a lease of their own."""
    made = []

    def one(**settings: object) -> Names:
        names = Names(store, open_registry(place, timeout=60.0), **{"timeout": 60.0, **settings})  # type: ignore[arg-type]
        made.append(names)
        return names

    yield one
    for names in made:
        names.close()
        names._registry.close()


@pytest.fixture
def names(make: MakeNames) -> Names:
    return make()
