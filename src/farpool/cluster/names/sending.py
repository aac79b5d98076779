"""Sending the objects of a version that is about to be published.

The sender puts objects with a time to live, small ones together, except those that already have all their copies. It
notes the mark that each copy then has. After that it records in the registry, in a publication with a hold of its
writer, which objects the version holds. Only then does it tell the nodes to keep the copies without an end; a node does
so if the copy still has its mark or is kept already. So a sweep finds a record of every kept object, and a writer that
was stopped for longer than its lease keeps no object that a sweep has released since (sweep.py). If a copy has another
mark or was evicted, the sender reads its mark again, sends the object again if it is gone, and has it kept once the
registry has confirmed that the writer's hold still exists.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from farpool.abc.objects import ObjectStore
from farpool.cluster.names.manifest import Manifest, Piece, TensorEntry, encode_manifest
from farpool.cluster.names.records import (
    PART,
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
from farpool.cluster.registry import Condition, Operation, Put, Registry
from farpool.cluster.wire.content import content_key
from farpool.errors import NameHeldError, NameLostError, NameMovedError, RegistryLeaseError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BATCH", "PAUSE", "PIECE", "Sending", "clock", "wait_for_sweeper", "writer_lost"]

PIECE = 64 << 20
"""Bytes of a piece of a value, and about the memory that it takes to publish a value that is given in parts."""
BATCH = 4 << 20
"""Bytes of small objects that are sent together, and about the memory that it takes to publish tensors."""
PAUSE = 0.05
"""Seconds between two checks of whether another program is done."""
_TRIES = 5
_A_LITTLE = 1.0
"""Time to live of touches that only read marks. Objects that were sent live longer, so such a touch changes no mark."""


class Sending:
    """Sends the objects of one publication, and records them in the registry.

    Parameters
    ----------
    store : ObjectStore
        Store that the objects are sent to.
    registry : Registry
        Registry in which the objects are recorded.
    name : str
        For errors.
    quoted : str
        The name in the registry's keys.
    writer : Condition
        Condition that the writer still holds the name.
    lease : int
        Lease of the writer.
    who : str
        The writer, for people.
    ttl : float
        Seconds that objects live whose name was never moved to them.
    timeout : float
        Seconds that a call of the registry may take.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: Registry,
        *,
        name: str,
        quoted: str,
        writer: Condition,
        lease: int,
        who: str,
        ttl: float,
        timeout: float,
    ) -> None:
        self._store, self._registry = store, registry
        self._name, self._quoted = name, quoted
        self._writer, self._lease, self._who = writer, lease, who
        self._ttl, self._timeout = ttl, timeout
        self.publication = secrets.token_hex(8)
        self.hold: Condition | None = None
        """The writer's hold on the publication, once there is one."""
        self.keys: set[str] = set()
        self._outgoing: dict[str, memoryview] = {}  # made, and not yet sent
        self._outgoing_bytes = 0
        self._waiting: dict[str, Callable[[], Buffer]] = {}  # sent, and not yet held: how to get the bytes again
        self._waiting_bytes = 0  # in memory for that reason
        self._seen: dict[str, Mapping[bytes, int]] = {}  # marks of copies of sent objects, until nodes keep them
        self._parts = 0

    def send(self, value: Buffer | Iterable[Buffer] | Mapping[str, Any]) -> tuple[str, Manifest]:
        """Send all objects, the manifest last, and have them held; return the manifest's key and the manifest.

        Raises
        ------
        NameMovedError
            The writer's lease has ended.
        NameLostError
            Objects are evicted again and again before they can be kept.
        TypeError, ValueError
            The value is not one that can be published.
        """
        if isinstance(value, Mapping):
            manifest = Manifest((), tuple(self._tensors(value)))
        else:
            manifest = Manifest(tuple(self._pieces(value)))
        content = encode_manifest(manifest)
        key = self._add(memoryview(content), lambda: content)
        self._hold_all()
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
                    if self._waiting_bytes >= PIECE:
                        self._hold_all()
            return
        for cut in _cut(whole):
            yield Piece(self._add(cut, lambda cut=cut: cut), cut.nbytes)  # type: ignore[misc]

    def _tensors(self, tensors: Mapping[Any, Any]) -> Iterator[TensorEntry]:
        for name, source in sources_of(tensors).items():
            content = memoryview(source.data())
            key = self._add(content, source.data) if content.nbytes else ""
            yield TensorEntry(name, source.dtype, source.shape, content.nbytes, key)
            del content  # before the next one is made

    def _add(self, content: memoryview, again: Callable[[], Buffer]) -> str:
        key = content_key([content])
        if key not in self.keys:
            self.keys.add(key)
            self._waiting[key] = again
            self._outgoing[key] = content
            self._outgoing_bytes += content.nbytes
            if len(self._waiting) == PART:
                self._hold_all()
            elif self._outgoing_bytes >= BATCH:
                self._send()
        return key

    def _send(self) -> None:
        """Send the collected objects that lack copies."""
        outgoing, self._outgoing = self._outgoing, {}
        self._outgoing_bytes = 0
        lacking = self._look(outgoing, self._ttl)
        if lacking:
            self._store.put_many([(key, outgoing[key]) for key in lacking], ttl=self._ttl, check=True)
            self._look(lacking, _A_LITTLE)

    def _look(self, keys: Iterable[str], ttl: float) -> list[str]:
        """Note the marks of objects' copies; return the keys of objects that lack copies."""
        keys = list(keys)
        touched = self._store.touch_many(keys, ttl)
        self._seen.update(zip(keys, touched.marks, strict=True))
        return [key for key, there in zip(keys, touched.copies, strict=True) if there < self._store.replicas]

    def _hold_all(self) -> None:
        """Send the remaining objects, record all sent objects as held, then tell the nodes to keep their copies."""
        self._send()
        self._announce(list(self._waiting))
        left = list(self._waiting)
        for _ in range(_TRIES):
            copies = self._store.touch_many(left, None, keep=True, seen=[self._seen[key] for key in left]).copies
            left = [key for key, kept in zip(left, copies, strict=True) if kept < self._store.replicas]
            if not left:
                break
            for key in self._look(left, _A_LITTLE):
                self._store.put_many([(key, self._waiting[key]())], ttl=self._ttl, check=True)
                self._look([key], _A_LITTLE)
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
        """Raise NameMovedError if the writer's hold has ended. If not, marks noted before this call are valid."""
        assert self.hold is not None
        held = self._registry.get(self.hold.key, timeout=self._timeout)
        if held is None or held.revision != self.hold.revision:
            raise writer_lost(self._registry, self._name, self._quoted)

    def _announce(self, keys: list[str]) -> None:
        """Record in the registry which objects the version will hold."""
        part = publication_key(self._quoted, self.publication, self._parts)
        operations: list[Operation] = [Put(part, encode(Publication.of(keys)))]
        conditions = [Condition(part, 0), Condition(SWEEPER, 0), self._writer]
        if self.hold is None:
            hold = hold_key(self._quoted, self.publication, "writer")
            operations.append(Put(hold, encode(Holder(self._who)), self._lease))
        else:
            conditions.append(self.hold)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                done = self._registry.commit(conditions, operations, timeout=self._timeout)
            except RegistryLeaseError as error:
                raise writer_lost(self._registry, self._name, self._quoted) from error
            if done.succeeded:
                break
            if not wait_for_sweeper(self._registry, self._name, deadline):
                mine = self._registry.get(self._writer.key, timeout=self._timeout)
                if mine is None or mine.revision != self._writer.revision or time.monotonic() >= deadline:
                    raise writer_lost(self._registry, self._name, self._quoted)
        self._parts += 1
        if self.hold is None:
            self.hold = Condition(hold, done.revision)


