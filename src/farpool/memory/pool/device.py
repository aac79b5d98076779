"""Opens the fast tier on the device that computes, and makes the queue of the tier's transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool import _native
from farpool.ledger import Ledger
from farpool.memory.pager.storage import cut
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena

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
    """The arena of the fast tier, the queue of its transfers, and a function that releases the arena's memory.

    Attributes
    ----------
    watch : callable
        Function that makes debug mode's checker for a pager of this arena.
    staging : dict of str to int
        Bytes of host memory held in addition to the arena: the amounts that `Ledger.add` books, by name.
    """

    arena: HostArena | CudaArena
    queue: _native.Queue
    release: Callable[[], None]
    watch: Callable[[Pager], Watch]
    staging: dict[str, int] = field(default_factory=dict)


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
    arena = HostArena(config.fast)

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import HostMemory, Watch

        return Watch(pager, HostMemory(arena))

    return FastTier(arena, _native.Queue(), arena.release, watch)


def _cuda(config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
    from farpool.memory.pager.executor.cuda import CudaArena, CudaHost, CudaStaging
    from farpool.memory.pager.executor.page_locks import TierLocks

    arena = CudaArena(config.fast)
    host = CudaHost(arena.tensor.device)
    largest = cut(config.fast).largest
    nbytes = max(largest, min(_STAGED_BLOCKS * largest, _STAGING_BYTES_MAX))
    staging = CudaStaging(host, nbytes)
    device = _native.Cuda()
    queue = _native.DeviceQueue(device, staging.address, nbytes, TierLocks(device, tiers, ledger).native)

    def release() -> None:
        arena.release()
        staging.release()

    def watch(pager: Pager) -> Watch:
        from farpool.memory.debug import DeviceMemory, Watch

        return Watch(pager, DeviceMemory(queue.fill))

    booked = {"requested": nbytes, "reserved": nbytes, "page_locked": nbytes, "touched": nbytes}
    return FastTier(arena, queue, release, watch, booked)
