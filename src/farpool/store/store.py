"""The store: published objects on nodes (docs/store.md)."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from farpool.errors import ConfigError, NodeError, StoreClosedError
from farpool.store.arguments import as_key, as_payload, as_prefix, as_target, expiry_of
from farpool.store.batch import publish_many, read_many
from farpool.store.core import Core, results
from farpool.store.messages import ObjectInfo
from farpool.store.pin import Pin, pin
from farpool.store.reading import find, read
from farpool.store.single import get_single, publish_single
from farpool.store.writing import publish, remove
from farpool.transport.access import AccessKey, client_key
from farpool.transport.address import parse_address
from farpool.transport.channel import SPIN_SECONDS, Channel, Transport
from farpool.transport.frames import EXPIRY, Op
from farpool.transport.settings import checked_timeout, checked_transport

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["NodeStatus", "Store"]

Key = str | bytes


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as a store sees it.

    Attributes
    ----------
    node : str
        Its address.
    breaker : str
        ``closed``: it is asked; ``open``: it has failed and is left alone; ``half-open``: it is being probed.
    failing : float
        Seconds since it began to fail; 0.0 while it is well.
    error : str
        Why it failed, or cannot be asked now; empty while it is well.
    mapped : bool
        Whether its objects are in mapped memory.
    stats : dict or None
        Its counters; None if it cannot be asked.
    """

    node: str
    breaker: str
    failing: float
    error: str
    mapped: bool
    stats: dict[str, Any] | None


