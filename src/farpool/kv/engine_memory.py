"""Blocks in an engine's memory: the buffers that each consists of, and the probe of memory at its first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from farpool.cluster.store.arguments import as_payload, nbytes_of
from farpool.errors import ConfigError
from farpool.kv.blocks import BlockCache
from farpool.kv.first_use import Place, loading_block, saving_block
from farpool.kv.memory import KVMemory, TensorMemory
from farpool.kv.plan import Shape
from farpool.kv.probe import EngineBlock, Probe
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.abc.objects import Payload

__all__ = ["EngineMemory", "Uses"]


class Uses(dict[tuple[Callable[[Sequence[Place]], EngineBlock], type[KVMemory], int], tuple[KVMemory, int]]):
    """Memory that a call uses.

    Each key is the function that makes a probe's block of the memory, the memory's class, and the number of a group of
    layers. Each value is the memory, and the number of one block that is in it.
    """

    def loads(self, memory: KVMemory, group: int, block: int) -> None:
        """Add memory that a load writes into."""
        self[loading_block, type(memory), group] = memory, block

    def saves(self, memory: KVMemory, group: int, block: int) -> None:
        """Add memory that a save reads."""
        self[saving_block, type(memory), group] = memory, block


class EngineMemory:
    """Finds blocks in an engine's memory. Thread-safe.

    Parameters
    ----------
    shape : Shape
        The engine's layers.
    blocks : BlockCache
        Cache through which the probe moves its block.

    Attributes
    ----------
    probe : Probe
        Probe of memory that is used for the first time.
    """

    def __init__(self, shape: Shape, blocks: BlockCache) -> None:
        self._shape = shape
        self.probe = Probe("PrefixCache", blocks, at_first_use=True)

    def targets(self, memory: KVMemory, needed: Iterable[tuple[int, range]]) -> tuple[list[int], list[Payload]]:
        """Return the bytes of blocks, and the memory into which each is loaded.

        Parameters
        ----------
        memory : KVMemory
            The engine's memory.
        needed : iterable of tuple of int and range
            Groups of layers, and the numbers of their blocks.

        Raises
        ------
        ConfigError
            The memory has no place for a layer, or a place of another size.
        """
        sizes: list[int] = []
        targets: list[Payload] = []
        for number, blocks in needed:
            one = self._shape.groups[number]
            sizes += [one.group.block_bytes] * len(blocks)
            for block, payload in zip(blocks, self.payloads(number, memory, blocks), strict=True):
                if payload is None:
                    raise ConfigError(f"the memory has no place for block {block} of one of the layers {one.layers}")
                targets.append(payload)
        return sizes, targets

    def payloads(self, number: int, memory: KVMemory, blocks: range) -> Sequence[Payload | None]:
        """Return the memory of blocks of a group of layers; None for a block that the engine does not have whole.

        Raises
        ------
        ConfigError
            The memory of a block has another size.
        """
        one, step = self._shape.groups[number], self._shape.block
        payloads: Sequence[Payload | None]
        looked_at: Sequence[Payload | None]
        if isinstance(memory, TensorMemory):
            payloads = memory.blocks(one.layers, blocks.start * step, len(blocks), step)
            looked_at = [next(filter(None, payloads), None)]  # all have the same size
        else:
            payloads = [_payload(memory, one.layers, block * step, (block + 1) * step) for block in blocks]
            looked_at = payloads
        for payload in looked_at:
            if payload is not None and (nbytes := nbytes_of(payload)) != one.group.block_bytes:
                raise ConfigError(
                    f"the memory of a block of layers {one.layers} has {nbytes} bytes, expected {one.group.block_bytes}"
                )
        return payloads

    def admit(
        self,
        step: str,
        requests: str | Sequence[str],
        blocks: int,
        uses: Uses,
        until: float,
        *,
        through_nodes: bool = True,
    ) -> Reason | None:
        """Probe memory that is used for the first time; return why its blocks may not be moved.

        Parameters
        ----------
        step, requests, blocks, through_nodes
            See `Probe.admit`.
        uses : Uses
            Memory that the call uses.
        until : float
            Deadline of the call, by the monotonic clock.
        """

        def block(kinds: Sequence[Any]) -> EngineBlock:
            make: Callable[[Sequence[Place]], EngineBlock] = kinds[0][0]
            return make([self._place(number, *uses[make, kind, number]) for _, kind, number in kinds])

        timeout = max(0.0, until - time.monotonic())
        return self.probe.admit(step, requests, blocks, uses, block, timeout, through_nodes=through_nodes)

    def _place(self, number: int, memory: KVMemory, block: int) -> Place:
        """Return the place of a block of one group of layers."""

        def payload() -> Payload:
            (found,) = self.targets(memory, [(number, range(block, block + 1))])[1]
            return found

        step = self._shape.block
        return Place(memory, self._shape.groups[number].layers, block * step, (block + 1) * step, payload)


def _payload(memory: KVMemory, layers: Iterable[int], start: int, stop: int) -> Payload | None:
    """Return the memory of some tokens' KV of several layers, or None if the engine does not have all of it."""
    parts: list[Buffer | Slices] = []
    for layer in layers:
        own = memory.parts(layer, start, stop)
        if own is None:
            return None
        parts += own
    return as_payload(tuple(parts))
