"""The store: write-once objects on nodes (docs/store.md)."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from farpool import forks
from farpool.abc.membership import Membership
from farpool.abc.objects import PutOutcome, Touched
from farpool.abc.redundancy import Redundancy
from farpool.checks import require_seconds
from farpool.closing import Closing
from farpool.cluster.members import StaticMembers
from farpool.cluster.members.named import named_nodes
from farpool.cluster.names import Names
from farpool.cluster.redundancy import redundancy_of
from farpool.cluster.store.arguments import as_key, as_keys, as_payload, as_prefix, as_target, parts_of, ttl_of
from farpool.cluster.store.best_effort import BestEffort
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.messages import Lookup, ObjectInfo, object_head, priority_in, results, seconds_left
from farpool.cluster.store.pacing import Pacing
from farpool.cluster.store.pin import Pin, Pins, pin_all
from farpool.cluster.store.reading import fetch, listing, look_up, read_many, read_one
from farpool.cluster.store.repair import Repaired, repair
from farpool.cluster.store.retention import checked_priority, end_session, retain, session_number
from farpool.cluster.store.rotation import Rotation, rotate
from farpool.cluster.store.upkeep import Upkeep
from farpool.cluster.store.writing import everywhere, put
from farpool.cluster.wire.access import AccessKey, client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import SPIN_S, Channel, Transport
from farpool.cluster.wire.content import content_key
from farpool.cluster.wire.frames import HEAD, KEPT, STATED, TOUCH, Op
from farpool.cluster.wire.settings import checked_timeout, checked_transport
from farpool.errors import ConfigError, NodeError, StoreClosedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool.cluster.names import NameInfo, NameWatch, OpenedName
    from farpool.cluster.registry import Registry
    from farpool.cluster.store.member import Member

    Value = Buffer | tuple[Buffer, ...]

__all__ = ["NodeStatus", "Store"]

Key = str | bytes


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of one node as a store sees it.

    Attributes
    ----------
    node : str
        Its address.
    failing : float
        Seconds since the node failed; 0.0 if it works. Calls do not ask a failed node until it answers again.
    error : str
        Reason why the node has failed or cannot be asked now; empty if it works.
    mapped : bool
        True if the memory with the node's objects is mapped into this process.
    stats : dict or None
        The node's counters; None if the node cannot be asked.
    identity : str
        The node's identity in hexadecimal; empty before the first contact.
    state : str
        The node's state in the list of members: ``active``, ``suspect`` or ``draining``.
    slow : float
        Seconds that the node took to answer at least, if that was so much longer than other nodes took that this store
        reads last from it; 0.0 otherwise.
    times_slow : int
        How often this store has begun to read last from the node.
    """

    node: str
    failing: float
    error: str
    mapped: bool
    stats: dict[str, Any] | None
    identity: str = ""
    state: str = "active"
    slow: float = 0.0
    times_slow: int = 0


