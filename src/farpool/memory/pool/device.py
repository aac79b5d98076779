"""Opens the fast tier on the device that computes, and makes the executor of the tier's transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool._native import Port
from farpool.available import available_memory
from farpool.errors import ConfigError
from farpool.ledger import Ledger
from farpool.memory.pager.executor.base import Executor
from farpool.memory.pager.executor.threads import ThreadExecutor
from farpool.memory.pager.storage import cut
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from farpool.sizes import format_size, share_bytes

if TYPE_CHECKING:
    from farpool.memory.debug import Watch
    from farpool.memory.pager import Pager
    from farpool.memory.pager.executor.cuda import CudaArena

__all__ = ["FastTier", "open_device"]

_STAGED_BLOCKS = 4
"""Number of blocks of the largest size for which staging memory has room. A fetch and a write-back between tier and
staging memory can then run at the same time as a fetch and a write-back between staging memory and device."""
_STAGING_BYTES_MAX = 1 << 30
"""Maximum bytes of staging memory, unless the largest block needs more."""


@dataclass(frozen=True, slots=True)
class FastTier:
    """The arena of the fast tier, the executor of its transfers, and a function that releases the arena's memory.

    Attributes
    ----------
    watch : callable
        Function that makes debug mode's checker for a pager of this arena.
    staging : dict of str to int
        Bytes of host memory held in addition to the arena: the amounts that `Ledger.add` books, by name.
    beside : callable, optional
        On a GPU: function that returns the bytes that torch has allocated and reserved there in addition to the arena.
    """

    arena: HostArena | CudaArena
    executor: Executor
    release: Callable[[], None]
    watch: Callable[[Pager], Watch]
    staging: dict[str, int] = field(default_factory=dict)
    beside: Callable[[], tuple[int, int]] | None = None


def open_device(config: PoolConfig, ports: list[Port], tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    """Allocate the fast tier on the configured device, and make the executor of its transfers.

    Parameters
    ----------
    ports : list of Port
        The tiers' native ports. The pool appends a port for each source file.
    tiers : sequence of Tier
        The lower tiers, open.
    ledger : Ledger
        Ledger on which the page-locked memory of the lower tiers is booked.

    Raises
    ------
    ConfigError
        The configured device does not exist or has too little memory.
    """
    if config.device == "cpu":
        return _host(config, ports)
    return _cuda(config, ports, tiers, ledger)


def _host(config: PoolConfig, ports: list[Port]) -> FastTier:
    arena = HostArena(_budget(config.fast, available_memory, HostArena.alignment))
    executor = ThreadExecutor(arena.address, ports)

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import HostMemory, Watch

        return Watch(pager, executor, HostMemory(arena))

    return FastTier(arena, executor, arena.release, watch)


def _cuda(config: PoolConfig, ports: list[Port], tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    from farpool.memory.pager.executor.cuda import CudaArena, CudaDevice, CudaHost, CudaStaging
    from farpool.memory.pager.executor.page_locks import PageLocks
    from farpool.memory.pager.executor.staged import StagedExecutor

    arena = CudaArena(_budget(config.fast, _free_on_gpu, CudaArena.alignment))
    host = CudaHost(arena.tensor.device)
    device = CudaDevice(arena, host)
    largest = cut(arena.nbytes).largest
    nbytes = max(largest, min(_STAGED_BLOCKS * largest, _STAGING_BYTES_MAX))
    staging = CudaStaging(host, nbytes)

    def release() -> None:
        arena.release(device.streams)
        staging.release()

    checked = None
    if config.debug:
        from farpool.memory.debug.checked_device import CheckedDevice

        checked = CheckedDevice(device)
    locks = PageLocks(host, tiers, ledger)
    executor = StagedExecutor(checked or device, staging.address, nbytes, ports, locks)

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import DeviceMemory, Watch

        assert checked is not None
        return Watch(pager, executor, DeviceMemory(device.fill), checked)

    booked = {"requested": nbytes, "reserved": nbytes, "page_locked": nbytes, "touched": nbytes}
    return FastTier(arena, executor, release, watch, booked, lambda: _torch_memory(arena))


def _budget(fast: int | str, free: Callable[[], int], alignment: int) -> int:
    """Return the bytes of the fast tier; a share, such as ``"80%"``, is taken of what `free` returns now."""
    if isinstance(fast, int):
        return fast
    left = free()
    nbytes = share_bytes(fast, left, alignment)
    if nbytes == 0:
        raise ConfigError(
            f"fast is {fast!r}, which is less than {alignment} bytes of the {format_size(left)} of memory that are "
            "free; give a larger share, or a size like '64MiB'",
            setting="fast",
        )
    return nbytes


def _free_on_gpu() -> int:
    """Return the bytes that are free on the current GPU. What torch has cached for itself does not count as free."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use device='cpu'")
    return torch.cuda.mem_get_info()[0]


def _torch_memory(arena: CudaArena) -> tuple[int, int]:
    """Return the bytes that torch's allocator has allocated and reserved on the arena's GPU, without the arena."""
    import torch

    device = arena.tensor.device
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    # The allocator rounds sizes up, so the arena may be some bytes more in its counts than in ours.
    return max(0, allocated - arena.limit), max(0, reserved - arena.limit)
