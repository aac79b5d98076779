"""Chooses the fast tier and what runs its transfers, by the device that computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool import _native
from farpool.config import PoolConfig
from farpool.executor.base import Executor
from farpool.executor.threads import ThreadExecutor
from farpool.storage import cut
from farpool.tiers.device import HostArena

if TYPE_CHECKING:
    from farpool.executor.cuda import CudaArena

__all__ = ["FastTier", "open_device"]

_STAGED = 4
"""Blocks in flight between host and device: one each way on either leg."""


@dataclass(frozen=True, slots=True)
class FastTier:
    """An arena, what runs its transfers, and how to give both back.

    Attributes
    ----------
    staging : dict of str to int
        Bytes of host memory held beside it, as booked on the ledger.
    """

    arena: HostArena | CudaArena
    executor: Executor
    release: Callable[[], None]
    staging: dict[str, int] = field(default_factory=dict)


def open_device(config: PoolConfig, ports: list[_native.Port]) -> FastTier:
    """Take the memory of the fast tier.

    Parameters
    ----------
    ports : list of Port
        The tiers' native ends; the pool appends to it.

    Raises
    ------
    ConfigError
        There is no such device, or it has less memory.
    """
    if config.device == "cpu":
        arena = HostArena(config.fast)
        return FastTier(arena, ThreadExecutor(arena.address, ports), arena.release)
    from farpool.executor.cuda import CudaArena, CudaDevice, CudaStaging
    from farpool.executor.staged import StagedExecutor

    device_arena = CudaArena(config.fast)
    nbytes = _STAGED * cut(config.fast).largest
    staging = CudaStaging(nbytes)

    def release() -> None:
        device_arena.release()
        staging.release()

    executor = StagedExecutor(CudaDevice(device_arena, staging), staging.address, nbytes, ports)
    booked = {"requested": nbytes, "reserved": nbytes, "page_locked": nbytes, "touched": nbytes}
    return FastTier(device_arena, executor, release, booked)
