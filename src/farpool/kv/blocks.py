"""KV blocks in a store, for engines that must neither wait long for the store nor receive wrong bytes from it.

Every call has a deadline and ends by it. If a node fails or bytes are damaged, the call reports a miss with a reason
instead of raising an error. When a load returns, no thread writes into its targets any more, so the engine may use that
memory for other blocks at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from farpool import forks
from farpool.abc.objects import About, Demotion
from farpool.checks import require_seconds, require_whole
from farpool.closing import Closing
from farpool.cluster.store import Store
from farpool.cluster.store.arguments import as_key, as_keys, as_payload, as_targets, ttl_of
from farpool.cluster.store.retention import checked_priority, session_number
from farpool.errors import ConfigError, FarpoolError
from farpool.kv.background import Threads
from farpool.kv.block_format import BlockFormat
from farpool.kv.descriptions import OBJECT_KIND, Descriptions, namespaces, purge
from farpool.kv.found import Found
from farpool.kv.judge import Judge
from farpool.kv.keys import block_key
from farpool.kv.link import Link
from farpool.kv.namespace import Namespace
from farpool.kv.pieces import Pieces
from farpool.kv.pins import Pins
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

_COST_MAX_S = 1e6


class Gate(Protocol):
    """Interface of an object that decides if a cache may move blocks. `farpool.kv.probe.Probe` implements it."""

    @property
    def reason(self) -> Reason | None: ...
    def is_of_this_thread(self) -> bool: ...
    def attempt(self) -> None: ...
    def begin_in_child(self) -> None: ...


class BlockCache(Closing):
    """Keeps the KV blocks of one namespace in a store, and reports each failure as a miss. Thread-safe.

    The cache connects when it is first used, and connects again in a forked child. Blocks are write-once: the first
    block that is saved under a key stays.

    Parameters
    ----------
    nodes : str, sequence of str, Store or PoolObjects
        Addresses of the nodes, the address of their registry, or a store or objects in a pool. If the caller passes a
        store or objects, the cache does not close them, and a forked child cannot use them.
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
        Keeps measured times of loading and computing, and may be shared by several caches; a new one by default.
        `BlockCache` itself neither measures nor decides, because only its caller knows which blocks a request needs.

    Raises
    ------
    ConfigError
        A setting is wrong. The nodes are not contacted yet.
    """

    def __init__(
        self,
        nodes: str | Sequence[str] | Objects,
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
        store = partial(Store, replicas=replicas, key=access_key, timeout=timeout, transport=transport)
        self._link = Link(nodes, store, timeout)
        self._descriptions = Descriptions()
        self._pieces = Pieces(self._link, self._format, self._descriptions, timeout)
        self._threads = Threads(threads)
        self._pins = Pins()
        self._tally = Tally()
        forks.begin_again(self)

    def forked(self) -> None:
        """Reset connections, threads, pins and locks in the child of a fork, because they belong to the parent."""
        for part in (self._link, self._threads, self._pins, self._tally):
            part.begin_in_child()
        if self._probe is not None:
            self._probe.begin_in_child()
        self.judge.begin_in_child()

    def require(self, probe: Gate) -> None:
        """Refuse to move any block except the probe's own block until the probe has passed."""
        self._probe = probe

    @property
    def probe(self) -> Gate | None:
        """The probe that has to pass before this cache moves blocks; None if there is no such probe."""
        return self._probe

    def _withheld(self, timeout: float | None) -> Reason | None:
        """Return the reason why the cache may not move blocks now; None if it may.

        If the probe has not reached the nodes yet, this call repeats the probe. With a `timeout` it does not, because
        that time may be too short for a probe.
        """
        probe = self._probe
        if probe is None or probe.reason is None or probe.is_of_this_thread():
            return None
        if timeout is None:
            probe.attempt()
        return probe.reason

    def _is_probed(self) -> bool:
        """Return True if this thread is running the probe, and thus moves the probe's own block.

        The probe's block must not be encoded, because a lossy codec would change its random bytes.
        """
        return self._probe is not None and self._probe.is_of_this_thread()

    def key(self, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
        """Compose the key of a block of this namespace; see `block_key` for the arguments."""
        return block_key(self.digest, chain, group, shard)

    def is_mapped(self) -> bool:
        """Return True if lookups read memory of this host and send no request to a node.

        A lookup then takes microseconds.
        """
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
            For each key the expected size of its object in bytes, header included. If the cache compresses, the object
            may be smaller. An object of a wrong size is a miss and is dropped, because no reader could use it.
        request : str or sequence of str
            The engine's name of the request, for ``farpool why``. If the keys belong to several requests, one name for
            each key.
        timeout : float or None
            Seconds that the lookup may take; None for the cache's own timeout.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys = as_keys(keys)
        sizes: Sequence[int | Exception | Reason | None]
        if (withheld := self._withheld(timeout)) is not None:
            sizes = [withheld] * len(keys)
        else:
            sizes = self._pieces.ask(keys, timeout, lambda calls, left: calls.lookup(keys, left))
        if stored is not None and sizes != stored and (misfits := self._format.misfits(keys, sizes, stored)):
            sizes = list(sizes)
            for number in misfits:
                sizes[number] = ValueError(f"an object of {sizes[number]} bytes, expected {stored[number]}")
            self._pieces.delete([keys[number] for number in misfits], _until(began, timeout))
        found = Found(sizes)
        self._tally.ended("lookup", request, len(keys), () if found.is_whole else found.reasons, began)
        return found

    def load(
        self, keys: Sequence[bytes], targets: Sequence[Target], *, request: Requests = "", timeout: float | None = None
    ) -> list[Reason | None]:
        """Read blocks into buffers.

        Parameters
        ----------
        keys, request
            As in `lookup`.
        targets : sequence of buffer or tuple of buffers
            For each key, writable contiguous memory of exactly the size of its payload. The buffers of a tuple together
            have that size.
        timeout : float or None
            Seconds that the whole load may take; None for a limit that grows with the size: the cache's own
            timeout for every 64 MiB.

        Returns
        -------
        list of Reason or None
            For each block None if its target contains the whole, verified payload; otherwise the reason why not. If
            there is a reason, the bytes in the target are unspecified. The load drops blocks that no reader can use,
            because keys are write-once and a useless block would prevent a new save under its key.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes, or the numbers of keys and targets differ.
        """
        began = time.monotonic()
        keys = _as_many(keys, targets, "targets")
        checked, sizes = as_targets(targets)
        outcomes: list[Reason | None]
        is_probe, moved = self._is_probed(), 0
        if (withheld := self._withheld(timeout)) is not None:
            outcomes = [withheld] * len(keys)
        else:
            until = _until(began, timeout)
            outcomes, moved = self._pieces.read(keys, checked, sizes, until, is_probe=is_probe)
        if not is_probe:
            self._tally.ended("load", request, len(keys), outcomes, began, moved)
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
        keys, request
            As in `lookup`.
        values : sequence of buffer or tuple of buffers
            Payload of each block, which must not change during the call.
        timeout : float or None
            Seconds that the whole save may take; None for a limit that grows with the size: the cache's own
            timeout for every 64 MiB.
        cost : float
            Seconds that computing one of the blocks again takes; 0 if that is not known.
        parents : mapping of bytes to bytes, optional
            Maps the key of each block to the key of the block before it. A block is useless if the block before it is
            missing, so a pool evicts the last blocks of a prefix first. The first block of a prefix has no entry.
        namespace : Namespace or None
            Namespace of the keys, if an engine has several namespaces; None for the cache's own.
        ttl : float or None
            Seconds after which the blocks expire; None for the cache's own `ttl`.

        Returns
        -------
        list of Reason or None
            For each block None if it is stored now, otherwise the reason why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes, the numbers of keys and values differ, or `cost` is not a valid
            number of seconds.
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
        payloads = [as_payload(value) for value in values]
        outcomes: list[Reason | None]
        is_probe, moved = self._is_probed(), 0
        if (withheld := self._withheld(timeout)) is not None:
            outcomes = [withheld] * len(keys)
        else:
            until = _until(began, timeout)
            outcomes, moved = self._pieces.write(keys, payloads, namespace, about, until, is_probe=is_probe)
        if not is_probe:
            self._tally.ended("save", request, len(keys), outcomes, began, moved)
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
        """Keep blocks from being evicted for a limited time. Blocks in a node's file are read back into its memory.

        Parameters
        ----------
        keys, request
            As in `lookup`.
        ttl : float
            Seconds after which the pins end by themselves. Nodes may then evict the blocks again.
        owner : bytes
            Name of the owner of these pins, such as the name of a sequence. A block is kept as long as any owner has it
            pinned. If an owner pins a block again, the new `ttl` replaces the old one.
        timeout : float or None
            Seconds that the call may take; None for the cache's own timeout.

        Returns
        -------
        list of Reason or None
            For each block None if it is stored and pinned, otherwise the reason why not. Nodes end pins early when they
            are restarted, and when this process has been disconnected for longer than their grace period.

        Raises
        ------
        ConfigError
            `ttl` is not a number of seconds above 0, or a key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys, ttl_ms = as_keys(keys), ttl_of(ttl)
        answers = self._pieces.ask(keys, timeout, lambda calls, left: calls.hold_many(keys, ttl_ms, left))
        pins = [(key, pin) for key, pin in zip(keys, answers, strict=True) if isinstance(pin, tuple)]
        self._release(self._pins.add(pins, owner, time.monotonic(), ttl))
        outcomes = [reason_of(answer) for answer in answers]
        self._tally.ended("pin", request, len(keys), outcomes, began)
        return outcomes

    def unpin(self, keys: Sequence[bytes], *, owner: bytes = b"") -> None:
        """End the pins of `owner` on these blocks.

        Nodes may then evict the blocks, unless other owners have pinned them.
        """
        self._release(self._pins.remove(keys, owner))

    def _release(self, pins: Sequence[Hold]) -> None:
        """Release pins on the nodes. On a node that cannot be reached, a pin ends when its time is over."""
        if pins:
            with contextlib.suppress(FarpoolError, OSError):
                self._link.calls().release_many(pins, self._timeout)

    def retain(
        self,
        keys: Sequence[bytes],
        priority: int,
        *,
        session: str | bytes | None = None,
        ttl: float | None = None,
        request: Requests = "",
        timeout: float | None = None,
    ) -> list[Reason | None]:
        """Give blocks a priority: nodes evict blocks of a lower priority first; see `farpool.Store.retain`.

        Parameters
        ----------
        keys, request
            As in `lookup`.
        priority : int
            0 to 7; replaces the priority that a block has. 0 for a block that is not retained.
        session : str, bytes or None
            Name of what needs the blocks, such as a conversation; replaces the session that a block has.
        ttl : float or None
            Seconds after which the priority ends; the blocks stay. None for no end.
        timeout : float or None
            Seconds that the call may take; None for the cache's own timeout.

        Returns
        -------
        list of Reason or None
            For each block None if it has the priority now, otherwise the reason why not. For nodes of an earlier
            release, the reason is `Reason.ABSENT`.

        Raises
        ------
        ConfigError
            The priority, the session's name or the time is wrong, or a key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys, level, ttl_ms = as_keys(keys), checked_priority(priority), ttl_of(ttl)
        session_number(session)  # checks the name, which `ask` would report as a failure of each block
        answers = self._pieces.ask(
            keys, timeout, lambda calls, left: calls.retain_many(keys, level, session, ttl_ms, left)
        )
        outcomes = [reason_of(answer or None) for answer in answers]
        self._tally.ended("retain", request, len(keys), outcomes, began)
        return outcomes

    def end_session(self, session: str | bytes, *, timeout: float | None = None) -> int:
        """End a session of `retain`: its blocks are no longer retained; see `farpool.Store.end_session`.

        Return the number of copies of blocks that the session has retained, on the nodes that answered; 0 if a node
        could not be asked. Blocks on such a node lose their priority when the node restarts, or at another call.
        """
        (ended,) = self._pieces.ask([as_key(session)], timeout, lambda calls, left: [calls.end_session(session, left)])
        return ended if isinstance(ended, int) else 0

    def drop(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """Remove blocks from all nodes that can be reached; return how many blocks were stored on such a node."""
        return self._pieces.delete(as_keys(keys), _until(time.monotonic(), timeout))

    def demote(
        self, keys: Sequence[bytes], *, request: Requests = "", timeout: float | None = None
    ) -> list[Reason | None]:
        """Move blocks out of memory into the tier below, to make room for other blocks. Lookups still find them.

        Parameters
        ----------
        keys, request
            As in `lookup`.
        timeout : float or None
            Seconds that the call may take; None for the cache's own timeout.

        Returns
        -------
        list of Reason or None
            For each block None if it is in the lower tier or is being moved there, otherwise the reason why not.

        Raises
        ------
        ConfigError
            A key is empty or longer than 256 bytes.
        """
        began = time.monotonic()
        keys = as_keys(keys)
        answers = self._pieces.ask(keys, timeout, lambda calls, left: calls.demote_many(keys, left))
        outcomes = [_DEMOTED[one] if isinstance(one, Demotion) else reason_of(one) for one in answers]
        self._tally.ended("demote", request, len(keys), outcomes, began)
        return outcomes

    def purge(self, namespace: Namespace | None = None) -> int:
        """Remove all blocks of a namespace (by default, the cache's own namespace); return how many were removed.

        Raises
        ------
        NodeError
            A node that may have such blocks cannot be reached.
        """
        digest = (namespace or self.namespace).digest
        removed = purge(self._link.objects(), digest)
        self._descriptions.forget(digest)
        return removed

    def namespaces(self) -> Mapping[bytes, Namespace]:
        """Return, by digest, all namespaces that have blocks in this cache's store or pool."""
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
        """Wait until all submitted functions have ended; return False if some still run after `timeout` seconds."""
        return self._threads.drain(timeout)

    def stats(self) -> dict[str, int]:
        """Return counters: blocks by step and outcome (such as ``load.late``), and bytes moved (``load.bytes``)."""
        return self._tally.stats()

    def close(self) -> None:
        """Cancel functions that have not begun, wait for running functions, and close the connections. Idempotent."""
        # We refuse new requests first. When we close the threads, waiting calls run at once, and they must end as
        # misses without asking a node.
        self._link.refuse()
        self._pins.clear()
        self._threads.close()
        self._link.close()

    def time_for(self, nbytes: int) -> float:
        """Return the default timeout in seconds for moving `nbytes` bytes."""
        return self._pieces.time_for(nbytes)

    def missed(self, step: str, request: str, blocks: int, reason: Reason, note: str) -> None:
        """Count and record blocks that were not requested from any node, because the engine cannot use them."""
        self._tally.missed(step, request, blocks, reason, note)


def _until(began: float, timeout: float | None) -> float | None:
    """Return the deadline of a call; None if the call has no timeout.

    In a call without a timeout, the cache's own timeout applies to each request.
    """
    return None if timeout is None else began + timeout


def _as_many(keys: Sequence[bytes], others: Sequence[object], what: str) -> list[bytes]:
    """Check the keys and return them; check that there is one of `others` (targets or values) for each key."""
    if len(keys) != len(others):
        raise ConfigError(f"{len(keys)} keys and {len(others)} {what}, expected as many", setting=what)
    return as_keys(keys)


_DEMOTED = {
    Demotion.LOWER: None,
    Demotion.PINNED: Reason.PINNED,
    Demotion.FULL: Reason.FULL,
    Demotion.NO_LOWER_TIER: Reason.NO_LOWER_TIER,
}
