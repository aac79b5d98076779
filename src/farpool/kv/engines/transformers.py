"""A cache for the transformers library. Its keys and values are in a pool, and processes can share its prefixes.

Use `FarpoolCache` in place of a ``DynamicCache``. Layers with full attention, whose keys and values grow with each
token, become `PagedLayer`. Other layers (sliding windows, recurrent states) are small and stay as they are.

*Prefixes.* With a `BlockCache` (see `prefix_blocks`), `FarpoolCache.save` stores the keys and values of whole blocks of
tokens, each block under a key that depends on its tokens and all tokens before it. `FarpoolCache.load` loads as many
leading blocks as the nodes have. A layer with a sliding window forgets the tokens before its window, so it can continue
only after a block for which its state was stored. The cache keeps the state that such a layer had at the end of its
latest whole block. `save` stores this state, and `load` loads the longest prefix at whose end such a state was stored.
If a node fails or bytes are damaged, the loaded prefix is shorter, and the model computes the rest.

*How a prefix is found.* `load` finds a prefix by its tokens: the tokens of one sequence without padding, from position
0 on. If keys and values depend on anything else, such as images, the caller names these inputs in a salt. Models for
which tokens and salt are not enough are refused (`farpool.kv.engines.transformers_config`). A cache never sees masks
and positions, but it detects some kinds of wrong use: padding at the beginning, several sequences, and tokens or a salt
that differ from those with which the prefix was loaded.

*Load or compute.* The cache sees when a pass (one call) of the model reaches the first and the last layer, so it
measures the compute time. It also measures its own loads. The `Judge` of the blocks compares both times to decide
whether to load a prefix or to compute it, as it does for `PrefixCache`. A GPU still computes after the model's call has
returned. So nothing is timed on a GPU, and every prefix that is found is loaded.

*Probe.* Before the first save or load through a `BlockCache`, a test moves a known block through new layers of the same
kinds as the model's layers, in the same pool. The test fills these layers with `FarpoolCache.update` as the model does,
saves and loads the block, and reads the layers as attention does. If other bytes come back, no prefix is saved or
loaded.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from farpool.errors import ConfigError, UnsupportedError
from farpool.kv.engines.transformers_blocks import prefix_blocks
from farpool.kv.engines.transformers_config import config_of
from farpool.kv.engines.transformers_layer import OperandMemory, PagedLayer
from farpool.kv.engines.transformers_payloads import Payloads
from farpool.kv.engines.transformers_prefix import CachedPrefix
from farpool.kv.engines.transformers_probe import probe_block
from farpool.memory.pool.pool import blocks_of
from farpool.tensors.arena import device_of

if TYPE_CHECKING:
    from farpool.kv.blocks import BlockCache
    from farpool.kv.probe import EngineBlock
    from farpool.memory.pool import Pool

__all__ = ["FarpoolCache", "prefix_blocks"]


class _Pass(NamedTuple):
    """A pass of the model that has begun: its start time, and the number of tokens that were in the cache then."""

    began: float
    context: int


class _PassTimer:
    """Measures how long the passes of a model take.

    It measures the time from the first layer to the last layer, and scales that time to all layers.

    Parameters
    ----------
    first, last : int
        Numbers of the first and the last layer that a pass reaches.
    layers : int
        Number of layers.

    Attributes
    ----------
    first : int
        The argument.
    """

    def __init__(self, first: int, last: int, layers: int) -> None:
        self.first = first
        self._last = last
        self._share = layers / (last - first)  # the time between the two layers stands for the time of all layers
        self._pass: _Pass | None = None

    def begin(self, context: int) -> None:
        """Record that a pass has reached the first layer, which holds `context` tokens from earlier passes."""
        self._pass = _Pass(time.monotonic(), context)

    def left(self, number: int) -> tuple[int, float] | None:
        """Record that a pass leaves a layer.

        After the last layer, return the number of tokens that were in the cache before the pass, and the seconds that
        the pass took. After any other layer, return None.
        """
        if number != self._last or self._pass is None:
            return None
        found, self._pass = self._pass, None
        return found.context, (time.monotonic() - found.began) * self._share


class FarpoolCache(Cache):
    """A cache for the transformers library that keeps the keys and values of full attention in a pool.

    Tokens, scores and logits equal the results with a ``DynamicCache`` to the last bit, except after loading prefixes
    that a lossy codec has encoded.

    Parameters
    ----------
    config : PreTrainedConfig or PreTrainedModel
        Configuration of the model, as for ``DynamicCache(config=...)``, or the model itself. Give the whole
        configuration: the text part of a multimodal model's configuration does not show that the model accepts images.
    pool : Pool
        Pool for the bytes, on the device that the model computes on.
    tokens_per_block : int, optional
        Number of tokens of a layer that the pool moves together. The default depends on the budget of the pool.
    prefixes : BlockCache, optional
        Result of `prefix_blocks`: the blocks in which `save` stores prefixes and `load` finds them.

    Raises
    ------
    ConfigError
        `tokens_per_block` is not positive, or `prefixes` were not made by `prefix_blocks`.

    Examples
    --------
    >>> with farpool.Pool(fast="1GiB", dram="16GiB") as pool:
    ...     cache = FarpoolCache(model.config, pool=pool)
    ...     outputs = model.generate(**inputs, cache=cache)  # past_key_values=cache before 5.24
    """

    def __init__(
        self,
        config: Any,
        *,
        pool: Pool,
        tokens_per_block: int | None = None,
        prefixes: BlockCache | None = None,
    ) -> None:
        if tokens_per_block is not None and (type(tokens_per_block) is not int or tokens_per_block < 1):
            raise ConfigError(
                f"tokens_per_block is {tokens_per_block!r}, expected a positive number of tokens, for example 64",
                setting="tokens_per_block",
            )
        self._pool = blocks_of(pool)
        self._tokens_per_block = tokens_per_block
        layers: list[Any] = list(DynamicCache(config=config_of(config)).layers)
        memory = self._operand_memory()
        for number, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[number] = PagedLayer(self._pool, f"layer {number}", memory, tokens_per_block)
        super().__init__(layers=layers)
        self._prefix: CachedPrefix | None = None
        self._timer: _PassTimer | None = None
        if prefixes is not None:
            device = device_of(self._pool)
            payloads = Payloads(prefixes.namespace, self.layers, device)
            self._prefix = CachedPrefix(prefixes, payloads, config, kind=(str(device), tokens_per_block))
            kept = [number for number, layer in enumerate(layers) if type(layer) is not DummyLayer]
            if kept[1:] and device.type == "cpu":
                self._timer = _PassTimer(kept[0], kept[-1], len(layers))

    def _operand_memory(self) -> tuple[OperandMemory, OperandMemory]:
        return OperandMemory(self._pool.ledger), OperandMemory(self._pool.ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> FarpoolCache:
        """Return an independent copy. Blocks that the copy and this cache have in common are stored once."""
        memory = self._operand_memory()
        return self._with_layers(
            [layer.twin(memory) if type(layer) is PagedLayer else copy.deepcopy(layer, memo) for layer in self.layers]
        )

    def _with_layers(self, layers: list[Any]) -> FarpoolCache:
        """Return a copy of this cache with other layers of the same kinds."""
        other = copy.copy(self)
        other.layers = layers
        other._timer = copy.copy(self._timer)
        if self._prefix is not None:
            other._prefix = self._prefix.twin(self._prefix.payloads.twin(layers))
        return other

    def __copy__(self) -> FarpoolCache:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a FarpoolCache cannot be pickled, because its bytes are in a pool of this process: store them for other "
            "processes with save(tokens)"
        )

    # ---- what transformers calls ---------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values to a layer, and return all keys and values that attention needs.

        `PagedLayer.update` describes the arguments, the results and the errors.
        """
        prefix, timer = self._prefix, self._timer
        if timer is not None and layer_idx == timer.first:
            layer: Any = self.layers[layer_idx]
            timer.begin(layer.get_seq_length())
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if prefix is not None:
            sequences, _, tokens = key_states.shape[:3]
            measured = None if timer is None else timer.left(layer_idx)
            # A pass of single tokens says nothing about prompts.
            if measured is not None and sequences == 1 and tokens >= prefix.step:
                prefix.computed(tokens, *measured)
            prefix.updated(layer_idx, sequences, tokens, keys, values)
        return keys, values

    def reset(self) -> None:
        """Forget all tokens."""
        if self._prefix is not None:
            self._prefix.forget()
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. The argument is their number with a minus sign: -3 removes three tokens."""
        super().crop(tokens_to_remove)
        if self._prefix is not None:
            self._prefix.cropped(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each sequence of the batch by the sequence with the given index, as beam search does."""
        self._forget_states()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self._forget_states()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences of the batch with the given indices."""
        self._forget_states()
        super().batch_select_indices(indices)

    def _forget_states(self) -> None:
        """Forget the states of sliding windows that are kept for `save`, because the batch has other sequences now."""
        if self._prefix is not None:
            self._prefix.payloads.forget_states()

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def save(self, tokens: Sequence[int] | torch.Tensor, *, request: str = "", salt: bytes | str = "") -> int:
        """Store the whole blocks of the prefix that the cache holds, for use by this and other processes.

        Parameters
        ----------
        tokens : sequence of int, or torch.Tensor
            The tokens of one sequence, from the first token on.
        request : str
            Name of the request, for ``farpool why``.
        salt : bytes or str
            A name for all other inputs on which the keys and values depend in addition to the tokens, for example a
            digest of all images. A prefix is found only with the salt with which it was saved. Models that see more
            than tokens need a salt, even for prompts of text alone.

        Returns
        -------
        int
            Number of leading tokens that `load` can find now. Blocks that the nodes already have are not sent again.

        Raises
        ------
        ConfigError
            - The cache has no `prefixes`, or has had more than one sequence.
            - Its keys and values have another dtype or shape than the blocks from `prefix_blocks`.
            - The tokens begin with padding, or the salt is missing.
            - The tokens or the salt differ from the prefix that this cache has loaded or saved before.
        """
        return self._required().save(tokens, self.get_seq_length(), salt, request, self._probe_block)

    def load(
        self,
        tokens: Sequence[int] | torch.Tensor,
        *,
        request: str = "",
        salt: bytes | str = "",
        judged: bool = True,
    ) -> int:
        """Load the longest stored prefix into an empty cache, if that is faster than computing it.

        At least the last token is not loaded, because the model must compute its logits. After both computing and
        loading have been measured, a prefix is loaded only if loading is expected to take less time. A few requests
        compute although loading seems faster, to measure how much time loading saves.

        Parameters
        ----------
        tokens : sequence of int, or torch.Tensor
            The prompt, which is a single sequence.
        request : str
            Name of the request, for ``farpool why``.
        salt : bytes or str
            The salt with which the prefix was saved; see `save`.
        judged : bool
            False to load the longest prefix that is found, even if loading takes longer than computing.

        Returns
        -------
        int
            Number of leading tokens that the cache holds now. 0 if no prefix was found in time, if computing is
            expected to take less time, or if the model has another dtype than the prefixes.

        Raises
        ------
        ConfigError
            - The cache has no `prefixes`, or holds tokens already.
            - The tokens belong to several sequences, or begin with padding.
            - The salt is missing.
        BudgetError, PoolFullError, TierError
            The pool has no room for the prefix, or a tier has failed. The cache is empty afterwards.
        """
        prefix = self._required()
        if self.get_seq_length():
            raise ConfigError(f"load: the cache holds {self.get_seq_length()} tokens; use a new one, or reset it")
        return prefix.load(tokens, salt, request, self._probe_block, judged=judged)

    def _required(self) -> CachedPrefix:
        if self._prefix is None:
            raise ConfigError(
                "this FarpoolCache has no prefixes: make it with FarpoolCache(..., prefixes=prefix_blocks(...))"
            )
        return self._prefix

    def _probe_block(self) -> EngineBlock:
        """Make the block of the probe, in new layers of the same kinds as the layers of this cache."""

        def empty() -> tuple[FarpoolCache, Payloads]:
            memory = self._operand_memory()
            other = self._with_layers(
                [
                    PagedLayer(self._pool, f"probe of layer {number}", memory, self._tokens_per_block)
                    if type(layer) is PagedLayer
                    else DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
                    if type(layer) is DynamicSlidingWindowLayer
                    else layer
                    for number, layer in enumerate(self.layers)
                ]
            )
            other._timer = None
            prefix = other._required()
            prefix.forget()
            return other, prefix.payloads

        return probe_block(empty, device_of(self._pool))
