"""The fast tier in the memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakSet

import torch

from farpool.errors import ConfigError
from farpool.forks import ModuleLock
from farpool.sizes import format_size

__all__ = ["CudaArena", "current_stream", "free_bytes", "torch_bytes"]

_ARENAS: WeakSet[CudaArena] = WeakSet()
"""All arenas of this process."""
_GUARD = ModuleLock()
"""Held while `_ARENAS` is changed or gone through."""


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
        The machine has no CUDA device, the device has less free memory than `nbytes`, or torch cannot use it.
    """

    kind = "hbm"
    page_locked = 0
    alignment = 512
    """Alignment in bytes, as torch aligns its own memory. With another alignment, cuBLAS may choose kernels whose
    results differ in some bits."""

    def __init__(self, nbytes: int) -> None:
        _free_and_total()  # a GPU that torch cannot use at all is reported in other words than one that is full
        try:
            with torch.inference_mode(False):
                self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            self.stream = torch.cuda.current_stream(self.tensor.device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = _free_and_total()  # by now, torch has given back what it had cached
            raise ConfigError(
                f"fast: {format_size(nbytes)} does not fit: {format_size(free)} of the GPU's {format_size(total)} are "
                "free, this process and others have the rest; give a smaller budget or a share such as '80%', or end "
                "other processes on this GPU (nvidia-smi lists them)",
                setting="fast",
            ) from error
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()
        with _GUARD.lock:
            _ARENAS.add(self)

    @property
    def limit(self) -> int:
        """Maximum size of the arena in bytes: the size with which it was made."""
        return self.tensor.numel()

    @property
    def touched(self) -> int:
        """Bytes of device memory that the arena holds; 0 after `release`."""
        return self.tensor.untyped_storage().nbytes()

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

    def release(self, streams: Iterable[int]) -> None:
        """Give the memory back. It is reused only after all work that is now queued on these streams has ended."""
        for stream in streams:
            if stream != self.stream.cuda_stream:
                self.tensor.record_stream(self._stream(stream))
        self.tensor.untyped_storage().resize_(0)  # views of the tensor may live on, but hold no memory then

    def _stream(self, number: int) -> torch.cuda.Stream:
        device = self.tensor.device
        # For 0, `ExternalStream` would take any stream of torch's pool instead of the default stream.
        return torch.cuda.ExternalStream(number, device=device) if number else torch.cuda.default_stream(device)


def current_stream(index: int) -> Callable[[], int]:
    """Return a function that returns the calling thread's current stream on this device, as CUDA numbers it.

    Each operation on a paged tensor calls it, so it is torch's own function, which makes no stream object.
    """
    return partial(torch._C._cuda_getCurrentRawStream, index)


def free_bytes() -> int:
    """Return the bytes that are free on the current GPU. Memory that torch has cached does not count as free.

    Raises
    ------
    ConfigError
        The machine has no CUDA device, or torch cannot use it.
    """
    return _free_and_total()[0]


def _free_and_total() -> tuple[int, int]:
    if not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use device='cpu'")
    try:
        return torch.cuda.mem_get_info()
    except RuntimeError as error:  # for example, other processes have left no memory for a context
        raise ConfigError(
            f"device: 'cuda' was asked for, but torch cannot use the GPU: {str(error).splitlines()[0]}; end other "
            "processes on this GPU (nvidia-smi lists them), choose another one with torch.cuda.set_device, or use "
            "device='cpu'",
            setting="device",
        ) from error


def torch_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that torch's allocator has allocated and reserved on a GPU, without the arenas of all pools."""
    with _GUARD.lock:
        arenas = sum(arena.touched for arena in _ARENAS if arena.tensor.device == device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    # The allocator rounds sizes up, so the arenas may be some bytes more in its counts than in ours.
    return max(0, allocated - arenas), max(0, reserved - arenas)
