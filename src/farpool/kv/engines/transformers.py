"""A cache for transformers whose keys and values live in a pool, and whose prefixes other processes can use.

`FarpoolCache` goes where a ``DynamicCache`` goes. The layers that such a cache keeps as they grow (full attention)
become `PagedLayer`; all others (sliding windows, recurrent states) are small and stay as they are.

*Prefixes.* With a `BlockCache` (see `prefix_blocks`), `save` stores the keys and values of whole blocks of tokens under
keys that say which tokens they are of, and `load` brings back as many leading blocks as there are. A layer with a
sliding window forgets what lies before its window, so it can only go on from a place at which its state was stored:
the cache keeps its latest state at the end of a block, and `load` goes as far as such a state exists. Whatever goes
wrong with nodes or bytes makes the loaded prefix shorter, and the rest is computed.

*What a prefix is found by.* The tokens from the first on, at positions 0, 1, 2 and so on, of one sequence without
padding; whatever else its keys and values depend on, such as images, has to be told as a salt. Models for which that
cannot be enough are refused (`farpool.kv.engines.transformers_config`). A cache never sees masks and positions, so of what
contradicts this it notices what it can: padding at the beginning, several sequences, tokens or a salt other than those
with which the prefix was loaded.

*Load or compute.* The cache sees when a pass of the model comes to its first layer and when to its last, and so how
long computing takes; loads it times itself. With both, the `Judge` of the blocks decides, as for `PrefixCache`. A
device runs behind the program, so on one nothing is timed and everything is loaded.

*Probe.* Before the first save or load through a `BlockCache`, a known block goes through layers like those of the
model, in the same pool: `update` fills them as the model does, and they are saved, loaded, and read as attention reads
them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from farpool.errors import BudgetError, ConfigError, PoolFullError, TierError, UnsupportedError
from farpool.kv.journal import record
from farpool.kv.keys import chain_seed, salt_bytes, token_chain
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock, Probe
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings
from farpool.kv.engines.transformers_config import check_prefixes, config_of, dtype_of, inputs_beside_tokens, left_padding
from farpool.kv.engines.transformers_layer import OperandMemory, PagedLayer
from farpool.memory.pool.pool import blocks_of
from farpool.tensors.arena import device_of

if TYPE_CHECKING:
    from farpool.kv.blocks import BlockCache
    from farpool.memory.pool import Pool

__all__ = ["FarpoolCache", "prefix_blocks"]

_FULL, _SLIDING = "full", "sliding"
"""Kinds of groups of layers; a model has one of either at most."""
_BATCH_BYTES = 16 << 20
"""Bytes of blocks that are in host memory at once on their way between a pool and nodes."""
_ENGINE = "transformers"
_LAYOUT = "lshtd"
"""Axes of payloads: layers, keys and values, heads, tokens, elements. States of layers with sliding windows are cut
into pieces of as many tokens as a block has, which lie like layers."""
_NOT_OF_THE_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Settings in a model's configuration that leave its keys and values as they are."""


