"""Tensors that autograd saves on a GPU, in a pool on that GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import farpool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS, WIDTH, ROWS = 8, 1024, 4096


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]).cuda()


def _steps(
    model: nn.Module, pool: farpool.Pool | None, stream: torch.cuda.Stream, steps: int = 4
) -> list[torch.Tensor]:
    """Losses and all gradients of training steps without an optimizer."""
    found = []
    with torch.cuda.stream(stream):
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(steps):
            model.zero_grad()
            with farpool.saved_tensors(pool) if pool is not None else torch.enable_grad():
                loss = model(inputs).square().mean()
            loss.backward()
            found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    stream.synchronize()
    return found


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("own_stream", [False, True])
def test_saved_tensors_in_a_pool_give_the_bits_of_plain_ones_with_less_memory(own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    expected = _steps(_model(), None, stream)
    saved = 2 * LAYERS * ROWS * WIDTH * 4
    peaks = []
    model = _model()
    with farpool.Pool("64MiB", dram="1GiB", device="cuda") as pool:
        for inside in (None, pool):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = _steps(model, inside, stream, steps=1)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del found
        assert _same(_steps(model, pool, stream), expected)
        assert pool.stats().evictions > 0
        assert pool.live == 0
    assert peaks[1] < peaks[0] - saved // 2


def test_two_threads_with_streams_of_their_own_save_in_one_pool() -> None:
    expected = _steps(_model(), None, torch.cuda.current_stream())
    found: dict[int, list[torch.Tensor]] = {}
    models = [_model() for _ in range(2)]
    with farpool.Pool("96MiB", dram="2GiB", device="cuda") as pool:

        def train(number: int) -> None:
            found[number] = _steps(models[number], pool, torch.cuda.Stream())

        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(found) == [0, 1]
        assert all(_same(one, expected) for one in found.values())
        assert pool.live == 0


def test_parts_that_are_kept_or_computed_again_by_cost_have_the_bits_of_plain_ones() -> None:
    stream = torch.cuda.current_stream()
    expected = _steps(_model(), None, stream)
    model = _model()
    parts = [model[first : first + 2] for first in range(0, 2 * LAYERS, 2)]

    class Parts(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for part in parts:
                inputs = farpool.checkpoint(part, inputs)
            return inputs

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return model.parameters(recurse)

        def zero_grad(self, set_to_none: bool = True) -> None:
            model.zero_grad(set_to_none)

    with farpool.Pool("64MiB", dram="1GiB", device="cuda") as pool:
        found = _steps(Parts(), pool, stream)
        told = farpool.saved_tensors(pool).explain()
        assert _same(found, expected)
        assert told.count("kept") + told.count("computed again") == LAYERS
        assert "to measure it" not in told
        assert pool.live == 0


def test_tensors_on_another_device_than_the_pool_stay_where_they_are() -> None:
    value = torch.randn(512, 512, device="cuda", requires_grad=True)
    with farpool.Pool("1MiB") as pool:
        with farpool.saved_tensors(pool):
            result = (value * 1).exp()
        assert pool.live == 0
        result.sum().backward()
    assert torch.equal(value.grad, value.detach().exp())
