"""The registry in an etcd cluster (version 3.4 or newer), for many hosts.

This module adds three promises to etcd's own.

First, a transaction is done only once, even if it is sent again because the reply was lost. Each stored value begins
with a *mark* of 16 bytes, and the mark begins with random bytes that identify the transaction. If the conditions of a
transaction fail at a second attempt, the marks in older revisions show whether the first attempt was done.

Second, the mark ends with a checksum of the entry. In earlier releases the mark is 16 random bytes, which readers
ignore. So earlier releases and this one can read each other's values.

Third, this module notices if the etcd was recreated under the same address, or restored from a backup: its replies then
have another cluster number, or a lower revision than earlier replies.
"""

from __future__ import annotations

import math
import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from farpool import forks
from farpool.abc.registry import Changes, Commit, Condition, Delete, Entry, Operation, Put, Registry, Snapshot, Watch
from farpool.cluster.registry.checks import (
    checked_key,
    checked_transaction,
    checked_ttl,
    checksum,
    damaged,
    deadline_of,
    no_lease,
)
from farpool.cluster.registry.gateway import ANSWER_TIMEOUT_S, Gateway, RefusedError, Stream
from farpool.cluster.registry.messages import (
    Compact,
    Compare,
    DeleteRequest,
    Empty,
    Header,
    KeyValue,
    LeaseAliveReply,
    LeaseReply,
    LeaseRequest,
    PutRequest,
    RangeReply,
    RangeRequest,
    RequestOp,
    TxnReply,
    TxnRequest,
    WatchCreate,
    WatchReply,
    WatchRequest,
)
from farpool.decoding import prepared
from farpool.errors import (
    RegistryAwayError,
    RegistryCompactedError,
    RegistryDamagedError,
    RegistryError,
    RegistryReplacedError,
)

__all__ = ["EtcdRegistry"]


class _Headed(Protocol):
    """A reply with a header, which has the number of the cluster that answered."""

    @property
    def header(self) -> Header: ...


_Answer = TypeVar("_Answer", bound=_Headed)

_MARK_BYTES = 16
_RANDOM_BYTES = 8
"""Number of random bytes at the beginning of a mark; they identify the transaction that wrote the value."""
_CHECKSUM = b"FPc1"
"""Bytes that follow the random bytes in a mark. They show that the CRC32 of the entry comes next.

Marks of earlier releases have more random bytes instead of these bytes and the CRC32.
"""
_PAGE_ENTRIES = 1000
_SILENCE_S = 2.0
"""If a watch has received no line for this many seconds, it checks that its member still reaches the majority."""
_NOT_FOUND, _FAILED_PRECONDITION, _OUT_OF_RANGE = 5, 9, 11  # codes of gRPC


