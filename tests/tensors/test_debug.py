"""Debug mode under tensors: what outlives an operation is found at once, and a right program runs as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farpool import Dram, LifetimeError, Pool
from farpool.memory.pool import blocks_of
from tests.tensors.evil_pool import EvilPool

_kept: list[Any] = []


class _Cycle:
    """Dies only when the garbage is collected."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def _keep(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "itself":
        _kept.append(x)
    elif how == "view":
        _kept.append(x[1:].t())
    elif how == "storage":
        _kept.append(x.untyped_storage())
    elif how == "cycle":
        _Cycle(x)
    elif how == "fails":
        raise ValueError("no")
    return x * 2


@pytest.fixture(scope="module")
def keep() -> Iterator[Any]:
    # Among PyTorch's own: operators of other libraries are given copies that they may keep.
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("farpool_tests_keep(Tensor x, str how) -> Tensor")
    library.impl("farpool_tests_keep", _keep, "CPU")
    yield torch.ops.aten.farpool_tests_keep
    library._destroy()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("256KiB", [Dram("4MiB")], timeout=20, debug=True) as pool:
        yield pool
        _kept.clear()


@pytest.mark.parametrize("how", ["itself", "view", "storage"])
def test_an_operation_that_keeps_its_operand_is_named(pool: Pool, keep: Any, how: str) -> None:
    tensor = pool.from_tensor(torch.ones(8, 8))
    with pytest.raises(LifetimeError, match=r"aten.farpool_tests_keep.*1 of the 1 real tensors .* still alive"):
        keep(tensor, how)
    _kept.clear()
    assert torch.equal(keep(tensor, "not"), torch.full((8, 8), 2.0))


def test_a_tensor_that_was_kept_reads_nan_when_its_memory_has_been_given_up(pool: Pool, keep: Any) -> None:
    tensor = pool.from_tensor(torch.ones(64, 64))
    with pytest.raises(LifetimeError):
        keep(tensor, "itself")
    (stale,) = _kept
    assert torch.equal(stale, torch.ones(64, 64))
    del tensor
    assert pool.live == 0
    assert stale.isnan().all()
    assert stale.to(torch.bfloat16).isnan().all()


def test_what_only_the_garbage_keeps_is_left_alone(pool: Pool, keep: Any) -> None:
    tensor = pool.from_tensor(torch.ones(8, 8))
    assert torch.equal(keep(tensor, "cycle"), torch.full((8, 8), 2.0))


def test_what_the_traceback_of_an_error_keeps_is_left_alone(pool: Pool, keep: Any) -> None:
    tensor = pool.from_tensor(torch.ones(8, 8))
    with pytest.raises(ValueError, match="no") as caught:
        keep(tensor, "fails")
    assert torch.equal(tensor + 1, torch.full((8, 8), 2.0))
    assert caught.traceback


def test_a_kept_operand_is_named_by_the_pool_that_moves_everything(evil: EvilPool, keep: Any) -> None:
    from farpool.tensors.factories import from_tensor

    tensor = from_tensor(evil, torch.ones(8, 8))  # type: ignore[arg-type]
    with pytest.raises(LifetimeError, match=r"keep"):
        keep(tensor, "view")
    _kept.clear()


def test_a_write_through_a_tensor_that_was_kept_is_found_when_the_tensor_is_used(pool: Pool, keep: Any) -> None:
    tensor = pool.from_tensor(torch.ones(8, 8))
    with pytest.raises(LifetimeError):
        keep(tensor, "itself")
    _kept[0][3, 3] = 5.0
    with pytest.raises(LifetimeError, match=r"weights\) at arena offset \d+: changed while no access could write it"):
        tensor.sum()
    blocks_of(pool)._watch = None  # the planted write is still there when the pool is closed


_TRAINING = """
import hashlib, torch, farpool
from torch import nn

def train(model):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss = model(torch.randint(0, 500, (4, 7))).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for value in model.state_dict().values():
        value = value.detach()
        digest.update(farpool.Pool.materialize(None, value).numpy().tobytes())
    return digest.hexdigest()

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(500, 48), nn.Linear(48, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 48))

expected = train(model())
with farpool.Pool("320KiB", dram="256KiB", nvme="8MiB") as pool:
    assert pool.debug
    paged = farpool.offload(model(), pool)
    assert train(paged) == expected
    assert pool.stats().evictions > 50
    del paged
"""


@pytest.mark.slow
def test_training_in_debug_mode_finds_nothing_and_gives_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _TRAINING],
        env={**os.environ, "FARPOOL_DEBUG": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
