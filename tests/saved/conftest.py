"""A pool for the tests of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farpool import Dram, Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A real pool whose fast tier is smaller than what the tests' programs save."""
    with Pool("256KiB", [Dram("32MiB")], timeout=20) as pool:
        yield pool
