"""Settings for tests on a GPU: what is computed twice has the same bits."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda import FakeMachine

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let pools with ``device="cuda"`` open a simulated GPU if the machine has none."""
    if torch.cuda.is_available():
        yield
        return
    machine = FakeMachine(zlib.crc32(request.node.name.encode()), computes=True)
    monkeypatch.setattr("farpool.memory.pool.block_pool.open_device", machine.open)
    yield
    assert not machine.fake.violations()
    assert machine.fake.calls("cuMemcpyHtoDAsync_v2") > 0
