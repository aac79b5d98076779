"""Prefix reuse for engines of one's own: look up what is there, load it or compute it, save what is new.

A block's key says all tokens up to its end, so sequences that begin alike share blocks, also between processes, hosts
and engines. A prefix can be used up to a block boundary at which every layer has what it needs: layers with full
attention all blocks, those with a sliding window the last ones, and recurrent layers the state at the boundary.

Weights may change at any time. Each call takes the namespace that is in use when it begins, and keeps to it: what was
begun before a change is saved, or found, as KV of the old weights, and is never loaded for the new ones.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec

from farpool.cluster.store.arguments import as_payload, nbytes_of
from farpool.errors import ConfigError
from farpool.kv.agreement import Agreement, Offer
from farpool.kv.background import Background
from farpool.kv.blocks import BlockCache, Found
from farpool.kv.cost import Arm, Plan
from farpool.kv.disagreement import Disagreements
from farpool.kv.first_use import Place, loading_block, saving_block
from farpool.kv.header import HEADER_BYTES
from farpool.kv.journal import record
from farpool.kv.judge import Judge
from farpool.kv.keys import block_keys, chain_seed, salt_bytes, token_chain, token_keys
from farpool.kv.memory import KVMemory, Layer, LayerGroup, TensorMemory, layer_groups
from farpool.kv.namespace import Namespace
from farpool.kv.near import NearMemory
from farpool.kv.probe import EngineBlock, Probe
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.abc.objects import Objects, Payload
    from farpool.kv.ranks import Exchange, Ranks

__all__ = ["Demoted", "Handoff", "LayerLoad", "Match", "PrefixCache"]

T = TypeVar("T")

_Uses = dict[tuple[Callable[[Sequence[Place]], EngineBlock], type[KVMemory], int], tuple[KVMemory, int]]
"""Memory that a call uses, by what makes a probe's block of it, its class and the group of layers: the memory, and the
number of a block that is in it."""

_SHORTEST = 0.01
"""Seconds that a lookup may take at least: a thread that has to wait for a processor would seem late before."""
_FEW_BLOCKS = 32
"""Blocks that `PrefixCache.fetch` asks for without a lookup: if none is there, so many requests that find nothing take
about as long as the other trip to the node would."""


class _Wanted(msgspec.Struct, frozen=True):
    """Blocks of a sequence by their keys, one group of layers after the other."""

    namespace: Namespace
    keys: Sequence[bytes]
    blocks: int
    tokens: int
    request: str
    salt: bytes

    def key(self, group: int, block: int) -> bytes:
        return self.keys[group * self.blocks + block]

    @property
    def last(self) -> bytes:
        """Key of the last block, whose hash covers all tokens; empty if there is no block."""
        return self.keys[self.blocks - 1] if self.blocks else b""

    def keys_of(self, group: int, blocks: range) -> Sequence[bytes]:
        return self.keys[group * self.blocks + blocks.start : group * self.blocks + blocks.stop]


class Match(msgspec.Struct, frozen=True):
    """Result of a lookup: how much of a prompt is there, and what is best done with it.

    Attributes
    ----------
    tokens : int
        Tokens of the prompt, from the first on, whose KV `PrefixCache.load` gives, those of `compute` included; 0 if
        all of them are better computed.
    compute : int
        Tokens at the front that the engine computes itself while the rest is loaded; 0 unless the lookup allowed a
        split.
    found : int
        Tokens whose KV is there.
    reason : Reason or None
        Why not more is loaded; None if the whole prompt is.
    plan : Plan
        The decision, with the times that it rests on.
    request : str
        The engine's name of the request.
    weights_id : str
        Name of the weights that the KV is of. Once others are in use, a load gives nothing.
    salt : bytes
        The salt of the request.
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
    _wanted: _Wanted
    _far_bytes: int
    _ends: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """Part of a load that goes on layer by layer.

    Attributes
    ----------
    layers : tuple of int
        Numbers of the layers.
    tokens : Future of int
        Number of tokens, from the first on, whose KV these layers have once it is done.
    """

    layers: tuple[int, ...]
    tokens: Future[int]


