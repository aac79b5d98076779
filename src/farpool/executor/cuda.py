"""A CUDA device as the end of staged transfers: a stream for each direction, events instead of synchronisation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from farpool import _native
from farpool.errors import ConfigError
from farpool.sizes import format_size

__all__ = ["CudaArena", "CudaDevice", "CudaStaging"]


class CudaArena:
    """The fast tier in the memory of a GPU: one allocation of exactly the budget.

    Parameters
    ----------
    nbytes : int
        Bytes to allocate.

    Raises
    ------
    ConfigError
        There is no CUDA device, or it has less free memory.
    """

    kind = "hbm"
    page_locked = 0

    def __init__(self, nbytes: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use device='cpu'")
        free, _ = torch.cuda.mem_get_info()
        if nbytes > free:
            raise ConfigError(
                f"fast: {format_size(nbytes)} is more than the GPU's free memory ({format_size(free)}); "
                "give a smaller budget"
            )
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()

    @property
    def limit(self) -> int:
        """Bytes that it can grow to: those it was made with."""
        return self.tensor.numel()

    @property
    def touched(self) -> int:
        """Bytes of device memory held."""
        return self.tensor.numel()

    def resize(self, nbytes: int) -> None:
        """Change the bytes in use. The allocation stays as it is, so it cannot grow beyond it.

        Raises
        ------
        ConfigError
            More than the arena was made with.
        """
        if nbytes > self.limit:
            raise ConfigError(
                f"fast: {format_size(nbytes)} is more than the arena was made with ({format_size(self.limit)}); "
                "on a GPU the budget can be lowered and raised again up to that"
            )
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the memory back. Nobody may look at it any more."""
        torch.cuda.synchronize()
        self.tensor = torch.empty(0, dtype=torch.uint8)


class CudaStaging:
    """Page-locked host memory of exactly the bytes asked for; the driver's own allocator would round them up."""

    def __init__(self, nbytes: int) -> None:
        self._memory = _native.Memory(nbytes)
        self._memory.touch(0, nbytes)
        self.address = self._memory.address
        self.nbytes = nbytes
        self.tensor = torch.frombuffer(memoryview(self._memory), dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0)
        if int(status) != 0:
            raise ConfigError(f"{format_size(nbytes)} of host memory cannot be page-locked: CUDA error {int(status)}")

    def release(self) -> None:
        """Unlock and give back. No copy may be under way."""
        torch.cuda.cudart().cudaHostUnregister(self.address)
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._memory.release()


class _EventCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class CudaDevice:
    """Copies on one stream for each direction. A fence is an event on every stream that has used the pool.

    Parameters
    ----------
    arena : CudaArena
    staging : CudaStaging
    """

    def __init__(self, arena: CudaArena, staging: CudaStaging) -> None:
        self._arena = arena
        self._staging = staging
        self._into = torch.cuda.Stream()
        self._out = torch.cuda.Stream()
        self._users: dict[int, torch.cuda.Stream] = {}

    def note_use(self) -> None:
        """The current stream has work queued that reads or writes the arena."""
        stream = torch.cuda.current_stream()
        self._users[stream.cuda_stream] = stream

    def fence(self) -> list[torch.cuda.Event]:
        self.note_use()
        events = []
        for stream in self._users.values():
            event = torch.cuda.Event()
            event.record(stream)
            events.append(event)
        return events

    def passed(self, fence: object) -> bool:
        assert isinstance(fence, list)
        return all(event.query() for event in fence)

    def move(self, source: int, target: int, nbytes: int) -> None:
        with self._in_order():
            bytes_of = self._arena.tensor
            bytes_of[target : target + nbytes].copy_(bytes_of[source : source + nbytes].clone())

    def fill(self, place: int, nbytes: int, pattern: bytes) -> None:
        """Fill a range with a pattern of two bytes, ordered with the program's work. Both bounds are even."""
        with self._in_order():
            words = self._arena.tensor[place : place + nbytes].view(torch.int16)
            words.fill_(int.from_bytes(pattern, sys.byteorder, signed=True))

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """What is queued inside comes after all that the program has queued on any stream, and before what it will."""
        current = torch.cuda.current_stream()
        for event in self.fence():
            current.wait_event(event)
        yield
        queued = torch.cuda.Event()
        queued.record(current)
        for stream in self._users.values():
            stream.wait_event(queued)

    def to_device(self, staging: int, place: int, nbytes: int, fence: object) -> _EventCopy:
        return self._copy(
            self._into,
            self._arena.tensor[place : place + nbytes],
            self._staging.tensor[staging : staging + nbytes],
            fence,
        )

    def to_host(self, place: int, staging: int, nbytes: int, fence: object) -> _EventCopy:
        return self._copy(
            self._out,
            self._staging.tensor[staging : staging + nbytes],
            self._arena.tensor[place : place + nbytes],
            fence,
        )

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, fence: object) -> _EventCopy:
        assert isinstance(fence, list)
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            for event in fence:
                stream.wait_event(event)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return _EventCopy(done)
