"""Makes the blocks for the probe that `farpool.kv.PrefixCache` runs at the first save or load.

A probe moves a known block and compares the result, to check that memory is read and written correctly. A load may
write into the engine's memory, so its probe loads random bytes into that memory. A save may only read the engine's
memory, so its probe saves the bytes that are there, and loads them into new memory. So each probe moves bytes through
the engine's memory in one direction only. A probe in both directions would miss some faults: memory functions that swap
two heads both when they read and when they write would return the right bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from farpool.cluster.store.arguments import as_payload, parts_of
from farpool.errors import ConfigError
from farpool.kv.compression import flat
from farpool.kv.memory import KVMemory, TensorMemory
from farpool.kv.probe import EngineBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from farpool.abc.objects import Payload

__all__ = ["Place", "loading_block", "saving_block"]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one block in an engine's memory, for one group of layers.

    Attributes
    ----------
    memory : KVMemory
        The engine's memory.
    layers : sequence of int
        Numbers of the layers that are stored together.
    start, stop : int
        First token of the block, and the first token after it.
    payload : callable
        Returns the block's memory in the form that saves and loads use.
    """

    memory: KVMemory
    layers: Sequence[int]
    start: int
    stop: int
    payload: Callable[[], Payload]

    def read(self) -> bytes:
        """Return a copy of the block's bytes, from the engine's tensors, or from its buffers if it has no tensors."""
        if isinstance(self.memory, TensorMemory):
            return b"".join(self.memory.read(layer, self.start, self.stop) for layer in self.layers)
        return b"".join(part.tobytes() for layer in self.layers for part in self._parts(layer))

    def write(self, data: bytes) -> None:
        """Replace the block's bytes by `data`."""
        at = 0
        for layer in self.layers:
            if isinstance(self.memory, TensorMemory):
                at += self.memory.write(layer, self.start, self.stop, data[at:])
                continue
            for part in self._parts(layer):
                part[:] = np.frombuffer(data, np.uint8, part.nbytes, at)
                at += part.nbytes

    def _parts(self, layer: int) -> list[NDArray[Any]]:
        parts = self.memory.parts(layer, self.start, self.stop)
        if parts is None:
            raise ConfigError(
                f"the memory has no place for tokens {self.start} to {self.stop} of layer {layer} any more; keep the "
                "memory of a call until the call returns"
            )
        return [flat(part) for part in parts_of(as_payload(tuple(parts)))]


def loading_block(places: Sequence[Place]) -> EngineBlock:
    """Make the known block for the probe of a load.

    `places` has one place in writable memory for each group of layers.
    """
    ends = [*accumulate((len(place.read()) for place in places), initial=0)]

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
    """Make the known block for the probe of a save.

    `places` has one place in read-only memory for each group of layers.
    """
    known = [place.read() for place in places]
    ends = [*accumulate(map(len, known), initial=0)]
    own = EngineBlock.private(ends[-1])
    view = cast("memoryview", own.targets()[0])
    return replace(
        own,
        values=lambda: [place.payload() for place in places],
        targets=lambda: [view[start:stop] for start, stop in pairwise(ends)],
        known=b"".join(known),
    )
