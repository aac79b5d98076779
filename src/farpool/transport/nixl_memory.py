"""A node's memory as a program reaches it with NIXL: attached when needed, and anew when its process was restarted."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from farpool._native import Connection, crc32c
from farpool.errors import NodeError, NodeTimeoutError, ProtocolError
from farpool.transport.frames import OFFSET, PLACE, Op, Status
from farpool.transport.lease import SEGMENT_HEADER_BYTES
from farpool.transport.nixl import Exposed, OneSided, Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["NodeMemory"]

_UNPIN_SECONDS = 0.1
"""Enough to leave a few bytes with the operating system."""
_OBJECTS = None
"""Stands for the tenant's objects where a lease's number may stand."""

_of_parents: list[NodeMemory] = []


class NodeCalls(Protocol):
    """Calls and connections to a node; a `Channel` is one."""

    @property
    def name(self) -> str:
        """The node's address, for errors."""
        ...

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """Ask the node over its control connection."""
        ...

    def connection(self, deadline: float) -> AbstractContextManager[Connection]:
        """A data connection for the time of a ``with`` block."""
        ...


class NodeMemory:
    """Leases and published objects of one node, read and written one-sided. Thread-safe.

    Parameters
    ----------
    channel : NodeCalls
        The way to the node for everything else.

    Opens nothing before it is needed; then `ConfigError` says that NIXL cannot be used here.
    """

    def __init__(self, channel: NodeCalls) -> None:
        self._channel = channel
        self._way: OneSided | None = None
        self._regions: dict[int | None, Region] = {}
        self._attaching = threading.Lock()
        self._changing = threading.Lock()

    def read(self, lease: int, offset: int, into: memoryview, deadline: float) -> None:
        """Fill a buffer from a lease's memory; `offset` counts from its first usable byte.

        Raises
        ------
        NodeTimeoutError
            It did not end in time. The buffer is unspecified, and not written any more.
        NodeError
            The node cannot be reached, or does not expose memory.
        AccessDeniedError, LeaseLostError
            The node does not let this program at the lease.
        """
        self._move(lease, deadline, lambda region: region.read(SEGMENT_HEADER_BYTES + offset, into, deadline))

    def write(self, lease: int, offset: int, data: memoryview, deadline: float) -> None:
        """Copy a buffer into a lease's memory; raises as `read`."""
        self._move(lease, deadline, lambda region: region.write(SEGMENT_HEADER_BYTES + offset, data, deadline))

    def get(self, key: bytes, deadline: float, into: Buffer | None = None) -> tuple[bytes | None, int, int] | None:
        """Read a published object: pinned, read one-sided, verified.

        Parameters
        ----------
        key : bytes
            Its key.
        deadline : float
            Time of `time.monotonic`.
        into : buffer, optional
            Where to; None makes new bytes.

        Returns
        -------
        tuple of bytes or None, int and int, or None
            Payload (None with `into`), generation and bytes. None where the node has to be asked: it has no such
            object, or what was read is not what it has.

        Raises
        ------
        ValueError
            `into` is too small.
        NodeTimeoutError, NodeError, AccessDeniedError
            As of `read`.
        """
        with self._channel.connection(deadline) as connection:
            pinned = connection.exchange(Op.PIN, key, deadline)
            if pinned.status != Status.DONE:
                return None
            offset, nbytes, checksum, _ = PLACE.unpack(pinned.meta)
            payload = bytearray(nbytes) if into is None else memoryview(into).cast("B")
            view = memoryview(payload)[:nbytes]
            try:
                if 0 < nbytes <= len(payload):
                    self._move(_OBJECTS, deadline, lambda region: region.read(offset, view, deadline))
            finally:
                # Said also when the time is over: the node unpins whenever it comes to it.
                soon = max(deadline, time.monotonic() + _UNPIN_SECONDS)
                connection.send(Op.UNPIN, OFFSET.pack(offset), soon, generation=pinned.generation)
            connection.receive(deadline)
        if len(payload) < nbytes:
            raise ValueError(f"{key!r} has {nbytes} bytes, the buffer {len(payload)}")
        # Wrong bytes are no failure of the memory yet: the object may lie in other pages by now than those that RDMA
        # hardware was told of.
        if crc32c(view) != checksum:
            return None
        return bytes(view) if into is None else None, pinned.generation, nbytes

    def forget(self, lease: int) -> None:
        """Let go of a lease that is given back."""
        region = self._regions.pop(lease, None)
        if region is not None:
            region.close()

    def close(self) -> None:
        """Let go of everything. No transfer is under way."""
        self._regions.clear()
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def leave_to_parent(self) -> None:
        """Keep everything as it is in a forked child: taking it down would speak on the parent's connections."""
        _of_parents.append(self)

    def _move(self, lease: int | None, deadline: float, transfer: Callable[[Region], None]) -> None:
        region = self._attached(lease, deadline)
        try:
            transfer(region)
        except NodeTimeoutError:
            raise
        except NodeError:
            # The process that exposes the memory may have been restarted. A transfer may be done twice.
            self._drop(lease, region)
            transfer(self._attached(lease, deadline))

    def _attached(self, lease: int | None, deadline: float) -> Region:
        region = self._regions.get(lease)
        if region is not None:
            return region
        if not self._attaching.acquire(timeout=max(0.0, deadline - time.monotonic())):
            name = self._channel.name
            raise NodeTimeoutError(f"{name}: another thread did not get at the node's memory in time", node=name)
        try:
            region = self._regions.get(lease)
            if region is None:
                exposed = self._ask(lease, deadline)
                if self._way is None:
                    self._way = OneSided(self._channel.name)
                region = self._way.attach(exposed)
                with self._changing:
                    self._regions[lease] = region
            return region
        finally:
            self._attaching.release()

    def _drop(self, lease: int | None, region: Region) -> None:
        with self._changing:
            if self._regions.get(lease) is not region:
                return  # another thread has
            del self._regions[lease]
        region.close()

    def _ask(self, lease: int | None, deadline: float) -> Exposed:
        answer: dict[str, Any] = self._channel.call("nixl_metadata", deadline, lease=lease)
        metadata, address, nbytes = (answer.get(name) for name in ("metadata", "address", "nbytes"))
        if not isinstance(metadata, bytes) or not isinstance(address, int) or not isinstance(nbytes, int):
            node = self._channel.name
            raise ProtocolError(
                f"{node} answered nixl_metadata with {sorted(answer)}, expected metadata, address and nbytes", node=node
            )
        return Exposed(metadata, address, nbytes)
