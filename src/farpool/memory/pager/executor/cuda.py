"""Copies to and from CUDA devices, on one stream for each direction.

The copies wait for events of the program's streams. No call synchronizes the host with the device.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from farpool._native import Memory
from farpool.errors import ConfigError, UnsupportedError
from farpool.memory.pager.executor.capture import relax_thread, relaxed
from farpool.memory.pager.executor.copies import Copy
from farpool.sizes import format_size

__all__ = ["CudaArena", "CudaDevice", "CudaHost", "CudaStaging"]

_BOUNCE_BYTES = 16 << 20
"""Maximum bytes of device memory outside the arena that a move between overlapping ranges uses."""


class CudaArena:
    """The fast tier in the memory of the current GPU: one allocation of exactly the budget.

    Parameters
    ----------
    nbytes : int
        Bytes to allocate.

    Attributes
    ----------
    stream : torch.cuda.Stream
        Stream on which the arena was allocated. Earlier work on that stream may still use the same memory for tensors
        that the program has freed.

    Raises
    ------
    ConfigError
        The machine has no CUDA device, or the device has less free memory than `nbytes`.
    """

    kind = "hbm"
    page_locked = 0
    alignment = 512
    """Alignment in bytes, as torch aligns its own memory. With another alignment, cuBLAS may choose kernels whose
    results differ in some bits."""

    def __init__(self, nbytes: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use device='cpu'")
        try:
            with torch.inference_mode(False):
                self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            self.stream = torch.cuda.current_stream(self.tensor.device)
        except torch.cuda.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info()
            raise ConfigError(
                f"fast: {format_size(nbytes)} is more than the GPU's free memory ({format_size(free)}); "
                "give a smaller budget"
            ) from error
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()

    @property
    def limit(self) -> int:
        """Maximum size of the arena in bytes: the size with which it was made."""
        return self.tensor.numel()

    @property
    def touched(self) -> int:
        """Bytes of device memory that the arena holds."""
        return self.tensor.numel()

    def resize(self, nbytes: int) -> None:
        """Change the number of bytes in use. The allocation keeps its size, so the arena cannot grow beyond it.

        Raises
        ------
        ConfigError
            The size is larger than the allocation.
        """
        if nbytes > self.limit:
            raise ConfigError(
                f"fast: {format_size(nbytes)} is more than the arena was made with ({format_size(self.limit)}); "
                "on a GPU the budget can be lowered and raised again up to that"
            )
        self.nbytes = nbytes

    def release(self, streams: list[torch.cuda.Stream]) -> None:
        """Give the memory back. It is reused only after all work that is now queued on these streams has ended."""
        for stream in streams:
            self.tensor.record_stream(stream)
        self.tensor.untyped_storage().resize_(0)  # views of the tensor may live on, but hold no memory then


class CudaHost:
    """The ranges of host memory that are page-locked for a GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changing = threading.Lock()
        self._ranges: tuple[tuple[int, torch.Tensor], ...] = ()
        """Locked ranges, sorted by address. Each change makes a new tuple, because threads read it without the lock."""

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock a range that begins at a page boundary. Must not be called from a thread that computes.

        If the call fails, CUDA keeps the error for the calling thread, and torch would raise it after that thread's
        next kernel launch.

        Raises
        ------
        OSError
            The CUDA driver refuses to lock the range.
        """
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device), relaxed():
            status = runtime.cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            raise OSError(f"CUDA error {int(status)}, {runtime.cudaGetErrorString(status)}")
        _keep_from_children(address, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        with self._changing, torch.inference_mode(False):
            added = (address, torch.frombuffer(memory, dtype=torch.uint8))
            self._ranges = tuple(sorted((*self._ranges, added), key=lambda item: item[0]))

    def unlock(self, address: int) -> None:
        """Unlock the range that was locked at this address. No copy may be using the range."""
        with self._changing:
            # The range leaves the list before it is unlocked, because `tensor` reads the list without the lock.
            self._ranges = tuple(item for item in self._ranges if item[0] != address)
        with torch.cuda.device(self._device), relaxed():
            torch.cuda.cudart().cudaHostUnregister(address)  # fails only if the driver has been unloaded before

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a tensor whose memory is this part of one locked range."""
        start, memory = self._ranges[bisect_right(self._ranges, address, key=lambda item: item[0]) - 1]
        return memory[address - start : address - start + nbytes]


