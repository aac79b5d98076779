"""Converts the layers of a cache for transformers into payloads, and payloads into layers.

A payload is the bytes of one block that nodes store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from farpool.errors import ConfigError
from farpool.kv.engines.transformers_blocks import FULL, SLIDING, pieces_of
from farpool.kv.engines.transformers_layer import PagedLayer
from farpool.kv.namespace import Group, Namespace

__all__ = ["Payloads"]


class _State(NamedTuple):
    """State of a layer with a sliding window after `tokens` tokens: the keys and values within the window."""

    tokens: int
    keys: torch.Tensor
    values: torch.Tensor


class Payloads:
    """Copies blocks of tokens from the layers of one cache into payloads, and loaded payloads into the layers.

    A layer with a sliding window forgets the tokens before its window. So this class keeps, for each such layer, the
    latest state that the layer had at the end of a block.

    Parameters
    ----------
    namespace : Namespace
        Namespace of the blocks, which gives their sizes.
    layers : sequence
        Layers of the cache.
    device : torch.device
        Device of the keys and values.

    Attributes
    ----------
    full : list of tuple of int and PagedLayer
        Layers with full attention, with their numbers.
    sliding : list of tuple of int and DynamicSlidingWindowLayer
        Layers with a sliding window, with their numbers.
    step : int
        Tokens of a block.
    dtype : torch.dtype
        Data type of the keys and values.
    """

    def __init__(self, namespace: Namespace, layers: Sequence[Any], device: torch.device) -> None:
        self._namespace = namespace
        self._layers = layers
        self._device = device
        self.full = [(number, layer) for number, layer in enumerate(layers) if type(layer) is PagedLayer]
        self.sliding: list[tuple[int, Any]] = [
            (number, layer) for number, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer
        ]
        self.step = namespace.tokens_per_block
        self.dtype: torch.dtype = getattr(torch, namespace.dtype)
        self._states: dict[int, _State] = {}

    def twin(self, layers: Sequence[Any]) -> Payloads:
        """Return the `Payloads` of a copy of the cache; `layers` are the layers of the copy."""
        other = Payloads(self._namespace, layers, self._device)
        other._states = dict(self._states)
        return other

    def group(self, kind: str) -> tuple[int, Group]:
        """Return the number and the description of the group that contains the layers of one kind."""
        return next((number, group) for number, group in enumerate(self._namespace.groups) if group.kind == kind)

    def nbytes(self, blocks: int) -> int:
        """Return the bytes of a prefix of this many blocks, including the states of the sliding windows at its end."""
        full = blocks * self.group(FULL)[1].block_bytes if self.full else 0
        return full + (self.group(SLIDING)[1].block_bytes if self.sliding else 0)

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Return the shape of one layer's keys for this many tokens. The values have the same shape."""
        return 1, self._namespace.heads, tokens, self._namespace.head_dim

    def check(self) -> None:
        """Check that the layers have the data type and shapes of the namespace.

        Raises
        ------
        ConfigError
            A data type or a shape differs.
        """
        expected = self.shape(0)
        for number, layer in (*self.full, *self.sliding):
            if isinstance(layer, PagedLayer):
                found, dtype = layer.shapes(0), layer.dtype
            else:
                found, dtype = (layer.keys.shape, layer.values.shape), layer.keys.dtype
            shapes = [(*shape[:2], 0, shape[3]) for shape in found]
            if dtype != self.dtype or any(shape != expected for shape in shapes):
                raise ConfigError(
                    f"layer {number} has keys and values of {dtype} with shapes {shapes}; prefixes have {self.dtype} "
                    f"with shape {expected}, of one sequence: give prefix_blocks the model's config and dtype"
                )

    # ---- layers with full attention ------------------------------------------------------------------------------

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """Copy the keys and values of the blocks of tokens with these numbers into payloads."""
        step, device = self.step, self.full[0][1].device
        memory, payloads = self.memory(len(numbers))
        keys, values = (torch.empty(self.shape(step), dtype=self.dtype, device=device) for _ in range(2))
        for place, number in enumerate(numbers):
            for row, (_, layer) in enumerate(self.full):
                layer.read(number * step, (number + 1) * step, keys, values)
                memory[place, row, 0] = keys[0]
                memory[place, row, 1] = values[0]
        return payloads

    def memory(self, count: int) -> tuple[torch.Tensor, list[memoryview]]:
        """Allocate memory into which `count` blocks can be loaded.

        Returns
        -------
        tuple of torch.Tensor and list of memoryview
            A tensor of shape ``(blocks, layers, 2, heads, tokens, width)``, and the bytes of each block.
        """
        nbytes = self.group(FULL)[1].block_bytes
        memory = bytearray(count * nbytes)
        view = memoryview(memory)
        shape = (count, len(self.full), 2, *self.shape(self.step)[1:])
        blocks = [view[start : start + nbytes] for start in range(0, len(memory), nbytes)]
        return torch.frombuffer(memory, dtype=self.dtype).view(shape), blocks

    def extend(self, memory: torch.Tensor) -> None:
        """Append loaded blocks, in a tensor from `memory`, to the layers with full attention."""
        for row, (_, layer) in enumerate(self.full):
            parts = memory[:, row].permute(1, 2, 0, 3, 4).to(self._device)
            keys, values = parts.reshape(2, *self.shape(len(memory) * self.step))
            layer.extend(keys, values)

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens of the layers with full attention."""
        for _, layer in self.full:
            layer.crop(tokens - layer.get_seq_length())

    # ---- layers with a sliding window ----------------------------------------------------------------------------

    def note_state(self, number: int, new: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the state of a layer with a sliding window at the end of a block.

        Parameters
        ----------
        number : int
            Number of the layer; a layer without a sliding window is ignored.
        new : int
            Number of tokens that were just added. If one or more blocks end among these tokens, the state at the last
            end of a block is kept; otherwise nothing changes.
        keys, values : torch.Tensor
            Keys and values that the layer gave to attention, up to the last new token.
        """
        layer: Any = self._layers[number]
        if type(layer) is not DynamicSlidingWindowLayer:
            return
        stop: int = layer.cumulative_length
        over = stop % self.step
        if over >= new:
            return
        last = keys.shape[-2] - over
        first = max(0, last - layer.sliding_window + 1)
        parts = (states[..., first:last, :].detach().clone() for states in (keys, values))
        self._states[number] = _State(stop - over, *parts)

    def forget_states(self, tokens: int = 0) -> None:
        """Forget each kept state that includes more than the first `tokens` tokens."""
        self._states = {number: state for number, state in self._states.items() if state.tokens <= tokens}

    def end_of_states(self) -> int | None:
        """Return after how many tokens all states were kept; None if layers differ or a layer has no state."""
        ends = {state.tokens for state in self._states.values()}
        return ends.pop() if len(ends) == 1 and len(self._states) == len(self.sliding) else None

    def read_states(self) -> memoryview:
        """Copy the states of all layers with a sliding window into a payload; pad states of fewer tokens with zeros."""
        step = self.step
        memory, parts = self.memory_of_states()
        for (number, _), part in zip(self.sliding, parts, strict=True):
            state = self._states[number]
            kept = torch.stack([state.keys[0], state.values[0]])
            for place, piece in enumerate(part):
                tokens = kept[..., place * step : (place + 1) * step, :]
                piece[..., : tokens.shape[-2], :] = tokens
        return memory

    def memory_of_states(self) -> tuple[memoryview, list[torch.Tensor]]:
        """Allocate memory for a payload with the states of all layers with a sliding window.

        Returns
        -------
        tuple of memoryview and list of torch.Tensor
            The bytes, and a view of the pieces of each layer, of shape ``(pieces, 2, heads, tokens, width)``.
        """
        memory = bytearray(self.group(SLIDING)[1].block_bytes)
        whole = torch.frombuffer(memory, dtype=self.dtype).view(-1, 2, *self.shape(self.step)[1:])
        parts, start = [], 0
        for _, layer in self.sliding:
            stop = start + pieces_of(layer, self.step)
            parts.append(whole[start:stop])
            start = stop
        return memoryview(memory), parts

    def restore(self, parts: Sequence[torch.Tensor], tokens: int) -> None:
        """Set the layers with a sliding window to loaded states.

        Parameters
        ----------
        parts : sequence of torch.Tensor
            Tensors from `memory_of_states`, with the loaded states.
        tokens : int
            Number of tokens after which the layers had these states.
        """
        for (number, layer), part in zip(self.sliding, parts, strict=True):
            kept = min(tokens, layer.sliding_window - 1)
            joined = torch.cat(list(part), dim=-2)[..., :kept, :].to(self._device)
            keys, values = joined.unsqueeze(1)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, tokens
            self._states[number] = _State(tokens, keys, values)

    def reset(self) -> None:
        """Empty all layers."""
        self._states.clear()
        for layer in self._layers:
            layer.reset()
