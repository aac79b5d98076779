"""Pools for the tensor tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Dram, Nvme, Pool
from tests.tensors.evil_pool import EvilPool


@pytest.fixture
def evil() -> EvilPool:
    """Moves and poisons everything between two operations."""
    return EvilPool()


@pytest.fixture
def tight() -> EvilPool:
    """The same with a budget of 4 KiB and blocks of 256 bytes."""
    return EvilPool(fast=4096, largest=256)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """A real pool with three tiers and a budget that the tests' modules exceed."""
    with Pool("256KiB", [Dram("512KiB"), Nvme(tmp_path / "far.pool", "16MiB")], timeout=20) as pool:
        yield pool
