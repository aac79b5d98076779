"""Describes an engine's KV memory: the properties and groups of the engine's layers, and KV in tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import torch

from farpool._native import Rows
from farpool.errors import ConfigError
from farpool.kv.namespace import Group

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices

__all__ = ["KVMemory", "Layer", "LayerGroup", "TensorMemory", "layer_groups"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Properties of one layer's KV that a cache needs.

    Attributes
    ----------
    nbytes : int
        Bytes of KV for each token, keys and values together. For latent attention, the bytes of the latents for each
        token. For a recurrent layer, the bytes of its state, which represents all earlier tokens.
    kind : {"full", "sliding", "mla", "recurrent"}
        Kind of attention; grouped-query attention is ``full`` with fewer bytes.
    window : int
        Tokens that a sliding layer attends to, including the token itself; 0 for other kinds.
    """

    nbytes: int
    kind: Literal["full", "sliding", "mla", "recurrent"] = "full"
    window: int = 0

    def __post_init__(self) -> None:
        if self.nbytes < 1 or (self.window < 1) == (self.kind == "sliding"):
            raise ConfigError(f"{self}: expected bytes above 0, and a window above 0 for sliding layers only")


class KVMemory(Protocol):
    """Interface of the memory in which an engine has the KV of one sequence, by layers and tokens."""

    def parts(self, layer: int, start: int, stop: int) -> Sequence[Buffer | Slices] | None:
        """Return the memory of one layer's KV of tokens `start` to `stop`, or None if the engine does not have it.

        The buffers are contiguous. They are stored in the returned order, which must be the same for all blocks of a
        namespace. For a recurrent layer, this returns the state after the first `stop` tokens.
        """


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are stored together: their numbers, and their `Group` in the namespace."""

    layers: tuple[int, ...]
    group: Group

    @property
    def needs_all(self) -> bool:
        """True if these layers need all blocks of a prefix, from the first on."""
        return self.group.kind in ("full", "mla")

    def first_block(self, blocks: int, block: int) -> int:
        """Return the number of the first block that these layers need to continue after `blocks` blocks."""
        if self.group.kind == "sliding":
            # The next token attends to the `window - 1` tokens before it.
            return max(0, blocks * block - (self.group.window - 1)) // block
        return blocks - 1 if self.group.kind == "recurrent" else 0


def layer_groups(layers: Sequence[Layer], block: int, pieces: int = 1) -> list[LayerGroup]:
    """Divide layers into groups that are stored together.

    Parameters
    ----------
    layers : sequence of Layer
        All layers of the model, or of this rank.
    block : int
        Tokens of a block.
    pieces : int
        Number of groups into which the layers of each kind are divided, so that the first layers can compute while the
        others are loaded.

    Raises
    ------
    ConfigError
        There are no layers, or `pieces` is not positive.
    """
    if not layers or pieces < 1:
        raise ConfigError(f"{len(layers)} layers in {pieces} pieces: expected at least one of both")
    kinds: dict[tuple[str, int], list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault((layer.kind, layer.window), []).append(number)
    groups: list[LayerGroup] = []
    for (_, window), numbers in kinds.items():
        size = -(-len(numbers) // pieces)
        for own in (tuple(numbers[at : at + size]) for at in range(0, len(numbers), size)):
            tokens = 1 if layers[own[0]].kind == "recurrent" else block
            nbytes = sum(layers[number].nbytes for number in own) * tokens
            groups.append(LayerGroup(own, Group(tuple(map(str, own)), nbytes, layers[own[0]].kind, window)))
    return groups


class TensorMemory:
    """KV in tensors in host memory. Each tensor has a dimension of tokens.

    Parameters
    ----------
    layers : sequence of tuple of Tensor
        Tensors of each layer, such as its keys and values. Each tensor is contiguous from its dimension of tokens on.
    token_dim : int
        Index of the dimension of tokens; -2 for ``[batch, heads, tokens, head size]``.
    first : sequence of int, optional
        For each layer, the index in the sequence of the first token that its tensors hold; zeros by default. Layers
        with a sliding window hold only the last tokens.

    Raises
    ------
    ConfigError
        A tensor is not in host memory, or is not contiguous from its dimension of tokens on.
    """

    def __init__(
        self, layers: Sequence[tuple[torch.Tensor, ...]], token_dim: int = -2, first: Sequence[int] | None = None
    ) -> None:
        self._tensors, self._token_dim = list(layers), token_dim
        self._layers: list[tuple[list[Buffer], list[int]]] = []
        self._together: dict[tuple[int, ...], Rows] = {}
        self._first = list(first) if first is not None else [0] * len(layers)
        for tensors in layers:
            chunks: list[Buffer] = []
            token_bytes: list[int] = []
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    raise ConfigError(f"a tensor is on {tensor.device}, expected host memory; copy it there first")
                leading = tensor.shape[: token_dim % tensor.dim()]
                # One chunk for each head and batch, because only the tokens of one head are contiguous.
                for place in itertools.product(*map(range, leading)):
                    chunk = tensor[place].detach()
                    if not chunk.is_contiguous():
                        raise ConfigError(
                            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous "
                            f"from dimension {token_dim % tensor.dim()} on; make it contiguous"
                        )
                    chunks.append(cast("Buffer", chunk.view(-1).view(torch.uint8).numpy()))
                    token_bytes.append(chunk[:1].numel() * chunk.element_size())
            self._layers.append((chunks, token_bytes))

    def parts(self, layer: int, start: int, stop: int) -> Sequence[Buffer | Slices] | None:
        """Return the memory of one layer's tokens, head by head; None if its tensors lack some of these tokens."""
        (found,) = self.blocks((layer,), start, 1, stop - start)
        return found

    def read(self, layer: int, start: int, stop: int) -> bytes:
        """Return a copy of one layer's tokens in the order of `parts`.

        This method shares no code with `parts`, so that a probe can compare both.
        """
        return b"".join(own.tobytes() for own in self._narrowed(layer, start, stop))

    def write(self, layer: int, start: int, stop: int, data: bytes) -> int:
        """Overwrite one layer's tokens with the first bytes of `data`, in the order of `read`.

        Return the number of bytes written.
        """
        at = 0
        for own in self._narrowed(layer, start, stop):
            own[...] = np.frombuffer(data, np.uint8, own.size, at).reshape(own.shape)
            at += own.size
        return at

    def _narrowed(self, layer: int, start: int, stop: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return views of the bytes of one layer's tokens, one for each tensor.

        The views are numpy arrays, because torch refuses to write into a tensor of inference mode outside that mode.
        """
        first = self._first[layer]
        narrowed = [one.detach().narrow(self._token_dim, start - first, stop - start) for one in self._tensors[layer]]
        return [one.unsqueeze(-1).view(torch.uint8).numpy() for one in narrowed]

    def blocks(self, layers: tuple[int, ...], start: int, count: int, size: int) -> list[tuple[Slices, ...] | None]:
        """Return the memory of several layers' tokens, block by block, and within a block layer by layer.

        Parameters
        ----------
        layers : tuple of int
            Numbers of the layers.
        start : int
            Index of the first token in the sequence.
        count, size : int
            Number of blocks, and number of tokens of each block.

        Returns
        -------
        list of tuple of Slices, or None
            For each block, its memory; None if the tensors of a layer lack some of the block's tokens.
        """
        first = self._first[layers[0]]
        rows = self._together.get(layers)
        if rows is None:
            if any(self._first[layer] != first for layer in layers):
                each = zip(*(self.blocks((layer,), start, count, size) for layer in layers), strict=True)
                return [None if None in own else sum(filter(None, own), ()) for own in each]
            # One object for all of these layers, because a call for each layer takes longer than the copy of a block.
            chunks = [chunk for layer in layers for chunk in self._layers[layer][0]]
            token_bytes = [nbytes for layer in layers for nbytes in self._layers[layer][1]]
            rows = self._together[layers] = Rows(chunks, token_bytes)
        return [None if one is None else (one,) for one in rows.blocks(start - first, count, size)]