class Store(Closing):
    """Immutable values under write-once keys, kept in the memory of nodes.

    Keys are text (UTF-8) or bytes, 1 to 256 bytes; values are contiguous buffers. A key identifies its value: the key
    is the hash of the value (`put_content`), or names the value's origin. So the first value that is put under a key
    stays, and every copy that can be read has the right bytes. A value stays until a program drops it, its time to live
    ends, or a node evicts it because the node needs the memory; readers then find no value. Each read verifies the
    bytes (CRC32C). Thread-safe. A store does not work in a forked child: make a new store there.

    Parameters
    ----------
    *nodes : str or Membership
        Addresses like ``tcp://10.0.0.7:7471``; or the address of the registry in which the nodes register, like
        ``etcd://10.0.0.1:2379``; or one `Membership`, such as `farpool.StaticMembers`. Members of a registry or a
        `Membership` may join, leave and move while the store is open. Every program names the same nodes, in any order.
        Without any, the environment names them (``FARPOOL_NODES``, or else ``FARPOOL_POOL``).
    replicas : int
        Number of nodes that must confirm a put. Each object then survives the loss of all but one of its nodes. A short
        form of ``redundancy=Copies(replicas)``.
    redundancy : Redundancy, optional
        How objects survive the loss of nodes; given in place of `replicas`. Only redundancies whose parts are whole
        copies of the value are supported.
    key : AccessKey or str or None
        The access key, ``NAME:SECRET`` as text; None for the access key that the environment gives (``FARPOOL_KEY`` or
        ``FARPOOL_KEY_FILE``), if any.
    timeout : float
        Maximum seconds for a call, including the time to connect; at most 1e6. A call fails earlier only if waiting
        cannot help.
    transport : "auto", "mapped", "tcp" or the name of a fabric
        ``auto`` maps the memory of nodes on this host and uses TCP for others; a fabric such as ``nixl`` reads
        one-sided (docs/nixl.md).
    spin : float
        Seconds for which a wait polls a socket before it blocks; 0 saves processor time.
    registry : Registry, str or path, optional
        Registry of names, opened when a name is used for the first time; None for the registry of the environment
        (``FARPOOL_REGISTRY``), or else the registry of the nodes, or else a file of this user on this host.

    Attributes
    ----------
    replicas : int
        Number of copies that each object has.
    registry : Registry, str, path or None
        Registry of names; None for the registry of the environment or of this user.

    Raises
    ------
    ConfigError
        A setting is wrong. The constructor contacts no node, so it does not raise if nodes are down.
    RegistryError
        The registry of the nodes cannot be read.
    """

    def __init__(
        self,
        *nodes: str | Membership,
        replicas: int = 1,
        redundancy: Redundancy | None = None,
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
        spin: float = SPIN_S,
        registry: Registry | str | os.PathLike[str] | None = None,
    ) -> None:
        named = named_nodes(nodes)
        transport = checked_transport(transport)
        require_seconds(spin, "spin")
        access = client_key(key)

        def connect(address: str) -> Channel:
            return Channel(parse_address(address), key=access, transport=transport, spin=spin)

        if registry is None and not os.environ.get("FARPOOL_REGISTRY"):
            registry = named.registry or None
        copies, timeout = redundancy_of(redundancy, replicas), checked_timeout(timeout)
        membership = named.open(timeout)
        try:
            self._start(membership, connect, copies, timeout, registry, lambda: named.close(membership))
        except BaseException:
            named.close(membership)
            raise

    def _start(
        self,
        membership: Membership,
        connect: Callable[[str], Channel],
        redundancy: Redundancy,
        timeout: float,
        registry: Registry | str | os.PathLike[str] | None = None,
        close_members: Callable[[], None] = lambda: None,
    ) -> None:
        parts = redundancy.parts
        # Other lists may grow until there are enough members.
        if isinstance(membership, StaticMembers) and parts > (most := len(membership.members())):
            raise ConfigError(f"replicas is {parts}, expected 1 to {most}, the number of nodes", setting="replicas")
        self._cluster: Cluster | None = Cluster(membership, connect, redundancy, checked_timeout(timeout))
        self.replicas = parts
        self.confirming = next((count for count in range(1, parts) if redundancy.enough(count)), parts)
        self._upkeep: Upkeep | None = None
        self._pacing: Pacing | None = None
        if parts > 1:  # or else there is no other copy that could be read or restored
            self._upkeep, self._pacing = Upkeep(self._cluster), Pacing(self._cluster)
            self._cluster.on_read, self._cluster.on_late = self._upkeep.note, self._pacing.late
        self._why = "was closed"
        self.registry = registry
        self._names: Names | None = None
        self._naming = threading.Lock()
        self._close_members = close_members
        _STORES.add(self)
        forks.begin_again(self)

    def forked(self) -> None:
        """Disable this store in a forked child, because its connections belong to the parent process."""
        self._cluster = self._names = None
        self._naming = threading.Lock()
        self._why = "is the copy that a fork left in this process"

    def _open(self) -> Cluster:
        if self._cluster is None:
            raise StoreClosedError(f"this store {self._why}; make a new one")
        return self._cluster

    def put(
        self,
        key: Key,
        value: Value,
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> PutOutcome:
        """Store a value under a key. If the key has a value already, that value stays.

        Parameters
        ----------
        key : str or bytes
            1 to 256 bytes.
        value : buffer or tuple of buffers
            Contiguous bytes, which must not change during the call. Buffers of a tuple are stored one after the other.
        ttl : float or None
            Seconds after which the value expires, or None for no limit. If the key has a value already, the longer time
            counts.
        check : bool
            Raise if the key has a value of another size or checksum.
        priority : int
            0 to 7. Nodes evict values of a lower priority first; see `retain`. If the key has a value already, the
            higher priority counts.
        session : str, bytes or None
            Session for which the priority holds, until `end_session`; see `retain`. Costs a second request.

        Returns
        -------
        PutOutcome
            ``STORED``, or ``PRESENT`` if a node had a copy already. A call that repeats a request after a lost
            connection may find its own copy, and then returns ``PRESENT``.

        Raises
        ------
        NodeFullError, ObjectTooLargeError, AccessDeniedError
            The nodes refuse the value.
        KeyConflictError
            With `check`: the key has another value.
        NodeError, NodeTimeoutError
            The node cannot be reached. It may have stored the value, or may still store it.
        ReplicationError
            With `replicas`: too few nodes have confirmed the put. Some may have stored the value, or may still store
            it.
        """
        # Read once, because another thread may close the store.
        cluster = self._cluster or self._open()
        item = (as_key(key), as_payload(value))
        if ttl is None and priority == 0 and session is None:
            head = cluster.head
        else:
            head = _head(cluster, ttl, priority, session)
        deadline = time.monotonic() + cluster.timeout
        (outcome,) = put(cluster, [item], head, deadline, check=check)
        if isinstance(outcome, Exception):
            raise outcome
        if session is not None:
            retain(cluster, [item[0]], priority, session_number(session), deadline, raises=True)
        return outcome

    def put_parts(
        self,
        key: Key,
        parts: Iterable[Buffer],
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> PutOutcome:
        """Store buffers, one after the other, as one value, without copying them into one buffer; see `put`."""
        return self.put(key, tuple(parts), ttl=ttl, check=check, priority=priority, session=session)

    def put_content(
        self, value: Value, *, ttl: float | None = None, priority: int = 0, session: Key | None = None
    ) -> str:
        """Store a value under the hash of its bytes; equal values are stored once.

        Returns
        -------
        str
            Its key: ``sha256-`` and the digest in hexadecimal.

        Raises
        ------
        NodeError
            As raised by `put`.
        """
        key = content_key(parts_of(as_payload(value)))
        self.put(key, value, ttl=ttl, check=True, priority=priority, session=session)
        return key

    def get(self, key: Key) -> bytes | None:
        """Read and return the value of a key; None if the key has no value.

        Raises
        ------
        ChecksumError
            Every copy that could be read is damaged.
        NodeError, NodeTimeoutError
            The node cannot be reached.
        ReplicationError
            With `replicas`: the nodes that cannot be reached may have all copies of the value.
        """
        return read_one(self._cluster or self._open(), as_key(key), None)

    def get_into(self, key: Key, buffer: Value) -> int | None:
        """Read a value into a buffer.

        Returns
        -------
        int or None
            Size of the value in bytes; None if there is no value. Without a value, and after an error, the contents of
            the buffer are unspecified.

        Raises
        ------
        ValueError
            The buffer is smaller than the value.
        ChecksumError, NodeError, NodeTimeoutError, ReplicationError
            As raised by `get`.
        """
        return read_one(self._cluster or self._open(), as_key(key), as_target(buffer))

    def get_into_parts(self, key: Key, buffers: Iterable[Buffer]) -> int | None:
        """Fill buffers with a value, one after the other; together they must be large enough. See `get_into`."""
        return self.get_into(key, tuple(buffers))

    def exists(self, key: Key) -> bool:
        """Return True if a key has a value."""
        return self.lookup([key]).leading == 1

    def lookup(self, keys: Iterable[Key]) -> Lookup:
        """Find out which keys have a value and how large the values are, with one request to each node.

        Raises
        ------
        NodeError, ReplicationError
            As raised by `get`.
        """
        cluster = self._open()
        return Lookup(cast("Sequence[int | None]", look_up(cluster, as_keys(keys), cluster.deadline())))

    def stat(self, key: Key) -> ObjectInfo | None:
        """Return size, time to live and pins of a value on the first node that has it; None if the key has no value."""
        cluster, data = self._open(), as_key(key)
        (found,) = results(fetch(cluster, [data], cluster.deadline(), Op.STAT), [data])
        if found is None:
            return None
        meta = found[1].meta
        nbytes, _, pins = STATED.unpack_from(meta)
        ttl, copies, _, _, _, _, flags = HEAD.unpack_from(meta, STATED.size)
        return ObjectInfo(data, nbytes, seconds_left(ttl), copies, pins, bool(flags & KEPT), priority_in(flags))

    def drop(self, key: Key) -> bool:
        """Drop a key's value; return True if there was one.

        All nodes that can be reached hide the value at once, and free its memory when no program has the value pinned
        any more. A node that cannot be reached, or is no member at the moment, keeps its copy: readers may find the
        value again when the node comes back.
        """
        cluster, data = self._open(), as_key(key)
        return everywhere(cluster, Op.DROP, [data], cluster.deadline()).copies[0] > 0

    def touch(self, key: Key, ttl: float | None, *, keep: bool | None = None) -> bool:
        """Let a value live for `ttl` seconds from now, or without a limit; return True if the key has a value.

        Parameters
        ----------
        key : str or bytes
            The key.
        ttl : float or None
            Seconds from now, or None for no limit. If the value already has a longer time, it keeps that time.
        keep : bool or None
            True: nodes never evict the value. False: nodes may evict the value again, and `ttl` counts even if it is
            shorter. None: the earlier setting stays.
        """
        return self._touch([key], ttl, keep, copies=1).copies[0] > 0

    def touch_many(
        self,
        keys: Iterable[Key],
        ttl: float | None,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        """Touch many values at the same time, and return how many copies were touched; see `touch`.

        Parameters
        ----------
        keys : iterable of str or bytes
            The keys.
        ttl : float or None
            As for `touch`.
        keep : bool or None
            As for `touch`.
        seen : sequence of mapping, optional
            The ``marks`` of an earlier touch of the same keys. Nodes then touch only the copies that these marks name.
            A node refuses a copy if, after that touch, another touch gave the copy a `keep` of True or False, or more
            time to live. With `keep` True, the node touches such a copy nevertheless if it keeps the copy now.

        Raises
        ------
        QuotaExceededError
            With `keep` True: the tenant's quota of bytes that are never evicted is too small for enough copies of a
            value.
        """
        return self._touch(keys, ttl, keep, copies=self.confirming if keep else 1, seen=seen)

    def _touch(
        self,
        keys: Iterable[Key],
        ttl: float | None,
        keep: bool | None,
        *,
        copies: int,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        cluster = self._open()
        arguments = TOUCH.pack(ttl_of(ttl), 0 if keep is None else 1 if keep else 2)
        metas = [arguments + as_key(key) for key in keys]
        return everywhere(cluster, Op.TOUCH, metas, cluster.deadline(), copies=copies, seen=seen)

    def retain(
        self, keys: Iterable[Key], priority: int, *, session: Key | None = None, ttl: float | None = None
    ) -> list[int]:
        """Let nodes evict values later than values of a lower priority; return how many copies each value has.

        A node evicts the values of the lowest priority that it has, and of these the ones that are needed least. So
        retained values are evicted, too, if a tenant's share is full of them: nothing waits for their sessions. To hold
        a value in any case, use `pin` or `touch` with `keep`. Nodes forget priorities when they restart.

        Parameters
        ----------
        keys : iterable of str or bytes
            The keys.
        priority : int
            0 to 7; replaces the value's priority. 0 is the priority of a value that is not retained.
        session : str, bytes or None
            Name of what needs the values, such as a conversation; replaces the value's session. When any program of the
            tenant calls `end_session`, the values lose their priority. None: no session ends it.
        ttl : float or None
            Seconds after which the priority ends; the values stay. None for no end.

        Returns
        -------
        list of int
            For each key, the number of copies that have the priority now. Nodes of earlier releases have none.

        Raises
        ------
        ConfigError
            The priority, the session's name or the time is wrong.
        NodeError
            No node could be asked, or the nodes refuse.
        """
        cluster, checked = self._open(), as_keys(keys)
        level, number, ttl_ms = checked_priority(priority), session_number(session), ttl_of(ttl)
        return results(retain(cluster, checked, level, number, cluster.deadline(), ttl_ms=ttl_ms), checked)

    def end_session(self, session: Key) -> int:
        """End a session of `put` or `retain`: its values are no longer retained. They stay until nodes evict them.

        Returns
        -------
        int
            Number of copies that the session has retained.

        Raises
        ------
        NodeError
            A node could not be asked. The session has ended on the others.
        """
        cluster = self._open()
        ended, failed = end_session(cluster, session_number(session), cluster.deadline())
        if failed is not None:
            raise failed
        return ended

    def pin(self, key: Key, *, ttl: float | None = None) -> Pin:
        """Hold a value in memory, and return a view of its bytes.

        The view shows the memory of a node of this host if possible, otherwise a copy.

        Parameters
        ----------
        key : str or bytes
            The key.
        ttl : float or None
            Seconds after which the pin ends by itself; None for as long as the program runs. When the pin has ended, do
            not use arrays or tensors that were made from its view.

        Raises
        ------
        KeyError
            The key has no value.
        """
        (held,) = self.pin_many([key], ttl=ttl)
        if held is None:
            raise KeyError(key)
        return held

    def pin_many(self, keys: Iterable[Key], *, ttl: float | None = None) -> Pins:
        """Hold many values in memory, with requests to all nodes at the same time; see `pin`.

        Parameters
        ----------
        keys : iterable of str or bytes
            The keys.
        ttl : float or None
            As for `pin`. If a program ends without a release, the nodes end its pins after this time at the latest.

        Returns
        -------
        Pins
            For each key its `Pin`, or None if the key has no value. As a context manager, it releases all pins.

        Raises
        ------
        NodeError, ReplicationError
            As raised by `get`. Nothing stays pinned then.
        """
        cluster = self._open()
        return pin_all(cluster, [as_key(key) for key in keys], ttl_of(ttl))

    def put_many(
        self,
        items: Mapping[Key, Value] | Iterable[tuple[Key, Value]],
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> list[PutOutcome]:
        """Put many values at the same time; see `put`."""
        cluster = self._open()
        pairs = items.items() if isinstance(items, Mapping) else items
        checked = [(as_key(key), as_payload(value)) for key, value in pairs]
        head, deadline, keys = _head(cluster, ttl, priority, session), cluster.deadline(), [key for key, _ in checked]
        outcomes = put(cluster, checked, head, deadline, check=check)
        if session is not None:
            stored = [key for key, one in zip(keys, outcomes, strict=True) if not isinstance(one, Exception)]
            retain(cluster, stored, priority, session_number(session), deadline, raises=True)
        return results(outcomes, keys)

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """Get many values at the same time; see `get`."""
        checked = as_keys(keys)
        cluster = self._open()
        values = read_many(cluster, checked, [None] * len(checked), cluster.deadline())
        return cast("list[bytes | None]", results(values, checked))

    def get_into_many(self, pairs: Iterable[tuple[Key, Value]]) -> list[int | None]:
        """Read many values into buffers at the same time; see `get_into`."""
        checked = [(as_key(key), as_target(buffer)) for key, buffer in pairs]
        cluster = self._open()
        keys = [key for key, _ in checked]
        sizes = read_many(cluster, keys, [into for _, into in checked], cluster.deadline())
        return cast("list[int | None]", results(sizes, keys))

    def best_effort(self) -> BestEffort:
        """Return calls for caches. Each call makes one short attempt, and returns errors in place of results."""
        return BestEffort(self._open)

    def objects(self, prefix: Key = "") -> Iterator[ObjectInfo]:
        """Iterate over the objects whose keys begin with `prefix`, in no particular order.

        An object that is put or dropped during the iteration may be returned or not.

        Raises
        ------
        ConfigError
            The prefix has more than 256 bytes.
        """
        return _each_once(listing(cluster := self._open(), as_prefix(prefix), cluster.deadline))

    def keys(self, prefix: Key = "") -> Iterator[bytes]:
        """Iterate over the stored keys that begin with `prefix`, in no particular order."""
        return (info.key for info in self.objects(prefix))

    def repair(self, *, bandwidth: float | None = None, progress: Callable[[int, int], None] | None = None) -> Repaired:
        """Restore missing copies, beginning with the objects that have the fewest copies.

        Copies on draining members count as missing, so a draining member can leave after its objects are repaired.

        Parameters
        ----------
        bandwidth : float or None
            Maximum bytes per second to copy; None for no limit.
        progress : callable or None
            Called with two counts: the objects processed so far, and all objects that lack copies.

        Returns
        -------
        Repaired
            Outcome of the sweep.

        Raises
        ------
        NodeError, ReplicationError
            The nodes that cannot be asked may have all copies of some object.
        """
        return repair(self._open(), bandwidth, progress)

    def publish(
        self, name: str, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None
    ) -> NameInfo:
        """Publish a value, or tensors, as the next version of a name.

        The name holds its objects: nodes never evict them, and they do not expire. Objects that the nodes have already
        are not sent again. The previous version stays for a minute, and longer while readers have it open.

        Parameters
        ----------
        name : str
            1 to 200 bytes of printable text.
        value : buffer, iterable of buffers, or mapping of str to tensors
            A value, an iterable of its parts, or tensors by name such as ``model.state_dict()``. Each part is sent
            before the iterable makes the next one. Each tensor becomes one object.
        expect : int, optional
            The version that the name must have now; 0 if nothing was published under it yet; None to accept any
            version.

        Returns
        -------
        NameInfo
            The new version.

        Raises
        ------
        NameHeldError
            Another writer holds the name.
        NameMovedError
            The name has another version than `expect`.
        QuotaExceededError
            The objects would exceed the tenant's quota of bytes that are never evicted.
        RegistryAwayError
            The registry could not make the new version current. If the error's `uncertain` is True, the registry may
            have made it current, or may still do so.
        NodeError
            The objects could not be stored.
        """
        return self._open_names().publish(name, value, expect=expect)

    def open(self, name: str, version: int | None = None) -> OpenedName:
        """Open a name for reading, and return the opened name, a context manager. The objects stay until it is closed.

        Parameters
        ----------
        name : str
            The name.
        version : int, optional
            An older version that is still held; None for the current version.

        Raises
        ------
        NameMissingError
            Nothing is published under the name, or that version is not held any more.
        NameLostError
            One of the version's objects is not on any node any more.
        RegistryAwayError
            The registry does not answer, and this program has not read the name before.
        """
        return self._open_names().open(name, version)

    def watch(self, name: str, after: int = 0) -> NameWatch:
        """Watch a name for versions above `after`; the current version may be the first. A context manager."""
        return self._open_names().watch(name, after)

    def list_names(self, prefix: str = "") -> list[NameInfo]:
        """Return the current version of each name that begins with a prefix, sorted by name."""
        return self._open_names().list_names(prefix)

    def history(self, name: str) -> list[NameInfo]:
        """Return the versions that were published under a name, at most the last hundred, oldest first."""
        return self._open_names().history(name)

    def unpublish(self, name: str, *, expect: int | None = None) -> NameInfo:
        """Remove a name. The last published version stays for a minute, and longer while programs read it.

        Raises
        ------
        NameMissingError
            Nothing is published under the name.
        NameHeldError, NameMovedError, RegistryAwayError
            As raised by `publish`.
        """
        return self._open_names().unpublish(name, expect=expect)

    def _open_names(self) -> Names:
        """Return the `Names` of this store; the first call opens the registry."""
        self._open()
        # Two threads must not open the registry twice, and `close` must find the names that one of them opens.
        with self._naming:
            if self._names is None:
                self._names = Names(self, self.registry, timeout=self._open().timeout)
            return self._names

    def rotate_tenant(self) -> Rotation:
        """Make all earlier objects of the access key's tenant unreadable, for all programs.

        Pinned values stay in memory until they are released. An object whose put is under way may stay readable. If a
        node cannot be reached, the call repeats the request until the call's timeout. Such a node may still return old
        objects until a program sends it the new epoch (docs/store.md); `Rotation.complete` is False then.

        Raises
        ------
        AccessDeniedError
            The access key lacks the right ``admin`` or ``publish``.
        NodeError
            No node has confirmed the new epoch. Some nodes may have begun it nevertheless.
        """
        return rotate(self._open())

    def largest(self) -> int:
        """Return the size in bytes of the largest value that any of the nodes can hold."""
        cluster = self._open()
        met = cluster.reachable(cluster.deadline()).met
        return max(member.channel.welcome.largest for member in met if member.channel.welcome is not None)

    def nodes(self) -> list[NodeStatus]:
        """Ask each node for its state and counters."""
        cluster, statuses = self._open(), []
        for member in cluster.members:
            stats: dict[str, Any] | None = None
            error = ""
            try:
                stats = member.call("stats", cluster.deadline())
            except NodeError as failure:
                error = str(failure)
            failing, why = member.status()
            mapped, identity = member.channel.reader is not None, member.identity.hex()
            state = str(member.info.state)
            known = (identity, state, member.pace.seconds, member.pace.times_slow)
            statuses.append(NodeStatus(member.name, failing, error or why, mapped, stats, *known))
        return statuses

    def close(self) -> None:
        """Close all connections and all open names. Idempotent.

        With `replicas`, the store first restores missing copies of objects that this program has read, for at most
        `timeout` seconds. If the program has not released a pin, its node ends the pin after a grace period.
        """
        with self._naming:
            cluster, self._cluster = self._cluster, None
            names, self._names = self._names, None
        try:
            if names is not None:
                names.close()
        finally:
            if cluster is not None:
                if self._upkeep is not None:
                    # Before the connections are closed, because the last hits still need them.
                    self._upkeep.finish(cluster.deadline())
                cluster.close()
                if self._pacing is not None:
                    self._pacing.close()
                self._close_members()

    def __reduce__(self) -> str:
        raise TypeError("a store cannot be pickled; make one from the nodes' addresses where it is needed")


def _head(cluster: Cluster, ttl: float | None, priority: int, session: Key | None) -> bytes:
    """Return the head for a put.

    If there is a session, a second request gives the objects their priority. So a program that dies between the two
    requests leaves no priority that no session ends.
    """
    session_number(session)  # raises before anything is sent
    if session is not None and not priority:
        raise ConfigError("session is given with priority 0, expected a priority from 1 to 7", setting="session")
    first = 0 if session is not None else checked_priority(priority)
    checked_priority(priority)
    return object_head(ttl_of(ttl), cluster.redundancy.parts, first)


def _each_once(copies: Iterable[tuple[Member, ObjectInfo]]) -> Iterator[ObjectInfo]:
    seen: set[bytes] = set()
    for _, info in copies:
        if info.key not in seen:
            seen.add(info.key)
            yield info


# Weak, because a store that the program drops must not live until exit.
_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def _exiting() -> None:
    """Close stores that were left open, because their threads cannot run in an interpreter that ends."""
    for store in list(_STORES):
        store.close()


atexit.register(_exiting)
