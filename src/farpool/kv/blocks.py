"""KV blocks in a store, for engines that must never wait for it nor be misled by it.

Every call has a deadline and ends by it. No failure of nodes or bytes raises an error: it is a miss, with a reason.
When a load returns, nothing writes into its targets any more, so the engine may use that memory for other blocks at
once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from farpool import forks
from farpool.abc.objects import About, Payload
from farpool.checks import require_seconds, require_whole
from farpool.closing import Closing
from farpool.cluster.store import Demotion, Store
from farpool.cluster.store.arguments import as_keys, as_payload, as_targets, nbytes_of, ttl_of
from farpool.errors import ConfigError, FarpoolError
from farpool.kv.background import Threads
from farpool.kv.block_format import BlockFormat
from farpool.kv.descriptions import OBJECT_KIND, Descriptions, namespaces, purge
from farpool.kv.found import Found
from farpool.kv.header import HEADER_BYTES
from farpool.kv.holds import Holds
from farpool.kv.judge import Judge
from farpool.kv.keys import block_key
from farpool.kv.link import Link
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason, reason_of
from farpool.kv.tally import Requests, Tally

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.abc.objects import Hold, Objects
    from farpool.cluster.wire.channel import Transport

    Target = Buffer | tuple[Buffer | Slices, ...]

__all__ = ["BlockCache", "Found", "namespaces", "purge"]

P = ParamSpec("P")
T = TypeVar("T")

_PIECE_BYTES = 64 << 20
"""Bytes of one request. Each such piece may take `timeout`, so large loads have more time than small ones."""
_COST_MAX_S = 1e6


class Gate(Protocol):
    """Interface that says if a cache may move blocks, implemented by `farpool.kv.probe.Probe`."""

    @property
    def reason(self) -> Reason | None: ...
    def is_of_this_thread(self) -> bool: ...
    def attempt(self) -> None: ...
    def begin_in_child(self) -> None: ...


class BlockCache(Closing):
    """KV blocks of one namespace in a store; every failure is a miss with a reason. Thread-safe.

    It connects when it is first used, and again in a forked child. Blocks are write-once: the first block that is saved
    under a key stays.

    Parameters
    ----------
    nodes : sequence of str, Store or PoolObjects
        Addresses of the nodes, or a store or objects in a pool. The cache does not close a store or objects that it was
        given, and a forked child cannot use them.
    namespace : Namespace
        Everything on which readers and writers have to agree.
    replicas : int
        Number of nodes that keep each block.
    access_key : str or None
        Access key of the nodes; None for the key in the environment.
    transport : str
        As in `Store`.
    timeout : float
        Seconds that a request may take. A load or save of more than 64 MiB makes several requests.
    ttl : float or None
        Seconds after which blocks expire; None for never.
    threads : int
        Threads for `submit`.
    judge : Judge, optional
        Measured times of loading and computing that several caches share; a new one by default. This class measures and
        decides nothing itself, because only its caller knows what a request needs.

    Raises
    ------
    ConfigError
        A setting is wrong. No node is asked before it is needed.
    """

    def __init__(
        self,
        nodes: Sequence[str] | Objects,
        namespace: Namespace,
        *,
        replicas: int = 1,
        access_key: str | None = None,
        transport: Transport = "auto",
        timeout: float = 1.0,
        ttl: float | None = None,
        threads: int = 2,
        judge: Judge | None = None,
    ) -> None:
        require_seconds(timeout, "timeout", None, 1e6)
        require_whole(threads, "threads", 1, 64)
        self.namespace = namespace
        self.judge = judge or Judge()
        self.digest = namespace.digest
        self._timeout = timeout
        self._ttl_ms = ttl_of(ttl)
        self._probe: Gate | None = None
        self._format = BlockFormat(namespace)
        self._link = Link(
            nodes, partial(Store, replicas=replicas, key=access_key, timeout=timeout, transport=transport)
        )
        self._threads = Threads(threads)
        self._holds = Holds()
        self._tally = Tally()
        self._descriptions = Descriptions()
        forks.begin_again(self)

    def forked(self) -> None:
        """Start in the child of a fork without the parent's connections, threads, holds and locks."""
        for part in (self._link, self._threads, self._holds, self._tally):
            part.begin_in_child()
        if self._probe is not None:
            self._probe.begin_in_child()
        self.judge.leave_to_parent()

    def require(self, probe: Gate) -> None:
        """Move no block except the probe's own until a connector's probe has passed."""
        self._probe = probe

    @property
    def probe(self) -> Gate | None:
        """Probe that this cache requires; None if it requires none."""
        return self._probe

    def _withheld(self, timeout: float | None) -> Reason | None:
        """Return the reason why the cache may not move blocks now; None if it may.

        If the probe has not reached the nodes yet, it tries now, unless the call has a timeout of its own, which may be
        too short.
        """
        probe = self._probe
        if probe is None or probe.reason is None or probe.is_of_this_thread():
            return None
        if timeout is None:
            probe.attempt()
        return probe.reason

    def _is_probed(self) -> bool:
        """Return True while this thread moves a probe's block, which is not the engine's.

        A lossy codec would change the random bytes of such a block.
        """
        return self._probe is not None and self._probe.is_of_this_thread()

    def key(self, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
        """Compose the key of a block of this namespace; see `block_key`."""
        return block_key(self.digest, chain, group, shard)

    def is_mapped(self) -> bool:
        """Return True if all nodes are on this host and mapped: a lookup takes microseconds."""
        return self._link.is_mapped()

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        stored: Sequence[int] | None = None,
        request: Requests = "",
        timeout: float | None = None,
    ) -> Found:
        """Look up which blocks are stored.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        stored : sequence of int, optional
            For each key the bytes that its object must have, header included, or must not exceed if the cache
            compresses. An object of another size is a miss and is dropped, because no reader could use it.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that it may take; None for the cache's own.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys = as_keys(keys)
        seconds = self._timeout if timeout is None else timeout
        sizes: Sequence[int | Exception | Reason | None]
        try:
            withheld = self._withheld(timeout)
            sizes = [withheld] * len(keys) if withheld else self._link.calls(seconds).lookup(keys, seconds)
        except FarpoolError as error:
            sizes = [error] * len(keys)
        if stored is not None and sizes != stored and (misfits := self._format.misfits(keys, sizes, stored)):
            sizes = list(sizes)
            for number in misfits:
                sizes[number] = ValueError(f"an object of {sizes[number]} bytes, expected {stored[number]}")
            self._forget([keys[number] for number in misfits], began, timeout)
        found = Found(sizes)
        self._note("lookup", request, len(keys), () if found.is_whole else found.reasons, began, 0)
        return found

    def load(
        self, keys: Sequence[bytes], targets: Sequence[Target], *, request: Requests = "", timeout: float | None = None
    ) -> list[Reason | None]:
        """Read blocks into buffers.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        targets : sequence of buffer or tuple of buffers
            For each key, writable contiguous memory that has exactly the bytes of its payload, all buffers of a tuple
            together.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that all of it may take; None for the cache's own time for each 64 MiB.

        Returns
        -------
        list of Reason or None
            For each block None if it is in its target, whole and verified, or else why not; then the target's bytes are
            unspecified. A block that no reader can use is dropped, because keys are write-once and its presence would
            block a new save.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes, or there are not as many targets as keys.
        """
        began = time.monotonic()
        keys = _as_many(keys, targets, "targets")
        checked, sizes = as_targets(targets)
        if (withheld := self._withheld(timeout)) is not None:
            outcomes: list[Reason | None] = [withheld] * len(keys)
            self._note("load", request, len(keys), outcomes, began, 0)
            return outcomes
        headers = bytearray(HEADER_BYTES * len(keys))
        view = memoryview(headers)
        places: list[Payload] = [
            (view[at : at + HEADER_BYTES], *(target if isinstance(target, tuple) else (target,)))
            for at, target in zip(range(0, len(headers), HEADER_BYTES), checked, strict=True)
        ]
        outcomes, moved = [], 0
        for piece, left in self._pieces(sizes, began, timeout):
            start, own = time.monotonic(), keys[piece]
            try:
                answers = self._link.calls(left).get_into_many(own, places[piece], left)
            except FarpoolError as error:
                answers = [error] * len(own)
            seconds = time.monotonic() - start
            header = headers[piece.start * HEADER_BYTES : piece.stop * HEADER_BYTES]
            came = self._format.checked(own, header, answers, checked[piece], sizes[piece], start + left)
            received = sum([answer for answer in answers if isinstance(answer, int)])
            self._learn("received", received, seconds, sizes[piece], came)
            moved += received
            outcomes += came
            if Reason.LATE in came:  # each of the other pieces would take as long again
                outcomes += [Reason.LATE] * (len(keys) - len(outcomes))
                break
        if any(outcomes):
            self._forget(self._format.useless(keys, sizes, outcomes), began, timeout)
        self._note("load", request, len(keys), outcomes, began, moved)
        return outcomes

    def save(
        self,
        keys: Sequence[bytes],
        values: Sequence[Target],
        *,
        request: Requests = "",
        timeout: float | None = None,
        cost: float = 0.0,
        parents: Mapping[bytes, bytes] | None = None,
        namespace: Namespace | None = None,
        ttl: float | None = None,
    ) -> list[Reason | None]:
        """Store blocks. Blocks that are stored already are not sent again.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        values : sequence of buffer or tuple of buffers
            Payload of each block, which must not change during the call.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that all of it may take; None for the cache's own time for each 64 MiB.
        cost : float
            Seconds that it takes to compute one of the blocks again; 0 if that is not known.
        parents : mapping of bytes to bytes, optional
            For each key the key of the block before it, without which it cannot be used; first blocks are left out. A
            pool evicts blocks from the ends of these prefixes.
        namespace : Namespace or None
            Namespace of the keys, if an engine has several; None for the cache's own.
        ttl : float or None
            Seconds after which the blocks expire; None for the cache's own time.

        Returns
        -------
        list of Reason or None
            For each block None if it is stored now, otherwise the reason why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes, there are not as many values as keys, or `cost` is no such number.
        """
        began = time.monotonic()
        keys = _as_many(keys, values, "values")
        if not 0 <= cost <= _COST_MAX_S:
            raise ConfigError(f"cost is {cost!r}, expected 0 to {_COST_MAX_S:g} seconds", setting="cost")
        namespace = namespace or self.namespace
        about = About(
            ttl_ms=self._ttl_ms if ttl is None else ttl_of(ttl),
            kind=OBJECT_KIND,
            cost_us=round(cost * 1e6),
            namespace=int.from_bytes(namespace.digest[:8], "little"),
            tenant=namespace.tenant,
            parents=parents or {},
        )
        pairs = [(key, as_payload(value)) for key, value in zip(keys, values, strict=True)]
        moved = 0
        if (withheld := self._withheld(timeout)) is not None:
            outcomes: list[Reason | None] = [withheld] * len(keys)
        else:
            outcomes, moved = self._stored(keys, pairs, namespace, about, began, timeout)
        self._note("save", request, len(keys), outcomes, began, moved)
        return outcomes

    def _stored(
        self,
        keys: list[bytes],
        pairs: Sequence[tuple[bytes, Payload]],
        namespace: Namespace,
        about: About,
        began: float,
        timeout: float | None,
    ) -> tuple[list[Reason | None], int]:
        """Store the blocks that are not stored yet; return for each why it is still missing, and the bytes sent."""
        sizes = [nbytes_of(payload) for _, payload in pairs]
        outcomes: list[Reason | None] = [None] * len(pairs)
        moved, seconds = 0, self._timeout if timeout is None else timeout
        try:
            there = self._link.calls(seconds).lookup(keys, seconds)
            misfits = self._format.misfits(keys, there, [HEADER_BYTES + nbytes for nbytes in sizes])
            self._forget([keys[number] for number in misfits], began, timeout)
            missing = sorted({*misfits, *(number for number, size in enumerate(there) if not isinstance(size, int))})
            encode = not self._is_probed()
            if missing and self._descriptions.is_due(namespace):
                left = self._left(None if timeout is None else began + timeout)
                # A probe's description is not kept, so that it expires even if the probe cannot drop it.
                self._descriptions.store(self._link.calls(), namespace, about.ttl_ms, left, keep=encode)
            for piece, left in self._pieces([sizes[number] for number in missing], began, timeout):
                until, own = time.monotonic() + left, missing[piece]
                unsaved = [pairs[number] for number in own]
                items = [(key, self._format.stored(key, payload, until, encode=encode)) for key, payload in unsaved]
                start = time.monotonic()
                answers = self._link.calls().put_many(items, max(0.0, until - start), about)
                seconds, sent = time.monotonic() - start, 0
                for number, (_, parts), answer in zip(own, items, answers, strict=True):
                    if isinstance(answer, Exception):
                        outcomes[number] = reason_of(answer)
                    else:
                        sent += nbytes_of(parts)
                reasons = [outcomes[number] for number in own]
                self._learn("sent", sent, seconds, [sizes[number] for number in own], reasons)
                moved += sent
                if Reason.LATE in reasons:  # each of the other pieces would take as long again
                    for number in missing[piece.stop :]:
                        outcomes[number] = Reason.LATE
                    break
        except FarpoolError as error:
            outcomes = [reason_of(error)] * len(pairs)
        return outcomes, moved

    def _learn(
        self, way: str, moved: int, seconds: float, sizes: Sequence[int], reasons: Sequence[Reason | None]
    ) -> None:
        """Report a transfer to the choice of the codec, if there is a choice."""
        compression = self._format.compression
        if compression is not None and compression.choice is not None and not self._is_probed():
            payload = sum(nbytes for nbytes, reason in zip(sizes, reasons, strict=True) if reason is None)
            learn = compression.choice.sent if way == "sent" else compression.choice.received
            learn(moved, seconds, payload)

    def pin(
        self,
        keys: Sequence[bytes],
        ttl: float,
        *,
        owner: bytes = b"",
        request: Requests = "",
        timeout: float | None = None,
    ) -> list[Reason | None]:
        """Keep blocks from being evicted for a limited time; blocks in a node's file come back to its memory.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        ttl : float
            Seconds after which they may be evicted again, even if no owner unpins them.
        owner : bytes
            Name of the owner that keeps them, such as a sequence. A block stays as long as one of its owners keeps it.
            An owner that pins it again replaces its time by the new one.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that the call may take; None for the cache's own.

        Returns
        -------
        list of Reason or None
            For each block None if it is stored and stays, otherwise the reason. Nodes end pins before their time when
            they are restarted, and when this process has been away for longer than their grace.

        Raises
        ------
        ConfigError
            `ttl` is not a number of seconds above 0, or a key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys, ttl_ms = as_keys(keys), ttl_of(ttl)
        seconds = self._timeout if timeout is None else timeout
        try:
            held = self._link.calls(seconds).hold_many(keys, ttl_ms, seconds)
        except FarpoolError as error:
            held = [error] * len(keys)
        holds = [(key, hold) for key, hold in zip(keys, held, strict=True) if isinstance(hold, tuple)]
        self._release(self._holds.add(holds, owner, time.monotonic(), ttl))
        outcomes = [
            None if isinstance(one, tuple) else Reason.ABSENT if one is None else reason_of(one) for one in held
        ]
        self._note("pin", request, len(keys), outcomes, began, 0)
        return outcomes

    def unpin(self, keys: Sequence[bytes], *, owner: bytes = b"") -> None:
        """Let nodes evict the blocks that `owner` has pinned, unless other owners keep them."""
        self._release(self._holds.remove(keys, owner))

    def _release(self, holds: Sequence[Hold]) -> None:
        """End holds on the nodes. If a node cannot be reached, its holds end by themselves after their time."""
        if holds:
            with contextlib.suppress(FarpoolError, OSError):
                self._link.calls().release_many(holds, self._timeout)

    def drop(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove blocks from all nodes that can be reached; return how many blocks had a copy that was removed."""
        keys = as_keys(keys)
        try:
            removed = self._link.calls().drop_many(keys, self._timeout if timeout is None else timeout)
        except FarpoolError:
            return 0
        return sum(isinstance(copies, int) and copies > 0 for copies in removed)

    def demote(
        self, keys: Sequence[bytes], *, request: Requests = "", timeout: float | None = None
    ) -> list[Reason | None]:
        """Move blocks out of memory into the tier below, to make room for other blocks. Lookups find them as before.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that it may take; None for the cache's own.

        Returns
        -------
        list of Reason or None
            For each block None if it is in the lower tier or on its way there, otherwise the reason why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys = as_keys(keys)
        seconds = self._timeout if timeout is None else timeout
        try:
            demoted = self._link.calls(seconds).demote_many(keys, seconds)
        except FarpoolError as error:
            demoted = [error] * len(keys)
        outcomes = [
            Reason.ABSENT if one is None else reason_of(one) if isinstance(one, Exception) else _DEMOTED[one]
            for one in demoted
        ]
        self._note("demote", request, len(keys), outcomes, began, 0)
        return outcomes

    def purge(self, namespace: Namespace | None = None) -> int:
        """Remove all blocks of a namespace, by default the cache's own; return how many there were.

        Raises
        ------
        NodeError
            Nodes that may have such blocks cannot be asked.
        """
        digest = (namespace or self.namespace).digest
        removed = purge(self._link.objects(), digest)
        self._descriptions.forget(digest)
        return removed

    def namespaces(self) -> Mapping[bytes, Namespace]:
        """Return all namespaces that have blocks in this cache's store or pool; see `namespaces`."""
        return namespaces(self._link.objects())

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on this cache's own threads.

        Raises
        ------
        StoreClosedError
            The cache is closed.
        """
        return self._threads.submit(function, *args, **kwargs)

    def drain(self, timeout: float) -> bool:
        """Wait until all submitted functions have ended; return False if they have not within `timeout` seconds."""
        return self._threads.drain(timeout)

    def stats(self) -> dict[str, int]:
        """Return counters: blocks by step and outcome (``load.done``, ``load.late``), bytes moved (``load.bytes``)."""
        return self._tally.stats()

    def close(self) -> None:
        """Cancel functions that have not begun, wait for those that have, and close the connections. Idempotent."""
        self._link.refuse()
        self._holds.clear()
        self._threads.close()
        self._link.close()

    def time_for(self, nbytes: int) -> float:
        """Return the seconds that moving so many bytes may take by default."""
        return self._timeout * max(1, -(-nbytes // _PIECE_BYTES))

    def missed(self, step: str, request: str, blocks: int, reason: Reason, note: str) -> None:
        """Count and record blocks that no node was asked for, because the engine cannot use them."""
        self._tally.missed(step, request, blocks, reason, note)

    def _note(
        self, step: str, request: Requests, blocks: int, reasons: Sequence[Reason | None], began: float, moved: int
    ) -> None:
        """Count and record the blocks of a step, except a probe's; see `Tally.ended`."""
        if not self._is_probed():
            self._tally.ended(step, request, blocks, reasons, began, moved)

    def _pieces(self, sizes: Sequence[int], began: float, timeout: float | None) -> Iterator[tuple[slice, float]]:
        """Cut a batch into pieces of bounded size; yield each with the seconds that it may take."""
        until = None if timeout is None else began + timeout
        start = nbytes = 0
        if sum(sizes) > _PIECE_BYTES:
            for number, own in enumerate(sizes):
                if number > start and nbytes + own > _PIECE_BYTES:
                    yield slice(start, number), self._left(until)
                    start, nbytes = number, 0
                nbytes += own
        if sizes:
            yield slice(start, len(sizes)), self._left(until)

    def _left(self, until: float | None) -> float:
        return self._timeout if until is None else max(0.0, until - time.monotonic())

    def _forget(self, keys: Sequence[bytes], began: float, timeout: float | None) -> None:
        """Drop blocks that no reader can use, if there is time: while they are there, none can be saved again."""
        left = self._left(None if timeout is None else began + timeout)
        if keys and left > 0:
            self.drop(keys, timeout=left)


def _as_many(keys: Sequence[bytes], others: Sequence[object], what: str) -> list[bytes]:
    """Check keys, and that there is one target or value for each."""
    if len(keys) != len(others):
        raise ConfigError(f"{len(keys)} keys and {len(others)} {what}, expected as many", setting=what)
    return as_keys(keys)


_DEMOTED = {
    Demotion.LOWER: None,
    Demotion.PINNED: Reason.PINNED,
    Demotion.FULL: Reason.FULL,
    Demotion.NO_LOWER_TIER: Reason.NO_LOWER_TIER,
}
