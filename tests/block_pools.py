"""Pools without tensors, with the settings that a `farpool.Pool` takes."""

from __future__ import annotations

from typing import Any

from farpool import PoolConfig
from farpool.memory.pool.block_pool import BlockPool

__all__ = ["block_pool"]


def block_pool(*settings: Any, **more: Any) -> BlockPool:
    """A pool of storages."""
    return BlockPool(PoolConfig.make(*settings, **more))
