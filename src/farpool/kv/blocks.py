"""KV blocks in a store, for engines that must never wait for it nor be misled by it.

Every call has a deadline and ends by it. Nothing that happens to nodes or bytes raises an error: it is a miss, with a
reason. When a load returns, nothing writes into its targets any more, so that the engine may use that memory for other
blocks at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, cast

from farpool.abc.objects import About, Payload
from farpool.cluster.store import Demotion, Store
from farpool.cluster.store.arguments import as_keys, as_payload, as_targets, nbytes_of, ttl_of
from farpool.errors import ConfigError, FarpoolError, NodeTimeoutError, StoreClosedError
from farpool.kv.compressed import Compression
from farpool.kv.header import HEADER_BYTES, check_header, pack_header
from farpool.kv.journal import record
from farpool.kv.judge import Judge
from farpool.kv.keys import KEY_BYTES, KEY_MAGIC, NAMESPACE_MAGIC, block_key, group_of, namespace_key
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason, reason_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool._native import Slices
    from farpool.abc.objects import Hold, ObjectCalls, Objects
    from farpool.cluster.wire.channel import Transport

    Target = Buffer | tuple[Buffer | Slices, ...]
    Requests = str | Sequence[str]
    """The engine's name of the request that blocks are of, or one name for each block."""

__all__ = ["BlockCache", "Found", "namespaces", "purge"]

P = ParamSpec("P")
T = TypeVar("T")

_PIECE_BYTES = 64 << 20
"""Bytes that are asked for together; each such piece may take `timeout`, so that large loads have more time than small
ones."""
_KIND = 2
"""Class of KV in an object's head (docs/wire.md)."""
_AT_ONCE = 4096
"""Keys that are dropped with one request."""
_MOST_DESCRIBED = 4096
"""Namespaces of which a cache remembers when it has described them."""
_DESCRIBED_SECONDS = 60.0
"""Seconds after which a namespace's description is stored anew: it may have been purged or lost."""
_LONGEST_COST = 1e6
_FEWEST_HOLDS = 1024
"""Number of held blocks below which those whose time is over are not looked for."""
_USELESS = frozenset({Reason.CORRUPT, Reason.FOREIGN})
"""Reasons for which no reader can use a block. It is dropped: as long as it is there, nobody can save it anew. One of
another version is left to programs of that version, which may run beside this one during an upgrade."""


@dataclass(frozen=True)
class Found:
    """Result of a lookup of blocks.

    Attributes
    ----------
    answers : sequence of int, None, Exception or Reason
        Bytes of each stored object, header included, in the order of the keys; None, an error, or the reason for it,
        where there is none.
    """

    answers: Sequence[int | Exception | Reason | None]

    # Derived when they are asked for: most lookups find all blocks, and are asked for little.

    @cached_property
    def sizes(self) -> Sequence[int | None]:
        """Bytes of each payload as it is stored, in the order of the keys; None where it cannot be loaded."""
        return [max(0, one - HEADER_BYTES) if isinstance(one, int) else None for one in self.answers]

    @cached_property
    def reasons(self) -> Sequence[Reason | None]:
        """Why each of the others cannot be loaded; None for those that can."""
        return [
            None
            if isinstance(one, int)
            else Reason.ABSENT
            if one is None
            else one
            if isinstance(one, Reason)
            else reason_of(one)
            for one in self.answers
        ]

    @cached_property
    def is_whole(self) -> bool:
        """True if all blocks are there."""
        try:
            sum(cast("Sequence[int]", self.answers))  # the quickest look at all of them: anything but a number raises
        except TypeError:
            return False
        return True

    @cached_property
    def leading(self) -> int:
        """Number of blocks, from the first on, that are there without a gap."""
        if self.is_whole:
            return len(self.answers)
        return next(number for number, one in enumerate(self.answers) if not isinstance(one, int))

    @property
    def found(self) -> list[bool]:
        """For each block, True if it is there."""
        return [True] * len(self.answers) if self.is_whole else [isinstance(one, int) for one in self.answers]