class Store:
    """Published objects on nodes: immutable values under keys.

    Keys are text (UTF-8) or bytes, 1 to 256 bytes; values are contiguous buffers. What `put` has published is there
    until it is replaced, deleted, expires, or is evicted by a node that needs the room: to a reader that is a miss.
    What is read is verified (CRC32C, generation). Thread-safe. Of no use in a forked child: make a new one there.

    Parameters
    ----------
    *nodes : str
        Addresses like ``tcp://10.0.0.7:7471``. Every program names the same nodes; their order says nothing.
    replicas : int
        Nodes that have to confirm a put or a delete before it is done, so that each object survives the loss of all
        but one of them.
    key : AccessKey or str or None
        The access key, ``NAME:SECRET`` as text; None for that of the environment (``FARPOOL_KEY``), if any.
    timeout : float
        Seconds that a call may take, connecting included; at most 1e6.
    transport : "auto", "mapped", "tcp" or "nixl"
        ``auto`` maps the memory of nodes on this host and uses TCP for others; ``nixl`` reads one-sided (docs/nixl.md).
    spin : float
        Seconds of asking a socket over and over before a wait for it blocks; 0 saves processor time.

    Raises
    ------
    ConfigError
        A setting is wrong. No node is asked before it is needed.
    """

    def __init__(
        self,
        *nodes: str,
        replicas: int = 1,
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
        spin: float = SPIN_SECONDS,
    ) -> None:
        addresses = [parse_address(node, "node") for node in nodes]
        if not addresses or len(set(addresses)) < len(addresses):
            what = "given twice" if addresses else "missing"
            raise ConfigError(f"nodes is {nodes!r}: an address is {what}; expected one of each node", setting="nodes")
        transport = checked_transport(transport)
        if isinstance(spin, bool) or not isinstance(spin, int | float) or not 0 <= spin < math.inf:
            raise ConfigError(f"spin is {spin!r}, expected seconds, at least 0", setting="spin")
        access = client_key(key)
        channels = [Channel(address, key=access, transport=transport, spin=spin) for address in addresses]
        self._start(channels, replicas, timeout)

    def _start(self, channels: Sequence[Channel], replicas: int, timeout: float) -> None:
        if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= len(channels):
            raise ConfigError(
                f"replicas is {replicas!r}, expected 1 to {len(channels)}, the number of nodes", setting="replicas"
            )
        self._core: Core | None = Core(channels, replicas, checked_timeout(timeout))
        self._why = "was closed"
        _STORES.add(self)

    def _open(self) -> Core:
        if self._core is None:
            raise StoreClosedError(f"this store {self._why}; make a new one")
        return self._core

    def put(self, key: Key, value: Buffer, *, ttl: float | None = None) -> int:
        """Publish a value under a key, in the place of any older one.

        Parameters
        ----------
        key : str or bytes
            1 to 256 bytes.
        value : buffer
            Contiguous. It must not change during the call.
        ttl : float or None
            Seconds after which it expires.

        Returns
        -------
        int
            The generation of this publish.

        Raises
        ------
        NodeFullError, ObjectTooLargeError, AccessDeniedError
            The node refuses it.
        NodeError, NodeTimeoutError
            The node cannot be reached. It may have been published, or may still be.
        ReplicationError
            With `replicas`: too few nodes have confirmed. The same holds.
        """
        core = self._open()
        data, payload, expiry = as_key(key), as_payload(value), expiry_of(ttl)
        if core.copies == 1:
            generation = publish_single(core, core.first(data), EXPIRY.pack(expiry) + data, payload)
            if generation is not None:
                return generation
        return core.run(publish(data, payload, expiry, core.group(data), core.names, core.clock))

    def get(self, key: Key) -> bytes | None:
        """The newest value of a key; None if there is none.

        Raises
        ------
        ChecksumError
            No copy has the bytes that were published.
        NodeError, NodeTimeoutError
            The node cannot be reached.
        ReplicationError
            With `replicas`: too few nodes can be reached to know which copy is the newest.
        """
        core = self._open()
        data = as_key(key)
        if core.copies == 1:
            return get_single(core, core.first(data), data)
        reply = core.run(read(data, core.group(data), core.names, core.unconfirmed))
        return None if reply is None else reply.payload or b""

    def get_into(self, key: Key, buffer: Buffer) -> int | None:
        """Read the newest value into a buffer.

        Returns
        -------
        int or None
            Its bytes. None if there is no value: the buffer's contents are then unspecified, as after an error.

        Raises
        ------
        ValueError
            The buffer is smaller than the value.
        ChecksumError, NodeError, NodeTimeoutError, ReplicationError
            As of `get`.
        """
        core = self._open()
        data, into = as_key(key), as_target(buffer)
        if core.copies == 1:
            return get_single(core, core.first(data), data, into)
        reply = core.run(read(data, core.group(data), core.names, core.unconfirmed, into))
        return None if reply is None else reply.nbytes

    def exists(self, key: Key) -> bool:
        """Whether a key has a value."""
        return self.stat(key) is not None

    def stat(self, key: Key) -> ObjectInfo | None:
        """Size, generation and expiry of a key's newest value; None if there is none."""
        core = self._open()
        return core.run(core.find(as_key(key)))

    def delete(self, key: Key) -> bool:
        """Remove a key's value; whether there was one. Nodes that are away learn of it when they are back.

        With `replicas` and an access key that may not read: whether any node still had a copy, if only an outdated one.
        """
        core, data = self._open(), as_key(key)
        return core.run(remove(data, core.group(data), core.names, core.clock, core.unconfirmed))

    def touch(self, key: Key, ttl: float | None) -> bool:
        """Have a value expire `ttl` seconds from now, or never; whether there is one.

        Copies on nodes that cannot be reached keep the time that they have.
        """
        core, data = self._open(), as_key(key)
        meta = EXPIRY.pack(expiry_of(ttl)) + data
        return core.run(find(data, core.group(data), core.names, core.unconfirmed, Op.TOUCH, meta)) is not None

    def pin(self, key: Key) -> Pin:
        """Hold a value in memory; on a node of this host without a copy.

        Raises
        ------
        KeyError
            The key has no value.
        """
        held = pin(self._open(), as_key(key))
        if held is None:
            raise KeyError(key)
        return held

    def put_many(
        self, items: Mapping[Key, Buffer] | Iterable[tuple[Key, Buffer]], *, ttl: float | None = None
    ) -> list[int]:
        """As `put` for each, many under way at a time; their generations."""
        core, expiry = self._open(), expiry_of(ttl)
        pairs = items.items() if isinstance(items, Mapping) else items
        checked = [(as_key(key), as_payload(value)) for key, value in pairs]
        return publish_many(core, checked, expiry)

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """As `get` for each, many under way at a time."""
        core = self._open()
        checked = [as_key(key) for key in keys]
        return cast("list[bytes | None]", read_many(core, checked, [None] * len(checked)))

    def get_into_many(self, pairs: Iterable[tuple[Key, Buffer]]) -> list[int | None]:
        """As `get_into` for each pair of key and buffer, many under way at a time."""
        core = self._open()
        checked = [(as_key(key), as_target(buffer)) for key, buffer in pairs]
        return cast("list[int | None]", read_many(core, [key for key, _ in checked], [into for _, into in checked]))

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """As `exists` for each, many under way at a time."""
        core = self._open()
        checked = [as_key(key) for key in keys]
        return [info is not None for info in results(core.run_all(core.find(key) for key in checked))]

    def delete_many(self, keys: Iterable[Key]) -> list[bool]:
        """As `delete` for each, many under way at a time."""
        core = self._open()
        checked = [as_key(key) for key in keys]
        return results(
            core.run_all(remove(key, core.group(key), core.names, core.clock, core.unconfirmed) for key in checked)
        )

    def objects(self, prefix: Key = "") -> Iterator[ObjectInfo]:
        """What is published under keys that begin with `prefix`, in no order.

        What is published, deleted or evicted meanwhile may be among them or not.

        Raises
        ------
        ConfigError
            The prefix has more than 256 bytes.
        """
        return self._open().objects(as_prefix(prefix))

    def keys(self, prefix: Key = "") -> Iterator[bytes]:
        """The keys of `objects`."""
        return (info.key for info in self.objects(prefix))

    def nodes(self) -> list[NodeStatus]:
        """How the nodes are; asks each of them."""
        core, statuses = self._open(), []
        for member in core.members:
            stats: dict[str, Any] | None = None
            error = ""
            try:
                stats = member.call("stats", time.monotonic() + core.timeout)
            except NodeError as failure:
                error = str(failure)
            breaker, failing, _ = member.status()
            statuses.append(NodeStatus(member.name, breaker, failing, error, member.channel.reader is not None, stats))
        return statuses

    def reconcile(self) -> int:
        """Finish deletions that some nodes have missed; how many. Done by itself when a node comes back."""
        return self._open().reconcile()

    def close(self) -> None:
        """End all connections. Idempotent. The nodes free what is still pinned after their grace."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a store cannot be pickled; make one from the nodes' addresses where it is needed")


_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def _forked() -> None:
    """In the child of a fork connections are the parent's and locks may be held for ever."""
    for store in _STORES:
        store._core = None
        store._why = "is the copy that a fork left in this process"


os.register_at_fork(after_in_child=_forked)
