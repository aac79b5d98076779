"""Send the objects of a version before it is published.

1. The sender puts the objects with a time to live, small ones together. It skips objects that already have all their
   copies. It notes the mark of each copy.
2. It records the version's objects in the registry, in a publication that the writer holds.
3. It tells the nodes to keep the copies without a time limit. A node does so if the copy still has the noted mark, or
   is kept already.

A mark is a number that a node gives to a copy. The node changes the mark when it keeps or releases the copy, or gives
it more time to live. So a sweep finds a record of every kept object. If a writer was stopped for longer than its lease
and a sweep has released an object since, the writer cannot make nodes keep it (sweep.py). If a copy has another mark or
was evicted, the sender reads its mark again, sends the object again if it is gone, asks the registry whether the
writer's hold still exists, and tells the nodes again to keep the copies.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from farpool.cluster.names.context import Context
from farpool.cluster.names.manifest import Manifest, Piece, TensorEntry, encode_manifest
from farpool.cluster.names.records import (
    PART_OBJECTS_MAX,
    SWEEPER,
    Holder,
    NameRecord,
    Publication,
    decode,
    encode,
    hold_key,
    name_key,
    publication_key,
)
from farpool.cluster.names.sources import sources_of
from farpool.cluster.registry import Condition, Operation, Put
from farpool.cluster.roles import HeldRole, holder_of
from farpool.cluster.wire.content import content_key
from farpool.errors import NameHeldError, NameLostError, NameMovedError, RegistryLeaseError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BATCH_BYTES", "PAUSE_S", "PIECE_BYTES", "Sending", "clock", "wait_for_sweeper", "writer_lost"]

PIECE_BYTES = 64 << 20
"""Bytes of a piece of a value. Publishing a value in parts needs about this much memory."""
BATCH_BYTES = 4 << 20
"""Bytes of small objects that are sent together. Publishing tensors needs about this much memory."""
PAUSE_S = 0.05
"""Seconds between two checks whether another program has finished its sweep."""
_ATTEMPTS_MAX = 5
"""Number of attempts to make nodes keep copies that disappear or change their marks."""
_MARKS_TTL_S = 1.0
"""Time to live in seconds that we give in a touch that only reads marks. Sent objects have more time left, so such a
touch changes no mark."""


class Sending:
    """Sends the objects of one publication, and records them in the registry.

    Parameters
    ----------
    context : Context
        Settings of the names.
    name : str
        The name, for errors.
    quoted : str
        The name as quoted in the registry's keys.
    role : HeldRole
        The role of the name's writer.

    Attributes
    ----------
    publication : str
        Identifier of the publication.
    hold : Condition or None
        Condition that the writer's hold on the publication exists; None until the hold is recorded.
    keys : set of str
        Keys of the objects that were added so far.
    """

    def __init__(self, context: Context, name: str, quoted: str, role: HeldRole) -> None:
        self._context, self._store = context, context.store
        self._name, self._quoted = name, quoted
        self._role = role
        self.publication = secrets.token_hex(8)
        self.hold: Condition | None = None
        self.keys: set[str] = set()
        self._outgoing: dict[str, memoryview] = {}  # objects that are not sent yet
        self._outgoing_bytes = 0
        # Functions that return the bytes of objects that nodes do not keep yet.
        self._waiting: dict[str, Callable[[], Buffer]] = {}
        self._waiting_bytes = 0  # bytes of the parts that stay in memory because nodes do not keep them yet
        self._seen: dict[str, Mapping[bytes, int]] = {}  # marks of copies of sent objects, until nodes keep them
        self._parts = 0

    def send(self, value: Buffer | Iterable[Buffer] | Mapping[str, Any]) -> tuple[str, Manifest]:
        """Send all objects, the manifest last, and tell nodes to keep them; return the manifest's key and the manifest.

        Raises
        ------
        NameMovedError
            The writer's lease has ended.
        NameLostError
            Nodes evicted objects again and again, before the sender could tell them to keep the objects.
        TypeError, ValueError
            The value cannot be published.
        """
        if isinstance(value, Mapping):
            manifest = Manifest((), tuple(self._tensors(value)))
        else:
            manifest = Manifest(tuple(self._pieces(value)))
        content = encode_manifest(manifest)
        key = self._add(memoryview(content), lambda: content)
        self._keep_all()
        return key, manifest

    def _pieces(self, value: Buffer | Iterable[Buffer]) -> Iterator[Piece]:
        try:
            whole = memoryview(value)  # type: ignore[arg-type]
        except TypeError:
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise TypeError(
                    f"the value of {self._name!r} is a {type(value).__name__}, expected bytes, parts of them or tensors"
                ) from None
            for part in value:
                for cut in _cut(memoryview(part)):
                    yield Piece(self._add(cut, lambda cut=cut: cut), cut.nbytes)  # type: ignore[misc]
                    self._waiting_bytes += cut.nbytes
                    if self._waiting_bytes >= PIECE_BYTES:
                        self._keep_all()
            return
        for cut in _cut(whole):
            yield Piece(self._add(cut, lambda cut=cut: cut), cut.nbytes)  # type: ignore[misc]

    def _tensors(self, tensors: Mapping[Any, Any]) -> Iterator[TensorEntry]:
        for name, source in sources_of(tensors).items():
            content = memoryview(source.data())
            key = self._add(content, source.data) if content.nbytes else ""
            yield TensorEntry(name, source.dtype, source.shape, content.nbytes, key)
            del content  # free it before the next one is made

    def _add(self, content: memoryview, again: Callable[[], Buffer]) -> str:
        key = content_key([content])
        if key not in self.keys:
            self.keys.add(key)
            self._waiting[key] = again
            self._outgoing[key] = content
            self._outgoing_bytes += content.nbytes
            if len(self._waiting) == PART_OBJECTS_MAX:
                self._keep_all()
            elif self._outgoing_bytes >= BATCH_BYTES:
                self._send()
        return key

    def _send(self) -> None:
        """Send the objects collected so far, except objects that already have all their copies."""
        outgoing, self._outgoing = self._outgoing, {}
        self._outgoing_bytes = 0
        lacking = self._look(outgoing, self._context.orphan_ttl)
        if lacking:
            self._store.put_many([(key, outgoing[key]) for key in lacking], ttl=self._context.orphan_ttl, check=True)
            self._look(lacking, _MARKS_TTL_S)

    def _look(self, keys: Iterable[str], ttl: float) -> list[str]:
        """Ask nodes for the marks of objects' copies and note them; return the keys of objects that lack copies."""
        keys = list(keys)
        touched = self._store.touch_many(keys, ttl)
        self._seen.update(zip(keys, touched.marks, strict=True))
        return [key for key, there in zip(keys, touched.copies, strict=True) if there < self._store.confirming]

    def _keep_all(self) -> None:
        """Send the remaining objects, record all sent objects, then tell the nodes to keep these objects."""
        self._send()
        # Before the nodes keep anything: a sweep has to know every object that is kept.
        self._announce(list(self._waiting))
        left = list(self._waiting)
        for _ in range(_ATTEMPTS_MAX):
            copies = self._store.touch_many(left, None, keep=True, seen=[self._seen[key] for key in left]).copies
            left = [key for key, kept in zip(left, copies, strict=True) if kept < self._store.confirming]
            if not left:
                break
            for key in self._look(left, _MARKS_TTL_S):
                self._store.put_many([(key, self._waiting[key]())], ttl=self._context.orphan_ttl, check=True)
                self._look([key], _MARKS_TTL_S)
            self._check_hold()
        else:
            raise NameLostError(
                f"copies of the object {left[0]} of {self._name!r} disappear again and again before nodes can keep "
                "them; nothing was published. Lend more memory, or publish less",
                name=self._name,
                key=left[0],
            )
        self._waiting.clear()
        self._seen.clear()
        self._waiting_bytes = 0

    def _check_hold(self) -> None:
        """Raise NameMovedError if the writer's hold has ended. Otherwise the marks noted before this call are valid."""
        assert self.hold is not None
        entry = self._context.registry.get(self.hold.key, timeout=self._context.timeout)
        if entry is None or entry.revision != self.hold.revision:
            raise writer_lost(self._context, self._name, self._quoted)

    def _announce(self, keys: list[str]) -> None:
        """Record in the registry which objects the version will have."""
        timeout = self._context.timeout
        part = publication_key(self._quoted, self.publication, self._parts)
        operations: list[Operation] = [Put(part, encode(Publication.of(keys)))]
        # A program of an earlier release that sweeps ignores marks, so no publication may begin during its sweep.
        conditions = [Condition(part, 0), Condition(SWEEPER, 0)]
        if self.hold is None:
            hold = hold_key(self._quoted, self.publication, "writer")
            # Bound to the writer's lease, so a writer that dies holds its publication no longer than its lease.
            operations.append(Put(hold, encode(Holder(self._context.who)), self._role.lease))
        else:
            conditions.append(self.hold)
        deadline = time.monotonic() + timeout
        while True:
            try:
                done = self._role.commit(conditions, operations, timeout=timeout)
            except RegistryLeaseError as error:
                raise writer_lost(self._context, self._name, self._quoted) from error
            if done.succeeded:
                break
            if not wait_for_sweeper(self._context, self._name, deadline) and time.monotonic() >= deadline:
                raise writer_lost(self._context, self._name, self._quoted)
        self._parts += 1
        if self.hold is None:
            self.hold = Condition(hold, done.revision)


