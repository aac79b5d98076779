"""Makes the block with which the probe tests a cache for transformers.

This is one block of tokens with known bytes, in layers that are made for the probe.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farpool.kv.probe import EngineBlock

if TYPE_CHECKING:
    from farpool.kv.engines.transformers_payloads import Payloads

    Make = Callable[[], tuple[Any, Payloads]]

__all__ = ["probe_block"]


class _Scratch:
    """A cache for the probe, with layers like the real cache's. It is filled as the model fills the real cache.

    Parameters
    ----------
    make : callable
        Returns an empty cache like the cache that the model updates, and its payloads.
    device : torch.device
        Device of the keys and values.
    """

    def __init__(self, make: Make, device: torch.device) -> None:
        self._make, self._device = make, device
        self._begin()
        payloads, step = self.payloads, self.payloads.step
        self._kept = [(number, step) for number, _ in payloads.full]
        self._kept += [(number, min(step, layer.sliding_window - 1)) for number, layer in payloads.sliding]
        self._loaded: list[torch.Tensor] = []
        self.nbytes = sum(2 * math.prod(payloads.shape(tokens)) for _, tokens in self._kept) * payloads.dtype.itemsize

    def _begin(self) -> None:
        """Make a cache with empty layers; the pool frees the blocks of the previous cache."""
        self._cache, self.payloads = self._make()

    def write(self, data: bytes) -> None:
        """Add a block of tokens to each empty layer, as the model does.

        `data` has, for each layer, the keys and values of the last tokens of the block: as many tokens as the layer
        keeps. The keys and values of the other tokens are zeros.
        """
        self._begin()
        payloads = self.payloads
        rest = torch.frombuffer(bytearray(data), dtype=payloads.dtype)
        for number, tokens in self._kept:
            shape = (2, *payloads.shape(tokens))
            own, rest = rest[: math.prod(shape)].view(shape), rest[math.prod(shape) :]
            before = torch.zeros((2, *payloads.shape(payloads.step - tokens)), dtype=payloads.dtype)
            keys, values = torch.cat([before, own], dim=-2).to(self._device)
            self._cache.update(keys, values, number)

    def read(self) -> bytes:
        """Return the block's bytes as attention would receive them together with the next token."""
        other, seen = copy.deepcopy(self._cache), []
        token = torch.zeros(self.payloads.shape(1), dtype=self.payloads.dtype, device=self._device)
        for number, tokens in self._kept:
            for states in other.update(token, token, number):
                own = states[..., states.shape[-2] - 1 - tokens : -1, :].cpu().contiguous()
                seen.append(own.view(-1).view(torch.uint8).numpy().tobytes())
        return b"".join(seen)

    def values(self) -> list[memoryview]:
        """Return the payloads that a save of the block would send to nodes."""
        payloads = self.payloads
        full = payloads.read([0]) if payloads.full else []
        return [*full, payloads.read_states()] if payloads.sliding else full

    def targets(self) -> list[memoryview]:
        """Return new memory into which a load writes the block; `land` then copies the block to the layers."""
        places: list[memoryview] = []
        self._loaded.clear()
        if self.payloads.full:
            memory, places = self.payloads.memory(1)
            self._loaded.append(memory)
        if self.payloads.sliding:
            place, parts = self.payloads.memory_of_states()
            places.append(place)
            self._loaded.extend(parts)
        return places

    def land(self, places: Sequence[Any]) -> None:
        """Copy the loaded block from the memory of `targets` into empty layers."""
        self._begin()
        loaded = self._loaded.copy()
        if self.payloads.full:
            self.payloads.extend(loaded.pop(0))
        self.payloads.restore(loaded, self.payloads.step)


def probe_block(make: Make, device: torch.device) -> EngineBlock:
    """Make the block of the probe, in a new cache like the real cache.

    Parameters
    ----------
    make : callable
        Returns an empty cache like the real cache, and its payloads.
    device : torch.device
        Device of the keys and values.
    """
    scratch = _Scratch(make, device)
    scratch.write(bytes(scratch.nbytes))
    return EngineBlock(scratch.nbytes, scratch.write, scratch.read, scratch.values, scratch.targets, scratch.land)
