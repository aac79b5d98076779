"""Prefix reuse for an engine of your own: look up blocks, load or compute them, and save new ones.

The key of a block depends on all tokens up to the block's end. So sequences with the same beginning share blocks, even
if different processes, hosts or engines use them. A prefix can be used up to a block after which every layer has the KV
that it needs to continue: layers with full attention need all blocks of the prefix, layers with a sliding window need
the last blocks, and recurrent layers need the state at the end of the last block.

Weights may change at any time. Each call uses the weights that are in use when it begins. A save that began before a
change saves KV of the old weights, and KV of the old weights is never loaded for the new ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

import msgspec

from farpool import forks
from farpool.closing import Closing
from farpool.errors import ConfigError
from farpool.kv.background import Background, Call, seconds_to
from farpool.kv.found import Found
from farpool.kv.handoff import Demoted, Handoff, Note, counted
from farpool.kv.judge import Judge
from farpool.kv.keys import salt_bytes
from farpool.kv.lookups import Lookups
from farpool.kv.memory import KVMemory, Layer
from farpool.kv.namespace import Namespace
from farpool.kv.near import NearMemory
from farpool.kv.old_calls import OldCalls
from farpool.kv.peers import Peers, count_of_ranks
from farpool.kv.plan import Current, Match, Prompt, Shape, Wanted, as_prompts
from farpool.kv.reasons import Reason
from farpool.kv.settings import PrefixFields, PrefixSettings
from farpool.kv.transfers import Transfers

if TYPE_CHECKING:
    from farpool.abc.objects import Objects
    from farpool.kv.ranks import Ranks

    Yes = Literal[True]
    No = Literal[False]
    Time = float | None
    One = Sequence[int] | Prompt
    Many = Sequence[Prompt]
    Matches = Sequence[Match]
    Memories = Sequence[KVMemory]

__all__ = ["Demoted", "Handoff", "LayerLoad", "Match", "PrefixCache", "Prompt"]

_UNASKED_BLOCKS_MAX = 32
"""Up to this many blocks, `fetch` loads without a lookup: if the blocks are missing, the failed load costs only about
one extra round trip."""


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One part of a load that `PrefixCache.load_parts` has begun.

    Attributes
    ----------
    layers : tuple of int
        Numbers of the layers.
    tokens : Call of int
        The call that loads this part. Its result is the number of leading tokens whose KV these layers have after the
        call.
    """

    layers: tuple[int, ...]
    tokens: Call[int]


class LookupOptions(TypedDict, total=False):
    """Keyword arguments of `PrefixCache.lookup`."""

    salt: bytes | str
    request: str
    split: bool
    leave: int
    timeout: float | None


class SaveOptions(TypedDict, total=False):
    """Keyword arguments of `PrefixCache.save`."""

    layers: Collection[int] | None
    start: int
    salt: bytes | str
    request: str
    weights_id: str | None
    timeout: float | None


