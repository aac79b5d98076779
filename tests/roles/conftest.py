"""Sessions over each kind of registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farpool.cluster.registry import Registry, open_registry
from farpool.cluster.roles import Session
from tests.registry.conftest import place, single

__all__ = ["place", "single"]

MakeSession = Callable[..., Session]


@pytest.fixture
def make(place: str) -> Iterator[MakeSession]:
    """Makes sessions like those of different programs: each has a registry and a lease of its own."""
    made: list[Session] = []

    def one(ttl: float = 3600.0, timeout: float = 60.0, **settings: object) -> Session:
        made.append(Session(open_registry(place, timeout=60.0), ttl, timeout=timeout, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for session in made:
        session.close()
        session.registry.close()


@pytest.fixture
def registry(place: str) -> Iterator[Registry]:
    """The registry, as a program without a session uses it."""
    with open_registry(place, timeout=60.0) as registry:
        yield registry