class EtcdRegistry(Registry):
    """A registry in an etcd cluster.

    Parameters
    ----------
    *endpoints : (str, int)
        Host and port of each member. A call asks one after another until one answers.
    prefix : str
        Beginning of all keys in etcd; not empty.
    context : ssl.SSLContext, optional
        Settings of TLS, with the client's certificate if the cluster requires one.
    user, password : str
        Credentials for a cluster with authentication.
    timeout : float
        Seconds that a call may take, unless the call has a `timeout` of its own.
    """

    def __init__(
        self,
        *endpoints: tuple[str, int],
        prefix: str = "farpool/",
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        timeout: float = 5.0,
    ) -> None:
        where = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in endpoints)
        self.address = f"etcd://{where}/{prefix.rstrip('/')}"
        self._prefix = checked_key(prefix, "prefix")
        self._timeout = timeout
        self._gateway = Gateway(self.address, list(endpoints), context=context, user=user, password=password)
        # Threads set these two without a lock. A lost update only makes the check of the next reply less strict.
        self._seen = 0  # the highest revision in a reply
        self._cluster = 0  # the number of the cluster; 0 before the first reply

    def _call(self, path: str, request: msgspec.Struct, reply: type[_Answer], deadline: float) -> tuple[_Answer, bool]:
        """Send a request, and check which cluster answers.

        Return the reply, and True if etcd may have done an earlier attempt of this call, too.
        """
        # Read before the request, because replies to other threads' requests may raise it in the meantime.
        before = self._seen
        answer, uncertain = self._gateway.call(path, request, reply, deadline)
        reads = isinstance(answer, RangeReply | TxnReply)  # other replies have the revision of a single member
        self.check_header(answer.header, before if reads else 0)
        return answer, uncertain

    def check_header(self, header: Header, least: int = 0) -> None:
        """Raise RegistryReplacedError if a header comes from another cluster, or its revision is below `least`."""
        cluster = header.cluster_id or self._cluster
        self._cluster = self._cluster or cluster
        if cluster != self._cluster or header.revision < least:
            raise RegistryReplacedError(
                f"the registry {self.address} was replaced while this program had it open: cluster {self._cluster:x} "
                f"at revision {least} or later was expected, {cluster:x} at revision {header.revision} answered. The "
                "last changes may be lost; open the registry again",
                registry=self.address,
            )

    # Entries

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        request = RangeRequest(self._prefix + checked_key(key))
        reply = self._call("/v3/kv/range", request, RangeReply, deadline_of(timeout, self._timeout))[0]
        self._saw(reply.header.revision)
        return self._entry(reply.kvs[0]) if reply.kvs else None

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        revision, found = self._read(prefixes, deadline_of(timeout, self._timeout))
        return Snapshot(revision, tuple(map(self._entry, found)))

    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        entries: list[Entry] = []
        wrong: list[str] = []
        for found in self._read([""], deadline_of(timeout, self._timeout))[1]:
            try:
                entries.append(self._entry(found))
            except RegistryDamagedError as error:
                wrong.append(str(error))
        return tuple(entries), tuple(wrong)

    def _read(self, prefixes: Sequence[str], deadline: float) -> tuple[int, list[KeyValue]]:
        """Read all keys with these prefixes at one revision."""
        ranges = [_range_of(self._prefix + checked_key(prefix, "prefix", fewest=0)) for prefix in prefixes]
        while True:
            # One transaction reads the first page of each prefix, at one revision. The other pages name that revision.
            reads = tuple(RequestOp(request_range=RangeRequest(*one, limit=_PAGE_ENTRIES)) for one in ranges)
            reply = self._call("/v3/kv/txn", TxnRequest(success=reads), TxnReply, deadline)[0]
            revision = reply.header.revision
            self._saw(revision)
            found: list[KeyValue] = []
            try:
                for (_, end), response in zip(ranges, reply.responses, strict=True):
                    page = response.response_range or RangeReply()
                    found += page.kvs
                    while page.more:
                        following = RangeRequest(page.kvs[-1].key + b"\0", end, limit=_PAGE_ENTRIES, revision=revision)
                        page = self._call("/v3/kv/range", following, RangeReply, deadline)[0]
                        found += page.kvs
            except RefusedError as refusal:
                if refusal.code != _OUT_OF_RANGE:
                    raise
                continue  # the revision was compacted between two pages
            return revision, found

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        checked_transaction(conditions, operations)
        # If an earlier attempt of this transaction was done, its revision is above `before`.
        deadline, before, mark = deadline_of(timeout, self._timeout), self._seen, secrets.token_bytes(_RANDOM_BYTES)
        request = TxnRequest(
            tuple(self._compare(condition) for condition in conditions),
            tuple(self._operation(operation, mark) for operation in operations),
        )
        lease = next((one.lease for one in operations if isinstance(one, Put) and one.lease), 0)
        try:
            reply, uncertain = self._call("/v3/kv/txn", request, TxnReply, deadline)
        except RefusedError as refusal:
            if refusal.code != _NOT_FOUND:
                raise
            raise no_lease(self.address, lease) from refusal
        self._saw(reply.header.revision)
        if reply.succeeded or not uncertain:
            return Commit(reply.succeeded, reply.header.revision)
        done = self._done_before(operations, mark, reply.header.revision, before, deadline)
        return Commit(done > 0, done or reply.header.revision)

    def _done_before(
        self, operations: Sequence[Operation], mark: bytes, revision: int, before: int, deadline: float
    ) -> int:
        """Return the revision at which an earlier attempt of a transaction was done; 0 if none was done.

        The caller has found that the conditions of the transaction fail now. The mark identifies the transaction. If an
        earlier attempt was done, its revision is above `before` and at most `revision`.
        """
        for operation in operations:
            if isinstance(operation, Delete):
                continue
            at = revision
            while at > before:
                request = RangeRequest(self._prefix + operation.key.encode(), revision=at)
                try:
                    reply = self._call("/v3/kv/range", request, RangeReply, deadline)[0]
                except RefusedError:
                    break  # compacted
                if not reply.kvs:
                    break  # it was deleted, and etcd does not report when; another key may show it
                found = reply.kvs[0]
                if found.value[:_RANDOM_BYTES] == mark:
                    return found.mod_revision
                at = found.mod_revision - 1
            else:
                return 0
        raise RegistryAwayError(
            f"the registry {self.address} lost the reply to a transaction, and does not show whether it was done. "
            "Read the entries again to find out",
            registry=self.address,
            uncertain=True,
        )

    def watch(self, prefix: str, after: int) -> Watch:
        return _EtcdWatch(self, self._gateway, self._prefix + checked_key(prefix, "prefix", fewest=0), after)

    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        try:
            self._call("/v3/kv/compaction", Compact(revision), Empty, deadline_of(timeout, self._timeout))
        except RefusedError as refusal:
            # Another program, or an earlier attempt of this one, has compacted it.
            if "has been compacted" not in str(refusal):
                raise

    # Leases

    def grant(self, ttl: float, *, timeout: float | None = None) -> int:
        # We choose the number, so a request that is sent again does not grant a second lease.
        number = secrets.randbelow(2**62) + 1
        # etcd counts whole seconds. A lease may last longer than the program asked, and never less.
        request = LeaseRequest(number, math.ceil(checked_ttl(ttl)))
        try:
            self._call("/v3/lease/grant", request, LeaseReply, deadline_of(timeout, self._timeout))
        except RefusedError as refusal:
            if refusal.code != _FAILED_PRECONDITION:  # this code shows that an earlier attempt was done
                raise
        return number

    def keep_alive(self, lease: int, *, timeout: float | None = None) -> float:
        deadline = deadline_of(timeout, self._timeout)
        reply = self._call("/v3/lease/keepalive", LeaseRequest(lease), LeaseAliveReply, deadline)[0]
        if reply.result.TTL <= 0:
            raise no_lease(self.address, lease)
        return float(reply.result.TTL)

    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        deadline = deadline_of(timeout, self._timeout)
        reply = self._call("/v3/lease/timetolive", LeaseRequest(lease), LeaseReply, deadline)[0]
        if reply.TTL < 0:
            raise no_lease(self.address, lease)
        return float(reply.TTL)

    def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        try:
            self._call("/v3/lease/revoke", LeaseRequest(lease), Empty, deadline_of(timeout, self._timeout))
        except RefusedError as refusal:
            if refusal.code != _NOT_FOUND:
                raise

    def close(self) -> None:
        self._gateway.close()

    def _saw(self, revision: int) -> None:
        self._seen = max(self._seen, revision)

    def _entry(self, found: KeyValue) -> Entry:
        name, mark, value = found.key[len(self._prefix) :], found.value[:_MARK_BYTES], found.value[_MARK_BYTES:]
        key = name.decode(errors="surrogateescape")
        has_checksum = mark[_RANDOM_BYTES : _RANDOM_BYTES + len(_CHECKSUM)] == _CHECKSUM
        if has_checksum and int.from_bytes(mark[-4:], "little") != checksum(name, value):
            raise damaged(self.address, "does not match its checksum", key)
        return Entry(key, value, found.mod_revision, found.lease)

    def _compare(self, condition: Condition) -> Compare:
        key = self._prefix + condition.key.encode()
        if condition.revision:
            return Compare(key, "MOD", mod_revision=condition.revision)
        return Compare(key, "CREATE", create_revision=0)

    def _operation(self, operation: Operation, mark: bytes) -> RequestOp:
        key = self._prefix + operation.key.encode()
        if isinstance(operation, Delete):
            return RequestOp(request_delete_range=DeleteRequest(key))
        mark += _CHECKSUM + checksum(operation.key.encode(), operation.value).to_bytes(4, "little")
        return RequestOp(request_put=PutRequest(key, mark + operation.value, operation.lease))


