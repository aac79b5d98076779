"""An object that stays where it is while it is used."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from farpool._native import buffer_address, crc32c
from farpool.errors import ChecksumError, NodeError
from farpool.store.core import Core
from farpool.store.deadline import share_of
from farpool.store.reading import find, read
from farpool.transport.frames import OFFSET, PLACE, Op, Status

if TYPE_CHECKING:
    from farpool.store.member import Member

__all__ = ["Pin", "pin"]


class Pin:
    """A published object in memory; a context manager.

    On a node of this host the view is the node's memory itself, mapped, and the node keeps the object in its place
    until the pin is released, also when it is replaced or deleted meanwhile. From elsewhere it is a copy.

    Attributes
    ----------
    generation : int
        Of the object.
    is_mapped : bool
        Whether the view is the node's memory.
    """

    def __init__(self, key: bytes, generation: int, view: memoryview, crc: int | None, place: _Place | None) -> None:
        self.generation = generation
        self.is_mapped = place is not None
        self._key = key
        # Mapped memory is shown through an object of the pin's own, whose references tell whether any view is left.
        self._shown = _shown(view) if place is not None else view
        self._view: memoryview | None = self._look()
        self._crc = crc
        self._place = place

    @property
    def view(self) -> memoryview:
        """The object's bytes, read-only."""
        if self._view is None:
            raise ValueError(f"the pin of {self._key!r} was released")
        return self._view

    def verify(self) -> None:
        """Read all bytes and compare their checksum, which a mapped view is given without.

        Raises
        ------
        ChecksumError
            The bytes are not those that were published.
        """
        if self._crc is not None and crc32c(self.view) != self._crc:
            raise ChecksumError(f"{self._key!r}: the bytes of the pinned object are not those that were published")

    def release(self) -> None:
        """Let the object go. Idempotent.

        Raises
        ------
        BufferError
            Something made from the view (an array, a tensor) still uses it; the object stays pinned.
        """
        if self._view is None:
            return
        if self._place is not None and not self._let_go():
            raise BufferError(
                f"the pin of {self._key!r} cannot be released while arrays, tensors or views that were made from its "
                "view are in use; drop them first"
            )
        self._view = None
        if self._place is not None:
            self._place.release(self.generation)

    def _look(self) -> memoryview:
        return memoryview(self._shown).toreadonly().cast("B")

    def _let_go(self) -> bool:
        """Whether nobody but this object looks at the memory any more; if so, this object does not either."""
        assert self._view is not None
        try:
            self._view.release()
        except BufferError:
            return False
        alone = sys.getrefcount(self._shown) == 2  # that of this object, and the argument's
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
            error.add_note(str(held))  # the traceback itself may hold what was made from the view


def _shown(view: memoryview) -> Any:
    """The same memory as a buffer of its own, which keeps the mapping."""
    shown = (ctypes.c_ubyte * view.nbytes).from_address(buffer_address(view))
    shown.mapped = view  # type: ignore[attr-defined]
    return shown


class _Place:
    """Where an object is pinned."""

    __slots__ = ("_core", "_member", "_offset")

    def __init__(self, core: Core, member: Member, offset: int) -> None:
        self._core = core
        self._member = member
        self._offset = offset

    def release(self, generation: int, deadline: float | None = None) -> None:
        """Let the object go by the deadline, that of a call that begins now unless given."""
        until = self._core.deadline() if deadline is None else deadline
        # A node that cannot be reached frees the pin with the session.
        with contextlib.suppress(NodeError):
            self._member.exchange(Op.UNPIN, OFFSET.pack(self._offset), until, generation)


def pin(core: Core, key: bytes) -> Pin | None:
    """Pin the newest object of a key; None if there is none."""
    group, deadline = core.group(key), core.deadline()
    nodes, newest = list(group.nodes), 0
    if len(nodes) > 1:
        found = core.run(find(key, group, core.names, core.unconfirmed), deadline)
        if found is None:
            return None
        nodes, newest = found.nodes, found.generation
    for rank, node in enumerate(nodes, 1):
        # The others of the group can be read, if nothing else: only where there are none it may take all the time.
        until = share_of(deadline, last=rank == len(group.nodes))
        pinned = _pin_at(core, core.members[node], key, newest, until)
        if pinned is not None:
            return pinned
    reply = core.run(read(key, group, core.names, core.unconfirmed), deadline)
    return None if reply is None else Pin(key, reply.generation, memoryview(reply.payload or b""), None, None)


def _pin_at(core: Core, member: Member, key: bytes, newest: int, deadline: float) -> Pin | None:
    """Pin an object in mapped memory, if it is there and no older than `newest`."""
    try:
        reader = member.attach(deadline)
        if reader is None:
            return None
        reply = member.exchange(Op.PIN, key, deadline)
    except NodeError:  # what follows says whether another copy does
        return None
    if reply.status != Status.DONE:
        return None
    offset, nbytes, crc, _ = PLACE.unpack(reply.meta)
    place = _Place(core, member, offset)
    # New contact may have been made in between, with other files.
    if reply.generation < newest or member.channel.reader is not reader:
        place.release(reply.generation, deadline)
        return None
    return Pin(key, reply.generation, reader.view(offset, nbytes), crc, place)
