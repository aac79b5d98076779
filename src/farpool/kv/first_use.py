"""Blocks of an engine's memory for the probe that `farpool.kv.PrefixCache` makes at the first save or load.

A load may write into the memory that it was given, so the probe loads random bytes into it. A save may only read the
engine's memory, so the probe saves the bytes that are in the memory, and loads them into new memory. Each of these
probes moves the bytes through the engine's memory in one direction only, because a memory that swaps two heads in both
directions would pass a probe that goes there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from farpool.cluster.store.arguments import as_payload, parts_of
from farpool.errors import ConfigError
from farpool.kv.compression import flat
from farpool.kv.memory import KVMemory, TensorMemory
from farpool.kv.probe import EngineBlock

if TYPE_CHECKING:
    from farpool.abc.objects import Payload

__all__ = ["Place", "loading_block", "saving_block"]


class Place:
    """Place of one block of a group of layers in an engine's memory.

    Parameters
    ----------
    memory : KVMemory
        The engine's memory.
    layers : sequence of int
        Numbers of the layers that are stored together.
    start, stop : int
        First token of the block, and the first token after it.
    payload : callable
        Return the block's memory in the form that a save or a load takes.
    """

    def __init__(
        self, memory: KVMemory, layers: Sequence[int], start: int, stop: int, payload: Callable[[], Payload]
    ) -> None:
        self._memory, self._layers, self._start, self._stop = memory, layers, start, stop
        self.payload = payload

    def read(self) -> bytes:
        """Copy the block from the tensors, or from the buffers that the engine names if it has no tensors."""
        return b"".join(self._read(layer) for layer in self._layers)

    def write(self, data: bytes) -> None:
        """Replace the block's bytes."""
        at = 0
        for layer in self._layers:
            if isinstance(self._memory, TensorMemory):
                nbytes = len(self._memory.read(layer, self._start, self._stop))
                self._memory.write(layer, self._start, self._stop, data[at : at + nbytes])
                at += nbytes
                continue
            for part in self._parts(layer):
                own = flat(part)
                own[:] = np.frombuffer(data, np.uint8, own.nbytes, at)
                at += own.nbytes

    def _read(self, layer: int) -> bytes:
        if isinstance(self._memory, TensorMemory):
            return self._memory.read(layer, self._start, self._stop)
        return b"".join(flat(part).tobytes() for part in self._parts(layer))

    def _parts(self, layer: int) -> list[memoryview]:
        parts = self._memory.parts(layer, self._start, self._stop)
        if parts is None:
            raise ConfigError(
                f"the memory has no place for tokens {self._start} to {self._stop} of layer {layer} any more; keep the "
                "memory of a call until the call returns"
            )
        return parts_of(as_payload(tuple(parts)))


def loading_block(places: Sequence[Place]) -> EngineBlock:
    """Make the block of a probe from memory that may be written, with one place for each group of layers."""
    ends = _ends([len(place.read()) for place in places])

    def write(data: bytes) -> None:
        for place, (start, stop) in zip(places, pairwise(ends), strict=True):
            place.write(data[start:stop])

    return EngineBlock(
        ends[-1],
        write,
        lambda: b"".join(place.read() for place in places),
        lambda: [place.read() for place in places],
        lambda: [place.payload() for place in places],
    )


def saving_block(places: Sequence[Place]) -> EngineBlock:
    """Make the block of a probe from memory that may only be read, with one place for each group of layers."""
    known = [place.read() for place in places]
    ends = _ends([len(one) for one in known])
    memory = bytearray(ends[-1])
    view = memoryview(memory)

    def write(data: bytes) -> None:
        view[:] = data

    return EngineBlock(
        len(memory),
        write,
        lambda: bytes(memory),
        lambda: [place.payload() for place in places],
        lambda: [view[start:stop] for start, stop in pairwise(ends)],
        known=b"".join(known),
    )


def _ends(sizes: Sequence[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends
