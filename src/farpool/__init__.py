"""farpool: one big memory for GPU and AI programs.

A program sees one memory. farpool keeps the bytes that the program needs now in a fast tier with a byte budget, and the
rest in slower tiers. Results are equal, to the last bit, to a run with everything resident.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(f"farpool runs on Linux (x86-64 and aarch64); this is {sys.platform}")

from farpool import _renamed
from farpool._native import tls_available
from farpool.cluster.members import RegistryMembers, StaticMembers
from farpool.cluster.names import Names
from farpool.cluster.names import use_tensors as use_named_tensors
from farpool.cluster.redundancy import Copies, Copysets
from farpool.errors import (
    AccessDeniedError,
    ArgumentError,
    BudgetError,
    ChecksumError,
    ConfigError,
    FarpoolError,
    FarpoolWarning,
    IncompatibleError,
    KeyConflictError,
    LeaseLostError,
    LifetimeError,
    NameHeldError,
    NameLostError,
    NameMissingError,
    NameMovedError,
    NodeError,
    NodeFullError,
    NodeTimeoutError,
    ObjectTooLargeError,
    OrderError,
    PoolClosedError,
    PoolFileError,
    PoolFullError,
    PoolMixError,
    ProbeError,
    ProtocolError,
    QuotaExceededError,
    RegistryAwayError,
    RegistryCompactedError,
    RegistryDamagedError,
    RegistryDeniedError,
    RegistryError,
    RegistryLeaseError,
    RegistryReplacedError,
    RegistryUnwritableError,
    ReplicationError,
    StoreClosedError,
    TapeFileError,
    TapeTruncatedError,
    TicketError,
    TierError,
    TierFullError,
    TierTimeoutError,
    UnsupportedError,
)
from farpool.memory.pool import Pool, TensorLibrary, use_tensors
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import Stats
from farpool.memory.region import Region
from farpool.registry import open_registry
from farpool.store import AsyncStore, Store
from farpool.tiers import Dram, Faulty, Nvme, Remote, Striped, Throttled, Tier, Traced, Verified

if TYPE_CHECKING:
    from collections.abc import Callable

    from farpool.cluster.names import TensorSource
    from farpool.cluster.store.tensors import map_tensors, publish_tensors, read_tensors
    from farpool.tensors.loading import load_safetensors
    from farpool.tensors.mode import paged
    from farpool.tensors.offload import offload, restore
    from farpool.tensors.paged_tensor import PagedTensor
    from farpool.tensors.pretrained import from_pretrained
    from farpool.tensors.recompute import checkpoint
    from farpool.tensors.saved import saved_tensors
    from farpool.tensors.step_in_backward import step_in_backward

__all__ = [
    "AccessDeniedError",
    "ArgumentError",
    "AsyncStore",
    "BudgetError",
    "ChecksumError",
    "ConfigError",
    "Copies",
    "Copysets",
    "Dram",
    "Event",
    "FarpoolError",
    "FarpoolWarning",
    "Faulty",
    "IncompatibleError",
    "KeyConflictError",
    "LeaseLostError",
    "LifetimeError",
    "NameHeldError",
    "NameLostError",
    "NameMissingError",
    "NameMovedError",
    "Names",
    "NodeError",
    "NodeFullError",
    "NodeTimeoutError",
    "Nvme",
    "ObjectTooLargeError",
    "OrderError",
    "PagedTensor",
    "Pool",
    "PoolClosedError",
    "PoolConfig",
    "PoolFileError",
    "PoolFullError",
    "PoolMixError",
    "ProbeError",
    "ProtocolError",
    "QuotaExceededError",
    "Region",
    "RegistryAwayError",
    "RegistryCompactedError",
    "RegistryDamagedError",
    "RegistryDeniedError",
    "RegistryError",
    "RegistryLeaseError",
    "RegistryMembers",
    "RegistryReplacedError",
    "RegistryUnwritableError",
    "Remote",
    "ReplicationError",
    "StaticMembers",
    "Stats",
    "Store",
    "StoreClosedError",
    "Striped",
    "TapeFileError",
    "TapeTruncatedError",
    "Throttled",
    "TicketError",
    "Tier",
    "TierError",
    "TierFullError",
    "TierTimeoutError",
    "Traced",
    "UnsupportedError",
    "Verified",
    "checkpoint",
    "from_pretrained",
    "load_safetensors",
    "map_tensors",
    "offload",
    "open_registry",
    "paged",
    "publish_tensors",
    "read_tensors",
    "restore",
    "saved_tensors",
    "step_in_backward",
    "tls_available",
]

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "PagedTensor": "farpool.tensors.paged_tensor",
    "checkpoint": "farpool.tensors.recompute",
    "from_pretrained": "farpool.tensors.pretrained",
    "load_safetensors": "farpool.tensors.loading",
    "map_tensors": "farpool.cluster.store.tensors",
    "offload": "farpool.tensors.offload",
    "paged": "farpool.tensors.mode",
    "publish_tensors": "farpool.cluster.store.tensors",
    "read_tensors": "farpool.cluster.store.tensors",
    "restore": "farpool.tensors.offload",
    "saved_tensors": "farpool.tensors.saved",
    "step_in_backward": "farpool.tensors.step_in_backward",
}


def _load_tensors() -> TensorLibrary:
    from farpool.tensors import library

    return library


def _load_tensor_source() -> Callable[[str, Any], TensorSource | None]:
    from farpool.cluster.store.tensors import tensor_source

    return tensor_source


_renamed.install()
use_tensors(_load_tensors)
use_named_tensors(_load_tensor_source)


def __getattr__(name: str) -> Any:
    """Import an attribute that needs torch when it is first used."""
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'farpool' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"farpool.{name} needs PyTorch: pip install 'farpool[torch]'", name="torch"
            ) from error
        raise
    globals()[name] = value
    return value
