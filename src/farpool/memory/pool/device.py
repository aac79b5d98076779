"""Opens the fast tier on the device that computes, and makes the queue of the tier's transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool import _native
from farpool.available import available_memory
from farpool.errors import ConfigError, TierError
from farpool.ledger import Ledger
from farpool.memory.pager.storage import cut
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from farpool.memory.tiers.page_locks import TierLocks
from farpool.sizes import format_size, share_bytes

if TYPE_CHECKING:
    from farpool.memory.debug import Watch
    from farpool.memory.pager import Pager
    from farpool.memory.tiers.cuda_arena import CudaArena

__all__ = ["FastTier", "open_device"]

_STAGED_BLOCKS = 4
"""Number of blocks of the largest size for which staging memory has room. A fetch and a write-back between tier and
staging memory can then run at the same time as a fetch and a write-back between staging memory and device."""
_STAGING_BYTES_MAX = 1 << 30
"""Maximum bytes of staging memory, unless the largest block needs more."""
_STAGING_BYTES_MIN = 4 << 20
"""Minimum bytes of staging memory: transfers are cut into chunks of this size."""


@dataclass(frozen=True, slots=True)
class FastTier:
    """The arena of the fast tier, the queue of its transfers, and a function that releases the arena's memory.

    Attributes
    ----------
    watch : callable
        Function that makes debug mode's checker for a pager of this arena.
    staging : dict of str to int
        Bytes of host memory held in addition to the arena: the amounts that `Ledger.add` books, by name.
    stream : callable or None
        Returns the device's stream on which the calling thread queues work. None if operations compute on the host.
    beside : callable, optional
        On a GPU: function that returns the bytes that torch has allocated and reserved there in addition to the arenas
        of this process's pools.
    bounce : callable, optional
        On a GPU: function that returns the bytes of device memory that the queue holds in addition to the arena. Blocks
        move through them to places that overlap their old ones.
    """

    arena: HostArena | CudaArena
    queue: _native.TransferQueue
    release: Callable[[], None]
    watch: Callable[[Pager], Watch]
    staging: dict[str, int] = field(default_factory=dict)
    stream: Callable[[], int] | None = None
    beside: Callable[[], tuple[int, int]] | None = None
    bounce: Callable[[], int] | None = None


def open_device(config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    """Allocate the fast tier on the configured device, and make the queue of its transfers.

    Parameters
    ----------
    tiers : sequence of Tier
        The lower tiers, open.
    ledger : Ledger
        Ledger on which the page-locked memory of the lower tiers is booked.

    Raises
    ------
    ConfigError
        The configured device does not exist or has too little memory.
    """
    return _host(config) if config.device == "cpu" else _cuda(config, tiers, ledger)


def _host(config: PoolConfig) -> FastTier:
    arena = HostArena(_budget(config.fast, available_memory, HostArena.alignment))

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import HostMemory, Watch

        return Watch(pager, HostMemory(arena))

    return FastTier(arena, _native.Queue(), arena.release, watch)


def _cuda(config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    from farpool.memory.tiers.cuda_arena import CudaArena, current_stream, free_bytes, torch_bytes

    arena = CudaArena(_budget(config.fast, free_bytes, CudaArena.alignment))
    index = arena.tensor.device.index
    try:
        cuda = _native.Cuda(index)
        staging = staging_bytes(arena.nbytes)
        queue = device_queue(cuda, staging, arena.stream.cuda_stream, tiers, ledger)
    except BaseException:
        arena.release([])
        raise

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import DeviceMemory, Watch

        return Watch(pager, DeviceMemory(arena.address, queue))

    return FastTier(
        arena,
        queue,
        lambda: arena.release(queue.streams()),
        watch,
        {"requested": staging, "reserved": staging, "page_locked": staging, "touched": staging},
        current_stream(index),
        lambda: torch_bytes(arena.tensor.device),
        lambda: queue.bounce,
    )


def staging_bytes(fast: int) -> int:
    """Return the bytes of page-locked host memory for transfers of a pool whose fast tier has `fast` bytes."""
    largest = cut(fast).largest
    return max(largest, min(_STAGED_BLOCKS * largest, _STAGING_BYTES_MAX), _STAGING_BYTES_MIN)


def device_queue(
    cuda: _native.Cuda,
    staging: int,
    allocating: int,
    tiers: Sequence[Tier],
    ledger: Ledger,
) -> _native.DeviceQueue:
    """Make the queue of a device's transfers, with page locks of the tiers' memory.

    Parameters
    ----------
    staging : int
        Bytes of page-locked host memory for transfers whose tier is not page-locked.
    allocating : int
        The stream on which the arena was allocated.

    Raises
    ------
    ConfigError
        The device refuses the staging memory or the streams.
    """
    locks = TierLocks(cuda, tiers, ledger)
    try:
        return _native.DeviceQueue(cuda, staging, allocating, locks.native)
    except TierError as error:
        raise ConfigError(
            f"the device cannot be used with {format_size(staging)} of page-locked host memory: {error}; free host "
            "memory, raise `ulimit -l`, or give a smaller budget, of which the blocks are smaller"
        ) from error


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