def writer_lost(context: Context, name: str, quoted: str) -> NameMovedError:
    """Return the error for a writer whose lease ended before the writer was done."""
    entry = context.registry.get(name_key(quoted), timeout=context.timeout)
    version = decode(entry.value, NameRecord, entry.key).version if entry else 0
    return NameMovedError(
        f"the lease of the writer of {name!r} has ended before the name was moved; "
        f"nothing was published, and the name has version {version}. Try again",
        name=name,
        version=version,
    )


def wait_for_sweeper(context: Context, name: str, deadline: float) -> bool:
    """If a program of an earlier release is sweeping, wait a little and return True; otherwise return False.

    Such programs sweep one at a time, under a role of their own, and release objects without looking at marks. They
    cannot read the format of a publication of this release, so they stop sweeping once the registry contains such a
    publication.

    Raises
    ------
    NameHeldError
        A program of an earlier release still sweeps at the deadline.
    """
    holder = holder_of(context.registry, SWEEPER, timeout=context.timeout)
    if holder is None:
        return False
    if time.monotonic() >= deadline:
        who, until = decode(holder.value, Holder, SWEEPER).who, time.time() + holder.seconds
        raise NameHeldError(
            f"the name {name!r} waits for {who}, a program of an earlier farpool that sweeps this registry until "
            f"{clock(until)}, longer if that renews its lease; try again when it has ended",
            name=name,
            holder=who,
            until=until,
        )
    time.sleep(PAUSE_S)
    return True


def clock(seconds: float) -> str:
    """Return a time in seconds since 1970 as text for people."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


def _cut(view: memoryview) -> Iterator[memoryview]:
    """Cut a value into pieces; an empty value gives one empty piece."""
    if not view.c_contiguous:
        raise ValueError(f"the value ({view.nbytes} bytes of shape {view.shape}) is not contiguous; copy it first")
    flat = view.cast("B") if view.nbytes else memoryview(b"")
    for begin in range(0, max(1, flat.nbytes), PIECE_BYTES):
        yield flat[begin : begin + PIECE_BYTES]
