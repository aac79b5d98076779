"""Pools for the tensor tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Dram, Nvme, Pool
from tests.fake_cuda import FakeMachine
from tests.tensors.evil_pool import EvilPool

_LONG_ON_A_GPU = {"test_compile.py", "test_from_pretrained.py", "test_tracing.py"}
"""Modules whose tests build many models, so that on the simulated GPU they belong to the long tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long on the simulated GPU as slow."""
    for item in items:
        if (
            item.path.parent == Path(__file__).parent
            and item.path.name in _LONG_ON_A_GPU
            and "[simulated-gpu" in item.name
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def evil() -> EvilPool:
    """Moves and poisons everything between two operations."""
    return EvilPool()


@pytest.fixture
def tight() -> EvilPool:
    """The same with a budget of 4 KiB and blocks of 256 bytes."""
    return EvilPool(fast=4096, largest=256)


@pytest.fixture(params=["cpu", "simulated-gpu"])
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A real pool with three tiers and a budget that the tests' modules exceed.

    Of the simulated GPU the tests see that transfers end late, in many orders. Operations compute on the host.
    """
    machine = None
    if request.param == "simulated-gpu":
        machine = FakeMachine(zlib.crc32(request.node.name.encode()), computes=True)
        monkeypatch.setattr("farpool.memory.pool.block_pool.open_device", machine.open)
    with Pool("256KiB", [Dram("512KiB"), Nvme(tmp_path / "far.pool", "16MiB")], timeout=20) as pool:
        yield pool
    assert machine is None or not machine.fake.violations()
