"""Prefix reuse for engines of one's own: look up what is there, load it or compute it, save what is new.

A block's key says all tokens up to its end, so sequences that begin alike share blocks, also between processes, hosts
and engines. A prefix can be used up to a block boundary at which every layer has what it needs: layers with full
attention all blocks, those with a sliding window the last ones, and recurrent layers the state at the boundary.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from farpool.errors import ConfigError
from farpool.kv.blocks import BlockCache, Found
from farpool.kv.cost import Arm, Plan
from farpool.kv.judge import Judge
from farpool.kv.keys import token_chain
from farpool.kv.memory import KVMemory, Layer, LayerGroup, layer_groups
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason
from farpool.store.arguments import as_payload, nbytes_of, parts_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.kv.objects import Objects
    from farpool.store.arguments import Payload

__all__ = ["Demoted", "LayerLoad", "Match", "PrefixCache"]


@dataclass(frozen=True)
class Match:
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
    """

    tokens: int
    compute: int
    found: int
    reason: Reason | None
    plan: Plan
    request: str
    arm: Arm
    seconds: float
    _blocks: BlockCache
    _keys: Sequence[Sequence[bytes]]


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


class _Handoff(msgspec.Struct, frozen=True):
    """Names of the blocks that one process hands to another."""

    namespace: bytes
    chains: list[bytes]


