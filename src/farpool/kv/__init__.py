"""KV cache of language models on the pool: keys, blocks, and connectors for serving engines (docs/kv.md)."""

from typing import TYPE_CHECKING, Any

from farpool.kv.blocks import BlockCache
from farpool.kv.found import Found
from farpool.kv.judge import Judge
from farpool.kv.keys import block_key, token_chain
from farpool.kv.namespace import Group, Namespace
from farpool.kv.ranks import Ranks, StoreRanks
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings, PrefixSettings

if TYPE_CHECKING:
    from farpool.kv.cache import PrefixCache
    from farpool.kv.engines.accelerate import PooledWeights
    from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
    from farpool.kv.memory import KVMemory, Layer, TensorMemory
    from farpool.kv.metrics import KVCollector
    from farpool.kv.plan import Match, Prompt
    from farpool.kv.pool_objects import PoolObjects

__all__ = [
    "BlockCache",
    "CacheSettings",
    "FarpoolCache",
    "Found",
    "Group",
    "Judge",
    "KVCollector",
    "KVMemory",
    "Layer",
    "Match",
    "Namespace",
    "PoolObjects",
    "PooledWeights",
    "PrefixCache",
    "PrefixSettings",
    "Prompt",
    "Ranks",
    "Reason",
    "StoreRanks",
    "TensorMemory",
    "block_key",
    "prefix_blocks",
    "token_chain",
]

_LATER = {
    "KVMemory": "memory",
    "Layer": "memory",
    "TensorMemory": "memory",
    "KVCollector": "metrics",
    "Match": "plan",
    "PoolObjects": "pool_objects",
    "PrefixCache": "cache",
    "Prompt": "plan",
    "PooledWeights": "engines.accelerate",
    "FarpoolCache": "engines.transformers",
    "prefix_blocks": "engines.transformers",
}
"""Names that are imported at their first use, because their modules import torch, transformers or Prometheus."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"farpool.kv.{_LATER[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        message = f"farpool.kv.{name} needs the package 'prometheus_client'; pip install 'farpool[metrics]'"
        raise ModuleNotFoundError(message, name=error.name) from error
