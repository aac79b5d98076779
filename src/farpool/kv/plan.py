"""Plans lookups, loads and saves: decides which blocks they need, and under which keys.

The functions of this module are pure: they use no clock, no node, no thread, and no engine memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from farpool.errors import ConfigError
from farpool.kv.cost import Arm, Plan
from farpool.kv.found import Found
from farpool.kv.header import HEADER_BYTES
from farpool.kv.keys import block_keys, chain_seed, salt_bytes, token_chain, token_keys
from farpool.kv.memory import Layer, LayerGroup, layer_groups
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason

__all__ = ["Current", "Match", "Prompt", "Shape", "Wanted", "as_prompts", "picked"]

T = TypeVar("T")


class Prompt(msgspec.Struct, frozen=True):
    """A token sequence with its salt and name, for calls that accept several sequences.

    Attributes
    ----------
    tokens : sequence of int
        All tokens, from the first on.
    salt : bytes or str
        Names everything that the KV depends on apart from the tokens and the cache's settings, such as a LoRA adapter,
        a digest of all images, or a user who shares nothing with other users. A lookup with one salt never finds KV
        that was saved with another salt.
    request : str
        Name of the request, for ``farpool why``.
    start : int
        Number of leading tokens that a save skips, for example because their KV is known to be stored.
    """

    tokens: Sequence[int]
    salt: bytes | str = b""
    request: str = ""
    start: int = 0


def as_prompts(
    prompts: Sequence[int] | Prompt | Sequence[Prompt],
    salt: bytes | str,
    request: str,
    start: int = 0,
    *,
    copied: bool = False,
) -> tuple[bool, list[Prompt]]:
    """Turn the argument of a call into a list of prompts. The returned bool is True for a single prompt.

    Parameters
    ----------
    prompts : sequence of int, Prompt or sequence of Prompt
        The tokens of one prompt, one `Prompt`, or several. An empty sequence is one prompt without tokens.
    salt, request, start
        Fields of the prompt if only its tokens are given.
    copied : bool
        True to copy the tokens, because the caller may change them before they are used.

    Raises
    ------
    ConfigError
        A field is given in addition to a `Prompt`, which has its own fields; or one of several prompts is no `Prompt`.
    """
    if not isinstance(prompts, Prompt) and (not len(prompts) or hasattr(prompts[0], "__index__")):
        is_one, found = True, [Prompt(cast("Sequence[int]", prompts), salt, request, start)]
    else:
        is_one = isinstance(prompts, Prompt)
        found = [prompts] if isinstance(prompts, Prompt) else list(cast("Sequence[Prompt]", prompts))
        if not isinstance(found[0], Prompt):
            raise ConfigError(
                f"tokens: the first one is {found[0]!r:.60}, expected a whole number; give several prompts as a list "
                "of Prompt(tokens)"
            )
        for prompt in found:
            if not isinstance(prompt, Prompt):
                raise ConfigError(f"prompts: one is {prompt!r:.60}, expected a Prompt like the first one")
        if salt or request or start:
            given = f"salt={salt!r}, request={request!r} and start={start!r}"
            raise ConfigError(f"{given} were given in addition to a Prompt; set the fields of the Prompt instead")
    if copied:
        found = [msgspec.structs.replace(one, tokens=list(one.tokens)) for one in found]
    return is_one, found


class Wanted(msgspec.Struct, frozen=True):
    """Keys of the blocks of a sequence, one group of layers after the other.

    Attributes
    ----------
    namespace : Namespace
        Namespace of the keys.
    keys : sequence of bytes
        The keys.
    blocks : int
        Number of blocks in each group of layers.
    tokens : int
        Number of tokens of the whole sequence.
    request : str
        Name of the request.
    salt : bytes
        Salt of the sequence.
    """

    namespace: Namespace
    keys: Sequence[bytes]
    blocks: int
    tokens: int
    request: str
    salt: bytes

    def key(self, group: int, block: int) -> bytes:
        """Return the key of one block of a group of layers."""
        return self.keys[group * self.blocks + block]

    @property
    def last(self) -> bytes:
        """Key of the last block, whose hash covers the tokens of all blocks; empty if there is no block."""
        return self.keys[self.blocks - 1] if self.blocks else b""

    def keys_of(self, group: int, blocks: range) -> Sequence[bytes]:
        """Return the keys of the blocks with these numbers in a group of layers."""
        return self.keys[group * self.blocks + blocks.start : group * self.blocks + blocks.stop]


class Match(msgspec.Struct, frozen=True):
    """Result of a lookup: how much of a prompt is stored, and how much of it the engine should load.

    Attributes
    ----------
    tokens : int
        Number of tokens, from the first on, whose KV the engine has after `PrefixCache.load`, including the first
        `compute` tokens; 0 if the engine should compute all of them.
    compute : int
        Number of leading tokens that the engine computes itself while the rest is loaded; 0 unless the lookup allowed a
        split.
    found : int
        Number of tokens whose KV is stored.
    reason : Reason or None
        Why the engine should not load more; None if it should load the whole prompt.
    plan : Plan
        The decision, with the estimated times on which it is based.
    request : str
        The engine's name of the request.
    weights_id : str
        Name of the weights that have computed the KV. If the engine changes its weights after the lookup, a load
        returns 0 tokens.
    salt : bytes
        The salt of the request.
    arm : {"load", "hold-out", "probe"}
        Group of requests to which this request belongs. A request of the arm ``load`` follows the estimated times. A
        few requests do the opposite, to measure: ``hold-out`` computes and ``probe`` loads.
    seconds : float
        Time that the lookup took.
    wanted : Wanted
        The blocks that were looked up.
    far_bytes : int
        Number of bytes that nodes have to send to load the KV of the `found` tokens, because these bytes are not in
        this process's memory.
    ends : sequence of int
        For each block, 1 if this rank could continue after the block, otherwise 0. Empty if the ranks do not need
        this: if there are no other ranks, if all layers need all blocks, or if the nodes were not asked.
    """

    tokens: int
    compute: int
    found: int
    reason: Reason | None
    plan: Plan
    request: str
    weights_id: str
    salt: bytes
    arm: Arm
    seconds: float
    wanted: Wanted
    far_bytes: int
    ends: Sequence[int] = ()


@dataclass
class Current:
    """Namespace of the weights in use. It is replaced as a whole, so each call sees the old or the new weights."""

    namespace: Namespace

    def is_outdated(self, match: Match) -> bool:
        """Return True if the engine has changed its weights since the lookup of `match`."""
        return match.wanted.namespace.digest != self.namespace.digest


class Shape:
    """Describes the layers of an engine, and the groups and blocks in which their KV is stored.

    Parameters
    ----------
    layers : sequence of Layer
        The layers.
    block : int
        Tokens of a block.
    pieces : int
        Number of groups into which the layers of each kind are divided.
    rank : int
        Number of this process's rank, which has one part of the KV.

    Attributes
    ----------
    groups : list of LayerGroup
        Layers that are stored together.
    order : list of int
        Numbers of the groups, ordered by their layers.
    block : int
        Tokens of a block.
    is_uniform : bool
        True if all layers need all blocks of a prefix.
    block_bytes : int
        Bytes of one block, for all groups together.
    """

    def __init__(self, layers: Sequence[Layer], block: int, pieces: int, rank: int) -> None:
        self.groups: list[LayerGroup] = layer_groups(layers, block, pieces)
        self.order = sorted(range(len(self.groups)), key=lambda number: self.groups[number].layers)
        self.block = block
        self.is_uniform = all(one.needs_all for one in self.groups)
        self.block_bytes = sum(one.group.block_bytes for one in self.groups)
        self._full = next((number for number, one in enumerate(self.groups) if one.needs_all), None)
        self._rank = rank

    def groups_of(self, layers: Collection[int] | None) -> Sequence[int]:
        """Return the numbers of the groups in which these layers are stored, or of all groups if `layers` is None.

        Raises
        ------
        ConfigError
            The layers do not form whole groups.
        """
        if layers is None:
            return range(len(self.groups))
        numbers = [number for number in self.order if set(self.groups[number].layers) <= set(layers)]
        if {layer for number in numbers for layer in self.groups[number].layers} != set(layers):
            parts = [self.groups[number].layers for number in self.order]
            raise ConfigError(f"layers {sorted(layers)} are not stored by themselves, expected some of {parts}")
        return numbers

    def keys(self, namespace: Namespace, chains: Sequence[bytes]) -> list[bytes]:
        """Compose the keys of all blocks of a sequence from its chained hashes, one group of layers after the other."""
        return block_keys(namespace.digest, chains, range(len(self.groups)), self._rank)

    def keys_of_tokens(self, namespace: Namespace, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Compose the keys of all blocks of a sequence from its tokens."""
        return token_keys(tokens, self.block, namespace.digest, len(self.groups), self._rank, salt)

    def sequence(
        self, namespace: Namespace, tokens: Sequence[int], salt: bytes | str
    ) -> tuple[list[bytes], bytes, list[bytes]]:
        """Return the keys of a sequence's blocks, a name for the sequence, and the chained hash of each block.

        The name depends on all tokens and on the salt.
        """
        chains = token_chain(tokens, self.block, chain_seed(namespace.digest, salt_bytes(salt)))
        rest = array("Q", list(tokens[len(chains) * self.block :])).tobytes()  # tokens that no block covers
        return self.keys(namespace, chains), b"".join(chains[-1:]) + rest, chains

    def wanted(self, namespace: Namespace, prompt: Prompt, leave: int = 0) -> Wanted:
        """Return the blocks of a prompt's tokens without the last `leave` tokens."""
        tokens, salt = prompt.tokens, salt_bytes(prompt.salt)
        own = tokens[: max(0, len(tokens) - leave)]
        keys = self.keys_of_tokens(namespace, own, salt)
        return Wanted(namespace, keys, len(own) // self.block, len(tokens), prompt.request, salt)

    def stored(self, wanted: Wanted) -> list[int]:
        """Return, for each block, the bytes of its object in the store: the header and the uncompressed payload."""
        sizes: list[int] = []
        for one in self.groups:
            sizes += [HEADER_BYTES + one.group.block_bytes] * wanted.blocks
        return sizes

    def usable(self, found: Found, blocks: int) -> tuple[int, Reason | None]:
        """Return the largest number of blocks after which every layer can continue.

        If this number is less than `blocks`, also return the reason, otherwise None.
        """
        if found.is_whole or not blocks:
            return blocks, None
        rows = self._rows(found, blocks)
        most = blocks
        for one, row in zip(self.groups, rows, strict=True):
            if one.needs_all and not all(row[:most]):
                most = row.index(False)
        usable = next(self._ends(rows, most), 0)
        reasons = (found.reasons[number * blocks + usable] for number in range(len(self.groups)) if usable < blocks)
        return usable, next((reason for reason in reasons if reason is not None), None)

    def ends(self, found: Found, blocks: int, usable: int) -> list[int]:
        """Return, for each block, 1 if every layer can continue after the block, otherwise 0.

        The blocks beyond the first `usable` blocks get 0.
        """
        ends = set(self._ends(self._rows(found, blocks), usable))
        return [int(end in ends) for end in range(1, blocks + 1)]

    def _rows(self, found: Found, blocks: int) -> list[list[bool]]:
        """Return a list for each group of layers. The list has, for each block, True if the block was found."""
        there = found.found
        return [there[number * blocks : (number + 1) * blocks] for number in range(len(self.groups))]

    def _ends(self, rows: Sequence[Sequence[bool]], most: int) -> Iterator[int]:
        """Yield each number of blocks, from `most` down, after which every layer can continue."""
        for usable in range(most, 0, -1):
            if all(
                all(row[one.first_block(usable, self.block) : usable])
                for one, row in zip(self.groups, rows, strict=True)
            ):
                yield usable

    def needed(self, usable: int, first: int = 0, groups: Sequence[int] | None = None) -> Iterator[tuple[int, range]]:
        """Yield, for each group, its number and the range of blocks that it needs to continue after `usable` blocks.

        Blocks before block `first` are left out.
        """
        for number in range(len(self.groups)) if groups is None else groups:
            yield number, range(max(first, self.groups[number].first_block(usable, self.block)), usable)

    def nbytes(self, usable: int) -> int:
        """Return the size in bytes of all blocks that `needed` yields."""
        if self.is_uniform:
            return usable * self.block_bytes
        return sum(self.groups[number].group.block_bytes * len(blocks) for number, blocks in self.needed(usable))

    def loaded(self, match: Match, blocks: Sequence[int], outcomes: Sequence[Reason | None]) -> int:
        """Return how many tokens of a match are usable after a load.

        `outcomes` has, for each of the `blocks`, the reason why it was not loaded, or None.
        """
        lost = [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is not None]
        if not lost:
            return match.tokens
        # Layers that need all blocks can use the blocks before the first lost block. Other layers need the last blocks.
        return min(lost) * self.block if self.is_uniform else match.compute

    def to_save(self, groups: Sequence[int]) -> list[int]:
        """Return groups in the order in which they are saved: first the groups with blocks that other blocks need."""
        return sorted(groups, key=lambda number: not self.groups[number].needs_all)

    def parent(self, wanted: Wanted, group: int, block: int) -> bytes | None:
        """Return the key of the block without which this block cannot be used; None if there is no such block."""
        if self.groups[group].needs_all:
            return wanted.key(group, block - 1) if block else None
        # A window or a state is usable only with all blocks of the layers with full attention up to this block.
        return None if self._full is None else wanted.key(self._full, block)


def picked(values: list[T], numbers: Sequence[int]) -> list[T]:
    """Return the values at these indices. If these are all indices of `values`, return `values` itself."""
    return values if len(numbers) == len(values) else [values[number] for number in numbers]
