"""Pins: objects that stay where they are in memory while a program uses them."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from farpool._native import buffer_address, crc32c_many
from farpool.cluster.store.driver import run
from farpool.cluster.store.messages import Ask, results
from farpool.cluster.store.plan import Plan, Send
from farpool.cluster.store.reading import fetch
from farpool.cluster.wire.frames import PLACE, TTL, UNPIN, Op, Status
from farpool.errors import ChecksumError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["Pin", "Pins", "pin_all"]


class Pin:
    """A stored object that is held in memory, with a view of its bytes; a context manager.

    For a node of this host, the view is the node's memory itself, mapped. The node keeps the object where it is until
    the pin is released, even if the object is dropped or expires, or if the node leaves the list of members. For
    another node, the view is a copy.

    Attributes
    ----------
    is_mapped : bool
        True if the view is the node's memory itself, False if it is a copy.
    """

    def __init__(
        self, key: bytes, view: memoryview, crc: int | None, place: _Place | None, until: float = math.inf
    ) -> None:
        self.is_mapped = place is not None
        self._key = key
        self._until = until
        # The view of mapped memory is made from an object of this pin, whose reference count shows if a view is left.
        self._shown = _shown(view) if place is not None else view
        self._view: memoryview | None = self._look()
        self._crc = crc
        self._place = place

    @property
    def view(self) -> memoryview:
        """The object's bytes, read-only.

        Raises
        ------
        ValueError
            The pin was released, or its time to live is over.
        """
        if self._view is None:
            raise ValueError(f"the pin of {self._key!r} was released")
        if time.monotonic() >= self._until:
            raise ValueError(f"the pin of {self._key!r} has ended with its time to live; pin it again")
        return self._view

    def verify(self) -> None:
        """Read all bytes and compare their checksum. `Store.pin` does this for a copy, but not for a mapped view.

        Raises
        ------
        ChecksumError
            The bytes differ from the bytes that were put.
        """
        _verify([self])

    def release(self) -> None:
        """Release the object. Idempotent.

        Raises
        ------
        BufferError
            An array, a tensor or another view made from this view is still in use; the object stays pinned.
        """
        place = self._leave()
        if place is not None:
            place.release()

    def _leave(self) -> _Place | None:
        """Drop the view; return the object's place, which the node must unpin.

        Return None for a copy, or if the pin was released already.
        """
        if self._view is None:
            return None
        if self._place is not None and not self._let_go():
            raise BufferError(
                f"the pin of {self._key!r} cannot be released while arrays, tensors or views that were made from its "
                "view are in use; drop them first"
            )
        self._view = None
        return self._place

    def _look(self) -> memoryview:
        return memoryview(self._shown).toreadonly().cast("B")

    def _let_go(self) -> bool:
        """Drop this pin's view of the memory. If another object still uses the view, keep it and return False."""
        assert self._view is not None
        try:
            self._view.release()
        # Python releases no memoryview from which another object still exports its bytes.
        except BufferError:
            return False
        alone = sys.getrefcount(self._shown) == 2  # one reference of this pin, and one of the argument
        if not alone:
            self._view = self._look()
        return alone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except BufferError as held:
            if error is None:
                raise
            error.add_note(str(held))  # the traceback itself may refer to an array that was made from the view


class Pins(Sequence[Pin | None]):
    """Pins of several objects, in the order of the requested keys; a context manager that releases all of them.

    The item for a key without a value is None.
    """

    def __init__(self, pins: Sequence[Pin | None]) -> None:
        self._pins = list(pins)

    @overload
    def __getitem__(self, place: int) -> Pin | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[Pin | None]: ...
    def __getitem__(self, place: int | slice) -> Pin | list[Pin | None] | None:
        return self._pins[place]

    def __len__(self) -> int:
        return len(self._pins)

    def verify(self) -> None:
        """Read all bytes of all objects and compare their checksums. This is faster than `Pin.verify` for each object.

        Raises
        ------
        ChecksumError
            The bytes of an object differ from the bytes that were put; the message names its key.
        ValueError
            A pin was released, or its time to live is over.
        """
        _verify([pin for pin in self._pins if pin is not None])

    def release(self) -> None:
        """Release all objects, with requests to all nodes at the same time. Idempotent.

        Raises
        ------
        BufferError
            An array, a tensor or another view made from a pin's view is still in use. That object stays pinned; the
            others are released.
        """
        places: list[_Place] = []
        held: BufferError | None = None
        for pin in self._pins:
            try:
                place = None if pin is None else pin._leave()
            except BufferError as error:
                # The other pins are released nevertheless. The error is raised at the end.
                held = held or error
            else:
                if place is not None:
                    places.append(place)
        _release(places)
        if held is not None:
            raise held

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except BufferError as held:
            if error is None:
                raise
            error.add_note(str(held))