class PrefixCache:
    """KV of token sequences, shared through nodes and never slower than computing it. Thread-safe.

    Whatever goes wrong is a miss: the engine computes. Which of both is faster is measured all the time: tell it how
    long computing takes (`computed`), and it loads only what comes sooner than it could be computed.

    Parameters
    ----------
    nodes : sequence of str, Store or PoolObjects
        Addresses of the nodes, or a store or objects in a pool, which stay the caller's.
    layers : sequence of Layer
        Layers whose KV is kept.
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
    tenant : str
        Users who share nothing with others.
    codec : str
        Compression of the blocks (docs/kv-compression.md); empty for none.
    pieces : int
        Number of parts that the layers are stored in, for `load_layers`.
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
        tenant: str = "",
        codec: str = "",
        pieces: int = 1,
        near_bytes: int = 0,
        hold_out: bool = True,
        **settings: Any,
    ) -> None:
        self._groups = layer_groups(layers, block, pieces)
        self._full = next((number for number, one in enumerate(self._groups) if _needs_all(one)), None)
        namespace = Namespace(
            engine="farpool",
            model=model,
            weights=weights_id,
            dtype=dtype,
            layout=layout,
            tokens_per_block=block,
            groups=tuple(one.group for one in self._groups),
            heads=heads,
            head_dim=head_dim,
            tenant=tenant,
            codec=codec,
        )
        self._nodes, self._settings = nodes, settings
        self.judge = Judge(hold_out=hold_out)
        self._blocks = BlockCache(nodes, namespace, judge=self.judge, **settings)
        self._block = block
        self._near: OrderedDict[bytes, bytearray] = OrderedDict()
        self._near_left = near_bytes
        self._lock = threading.Lock()

    @property
    def weights_id(self) -> str:
        """Name of the weights whose KV is looked up and saved from now on; setting it hides all KV of other weights."""
        return self._blocks.namespace.weights

    @weights_id.setter
    def weights_id(self, weights_id: str) -> None:
        before = self._blocks
        # What is under way goes on under the old name, so that it is not saved or found as KV of the new weights.
        namespace = replace(before.namespace, weights=weights_id)
        self._blocks = BlockCache(self._nodes, namespace, judge=self.judge, **self._settings)
        before.close()

    def lookup(self, tokens: Sequence[int], *, request: str = "", split: bool = False, leave: int = 1) -> Match:
        """Find out how much of a prompt can be loaded, and decide whether it should be.

        Parameters
        ----------
        tokens : sequence of int
            The prompt.
        request : str
            Name of the request, for ``farpool why``.
        split : bool
            The engine can compute the first tokens while the others are loaded.
        leave : int
            Tokens at the end that are never loaded, as an engine has to compute at least one to go on.
        """
        blocks = self._blocks
        return self._match(
            blocks, self._chains(blocks, tokens[: max(0, len(tokens) - leave)]), len(tokens), request, split
        )

    def _chains(self, blocks: BlockCache, tokens: Sequence[int]) -> list[bytes]:
        return token_chain(tokens, self._block, blocks.digest)

    def _match(self, blocks: BlockCache, chains: list[bytes], total: int, request: str, split: bool) -> Match:
        began = time.monotonic()
        keys = [blocks.key(chain, number) for number in range(len(self._groups)) for chain in chains]
        found = blocks.lookup(keys, request=request)
        usable, reason = self._usable(found, len(chains))
        there = usable * self._block
        nbytes = sum(one.group.block_bytes * (usable - one.first_block(usable, self._block)) for one in self._groups)
        plan = Plan(0, None, None, "nothing is there")
        arm: Arm = "load"
        if there:
            plan, arm = self.judge.decide(there, nbytes, step=self._block, request=request, split=split)
        bypassed = plan.compute >= there
        return Match(
            tokens=0 if bypassed else there,
            compute=0 if bypassed else plan.compute,
            found=there,
            reason=Reason.BYPASSED if there and bypassed else reason if there < total - total % self._block else None,
            plan=plan,
            request=request,
            arm=arm,
            seconds=time.monotonic() - began,
            _blocks=blocks,
            _keys=[keys[start : start + usable] for start in range(0, len(keys), max(1, len(chains)))],
        )

    def _usable(self, found: Found, blocks: int) -> tuple[int, Reason | None]:
        """Return up to which block every layer has what it needs, and why not further."""
        if found.is_whole or not blocks:
            return blocks, None
        there = found.found
        rows = [there[number * blocks : (number + 1) * blocks] for number in range(len(self._groups))]
        most = blocks
        for one, row in zip(self._groups, rows, strict=True):
            if one.group.kind in ("full", "mla") and not all(row[:most]):
                most = row.index(False)
        for usable in range(most, 0, -1):
            if all(
                all(row[one.first_block(usable, self._block) : usable])
                for one, row in zip(self._groups, rows, strict=True)
            ):
                break
        else:
            usable = 0
        reasons = (found.reasons[number * blocks + usable] for number in range(len(self._groups)) if usable < blocks)
        return usable, next((reason for reason in reasons if reason is not None), None)

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
            time.

        Returns
        -------
        int
            Tokens, from the first on, whose KV is in place once the engine has computed the first `match.compute` ones.

        Raises
        ------
        ConfigError
            The memory lacks a place for a layer.
        """
        began = time.monotonic()
        usable = self._load(match, memory, range(len(self._groups)), timeout)
        self._judged(match, usable, time.monotonic() - began)
        return usable

    def load_async(self, match: Match, memory: KVMemory, *, timeout: float | None = None) -> Future[int]:
        """Begin a `load` on a thread of this cache; its result is that of `load`."""
        return match._blocks.submit(self.load, match, memory, timeout=timeout)

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
        began = time.monotonic()
        loads = [
            LayerLoad(one.layers, match._blocks.submit(self._load, match, memory, [number], timeout))
            for number, one in sorted(enumerate(self._groups), key=lambda pair: pair[1].layers)
        ]
        waiting = len(loads)

        def ended(_: Future[int]) -> None:
            nonlocal waiting
            with self._lock:
                waiting -= 1
                left = waiting
            parts = [load.tokens for load in loads]
            if not left and not any(part.cancelled() or part.exception() is not None for part in parts):
                self._judged(match, min(part.result() for part in parts), time.monotonic() - began)

        for load in loads:
            load.tokens.add_done_callback(ended)
        return loads

    def _load(self, match: Match, memory: KVMemory, groups: Sequence[int], timeout: float | None) -> int:
        """Load some groups of layers; return how many tokens they have then."""
        usable, first = match.tokens // self._block, match.compute // self._block
        if not usable:
            return 0
        keys: list[bytes] = []
        targets: list[Payload] = []
        places: list[tuple[int, int]] = []
        for number in groups:
            one = self._groups[number]
            for block in range(max(first, one.first_block(usable, self._block)), usable):
                keys.append(match._keys[number][block])
                targets.append(self._parts(one, memory, block))
                places.append((number, block))
        if timeout is None and match.plan.recompute_seconds is not None:
            # What comes later than it could be computed is of no use.
            timeout = match.plan.recompute_seconds
        nbytes = sum(self._groups[number].group.block_bytes for number, _ in places)
        began = time.monotonic()
        with self.judge.loading(nbytes) as under_way:
            outcomes = self._load_blocks(match, keys, targets, timeout)
        if all(outcome is None for outcome in outcomes):
            self.judge.loaded(under_way, time.monotonic() - began)
            return match.tokens
        for (_, block), outcome in zip(places, outcomes, strict=True):
            if outcome is not None:
                # Only layers with full attention can do with fewer blocks; others have just those of the end.
                whole = all(one.group.kind in ("full", "mla") for one in self._groups)
                usable = min(usable, block) if whole else first
        return usable * self._block

    def _load_blocks(
        self, match: Match, keys: list[bytes], targets: list[Payload], timeout: float | None
    ) -> list[Reason | None]:
        """Load blocks from this process's memory, where `prefetch_by` has brought them, or else from the nodes."""
        outcomes: list[Reason | None] = [None] * len(keys)
        far: list[int] = []
        for number, (key, parts) in enumerate(zip(keys, targets, strict=True)):
            with self._lock:
                near = self._near.get(key)
            if near is None:
                far.append(number)
                continue
            at, source = 0, memoryview(near)
            for part in parts_of(parts):
                view = part.cast("B")
                view[:] = source[at : at + view.nbytes]
                at += view.nbytes
        if far:
            loaded = match._blocks.load(
                [keys[n] for n in far], [targets[n] for n in far], request=match.request, timeout=timeout
            )
            for number, outcome in zip(far, loaded, strict=True):
                outcomes[number] = outcome
        return outcomes

    def _parts(self, one: LayerGroup, memory: KVMemory, block: int) -> Payload:
        """Return the memory of one block of a group of layers.

        Raises
        ------
        ConfigError
            The memory has no place for a layer, or one of another size.
        """
        parts: list[Buffer | Slices] = []
        for layer in one.layers:
            own = memory.parts(layer, block * self._block, (block + 1) * self._block)
            if own is None:
                raise ConfigError(f"the memory has no place for layer {layer}, block {block}, which is to be loaded")
            parts += own
        payload = as_payload(tuple(parts))
        nbytes = nbytes_of(payload)
        if nbytes != one.group.block_bytes:
            raise ConfigError(
                f"the memory of layers {one.layers}, block {block}, has {nbytes} bytes, "
                f"expected {one.group.block_bytes}"
            )
        return payload

    def _judged(self, match: Match, usable: int, seconds: float) -> None:
        if match.tokens:
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
        held_out = match.seconds if match is not None and match.arm == "hold-out" else None
        self.judge.computed(tokens, context, seconds, held_out=held_out)

    def save(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        *,
        start: int = 0,
        request: str = "",
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
        request : str
            Name of the request, for ``farpool why``.
        timeout : float or None
            Seconds that it may take; None for the cache's own time for each 64 MiB.

        Returns
        -------
        int
            Number of blocks that are there now, of all groups of layers.
        """
        blocks = self._blocks
        keys: list[bytes] = []
        values: list[Payload] = []
        parents: dict[bytes, bytes] = {}
        chains = self._chains(blocks, tokens)
        # Those that others need go first.
        for number, one in sorted(enumerate(self._groups), key=lambda numbered: not _needs_all(numbered[1])):
            for block in range(start // self._block, len(chains)):
                span = (block * self._block, (block + 1) * self._block)
                own = [memory.parts(layer, *span) for layer in one.layers]
                if all(parts is not None for parts in own):
                    keys.append(blocks.key(chains[block], number))
                    values.append(self._parts(one, memory, block))
                    if (parent := self._parent(blocks, chains, number, block)) is not None:
                        parents[keys[-1]] = parent
        share = self.judge.prefill_seconds(len(tokens)) / len(keys) if keys else 0.0
        return blocks.save(keys, values, request=request, timeout=timeout, cost=share, parents=parents).count(None)

    def _parent(self, blocks: BlockCache, chains: Sequence[bytes], group: int, block: int) -> bytes | None:
        """Return the key of the block without which one is of no use; None where there is none."""
        if _needs_all(self._groups[group]):
            return blocks.key(chains[block - 1], group) if block else None
        # A window or a state is of use with all that layers with full attention have before it.
        return None if self._full is None else blocks.key(chains[block], self._full)

    def save_async(
        self,
        tokens: Sequence[int],
        memory: KVMemory,
        *,
        start: int = 0,
        request: str = "",
        timeout: float | None = None,
    ) -> Future[int]:
        """Begin a `save` on a thread of this cache; its result is that of `save`."""
        return self._blocks.submit(self.save, tokens, memory, start=start, request=request, timeout=timeout)

    def pin(self, tokens: Sequence[int], ttl: float) -> int:
        """Keep the KV of a sequence from being evicted for `ttl` seconds; return how many of its blocks stay."""
        blocks = self._blocks
        return sum(blocks.pin(self._keys(blocks, tokens), ttl))

    def unpin(self, tokens: Sequence[int]) -> None:
        """Let the KV of a sequence be evicted again."""
        blocks = self._blocks
        blocks.unpin(self._keys(blocks, tokens))

    def supersede(self, old: Sequence[int], new: Sequence[int]) -> int:
        """Drop the KV of a sequence that another one replaces, except for what both share.

        Parameters
        ----------
        old, new : sequence of int
            Tokens, such as a conversation before and after its tool results were cut.

        Returns
        -------
        int
            Number of blocks that went. Other sequences that go on from the old one are computed again.
        """
        blocks = self._blocks
        kept = set(self._keys(blocks, new))
        return blocks.drop([key for key in self._keys(blocks, old) if key not in kept])

    def demote(self, tokens: Sequence[int], *, request: str = "", timeout: float | None = None) -> Demoted:
        """Move the KV of a sequence out of memory into the tier below, so that others have room.

        It is found as before, and comes back when it is loaded, or by `prefetch_by`. Other sequences that begin alike
        have their common blocks there, too.

        Parameters
        ----------
        tokens : sequence of int
            The sequence, such as a conversation that waits for a slow tool.
        request : str
            Name of the request, for ``farpool why``.
        timeout : float or None
            Seconds that it may take; None for the cache's own time.

        Returns
        -------
        Demoted
            How many blocks went, and why the others did not: without a lower tier all of them stay.
        """
        blocks = self._blocks
        outcomes = blocks.demote(self._keys(blocks, tokens), request=request, timeout=timeout)
        return Demoted(outcomes.count(None), Counter(reason for reason in outcomes if reason is not None))

    def handoff(self, tokens: Sequence[int], ttl: float) -> bytes:
        """Keep the KV of a sequence for another process, and return a note for it.

        Parameters
        ----------
        tokens : sequence of int
            The sequence.
        ttl : float
            Seconds for which it is kept.

        Returns
        -------
        bytes
            Argument for the other process's `take`.
        """
        blocks = self._blocks
        self.pin(tokens, ttl)
        return msgspec.msgpack.encode(_Handoff(blocks.digest, self._chains(blocks, tokens)))

    def take(self, note: bytes, *, request: str = "") -> Match:
        """Look up what another process has handed off, without its tokens.

        Parameters
        ----------
        note : bytes
            Result of its `handoff`.
        request : str
            Name of the request, for ``farpool why``.

        Returns
        -------
        Match
            Nothing is found if the other process has other weights, layers or settings.

        Raises
        ------
        ConfigError
            The bytes are no such note.
        """
        try:
            handed = msgspec.msgpack.decode(note, type=_Handoff)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{len(note)} bytes are not the result of a handoff: {error}") from None
        blocks = self._blocks
        chains = handed.chains if handed.namespace == blocks.digest else []
        match = self._match(blocks, chains, len(handed.chains) * self._block, request, split=False)
        return match if chains or not handed.chains else replace(match, reason=Reason.FOREIGN)

    def prefetch_by(self, tokens: Sequence[int], deadline: float) -> Future[int]:
        """Bring the KV of a sequence into this process's memory, for a request that will come.

        Parameters
        ----------
        tokens : sequence of int
            The sequence.
        deadline : float
            Seconds from now after which it is of no use.

        Returns
        -------
        Future of int
            Number of blocks that are near once it is done; as many of the first as `near_bytes` has room for.
        """
        blocks = self._blocks
        return blocks.submit(self._prefetch, blocks, list(tokens), time.monotonic() + deadline)

    def _prefetch(self, blocks: BlockCache, tokens: Sequence[int], deadline: float) -> int:
        chains = self._chains(blocks, tokens)
        wanted: list[tuple[bytes, bytearray]] = []
        if time.monotonic() > deadline:
            return 0
        for chain in chains:
            for number, one in enumerate(self._groups):
                key = blocks.key(chain, number)
                if key not in self._near and self._room(one.group.block_bytes):
                    wanted.append((key, bytearray(one.group.block_bytes)))
        keys, places = [key for key, _ in wanted], [place for _, place in wanted]
        outcomes = blocks.load(keys, places, timeout=max(0.0, deadline - time.monotonic()))
        came = 0
        with self._lock:
            for (key, place), outcome in zip(wanted, outcomes, strict=True):
                if outcome is None and key not in self._near:
                    self._near[key] = place
                    came += 1
                else:
                    self._near_left += len(place)
        return came

    def _room(self, nbytes: int) -> bool:
        """Take memory for a block that comes near; those that came first have to go if there is none left."""
        with self._lock:
            while self._near_left < nbytes and self._near:
                self._near_left += len(self._near.popitem(last=False)[1])
            if self._near_left < nbytes:
                return False
            self._near_left -= nbytes
            return True

    def _keys(self, blocks: BlockCache, tokens: Sequence[int]) -> list[bytes]:
        chains = self._chains(blocks, tokens)
        return [blocks.key(chain, number) for number in range(len(self._groups)) for chain in chains]

    def purge(self) -> int:
        """Remove all KV of these weights and settings from the nodes; return how many blocks there were.

        Raises
        ------
        NodeError
            Nodes that may have some cannot be asked.
        """
        return self._blocks.purge()

    def stats(self) -> dict[str, Any]:
        """Return counters of blocks (see `BlockCache.stats`), and what loading gains (see `Judge.stats`)."""
        return {**self._blocks.stats(), **self.judge.stats()}

    def drain(self, timeout: float) -> bool:
        """Wait until all that was begun has ended; return False if it has not within `timeout` seconds."""
        return self._blocks.drain(timeout)

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and close the connections. Idempotent."""
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _needs_all(one: LayerGroup) -> bool:
    """Tell if these layers need all blocks from the first on."""
    return one.group.kind in ("full", "mla")