class PrefixCache(Closing, OldCalls):
    """Shares the KV of token sequences through nodes; loads KV if that is faster than computing it. Thread-safe.

    Every failure is a miss: the engine computes the KV. The cache measures continuously whether loading or computing is
    faster. If you report how long computing takes (see `computed`), the cache loads only KV that it can load in less
    time.

    `lookup`, `load` and `save` accept one request or several, and return when they have ended. With ``wait=False`` they
    run in the background and return a `Call` at once. Use the call's `result()`, or ``await`` the call in a coroutine.
    The timeout of a call includes the time that it waits for a thread. `close` turns calls that have not begun into
    misses.

    Parameters
    ----------
    nodes : str, sequence of str, Store or PoolObjects
        Addresses of the nodes, the address of their registry, or a store or objects in a pool. If the caller passes a
        store or objects, the cache does not close them.
    layers : sequence of Layer
        Layers whose KV is kept: all layers of the model, or the layers of this rank.
    settings : PrefixSettings, optional
        All other settings. Instead of this object, you can give its fields as keyword arguments.
    ranks : Ranks, optional
        Object through which the ranks of `PrefixSettings.parallel` agree, such as `StoreRanks`. Rank 0 decides for all
        ranks, and all ranks get the same `Match.tokens` and the same result of each load. All ranks must make the same
        calls in the same order. Without this object, each rank loads everything that it finds, and the engine has to
        use the least `Match.tokens` of its ranks, and then the least result of their loads (docs/kv.md).
    **fields
        Fields of `PrefixSettings`. If `settings` is given too, these values replace its fields.

    Attributes
    ----------
    judge : Judge
        Keeps the measured times, and computes how much time loading has saved.

    Raises
    ------
    ConfigError
        A setting is wrong.
    """

    def __init__(
        self,
        nodes: str | Sequence[str] | Objects,
        layers: Sequence[Layer],
        settings: PrefixSettings | None = None,
        *,
        ranks: Ranks | None = None,
        **fields: Unpack[PrefixFields],
    ) -> None:
        given = PrefixSettings(**fields) if settings is None else msgspec.structs.replace(settings, **fields)
        is_alone = count_of_ranks(given.parallel or {}, given.rank, ranks) == 1
        # Decisions depend on measured times, which differ from rank to rank, so one rank decides for all, or none does.
        decides = is_alone or (ranks is not None and given.rank == 0)
        self._shape = shape = Shape(layers, given.block, given.pieces, given.rank)
        self._current = Current(given.namespace([one.group for one in shape.groups]))
        self.judge = judge = Judge(hold_out=given.hold_out and decides)
        self._blocks = blocks = given.blocks(nodes, self._current.namespace, judge)
        self._background = Background(blocks.submit)
        self._near = NearMemory(given.near_bytes)
        self._peers = Peers(None if is_alone else ranks, shape, judge, blocks.missed, decides=decides)
        self._lookups = Lookups(shape, blocks, self._near, judge, self._peers, decides=decides)
        self._transfers = Transfers(shape, blocks, self._near, judge, self._peers, self._current)
        forks.begin_again(self)

    @property
    def weights_id(self) -> str:
        """Name of the weights in use. A call uses only KV of the weights that are in use when the call begins.

        After a change, calls that have begun keep the old name. If the engine may have changed its weights between
        computing KV and saving it, call `save` with the name of the weights with which the KV was computed.
        """
        return self._current.namespace.weights

    @weights_id.setter
    def weights_id(self, weights_id: str) -> None:
        self._current.namespace = replace(self._current.namespace, weights=weights_id)
        # Blocks of the old weights would only take room, because their keys are never requested again.
        self._near.clear()

    def _namespace_of(self, weights_id: str | None) -> Namespace:
        """Return the namespace of the weights with this name; None means the weights in use."""
        namespace = self._current.namespace
        return namespace if weights_id is None else replace(namespace, weights=weights_id)

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Layers of each group that is stored together, in the order in which `load_parts` loads the groups."""
        return [self._shape.groups[number].layers for number in self._shape.order]

    @overload
    def lookup(self, tokens: One, *, wait: Yes = True, **options: Unpack[LookupOptions]) -> Match: ...
    @overload
    def lookup(self, tokens: Many, *, wait: Yes = True, **options: Unpack[LookupOptions]) -> list[Match]: ...
    @overload
    def lookup(self, tokens: One, *, wait: No, **options: Unpack[LookupOptions]) -> Call[Match]: ...
    @overload
    def lookup(self, tokens: Many, *, wait: No, **options: Unpack[LookupOptions]) -> Call[list[Match]]: ...
    def lookup(
        self,
        tokens: One | Many,
        *,
        salt: bytes | str = b"",
        request: str = "",
        split: bool = False,
        leave: int = 1,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Match | list[Match] | Call[Any]:
        """Look up how much of a prompt can be loaded, and decide how much of it to load.

        Parameters
        ----------
        tokens : sequence of int, Prompt or sequence of Prompt
            Tokens of one prompt, or several prompts. Several prompts are looked up with a single request to the nodes.
        salt, request
            As in `Prompt`, if only tokens are given.
        split : bool
            True if the engine can compute the first tokens while the others are loaded.
        leave : int
            Number of tokens at the end that are never loaded. An engine has to compute at least one to continue.
        timeout : float or None
            Seconds that the lookup may take; None for the cache's own timeout.
        wait : bool
            If False, run in the background and return a `Call`.

        Returns
        -------
        Match, list of Match or Call
            One match for each prompt; a list of matches if several prompts were given.
        """
        # We take both now, even if a thread looks up later. So the lookup uses the present weights, and all ranks
        # number their exchanges in the order of the engine's calls.
        namespace, exchange = self._current.namespace, self._peers.begin()
        try:
            is_one, asked = as_prompts(tokens, salt, request, copied=not wait)
            until = 0.0 if wait else self._until(timeout, 0)
        except BaseException:
            self._peers.abandon(exchange)
            raise

        def look_up(timeout: float | None) -> Match | list[Match]:
            wanted = (self._shape.wanted(namespace, one, leave) for one in asked)
            matches = self._lookups.match(wanted, split, timeout, exchange)
            return matches[0] if is_one else matches

        return look_up(timeout) if wait else self._background.begin(lambda: look_up(seconds_to(until)), until)

    @overload
    def load(self, match: Match, memory: KVMemory, *, timeout: Time = None, wait: Yes = True) -> int: ...
    @overload
    def load(self, match: Matches, memory: Memories, *, timeout: Time = None, wait: Yes = True) -> list[int]: ...
    @overload
    def load(self, match: Match, memory: KVMemory, *, timeout: Time = None, wait: No) -> Call[int]: ...
    @overload
    def load(self, match: Matches, memory: Memories, *, timeout: Time = None, wait: No) -> Call[list[int]]: ...
    def load(
        self,
        match: Match | Matches,
        memory: KVMemory | Memories,
        *,
        timeout: Time = None,
        wait: bool = True,
    ) -> int | list[int] | Call[Any]:
        """Load the blocks that a lookup has found into the engine's memory.

        Parameters
        ----------
        match : Match or sequence of Match
            Result of the lookup.
        memory : KVMemory or sequence of KVMemory
            For each match, the memory for the KV of the tokens `match.compute` to `match.tokens`. Do not use this
            memory for anything else until the load has ended.
        timeout : float or None
            Seconds that the whole load may take. None for the time that computing the same tokens is expected to take
            or, if that is not known, a limit that grows with the size: the cache's own timeout for every 64 MiB.
        wait : bool
            If False, run in the background and return a `Call`.

        Returns
        -------
        int, list of int or Call
            For each match, the number of leading tokens whose KV is in memory. This number includes the first
            `match.compute` tokens, which the engine computes itself. 0 if the engine has changed its weights since the
            lookup.

        Raises
        ------
        ConfigError
            The memory lacks a place for a layer.
        """
        is_one = isinstance(match, Match)
        # Copies, because the caller may change its lists before the load begins.
        asked = [match] if isinstance(match, Match) else list(match)
        places = [cast("KVMemory", memory)] if is_one else list(cast("Memories", memory))
        began, until = time.monotonic(), self._load_until(asked, timeout)
        # Numbered here and not on the thread that loads: all ranks begin their exchanges in the order of the engine's
        # calls.
        exchange = self._peers.begin_load(asked)

        def load() -> int | list[int]:
            usable = self._transfers.load(asked, places, range(len(self._shape.groups)), until, exchange)
            seconds, total = time.monotonic() - began, sum(one.tokens for one in asked)
            for one, tokens in zip(asked, usable, strict=True):
                self._judged(one, tokens, seconds * one.tokens / max(1, total))
            return usable[0] if is_one else usable

        return load() if wait else self._background.begin(load, until)

    def load_parts(self, match: Match, memory: KVMemory, *, timeout: float | None = None) -> list[LayerLoad]:
        """Begin to load in the background, part by part. The engine can use the first layers while others are loaded.

        Parameters
        ----------
        match, memory, timeout
            As in `load`.

        Returns
        -------
        list of LayerLoad
            One load for each of `parts`, in the same order. The engine can use only the shortest prefix that a part has
            loaded. If a later part loads a shorter prefix than an earlier part, the engine has to compute the earlier
            part's layers again. The judge counts the time until the last part has ended, as if the engine had computed
            nothing during that time.
        """
        began, until = time.monotonic(), self._load_until([match], timeout)

        def begin(number: int) -> Call[int]:
            exchange = self._peers.begin_load([match])
            return self._background.begin(
                lambda: self._transfers.load([match], [memory], [number], until, exchange)[0], until
            )

        loads = [LayerLoad(self._shape.groups[number].layers, begin(number)) for number in self._shape.order]
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
        """Return the deadline of a load that begins now."""
        if timeout is None:
            # Loading is useless if it takes longer than computing.
            computing = [match.plan.recompute_seconds for match in matches if match.tokens]
            known = [seconds for seconds in computing if seconds is not None]
            timeout = sum(known) if known and len(known) == len(computing) else None
        shape = self._shape
        return self._until(timeout, sum(shape.nbytes(match.tokens // shape.block) for match in matches))

    def _judged(self, match: Match, usable: int, seconds: float) -> None:
        # Blocks that are near take no time on the link, so they do not show how long loading takes.
        if match.tokens and match.far_bytes:
            self.judge.gained(match.tokens, usable, match.seconds + seconds, compute=match.compute)

    def fetch(
        self,
        tokens: One,
        memory: KVMemory,
        *,
        salt: bytes | str = b"",
        request: str = "",
        leave: int = 1,
        timeout: float | None = None,
    ) -> Match:
        """Look up a prompt and load its blocks if that is faster than computing: `lookup` and `load` in one step.

        If a prompt has few blocks, `fetch` requests them without a lookup, to make one request instead of two.

        Parameters
        ----------
        tokens, salt, request, leave
            As in `lookup`.
        memory, timeout
            As in `load`.

        Returns
        -------
        Match
            Result of the lookup. The KV of the first `Match.tokens` tokens is in memory.

        Raises
        ------
        ConfigError
            The memory lacks a place for a layer.
        """
        exchange = self._peers.begin()
        try:
            is_one, prompts = as_prompts(tokens, salt, request)
            if not is_one:
                raise ConfigError(f"fetch: got {len(prompts)} prompts, expected one; call it for each")
            wanted = self._shape.wanted(self._current.namespace, prompts[0], leave)
        except BaseException:
            self._peers.abandon(exchange)
            raise
        there, nbytes = wanted.blocks * self._shape.block, self._shape.nbytes(wanted.blocks)
        plan = None
        if exchange is None and self._shape.is_uniform and 0 < len(wanted.keys) <= _UNASKED_BLOCKS_MAX:
            plan = self.judge.planned(there, nbytes, step=self._shape.block)
        if plan is None:
            (match,) = self._lookups.match([wanted], False, timeout, exchange)
            return msgspec.structs.replace(match, tokens=self.load(match, memory, timeout=timeout))
        began = time.monotonic()
        until = self._until(plan.recompute_seconds if timeout is None else timeout, nbytes)
        near = self._near.present(wanted.keys)
        found = self._transfers.fetch(wanted, memory, until)
        match = self._lookups.decided(wanted, found, near, False, time.monotonic() - began, plan=plan)
        if match.tokens and self._current.is_outdated(match):
            return msgspec.structs.replace(match, tokens=self._transfers.usable(match, (), ()))
        self._judged(match, match.tokens, 0.0)
        return match

    def computed(self, tokens: int, seconds: float, *, context: int = 0, match: Match | None = None) -> None:
        """Report how long computing took. The cache uses the time to decide when loading is faster.

        Parameters
        ----------
        tokens : int
            Number of tokens that were computed together.
        seconds : float
            Time that computing the KV of these tokens took.
        context : int
            Number of tokens before them in the sequence.
        match : Match, optional
            Result of the request's lookup, if the lookup told the engine to compute the prefix.
        """
        self.judge.computed(tokens, context, seconds, held_out=match is not None and match.arm == "hold-out")

    @overload
    def save(self, tokens: One, memory: KVMemory, *, wait: Yes = True, **options: Unpack[SaveOptions]) -> int: ...
    @overload
    def save(
        self, tokens: Many, memory: Memories, *, wait: Yes = True, **options: Unpack[SaveOptions]
    ) -> list[int]: ...
    @overload
    def save(self, tokens: One, memory: KVMemory, *, wait: No, **options: Unpack[SaveOptions]) -> Call[int]: ...
    @overload
    def save(self, tokens: Many, memory: Memories, *, wait: No, **options: Unpack[SaveOptions]) -> Call[list[int]]: ...
    def save(
        self,
        tokens: One | Many,
        memory: KVMemory | Memories,
        *,
        layers: Collection[int] | None = None,
        start: int = 0,
        salt: bytes | str = b"",
        request: str = "",
        weights_id: str | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> int | list[int] | Call[Any]:
        """Save the KV of a sequence, except for blocks that are stored already.

        Parameters
        ----------
        tokens : sequence of int, Prompt or sequence of Prompt
            All tokens of the sequence, from the first on. If the last block is not full, it is not saved. If you give
            several sequences, blocks that they share are sent once.
        memory : KVMemory or sequence of KVMemory
            For each sequence, the memory that contains its KV. This memory must not change until the save has ended. KV
            that is not in this memory is not saved, such as KV of tokens that have left a sliding window, or states
            that the engine did not keep.
        layers : collection of int, optional
            Save only these layers, for example while the engine computes the others. They must be all layers of one or
            more of `parts`.
        start, salt, request
            As in `Prompt`, if only tokens are given.
        weights_id : str or None
            Name of the weights with which the KV was computed, such as `Match.weights_id`; None for the weights that
            are in use when `save` is called. Give the name if the engine may change its weights between computing and
            saving.
        timeout : float or None
            Seconds that the whole save may take; None for a limit that grows with the size: the cache's own
            timeout for every 64 MiB.
        wait : bool
            If False, run in the background and return a `Call`.

        Returns
        -------
        int, list of int or Call
            For each sequence, how many of its blocks are stored now, summed over all groups of these layers.

        Raises
        ------
        ConfigError
            The layers are not one or more whole `parts`.
        """
        # We determine now everything that the save depends on, because the engine may use other weights when the save
        # begins.
        is_one, asked = as_prompts(tokens, salt, request, start, copied=not wait)
        places = [cast("KVMemory", memory)] if is_one else list(cast("Memories", memory))
        groups, namespace = self._shape.groups_of(layers), self._namespace_of(weights_id)
        blocks = sum(len(one.tokens) // self._shape.block for one in asked)
        until = self._until(timeout, blocks * self._shape.block_bytes)

        def save() -> int | list[int]:
            saved = self._transfers.save(namespace, asked, places, groups, until)
            return saved[0] if is_one else saved

        return save() if wait else self._background.begin(save, until)

    def pin(self, tokens: Sequence[int], ttl: float, *, salt: bytes | str = b"", request: str = "") -> int:
        """Keep the KV of a sequence from being evicted for `ttl` seconds; return how many of its blocks are pinned.

        Tokens and salt (see `Prompt`) together identify a sequence. Each sequence has pins of its own, so blocks that
        two sequences share are kept until both sequences are unpinned. Nodes end pins early when this process has been
        disconnected for longer than their grace period, or when they are restarted.
        """
        keys, owner, _ = self._sequence(tokens, salt)
        return self._blocks.pin(keys, ttl, owner=owner, request=request).count(None)

    def unpin(self, tokens: Sequence[int], *, salt: bytes | str = b"") -> None:
        """End the pins of a sequence, so that its KV may be evicted again.

        This ends only pins on KV of the weights in use. Pins on KV of other weights end when their `ttl` is over.
        """
        keys, owner, _ = self._sequence(tokens, salt)
        self._blocks.unpin(keys, owner=owner)

    def retain(
        self,
        tokens: Sequence[int],
        priority: int,
        *,
        session: str | bytes | None = None,
        ttl: float | None = None,
        salt: bytes | str = b"",
        request: str = "",
    ) -> int:
        """Let nodes evict the KV of a prefix later than KV of a lower priority; return how many blocks are retained.

        Unlike a pin, a priority does not hold KV in memory in any case: if KV of the highest priority fills the
        tenant's share, nodes evict from it what is needed least. So no prefix has to be released for others to proceed.

        Parameters
        ----------
        tokens : sequence of int
            The prefix, saved already. Blocks that it shares with other sequences are retained, too.
        priority : int
            0 to 7; replaces the priority that a block has. 0 for KV that is not retained, as after `save`.
        session : str, bytes or None
            Name of what needs the KV, such as a conversation; replaces the session that a block has. `end_session` then
            ends the priority of all its blocks.
        ttl : float or None
            Seconds after which the priority ends; the KV stays. None for no end.
        salt, request
            As in `Prompt`.

        Raises
        ------
        ConfigError
            The priority, the session's name or the time is wrong.
        """
        keys, *_ = self._sequence(tokens, salt)
        return self._blocks.retain(keys, priority, session=session, ttl=ttl, request=request).count(None)

    def end_session(self, session: str | bytes) -> int:
        """End a session of `retain`, for KV of all weights. Its KV stays until nodes evict it.

        Return the number of copies of blocks that the session has retained; 0 if a node could not be asked.
        """
        return self._blocks.end_session(session)

    def _sequence(self, tokens: Sequence[int], salt: bytes | str) -> tuple[list[bytes], bytes, list[bytes]]:
        return self._shape.sequence(self._current.namespace, tokens, salt)

    def supersede(self, old: Sequence[int], new: Sequence[int], *, salt: bytes | str = b"") -> int:
        """Drop the KV of the sequence `old`, which `new` replaces. Blocks that both sequences share are kept.

        Parameters
        ----------
        old, new : sequence of int
            Tokens of both sequences, such as a conversation before and after its tool results were cut.
        salt : bytes or str
            Salt of both sequences, as in `Prompt`.

        Returns
        -------
        int
            Number of dropped blocks. If other sequences used these blocks, the KV of the blocks has to be computed
            again.
        """
        namespace, salt = self._current.namespace, salt_bytes(salt)
        kept = set(self._shape.keys_of_tokens(namespace, new, salt))
        return self._blocks.drop([key for key in self._shape.keys_of_tokens(namespace, old, salt) if key not in kept])

    def demote(
        self, tokens: Sequence[int], *, salt: bytes | str = b"", request: str = "", timeout: float | None = None
    ) -> Demoted:
        """Move the KV of a sequence out of memory into the tier below, so that other KV has room.

        Lookups still find the KV. A load or `prefetch_by` moves it back into memory. Blocks that this sequence shares
        with others are moved, too.

        Parameters
        ----------
        tokens : sequence of int
            The sequence, such as a conversation that waits for a slow tool.
        salt, request
            As in `Prompt`.
        timeout : float or None
            Seconds that the call may take; None for the cache's own timeout.

        Returns
        -------
        Demoted
            How many blocks were moved, and why the other blocks were not. Without a lower tier, all blocks stay in
            memory.
        """
        keys, *_ = self._sequence(tokens, salt)
        outcomes = self._blocks.demote(keys, request=request, timeout=timeout)
        return Demoted(outcomes.count(None), counted(outcomes))

    def handoff(self, tokens: Sequence[int], ttl: float, *, salt: bytes | str = b"", request: str = "") -> Handoff:
        """Keep the KV of a sequence for another process, and make a note that lets that process find the KV.

        Parameters
        ----------
        tokens : sequence of int
            The sequence.
        ttl : float
            Seconds for which the KV is kept. When the other process calls `take`, the KV is kept for the same time from
            then on. A node stops keeping the KV for this process if the process has been disconnected for longer than
            the node's grace period.
        salt, request
            As in `Prompt`. The note contains the salt, so `take` has no such argument.

        Returns
        -------
        Handoff
            The note, and how many blocks are kept. If no block is kept, the note is useless.
        """
        namespace = self._current.namespace
        keys, owner, chains = self._shape.sequence(namespace, tokens, salt)
        outcomes = self._blocks.pin(keys, ttl, owner=owner, request=request)
        kept = outcomes.count(None)
        note = msgspec.msgpack.encode(Note(namespace.digest, chains, owner, ttl, kept, salt_bytes(salt)))
        return Handoff(note, kept, counted(outcomes))

    def take(self, note: bytes, *, request: str = "", timeout: float | None = None) -> Match:
        """Look up KV that another process has handed off, and keep the KV for this process.

        This process need not know the tokens.

        Parameters
        ----------
        note : bytes
            `Handoff.note` of the other process.
        request : str
            Name of the request, for ``farpool why``.
        timeout : float or None
            Seconds that the lookup may take; None for the cache's own timeout.

        Returns
        -------
        Match
            Result of the lookup. It finds no block if the other process has other weights, layers or settings. Found
            blocks are kept for the `ttl` of the handoff, or until this process calls `unpin`.

        Raises
        ------
        ConfigError
            The bytes are not a note. If the engine has other ranks, those ranks then find no blocks.
        """
        namespace, exchange = self._current.namespace, self._peers.begin()
        try:
            handed = Note.of(note)
            is_ours = handed.namespace == namespace.digest
            chains = handed.chains if is_ours else []
            keys = self._shape.keys(namespace, chains)
        except BaseException:
            self._peers.abandon(exchange)
            raise
        tokens = len(handed.chains) * self._shape.block
        wanted = Wanted(namespace, keys, len(chains), tokens, request, handed.salt)
        if not is_ours:
            said = "the note is of other weights, layers or settings"
            self._blocks.missed("lookup", request, len(handed.chains), Reason.FOREIGN, said)
            match = self._lookups.decided(wanted, Found([]), (), False, 0.0)
            self._peers.agree([match], exchange)
            return msgspec.structs.replace(match, reason=Reason.FOREIGN)
        (match,) = self._lookups.match([wanted], False, timeout, exchange)
        if match.found and handed.kept:
            # We pin the blocks in this process's own session, because the session of the other process may end.
            self._background.begin(
                lambda: self._blocks.pin(keys, handed.ttl, owner=handed.owner, request=request), self._until(None, 0)
            )
        return match

    def prefetch_by(
        self, tokens: Sequence[int], deadline: float, *, salt: bytes | str = b"", request: str = "", leave: int = 1
    ) -> Call[int]:
        """Read the KV of a sequence into nearer memory in the background, to make a later `lookup` and `load` fast.

        The call reads all blocks that a `lookup` of the sequence would load: into this process's memory if
        `PrefixSettings.near_bytes` is above 0, otherwise into the memory of the nodes.

        Parameters
        ----------
        tokens : sequence of int
            The sequence of a request that will come.
        deadline : float
            Seconds from now after which the KV is no longer needed.
        salt, request, leave
            As in `lookup`.

        Returns
        -------
        Call of int
            Number of these blocks that are in that memory when the call ends. This process's memory receives the first
            blocks, as many as fit. Nodes read the blocks from their files, and keep them in memory until the deadline.
        """
        namespace, until = self._current.namespace, time.monotonic() + deadline
        prompt = Prompt(list(tokens), salt, request)

        def prefetch() -> int:
            wanted = self._shape.wanted(namespace, prompt, leave)
            if not wanted.blocks or time.monotonic() >= until:
                return 0
            (found,), _ = self._lookups.find([wanted], seconds_to(until))
            usable, _ = self._shape.usable(found, wanted.blocks)
            return self._transfers.bring_near(wanted, usable, until)

        return self._background.begin(prefetch, until)

    def purge(self) -> int:
        """Remove all KV of the present weights and settings from the nodes; return how many blocks were removed.

        Raises
        ------
        NodeError
            A node that may have such KV cannot be reached.
        """
        self._near.clear()
        return self._blocks.purge(self._current.namespace)

    def stats(self) -> dict[str, Any]:
        """Return counters of blocks (see `BlockCache.stats`), and how much time loading saves (see `Judge.stats`)."""
        return {**self._blocks.stats(), **self.judge.stats()}

    def _until(self, timeout: float | None, nbytes: int) -> float:
        """Return the deadline of a call that begins now. A call without a timeout gets time to move `nbytes` bytes."""
        return time.monotonic() + (self._blocks.time_for(nbytes) if timeout is None else timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until all calls in the background have ended; return False if some still run after `timeout` seconds."""
        return self._blocks.drain(timeout)

    def close(self) -> None:
        """Turn calls that have not begun into misses, wait for running calls, and close connections. Idempotent."""
        self._blocks.close()
        self._lookups.close(self._blocks.time_for(0))

    def forked(self) -> None:
        """Make new locks in the child of a fork, because threads of the parent may hold the old locks."""
        self._near.begin_in_child()
        self._background.begin_in_child()
        self._lookups.begin_in_child()