def writer_lost(registry: Registry, name: str, quoted: str) -> NameMovedError:
    """Return the error for a writer whose lease has ended before it was done."""
    entry = registry.get(name_key(quoted))
    version = decode(entry.value, NameRecord, entry.key).version if entry else 0
    return NameMovedError(
        f"the lease of the writer of {name!r} has ended before the name was moved; "
        f"nothing was published, and the name has version {version}. Try again",
        name=name,
        version=version,
    )


def wait_for_sweeper(registry: Registry, name: str, deadline: float) -> bool:
    """Wait a little if a program of an earlier release sweeps; return False if none does.

    Such programs sweep one at a time, under an entry with a lease, and release objects without looking at marks. They
    cannot read the format of a publication of this release, so they stop sweeping once there is one.

    Raises
    ------
    NameHeldError
        Such a program still sweeps at the deadline.
    """
    entry = registry.get(SWEEPER)
    if entry is None:
        return False
    if time.monotonic() >= deadline:
        who = decode(entry.value, Holder, SWEEPER).who
        with suppress(RegistryLeaseError):  # it has ended in between
            until = time.time() + registry.remaining(entry.lease)
            raise NameHeldError(
                f"the name {name!r} waits for {who}, a program of an earlier farpool that sweeps this registry until "
                f"{clock(until)}, longer if that renews its lease; try again when it has ended",
                name=name,
                holder=who,
                until=until,
            )
    time.sleep(PAUSE)
    return True


def clock(seconds: float) -> str:
    """Return a time of day for people."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


def _cut(view: memoryview) -> Iterator[memoryview]:
    """Cut a value into pieces; at least one, which may be empty."""
    if not view.c_contiguous:
        raise ValueError(f"the value ({view.nbytes} bytes of shape {view.shape}) is not contiguous; copy it first")
    flat = view.cast("B") if view.nbytes else memoryview(b"")
    for begin in range(0, max(1, flat.nbytes), PIECE):
        yield flat[begin : begin + PIECE]
