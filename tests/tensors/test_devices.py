"""Devices are compared with their numbers; a pool on a GPU is played by one whose views say that they lie there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import farpool
from farpool.memory.pool import blocks_of
from farpool.tensors import arena
from farpool.tensors.arena import is_device
from farpool.tensors.rules import copying, creating

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("cpu", CPU, True),
        ("cpu:0", CPU, True),
        ("cuda", CPU, False),
        ("cpu", FIRST, False),
        ("meta", FIRST, False),
        ("cuda:0", FIRST, True),
        ("cuda:1", FIRST, False),
        (SECOND, SECOND, True),
        ("cuda", FIRST, False),
        ("cuda", SECOND, True),
    ],
)
def test_a_device_without_a_number_is_the_current_one(
    asked: Any, device: torch.device, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert is_device(asked, device) is expected


@pytest.fixture
def on_first_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(copying, "describe", lambda tensor: "the tensor")
    monkeypatch.setattr(copying, "copy_like", lambda source, *rest: "stayed")
    return SimpleNamespace(device=FIRST, dtype=torch.float32)


def test_a_tensor_does_not_stay_when_it_is_moved_to_another_gpu(on_first_gpu: Any) -> None:
    rule: Any = copying._to_copy
    assert rule(None, (on_first_gpu,), {"device": FIRST}) == "stayed"
    assert rule(None, (on_first_gpu,), {"dtype": torch.float16}) == "stayed"
    with pytest.raises(farpool.UnsupportedError, match="cannot move to cuda:1: it lives in its pool on cuda:0"):
        rule(None, (on_first_gpu,), {"device": SECOND})


def test_a_tensor_like_another_on_another_gpu_is_not_made_in_the_pool(on_first_gpu: Any) -> None:
    assert creating._elsewhere(on_first_gpu, {"device": SECOND})
    assert not creating._elsewhere(on_first_gpu, {"device": FIRST})
    assert not creating._elsewhere(on_first_gpu, {})


def test_what_a_factory_makes_on_another_gpu_stays_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from farpool.tensors import mode

    asked: list[Any] = []

    def remember(device: Any, of: torch.device) -> bool:
        asked.append((device, of))
        return is_device(device, FIRST)

    monkeypatch.setattr(mode, "is_device", remember)
    with farpool.Pool("1MiB") as pool, farpool.paged(pool):
        assert type(torch.zeros(3)).__name__ == "PagedTensor"
        assert type(torch.zeros(3, device="meta")) is torch.Tensor
    assert asked == [("meta", arena.device_of(blocks_of(pool)))]
