"""Tensors that enter or leave a pool while another thread waits for operands beside them."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch

import farpool
from farpool import Pool
from farpool.errors import FarpoolWarning, PoolClosedError
from farpool.memory.pool import blocks_of
from farpool.memory.pool.space import TierSpace
from farpool.memory.tiers import Dram, Throttled

offloading = importlib.import_module("farpool.tensors.offload")  # its name in the package is that of the function
NUMBERS = 16 << 10
PATIENCE = 60.0


def await_transfer(pool: Pool) -> None:
    """Until a thread waits for bytes that are on their way."""
    blocks = blocks_of(pool)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with blocks.driver:
            if blocks.pager.under_way and blocks.pager.transfers():
                return
        time.sleep(0.001)
    raise AssertionError("nobody waited")


@pytest.mark.parametrize(
    "compute",
    [torch.sub, lambda left, right: left.sub_(right), lambda left, right: torch._foreach_sub([left], [right])[0]],
    ids=["result", "in place", "lists"],
)
@pytest.mark.slow
def test_operands_are_not_mixed_up_when_a_pool_is_left_while_an_operation_waits(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    outcome: list[torch.Tensor | PoolClosedError] = []

    def run() -> None:
        try:
            outcome.append(compute(near, far).cpu())  # a list's result is made in the pool, which may be closed by now
        except PoolClosedError as error:
            outcome.append(error)

    slow = Throttled(Dram("4MiB"), read_bandwidth="400KB/s")  # a sixth of a second for each
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FarpoolWarning)
        with Pool("512KiB", [slow], prefetch=False) as pool:
            near, far = pool.full((NUMBERS,), 5.0), pool.full((NUMBERS,), 3.0)
            others = [pool.full((NUMBERS,), 1.0) for _ in range(12)]
            for other in others:
                other.sum()
            near.sum()
            del other, others
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            await_transfer(pool)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    (got,) = outcome
    if isinstance(got, PoolClosedError):
        assert near[0] == 5  # refused, and nothing has changed
    else:
        assert torch.equal(got, torch.full((NUMBERS,), 2.0))
    assert torch.equal(far, torch.full((NUMBERS,), 3.0))


def test_no_write_is_lost_when_a_tensor_leaves_while_a_tier_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookkeeping of a tier is Python code, in which another thread gets its turn."""
    copied, found_room, left = (threading.Event() for _ in range(3))
    swap = offloading.swap

    def swap_later(target: torch.Tensor, value: torch.Tensor) -> None:
        copied.set()
        assert found_room.wait(PATIENCE)
        swap(target, value)
        left.set()

    with Pool("64KiB", dram="4MiB") as pool:
        layer = farpool.offload(torch.nn.Linear(64, 64, bias=False), pool)
        weight = layer.weight
        before = weight.detach().cpu()
        monkeypatch.setattr(offloading, "swap", swap_later)
        thread = threading.Thread(target=farpool.restore, args=(layer,), daemon=True)
        thread.start()
        assert copied.wait(PATIENCE)  # only the swap is left to do
        others = [pool.ones(64, 64) for _ in range(4)]  # they have no place below yet, and leave the weight no room
        others[0].sum()  # after this there is nothing for which the next access would have to go through Python
        reserve = TierSpace.reserve

        def let_it_leave(space: TierSpace, nbytes: int, cls: str) -> int | None:
            offset = reserve(space, nbytes, cls)
            found_room.set()
            assert left.wait(PATIENCE)
            return offset

        monkeypatch.setattr(TierSpace, "reserve", let_it_leave)
        with torch.no_grad():
            try:
                weight.add_(100.0)
            except PoolClosedError:  # it says to repeat the operation
                weight.add_(100.0)
        monkeypatch.undo()
        thread.join(PATIENCE)
        assert type(weight) is torch.nn.Parameter
        assert torch.equal(weight.detach(), before + 100.0)
        del others