class Gate(Protocol):
    """Interface that says if a cache may move blocks, implemented by `farpool.kv.probe.Probe`."""

    @property
    def reason(self) -> Reason | None: ...
    def is_of_this_thread(self) -> bool: ...
    def attempt(self) -> None: ...
    def begin_in_child(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Link:
    """Connections of one process: after a fork the child has none."""

    process: int
    objects: Objects
    calls: ObjectCalls


class BlockCache:
    """KV blocks of one namespace in a store; whatever goes wrong is a miss with a reason. Thread-safe.

    It connects when it is first used, and anew in a forked child. Blocks are write-once: the first that is saved under
    a key stays.

    Parameters
    ----------
    nodes : sequence of str, Store or PoolObjects
        Addresses of the nodes, or a store or objects in a pool, which stay the caller's, and which a forked child
        cannot use.
    namespace : Namespace
        All that readers and writers have to agree on.
    replicas : int
        Number of nodes that keep each block.
    access_key : str or None
        Access key of the nodes; None for that of the environment.
    transport : str
        As of `Store`.
    timeout : float
        Seconds that a request may take, of which a load or save of more than 64 MiB makes several.
    ttl : float or None
        Seconds after which blocks expire; None for never.
    threads : int
        Threads for `submit`.
    judge : Judge, optional
        Measured times of loading and computing that caches have in common; a new one if left out. This class measures
        and decides nothing itself: whoever knows what a request needs does.

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
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
            raise ConfigError(f"timeout is {timeout!r}, expected seconds above 0 and at most 1e6", setting="timeout")
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 64:
            raise ConfigError(f"threads is {threads!r}, expected 1 to 64", setting="threads")
        self.namespace = namespace
        self.judge = judge or Judge()
        self.digest = namespace.digest
        self._compression = Compression(namespace) if namespace.codec else None
        self._timeout = timeout
        self._ttl_ms = ttl_of(ttl)
        self._threads = threads
        if isinstance(nodes, str):
            raise ConfigError(f"nodes is {nodes!r}, expected a list of addresses", setting="nodes")
        self._given = None if isinstance(nodes, Sequence) else nodes
        addresses = tuple(nodes) if isinstance(nodes, Sequence) else ()

        def connect() -> Store:
            return Store(*addresses, replicas=replicas, key=access_key, timeout=timeout, transport=transport)

        self._connect = connect
        if self._given is None:
            connect().close()  # refuses wrong settings now, and asks no node
        self._closed = False
        self._described_at: dict[bytes, float] = {}
        self._probe: Gate | None = None
        self._holds: dict[bytes, dict[bytes, tuple[Hold, float]]] = {}  # by key and owner
        self._many_holds = _FEWEST_HOLDS
        self._counts: Counter[str] = Counter()
        self._begin()
        _CACHES.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: set[Future[Any]] = set()

    def _calls(self, seconds: float = math.inf) -> ObjectCalls:
        """Return the calls of the store, which is opened by the first that needs it in this process.

        Raises
        ------
        NodeTimeoutError
            No time is left for a call: nobody is asked, although a fast node might answer.
        StoreClosedError
            The cache is closed.
        """
        if seconds <= 0:
            raise NodeTimeoutError("the time of this call was over before it was made")
        link = self._link
        if link is not None and not self._closed:
            return link.calls
        with self._lock:
            if self._closed:
                raise StoreClosedError("this cache of KV blocks was closed; make a new one")
            if self._link is None:
                objects = self._given or self._connect()
                self._link = _Link(os.getpid(), objects, objects.best_effort())
            return self._link.calls

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
        """Return True while this thread moves the block of a probe, which does not belong to the engine."""
        return self._probe is not None and self._probe.is_of_this_thread()

    def _compression_of_blocks(self) -> Compression | None:
        """Return the codecs; None for a probe's block, whose random bytes a lossy codec would change."""
        return None if self._is_probed() else self._compression

    def key(self, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
        """Compose the key of a block of this namespace; see `block_key`."""
        return block_key(self.digest, chain, group, shard)

    def is_mapped(self) -> bool:
        """Return True if all nodes are on this host and mapped: looking up what is there takes microseconds."""
        try:
            return self._calls().is_mapped()
        except FarpoolError:
            return False

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        stored: Sequence[int] | None = None,
        request: Requests = "",
        timeout: float | None = None,
    ) -> Found:
        """Find out which blocks are there.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        stored : sequence of int, optional
            Bytes that each object has to have, header included, or at most has if the cache compresses. What has
            another size is a miss, and is dropped, as nobody could use it.
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
            sizes = [withheld] * len(keys) if withheld else self._calls(seconds).lookup(keys, seconds)
        except FarpoolError as error:
            sizes = [error] * len(keys)
        if stored is not None and sizes != stored and (misfits := self._misfits(keys, sizes, stored)):
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
            For each block None if it is in its target, whole and verified, or else why not; the target's bytes are then
            unspecified. What nobody could use is dropped.

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
        outcomes = []
        moved = 0
        for piece, left in self._pieces(sizes, began, timeout):
            start, own = time.monotonic(), keys[piece]
            try:
                answers = self._calls(left).get_into_many(own, places[piece], left)
            except FarpoolError as error:
                answers = [error] * len(own)
            seconds = time.monotonic() - start
            header = headers[piece.start * HEADER_BYTES : piece.stop * HEADER_BYTES]
            outcomes += self._checked_blocks(own, header, answers, checked[piece], sizes[piece], start + left)
            came = sum([answer for answer in answers if isinstance(answer, int)])
            compression = self._compression_of_blocks()
            if compression is not None and compression.choice is not None:
                loaded = zip(sizes[piece], outcomes[piece], strict=True)
                payload = sum(nbytes for nbytes, reason in loaded if reason is None)
                compression.choice.received(came, seconds, payload)
            moved += came
            if Reason.LATE in outcomes[piece]:  # each of the other pieces would take as long again
                outcomes += [Reason.LATE] * (len(keys) - len(outcomes))
                break
        if any(outcomes):
            useless = [
                key
                for key, nbytes, reason in zip(keys, sizes, outcomes, strict=True)
                # A reader that asks for another size than its namespace says is wrong itself.
                if reason in _USELESS or (reason is Reason.WRONG_SIZE and nbytes == self._block_bytes(key))
            ]
            self._forget(useless, began, timeout)
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
        """Store blocks that are not there yet; those that are do not travel.

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
            By key, that of the block before it, without which it is of no use; first blocks are left out. In a pool,
            blocks leave from the ends of the prefixes that this tells.
        namespace : Namespace or None
            Namespace of the keys, where an engine has several; None for the cache's own.
        ttl : float or None
            Seconds after which the blocks expire; None for the cache's own time.

        Returns
        -------
        list of Reason or None
            For each block None if it is there now, or else why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes, there are not as many values as keys, or `cost` is no such number.
        """
        began = time.monotonic()
        keys = _as_many(keys, values, "values")
        if not 0 <= cost <= _LONGEST_COST:
            raise ConfigError(f"cost is {cost!r}, expected 0 to {_LONGEST_COST:g} seconds", setting="cost")
        namespace = namespace or self.namespace
        ttl_ms = self._ttl_ms if ttl is None else ttl_of(ttl)
        about = About(
            ttl_ms=ttl_ms,
            kind=_KIND,
            cost_us=round(cost * 1e6),
            namespace=int.from_bytes(namespace.digest[:8], "little"),
            tenant=namespace.tenant,
            parents=parents or {},
        )
        pairs = [(key, as_payload(value)) for key, value in zip(keys, values, strict=True)]
        sizes = [nbytes_of(payload) for _, payload in pairs]
        outcomes: list[Reason | None] = [None] * len(pairs)
        moved = 0
        if (withheld := self._withheld(timeout)) is not None:
            outcomes = [withheld] * len(keys)
            self._note("save", request, len(keys), outcomes, began, moved)
            return outcomes
        try:
            seconds = self._timeout if timeout is None else timeout
            there = self._calls(seconds).lookup(keys, seconds)
            misfits = self._misfits(keys, there, [HEADER_BYTES + nbytes for nbytes in sizes])
            self._forget([keys[number] for number in misfits], began, timeout)
            missing = sorted({*misfits, *(number for number, size in enumerate(there) if not isinstance(size, int))})
            if missing:
                self._describe(namespace, ttl_ms, self._left(None if timeout is None else began + timeout))
            unsaved = [pairs[number] for number in missing]
            for piece, left in self._pieces([sizes[number] for number in missing], began, timeout):
                until = time.monotonic() + left
                items = [(key, self._stored(key, payload, until)) for key, payload in unsaved[piece]]
                start = time.monotonic()
                answers = self._calls().put_many(items, max(0.0, until - start), about)
                seconds, went, payload = time.monotonic() - start, 0, 0
                for number, (_, parts), answer in zip(missing[piece], items, answers, strict=True):
                    if isinstance(answer, Exception):
                        outcomes[number] = reason_of(answer)
                    else:
                        went += nbytes_of(parts)
                        payload += sizes[number]
                compression = self._compression_of_blocks()
                if compression is not None and compression.choice is not None:
                    compression.choice.sent(went, seconds, payload)
                moved += went
                if any(outcomes[number] is Reason.LATE for number in missing[piece]):
                    for number in missing[piece.stop :]:
                        outcomes[number] = Reason.LATE
                    break
        except FarpoolError as error:
            outcomes = [reason_of(error)] * len(pairs)
        self._note("save", request, len(keys), outcomes, began, moved)
        return outcomes

    def pin(
        self,
        keys: Sequence[bytes],
        ttl: float,
        *,
        owner: bytes = b"",
        request: Requests = "",
        timeout: float | None = None,
    ) -> list[Reason | None]:
        """Keep blocks from being evicted for a limited time; those in a node's file come back to its memory.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 64 bytes.
        ttl : float
            Seconds after which they may be evicted again, also if nobody unpins them.
        owner : bytes
            Who keeps them, such as a sequence. A block stays as long as one of its owners keeps it; one who pins it
            again begins anew with the new time.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``, or one name for each key.
        timeout : float or None
            Seconds that the call may take; None for the cache's own.

        Returns
        -------
        list of Reason or None
            For each block None if it is there and stays, or else why not. Nodes let pins go before their time when they
            are restarted, and when this process has been gone for longer than their grace.

        Raises
        ------
        ConfigError
            `ttl` is not a number of seconds above 0, or a key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys, ttl_ms = as_keys(keys), ttl_of(ttl)
        seconds = self._timeout if timeout is None else timeout
        try:
            held = self._calls(seconds).hold_many(keys, ttl_ms, seconds)
        except FarpoolError as error:
            held = [error] * len(keys)
        replaced: list[Hold] = []
        now = time.monotonic()
        with self._lock:
            self._forget_holds(now)
            for key, hold in zip(keys, held, strict=True):
                if isinstance(hold, tuple):
                    owners = self._holds.setdefault(key, {})
                    before, _ = owners.get(owner, (hold, 0.0))
                    owners[owner] = hold, now + ttl
                    if before not in [other for other, _ in owners.values()]:
                        replaced.append(before)
        self._release(replaced)
        outcomes = [
            None if isinstance(one, tuple) else Reason.ABSENT if one is None else reason_of(one) for one in held
        ]
        self._note("pin", request, len(keys), outcomes, began, 0)
        return outcomes

    def unpin(self, keys: Sequence[bytes], *, owner: bytes = b"") -> None:
        """Let blocks be evicted again that `owner` has pinned; those of other owners are left alone."""
        ended: list[Hold] = []
        with self._lock:
            for key in keys:
                owners = self._holds.get(key, {})
                mine = owners.pop(owner, None)
                # In a pool all owners have one hold; nodes count each.
                if mine is not None and mine[0] not in [hold for hold, _ in owners.values()]:
                    ended.append(mine[0])
                if not owners:
                    self._holds.pop(key, None)
        self._release(ended)

    def _forget_holds(self, now: float) -> None:
        """Forget holds whose time is over, if there are many; called with the lock."""
        if len(self._holds) > self._many_holds:
            left = {
                key: {owner: one for owner, one in owners.items() if one[1] > now}
                for key, owners in self._holds.items()
            }
            self._holds = {key: owners for key, owners in left.items() if owners}
            self._many_holds = max(_FEWEST_HOLDS, 2 * len(self._holds))

    def _release(self, holds: Sequence[Hold]) -> None:
        """Tell nodes that holds have ended; where that fails, they end with their time."""
        if holds:
            with contextlib.suppress(FarpoolError, OSError):
                self._calls().release_many(holds, self._timeout)

    def drop(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove blocks from all nodes that can be reached; return how many had a copy that went."""
        keys = as_keys(keys)
        try:
            went = self._calls().drop_many(keys, self._timeout if timeout is None else timeout)
        except FarpoolError:
            return 0
        return sum(isinstance(copies, int) and copies > 0 for copies in went)

    def demote(
        self, keys: Sequence[bytes], *, request: Requests = "", timeout: float | None = None
    ) -> list[Reason | None]:
        """Move blocks out of memory into the tier below, so that others have room; they are found as before.

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
            For each block None if it is in the lower tier, or on its way there, or else why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys = as_keys(keys)
        seconds = self._timeout if timeout is None else timeout
        try:
            demoted = self._calls(seconds).demote_many(keys, seconds)
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
            Nodes that may have some cannot be asked.
        """
        digest = (namespace or self.namespace).digest
        gone = purge(self._objects(), digest)
        self._described_at.pop(digest, None)
        return gone

    def namespaces(self) -> Mapping[bytes, Namespace]:
        """Return all namespaces that have blocks where this cache keeps its own; see `namespaces`."""
        return namespaces(self._objects())

    def _objects(self) -> Objects:
        """Return the store or pool behind this cache; raises `StoreClosedError` if the cache is closed."""
        self._calls()
        link = self._link
        if link is None:  # closed in between
            raise StoreClosedError("this cache of KV blocks was closed; make a new one")
        return link.objects

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on this cache's own threads.

        Raises
        ------
        StoreClosedError
            The cache is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreClosedError("this cache of KV blocks was closed; make a new one")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="farpool-kv")
            job = self._executor.submit(function, *args, **kwargs)
            self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def drain(self, timeout: float) -> bool:
        """Wait until what was submitted has ended; return False if it has not within `timeout` seconds."""
        return not wait(list(self._jobs), timeout).not_done

    def stats(self) -> dict[str, int]:
        """Return counters: blocks by step and outcome (``load.done``, ``load.late``), bytes moved (``load.bytes``)."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and close the connections. Idempotent."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
            link, self._link = self._link, None
            self._holds.clear()
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        if link is not None and link.process == os.getpid() and isinstance(link.objects, Store) and self._given is None:
            link.objects.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, key: bytes, payload: Payload, until: float) -> Payload:
        """Return a payload as it is stored: its header, and what its codec makes of it while there is time."""
        stored = payload
        compression = self._compression_of_blocks()
        if compression is not None and time.monotonic() < until:
            stored = compression.encode(key, payload)
        header = memoryview(pack_header(key, nbytes_of(payload), nbytes_of(stored)))
        return header, *(stored if isinstance(stored, tuple) else (stored,))

    def _checked_blocks(
        self,
        keys: Sequence[bytes],
        headers: bytearray,
        answers: Sequence[int | Exception | None],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        until: float,
    ) -> list[Reason | None]:
        """Check the headers and payloads that were received, and decode encoded payloads in place."""
        # Almost always every block arrives as it was saved, and one comparison of all headers shows this.
        if answers == [HEADER_BYTES + nbytes for nbytes in sizes] and headers == b"".join(
            [pack_header(key, nbytes, nbytes) for key, nbytes in zip(keys, sizes, strict=True)]
        ):
            return [None] * len(keys)
        outcomes: list[Reason | None] = []
        for number, answer in enumerate(answers):
            if isinstance(answer, int):
                header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
                outcomes.append(
                    self._checked_block(keys[number], header, answer, targets[number], sizes[number], until)
                )
            else:
                outcomes.append(Reason.ABSENT if answer is None else reason_of(answer))
        return outcomes

    def _checked_block(
        self, key: bytes, header: bytearray, came: int, target: Payload, nbytes: int, until: float
    ) -> Reason | None:
        """Check one block, of which `came` bytes arrived with its header."""
        if came < HEADER_BYTES:
            return Reason.FOREIGN
        stored = came - HEADER_BYTES
        reason = check_header(header, key, nbytes, stored)
        if reason is not None or stored == nbytes:
            return reason
        if self._compression is None:
            return Reason.WRONG_SIZE
        if time.monotonic() > until:
            return Reason.LATE
        return None if self._compression.decode_within(key, stored, target) else Reason.CORRUPT

    def _pieces(self, sizes: Sequence[int], began: float, timeout: float | None) -> Iterator[tuple[slice, float]]:
        """Cut a batch into pieces of bounded size; each comes with the seconds that it may take."""
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

    def time_for(self, nbytes: int) -> float:
        """Return the seconds that moving so many bytes may take where nothing else is said."""
        return self._timeout * max(1, -(-nbytes // _PIECE_BYTES))

    def _left(self, until: float | None) -> float:
        return self._timeout if until is None else max(0.0, until - time.monotonic())

    def _describe(self, namespace: Namespace, ttl_ms: int, left: float) -> None:
        """Store a namespace's own description, so that others can tell what its blocks are of (`namespaces`)."""
        now, digest = time.monotonic(), namespace.digest
        if now >= self._described_at.get(digest, -math.inf) + _DESCRIBED_SECONDS:
            item = (namespace_key(digest), as_payload(namespace.encoded))
            # It outlives the blocks that come until it is stored anew: without it nobody finds them by weights or
            # tenant.
            ttl_ms = ttl_ms + 2000 * int(_DESCRIBED_SECONDS) if ttl_ms else 0
            # The description of a probe is not kept, so it expires even if the probe could not drop it.
            about = About(ttl_ms=ttl_ms, kind=_KIND, tenant=namespace.tenant, keep=not self._is_probed())
            (outcome,) = self._calls().put_many([item], left, about)
            if not isinstance(outcome, Exception):
                if len(self._described_at) >= _MOST_DESCRIBED:
                    self._described_at.clear()
                self._described_at[digest] = now

    def _forget(self, keys: Sequence[bytes], began: float, timeout: float | None) -> None:
        """Drop blocks that nobody can use, while there is time: as long as they are there, none can be saved anew."""
        left = self._left(None if timeout is None else began + timeout)
        if keys and left > 0:
            self.drop(keys, timeout=left)

    def _misfits(
        self, keys: Sequence[bytes], there: Sequence[int | Exception | Reason | None], stored: Sequence[int]
    ) -> list[int]:
        """Return the numbers of objects that cannot be the blocks of their keys, as they have another size."""
        least = HEADER_BYTES if self._compression is not None else None
        return [
            number
            for number, (size, most) in enumerate(zip(there, stored, strict=True))
            if isinstance(size, int)
            and size != most
            and not (least is not None and least <= size < most)
            # One who expects another size than its namespace says is wrong itself.
            and most - HEADER_BYTES == self._block_bytes(keys[number])
        ]

    def _block_bytes(self, key: bytes) -> int | None:
        """Return the bytes that the payload of a key has by the namespace; None for keys of another form."""
        groups = self.namespace.groups
        group = group_of(key) if len(key) == KEY_BYTES else len(groups)
        return groups[group].block_bytes if group < len(groups) else None

    def missed(self, step: str, request: str, blocks: int, reason: Reason, note: str) -> None:
        """Count blocks, and write them into the journal, that nobody was asked for as they are of no use."""
        with self._lock:
            self._counts[f"{step}.{reason}"] += blocks
        record(request, step, blocks, 0, {str(reason): blocks}, 0.0, note)

    def _note(
        self, step: str, request: Requests, blocks: int, reasons: Sequence[Reason | None], began: float, moved: int
    ) -> None:
        """Count blocks, and write them into the journal; `reasons` is as long as there are blocks, or empty."""
        if self._is_probed():
            return
        failures = [str(reason) for reason in reasons if reason is not None]
        failed: Mapping[str, int] = Counter(failures) if failures else {}
        with self._lock:
            self._counts[f"{step}.done"] += blocks - len(failures)
            self._counts[f"{step}.bytes"] += moved
            for reason, number in failed.items():
                self._counts[f"{step}.{reason}"] += number
        seconds = time.monotonic() - began
        if isinstance(request, str):
            record(request, step, blocks, blocks - len(failures), failed, seconds)
            return
        counts = Counter(request)
        missed = Counter(zip(request, reasons, strict=bool(reasons)))
        for name, number in counts.items():
            own = {str(reason): count for (of, reason), count in missed.items() if of == name and reason is not None}
            record(name, step, number, number - sum(own.values()), own, seconds)


def _as_many(keys: Sequence[bytes], others: Sequence[object], what: str) -> list[bytes]:
    """Check keys, and that there is one other thing for each."""
    if len(keys) != len(others):
        raise ConfigError(f"{len(keys)} keys and {len(others)} {what}, expected as many", setting=what)
    return as_keys(keys)


def namespaces(objects: Objects) -> Mapping[bytes, Namespace]:
    """Return the namespaces that have blocks in a store or pool, by their digests.

    Raises
    ------
    NodeError, ReplicationError
        So many nodes cannot be asked that they may have some that no other has.
    """
    found: dict[bytes, Namespace] = {}
    for key, encoded in zip(keys := list(objects.keys(NAMESPACE_MAGIC)), objects.get_many(keys), strict=True):
        if encoded is not None:
            # Anybody who may put can put something else there.
            with contextlib.suppress(ConfigError):
                namespace = Namespace.decode(encoded)
                if namespace_key(namespace.digest) == key:
                    found[namespace.digest] = namespace
    return found


def purge(objects: Objects, digest: bytes) -> int:
    """Remove all blocks of one namespace from a store or pool; return how many there were.

    Raises
    ------
    NodeError, ReplicationError
        So many nodes cannot be asked that they may have blocks that no other has.
    """
    calls, gone = objects.best_effort(), 0
    keys = [*objects.keys(KEY_MAGIC + digest)]
    for start in range(0, len(keys), _AT_ONCE):
        for copies in calls.drop_many(keys[start : start + _AT_ONCE], _PURGE_SECONDS):
            if isinstance(copies, Exception):
                raise copies
            gone += copies > 0
    objects.drop(namespace_key(digest))
    return gone


_DEMOTED = {
    Demotion.LOWER: None,
    Demotion.PINNED: Reason.PINNED,
    Demotion.FULL: Reason.FULL,
    Demotion.NO_LOWER_TIER: Reason.NO_LOWER_TIER,
}
_PURGE_SECONDS = 30.0
_CACHES: weakref.WeakSet[BlockCache] = weakref.WeakSet()


def _forked() -> None:
    """Let caches in the child of a fork begin anew: connections, threads and locks are the parent's."""
    for cache in _CACHES:
        cache._holds.clear()
        cache._begin()
        if cache._probe is not None:
            cache._probe.begin_in_child()
        cache.judge.leave_to_parent()


os.register_at_fork(after_in_child=_forked)
