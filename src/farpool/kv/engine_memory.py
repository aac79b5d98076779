"""Finds the buffers of each block in an engine's memory, and probes this memory at its first use.

A probe moves a block of known bytes, to check that the memory is read and written correctly (`farpool.kv.probe`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from farpool.cluster.store.arguments import as_payload, nbytes_of
from farpool.errors import ConfigError
from farpool.kv.background import seconds_to
from farpool.kv.blocks import BlockCache
from farpool.kv.first_use import Place, loading_block, saving_block
from farpool.kv.memory import KVMemory, TensorMemory
from farpool.kv.plan import Shape, Wanted, picked
from farpool.kv.probe import Probe
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.abc.objects import Payload

    Step = Literal["load", "save"]

__all__ = ["Batch", "EngineMemory"]


@dataclass(slots=True)
class Batch:
    """Blocks that one call loads or saves.

    Attributes
    ----------
    request : str or list of str
        Name of the request. If the call has several requests, one name for each block.
    keys : list of bytes
        Key of each block.
    payloads : list of payloads
        Memory of each block.
    sizes : list of int
        Size of each block in bytes.
    uses : dict
        Example blocks for the probe: one block of each kind of engine memory that the call uses; empty if the payloads
        are not in the engine's memory. Each value is a tuple: index of a group of layers, memory, index of a block.
    """

    request: str | list[str]
    keys: list[bytes] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    uses: dict[Hashable, tuple[int, KVMemory, int]] = field(default_factory=dict)

    def use(self, step: Step, number: int, memory: KVMemory, block: int) -> None:
        """Record the example block of the memory that `step` (a load or save) uses for the group of layers `number`."""
        self.uses[step, type(memory), number] = number, memory, block

    def only(self, numbers: Sequence[int]) -> Batch:
        """Return a batch with only the blocks at these indices."""
        return Batch(
            self.request if isinstance(self.request, str) else picked(self.request, numbers),
            picked(self.keys, numbers),
            picked(self.payloads, numbers),
            picked(self.sizes, numbers),
        )


class EngineMemory:
    """Finds the memory of blocks in an engine's memory, and probes it. Thread-safe.

    Parameters
    ----------
    shape : Shape
        The engine's layers.
    blocks : BlockCache
        Cache through which the probe moves its block.

    Attributes
    ----------
    probe : Probe
        Probes each kind of memory when it is used for the first time.
    """

    def __init__(self, shape: Shape, blocks: BlockCache) -> None:
        self._shape = shape
        self.probe = Probe("PrefixCache", blocks, at_first_use=True)

    def add_targets(self, batch: Batch, wanted: Wanted, memory: KVMemory, needed: Iterable[tuple[int, range]]) -> None:
        """Add blocks to a batch, with the memory into which they are loaded.

        Parameters
        ----------
        batch : Batch
            The batch.
        wanted : Wanted
            Blocks of a sequence.
        memory : KVMemory
            The engine's memory of the sequence.
        needed : iterable of tuple of int and range
            Index of each group of layers, and the indices of the blocks of that group to add.

        Raises
        ------
        ConfigError
            The memory has no place for a layer, or the place has a wrong size.
        """
        for number, blocks in needed:
            batch.keys += wanted.keys_of(number, blocks)
            batch.payloads += self._targets(number, memory, blocks)
            batch.sizes += [self._shape.groups[number].group.block_bytes] * len(blocks)
            if isinstance(batch.request, list):
                batch.request += [wanted.request] * len(blocks)
            if blocks:
                batch.use("load", number, memory, blocks.start)

    def _place(self, number: int, memory: KVMemory, block: int) -> Place:
        """Return the place of a block of one group of layers in the engine's memory."""

        def payload() -> Payload:
            (target,) = self._targets(number, memory, range(block, block + 1))
            return target

        tokens = self._shape.block
        return Place(memory, self._shape.groups[number].layers, block * tokens, (block + 1) * tokens, payload)

    def _targets(self, number: int, memory: KVMemory, blocks: range) -> Sequence[Payload]:
        """Return the memory of each block of a group of layers; raise `ConfigError` if a block has no place."""
        payloads = self.payloads(number, memory, blocks)
        if None in payloads:
            block, layers = blocks[payloads.index(None)], self._shape.groups[number].layers
            raise ConfigError(f"the memory has no place for block {block} of one of the layers {layers}")
        return cast("Sequence[Payload]", payloads)

    def payloads(self, number: int, memory: KVMemory, blocks: range) -> Sequence[Payload | None]:
        """Return the memory of each block of a group of layers; None for a block that is not completely in `memory`.

        Raises
        ------
        ConfigError
            The memory of a block has a wrong size.
        """
        one, tokens = self._shape.groups[number], self._shape.block
        payloads: Sequence[Payload | None]
        looked_at: Sequence[Payload | None]
        if isinstance(memory, TensorMemory):
            payloads = memory.blocks(one.layers, blocks.start * tokens, len(blocks), tokens)
            looked_at = [next(filter(None, payloads), None)]  # all have the same size
        else:
            payloads = [_payload(memory, one.layers, block * tokens, (block + 1) * tokens) for block in blocks]
            looked_at = payloads
        for payload in looked_at:
            if payload is not None and (nbytes := nbytes_of(payload)) != one.group.block_bytes:
                raise ConfigError(
                    f"the memory of a block of layers {one.layers} has {nbytes} bytes, expected {one.group.block_bytes}"
                )
        return payloads

    def admit(self, step: Step, batch: Batch, until: float, *, through_nodes: bool = True) -> Reason | None:
        """Probe memory that is used for the first time.

        Return the reason why the call must not move the batch; None if it may.

        Parameters
        ----------
        step : {"load", "save"}
            What the call does with the batch.
        batch : Batch
            The blocks.
        until : float
            Deadline of the call, by the monotonic clock.
        through_nodes : bool
            False if the call needs no node. The probe then copies its block within memory instead of moving it through
            nodes.
        """
        make = loading_block if step == "load" else saving_block
        return self.probe.admit(
            step,
            batch.request,
            len(batch.keys),
            batch.uses,
            lambda kinds: make([self._place(*batch.uses[kind]) for kind in kinds]),
            seconds_to(until),
            through_nodes=through_nodes,
        )


def _payload(memory: KVMemory, layers: Iterable[int], start: int, stop: int) -> Payload | None:
    """Return the memory of the KV of tokens `start` to `stop` in several layers; None if a part is missing."""
    parts: list[Buffer | Slices] = []
    for layer in layers:
        own = memory.parts(layer, start, stop)
        if own is None:
            return None
        parts += own
    return as_payload(tuple(parts))