def _keep_from_children(address: int, nbytes: int) -> None:
    """Exclude a range of memory from the address space of forked children.

    Otherwise, on Linux kernels before 5.12, the parent's next write to a page after a fork could go to a copy of the
    page while the GPU still uses the old page. A child never uses that memory, because its pool is closed.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTFORK)


class CudaStaging:
    """Page-locked host memory of exactly `nbytes` bytes. The CUDA driver's own allocator would round the size up.

    Parameters
    ----------
    host : CudaHost
        Page-locks the memory for the GPU.
    nbytes : int
        Size of the memory in bytes.

    Raises
    ------
    ConfigError
        The memory cannot be page-locked.
    """

    def __init__(self, host: CudaHost, nbytes: int) -> None:
        self._host = host
        self._memory = Memory(nbytes)
        self._memory.touch(0, nbytes)
        self.address = self._memory.address
        self.nbytes = nbytes
        try:
            # We lock in another thread, because CUDA keeps an error for the thread that made the call, and the next
            # kernel launch of this thread would raise it.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(host.lock, self.address, nbytes).result()
        except OSError as error:
            raise ConfigError(
                f"{format_size(nbytes)} of host memory cannot be page-locked for the GPU: {error}; "
                "give a smaller budget, of which the blocks are smaller"
            ) from error

    def release(self) -> None:
        """Unlock the memory and give it back; no copy may be under way."""
        self._host.unlock(self.address)
        self._memory.release()


class _EventCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class _LostCopy:
    """A copy whose end cannot be detected, because CUDA raised an error before the copy's event was recorded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        raise self._error.with_traceback(None)  # otherwise the traceback would grow with each poll


class CudaDevice:
    """A CUDA device that copies on a stream for each direction.

    A fence is a list of events, one for each of the program's streams on which the pool has been used.

    Parameters
    ----------
    arena : CudaArena
        The arena.
    host : CudaHost
        The page-locked host memory to copy from and to.
    """

    def __init__(self, arena: CudaArena, host: CudaHost) -> None:
        self._arena = arena
        self._host = host
        self._device = arena.tensor.device
        self._into = torch.cuda.Stream(self._device)
        self._out = torch.cuda.Stream(self._device)
        self._users: dict[int, torch.cuda.Stream] = {arena.stream.cuda_stream: arena.stream}
        self._moved: torch.cuda.Event | None = None
        """Event after the latest move or fill in the arena; a stream that is used for the first time waits for it."""

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """All streams whose queued work may use the arena."""
        return [self._into, self._out, *self._users.values()]

    def begin_thread(self) -> None:
        relax_thread()

    def note_use(self) -> None:
        """Register the current stream, because the program is about to queue work on it that uses the arena.

        Raises
        ------
        UnsupportedError
            A CUDA graph is being captured on the current stream. The work would become part of the graph.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured: an operation on paged tensors cannot be part of it, because its "
                "operands are elsewhere when the graph is replayed; capture operations on plain tensors only"
            )
        self._current()

    def _current(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._users:
            self._users[stream.cuda_stream] = stream
            if self._moved is not None:
                stream.wait_event(self._moved)  # the known streams already wait for this event
        return stream

    def _forget_capturing(self) -> None:
        """Forget streams on which a CUDA graph is being captured: an event recorded there would belong to the graph.

        These streams have no unfinished work on the arena, because `torch.cuda.graph` synchronizes before a capture.
        `note_use` registers them again at their next use.
        """
        for number, stream in [*self._users.items()]:
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    del self._users[number]

    def fence(self) -> list[torch.cuda.Event]:
        self._forget_capturing()
        return [stream.record_event() for stream in self._users.values()]

    def passed(self, fence: object) -> bool:
        assert isinstance(fence, list)
        return all(event.query() for event in fence)

    def move(self, source: int, target: int, nbytes: int) -> None:
        with self._in_order():
            arena = self._arena.tensor
            if abs(target - source) >= nbytes:
                arena[target : target + nbytes].copy_(arena[source : source + nbytes])
                return
            starts = range(0, nbytes, _BOUNCE_BYTES)
            # Pieces go in the direction in which no write overwrites bytes that are still to be read.
            for start in starts if target < source else reversed(starts):
                size = min(_BOUNCE_BYTES, nbytes - start)
                # A device copy between ranges that overlap has no defined result, so each piece goes through memory of
                # its own.
                piece = arena[source + start : source + start + size].clone()
                arena[target + start : target + start + size].copy_(piece)

    def fill(self, place: int, nbytes: int, pattern: bytes) -> None:
        """Fill a range with a pattern of two bytes, after the program's earlier work and before its later work.

        The bounds of the range must be even.
        """
        with self._in_order():
            words = self._arena.tensor[place : place + nbytes].view(torch.int16)
            words.fill_(int.from_bytes(pattern, sys.byteorder, signed=True))

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Context in which queued work runs after the program's earlier work on the arena and before its later work."""
        # Work on a stream that is being captured would be done at each replay of the graph, and not now.
        stream = self._into if torch.cuda.is_current_stream_capturing() else self._current()
        for event in self.fence():
            stream.wait_event(event)
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            yield
        self._moved = stream.record_event()
        # All streams wait, because the program's next work on any of them may use the place that was moved to or from.
        for stream in self._users.values():
            stream.wait_event(self._moved)

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> Copy:
        return self._copy(
            self._into, self._arena.tensor[place : place + nbytes], self._host.tensor(host, nbytes), fence
        )

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> Copy:
        return self._copy(self._out, self._host.tensor(host, nbytes), self._arena.tensor[place : place + nbytes], fence)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, fence: object) -> Copy:
        assert isinstance(fence, list)
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            for event in fence:
                stream.wait_event(event)
            try:
                target.copy_(source, non_blocking=True)
                return _EventCopy(stream.record_event())
            except Exception as error:
                return _LostCopy(error)  # the copy may have been queued all the same
