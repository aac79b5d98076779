"""Registries of each kind, and lists of the members in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farpool.cluster.members import RegistryMembers
from tests.registry.conftest import file, fresh, place, registry, single

__all__ = ["file", "fresh", "place", "registry", "single"]

MakeMembers = Callable[..., RegistryMembers]


@pytest.fixture
def follow() -> Iterator[MakeMembers]:
    """Makes lists, which are closed at the end."""
    made: list[RegistryMembers] = []

    def one(where: object, **settings: object) -> RegistryMembers:
        made.append(RegistryMembers(where, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for members in made:
        members.close()
