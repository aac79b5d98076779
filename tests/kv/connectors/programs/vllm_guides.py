"""The commands of the guides through vLLM's own parsers: ``python -m tests.kv.connectors.programs.vllm_guides``."""

from __future__ import annotations

import json
import uuid
from typing import Any

import vllm.platforms
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from farpool.cluster.node.process import running_node
from tests.kv.connectors.programs.guides import commands

BLOCK = 65536


def parsed(page: str) -> Any:
    """The configuration that vLLM makes from the options of the one ``vllm serve`` in a guide."""
    ((_, *options),) = commands(page, "vllm serve")
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(options)


def tier() -> dict[str, Any]:
    """The options of vLLM's guide make the tier, on a node."""
    told = parsed("kv-vllm.md")
    transfer = told.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    (settings,) = extra["secondary_tiers"]
    facts = {"connector": transfer.kv_connector, "role": transfer.kv_role, "room": extra["cpu_bytes_to_use"]}
    with running_node() as node:
        settings["nodes"] = [one.replace("tcp://127.0.0.1:7471", node.address) for one in settings["nodes"]]
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=BLOCK,
            enable_kv_cache_events=False,
            extra_config={**extra, "cpu_bytes_to_use": 16 * BLOCK},
            engine_id=f"farpool-test-{uuid.uuid4().hex[:12]}",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        manager = OffloadingSpecFactory.create_spec(config).get_manager()
        try:
            (made,) = manager.secondary_tiers
            own, namespace = made._settings, made._namespace()
        finally:
            manager.shutdown()
    facts |= {"tier": type(made).__name__, "weights": namespace.weights, "named": own.nodes == [node.address]}
    return {**facts, "hashes": [namespace.hash, told.prefix_caching_hash_algo]}


def to_lmcache() -> dict[str, Any]:
    """The options by which LMCache's guide connects vLLM to LMCache's server name a connector of vLLM."""
    transfer = parsed("kv-lmcache.md").kv_transfer_config
    known = transfer.kv_connector in KVConnectorFactory._registry
    return {"known": known, "role": transfer.kv_role, "extra": transfer.kv_connector_extra_config}


if __name__ == "__main__":
    # This vLLM was built for no device, and its parser wants one.
    vllm.platforms._current_platform = CpuPlatform()
    print(json.dumps({"tier": tier(), "to_lmcache": to_lmcache()}))
