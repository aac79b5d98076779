"""Empty registries of each kind for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool.cluster.registry import Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from tests.registry.cluster import ETCD, Cluster, running_cluster

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def single() -> Iterator[Cluster]:
    """A cluster of one member, which runs until all tests have ended."""
    if ETCD is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    with running_cluster(1) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of a registry that does not exist yet."""
    if request.param == "sqlite":
        return str(tmp_path / "registry.sqlite")
    cluster: Cluster = request.getfixturevalue("single")
    return f"etcd://{cluster.hosts}/test-{next(_NUMBERS)}"


@pytest.fixture
def fresh(place: str) -> Iterator[Callable[[], Registry]]:
    """Opens the same registry once more at each call."""
    from farpool.cluster.registry import open_registry

    opened: list[Registry] = []

    def open_one() -> Registry:
        opened.append(open_registry(place, timeout=60.0))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def registry(fresh: Callable[[], Registry]) -> Registry:
    return fresh()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SqliteRegistry]:
    with SqliteRegistry(tmp_path / "registry.sqlite", timeout=60.0) as registry:
        yield registry