def _verify(pins: Sequence[Pin]) -> None:
    """Compare the checksums of mapped pins; copies were verified when they arrived."""
    views = [(pin, pin.view) for pin in pins]
    mapped = [(pin, view) for pin, view in views if pin._crc is not None]
    sums = crc32c_many([view for _, view in mapped])
    for (pin, _), crc in zip(mapped, sums, strict=True):
        pin.view  # noqa: B018 - raises if the pin ended while we read, because the bytes may have changed
        if crc != pin._crc:
            raise ChecksumError(f"{pin._key!r}: the bytes of the pinned object differ from those that were put")


def _shown(view: memoryview) -> Any:
    """Wrap the memory of a view in a new buffer object, which keeps the mapping alive."""
    shown = (ctypes.c_ubyte * view.nbytes).from_address(buffer_address(view))
    shown.mapped = view  # type: ignore[attr-defined]
    return shown


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a pinned object: its node, its offset on the node, and the identifying number of the pin."""

    cluster: Cluster
    member: Member
    offset: int
    number: int
    serial: int

    def release(self) -> None:
        """Have the node unpin the object."""
        _release([self])


def _release(places: Sequence[_Place]) -> None:
    """Have nodes unpin objects."""
    if places:
        # The answers do not matter: a node that cannot be reached ends the pins with the session.
        cluster = places[0].cluster
        asks = [Ask(one.member, Op.UNPIN, UNPIN.pack(one.offset, one.number), one.serial) for one in places]
        cluster.ask(asks, cluster.deadline())


def pin_all(cluster: Cluster, keys: Sequence[bytes], ttl_ms: int) -> Pins:
    """Pin objects in mapped memory, and copy the objects that are not in mapped memory.

    The result has None for a key without a value.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : sequence of bytes
        The keys.
    ttl_ms : int
        Milliseconds after which the nodes unpin the objects; 0 for as long as the program runs.
    """
    now = time.monotonic()
    deadline = cluster.deadline()
    # This time begins before the nodes' own, so that no view is used after its node has unpinned the object.
    until = now + ttl_ms / 1000 if ttl_ms else math.inf
    pins: list[Pin | None] = [None] * len(keys)
    lost: list[_Place] = []
    try:
        try:
            run(cluster, _pin(cluster, cluster.view(deadline), keys, pins, lost, ttl_ms, until), deadline)
        finally:
            _release(lost)  # with its own time, because the pins of this call may have taken all of theirs
        left = [number for number, pinned in enumerate(pins) if pinned is None]
        rest = [keys[number] for number in left]
        copies = fetch(cluster, rest, deadline) if rest else []
        for number, found in zip(left, results(copies, rest, len(keys) - len(left)), strict=True):
            if found is not None:
                pins[number] = Pin(keys[number], memoryview(found[1].payload or b""), None, None, until)
    except BaseException:
        Pins(pins).release()
        raise
    return Pins(pins)


def _pin(
    cluster: Cluster,
    view: Snapshot,
    keys: Sequence[bytes],
    pins: list[Pin | None],
    lost: list[_Place],
    ttl_ms: int,
    until: float,
) -> Plan[None]:
    """Pin objects in mapped memory, and store the pins in `pins`.

    The members are asked one after another, in the order for each key.

    If this process made contact with a node again while the node made a pin, the mapped memory may be outdated. Such a
    pin is appended to `lost`, and the caller releases it.
    """
    orders = [view.order(key) for key in keys]
    for rank in range(max(map(len, orders), default=0)):
        places = [(number, order[rank]) for number, order in enumerate(orders) if pins[number] is None]
        readers = [(number, member.channel.reader, member) for number, member in places]
        asked = [(number, reader) for number, reader, _ in readers if reader is not None]
        asks = [
            Ask(member, Op.PIN, TTL.pack(ttl_ms) + keys[number])
            for number, reader, member in readers
            if reader is not None
        ]
        if not asks:
            continue
        answers: Sequence[Reply | Exception] = yield Send(asks)
        for (number, reader), ask, reply in zip(asked, asks, answers, strict=True):
            if isinstance(reply, Exception) or reply.status != Status.DONE:
                continue
            offset, nbytes, crc, pin_number = PLACE.unpack(reply.meta)
            place = _Place(cluster, ask.member, offset, pin_number, reply.serial)
            if ask.member.channel.reader is reader:
                pins[number] = Pin(keys[number], reader.view(offset, nbytes), crc, place, until)
            else:  # there was new contact in between, and the node may have other files now
                lost.append(place)
