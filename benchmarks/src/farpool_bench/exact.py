"""Measurement of the bytes that storages take in each tier, from the pool's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.stats import TierStats
from farpool.memory.tiers import Dram, Nvme, Tier

__all__ = ["Exact", "exact_sizes"]

_ROOM, _PAGE = 1 << 20, 4096


@dataclass(frozen=True, slots=True)
class Exact:
    """Bytes that one storage takes in each tier.

    Attributes
    ----------
    requested : int
        Size of the storage.
    arena, dram, nvme : int
        Bytes reserved in each tier while it lies there.
    dram_touched : int
        Memory behind it in the DRAM tier that the operating system had to back.
    page_locked : int
        Host memory that the pool locks into RAM for it; 0 where the fast tier is host memory itself.
    """

    requested: int
    arena: int
    dram: int
    dram_touched: int
    nvme: int
    page_locked: int


def exact_sizes(sizes: Sequence[int], folder: Path, device: str) -> tuple[Exact, ...]:
    """Put a storage of each size into a pool, evict it to a lower tier, and count the bytes it takes.

    Parameters
    ----------
    folder : Path
        Folder for the file of the NVMe tier.
    """
    return tuple(_exact(nbytes, folder, device) for nbytes in sizes)


def _exact(nbytes: int, folder: Path, device: str) -> Exact:
    arena, dram, locked = _taken(nbytes, Dram(2 * nbytes + _ROOM), device)
    _, nvme, _ = _taken(nbytes, Nvme(folder / "sizes", 2 * nbytes + _ROOM), device)
    return Exact(nbytes, arena, dram.reserved, dram.touched, nvme.reserved, locked)


def _taken(nbytes: int, tier: Tier, device: str) -> tuple[int, TierStats, int]:
    """Bytes taken in the arena, statistics of the lower tier after eviction, and bytes locked into RAM."""
    fast = (nbytes + _ROOM) // _PAGE * _PAGE
    with BlockPool(PoolConfig.make(fast, [tier], device=device)) as pool:
        storage = pool.allocate(nbytes)
        _fill(pool, storage)
        arena = pool.stats().fast.reserved
        locked = pool.ledger.total(tier="host").page_locked
        _fill(pool, pool.allocate(fast))  # which pushes the other out
        return arena, pool.stats().tiers[0], locked


def _fill(pool: BlockPool, storage: Storage) -> None:
    pool.release(pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)]))