@dataclass(frozen=True, slots=True)
class Demoted:
    """Result of moving a sequence's KV to the lower tier.

    Attributes
    ----------
    blocks : int
        Blocks that lie there now, or are on their way.
    reasons : mapping of Reason to int
        How many of the others there were for each reason: `Reason.ABSENT` are not there at all, `Reason.NO_LOWER_TIER`,
        `Reason.PINNED` and `Reason.FULL` stay in memory.
    """

    blocks: int
    reasons: Mapping[Reason, int]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Result of keeping a sequence's KV for another process.

    Attributes
    ----------
    note : bytes
        Argument for the other process's `take`.
    blocks : int
        Blocks that are kept for it.
    reasons : mapping of Reason to int
        How many of the others there were for each reason; they may be gone, or go, before it takes them.
    """

    note: bytes
    blocks: int
    reasons: Mapping[Reason, int]


class _Note(msgspec.Struct, frozen=True):
    """Names of the blocks that one process hands to another."""

    namespace: bytes
    chains: list[bytes]
    owner: bytes
    ttl: Annotated[float, msgspec.Meta(gt=0)]
    kept: int
    salt: bytes = b""  # notes of releases without salts have none


class PrefixCache:
    """KV of token sequences, shared through nodes and never slower than computing it. Thread-safe.

    Whatever goes wrong is a miss: the engine computes. Which of both is faster is measured all the time: tell it how
    long computing takes (`computed`), and it loads only what comes sooner than it could be computed.

    Futures are those of `concurrent.futures`: use ``await asyncio.wrap_future(...)`` in a coroutine. The time of a call
    that returns one runs from the call on, also while it waits for a thread. Closing the cache makes those that have
    not begun misses.

    Parameters
    ----------
    nodes : sequence of str, Store or PoolObjects
        Addresses of the nodes, or a store or objects in a pool, which stay the caller's.
    layers : sequence of Layer
        Layers whose KV is kept: all of the model, or those of this rank.
    model : str
        Name of the model.
    weights_id : str
        Name of exactly its weights; may be changed while running.
    dtype : str
        Logical data type of the KV.
    layout : str
        Name of the order of bytes within a block, whatever `KVMemory.parts` returns.
    block : int
        Tokens of a block.
    heads, head_dim : int
        KV heads of a layer, and channels of a head; the codecs ``int8`` and ``int4`` need them.
    parallel : mapping of str to int, optional
        Sizes of the groups of processes that the KV is divided among, such as ``{"tp": 2}``; left out if each has all.
    rank : int
        Number of this process's part among all that `parallel` makes, 0 to their product less 1. Each part is stored by
        itself, and is never loaded for another one.
    ranks : Ranks, optional
        Object through which the ranks of `parallel` agree, such as `StoreRanks`. Rank 0 decides for all, and all ranks
        get the same `Match.tokens` and the same result of each load. All ranks must make the same calls in the same
        order. Without it, each rank loads everything that it finds, and the engine has to take the least `Match.tokens`
        over its ranks, and then the least result of the loads (docs/kv.md).
    extra : mapping of str to (str or int), optional
        Whatever else makes bytes differ.
    tenant : str
        Users who share nothing with others.
    codec : str
        Compression of the blocks (docs/kv-compression.md); empty for none.
    pieces : int
        Number of parts that the layers are stored in, for `load_layers` and `save_layers`.
    near_bytes : int
        Memory of this process for blocks that `prefetch_by` brings.
    hold_out : bool
        Compute a few requests that could load, to measure what loading gains, and stand aside while it costs time.
    **settings
        Settings of `BlockCache`, such as ``timeout``, ``replicas`` and ``access_key``.

    Attributes
    ----------
    judge : Judge
        Measured times, and what loading has gained.

    Raises
    ------
    ConfigError
        A setting is wrong.
    """

    def __init__(
        self,
        nodes: Sequence[str] | Objects,
        layers: Sequence[Layer],
        *,
        model: str,
        weights_id: str,
        dtype: str,
        layout: str = "layer-major",
        block: int = 16,
        heads: int = 0,
        head_dim: int = 0,
        parallel: Mapping[str, int] | None = None,
        rank: int = 0,
        ranks: Ranks | None = None,
        extra: Mapping[str, str | int] | None = None,
        tenant: str = "",
        codec: str = "",
        pieces: int = 1,
        near_bytes: int = 0,
        hold_out: bool = True,
        **settings: Any,
    ) -> None:
        sizes = dict(parallel or {})
        is_alone = _count_of_ranks(sizes, rank, ranks) == 1
        self._groups = layer_groups(layers, block, pieces)
        self._full = next((number for number, one in enumerate(self._groups) if _needs_all(one)), None)
        self._all_full = all(map(_needs_all, self._groups))
        self._block_bytes = sum(one.group.block_bytes for one in self._groups)
        self._order = sorted(range(len(self._groups)), key=lambda number: self._groups[number].layers)
        self._rank, self._block = rank, block
        # Replaced as a whole when the weights change, so that each call sees one or the other.
        self._namespace = Namespace(
            engine="farpool",
            model=model,
            weights=weights_id,
            dtype=dtype,
            layout=layout,
            tokens_per_block=block,
            groups=tuple(one.group for one in self._groups),
            heads=heads,
            head_dim=head_dim,
            parallel=tuple(sorted(sizes.items())),
            tenant=tenant,
            codec=codec,
            extra=tuple(sorted((extra or {}).items())),
        )
        self._agreement = None if is_alone or ranks is None else Agreement(ranks, has_ends=not self._all_full)
        # Decisions depend on measured times, which differ from rank to rank, so one rank decides for all, or none does.
        self._decides = is_alone or (ranks is not None and rank == 0)
        self.judge = Judge(hold_out=hold_out and self._decides)
        self._blocks = BlockCache(nodes, self._namespace, judge=self.judge, **settings)
        self._probe = Probe("PrefixCache", at_first_use=True)
        self._probe.guard(self._blocks, self._blocks)
        self._background = Background(self._blocks.submit)
        self._near = NearMemory(near_bytes)
        self._disagreements = Disagreements(self._blocks.namespaces)
        _CACHES.add(self)

    @property
    def weights_id(self) -> str:
        """Name of the weights whose KV is looked up and saved from now on; setting it hides all KV of other weights.

        What was begun before goes on under the old name. Tell `save` which weights have computed its KV if that may
        have been others than those in use when it is called.
        """
        return self._namespace.weights

    @weights_id.setter
    def weights_id(self, weights_id: str) -> None:
        self._namespace = replace(self._namespace, weights=weights_id)
        self._near.clear()

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Layers that are stored together, in the order in which `load_layers` brings them."""
        return [self._groups[number].layers for number in self._order]

    def lookup(
        self,
        tokens: Sequence[int],
        *,
        salt: bytes | str = "",
        request: str = "",
        split: bool = False,
        leave: int = 1,
        timeout: float | None = None,
    ) -> Match:
        """Find out how much of a prompt can be loaded, and decide whether it should be.

        Parameters
        ----------
        tokens : sequence of int
            The prompt.
        salt : bytes or str
            Names everything that the KV depends on apart from the tokens and this cache's settings, such as a LoRA
            adapter, a digest of all images, or a user who shares nothing with other users. A lookup with one salt never
            finds KV that was saved with another one.
        request : str
            Name of the request, for ``farpool why``.
        split : bool
            The engine can compute the first tokens while the others are loaded.
        leave : int
            Tokens at the end that are never loaded, as an engine has to compute at least one to go on.
        timeout : float or None
            Seconds that it may take; None for the cache's own time.
        """
        exchange = self._exchange()
        with self._joining(exchange):
            wanted = self._wanted(self._namespace, tokens, salt, leave, request)
        return self._match([wanted], split, timeout, exchange)[0]

    def lookup_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        salts: Sequence[bytes | str] = (),
        requests: Sequence[str] = (),
        split: bool = False,
        leave: int = 1,
        timeout: float | None = None,
    ) -> list[Match]:
        """Look up several prompts with one request to the nodes.

        Parameters
        ----------
        prompts : sequence of sequence of int
            The prompts.
        salts : sequence of (bytes or str)
            Salt of each, as of `lookup`; left out for none.
        requests : sequence of str
            Name of the request of each; left out for none.
        split, leave, timeout
            As of `lookup`.
        """
        namespace, exchange = self._namespace, self._exchange()
        with self._joining(exchange):
            each = zip(prompts, _each(salts, prompts, b""), _each(requests, prompts, ""), strict=True)
            wanted = [self._wanted(namespace, tokens, salt, leave, request) for tokens, salt, request in each]
        return self._match(wanted, split, timeout, exchange)

    def lookup_async(
        self,
        tokens: Sequence[int],
        *,
        salt: bytes | str = "",
        request: str = "",
        split: bool = False,
        leave: int = 1,
        timeout: float | None = None,
    ) -> Future[Match]:
        """Begin a `lookup` on a thread of this cache; its result is that of `lookup`."""
        namespace, exchange = self._namespace, self._exchange()
        with self._joining(exchange):
            tokens, until = list(tokens), self._until(timeout, 0)

        def look_up() -> Match:
            with self._joining(exchange):
                wanted = self._wanted(namespace, tokens, salt, leave, request)
            return self._match([wanted], split, _seconds_to(until), exchange)[0]

        return self._background.begin(look_up, until)

    def _chains(self, namespace: Namespace, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        return token_chain(tokens, self._block, chain_seed(namespace.digest, salt))

    def _keys(self, namespace: Namespace, chains: Sequence[bytes]) -> list[bytes]:
        """Compose the keys of all blocks of a sequence, one group of layers after the other."""
        return block_keys(namespace.digest, chains, range(len(self._groups)), self._rank)

    def _token_keys(self, namespace: Namespace, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Compose the keys of all blocks of a sequence; the result is that of `_keys`."""
        return token_keys(tokens, self._block, namespace.digest, len(self._groups), self._rank, salt)

    def _wanted(
        self, namespace: Namespace, tokens: Sequence[int], salt: bytes | str, leave: int, request: str
    ) -> _Wanted:
        own, salt = tokens[: max(0, len(tokens) - leave)], salt_bytes(salt)
        keys = self._token_keys(namespace, own, salt)
        return _Wanted(namespace, keys, len(own) // self._block, len(tokens), request, salt)

    def _exchange(self) -> Exchange | None:
        """Begin an exchange with the other ranks, in the order of calls; None if there are no others to agree with."""
        return None if self._agreement is None else self._agreement.begin()

    def _load_exchange(self, matches: Sequence[Match]) -> Exchange | None:
        """Begin the exchange of a load; None if the ranks have agreed that there is nothing to load.

        A rank whose lookup raised an error has no match to load, so the others must not begin an exchange without it.
        """
        return self._exchange() if any(match.tokens for match in matches) else None

    @contextlib.contextmanager
    def _joining(self, exchange: Exchange | None) -> Iterator[None]:
        """Take part in an exchange with nothing if the body raises an error: the other ranks wait for this one."""
        try:
            yield
        except BaseException:
            if exchange is not None:
                self._agreed([], exchange)
            raise

    def _match(
        self, wanted: Sequence[_Wanted], split: bool, timeout: float | None, exchange: Exchange | None
    ) -> list[Match]:
        """Look up sequences together, and decide about each, with the other ranks if there is an exchange."""
        with self._joining(exchange):
            matches = self._match_here(wanted, split, timeout)
        return matches if exchange is None else self._agreed(matches, exchange)

    def _agreed(self, matches: Sequence[Match], exchange: Exchange) -> list[Match]:
        """Reduce this rank's matches to the blocks that all ranks load."""
        assert self._agreement is not None
        step = self._block
        offers = [
            Offer(
                match._wanted.blocks,
                match.tokens // step,
                match.compute // step,
                match._ends if match.tokens else (),
                match._wanted.last,
            )
            for match in matches
        ]
        return [
            self._cut(match, usable * step, compute * step)
            for match, (usable, compute) in zip(matches, self._agreement.found(exchange, offers), strict=True)
        ]

    def _cut(self, match: Match, tokens: int, compute: int) -> Match:
        """Return a match with the tokens on which all ranks have agreed."""
        if (tokens, compute) == (match.tokens, match.compute):
            return match
        if tokens == match.tokens:
            return msgspec.structs.replace(match, compute=compute)
        self._outdone("lookup", match, match.tokens - tokens)
        if not tokens and self._decides:
            self.judge.missed(match._wanted.blocks * self._block, match.seconds)
        return msgspec.structs.replace(match, tokens=tokens, compute=compute, reason=Reason.OTHER_RANK)

    def _outdone(self, step: str, match: Match, tokens: int) -> None:
        """Write into the journal that this rank could have used more tokens than all ranks together."""
        why = "another rank lacks the block, computes it, or did not answer in time"
        self._blocks.missed(step, match.request, tokens // self._block, Reason.OTHER_RANK, why)

    def _match_here(self, wanted: Sequence[_Wanted], split: bool, timeout: float | None) -> list[Match]:
        """Look up sequences together, and decide about each as far as this rank can."""
        step = self._block
        passed = [bool(one.blocks) and self.judge.passes_over(one.blocks * step, step, one.request) for one in wanted]
        if any(passed):
            asked = iter(
                self._match_all([one for one, over in zip(wanted, passed, strict=True) if not over], split, timeout)
            )
            return [_passed_over(one) if over else next(asked) for one, over in zip(wanted, passed, strict=True)]
        return self._match_all(wanted, split, timeout)

    def _match_all(self, wanted: Sequence[_Wanted], split: bool, timeout: float | None) -> list[Match]:
        began = time.monotonic()
        if timeout is None:
            # An answer that takes longer than computing is of no use.
            computing = sum(self.judge.prefill_seconds(one.blocks * self._block) for one in wanted)
            timeout = min(max(computing, _SHORTEST) if computing else math.inf, self._blocks.time_for(0))
        found, near = self._look_up(wanted, timeout)
        seconds = (time.monotonic() - began) / max(1, len(wanted))
        return [self._decided(one, own, near, split, seconds) for one, own in zip(wanted, found, strict=True)]

    def _look_up(self, wanted: Sequence[_Wanted], timeout: float | None) -> tuple[list[Found], set[bytes]]:
        """Find out which blocks are there, and which of them are in this process's memory."""
        keys = [key for one in wanted for key in one.keys]
        stored: list[int] = []
        for one in wanted:
            for group in self._groups:
                stored += [HEADER_BYTES + group.group.block_bytes] * one.blocks
        names = wanted[0].request if len(wanted) == 1 else [one.request for one in wanted for _ in one.keys]
        near = self._near.held(keys)
        if not near:
            answers = self._blocks.lookup(keys, stored=stored, request=names, timeout=timeout).answers
        else:
            answers = [*stored]
            far = [number for number, key in enumerate(keys) if key not in near]
            found = self._blocks.lookup(
                _take(keys, far),
                stored=_take(stored, far),
                request=names if isinstance(names, str) else _take(names, far),
                timeout=timeout,
            )
            for number, answer in zip(far, found.answers, strict=True):
                answers[number] = answer
        ends = [*itertools.accumulate(len(one.keys) for one in wanted)]
        return [Found(answers[end - len(one.keys) : end]) for one, end in zip(wanted, ends, strict=True)], near

    def _decided(self, wanted: _Wanted, found: Found, near: set[bytes], split: bool, seconds: float) -> Match:
        """Decide what is best done with what was found of a sequence."""
        usable, reason = self._usable(found, wanted.blocks)
        if reason is Reason.ABSENT and not any(found.found):
            reason = self._disagreements.reason(wanted.namespace, wanted.request, len(wanted.keys)) or reason
        match = self._weighed(wanted, usable, reason, near, split, seconds)
        if self._agreement is None or self._all_full:
            return match
        ends = set(self._ends(self._rows(found, wanted.blocks), usable))
        return msgspec.structs.replace(match, _ends=[int(end in ends) for end in range(1, wanted.blocks + 1)])

    def _weighed(
        self,
        wanted: _Wanted,
        usable: int,
        reason: Reason | None,
        near: set[bytes],
        split: bool,
        seconds: float,
        plan: Plan | None = None,
    ) -> Match:
        """Decide about the blocks of a sequence that can be used, unless a plan for all of them was made before."""
        there = usable * self._block
        nbytes = self._nbytes(usable)
        if near:
            nbytes = sum(
                self._groups[number].group.block_bytes
                for number, blocks in self._needed(usable)
                for key in wanted.keys_of(number, blocks)
                if key not in near
            )
        arm: Arm = "load"
        if nbytes and not self._decides:
            seconds_computing = self.judge.prefill_seconds(there) or None
            plan = Plan(0, None, seconds_computing, "load: another rank or the engine decides")
        elif nbytes:
            plan, arm = self.judge.decide(
                there, nbytes, step=self._block, request=wanted.request, split=split, plan=plan
            )
        elif there:
            plan = Plan(0, 0.0, None, "load: all of it is in the memory of this process")
            record(wanted.request, "decision", usable, usable, {}, 0.0, plan.why)
        else:
            plan = Plan(0, None, None, "no block was found")
            if wanted.blocks:
                self.judge.missed(wanted.blocks * self._block, seconds)
        bypassed = plan.compute >= there
        whole = wanted.tokens - wanted.tokens % self._block
        return Match(
            tokens=0 if bypassed else there,
            compute=0 if bypassed else plan.compute,
            found=there,
            reason=Reason.BYPASSED if there and bypassed else reason if there < whole else None,
            plan=plan,
            request=wanted.request,
            weights_id=wanted.namespace.weights,
            salt=wanted.salt,
            arm=arm,
            seconds=seconds,
            _wanted=wanted,
            _far_bytes=nbytes,
        )

    def _usable(self, found: Found, blocks: int) -> tuple[int, Reason | None]:
        """Return up to which block every layer has what it needs, and why not further."""
        if found.is_whole or not blocks:
            return blocks, None
        rows = self._rows(found, blocks)
        most = blocks
        for one, row in zip(self._groups, rows, strict=True):
            if _needs_all(one) and not all(row[:most]):
                most = row.index(False)
        usable = next(self._ends(rows, most), 0)
        reasons = (found.reasons[number * blocks + usable] for number in range(len(self._groups)) if usable < blocks)
        return usable, next((reason for reason in reasons if reason is not None), None)

    def _rows(self, found: Found, blocks: int) -> list[list[bool]]:
        """Return which blocks of each group were found."""
        there = found.found
        return [there[number * blocks : (number + 1) * blocks] for number in range(len(self._groups))]

    def _ends(self, rows: Sequence[Sequence[bool]], most: int) -> Iterator[int]:
        """Yield the numbers of blocks, at most `most`, behind which every layer can continue, the largest first."""
        for usable in range(most, 0, -1):
            if all(
                all(row[one.first_block(usable, self._block) : usable])
                for one, row in zip(self._groups, rows, strict=True)
            ):
                yield usable

    def _needed(self, usable: int, first: int = 0, groups: Sequence[int] | None = None) -> Iterator[tuple[int, range]]:
        """Yield each group with the blocks from `first` on that it needs to go on behind `usable` blocks."""
        for number in range(len(self._groups)) if groups is None else groups:
            yield number, range(max(first, self._groups[number].first_block(usable, self._block)), usable)

    def _nbytes(self, usable: int) -> int:
        """Return the bytes of all blocks that `_needed` yields."""
        if self._all_full:
            return usable * self._block_bytes
        return sum(self._groups[number].group.block_bytes * len(blocks) for number, blocks in self._needed(usable))

    def load(self, match: Match, memory: KVMemory, *, timeout: float | None = None) -> int:
        """Load what a lookup has found into the engine's memory.

        Parameters
        ----------
        match : Match
            Result of the lookup.
        memory : KVMemory
            Place of the tokens `match.compute` to `match.tokens`; it must not be used for anything else until this
            returns.
        timeout : float or None
            Seconds that it may take; None for as long as computing the same is expected to take, or the cache's own
            time for each 64 MiB.

        Returns
        -------
        int
            Tokens, from the first on, whose KV is in place once the engine has computed the first `match.compute` ones;
            0 if other weights are in use by now.

        Raises
        ------
        ConfigError
            The memory lacks a place for a layer.
        """
        return self.load_many([match], [memory], timeout=timeout)[0]

    def load_many(
        self, matches: Sequence[Match], memories: Sequence[KVMemory], *, timeout: float | None = None
    ) -> list[int]:
        """Load several prompts at the same time.

        Parameters
        ----------
        matches, memories
            For each prompt, arguments of `load`.
        timeout : float or None
            Seconds that all of it may take; None for as long as computing all of it is expected to take, or the cache's
            own time for each 64 MiB.

        Returns
        -------
        list of int
            Result of `load` for each.
        """
        until = self._load_until(matches, timeout)
        return self._load_judged(matches, memories, time.monotonic(), until, self._load_exchange(matches))

    def fetch(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        *,
        salt: bytes | str = "",
        request: str = "",
        leave: int = 1,
        timeout: float | None = None,
    ) -> Match:
        """Look up a prompt and load what is there, if that pays: `lookup` and `load` in one step.

        A prompt of few blocks is asked for at once, with one request instead of two.

        Parameters
        ----------
        tokens, salt, request, leave
            As of `lookup`.
        memory, timeout
            As of `load`.

        Returns
        -------
        Match
            The first `Match.tokens` tokens are in place.

        Raises
        ------
        ConfigError
            The memory lacks a place for a layer.
        """
        exchange = self._exchange()
        with self._joining(exchange):
            wanted = self._wanted(self._namespace, tokens, salt, leave, request)
        there, nbytes = wanted.blocks * self._block, self._nbytes(wanted.blocks)
        plan = None
        if exchange is None and self._all_full and 0 < len(wanted.keys) <= _FEW_BLOCKS:
            plan = self.judge.planned(there, nbytes, step=self._block)
        if plan is None:
            (match,) = self._match([wanted], False, timeout, exchange)
            return msgspec.structs.replace(match, tokens=self.load(match, memory, timeout=timeout))
        began = time.monotonic()
        until = self._until(plan.recompute_seconds if timeout is None else timeout, nbytes)
        sizes, targets = self._targets(memory, self._needed(wanted.blocks))
        near = self._near.held(wanted.keys)
        uses: _Uses = {(loading_block, type(memory), number): (memory, 0) for number in range(len(self._groups))}
        outcomes, under_way, moving = self._fetch_probed(uses, wanted.keys, targets, sizes, request, until)
        if moving:
            self.judge.loaded(under_way, moving)
        seconds = time.monotonic() - began
        if any(outcomes):
            answers = [outcome or HEADER_BYTES + size for outcome, size in zip(outcomes, sizes, strict=True)]
            match = self._decided(wanted, Found(answers), near, False, seconds)
        else:
            match = self._weighed(wanted, wanted.blocks, None, near, False, seconds, None if near else plan)
        if match.tokens and self._is_outdated(match):
            return msgspec.structs.replace(match, tokens=self._came(match, (), ()))
        self._judged(match, match.tokens, 0.0)
        return match

    def load_async(self, match: Match, memory: KVMemory, *, timeout: float | None = None) -> Future[int]:
        """Begin a `load` on a thread of this cache; its result is that of `load`."""
        began, until = time.monotonic(), self._load_until([match], timeout)
        exchange = self._load_exchange([match])
        return self._background.begin(lambda: self._load_judged([match], [memory], began, until, exchange)[0], until)

    def load_layers(self, match: Match, memory: KVMemory, *, timeout: float | None = None) -> list[LayerLoad]:
        """Begin to load, the first layers first, so that they can compute while the others are loaded.

        Parameters
        ----------
        match, memory, timeout
            As of `load`.

        Returns
        -------
        list of LayerLoad
            One for each part that the layers are stored in, in their order. The prefix that can be used is the shortest
            of all parts, so a part that comes short makes earlier layers compute again. What the load gains is judged
            by the time until the last part is there, as if nothing had been computed meanwhile.
        """
        began, until = time.monotonic(), self._load_until([match], timeout)

        def begin(number: int) -> Future[int]:
            exchange = self._load_exchange([match])
            return self._background.begin(lambda: self._load([match], [memory], [number], until, exchange)[0], until)

        loads = [LayerLoad(self._groups[number].layers, begin(number)) for number in self._order]
        lock, waiting = threading.Lock(), len(loads)

        def ended(_: Future[int]) -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                left = waiting
            parts = [load.tokens for load in loads]
            if not left and not any(part.cancelled() or part.exception() is not None for part in parts):
                self._judged(match, min(part.result() for part in parts), time.monotonic() - began)

        for load in loads:
            load.tokens.add_done_callback(ended)
        return loads

    def _load_until(self, matches: Sequence[Match], timeout: float | None) -> float:
        """Return the time until which a load that begins now may take."""
        if timeout is None:
            # What comes later than it could be computed is of no use.
            computing = [match.plan.recompute_seconds for match in matches if match.tokens]
            known = [seconds for seconds in computing if seconds is not None]
            timeout = sum(known) if known and len(known) == len(computing) else None
        return self._until(timeout, sum(self._nbytes(match.tokens // self._block) for match in matches))

    def _load_judged(
        self,
        matches: Sequence[Match],
        memories: Sequence[KVMemory],
        began: float,
        until: float,
        exchange: Exchange | None,
    ) -> list[int]:
        """Load prompts whole, and compare the time with that of computing them."""
        usable = self._load(matches, memories, range(len(self._groups)), until, exchange)
        seconds, total = time.monotonic() - began, sum(match.tokens for match in matches)
        for match, tokens in zip(matches, usable, strict=True):
            self._judged(match, tokens, seconds * match.tokens / max(1, total))
        return usable

    def _load(
        self,
        matches: Sequence[Match],
        memories: Sequence[KVMemory],
        groups: Sequence[int],
        until: float,
        exchange: Exchange | None,
    ) -> list[int]:
        """Load some groups of layers of prompts; return the tokens of each prompt that all ranks have then."""
        try:
            usable, under_way, seconds = self._load_here(matches, memories, groups, until)
        except BaseException:
            if exchange is not None:  # the other ranks wait for this one
                self._agreed_load(matches, [0] * len(matches), 0.0, exchange)
            raise
        if exchange is not None:
            usable, seconds = self._agreed_load(matches, usable, seconds, exchange)
        if seconds:
            self.judge.loaded(under_way, seconds)
        return usable

    def _load_here(
        self, matches: Sequence[Match], memories: Sequence[KVMemory], groups: Sequence[int], until: float
    ) -> tuple[list[int], int, float]:
        """Load this rank's blocks; return the tokens that it can use of each prompt, and `_fetch`'s measurement."""
        keys: list[bytes] = []
        targets: list[Payload] = []
        sizes: list[int] = []
        places: list[list[int]] = []
        uses: _Uses = {}
        for match, memory in zip(matches, memories, strict=True):
            needed = list(self._needed(match.tokens // self._block, match.compute // self._block, groups))
            if self._is_outdated(match):
                needed = []
            own_sizes, own_targets = self._targets(memory, needed)
            sizes += own_sizes
            targets += own_targets
            for number, blocks in needed:
                keys += match._wanted.keys_of(number, blocks)
                if blocks:
                    uses[loading_block, type(memory), number] = memory, blocks.start
            places.append([block for _, blocks in needed for block in blocks])
        names = (
            matches[0].request
            if len(matches) == 1
            else [match.request for match, own in zip(matches, places, strict=True) for _ in own]
        )
        came, under_way, seconds = self._fetch_probed(uses, keys, targets, sizes, names, until)
        outcomes = iter(came)
        usable = [
            self._came(match, own, list(itertools.islice(outcomes, len(own))))
            for match, own in zip(matches, places, strict=True)
        ]
        return usable, under_way, seconds

    def _agreed_load(
        self, matches: Sequence[Match], usable: Sequence[int], seconds: float, exchange: Exchange
    ) -> tuple[list[int], float]:
        """Return the loaded tokens that all ranks can use, and the time of the slowest rank, if known."""
        assert self._agreement is not None
        lasts = [match._wanted.last for match in matches]
        agreed, slowest = self._agreement.loaded(exchange, lasts, usable, seconds)
        for match, own, tokens in zip(matches, usable, agreed, strict=True):
            if tokens < own:
                self._outdone("load", match, own - tokens)
        return agreed, max(seconds, slowest) if seconds else 0.0

    def _is_outdated(self, match: Match) -> bool:
        """Tell if other weights are in use than those of a lookup."""
        return match._wanted.namespace.digest != self._namespace.digest

    def _came(self, match: Match, blocks: Sequence[int], outcomes: Sequence[Reason | None]) -> int:
        """Return how many tokens of a prompt can be used, by what became of its blocks, which have these numbers."""
        if match.tokens and self._is_outdated(match):  # perhaps since the load began
            said = f"it is of weights {match.weights_id!r}, and {self.weights_id!r} are in use"
            self._blocks.missed("load", match.request, match.tokens // self._block, Reason.OTHER_WEIGHTS, said)
            return 0
        lost = [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is not None]
        if not lost:
            return match.tokens
        # Only layers with full attention can do with fewer blocks; others have just those of the end.
        return min(lost) * self._block if self._all_full else match.compute

    def _fetch_probed(
        self,
        uses: _Uses,
        keys: Sequence[bytes],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        request: str | Sequence[str],
        until: float,
    ) -> tuple[list[Reason | None], int, float]:
        """Do as `_fetch`, after the probe of memory that is used for the first time."""
        # No node is asked for blocks that are all in this process's memory, and the nodes may be away.
        is_near = self._near.nbytes and len(self._near.held(keys)) == len(keys)
        withheld = self._unproved(uses, until, through_nodes=not is_near)
        if withheld is None:
            return self._fetch(keys, targets, sizes, request, until)
        self._withheld("load", [request] * len(keys) if isinstance(request, str) else request, withheld)
        return [withheld] * len(keys), 0, 0.0

    def _unproved(self, uses: _Uses, until: float, *, through_nodes: bool = True) -> Reason | None:
        """Probe memory that is used for the first time; return why its blocks may not be moved."""

        def block(kinds: Sequence[Any]) -> EngineBlock:
            make: Callable[[Sequence[Place]], EngineBlock] = kinds[0][0]
            return make([self._place(number, *uses[make, kind, number]) for _, kind, number in kinds])

        return self._probe.first_use(uses, block, _seconds_to(until), through_nodes=through_nodes)

    def _place(self, number: int, memory: KVMemory, block: int) -> Place:
        """Return the place of a block of one group of layers."""

        def payload() -> Payload:
            (found,) = self._targets(memory, [(number, range(block, block + 1))])[1]
            return found

        step = self._block
        return Place(memory, self._groups[number].layers, block * step, (block + 1) * step, payload)

    def _withheld(self, step: str, requests: Sequence[str], reason: Reason) -> None:
        """Write into the journal that blocks were not moved because no known block came back before them."""
        for request, blocks in Counter(requests).items():
            self._blocks.missed(step, request, blocks, reason, "no known block has come back through this memory")

    def _fetch(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        request: str | Sequence[str],
        until: float,
    ) -> tuple[list[Reason | None], int, float]:
        """Copy blocks that are in this process's memory, and load the others.

        Returns
        -------
        tuple of list, int and float
            For each block None or the reason why it is missing, and for the judge the bytes under way and the seconds
            that the load took; 0 seconds if the judge cannot use them.
        """
        outcomes: list[Reason | None] = [None] * len(keys)
        far = self._near.copy(keys, targets) if self._near.nbytes else range(len(keys))
        if not far:
            return outcomes, 0, 0.0
        if len(far) < len(keys):
            keys, targets, sizes = _take(keys, far), _take(targets, far), _take(sizes, far)
            request = request if isinstance(request, str) else _take(request, far)
        began = time.monotonic()
        nbytes = sum(sizes)
        under_way = self.judge.begun(nbytes)
        try:
            loaded = self._blocks.load(keys, targets, request=request, timeout=_seconds_to(until))
        finally:
            self.judge.ended(nbytes)
        seconds = 0.0
        if not any(loaded) or Reason.LATE in loaded:  # what was late has taken so long at least
            seconds = time.monotonic() - began
        for number, outcome in zip(far, loaded, strict=True):
            outcomes[number] = outcome
        return outcomes, under_way, seconds

    def _targets(self, memory: KVMemory, needed: Iterable[tuple[int, range]]) -> tuple[list[int], list[Payload]]:
        """Return the bytes of blocks, and the memory into which each is loaded.

        Raises
        ------
        ConfigError
            The memory has no place for a layer, or one of another size.
        """
        sizes: list[int] = []
        targets: list[Payload] = []
        for number, blocks in needed:
            one = self._groups[number]
            sizes += [one.group.block_bytes] * len(blocks)
            for block, payload in zip(blocks, self._payloads(number, memory, blocks), strict=True):
                if payload is None:
                    raise ConfigError(f"the memory has no place for block {block} of one of the layers {one.layers}")
                targets.append(payload)
        return sizes, targets

    def _payloads(self, number: int, memory: KVMemory, blocks: range) -> Sequence[Payload | None]:
        """Return the memory of blocks of a group of layers; None for those of which the engine does not have all.

        Raises
        ------
        ConfigError
            It has another size.
        """
        one, step = self._groups[number], self._block
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

    def _judged(self, match: Match, usable: int, seconds: float) -> None:
        # What is near has taken no time of the link's, and says nothing about loading.
        if match.tokens and match._far_bytes:
            self.judge.gained(match.tokens, usable, match.seconds + seconds, compute=match.compute)

    def computed(self, tokens: int, seconds: float, *, context: int = 0, match: Match | None = None) -> None:
        """Report how long computing took, from which it is judged what is worth loading.

        Parameters
        ----------
        tokens : int
            Tokens that were computed together.
        seconds : float
            Time until their KV was there.
        context : int
            Tokens before them.
        match : Match, optional
            Lookup of the request, if it said that its prefix should be computed.
        """
        self.judge.computed(tokens, context, seconds, held_out=match is not None and match.arm == "hold-out")

    def save(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        *,
        start: int = 0,
        salt: bytes | str = "",
        request: str = "",
        weights_id: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Save the KV of a sequence, except for blocks that are there already.

        Parameters
        ----------
        tokens : sequence of int
            All tokens of the sequence, from the first on; those of a last block that is not full are left out.
        memory : KVMemory
            Place of their KV, which must not change until this returns. What it does not have is not saved: tokens that
            have left a sliding window, states of boundaries at which none was kept.
        start : int
            Tokens at the front that need not be looked at.
        salt : bytes or str
            As of `lookup`.
        request : str
            Name of the request, for ``farpool why``.
        weights_id : str or None
            Name of the weights that have computed it, such as `Match.weights_id`; None for those in use when this is
            called. Name them wherever weights may change between computing and saving.
        timeout : float or None
            Seconds that it may take; None for the cache's own time for each 64 MiB.

        Returns
        -------
        int
            Number of blocks that are there now, of all groups of layers.
        """
        return self.save_many(
            [tokens],
            [memory],
            starts=[start],
            salts=[salt],
            requests=[request],
            weights_id=weights_id,
            timeout=timeout,
        )[0]

    def save_many(
        self,
        sequences: Sequence[Sequence[int]],
        memories: Sequence[KVMemory],
        *,
        starts: Sequence[int] = (),
        salts: Sequence[bytes | str] = (),
        requests: Sequence[str] = (),
        weights_id: str | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Save several sequences at the same time; blocks that they share are sent once.

        Parameters
        ----------
        sequences, memories
            For each sequence, arguments of `save`.
        starts : sequence of int
            Tokens at the front of each that need not be looked at; left out for none.
        salts : sequence of (bytes or str)
            Salt of each, as of `lookup`; left out for none.
        requests : sequence of str
            Name of the request of each; left out for none.
        weights_id : str or None
            As of `save`.
        timeout : float or None
            Seconds that all of it may take; None for the cache's own time for each 64 MiB.

        Returns
        -------
        list of int
            Result of `save` for each.
        """
        until = self._save_until(sequences, timeout)
        return self._save(
            self._of(weights_id),
            sequences,
            memories,
            _each(starts, sequences, 0),
            _each(salts, sequences, b""),
            _each(requests, sequences, ""),
            range(len(self._groups)),
            until,
        )

    def save_async(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        *,
        start: int = 0,
        salt: bytes | str = "",
        request: str = "",
        weights_id: str | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Begin a `save` on a thread of this cache; its result is that of `save`."""
        groups = range(len(self._groups))
        return self._begin_save(tokens, memory, groups, start, salt, request, weights_id, timeout)

    def save_layers(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        layers: Collection[int],
        *,
        start: int = 0,
        salt: bytes | str = "",
        request: str = "",
        weights_id: str | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Begin to save some layers, while the others are still being computed.

        Parameters
        ----------
        tokens, memory, start, salt, request, weights_id, timeout
            As of `save`.
        layers : collection of int
            Numbers of the layers: one or more of `parts`.

        Returns
        -------
        Future of int
            Number of blocks of these layers that are there once it is done.

        Raises
        ------
        ConfigError
            The layers are no whole parts.
        """
        groups = [number for number in self._order if set(self._groups[number].layers) <= set(layers)]
        if {layer for number in groups for layer in self._groups[number].layers} != set(layers):
            raise ConfigError(f"layers {sorted(layers)} are not stored by themselves, expected some of {self.parts}")
        return self._begin_save(tokens, memory, groups, start, salt, request, weights_id, timeout)

    def _begin_save(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        groups: Sequence[int],
        start: int,
        salt: bytes | str,
        request: str,
        weights_id: str | None,
        timeout: float | None,
    ) -> Future[int]:
        # All that the save rests on is taken now: by the time it begins, other weights may be in use.
        namespace, tokens, until = self._of(weights_id), list(tokens), self._save_until([tokens], timeout)
        return self._background.begin(
            lambda: self._save(namespace, [tokens], [memory], [start], [salt], [request], groups, until)[0], until
        )

    def _of(self, weights_id: str | None) -> Namespace:
        """Return the namespace of some weights, or of those in use."""
        namespace = self._namespace
        return namespace if weights_id is None else replace(namespace, weights=weights_id)

    def _save_until(self, sequences: Sequence[Sequence[int]], timeout: float | None) -> float:
        """Return the time until which a save that begins now may take."""
        nbytes = sum(one.group.block_bytes for one in self._groups)
        return self._until(timeout, sum(len(tokens) // self._block for tokens in sequences) * nbytes)

    def _save(
        self,
        namespace: Namespace,
        sequences: Sequence[Sequence[int]],
        memories: Sequence[KVMemory],
        starts: Sequence[int],
        salts: Sequence[bytes | str],
        requests: Sequence[str],
        groups: Sequence[int],
        until: float,
    ) -> list[int]:
        """Save some groups of layers of sequences; return for each how many of its blocks are there."""
        values: dict[bytes, Payload] = {}
        parents: dict[bytes, bytes] = {}
        names: list[str] = []
        saved: list[list[bytes]] = []
        uses: _Uses = {}
        each = zip(sequences, memories, starts, salts, requests, strict=True)
        for tokens, memory, start, salt, request in each:
            wanted = self._wanted(namespace, tokens, salt, 0, request)
            own: list[bytes] = []
            # Those that others need go first.
            for number in sorted(groups, key=lambda number: not _needs_all(self._groups[number])):
                blocks = range(start // self._block, wanted.blocks)
                fresh = [block for block in blocks if wanted.key(number, block) not in values]
                span = range(fresh[0], fresh[-1] + 1) if fresh else range(0)
                for block, payload in zip(span, self._payloads(number, memory, span), strict=True):
                    key = wanted.key(number, block)
                    if payload is not None and key not in values:
                        values[key] = payload
                        names.append(request)
                        uses[saving_block, type(memory), number] = memory, block
                        if (parent := self._parent(wanted, number, block)) is not None:
                            parents[key] = parent
                own += [key for key in wanted.keys_of(number, blocks) if key in values]
            saved.append(own)
        if (withheld := self._unproved(uses, until)) is not None:
            self._withheld("save", names, withheld)
            return [0] * len(saved)
        computing = sum(self.judge.prefill_seconds(len(tokens)) for tokens in sequences)
        outcomes = self._blocks.save(
            list(values),
            list(values.values()),
            request=requests[0] if len(requests) == 1 else names,
            timeout=_seconds_to(until),
            cost=computing / max(1, len(values)),
            parents=parents,
            namespace=namespace,
        )
        there = {key for key, outcome in zip(values, outcomes, strict=True) if outcome is None}
        return [sum(key in there for key in own) for own in saved]

    def _parent(self, wanted: _Wanted, group: int, block: int) -> bytes | None:
        """Return the key of the block without which one is of no use; None where there is none."""
        if _needs_all(self._groups[group]):
            return wanted.key(group, block - 1) if block else None
        # A window or a state is of use with all that layers with full attention have before it.
        return None if self._full is None else wanted.key(self._full, block)

    def pin(self, tokens: Sequence[int], ttl: float, *, salt: bytes | str = "", request: str = "") -> int:
        """Keep the KV of a sequence from being evicted for `ttl` seconds; return how many of its blocks stay.

        Tokens and salt (see `lookup`) together name a sequence, and each sequence has pins of its own: blocks that two
        sequences share stay until both are unpinned. Nodes end pins early when this process has been gone for longer
        than their grace, or when they are restarted.
        """
        keys, owner = self._sequence(tokens, salt)
        return self._blocks.pin(keys, ttl, owner=owner, request=request).count(None)

    def unpin(self, tokens: Sequence[int], *, salt: bytes | str = "") -> None:
        """Let the KV of a sequence be evicted again; that of weights which are no longer in use goes by its time."""
        keys, owner = self._sequence(tokens, salt)
        self._blocks.unpin(keys, owner=owner)

    def _sequence(self, tokens: Sequence[int], salt: bytes | str) -> tuple[list[bytes], bytes]:
        """Return the keys of a sequence's blocks, and a name made from all of its tokens and its salt."""
        namespace = self._namespace
        chains = self._chains(namespace, tokens, salt_bytes(salt))
        return self._keys(namespace, chains), self._owner(chains, tokens)

    def _owner(self, chains: Sequence[bytes], tokens: Sequence[int]) -> bytes:
        """Return a name that stands for all tokens of a sequence, those of a last block that is not full too."""
        return b"".join(chains[-1:]) + array("Q", list(tokens[len(chains) * self._block :])).tobytes()

    def supersede(self, old: Sequence[int], new: Sequence[int], *, salt: bytes | str = "") -> int:
        """Drop the KV of a sequence that another one replaces, except for what both share.

        Parameters
        ----------
        old, new : sequence of int
            Tokens, such as a conversation before and after its tool results were cut.
        salt : bytes or str
            Salt of both, as of `lookup`.

        Returns
        -------
        int
            Number of blocks that went. Other sequences that go on from the old one are computed again.
        """
        namespace, salt = self._namespace, salt_bytes(salt)
        kept = set(self._token_keys(namespace, new, salt))
        return self._blocks.drop([key for key in self._token_keys(namespace, old, salt) if key not in kept])

    def demote(
        self,
        tokens: Sequence[int],
        *,
        salt: bytes | str = "",
        request: str = "",
        timeout: float | None = None,
    ) -> Demoted:
        """Move the KV of a sequence out of memory into the tier below, so that others have room.

        It is found as before, and comes back when it is loaded, or by `prefetch_by`. Other sequences that begin alike
        have their common blocks there, too.

        Parameters
        ----------
        tokens : sequence of int
            The sequence, such as a conversation that waits for a slow tool.
        salt : bytes or str
            As of `lookup`.
        request : str
            Name of the request, for ``farpool why``.
        timeout : float or None
            Seconds that it may take; None for the cache's own time.

        Returns
        -------
        Demoted
            How many blocks went, and why the others did not: without a lower tier all of them stay.
        """
        keys, _ = self._sequence(tokens, salt)
        outcomes = self._blocks.demote(keys, request=request, timeout=timeout)
        return Demoted(outcomes.count(None), _counted(outcomes))

    def handoff(self, tokens: Sequence[int], ttl: float, *, salt: bytes | str = "", request: str = "") -> Handoff:
        """Keep the KV of a sequence for another process, and make a note for it.

        Parameters
        ----------
        tokens : sequence of int
            The sequence.
        ttl : float
            Seconds for which it is kept, here until the other process takes it, and as long again there. A node ends
            what is kept for this process when it has been gone for longer than the node's grace.
        salt : bytes or str
            As of `lookup`. The note holds it, so `take` needs none.
        request : str
            Name of the request, for ``farpool why``.

        Returns
        -------
        Handoff
            The note, and how many blocks are kept. If none is, the note is of no use.
        """
        namespace, salt = self._namespace, salt_bytes(salt)
        chains = self._chains(namespace, tokens, salt)
        owner = self._owner(chains, tokens)
        outcomes = self._blocks.pin(self._keys(namespace, chains), ttl, owner=owner, request=request)
        kept = outcomes.count(None)
        note = msgspec.msgpack.encode(_Note(namespace.digest, chains, owner, ttl, kept, salt))
        return Handoff(note, kept, _counted(outcomes))

    def take(self, note: bytes, *, request: str = "", timeout: float | None = None) -> Match:
        """Look up what another process has handed off, without its tokens, and keep it for this one.

        Parameters
        ----------
        note : bytes
            `Handoff.note` of the other process.
        request : str
            Name of the request, for ``farpool why``.
        timeout : float or None
            Seconds that the lookup may take; None for the cache's own time.

        Returns
        -------
        Match
            Nothing is found if the other process has other weights, layers or settings. What is found is kept for as
            long as the handoff says, or until `unpin`.

        Raises
        ------
        ConfigError
            The bytes are no such note. The other ranks, if there are any, find nothing then.
        """
        namespace, exchange = self._namespace, self._exchange()
        with self._joining(exchange):
            handed = _handed(note)
            is_ours = handed.namespace == namespace.digest
            chains = handed.chains if is_ours else []
            keys = self._keys(namespace, chains)
        wanted = _Wanted(namespace, keys, len(chains), len(handed.chains) * self._block, request, handed.salt)
        if not is_ours:
            said = "the note is of other weights, layers or settings"
            self._blocks.missed("lookup", request, len(handed.chains), Reason.FOREIGN, said)
            match = self._decided(wanted, Found([]), set(), False, 0.0)
            if exchange is not None:
                self._agreed([match], exchange)
            return msgspec.structs.replace(match, reason=Reason.FOREIGN)
        (match,) = self._match([wanted], False, timeout, exchange)
        if match.found and handed.kept:
            # By this process's own session, as the giver's may end.
            self._background.begin(
                lambda: self._blocks.pin(keys, handed.ttl, owner=handed.owner, request=request), self._until(None, 0)
            )
        return match

    def prefetch_by(
        self,
        tokens: Sequence[int],
        deadline: float,
        *,
        salt: bytes | str = "",
        request: str = "",
        leave: int = 1,
    ) -> Future[int]:
        """Bring the KV of a sequence near, for a request that will come: what a `lookup` of it would load.

        Parameters
        ----------
        tokens : sequence of int
            The sequence.
        deadline : float
            Seconds from now after which it is of no use.
        salt : bytes or str
            As of `lookup`.
        request : str
            Name of the request, for ``farpool why``.
        leave : int
            As of `lookup`.

        Returns
        -------
        Future of int
            Number of blocks that are near once it is done: with `near_bytes` in this process's memory, as many of the
            first as it has room for; without it in that of the nodes, where they come back from the nodes' files, and
            stay until the deadline.
        """
        namespace, tokens, until = self._namespace, list(tokens), time.monotonic() + deadline
        return self._background.begin(
            lambda: self._prefetch(self._wanted(namespace, tokens, salt, leave, request), until), until
        )

    def _prefetch(self, wanted: _Wanted, until: float) -> int:
        if not wanted.blocks or time.monotonic() >= until:
            return 0
        (found,), _ = self._look_up([wanted], _seconds_to(until))
        usable, _ = self._usable(found, wanted.blocks)
        needed = [
            (key, self._groups[number].group.block_bytes)
            for number, blocks in self._needed(usable)
            for key in wanted.keys_of(number, blocks)
        ]
        keys, left = [key for key, _ in needed], _seconds_to(until)
        if not needed or not left:
            return 0
        if not self._near.nbytes:
            # A node that is to keep a block in memory reads it from its file first.
            return self._blocks.pin(keys, left, owner=b"prefetch", request=wanted.request, timeout=left).count(None)
        places = self._near.reserve(needed)
        came, under_way, seconds = self._fetch(
            list(places),
            [memoryview(place) for place in places.values()],
            [len(place) for place in places.values()],
            wanted.request,
            until,
        )
        if seconds:
            self.judge.loaded(under_way, seconds)
        for (key, place), outcome in zip(places.items(), came, strict=True):
            if outcome is None:
                self._near.keep(key, place)
            else:
                self._near.give_back(place)
        return len(self._near.held(keys))

    def purge(self) -> int:
        """Remove all KV of these weights and settings from the nodes; return how many blocks there were.

        Raises
        ------
        NodeError
            Nodes that may have some cannot be asked.
        """
        self._near.clear()
        return self._blocks.purge(self._namespace)

    def stats(self) -> dict[str, Any]:
        """Return counters of blocks (see `BlockCache.stats`), and what loading gains (see `Judge.stats`)."""
        return {**self._blocks.stats(), **self.judge.stats()}

    def _until(self, timeout: float | None, nbytes: int) -> float:
        """Return the end of the time of a call that begins now, by default that for so many bytes."""
        return time.monotonic() + (self._blocks.time_for(nbytes) if timeout is None else timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until all that was begun has ended; return False if it has not within `timeout` seconds."""
        return self._blocks.drain(timeout)

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and close the connections. Idempotent."""
        self._blocks.close()
        self._disagreements.join(self._blocks.time_for(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _count_of_ranks(parallel: Mapping[str, int], rank: int, ranks: Ranks | None) -> int:
    """Return how many ranks there are.

    Raises
    ------
    ConfigError
        There is no such rank, or no such number of ranks.
    """
    if not all(isinstance(size, int) and size > 0 for size in parallel.values()):
        raise ConfigError(f"parallel is {parallel!r}, expected sizes above 0", setting="parallel")
    count = math.prod(parallel.values())
    if not isinstance(rank, int) or not 0 <= rank < count:
        raise ConfigError(f"rank is {rank!r}, expected 0 to {count - 1}", setting="rank")
    if ranks is not None and (ranks.rank, ranks.size) != (rank, count):
        raise ConfigError(
            f"ranks is rank {ranks.rank} of {ranks.size}, expected rank {rank} of {count}, from parallel and rank",
            setting="ranks",
        )
    return count


def _handed(note: bytes) -> _Note:
    """Read the note of a handoff.

    Raises
    ------
    ConfigError
        The bytes are no such note.
    """
    try:
        return msgspec.msgpack.decode(note, type=_Note)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{len(note)} bytes are not the note of a handoff: {error}") from None


def _passed_over(wanted: _Wanted) -> Match:
    """Return what is known of a sequence that was not looked up."""
    plan = Plan(wanted.tokens, None, None, "compute: loading has cost time lately")
    weights = wanted.namespace.weights
    return Match(0, 0, 0, Reason.BYPASSED, plan, wanted.request, weights, wanted.salt, "hold-out", 0.0, wanted, 0)


def _payload(memory: KVMemory, layers: Iterable[int], start: int, stop: int) -> Payload | None:
    """Return the memory of some tokens' KV of several layers, or None if the engine does not have all of it."""
    parts: list[Buffer | Slices] = []
    for layer in layers:
        own = memory.parts(layer, start, stop)
        if own is None:
            return None
        parts += own
    return as_payload(tuple(parts))


def _needs_all(one: LayerGroup) -> bool:
    """Tell if these layers need all blocks from the first on."""
    return one.group.kind in ("full", "mla")


def _take(values: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """Return the values that have these numbers."""
    return [values[number] for number in numbers]


def _each(given: Sequence[T], others: Sequence[object], default: T) -> Sequence[T]:
    """Return one value for each of some others: those that were given, if any were."""
    return given or [default] * len(others)


def _seconds_to(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _counted(outcomes: Sequence[Reason | None]) -> Mapping[Reason, int]:
    """Return how many of some blocks there were for each reason."""
    return Counter(reason for reason in outcomes if reason is not None)


_CACHES: weakref.WeakSet[PrefixCache] = weakref.WeakSet()


def _forked() -> None:
    """Renew the locks of caches in the child of a fork: threads of the parent may hold them."""
    for cache in _CACHES:
        cache._near.begin()
        cache._background.leave_to_parent()
        cache._disagreements.leave_to_parent()


os.register_at_fork(after_in_child=_forked)