class _EtcdWatch(Watch):
    """Watch that reads a stream of changes from one member, and from another if that member fails or is cut off."""

    def __init__(self, registry: EtcdRegistry, gateway: Gateway, prefix: bytes, after: int) -> None:
        self._registry = registry
        self._gateway = gateway
        self._prefix = prefix
        self._after = after
        self._stream: Stream | None = None
        self._heard = 0.0  # when the member last sent something
        self._closed = False
        forks.begin_again(self)

    def forked(self) -> None:
        """Close the forked child's copy of the stream. The child's next call begins a new stream.

        If parent and child read the same stream, each would miss the changes that the other has read.
        """
        self._close_stream()

    def next(self, timeout: float) -> Changes:
        address = self._registry.address
        began, rounds = time.monotonic(), 0
        deadline = deadline_of(timeout, 0.0)
        while True:
            if self._closed:
                raise RegistryError(f"this watch of {address} was closed", registry=address)
            try:
                stream = self._stream or self._begin(deadline)
            except ConnectionError:
                if time.monotonic() >= deadline:
                    raise self._gateway.away(began) from None
                self._gateway.pause(rounds, deadline)
                rounds += 1
                continue
            line = None
            try:
                line = stream.line(min(deadline, self._heard + _SILENCE_S))
                # A member that is cut off from the others sends nothing, and keeps the connection open.
                if line is None and time.monotonic() >= self._heard + _SILENCE_S:
                    self._ask(stream, deadline)
                elif line:
                    self._heard = time.monotonic()
                    changes = self._read(line, stream)
                    if changes is not None:
                        return changes
            except OSError as error:
                if isinstance(error, RegistryError):
                    raise
                self._gateway.failed(stream.endpoint, str(error) or type(error).__name__)
                self._close_stream()
            if line is None and time.monotonic() >= deadline and self._stream is not None:
                return Changes(self._after, ())

    def _begin(self, deadline: float) -> Stream:
        """Begin a stream at the first member that answers and reaches the majority."""
        start, end = _range_of(self._prefix)
        request = WatchRequest(WatchCreate(start, end, self._after + 1))
        # Even a call with a short timeout gets the time to begin a stream. Otherwise a loop of short calls would never
        # have one.
        until = max(deadline, time.monotonic() + ANSWER_TIMEOUT_S)
        for endpoint in self._gateway.endpoints():
            limit = min(ANSWER_TIMEOUT_S, until - time.monotonic())
            if limit <= 0:
                break
            try:
                stream = self._gateway.stream("/v3/watch", request, limit, endpoint)
            except ConnectionError:
                continue
            # A member without the majority begins a watch as well, and then reports nothing.
            try:
                self._ask(stream, until)
            except BaseException as error:
                stream.close()
                if isinstance(error, ConnectionError):
                    continue
                raise
            self._gateway.well(endpoint)
            self._stream = stream
            return stream
        raise ConnectionError

    def _ask(self, stream: Stream, deadline: float) -> None:
        """Read one key from the stream's member; raise ConnectionError if it does not reach the majority.

        The revision shows if the etcd was recreated. The stream does not show it: its member waits for the revision
        that the watch asked for.
        """
        limit = max(ANSWER_TIMEOUT_S / 10, min(2 * ANSWER_TIMEOUT_S, deadline - time.monotonic()))
        request = RangeRequest(self._prefix, limit=1)
        reply = self._gateway.ask_one(stream.endpoint, "/v3/kv/range", request, limit)
        if reply is None:
            raise ConnectionError(stream.endpoint.why)
        try:
            header = msgspec.json.decode(reply, type=prepared(RangeReply), strict=False).header
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"it sent a reply that no etcd sends: {error}") from error
        self._registry.check_header(header, self._after)
        self._heard = time.monotonic()

    def _read(self, line: bytes, stream: Stream) -> Changes | None:
        """Decode a line of the stream; return the changes in this line, or None if it has none."""
        try:
            reply = msgspec.json.decode(line, type=prepared(WatchReply), strict=False)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"it sent a line that no etcd sends: {error}") from error
        if reply.error is not None or reply.result is None:
            # The token may have expired, so the next stream begins with a new one.
            self._gateway.forget_token()
            raise ConnectionError(reply.error.message if reply.error else "it sent an empty line")
        result = reply.result
        self._registry.check_header(result.header)
        if result.compact_revision:
            self._close_stream()
            raise RegistryCompactedError(
                f"the registry {self._registry.address} keeps changes from revision {result.compact_revision} "
                f"on, expected changes after {self._after}; read the entries again and watch from there",
                registry=self._registry.address,
                oldest=result.compact_revision,
            )
        if result.canceled:
            self._gateway.forget_token()
            raise ConnectionError(result.cancel_reason or "it has cancelled the watch")
        entries = []
        for event in result.events:
            entry = self._registry._entry(event.kv)
            deleted = event.type == "DELETE"
            entries.append(Entry(entry.key, entry.value, entry.revision, entry.lease, deleted) if deleted else entry)
        if not entries:
            return None
        self._after = max(self._after, entries[-1].revision)
        return Changes(self._after, tuple(entries))

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        self._closed = True
        self._close_stream()


def _range_of(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the bounds of all keys that begin with a prefix: the prefix itself, and the first key after these keys.

    The second bound is the prefix with its last byte incremented. That is possible because UTF-8 has no byte 255.
    """
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])
