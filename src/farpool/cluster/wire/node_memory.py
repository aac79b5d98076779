"""One-sided access to a node's memory over a fabric.

The program attaches to a segment when it first uses the segment, and again after a failed transfer.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farpool._native import Connection, crc32c
from farpool.abc.fabric import Endpoint, Exposed, Fabric, Region
from farpool.cluster.wire.frames import PLACE, TTL, UNPIN, Op, Status
from farpool.cluster.wire.lease import SEGMENT_HEADER_BYTES
from farpool.decoding import prepared
from farpool.errors import NodeError, NodeTimeoutError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["NodeMemory"]

_UNPIN_TIMEOUT_MIN_S = 0.1
"""Minimum seconds for an unpin, even if the deadline of the read has passed."""
_OBJECTS_LEASE = None
"""Used in place of a lease's number for the tenant's objects."""

# Never emptied: destructors of these objects would act on the parent's connections.
_of_parents: list[NodeMemory] = []


class NodeCalls(Protocol):
    """Interface for calls and connections to a node; `Channel` implements it."""

    @property
    def name(self) -> str:
        """The node's address, for errors."""
        ...

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """Make a call over the node's control connection."""
        ...

    def connection(self, deadline: float) -> AbstractContextManager[Connection]:
        """Borrow a data connection for the duration of a ``with`` block."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Attached:
    """A segment to which this program is attached: the node's description, and the region for access to it."""

    exposed: Exposed
    region: Region


class NodeMemory:
    """Leases and objects of one node, read and written one-sided. Thread-safe.

    Parameters
    ----------
    channel : NodeCalls
        Makes calls to the node, which describe its memory, and lends connections, over which objects are pinned. It
        moves no bytes of the memory.
    name : str
        The fabric's name.
    fabric : Fabric
        Fabric that moves the bytes. Its endpoint is opened at its first use.
    """

    def __init__(self, channel: NodeCalls, name: str, fabric: Fabric) -> None:
        self._channel = channel
        self._name = name
        self._fabric = fabric
        self._endpoint: Endpoint | None = None
        self._regions: dict[int | None, _Attached] = {}
        # Protects the endpoint and changes of the regions. Transfers look the regions up without it.
        self._attaching = threading.Lock()

    def read(self, lease: int, offset: int, into: memoryview, deadline: float) -> None:
        """Fill a buffer from a lease's memory. `offset` counts from the first byte after the segment's header.

        Raises
        ------
        NodeTimeoutError, NodeError
            As raised by `Region.read`, or the node cannot be reached or does not expose memory.
        AccessDeniedError, LeaseLostError
            The node does not let this program access the lease.
        """
        self._move(lease, deadline, lambda region: region.read(SEGMENT_HEADER_BYTES + offset, into, deadline))

    def write(self, lease: int, offset: int, data: memoryview, deadline: float) -> None:
        """Copy a buffer into a lease's memory. Raises the same errors as `read`."""
        self._move(lease, deadline, lambda region: region.write(SEGMENT_HEADER_BYTES + offset, data, deadline))

    def get(self, key: bytes, deadline: float, into: Buffer | None = None) -> tuple[bytes | None, int, int] | None:
        """Pin an object, read it one-sided, unpin it and verify its checksum. May also raise the errors of `read`.

        Returns
        -------
        tuple of bytes or None, int and int, or None
            Payload, serial, and size in bytes; the payload is None if `into` received it. The result is None in place
            of a tuple if the node did not pin the object (for example because the key has no value), or if the bytes do
            not match the checksum. The caller then asks the node over a connection.

        Raises
        ------
        ValueError
            `into` is too small.
        """
        with self._channel.connection(deadline) as connection:
            # The node takes no part in the read, so it must neither move nor evict the object until the unpin.
            pinned = connection.exchange(Op.PIN, TTL.pack(0) + key, deadline)
            if pinned.status != Status.DONE:
                return None
            offset, nbytes, checksum, number = PLACE.unpack(pinned.meta)
            payload = bytearray(nbytes) if into is None else memoryview(into).cast("B")
            view = memoryview(payload)[:nbytes]
            try:
                if 0 < nbytes <= len(payload):
                    self._move(_OBJECTS_LEASE, deadline, lambda region: region.read(offset, view, deadline))
            finally:
                # Sent even after the deadline: the node unpins when it gets to it.
                soon = max(deadline, time.monotonic() + _UNPIN_TIMEOUT_MIN_S)
                connection.exchange(Op.UNPIN, UNPIN.pack(offset, number), soon, serial=pinned.serial)
        if len(payload) < nbytes:
            raise ValueError(f"{key!r} has {nbytes} bytes, the buffer {len(payload)}")
        # Wrong bytes are no failure of the memory yet: the object may now be in other pages than the pages
        # that were registered with the hardware.
        if crc32c(view) != checksum:
            return None
        return bytes(view) if into is None else None, pinned.serial, nbytes

    def detach(self, lease: int | None) -> None:
        """Detach from a lease that is about to be released; None detaches from the tenant's objects."""
        attached = self._regions.pop(lease, None)
        if attached is not None:
            attached.region.close()

    def close(self) -> None:
        """Detach from everything. No transfer may be under way."""
        self._regions.clear()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def leave_to_parent(self) -> None:
        """Keep everything open in a forked child, because closing it would send bytes on the parent's connections."""
        _of_parents.append(self)

    def _move(self, lease: int | None, deadline: float, transfer: Callable[[Region], None]) -> None:
        attached = self._attached(lease, deadline)
        try:
            transfer(attached.region)
        except NodeTimeoutError:
            # The deadline has passed, so there is no time for a second attempt.
            raise
        except NodeError:
            # The process that exposes the memory may have been killed. A transfer may be done twice.
            transfer(self._attached(lease, deadline, failed=attached).region)

    def _attached(self, lease: int | None, deadline: float, failed: _Attached | None = None) -> _Attached:
        """Return an attached segment; attach to it first if necessary.

        `failed` is an earlier result of this function, with which a transfer failed. It is not returned again.
        """
        # Without the lock, because nearly all transfers find the segment attached.
        attached = self._regions.get(lease)
        if attached is not None and attached is not failed:
            return attached
        if not self._attaching.acquire(timeout=max(0.0, deadline - time.monotonic())):
            name = self._channel.name
            raise NodeTimeoutError(f"{name}: another thread did not get at the node's memory in time", node=name)
        try:
            # Another thread may have attached it while this one waited for the lock.
            attached = self._regions.get(lease)
            if attached is None or attached is failed:
                self.detach(lease)
                # We name the exposure that failed, because the node may still count it as alive.
                exposed = self._ask(lease, deadline, b"" if failed is None else failed.exposed.metadata)
                if self._endpoint is None:
                    self._endpoint = self._fabric.endpoint(self._channel.name)
                self._regions[lease] = attached = _Attached(exposed, self._endpoint.attach(exposed))
            return attached
        finally:
            self._attaching.release()

    def _ask(self, lease: int | None, deadline: float, failed: bytes) -> Exposed:
        answer = self._channel.call("expose", deadline, fabric=self._name, lease=lease, failed=failed)
        try:
            return msgspec.convert(answer, prepared(Exposed))
        except msgspec.ValidationError as error:
            node = self._channel.name
            raise ProtocolError(f"{node} did not say how its memory is reached: {error}", node=node) from error