def prefix_blocks(
    model: Any,
    settings: CacheSettings | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    tokens_per_block: int = 64,
) -> BlockCache:
    """The blocks in which the prefixes of a model are stored; one object serves all caches of a program.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or its configuration.
    settings : CacheSettings or mapping
        Nodes, and the name of exactly the weights that the model has (``weights_id``), adapters included.
    dtype : torch.dtype, optional
        Of the keys and values; that of the model if left out, or the one in its configuration.
    tokens_per_block : int
        Prefixes are stored and found in multiples of this.

    Raises
    ------
    ConfigError
        A setting is wrong, or nothing tells the dtype.
    UnsupportedError
        The model has layers whose state cannot be stored, such as recurrent ones, or its keys and values depend on what
        comes after them, as with rotary embeddings of the types ``longrope`` and ``dynamic``.
    """
    if not isinstance(settings, CacheSettings):
        settings = CacheSettings.of(settings, "prefix_blocks")
    config, dtype = config_of(model), dtype or dtype_of(model)
    if dtype is None:
        raise ConfigError(
            "prefix_blocks: the configuration does not say the dtype of keys and values: give the model itself, or "
            "dtype=model.dtype",
            setting="dtype",
        )
    check_prefixes(config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    full, sliding, windows = [], [], []
    pieces = 0
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            full.append(str(number))
        elif type(layer) is DynamicSlidingWindowLayer:
            sliding.append(str(number))
            windows.append(layer.sliding_window)
            pieces += _pieces(layer, tokens_per_block)
        elif type(layer) is not DummyLayer:
            raise UnsupportedError(
                f"layer {number}: the state of a {type(layer).__name__} cannot be stored as part of a prefix; use "
                "FarpoolCache without prefixes"
            )
    token_bytes = 2 * heads * width * dtype.itemsize
    groups = []
    if full:
        groups.append(Group(tuple(full), len(full) * tokens_per_block * token_bytes))
    if sliding:
        groups.append(Group(tuple(sliding), pieces * tokens_per_block * token_bytes, "sliding", max(windows)))
    described = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    namespace = Namespace(
        engine=_ENGINE,
        model=config.model_type,
        weights=settings.weights_id,
        dtype=_name_of(dtype),
        layout=_LAYOUT,
        tokens_per_block=tokens_per_block,
        groups=tuple(groups),
        heads=heads,
        head_dim=width,
        tenant=settings.tenant,
        codec=settings.codec,
        extra=(("config", digest),),
    )
    blocks = settings.cache(namespace)
    _probe_of(blocks)
    return blocks


class _State(NamedTuple):
    """State of a layer with a sliding window after a number of tokens."""

    tokens: int
    keys: torch.Tensor
    values: torch.Tensor


class _Pass(NamedTuple):
    """A pass of the model that has come to its first layer: when, and how many tokens there were before."""

    began: float
    context: int


class FarpoolCache(Cache):
    """A cache for transformers with the keys and values of full attention in a pool.

    Tokens, scores and logits are those of a ``DynamicCache``, to the last bit, unless the prefixes that it loads have a
    lossy codec.

    Parameters
    ----------
    config : PreTrainedConfig or PreTrainedModel
        Configuration of the model, as for ``DynamicCache(config=...)``, or the model itself. The whole one: the text
        part of a model that sees images does not say so.
    pool : Pool
        Where the bytes live; on the device that the model computes on.
    tokens_per_block : int, optional
        Tokens of a layer that are moved together. Chosen by the budget of the pool if left out.
    prefixes : BlockCache, optional
        Where `save` and `load` store and find prefixes, from `prefix_blocks`.

    Raises
    ------
    ConfigError
        `tokens_per_block` is not positive, or `prefixes` are of something else than transformers.

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
        found = None if prefixes is None else (prefixes.namespace.engine, prefixes.namespace.layout)
        if found not in (None, (_ENGINE, _LAYOUT)):
            raise ConfigError(
                f"prefixes: blocks of engine and layout {found}; make them with "
                "farpool.kv.transformers.prefix_blocks(model, ...)",
                setting="prefixes",
            )
        self._pool = blocks_of(pool)
        self._prefixes = prefixes
        self._probe = None if prefixes is None else _probe_of(prefixes)
        self._tokens_per_block = tokens_per_block
        self._model_dtype = dtype_of(config)
        config = config_of(config)
        self._beside_tokens = inputs_beside_tokens(config)
        self._padding = left_padding(config)
        self._chain: list[bytes] = []
        """Hashes of the blocks of tokens that `load` and `save` were told, as far as the cache still holds them."""
        self._several = False
        """True once there were several sequences, which have padding and masks."""
        self._states: dict[int, _State] = {}
        """The latest state of each layer with a sliding window at the end of a block of a prefix, by its number."""
        memory = self._operand_memory()
        layers = [
            PagedLayer(self._pool, f"layer {number}", memory, tokens_per_block)
            if type(layer) is DynamicLayer
            else layer
            for number, layer in enumerate(DynamicCache(config=config).layers)
        ]
        super().__init__(layers=layers)
        kept = [number for number, layer in enumerate(layers) if type(layer) is not DummyLayer]
        self._ends = (kept[0], kept[-1]) if kept else (0, 0)
        """Numbers of the first and the last layer that a pass comes to."""
        self._timed = prefixes is not None and kept[1:] != [] and device_of(self._pool).type == "cpu"
        self._pass: _Pass | None = None
        self._held_out = False
        """True while a prefix is computed to measure what loading gains."""

    def _operand_memory(self) -> tuple[OperandMemory, OperandMemory]:
        return OperandMemory(self._pool.ledger), OperandMemory(self._pool.ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> FarpoolCache:
        """A copy that goes on by itself; what both have in common is stored once."""
        other = copy.copy(self)
        other._states = dict(self._states)
        other._held_out = False
        memory = self._operand_memory()
        other.layers = [
            layer.twin(memory) if type(layer) is PagedLayer else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        return other

    def __copy__(self) -> FarpoolCache:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a FarpoolCache cannot be pickled, as its bytes are in a pool of this process: save(tokens) stores them "
            "for others"
        )

    # ---- what transformers calls ---------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values to a layer, and return all that attention needs; see `PagedLayer.update`."""
        self._several = self._several or key_states.shape[0] > 1
        if self._timed and layer_idx == self._ends[0]:
            first: Any = self.layers[layer_idx]
            self._pass = _Pass(time.monotonic(), first.get_seq_length())
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._timed and layer_idx == self._ends[1]:
            self._note_pass(*key_states.shape[::2][:2])
        if self._prefixes is not None and type(self.layers[layer_idx]) is DynamicSlidingWindowLayer:
            self._note_state(layer_idx, key_states.shape[-2], keys, values)
        return keys, values

    def _note_pass(self, sequences: int, tokens: int) -> None:
        """Tell the judge how long a pass has taken: what lies between its first and last layer stands for the rest."""
        found, self._pass = self._pass, None
        # A pass of single tokens says nothing about prompts.
        if found is None or sequences != 1 or tokens < self._block_tokens:
            return
        seconds = (time.monotonic() - found.began) * len(self.layers) / (self._ends[1] - self._ends[0])
        held_out, self._held_out = self._held_out, False
        self._blocks.judge.computed(tokens, found.context, seconds, held_out=held_out)

    def _note_state(self, number: int, new: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the state of a layer with a sliding window at the last end of a block, if that is among new tokens."""
        layer: Any = self.layers[number]
        stop: int = layer.cumulative_length
        over = stop % self._block_tokens
        if over >= new:
            return
        last = keys.shape[-2] - over
        first = max(0, last - layer.sliding_window + 1)
        parts = (states[..., first:last, :].detach().clone() for states in (keys, values))
        self._states[number] = _State(stop - over, *parts)

    def reset(self) -> None:
        """Forget all tokens."""
        self._states.clear()
        self._chain, self._several = [], False
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is given with a minus sign."""
        super().crop(tokens_to_remove)
        tokens = self.get_seq_length()
        self._states = {number: state for number, state in self._states.items() if state.tokens <= tokens}
        if self._chain:
            self._chain = self._chain[: tokens // self._block_tokens]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each sequence of the batch go on with the tokens of another one, as beam search does."""
        self._states.clear()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self._states.clear()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences of the batch."""
        self._states.clear()
        super().batch_select_indices(indices)

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def save(self, tokens: Sequence[int] | torch.Tensor, *, request: str = "", salt: bytes | str = "") -> int:
        """Store the prefix that the cache holds, in whole blocks, for this and other processes.

        Parameters
        ----------
        tokens : sequence of int, or torch.Tensor
            The tokens from the first one on, of one sequence.
        request : str
            Name of the request, for ``farpool why``.
        salt : bytes or str
            Whatever the keys and values depend on beside these tokens, for example a digest of all images; a prefix is
            found with the same one only. Models that see more than tokens need one, also for prompts of text alone.

        Returns
        -------
        int
            Number of leading tokens that `load` can find now. Blocks that were there are not sent again.

        Raises
        ------
        ConfigError
            The cache has no `prefixes`, or keys and values of another dtype or shape than `prefix_blocks` was told; it
            has had more than one sequence; the tokens begin with padding; the salt is missing; tokens or salt are not
            those of the prefix that was loaded.
        """
        blocks, step = self._blocks, self._block_tokens
        ids = self._checked(tokens, salt)
        count = min(len(ids), self.get_seq_length()) // step
        if count == 0:
            return 0
        self._check_layers()
        chain = self._hashed(ids[: count * step], salt)
        known = min(len(chain), len(self._chain))
        if chain[:known] != self._chain[:known]:
            raise ConfigError(
                "save: the tokens, or the salt, are not those with which the prefix was loaded, or saved before; "
                "give the whole sequence from its first token on, and the same salt"
            )
        self._chain = max(chain, self._chain, key=len)
        stored = count
        if self._is_unproved("save", count, request):
            return 0
        full = self._of_type(PagedLayer)
        if full:
            keys = self._keys(chain, _FULL)
            parents = dict(zip(keys[1:], keys, strict=False))
            present = blocks.lookup(keys, request=request).found
            for batch in _batches([number for number in range(count) if not present[number]], self._bytes(_FULL)):
                payloads = self._payloads(full, batch)
                cost = blocks.judge.prefill_seconds(count * step) / count
                batched = [keys[number] for number in batch]
                outcomes = blocks.save(batched, payloads, request=request, cost=cost, parents=parents)
                stored = min([stored, *(number for number, no in zip(batch, outcomes, strict=True) if no is not None)])
        sliding = self._of_type(DynamicSlidingWindowLayer)
        if sliding:
            ends = {self._states[number].tokens for number, _ in sliding if number in self._states}
            if len(ends) != 1 or len(self._states) < len(sliding) or (end := ends.pop() // step) > stored:
                return 0
            (key,) = self._keys(chain[end - 1 : end], _SLIDING)
            before = {key: keys[end - 1]} if full else {}
            (outcome,) = blocks.save([key], [self._sliding_payload()], request=request, parents=before)
            stored = 0 if outcome is not None else end
        return stored * step

    def load(
        self,
        tokens: Sequence[int] | torch.Tensor,
        *,
        request: str = "",
        salt: bytes | str = "",
        judged: bool = True,
    ) -> int:
        """Bring back the longest prefix that is stored, into an empty cache, if that pays.

        At least one token is left to compute, as its logits are needed. Once computing and loading have been measured,
        only what is expected to come sooner than it could be computed is loaded, and a few requests compute to check
        that.

        Parameters
        ----------
        tokens : sequence of int, or torch.Tensor
            The prompt, of one sequence.
        request : str
            Name of the request, for ``farpool why``.
        salt : bytes or str
            As of `save`.
        judged : bool
            False to load what is there however long it takes.

        Returns
        -------
        int
            Number of leading tokens that the cache holds now; 0 where nothing was found in time, or computing takes
            less time, or the model has another dtype than the prefixes.

        Raises
        ------
        ConfigError
            The cache has no `prefixes`, or holds tokens already; the tokens are of several sequences, or begin with
            padding; the salt is missing.
        BudgetError, PoolFullError, TierError
            The pool cannot take them; the cache is empty then.
        """
        blocks, step = self._blocks, self._block_tokens
        if self.get_seq_length():
            raise ConfigError(f"load: the cache holds {self.get_seq_length()} tokens; use a new one, or reset it")
        self._held_out = False
        ids = self._checked(tokens, salt)
        count = (len(ids) - 1) // step
        if count <= 0:
            return 0
        if self._model_dtype is not None and self._model_dtype != self._dtype:
            why = (
                f"the prefixes are of {blocks.namespace.dtype} and the model is of {_name_of(self._model_dtype)}: give "
                "the model itself to prefix_blocks and to FarpoolCache"
            )
            record(request, "load", count, 0, {"other_dtype": count}, 0.0, why)
            return 0
        began = time.monotonic()
        if judged and blocks.judge.passes_over(count * step, step, request):
            self._held_out = True
            return 0
        chain = self._hashed(ids[: count * step], salt)
        full = self._of_type(PagedLayer)
        keys = self._keys(chain, _FULL) if full else []
        if full:
            count = blocks.lookup(keys, request=request).leading
        ends = [count]
        sliding = self._of_type(DynamicSlidingWindowLayer)
        if sliding:
            states = self._keys(chain[:count], _SLIDING)
            found = blocks.lookup(states, request=request).found
            ends = [number + 1 for number in reversed(range(count)) if found[number]]
        if not ends or not (there := ends[0]):
            if judged:
                blocks.judge.missed((len(ids) - 1) // step * step, time.monotonic() - began)
            return 0
        nbytes = (there * self._bytes(_FULL) if full else 0) + (self._bytes(_SLIDING) if sliding else 0)
        until = math.inf
        if judged:
            plan, arm = blocks.judge.decide(there * step, nbytes, step=step, request=request)
            if plan.compute:
                self._held_out = arm == "hold-out"
                return 0
            if plan.seconds is not None and plan.recompute_seconds is not None:
                until = began + plan.recompute_seconds  # what comes later could have been computed
        if self._is_unproved("load", there, request, _left(until)):
            return 0
        start = time.monotonic()
        under_way = blocks.judge.begun(nbytes)
        try:
            loaded = self._load_full(full, keys[:there], request, until) if full else there
            if sliding:
                came = (end for end in ends if end <= loaded and self._load_sliding(states, end, request, until))
                loaded = next(came, 0)
            for _, layer in full:
                layer.crop(loaded * step - layer.get_seq_length())
        except BaseException:
            self.reset()
            raise
        finally:
            blocks.judge.ended(nbytes)
        ended = time.monotonic()
        if loaded == there:
            blocks.judge.loaded(under_way, ended - start)
        if judged:
            blocks.judge.gained(there * step, loaded * step, ended - began)
        if not loaded:
            self.reset()
        self._chain = chain[:loaded]
        return loaded * step

    def _checked(self, tokens: Sequence[int] | torch.Tensor, salt: bytes | str) -> list[int]:
        """Return token ids as a list if they, with the salt, may name a prefix.

        Raises
        ------
        ConfigError
        """
        ids = _token_ids(tokens)
        if self._beside_tokens and not salt:
            raise ConfigError(
                f"keys and values of this model depend on more than tokens ({self._beside_tokens}): give save and load "
                "a salt=, such as a digest of all images and sounds of the prompt; any other text if it has none",
                setting="salt",
            )
        if ids and ids[0] == self._padding:
            raise ConfigError(
                f"the tokens begin with padding ({ids[0]}); prefixes are of one sequence whose first token is at "
                "position 0: compute, load and save it without padding"
            )
        return ids

    def _hashed(self, ids: Sequence[int], salt: bytes | str) -> list[bytes]:
        """Return the hashes of blocks of tokens, which depend on the namespace and the salt, too."""
        return token_chain(ids, self._block_tokens, chain_seed(self._blocks.digest, salt_bytes(salt)))

    @property
    def _blocks(self) -> BlockCache:
        if self._prefixes is None:
            raise ConfigError(
                "this FarpoolCache has no prefixes: make it with FarpoolCache(..., prefixes=prefix_blocks(...))"
            )
        return self._prefixes

    @property
    def _block_tokens(self) -> int:
        return self._blocks.namespace.tokens_per_block

    def _of_type(self, kind: type) -> list[tuple[int, Any]]:
        """Layers of one type, with their numbers."""
        return [(number, layer) for number, layer in enumerate(self.layers) if type(layer) is kind]

    def _group(self, kind: str) -> tuple[int, Group]:
        """Number and description of the group of layers of one kind."""
        groups = self._blocks.namespace.groups
        return next((number, group) for number, group in enumerate(groups) if group.kind == kind)

    def _keys(self, chain: Sequence[bytes], kind: str) -> list[bytes]:
        """Keys of the blocks of one kind of layers."""
        number, _ = self._group(kind)
        return [self._blocks.key(link, number) for link in chain]

    def _bytes(self, kind: str) -> int:
        return self._group(kind)[1].block_bytes

    def _shape(self, tokens: int) -> tuple[int, int, int, int]:
        namespace = self._blocks.namespace
        return 1, namespace.heads, tokens, namespace.head_dim

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._blocks.namespace.dtype)
        return dtype

    def _check_layers(self) -> None:
        """Check that the layers hold what the namespace says: one sequence, of its dtype and shapes.

        Raises
        ------
        ConfigError
        """
        if self._several:
            raise ConfigError(
                "the cache has held several sequences at once, whose padding and masks it does not know; prefixes are "
                "of one sequence: compute it by itself to save it"
            )
        shape = self._shape(0)
        for number, layer in (*self._of_type(PagedLayer), *self._of_type(DynamicSlidingWindowLayer)):
            if type(layer) is PagedLayer:
                shapes = [(*found[:2], 0, found[3]) for found in layer.shapes(0)]
            else:
                shapes = [(*found.shape[:2], 0, found.shape[3]) for found in (layer.keys, layer.values)]
            dtype = layer.dtype if type(layer) is PagedLayer else layer.keys.dtype
            if dtype != self._dtype or any(found != shape for found in shapes):
                raise ConfigError(
                    f"layer {number} has keys and values of {dtype} with shapes {shapes}; prefixes have "
                    f"{self._dtype} with shape {shape}, of one sequence: give prefix_blocks the model's config and "
                    "dtype"
                )

    def _payloads(self, layers: Sequence[tuple[int, PagedLayer]], numbers: Sequence[int]) -> list[memoryview]:
        """Keys and values of some blocks of tokens, in the layout of payloads."""
        step = self._block_tokens
        memory, payloads = self._memory_for(len(layers), len(numbers))
        keys, values = (torch.empty(self._shape(step), dtype=self._dtype, device=layers[0][1].device) for _ in range(2))
        for place, number in enumerate(numbers):
            for row, (_, layer) in enumerate(layers):
                layer.read(number * step, (number + 1) * step, keys, values)
                memory[place, row, 0] = keys[0]
                memory[place, row, 1] = values[0]
        return payloads

    def _load_full(
        self, layers: Sequence[tuple[int, PagedLayer]], keys: Sequence[bytes], request: str, until: float
    ) -> int:
        """Load leading blocks of the layers with full attention; returns how many came."""
        loaded = 0
        for batch in _batches(range(len(keys)), self._bytes(_FULL)):
            memory, targets = self._memory_for(len(layers), len(batch))
            own = [keys[number] for number in batch]
            outcomes = self._blocks.load(own, targets, request=request, timeout=_left(until))
            came = len(list(takewhile(lambda reason: reason is None, outcomes)))
            if came:
                self._extend(layers, memory[:came])
            loaded += came
            if came < len(batch):
                break
        return loaded

    def _extend(self, layers: Sequence[tuple[int, PagedLayer]], memory: torch.Tensor) -> None:
        """Add blocks that have come into memory of `_memory_for` to the layers with full attention."""
        for row, (_, layer) in enumerate(layers):
            parts = memory[:, row].permute(1, 2, 0, 3, 4).to(device_of(self._pool))
            keys, values = parts.reshape(2, *self._shape(len(memory) * self._block_tokens))
            layer.extend(keys, values)

    def _memory_for(self, layers: int, count: int) -> tuple[torch.Tensor, list[memoryview]]:
        """Memory for blocks: as a tensor ``(blocks, layers, 2, heads, tokens, width)``, and the bytes of each block."""
        nbytes = self._bytes(_FULL)
        memory = bytearray(count * nbytes)
        view = memoryview(memory)
        shape = (count, layers, 2, *self._shape(self._block_tokens)[1:])
        blocks = [view[start : start + nbytes] for start in range(0, len(memory), nbytes)]
        return torch.frombuffer(memory, dtype=self._dtype).view(shape), blocks

    def _sliding_payload(self) -> memoryview:
        """States of all layers with a sliding window; what a short one lacks is zero."""
        step = self._block_tokens
        memory, parts = self._sliding_memory()
        for (number, _), part in zip(self._of_type(DynamicSlidingWindowLayer), parts, strict=True):
            states = self._states[number]
            kept = torch.stack([states.keys[0], states.values[0]])
            for place, piece in enumerate(part):
                tokens = kept[..., place * step : (place + 1) * step, :]
                piece[..., : tokens.shape[-2], :] = tokens
        return memory

    def _load_sliding(self, states: Sequence[bytes], end: int, request: str, until: float) -> bool:
        """Load the states of all layers with a sliding window at the end of a block; True if they came."""
        memory, parts = self._sliding_memory()
        (reason,) = self._blocks.load([states[end - 1]], [memory], request=request, timeout=_left(until))
        if reason is not None:
            return False
        self._restore(parts, end * self._block_tokens)
        return True

    def _restore(self, parts: Sequence[torch.Tensor], tokens: int) -> None:
        """Give layers with a sliding window the states after so many tokens, from pieces of `_sliding_memory`."""
        for (number, layer), part in zip(self._of_type(DynamicSlidingWindowLayer), parts, strict=True):
            kept = min(tokens, layer.sliding_window - 1)
            joined = torch.cat(list(part), dim=-2)[..., :kept, :].to(device_of(self._pool))
            keys, values = joined.unsqueeze(1)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, tokens
            self._states[number] = _State(tokens, keys, values)

    def _sliding_memory(self) -> tuple[memoryview, list[torch.Tensor]]:
        """Memory for the states of all layers with a sliding window: its bytes, and the pieces of each layer.

        Those are tensors ``(pieces, 2, heads, tokens, width)``.
        """
        memory = bytearray(self._bytes(_SLIDING))
        whole = torch.frombuffer(memory, dtype=self._dtype).view(-1, 2, *self._shape(self._block_tokens)[1:])
        parts, start = [], 0
        for _, layer in self._of_type(DynamicSlidingWindowLayer):
            stop = start + _pieces(layer, self._block_tokens)
            parts.append(whole[start:stop])
            start = stop
        return memoryview(memory), parts

    # ---- the probe -----------------------------------------------------------------------------------------------

    def _is_unproved(self, step: str, blocks: int, request: str, timeout: float | None = None) -> bool:
        """Probe layers like those of this cache at their first use; True if blocks must not be moved."""
        assert self._probe is not None
        kind = (str(device_of(self._pool)), self._tokens_per_block)
        try:
            reason = self._probe.first_use([kind], lambda kinds: self._scratch().probe_block(), timeout)
        except (BudgetError, PoolFullError, TierError):
            if step == "load":
                raise
            reason = Reason.FULL
        if reason is not None:
            said = "no known block has come back through layers like these"
            self._blocks.missed(step, request, blocks, reason, said)
        return reason is not None

    def _scratch(self) -> _Scratch:
        """Return an empty cache with layers like those of this one."""
        other = _Scratch.__new__(_Scratch)
        other.__dict__.update(self.__dict__)
        other._timed, other._several, other._chain = False, False, []
        other.forget()
        return other


class _Scratch(FarpoolCache):
    """Layers of a cache that are used for its probe alone, with one block of tokens in each."""

    def forget(self) -> None:
        """Begin with empty layers; those of before leave the pool."""
        memory = self._operand_memory()
        self._states: dict[int, _State] = {}
        self.layers = [
            PagedLayer(self._pool, f"probe of layer {number}", memory, self._tokens_per_block)
            if type(layer) is PagedLayer
            else DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
            if type(layer) is DynamicSlidingWindowLayer
            else layer
            for number, layer in enumerate(self.layers)
        ]

    def probe_block(self) -> EngineBlock:
        """Make the block of the probe: what one block of tokens leaves in all layers."""
        step = self._block_tokens
        kept = [(number, step) for number, _ in self._of_type(PagedLayer)]
        kept += [
            (number, min(step, layer.sliding_window - 1)) for number, layer in self._of_type(DynamicSlidingWindowLayer)
        ]
        came: list[torch.Tensor] = []

        def targets() -> list[memoryview]:
            places: list[memoryview] = []
            came.clear()
            if full := self._of_type(PagedLayer):
                memory, places = self._memory_for(len(full), 1)
                came.append(memory)
            if self._of_type(DynamicSlidingWindowLayer):
                place, parts = self._sliding_memory()
                places.append(place)
                came.extend(parts)
            return places

        def land(places: Sequence[Any]) -> None:
            self.forget()
            if full := self._of_type(PagedLayer):
                self._extend(full, came.pop(0))
            self._restore(came, step)

        def write(data: bytes) -> None:
            self._fill(kept, data)

        nbytes = sum(2 * math.prod(self._shape(tokens)) for _, tokens in kept) * self._dtype.itemsize
        write(bytes(nbytes))
        return EngineBlock(nbytes, write, lambda: self._seen(kept), self._values, targets, land)

    def _fill(self, kept: Sequence[tuple[int, int]], data: bytes) -> None:
        """Add a block of tokens to each layer as the model does; `data` is of the last ones, which it keeps."""
        self.forget()
        rest = torch.frombuffer(bytearray(data), dtype=self._dtype)
        for number, tokens in kept:
            shape = (2, *self._shape(tokens))
            own, rest = rest[: math.prod(shape)].view(shape), rest[math.prod(shape) :]
            before = torch.zeros((2, *self._shape(self._block_tokens - tokens)), dtype=self._dtype)
            keys, values = torch.cat([before, own], dim=-2).to(device_of(self._pool))
            self.update(keys, values, number)

    def _seen(self, kept: Sequence[tuple[int, int]]) -> bytes:
        """Return what attention gets when one more token comes."""
        other, seen = copy.deepcopy(self), []
        token = torch.zeros(self._shape(1), dtype=self._dtype, device=device_of(self._pool))
        for number, tokens in kept:
            for states in other.update(token, token, number):
                own = states[..., states.shape[-2] - 1 - tokens : -1, :].cpu().contiguous()
                seen.append(own.view(-1).view(torch.uint8).numpy().tobytes())
        return b"".join(seen)

    def _values(self) -> list[memoryview]:
        full = self._of_type(PagedLayer)
        payloads = self._payloads(full, [0]) if full else []
        return [*payloads, self._sliding_payload()] if self._of_type(DynamicSlidingWindowLayer) else payloads


def _probe_of(prefixes: BlockCache) -> Probe:
    """Return the probe that all caches with these prefixes have in common."""
    probe = prefixes.probe
    if not isinstance(probe, Probe):
        probe = Probe("FarpoolCache", at_first_use=True)
        probe.guard(prefixes, prefixes)
    return probe


def _pieces(layer: DynamicSlidingWindowLayer, tokens_per_block: int) -> int:
    """Return the number of pieces of `tokens_per_block` tokens into which a layer's state is cut."""
    return -(-(layer.sliding_window - 1) // tokens_per_block)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _token_ids(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """Token ids as a list.

    Raises
    ------
    ConfigError
        They are of several sequences.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() > 1 and tokens.numel() != tokens.shape[-1]:
            raise ConfigError(
                f"tokens have shape {tuple(tokens.shape)}; prefixes are stored for one sequence at a time"
            )
        found: list[int] = tokens.flatten().tolist()
        return found
    return list(tokens)


def _left(until: float) -> float | None:
    """Seconds that are left of a deadline; None if there is none."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _batches(numbers: Sequence[int], nbytes: int) -> Iterator[Sequence[int]]:
    """Cut a list of blocks of `nbytes` bytes each into batches that fit into memory."""
    step = max(1, _BATCH_BYTES // nbytes)
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]
