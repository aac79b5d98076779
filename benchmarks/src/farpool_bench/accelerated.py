"""A model under the accelerate library, whose hooks fetch weights when a module runs and drop them afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from farpool_bench.stack import Stack

__all__ = ["PacedWeights", "accelerated"]


class PacedWeights(Mapping[str, torch.Tensor]):
    """Mapping of weights behind a simulated link: reading one takes its bytes over the rate, the copy included.

    Parameters
    ----------
    weights : mapping
        The weights, by name.
    rate : float or None
        Bytes per second; None where the link is real.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], rate: float | None) -> None:
        self._weights = weights
        self._rate = rate

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        if self._rate is None:
            return weight
        end = time.perf_counter() + weight.nbytes / self._rate
        copy = weight.clone()
        time.sleep(max(0.0, end - time.perf_counter()))
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def accelerated(plain: Stack, device: str, rate: float | None) -> Stack:
    """Make a copy of a stack under accelerate: each module fetches its weights before it runs and drops them after.

    Raises
    ------
    ModuleNotFoundError
        Accelerate is not installed.
    """
    from accelerate.hooks import attach_align_device_hook

    weights = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    if device == "cuda":
        weights = {name: tensor.cpu().pin_memory() for name, tensor in weights.items()}
    with torch.device("meta"):
        model = Stack(len(plain.blocks), plain.width)
    attach_align_device_hook(
        model, execution_device=torch.device(device), offload=True, weights_map=PacedWeights(weights, rate)
    )
    return model
