"""Memory of CUDA devices, and host memory that is page-locked for them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

import torch

from farpool._native import Memory
from farpool.errors import ConfigError
from farpool.memory.pager.executor.capture import relaxed
from farpool.sizes import format_size

__all__ = ["CudaArena", "CudaHost", "CudaStaging"]


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

    def release(self) -> None:
        """Wait for the device's work, which may still use the memory on any stream, and give the memory back."""
        torch.cuda.synchronize(self.tensor.device)
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
