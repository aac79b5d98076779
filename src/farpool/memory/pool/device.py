"""Opens the fast tier on the device that computes, and makes the queue of the tier's transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool import _native
from farpool.errors import ConfigError, TierError
from farpool.ledger import Ledger
from farpool.memory.pager.executor.page_locks import TierLocks
from farpool.memory.pager.storage import cut
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from farpool.sizes import format_size

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
    """

    arena: HostArena | CudaArena
    queue: _native.TransferQueue
    release: Callable[[], None]
    watch: Callable[[Pager], Watch]
    staging: dict[str, int] = field(default_factory=dict)
    stream: Callable[[], int] | None = None


def open_device(config: PoolConfig, ports: Sequence[_native.Port], tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
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
    arena = HostArena(config.fast)

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import HostMemory, Watch

        return Watch(pager, HostMemory(arena))

    return FastTier(arena, _native.Queue(), arena.release, watch)


def _cuda(config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    from farpool.memory.pager.executor.cuda import CudaArena, current_stream

    arena = CudaArena(config.fast)
    index = arena.tensor.device.index
    try:
        cuda = _native.Cuda(index)
        staging = staging_bytes(config.fast)
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
