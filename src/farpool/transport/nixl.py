"""One-sided reads and writes of a node's memory with NIXL: RDMA where there is RDMA, else what UCX finds.

NIXL knows no deadlines, and a transfer that was given up still writes into its buffer when a stopped peer goes on. So
transfers only ever touch *slabs*, registered memory that belongs to this module; the caller's bytes are copied. A slab
whose transfer did not end in time is set aside until it has ended. What a stopped node can hold in this way is bounded.
Nothing new begins in a region before writes that were given up there have ended: they could overtake it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from farpool._native import Memory
from farpool.errors import NodeError, NodeTimeoutError
from farpool.transport.nixl_agent import Agent

__all__ = ["Exposed", "OneSided", "Region"]

_SLAB_BYTES = 4 << 20
_MOST_SLABS = 16
"""Slabs for one node: transfers under way and such that were given up."""
_SLABS_A_TRANSFER = 2
"""One is copied while the other is under way."""
_PAUSE = 20e-6


@dataclass(frozen=True, slots=True)
class Exposed:
    """What a node says of memory that may be read and written one-sided.

    Attributes
    ----------
    metadata : bytes
        Its agent's.
    address : int
        Where the memory lies in the process that exposes it.
    nbytes : int
        Its length.
    """

    metadata: bytes
    address: int
    nbytes: int


class OneSided:
    """A program's one-sided way to the memory of one node. Thread-safe.

    Parameters
    ----------
    node : str
        The node's address, for errors.
    spin : float
        Seconds of looking for the end of a transfer before sleeping between looks.

    Raises
    ------
    ConfigError
        NIXL is not there.
    """

    def __init__(self, node: str, *, spin: float = 50e-6) -> None:
        self.node = node
        self.spin = spin
        self.agent = Agent(f"farpool-{secrets.token_hex(8)}", serves=False)
        self.slabs = _Slabs(self.agent, node)

    def attach(self, exposed: Exposed) -> Region:
        """Get at exposed memory.

        Raises
        ------
        NodeError
            The metadata is none that NIXL can use.
        """
        try:
            name = self.agent.meet(exposed.metadata)
        except Exception as error:
            raise NodeError(
                f"{self.node}: NIXL cannot use what the node says of its memory: {error}", node=self.node
            ) from error
        return Region(self, name, exposed)

    def close(self) -> None:
        """Give everything back. Nobody uses this object or its regions any more."""
        self.slabs.close()


class Region:
    """Memory of a node, as `OneSided.attach` gives it. Thread-safe."""

    def __init__(self, way: OneSided, name: str, exposed: Exposed) -> None:
        self._way = way
        self._name = name
        self._exposed = exposed

    @property
    def nbytes(self) -> int:
        """Length of the memory."""
        return self._exposed.nbytes

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        """Fill a writable, contiguous buffer of bytes from `offset` on.

        Parameters
        ----------
        offset : int
            Bytes from the beginning of the memory.
        into : memoryview
            Where to; unspecified after a failure, and never written once this call has ended.
        deadline : float
            Time of `time.monotonic`.

        Raises
        ------
        NodeTimeoutError
            It did not end in time.
        NodeError
            The node's end is gone, or the transfer failed: attach anew.
        """
        self._move(self._way.agent.native.NIXL_READ, offset, into, deadline)

    def write(self, offset: int, data: memoryview, deadline: float) -> None:
        """Copy a contiguous buffer of bytes to `offset`; raises as `read`, and what lies there then is unspecified.

        After `NodeTimeoutError` the bytes may still arrive, but before anything that is done with this memory later.
        """
        self._move(self._way.agent.native.NIXL_WRITE, offset, data, deadline)

    def close(self) -> None:
        """Let go of the memory. Nobody uses this object any more."""
        self._way.slabs.forget(self._name)

    def _move(self, operation: Any, offset: int, view: memoryview, deadline: float) -> None:
        if not 0 <= offset <= self.nbytes - view.nbytes:
            raise ValueError(f"{view.nbytes} bytes at offset {offset} lie outside of memory of {self.nbytes} bytes")
        is_read = operation == self._way.agent.native.NIXL_READ
        data = view.cast("B")
        pieces = deque(range(0, data.nbytes, _SLAB_BYTES))
        with self._way.slabs.borrow(min(len(pieces), _SLABS_A_TRANSFER), self._name, deadline) as slabs:
            idle, busy = deque(slabs), deque[tuple[_Slab, int]]()
            while pieces or busy:
                if pieces and idle:
                    slab, begin = idle.popleft(), pieces.popleft()
                    nbytes = min(_SLAB_BYTES, data.nbytes - begin)
                    if not is_read:
                        slab.bytes[:nbytes] = data[begin : begin + nbytes]
                    self._start(slab, operation, offset + begin, nbytes)
                    busy.append((slab, begin))
                    continue
                slab, begin = busy.popleft()
                self._finish(slab, deadline)
                if is_read:
                    piece = data[begin : begin + _SLAB_BYTES]
                    piece[:] = slab.bytes[: piece.nbytes]
                idle.append(slab)

    def _start(self, slab: _Slab, operation: Any, offset: int, nbytes: int) -> None:
        slab.region = self._name
        slab.is_written_out = operation == self._way.agent.native.NIXL_WRITE
        try:
            slab.transfer = self._way.agent.start(
                operation, slab.memory.address, self._exposed.address + offset, nbytes, self._name
            )
        except Exception as error:
            raise self._failure(error) from error

    def _finish(self, slab: _Slab, deadline: float) -> None:
        spin_until = time.monotonic() + self._way.spin
        try:
            while not self._way.slabs.has_ended(slab):
                now = time.monotonic()
                if now >= deadline:
                    raise NodeTimeoutError(
                        f"{self._way.node}: a one-sided transfer did not end in time", node=self._way.node
                    )
                if now >= spin_until:
                    time.sleep(_PAUSE)
        except NodeError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> NodeError:
        node = self._way.node
        return NodeError(f"{node}: a one-sided transfer failed: {error or type(error).__name__}", node=node)


class _Slab:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes = memoryview(memory).cast("B")
        self.transfer: int | None = None
        """Handle of the transfer that uses it."""
        self.region = ""
        """Name of the other end of the latest transfer."""
        self.is_written_out = False
        """Whether that was a write."""


class _Slabs:
    """The registered memory of one node's transfers; made as it is needed."""

    def __init__(self, agent: Agent, node: str) -> None:
        self._agent = agent
        self._node = node
        self._made = 0
        self._idle: list[_Slab] = []
        self._given_up: list[_Slab] = []
        self._leaving: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def borrow(self, count: int, region: str, deadline: float) -> Iterator[list[_Slab]]:
        """Slabs for transfers with a region: `count`, or fewer if only fewer are free; NodeTimeoutError if none is."""
        slabs: list[_Slab] = []
        try:
            with self._changed:
                while count and not self._take_into(slabs, count, region):
                    self._wait(deadline)
            yield slabs
        finally:
            with self._changed:
                for slab in slabs:
                    (self._idle if slab.transfer is None else self._given_up).append(slab)
                self._changed.notify_all()

    def has_ended(self, slab: _Slab) -> bool:
        """Whether the slab's transfer has ended; what NIXL raises if it has ended badly. The slab is then free."""
        assert slab.transfer is not None
        try:
            if not self._agent.is_done(slab.transfer):
                return False
        except BaseException:
            self._let_go(slab)
            raise
        self._let_go(slab)
        return True

    @property
    def given_up(self) -> int:
        """Slabs whose transfers did not end in time, and have not ended yet as far as is known."""
        return len(self._given_up)

    def forget(self, region: str) -> None:
        """Drop the other end of transfers, once those that were given up have ended: NIXL would lose sight of them."""
        with self._changed:
            self._leaving.add(region)
            self._recover()

    def close(self) -> None:
        """Give up everything. An agent that is gone has no connections through which bytes could still come."""
        with self._changed:
            for slab in self._given_up:
                self._let_go(slab)
            self._agent.close()
            self._given_up.clear()
            self._idle.clear()

    def _let_go(self, slab: _Slab) -> None:
        handle, slab.transfer = slab.transfer, None
        if handle is not None:
            self._agent.release(handle)

    def _take_into(self, slabs: list[_Slab], count: int, region: str) -> bool:
        self._recover()
        if any(slab.is_written_out and slab.region == region for slab in self._given_up):
            return False
        while len(slabs) < count:
            if self._idle:
                slabs.append(self._idle.pop())
            elif self._made < _MOST_SLABS:
                memory = Memory(_SLAB_BYTES)
                self._agent.register(memory.address, memory.nbytes)
                self._made += 1
                slabs.append(_Slab(memory))
            else:
                break
        return bool(slabs)

    def _recover(self) -> None:
        """Have back what was given up and has ended since."""
        for slab in list(self._given_up):
            with contextlib.suppress(Exception):  # ended badly is ended
                if not self.has_ended(slab):
                    continue
            self._given_up.remove(slab)
            self._idle.append(slab)
        for region in self._leaving - {slab.region for slab in self._given_up}:
            self._leaving.discard(region)
            with contextlib.suppress(Exception):  # NIXL has dropped it already
                self._agent.forget(region)

    def _wait(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise NodeTimeoutError(
                f"{self._node}: a one-sided transfer could not begin in time; {len(self._given_up)} of {_MOST_SLABS} "
                "pieces of memory are still held by transfers that did not end",
                node=self._node,
            )
        # Nobody tells when a transfer that was given up ends.
        self._changed.wait(min(seconds, 0.01) if self._given_up else seconds)
