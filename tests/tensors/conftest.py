"""Pools for the tensor tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Dram, Nvme, Pool
from tests.fake_cuda import SIMULATED, FakeMachine
from tests.tensors.evil_pool import EvilPool


@pytest.fixture
def evil() -> EvilPool:
    """Moves and poisons everything between two operations."""
    return EvilPool()


@pytest.fixture
def tight() -> EvilPool:
    """The same with a budget of 4 KiB and blocks of 256 bytes."""
    return EvilPool(fast=4096, largest=256)


@pytest.fixture(params=["cpu", "simulated-gpu"] if SIMULATED else ["cpu"])
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
