"""Saves the prefix of a cache for transformers as blocks on nodes, and loads stored prefixes.

A *chain* is the list of the hashes of a sequence's blocks of tokens. Each hash also depends on all tokens before its
block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from farpool.errors import BudgetError, ConfigError, PoolFullError, TierError
from farpool.kv.engines.transformers_blocks import ENGINE, FULL, LAYOUT, SLIDING, name_of, probe_of
from farpool.kv.engines.transformers_config import config_of, dtype_of, inputs_beside_tokens, left_padding
from farpool.kv.engines.transformers_payloads import Payloads
from farpool.kv.journal import record
from farpool.kv.keys import chain_seed, salt_bytes, token_chain
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Hashable

    from farpool.kv.blocks import BlockCache
    from farpool.kv.probe import EngineBlock

    Tokens = Sequence[int] | torch.Tensor
    ProbeBlock = Callable[[], EngineBlock]

__all__ = ["CachedPrefix"]

_BATCH_BYTES_MAX = 16 << 20
"""Maximum bytes of one batch. Blocks pass through host memory between a pool and nodes, one batch at a time. A larger
block is a batch of its own."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Blocks of a prompt, and where the model can continue after loading them.

    Attributes
    ----------
    chain : list of bytes
        Hashes of the prompt's blocks of tokens.
    keys, states : list of bytes
        Keys of the prompt's blocks for layers with full attention, and keys of the states of layers with a sliding
        window. Each list is empty if the model has no layers of that kind.
    ends : list of int
        Numbers of leading blocks after which the model can continue. The largest is first.
    """

    chain: list[bytes]
    keys: list[bytes]
    states: list[bytes]
    ends: list[int]


class CachedPrefix:
    """Saves and loads the prefix that one cache holds.

    Parameters
    ----------
    blocks : BlockCache
        Blocks from `prefix_blocks`.
    payloads : Payloads
        Payloads of the cache's layers.
    model : PreTrainedModel or PreTrainedConfig
        The model, or its configuration.
    kind : hashable
        Kind of memory that the cache has. The probe tests each kind once.

    Attributes
    ----------
    payloads : Payloads
        The argument.
    step : int
        Tokens of a block.

    Raises
    ------
    ConfigError
        The blocks were not made by `prefix_blocks`.
    """

    def __init__(self, blocks: BlockCache, payloads: Payloads, model: Any, kind: Hashable) -> None:
        found = blocks.namespace.engine, blocks.namespace.layout
        if found != (ENGINE, LAYOUT):
            raise ConfigError(
                f"prefixes: blocks of engine and layout {found}; make them with farpool.kv.prefix_blocks(model, ...)",
                setting="prefixes",
            )
        self._blocks = blocks
        self._probe = probe_of(blocks)
        self._kind = kind
        self._model_dtype = dtype_of(model)
        config = config_of(model)
        self._beside_tokens = inputs_beside_tokens(config)
        self._padding = left_padding(config)
        self.payloads = payloads
        self.step = payloads.step
        self._chain: list[bytes] = []
        """Hashes of the leading blocks whose tokens `load` or `save` received and which the cache still holds."""
        self._several = False
        """True if the cache has held several sequences at once, which may have padding and masks."""
        self._held_out = False
        """True while the model computes a prefix instead of loading it, to measure how much time loading saves."""

    def twin(self, payloads: Payloads) -> CachedPrefix:
        """Return the `CachedPrefix` of a copy of the cache; `payloads` are the payloads of the copy."""
        other = CachedPrefix.__new__(CachedPrefix)
        other.__dict__.update(self.__dict__, payloads=payloads, _held_out=False)
        return other

    # ---- what the cache reports ----------------------------------------------------------------------------------

    def updated(self, number: int, sequences: int, new: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Record that the model has added tokens to a layer.

        Parameters
        ----------
        number : int
            Number of the layer.
        sequences : int
            Number of sequences in the batch.
        new : int
            Number of new tokens.
        keys, values : torch.Tensor
            Keys and values that the layer gave to attention, including the new tokens.
        """
        self._several = self._several or sequences > 1
        self.payloads.note_state(number, new, keys, values)

    def computed(self, tokens: int, context: int, seconds: float) -> None:
        """Record that the model has computed `tokens` tokens after `context` earlier tokens in this many seconds."""
        held_out, self._held_out = self._held_out, False
        self._blocks.judge.computed(tokens, context, seconds, held_out=held_out)

    def cropped(self, tokens: int) -> None:
        """Record that the cache keeps only its first `tokens` tokens."""
        self.payloads.forget_states(tokens)
        self._chain = self._chain[: tokens // self.step]

    def forget(self) -> None:
        """Forget which prefix the cache holds."""
        self.payloads.forget_states()
        self._chain, self._several = [], False

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, tokens: Tokens, cached: int, salt: bytes | str, request: str, probe: ProbeBlock) -> int:
        """Store the prefix, as `FarpoolCache.save` describes.

        Parameters
        ----------
        tokens, salt, request
            See `FarpoolCache.save`.
        cached : int
            Number of tokens that the cache holds.
        probe : callable
            Makes the known block of the probe.
        """
        ids = self._checked(tokens, salt)
        count = min(len(ids), cached) // self.step
        if count == 0:
            return 0
        if self._several:
            raise ConfigError(
                "the cache has held several sequences at once, whose padding and masks it does not know; prefixes are "
                "of one sequence: compute it by itself to save it"
            )
        self.payloads.check()
        chain = self._hashed(ids[: count * self.step], salt)
        known = min(len(chain), len(self._chain))
        if chain[:known] != self._chain[:known]:
            raise ConfigError(
                "save: the tokens, or the salt, differ from those with which the prefix was loaded or saved before; "
                "give the whole sequence from its first token on, and the same salt"
            )
        self._chain = max(chain, self._chain, key=len)
        if self._is_unproved("save", count, request, probe):
            return 0
        keys = self._keys(chain, FULL) if self.payloads.full else []
        stored = self._save_full(keys, request) if keys else count
        if self.payloads.sliding:
            stored = self._save_states(chain, keys, stored, request)
        return stored * self.step

    def _save_full(self, keys: Sequence[bytes], request: str) -> int:
        """Save the blocks of layers with full attention that the nodes lack.

        Return how many leading blocks the nodes have now.
        """
        blocks, count = self._blocks, len(keys)
        parents = dict(zip(keys[1:], keys, strict=False))
        cost = blocks.judge.prefill_seconds(count * self.step) / count
        # `save` would skip stored blocks, too, but we would have read them out of the pool by then.
        present = blocks.lookup(keys, request=request).found
        stored = count
        missing = [number for number in range(count) if not present[number]]
        for batch in _batches(missing, self.payloads.group(FULL)[1].block_bytes):
            payloads = self.payloads.read(batch)
            batched = [keys[number] for number in batch]
            outcomes = blocks.save(batched, payloads, request=request, cost=cost, parents=parents)
            failed = (number for number, reason in zip(batch, outcomes, strict=True) if reason is not None)
            stored = min([stored, *failed])
        return stored

    def _save_states(self, chain: Sequence[bytes], keys: Sequence[bytes], stored: int, request: str) -> int:
        """Save the states of layers with a sliding window; return how many leading blocks `load` can find now."""
        tokens = self.payloads.end_of_states()
        end = 0 if tokens is None else tokens // self.step
        if not 0 < end <= stored:
            return 0
        (key,) = self._keys(chain[end - 1 : end], SLIDING)
        parents = {key: keys[end - 1]} if keys else {}
        (reason,) = self._blocks.save([key], [self.payloads.read_states()], request=request, parents=parents)
        return end if reason is None else 0

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self, tokens: Tokens, salt: bytes | str, request: str, probe: ProbeBlock, *, judged: bool) -> int:
        """Load the longest stored prefix into an empty cache, as `FarpoolCache.load` describes.

        Parameters
        ----------
        tokens, salt, request, judged
            See `FarpoolCache.load`.
        probe : callable
            Makes the known block of the probe.
        """
        judge, step = self._blocks.judge, self.step
        self._held_out = False
        ids = self._checked(tokens, salt)
        count = (len(ids) - 1) // step
        if count <= 0 or self._has_other_dtype(count, request):
            return 0
        began = time.monotonic()
        if judged and judge.passes_over(count * step, step, request):
            self._held_out = True
            return 0
        stored = self._look_up(self._hashed(ids[: count * step], salt), request)
        if not stored.ends or not (there := stored.ends[0]):
            if judged:
                judge.missed(count * step, time.monotonic() - began)
            return 0
        until = self._decided(there, began, request) if judged else math.inf
        if until is None or self._is_unproved("load", there, request, probe, _left(until)):
            return 0
        loaded = self._load(stored, until, request)
        if judged:
            judge.gained(there * step, loaded * step, time.monotonic() - began)
        if not loaded:
            self.payloads.reset()
            self.forget()
        self._chain = stored.chain[:loaded]
        return loaded * step

    def _has_other_dtype(self, count: int, request: str) -> bool:
        """Return True if the model and the prefixes differ in data type, and record this for ``farpool why``."""
        if self._model_dtype is None or self._model_dtype == self.payloads.dtype:
            return False
        why = (
            f"the prefixes are of {self._blocks.namespace.dtype} and the model is of {name_of(self._model_dtype)}: "
            "give the model itself to prefix_blocks and to FarpoolCache"
        )
        record(request, "load", count, 0, {str(Reason.OTHER_DTYPE): count}, 0.0, why)
        return True

    def _look_up(self, chain: list[bytes], request: str) -> _Stored:
        """Ask the nodes which blocks of a prompt they have."""
        count, keys, states = len(chain), [], []
        if self.payloads.full:
            keys = self._keys(chain, FULL)
            count = self._blocks.lookup(keys, request=request).leading
        ends = [count]
        if self.payloads.sliding:
            states = self._keys(chain[:count], SLIDING)
            found = self._blocks.lookup(states, request=request).found
            ends = [number + 1 for number in reversed(range(count)) if found[number]]
        return _Stored(chain, keys, states, ends)

    def _decided(self, there: int, began: float, request: str) -> float | None:
        """Return the deadline for loading the `there` blocks that were found; None if the model should compute them.

        The deadline is infinite if too little has been measured to set one.
        """
        step = self.step
        nbytes = self.payloads.nbytes(there)
        plan, arm = self._blocks.judge.decide(there * step, nbytes, step=step, request=request)
        if plan.compute:
            self._held_out = arm == "hold-out"
            return None
        if plan.seconds is None or plan.recompute_seconds is None:
            return math.inf
        return began + plan.recompute_seconds  # after that, computing would have been faster

    def _load(self, stored: _Stored, until: float, request: str) -> int:
        """Load the blocks that were found; return how many leading blocks the cache holds afterwards.

        If this raises an error, the cache is empty afterwards.
        """
        judge, there = self._blocks.judge, stored.ends[0]
        nbytes = self.payloads.nbytes(there)
        start = time.monotonic()
        under_way = judge.begun(nbytes)
        try:
            loaded = self._load_full(stored.keys[:there], request, until) if self.payloads.full else there
            if self.payloads.sliding:
                ends = (end for end in stored.ends if end <= loaded)
                loaded = next((end for end in ends if self._load_states(stored.states, end, request, until)), 0)
            self.payloads.crop(loaded * self.step)
        except BaseException:
            self.payloads.reset()
            self.forget()
            raise
        finally:
            judge.ended(nbytes)
        if loaded == there:
            judge.loaded(under_way, time.monotonic() - start)
        return loaded

    def _load_full(self, keys: Sequence[bytes], request: str, until: float) -> int:
        """Load leading blocks of the layers with full attention; return how many were loaded."""
        loaded = 0
        for batch in _batches(range(len(keys)), self.payloads.group(FULL)[1].block_bytes):
            memory, targets = self.payloads.memory(len(batch))
            own = [keys[number] for number in batch]
            outcomes = self._blocks.load(own, targets, request=request, timeout=_left(until))
            whole = len(list(takewhile(lambda reason: reason is None, outcomes)))
            if whole:
                self.payloads.extend(memory[:whole])
            loaded += whole
            if whole < len(batch):
                break
        return loaded

    def _load_states(self, states: Sequence[bytes], end: int, request: str, until: float) -> bool:
        """Load the states that the layers with a sliding window had after `end` blocks; return True on success."""
        memory, parts = self.payloads.memory_of_states()
        (reason,) = self._blocks.load([states[end - 1]], [memory], request=request, timeout=_left(until))
        if reason is None:
            self.payloads.restore(parts, end * self.step)
        return reason is None

    # ---- both ----------------------------------------------------------------------------------------------------

    def _checked(self, tokens: Tokens, salt: bytes | str) -> list[int]:
        """Check that tokens and salt can identify a prefix, and return the token ids as a list.

        Raises
        ------
        ConfigError
            The tokens belong to several sequences or begin with padding, or the salt is missing.
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
        """Return the hashes of the blocks of tokens. The namespace and the salt are also hashed."""
        return token_chain(ids, self.step, chain_seed(self._blocks.digest, salt_bytes(salt)))

    def _keys(self, chain: Sequence[bytes], kind: str) -> list[bytes]:
        """Return the keys of the blocks with these hashes for one kind of layers."""
        number, _ = self.payloads.group(kind)
        return [self._blocks.key(link, number) for link in chain]

    def _is_unproved(
        self, step: str, blocks: int, request: str, probe: ProbeBlock, timeout: float | None = None
    ) -> bool:
        """Return True if blocks must not be moved, because the probe has not passed for this cache's kind of memory.

        The first call for each kind of memory runs the probe.
        """
        try:
            reason = self._probe.admit(step, request, blocks, [self._kind], lambda kinds: probe(), timeout)
        except (BudgetError, PoolFullError, TierError):
            if step == "load":
                raise
            # If there is no room for the probe's layers, a save stores nothing, and the cache stays as it is.
            self._blocks.missed(step, request, blocks, Reason.FULL, "the pool has no room for the block of the probe")
            return True
        return reason is not None


def _token_ids(tokens: Tokens) -> list[int]:
    """Return token ids as a list.

    Raises
    ------
    ConfigError
        The tokens belong to several sequences.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() > 1 and tokens.numel() != tokens.shape[-1]:
            raise ConfigError(
                f"tokens have shape {tuple(tokens.shape)}; prefixes are stored for one sequence at a time: give the "
                "tokens of one sequence"
            )
        found: list[int] = tokens.flatten().tolist()
        return found
    return list(tokens)


def _left(until: float) -> float | None:
    """Return the seconds until a deadline; None if the deadline is infinite."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _batches(numbers: Sequence[int], nbytes: int) -> Iterator[Sequence[int]]:
    """Split a list of block numbers into batches.

    The blocks of one batch (`nbytes` bytes each) have at most `_BATCH_BYTES_MAX` bytes together. A larger block is a
    batch of its own.
    """
    step = max(1, _BATCH_BYTES_MAX // nbytes)
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]
