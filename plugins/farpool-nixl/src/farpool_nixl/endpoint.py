"""One-sided reads and writes of a node's memory with NIXL: RDMA where there is RDMA, else what UCX finds.

NIXL knows no deadlines, and a transfer that was given up still writes into its buffer when a stopped peer goes on. So
transfers only ever touch *slabs*, registered memory that belongs to this module; the caller's bytes are copied. A slab
whose transfer did not end in time is set aside until it has ended. What a stopped node can hold in this way is bounded.
Nothing new begins in a region before writes that were given up there have ended: they could overtake it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from farpool._native import Memory
from farpool.abc.fabric import Exposed
from farpool.errors import NodeError, NodeTimeoutError
from farpool_nixl.agent import Agent

__all__ = ["NixlEndpoint", "NixlRegion"]

_SLAB_BYTES = 4 << 20
_SLABS_MAX = 16
"""Most slabs for one node: those of transfers under way, and of transfers that were given up."""
_TRANSFER_SLABS = 2
"""Slabs of one transfer: one is copied while the other is under way."""
_SPIN_S = 50e-6
"""Seconds of looking for the end of a transfer before sleeping between looks."""
_PAUSE_S = 20e-6
_FAILURE = "a one-sided transfer failed"


class _Slab:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes = memoryview(memory).cast("B")
        self.transfer: int | None = None
        """Handle of the transfer that uses the slab; None while it is idle."""
        self.region = ""
        """Name of the other end of the latest transfer."""
        self.is_written_out = False
        """True if the latest transfer was a write."""


class NixlEndpoint:
    """A program's end of all transfers with one node, and its slabs, made as they are needed.

    Attributes
    ----------
    given_up : list
        Slabs whose transfers did not end in time, and have not ended yet as far as is known.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.agent = Agent(serves=False)
        self.given_up: list[_Slab] = []
        self._idle: list[_Slab] = []
        self._made = 0
        self._leaving: set[str] = set()
        self._changed = threading.Condition()

    def attach(self, exposed: Exposed) -> NixlRegion:
        """Open a segment that the node exposes."""
        with self.failing("NIXL cannot use what the node says of its memory"):
            return NixlRegion(self, self.agent.meet(exposed.metadata), exposed)

    def close(self) -> None:
        """Release the slabs and end the agent: without it there are no connections through which bytes could come."""
        with self._changed:
            for slab in self.given_up:
                self._release(slab)
            self.agent.close()
            self.given_up.clear()
            self._idle.clear()

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn exceptions of NIXL into `NodeError`."""
        try:
            yield
        except Exception as error:
            raise NodeError(f"{self.node}: {what}: {error or type(error).__name__}", node=self.node) from error

    @contextlib.contextmanager
    def borrow(self, count: int, region: str, deadline: float) -> Iterator[list[_Slab]]:
        """Lend `count` slabs for transfers with a region, fewer if only fewer are free; NodeTimeoutError if none is."""
        slabs: list[_Slab] = []
        try:
            with self._changed:
                while count and not self._take_into(slabs, count, region):
                    self._wait(deadline)
            yield slabs
        finally:
            with self._changed:
                for slab in slabs:
                    (self._idle if slab.transfer is None else self.given_up).append(slab)
                self._changed.notify_all()

    def has_ended(self, slab: _Slab) -> bool:
        """Return True if the slab's transfer has ended, which frees the slab. Raises as `Agent.is_done`."""
        assert slab.transfer is not None
        ended = True
        try:
            ended = self.agent.is_done(slab.transfer)
        finally:
            if ended:
                self._release(slab)
        return ended

    def forget(self, region: str) -> None:
        """Drop the other end of transfers, once those that were given up have ended: NIXL would lose sight of them."""
        with self._changed:
            self._leaving.add(region)
            self._recover()

    def _release(self, slab: _Slab) -> None:
        handle, slab.transfer = slab.transfer, None
        if handle is not None:
            self.agent.release(handle)

    def _take_into(self, slabs: list[_Slab], count: int, region: str) -> bool:
        self._recover()
        if any(slab.is_written_out and slab.region == region for slab in self.given_up):
            return False
        while len(slabs) < count:
            if self._idle:
                slabs.append(self._idle.pop())
            elif self._made < _SLABS_MAX:
                memory = Memory(_SLAB_BYTES)
                self.agent.register(memory.address, memory.nbytes)
                self._made += 1
                slabs.append(_Slab(memory))
            else:
                break
        return bool(slabs)

    def _recover(self) -> None:
        """Take back the slabs of transfers that were given up and have ended since."""
        for slab in list(self.given_up):
            with contextlib.suppress(Exception):  # ended badly is ended
                if not self.has_ended(slab):
                    continue
            self.given_up.remove(slab)
            self._idle.append(slab)
        for region in self._leaving - {slab.region for slab in self.given_up}:
            self._leaving.discard(region)
            with contextlib.suppress(Exception):  # NIXL has dropped it already
                self.agent.forget(region)

    def _wait(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise NodeTimeoutError(
                f"{self.node}: a one-sided transfer could not begin in time; {len(self.given_up)} of {_SLABS_MAX} "
                "pieces of memory are still held by transfers that did not end",
                node=self.node,
            )
        # Nobody tells when a transfer that was given up ends.
        self._changed.wait(min(seconds, 0.01) if self.given_up else seconds)


class NixlRegion:
    """A segment of a node, as `NixlEndpoint.attach` gives it."""

    def __init__(self, endpoint: NixlEndpoint, name: str, exposed: Exposed) -> None:
        self._endpoint = endpoint
        self._name = name
        self._exposed = exposed

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        """Read the segment from `offset` on into a buffer."""
        self._move(True, offset, into, deadline)

    def write(self, offset: int, data: memoryview, deadline: float) -> None:
        """Write a buffer to the segment at `offset`."""
        self._move(False, offset, data, deadline)

    def close(self) -> None:
        """Close the segment; the endpoint forgets it once its transfers have ended."""
        self._endpoint.forget(self._name)

    def _move(self, is_read: bool, offset: int, view: memoryview, deadline: float) -> None:
        end = self._exposed.nbytes
        if not 0 <= offset <= end - view.nbytes:
            raise ValueError(f"{view.nbytes} bytes at offset {offset} lie outside of memory of {end} bytes")
        data = view.cast("B")
        pieces = deque(range(0, data.nbytes, _SLAB_BYTES))
        with self._endpoint.borrow(min(len(pieces), _TRANSFER_SLABS), self._name, deadline) as slabs:
            idle, busy = deque(slabs), deque[tuple[_Slab, memoryview]]()
            while pieces or busy:
                if pieces and idle:
                    slab, begin = idle.popleft(), pieces.popleft()
                    piece = data[begin : begin + _SLAB_BYTES]
                    if not is_read:
                        slab.bytes[: piece.nbytes] = piece
                    slab.region, slab.is_written_out = self._name, not is_read
                    local, remote = slab.memory.address, self._exposed.address + offset + begin
                    with self._endpoint.failing(_FAILURE):
                        slab.transfer = self._endpoint.agent.start(is_read, local, remote, piece.nbytes, self._name)
                    busy.append((slab, piece))
                    continue
                slab, piece = busy.popleft()
                self._finish(slab, deadline)
                if is_read:
                    piece[:] = slab.bytes[: piece.nbytes]
                idle.append(slab)

    def _finish(self, slab: _Slab, deadline: float) -> None:
        node = self._endpoint.node
        spin_until = time.monotonic() + _SPIN_S
        while True:
            with self._endpoint.failing(_FAILURE):
                if self._endpoint.has_ended(slab):
                    return
            now = time.monotonic()
            if now >= deadline:
                raise NodeTimeoutError(f"{node}: a one-sided transfer did not end in time", node=node)
            if now >= spin_until:
                time.sleep(_PAUSE_S)
